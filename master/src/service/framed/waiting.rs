//! The calls of one connection that wait, and what they may hold meanwhile.

use kvpool_types::wire::frame::{Header, Op};
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

/// The bytes that the waiting commits of a connection may hold, and so many the other calls.
const MOST_HELD: usize = 64 << 20;
/// What a call holds beside its request.
const CALL: usize = 16 << 10;

/// The calls of one connection that wait. They end with it: nobody is there to be answered.
#[derive(Debug)]
pub(super) struct Waiting {
    commits: Arc<Semaphore>,
    others: Arc<Semaphore>,
    tasks: JoinSet<()>,
}

impl Waiting {
    pub(super) fn new() -> Self {
        Self {
            commits: Arc::new(Semaphore::new(MOST_HELD)),
            others: Arc::new(Semaphore::new(MOST_HELD)),
            tasks: JoinSet::new(),
        }
    }

    /// A place for a call that may have to wait, unless those that wait hold too much already. Commits
    /// have places of their own, for others may wait for what they make evictable.
    pub(super) fn place(&self, call: &Header) -> Option<OwnedSemaphorePermit> {
        let places = match call.op {
            Op::Commit => &self.commits,
            _ => &self.others,
        };
        let held = u32::try_from(CALL + call.meta as usize).ok()?;
        Arc::clone(places).try_acquire_many_owned(held).ok()
    }

    /// Has a call go on by itself.
    pub(super) fn spawn(
        &mut self,
        place: OwnedSemaphorePermit,
        call: impl Future<Output = ()> + Send + 'static,
        runtime: &Handle,
    ) {
        while self.tasks.try_join_next().is_some() {}
        let call = async move {
            call.await;
            drop(place);
        };
        self.tasks.spawn_on(call, runtime);
    }
}
