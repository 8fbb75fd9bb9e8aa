//! An operator empties a node with an SSD that does not come back.

use kvpool_client::Client;
use kvpool_tests::blocks::{Tally, check_all, put_all};
use kvpool_tests::daemon::path_of;
use kvpool_tests::{Cluster, Options};
use serde_json::Value;
use std::process::{Command, Output};
use std::time::Duration;

const BLOCK: usize = 1 << 20;
/// Almost twice the memory of the two nodes.
const BLOCKS: u64 = 224;

fn kvctl(cluster: &Cluster, arguments: &[&str]) -> Output {
    Command::new(path_of("kvctl").unwrap())
        .args(arguments)
        .args(["--master", &cluster.master_url(), "--output", "json"])
        .output()
        .unwrap()
}

async fn check(client: &Client) -> Tally {
    let mut all = Tally::default();
    for first in (0..BLOCKS).step_by(8) {
        let tally = check_all(client, first..first + 8, BLOCK).await;
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
async fn the_blocks_of_an_ssd_that_does_not_come_back_move_with_the_drain() {
    let disks = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let ssd = format!("dir={},size=512MiB", disks.path().display());
    let options = Options {
        nodes: 2,
        segment: "64MiB".into(),
        node: vec!["--ssd".into(), ssd],
        ..Options::default()
    };
    let mut cluster = Cluster::start(options.master(&["--lease-ttl", "300ms"])).unwrap();
    let attached = "pool::tiering::attach: medium attached";
    let are_attached = || Ok(cluster.master.log_text().matches(attached).count() >= 2);
    cluster.wait_for("both SSDs", are_attached).unwrap();
    let client = cluster.client().await.unwrap();
    for first in (0..BLOCKS).step_by(4) {
        put_all(&client, first..first + 4, BLOCK).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let before = check(&client).await;
    assert!(before.right as u64 >= BLOCKS * 9 / 10, "{before:?}");

    let drained = kvctl(
        &cluster,
        &["node", "drain", "node-0", "--ssd", "--timeout", "2m"],
    );
    assert!(drained.status.success(), "{drained:?}");
    let told: Value = serde_json::from_slice(&drained.stdout).unwrap();
    println!("{told}");
    assert_eq!(told["state"], "drained", "{told}");
    assert_eq!(told["left"], 0, "{told}");
    assert_eq!(told["on_ssd"], 0, "{told}");
    assert!(told["moved"].as_u64() >= Some(BLOCKS / 4), "{told}");

    // The machine is retired with its SSD.
    cluster.nodes[0].kill().unwrap();
    let client = cluster.client().await.unwrap();
    let after = check(&client).await;
    assert!(
        after.right * 20 >= before.right * 19,
        "{after:?} after {before:?}"
    );
}
