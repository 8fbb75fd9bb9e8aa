use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Publishes a chain of blocks, first to last, the first under `parent`.
fn put_chain(directory: &Directory, numbers: std::ops::Range<u64>, parent: Option<u64>) {
    let ticks = directory.ticks(1000);
    let first = numbers.start;
    let blocks = numbers.enumerate().map(|(index, n)| NewBlock {
        parent: if n == first {
            parent.map(key)
        } else {
            Some(key(n - 1))
        },
        tick: ticks.of(index),
        ..block(directory, n)
    });
    directory.publish(blocks.collect::<Vec<_>>());
}

#[test]
fn a_chain_goes_from_its_end_even_when_its_start_is_oldest() {
    let directory = directory(Policy::Prefix);
    for n in 0..10u64 {
        put_block(
            &directory,
            NewBlock {
                parent: n.checked_sub(1).map(key),
                ..block(&directory, n)
            },
        );
    }
    assert_eq!(
        evict(&directory, 10, NOW),
        (0..10).rev().collect::<Vec<_>>()
    );
}

#[test]
fn under_plain_lru_chains_do_not_count() {
    let directory = directory(Policy::Lru);
    for n in 0..10u64 {
        put_block(
            &directory,
            NewBlock {
                parent: n.checked_sub(1).map(key),
                ..block(&directory, n)
            },
        );
    }
    assert_eq!(evict(&directory, 10, NOW), (0..10).collect::<Vec<_>>());
}

#[test]
fn a_parent_is_found_in_its_namespace_only_and_only_if_present() {
    let directory = directory(Policy::Prefix);
    put(&directory, 0);
    let other = NewBlock {
        namespace: NamespaceId(9),
        ..child(&directory, 1, 0)
    };
    put_block(&directory, other);
    put_block(&directory, child(&directory, 2, 77));
    put(&directory, 77);
    put_block(&directory, child(&directory, 3, 3));
    assert_eq!(
        evict(&directory, 4, NOW),
        [0, 1, 2, 77],
        "nothing is linked"
    );
}

#[test]
fn a_protected_descendant_protects_all_before_it() {
    let directory = directory(Policy::Prefix);
    put_chain(&directory, 0..5, None);
    put(&directory, 9);
    lease(&directory, 4, BootInstant(NOW.0 + 10), NOW);
    assert_eq!(evict(&directory, 99, NOW), [9]);
    // Another branch can be evicted.
    put_chain(&directory, 20..23, Some(2));
    assert_eq!(evict(&directory, 99, NOW), [22, 21, 20]);
    assert_eq!(
        evict(&directory, 99, BootInstant(NOW.0 + 10)),
        [4, 3, 2, 1, 0]
    );
}

#[test]
fn children_of_a_removed_parent_go_first_with_all_that_follows_them() {
    let directory = directory(Policy::Prefix);
    for n in 100..110 {
        put(&directory, n);
    }
    put_chain(&directory, 0..4, None);
    put_chain(&directory, 10..13, Some(1));
    remove(&directory, 1);
    // Both branches under block 1, each from its end, before older blocks.
    let first = evict(&directory, 5, NOW);
    assert_eq!(
        first.iter().copied().collect::<BTreeSet<_>>(),
        BTreeSet::from([2, 3, 10, 11, 12])
    );
    let place = |n| first.iter().position(|other| *other == n);
    assert!(place(3) < place(2) && place(12) < place(11) && place(11) < place(10));
    assert_eq!(evict(&directory, 2, NOW), [100, 101]);
}

#[test]
fn a_root_that_is_used_is_an_ordinary_block_again() {
    let directory = directory(Policy::Prefix);
    put(&directory, 100);
    put_chain(&directory, 0..3, None);
    put_chain(&directory, 10..12, None);
    remove(&directory, 0);
    remove(&directory, 10);
    touch(&directory, 1);
    touch(&directory, 11);
    assert_eq!(evict(&directory, 4, NOW), [100, 2, 1, 11]);
}

#[test]
fn a_repeated_commit_links_nothing_and_a_new_version_does() {
    let directory = directory(Policy::Prefix);
    put_chain(&directory, 0..2, None);
    remove(&directory, 0);
    put(&directory, 0);
    touch(&directory, 1);
    // A repeated commit is refused.
    let again = NewBlock {
        version: Version(2),
        ..child(&directory, 1, 0)
    };
    assert!(directory.publish(vec![again]).remove(0).id.is_none());
    assert_eq!(evict(&directory, 1, NOW), [0]);
    put(&directory, 0);
    put_block(
        &directory,
        NewBlock {
            version: Version(50),
            ..child(&directory, 1, 0)
        },
    );
    assert_eq!(evict(&directory, 1, NOW), [1]);
}

#[test]
fn a_new_version_keeps_the_place_in_the_chain() {
    let directory = directory(Policy::Prefix);
    put_chain(&directory, 0..3, None);
    for n in [0, 1] {
        put_block(
            &directory,
            NewBlock {
                version: Version(50),
                ..block(&directory, n)
            },
        );
    }
    assert_eq!(evict(&directory, 3, NOW), [2, 1, 0]);
}

/// The parent came back after the block's first version, which was put without it.
#[test]
fn a_new_version_finds_the_parent_that_the_old_one_lacked() {
    let directory = directory(Policy::Prefix);
    directory.publish([child(&directory, 1, 0)]);
    put_block(&directory, block(&directory, 0));
    let again = NewBlock {
        version: Version(50),
        ..child(&directory, 1, 0)
    };
    directory.publish([again]);
    put_block(&directory, block(&directory, 2));
    assert_eq!(evict(&directory, 2, NOW), [1, 0]);
}

#[test]
fn links_that_would_close_a_cycle_are_refused() {
    let directory = directory(Policy::Prefix);
    let circle: Vec<NewBlock> = (0..6).map(|n| child(&directory, n, (n + 1) % 6)).collect();
    directory.publish(circle);
    let order = evict(&directory, 6, NOW);
    assert_eq!(order.len(), 6, "a circle would never go");
}

#[test]
fn a_batch_links_its_blocks_in_whatever_order_they_come() {
    let directory = directory(Policy::Prefix);
    let blocks: Vec<NewBlock> = (0..200)
        .map(|n| child(&directory, n, n.max(1) - 1))
        .collect();
    let mut shuffled = blocks;
    shuffled.sort_by_key(|block| number(&block.key).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    directory.publish(shuffled);
    assert_eq!(
        evict(&directory, 200, NOW),
        (0..200).rev().collect::<Vec<_>>()
    );
}

#[test]
fn however_long_a_chain_is_its_links_come_in_any_order() {
    let directory = directory(Policy::Prefix);
    let length = 6000;
    let ids: Vec<BlockId> = (0..length)
        .map(|n| put_block(&directory, block(&directory, n)))
        .collect();
    let parents: Vec<Key> = (0..length).map(key).collect();
    let mut links: Vec<Link<'_>> = (1..ids.len())
        .map(|n| Link {
            namespace: NS,
            block: ids[n],
            version: Version(n as u64 + 1),
            parent: parents[n - 1].as_ref(),
        })
        .collect();
    // The second to last link comes last: its block already has a child, and a long chain above.
    let late = links.len() - 2;
    links[late..].reverse();
    directory.link(&mut links);
    assert_eq!(
        evict(&directory, length, NOW),
        (0..length).rev().collect::<Vec<_>>()
    );
}

#[test]
fn a_late_report_of_a_lost_child_does_not_expose_a_parent_with_another_child() {
    let directory = directory(Policy::Prefix);
    let id = put_block(&directory, block(&directory, 0));
    put_block(&directory, child(&directory, 1, 0));
    // The work of a thread that removed another child of block 0 before block 1 was linked.
    let leaves = vec![id];
    directory.apply_aftermath(super::super::lineage::Aftermath {
        leaves,
        ..Default::default()
    });
    assert_eq!(evict(&directory, 1, NOW), [1]);
}

#[derive(Clone, Debug)]
enum Step {
    Put(u64, Option<u64>),
    Touch(u64),
    Lease(u64, u64),
    Remove(u64),
    Wait(u64),
    Evict(u64),
}

const KEYS: u64 = 40;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// A model of the links, and of the blocks that may be evicted.
    #[test]
    fn blocks_are_evicted_after_their_descendants_and_every_evictable_block_is(
        steps in proptest::collection::vec(prop_oneof![
            6 => (0..KEYS, proptest::option::weighted(0.8, 0..KEYS)).prop_map(|(n, p)| Step::Put(n, p)),
            2 => (0..KEYS).prop_map(Step::Touch),
            2 => (0..KEYS, 1..100u64).prop_map(|(n, ttl)| Step::Lease(n, ttl)),
            1 => (0..KEYS).prop_map(Step::Remove),
            2 => (1..50u64).prop_map(Step::Wait),
            2 => (1..8u64).prop_map(Step::Evict),
        ], 1..150)
    ) {
        let directory = directory(Policy::Prefix);
        let mut parents: BTreeMap<u64, Option<u64>> = BTreeMap::new();
        let mut leases: BTreeMap<u64, u64> = BTreeMap::new();
        let mut now = NOW.0;
        let forget = |parents: &mut BTreeMap<u64, Option<u64>>, n: u64| {
            parents.remove(&n);
            for parent in parents.values_mut() {
                *parent = parent.filter(|parent| *parent != n);
            }
        };
        for step in steps {
            match step {
                Step::Put(n, parent) => {
                    let new = NewBlock { parent: parent.map(key), ..block(&directory, n) };
                    let published = directory.publish(vec![new]).remove(0).id.is_some();
                    prop_assert_eq!(published, !parents.contains_key(&n));
                    if published {
                        let parent = parent.filter(|p| *p != n && parents.contains_key(p));
                        parents.insert(n, parent);
                        leases.remove(&n);
                    }
                }
                Step::Touch(n) => {
                    let tick = directory.ticks(1).of(0);
                    with(&directory, n, |mut block| block.touch(tick));
                }
                Step::Lease(n, ttl) => {
                    if parents.contains_key(&n) {
                        lease(&directory, n, BootInstant(now + ttl), BootInstant(now));
                        let until = leases.entry(n).or_default();
                        *until = (*until).max(now + ttl);
                    }
                }
                Step::Remove(n) => {
                    remove(&directory, n);
                    forget(&mut parents, n);
                }
                Step::Wait(time) => now += time,
                Step::Evict(count) => {
                    let gone = evict(&directory, count, BootInstant(now));
                    for n in &gone {
                        prop_assert!(parents.values().all(|parent| *parent != Some(*n)), "{n} has children");
                        prop_assert!(leases.get(n).is_none_or(|until| *until <= now), "{n} is leased");
                        forget(&mut parents, *n);
                    }
                    if (gone.len() as u64) < count {
                        // The remaining blocks are leased, or are ancestors of a leased block.
                        let mut held: HashSet<u64> = parents
                            .keys()
                            .filter(|n| leases.get(n).is_some_and(|until| *until > now))
                            .copied()
                            .collect();
                        for mut n in held.clone() {
                            while let Some(Some(parent)) = parents.get(&n) {
                                held.insert(*parent);
                                n = *parent;
                            }
                        }
                        prop_assert!(parents.keys().all(|n| held.contains(n)), "more could have gone");
                    }
                }
            }
        }
        let left = parents.len() as u64;
        prop_assert_eq!(evict(&directory, 1000, BootInstant(now + 1000)).len() as u64, left);
        prop_assert_eq!(directory.linked(), 0);
    }
}
