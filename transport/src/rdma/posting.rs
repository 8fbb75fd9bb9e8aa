//! Posts the pieces of a batch: the summing threads do it, one piece each in turn.
//!
//! ```text
//! start ─► run: cut, post ─► sum ─► run again, behind all queued jobs
//!                 └─ first time: wakes a second thread
//! ```
//!
//! With a software device, posting a piece takes as much processor time as moving it. If all pieces
//! of a batch were queued at once, no piece would be summed or reported before the last piece is
//! posted. So a thread posts one piece, and queues the next post behind the other jobs.

use super::link::{OpenRdmaLink, THREADS};
use super::pieces::{Cutter, Piece, PieceItem};
use crate::copiers::Job;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The operations of a batch on its pieces: reads or writes.
pub(super) trait Moves: Send + Sync + Sized + 'static {
    /// Stays with an item until the item has ended.
    type Tag: Send + Sync + 'static;
    /// The sum of a piece.
    type Sum: Send + 'static;

    /// Starts an item; false when it has ended already.
    fn begin(&self, open: &OpenRdmaLink, item: &mut PieceItem<Self::Tag>) -> bool;

    /// Posts pieces. Calls `others` after registering memory and before the slow part.
    fn post(&self, open: &Arc<OpenRdmaLink>, group: Group<Self>, others: impl FnOnce());
}

/// Pieces that are posted together.
pub(super) type Group<M> = Vec<Piece<<M as Moves>::Tag, <M as Moves>::Sum>>;

/// A batch that is being posted.
pub(super) struct Posting<M: Moves> {
    open: Arc<OpenRdmaLink>,
    moves: M,
    cutter: Mutex<Cutter<M::Tag, M::Sum>>,
    threads: AtomicUsize,
}

impl<M: Moves> Posting<M> {
    /// Starts to move the items.
    pub(super) fn start(open: &Arc<OpenRdmaLink>, moves: M, items: Vec<PieceItem<M::Tag>>) {
        if items.is_empty() {
            return;
        }
        let posting = Arc::new(Self {
            open: open.clone(),
            moves,
            cutter: Mutex::new(Cutter::new(items)),
            threads: AtomicUsize::new(1),
        });
        posting.queue();
    }

    fn queue(self: Arc<Self>) {
        let open = self.open.clone();
        let job: Job = Box::new(move || self.run());
        open.copiers.submit(std::iter::once(job));
    }

    fn run(self: Arc<Self>) {
        let begin = |item: &mut PieceItem<M::Tag>| self.moves.begin(&self.open, item);
        let (group, has_more) = {
            let mut cutter = self.cutter.lock();
            (cutter.next_group(begin), !cutter.is_empty())
        };
        if group.is_empty() {
            return;
        }
        // Two threads that start with pieces of one block would both register the block.
        let others = || {
            let is_wanted = |count| (has_more && count < THREADS).then_some(count + 1);
            let called = self
                .threads
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_wanted);
            if called.is_ok() {
                self.clone().queue();
            }
        };
        self.moves.post(&self.open, group, others);
        if has_more {
            self.queue();
        }
    }
}
