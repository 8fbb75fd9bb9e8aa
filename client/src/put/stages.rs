//! The stages of one put, each a type: what may be done next is what the type offers.
//!
//! A stage that is dropped before its block is committed gives the grants back. So the space and the key are
//! free again before the reservation expires.

use crate::revoker::{Revoker, Ticket};
use kvpool_proto::{CommitColumns, CommitItem};
use kvpool_transport::{TransferError, TransferResult};
use kvpool_types::{Checksum, Code, Epoch, Key, Length, SegmentId, Version};
use smallvec::SmallVec;

/// A reservation that is given back unless it is used up.
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

/// Space is granted for the block's replicas; their bytes are on the way.
#[derive(Debug)]
pub(super) struct Reserved<'a> {
    claim: Claim<'a>,
    outstanding: usize,
    written: SmallVec<[(SegmentId, Checksum); 1]>,
    failed: Option<TransferError>,
}

/// At least one replica's bytes are all in place.
#[derive(Debug)]
pub(super) struct Written<'a> {
    claim: Claim<'a>,
    checksum: Checksum,
    segments: SmallVec<[SegmentId; 1]>,
}

impl<'a> Reserved<'a> {
    /// A reservation of `replicas` for `key`.
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

    /// Records what became of one replica.
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

    /// Whether every replica came to its end.
    pub(super) const fn is_done(&self) -> bool {
        self.outstanding == 0
    }

    /// The next stage, when at least one replica was written; else the last failure.
    ///
    /// Replicas whose bytes differ can only come from a buffer that changed meanwhile. Those that
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
    /// The epoch that granted it: the only one that can commit it.
    pub(super) fn epoch(&self) -> Epoch {
        self.claim.epoch()
    }

    /// What the commit says of it; `parent` counts from 1 among the keys of the call, 0 for none.
    pub(super) fn item(&self, length: Length, parent: u32) -> CommitItem {
        CommitItem {
            version: self.claim.version().0,
            length: length.0,
            checksum: self.checksum.0,
            segments: self.segments.iter().map(|segment| segment.0).collect(),
            parent,
        }
    }

    /// Whether it was written to one segment.
    pub(super) fn is_on_one(&self) -> bool {
        self.segments.len() == 1
    }

    /// The same as [`Written::item`], as the next one of columns.
    pub(super) fn add_to(&self, columns: &mut CommitColumns, length: Length, parent: u32) {
        columns.versions.push(self.claim.version().0);
        columns.lengths.push(length.0);
        columns.checksums.push(self.checksum.0);
        columns
            .segments
            .extend(self.segments.first().map(|id| id.0));
        columns.parents.push(parent);
    }

    /// The reservation is used up: nothing is given back. How many replicas it was.
    pub(super) fn used_up(mut self) -> usize {
        self.claim.ticket = None;
        self.segments.len()
    }
}
