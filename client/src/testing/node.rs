//! Nodes in memory, which behave as a test sets them.

use super::Setup;
use crate::cache::KnownNode;
use crate::clock::Deadline;
use crate::links::Dial;
use futures::future::BoxFuture;
use kvpool_master::membership::{Registration, Reported, StoreNode};
use kvpool_master::pool::Pool;
use kvpool_proto::master_message::Body;
use kvpool_transport::checksum::checksum;
use kvpool_transport::{
    Link, ReadOp, Slice, SumsOp, TransferError, TransferResult, TransportKind, WriteOp,
};
use kvpool_types::{
    CHUNK, Checksum, Code, Epoch, Extent, GrantKey, HostId, Incarnation, Length, NodeName, Offset,
    SegmentId,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// The behaviour of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    #[default]
    Well,
    /// No request is answered before its deadline.
    Hangs,
    /// Reads return wrong bytes.
    Lies,
    /// Every transfer fails with this code.
    Fails(Code),
    /// Every transfer takes this time.
    Slow(Duration),
    /// Of each batch of writes, this number succeeds. The others exceed the client's limit.
    HoldsAtMost(usize),
}

/// The incarnations of the nodes, which are named `n1` and `n2`.
const NODES: [u128; 2] = [1, 2];

/// The nodes of a pool. They are registered with the real master, and keep their bytes in one table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nodes(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    modes: HashMap<Incarnation, Mode>,
    bytes: HashMap<(SegmentId, Offset), Vec<u8>>,
    reads: HashMap<Incarnation, usize>,
    /// The term of the last welcome, and the key of each node's grants in it.
    welcomes: HashMap<Incarnation, (Epoch, GrantKey)>,
}

impl Nodes {
    pub(crate) fn set(&self, node: u128, mode: Mode) {
        self.0.lock().modes.insert(Incarnation(node), mode);
    }

    /// The number of blocks that were read from a node.
    pub(crate) fn reads(&self, node: u128) -> usize {
        let state = self.0.lock();
        state.reads.get(&Incarnation(node)).copied().unwrap_or(0)
    }

    fn mode(&self, node: Incarnation) -> Mode {
        self.0.lock().modes.get(&node).copied().unwrap_or_default()
    }

    fn stored(&self, extent: Extent) -> Option<Vec<u8>> {
        let state = self.0.lock();
        state.bytes.get(&(extent.segment, extent.offset)).cloned()
    }

    /// Registers the nodes in a new term. From then on they answer requests of that term.
    pub(super) async fn register(&self, pool: &Arc<Pool>, setup: &Setup) {
        let (host, socket) = match setup.is_near {
            true => (kvpool_transport::machine::host_id().unwrap(), "socket"),
            false => (HostId(77), ""),
        };
        for id in NODES {
            let registration = Registration {
                name: NodeName(format!("n{id}")),
                incarnation: Incarnation(id),
                data_address: "127.0.0.1:1".into(),
                shm_path: socket.into(),
                host,
                epoch_seen: Epoch(0),
                secret: None,
                epoch_proof: Default::default(),
                segments: vec![(Length(setup.segment_bytes), None)],
                held: Vec::new(),
                loaded: Vec::new(),
                can_pull: false,
                can_undrain: true,
                version: String::new(),
                wants_signed_reads: false,
            };
            let node = pool.register(&registration).await.unwrap();
            let welcome = (pool.epoch, node.key.clone());
            self.0.lock().welcomes.insert(node.incarnation, welcome);
            let (outbox, mut inbox) = mpsc::unbounded_channel();
            pool.activate(&node, &registration, outbox);
            pool.heard(&node, Some(Reported::default()));
            let (nodes, pool) = (self.clone(), Arc::clone(pool));
            tokio::spawn(async move {
                while let Some(Ok(message)) = inbox.recv().await {
                    nodes.obey(&pool, &node, message.body);
                }
            });
        }
    }

    /// Carries out a request of the master to a node.
    fn obey(&self, pool: &Arc<Pool>, node: &StoreNode, asked: Option<Body>) {
        match asked {
            Some(Body::Fence(fence)) => {
                let tickets: Vec<u64> = fence.items.iter().map(|item| item.ticket).collect();
                pool.fenced(node, &tickets);
            }
            Some(Body::Verify(verify)) => {
                let range = verify.extent.unwrap();
                let bytes = self.stored(Extent {
                    segment: SegmentId(range.segment),
                    offset: Offset(range.offset),
                    length: Length(range.length),
                });
                let right = bytes.is_some_and(|bytes| checksum(&bytes).0 == verify.checksum);
                let matches = right && self.mode(node.incarnation) != Mode::Lies;
                pool.heard_verified(node, verify.ticket, matches);
            }
            Some(Body::Undrain(order)) => pool.undrained(node, order.number),
            _ => {}
        }
    }

    /// Stores bytes under a grant of the term that the node is in.
    fn store(&self, node: Incarnation, op: &WriteOp) -> TransferResult {
        let bytes: Vec<u8> = op.from.iter().flat_map(Slice::to_vec).collect();
        let extent = op.grant.extent;
        assert_eq!(Length(bytes.len() as u64), extent.length);
        let sum = checksum(&bytes);
        let mut state = self.0.lock();
        let (epoch, key) = state.welcomes.get(&node).unwrap();
        if op.grant.epoch != *epoch {
            return Err(error(Code::StaleEpoch));
        }
        assert!(key.verify(node, &op.grant), "{:?} is forged", op.grant);
        state.bytes.insert((extent.segment, extent.offset), bytes);
        Ok(sum)
    }
}

impl Dial for Nodes {
    fn dial(
        &self,
        node: Arc<KnownNode>,
        _: TransportKind,
        _: Deadline,
    ) -> BoxFuture<'static, Result<Arc<dyn Link>, TransferError>> {
        let link = FakeLink {
            nodes: self.clone(),
            node: node.incarnation,
        };
        Box::pin(async move { Ok(Arc::new(link) as Arc<dyn Link>) })
    }
}

#[derive(Clone, Debug)]
struct FakeLink {
    nodes: Nodes,
    node: Incarnation,
}

impl FakeLink {
    /// Waits, or returns an error, according to the node's mode.
    async fn behave(&self, deadline: Instant) -> Result<(), TransferError> {
        match self.nodes.mode(self.node) {
            Mode::Well | Mode::Lies | Mode::HoldsAtMost(_) => Ok(()),
            Mode::Fails(code) => Err(error(code)),
            Mode::Hangs => {
                tokio::time::sleep_until(deadline.into()).await;
                Err(error(Code::DeadlineExceeded))
            }
            Mode::Slow(pause) => {
                tokio::time::sleep(pause).await;
                Ok(())
            }
        }
    }

    fn read_one(&self, op: &ReadOp) -> TransferResult {
        let mut bytes = self
            .nodes
            .stored(op.extent)
            .ok_or_else(|| error(Code::Missing))?;
        if self.nodes.mode(self.node) == Mode::Lies {
            bytes.iter_mut().for_each(|byte| *byte ^= 1);
        }
        let from = op.from.as_usize();
        let bytes = &bytes[from..from + op.length().as_usize()];
        let mut at = 0;
        for slice in &op.into {
            let next = at + slice.length().as_usize();
            slice.write_at(Offset(0), &bytes[at..next]);
            at = next;
        }
        Ok(checksum(bytes))
    }
}

impl Link for FakeLink {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn read(
        &self,
        _: Epoch,
        ops: Vec<ReadOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>> {
        let link = self.clone();
        Box::pin(async move {
            *link.nodes.0.lock().reads.entry(link.node).or_default() += ops.len();
            match link.behave(deadline).await {
                Ok(()) => ops.iter().map(|op| link.read_one(op)).collect(),
                Err(error) => vec![Err(error); ops.len()],
            }
        })
    }

    fn write(
        &self,
        ops: Vec<WriteOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<TransferResult>> {
        let link = self.clone();
        Box::pin(async move {
            if let Err(error) = link.behave(deadline).await {
                return vec![Err(error); ops.len()];
            }
            let most = match link.nodes.mode(link.node) {
                Mode::HoldsAtMost(most) => most,
                _ => usize::MAX,
            };
            let write = |(at, op)| match at < most {
                true => link.nodes.store(link.node, op),
                false => Err(error(Code::TooManyHeld)),
            };
            ops.iter().enumerate().map(write).collect()
        })
    }

    fn sums(
        &self,
        _: Epoch,
        ops: Vec<SumsOp>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<Result<Vec<Checksum>, TransferError>>> {
        let link = self.clone();
        Box::pin(async move {
            let behaved = link.behave(deadline).await;
            ops.into_iter()
                .map(|SumsOp { extent, .. }| {
                    behaved.clone()?;
                    let bytes = link
                        .nodes
                        .stored(extent)
                        .ok_or_else(|| error(Code::Missing))?;
                    let chunk = Length(CHUNK).as_usize();
                    Ok(bytes.chunks(chunk).map(checksum).collect())
                })
                .collect()
        })
    }

    fn pin(
        &self,
        _: Epoch,
        _: Extent,
        _: Instant,
    ) -> BoxFuture<'static, Result<Slice, TransferError>> {
        Box::pin(async { Err(error(Code::InvalidArgument)) })
    }

    fn is_open(&self) -> bool {
        true
    }
}

fn error(code: Code) -> TransferError {
    TransferError {
        code,
        message: "as told".to_owned(),
    }
}
