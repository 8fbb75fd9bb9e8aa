//! Whether a drain may begin, and whether it is complete.
//!
//! A draining node is *drained* while no task moves its blocks and a stop would lose none of them.
//! The mover looks at the blocks of draining nodes from time to time. A doubt voids all earlier
//! looks. It arises when a task begins, when a node leaves or is suspect, and when a medium is
//! lost.

use super::{Pool, TaskRefused};
use crate::clock::BootInstant;
use crate::membership::{NodeState, StoreNode};
use kvpool_types::Code;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// The least time between two looks at the blocks of draining nodes.
const LOOK: Duration = Duration::from_secs(1);
/// The least time between two looks, as a multiple of the last look's duration. A look scans all
/// blocks, and the mover has other work.
const LOOK_REST: u32 = 20;
/// How long a drain waits for the next session of its node before it begins. A node that has died is usually suspect by
/// then.
const SETTLES: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(20);

impl Pool {
    /// Waits while a node without a session is not suspect yet. The caller of a drain then sees at once that a dead
    /// node is silent.
    pub(super) async fn session_settles(&self, node: &StoreNode) {
        let until = Instant::now() + SETTLES;
        let may_be_dead = || node.is_readable() && !node.is_connected();
        while may_be_dead() && Instant::now() < until && !self.is_stopping() {
            sleep(POLL).await;
        }
    }

    /// Refuses the drain of the last node that takes blocks, if blocks would leave with it. A node
    /// that already drains takes no blocks, so a repeated drain is not refused.
    pub(super) async fn check_drain(
        self: &Arc<Self>,
        node: &Arc<StoreNode>,
        force: bool,
        media: bool,
    ) -> Result<(), TaskRefused> {
        let takes = |other: &Arc<StoreNode>| !Arc::ptr_eq(other, node) && other.pulls_now();
        if force || node.drains() || self.members.all().iter().any(takes) {
            return Ok(());
        }
        let (pool, of) = (Arc::clone(self), Arc::clone(node));
        let count = move || {
            let on_media = if media {
                pool.count_only_on_media(&of, u64::MAX)
            } else {
                0
            };
            pool.only_in_memory_of(&of, u64::MAX) + on_media
        };
        match kvpool_seams::blocking(count).await {
            Ok(0) => Ok(()),
            Ok(left) => Err(TaskRefused {
                code: Code::LastNode,
                message: format!(
                    "node {} is the last node that takes blocks, and {left} blocks have no other place: start \
                     another node first, or force the drain",
                    node.name
                ),
            }),
            Err(_) => Err(TaskRefused {
                code: Code::Internal,
                message: "the blocks of the node could not be counted".to_owned(),
            }),
        }
    }

    /// The state of a node for display: the label of its state, or [`NodeState::DRAINED`].
    pub fn state_label(&self, node: &StoreNode) -> &'static str {
        match node.is_drained(self.replicas.doubts.load(Ordering::Acquire)) {
            true => NodeState::DRAINED,
            false => node.state().label(),
        }
    }

    /// Voids all earlier looks: no node counts as drained before the next look at its blocks.
    pub(in crate::pool) fn doubt_drained(&self) {
        self.replicas.doubts.fetch_add(1, Ordering::AcqRel);
    }

    /// Looks at the blocks of each draining node, and returns the time of the next look. Blocks
    /// that keep a node from being drained also appear and leave without an event: a client removes
    /// blocks, or a disk fails.
    pub(super) fn look_at_drains(&self) -> BootInstant {
        let begun = self.now();
        for node in self.members.all() {
            if !node.drains() {
                continue;
            }
            // While blocks move, their number changes, so it is enough to know whether one is left.
            let doubts = self.replicas.doubts.load(Ordering::Acquire);
            let is_moved = self.is_moved_off(&node);
            let most = if is_moved { 1 } else { u64::MAX };
            let left = self.look_at_left(&node, most);
            let is_current = self.replicas.doubts.load(Ordering::Acquire) == doubts;
            node.note_count((is_current && !is_moved).then_some(left));
        }
        let ended = self.now();
        ended.after(LOOK.max(ended.since(begun) * LOOK_REST))
    }

    /// Whether a stopping node still waits for word that its blocks are safe. A node without media
    /// that does not wait for moves gets no word.
    fn will_be_told(&self, node: &StoreNode) -> bool {
        node.awaits_word() && (node.waits_for_moves() || self.keeps_copies_on_own_media(node))
    }

    /// The number of blocks that leave with a draining node, counted up to about `most`. The look
    /// also decides whether the node is shown as drained.
    pub(super) fn look_at_left(&self, node: &StoreNode, most: u64) -> u64 {
        // Read first, so that a change during the look voids it.
        let doubts = self.replicas.doubts.load(Ordering::Acquire);
        let mut left = self.only_in_memory_of(node, most);
        if node.media_leave() && left < most {
            left += self.count_only_on_media(node, most - left);
        }
        // A task also moves blocks with copies on the node's own media, although the node keeps
        // these copies.
        let begins = node.leaves() && !node.is_told_to_leave();
        let running = self.replicas.tasks.running();
        let moves = begins || running.iter().any(|task| Self::is_off(&task.wish, node));
        let waits = moves || self.will_be_told(node);
        node.note_left(left == 0 && !waits, doubts);
        left
    }
}
