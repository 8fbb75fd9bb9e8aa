//! A node is killed at each kind of request to its disk: before the request, in the middle of it,
//! and after it. No get returns a content that its key cannot have, every present block can be
//! read, and no extent is leaked. A new process does not touch the disk before the last write of
//! the killed process has ended.
//!
//! `KVPOOL_MEDIA_KILLS=200` sets the number of killed nodes; by default each point has one kill.

use fuser::Errno;
use kvpool_client::Client;
use kvpool_tests::accounts::empty_the_pool;
use kvpool_tests::churn::{Churn, Shape};
use kvpool_tests::faulty_disk::{Fault, FaultyDisk, Point, Trap};
use kvpool_tests::{Cluster, Options};
use rustix::process::Signal;
use std::path::Path;
use std::time::{Duration, Instant};

const SHAPE: Shape = Shape {
    tasks: 4,
    keys: 400,
    length: 64 << 10,
};
/// The goal for a node to serve its disk again.
const GOAL: Duration = Duration::from_secs(3);
/// The longest wait for a request of each kind under load.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the kernel may take to deliver a kill.
const DELIVERY: Duration = Duration::from_millis(50);

/// The activity during which the node reaches the point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum During {
    Load,
    Attach,
}

/// The request is lost.
const LOST: Fault = Fault::Fails(Errno::EIO);
/// Half of the request reaches the disk.
const TORN: Fault = Fault::Short;
/// The request is done, and the node does not learn of it.
const DONE: Fault = Fault::None;

const POINTS: [(During, Point, Fault); 12] = [
    (During::Load, Point::Extent, LOST),
    (During::Load, Point::Extent, TORN),
    (During::Load, Point::Extent, DONE),
    (During::Load, Point::Flush, LOST),
    (During::Load, Point::Flush, DONE),
    (During::Load, Point::Read, LOST),
    (During::Attach, Point::Superblock, LOST),
    (During::Attach, Point::Superblock, TORN),
    (During::Attach, Point::Superblock, DONE),
    (During::Attach, Point::Flush, LOST),
    (During::Attach, Point::Flush, DONE),
    (During::Attach, Point::Read, LOST),
];

fn start(test: &str, place: &Path) -> Option<(Cluster, FaultyDisk)> {
    let disk = match FaultyDisk::mount(place) {
        Ok(disk) => disk,
        Err(error) => {
            eprintln!("SKIPPED {test}: no FUSE here: {error:#}");
            return None;
        }
    };
    let ssd = format!("path={},size=96MiB", disk.path().display());
    let options = Options {
        segment: "32MiB".into(),
        node: vec!["--ssd".into(), ssd],
        ..Options::default()
    };
    let cluster = Cluster::start(options.master(&["--lease-ttl", "300ms"])).unwrap();
    wait_attached(&cluster, 0);
    Some((cluster, disk))
}

/// The number of attachments of the disk.
fn attachments(cluster: &Cluster) -> usize {
    let logs = cluster.master.log_text();
    logs.matches("pool::tiering::attach: medium attached")
        .count()
}

fn wait_attached(cluster: &Cluster, before: usize) {
    let is_attached = || Ok(attachments(cluster) > before);
    cluster
        .wait_for("the disk is attached", is_attached)
        .unwrap();
}

/// Kills the node while its request is held. Releases the request with `fault` once the kill was
/// delivered.
fn kill_and_release(cluster: &mut Cluster, trap: Trap, fault: Fault) {
    let release = std::thread::spawn(move || {
        std::thread::sleep(DELIVERY);
        trap.release(fault);
    });
    cluster.nodes[0].kill().unwrap();
    release.join().unwrap();
}

async fn end(cluster: Cluster, disk: FaultyDisk, client: &Client, churn: Churn) {
    let mut left = churn.end().await.unwrap();
    let seen = left.check(client).await.unwrap();
    println!("under load {:?}; afterwards {seen:?}", left.seen);
    assert!(left.seen.stored > 200 && left.seen.right > 100);
    assert!(seen.right > 100 && seen.failed == 0, "{seen:?}");
    empty_the_pool(client).await.unwrap();
    // The mount outlives the daemon, which has the file open.
    drop(cluster);
    drop(disk);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_kill_at_a_request_to_the_disk_damages_a_block() {
    const NAME: &str = "no_kill_at_a_request_to_the_disk_damages_a_block";
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some((mut cluster, disk)) = start(NAME, place.path()) else {
        return;
    };
    let asked = std::env::var("KVPOOL_MEDIA_KILLS").ok();
    let kills = asked.and_then(|kills| kills.parse().ok());
    let client = cluster.client().await.unwrap();
    let churn = Churn::start(&client, SHAPE);
    let (mut slowest, mut met) = (Duration::ZERO, [0; POINTS.len()]);
    for round in 0..kills.unwrap_or(POINTS.len()) {
        let which = round % POINTS.len();
        let (during, point, fault) = POINTS[which];
        if during == During::Attach {
            cluster.nodes[0].kill().unwrap();
        }
        let trap = disk.trap(point);
        if during == During::Attach {
            cluster.nodes[0] = cluster.spawn_node(0).unwrap();
        }
        // A start reads only extents that the last flush may have missed.
        if trap.has_sprung(PATIENCE) {
            met[which] += 1;
        } else {
            println!("not met: {during:?} {point:?}");
        }
        kill_and_release(&mut cluster, trap, fault);
        let (before, since) = (attachments(&cluster), Instant::now());
        cluster.restart_node(0).unwrap();
        wait_attached(&cluster, before);
        slowest = slowest.max(since.elapsed());
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    println!("kills at each point: {met:?}; slowest attachment {slowest:?}, the goal is {GOAL:?}");
    assert!(met.iter().all(|kills| *kills > 0), "{met:?}");
    end(cluster, disk, &client, churn).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_life_waits_for_the_last_write_of_the_life_before() {
    const NAME: &str = "a_new_life_waits_for_the_last_write_of_the_life_before";
    const HELD: Duration = Duration::from_secs(2);
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some((mut cluster, disk)) = start(NAME, place.path()) else {
        return;
    };
    let client = cluster.client().await.unwrap();
    let churn = Churn::start(&client, SHAPE);
    for lives in 0..3 {
        let trap = disk.trap(Point::Extent);
        assert!(trap.has_sprung(PATIENCE));
        let before = attachments(&cluster);
        cluster.nodes[0].signal(Signal::KILL).unwrap();
        let (held, started) = std::thread::scope(|scope| {
            let start = scope.spawn(|| cluster.start_node(0));
            std::thread::sleep(HELD);
            let held = !start.is_finished() && attachments(&cluster) == before;
            trap.release(DONE);
            (held, start.join().unwrap())
        });
        let started = started.unwrap();
        // The filesystem of this test would also hold the new process's requests, so the lock must
        // come first.
        let log = started.log_text();
        let has_waited = log.matches("another process has the medium").count() > lives;
        assert!(
            held && has_waited,
            "a new life began beside the write:\n{log}"
        );
        cluster.nodes[0] = started;
        wait_attached(&cluster, before);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    end(cluster, disk, &client, churn).await;
}
