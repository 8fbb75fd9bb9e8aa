//! Copies of blocks from other nodes into this node's memory, as the master orders them.
//!
//! ```text
//!  session ─ orders ─► queue ─► worker: read over TCP from the other node ─► admitted under the grant
//!                                       ─► copied and summed ─► recorded ─► answer
//! ```
//!
//! The node is a client of the other node's data port. No client of the pool is involved.
//!
//! **Architecture Invariant:** a pulled block can be read only after its bytes in this memory have the
//! checksum of its commit.

use crate::serve::Store;
use futures::future::BoxFuture;
use kvpool_auth::Credentials;
use kvpool_proto::{self as proto, node_message::Body as ToMaster};
use kvpool_tls::ClientTls;
use kvpool_transport::checksum::ChunkedSum;
use kvpool_transport::host::{Abort, Admission, Host};
use kvpool_transport::{DataTls, Link, ReadOp, Region, TransferError, tcp};
use kvpool_types::wire::data::Hello;
use kvpool_types::wire::frame;
use kvpool_types::{
    Checksum, ChecksumAlgorithm, ClientId, ClusterId, Code, Epoch, Extent, Grant, GrantId,
    Incarnation, Length, Offset, ReadRight, SegmentId, Version,
};
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::net::ToSocketAddrs;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The most blocks that are pulled at a time.
const WORKERS: usize = 4;
/// How long an order may wait in the queue. The master gives it up a little later.
const LONGEST_WAIT: Duration = Duration::from_secs(25);
/// Connections to one other node.
const CONNECTIONS: usize = 2;
/// The time limit for reading one block.
const LONGEST: Duration = Duration::from_secs(5);
/// The time limit for opening a link.
const CONNECT: Duration = Duration::from_secs(1);
/// The most orders that wait. A master has fewer in progress.
const MOST_WAITING: usize = 16_384;
/// The bytes that are copied and summed at a time, while they are in the cache.
const PIECE: usize = 64 << 10;
/// The most links that are kept.
const MOST_LINKS: usize = 64;

/// Opens links to other nodes in a simulation, which has no sockets.
#[cfg_attr(
    not(feature = "simulation"),
    expect(unreachable_pub, reason = "only a simulation exports the trait")
)]
pub trait Dial: Send + Sync + std::fmt::Debug {
    /// Opens a link to an incarnation of the node at `address`.
    fn dial(
        &self,
        address: &str,
        node: Incarnation,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Arc<dyn Link>, TransferError>>;
}

/// Sends the answers of one session.
pub(crate) type Answers = tokio::sync::mpsc::UnboundedSender<ToMaster>;

/// The session that gave the orders.
#[derive(Clone, Debug)]
pub(crate) struct PullSession {
    pub(crate) cluster: ClusterId,
    pub(crate) incarnation: Incarnation,
    pub(crate) epoch: Epoch,
    pub(crate) answers: Answers,
}

/// The node's pulls. The first order starts the threads. In a simulation each order is a task instead.
#[derive(Debug)]
pub(crate) struct Pulls {
    shared: Arc<Shared>,
    started: OnceLock<bool>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    /// The node's token, which other nodes may require.
    credentials: Credentials,
    tls: Option<ClientTls>,
    /// Opens links in a simulation.
    dialer: Option<Arc<dyn Dial>>,
    client: ClientId,
    turns: Turns,
    links: Mutex<HashMap<Incarnation, Arc<dyn Link>>>,
}

/// The orders that wait for workers, and the workers that wait for orders.
#[derive(Debug, Default)]
struct Turns {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    orders: VecDeque<PullOrder>,
    /// The number of orders in progress, by their source node.
    busy: HashMap<bytes::Bytes, usize>,
    is_closed: bool,
}

#[derive(Debug)]
struct PullOrder {
    pull: proto::Pull,
    session: PullSession,
    since: Instant,
}

impl Turns {
    /// Waits for the next order. `None` once the queue is closed.
    fn next(&self) -> Option<PullOrder> {
        let mut queue = self.queue.lock();
        loop {
            if queue.is_closed {
                return None;
            }
            match queue.next() {
                Some(next) => return Some(next),
                None => self.changed.wait(&mut queue),
            }
        }
    }

    /// Records that an order has ended. A worker may have waited for that with orders in the queue.
    fn ended(&self, order: &PullOrder) {
        let mut queue = self.queue.lock();
        queue.ended(order);
        let has_orders = !queue.orders.is_empty();
        drop(queue);
        if has_orders {
            self.changed.notify_all();
        }
    }

    fn close(&self) {
        self.queue.lock().is_closed = true;
        self.changed.notify_all();
    }
}

impl Queue {
    /// Takes the first order that may begin. A source gets the last free worker only while none of its
    /// orders is in progress. Otherwise one source that hangs could hold all workers, and orders of other
    /// sources that come later would wait for it.
    fn next(&mut self) -> Option<PullOrder> {
        let in_progress: usize = self.busy.values().sum();
        let is_last = in_progress + 1 >= WORKERS;
        let may_begin = |order: &PullOrder| {
            let source = &order.pull.from_incarnation;
            !is_last || !self.busy.contains_key(source)
        };
        let at = self.orders.iter().position(may_begin)?;
        let order = self.orders.remove(at)?;
        let source = order.pull.from_incarnation.clone();
        *self.busy.entry(source).or_default() += 1;
        Some(order)
    }

    /// Records that an order has ended.
    fn ended(&mut self, order: &PullOrder) {
        let source = &order.pull.from_incarnation;
        if let Some(busy) = self.busy.get_mut(source) {
            *busy -= 1;
            if *busy == 0 {
                self.busy.remove(source);
            }
        }
    }
}

/// The abort of a copy into memory does nothing. The copy is short, and the fence waits for its end.
struct Short;

impl Abort for Short {
    fn abort(&self) {}
}

impl Pulls {
    /// Pulls that use `tls` for nodes whose address requires TLS.
    pub(crate) fn new(store: Store, credentials: Credentials, tls: Option<ClientTls>) -> Self {
        Self::over(store, credentials, tls, None)
    }

    /// Pulls whose links `dialer` opens. They run as tasks of the caller's runtime.
    #[cfg(feature = "simulation")]
    pub(crate) fn simulated(store: Store, dialer: Arc<dyn Dial>) -> Self {
        Self::over(store, Credentials::default(), None, Some(dialer))
    }

    fn over(
        store: Store,
        credentials: Credentials,
        tls: Option<ClientTls>,
        dialer: Option<Arc<dyn Dial>>,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                store,
                credentials,
                tls,
                dialer,
                client: ClientId(kvpool_seams::random()),
                turns: Turns::default(),
                links: Mutex::default(),
            }),
            started: OnceLock::new(),
        }
    }

    /// Queues orders of a session. Each ends with one answer.
    pub(crate) fn push(&self, orders: Vec<proto::Pull>, session: &PullSession) {
        if self.shared.dialer.is_some() {
            for order in orders {
                let (shared, session) = (Arc::clone(&self.shared), session.clone());
                tokio::spawn(async move { shared.carry_out(&order, &session).await });
            }
            return;
        }
        let is_running = *self.started.get_or_init(|| self.start());
        let mut refused = Vec::new();
        {
            let (mut queue, since) = (self.shared.turns.queue.lock(), now());
            for pull in orders {
                if is_running && queue.orders.len() < MOST_WAITING {
                    let session = session.clone();
                    queue.orders.push_back(PullOrder {
                        pull,
                        session,
                        since,
                    });
                } else {
                    refused.push(pull.ticket);
                }
            }
        }
        self.shared.turns.changed.notify_all();
        for ticket in refused {
            answer(session, ticket, Code::TooManyHeld);
        }
    }

    /// Starts the workers. Returns false when the system gives no thread.
    fn start(&self) -> bool {
        (0..WORKERS).all(|number| {
            let shared = Arc::clone(&self.shared);
            let started =
                kvpool_seams::thread(&format!("kvnode-pull-{number}"), move || shared.run());
            started
                .inspect_err(|error| tracing::error!(%error, "no thread for pulls"))
                .is_ok()
        })
    }
}

impl Drop for Pulls {
    fn drop(&mut self) {
        // A worker that is reading ends by its deadline, and the drop does not wait for it.
        self.shared.turns.close();
    }
}

impl Shared {
    fn run(&self) {
        while let Some(order) = self.turns.next() {
            match now().saturating_duration_since(order.since) < LONGEST_WAIT {
                true => futures::executor::block_on(self.carry_out(&order.pull, &order.session)),
                false => answer(&order.session, order.pull.ticket, Code::Unreachable),
            }
            self.turns.ended(&order);
        }
    }

    async fn carry_out(&self, order: &proto::Pull, session: &PullSession) {
        // When the session ended, the master gave up the order.
        if !session.answers.is_closed() {
            let pulled = self.pull(order, session).await;
            answer(session, order.ticket, pulled.unwrap_or_else(|code| code));
        }
    }

    async fn pull(&self, order: &proto::Pull, session: &PullSession) -> Result<Code, Code> {
        let deadline = now() + LONGEST;
        let (from, to) = (extent(order.from)?, extent(order.to)?);
        let source = Incarnation::from_slice(&order.from_incarnation).ok_or(Code::Malformed)?;
        if from.length != to.length {
            return Err(Code::Malformed);
        }
        let link = self.link(source, &order.from_address, session).await?;
        let mac = order.grant.as_ref().try_into();
        let grant = Grant {
            extent: to,
            epoch: session.epoch,
            id: GrantId(order.grant_id),
            mac: mac.map_err(|_| Code::GrantRefused)?,
        };
        let arrived = Region::allocate(from.length).whole();
        let read = ReadOp {
            extent: from,
            from: Offset(0),
            into: vec![arrived.clone()],
            right: right(order),
        };
        let read = link.read(session.epoch, vec![read], deadline).await;
        match read.into_iter().next() {
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                tracing::debug!(%error, %from, "block not pulled");
                return Err(error.code);
            }
            None => return Err(Code::Internal),
        }
        // The write is admitted only after the read. So a fence of the extent never waits for another node.
        let admission = self
            .store
            .admit_write(session.incarnation, &grant, Arc::new(Short));
        let guard = match admission {
            Admission::Refuse(refused) => return Err(refused.code),
            Admission::Write(guard) => guard,
        };
        let mut sum = ChunkedSum::for_length(to.length);
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        while at < to.length.0 {
            let left = Length(to.length.0 - at).as_usize();
            let (bytes, _) = piece.split_at_mut(left.min(PIECE));
            arrived.read_at(Offset(at), bytes);
            sum.update(bytes);
            guard.write_at(Offset(at), bytes);
            at += bytes.len() as u64;
        }
        let sums = sum.finish();
        if sums.whole != Checksum(order.checksum) {
            return Err(Code::ChecksumMismatch);
        }
        let code = guard.finish(sums.chunks);
        if code == Code::Ok {
            let version = Version(order.version);
            self.store.is_copy_of(&to, grant.id, version);
            self.store.metrics().pulled(to.length);
        }
        Ok(code)
    }

    /// The link to an incarnation of another node, which is opened if need be. If that node refuses the
    /// token, the token's file is read again.
    async fn link(
        &self,
        node: Incarnation,
        address: &str,
        session: &PullSession,
    ) -> Result<Arc<dyn Link>, Code> {
        if let Some(link) = self.links.lock().get(&node).filter(|link| link.is_open()) {
            return Ok(Arc::clone(link));
        }
        let link = match &self.dialer {
            None => self.connect(node, address, session)?,
            Some(dialer) => {
                let opened = dialer.dial(address, node, now() + CONNECT).await;
                opened.map_err(|error| error.code)?
            }
        };
        let mut links = self.links.lock();
        links.retain(|_, link| link.is_open());
        if links.len() >= MOST_LINKS {
            links.clear();
        }
        // Another worker may have opened a link too. The later one is used from here on.
        links.insert(node, Arc::clone(&link));
        Ok(link)
    }

    fn connect(
        &self,
        node: Incarnation,
        address: &str,
        session: &PullSession,
    ) -> Result<Arc<dyn Link>, Code> {
        let shown = self.credentials.number();
        match self.connect_once(node, address, session) {
            Err(Code::Unauthenticated | Code::TokenExpired) if self.credentials.renewed(shown) => {
                self.connect_once(node, address, session)
            }
            opened => opened,
        }
    }

    fn connect_once(
        &self,
        node: Incarnation,
        address: &str,
        session: &PullSession,
    ) -> Result<Arc<dyn Link>, Code> {
        let hello = Hello {
            min_version: frame::MIN_VERSION,
            max_version: frame::VERSION,
            cluster: session.cluster,
            client: self.client,
            incarnation: node,
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
            token: self.credentials.current().token,
        };
        let (address, tls) = DataTls::of(address, self.tls.as_ref()).map_err(|error| {
            tracing::warn!(address, %error, "another node cannot be called");
            error.code
        })?;
        let credentials = self.credentials.clone();
        let options = tcp::ConnectOptions {
            connections: CONNECTIONS,
            tls,
            token: tcp::TokenSource::new(move || credentials.current().token),
            ..tcp::ConnectOptions::default()
        };
        let found = address.to_socket_addrs().map_err(|error| {
            tracing::warn!(address, %error, "address of another node does not resolve");
            Code::Unreachable
        })?;
        let mut failed = Code::Unreachable;
        for address in found {
            let until = now() + CONNECT;
            match tcp::connect_with(address, hello.clone(), until, &options) {
                Ok((link, _)) => return Ok(link),
                Err(error) => {
                    tracing::debug!(%address, %error, "no link to another node");
                    // A node of another pool has taken the address of a node that has left.
                    failed = match error.code {
                        Code::WrongCluster => Code::Unreachable,
                        code => code,
                    };
                }
            }
        }
        Err(failed)
    }
}

/// The present time for the transports' deadlines. A simulation replaces it.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

fn extent(range: Option<proto::ExtentRange>) -> Result<Extent, Code> {
    let range = range.ok_or(Code::Malformed)?;
    Ok(Extent {
        segment: SegmentId(range.segment),
        offset: Offset(range.offset),
        length: Length(range.length),
    })
}

/// The read right for the other node's extent, if the master signed one.
fn right(order: &proto::Pull) -> Option<ReadRight> {
    Some(ReadRight {
        version: Version(order.version),
        deadline_ms: order.read_deadline_ms,
        mac: order.read_proof.as_ref().try_into().ok()?,
    })
}

fn answer(session: &PullSession, ticket: u64, code: Code) {
    let done = proto::TransferDone {
        ticket,
        code: code.to_wire().into(),
        takes_no_writes: false,
    };
    let done = proto::TransfersDone {
        transfers: vec![done],
    };
    // A failure means that the session has ended, so the master has dropped the ticket.
    let _ended = session.answers.send(ToMaster::Pulled(done));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(source: u128, ticket: u64) -> PullOrder {
        let (answers, _session) = tokio::sync::mpsc::unbounded_channel();
        PullOrder {
            pull: proto::Pull {
                ticket,
                from_incarnation: bytes::Bytes::copy_from_slice(&source.to_be_bytes()),
                ..proto::Pull::default()
            },
            session: PullSession {
                cluster: ClusterId(1),
                incarnation: Incarnation(9),
                epoch: Epoch(1),
                answers,
            },
            since: now(),
        }
    }

    fn take(queue: &mut Queue) -> Vec<PullOrder> {
        std::iter::from_fn(|| queue.next()).collect()
    }

    fn tickets(orders: &[PullOrder]) -> Vec<u64> {
        orders.iter().map(|order| order.pull.ticket).collect()
    }

    #[test]
    fn a_source_that_hangs_leaves_a_worker_to_others() {
        let mut queue = Queue::default();
        queue.orders.extend((0..10).map(|ticket| order(1, ticket)));
        queue.orders.push_back(order(2, 10));
        let taken = take(&mut queue);
        assert_eq!(tickets(&taken), [0, 1, 2, 10]);
        taken.iter().for_each(|order| queue.ended(order));
        assert!(queue.busy.is_empty());
    }

    /// No other source has an order when the source begins to hang.
    #[test]
    fn a_source_that_hangs_alone_leaves_a_worker_to_orders_that_come_later() {
        let mut queue = Queue::default();
        queue.orders.extend((0..10).map(|ticket| order(1, ticket)));
        let hanging = take(&mut queue);
        assert_eq!(tickets(&hanging), [0, 1, 2]);
        queue.orders.push_back(order(2, 10));
        queue.orders.push_back(order(2, 11));
        let other = take(&mut queue);
        assert_eq!(tickets(&other), [10]);
        other.iter().for_each(|order| queue.ended(order));
        let other = take(&mut queue);
        assert_eq!(tickets(&other), [11]);
        hanging.iter().for_each(|order| queue.ended(order));
        other.iter().for_each(|order| queue.ended(order));
        assert!(queue.busy.is_empty());
    }

    /// A third worker waits, since both sources have orders in progress.
    #[test]
    fn the_end_of_a_pull_wakes_a_worker_that_waits_with_orders_in_the_queue() {
        let turns = Arc::new(Turns::default());
        let orders = [(1, 0), (1, 1), (2, 2), (1, 3), (2, 4)].map(|(of, ticket)| order(of, ticket));
        turns.queue.lock().orders.extend(orders);
        let busy = take(&mut turns.queue.lock());
        assert_eq!(tickets(&busy), [0, 1, 2]);
        let (took, taken) = std::sync::mpsc::channel();
        let worker = Arc::clone(&turns);
        let thread = std::thread::spawn(move || took.send(worker.next()).unwrap());
        let waits = Duration::from_millis(100);
        assert!(taken.recv_timeout(waits).is_err(), "the last worker waits");
        turns.ended(&busy[2]);
        let longest = Duration::from_secs(10);
        let order = taken.recv_timeout(longest).unwrap().unwrap();
        assert_eq!(order.pull.ticket, 3);
        thread.join().unwrap();
    }
}
