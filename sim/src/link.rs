//! A client's link to a store node. The node's real fence judges every request. The bytes move in pieces between
//! real memory, late and interrupted as they are on sockets.

use crate::life::Life;
use crate::net::{Fate, Net, NodePort, Receive};
use crate::plan::Process;
use futures::future::BoxFuture;
use kvpool_store_node::simulation::Dial;
use kvpool_transport::checksum::{ChunkedSum, checksum};
use kvpool_transport::host::{Abort, Admission, Host, Refused};
use kvpool_transport::{
    Link, ReadOp, Slice, SumsOp, TransferError, TransferResult, TransportKind, WriteOp,
};
use kvpool_types::wire::data::{Hello, ReadItem, WriteRequest};
use kvpool_types::wire::frame;
use kvpool_types::{
    Checksum, ChecksumAlgorithm, ClientId, Code, Epoch, Extent, Grant, Incarnation, Offset, Token,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Blocks to this size are written in one step at the node.
const AT_ONCE: u64 = 16 << 10;
/// How long a writer stalls that does not go on by itself: longer than any history lasts after its faults.
const STALL: Duration = Duration::from_secs(300);
/// How much later than its connection a read of a signed location ends at most, in microseconds.
const ENDS_LATE: u64 = 200_000;
/// How often a stalled writer's connection is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// Larger ones come in pieces of this size.
const PIECE: usize = 32 << 10;

/// See the module's documentation.
#[derive(Clone)]
pub(crate) struct SimLink {
    net: Arc<Net>,
    from: Process,
    node: usize,
    incarnation: Incarnation,
    /// The client's process.
    life: Life,
    port: NodePort,
    connection: Arc<Connection>,
}

/// One connection, which the node may abort.
#[derive(Debug, Default)]
struct Connection {
    is_aborted: AtomicBool,
}

impl Abort for Connection {
    fn abort(&self) {
        self.is_aborted.store(true, Ordering::Release);
    }
}

impl std::fmt::Debug for SimLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "link from {} to n{}", self.from, self.node)
    }
}

/// Bytes that are arriving at a node.
struct Receiving {
    net: Arc<Net>,
    receive: Receive,
}

impl Receiving {
    fn new(link: &SimLink, grant: Grant) -> Self {
        let receive = Receive {
            life: link.port.life.clone(),
            grant,
        };
        link.net.receive(&receive);
        let net = Arc::clone(&link.net);
        Self { net, receive }
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        self.net.received(&self.receive);
    }
}

/// Bytes that a node sends to a reader who showed a signed location.
struct Reading {
    net: Arc<Net>,
    life: Life,
    extent: Extent,
}

impl Reading {
    fn new(link: &SimLink, extent: Extent) -> Self {
        let (net, life) = (Arc::clone(&link.net), link.port.life.clone());
        net.reads.lock().push((life.clone(), extent));
        Self { net, life, extent }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut reads = self.net.reads.lock();
        let is_it =
            |(life, extent): &(Life, Extent)| life.is_same(&self.life) && *extent == self.extent;
        if let Some(at) = reads.iter().position(is_it) {
            reads.swap_remove(at);
        }
    }
}

fn error(code: Code, message: impl Into<String>) -> TransferError {
    TransferError {
        code,
        message: message.into(),
    }
}

fn refused(refused: Refused) -> TransferError {
    error(refused.code, refused.message)
}

/// Opens a link.
pub(crate) async fn dial(
    net: Arc<Net>,
    from: Process,
    life: Life,
    address: String,
    incarnation: Incarnation,
    deadline: Instant,
) -> Result<Arc<dyn Link>, TransferError> {
    let late = || {
        error(
            Code::DeadlineExceeded,
            "the connection was not opened in time",
        )
    };
    let opened = async {
        life.check().await;
        let Some((node, port)) = net.node_at(&address) else {
            return Err(error(Code::Unreachable, "connection refused"));
        };
        if net.pass(from, Process::Node(node)).await == Fate::Lost
            || net.pass(Process::Node(node), from).await == Fate::Lost
        {
            std::future::pending::<()>().await;
        }
        life.check().await;
        if port.life.is_over() {
            return Err(error(Code::Unreachable, "connection reset"));
        }
        let hello = Hello {
            min_version: frame::MIN_VERSION,
            max_version: frame::VERSION,
            cluster: net.cluster.lock().unwrap_or_default(),
            client: ClientId::default(),
            incarnation,
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
            token: Token::default(),
        };
        port.node.host().hello(&hello).map_err(refused)?;
        Ok(Arc::new(SimLink {
            net: Arc::clone(&net),
            from,
            node,
            incarnation,
            life: life.clone(),
            port,
            connection: Arc::default(),
        }) as Arc<dyn Link>)
    };
    let opened = tokio::time::timeout_at(deadline.into(), opened).await;
    opened.unwrap_or_else(|_| Err(late()))
}

/// A node's way to other nodes.
#[derive(Debug)]
pub(crate) struct Dialer {
    pub(crate) net: Arc<Net>,
    pub(crate) from: Process,
    pub(crate) life: Life,
}

impl Dial for Dialer {
    fn dial(
        &self,
        address: &str,
        node: Incarnation,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Arc<dyn Link>, TransferError>> {
        Box::pin(dial(
            Arc::clone(&self.net),
            self.from,
            self.life.clone(),
            address.to_owned(),
            node,
            deadline,
        ))
    }
}

impl SimLink {
    fn is_broken(&self) -> bool {
        self.port.life.is_over() || self.connection.is_aborted.load(Ordering::Acquire)
    }

    fn host(&self) -> Arc<dyn Host> {
        self.port.node.host()
    }

    /// Asks the node. The node does its part also when the caller gives up meanwhile; a request that is late
    /// arrives late.
    fn ask<T: Send + 'static>(
        &self,
        count: usize,
        deadline: Instant,
        work: impl Future<Output = Vec<Result<T, TransferError>>> + Send + 'static,
    ) -> BoxFuture<'static, Vec<Result<T, TransferError>>> {
        let link = self.clone();
        let (done, answered) = oneshot::channel();
        let node_part = async move {
            let (from, to) = (link.from, Process::Node(link.node));
            if link.net.pass(from, to).await == Fate::Lost {
                link.connection.abort();
                return;
            }
            // What a client sent before it died is on its way all the same.
            if link.is_broken() {
                let _left = done.send(None);
                return;
            }
            let answer = link.port.life.run(work).await;
            let answer = answer.filter(|_| !link.is_broken());
            if link.net.pass(to, from).await == Fate::Arrived {
                let _left = done.send(answer);
            } else {
                link.connection.abort();
            }
        };
        tokio::spawn(node_part);
        let life = self.life.clone();
        Box::pin(async move {
            let all = |code, text: &str| (0..count).map(|_| Err(error(code, text))).collect();
            let answered = tokio::time::timeout_at(deadline.into(), answered).await;
            life.check().await;
            match answered {
                Ok(Ok(Some(outcomes))) => outcomes,
                Ok(_) => all(Code::Unreachable, "the connection broke"),
                Err(_) => all(Code::DeadlineExceeded, "no answer in time"),
            }
        })
    }

    /// The node's part of a read: the bytes as they were sent, a piece at a time.
    async fn read_at_node(self, epoch: Epoch, op: ReadOp) -> Result<Vec<u8>, TransferError> {
        let item = ReadItem {
            extent: op.extent,
            from: op.from,
            length: op.length(),
            right: op.right,
        };
        self.net.pulls(self.from, &op.extent, op.right.as_ref());
        let abort: Arc<dyn Abort> = self.connection.clone();
        let slice = self
            .host()
            .admit_read(epoch, self.incarnation, &item, &abort)
            .map_err(refused)?;
        let reading = item.right.map(|right| {
            self.net.located(self.incarnation, epoch, op.extent, right);
            Reading::new(&self, op.extent)
        });
        let mut bytes = vec![0; slice.length().as_usize()];
        let mut at = 0;
        for piece in bytes.chunks_mut(PIECE) {
            if at > 0 {
                self.pause_of_peer().await;
            }
            if self.is_broken() {
                if reading.is_some() {
                    // The node may go on to send for a while. Nobody may write there meanwhile.
                    let late = self.net.dice.micros(0, ENDS_LATE);
                    tokio::time::sleep(late).await;
                }
                return Err(error(Code::Unreachable, "the connection broke"));
            }
            slice.read_at(Offset(at), piece);
            at += piece.len() as u64;
        }
        let flips = self.net.noise().flipped;
        self.may_flip(flips, &mut bytes, "gets", &op.extent);
        Ok(bytes)
    }

    /// Makes a byte wrong in so many of 1000 transfers. Says whether it did.
    fn may_flip(&self, flips: u64, bytes: &mut [u8], verb: &str, extent: &Extent) -> bool {
        let dice = &self.net.dice;
        if !dice.chance(flips) {
            return false;
        }
        let at = dice.index(bytes.len());
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 1 << dice.below(8);
        }
        let said = format_args!("{verb} a wrong byte of {extent}");
        self.net.trace.note(self.from, said);
        true
    }

    /// The time to the next piece of a read or a write. A peer may stall for long; the node then ends the connection.
    async fn pause_of_peer(&self) {
        let dice = &self.net.dice;
        let pause = match dice.chance(self.net.noise().slow) {
            true if dice.chance(200) => STALL,
            true => dice.micros(10_000, 4_000_000),
            false => dice.micros(20, 3_000),
        };
        let until = tokio::time::Instant::now() + pause;
        while tokio::time::Instant::now() < until && !self.is_broken() {
            let step = tokio::time::Instant::now() + LOOK;
            tokio::time::sleep_until(until.min(step)).await;
        }
    }

    /// The node's part of a write.
    async fn write_at_node(self, op: WriteOp) -> Result<Checksum, TransferError> {
        let mut bytes: Vec<u8> = op.from.iter().flat_map(Slice::to_vec).collect();
        let mut sums = ChunkedSum::for_length(op.grant.extent.length);
        sums.update(&bytes);
        let sums = sums.finish();
        let flips = self.net.noise().flipped_writes;
        if self.may_flip(flips, &mut bytes, "sends", &op.grant.extent) {
            self.net.damage.note(&op.grant.extent);
        }
        let code = if bytes.len() as u64 <= AT_ONCE {
            let request = WriteRequest {
                incarnation: self.incarnation,
                grants: vec![op.grant],
            };
            let mut payload = bytes;
            for sum in &sums.chunks {
                payload.extend_from_slice(&sum.0.to_le_bytes());
            }
            let codes = self.host().write_now(&request, &payload);
            if codes.first() == Some(&Code::Ok) {
                self.net.admitted(self.incarnation, &op.grant);
                drop(Receiving::new(&self, op.grant));
            }
            codes.first().copied().unwrap_or(Code::Internal)
        } else {
            let abort: Arc<dyn Abort> = self.connection.clone();
            match self.host().admit_write(self.incarnation, &op.grant, abort) {
                Admission::Refuse(why) => return Err(refused(why)),
                Admission::Write(guard) => {
                    self.net.admitted(self.incarnation, &op.grant);
                    let receiving = Receiving::new(&self, op.grant);
                    let mut at = 0;
                    for piece in bytes.chunks(PIECE) {
                        self.pause_of_peer().await;
                        self.net.running(self.from).await;
                        if self.is_broken() || self.life.is_over() {
                            return Err(error(Code::Unreachable, "the connection broke"));
                        }
                        guard.write_at(Offset(at), piece);
                        at += piece.len() as u64;
                    }
                    // Once it has finished, the extent may belong to another at once.
                    drop(receiving);
                    guard.finish(sums.chunks.clone())
                }
            }
        };
        match code {
            Code::Ok => Ok(sums.whole),
            code => Err(error(code, "refused by the node")),
        }
    }
}

impl Link for SimLink {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn read(
        &self,
        epoch: Epoch,
        ops: Vec<ReadOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>> {
        let (link, asked) = (self.clone(), ops.clone());
        let arrived = self.ask(ops.len(), deadline, async move {
            let mut outcomes = Vec::with_capacity(asked.len());
            for op in asked {
                outcomes.push(link.clone().read_at_node(epoch, op).await);
            }
            outcomes
        });
        Box::pin(async move {
            let arrived = arrived.await.into_iter().zip(ops);
            let put_down = |(bytes, op): (Result<Vec<u8>, _>, ReadOp)| {
                let bytes = bytes?;
                let mut rest = bytes.as_slice();
                for slice in &op.into {
                    let (part, others) = rest.split_at(slice.length().as_usize());
                    slice.write_at(Offset(0), part);
                    rest = others;
                }
                Ok(checksum(&bytes))
            };
            arrived.map(put_down).collect()
        })
    }

    fn write(
        &self,
        ops: Vec<WriteOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>> {
        let link = self.clone();
        self.ask(ops.len(), deadline, async move {
            let mut outcomes = Vec::with_capacity(ops.len());
            for op in ops {
                outcomes.push(link.clone().write_at_node(op).await);
            }
            outcomes
        })
    }

    fn sums(
        &self,
        epoch: Epoch,
        ops: Vec<SumsOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<Result<Vec<Checksum>, TransferError>>> {
        let (host, incarnation) = (self.host(), self.incarnation);
        self.ask(ops.len(), deadline, async move {
            let sums = ops.into_iter().map(|SumsOp { extent, right }| {
                let item = ReadItem {
                    right,
                    ..ReadItem::whole(extent)
                };
                host.sums(epoch, incarnation, &item).map_err(refused)
            });
            sums.collect()
        })
    }

    fn pin(
        &self,
        _: Epoch,
        _: Extent,
        _: Instant,
    ) -> BoxFuture<'static, Result<Slice, TransferError>> {
        Box::pin(async { Err(error(Code::InvalidArgument, "no shared memory")) })
    }

    fn is_open(&self) -> bool {
        !self.is_broken()
    }
}
