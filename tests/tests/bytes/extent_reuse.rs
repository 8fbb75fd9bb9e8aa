//! Invariant 3: no extent is reused while it can still be touched.
//!
//! The test stops writers and view holders (SIGSTOP) past every deadline, refills the pool, and
//! continues them. No other block may change.

use kvpool_client::{PutBlock, PutOptions};
use kvpool_tests::blocks::{check_all, key, put_all, source};
use kvpool_tests::grants::Control;
use kvpool_tests::raw::Port;
use kvpool_tests::{Cluster, Hand, Options};
use kvpool_types::wire::data::{Meta, WriteRequest};
use kvpool_types::wire::frame::Op;
use std::time::Duration;

const MIB: usize = 1 << 20;
const HELD: u64 = 1 << 20;

fn small_pool() -> Cluster {
    let flags = ["--lease-ttl", "300ms"];
    let options = Options {
        segment: "16MiB".into(),
        ..Options::default()
    };
    Cluster::start(options.master(&flags)).unwrap()
}

/// Puts twice the pool's size, so that every reusable extent is reused.
async fn refill(client: &kvpool_client::Client, first: u64) {
    for number in first..first + 128 {
        put_all(client, number..number + 1, MIB / 4).await.unwrap();
    }
}

async fn sleep(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_shared_memory_writer_keeps_its_extent_shut() {
    let cluster = small_pool();
    let client = cluster.client().await.unwrap();
    let length = HELD.to_string();
    let mut hand = Hand::start(&["write", &cluster.master_url(), "900", &length, "500"]).unwrap();
    hand.line().unwrap();
    hand.pause().unwrap();
    sleep(1500).await;
    refill(&client, 0).await;
    assert_eq!(
        cluster.gauge("reservations").unwrap(),
        0,
        "the grant has ended"
    );
    assert!(cluster.gauge("quarantine_bytes").unwrap() >= HELD);
    let before = check_all(&client, 0..128, MIB / 4).await;
    assert_eq!((before.wrong, before.failed), (0, 0));
    assert!(before.right > 30, "{before:?}");

    hand.resume().unwrap();
    sleep(300).await;
    let after = check_all(&client, 0..128, MIB / 4).await;
    assert_eq!(
        after, before,
        "the writer went on and changed a block of another"
    );
    // Only the death of its process frees the extent.
    assert!(cluster.gauge("quarantine_bytes").unwrap() >= HELD);
    hand.kill().unwrap();
    cluster
        .wait_for("the extent", || {
            Ok(cluster.gauge("quarantine_bytes")? < HELD)
        })
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_view_holder_still_sees_its_block() {
    let cluster = small_pool();
    let client = cluster.client().await.unwrap();
    let put = PutBlock::new(key(900), source(&key(900), MIB));
    client
        .batch_put(vec![put], &PutOptions::default())
        .await
        .remove(0)
        .unwrap();
    let length = MIB.to_string();
    let mut hand = Hand::start(&["view", &cluster.master_url(), "900", &length]).unwrap();
    assert_eq!(hand.line().unwrap(), "viewing");
    hand.pause().unwrap();
    sleep(1000).await;
    refill(&client, 0).await;
    let held = client.is_exist(&[key(900)]).await.unwrap()[0];
    assert!(!held, "the block was to be evicted from under the view");
    hand.resume().unwrap();
    hand.say("check").unwrap();
    assert_eq!(hand.line().unwrap(), "right");
    assert!(cluster.gauge("quarantine_bytes").unwrap() >= HELD);
    hand.kill().unwrap();
    cluster
        .wait_for("the extent", || {
            Ok(cluster.gauge("quarantine_bytes")? < HELD)
        })
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_tcp_writer_is_cut_off_when_its_grant_ends() {
    let cluster = small_pool();
    let client = cluster.client().await.unwrap();
    let mut control = Control::connect(&cluster.master_url()).await.unwrap();
    let granted = control.reserve(&key(900), HELD, 500).await.unwrap();
    let mut port = Port::open(&granted.data_address).unwrap();
    port.hello(control.cluster).unwrap();
    let request = WriteRequest {
        incarnation: granted.incarnation,
        grants: vec![granted.grant],
    };
    let payload = request.payload_bytes().unwrap();
    port.announce(Op::Write, control.epoch, &request.to_bytes(), payload)
        .unwrap();
    let garbage = vec![0xee; MIB / 2];
    port.bytes(&garbage).unwrap();
    cluster
        .wait_for("the end of the grant", || {
            Ok(cluster.gauge("reservations")? == 0)
        })
        .unwrap();
    cluster
        .wait_for("the fence", || Ok(cluster.gauge("quarantine_bytes")? == 0))
        .unwrap();
    refill(&client, 0).await;
    // The rest of the payload is written nowhere.
    let _broken = port.bytes(&garbage);
    sleep(100).await;
    let tally = check_all(&client, 0..128, MIB / 4).await;
    assert_eq!((tally.wrong, tally.failed), (0, 0));
    assert!(port.is_closed());

    // The ended grant is refused on a new connection too.
    let mut port = Port::open(&granted.data_address).unwrap();
    port.hello(control.cluster).unwrap();
    let whole = vec![0xee; usize::try_from(payload).unwrap()];
    let codes = port
        .codes(Op::Write, control.epoch, &request.to_bytes(), &whole)
        .unwrap();
    assert_eq!(codes, [kvpool_types::Code::GrantEnded]);
}
