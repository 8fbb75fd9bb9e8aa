use super::super::entry::QueueState;
use super::*;
use crate::accounts::Item;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Puts, uses, leases, links, removals and eviction run at once. Then the counts must be
/// consistent.
#[test]
fn four_threads_at_once_leave_a_directory_that_adds_up() {
    let directory = directory(Policy::Prefix);
    let version = AtomicU64::new(1);
    let (published, gone) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (directory, version, published, gone) = (&directory, &version, &published, &gone);
            scope.spawn(move || {
                let mut random = StdRng::seed_from_u64(thread);
                for _ in 0..3000 {
                    let chain = random.random_range(0..20) * 100;
                    let at = chain + random.random_range(0..50);
                    match random.random_range(0..10) {
                        0..5 => {
                            let blocks = (at..at + 4).map(|n| NewBlock {
                                version: Version(version.fetch_add(1, Ordering::Relaxed)),
                                parent: (n > chain).then(|| key(n - 1)),
                                ..block(directory, n)
                            });
                            for outcome in directory.publish(blocks.collect::<Vec<_>>()) {
                                let new = outcome.id.is_some() && outcome.replaced.is_none();
                                published.fetch_add(u64::from(new), Ordering::Relaxed);
                            }
                        }
                        5..8 => {
                            let keys: Vec<Key> = (chain..at).map(key).collect();
                            let refs: Vec<_> = keys.iter().map(Key::as_ref).collect();
                            let ticks = directory.ticks(keys.len());
                            directory.visit(NS, &refs, |index, block| {
                                if let Some(mut block) = block {
                                    block.touch(ticks.of(index));
                                    block.lease(BootInstant(NOW.0 + 10), NOW);
                                    block.release(BootInstant(NOW.0 + 10), NOW);
                                }
                            });
                        }
                        8 => {
                            let removed = matches!(remove(directory, at), Removal::Removed(_));
                            gone.fetch_add(u64::from(removed), Ordering::Relaxed);
                        }
                        _ => {
                            let evicted = evict(directory, 10, NOW).len() as u64;
                            gone.fetch_add(evicted, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    let left = published.into_inner() - gone.into_inner();
    assert_eq!(directory.blocks(), left);
    assert_eq!(directory.bytes(), left * SIZE);
    let mut seen = 0;
    assert_eq!(directory.scan(&[], usize::MAX, |_| seen += 1), Ok(None));
    assert_eq!(seen, left);
    for cell in &directory.stripes {
        let stripe = cell.lock();
        for slot in 0..stripe.entries.high() {
            let Some(entry) = stripe.entries.get(slot) else {
                continue;
            };
            let node = stripe.entries.rest(slot).lineage;
            let has_children = directory.common.lineage.lock().has_children(node);
            let waits = matches!(
                entry.queue_state(),
                QueueState::Inner | QueueState::RootWithChildren
            );
            assert_eq!(has_children, waits, "who has children waits for them to go");
        }
    }
    // Nothing is stuck: every block can be evicted, each after its descendants.
    assert_eq!(evict(&directory, left + 1, NOW).len() as u64, left);
    assert_eq!(
        (directory.blocks(), directory.bytes(), directory.linked()),
        (0, 0, 0)
    );
}

/// Quotas read the accounts without a lock, so a block must be counted at every moment.
#[test]
fn a_block_whose_replicas_change_is_counted_all_the_while() {
    let directory = directory(Policy::Prefix);
    put(&directory, 1);
    let second = Replica {
        segment: SegmentId(2),
        ..replica(2)
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let account = directory.accounts().of(NS);
            let mut least = (u64::MAX, u64::MAX);
            while !is_over.load(Ordering::Relaxed) {
                let (blocks, resident) = (account.get(Item::Blocks), account.get(Item::Resident));
                least = (least.0.min(blocks), least.1.min(resident));
            }
            least
        });
        for version in 0..20_000 {
            let key = key(1);
            directory.add_replica(NS, key.as_ref(), Version(2 + version), second);
            directory.drop_replica(NS, key.as_ref(), Version(2 + version), SegmentId(2));
            put_block(
                &directory,
                NewBlock {
                    version: Version(3 + version),
                    ..block(&directory, 1)
                },
            );
        }
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(reader.join().unwrap(), (1, SIZE));
    });
}
