//! The waiting calls of one connection, and the bound on their memory.

use crate::wait_budget::{WaitBudget, WaitPermit};
use kvpool_types::wire::frame::{Header, Op};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

/// The most bytes of a connection's waiting commits, and of its other waiting calls.
const MOST_HELD: usize = 64 << 20;

/// The waiting calls of one connection. They end with the connection, because nothing could read
/// their answers.
#[derive(Debug)]
pub(super) struct WaitingCalls {
    /// The budget of the connection.
    own: WaitBudget,
    /// The budget of the whole master.
    shared: WaitBudget,
    tasks: JoinSet<()>,
}

impl WaitingCalls {
    pub(super) fn new(shared: WaitBudget) -> Self {
        Self {
            own: WaitBudget::new(MOST_HELD),
            shared,
            tasks: JoinSet::new(),
        }
    }

    /// The permits for a call that may wait; `None` when the waiting calls hold too much memory.
    pub(super) fn permit(&self, call: &Header) -> Option<[WaitPermit; 2]> {
        let take = match call.op {
            Op::Commit => WaitBudget::for_commit,
            _ => WaitBudget::for_other,
        };
        let request = call.meta as usize;
        Some([take(&self.own, request)?, take(&self.shared, request)?])
    }

    /// Continues a call as a task.
    pub(super) fn spawn(
        &mut self,
        permits: [WaitPermit; 2],
        call: impl Future<Output = ()> + Send + 'static,
        runtime: &Handle,
    ) {
        while self.tasks.try_join_next().is_some() {}
        let call = async move {
            call.await;
            drop(permits);
        };
        self.tasks.spawn_on(call, runtime);
    }
}
