//! The calls of one connection that wait, and what they may hold meanwhile.

use crate::service::places::{Place, Places};
use kvpool_types::wire::frame::{Header, Op};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

/// The bytes that the waiting commits of a connection may hold, and so many the other calls.
const MOST_HELD: usize = 64 << 20;

/// The calls of one connection that wait. They end with it: nobody is there to be answered.
#[derive(Debug)]
pub(super) struct Waiting {
    /// Those of the connection.
    own: Places,
    /// Those of the whole master.
    shared: Places,
    tasks: JoinSet<()>,
}

impl Waiting {
    pub(super) fn new(shared: Places) -> Self {
        Self {
            own: Places::new(MOST_HELD),
            shared,
            tasks: JoinSet::new(),
        }
    }

    /// A place for a call that may have to wait, unless those that wait hold too much already.
    pub(super) fn place(&self, call: &Header) -> Option<[Place; 2]> {
        let take = match call.op {
            Op::Commit => Places::for_commit,
            _ => Places::for_other,
        };
        let request = call.meta as usize;
        Some([take(&self.own, request)?, take(&self.shared, request)?])
    }

    /// Has a call go on by itself.
    pub(super) fn spawn(
        &mut self,
        places: [Place; 2],
        call: impl Future<Output = ()> + Send + 'static,
        runtime: &Handle,
    ) {
        while self.tasks.try_join_next().is_some() {}
        let call = async move {
            call.await;
            drop(places);
        };
        self.tasks.spawn_on(call, runtime);
    }
}
