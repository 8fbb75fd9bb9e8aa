//! The node in a simulation: its fence, its memory and its session with the master are the node as it
//! is. Sockets, and threads, are not there.

use crate::agent::{Agent, Connect, Options};
use crate::config::Isolation;
use crate::fence::Limits;
use crate::metrics::Metrics;
use crate::pulls::Pulls;
use crate::segment::{Dram, Segment};
use crate::serve::{Identity, Store};
use kvpool_auth::Credentials;
use kvpool_transport::host::Host;
use kvpool_types::{HostId, Incarnation, Length, NodeName};
use std::io;
use std::sync::Arc;

pub use crate::pulls::Dial;

/// The messages of a master, in order, until its stream ends.
pub type Inbox = crate::agent::Inbox;
/// The node's messages to a master.
pub type Outgoing = crate::agent::Outgoing;

/// What a node is.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Its name.
    pub name: String,
    /// The machine that it runs on.
    pub host: HostId,
    /// The address that clients dial.
    pub data_address: String,
    /// The addresses of the masters.
    pub masters: Vec<String>,
    /// The bytes of each segment: multiples of the page size.
    pub segments: Vec<Length>,
    /// The most bytes that one client may hold.
    pub held_per_client: Length,
    /// Whether reads need a location that the master signed.
    pub asks_for_signed_reads: bool,
}

/// What goes on at a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Receives in progress.
    pub receives: u64,
    /// Pins of views.
    pub pins: u64,
    /// Fence tickets that wait.
    pub tickets: u64,
    /// Written extents.
    pub records: u64,
    /// Ranges kept to refuse closed grants.
    pub floors: u64,
}

/// One life of a node's process. The process ends when this and its session are dropped.
#[derive(Debug)]
pub struct Node {
    store: Store,
    agent: Agent,
}

impl Node {
    /// A node, and its session with the masters, which somebody must poll. `connect` opens a session, and
    /// `dialer` links to other nodes.
    ///
    /// # Errors
    ///
    /// The system's, when there is no memory.
    pub fn start(
        setup: &Setup,
        connect: Connect,
        dialer: Arc<dyn Dial>,
    ) -> io::Result<(Self, impl Future<Output = ()> + use<>)> {
        let segment = |size: &Length| {
            let segment = Dram::allocate(*size, false, "kvpool simulation")?;
            Ok(Box::new(segment) as Box<dyn Segment>)
        };
        let segments = setup.segments.iter().map(segment);
        let store = Store::new(
            Identity {
                name: NodeName(setup.name.clone()),
                host: setup.host,
            },
            segments.collect::<io::Result<_>>()?,
            Limits {
                held_per_client: setup.held_per_client,
            },
            Metrics::new().map_err(io::Error::other)?,
            Isolation::default(),
        );
        if setup.asks_for_signed_reads {
            store.demand_rights();
        }
        let options = Options {
            masters: setup.masters.clone(),
            credentials: Credentials::default(),
            tls: None,
            data_address: setup.data_address.clone(),
            shm_path: String::new(),
            media: None,
            pulls: Pulls::simulated(store.clone(), dialer),
            moves_blocks: true,
            connections: Box::new(|| 0),
            connect: Some(connect),
        };
        let (agent, session) = Agent::simulated(store.clone(), options);
        Ok((Self { store, agent }, session))
    }

    /// What the node's transports ask.
    pub fn host(&self) -> Arc<dyn Host> {
        Arc::new(self.store.clone())
    }

    /// The present incarnation.
    pub fn incarnation(&self) -> Incarnation {
        self.store.snapshot().incarnation
    }

    /// Whether a master has welcomed the node and hears it.
    pub fn is_connected(&self) -> bool {
        self.agent.is_connected()
    }

    /// Places nothing here any more, as at SIGTERM. The master moves the blocks to other nodes.
    pub fn drain(&self) {
        self.agent.forget_saved();
        self.agent.drain();
    }

    /// The blocks that stay behind, once the master has said that none waits any more to be moved.
    pub fn saved(&self) -> Option<u64> {
        self.agent.saved()
    }

    /// Tells the master that this incarnation is over. The session ends then.
    pub fn leave(&self) {
        self.store.drain();
        self.agent.say_goodbye();
    }

    /// What goes on.
    pub fn census(&self) -> Census {
        let census = self.store.census();
        Census {
            receives: census.receives,
            pins: census.pins,
            tickets: census.tickets,
            records: census.records,
            floors: census.floors,
        }
    }
}
