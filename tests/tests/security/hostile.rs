//! Unidentified callers cost little, and no identified client pays for them.

use kvpool_client::Client;
use kvpool_tests::blocks::{key, put_all};
use kvpool_tests::hostile::{Crowd, framed, grpc, http, raise_descriptor_limit};
use kvpool_tests::{Cluster, Daemon, Options};
use kvpool_types::wire::frame::Op;
use std::time::{Duration, Instant};

const BLOCKS: u64 = 64;

/// The number of a client's calls in a second, in the best of several moments. Other work of the
/// machine must not count.
async fn speed(client: &Client) -> f64 {
    let mut best = 0.0f64;
    for _ in 0..8 {
        let began = Instant::now();
        let mut calls = 0.0;
        while began.elapsed() < Duration::from_millis(250) {
            for number in 0..BLOCKS {
                assert!(client.get(&key(number)).await.unwrap().is_some());
                assert_eq!(client.is_exist(&[key(number)]).await.unwrap(), [true]);
                calls += 2.0;
            }
        }
        best = best.max(calls / began.elapsed().as_secs_f64());
    }
    best
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

struct Cost {
    bytes: u64,
    threads: usize,
}

fn cost(daemon: &Daemon) -> Cost {
    Cost {
        bytes: daemon.resident_bytes().unwrap(),
        threads: daemon.threads().unwrap(),
    }
}

/// `KVPOOL_CALLERS=2000` sets the callers of each port. Set `KVPOOL_KEPT_SPEED=0.9` on an idle
/// machine.
#[tokio::test(flavor = "multi_thread")]
async fn callers_before_hello_cost_little_and_known_clients_go_on() {
    let set = |name: &str| std::env::var(name).ok()?.parse::<f64>().ok();
    let most = raise_descriptor_limit().saturating_sub(200) / 6;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a small count"
    )]
    let wanted = set("KVPOOL_CALLERS").unwrap_or(600.0) as usize;
    let count = wanted.min(usize::try_from(most).unwrap());
    let kept = set("KVPOOL_KEPT_SPEED").unwrap_or(0.1);

    let cluster = Cluster::start(Options::default()).unwrap();
    let (master, node) = (&cluster.master, &cluster.nodes[0]);
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..BLOCKS, 4096).await.unwrap();
    speed(&client).await;
    let fast = speed(&client).await;
    let before = [cost(master), cost(node)];

    let socket = cluster.node_socket(0);
    let crowds: Vec<Crowd> = tokio::task::block_in_place(|| {
        std::thread::scope(|scope| {
            let gathering = [
                scope.spawn(|| Crowd::of(&master.listen, count, &framed(Op::Greet))),
                scope.spawn(|| Crowd::of(&master.listen, count, &grpc())),
                scope.spawn(|| Crowd::of(&master.http, count, &http())),
                scope.spawn(|| Crowd::of(&node.listen, count, &framed(Op::Hello))),
                scope.spawn(|| Crowd::of_unix(&socket, count, &framed(Op::Hello))),
                scope.spawn(|| Crowd::of(&node.http, count, &http())),
            ];
            let gathered = gathering.map(|thread| thread.join().unwrap().unwrap());
            gathered.into()
        })
    });
    let during = [cost(master), cost(node)];
    let slow = speed(&client).await;
    // A client that connects now is admitted.
    let late = tokio::time::timeout(Duration::from_secs(20), cluster.client()).await;
    let late = late.expect("a client that comes is not let in").unwrap();
    assert!(late.get(&key(0)).await.unwrap().is_some());
    assert_eq!(node.http_get("/healthz").unwrap(), "ok\n");
    println!(
        "{count} callers a port: {fast:.0} calls/s before, {slow:.0} beside them ({:.2}); master {} -> {} MiB, \
         {} -> {} threads; node {} -> {} MiB, {} -> {} threads",
        slow / fast,
        mib(before[0].bytes),
        mib(during[0].bytes),
        before[0].threads,
        during[0].threads,
        mib(before[1].bytes),
        mib(during[1].bytes),
        before[1].threads,
        during[1].threads,
    );
    for (before, during) in before.iter().zip(&during) {
        assert!(
            during.threads <= before.threads + 16,
            "{} threads",
            during.threads
        );
        assert!(
            during.bytes <= before.bytes + (64 << 20),
            "{} MiB became {}",
            mib(before.bytes),
            mib(during.bytes)
        );
    }
    assert!(slow >= kept * fast, "{fast:.0} calls/s became {slow:.0}");

    drop(crowds);
    cluster
        .wait_for("memory is given back", || {
            let now = [cost(master), cost(node)];
            Ok(before.iter().zip(&now).all(|(before, now)| {
                now.bytes <= before.bytes + (32 << 20) && now.threads <= before.threads + 16
            }))
        })
        .unwrap();
    assert_eq!(cluster.node_states().unwrap().len(), 1);
}

/// Connections count only after their hello. A client beyond the limit gets an error that says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_has_as_many_connections_as_it_was_told() {
    let options = Options::default().master(&["--max-connections", "6"]);
    let cluster = Cluster::start(options).unwrap();
    let first = cluster.client().await.unwrap();
    put_all(&first, 0..1, 1000).await.unwrap();
    let mut clients = vec![first];
    let refused = loop {
        match cluster.client().await {
            Ok(client) => {
                // The first call opens the client's framed connection.
                match client.is_exist(&[key(0)]).await {
                    Ok(_) => clients.push(client),
                    Err(error) => break error.to_string(),
                }
            }
            Err(error) => break error.to_string(),
        }
        assert!(clients.len() < 10, "nobody was refused");
    };
    assert!(refused.contains("--max-connections"), "{refused}");
    assert!(clients[0].get(&key(0)).await.unwrap().is_some());
    drop(clients);
    cluster
        .wait_for("a place is free again", || {
            let client = futures_now(cluster.client());
            Ok(client.is_ok())
        })
        .unwrap();
}

/// Waits for a future inside a task of the multi-threaded runtime.
fn futures_now<T>(future: impl Future<Output = T>) -> T {
    tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(future))
}
