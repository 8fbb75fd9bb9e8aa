//! Invariant 1: a get returns the bytes that were committed under that key, or a miss.

use kvpool_client::{GetOptions, GetOutcome, PutBlock, PutOptions, TransportChoice};
use kvpool_proto as proto;
use kvpool_tests::blocks::{Tally, check_all, key, put_all, source};
use kvpool_tests::grants::Control;
use kvpool_tests::{Cluster, Options};
use kvpool_types::Code;
use kvpool_types::wire::keys;

const LENGTH: usize = 300_000;

/// Flips a byte in the middle of the copy of block `number` on node `node`.
async fn corrupt(cluster: &Cluster, number: u64, node: &str) {
    let client = cluster.client().await.unwrap();
    let described = client
        .describe(&[key(number)])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    let replica = described
        .replicas
        .iter()
        .find(|replica| replica.node == node)
        .unwrap();
    let index: usize = node.trim_start_matches("node-").parse().unwrap();
    cluster.nodes[index]
        .flip_byte(replica.extent.offset.0 + 150_000)
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_byte_is_never_served_and_its_copy_is_dropped() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let cluster = Cluster::start(Options::default()).unwrap();
        let options = kvpool_client::Options {
            transport,
            ..cluster.client_options()
        };
        let client = kvpool_client::Client::connect(options).await.unwrap();
        put_all(&client, 0..8, LENGTH).await.unwrap();
        corrupt(&cluster, 3, "node-0").await;
        let tally = check_all(&client, 0..8, LENGTH).await;
        assert_eq!(
            tally,
            Tally {
                right: 7,
                missed: 1,
                ..Tally::default()
            },
            "{transport:?}"
        );
        cluster
            .wait_for("the node's own check", || {
                Ok(cluster
                    .master
                    .metric("kvpool_master_replicas_corrupt_total")?
                    >= 1.0)
            })
            .unwrap();
        // The key is free again.
        put_all(&client, 3..4, LENGTH).await.unwrap();
        assert_eq!(check_all(&client, 0..8, LENGTH).await.right, 8);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_get_goes_on_to_the_next_copy() {
    let cluster = Cluster::start(Options {
        nodes: 2,
        ..Options::default()
    })
    .unwrap();
    let client = cluster.client().await.unwrap();
    let options = PutOptions {
        replicas: 2,
        ..PutOptions::default()
    };
    for number in 0..2 {
        let put = PutBlock::new(key(number), source(&key(number), LENGTH));
        client
            .batch_put(vec![put], &options)
            .await
            .remove(0)
            .unwrap();
    }
    // Each node has one wrong block, so the order in which a client tries nodes does not matter.
    corrupt(&cluster, 0, "node-0").await;
    corrupt(&cluster, 1, "node-1").await;
    for _ in 0..10 {
        let fresh = cluster.client().await.unwrap();
        assert_eq!(check_all(&fresh, 0..2, LENGTH).await.right, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_range_over_a_flipped_byte_is_not_served() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..1, LENGTH).await.unwrap();
    corrupt(&cluster, 0, "node-0").await;
    // The flipped byte lies in the third chunk; the first chunk is intact.
    let first = kvpool_tests::blocks::target(1000);
    let sound = client
        .get_range(
            &key(0),
            kvpool_types::Offset(10),
            vec![first.clone()],
            &GetOptions::default(),
        )
        .await;
    assert!(sound.unwrap().is_hit());
    assert_eq!(
        first.to_vec(),
        kvpool_tests::blocks::bytes_of(&key(0), LENGTH)[10..1010]
    );
    let third = kvpool_tests::blocks::target(1000);
    let spoiled = client
        .get_range(
            &key(0),
            kvpool_types::Offset(149_500),
            vec![third],
            &GetOptions::default(),
        )
        .await;
    assert!(
        !matches!(spoiled, Ok(GetOutcome::Hit { .. })),
        "{spoiled:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clients_own_fault_deletes_nothing() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..1, LENGTH).await.unwrap();
    let block = client.describe(&[key(0)]).await.unwrap().remove(0).unwrap();
    let mut control = Control::connect(&cluster.master_url()).await.unwrap();
    let request = proto::ReportReplicasRequest {
        caller: control.caller(),
        keys: keys::pack([&key(0)]).into(),
        reports: vec![proto::ReportedReplica {
            version: block.version.0,
            segment: block.replicas[0].extent.segment.0,
            code: Code::ChecksumMismatch.to_wire().into(),
        }],
    };
    control.raw().report_replicas(request).await.unwrap();
    cluster
        .wait_for("the node's word that the copy is right", || {
            Ok(cluster
                .master
                .log_text()
                .contains("re-verified, its checksum matches"))
        })
        .unwrap();
    let fresh = cluster.client().await.unwrap();
    assert_eq!(check_all(&fresh, 0..1, LENGTH).await.right, 1);
    assert_eq!(
        cluster
            .master
            .metric("kvpool_master_replicas_corrupt_total")
            .unwrap(),
        0.0
    );
}
