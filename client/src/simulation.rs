//! The client in a simulation. Its calls go over a simulated network, and its links come from the
//! simulation's dialer. All other code is the same as in production.

use crate::cache::KnownNode;
use crate::clock::Deadline;
use crate::control::{Carry, NotCarried};
use crate::errors::ConnectError;
use crate::links::Dial;
use crate::{Client, Options};
use bytes::Bytes;
use futures::future::BoxFuture;
use kvpool_transport::{Link, TransferError, TransportKind};
use kvpool_types::{HostId, Incarnation};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;
use tokio::runtime::Handle;

/// Why a call has no reply.
#[derive(Debug)]
pub enum Unanswered {
    /// The master cannot be reached and has not received the call.
    NoWay(String),
    /// The master answered with this status, or the connection broke.
    Failed(tonic::Status),
}

/// The simulated network of one client.
pub trait Network: Send + Sync + Debug + 'static {
    /// Calls `method` of the master at `address` with an encoded request, and returns the encoded reply.
    fn call(
        &self,
        address: &str,
        method: &'static str,
        request: Bytes,
    ) -> BoxFuture<'static, Result<Bytes, Unanswered>>;

    /// Opens a link to the incarnation of a node at `address`.
    fn dial(
        &self,
        address: &str,
        incarnation: Incarnation,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Arc<dyn Link>, TransferError>>;
}

#[derive(Debug)]
struct Over<N>(Arc<N>);

impl<N: Network> Carry for Over<N> {
    fn carry(
        &self,
        address: &str,
        method: &'static str,
        request: Bytes,
    ) -> BoxFuture<'static, Result<Bytes, NotCarried>> {
        let called = self.0.call(address, method, request);
        Box::pin(async move {
            called.await.map_err(|unanswered| match unanswered {
                Unanswered::NoWay(why) => NotCarried::NoWay(why),
                Unanswered::Failed(status) => NotCarried::Failed(status),
            })
        })
    }
}

impl<N: Network> Dial for Over<N> {
    fn dial(
        &self,
        node: Arc<KnownNode>,
        _: TransportKind,
        deadline: Deadline,
    ) -> BoxFuture<'static, Result<Arc<dyn Link>, TransferError>> {
        self.0
            .dial(&node.data_address, node.incarnation, deadline.to_std())
    }
}

/// Connects a client on `host` over a simulated network, as [`Client::connect`] does over a real one.
///
/// # Errors
///
/// Those of [`Client::connect`].
pub async fn connect<N: Network>(
    options: Options,
    host: HostId,
    network: Arc<N>,
) -> Result<Client, ConnectError> {
    let carrier: Arc<dyn Carry> = Arc::new(Over(Arc::clone(&network)));
    let dialer = |_: &_, _: &_| Box::new(Over(network)) as Box<dyn Dial>;
    Client::connect_over(
        options,
        Handle::current(),
        None,
        dialer,
        host,
        Some(carrier),
    )
    .await
}
