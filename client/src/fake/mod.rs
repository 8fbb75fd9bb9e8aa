//! A pool in one process, for tests of what a real one does only by accident: nodes that hang, lie
//! or vanish, and a master that loses answers, fails over and runs out of room.

mod master;
mod node;

use crate::{Client, Options, Timeouts, TransportChoice};
use kvpool_proto::pool_server::PoolServer;
use kvpool_types::Length;
pub(crate) use master::{CommitFault, Master};
pub(crate) use node::{Mode, Nodes};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tonic::transport::server::TcpIncoming;

/// A master that listens, and two nodes that are reached without a socket.
pub(crate) struct Pool {
    pub(crate) master: Arc<Master>,
    pub(crate) nodes: Nodes,
    pub(crate) client: Client,
}

/// Starts a pool and connects to it.
pub(crate) async fn pool() -> Pool {
    pool_with(|_| {}).await
}

/// The same with other options of the client.
pub(crate) async fn pool_with(change: impl FnOnce(&mut Options)) -> Pool {
    let master = Arc::new(Master::default());
    let address = serve(Arc::clone(&master));
    let mut options = Options {
        masters: vec![address],
        transport: TransportChoice::Tcp,
        timeouts: Timeouts {
            connect: Duration::from_secs(5),
            put: Duration::from_secs(2),
            get: Duration::from_secs(2),
            control: Duration::from_secs(2),
        },
        max_message_bytes: Length(4 << 20),
        ..Options::default()
    };
    change(&mut options);
    let nodes = Nodes::default();
    let dialer = nodes.clone();
    let client = Client::connect_with(options, Handle::current(), |_, _| Box::new(dialer))
        .await
        .unwrap();
    Pool {
        master,
        nodes,
        client,
    }
}

/// Serves a master on a port of its own, whose address is the answer.
pub(crate) fn serve(master: Arc<Master>) -> String {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = format!("http://{}", incoming.local_addr().unwrap());
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(PoolServer::from_arc(master))
            .serve_with_incoming(incoming),
    );
    address
}
