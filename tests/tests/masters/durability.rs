//! Invariant 5: an acknowledged commit survives the master, on the embedded store.
//!
//! `KVPOOL_KILLS=200` sets the number of kills; the default keeps the suite quick.

use kvpool_tests::blocks::{check_all, key, put_all};
use kvpool_tests::{Cluster, Options};
use rand::Rng;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const LENGTH: usize = 2048;
const BATCH: u64 = 16;

fn kills() -> u64 {
    std::env::var("KVPOOL_KILLS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(15)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_acknowledged_block_is_there_after_each_kill_of_the_master() {
    // The pool has room for all blocks that the writer can put, so nothing is evicted.
    let options = Options {
        segment: "2GiB".into(),
        nodes: 1,
        ..Options::default()
    };
    let mut cluster = Cluster::start(options).unwrap();
    let acknowledged = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let client = cluster.client().await.unwrap();
        let (acknowledged, stop) = (Arc::clone(&acknowledged), Arc::clone(&stop));
        tokio::spawn(async move {
            let mut next = 0;
            while !stop.load(Ordering::Acquire) {
                // If the answer to a put was lost, the test puts the block again until it is
                // acknowledged.
                if put_all(&client, next..next + BATCH, LENGTH).await.is_ok() {
                    next += BATCH;
                    acknowledged.store(next, Ordering::Release);
                }
            }
        })
    };
    let client = cluster.client().await.unwrap();
    let mut checked = 0;
    for kill in 0..kills() {
        let pause = rand::rng().random_range(20..200);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let before = acknowledged.load(Ordering::Acquire);
        cluster.master.kill().unwrap();
        let at_kill = acknowledged.load(Ordering::Acquire);
        cluster.restart_master().unwrap();
        cluster.wait_live(1).unwrap();
        let keys: Vec<_> = (0..at_kill).map(key).collect();
        let present = client.is_exist(&keys).await.unwrap();
        let lost = present.iter().filter(|present| !**present).count();
        assert_eq!(
            lost, 0,
            "after kill {kill}: {lost} of {at_kill} acknowledged blocks are gone"
        );
        let fresh = checked.max(before.saturating_sub(512))..at_kill;
        let tally = check_all(&client, fresh.clone(), LENGTH).await;
        assert_eq!(
            tally.right as u64,
            fresh.end - fresh.start,
            "after kill {kill}: {tally:?}"
        );
        checked = at_kill;
    }
    stop.store(true, Ordering::Release);
    writer.await.unwrap();
    let total = acknowledged.load(Ordering::Acquire);
    assert!(
        total > kills() * BATCH / 4,
        "the writer got nothing done: {total} blocks"
    );
    assert_eq!(
        check_all(&client, 0..total, LENGTH).await.right as u64,
        total
    );
    println!(
        "{} kills of the master, {total} acknowledged blocks, none lost",
        kills()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn removals_and_namespaces_survive_too() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    let named = kvpool_types::namespace::Namespace {
        name: "tenant".into(),
        model: "m".into(),
        ..Default::default()
    };
    let options = kvpool_client::Options {
        namespace: named,
        ..cluster.client_options()
    };
    let client = kvpool_client::Client::connect(options).await.unwrap();
    put_all(&client, 0..50, LENGTH).await.unwrap();
    let gone: Vec<_> = (0..25).map(key).collect();
    let removed = client
        .remove(kvpool_client::Remove::Keys(gone), true)
        .await
        .unwrap();
    assert_eq!(removed.removed, 25);
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
    let tally = check_all(&client, 0..50, LENGTH).await;
    assert_eq!((tally.right, tally.missed), (25, 25));
    // The room of the removed blocks can be used again.
    put_all(&client, 0..25, LENGTH).await.unwrap();
    assert_eq!(check_all(&client, 0..50, LENGTH).await.right, 50);
}
