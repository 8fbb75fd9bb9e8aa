use super::*;

#[test]
fn the_goal_is_reached_and_not_exceeded_by_a_block() {
    let directory = directory(Policy::Prefix);
    for n in 0..20 {
        put(&directory, n);
    }
    let freed = |goal| -> u64 {
        directory
            .evict(goal, NOW, ANYWHERE)
            .iter()
            .map(Removed::bytes)
            .sum()
    };
    assert_eq!(freed(0), 0);
    assert_eq!(freed(1), SIZE);
    assert_eq!(freed(SIZE), SIZE);
    assert_eq!(freed(SIZE + 1), 2 * SIZE);
    assert_eq!(freed(1_000_000), 16 * SIZE, "all that is left");
    assert_eq!(freed(1), 0);
}

#[test]
fn before_the_floor_everything_counts_as_leased() {
    let directory = directory(Policy::Prefix);
    put(&directory, 1);
    let floor = BootInstant(NOW.0 + 5);
    with(&directory, 1, |block| {
        assert!(block.is_leased(BootInstant(NOW.0 + 4), floor));
        assert!(!block.is_leased(floor, floor));
    });
}

/// The blocks can be evicted again when their node takes blocks again.
#[test]
fn a_block_on_segments_that_give_no_room_stays() {
    let directory = directory(Policy::Prefix);
    let on = |segment| Replica {
        segment: SegmentId(segment),
        ..replica(9)
    };
    put(&directory, 0);
    put_block(
        &directory,
        NewBlock {
            replicas: smallvec![replica(1), on(2)],
            ..block(&directory, 1)
        },
    );
    put_block(
        &directory,
        NewBlock {
            replicas: smallvec![on(2)],
            ..block(&directory, 2)
        },
    );
    let second = |segment| segment == SegmentId(2);
    let evicted = directory.evict(2 * SIZE, NOW, second);
    let numbers: Vec<u64> = evicted.iter().map(|block| number(&block.key)).collect();
    assert_eq!(numbers, [1, 2], "each gives the room of one extent there");
    assert!(directory.evict(1, NOW, second).is_empty());
    assert!(is_present(&directory, 0));
    assert_eq!(evict(&directory, 1, NOW), [0; 0], "its segment is away");
    directory.recall([SegmentId(2)].into_iter());
    assert_eq!(evict(&directory, 1, NOW), [0; 0], "another came back");
    directory.recall([replica(0).segment].into_iter());
    assert_eq!(evict(&directory, 1, NOW), [0]);
}

/// Eviction examines each block of a dead node once, however often it runs.
#[test]
fn the_blocks_of_a_dead_node_are_met_once_and_not_again() {
    let directory = directory(Policy::Prefix);
    let away = 200;
    let mut blocks = 0..;
    for n in blocks.by_ref().take(away) {
        put(&directory, n);
    }
    for n in blocks.by_ref().take(40) {
        let replicas = smallvec![Replica {
            segment: SegmentId(2),
            ..replica(n)
        }];
        put_block(
            &directory,
            NewBlock {
                replicas,
                ..block(&directory, n)
            },
        );
    }
    let looks = std::cell::Cell::new(0);
    let alive = |segment| {
        looks.set(looks.get() + 1);
        segment == SegmentId(2)
    };
    let minute = |n: u64| BootInstant(NOW.0 + n * 60_000);
    for n in 0..20 {
        assert_eq!(directory.evict(1, minute(n), alive).len(), 1);
    }
    let most = away + 20 * 4;
    assert!(
        looks.get() <= most,
        "{} looks at {away} blocks",
        looks.get()
    );
    // All of them are evicted once their node takes blocks again.
    directory.recall([replica(0).segment].into_iter());
    let everything = directory.evict(u64::MAX, minute(20), ANYWHERE);
    assert_eq!(everything.len(), away + 20);
}

#[test]
fn a_leased_block_keeps_its_place_in_the_order_for_when_its_lease_ends() {
    let directory = directory(Policy::Prefix);
    for n in 0..6 {
        put(&directory, n);
    }
    let until = BootInstant(NOW.0 + 100);
    for n in 0..4 {
        lease(&directory, n, until, NOW);
    }
    assert_eq!(evict(&directory, 1, NOW), [4]);
    // A release brings a block back at once; expiry brings the others back.
    with(&directory, 2, |mut block| block.release(until, NOW));
    assert_eq!(evict(&directory, 1, NOW), [2]);
    // A renewal holds a block back for longer.
    assert_eq!(
        with(&directory, 0, |mut block| block.renew(
            until,
            BootInstant(NOW.0 + 200),
            NOW
        )),
        Some(true)
    );
    assert_eq!(evict(&directory, 2, until), [1, 3]);
    assert_eq!(evict(&directory, 9, until), [5]);
    assert_eq!(evict(&directory, 9, BootInstant(NOW.0 + 199)), [0; 0]);
    assert_eq!(evict(&directory, 9, BootInstant(NOW.0 + 200)), [0]);
}

#[test]
fn leased_blocks_are_met_once_not_in_every_round() {
    let directory = directory(Policy::Prefix);
    let blocks = 20_000;
    directory.publish(
        (0..blocks)
            .map(|n| block(&directory, n))
            .collect::<Vec<_>>(),
    );
    for n in 0..blocks {
        lease(&directory, n, BootInstant(NOW.0 + 100), NOW);
    }
    assert!(evict(&directory, 1, NOW).is_empty(), "meets each of them");
    let parked: usize = directory
        .stripes
        .iter()
        .map(|cell| {
            let stripe = cell.lock();
            super::super::queues::Rank::ALL
                .iter()
                .filter(|rank| stripe.queues.first(**rank).is_some())
                .count()
        })
        .sum();
    assert_eq!(
        parked, 0,
        "nothing is left to be looked at until a lease ends"
    );
    assert!(evict(&directory, 1, NOW).is_empty());
    assert_eq!(
        evict(&directory, blocks, BootInstant(NOW.0 + 100)).len() as u64,
        blocks
    );
}

/// A move that waits for the end of leases would take the moved block for the next victim.
#[test]
fn a_leased_block_is_no_victim_when_its_replicas_change() {
    let directory = directory(Policy::Prefix);
    let end = BootInstant(NOW.0 + 100);
    put(&directory, 0);
    lease(&directory, 0, end, NOW);
    assert!(evict(&directory, 1, NOW).is_empty(), "a lease keeps it");
    assert_eq!(directory.first_tick(NOW), None);
    let second = Replica {
        segment: SegmentId(2),
        ..replica(0)
    };
    directory.add_replica(NS, key(0).as_ref(), Version(1), second);
    assert_eq!(directory.first_tick(NOW), None, "with two replicas");
    directory.drop_replica(NS, key(0).as_ref(), Version(1), replica(0).segment);
    assert_eq!(directory.first_tick(NOW), None, "after a move");
    assert_eq!(evict(&directory, 1, end), [0], "the lease has ended");
}

#[test]
fn soft_pinned_blocks_are_evicted_last_until_the_pin_expires() {
    let directory = directory(Policy::Prefix);
    for (n, ttl) in [(0, 50), (1, 100), (2, 0), (3, 70)] {
        let soft_pin_until = (ttl > 0).then_some(BootInstant(NOW.0 + ttl));
        put_block(
            &directory,
            NewBlock {
                soft_pin_until,
                ..block(&directory, n)
            },
        );
    }
    put(&directory, 4);
    assert_eq!(evict(&directory, 1, NOW), [2], "an older one is pinned");
    put(&directory, 5);
    assert_eq!(
        evict(&directory, 2, BootInstant(NOW.0 + 50)),
        [0, 4],
        "its pin is over"
    );
    assert_eq!(
        evict(&directory, 2, BootInstant(NOW.0 + 50)),
        [5, 1],
        "only pinned ones are left"
    );
    assert_eq!(evict(&directory, 2, BootInstant(NOW.0 + 50)), [3]);
}

#[test]
fn a_hard_pin_is_for_good() {
    let directory = directory(Policy::Prefix);
    put_block(
        &directory,
        NewBlock {
            hard_pin: true,
            ..block(&directory, 1)
        },
    );
    touch(&directory, 1);
    lease(&directory, 1, BootInstant(NOW.0 + 5), NOW);
    assert!(evict(&directory, 1, BootInstant(NOW.0 + 1000)).is_empty());
    assert!(is_present(&directory, 1));
    // A new version without the pin can be evicted.
    put_block(
        &directory,
        NewBlock {
            version: Version(9),
            ..block(&directory, 1)
        },
    );
    assert_eq!(evict(&directory, 1, BootInstant(NOW.0 + 1000)), [1]);
}

#[test]
fn expired_tokens_change_nothing() {
    let directory = directory(Policy::Prefix);
    put(&directory, 1);
    let at = |ms| BootInstant(NOW.0 + ms);
    lease(&directory, 1, at(10), NOW);
    // The first holder's lease has expired, and another holder takes one.
    lease(&directory, 1, at(100), at(20));
    with(&directory, 1, |mut block| {
        block.release(at(10), at(21));
        assert!(block.is_leased(at(21), NO_FLOOR));
        assert!(!block.renew(at(10), at(500), at(21)));
        assert_eq!(block.lease_until(), at(100));
        block.lease(at(50), at(22));
        block.release(at(50), at(23));
        assert_eq!(block.lease_until(), at(100), "the other holder's");
        block.release(at(100), at(24));
        assert!(!block.is_leased(at(24), NO_FLOOR));
        assert!(
            !block.renew(at(100), at(500), at(25)),
            "there is nothing to extend"
        );
    });
}

/// Publishes a chain of single blocks, each on the segment that `on` gives for its number.
fn put_chain_on(directory: &Directory, numbers: std::ops::Range<u64>, on: impl Fn(u64) -> u32) {
    for n in numbers.clone() {
        let parent = (n > numbers.start).then(|| key(n - 1));
        let segment = SegmentId(on(n));
        let replicas = smallvec![Replica {
            segment,
            ..replica(n)
        }];
        put_block(
            directory,
            NewBlock {
                parent,
                replicas,
                ..block(directory, n)
            },
        );
    }
}

/// A chain lies on several segments. Its blocks elsewhere do not keep those that give room.
#[test]
fn a_leaf_that_gives_no_room_does_not_keep_its_ancestors() {
    let directory = directory(Policy::Prefix);
    let first = |segment| segment == SegmentId(1);
    let numbers = |evicted: Vec<Removed>| -> Vec<u64> {
        evicted.iter().map(|block| number(&block.key)).collect()
    };
    put_chain_on(&directory, 0..5, |n| if n < 2 { 1 } else { 2 });
    put_chain_on(&directory, 10..12, |_| 2);
    let evicted = directory.evict(SIZE, NOW, first);
    assert_eq!(
        numbers(evicted),
        [4, 3, 2, 1],
        "leaves first, and no block too many"
    );
    assert!(is_present(&directory, 0) && is_present(&directory, 11));
}

/// A leaf leaves for an ancestor only if that frees the ancestor.
#[test]
fn a_leaf_stays_beside_a_lease_or_in_a_large_family_and_leaves_later() {
    let directory = directory(Policy::Prefix);
    let first = |segment| segment == SegmentId(1);
    put_chain_on(&directory, 0..3, |n| if n == 0 { 1 } else { 2 });
    let lease_end = BootInstant(NOW.0 + 10);
    lease(&directory, 0, lease_end, NOW);
    assert!(directory.evict(SIZE, NOW, first).is_empty());
    assert!(is_present(&directory, 2), "nothing is evicted in vain");
    assert!(
        directory.evict(SIZE, lease_end, first).is_empty(),
        "it is set aside"
    );
    directory.recall(std::iter::empty());
    assert_eq!(directory.evict(SIZE, lease_end, first).len(), 3);

    put_chain_on(&directory, 100..170, |n| if n == 100 { 1 } else { 2 });
    assert!(directory.evict(SIZE, lease_end, first).is_empty());
    assert!(is_present(&directory, 169));
}

/// Blocks of a namespace that goes last.
const LAST: NamespaceId = NamespaceId(4);

/// First a block of [`LAST`] or a soft-pinned block, then a tick, then a plain block.
fn with_a_later_block(of_last: bool) -> (Directory, Tick) {
    let directory = directory(Policy::Prefix);
    if of_last {
        let settings = NamespaceSettings::default().with(Setting::Priority, 1000);
        assert!(directory.accounts().set(LAST, &settings));
    }
    put_block(
        &directory,
        NewBlock {
            namespace: if of_last { LAST } else { NS },
            soft_pin_until: (!of_last).then_some(BootInstant(u64::MAX)),
            ..block(&directory, 0)
        },
    );
    let before = directory.next_tick();
    put(&directory, 1);
    (directory, before)
}

fn evict_before(directory: &Directory, before: Tick) -> Vec<u64> {
    let removed = directory.evict_before(before, u64::MAX, NOW, ANYWHERE);
    removed.iter().map(|removed| number(&removed.key)).collect()
}

#[test]
fn a_later_block_keeps_those_that_go_after_it_by_a_pin_or_a_priority() {
    for of_last in [false, true] {
        let (directory, before) = with_a_later_block(of_last);
        assert_eq!(evict_before(&directory, before), [0; 0]);
        assert_eq!(evict_before(&directory, directory.next_tick()), [1, 0]);
    }
}

#[test]
fn later_blocks_that_may_not_leave_keep_no_others() {
    for of_last in [false, true] {
        let (directory, before) = with_a_later_block(of_last);
        lease(&directory, 1, BootInstant(NOW.0 + 10), NOW);
        assert_eq!(evict_before(&directory, before), [0], "it is leased");
    }
    let (directory, before) = with_a_later_block(true);
    let settings = NamespaceSettings::default().with(Setting::Guaranteed, SIZE);
    assert!(directory.accounts().set(NS, &settings));
    directory.reorder();
    assert_eq!(evict_before(&directory, before), [0], "its share keeps it");
}

#[test]
fn one_block_that_was_used_later_stays() {
    let directory = directory(Policy::Prefix);
    let before = directory.next_tick();
    let id = put_block(&directory, block(&directory, 1));
    let evict = |before| directory.evict_block(id, Version(2), before, NOW, ANYWHERE);
    assert_eq!(evict(before), Single::Stays);
    assert!(matches!(evict(directory.next_tick()), Single::Evicted(_)));
}
