//! The node in a simulation. Its fence, its memory and its session with the master are the same code as in
//! production. It has no sockets and no threads.

use crate::agent::{Agent, Connect, Options};
use crate::config::Isolation;
use crate::fence::Limits;
use crate::media::{Attachment, Media, SsdConfig};
use crate::metrics::Metrics;
use crate::pulls::Pulls;
use crate::segment::Segment;
use crate::serve::{Identity, Store};
use kvpool_auth::Credentials;
use kvpool_disk::Engine;
use kvpool_transport::host::Host;
use kvpool_transport::{Region, Slice};
use kvpool_types::{HostId, Incarnation, Length, NodeName, Offset};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use crate::pulls::Dial;

/// The messages of a master, in order, until its stream ends.
pub type Inbox = crate::agent::Inbox;
/// The node's messages to a master.
pub type Outgoing = crate::agent::Outgoing;

/// The parameters of a simulated node.
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
    /// The disks.
    pub disks: Vec<Disk>,
    /// Whether a node that stops waits until its blocks are elsewhere.
    pub moves_blocks: bool,
}

/// A segment that only this process uses. Its pages are allocated as they are written.
#[derive(Debug)]
struct Memory(Region);

impl Segment for Memory {
    fn size(&self) -> Length {
        self.0.length()
    }

    fn memory(&self, from: Offset, length: Length) -> Option<Slice> {
        self.0.slice(from, length)
    }

    fn share(&self, _writable: bool) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// A device for media.
#[derive(Clone, Debug)]
pub struct Disk {
    /// The device. It must answer requests for superblocks and flushes at once, since these block.
    pub engine: Arc<dyn Engine>,
    /// Drive writes per day; `None` for no limit.
    pub writes_per_day: Option<f64>,
}

/// The number of touches, tickets and records at a node.
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

/// One life of a node's process. It ends when this value and its session are dropped.
#[derive(Debug)]
pub struct Node {
    store: Store,
    agent: Agent,
    media: Option<Arc<Media>>,
}

impl Node {
    /// A node, and its work as a future that the caller must poll: the session with the masters, and the
    /// transfers to and from disks. `connect` opens a session, and `dialer` opens links to other nodes.
    ///
    /// # Errors
    ///
    /// The system's error when there is no memory. A disk's error when its content cannot be used.
    pub fn start(
        setup: &Setup,
        connect: Connect,
        dialer: Arc<dyn Dial>,
    ) -> io::Result<(Self, impl Future<Output = ()> + use<>)> {
        let segment = |size: &Length| {
            let segment = Memory(Region::allocate(*size));
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
        let (media, transfers) = open_media(&setup.disks, &store)?;
        let options = Options {
            masters: setup.masters.clone(),
            credentials: Credentials::default(),
            tls: None,
            data_address: setup.data_address.clone(),
            shm_path: String::new(),
            media: media.clone(),
            pulls: Pulls::simulated(store.clone(), dialer),
            moves_blocks: setup.moves_blocks,
            connections: Box::new(|| 0),
            problems: Box::new(Vec::new),
            connect: Some(connect),
        };
        let (agent, session) = Agent::simulated(store.clone(), options);
        let work = async move {
            tokio::join!(session, transfers);
        };
        let node = Self {
            store,
            agent,
            media,
        };
        Ok((node, work))
    }

    /// Whether a medium is attached.
    pub fn has_attached(&self) -> bool {
        let mut status = self.media.iter().flat_map(|media| media.status());
        status.any(|medium| medium.attachment == Attachment::Attached)
    }

    /// The host that the node's transports call.
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
        self.agent.drain();
    }

    /// Whether the node knows that it is out of service, or stops.
    pub fn drains(&self) -> bool {
        self.agent.drains()
    }

    /// The blocks that stay behind, once the master has said that none waits any more to be moved.
    pub fn saved(&self) -> Option<u64> {
        self.agent.saved()
    }

    /// Tells the master that this incarnation is over. The session then ends.
    pub fn leave(&self) {
        self.store.drain();
        self.agent.say_goodbye();
    }

    /// Marks the media as clean, unless transfers are in progress. Call it after [`Node::leave`].
    pub fn detach(&self) {
        if let Some(media) = &self.media {
            media.detach(kvpool_seams::end_of_wait(Duration::ZERO));
        }
    }

    /// The present counts.
    pub fn census(&self) -> Census {
        let census = self.store.census();
        Census {
            receives: census.receives + census.loads,
            pins: census.pins,
            tickets: census.tickets,
            records: census.records,
            floors: census.floors,
        }
    }
}

/// The media on these disks, and their work as a future.
fn open_media(
    disks: &[Disk],
    store: &Store,
) -> io::Result<(Option<Arc<Media>>, impl Future<Output = ()> + use<>)> {
    let engines = disks.iter().enumerate().map(|(number, disk)| {
        let config = SsdConfig {
            path: PathBuf::from(format!("ssd{number}")),
            in_directory: false,
            size: None,
            reset: false,
            dwpd: disk.writes_per_day,
            namespaces: Vec::new(),
        };
        (config, Arc::clone(&disk.engine))
    });
    let media = match disks.is_empty() {
        true => None,
        false => {
            Some(Media::simulated(engines.collect(), store.clone()).map_err(io::Error::other)?)
        }
    };
    let (media, work) = media.unzip();
    let work = async move {
        if let Some(work) = work {
            work.await;
        }
    };
    Ok((media.map(Arc::new), work))
}
