//! Who posts the pieces of a batch: the threads that sum, one piece each in turn.
//!
//! ```text
//! start ─► run: cut, post ─► sum ─► run again, behind what has been queued meanwhile
//!                 └─ first time: calls a second thread
//! ```
//!
//! Posting a piece may take the processor for as long as moving it does, where the device is software. With
//! all pieces of a batch queued at once, nothing that has landed would be summed or reported before the last
//! one is posted. So a thread takes one piece and gets back in the line.

use super::link::{OpenRdmaLink, THREADS};
use super::pieces::{Cutter, Piece, PieceItem};
use crate::copiers::Job;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What is done with the pieces of a batch.
pub(super) trait Moves: Send + Sync + Sized + 'static {
    /// What stays with an item.
    type Tag: Send + Sync + 'static;
    /// What a piece is summed to.
    type Sum: Send + 'static;

    /// Begins an item; false when it has ended already.
    fn begin(&self, open: &OpenRdmaLink, item: &mut PieceItem<Self::Tag>) -> bool;

    /// Posts pieces. Calls `others` once memory has been registered, before what takes its time.
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
    /// Has the items moved.
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
        // Pieces of one block that come first on two threads would both register it.
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
