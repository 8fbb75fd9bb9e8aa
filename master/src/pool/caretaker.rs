//! The thread for time-outs: ended grants, ended leases on freed extents, silent nodes. It also
//! sweeps the blocks of dropped nodes out of the directory.

use super::Pool;
use crate::clock::BootInstant;
use crate::workers::Workers;
use kvpool_types::ClientId;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const TICK: Duration = Duration::from_millis(20);
/// How long one sweep of dropped nodes may delay the next check of time-outs.
const SWEEP: Duration = Duration::from_millis(10);

/// Starts the caretaker.
pub(super) fn start(pool: &Arc<Pool>, workers: Workers) -> std::io::Result<()> {
    workers.start(
        pool,
        "caretaker",
        |pool| &pool.caretaker_wake,
        Duration::ZERO,
        |pool| {
            pool.tend();
            if pool.sweep(SWEEP) {
                Duration::ZERO
            } else {
                TICK
            }
        },
    )
}

/// A framed connection of a client. The connection counts as closed on drop.
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
    /// Returns whether the term is within its deadline. Past the deadline the pool ends the nodes'
    /// sessions, so that the nodes look for another leader, and ends all waits for the store. If
    /// the term is renewed later, the nodes get time to return.
    fn check_term(&self, now: BootInstant) -> bool {
        let leads = self.leads();
        if self.leading.swap(leads, Ordering::AcqRel) != leads {
            self.lapse_told.notify_waiters();
            self.tiering.wake_lookups();
            for node in self.members.all() {
                if leads {
                    node.wait_from(now);
                } else {
                    node.end_session(now);
                }
            }
            if leads {
                tracing::info!(epoch = %self.epoch, "leader lease renewed, resuming");
            } else {
                tracing::warn!(epoch = %self.epoch, "leader lease expired, read-only");
            }
        }
        leads
    }

    /// Ends the open puts of dead clients, so that other puts of these keys need not wait until the
    /// grants expire.
    fn end_puts_of_gone(&self, now: BootInstant) {
        // The reservations are locked first, so that a client that reconnects meanwhile keeps its
        // put.
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
                "clients gone, their open puts ended"
            );
        }
        self.end_reservations(ended);
    }

    /// Records a framed connection of a client until the result is dropped.
    pub fn enter_writer(self: &Arc<Self>, client: ClientId) -> Presence {
        self.writers.enter(client);
        Presence {
            pool: Arc::clone(self),
            client,
        }
    }

    fn tend(self: &Arc<Self>) {
        let now = self.now();
        self.excuse_silence(now);
        self.check_nodes_returned();
        self.count_failed_puts(now);
        // Past its deadline the term frees nothing, because it could not make that durable.
        if !self.check_term(now) {
            return;
        }
        let expired = self.reservations.take_expired(now);
        self.metrics.grants_expired(expired.len());
        self.end_reservations(expired);
        self.end_puts_of_gone(now);
        self.quarantine.tick(now, |over| self.log_unleased(over));
        for node in self.members.all() {
            self.quarantine.mark_stuck(&node, now);
        }
        self.top_up_versions();
        let Self {
            members, config, ..
        } = &**self;
        let (mut suspect_after, mut broken_after) = (
            config.suspect_after,
            config.suspect_after.min(config.heartbeat_interval * 2),
        );
        // A leader that may itself be cut off resigns soon. Until then standbys forward reads to
        // it, and these reads must find the blocks of healthy nodes.
        if self.term_left().is_some() && self.hears_few() {
            suspect_after *= 2;
            broken_after = suspect_after;
        }
        self.watch_own_silence(now);
        // If all nodes are silent at once, this master is probably cut off.
        let drop_after = match self.hears_nobody() && members.count() > 1 {
            true => Duration::MAX,
            false => config.drop_after,
        };
        let judged = members.judge(now, suspect_after, broken_after, drop_after);
        if judged.has_suspect {
            self.doubt_drained();
            // The media of a suspect node cannot be read.
            self.tiering.wake_lookups();
        }
        for node in judged.lost {
            tracing::warn!(node = %node.name, "node silent for too long, dropping it");
            self.metrics.node_dropped();
            self.drop_node(&node);
        }
        // Room also appears without an event: a node takes blocks again, or the time of the put at
        // the head of the queue ends.
        self.wake_waiting_puts();
        self.metrics.watch_usage(&self.placement.usage(), TICK);
        self.metrics.watch_puts(self.put_queue.len());
        let nodes = members.all();
        let labels: Vec<_> = nodes.iter().map(|node| self.state_label(node)).collect();
        self.metrics.watch_nodes(&labels);
        self.metrics.watch_left_blocks(&nodes);
        self.metrics.watch_media(self.bytes_due());
        let unused = self.unused_media().len();
        self.metrics.watch_each_medium(&self.media(), unused);
    }
}
