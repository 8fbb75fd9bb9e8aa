//! The benefit of further replicas: four clients read one block of 16 MiB from three nodes, with
//! and without `--hot-rate`, alternated in one run. Each node sends at most 1 Gbit/s: `tc` limits
//! its link. So the nodes' network is the limit, not the processors of this host.
//!
//!     cargo build --release -p kvpool-master -p kvpool-store-node
//!     cargo bench -p kvpool-tests --bench hot_block [-- ROUNDS]
//!
//! It needs root. It prints the medians over the rounds: MB/s of all clients together.

use anyhow::{Context, ensure};
use kvpool_client::{Client, GetOptions, Options as ClientOptions, TransportChoice};
use kvpool_tests::Daemon;
use kvpool_tests::blocks::{check_all_by, key, put_all};
use kvpool_tests::net::Net;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const BLOCK: usize = 16 << 20;
const READERS: usize = 4;
const NODES: [&str; 3] = ["node-0", "node-1", "node-2"];
const LINK: &str = "1gbit";
/// How long replicas may take to appear before the measurement, and the duration of the
/// measurement.
const SETTLE: Duration = Duration::from_secs(6);
const MEASURED: Duration = Duration::from_secs(5);

fn main() -> anyhow::Result<()> {
    let rounds = std::env::args()
        .find_map(|text| text.parse().ok())
        .unwrap_or(3);
    let parties: Vec<&str> = ["master", "reader"].into_iter().chain(NODES).collect();
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let net = Net::new(&parties)?;
        with.push(rate(
            &net,
            &["--hot-rate", "50MiB", "--hot-budget", "64MiB"],
        )?);
        let net = Net::new(&parties)?;
        without.push(rate(&net, &[])?);
    }
    let (with, without) = (median(with), median(without));
    println!("{rounds} rounds; medians, MB/s of {READERS} clients");
    println!("one replica    {without:>8.0}");
    println!("hot replicas   {with:>8.0}");
    println!("ratio          {:>8.2}", with / without);
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn start(net: &Net, party: &str, program: &'static str, place: &Path, flags: &[&str]) -> Daemon {
    let listen = format!("{}:0", net.address(party));
    let own = ["--listen", &listen, "--http-listen", &listen, "--insecure"];
    let flags: Vec<String> = own.iter().chain(flags).map(|&flag| flag.into()).collect();
    let (place, name) = (place.to_owned(), party.to_owned());
    net.run(party, move |_| {
        Daemon::start(program, &place, &name, &flags).expect("a daemon that starts")
    })
}

/// The rate of all readers of one block together, in MB/s.
fn rate(net: &Net, flags: &[&str]) -> anyhow::Result<f64> {
    let place = tempfile::tempdir()?;
    let data = place.path().join("data").display().to_string();
    let flags: Vec<&str> = ["--data-dir", &data, "--lease-ttl", "300ms"]
        .into_iter()
        .chain(flags.iter().copied())
        .collect();
    let master = start(net, "master", "kvmaster", place.path(), &flags);
    let url = format!("http://{}", master.listen);
    let mut nodes = Vec::new();
    for node in NODES {
        let bounded = net.inside(node, || {
            let line = format!("qdisc add dev eth0 root tbf rate {LINK} burst 512kb latency 100ms");
            Command::new("tc").args(line.split(' ')).status()
        });
        ensure!(bounded.context("run tc")?.success(), "tc bounds no link");
        let socket = place.path().join(format!("{node}.sock"));
        let socket = socket.display().to_string();
        let flags = [
            "--master",
            &url,
            "--name",
            node,
            "--segment",
            "96MiB",
            "--shm-path",
            &socket,
        ];
        nodes.push(start(net, node, "kvstore-node", place.path(), &flags));
    }
    let options = ClientOptions {
        masters: vec![url],
        transport: TransportChoice::Tcp,
        ..ClientOptions::default()
    };
    net.inside("reader", || {
        let runtime = tokio::runtime::Runtime::new()?;
        runtime.block_on(read(options))
    })
}

async fn read(options: ClientOptions) -> anyhow::Result<f64> {
    let client = Client::connect(options.clone()).await?;
    put_all(&client, 0..1, BLOCK).await?;
    let (is_over, bytes) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let mut readers = Vec::new();
    for _ in 0..READERS {
        let client = Client::connect(options.clone()).await?;
        let (is_over, bytes) = (Arc::clone(&is_over), Arc::clone(&bytes));
        readers.push(tokio::spawn(async move {
            let options = GetOptions {
                release: true,
                ..GetOptions::default()
            };
            while !is_over.load(Ordering::Relaxed) {
                let tally = check_all_by(&client, 0..1, BLOCK, &options).await;
                ensure!(tally.right == 1, "not as it was put: {tally:?}");
                bytes.fetch_add(BLOCK as u64, Ordering::Relaxed);
            }
            Ok(())
        }));
    }
    tokio::time::sleep(SETTLE).await;
    let (before, since) = (bytes.load(Ordering::Relaxed), Instant::now());
    tokio::time::sleep(MEASURED).await;
    let read = bytes.load(Ordering::Relaxed) - before;
    let took = since.elapsed();
    let described = client.describe(&[key(0)]).await?;
    let replicas = described[0]
        .as_ref()
        .map_or(0, |block| block.replicas.len());
    println!(
        "{replicas} replicas: {:.0} MB/s",
        read as f64 / 1e6 / took.as_secs_f64()
    );
    is_over.store(true, Ordering::Relaxed);
    for reader in readers {
        reader.await??;
    }
    Ok(read as f64 / 1e6 / took.as_secs_f64())
}
