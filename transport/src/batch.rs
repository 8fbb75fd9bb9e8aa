//! The outcomes of one batch, gathered from the threads that bring them.
//!
//! ```text
//! waiting ──begin──► running ──pause──► waiting
//!    └──end / expire──► ended ◄──end──────┘
//! ```
//!
//! An item that runs has its memory touched, so it is ended only by the thread that runs it; one that
//! waits may be ended by the deadline. The future resolves when the last item has ended.

use crate::link::TransferError;
use futures::channel::oneshot;
use futures::future::{BoxFuture, FutureExt};
use kvpool_types::Code;
use parking_lot::Mutex;
use std::sync::Arc;

type Outcome<T> = Result<T, TransferError>;

/// Resolves to one outcome an item, in order, once the last item has ended.
pub(crate) type Outcomes<T> = oneshot::Receiver<Vec<Outcome<T>>>;

/// The items of one batch. Shared by those who end them.
pub(crate) struct Batch<T>(Mutex<State<T>>);

struct State<T> {
    items: Vec<Item<T>>,
    /// How many have not ended.
    left: usize,
    expired: bool,
    done: Option<oneshot::Sender<Vec<Outcome<T>>>>,
}

enum Item<T> {
    Waiting,
    Running,
    Ended(Outcome<T>),
}

impl<T> Batch<T> {
    /// A batch of `count` items, and what its outcomes come out of.
    pub(crate) fn new(count: usize) -> (Arc<Self>, Outcomes<T>) {
        let (done, outcomes) = oneshot::channel();
        let batch = Self(Mutex::new(State {
            items: (0..count).map(|_| Item::Waiting).collect(),
            left: count,
            expired: false,
            done: Some(done),
        }));
        batch.0.lock().resolve_if_done();
        (Arc::new(batch), outcomes)
    }

    /// Takes a waiting item to run it; false when it has ended.
    pub(crate) fn begin(&self, item: usize) -> bool {
        match self.0.lock().items.get_mut(item) {
            Some(state @ Item::Waiting) => {
                *state = Item::Running;
                true
            }
            _ => false,
        }
    }

    /// Lets a running item wait again; false when it has ended because the deadline passed.
    pub(crate) fn pause(&self, item: usize) -> bool {
        let mut state = self.0.lock();
        if state.expired {
            state.end(item, Err(deadline_exceeded()));
            return false;
        }
        if let Some(state) = state.items.get_mut(item) {
            *state = Item::Waiting;
        }
        true
    }

    /// Ends an item, unless it has ended.
    pub(crate) fn end(&self, item: usize, outcome: Outcome<T>) {
        self.0.lock().end(item, outcome);
    }

    /// Ends all that wait: the deadline has passed. Those that run end when they notice.
    pub(crate) fn expire(&self) {
        let mut state = self.0.lock();
        state.expired = true;
        for item in 0..state.items.len() {
            if matches!(state.items.get(item), Some(Item::Waiting)) {
                state.end(item, Err(deadline_exceeded()));
            }
        }
    }

    /// Whether every item has ended.
    pub(crate) fn is_done(&self) -> bool {
        self.0.lock().left == 0
    }
}

impl<T> State<T> {
    fn end(&mut self, item: usize, outcome: Outcome<T>) {
        if let Some(state @ (Item::Waiting | Item::Running)) = self.items.get_mut(item) {
            *state = Item::Ended(outcome);
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
                    Item::Ended(outcome) => outcome,
                    Item::Waiting | Item::Running => {
                        unreachable!("invariant: no item is left")
                    }
                })
                .collect();
            // Nobody waits when the future was dropped: the transfer was detached.
            drop(done.send(outcomes));
        }
    }
}

/// The outcomes, with a link kept open until they are there.
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

/// The outcome of an item that its deadline has ended.
pub(crate) fn deadline_exceeded() -> TransferError {
    TransferError {
        code: Code::DeadlineExceeded,
        message: "the deadline passed before the transfer had ended".to_owned(),
    }
}

/// The outcome of an item whose connection failed.
pub(crate) fn unreachable(why: impl std::fmt::Display) -> TransferError {
    TransferError {
        code: Code::Unreachable,
        message: format!("the connection to the node failed: {why}"),
    }
}

/// The outcome of an item that the caller got wrong.
pub(crate) fn invalid(message: String) -> TransferError {
    TransferError {
        code: Code::InvalidArgument,
        message,
    }
}
