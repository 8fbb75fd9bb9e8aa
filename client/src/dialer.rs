//! Opening links to store nodes.

use crate::cache::KnownNode;
use crate::clock::Deadline;
use crate::errors::is_about_the_token;
use crate::links::Dial;
use futures::future::BoxFuture;
use kvpool_auth::Credentials;
use kvpool_tls::ClientTls;
use kvpool_tls::addresses::{self, first_of};
use kvpool_transport::rdma::{self, Fabric};
use kvpool_transport::{DataTls, Link, TransferError, TransportKind, shm, tcp};
use kvpool_types::wire::data::{Hello, HelloReply};
use kvpool_types::wire::frame;
use kvpool_types::{ChecksumAlgorithm, ClientId, ClusterId, Code, Incarnation, Token};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// Opens links by the transports of this host.
#[derive(Clone, Debug)]
pub(crate) struct Dialer {
    hello: Hello,
    credentials: Credentials,
    /// The RDMA ports of this host, if there are any.
    rdma: Option<Arc<Fabric>>,
    tcp: tcp::ConnectOptions,
    /// The TLS settings for nodes whose address requires TLS.
    tls: Option<ClientTls>,
}

impl Dialer {
    /// A dialer for `client` of the pool `cluster`. It presents the token of `credentials` to nodes.
    pub(crate) fn new(
        cluster: ClusterId,
        client: ClientId,
        credentials: Credentials,
        rdma: Option<Arc<Fabric>>,
        tcp_connections: usize,
        tls: Option<ClientTls>,
    ) -> Self {
        Self {
            hello: Hello {
                min_version: frame::MIN_VERSION,
                max_version: frame::VERSION,
                cluster,
                client,
                incarnation: Incarnation::default(),
                checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
                token: Token::default(),
            },
            credentials: credentials.clone(),
            rdma,
            tcp: tcp::ConnectOptions {
                connections: tcp_connections.max(1),
                token: tcp::TokenSource::new(move || credentials.current().token),
                ..tcp::ConnectOptions::default()
            },
            tls,
        }
    }
}

impl Dial for Dialer {
    fn dial(
        &self,
        node: Arc<KnownNode>,
        kind: TransportKind,
        deadline: Deadline,
    ) -> BoxFuture<'static, Result<Arc<dyn Link>, TransferError>> {
        let dialer = self.clone();
        Box::pin(async move {
            let shown = dialer.credentials.current();
            match dialer.once(&node, kind, shown.token, deadline).await {
                // The token's file was renewed a moment ago.
                Err(error)
                    if is_about_the_token(error.code)
                        && dialer.credentials.renewed(shown.number) =>
                {
                    let token = dialer.credentials.current().token;
                    dialer.once(&node, kind, token, deadline).await
                }
                opened => opened,
            }
        })
    }
}

impl Dialer {
    /// One attempt, which presents `token`.
    async fn once(
        &self,
        node: &KnownNode,
        kind: TransportKind,
        token: Token,
        deadline: Deadline,
    ) -> Result<Arc<dyn Link>, TransferError> {
        // With the incarnation in the hello, a restarted node refuses the hello.
        let hello = Hello {
            incarnation: node.incarnation,
            token,
            ..self.hello.clone()
        };
        match kind {
            TransportKind::Shm => {
                let path = PathBuf::from(&node.shm_path);
                open(move || shm::connect(&path, hello, deadline.to_std())).await
            }
            TransportKind::Rdma => {
                let fabric = self.rdma.as_ref();
                let fabric =
                    fabric.ok_or_else(|| unreachable("this host has no RDMA".to_owned()))?;
                let (address, tls) = DataTls::of(&node.data_address, self.tls.as_ref())?;
                let found = resolve(address, deadline).await?;
                let opened = first_of(found, |address| {
                    let (fabric, hello) = (Arc::clone(fabric), hello.clone());
                    let (tls, until) = (tls.clone(), deadline.to_std());
                    open(move || rdma::connect_with(&fabric, address, hello, until, tls.as_ref()))
                });
                opened.await.unwrap_or_else(nowhere)
            }
            TransportKind::Tcp => {
                let (address, tls) = DataTls::of(&node.data_address, self.tls.as_ref())?;
                let tcp = tcp::ConnectOptions {
                    tls,
                    ..self.tcp.clone()
                };
                let found = resolve(address, deadline).await?;
                let opened = first_of(found, |address| {
                    let (hello, tcp) = (hello.clone(), tcp.clone());
                    open(move || tcp::connect_with(address, hello, deadline.to_std(), &tcp))
                });
                opened.await.unwrap_or_else(nowhere)
            }
        }
    }
}

/// Runs a blocking connect off the async threads.
async fn open(
    connect: impl FnOnce() -> Result<(Arc<dyn Link>, HelloReply), TransferError> + Send + 'static,
) -> Result<Arc<dyn Link>, TransferError> {
    match tokio::task::spawn_blocking(connect).await {
        Ok(opened) => opened.map(|(link, _)| link).map_err(of_this_pool),
        Err(_) => Err(unreachable("the runtime is shutting down".to_owned())),
    }
}

/// Maps the refusal of a node of another pool to `Unreachable`. The master named a node that is gone, and a
/// node of another pool has its address now.
fn of_this_pool(error: TransferError) -> TransferError {
    match error.code {
        Code::WrongCluster => {
            unreachable(format!("another pool's node answers: {}", error.message))
        }
        _ => error,
    }
}

async fn resolve(address: &str, deadline: Deadline) -> Result<Vec<SocketAddr>, TransferError> {
    match deadline.run(addresses::resolve(address)).await {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(unreachable(format!("{address}: {error}"))),
        Err(_) => Err(unreachable(format!("resolving {address} timed out"))),
    }
}

fn nowhere<T>() -> Result<T, TransferError> {
    Err(unreachable(
        "the node's address resolves to no host".to_owned(),
    ))
}

fn unreachable(message: String) -> TransferError {
    TransferError {
        code: Code::Unreachable,
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The client then uses another node for the block.
    #[test]
    fn a_node_of_another_pool_is_no_node_of_this_one() {
        let code_of = |code| {
            let message = "cluster 1 is meant, this is 2".to_owned();
            of_this_pool(TransferError { code, message }).code
        };
        assert_eq!(code_of(Code::WrongCluster), Code::Unreachable);
        for code in [Code::WrongIncarnation, Code::StaleEpoch, Code::Malformed] {
            assert_eq!(code_of(code), code);
        }
    }
}
