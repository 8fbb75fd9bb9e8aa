//! Nodes that behave as they are told.

use crate::cache::Node;
use crate::clock::Deadline;
use crate::links::Dial;
use futures::future::BoxFuture;
use kvpool_transport::checksum::checksum;
use kvpool_transport::{
    Link, ReadOp, Slice, TransferError, TransferResult, TransportKind, WriteOp,
};
use kvpool_types::{CHUNK, Checksum, Code, Epoch, Extent, Incarnation, Length, Offset, SegmentId};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How a node answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    #[default]
    Well,
    /// Nothing is answered before the deadline.
    Hangs,
    /// Bytes come back wrong.
    Lies,
    /// Every transfer fails with this.
    Fails(Code),
    /// Transfers take so long.
    Slow(Duration),
}

/// All nodes of a fake pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nodes(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    modes: HashMap<Incarnation, Mode>,
    bytes: HashMap<(SegmentId, Offset), Vec<u8>>,
    reads: HashMap<Incarnation, usize>,
}

impl Nodes {
    pub(crate) fn set(&self, node: u128, mode: Mode) {
        self.0.lock().modes.insert(Incarnation(node), mode);
    }

    /// How many blocks were asked of a node.
    pub(crate) fn reads(&self, node: u128) -> usize {
        self.0
            .lock()
            .reads
            .get(&Incarnation(node))
            .copied()
            .unwrap_or(0)
    }
}

impl Dial for Nodes {
    fn dial(
        &self,
        node: Arc<Node>,
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
    fn mode(&self) -> Mode {
        let modes = &self.nodes.0.lock().modes;
        modes.get(&self.node).copied().unwrap_or_default()
    }

    /// Waits as the node's mode says; an error when that says so.
    async fn behave(&self, deadline: Instant) -> Result<(), TransferError> {
        match self.mode() {
            Mode::Well | Mode::Lies => Ok(()),
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

    fn stored(&self, extent: Extent) -> Option<Vec<u8>> {
        let state = self.nodes.0.lock();
        state.bytes.get(&(extent.segment, extent.offset)).cloned()
    }

    fn read_one(&self, op: &ReadOp) -> TransferResult {
        let mut bytes = self.stored(op.extent).ok_or_else(|| error(Code::Missing))?;
        if self.mode() == Mode::Lies {
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
            ops.into_iter()
                .map(|op| {
                    let bytes: Vec<u8> = op.from.iter().flat_map(Slice::to_vec).collect();
                    assert_eq!(Length(bytes.len() as u64), op.grant.extent.length);
                    let sum = checksum(&bytes);
                    let place = (op.grant.extent.segment, op.grant.extent.offset);
                    link.nodes.0.lock().bytes.insert(place, bytes);
                    Ok(sum)
                })
                .collect()
        })
    }

    fn sums(
        &self,
        _: Epoch,
        extents: Vec<Extent>,
        deadline: Instant,
    ) -> BoxFuture<'static, Vec<Result<Vec<Checksum>, TransferError>>> {
        let link = self.clone();
        Box::pin(async move {
            let behaved = link.behave(deadline).await;
            extents
                .into_iter()
                .map(|extent| {
                    behaved.clone()?;
                    let bytes = link.stored(extent).ok_or_else(|| error(Code::Missing))?;
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
