//! An operator empties a node with an SSD that does not come back.

use kvpool_client::{Client, GetOptions};
use kvpool_tests::blocks::{check_all_by, key, put_all};
use kvpool_tests::daemon::path_of;
use kvpool_tests::{Cluster, Options};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const BLOCK: usize = 1 << 20;

fn kvctl(cluster: &Cluster, arguments: &[&str]) -> Command {
    let mut command = Command::new(path_of("kvctl").unwrap());
    command
        .args(arguments)
        .args(["--master", &cluster.master_url(), "--output", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A pool of nodes with 64 MiB of memory and an SSD each.
fn pool(disks: &Path, nodes: usize) -> Cluster {
    let ssd = format!("dir={},size=512MiB", disks.display());
    let options = Options {
        nodes,
        segment: "64MiB".into(),
        node: vec!["--ssd".into(), ssd],
        ..Options::default()
    };
    let cluster = Cluster::start(options.master(&["--lease-ttl", "300ms"])).unwrap();
    let attached = "pool::tiering::attach: medium attached";
    let are_attached = || Ok(cluster.master.log_text().matches(attached).count() >= nodes);
    cluster.wait_for("the SSDs", are_attached).unwrap();
    cluster
}

/// Puts more blocks than memory takes, slowly enough for the disks.
async fn fill(client: &Client, blocks: u64) {
    for first in (0..blocks).step_by(4) {
        put_all(client, first..first + 4, BLOCK).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// For each block, the node and the state of each of its replicas and copies.
async fn places(client: &Client, blocks: u64) -> Vec<Vec<(String, String)>> {
    let keys: Vec<_> = (0..blocks).map(key).collect();
    let described = client.describe(&keys).await.unwrap();
    let places = described.into_iter().map(|block| {
        let replicas = block.map_or_else(Vec::new, |block| block.replicas);
        let replicas = replicas.into_iter();
        replicas.map(|one| (one.node, one.state)).collect()
    });
    places.collect()
}

/// The blocks that only the SSD of node 0 holds.
async fn only_on_ssd(client: &Client, blocks: u64) -> Vec<u64> {
    let places = places(client, blocks).await;
    let on_media = ["ready", "slow"];
    let is_there = |at: &(String, String)| at.0 == "node-0" && on_media.contains(&at.1.as_str());
    let only = (0..blocks).zip(&places);
    let only = only.filter(|(_, at)| !at.is_empty() && at.iter().all(is_there));
    only.map(|(number, _)| number).collect()
}

/// A block that another node has in its memory alone may be evicted for the blocks that move there, as for a put. So
/// the rule is for the blocks that only the SSD held, and the other SSD has room for all of them.
#[tokio::test(flavor = "multi_thread")]
async fn the_blocks_of_an_ssd_that_does_not_come_back_move_with_the_drain() {
    const BLOCKS: u64 = 224;
    let disks = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut cluster = pool(disks.path(), 2);
    let client = cluster.client().await.unwrap();
    fill(&client, BLOCKS).await;
    let only = only_on_ssd(&client, BLOCKS).await;
    assert!(only.len() >= 16, "{only:?}");

    let drain = ["node", "drain", "node-0", "--ssd", "--timeout", "2m"];
    let drained = kvctl(&cluster, &drain).output().unwrap();
    assert!(drained.status.success(), "{drained:?}");
    let told: Value = serde_json::from_slice(&drained.stdout).unwrap();
    println!("{told}");
    assert_eq!(told["state"], "drained", "{told}");
    assert_eq!(told["left"], 0, "{told}");
    assert_eq!(told["on_ssd"], 0, "{told}");
    assert!(told["moved"].as_u64() >= Some(only.len() as u64), "{told}");
    let status = kvctl(&cluster, &["status", "--over", "0s"]).output();
    let status: Value = serde_json::from_slice(&status.unwrap().stdout).unwrap();
    let wrong = status["wrong"].to_string();
    assert!(
        wrong.contains("node-0 is drained with its SSDs"),
        "{status}"
    );
    let after = places(&client, BLOCKS).await;
    for number in &only {
        let at = &after[usize::try_from(*number).unwrap()];
        assert!(at.iter().any(|(node, _)| node == "node-1"), "{at:?}");
    }

    // The machine is retired with its SSD.
    cluster.nodes[0].kill().unwrap();
    let client = cluster.client().await.unwrap();
    let patient = GetOptions {
        release: true,
        timeout: Some(Duration::from_secs(60)),
    };
    for number in only {
        let tally = check_all_by(&client, number..number + 1, BLOCK, &patient).await;
        assert_eq!(tally.right, 1, "block {number}: {tally:?}");
    }
}

/// A later drain without --ssd says that the SSDs come back. The operator of the first drain retires them all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_of_an_ssd_fails_while_blocks_are_only_there() {
    let disks = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cluster = pool(disks.path(), 1);
    let client = cluster.client().await.unwrap();
    fill(&client, 96).await;
    // No other node takes blocks.
    let drain = ["node", "drain", "node-0", "--ssd", "--force"];
    let drains = kvctl(&cluster, &drain).args(["--timeout", "1m"]).spawn();
    let drains = drains.unwrap();
    let draining = [("node-0".to_owned(), "draining".to_owned())];
    cluster
        .wait_for("node-0 drains", || Ok(cluster.node_states()? == draining))
        .unwrap();
    client.drain_node("node-0", true).await.unwrap();
    let ended = drains.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let told: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!(told["state"], "draining", "{told}");
    assert!(told["left"].as_u64() > Some(0), "{told}");
    assert!(told["on_ssd"].as_u64() > Some(0), "{told}");
    let why = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(why.contains("blocks would be lost"), "{why}");
}
