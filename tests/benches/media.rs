//! Blocks between memory and disk, against plain direct I/O of the same size and depth on a file beside,
//! alternated in one run.
//!
//!     cargo build --profile dist -p kvpool-master -p kvpool-store-node
//!     cargo bench --profile dist -p kvpool-tests --bench media [-- ROUNDS NAME=VALUE...]
//!
//! With `--release` in both lines it builds in a third of the time. The two cores are then the limit.
//!
//! Names: `total`, the bytes of all blocks together; `transports`, such as `shm,tcp,rdma`; `medium` and
//! `plain`, two block devices for kvpool and for the plain I/O. The bench overwrites both.
//!
//! - `store`: a node that drains copies a gibibyte of blocks from its memory to its disk.
//! - `get`: four callers get blocks that lie on the disk only, in random order. The limit is the smaller
//!   of plain reads and of gets of the same blocks from memory.
//! - `one`: the median latency of a single get of a block on the disk. Its column `memory` is the latency of
//!   the next get of the same block, which then lies in memory.
//!
//! Both files were written once before, as those of a disk in use: the first write of a range costs the
//! filesystem more. Devices were not written. The processes that read from shared memory fill their page
//! tables before. The memory that gets the blocks has its pages before.
//! It prints the medians over the rounds, of the rates and of the ratios.

use anyhow::Context;
use kvpool_client::{Client, GetBlock, GetOptions, GetOutcome, TransportChoice};
use kvpool_disk::{Arena, Choice, Engine, Op, Options as DiskOptions, Request, open};
use kvpool_tests::blocks::{is_right, key, put_all, target};
use kvpool_tests::{Cluster, Options};
use kvpool_types::Offset;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How long a process may fill its page tables.
const SETTLE: Duration = Duration::from_secs(3);
/// The bytes in progress at a time, as the master orders them.
const WINDOW: u64 = 64 << 20;
/// The bytes of one batch of gets.
const BATCH: u64 = 16 << 20;
/// Batches in progress.
const CALLERS: usize = 4;
const SIZES: [u64; 3] = [256 << 10, 1 << 20, 8 << 20];

/// What to measure.
struct Settings {
    rounds: usize,
    /// The bytes of all blocks together.
    total: u64,
    transports: Vec<(String, TransportChoice)>,
    /// The device of the medium. Without one, it is a file.
    medium: Option<PathBuf>,
    /// The device for plain I/O. Without one, it is a file.
    plain: Option<PathBuf>,
}

impl Settings {
    fn of(arguments: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let mut settings = Self {
            rounds: 3,
            total: 1 << 30,
            transports: transports("shm,tcp")?,
            medium: None,
            plain: None,
        };
        for argument in arguments.filter(|argument| argument != "--bench") {
            match argument.split_once('=') {
                None => settings.rounds = argument.parse().context("the number of rounds")?,
                Some(("total", bytes)) => settings.total = bytes.parse()?,
                Some(("transports", names)) => settings.transports = transports(names)?,
                Some(("medium", path)) => settings.medium = Some(path.into()),
                Some(("plain", path)) => settings.plain = Some(path.into()),
                Some((name, _)) => anyhow::bail!("there is no setting {name}"),
            }
        }
        Ok(settings)
    }
}

fn transports(names: &str) -> anyhow::Result<Vec<(String, TransportChoice)>> {
    let named = names.split(',').map(|name| {
        let choice = match name {
            "shm" => TransportChoice::Shm,
            "tcp" => TransportChoice::Tcp,
            "rdma" => TransportChoice::Rdma,
            other => anyhow::bail!("there is no transport {other}"),
        };
        Ok((name.to_owned(), choice))
    });
    named.collect()
}

fn main() -> anyhow::Result<()> {
    let settings = Settings::of(std::env::args().skip(1))?;
    let rounds = settings.rounds;
    let runtime = tokio::runtime::Runtime::new()?;
    let place = match settings.medium {
        Some(_) => tempfile::tempdir()?,
        None => tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?,
    };
    println!(
        "{rounds} rounds; medians; {} MiB of blocks",
        settings.total >> 20
    );
    println!(
        "{:<24} {:>12} {:>12} {:>12} {:>7}",
        "case", "kvpool", "disk", "memory", "ratio"
    );
    for block in SIZES {
        let mut rows: Vec<(String, Vec<[f64; 4]>)> = Vec::new();
        for _ in 0..rounds {
            for (name, measured) in runtime.block_on(round(&settings, place.path(), block))? {
                match rows.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, all)) => all.push(measured),
                    None => rows.push((name, vec![measured])),
                }
            }
        }
        for (name, all) in rows {
            let [got, disk, memory, ratio] =
                [0, 1, 2, 3].map(|at| median(all.iter().map(|row| row[at]).collect()));
            println!("{name:<24} {got:>12.1} {disk:>12.1} {memory:>12.1} {ratio:>7.2}");
        }
    }
    Ok(())
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or_default()
}

/// Measures all cases with blocks of one size. Rates in MB/s, latencies in us.
async fn round(
    settings: &Settings,
    place: &Path,
    block: u64,
) -> anyhow::Result<Vec<(String, [f64; 4])>> {
    let total = settings.total;
    let blocks = total / block;
    let label = match block >> 20 {
        0 => format!("{}KiB", block >> 10),
        mib => format!("{mib}MiB"),
    };
    let mut rows = Vec::new();
    let raw = Raw::open(settings, &place.join("raw"), block)?;
    let place = tempfile::tempdir_in(place)?;
    let file = match &settings.medium {
        Some(device) => {
            let mut blank = std::fs::File::options().write(true).open(device)?;
            blank.write_all(&vec![0; 1 << 20])?;
            blank.sync_all()?;
            device.clone()
        }
        None => {
            let file = place.path().join("ssd");
            write_zeros(&file, total + total / 2)?;
            file
        }
    };
    let options = Options {
        segment: format!("{}MiB", total >> 19),
        node: vec!["--ssd".into(), format!("path={}", file.display())],
        ..Options::default()
    };
    let mut cluster = Cluster::start(options.master(&["--lease-ttl", "300ms"]))?;
    let client = connect(&cluster, TransportChoice::Auto).await?;
    wait_attached(&cluster, 1)?;
    for first in (0..blocks).step_by(16) {
        put_all(
            &client,
            first..(first + 16).min(blocks),
            usize::try_from(block)?,
        )
        .await?;
    }
    let disk = raw.write()?;
    let stored = drain(&mut cluster, total)?;
    rows.push((format!("store/{label}"), [stored, disk, 0.0, stored / disk]));
    let mut attached = 1;
    for (name, transport) in &settings.transports {
        cluster.restart_node(0)?;
        attached += 1;
        wait_attached(&cluster, attached)?;
        let client = connect(&cluster, *transport).await?;
        tokio::time::sleep(SETTLE).await;
        let disk = raw.read(BATCH * CALLERS as u64)?;
        let cold = get_all(&client, blocks, block).await?;
        let warm = get_all(&client, blocks, block).await?;
        let ratio = cold / disk.min(warm);
        rows.push((format!("get/{name}/{label}"), [cold, disk, warm, ratio]));
        // The blocks already have copies, so the node ends at once.
        cluster.nodes[0].terminate()?;
    }
    if block == 1 << 20 {
        cluster.restart_node(0)?;
        wait_attached(&cluster, attached + 1)?;
        let client = connect(&cluster, TransportChoice::Shm).await?;
        tokio::time::sleep(SETTLE).await;
        let disk = raw.latency()?;
        let one = latency(&client, blocks, block).await?;
        let memory = latency(&client, blocks, block).await?;
        rows.push((format!("one/{label} us"), [one, disk, memory, one - disk]));
    }
    Ok(rows)
}

async fn connect(cluster: &Cluster, transport: TransportChoice) -> anyhow::Result<Client> {
    let options = kvpool_client::Options {
        transport,
        ..cluster.client_options()
    };
    Ok(Client::connect(options).await?)
}

fn wait_attached(cluster: &Cluster, times: usize) -> anyhow::Result<()> {
    cluster.wait_for("the medium is attached", || {
        let log = cluster.master.log_text();
        Ok(log
            .matches("pool::tiering::attach: medium attached")
            .count()
            >= times)
    })
}

/// The bytes that a process has written to disks.
fn written(pid: u32) -> anyhow::Result<u64> {
    let counts = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
    let bytes = counts.lines().find_map(|l| l.strip_prefix("write_bytes: "));
    Ok(bytes.context("no such count")?.trim().parse()?)
}

fn write_zeros(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let mut file = std::fs::File::create(path)?;
    std::io::copy(&mut std::io::repeat(0).take(bytes), &mut file)?;
    Ok(file.sync_all()?)
}

/// Stops the node, and returns the rate at which it copied its memory, in MB/s.
fn drain(cluster: &mut Cluster, total: u64) -> anyhow::Result<f64> {
    let stored = |cluster: &Cluster| -> anyhow::Result<u64> {
        let counters = cluster.counters()?;
        counters["counters"]["bytes_stored_total"]
            .as_u64()
            .context("no such counter")
    };
    let pid = cluster.nodes[0].pid();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(i32::try_from(pid)?).context("a process id")?,
        rustix::process::Signal::TERM,
    )?;
    let asked = Instant::now();
    let waits = || {
        let waited = asked.elapsed().as_secs();
        anyhow::ensure!(waited < 60, "the drain does not end");
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    };
    // Measured from the first write on: the node's goodbye does not use the disk.
    let written_before = written(pid)?;
    while written(pid)? == written_before {
        waits()?;
    }
    let begun = Instant::now();
    while stored(cluster)? < total {
        waits()?;
    }
    let rate = total as f64 / 1e6 / begun.elapsed().as_secs_f64();
    cluster.nodes[0].terminate()?;
    Ok(rate)
}

/// Gets every block once in random order, and checks some of them. Returns MB/s.
async fn get_all(client: &Client, blocks: u64, block: u64) -> anyhow::Result<f64> {
    let mut order: Vec<u64> = (0..blocks).collect();
    order.shuffle(&mut StdRng::seed_from_u64(rand::random()));
    let length = usize::try_from(block)?;
    let batch = usize::try_from((BATCH / block).max(1))?;
    let parts: Vec<Vec<u64>> = order
        .chunks(order.len().div_ceil(CALLERS))
        .map(<[u64]>::to_vec)
        .collect();
    let targets = parts.iter().map(|_| {
        let targets = (0..batch).map(|_| target(length));
        // The memory has its pages before the measurement, as that of the plain reads has.
        targets.inspect(|memory| memory.write_at(Offset(0), &vec![1; length]))
    });
    let targets: Vec<Vec<_>> = targets.map(Iterator::collect).collect();
    let begun = Instant::now();
    let tasks: Vec<_> = parts
        .into_iter()
        .zip(targets)
        .map(|(part, targets)| {
            let client = client.clone();
            tokio::spawn(async move {
                for numbers in part.chunks(batch) {
                    let gets = numbers.iter().zip(&targets);
                    let gets = gets
                        .map(|(n, to)| GetBlock::new(key(*n), to.clone()))
                        .collect();
                    let options = GetOptions {
                        release: true,
                        ..GetOptions::default()
                    };
                    for outcome in client.batch_get(gets, &options).await {
                        anyhow::ensure!(matches!(outcome?, GetOutcome::Hit { .. }), "a miss");
                    }
                }
                let (last, to) = (part.chunks(batch).last(), &targets[0]);
                let first = last.and_then(<[u64]>::first).context("an empty part")?;
                anyhow::ensure!(is_right(&key(*first), to, length), "wrong bytes");
                Ok(())
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    Ok((blocks * block) as f64 / 1e6 / begun.elapsed().as_secs_f64())
}

/// The median latency of single gets of different blocks, in us.
async fn latency(client: &Client, blocks: u64, block: u64) -> anyhow::Result<f64> {
    let to = target(usize::try_from(block)?);
    let mut all = Vec::new();
    for number in 0..blocks.min(300) {
        let begun = Instant::now();
        let get = GetBlock::new(key(number), to.clone());
        let outcome = client
            .batch_get(vec![get], &GetOptions::default())
            .await
            .remove(0)?;
        anyhow::ensure!(matches!(outcome, GetOutcome::Hit { .. }), "a miss");
        all.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(all))
}

/// Plain I/O on a file, with requests of a block and its header.
struct Raw {
    engine: Arc<dyn Engine>,
    arena: Arc<Arena>,
    /// The bytes of one request.
    request: u64,
    /// The number of blocks.
    count: u64,
}

impl Raw {
    fn open(settings: &Settings, path: &Path, block: u64) -> anyhow::Result<Self> {
        let arena = Arena::new(usize::try_from(WINDOW * 2)?)?;
        let path = settings.plain.as_deref().unwrap_or(path);
        let size = settings.total + (settings.total >> 3);
        let options = DiskOptions {
            size: settings.plain.is_none().then_some(size),
            engine: Choice::Uring,
            ..DiskOptions::default()
        };
        if !path.exists() {
            write_zeros(path, size)?;
        }
        let engine = open(path, &options, &arena)?;
        let request = block + 4096;
        Ok(Self {
            engine,
            arena,
            request,
            count: settings.total / block,
        })
    }

    /// Sequential writes of all blocks: MB/s of blocks.
    fn write(&self) -> anyhow::Result<f64> {
        let offsets = (0..self.count).map(|at| at * self.request).collect();
        self.run(offsets, WINDOW, Op::Write)
    }

    /// Reads of all blocks in random order: MB/s of blocks.
    fn read(&self, in_flight: u64) -> anyhow::Result<f64> {
        let mut offsets: Vec<u64> = (0..self.count).map(|at| at * self.request).collect();
        offsets.shuffle(&mut StdRng::seed_from_u64(rand::random()));
        self.run(offsets, in_flight, Op::Read)
    }

    /// The median latency of single reads, in us.
    fn latency(&self) -> anyhow::Result<f64> {
        let mut all = Vec::new();
        for _ in 0..300 {
            let at = rand::rng().random_range(0..self.count) * self.request;
            let begun = Instant::now();
            self.run(vec![at], self.request, Op::Read)?;
            all.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(all))
    }

    fn run(
        &self,
        offsets: Vec<u64>,
        in_flight: u64,
        op: impl Fn(kvpool_disk::Buffer) -> Op,
    ) -> anyhow::Result<f64> {
        let depth = (in_flight / self.request).max(1);
        let (done, ended) = mpsc::channel();
        let count = offsets.len();
        let begun = Instant::now();
        let (mut running, mut finished) = (0, 0);
        let mut offsets = offsets.into_iter();
        while finished < count {
            while running < depth
                && let Some(offset) = offsets.next()
            {
                let until = Instant::now() + Duration::from_secs(10);
                let length = usize::try_from(self.request)?;
                let buffer = self.arena.take_within(length, until).context("no memory")?;
                let done = done.clone();
                self.engine.submit(Request {
                    op: op(buffer),
                    offset,
                    done: Box::new(move |completion| {
                        // The receiver lives until all completions have come.
                        let _ = done.send(completion.result);
                    }),
                });
                running += 1;
            }
            ended.recv()??;
            running -= 1;
            finished += 1;
        }
        let bytes = count as u64 * (self.request - 4096);
        Ok(bytes as f64 / 1e6 / begun.elapsed().as_secs_f64())
    }
}
