//! Exact LRU over all stripes, compared with a model.

use super::*;
use proptest::prelude::*;
use smallvec::smallvec;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Step {
    Put {
        n: u64,
        length: u64,
        soft: Option<u64>,
        hard: bool,
        copies: usize,
    },
    Touch(Vec<u64>),
    Lease(u64, u64),
    Remove(u64),
    Wait(u64),
    Evict(u64),
}

const KEYS: u64 = 60;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let put = (
        0..KEYS,
        1..200u64,
        proptest::option::weighted(0.2, 1..300u64),
        0..20u8,
        1..4usize,
    );
    let step = prop_oneof![
        8 => put.prop_map(|(n, length, soft, hard, copies)| {
            Step::Put { n, length, soft, hard: hard == 0, copies }
        }),
        4 => proptest::collection::vec(0..KEYS, 1..100).prop_map(Step::Touch),
        3 => (0..KEYS, 1..100u64).prop_map(|(n, ttl)| Step::Lease(n, ttl)),
        1 => (0..KEYS).prop_map(Step::Remove),
        3 => (1..60u64).prop_map(Step::Wait),
        3 => (0..2000u64).prop_map(Step::Evict),
    ];
    proptest::collection::vec(step, 1..120)
}

#[derive(Clone, Copy, Debug)]
struct Model {
    tick: u64,
    bytes: u64,
    footprint: u64,
    leased: u64,
    soft: Option<u64>,
    hard: bool,
}

/// The blocks to evict, in order.
fn expected(model: &BTreeMap<u64, Model>, goal: u64, now: u64) -> Vec<u64> {
    let mut candidates: Vec<_> = model
        .iter()
        .filter(|(_, block)| !block.hard && block.leased <= now)
        .collect();
    candidates.sort_by_key(|(_, block)| (block.soft.is_some_and(|s| s > now), block.tick));
    let mut bytes = 0;
    let take = candidates.into_iter().take_while(|(_, block)| {
        let more = bytes < goal;
        bytes += block.footprint;
        more
    });
    take.map(|(n, _)| *n).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn eviction_is_exact(steps in steps()) {
        let directory = directory(Policy::Lru);
        let (mut model, mut now, mut version) = (BTreeMap::<u64, Model>::new(), NOW.0, 0);
        for step in steps {
            match step {
                Step::Put { n, length, soft, hard, copies } => {
                    version += 1;
                    let tick = directory.ticks(1).of(0);
                    put_block(&directory, NewBlock {
                        version: Version(version),
                        length: Length(length),
                        soft_pin_until: soft.map(|ttl| BootInstant(now + ttl)),
                        hard_pin: hard,
                        replicas: smallvec![replica(n); copies],
                        tick,
                        ..block(&directory, n)
                    });
                    let leased = model.get(&n).map_or(0, |block| block.leased);
                    let bytes = length * copies as u64;
                    let footprint = length.next_multiple_of(64) * copies as u64;
                    let soft = soft.map(|ttl| now + ttl);
                    model.insert(n, Model { tick: tick.0, bytes, footprint, leased, soft, hard });
                }
                Step::Touch(batch) => {
                    let ticks = directory.ticks(batch.len());
                    let keys: Vec<Key> = batch.iter().copied().map(key).collect();
                    let refs: Vec<_> = keys.iter().map(Key::as_ref).collect();
                    directory.visit(NS, &refs, |index, block| {
                        if let Some(mut block) = block {
                            block.touch(ticks.of(index));
                        }
                    });
                    for (index, n) in batch.iter().enumerate() {
                        if let Some(block) = model.get_mut(n) {
                            block.tick = block.tick.max(ticks.of(index).0);
                        }
                    }
                }
                Step::Lease(n, ttl) => {
                    if let Some(block) = model.get_mut(&n) {
                        lease(&directory, n, BootInstant(now + ttl), BootInstant(now));
                        block.leased = block.leased.max(now + ttl);
                    }
                }
                Step::Remove(n) => {
                    let there = matches!(remove(&directory, n), Removal::Removed(_));
                    prop_assert_eq!(there, model.remove(&n).is_some());
                }
                Step::Wait(time) => now += time,
                Step::Evict(goal) => {
                    let wanted = expected(&model, goal, now);
                    let evicted = directory.evict(goal, BootInstant(now), ANYWHERE);
                    let got: Vec<u64> = evicted.iter().map(|r| number(&r.key)).collect();
                    prop_assert_eq!(&got, &wanted);
                    for n in got {
                        model.remove(&n);
                    }
                }
            }
            let bytes: u64 = model.values().map(|block| block.bytes).sum();
            prop_assert_eq!(directory.blocks(), model.len() as u64);
            prop_assert_eq!(directory.bytes(), bytes);
        }
    }
}

#[test]
fn uses_that_arrive_out_of_order_are_put_in_order() {
    let directory = directory(Policy::Lru);
    for n in 0..100 {
        put(&directory, n);
    }
    // A hundred batches of one key each. They took their ticks in one order and arrive in the
    // other.
    let ticks = directory.ticks(100);
    for n in 0..100 {
        with(&directory, n, |mut block| {
            block.touch(ticks.of(usize::try_from(n).unwrap()));
        });
    }
    assert_eq!(
        evict(&directory, 100, NOW),
        (0..100).rev().collect::<Vec<_>>()
    );
}

#[test]
fn a_late_use_does_not_make_a_block_older() {
    let directory = directory(Policy::Lru);
    let early = directory.ticks(1).of(0);
    put(&directory, 1);
    put(&directory, 2);
    with(&directory, 2, |mut block| block.touch(early));
    assert_eq!(evict(&directory, 1, NOW), [1]);
}
