//! Blocks that leave memory stay on the node's disk, and are loaded when they are used. They are
//! present again after the node or the master was killed. No wrong byte is ever served.

use kvpool_client::GetOptions;
use kvpool_tests::blocks::{Tally, check_all, check_all_by, put_all};
use kvpool_tests::{Cluster, Daemon, Options};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

const BLOCK: usize = 1 << 20;
/// Four times the memory of the node.
const BLOCKS: u64 = 256;

fn pool_with_disk(disk: &Path) -> Cluster {
    // The lease is short, because the test reads every block and memory holds a quarter of them.
    pool_with(disk, &["--lease-ttl", "300ms"])
}

fn pool_with(disk: &Path, master: &[&str]) -> Cluster {
    pool_of(disk, "1GiB", master)
}

/// A pool whose node has a disk of this size.
fn pool_of(disk: &Path, size: &str, master: &[&str]) -> Cluster {
    let file = disk.join("ssd");
    let ssd = format!("path={},size={size}", file.display());
    let options = Options {
        segment: "64MiB".into(),
        node: vec!["--ssd".into(), ssd],
        ..Options::default()
    };
    Cluster::start(options.master(master)).unwrap()
}

/// Puts all blocks, slowly enough for the disk.
async fn fill(cluster: &Cluster) {
    let client = cluster.client().await.unwrap();
    attached(cluster, 1);
    for first in (0..BLOCKS).step_by(4) {
        put_all(&client, first..first + 4, BLOCK).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until the node has attached its medium this many times.
fn attached(cluster: &Cluster, times: usize) {
    let is_attached = || {
        Ok(cluster
            .master
            .log_text()
            .matches("pool::tiering::attach: medium attached")
            .count()
            >= times)
    };
    cluster
        .wait_for("the medium is attached", is_attached)
        .unwrap();
}

fn counter(cluster: &Cluster, name: &str) -> u64 {
    let counters = cluster.counters().unwrap();
    counters["counters"][name].as_u64().unwrap()
}

/// Reads every block with a client that has no cached locations.
async fn check(cluster: &Cluster) -> Tally {
    let client = cluster.client().await.unwrap();
    let mut all = Tally::default();
    for first in (0..BLOCKS).step_by(8) {
        let tally = check_all(&client, first..first + 8, BLOCK).await;
        all.right += tally.right;
        all.wrong += tally.wrong;
        all.missed += tally.missed;
        all.failed += tally.failed;
    }
    println!("{all:?}");
    assert_eq!((all.wrong, all.failed), (0, 0), "{all:?}");
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_on_disk_survive_the_deaths_of_node_and_master() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut cluster = pool_with_disk(disk.path());
    fill(&cluster).await;
    let before = check(&cluster).await;
    assert!(before.right >= 240, "memory alone holds 60: {before:?}");
    let stored = counter(&cluster, "bytes_stored_total");
    assert!(stored >= 190 * BLOCK as u64, "{stored}");

    cluster.nodes[0].kill().unwrap();
    cluster.restart_node(0).unwrap();
    cluster.wait_live(1).unwrap();
    attached(&cluster, 2);
    let after = check(&cluster).await;
    assert!(
        after.right as u64 >= stored / BLOCK as u64 * 9 / 10,
        "{after:?}"
    );

    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
    attached(&cluster, 3);
    let again = check(&cluster).await;
    assert!(
        again.right >= after.right * 9 / 10,
        "{again:?} after {after:?}"
    );

    // A planned stop marks the medium as clean, and the next start continues from there.
    assert!(cluster.nodes[0].terminate().unwrap().success());
    cluster.restart_node(0).unwrap();
    cluster.wait_live(1).unwrap();
    attached(&cluster, 4);
    let last = check(&cluster).await;
    assert!(
        last.right >= again.right * 9 / 10,
        "{last:?} after {again:?}"
    );
}

/// The node copies its memory to the disk before it ends, and serves all of these blocks ten
/// seconds after its start.
#[tokio::test(flavor = "multi_thread")]
async fn a_planned_restart_costs_no_hits() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // With this policy the latest blocks get their copies late.
    let late = ["--lease-ttl", "300ms", "--eviction-policy", "lru"];
    let mut cluster = pool_with(disk.path(), &late);
    let client = cluster.client().await.unwrap();
    attached(&cluster, 1);
    // Memory is full, and most of its blocks have no copy yet.
    put_all(&client, 0..56, BLOCK).await.unwrap();
    let before = check_all(&client, 0..56, BLOCK).await;
    assert_eq!(before.right, 56, "{before:?}");
    assert!(counter(&cluster, "blocks_stored_total") < 40);
    assert!(cluster.nodes[0].terminate().unwrap().success());
    let log = cluster.nodes[0].log_text();
    assert!(log.contains("before the stop, and none is lost"), "{log}");
    let asked = Instant::now();
    cluster.restart_node(0).unwrap();
    cluster.wait_live(1).unwrap();
    attached(&cluster, 2);
    let client = cluster.client().await.unwrap();
    let after = check_all(&client, 0..56, BLOCK).await;
    println!("{before:?}, and {after:?} after {:?}", asked.elapsed());
    assert_eq!(after.right, 56, "{after:?}");
    assert!(asked.elapsed() < Duration::from_secs(10));
}

/// The disk takes about half of the blocks in memory.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_warns_of_the_blocks_that_are_lost() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let late = ["--lease-ttl", "300ms", "--eviction-policy", "lru"];
    let mut cluster = pool_of(disk.path(), "48MiB", &late);
    let client = cluster.client().await.unwrap();
    attached(&cluster, 1);
    put_all(&client, 0..56, BLOCK).await.unwrap();
    assert!(cluster.nodes[0].terminate().unwrap().success());
    let log = cluster.nodes[0].log_text();
    let told = log
        .lines()
        .find(|line| line.contains("before the stop, and"));
    let warns = |line: &str| line.contains("WARN") && line.contains("some are lost");
    assert!(told.is_some_and(warns), "{log}");
}

/// A pool whose only node is out of service and holds 56 blocks, which no other node takes.
async fn out_of_service(disk: &Path) -> Cluster {
    let cluster = pool_with(disk, &["--lease-ttl", "300ms", "--eviction-policy", "lru"]);
    let client = cluster.client().await.unwrap();
    attached(&cluster, 1);
    put_all(&client, 0..56, BLOCK).await.unwrap();
    let task = client.drain_node("node-0", true).await.unwrap();
    let ended = client.wait_replica_task(task.id, Duration::from_secs(60));
    let ended = ended.await.unwrap().unwrap();
    assert_eq!((ended.changed, ended.failed), (0, 56), "{ended:?}");
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_out_of_service_whose_blocks_have_copies_stops_at_once() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut cluster = out_of_service(disk.path()).await;
    let are_stored = || Ok(counter(&cluster, "blocks_stored_total") >= 56);
    cluster
        .wait_for("every block has its copy", are_stored)
        .unwrap();
    // By now the master has told the node.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let asked = Instant::now();
    assert!(cluster.nodes[0].terminate().unwrap().success());
    assert!(
        asked.elapsed() < Duration::from_secs(15),
        "{:?}",
        asked.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_out_of_service_copies_the_blocks_that_stayed_and_stops_before_its_timeout() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut cluster = out_of_service(disk.path()).await;
    // The timeout for copies is 30 s.
    let asked = Instant::now();
    assert!(cluster.nodes[0].terminate().unwrap().success());
    assert!(
        asked.elapsed() < Duration::from_secs(25),
        "{:?}",
        asked.elapsed()
    );
    assert_eq!(counter(&cluster, "blocks_lost_total"), 0);
    cluster.restart_node(0).unwrap();
    cluster.wait_live(1).unwrap();
    attached(&cluster, 2);
    let client = cluster.client().await.unwrap();
    let after = check_all(&client, 0..56, BLOCK).await;
    assert_eq!(after.right, 56, "{after:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_on_disk_is_a_miss_and_never_a_wrong_byte() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut cluster = pool_with_disk(disk.path());
    fill(&cluster).await;
    assert!(check(&cluster).await.right >= 240);
    // The blocks in memory are lost with the node, so all are read from disk.
    cluster.nodes[0].kill().unwrap();
    let mut file = std::fs::File::options()
        .write(true)
        .open(disk.path().join("ssd"))
        .unwrap();
    let mut draws = StdRng::seed_from_u64(7);
    for _ in 0..100 {
        // An offset after the superblocks, in the part that was written.
        let at = draws.random_range((1 << 20)..(200u64 << 20));
        file.seek(SeekFrom::Start(at)).unwrap();
        file.write_all(&draws.random::<[u8; 16]>()).unwrap();
    }
    file.sync_all().unwrap();
    cluster.restart_node(0).unwrap();
    cluster.wait_live(1).unwrap();
    attached(&cluster, 2);
    let after = check(&cluster).await;
    assert!(after.missed > 30 && after.right > 50, "{after:?}");
    assert!(counter(&cluster, "replicas_corrupt_total") > 30);
    // Copies that were found wrong are dropped for good.
    let again = check(&cluster).await;
    assert_eq!(again.right, after.right);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fails_is_named_and_memory_serves_on() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut cluster = pool_with_disk(disk.path());
    fill(&cluster).await;
    // The blocks in memory are lost with the node, so all are read from disk.
    cluster.nodes[0].kill().unwrap();
    cluster.restart_node(0).unwrap();
    cluster.wait_live(1).unwrap();
    attached(&cluster, 2);
    let file = std::fs::File::options()
        .write(true)
        .open(disk.path().join("ssd"));
    file.unwrap().set_len(1 << 20).unwrap();
    let tally = check(&cluster).await;
    assert_eq!(tally.right, 0, "the disk ends where the blocks began");
    let named = || Ok(cluster.nodes[0].log_text().contains("medium failed"));
    cluster.wait_for("the node names the disk", named).unwrap();
    let status = || cluster.master.http_get("/metrics");
    let is_gone = || Ok(status()?.contains(r#"kvpool_master_media{state="gone"} 1"#));
    cluster.wait_for("the master knows of it", is_gone).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 1000..1032, BLOCK).await.unwrap();
    assert_eq!(check_all(&client, 1000..1032, BLOCK).await.right, 32);
    // With no disk to copy to, the node ends at once.
    assert!(cluster.nodes[0].terminate().unwrap().success());
}

/// kvmaster starts with an empty data directory, and then with the right one again. The node runs on.
#[tokio::test(flavor = "multi_thread")]
async fn a_medium_stays_as_it_is_while_the_master_lacks_its_data() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut cluster = pool_with_disk(disk.path());
    fill(&cluster).await;
    let stored = counter(&cluster, "bytes_stored_total");
    assert!(stored >= 190 * BLOCK as u64, "{stored}");
    let (data, aside) = (cluster.data_dir(), cluster.directory().join("set-aside"));
    cluster.master.kill().unwrap();
    std::fs::rename(&data, &aside).unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
    let named = || {
        let log = cluster.nodes[0].log_text();
        Ok(log.contains("belongs to another pool"))
    };
    cluster.wait_for("the node names the pool", named).unwrap();

    cluster.master.kill().unwrap();
    std::fs::remove_dir_all(&data).unwrap();
    std::fs::rename(&aside, &data).unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
    attached(&cluster, 2);
    assert!(!cluster.nodes[0].log_text().contains("is not formatted"));
    let after = check(&cluster).await;
    assert!(
        after.right as u64 >= stored / BLOCK as u64 * 9 / 10,
        "{after:?}"
    );
}

#[test]
fn a_file_of_somebody_else_stays_as_it_is() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options = Options {
        nodes: 0,
        ..Options::default()
    };
    let cluster = Cluster::start(options).unwrap();
    for length in [100, 70_000_000] {
        let file = place.path().join("foreign");
        let bytes = vec![7; length];
        std::fs::write(&file, &bytes).unwrap();
        let ssd = format!("path={},size=128MiB", file.display());
        let master = cluster.master_url();
        let flags = ["--segment", "64MiB", "--ssd", &ssd, "--master", &master];
        let flags = flags.map(str::to_owned);
        let refused = Daemon::start("kvstore-node", place.path(), "node", &flags).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains("bytes that are not kvpool's"), "{refused}");
        assert!(
            std::fs::read(&file).unwrap() == bytes,
            "the file was changed"
        );
    }
}

#[test]
fn a_wrong_path_of_a_disk_is_found_before_memory_is_touched() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let here = place.path().display().to_string();
    for (ssd, fault) in [
        (
            format!("path={here}/none/ssd,size=128MiB"),
            format!("the directory {here}/none does not exist"),
        ),
        (
            format!("dir={here}/none"),
            format!("the directory {here}/none does not exist"),
        ),
        (
            format!("path={here},size=128MiB"),
            format!("give --ssd dir={here}"),
        ),
    ] {
        let ports = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
        let flags = ["--segment", "64MiB", "--ssd", &ssd].into_iter();
        let flags: Vec<String> = flags.chain(ports).map(str::to_owned).collect();
        let refused = Daemon::start("kvstore-node", place.path(), "node", &flags).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains(&fault), "{refused}");
        assert!(!refused.contains("touching"), "{refused}");
    }
}

/// The node finds a medium and a clone of it. It names both, and leaves both unchanged.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_refuses_a_medium_and_its_copy_together() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut cluster = pool_with_disk(disk.path());
    let client = cluster.client().await.unwrap();
    attached(&cluster, 1);
    put_all(&client, 0..16, BLOCK).await.unwrap();
    assert!(cluster.nodes[0].terminate().unwrap().success());
    let (own, copy) = (disk.path().join("ssd"), disk.path().join("copy"));
    std::fs::copy(&own, &copy).unwrap();
    let list = format!("path={},path={}", copy.display(), own.display());
    let master = cluster.master_url();
    let flags = ["--segment", "64MiB", "--ssd", &list, "--master", &master].map(str::to_owned);
    let refused = Daemon::start("kvstore-node", disk.path(), "both", &flags).unwrap_err();
    let refused = refused.to_string();
    assert!(refused.contains("hold the same medium"), "{refused}");
    cluster.restart_node(0).unwrap();
    cluster.wait_live(1).unwrap();
    attached(&cluster, 2);
    let client = cluster.client().await.unwrap();
    let after = check_all(&client, 0..16, BLOCK).await;
    assert_eq!(after.right, 16, "{after:?}");
}

/// A link leads to the file of another path. The node does not wait for its own lock at the link.
#[test]
fn a_node_refuses_two_paths_of_one_file_at_once() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = |name| disk.path().join(name);
    let file = place("ssd");
    for kind in ["symbolic", "hard"] {
        let link = place(kind);
        match kind {
            "symbolic" => std::os::unix::fs::symlink(&file, &link).unwrap(),
            // The first round has made the file.
            _ => std::fs::hard_link(&file, &link).unwrap(),
        }
        let list = [&file, &link].map(|path| format!("path={},size=64MiB", path.display()));
        let list = list.join(",");
        let ports = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"];
        let flags = ["--segment", "64MiB", "--ssd", &list].into_iter();
        let flags: Vec<String> = flags.chain(ports).map(str::to_owned).collect();
        // The error has the whole log of the node, so each round has a log of its own.
        let name = format!("node-{kind}");
        let refused = Daemon::start("kvstore-node", disk.path(), &name, &flags).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains("are the same file"), "{refused}");
        let [file, link] = [&file, &link].map(|path| path.display().to_string());
        let has_both = refused.contains(&file) && refused.contains(&link);
        assert!(has_both, "{refused}");
        // In the second round, the first process may still have the file.
        let waits = |line: &str| line.contains("waiting for it") && line.contains(&link);
        assert!(!refused.lines().any(waits), "{refused}");
    }
}

/// Four clients read batches that together are four times as large as memory. Every block on the
/// disk is a hit: a client whose blocks have no room at first asks again.
#[tokio::test(flavor = "multi_thread")]
async fn batches_larger_than_memory_hit_every_block() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cluster = pool_with(disk.path(), &[]);
    fill(&cluster).await;
    let there = check(&cluster).await;
    assert!(
        there.right * 10 > usize::try_from(BLOCKS).unwrap() * 9,
        "{there:?}"
    );
    let patient = GetOptions {
        release: true,
        timeout: Some(Duration::from_secs(60)),
    };
    let begun = Instant::now();
    let mut readers = Vec::new();
    for _ in 0..4 {
        let client = cluster.client().await.unwrap();
        let patient = patient.clone();
        readers.push(tokio::spawn(async move {
            check_all_by(&client, 0..BLOCKS, BLOCK, &patient).await
        }));
    }
    for reader in readers {
        let tally = reader.await.unwrap();
        assert_eq!(tally.right, there.right, "{tally:?} where {there:?}");
        assert_eq!(tally.wrong + tally.failed, 0, "{tally:?}");
    }
    println!("{there:?}, four times in {:?}", begun.elapsed());
}
