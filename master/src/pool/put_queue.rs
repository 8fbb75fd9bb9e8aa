//! The queue of puts that wait for room.
//!
//! Puts are served in the order of their arrival. While a put waits, later puts take no room. A
//! put is woken when the free room covers its demand and the demands before it. A woken put makes
//! one pass over its batch. It then leaves the queue, or stays at its position.
//!
//! The passes of woken puts run in any order. A put must not take the contiguous range that the put
//! before it needs. So a second put is woken only while the longest free range has room for both.
//!
//! Eviction may be unable to make room for a large demand while leases run. So the put at the head
//! stays there for at most [`HEAD_WAIT`] after eviction last made room. It is then woken to take
//! the room that is free, and moves behind the other puts.
//!
//! Eviction makes no room for a woken put. It is taking free room, which becomes used room during its
//! pass. So its demand would count twice.
//!
//! ADR 0022 says why waiting puts form a queue.

use super::Pool;
use crate::clock::BootInstant;
use kvpool_types::Length;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// How long a demand that cannot be met may block the puts behind it.
const HEAD_WAIT: Duration = Duration::from_millis(500);

/// The room that a put needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    /// The bytes of all replicas of all its open blocks.
    pub(super) bytes: u64,
    /// The length of the largest block, which needs contiguous room.
    pub(super) largest: u64,
    /// The number of nodes that each block needs room on.
    pub(super) copies: usize,
    /// The time at which the put gives up.
    pub(super) until: BootInstant,
}

impl Demand {
    /// The bytes that must be free before the put is woken: its largest block, and as much of the
    /// rest as `most` allows. A larger put is served in parts, so that it neither empties the pool
    /// nor blocks other puts.
    pub(super) fn counted(&self, most: u64) -> u64 {
        let one = self.largest.saturating_mul(self.copies.max(1) as u64);
        self.bytes.min(most.max(one))
    }
}

/// The most bytes of demands that count at once, in a pool that may use `limit` bytes.
pub(super) const fn counted_at_once(limit: u64) -> u64 {
    limit / 8
}

#[derive(Debug)]
struct Waiter {
    number: u64,
    demand: Demand,
    woken: bool,
    /// The number of passes that did not serve the put.
    passes: u64,
    /// The time since which the put is at the head.
    first_since: Option<BootInstant>,
    turn: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Queue {
    next: u64,
    waiters: VecDeque<Waiter>,
}

/// Every waiting put.
#[derive(Debug, Default)]
pub(super) struct PutQueue {
    state: Mutex<Queue>,
    length: AtomicUsize,
}

/// The demands that eviction serves next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QueuedDemand {
    /// The number of the first put that is not woken.
    pub(super) first: u64,
    /// The number of that put's passes that did not serve it. Other puts have taken the room that
    /// was made before the last pass.
    pub(super) passes: u64,
    /// That put's demand.
    pub(super) demand: Demand,
    /// The bytes of that put and of some puts behind it.
    pub(super) bytes: u64,
    /// The earliest time at which one of these puts gives up.
    pub(super) until: BootInstant,
}

/// A put's position in the queue. The put leaves the queue on drop.
pub(super) struct QueuedPut<'a> {
    pool: &'a Pool,
    number: u64,
    turn: Arc<Notify>,
}

impl QueuedPut<'_> {
    /// Waits until the put is woken.
    pub(super) async fn woken(&self) {
        self.turn.notified().await;
    }

    /// Updates the demand after a pass. `called`: the put was woken for this pass, and may be woken
    /// again. A put that is woken during another pass stays woken, since its next pass takes room.
    pub(super) fn set_demand(&self, demand: Demand, called: bool) {
        let mut state = self.pool.put_queue.state.lock();
        let mine = |waiter: &&mut Waiter| waiter.number == self.number;
        if let Some(waiter) = state.waiters.iter_mut().find(mine) {
            waiter.demand = demand;
            if called {
                waiter.passes += u64::from(waiter.woken);
                waiter.woken = false;
            }
        }
        drop(state);
        // The put was not served, so eviction must make room for it again.
        self.pool.evictor_wake.wake();
    }
}

impl Drop for QueuedPut<'_> {
    fn drop(&mut self) {
        let queue = &self.pool.put_queue;
        let mut state = queue.state.lock();
        let waiting = state.waiters.len();
        state.waiters.retain(|waiter| waiter.number != self.number);
        debug_assert_eq!(
            state.waiters.len() + 1,
            waiting,
            "invariant: a put leaves the queue once"
        );
        queue.length.store(state.waiters.len(), Ordering::Release);
        drop(state);
        self.pool.wake_waiting_puts();
        if !queue.is_empty() {
            // The room that this put took is not free for the others.
            self.pool.evictor_wake.wake();
        }
    }
}

impl PutQueue {
    /// True when no put waits.
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of waiting puts.
    pub(super) fn len(&self) -> usize {
        self.length.load(Ordering::Acquire)
    }

    /// Wakes every put, at the term's end.
    pub(super) fn wake_all(&self) {
        for waiter in &self.state.lock().waiters {
            waiter.turn.notify_one();
        }
    }

    /// Records that eviction made room, which restarts the time of the put at the head.
    pub(super) fn progress(&self, now: BootInstant) {
        if let Some(first) = self.state.lock().waiters.front_mut() {
            first.first_since = Some(now);
        }
    }

    /// The demand of the first put that is not woken, together with the demands behind it while
    /// their sum is at most `most` bytes.
    pub(super) fn demanded(&self, most: u64) -> Option<QueuedDemand> {
        let state = self.state.lock();
        let mut waiting = state.waiters.iter().filter(|waiter| !waiter.woken);
        let first = waiting.next()?;
        let mut demanded = QueuedDemand {
            first: first.number,
            passes: first.passes,
            demand: first.demand,
            bytes: first.demand.counted(most),
            until: first.demand.until,
        };
        for waiter in waiting {
            let bytes = demanded.bytes.saturating_add(waiter.demand.counted(most));
            if bytes > most {
                break;
            }
            demanded.bytes = bytes;
            demanded.until = demanded.until.min(waiter.demand.until);
        }
        Some(demanded)
    }
}

impl Pool {
    /// Adds a put to the queue.
    pub(super) fn enqueue_put(&self, demand: Demand) -> QueuedPut<'_> {
        debug_assert!(
            demand.bytes >= demand.largest && demand.largest > 0,
            "invariant: a demand covers its largest block"
        );
        let turn = Arc::new(Notify::new());
        let mut state = self.put_queue.state.lock();
        state.next += 1;
        let number = state.next;
        let waiter = Waiter {
            number,
            demand,
            woken: false,
            passes: 0,
            first_since: None,
            turn: Arc::clone(&turn),
        };
        state.waiters.push_back(waiter);
        let length = state.waiters.len();
        self.put_queue.length.store(length, Ordering::Release);
        drop(state);
        self.metrics.put_waits();
        // Room may have appeared since the put's last pass.
        self.wake_waiting_puts();
        self.evictor_wake.wake();
        QueuedPut {
            pool: self,
            number,
            turn,
        }
    }

    /// Wakes the puts whose demands fit into the free room, first come, first served. The caller
    /// must hold neither the segments' lock nor the reservations' lock.
    pub(super) fn wake_waiting_puts(&self) {
        if self.put_queue.is_empty() {
            return;
        }
        let now = self.now();
        let segments = self.placement.segments();
        let usage = segments.usage();
        let mut room = usage.limit.saturating_sub(usage.used);
        let most = counted_at_once(usage.limit);
        let mut state = self.put_queue.state.lock();
        let mut at = 0;
        // The largest blocks of the woken puts.
        let mut promised = 0_u64;
        while let Some(waiter) = state.waiters.get_mut(at) {
            let demand = waiter.demand;
            let bytes = demand.counted(most);
            if !waiter.woken {
                let range = match promised {
                    0 => demand.largest,
                    _ => promised.saturating_add(demand.bytes),
                };
                let fits = || segments.gives_room_on(Length(range), demand.copies) >= demand.copies;
                if bytes > room || !fits() {
                    break;
                }
                waiter.woken = true;
                waiter.turn.notify_one();
                self.metrics.put_called();
            }
            promised = promised.saturating_add(demand.largest);
            room = room.saturating_sub(bytes);
            at += 1;
        }
        if at > 0 {
            return;
        }
        let Some(first) = state.waiters.front_mut() else {
            return;
        };
        if now.since(*first.first_since.get_or_insert(now)) >= HEAD_WAIT {
            // The put takes the room that is free.
            first.first_since = None;
            first.woken = true;
            first.turn.notify_one();
            self.metrics.put_called();
            // It moves behind the others.
            state.waiters.rotate_left(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::BootClock;
    use crate::config::Config;
    use crate::membership::{NodeState, StoreNode};
    use crate::metrics::Metrics;
    use crate::placement::Segment;
    use crate::store::{EmbeddedOptions, EmbeddedStore};
    use kvpool_types::{GrantKey, Incarnation, NodeName, SegmentId};

    const MIB: u64 = 1 << 20;

    /// Another put of its key ends, for example, while the put is woken.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_put_that_is_woken_during_another_pass_stays_woken_until_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let clock = Arc::new(BootClock);
        let pool = Pool::start(Config::default(), Arc::new(store), clock, metrics);
        let pool = pool.await.unwrap();
        let (name, key) = (NodeName("n".into()), GrantKey([1; 32]));
        let node = Arc::new(StoreNode::new(name, Incarnation(1), key, pool.now()));
        node.set_state(NodeState::Live);
        let segment = Segment::new(SegmentId(1), node, Length(MIB), 1.0);
        pool.placement.insert(Arc::new(segment));
        let state = || {
            let state = pool.put_queue.state.lock();
            let waiter = state.waiters.front().unwrap();
            (waiter.woken, waiter.passes)
        };
        let demand = |bytes| Demand {
            bytes,
            largest: bytes,
            copies: 1,
            until: BootInstant(u64::MAX),
        };
        // The room is free.
        let queued = pool.enqueue_put(demand(4096));
        assert_eq!(state(), (true, 0));
        queued.set_demand(demand(8192), false);
        assert_eq!(state(), (true, 0), "eviction would make room for it too");
        queued.woken().await;
        // No room of this length comes, and the put is at the head for less than `HEAD_WAIT`.
        queued.set_demand(demand(2 * MIB), true);
        assert_eq!(state().1, 1);
        drop(queued);
        assert!(pool.put_queue.is_empty());
        pool.retire().await;
    }

    #[test]
    fn eviction_makes_no_room_for_woken_puts() {
        let queue = PutQueue::default();
        let add = |number: u64, woken| {
            let waiter = Waiter {
                number,
                demand: Demand {
                    bytes: number * 10,
                    largest: number * 10,
                    copies: 1,
                    until: BootInstant(100 - number),
                },
                woken,
                passes: 0,
                first_since: None,
                turn: Arc::default(),
            };
            queue.state.lock().waiters.push_back(waiter);
        };
        assert_eq!(queue.demanded(100), None);
        add(1, true);
        assert_eq!(queue.demanded(100), None);
        add(2, false);
        add(3, true);
        add(4, false);
        let demanded = queue.demanded(100).unwrap();
        assert_eq!((demanded.first, demanded.demand.bytes), (2, 20));
        assert_eq!((demanded.bytes, demanded.until), (60, BootInstant(96)));
    }
}
