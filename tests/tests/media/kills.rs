//! Nodes and masters are killed while blocks move between memory and disk. No get returns a content
//! that its key cannot have. No removed block returns, every present block can be read, and no
//! extent is leaked.
//!
//! `KVPOOL_MEDIA_KILLS=200` sets the number of killed nodes and of killed masters. The leader of a
//! pool on etcd is killed a tenth as often. The defaults keep the suite quick.

use kvpool_client::Client;
use kvpool_tests::accounts::empty_the_pool;
use kvpool_tests::churn::{Churn, Left, Shape};
use kvpool_tests::{Cluster, Options, masters};
use rand::Rng;
use std::time::{Duration, Instant};

/// The blocks take three times the memory, and half of them are replaced before they reach the
/// disk.
const SHAPE: Shape = Shape {
    tasks: 4,
    keys: 400,
    length: 64 << 10,
};
/// The goal for a node to serve its disk again.
const GOAL: Duration = Duration::from_secs(3);

fn kills(without: u32, share: u32) -> u32 {
    let asked = std::env::var("KVPOOL_MEDIA_KILLS").ok();
    let asked = asked.and_then(|text| text.parse::<u32>().ok());
    asked.map_or(without, |kills| kills.div_ceil(share))
}

/// The number of attachments in the masters' logs.
fn attachments(logs: &str) -> usize {
    logs.matches("pool::tiering::attach: medium attached")
        .count()
}

fn pool(disk: &std::path::Path) -> Cluster {
    let ssd = format!("path={},size=96MiB", disk.join("ssd").display());
    let options = Options {
        segment: "32MiB".into(),
        node: vec!["--ssd".into(), ssd],
        ..Options::default()
    };
    Cluster::start(options.master(&["--lease-ttl", "300ms"])).unwrap()
}

/// Waits until the disk was attached once more than `before`, and returns the time that this took.
fn wait_attached(cluster: &Cluster, before: usize, since: Instant) -> Duration {
    let is_attached = || Ok(attachments(&cluster.master.log_text()) > before);
    cluster
        .wait_for("the disk is attached", is_attached)
        .unwrap();
    since.elapsed()
}

/// Waits for a moment in which blocks move.
async fn wait_a_moment() {
    let moment = rand::rng().random_range(100..900);
    tokio::time::sleep(Duration::from_millis(moment)).await;
}

/// Ends the load, empties the memory by a kill, and reads all blocks on the disk.
async fn read_all(mut cluster: Cluster, client: &Client, churn: Churn) {
    let mut left: Left = churn.end().await.unwrap();
    println!("the load: {:?}", left.seen);
    assert!(
        left.seen.stored > 500 && left.seen.right > 200,
        "{:?}",
        left.seen
    );
    let before = attachments(&cluster.master.log_text());
    cluster.nodes[0].kill().unwrap();
    cluster.restart_node(0).unwrap();
    wait_attached(&cluster, before, Instant::now());
    let seen = left.check(client).await.unwrap();
    println!("on disk: {seen:?}");
    assert!(seen.right > 200 && seen.failed == 0, "{seen:?}");
    // In a short run on a slow machine the last master may drop no copy.
    if std::env::var_os("KVPOOL_MEDIA_KILLS").is_some() {
        let counters = cluster.counters().unwrap();
        let dropped = counters["counters"]["copies_dropped_total"].as_u64();
        assert!(dropped.unwrap() > 0, "the disk was never full");
    }
    empty_the_pool(client).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_kill_of_a_node_brings_back_or_damages_a_block() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut cluster = pool(disk.path());
    let client = cluster.client().await.unwrap();
    wait_attached(&cluster, 0, Instant::now());
    let churn = Churn::start(&client, SHAPE);
    let mut slowest = Duration::ZERO;
    for _ in 0..kills(4, 1) {
        wait_a_moment().await;
        let before = attachments(&cluster.master.log_text());
        cluster.nodes[0].kill().unwrap();
        let since = Instant::now();
        cluster.restart_node(0).unwrap();
        slowest = slowest.max(wait_attached(&cluster, before, since));
    }
    println!("slowest attachment after a kill: {slowest:?}, the goal is {GOAL:?}");
    wait_a_moment().await;
    read_all(cluster, &client, churn).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_kill_of_a_master_brings_back_or_damages_a_block() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut cluster = pool(disk.path());
    let client = cluster.client().await.unwrap();
    wait_attached(&cluster, 0, Instant::now());
    let churn = Churn::start(&client, SHAPE);
    for round in 0..kills(4, 1) {
        wait_a_moment().await;
        cluster.master.kill().unwrap();
        // Sometimes the node is killed too, and returns first.
        if round % 4 == 3 {
            cluster.nodes[0].kill().unwrap();
            cluster.restart_node(0).unwrap();
        }
        let before = attachments(&cluster.master.log_text());
        let since = Instant::now();
        cluster.restart_master().unwrap();
        wait_attached(&cluster, before, since);
    }
    wait_a_moment().await;
    read_all(cluster, &client, churn).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_fail_over_brings_back_or_damages_a_block() {
    const NAME: &str = "no_fail_over_brings_back_or_damages_a_block";
    if !masters::available(NAME) {
        return;
    }
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let ssd = format!("path={}/{{node}},size=96MiB", disk.path().display());
    let options = masters::Options {
        masters: 2,
        nodes: 1,
        segment: "32MiB".into(),
        node: vec!["--ssd".into(), ssd],
        ..masters::Options::default()
    };
    let mut pool = masters::Pool::start(options.master(&["--lease-ttl", "300ms"])).unwrap();
    let client = pool.client().await.unwrap();
    let churn = Churn::start(&client, SHAPE);
    for _ in 0..kills(2, 10) {
        let leader = pool.wait_settled().unwrap();
        pool.wait_live(1).unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        pool.kill(leader.index).unwrap();
        pool.wait_leader(leader.epoch).unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        pool.restart(leader.index).unwrap();
    }
    pool.wait_settled().unwrap();
    pool.wait_live(1).unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut left = churn.end().await.unwrap();
    println!("the load: {:?}", left.seen);
    assert!(
        left.seen.stored > 500 && left.seen.right > 200,
        "{:?}",
        left.seen
    );
    let seen = left.check(&client).await.unwrap();
    println!("in the end: {seen:?}");
    assert!(seen.right > 200 && seen.failed == 0, "{seen:?}");
    empty_the_pool(&client).await.unwrap();
}
