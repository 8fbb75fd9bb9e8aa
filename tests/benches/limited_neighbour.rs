//! The cost of a rate-limited namespace for its neighbours: the 99th percentiles of another
//! namespace's calls, with and without the neighbour, alternated in one run. A neighbour without a
//! limit is measured too.
//!
//!     cargo build --release -p kvpool-master -p kvpool-store-node
//!     cargo bench -p kvpool-tests --bench limited_neighbour [-- ROUNDS]
//!
//! The pool uses tokens. The neighbour is a process with eight loops that put, get and ask as fast
//! as they can. A round has a turn of each kind, in a changing order. It prints the medians over
//! the rounds: of the percentiles (us), and of their ratios to the turn without a neighbour.

use anyhow::{Context, ensure};
use kvpool_client::{
    Client, GetBlock, GetOptions, GetOutcome, Leasing, Namespace, NamespaceSettings,
    Options as ClientOptions, PutBlock, PutOptions, Setting,
};
use kvpool_tests::blocks::{key, source, target};
use kvpool_tests::guard::Tokens;
use kvpool_tests::{Cluster, Options};
use kvpool_types::Key;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const TURN: Duration = Duration::from_secs(3);
/// The pause between turns: the neighbour's calls end, and its bucket fills again.
const PAUSE: Duration = Duration::from_millis(1500);
const BLOCK: usize = 64 << 10;
/// The number of keys in one question.
const ASKED: u64 = 64;
/// The neighbour's limit, in calls a second.
const LIMIT: u64 = 200;
const LOOPS: u64 = 8;
const NEIGHBOUR: &str = "elsewhere";

/// The neighbour's behaviour in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Alone,
    Limited,
    Unlimited,
}

const TURNS: [Turn; 3] = [Turn::Alone, Turn::Limited, Turn::Unlimited];
const CALLS: [&str; 3] = ["put", "get", "exist"];

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let runtime = tokio::runtime::Runtime::new()?;
    if let Some(at) = arguments.iter().position(|text| text == "--neighbour") {
        let [url, token] = arguments.get(at + 1..).context("arguments")? else {
            anyhow::bail!("--neighbour URL TOKEN");
        };
        return runtime.block_on(be_neighbour(url, token));
    }
    let rounds = arguments.iter().find_map(|text| text.parse().ok());
    runtime.block_on(measure(rounds.unwrap_or(9)))
}

/// The neighbour's process.
struct Neighbour {
    child: Child,
    says: BufReader<ChildStdout>,
    hears: ChildStdin,
}

impl Neighbour {
    fn start(cluster: &Cluster, token: PathBuf) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--neighbour", &cluster.master_url()])
            .arg(token)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let says = BufReader::new(child.stdout.take().context("its output")?);
        let hears = child.stdin.take().context("its input")?;
        Ok(Self { child, says, hears })
    }

    /// Starts or stops the neighbour's calls. Returns the number of its calls since the last
    /// command.
    fn tell(&mut self, word: &str) -> anyhow::Result<u64> {
        writeln!(self.hears, "{word}")?;
        let mut line = String::new();
        self.says.read_line(&mut line)?;
        line.trim().parse().context(line)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

async fn be_neighbour(url: &str, token: &str) -> anyhow::Result<()> {
    let client = Client::connect(ClientOptions {
        masters: vec![url.to_owned()],
        token_file: Some(token.into()),
        namespace: Namespace {
            name: NEIGHBOUR.to_owned(),
            ..Default::default()
        },
        ..ClientOptions::default()
    });
    let client = client.await?;
    let (runs, made) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
    for number in 0..LOOPS {
        let (client, runs, made) = (client.clone(), Arc::clone(&runs), Arc::clone(&made));
        tokio::spawn(async move {
            let own = number << 32;
            let into = target(BLOCK);
            loop {
                if !runs.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    continue;
                }
                // A call at the limit fails at its deadline, and the next one follows.
                for call in CALLS {
                    let _refused = one(&client, call, own, &into).await;
                    made.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    for line in std::io::stdin().lines() {
        runs.store(line? == "go", Ordering::Relaxed);
        println!("{}", made.swap(0, Ordering::Relaxed));
    }
    Ok(())
}

/// Makes one call for a block. `exist` also asks for the blocks after it.
async fn one(
    client: &Client,
    call: &str,
    number: u64,
    into: &kvpool_transport::Slice,
) -> anyhow::Result<()> {
    match call {
        "put" => {
            let key = key(number);
            let put = PutBlock::new(key.clone(), source(&key, BLOCK));
            let options = PutOptions {
                upsert: true,
                ..PutOptions::default()
            };
            client.batch_put(vec![put], &options).await.remove(0)?;
        }
        "get" => {
            let get = GetBlock::new(key(number), into.clone());
            let options = GetOptions {
                release: true,
                ..GetOptions::default()
            };
            let got = client.batch_get(vec![get], &options).await.remove(0)?;
            ensure!(matches!(got, GetOutcome::Hit { .. }), "a miss");
        }
        _ => {
            let keys: Vec<Key> = (number..number + ASKED).map(key).collect();
            client.exist(&keys, Leasing::None).await?;
        }
    }
    Ok(())
}

async fn measure(rounds: usize) -> anyhow::Result<()> {
    let tokens = Tokens::new()?;
    tokens.write("other", 3600)?;
    let cluster = Cluster::start(Options {
        segment: "512MiB".into(),
        master: tokens.flags(),
        node: tokens.node_flags(),
        ..Options::default()
    })?;
    let client = cluster.client().await?;
    let own = Namespace {
        name: NEIGHBOUR.to_owned(),
        ..Default::default()
    };
    let limit = NamespaceSettings::default().with(Setting::Requests, LIMIT);
    client.create_namespace(own, &limit).await?;
    let mut neighbour = Neighbour::start(&cluster, tokens.file("other"))?;
    turn(&client).await?;
    let mut found: Vec<[[f64; 3]; 3]> = Vec::new();
    let mut made = [0.0; 3];
    for round in 0..rounds {
        let mut this = [[0.0; 3]; 3];
        for place in 0..TURNS.len() {
            // A later turn finds a warmer machine, so the order changes.
            let number = (place + round) % TURNS.len();
            let kind = TURNS[number];
            match kind {
                Turn::Unlimited => {
                    let none = NamespaceSettings::default();
                    let clear = [Setting::Requests];
                    client.change_namespace(NEIGHBOUR, &none, &clear).await?;
                }
                _ => {
                    client.change_namespace(NEIGHBOUR, &limit, &[]).await?;
                }
            }
            if kind != Turn::Alone {
                neighbour.tell("go")?;
                // The calls of the first second use a full bucket.
                tokio::time::sleep(PAUSE).await;
            }
            let begun = Instant::now();
            this[number] = turn(&client).await?;
            if kind != Turn::Alone {
                let calls = neighbour.tell("stop")? as f64;
                made[number] += calls / (begun.elapsed() + PAUSE).as_secs_f64() / rounds as f64;
            }
            tokio::time::sleep(PAUSE).await;
        }
        found.push(this);
    }
    println!("{rounds} rounds; medians of the 99th percentiles in us");
    println!(
        "the neighbour ended {:.0} calls a second at its limit of {LIMIT} requests, {:.0} without one",
        made[1], made[2]
    );
    println!(
        "{:<8} {:>10} {:>10} {:>7} {:>17} {:>10} {:>7}",
        "call", "alone", "limited", "ratio", "quartiles", "unlimited", "ratio"
    );
    for (at, call) in CALLS.iter().enumerate() {
        let of = |value: &dyn Fn(&[[f64; 3]; 3]) -> f64| -> Vec<f64> {
            let mut all: Vec<f64> = found.iter().map(value).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let middle = |all: &[f64], quarter: usize| all[(all.len() - 1) * quarter / 4];
        let p99 = |turn: usize| middle(&of(&|round| round[turn][at]), 2);
        let ratios = |turn: usize| of(&|round| round[turn][at] / round[0][at]);
        let limited = ratios(1);
        println!(
            "{call:<8} {:>10.0} {:>10.0} {:>7.2} {:>8.2} to {:>5.2} {:>10.0} {:>7.2}",
            p99(0),
            p99(1),
            middle(&limited, 2),
            middle(&limited, 1),
            middle(&limited, 3),
            p99(2),
            middle(&ratios(2), 2),
        );
    }
    Ok(())
}

/// The 99th percentile of each call in a turn, in us.
async fn turn(client: &Client) -> anyhow::Result<[f64; 3]> {
    let into = target(BLOCK);
    let mut took = [const { Vec::new() }; 3];
    let until = Instant::now() + TURN;
    let mut number = 1 << 48;
    while Instant::now() < until {
        number = (1 << 48) + (number + 1) % 1000;
        for (call, took) in CALLS.iter().zip(&mut took) {
            let begun = Instant::now();
            one(client, call, number, &into).await?;
            took.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut all = [0.0; 3];
    for (p99, mut took) in all.iter_mut().zip(took) {
        took.sort_by(f64::total_cmp);
        *p99 = *took.get(took.len() * 99 / 100).context("no calls")?;
    }
    Ok(all)
}
