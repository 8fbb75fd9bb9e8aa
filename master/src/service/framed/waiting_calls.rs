//! The calls of one connection that wait, and what they may hold meanwhile.

use crate::wait_budget::{WaitBudget, WaitPermit};
use kvpool_types::wire::frame::{Header, Op};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

/// The bytes that the waiting commits of a connection may hold, and so many the other calls.
const MOST_HELD: usize = 64 << 20;

/// The calls of one connection that wait. They end with it: nobody is there to be answered.
#[derive(Debug)]
pub(super) struct WaitingCalls {
    /// Those of the connection.
    own: WaitBudget,
    /// Those of the whole master.
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

    /// A place for a call that may have to wait, unless those that wait hold too much already.
    pub(super) fn permit(&self, call: &Header) -> Option<[WaitPermit; 2]> {
        let take = match call.op {
            Op::Commit => WaitBudget::for_commit,
            _ => WaitBudget::for_other,
        };
        let request = call.meta as usize;
        Some([take(&self.own, request)?, take(&self.shared, request)?])
    }

    /// Has a call go on by itself.
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
