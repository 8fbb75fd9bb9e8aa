//! A standby's memory does not grow with the length of the log that it follows.
//!
//! KVPOOL_GROUPS=10000000 cargo nextest run -p kvpool-master --test standby_memory --no-capture

#![allow(
    unsafe_code,
    reason = "a global allocator cannot be written without it"
)]

mod counting;

use kvpool_master::Config;
use kvpool_master::clock::{BootInstant, ManualClock};
use kvpool_master::standby::Standby;
use kvpool_master::store::record::{Commit, Seed, Segment, encode_group};
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore, LogSeq, Record};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Incarnation, Key, Length, NodeName, Offset, SegmentId, Version};
use smallvec::smallvec;
use std::sync::Arc;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

const BLOCK: u64 = 4096;
/// The number of keys; each put replaces one.
const KEYS: u64 = 1000;
/// The number of groups that the leader keeps in its log.
const KEPT: u64 = 50_000;
/// The number of groups between two reports of the log's cut to the standby.
const LOOKS: u64 = 20_000;

fn groups() -> u64 {
    let asked = std::env::var("KVPOOL_GROUPS").ok();
    asked.map_or(400_000, |text| {
        text.parse().expect("KVPOOL_GROUPS is a number")
    })
}

fn put(n: u64) -> Record {
    // An extent is free long before another block takes it.
    let place = n % (KEYS * 8);
    Record::Commit(Commit {
        namespace: NamespaceId(0),
        key: Key::parse(&format!("block-{}", n % KEYS)).unwrap(),
        version: Version(n),
        length: Length(BLOCK),
        checksum: Checksum(n),
        replicas: smallvec![(SegmentId(1), Offset(place * BLOCK))],
        parent: None,
        hard_pin: false,
    })
}

#[tokio::test]
async fn a_standby_takes_no_more_memory_however_long_it_follows() {
    let all = groups();
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let clock = Arc::new(ManualClock::new(BootInstant(1)));
    let config = Config::default();
    let standby = Standby::load(&store, &config, Arc::clone(&clock) as _);
    let mut standby = standby.await.unwrap();
    let seed = Record::Seed(Seed { seed: 7 });
    let segment = Record::Segment(Segment {
        id: SegmentId(1),
        node: NodeName("node".into()),
        incarnation: Incarnation(1),
        index: 0,
        size: Length(KEYS * 16 * BLOCK),
    });
    let group = encode_group(&[seed, segment]);
    standby.apply(LogSeq(1), &group).unwrap();
    let early = all / 4;
    let mut before = (0, 0);
    for seq in 2..=all {
        let group = encode_group(&[put(seq)]);
        standby.apply(LogSeq(seq), &group).unwrap();
        clock.advance(Duration::from_millis(2));
        if seq % LOOKS == 0 {
            standby.forget(LogSeq(seq.saturating_sub(KEPT)));
        }
        if seq == early {
            before = (counting::live(), standby.remembered());
        }
    }
    let after = (counting::live(), standby.remembered());
    println!(
        "after {early} groups {} KiB and {} runs, after {all} {} KiB and {} runs",
        before.0 >> 10,
        before.1,
        after.0 >> 10,
        after.1
    );
    assert!(after.1 <= before.1 * 2, "{} runs of the log", after.1);
    let grown = after.0.saturating_sub(before.0);
    assert!(
        grown < 256 << 10,
        "{} KiB more after {all} groups",
        grown >> 10
    );
}
