//! Collects the outcomes of one batch from the threads that produce them.
//!
//! ```text
//! waiting ──begin──► running ──pause──► waiting
//!    └──end / expire──► ended ◄──end──────┘
//! ```
//!
//! A running item's memory is being touched, so only the thread that runs the item ends it. The
//! deadline may end a waiting item. The batch then releases the memory that it kept for the item,
//! even while a request to the node is pending. The future resolves when the last item has ended.

use crate::link::TransferError;
use crate::memory::Slice;
use futures::channel::oneshot;
use futures::future::{BoxFuture, FutureExt};
use kvpool_types::Code;
use parking_lot::Mutex;
use std::sync::Arc;

type Outcome<T> = Result<T, TransferError>;

/// Resolves to one outcome an item, in order, once the last item has ended.
pub(crate) type Outcomes<T> = oneshot::Receiver<Vec<Outcome<T>>>;

/// The items of one batch, shared by the threads that end them.
pub(crate) struct Batch<T>(Mutex<BatchState<T>>);

struct BatchState<T> {
    items: Vec<ItemState<T>>,
    /// The callers' memory by item, while the item waits. Shorter than `items` when the last items
    /// keep none.
    kept: Vec<Vec<Slice>>,
    /// The number of items that have not ended.
    left: usize,
    expired: bool,
    done: Option<oneshot::Sender<Vec<Outcome<T>>>>,
}

enum ItemState<T> {
    Waiting,
    Running,
    Ended(Outcome<T>),
}

impl<T> Batch<T> {
    /// A batch of `count` items, and the receiver of its outcomes.
    pub(crate) fn new(count: usize) -> (Arc<Self>, Outcomes<T>) {
        let (done, outcomes) = oneshot::channel();
        let batch = Self(Mutex::new(BatchState {
            items: (0..count).map(|_| ItemState::Waiting).collect(),
            kept: Vec::new(),
            left: count,
            expired: false,
            done: Some(done),
        }));
        batch.0.lock().resolve_if_done();
        (Arc::new(batch), outcomes)
    }

    /// Starts a waiting item; false when it has ended.
    pub(crate) fn begin(&self, item: usize) -> bool {
        match self.0.lock().items.get_mut(item) {
            Some(state @ ItemState::Waiting) => {
                *state = ItemState::Running;
                true
            }
            _ => false,
        }
    }

    /// Keeps an item's memory until [`Batch::take`] starts the item, or the item ends.
    pub(crate) fn keep(&self, item: usize, memory: Vec<Slice>) {
        let mut state = self.0.lock();
        if state.expired || !matches!(state.items.get(item), Some(ItemState::Waiting)) {
            drop(state);
            return drop(memory);
        }
        if state.kept.len() <= item {
            state.kept.resize_with(item + 1, Vec::new);
        }
        if let Some(kept) = state.kept.get_mut(item) {
            *kept = memory;
        }
    }

    /// Starts a waiting item and takes its memory; `None` when it has ended.
    pub(crate) fn take(&self, item: usize) -> Option<Vec<Slice>> {
        let mut state = self.0.lock();
        if state.expired {
            return None;
        }
        match state.items.get_mut(item) {
            Some(state @ ItemState::Waiting) => *state = ItemState::Running,
            _ => return None,
        }
        Some(state.take_kept(item))
    }

    /// Lets a running item wait again. False when the item ended because its deadline passed.
    pub(crate) fn pause(&self, item: usize) -> bool {
        let mut state = self.0.lock();
        if state.expired {
            state.end(item, Err(deadline_exceeded()));
            return false;
        }
        if let Some(state) = state.items.get_mut(item) {
            *state = ItemState::Waiting;
        }
        true
    }

    /// Ends an item, unless it has ended.
    pub(crate) fn end(&self, item: usize, outcome: Outcome<T>) {
        // The memory is released before the caller is told, and outside the lock.
        let kept = self.0.lock().take_kept(item);
        drop(kept);
        self.0.lock().end(item, outcome);
    }

    /// Ends all waiting items, because the deadline has passed. A running item ends when its thread
    /// notices.
    pub(crate) fn expire(&self) {
        let kept = {
            let mut state = self.0.lock();
            state.expired = true;
            std::mem::take(&mut state.kept)
        };
        drop(kept);
        let mut state = self.0.lock();
        for item in 0..state.items.len() {
            if matches!(state.items.get(item), Some(ItemState::Waiting)) {
                state.end(item, Err(deadline_exceeded()));
            }
        }
    }

    /// Whether every item has ended.
    pub(crate) fn is_done(&self) -> bool {
        self.0.lock().left == 0
    }
}

impl<T> BatchState<T> {
    /// Takes the memory that is kept for an item.
    fn take_kept(&mut self, item: usize) -> Vec<Slice> {
        self.kept
            .get_mut(item)
            .map(std::mem::take)
            .unwrap_or_default()
    }

    fn end(&mut self, item: usize, outcome: Outcome<T>) {
        if let Some(state @ (ItemState::Waiting | ItemState::Running)) = self.items.get_mut(item) {
            *state = ItemState::Ended(outcome);
            self.left -= 1;
            self.resolve_if_done();
        }
    }

    fn resolve_if_done(&mut self) {
        if self.left > 0 {
            return;
        }
        if let Some(done) = self.done.take() {
            let outcomes = std::mem::take(&mut self.items)
                .into_iter()
                .map(|item| match item {
                    ItemState::Ended(outcome) => outcome,
                    ItemState::Waiting | ItemState::Running => {
                        unreachable!("invariant: no item is left")
                    }
                })
                .collect();
            // If the future was dropped, the transfer is detached and has no receiver.
            drop(done.send(outcomes));
        }
    }
}

/// The outcomes. The link stays open until they arrive.
pub(crate) fn resolve<T: Send + 'static>(
    open: Arc<impl Send + Sync + 'static>,
    outcomes: Outcomes<T>,
) -> BoxFuture<'static, Vec<Outcome<T>>> {
    async move {
        let outcomes = outcomes
            .await
            .expect("invariant: every item of a batch is ended");
        drop(open);
        outcomes
    }
    .boxed()
}

/// The outcome of an item past its deadline.
pub(crate) fn deadline_exceeded() -> TransferError {
    TransferError {
        code: Code::DeadlineExceeded,
        message: "the deadline passed before the transfer ended".to_owned(),
    }
}

/// The outcome of an item whose connection failed.
pub(crate) fn unreachable(why: impl std::fmt::Display) -> TransferError {
    TransferError {
        code: Code::Unreachable,
        message: format!("the connection to the node failed: {why}"),
    }
}

/// The outcome of an item with invalid arguments.
pub(crate) fn invalid(message: String) -> TransferError {
    TransferError {
        code: Code::InvalidArgument,
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Region;

    /// Memory, and a weak reference that tells whether it is kept.
    fn memory() -> (Vec<Slice>, std::sync::Weak<()>) {
        let count = Arc::new(());
        let weak = Arc::downgrade(&count);
        (
            vec![Region::from(vec![0; 8]).whole().with_hook(count)],
            weak,
        )
    }

    #[test]
    fn the_memory_of_an_item_is_released_when_the_item_ends() {
        let (batch, _outcomes) = Batch::<()>::new(4);
        let kept: Vec<_> = (0..4)
            .map(|item| {
                let (memory, is_kept) = memory();
                batch.keep(item, memory);
                is_kept
            })
            .collect();
        let held = || {
            kept.iter()
                .map(std::sync::Weak::strong_count)
                .sum::<usize>()
        };
        assert_eq!(held(), 4);
        batch.end(0, Ok(()));
        assert_eq!(held(), 3);
        let taken = batch.take(1).unwrap();
        batch.expire();
        // The running item keeps its memory; the waiting items keep none.
        assert_eq!(held(), 1);
        assert!(batch.take(2).is_none() && batch.take(3).is_none());
        drop(taken);
        assert_eq!(held(), 0);
        let (late, is_kept) = memory();
        batch.keep(2, late);
        assert_eq!(is_kept.strong_count(), 0);
    }
}
