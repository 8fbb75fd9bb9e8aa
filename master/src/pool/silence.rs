//! Whether a silence is a node's own, or this master is cut off.

use super::Pool;
use crate::clock::BootInstant;
use crate::membership::StoreNode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A leader that hears nothing for this long may be cut off.
pub const SILENCE: Duration = Duration::from_secs(2);

/// The value of `hears_nobody_since` while the master hears a client or a node.
pub(super) const HEARS_SOMEBODY: u64 = u64::MAX;

impl Pool {
    /// Records that a client called this master directly.
    pub fn heard_client(&self) {
        self.heard_client.store(self.now().0, Ordering::Relaxed);
        self.end_own_silence();
    }

    /// The time since a client last called this master directly, or since the term began.
    pub fn client_silence(&self) -> Duration {
        let heard = BootInstant(self.heard_client.load(Ordering::Relaxed));
        self.now().since(heard)
    }

    /// True if no client called this master for [`SILENCE`], and fewer than half of the nodes
    /// talked to it. Then this master itself may be cut off.
    pub fn hears_few(&self) -> bool {
        if self.client_silence() < SILENCE {
            return false;
        }
        let nodes = self.members.all();
        let now = self.now();
        let is_heard = |node: &&Arc<StoreNode>| now.since(node.last_heard()) < SILENCE;
        nodes.iter().filter(is_heard).count() * 2 < nodes.len().max(1)
    }

    /// Counts the silence of all nodes from `now` on if this check comes late, since then the
    /// machine slept or the process was stopped. The clock counts that time, but messages of live
    /// nodes are still unread.
    pub(super) fn excuse_silence(&self, now: BootInstant) {
        let last = BootInstant(self.tended.swap(now.0, Ordering::Relaxed));
        let pause = now.since(last);
        if pause <= self.config.suspect_after {
            return;
        }
        for node in self.members.all() {
            node.wait_from(now);
        }
        tracing::warn!(
            pause_ms = pause.as_millis(),
            "this master did not run for a while, so the silence of its nodes counts from now"
        );
    }

    /// Records since when the master has heard neither a client nor a node, if that is longer than
    /// usual.
    pub(super) fn watch_own_silence(&self, now: BootInstant) {
        let nodes = self.members.all();
        let heard = nodes.iter().map(|node| node.last_heard()).max();
        let Some(heard) = heard else { return };
        let heard = heard.max(BootInstant(self.heard_client.load(Ordering::Relaxed)));
        let usual = SILENCE.max(self.config.heartbeat_interval * 2);
        if now.since(heard) >= usual.min(self.config.suspect_after) {
            self.hears_nobody_since.store(heard.0, Ordering::Relaxed);
        }
    }

    /// True while the master hears neither a client nor a node.
    pub(super) fn hears_nobody(&self) -> bool {
        self.hears_nobody_since.load(Ordering::Relaxed) != HEARS_SOMEBODY
    }

    /// Ends a silence of all clients and nodes, because one of them was heard. Probably this master
    /// was cut off. So the nodes that became suspect meanwhile get time to return. Otherwise the
    /// first client to return would get misses for the blocks of nodes that return later.
    pub(super) fn end_own_silence(&self) {
        if !self.hears_nobody() {
            return;
        }
        let since = self
            .hears_nobody_since
            .swap(HEARS_SOMEBODY, Ordering::Relaxed);
        if since == HEARS_SOMEBODY {
            return;
        }
        let (since, now) = (BootInstant(since), self.now());
        let nodes = self.members.all();
        let excuse = |node: &&Arc<StoreNode>| node.excuse(since, now, self.config.suspect_after);
        let excused = nodes.iter().filter(excuse).count();
        if excused > 0 {
            tracing::warn!(
                nodes = excused,
                silent_ms = now.since(since).as_millis(),
                "this master heard nobody for a while, so its nodes get time to return"
            );
            self.changed.notify_waiters();
            self.wake_waiting_puts();
        }
    }
}
