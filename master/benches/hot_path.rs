//! The master's own work for each key, without a wire: `exist`, `match_prefix`, `reserve` and
//! `commit` over a pool with the embedded store. It prints medians in nanoseconds for each key.
//!
//! `cargo bench -p kvpool-master --bench hot_path [-- exist [BLOCKS] | copies [BLOCKS] | prefix | put]`
//!
//! `copies` compares a pool without media with one whose every block has a copy on a medium too.

use kvpool_master::clock::BootClock;
use kvpool_master::membership::{Registration, Reported, StoreNode};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::{CommitItem, OfferedMedium, Pool, ReserveOptions, Written};
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore};
use kvpool_master::{CommitAck, Config};
use kvpool_proto::MediumState;
use kvpool_proto::master_message::Body;
use kvpool_types::ids::NamespaceId;
use kvpool_types::medium::{self, Generation};
use kvpool_types::wire::keys::{self, KeyBatch};
use kvpool_types::{
    Checksum, Code, Epoch, Extent, GrantId, HostId, Incarnation, Key, Length, MediumId, NodeName,
};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const NS: NamespaceId = NamespaceId(0);
const BLOCK: Length = Length(64);
const PUT_BATCH: u64 = 1024;
const MEDIUM: MediumId = MediumId(1);

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

/// The key of block `n`, with the spread of SHA-256.
fn key(n: u64) -> Key {
    let mut random = Random(n.wrapping_mul(0xd134_2543_de82_ef95));
    let mut digest = [0; 32];
    for part in digest.chunks_exact_mut(8) {
        part.copy_from_slice(&random.next().to_le_bytes());
    }
    Key::from_digest(digest)
}

/// A pool with one node that fences every requested extent.
struct Bench {
    pool: Arc<Pool>,
    node: Arc<StoreNode>,
    _directory: tempfile::TempDir,
}

impl Bench {
    async fn new(size: Length) -> anyhow::Result<Self> {
        Self::with_medium(size, None).await
    }

    /// The node confirms each transfer at once.
    async fn with_medium(size: Length, medium: Option<Length>) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path()))?;
        let config = Config {
            commit_ack: CommitAck::Memory,
            suspect_after: Duration::from_secs(1 << 20),
            drop_after: Duration::from_secs(1 << 21),
            ..Config::default()
        };
        let metrics = Arc::new(Metrics::new()?);
        let pool = Pool::start(config, Arc::new(store), Arc::new(BootClock), metrics).await?;
        let registration = Registration {
            name: NodeName("n".into()),
            incarnation: Incarnation(7),
            data_address: "127.0.0.1:1".into(),
            shm_path: String::new(),
            host: HostId(1),
            epoch_seen: Epoch(0),
            secret: None,
            epoch_proof: Default::default(),
            segments: vec![(size, None)],
            held: Vec::new(),
            loaded: Vec::new(),
            can_pull: false,
            can_undrain: false,
            version: String::new(),
            wants_signed_reads: false,
        };
        let node = pool.register(&registration).await?;
        let (outbox, mut inbox) = tokio::sync::mpsc::unbounded_channel();
        let session = pool.activate(&node, &registration, outbox);
        pool.heard(&node, Some(Reported::default()));
        let (fencing, fenced) = (Arc::clone(&pool), Arc::clone(&node));
        tokio::spawn(async move {
            while let Some(Ok(message)) = inbox.recv().await {
                match message.body {
                    Some(Body::Fence(fence)) => {
                        let tickets: Vec<u64> =
                            fence.items.iter().map(|item| item.ticket).collect();
                        fencing.fenced(&fenced, &tickets);
                    }
                    Some(Body::AttachMedium(attach)) => {
                        let (pool, node) = (Arc::clone(&fencing), Arc::clone(&fenced));
                        let generation = Generation(attach.generation);
                        tokio::spawn(async move {
                            pool.medium_attached(&node, session, MEDIUM, generation)
                                .await;
                        });
                    }
                    Some(Body::Transfers(orders)) => {
                        let orders = orders.transfers.iter();
                        let done: Vec<_> = orders.map(|order| (order.ticket, Code::Ok)).collect();
                        fencing.transfers_done(&fenced, &done);
                    }
                    _ => {}
                }
            }
        });
        if let Some(size) = medium {
            let offer = OfferedMedium {
                medium: MEDIUM,
                generation: Generation(0),
                size,
                zone: Length(size.0 / 32),
                state: MediumState::MediumReady,
                budget: 0,
                namespaces: Vec::new(),
            };
            pool.media_offered(&node, session, vec![offer]).await?;
        }
        Ok(Self {
            pool,
            node,
            _directory: directory,
        })
    }

    /// Puts blocks like the service, with signatures.
    async fn put(&self, packed: &[u8]) {
        let batch = KeyBatch::unpack(packed, 1 << 20).expect("packed");
        let lengths = vec![BLOCK; batch.len()];
        let options = ReserveOptions {
            timeout: Duration::from_secs(10),
            ..ReserveOptions::default()
        };
        let granted = self.pool.reserve(NS, &batch, &lengths, &options).await;
        let segments: Written = self.node.segments().into();
        let mut items = Vec::with_capacity(batch.len());
        for (key, outcome) in batch.iter().zip(granted) {
            let granted = outcome.expect("there is room");
            for replica in granted.replicas.iter() {
                let extent = Extent {
                    segment: replica.segment,
                    offset: replica.offset,
                    length: BLOCK,
                };
                let id = GrantId(granted.version.0);
                let node = &self.node;
                black_box(
                    node.signer
                        .sign(node.incarnation, self.pool.epoch, id, extent),
                );
            }
            items.push(CommitItem {
                key: key.to_key(),
                version: granted.version,
                length: BLOCK,
                checksum: Checksum(1),
                segments: segments.clone(),
                parent: None,
            });
        }
        let codes = self.pool.commit(NS, items).await;
        assert!(codes.iter().all(|code| *code == Code::Ok));
    }

    async fn fill(&self, blocks: u64) {
        for first in (0..blocks).step_by(1024) {
            let keys: Vec<Key> = (first..blocks.min(first + 1024)).map(key).collect();
            self.put(&keys::pack(&keys)).await;
        }
    }

    /// Waits until each of so many blocks has its copy.
    async fn copy_all(&self, blocks: u64) {
        self.pool.draining(&self.node, false);
        let copies = || {
            self.pool
                .media()
                .iter()
                .map(|medium| medium.copies)
                .sum::<u64>()
        };
        while copies() < blocks {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Asks like the service: packed keys in, a bitmap out.
    fn exist(&self, packed: &[u8]) -> usize {
        let keys = KeyBatch::unpack(packed, 1 << 20).expect("packed");
        let present = self.pool.exist_bits(NS, &keys, true).answer;
        let count = present.count();
        black_box(present.into_bytes());
        count
    }

    fn match_prefix(&self, packed: &[u8]) -> usize {
        let keys = KeyBatch::unpack(packed, 1 << 20).expect("packed");
        self.pool.match_prefix(NS, &keys, true).answer
    }
}

fn median(mut samples: Vec<f64>) -> (f64, f64, f64) {
    samples.sort_by(f64::total_cmp);
    let at = |part: usize| {
        samples
            .get(samples.len() * part / 4)
            .copied()
            .unwrap_or(0.0)
    };
    (at(2), at(1), at(3))
}

fn print(what: &str, samples: Vec<f64>) {
    let (middle, low, high) = median(samples);
    println!("{what:<44} {middle:8.1} ns a key   ({low:.1} - {high:.1})");
}

/// Random batches of present keys.
fn batches(blocks: u64, size: usize, count: usize, random: &mut Random) -> Vec<Vec<u8>> {
    (0..count)
        .map(|_| {
            let keys: Vec<Key> = (0..size).map(|_| key(random.next() % blocks)).collect();
            keys::pack(&keys)
        })
        .collect()
}

fn timed(keys: usize, call: impl FnOnce() -> usize) -> f64 {
    let start = Instant::now();
    let found = call();
    let took = start.elapsed();
    assert_eq!(found, keys, "all are there");
    took.as_secs_f64() * 1e9 / keys as f64
}

async fn exist() -> anyhow::Result<()> {
    let only: Option<u64> = std::env::args()
        .nth(2)
        .and_then(|blocks| blocks.parse().ok());
    let mut pools = Vec::new();
    for blocks in [2_000, 100_000, 1_000_000] {
        if only.is_none_or(|only| only == blocks) {
            let bench = Bench::new(Length(1 << 34)).await?;
            bench.fill(blocks).await;
            pools.push((blocks, bench));
        }
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut random = Random(1);
    for size in [1, 64, 1024, 8192] {
        let rounds = (1 << 18) / size;
        let prepared: Vec<Vec<Vec<u8>>> = pools
            .iter()
            .map(|(blocks, _)| batches(*blocks, size, rounds.min(4096), &mut random))
            .collect();
        let mut samples = vec![Vec::new(); pools.len()];
        // The pools alternate in stretches, so that neither evicts the other's cache lines at every
        // call.
        for _ in 0..4 {
            for (((_, bench), packed), samples) in pools.iter().zip(&prepared).zip(&mut samples) {
                for batch in packed {
                    samples.push(timed(size, || bench.exist(batch)));
                }
            }
        }
        for ((blocks, _), samples) in pools.iter().zip(samples) {
            print(&format!("exist of {size}, {blocks} blocks"), samples);
        }
    }
    Ok(())
}

async fn copies() -> anyhow::Result<()> {
    let blocks = std::env::args()
        .nth(2)
        .and_then(|blocks| blocks.parse().ok())
        .unwrap_or(1_000_000);
    let memory = Length(1 << 34);
    let footprint = medium::footprint(BLOCK).expect("a length that can be stored");
    let plain = Bench::new(memory).await?;
    let tiered = Bench::with_medium(memory, Some(Length(2 * blocks * footprint.0))).await?;
    for bench in [&plain, &tiered] {
        bench.fill(blocks).await;
    }
    tiered.copy_all(blocks).await;
    let mut random = Random(3);
    for size in [1, 64, 1024, 8192] {
        let prepared = batches(blocks, size, ((1 << 18) / size).min(4096), &mut random);
        let mut samples = [Vec::new(), Vec::new()];
        for round in 0..8 {
            // Each goes first as often as the other.
            for which in [round % 2, 1 - round % 2] {
                let (bench, samples) = match which {
                    0 => (&plain, &mut samples[0]),
                    _ => (&tiered, &mut samples[1]),
                };
                for batch in &prepared {
                    samples.push(timed(size, || bench.exist(batch)));
                }
            }
        }
        let [without, with] = samples;
        let ratio = median(with.clone()).0 / median(without.clone()).0;
        print(&format!("exist of {size}, {blocks} blocks"), without);
        print("  with a copy of each on a medium", with);
        println!("  {ratio:.3} of the time");
    }
    Ok(())
}

async fn prefix() -> anyhow::Result<()> {
    let blocks = 100_000;
    let bench = Bench::new(Length(1 << 34)).await?;
    bench.fill(blocks).await;
    let mut random = Random(2);
    for size in [64, 1024] {
        let packed = batches(blocks, size, 512, &mut random);
        let mut samples = [Vec::new(), Vec::new()];
        let [exist, prefix] = &mut samples;
        for _ in 0..4 {
            for (at, batch) in packed.iter().enumerate() {
                if at % 2 == 0 {
                    exist.push(timed(size, || bench.exist(batch)));
                } else {
                    prefix.push(timed(size, || bench.match_prefix(batch)));
                }
            }
        }
        let [exist, prefix] = samples;
        print(&format!("exist of {size}"), exist);
        print(&format!("match_prefix of {size}"), prefix);
    }
    Ok(())
}

/// The CPU time of all threads of this process.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

async fn put() -> anyhow::Result<()> {
    let bench = Bench::new(Length(1 << 34)).await?;
    let (mut walls, mut cpus) = (Vec::new(), Vec::new());
    for round in 0..12 {
        let packed: Vec<Vec<u8>> = (0..64)
            .map(|batch| {
                let first = (round * 64 + batch) * PUT_BATCH;
                let keys: Vec<Key> = (first..first + PUT_BATCH).map(key).collect();
                keys::pack(&keys)
            })
            .collect();
        let blocks = (64 * PUT_BATCH) as f64;
        let (start, before) = (Instant::now(), cpu());
        for batch in &packed {
            bench.put(batch).await;
        }
        walls.push(start.elapsed().as_secs_f64() * 1e9 / blocks);
        cpus.push((cpu() - before).as_secs_f64() * 1e9 / blocks);
    }
    print("reserve + commit of 1024, elapsed", walls);
    print("reserve + commit of 1024, CPU of all threads", cpus);
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let wants =
        |what: &str| wanted == what || !["exist", "copies", "prefix", "put"].contains(&&*wanted);
    runtime.block_on(async {
        if wants("exist") {
            exist().await?;
        }
        if wants("copies") {
            copies().await?;
        }
        if wants("prefix") {
            prefix().await?;
        }
        if wants("put") {
            put().await?;
        }
        Ok(())
    })
}
