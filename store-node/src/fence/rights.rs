//! The read rights that a master signs into the locations that it returns.
//!
//! A node that judges tokens requires a right for each extent that is read over its ports, and judges it
//! before a byte moves. A right names the extent, the version in it and a deadline on the master's clock. It
//! is signed with the key of the grants. A node without tokens requires no rights.

use super::reading::ReadGuard;
use super::{Fence, Record, Span, refused};
use kvpool_transport::host::{Abort, Refused};
use kvpool_types::wire::data::ReadItem;
use kvpool_types::{Code, Epoch, Extent, GrantId, GrantSigner, Incarnation, ReadSigner, Version};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// The key and clock by which the rights of one term are judged.
#[derive(Debug)]
pub(super) struct ReadTerm {
    signer: ReadSigner,
    /// How many milliseconds the master's clock is ahead of this node's.
    ahead_ms: AtomicI64,
}

impl ReadTerm {
    pub(super) fn new(
        signer: &GrantSigner,
        incarnation: Incarnation,
        epoch: Epoch,
        ahead_ms: i64,
    ) -> Self {
        Self {
            signer: signer.for_reads(incarnation, epoch),
            ahead_ms: AtomicI64::new(ahead_ms),
        }
    }
}

impl Fence {
    /// Requires rights for reads from now on, in every term whose master signs locations.
    pub(crate) const fn demand_rights(&mut self) {
        self.wants_rights = true;
    }

    /// Whether this fence requires rights.
    pub(crate) const fn wants_rights(&self) -> bool {
        self.wants_rights
    }

    /// Records how many milliseconds the master's clock is ahead.
    pub(crate) fn hear_clock(&self, ahead_ms: i64) {
        if let Some(reads) = &self.reads {
            reads.ahead_ms.store(ahead_ms, Ordering::Relaxed);
        }
    }

    /// Judges the right of a read, if rights are required. `now_ms` is this node's clock.
    pub(crate) fn prove_read(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        item: &ReadItem,
        now_ms: fn() -> u64,
    ) -> Result<(), Refused> {
        if !self.wants_rights {
            return Ok(());
        }
        // A right of another term was signed with another key.
        self.check_term(incarnation, epoch)?;
        let Some(reads) = &self.reads else {
            return Ok(());
        };
        let extent = item.extent;
        let Some(right) = &item.right else {
            let why = format!("the read of {extent} shows no location that the master signed");
            return Err(refused(Code::LocationRefused, why));
        };
        if !reads.signer.verify(extent, right) {
            let why = format!("the location of {extent} has an invalid signature");
            return Err(refused(Code::LocationRefused, why));
        }
        let ahead = reads.ahead_ms.load(Ordering::Relaxed);
        let masters_now = now_ms().saturating_add_signed(ahead);
        if masters_now > right.deadline_ms {
            let late = masters_now - right.deadline_ms;
            let why = format!("the location of {extent} ended {late} ms ago");
            return Err(refused(Code::LocationExpired, why));
        }
        self.check_version(&extent, right.version)
    }

    /// Records an admitted read, if rights are required. The extent gets no other block until the read ends.
    pub(crate) fn begin_read(&self, span: Span, abort: &Arc<dyn Abort>) -> Option<ReadGuard> {
        let is_noted = self.wants_rights && span.range.start < span.range.end;
        is_noted.then(|| self.reading.begin(span, Arc::clone(abort)))
    }

    /// Refuses a location whose extent holds another version now. An extent without a record is judged later.
    fn check_version(&self, extent: &Extent, version: Version) -> Result<(), Refused> {
        let span = self.locate(extent)?;
        let space = self.spaces.get(span.segment.0);
        let record = space.and_then(|space| space.records.get(span.range));
        match record.map(|record| record.version) {
            Some(there) if there != version && there != Version(0) => Err(refused(
                Code::Missing,
                format!("version {version} is not written at {extent} any more"),
            )),
            _ => Ok(()),
        }
    }

    /// Records that a copy of `version` was written to `extent` under `grant`. Version 0 means that the
    /// master, of an earlier release, did not name the version.
    pub(crate) fn is_copy_of(&mut self, extent: &Extent, grant: GrantId, version: Version) {
        self.note_copy(extent, grant, |record| record.version = version);
    }

    /// Changes the record of the block that was written to `extent` under `grant`. `None` if this record no
    /// longer exists.
    pub(super) fn note_copy<T>(
        &mut self,
        extent: &Extent,
        grant: GrantId,
        change: impl FnOnce(&mut Record) -> T,
    ) -> Option<(Span, T)> {
        let span = self.locate(extent).ok()?;
        let space = self.spaces.get_mut(span.segment.0)?;
        let record = space.records.get_mut(span.range)?;
        (record.grant == grant).then(|| (span, change(record)))
    }
}
