//! The memory of a block in the master, measured at the allocator. It covers the directory's
//! entries, index and lineage, and the segment's table of extents.

#![allow(
    unsafe_code,
    reason = "a global allocator cannot be written without it"
)]
// UNSAFETY: the allocator passes every call to the system's allocator and only counts.

use kvpool_master::clock::BootInstant;
use kvpool_master::directory::{Directory, NewBlock, Options, Replica, Tick};
use kvpool_master::placement::Extents;
use kvpool_master::store::record;
use kvpool_master::tier::Tier;
use kvpool_types::ids::NamespaceId;
use kvpool_types::medium::footprint;
use kvpool_types::{Checksum, Key, Length, MediumId, NodeName, Offset, SegmentId, Version};
use smallvec::smallvec;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

/// The bytes that glibc uses for an allocation: a header, and steps of 16 bytes.
const fn taken(bytes: usize) -> usize {
    (bytes + 8).next_multiple_of(16)
}

// SAFETY: every call is passed on unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(taken(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(taken(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time: the count covers the whole process.
static ALONE: Mutex<()> = Mutex::new(());

const BLOCKS: u64 = 1_000_000;
const BATCH: u64 = 1000;
const BUDGET: f64 = 160.0;
const SEGMENT: SegmentId = SegmentId(1);

/// Digests with the spread of SHA-256.
fn key(n: u64) -> Key {
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

/// Fills a directory and a segment. Returns the bytes for each block, and the bytes that the
/// directory reports.
fn fill(parents: bool) -> (f64, f64) {
    let before = LIVE.load(Ordering::Relaxed);
    let directory = Directory::new(Options::new(1), BootInstant(0));
    let mut extents = Extents::new(Length(BLOCKS << 16));
    for batch in 0..BLOCKS / BATCH {
        let numbers = batch * BATCH..(batch + 1) * BATCH;
        let ticks = directory.ticks(usize::try_from(BATCH).expect("small"));
        let blocks: Vec<NewBlock> = numbers
            .enumerate()
            .map(|(index, n)| {
                let (extent, offset) = extents.allocate(Length(1 << 16)).expect("room");
                let tick: Tick = ticks.of(index);
                NewBlock {
                    namespace: NamespaceId(0),
                    key: key(n),
                    version: Version(n + 1),
                    length: Length(1 << 16),
                    checksum: Checksum(n),
                    replicas: smallvec![Replica {
                        segment: SEGMENT,
                        extent,
                        offset,
                    }],
                    parent: (parents && index > 0).then(|| key(n - 1)),
                    soft_pin_until: None,
                    hard_pin: false,
                    tick,
                    leased_until: None,
                }
            })
            .collect();
        let placed: Vec<_> = blocks
            .iter()
            .map(|block| block.replicas[0].extent)
            .collect();
        for (published, extent) in directory.publish(blocks).into_iter().zip(placed) {
            extents.set_owner(extent, published.id.expect("published"));
        }
    }
    assert_eq!(directory.blocks(), BLOCKS);
    assert_eq!(directory.linked(), if parents { BLOCKS } else { 0 });
    let bytes = LIVE.load(Ordering::Relaxed) - before;
    let accounted = directory.memory_bytes() + extents.memory_bytes();
    (
        bytes as f64 / BLOCKS as f64,
        accounted as f64 / BLOCKS as f64,
    )
}

#[test]
fn a_million_digest_keys_stay_within_the_budget() {
    let _alone = ALONE.lock();
    for parents in [false, true] {
        let (bytes, accounted) = fill(parents);
        println!("parents: {parents}: {bytes:.1} bytes a block, {accounted:.1} accounted for");
        assert!(bytes <= BUDGET, "{bytes} bytes a block");
        assert!(
            (bytes - accounted).abs() < 3.0,
            "{accounted} accounted for, {bytes} taken"
        );
    }
}

/// A copy on a medium costs an entry of the tier's directory, and one of the medium's table.
#[test]
fn a_million_copies_on_a_medium_stay_within_the_budget() {
    let _alone = ALONE.lock();
    let memory = Directory::new(Options::new(1), BootInstant(0));
    let before = LIVE.load(Ordering::Relaxed);
    let tier = Tier::new(Options::new(1), BootInstant(0), &memory);
    let (id, length) = (SegmentId::on_medium(1), Length(60 << 10));
    let taken = footprint(length).expect("a length that can be stored");
    let zone = Length(taken.0 * 1000);
    tier.set_medium(record::Medium {
        id,
        medium: MediumId(1),
        node: NodeName("n".into()),
        generation: 1,
        is_pending: false,
        size: Length(taken.0 * BLOCKS),
        zone,
        cursor: 0,
    });
    for n in 0..BLOCKS {
        assert!(tier.publish(record::Commit {
            namespace: NamespaceId(0),
            key: key(n),
            version: Version(n + 1),
            length,
            checksum: Checksum(n),
            replicas: smallvec![(id, Offset(n * taken.0))],
            parent: None,
            hard_pin: false,
        }));
    }
    assert_eq!(tier.directory().blocks(), BLOCKS);
    let bytes = (LIVE.load(Ordering::Relaxed) - before) as f64 / BLOCKS as f64;
    println!("{bytes:.1} bytes a copy");
    assert!(bytes <= BUDGET, "{bytes} bytes a copy");
}
