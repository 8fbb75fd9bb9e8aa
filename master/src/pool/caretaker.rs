//! The thread that watches clocks: ended grants, ended leases on freed extents, silent nodes.
//! It also sweeps the blocks of dropped nodes out of the directory.

use super::Pool;
use crate::clock::BootInstant;
use kvpool_types::ClientId;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const TICK: Duration = Duration::from_millis(20);
/// For how long dropped nodes are swept before clocks are looked at again.
const SWEEP: Duration = Duration::from_millis(10);

/// Starts the thread.
pub(super) fn start(pool: &Arc<Pool>) -> std::io::Result<()> {
    let pool = Arc::clone(pool);
    std::thread::Builder::new()
        .name("caretaker".into())
        .spawn(move || {
            while !pool.is_stopping() {
                pool.tend();
                if !pool.sweep(SWEEP) {
                    std::thread::sleep(TICK);
                }
            }
        })?;
    Ok(())
}

/// A framed connection of a client. Dropped, it is closed.
#[derive(Debug)]
pub struct Presence {
    pool: Arc<Pool>,
    client: ClientId,
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.pool.writers.leave(self.client, self.pool.now());
    }
}

impl Pool {
    /// Whether the term lasts. Once it does not, nodes are let go, so that they look for another leader, and
    /// whoever waits for the store is told;
    /// when it is confirmed after all they are given the time to come back.
    fn mind_term(&self, now: BootInstant) -> bool {
        let leads = self.leads();
        if self.leading.swap(leads, Ordering::AcqRel) != leads {
            self.lapse_told.notify_waiters();
            for node in self.members.all() {
                if leads {
                    node.wait_from(now);
                } else {
                    node.hang_up();
                }
            }
            tracing::warn!(epoch = %self.epoch, leads, "the term was confirmed late, or was not");
        }
        leads
    }

    /// Ends the puts of clients that died: others need not wait for their keys until the grants end.
    fn end_puts_of_gone(&self, now: BootInstant) {
        // Locked first: the next put of a client that comes back meanwhile is not among those that end.
        let mut reservations = self.reservations.lock();
        let gone = self.writers.take_gone(now);
        if gone.is_empty() {
            return;
        }
        let ended = reservations.take_of(&gone);
        drop(reservations);
        if !ended.is_empty() {
            tracing::info!(
                clients = gone.len(),
                puts = ended.len(),
                "clients are gone, their connections closed: their unfinished puts are ended"
            );
        }
        self.end_reservations(ended);
    }

    /// Notes that a client has a framed connection until what this returns is dropped.
    pub fn enter_writer(self: &Arc<Self>, client: ClientId) -> Presence {
        self.writers.enter(client);
        Presence {
            pool: Arc::clone(self),
            client,
        }
    }

    fn tend(self: &Arc<Self>) {
        let now = self.now();
        self.check_nodes_returned();
        // Without a term nothing is given up: it could not be made durable.
        if !self.mind_term(now) {
            return;
        }
        let expired = self.reservations.take_expired(now);
        self.metrics.grants_expired(expired.len());
        self.end_reservations(expired);
        self.end_puts_of_gone(now);
        self.quarantine.tick(now);
        for node in self.members.all() {
            self.quarantine.mark_stuck(&node, now);
        }
        self.top_up_versions();
        let Self {
            members, config, ..
        } = &**self;
        let broken_after = config.suspect_after.min(config.heartbeat_interval * 2);
        for node in members.judge(now, config.suspect_after, broken_after, config.drop_after) {
            tracing::warn!(node = %node.name, "node has been silent for too long: it is dropped");
            self.drop_node(&node);
        }
        // Room also comes without an event: a node takes blocks again, a demand has held the line for long enough.
        self.wake_waiting_puts();
        self.metrics.watch_usage(&self.placement.usage(), TICK);
    }
}
