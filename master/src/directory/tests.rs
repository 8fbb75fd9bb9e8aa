//! Tests of the directory as a whole.

mod eviction;
mod keys;
mod lineage;
mod order;
mod runs;
mod threads;

use super::*;
use crate::replica::ExtentIndex;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Key, Length, NamespaceSettings, Offset, SegmentId, Setting, Version};
use smallvec::smallvec;

const NS: NamespaceId = NamespaceId(3);
const NOW: BootInstant = BootInstant(1_000_000);
const NO_FLOOR: BootInstant = BootInstant(0);
/// Room is needed on every segment.
const ANYWHERE: fn(SegmentId) -> bool = |_| true;
/// A multiple of the granule of extents.
const SIZE: u64 = 128;

fn directory(policy: Policy) -> Directory {
    Directory::new(
        Options {
            stripes: 8,
            policy,
            ..Options::new(7)
        },
        NOW,
    )
}

fn key(n: u64) -> Key {
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&n.to_le_bytes());
    Key::from_digest(digest)
}

fn number(key: &Key) -> u64 {
    match key.as_ref() {
        kvpool_types::KeyRef::Digest { digest, .. } => {
            u64::from_le_bytes(digest[..8].try_into().unwrap())
        }
        kvpool_types::KeyRef::Text(_) => panic!("a digest"),
    }
}

fn replica(n: u64) -> Replica {
    Replica {
        segment: SegmentId(1),
        extent: ExtentIndex(u32::try_from(n).unwrap()),
        offset: Offset(n * 128),
    }
}

/// Block `n`: version `n + 1`, used now.
fn block(directory: &Directory, n: u64) -> NewBlock {
    NewBlock {
        namespace: NS,
        key: key(n),
        version: Version(n + 1),
        length: Length(SIZE),
        checksum: Checksum(n),
        replicas: smallvec![replica(n)],
        parent: None,
        soft_pin_until: None,
        hard_pin: false,
        tick: directory.ticks(1).of(0),
        leased_until: None,
    }
}

fn child(directory: &Directory, n: u64, parent: u64) -> NewBlock {
    NewBlock {
        parent: Some(key(parent)),
        ..block(directory, n)
    }
}

fn put(directory: &Directory, n: u64) {
    put_block(directory, block(directory, n));
}

fn put_block(directory: &Directory, block: NewBlock) -> BlockId {
    directory.publish(vec![block])[0].id.expect("published")
}

fn with<T>(directory: &Directory, n: u64, f: impl FnOnce(BlockMut<'_>) -> T) -> Option<T> {
    let (mut f, mut out) = (Some(f), None);
    directory.visit(NS, &[key(n).as_ref()], |_, block| {
        out = block.map(|block| f.take().expect("once")(block));
    });
    out
}

fn touch(directory: &Directory, n: u64) {
    let tick = directory.ticks(1).of(0);
    with(directory, n, |mut block| block.touch(tick)).expect("present");
}

fn lease(directory: &Directory, n: u64, until: BootInstant, now: BootInstant) {
    with(directory, n, |mut block| block.lease(until, now)).expect("present");
}

fn is_present(directory: &Directory, n: u64) -> bool {
    with(directory, n, |_| ()).is_some()
}

fn remove(directory: &Directory, n: u64) -> Removal {
    directory
        .remove(NS, &[key(n).as_ref()], |_| Verdict::Remove)
        .remove(0)
}

/// Evicts `count` blocks of [`SIZE`]; returns their numbers in order.
fn evict(directory: &Directory, count: u64, now: BootInstant) -> Vec<u64> {
    let removed = directory.evict(count * SIZE, now, ANYWHERE);
    removed.iter().map(|removed| number(&removed.key)).collect()
}
