//! A client that follows no rule: it has queue pairs and uses arbitrary keys and addresses.

use super::{hello, soon};
use crate::frame::{failure, receive_by, send};
use crate::link::TransferError;
use crate::memory::Region;
use crate::peer::{Endpoint, Secret};
use crate::rdma::{Allows, Fabric, QueuePair, Rail, RdmaLane, RdmaOptions, Remote, Transfer};
use crate::rdma::{Verb, WorkError};
use crate::socket::shut_down;
use crate::tcp;
use kvpool_types::wire::data::{Hello, Meta, ReadItem, ReadRequest, Statuses, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::wire::rdma::{Offer, RdmaLocated, RdmaOpen, RdmaOpened, Registered};
use kvpool_types::{Code, Epoch, Extent, GrantId, Incarnation, Offset};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

/// The first port of this host, opened outside any endpoint; or why there is none.
pub(super) fn port() -> Result<Arc<Rail>, String> {
    static FABRIC: OnceLock<Result<Arc<Fabric>, String>> = OnceLock::new();
    let fabric = FABRIC.get_or_init(|| {
        let opened = Fabric::open(&RdmaOptions::default());
        opened.map_err(|why| why.to_string())
    });
    let first = |fabric: &Arc<Fabric>| fabric.rails()[0].clone();
    fabric.as_ref().map(first).map_err(Clone::clone)
}

/// An admitted connection.
pub(super) struct Connection {
    socket: OwnedFd,
    pub(super) session: Incarnation,
}

impl Connection {
    pub(super) fn open(to: &Endpoint) -> Self {
        Self::with_hello(to, &hello(&Secret::default())).unwrap()
    }

    pub(super) fn with_hello(to: &Endpoint, hello: &Hello) -> Result<Self, TransferError> {
        let (socket, reply) = tcp::open(to.local_addr(), hello, soon(), None)?;
        Ok(Self {
            socket: socket.into_parts().0,
            session: reply.incarnation,
        })
    }

    /// Ends the connection.
    pub(super) fn shut(&self) {
        shut_down(self.socket.as_fd());
    }

    /// Sends a request and returns the answer.
    pub(super) fn ask<M: Meta>(
        &self,
        op: Op,
        request: &impl Meta,
        answer: Op,
    ) -> Result<M, TransferError> {
        let socket = self.socket.as_fd();
        send(socket, op, 1, Epoch(0), request).unwrap();
        let (header, _, meta) = receive_by(socket, soon()).unwrap();
        if header.op == Op::Failure {
            return Err(failure(&meta));
        }
        assert_eq!(header.op, answer);
        Ok(M::decode(&meta).unwrap())
    }

    /// Offers queue pairs.
    pub(super) fn offer(
        &self,
        session: Incarnation,
        queues: &[(QueuePair, bool)],
    ) -> Result<RdmaOpened, TransferError> {
        let offers = queues.iter().map(|(queue, writes)| Offer {
            queue: *queue.address(),
            writes: *writes,
        });
        let request = RdmaOpen {
            incarnation: session,
            offers: offers.collect(),
        };
        self.ask(Op::RdmaOpen, &request, Op::RdmaOpened)
    }

    pub(super) fn locate(
        &self,
        session: Incarnation,
        extent: Extent,
    ) -> Result<Vec<Registered>, Code> {
        let whole = ReadItem {
            extent,
            from: Offset(0),
            length: extent.length,
            right: None,
        };
        let request = ReadRequest {
            incarnation: session,
            items: vec![whole],
        };
        let located = self.ask(Op::RdmaLocate, &request, Op::RdmaLocated);
        let RdmaLocated(mut located) = located.map_err(|error| error.code)?;
        located.remove(0)
    }
}

/// Queue pairs as a peer has them, on a port of this host.
pub(super) fn queue_pairs(port: &Arc<Rail>) -> Vec<(QueuePair, bool)> {
    let pair = |writes| (QueuePair::create(port, Allows::Nothing).unwrap(), writes);
    vec![pair(false), pair(true)]
}

/// An admitted client with connected queue pairs.
pub(super) struct Intruder {
    pub(super) connection: Connection,
    port: Arc<Rail>,
    reads: RdmaLane,
    writes: RdmaLane,
}

impl Intruder {
    pub(super) fn connect(to: &Endpoint, port: &Arc<Rail>) -> Self {
        let connection = Connection::open(to);
        let queues = queue_pairs(port);
        let opened = connection.offer(connection.session, &queues).unwrap();
        let mut lanes = Vec::new();
        for ((queue, _), its) in queues.into_iter().zip(&opened.accepted) {
            queue.connect(&its.queue).unwrap();
            lanes.push(RdmaLane::new(queue));
        }
        let writes = lanes.pop().unwrap();
        Self {
            connection,
            port: port.clone(),
            reads: lanes.pop().unwrap(),
            writes,
        }
    }

    /// The registration on the peer's first port.
    pub(super) fn place(&self, extent: Extent) -> Result<Registered, Code> {
        let places = self.connection.locate(self.connection.session, extent)?;
        Ok(places[0])
    }

    /// Announces a write, which the peer then waits for.
    pub(super) fn announce(&self, extent: Extent) -> Code {
        let session = self.connection.session;
        let key = Secret::default().grant_key(session);
        let request = WriteRequest {
            incarnation: session,
            grants: vec![key.sign(session, Epoch(0), GrantId(1), extent)],
        };
        let answer = self.connection.ask(Op::WriteBegin, &request, Op::Statuses);
        let Statuses(codes) = answer.unwrap();
        codes[0]
    }

    /// Moves bytes between `local` and an address of the peer, by a key.
    pub(super) fn run(
        &self,
        verb: Verb,
        address: u64,
        rkey: u32,
        local: &Region,
    ) -> Result<(), WorkError> {
        let slice = local.whole();
        let registration = self.port.cached(&slice).unwrap();
        let transfer = Transfer {
            verb,
            remote: Remote { address, rkey },
            local: vec![(registration, slice)],
        };
        let lane = match verb {
            Verb::Read => &self.reads,
            Verb::Write => &self.writes,
        };
        let (sender, outcome) = mpsc::channel();
        lane.submit(vec![transfer], move |mut outcomes| {
            sender.send(outcomes.remove(0)).unwrap();
        });
        outcome.recv_timeout(Duration::from_secs(60)).unwrap()
    }
}
