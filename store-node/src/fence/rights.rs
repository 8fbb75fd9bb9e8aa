//! The permissions to read, which a master signs into the locations that it hands out.
//!
//! A node that judges tokens asks whoever reads over its ports for the permission of each extent, and judges it
//! before a byte moves. It names the extent, the version in it and a deadline on the master's clock, and is signed
//! with the key of the grants. A node without tokens asks for none.

use super::reading::ReadGuard;
use super::{Fence, Record, Span, refused};
use kvpool_transport::host::{Abort, Refused};
use kvpool_types::wire::data::ReadItem;
use kvpool_types::{Code, Epoch, Extent, GrantId, GrantSigner, Incarnation, ReadSigner, Version};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// What the permissions of one term are judged by.
#[derive(Debug)]
pub(super) struct ReadTerm {
    signer: ReadSigner,
    /// By how many milliseconds the master's clock is ahead of this node's.
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
    /// Asks for permissions of reads from now on, in every term whose master signs locations.
    pub(crate) const fn demand_rights(&mut self) {
        self.wants_rights = true;
    }

    /// Whether this fence was told to ask for permissions.
    pub(crate) const fn wants_rights(&self) -> bool {
        self.wants_rights
    }

    /// Notes by how many milliseconds the master's clock is ahead.
    pub(crate) fn hear_clock(&self, ahead_ms: i64) {
        if let Some(reads) = &self.reads {
            reads.ahead_ms.store(ahead_ms, Ordering::Relaxed);
        }
    }

    /// Judges the permission of a read, where one is asked for. `now_ms` is this node's clock.
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
        // A permission of another term was signed with another key.
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

    /// Notes a read that was admitted, where permissions are asked for: its extent gets no other block until the
    /// read ends.
    pub(crate) fn begin_read(&self, span: Span, abort: &Arc<dyn Abort>) -> Option<ReadGuard> {
        let is_noted = self.wants_rights && span.range.start < span.range.end;
        is_noted.then(|| self.reading.begin(span, Arc::clone(abort)))
    }

    /// Refuses a location whose extent holds another version by now. An extent that holds none is judged later.
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

    /// Notes that a copy of `version` was written to `extent` under `grant`. Version 0 stands for one that an earlier
    /// version of the master did not name.
    pub(crate) fn is_copy_of(&mut self, extent: &Extent, grant: GrantId, version: Version) {
        self.note_copy(extent, grant, |record| record.version = version);
    }

    /// Changes the record of what was written to `extent` under `grant`. `None` when it is not there any more.
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
