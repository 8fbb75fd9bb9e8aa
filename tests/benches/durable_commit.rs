//! The cost of durability for a commit: the same blocks with commits acknowledged from memory and
//! from etcd, in turns in one run.
//!
//!     cargo build --release -p kvpool-master -p kvpool-store-node
//!     cargo bench -p kvpool-tests --bench durable_commit [-- embedded] [-- PAIRS]
//!
//! It drives real kvmasters with Reserve and Commit over framed connections and moves no bytes. It
//! measures batches of 1 and of 128 blocks, one batch at a time and under load. It prints the
//! medians over the pairs: blocks per second, the median latency of a batch's commit, and the
//! difference.

use kvpool_client::{Client, Options as ClientOptions, Remove};
use kvpool_tests::commits::{Drive, Measured};
use kvpool_tests::masters::{self, Pool};
use kvpool_tests::{Cluster, Options};
use std::time::Duration;

const SEGMENT: &str = "512MiB";
const EACH: Duration = Duration::from_secs(2);
/// The number of blocks that have room.
const MOST: u64 = 4_000_000;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let pairs = arguments.iter().find_map(|text| text.parse().ok());
    let pairs: usize = pairs.unwrap_or(5);
    let embedded = arguments.iter().any(|text| text == "embedded");
    if !embedded && !masters::available("durable_commit") {
        return Ok(());
    }
    let runtime = tokio::runtime::Runtime::new()?;
    let _here = runtime.enter();
    let open = |flags: &[&str]| match embedded {
        true => Master::embedded(flags),
        false => Master::on_etcd(flags),
    };
    let mut masters = [open(&["--commit-ack", "memory"])?, open(&[])?];
    let store = if embedded { "embedded" } else { "etcd" };
    println!("{pairs} pairs of {EACH:?}; medians over the pairs; memory against durable ({store})");
    println!(
        "{:>6} {:>12}  {:>21}  {:>8}  {:>23}  {:>10}",
        "batch", "in flight", "blocks/s", "of memory", "median of a commit", "added"
    );
    for batch in [1, 128] {
        for (connections, in_flight) in [(1, 1), (4, 4)] {
            let drive = Drive {
                connections,
                in_flight,
                batch,
                upsert: false,
            };
            compare(&runtime, &mut masters, drive, pairs)?;
        }
    }
    Ok(())
}

fn compare(
    runtime: &tokio::runtime::Runtime,
    masters: &mut [Master; 2],
    drive: Drive,
    pairs: usize,
) -> anyhow::Result<()> {
    let mut runs: [Vec<Measured>; 2] = Default::default();
    for pair in 0..=pairs {
        for (master, runs) in masters.iter_mut().zip(&mut runs) {
            let measured = drive.run(&master.address, 0..MOST, EACH)?;
            // The first pair warms up.
            if pair > 0 {
                runs.push(measured);
            }
            runtime.block_on(master.client.remove(Remove::Everything, true))?;
        }
    }
    let [memory, durable] = runs;
    let rate = |runs: &[Measured]| median(runs.iter().map(Measured::rate).collect());
    let latency = |runs: &[Measured]| {
        let medians = runs.iter().map(|run| run.median().as_secs_f64() * 1e6);
        median(medians.collect())
    };
    println!(
        "{:>6} {:>12}  {:>9.0}, {:>9.0}  {:>8.2}  {:>8.0} us, {:>8.0} us  {:>7.0} us",
        drive.batch,
        format!("{} x {}", drive.connections, drive.in_flight),
        rate(&memory),
        rate(&durable),
        rate(&durable) / rate(&memory),
        latency(&memory),
        latency(&durable),
        latency(&durable) - latency(&memory),
    );
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// A client that can wait for the removal of millions of blocks.
fn patient(mut options: ClientOptions) -> anyhow::Result<Client> {
    options.timeouts.control = Duration::from_secs(120);
    Ok(tokio::runtime::Handle::current().block_on(Client::connect(options))?)
}

/// A master to be measured, with the processes that it needs.
struct Master {
    address: String,
    client: Client,
    _pool: Box<dyn std::any::Any>,
}

impl Master {
    fn embedded(flags: &[&str]) -> anyhow::Result<Self> {
        let options = Options {
            segment: SEGMENT.into(),
            ..Options::default()
        };
        let cluster = Cluster::start(options.master(flags))?;
        Ok(Self {
            address: cluster.master.listen.clone(),
            client: patient(cluster.client_options())?,
            _pool: Box::new(cluster),
        })
    }

    fn on_etcd(flags: &[&str]) -> anyhow::Result<Self> {
        let options = masters::Options {
            masters: 1,
            nodes: 1,
            segment: SEGMENT.into(),
            ..masters::Options::default()
        };
        let pool = Pool::start(options.master(flags))?;
        Ok(Self {
            address: pool.master(0).listen.clone(),
            client: patient(pool.client_options())?,
            _pool: Box::new(pool),
        })
    }
}
