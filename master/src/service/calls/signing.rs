//! Locations, with signed permissions for nodes that require them.

use super::{NodeTable, bytes};
use crate::directory::Replica;
use crate::placement::Segments;
use crate::pool::{Found, Pool};
use ::bytes::Bytes;
use kvpool_proto as proto;
use kvpool_types::{Epoch, Extent, ReadSigner};

/// Names the replicas of one reply, and signs the locations on nodes that require it.
pub(super) struct ReadSigning<'a> {
    epoch: Epoch,
    deadline_ms: u64,
    segments: &'a Segments<'a>,
    nodes: NodeTable,
    /// The signer of each node of the table.
    signers: Vec<Option<ReadSigner>>,
}

impl<'a> ReadSigning<'a> {
    pub(super) fn new(pool: &Pool, segments: &'a Segments<'a>) -> Self {
        Self {
            epoch: pool.epoch,
            deadline_ms: pool.read_deadline().0,
            segments,
            nodes: NodeTable::default(),
            signers: Vec::new(),
        }
    }

    /// The location of a replica; `None` when its node has left.
    pub(super) fn locate(
        &mut self,
        found: &Found,
        replica: &Replica,
    ) -> Option<proto::ReplicaLocation> {
        let node = self.nodes.index(self.segments, replica)?;
        let at = usize::try_from(node).ok()?;
        if at == self.signers.len() {
            let owner = &self.segments.get(replica.segment)?.node;
            self.signers.push(owner.read_signer(self.epoch));
        }
        let proof = match self.signers.get(at).and_then(Option::as_ref) {
            Some(signer) => {
                let extent = Extent {
                    segment: replica.segment,
                    offset: replica.offset,
                    length: found.length,
                };
                bytes(&signer.sign(extent, found.version, self.deadline_ms).mac)
            }
            None => Bytes::new(),
        };
        Some(proto::ReplicaLocation {
            node,
            segment: replica.segment.0,
            offset: replica.offset.0,
            read_proof: proof,
        })
    }

    /// The deadline of the permissions; 0 when no location was signed.
    pub(super) fn deadline_ms(&self) -> u64 {
        let signs = self.signers.iter().any(Option::is_some);
        if signs { self.deadline_ms } else { 0 }
    }

    /// The nodes that the locations name.
    pub(super) fn into_nodes(self) -> Vec<proto::NodeAddress> {
        self.nodes.into_wire()
    }
}
