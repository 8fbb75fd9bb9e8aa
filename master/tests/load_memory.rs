//! The memory of a master while it loads its metadata, compared with its memory afterwards.
//!
//! KVPOOL_BLOCKS=10000000 cargo nextest run -p kvpool-master --test load_memory --no-capture

#![allow(
    unsafe_code,
    reason = "a global allocator cannot be written without it"
)]

mod counting;

use kvpool_master::Config;
use kvpool_master::clock::{BootClock, BootInstant};
use kvpool_master::directory::{Directory, Options, SHARDS};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::{Pool, TermStart};
use kvpool_master::standby::Standby;
use kvpool_master::store::record::{self, Commit, Remove, Seed, Segment, encode_group};
use kvpool_master::store::{
    EmbeddedOptions, EmbeddedStore, JournalOptions, LogSeq, MetadataStore, Record, ShardIndex,
};
use kvpool_master::term::Term;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{
    Checksum, ClusterId, Epoch, Incarnation, Key, Length, NodeName, Offset, SegmentId, Version,
};
use smallvec::smallvec;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

const SEED: u64 = 7;
const SPACE: NamespaceId = NamespaceId(0);
const BLOCK: u64 = 4096;
const SEGMENTS: u64 = 4;
/// The number of blocks in a chain.
const CHAIN: u64 = 16;
/// The number of records in a group of the log.
const GROUP: u64 = 1024;

/// The kind of a pool's blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Digests,
    Chains,
    Texts,
}

fn blocks() -> u64 {
    let asked = std::env::var("KVPOOL_BLOCKS").ok();
    asked.map_or(1_000_000, |text| {
        text.parse().expect("KVPOOL_BLOCKS is a number")
    })
}

/// Digests with the spread of SHA-256.
fn key(kind: Kind, n: u64) -> Key {
    if kind == Kind::Texts {
        return Key::parse(&format!("tenant-7/a-model-with-a-name/layer-3/block-{n}")).unwrap();
    }
    let mut digest = [0; 32];
    for (turn, part) in [0, 13, 26, 39].into_iter().zip(digest.chunks_exact_mut(8)) {
        let word = (n + 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(turn)
            ^ n;
        part.copy_from_slice(&word.to_le_bytes());
    }
    Key::from_digest(digest)
}

/// Block `n` at the extent number `place`: a later version may take the extent of another key's
/// earlier version.
fn commit(kind: Kind, n: u64, version: u64, place: u64, all: u64) -> Record {
    let here = all.div_ceil(SEGMENTS);
    let segment = u32::try_from(place / here).unwrap();
    Record::Commit(Commit {
        namespace: SPACE,
        key: key(kind, n),
        version: Version(version),
        length: Length(BLOCK),
        checksum: Checksum(n),
        replicas: smallvec![(SegmentId(segment + 1), Offset(place % here * BLOCK))],
        parent: (kind == Kind::Chains && !n.is_multiple_of(CHAIN)).then(|| key(kind, n - 1)),
        hard_pin: false,
    })
}

/// A store with a snapshot of all blocks and a log that replaces a third of them. Every extent that
/// a block leaves is taken by another block.
async fn stored(directory: &Path, kind: Kind, all: u64) -> EmbeddedStore {
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    store
        .append(epoch, LogSeq(1), encode_group(&[]))
        .await
        .unwrap();
    let mut system = vec![Record::Seed(Seed { seed: SEED })];
    let size = Length(all.div_ceil(SEGMENTS) * BLOCK * 2);
    system.extend((0..u32::try_from(SEGMENTS).unwrap()).map(|index| {
        Record::Segment(Segment {
            id: SegmentId(index + 1),
            node: NodeName(format!("node-{index}")),
            incarnation: Incarnation(index.into()),
            index: 0,
            size,
        })
    }));
    let mut of_parts: Vec<Vec<u32>> = vec![Vec::new(); SHARDS as usize];
    let shards = Directory::new(Options::new(SEED), BootInstant(0));
    for n in 0..all {
        let part = shards.shard_of_key(SPACE, key(kind, n).as_ref());
        of_parts[part as usize].push(u32::try_from(n).unwrap());
    }
    let put = async |shard, records: &mut dyn Iterator<Item = Record>| {
        let parts = record::encode_snapshot(SHARDS, records);
        let put = store.put_snapshot(epoch, shard, LogSeq(1), parts);
        put.await.unwrap();
    };
    put(ShardIndex::SYSTEM, &mut system.into_iter()).await;
    for (part, numbers) in (0..).zip(of_parts) {
        let mut records = numbers
            .into_iter()
            .map(|n| commit(kind, n.into(), u64::from(n) + 1, n.into(), all));
        put(ShardIndex(part), &mut records).await;
    }
    let mut seq = LogSeq(1);
    for first in (0..all / 3).step_by(usize::try_from(GROUP).unwrap()) {
        let numbers = first..(first + GROUP).min(all / 3);
        // The first half of a group removes blocks, and the second half takes their extents.
        let removes = numbers.clone().filter(|n| n.is_multiple_of(2)).map(|n| {
            Record::Remove(Remove {
                namespace: SPACE,
                key: key(kind, n),
                version: Version(n + 1),
                unleased: false,
                everywhere: false,
                places: Default::default(),
            })
        });
        let puts = numbers
            .filter(|n| n.is_multiple_of(2))
            .map(|n| commit(kind, n, all + n + 1, n, all));
        seq = seq.next();
        let group = encode_group(&removes.chain(puts).collect::<Vec<_>>());
        store.append(epoch, seq, group).await.unwrap();
    }
    store.truncate_log(epoch, LogSeq(1)).await.unwrap();
    store
}

fn mib(bytes: usize) -> usize {
    bytes >> 20
}

async fn load(kind: Kind) {
    let all = blocks();
    let directory = tempfile::tempdir().unwrap();
    stored(directory.path(), kind, all)
        .await
        .close()
        .await
        .unwrap();
    let before = counting::live();
    counting::take_peak();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let store = Arc::new(store) as Arc<dyn MetadataStore>;
    let (config, clock) = (Config::default(), Arc::new(BootClock));
    let started = Instant::now();
    let standby = Standby::load(&*store, &config, Arc::clone(&clock) as _);
    let standby = standby.await.unwrap();
    let took = started.elapsed();
    assert_eq!(standby.blocks(), all);
    let loading = counting::take_peak() - before;
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let start = TermStart {
        config,
        cluster: ClusterId(1),
        store: Arc::clone(&store),
        journal: JournalOptions::default(),
        clock,
        metrics: Arc::new(Metrics::new().unwrap()),
    };
    let promoted = Instant::now();
    let pool = Pool::lead(start, standby, Arc::new(Term::unlimited(epoch)));
    let pool = pool.await.unwrap();
    let promotion = promoted.elapsed();
    let promoting = counting::take_peak() - before;
    let steady = counting::live() - before;
    println!(
        "{all} {kind:?}: steady {} MiB ({} bytes a block), peak of load {} MiB ({:.2}), of promotion {} MiB \
         ({:.2}); loaded in {took:?}, promoted in {promotion:?}",
        mib(steady),
        steady / usize::try_from(all).unwrap(),
        mib(loading),
        loading as f64 / steady as f64,
        mib(promoting),
        promoting as f64 / steady as f64,
    );
    for peak in [loading, promoting] {
        let ratio = peak as f64 / steady as f64;
        assert!(ratio <= 1.3, "a peak of {ratio:.2} times the steady memory");
    }
    pool.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_needs_at_most_1_3_times_the_final_memory() {
    for kind in [Kind::Digests, Kind::Chains, Kind::Texts] {
        load(kind).await;
    }
}
