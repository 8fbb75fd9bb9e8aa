//! The two encodings of a batch of puts: one message for each key, or columns.

use super::{NodeTable, bytes};
use crate::directory::Replica;
use crate::placement::Segments;
use crate::pool::{CommitItem, Granted};
use crate::service::refused::Refused;
use crate::service::request::check_lengths;
use ::bytes::BytesMut;
use kvpool_proto as proto;
use kvpool_types::grant::MAC_BYTES;
use kvpool_types::{Checksum, Code, Epoch, Extent, GrantId, Key, Length, SegmentId, Version};
use smallvec::smallvec;

type Outcome = Result<Granted, Code>;

/// Signs grants and collects their nodes.
pub(super) struct Signing<'a> {
    epoch: Epoch,
    segments: Segments<'a>,
    nodes: NodeTable,
}

impl<'a> Signing<'a> {
    pub(super) fn new(epoch: Epoch, segments: Segments<'a>) -> Self {
        Self {
            epoch,
            segments,
            nodes: NodeTable::default(),
        }
    }

    /// The index of the granted extent's node, and the signature; `None` when the node has left.
    fn sign(
        &mut self,
        version: Version,
        replica: &Replica,
        length: Length,
    ) -> Option<(u32, [u8; MAC_BYTES])> {
        let node = &self.segments.get(replica.segment)?.node;
        let extent = Extent {
            segment: replica.segment,
            offset: replica.offset,
            length,
        };
        let id = GrantId(version.0);
        let grant = node.signer.sign(node.incarnation, self.epoch, id, extent);
        let node = self.nodes.index(&self.segments, replica)?;
        Some((node, grant.mac))
    }

    /// The outcomes in columns, if each grant has one extent and no node has left.
    pub(super) fn columns(
        &mut self,
        outcomes: &[Outcome],
        lengths: &[Length],
    ) -> Option<proto::ReservationColumns> {
        let count = outcomes.len();
        let mut macs = BytesMut::with_capacity(count * MAC_BYTES);
        let mut columns = proto::ReservationColumns {
            codes: Vec::with_capacity(count),
            versions: Vec::with_capacity(count),
            nodes: Vec::with_capacity(count),
            segments: Vec::with_capacity(count),
            offsets: Vec::with_capacity(count),
            ..Default::default()
        };
        let mut push = |code: Code, version, node, segment, offset, mac: &[u8]| {
            columns.codes.push(code.to_wire().into());
            columns.versions.push(version);
            columns.nodes.push(node);
            columns.segments.push(segment);
            columns.offsets.push(offset);
            macs.extend_from_slice(mac);
        };
        for (outcome, length) in outcomes.iter().zip(lengths) {
            match outcome {
                Ok(Granted { version, replicas }) => {
                    let [replica] = replicas.as_slice() else {
                        return None;
                    };
                    let (node, mac) = self.sign(*version, replica, *length)?;
                    let Replica {
                        segment, offset, ..
                    } = replica;
                    push(Code::Ok, version.0, node, segment.0, offset.0, &mac);
                }
                Err(code) => push(*code, 0, 0, 0, 0, &[0; MAC_BYTES]),
            }
        }
        columns.macs = macs.freeze();
        Some(columns)
    }

    /// The outcomes as one message each.
    pub(super) fn each(
        &mut self,
        outcomes: &[Outcome],
        lengths: &[Length],
    ) -> Vec<proto::Reservation> {
        let reservation = |(outcome, length): (&Outcome, &Length)| match outcome {
            Ok(Granted { version, replicas }) => proto::Reservation {
                code: Code::Ok.to_wire().into(),
                version: version.0,
                extents: replicas
                    .iter()
                    .filter_map(|replica| {
                        let (node, mac) = self.sign(*version, replica, *length)?;
                        Some(proto::GrantedExtent {
                            node,
                            segment: replica.segment.0,
                            offset: replica.offset.0,
                            mac: bytes(&mac),
                        })
                    })
                    .collect(),
            },
            Err(code) => proto::Reservation {
                code: code.to_wire().into(),
                ..Default::default()
            },
        };
        outcomes.iter().zip(lengths).map(reservation).collect()
    }

    /// The nodes that the indexes name.
    pub(super) fn into_nodes(self) -> Vec<proto::NodeAddress> {
        self.nodes.into_wire()
    }
}

/// The items of a commit, in either of the two encodings.
pub(super) enum Items<'a> {
    Each(&'a [proto::CommitItem]),
    Columns(&'a proto::CommitColumns),
}

impl<'a> Items<'a> {
    /// Checks that the request has one item for each of `count` keys.
    pub(super) fn read(request: &'a proto::CommitRequest, count: usize) -> Result<Self, Refused> {
        let Some(columns) = &request.columns else {
            check_lengths("items", request.items.len(), count)?;
            return Ok(Self::Each(&request.items));
        };
        check_lengths("items beside columns", request.items.len(), 0)?;
        check_lengths("versions", columns.versions.len(), count)?;
        check_lengths("lengths", columns.lengths.len(), count)?;
        check_lengths("checksums", columns.checksums.len(), count)?;
        check_lengths("segments", columns.segments.len(), count)?;
        if !columns.parents.is_empty() {
            check_lengths("parents", columns.parents.len(), count)?;
        }
        Ok(Self::Columns(columns))
    }

    /// The commit item of a key, and the number of its parent: 0 for none. The item's own parent is
    /// not set.
    pub(super) fn get(&self, at: usize, key: Key) -> (CommitItem, u32) {
        /// The value at `at`; zero if the column is omitted.
        fn of<T: Copy + Default>(column: &[T], at: usize) -> T {
            column.get(at).copied().unwrap_or_default()
        }
        let (version, length, checksum, segments, parent) = match self {
            Self::Each(items) => {
                let item = items
                    .get(at)
                    .expect("invariant: there is an item for each key");
                let segments = item.segments.iter().map(|id| SegmentId(*id)).collect();
                let (length, checksum) = (item.length, item.checksum);
                (item.version, length, checksum, segments, item.parent)
            }
            Self::Columns(columns) => (
                of(&columns.versions, at),
                of(&columns.lengths, at),
                of(&columns.checksums, at),
                smallvec![SegmentId(of(&columns.segments, at))],
                of(&columns.parents, at),
            ),
        };
        let item = CommitItem {
            key,
            version: Version(version),
            length: Length(length),
            checksum: Checksum(checksum),
            segments,
            parent: None,
        };
        (item, parent)
    }
}
