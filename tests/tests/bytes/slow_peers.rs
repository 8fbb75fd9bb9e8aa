//! Invariant 6: a slow peer is not a dead peer.

use kvpool_client::TransportChoice;
use kvpool_tests::blocks::{Tally, check_all, key, put_all};
use kvpool_tests::{Cluster, Options};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_hangs_is_avoided_and_comes_back_without_loss() {
    let flags = ["--heartbeat-interval", "100ms", "--suspect-after", "500ms"];
    let cluster = Cluster::start(
        Options {
            nodes: 2,
            ..Options::default()
        }
        .master(&flags),
    )
    .unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..40, 50_000).await.unwrap();
    let on_first = |cluster: &Cluster, state: &str| {
        let states = cluster.node_states()?;
        Ok(states
            .iter()
            .any(|(name, now)| name == "node-0" && now == state))
    };
    cluster.nodes[0].pause().unwrap();
    cluster
        .wait_for("suspicion", || on_first(&cluster, "suspect"))
        .unwrap();
    let started = Instant::now();
    let fresh = cluster.client().await.unwrap();
    let tally = check_all(&fresh, 0..40, 50_000).await;
    assert_eq!(
        tally,
        Tally {
            right: tally.right,
            missed: 40 - tally.right,
            ..Tally::default()
        }
    );
    assert!(
        tally.missed > 0 && tally.right > 0,
        "both nodes were to hold blocks: {tally:?}"
    );
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
    cluster.nodes[0].resume().unwrap();
    cluster
        .wait_for("trust", || on_first(&cluster, "live"))
        .unwrap();
    let tally = check_all(&fresh, 0..40, 50_000).await;
    assert_eq!(
        tally,
        Tally {
            right: 40,
            ..Tally::default()
        }
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_never_wait_behind_data() {
    let flags = ["--heartbeat-interval", "100ms", "--suspect-after", "1s"];
    let cluster = Cluster::start(
        Options {
            segment: "256MiB".into(),
            ..Options::default()
        }
        .master(&flags),
    )
    .unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for worker in 0..8 {
        let options = kvpool_client::Options {
            transport: TransportChoice::Tcp,
            ..cluster.client_options()
        };
        let client = kvpool_client::Client::connect(options).await.unwrap();
        let stop = Arc::clone(&stop);
        let first = worker * 100;
        tasks.push(tokio::spawn(async move {
            put_all(&client, first..first + 8, 2 << 20).await.unwrap();
            while !stop.load(Ordering::Acquire) {
                assert_eq!(check_all(&client, first..first + 8, 2 << 20).await.wrong, 0);
            }
        }));
    }
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        for (name, state) in cluster.node_states().unwrap() {
            assert_eq!(state, "live", "{name}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    stop.store(true, Ordering::Release);
    for task in tasks {
        task.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_get_from_a_hung_node_ends_at_its_deadline() {
    let cluster = Cluster::start(Options::default()).unwrap();
    for transport in [TransportChoice::Tcp, TransportChoice::Shm] {
        let options = kvpool_client::Options {
            transport,
            ..cluster.client_options()
        };
        let client = kvpool_client::Client::connect(options).await.unwrap();
        put_all(&client, 0..1, 1 << 20).await.unwrap();
        assert_eq!(check_all(&client, 0..1, 1 << 20).await.right, 1);
        cluster.nodes[0].pause().unwrap();
        let timeout = Duration::from_millis(800);
        let started = Instant::now();
        let options = kvpool_client::GetOptions {
            timeout: Some(timeout),
            ..Default::default()
        };
        let target = kvpool_tests::blocks::target(1 << 20);
        let get = kvpool_client::GetBlock::new(key(0), target);
        let outcome = client.batch_get(vec![get], &options).await.remove(0);
        let took = started.elapsed();
        cluster.nodes[0].resume().unwrap();
        assert!(
            took < timeout + Duration::from_millis(500),
            "{transport:?}: {took:?}"
        );
        // Over TCP a stopped node sends nothing. A mapping can be read without the node.
        if transport == TransportChoice::Tcp {
            assert!(
                !matches!(outcome, Ok(kvpool_client::GetOutcome::Hit { .. })),
                "{outcome:?}"
            );
        }
        cluster.wait_live(1).unwrap();
    }
}
