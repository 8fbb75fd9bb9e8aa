//! A pool in one process, for tests of what a real one does only by accident: nodes that hang, lie
//! or vanish, and a master that loses answers, fails over and runs out of room.

mod frames;
mod master;
mod node;
mod role;
mod wire;

use crate::{Client, Options, Timeouts, TransportChoice};
use kvpool_proto::pool_server::PoolServer;
use kvpool_types::Length;
pub(crate) use master::{Columns, CommitFault, Master};
pub(crate) use node::{Mode, Nodes};
pub(crate) use role::Role;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
pub(crate) use wire::{Passage, Wire};

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
    let mut options = options(vec![address]);
    change(&mut options);
    let (nodes, client) = connect(options).await;
    Pool {
        master,
        nodes,
        client,
    }
}

/// Options with which nothing takes long.
pub(crate) fn options(masters: Vec<String>) -> Options {
    Options {
        masters,
        transport: TransportChoice::Tcp,
        timeouts: Timeouts {
            connect: Duration::from_secs(5),
            put: Duration::from_secs(2),
            get: Duration::from_secs(2),
            control: Duration::from_secs(2),
        },
        max_message_bytes: Length(4 << 20),
        ..Options::default()
    }
}

/// A client, and the nodes that it reaches.
pub(crate) async fn connect(options: Options) -> (Nodes, Client) {
    let nodes = Nodes::default();
    let dialer = nodes.clone();
    let client = Client::connect_with(options, Handle::current(), None, |_, _| Box::new(dialer));
    (nodes, client.await.unwrap())
}

/// Serves a master, gRPC and frames, on a port of its own, whose address is the answer.
pub(crate) fn serve(master: Arc<Master>) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = TcpListener::from_std(listener).unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    master.own().address.clone_from(&address);
    let (grpc, mut connections) = mpsc::channel::<std::io::Result<_>>(16);
    let incoming = futures::stream::poll_fn(move |context| connections.poll_recv(context));
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(PoolServer::from_arc(Arc::clone(&master)))
            .serve_with_incoming(incoming),
    );
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (master, grpc) = (Arc::clone(&master), grpc.clone());
            tokio::spawn(async move {
                let mut first = [0; 4];
                if stream.peek(&mut first).await.is_err() {
                    return;
                }
                if &first == b"KVP1" {
                    // It ends as the client ends it.
                    let _ = frames::serve(master, stream).await;
                } else {
                    let _ = grpc.send(Ok(stream)).await;
                }
            });
        }
    });
    address
}

/// Serves a master behind a wire, which is where clients are told to find it.
pub(crate) async fn serve_behind_wire(master: &Arc<Master>) -> Wire {
    let address = serve(Arc::clone(master));
    let own = address.strip_prefix("http://").unwrap().parse().unwrap();
    let wire = Wire::to(own).await;
    master.own().address.clone_from(&wire.url);
    wire
}
