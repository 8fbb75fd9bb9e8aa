//! What users see when processes die under load.

use kvpool_client::{PutBlock, PutOptions};
use kvpool_tests::blocks::{Tally, check_all, key, put_all, source};
use kvpool_tests::{Cluster, Hand, Options};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const LENGTH: usize = 1 << 20;

/// Readers and writers that run until they are stopped, with their observations.
struct Load {
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<(Tally, Duration)>>,
    writer: tokio::task::JoinHandle<(u64, Duration)>,
}

impl Load {
    async fn start(cluster: &Cluster, blocks: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut tasks = Vec::new();
        for _ in 0..4 {
            let client = cluster.client().await.unwrap();
            let stop = Arc::clone(&stop);
            tasks.push(tokio::spawn(async move {
                let (mut all, mut slowest) = (Tally::default(), Duration::ZERO);
                while !stop.load(Ordering::Acquire) {
                    let started = Instant::now();
                    let tally = check_all(&client, 0..blocks, LENGTH).await;
                    slowest = slowest.max(started.elapsed());
                    all.right += tally.right;
                    all.wrong += tally.wrong;
                    all.missed += tally.missed;
                    all.failed += tally.failed;
                }
                (all, slowest)
            }));
        }
        let client = cluster.client().await.unwrap();
        let stopped = Arc::clone(&stop);
        let writer = tokio::spawn(async move {
            let (mut next, mut slowest) = (10_000, Duration::ZERO);
            while !stopped.load(Ordering::Acquire) {
                let started = Instant::now();
                let put = PutBlock::new(key(next), source(&key(next), LENGTH));
                let _lost = client.batch_put(vec![put], &PutOptions::default()).await;
                slowest = slowest.max(started.elapsed());
                next += 1;
            }
            (next - 10_000, slowest)
        });
        Self {
            stop,
            tasks,
            writer,
        }
    }

    async fn end(self) -> (Tally, Duration, Duration) {
        self.stop.store(true, Ordering::Release);
        let (mut all, mut slowest) = (Tally::default(), Duration::ZERO);
        for task in self.tasks {
            let (tally, took) = task.await.unwrap();
            all.right += tally.right;
            all.wrong += tally.wrong;
            all.missed += tally.missed;
            all.failed += tally.failed;
            slowest = slowest.max(took);
        }
        let (puts, slowest_put) = self.writer.await.unwrap();
        assert!(puts > 0);
        (all, slowest, slowest_put)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_amid_gets_and_puts_costs_only_its_own_blocks() {
    let options = Options {
        nodes: 2,
        segment: "128MiB".into(),
        ..Options::default()
    };
    let mut cluster = Cluster::start(options).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..40, LENGTH).await.unwrap();
    let load = Load::start(&cluster, 40).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    cluster.nodes[0].kill().unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let fresh = cluster.client().await.unwrap();
    let after = check_all(&fresh, 0..40, LENGTH).await;
    assert_eq!(
        after,
        Tally {
            right: after.right,
            missed: after.missed,
            ..Tally::default()
        }
    );
    assert!(after.right > 0 && after.missed > 0, "{after:?}");
    // A new incarnation of the node offers its memory again, empty.
    cluster.restart_node(0).unwrap();
    cluster.wait_live(2).unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (all, slowest_get, slowest_put) = load.end().await;
    println!("{all:?}, slowest sweep {slowest_get:?}, slowest put {slowest_put:?}");
    assert_eq!(all.wrong, 0);
    // A sweep is one batch of 40 gets under one deadline of 5 s; a put has 10 s.
    assert!(slowest_get < Duration::from_millis(5500), "{slowest_get:?}");
    assert!(
        slowest_put < Duration::from_millis(10_500),
        "{slowest_put:?}"
    );
    cluster
        .wait_for("the end of puts under way", || {
            Ok(cluster.gauge("reservations")? == 0)
        })
        .unwrap();
    cluster
        .wait_for("the room back", || {
            Ok(cluster.gauge("quarantine_bytes")? == 0)
        })
        .unwrap();
    let live = cluster.counters().unwrap()["counters"]["live_bytes"]
        .as_u64()
        .unwrap();
    assert_eq!(
        cluster.gauge("used_bytes").unwrap(),
        live,
        "used is more than the blocks there"
    );
}

/// Answers each connection like a web server that does not understand the request.
fn serve_http(listener: TcpListener, answered: Arc<AtomicU64>) {
    std::thread::spawn(move || {
        for caller in listener.incoming() {
            let mut caller = caller.unwrap();
            let answer =
                b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
            let heard = caller.read(&mut [0; 4096]);
            if heard.is_ok_and(|bytes| bytes > 0) && caller.write_all(answer).is_ok() {
                answered.fetch_add(1, Ordering::AcqRel);
            }
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn puts_go_on_when_another_program_has_the_port_of_a_node_that_died() {
    // Until the end of the test the master takes the dead node for live, so puts and gets still
    // call its port.
    let options = Options {
        nodes: 2,
        segment: "128MiB".into(),
        ..Options::default()
    };
    let late = [
        "--heartbeat-interval",
        "10m",
        "--suspect-after",
        "20m",
        "--drop-after",
        "30m",
    ];
    let mut cluster = Cluster::start(options.master(&late)).unwrap();
    let two = PutOptions {
        replicas: 2,
        ..PutOptions::default()
    };
    let client = cluster.client().await.unwrap();
    let puts = (0..8).map(|number| PutBlock::new(key(number), source(&key(number), LENGTH)));
    for outcome in client.batch_put(puts.collect(), &two).await {
        outcome.unwrap();
    }
    let port = cluster.nodes[0].listen.clone();
    cluster.nodes[0].kill().unwrap();
    let answered = Arc::new(AtomicU64::new(0));
    serve_http(TcpListener::bind(&port).unwrap(), Arc::clone(&answered));
    let fresh = cluster.client().await.unwrap();
    for (client, first) in [(client, 100), (fresh, 200)] {
        put_all(&client, first..first + 16, LENGTH).await.unwrap();
        let before = check_all(&client, 0..8, LENGTH).await;
        assert_eq!(before.right, 8, "{before:?}");
        let put = check_all(&client, first..first + 16, LENGTH).await;
        assert_eq!(put.right, 16, "{put:?}");
    }
    let met = answered.load(Ordering::Acquire);
    assert!(met > 1, "{met} connections met the other program");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_master_killed_under_load_comes_back_with_every_acknowledged_block() {
    let options = Options {
        nodes: 2,
        segment: "512MiB".into(),
        ..Options::default()
    };
    let mut cluster = Cluster::start(options).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..40, LENGTH).await.unwrap();
    let load = Load::start(&cluster, 40).await;
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        cluster.master.kill().unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        cluster.restart_master().unwrap();
        cluster.wait_live(2).unwrap();
        let fresh = cluster.client().await.unwrap();
        assert_eq!(check_all(&fresh, 0..40, LENGTH).await.right, 40);
    }
    let (all, slowest_get, _) = load.end().await;
    println!("{all:?}, slowest sweep {slowest_get:?}");
    assert_eq!((all.wrong, all.missed), (0, 0), "{all:?}");
    assert!(slowest_get < Duration::from_millis(5500), "{slowest_get:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_client_takes_over_the_put_of_one_that_died() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let length = (1 << 20).to_string();
    let mut hand = Hand::start(&["write", &cluster.master_url(), "5", &length, "1500"]).unwrap();
    hand.line().unwrap();
    hand.kill().unwrap();
    let client = cluster.client().await.unwrap();
    let started = Instant::now();
    put_all(&client, 5..6, 1 << 20).await.unwrap();
    assert!(
        started.elapsed() < Duration::from_secs(6),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(check_all(&client, 5..6, 1 << 20).await.right, 1);
    cluster
        .wait_for("the room back", || {
            Ok(cluster.gauge("quarantine_bytes")? == 0)
        })
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_every_daemon_cleanly_and_loses_nothing_durable() {
    let mut cluster = Cluster::start(Options {
        nodes: 2,
        ..Options::default()
    })
    .unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..20, 100_000).await.unwrap();
    let load = {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(AtomicU64::new(0));
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&seen));
        let client = cluster.client().await.unwrap();
        let task = tokio::spawn(async move {
            while !stopped.load(Ordering::Acquire) {
                let tally = check_all(&client, 0..20, 100_000).await;
                assert_eq!(tally.wrong, 0);
                count.fetch_add(1, Ordering::AcqRel);
            }
        });
        (stop, task, seen)
    };
    tokio::time::sleep(Duration::from_millis(200)).await;
    let started = Instant::now();
    assert!(cluster.nodes[0].terminate().unwrap().success());
    assert!(
        started.elapsed() < Duration::from_secs(10),
        "{:?}",
        started.elapsed()
    );
    cluster
        .wait_for("the node's goodbye", || {
            Ok(cluster.node_states()?.len() == 1)
        })
        .unwrap();
    let started = Instant::now();
    assert!(cluster.master.terminate().unwrap().success());
    assert!(
        started.elapsed() < Duration::from_secs(10),
        "{:?}",
        started.elapsed()
    );
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
    let left = check_all(&cluster.client().await.unwrap(), 0..20, 100_000).await;
    assert_eq!((left.wrong, left.failed), (0, 0));
    assert!(left.right > 0, "{left:?}");
    load.0.store(true, Ordering::Release);
    load.1.await.unwrap();
    assert!(load.2.load(Ordering::Acquire) > 0);
    assert!(cluster.nodes[1].terminate().unwrap().success());
}
