//! A block that is read faster than one node should serve gets further replicas within a budget.
//! They are dropped when the block cools.

use kvpool_client::{GetOptions, Options as ClientOptions, TransportChoice};
use kvpool_tests::blocks::{check_all_by, key, put_all};
use kvpool_tests::{Cluster, Options};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const BLOCK: usize = 16 * MIB;
const READERS: usize = 4;

/// Clients that read one block over TCP, again and again.
struct Readers {
    is_over: Arc<AtomicBool>,
    bytes: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Readers {
    async fn start(cluster: &Cluster, number: u64) -> Self {
        let (is_over, bytes) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let mut tasks = Vec::new();
        for _ in 0..READERS {
            let options = ClientOptions {
                transport: TransportChoice::Tcp,
                ..cluster.client_options()
            };
            let client = kvpool_client::Client::connect(options).await.unwrap();
            let (is_over, bytes) = (Arc::clone(&is_over), Arc::<AtomicU64>::clone(&bytes));
            tasks.push(tokio::spawn(async move {
                let options = GetOptions {
                    release: true,
                    ..GetOptions::default()
                };
                while !is_over.load(Ordering::Relaxed) {
                    let tally = check_all_by(&client, number..number + 1, BLOCK, &options).await;
                    assert_eq!(tally.right, 1, "{tally:?}");
                    bytes.fetch_add(BLOCK as u64, Ordering::Relaxed);
                }
            }));
        }
        Self {
            is_over,
            bytes,
            tasks,
        }
    }

    /// MB/s of all readers together, over this time.
    async fn rate(&self, over: Duration) -> f64 {
        let (before, since) = (self.bytes.load(Ordering::Relaxed), Instant::now());
        tokio::time::sleep(over).await;
        let read = self.bytes.load(Ordering::Relaxed) - before;
        read as f64 / 1e6 / since.elapsed().as_secs_f64()
    }

    async fn end(self) {
        self.is_over.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}

fn gauge(cluster: &Cluster, name: &str) -> u64 {
    let page = cluster.master.http_get("/metrics").unwrap();
    let line = page
        .lines()
        .find_map(|line| line.strip_prefix(&format!("kvpool_master_{name} ")));
    line.unwrap_or_else(|| panic!("no metric {name}"))
        .parse()
        .unwrap()
}

async fn replicas(client: &kvpool_client::Client, number: u64) -> usize {
    let described = client.describe(&[key(number)]).await.unwrap();
    described[0]
        .as_ref()
        .map_or(0, |block| block.replicas.len())
}

async fn wait_for_replicas(client: &kvpool_client::Client, number: u64, wanted: usize) -> Duration {
    let since = Instant::now();
    while replicas(client, number).await != wanted {
        assert!(
            since.elapsed() < Duration::from_secs(60),
            "{wanted} replicas"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    since.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hot_block_gets_replicas_and_gives_them_back() {
    let options = Options {
        nodes: 3,
        segment: "96MiB".into(),
        ..Options::default()
    };
    // Room for the further replicas of one block.
    let flags = [
        "--lease-ttl",
        "300ms",
        "--hot-rate",
        "20MiB",
        "--hot-budget",
        "40MiB",
    ];
    let cluster = Cluster::start(options.master(&flags)).unwrap();
    let client = cluster.client().await.unwrap();
    // The pool is full.
    put_all(&client, 100..115, BLOCK).await.unwrap();
    put_all(&client, 0..2, BLOCK).await.unwrap();
    assert_eq!(replicas(&client, 0).await, 1);

    let readers = Readers::start(&cluster, 0).await;
    let one = readers.rate(Duration::from_millis(500)).await;
    let hot = wait_for_replicas(&client, 0, 3).await;
    let three = readers.rate(Duration::from_secs(2)).await;
    assert_eq!(gauge(&cluster, "hot_replica_bytes"), 2 * BLOCK as u64);
    println!("{one:.0} MB/s at first, three replicas after {hot:?}, {three:.0} MB/s from them");

    // Another hot block would exceed the budget.
    let others = Readers::start(&cluster, 1).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(replicas(&client, 1).await, 1);
    assert_eq!(gauge(&cluster, "hot_replica_bytes"), 2 * BLOCK as u64);
    readers.end().await;

    // The first block cools, and its budget goes to the second one.
    let cooled = wait_for_replicas(&client, 0, 1).await;
    wait_for_replicas(&client, 1, 3).await;
    others.end().await;
    wait_for_replicas(&client, 1, 1).await;
    let is_empty = || Ok(gauge(&cluster, "hot_replica_bytes") == 0);
    cluster.wait_for("the budget is free", is_empty).unwrap();
    println!("one replica {cooled:?} after the last read");
}
