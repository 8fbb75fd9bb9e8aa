//! The stages of one put, each a type that offers only the operations of this stage.
//!
//! A stage that is dropped before its block is committed revokes its grants. So the space and the key are
//! free before the reservation expires.

use crate::revoker::{Revoker, Ticket};
use kvpool_proto::{CommitColumns, CommitItem};
use kvpool_transport::{TransferError, TransferResult};
use kvpool_types::{Checksum, Code, Epoch, Key, Length, SegmentId, Version};
use smallvec::SmallVec;

/// A reservation that is revoked on drop unless it is used up.
#[derive(Debug)]
struct Claim<'a> {
    ticket: Option<Ticket>,
    revoker: &'a Revoker,
}

impl Claim<'_> {
    fn version(&self) -> Version {
        self.ticket
            .as_ref()
            .map_or(Version(0), |ticket| ticket.version)
    }

    fn epoch(&self) -> Epoch {
        self.ticket.as_ref().map_or(Epoch(0), |ticket| ticket.epoch)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.revoker.give_back(ticket);
        }
    }
}

/// Space is granted for the block's replicas, and the replicas are being written.
#[derive(Debug)]
pub(super) struct Reserved<'a> {
    claim: Claim<'a>,
    outstanding: usize,
    written: SmallVec<[(SegmentId, Checksum); 1]>,
    failed: Option<TransferError>,
}

/// At least one replica is fully written.
#[derive(Debug)]
pub(super) struct Written<'a> {
    claim: Claim<'a>,
    checksum: Checksum,
    segments: SmallVec<[SegmentId; 1]>,
}

impl<'a> Reserved<'a> {
    /// A reservation of `replicas` extents for `key`.
    pub(super) fn new(
        key: Key,
        version: Version,
        epoch: Epoch,
        replicas: usize,
        revoker: &'a Revoker,
    ) -> Self {
        Self {
            claim: Claim {
                ticket: Some(Ticket {
                    key,
                    version,
                    epoch,
                }),
                revoker,
            },
            outstanding: replicas,
            written: SmallVec::new(),
            failed: None,
        }
    }

    /// Records the result of one replica's write.
    pub(super) fn record(&mut self, segment: SegmentId, result: TransferResult) {
        debug_assert!(
            self.outstanding > 0,
            "a replica more was written than granted"
        );
        self.outstanding = self.outstanding.saturating_sub(1);
        match result {
            Ok(checksum) => self.written.push((segment, checksum)),
            Err(error) => self.failed = Some(error),
        }
    }

    /// Whether every replica has a result.
    pub(super) const fn is_done(&self) -> bool {
        self.outstanding == 0
    }

    /// The next stage, if at least one replica was written; else the last failure.
    ///
    /// Replicas whose bytes differ can only come from a buffer that changed meanwhile. The replicas that
    /// agree with the first one are kept.
    pub(super) fn finish(self) -> Result<Written<'a>, TransferError> {
        let Some((_, checksum)) = self.written.first().copied() else {
            return Err(self.failed.unwrap_or(TransferError {
                code: Code::Internal,
                message: "no replica was written".to_owned(),
            }));
        };
        Ok(Written {
            claim: self.claim,
            checksum,
            segments: self
                .written
                .iter()
                .filter(|(_, sum)| *sum == checksum)
                .map(|(segment, _)| *segment)
                .collect(),
        })
    }
}

impl Written<'_> {
    /// The epoch that granted the reservation. Only this epoch can commit it.
    pub(super) fn epoch(&self) -> Epoch {
        self.claim.epoch()
    }

    /// The block's entry in a commit. `parent` is the parent's index in the commit plus 1, or 0 for none.
    pub(super) fn item(&self, length: Length, parent: u32) -> CommitItem {
        CommitItem {
            version: self.claim.version().0,
            length: length.0,
            checksum: self.checksum.0,
            segments: self.segments.iter().map(|segment| segment.0).collect(),
            parent,
        }
    }

    /// Whether exactly one segment was written.
    pub(super) fn is_on_one(&self) -> bool {
        self.segments.len() == 1
    }

    /// Appends the entry of [`Written::item`] to a commit in columns.
    pub(super) fn add_to(&self, columns: &mut CommitColumns, length: Length, parent: u32) {
        columns.versions.push(self.claim.version().0);
        columns.lengths.push(length.0);
        columns.checksums.push(self.checksum.0);
        columns
            .segments
            .extend(self.segments.first().map(|id| id.0));
        columns.parents.push(parent);
    }

    /// Marks the reservation as used up, so that nothing is revoked. Returns its number of replicas.
    pub(super) fn used_up(mut self) -> usize {
        self.claim.ticket = None;
        self.segments.len()
    }
}
