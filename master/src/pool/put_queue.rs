//! The line of puts that wait for room.
//!
//! Demands stand in line by class, and within a class in the order in which they came. While anybody stands in
//! line, nobody who comes later takes room. A put is called when the free room covers its demand and the demands
//! before it. A put that is called makes one pass over its own batch and leaves, or stays where it stands.
//!
//! A demand may be larger than eviction can make room for while leases run. The first in line therefore keeps
//! its place for [`HOLD`] at most after eviction has made room last. It then takes what there is. If that is
//! nothing, it stands behind the others.
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

/// How long a demand that cannot be met keeps those behind it waiting.
const HEAD_WAIT: Duration = Duration::from_millis(500);

/// Which demands go first. There is one class today.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    /// Every put.
    #[default]
    Put,
}

/// The room that a put asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    /// The bytes of all copies of all its open blocks.
    pub(super) bytes: u64,
    /// The largest of the blocks: it needs room in one piece.
    pub(super) largest: u64,
    /// The nodes that each block needs room on.
    pub(super) copies: usize,
    /// When the put gives up.
    pub(super) until: BootInstant,
}

impl Demand {
    /// The bytes that are to be free before the put is called: its largest block, and as much of the rest as is within
    /// `most`. A put of more is served in parts, so that it neither empties the pool nor holds the others up.
    pub(super) fn counted(&self, most: u64) -> u64 {
        let one = self.largest.saturating_mul(self.copies.max(1) as u64);
        self.bytes.min(most.max(one))
    }
}

/// The most bytes that demands count for at a time, in a pool that holds `limit` bytes.
pub(super) const fn counted_at_once(limit: u64) -> u64 {
    limit / 8
}

#[derive(Debug)]
struct Waiter {
    number: u64,
    class: Class,
    demand: Demand,
    woken: bool,
    /// Since when it is the first in queue.
    first_since: Option<BootInstant>,
    turn: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Queue {
    next: u64,
    waiters: VecDeque<Waiter>,
}

/// Every put that waits for room.
#[derive(Debug, Default)]
pub(super) struct PutQueue {
    state: Mutex<Queue>,
    length: AtomicUsize,
}

/// The demands that eviction works for next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QueuedDemand {
    /// The first in line, by its number.
    pub(super) first: u64,
    /// What it asks for.
    pub(super) demand: Demand,
    /// The bytes of the first in line and of some after it.
    pub(super) bytes: u64,
    /// When the first of these gives up.
    pub(super) until: BootInstant,
}

/// A put's place in queue. It leaves the line when this is dropped.
pub(super) struct QueuedPut<'a> {
    pool: &'a Pool,
    number: u64,
    turn: Arc<Notify>,
}

impl QueuedPut<'_> {
    /// Waits until the put is called.
    pub(super) async fn woken(&self) {
        self.turn.notified().await;
    }

    /// Notes what the put still asks for after a pass. It may be called again.
    pub(super) fn set_demand(&self, demand: Demand) {
        let mut state = self.pool.put_queue.state.lock();
        let mine = |waiter: &&mut Waiter| waiter.number == self.number;
        if let Some(waiter) = state.waiters.iter_mut().find(mine) {
            waiter.demand = demand;
            waiter.woken = false;
        }
    }
}

impl Drop for QueuedPut<'_> {
    fn drop(&mut self) {
        let queue = &self.pool.put_queue;
        let mut state = queue.state.lock();
        state.waiters.retain(|waiter| waiter.number != self.number);
        queue.length.store(state.waiters.len(), Ordering::Release);
        drop(state);
        self.pool.wake_waiting_puts();
    }
}

impl PutQueue {
    /// Whether nobody waits for room.
    pub(super) fn is_empty(&self) -> bool {
        self.length.load(Ordering::Acquire) == 0
    }

    /// Calls everybody, at the term's end.
    pub(super) fn wake_all(&self) {
        for waiter in &self.state.lock().waiters {
            waiter.turn.notify_one();
        }
    }

    /// Notes that eviction has made room: the first in line is about to be served.
    pub(super) fn progress(&self, now: BootInstant) {
        if let Some(first) = self.state.lock().waiters.front_mut() {
            first.first_since = Some(now);
        }
    }

    /// The demand of the first in line, and of those after it as long as all together are within `most`.
    pub(super) fn demanded(&self, most: u64) -> Option<QueuedDemand> {
        let state = self.state.lock();
        let first = state.waiters.front()?;
        let mut demanded = QueuedDemand {
            first: first.number,
            demand: first.demand,
            bytes: first.demand.counted(most),
            until: first.demand.until,
        };
        for waiter in state.waiters.iter().skip(1) {
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
    /// Stands a put in queue.
    pub(super) fn enqueue_put(&self, class: Class, demand: Demand) -> QueuedPut<'_> {
        let turn = Arc::new(Notify::new());
        let mut state = self.put_queue.state.lock();
        state.next += 1;
        let number = state.next;
        let waiter = Waiter {
            number,
            class,
            demand,
            woken: false,
            first_since: None,
            turn: Arc::clone(&turn),
        };
        let behind = state.waiters.partition_point(|other| other.class <= class);
        state.waiters.insert(behind, waiter);
        let length = state.waiters.len();
        self.put_queue.length.store(length, Ordering::Release);
        drop(state);
        self.metrics.put_waits();
        // Room may have come between the pass that found none and now.
        self.wake_waiting_puts();
        self.evictor_wake.wake();
        QueuedPut {
            pool: self,
            number,
            turn,
        }
    }

    /// Calls the puts whose demands the free room covers, first come first served. Neither the segments nor the
    /// reservations may be locked.
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
        while let Some(waiter) = state.waiters.get_mut(at) {
            let demand = waiter.demand;
            let bytes = demand.counted(most);
            if !waiter.woken {
                let fits = || {
                    segments.gives_room_on(Length(demand.largest), demand.copies) >= demand.copies
                };
                if bytes > room || !fits() {
                    break;
                }
                waiter.woken = true;
                waiter.turn.notify_one();
                self.metrics.put_called();
            }
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
            // It takes what there is.
            first.first_since = None;
            first.woken = true;
            first.turn.notify_one();
            self.metrics.put_called();
            let class = first.class;
            let behind = state.waiters.partition_point(|other| other.class <= class);
            if behind > 1
                && let Some(first) = state.waiters.pop_front()
            {
                state.waiters.insert(behind - 1, first);
            }
        }
    }
}
