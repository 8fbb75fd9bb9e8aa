use super::*;
use crate::accounts::Item;
use crate::placement::Extents;
use parking_lot::Mutex;
use smallvec::smallvec;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

const SEGMENT: SegmentId = SegmentId(1);
const UNIT: u64 = 1024;
const LIMITS: RunLimits = RunLimits {
    now: NOW,
    floor: LeaseFloor {
        until: BootInstant(0),
        before: Version(0),
    },
    before: Tick::MAX,
};

/// A segment full of blocks of one unit each, in address order.
struct Full {
    directory: Directory,
    extents: Mutex<Extents>,
}

impl Full {
    fn new(blocks: u64, parent: impl Fn(u64) -> Option<u64>) -> Self {
        Self::of(blocks, parent, |_| NS)
    }

    fn of(
        blocks: u64,
        parent: impl Fn(u64) -> Option<u64>,
        namespace: impl Fn(u64) -> NamespaceId,
    ) -> Self {
        let directory = directory(Policy::Prefix);
        let mut extents = Extents::new(Length(UNIT * blocks));
        for n in 0..blocks {
            let (extent, offset) = extents.allocate(Length(UNIT)).unwrap();
            let id = put_block(
                &directory,
                NewBlock {
                    namespace: namespace(n),
                    length: Length(UNIT),
                    replicas: smallvec![Replica {
                        segment: SEGMENT,
                        extent,
                        offset,
                    }],
                    parent: parent(n).map(key),
                    ..block(&directory, n)
                },
            );
            extents.set_owner(extent, id);
        }
        Self {
            directory,
            extents: Mutex::new(extents),
        }
    }

    fn free(&self, removed: &[Removed]) {
        let mut extents = self.extents.lock();
        for replica in removed.iter().flat_map(|removed| &removed.replicas) {
            extents.free(replica.extent);
        }
    }

    fn run(&self, units: u64) -> Option<Vec<u64>> {
        let length = Length(UNIT * units);
        let removed = self
            .directory
            .evict_run(SEGMENT, || self.extents.lock(), length, &LIMITS)?;
        self.free(&removed);
        assert!(
            self.extents.lock().largest_free() >= length,
            "what was evicted makes room"
        );
        Some(removed.iter().map(|removed| number(&removed.key)).collect())
    }
}

#[test]
fn a_run_is_made_of_neighbours_and_of_no_more_than_are_needed() {
    let full = Full::new(64, |_| None);
    let run = full.run(5).unwrap();
    let set: BTreeSet<u64> = run.iter().copied().collect();
    assert_eq!(set, (0..5).collect(), "the oldest neighbours");
    assert_eq!(full.directory.blocks(), 59);
}

/// All pairs of neighbours have the same bytes.
#[test]
fn a_run_leaves_a_block_that_was_used_last_also_in_a_pool_that_has_run_for_long() {
    let full = Full::new(16, |_| None);
    full.directory.ticks(1 << 30);
    // The oldest block has the most recent one on one side, and the second oldest on the other.
    let others = (0..16).filter(|n| !(3..=5).contains(n));
    for n in [4, 5].into_iter().chain(others).chain([3]) {
        touch(&full.directory, n);
    }
    let run = full.run(2).unwrap();
    let set: BTreeSet<u64> = run.into_iter().collect();
    assert_eq!(set, BTreeSet::from([4, 5]));
}

#[test]
fn free_ranges_between_neighbours_are_used() {
    let full = Full::new(64, |_| None);
    // Every other unit of the first half is free.
    for n in (1..32).step_by(2) {
        let Removal::Removed(removed) = remove(&full.directory, n) else {
            panic!("present")
        };
        full.free(&[removed]);
    }
    assert_eq!(
        full.run(7).unwrap().len(),
        3,
        "three blocks between four free units"
    );
}

#[test]
fn leased_neighbours_end_a_run() {
    let full = Full::new(32, |_| None);
    for n in (3..32).step_by(4) {
        lease(&full.directory, n, BootInstant(NOW.0 + 10), NOW);
    }
    assert_eq!(full.run(4), None);
    assert_eq!(full.directory.blocks(), 32, "nothing is evicted in vain");
    let run = full.run(3).unwrap();
    assert!(run.iter().all(|n| n % 4 != 3));
    assert_eq!(
        full.directory.evict_run(
            SEGMENT,
            || full.extents.lock(),
            Length(UNIT),
            &RunLimits {
                floor: LeaseFloor {
                    until: BootInstant(NOW.0 + 1),
                    before: Version(u64::MAX),
                },
                ..LIMITS
            }
        ),
        None,
        "before the floor blocks of earlier terms stay"
    );
}

#[test]
fn a_run_has_no_block_that_was_used_later() {
    let full = Full::new(8, |_| None);
    let limits = RunLimits {
        before: full.directory.next_tick(),
        ..LIMITS
    };
    touch(&full.directory, 3);
    let run = |units| {
        let extents = || full.extents.lock();
        let length = Length(UNIT * units);
        full.directory.evict_run(SEGMENT, extents, length, &limits)
    };
    assert_eq!(run(5), None);
    assert_eq!(run(4).map(|run| run.len()), Some(4));
}

#[test]
fn hard_pinned_neighbours_end_a_run() {
    let full = Full::new(32, |_| None);
    for n in (3..32).step_by(4) {
        let replicas = with(&full.directory, n, |block| block.replicas().to_vec()).unwrap();
        put_block(
            &full.directory,
            NewBlock {
                version: Version(100 + n),
                length: Length(UNIT),
                replicas: replicas.into(),
                hard_pin: true,
                ..block(&full.directory, n)
            },
        );
    }
    assert_eq!(full.run(4), None);
    assert!(full.run(3).unwrap().iter().all(|n| n % 4 != 3));
}

#[test]
fn held_ranges_end_a_run() {
    let full = Full::new(32, |_| None);
    for n in (3..32).step_by(4) {
        let Removal::Removed(removed) = remove(&full.directory, n) else {
            panic!("present")
        };
        // Its extent is in quarantine: in use, without an owner.
        full.extents.lock().clear_owner(removed.replicas[0].extent);
    }
    assert_eq!(full.run(4), None);
    assert!(full.run(3).is_some());
}

#[test]
fn a_run_takes_the_ends_of_chains_and_never_leaves_a_child_without_parent() {
    let full = Full::new(60, |n| (n % 10 != 0).then(|| n - 1));
    let run = full.run(3).unwrap();
    assert_eq!(
        run,
        [9, 8, 7],
        "the end of the oldest chain, last block first"
    );
    // A whole chain is evicted from its end to its start.
    let run = full.run(10).unwrap();
    for pair in run.windows(2).filter(|pair| pair[0] / 10 == pair[1] / 10) {
        assert!(pair[0] > pair[1]);
    }
    let left = |n: u64| is_present(&full.directory, n);
    for n in (0..60).filter(|n| n % 10 != 0) {
        assert!(!left(n) || left(n - 1), "{n} has lost its parent");
    }
}

/// Each block alone could leave, but not all blocks of a run together.
#[test]
fn a_run_crosses_no_guaranteed_share() {
    const KEPT: NamespaceId = NamespaceId(9);
    let with_share = |blocks: u64, of_kept: u64| {
        let full = Full::of(blocks, |_| None, |n| if n < of_kept { KEPT } else { NS });
        let share = NamespaceSettings::default().with(Setting::Guaranteed, 30 * UNIT);
        full.directory.accounts().set(KEPT, &share);
        full.directory.reorder();
        full
    };
    let left = |full: &Full| full.directory.accounts().of(KEPT).get(Item::Resident) / UNIT;
    // The blocks of `KEPT` are the oldest, so a run over them is the cheapest.
    let full = with_share(64, 32);
    assert_eq!(full.run(5).unwrap().len(), 5);
    assert!(left(&full) >= 30, "{} are left", left(&full));
    assert_eq!(full.run(64), None, "nothing is evicted in vain");
    assert!(left(&full) >= 30, "{} are left", left(&full));
    // A run may take what is above the share.
    let full = with_share(32, 32);
    assert_eq!(full.run(3), None);
    assert_eq!(full.run(2).unwrap().len(), 2);
    assert_eq!((full.run(3), left(&full)), (None, 30));
}

/// Their blocks are the youngest: a run that counts recency alone takes others.
#[test]
fn a_run_takes_blocks_above_a_soft_quota_and_of_low_priority_first() {
    const EARLY: NamespaceId = NamespaceId(9);
    let settings = [
        NamespaceSettings::default().with(Setting::MemorySoft, UNIT),
        NamespaceSettings::default().with(Setting::Priority, 0),
    ];
    for early in settings {
        let full = Full::of(64, |_| None, |n| if n < 48 { NS } else { EARLY });
        full.directory.accounts().set(EARLY, &early);
        full.directory.reorder();
        let evicted = full.run(5).unwrap();
        assert!(evicted.iter().all(|n| *n >= 48), "{early:?}: {evicted:?}");
    }
}

#[test]
fn victims_that_are_protected_after_they_were_chosen_stay() {
    let full = Full::new(8, |_| None);
    let all = Length(UNIT * 8);
    let plan = full
        .directory
        .plan_run(SEGMENT, || full.extents.lock(), all, &LIMITS)
        .unwrap();
    assert_eq!(plan.len(), 8);
    lease(&full.directory, 1, BootInstant(NOW.0 + 10), NOW);
    put_block(&full.directory, child(&full.directory, 100, 2));
    put_block(
        &full.directory,
        NewBlock {
            version: Version(50),
            ..block(&full.directory, 3)
        },
    );
    remove(&full.directory, 4);
    let evicted = full.directory.evict_planned(plan, NOW);
    let evicted: BTreeSet<u64> = evicted.iter().map(|removed| number(&removed.key)).collect();
    assert_eq!(evicted, BTreeSet::from([0, 5, 6, 7]));
}

/// The caller must note the block's leases before a load brings the block back.
#[test]
fn a_block_of_a_dropped_segment_is_shown_before_anybody_else_can_touch_its_key() {
    let full = Arc::new(Full::new(1, |_| None));
    let (said, touched) = std::sync::mpsc::channel();
    let is_locked = std::cell::Cell::new(None);
    let leaves = |dropped: &Dropped| {
        assert!(dropped.removed.is_some());
        let (full, said) = (Arc::clone(&full), said.clone());
        std::thread::spawn(move || said.send(full.directory.find(NS, key(0).as_ref())));
        let early = touched.recv_timeout(Duration::from_millis(50));
        is_locked.set(Some(early.is_err()));
    };
    let extents = || full.extents.lock();
    full.directory.drop_segment(SEGMENT, extents, 0, 8, leaves);
    assert_eq!(is_locked.get(), Some(true));
    assert_eq!(touched.recv(), Ok(None), "the block has left");
}

#[test]
fn a_segment_is_dropped_in_steps() {
    let full = Full::new(50, |n| n.checked_sub(1));
    let second = SegmentId(2);
    let elsewhere = Replica {
        segment: second,
        extent: ExtentIndex(0),
        offset: Offset(0),
    };
    let here = with(&full.directory, 7, |block| block.replicas()[0]).unwrap();
    put_block(
        &full.directory,
        NewBlock {
            version: Version(1000),
            replicas: smallvec![here, elsewhere],
            ..block(&full.directory, 7)
        },
    );
    let (mut place, mut dropped, mut steps) = (Some(0), 0, 0);
    while let Some(at) = place {
        let (some, next) =
            full.directory
                .drop_segment(SEGMENT, || full.extents.lock(), at, 8, |_| {});
        assert!(some.len() <= 8);
        dropped += some.len();
        steps += 1;
        place = next;
    }
    assert_eq!((dropped, steps), (50, 7));
    assert_eq!(full.directory.blocks(), 1, "one has a replica elsewhere");
    assert_eq!(
        with(&full.directory, 7, |block| block.replicas().to_vec()),
        Some(vec![elsewhere])
    );
}
