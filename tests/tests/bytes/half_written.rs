//! Invariant 2: no half-written block is visible.

use kvpool_tests::blocks::{Tally, bytes_of, check_all, key};
use kvpool_tests::grants::Control;
use kvpool_tests::raw::Port;
use kvpool_tests::{Cluster, Hand, Options};
use kvpool_transport::checksum;
use kvpool_types::wire::data::{Meta, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::{CHUNK, Code};

const LENGTH: usize = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_visible_after_its_commit_and_not_before() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let key = key(1);
    let absent = || async { !client.is_exist(std::slice::from_ref(&key)).await.unwrap()[0] };
    let mut control = Control::connect(&cluster.master_url()).await.unwrap();
    let granted = control.reserve(&key, LENGTH as u64, 30_000).await.unwrap();
    assert!(absent().await, "reserved");
    let bytes = bytes_of(&key, LENGTH);
    let mut payload = bytes.clone();
    for chunk in bytes.chunks(usize::try_from(CHUNK).unwrap()) {
        payload.extend_from_slice(&checksum::checksum(chunk).0.to_le_bytes());
    }
    let mut port = Port::open(&granted.data_address).unwrap();
    port.hello(control.cluster).unwrap();
    let request = WriteRequest {
        incarnation: granted.incarnation,
        grants: vec![granted.grant],
    };
    port.announce(
        Op::Write,
        control.epoch,
        &request.to_bytes(),
        payload.len() as u64,
    )
    .unwrap();
    port.bytes(&payload[..LENGTH / 2]).unwrap();
    assert!(absent().await, "half written");
    port.bytes(&payload[LENGTH / 2..]).unwrap();
    let (header, _, _) = port.receive().unwrap();
    assert_eq!(header.op, Op::Statuses);
    assert!(absent().await, "written");
    let sum = checksum::checksum(&bytes);
    assert_eq!(control.commit(&key, &granted, sum).await.unwrap(), Code::Ok);
    assert_eq!(check_all(&client, 1..2, LENGTH).await.right, 1);
    // The answer may have been lost: the same commit again succeeds.
    assert_eq!(control.commit(&key, &granted, sum).await.unwrap(), Code::Ok);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_killed_amid_puts_leaves_whole_blocks_or_none() {
    let cluster = Cluster::start(Options {
        segment: "256MiB".into(),
        ..Options::default()
    })
    .unwrap();
    let client = cluster.client().await.unwrap();
    for round in 0..5 {
        let first = round * 1000;
        let length = (4 << 20).to_string();
        let mut hand =
            Hand::start(&["put", &cluster.master_url(), &first.to_string(), &length]).unwrap();
        hand.line().unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(3 + 7 * round)).await;
        hand.kill().unwrap();
        let acknowledged = hand.printed().len() as u64 + 1;
        let tally = check_all(&client, first..first + acknowledged + 2, 4 << 20).await;
        assert_eq!(
            tally,
            Tally {
                right: tally.right,
                missed: tally.missed,
                ..Tally::default()
            }
        );
        assert!(
            tally.right as u64 >= acknowledged,
            "{tally:?} of {acknowledged} acknowledged"
        );
        client
            .remove(kvpool_client::Remove::Everything, true)
            .await
            .unwrap();
    }
    // The reservations of the killed clients are given back.
    cluster
        .wait_for(
            "no reservations",
            || Ok(cluster.gauge("reservations")? == 0),
        )
        .unwrap();
}
