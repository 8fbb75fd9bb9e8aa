//! A pool in one process, for tests of faults that a real pool shows only by accident.
//!
//! The master is the real one, behind a layer that delays, drops or changes answers. The nodes are in memory.
//! A test makes them hang, fail, or return wrong bytes.
//!
//! ```text
//!  Client ─ Wire ─► Master (the layer) ─► kvpool_master's PoolService ─► Pool
//!     └─ Nodes (links into a table of bytes) ◄── fences, checks ───────────┘
//! ```

mod cluster;
mod frames;
mod master;
mod node;
mod wire;

use crate::{Client, Options, Timeouts, TransportChoice};
pub(crate) use cluster::{Cluster, Setup};
use kvpool_types::Length;
pub(crate) use master::{Fault, Master};
pub(crate) use node::{Mode, Nodes};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
pub(crate) use wire::{Passage, Wire};

/// A leader, two nodes, and a client.
pub(crate) struct Pool {
    pub(crate) master: Arc<Master>,
    pub(crate) nodes: Nodes,
    pub(crate) client: Client,
}

/// Starts a pool and connects to it.
pub(crate) async fn pool() -> Pool {
    pool_with(|_, _| {}).await
}

/// Starts a pool with changed settings, and connects to it with changed options.
pub(crate) async fn pool_with(change: impl FnOnce(&mut Setup, &mut Options)) -> Pool {
    let (mut setup, mut options) = (Setup::default(), options(Vec::new()));
    change(&mut setup, &mut options);
    let master = leader(setup).await;
    options.masters.insert(0, master.url());
    let client = connect(&master, options).await;
    Pool {
        nodes: master.cluster.nodes.clone(),
        master,
        client,
    }
}

/// The leader of a new pool, which clients reach at its own port.
pub(crate) async fn leader(setup: Setup) -> Arc<Master> {
    let master = Master::start(&Cluster::start(setup).await);
    master.lead().await;
    master
}

/// Client options with short timeouts.
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

/// A client of the pool of `master`, which reaches the pool's nodes without a socket.
pub(crate) async fn connect(master: &Master, options: Options) -> Client {
    let dialer = master.cluster.nodes.clone();
    let client = Client::connect_with(options, Handle::current(), None, |_, _| Box::new(dialer));
    client.await.unwrap()
}
