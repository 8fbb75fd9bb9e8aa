//! Admits writes, reads and pins, each before a byte moves, and ends them.

use super::touch::{Held, PeerKey, Touch, Toucher};
use super::{Fence, Range, Span, refused};
use kvpool_transport::host::{Abort, Refused};
use kvpool_types::wire::data::ReadItem;
use kvpool_types::{Checksum, Code, Epoch, Extent, Grant, GrantId, Incarnation, Length, Offset};
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// A grant whose proof is valid for one incarnation and epoch. The check of a proof is the slowest step, so
/// it runs under a shared lock. The write's admission compares the term again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proven {
    incarnation: Incarnation,
    epoch: Epoch,
    grant: GrantId,
    extent: Extent,
}

impl Fence {
    /// Checks that a grant was signed for this incarnation in the present epoch.
    pub(crate) fn prove(&self, incarnation: Incarnation, grant: &Grant) -> Result<Proven, Refused> {
        self.check_term(incarnation, grant.epoch)?;
        let proven = self
            .term
            .as_ref()
            .is_some_and(|term| term.signer.verify(incarnation, grant));
        if !proven {
            return Err(refused(
                Code::GrantRefused,
                format!(
                    "grant {} for {} has an invalid signature",
                    grant.id, grant.extent
                ),
            ));
        }
        Ok(Proven {
            incarnation,
            epoch: grant.epoch,
            grant: grant.id,
            extent: grant.extent,
        })
    }

    /// Admits a write whose bytes are copied before the lock of the fence is released. [`Fence::record_now`]
    /// ends it.
    pub(crate) fn admit_now(&mut self, proven: &Proven) -> Result<Span, Refused> {
        let span = self.admit_write(proven)?;
        self.remove_records(span);
        Ok(span)
    }

    /// Records a write that was admitted by [`Fence::admit_now`], with its chunk checksums.
    pub(crate) fn record_now(
        &mut self,
        span: Span,
        grant: GrantId,
        sums: impl ExactSizeIterator<Item = Checksum>,
    ) -> Result<(), Refused> {
        let count = sums.len();
        match self.keep(span, grant, count, sums.collect()) {
            Code::Ok => Ok(()),
            code => Err(refused(
                code,
                format!("{count} chunk checksums do not match the length of grant {grant}"),
            )),
        }
    }

    /// Admits a receive. It lasts until [`Fence::end_receive`].
    pub(crate) fn begin_receive(
        &mut self,
        proven: &Proven,
        abort: Arc<dyn Abort>,
    ) -> Result<Span, Refused> {
        let span = self.admit_write(proven)?;
        let toucher = match abort.ends_soon() {
            true => Toucher::Receive { abort },
            false => Toucher::Load,
        };
        *self.census.of(&toucher) += 1;
        self.touch_to_write(span, Touch::new(toucher, proven.grant));
        Ok(span)
    }

    /// Ends a receive. `sums` has the chunk checksums if all bytes are in place.
    pub(crate) fn end_receive(&mut self, span: Span, sums: Option<Vec<Checksum>>) -> Code {
        let Some(touch) = self.untouch(span) else {
            return Code::GrantEnded;
        };
        match sums {
            Some(sums) => self.record(span, &touch, sums),
            None => Code::Unreachable,
        }
    }

    /// Admits a write by a process through its mapping. It lasts until [`Fence::end_hold`] or
    /// [`Fence::peer_gone`].
    pub(crate) fn begin_hold(&mut self, peer: PeerKey, proven: &Proven) -> Result<(), Refused> {
        let span = self.admit_write(proven)?;
        let held = self.peers.get(&peer);
        if held.is_some_and(|held| held.holds.contains_key(&proven.grant)) {
            // The process still holds a grant of an earlier epoch with the same number. The end of one grant
            // could be taken for the end of the other.
            return Err(refused(
                Code::InProgress,
                format!("{peer} still holds another grant {}", proven.grant),
            ));
        }
        self.check_cap(peer, held, span.range.length())?;
        let held = self.peers.entry(peer).or_default();
        held.holds.insert(proven.grant, span);
        held.bytes.0 += span.range.length().0;
        self.census.held.0 += span.range.length().0;
        self.census.holds += 1;
        self.touch_to_write(span, Touch::new(Toucher::Hold, proven.grant));
        Ok(())
    }

    /// Ends a hold. All bytes are in place if `sums` is not empty.
    pub(crate) fn end_hold(&mut self, peer: PeerKey, grant: GrantId, sums: Vec<Checksum>) -> Code {
        let Entry::Occupied(mut entry) = self.peers.entry(peer) else {
            return Code::GrantEnded;
        };
        let Some(span) = entry.get_mut().holds.remove(&grant) else {
            return Code::GrantEnded;
        };
        entry.get_mut().bytes.0 -= span.range.length().0;
        self.census.held.0 -= span.range.length().0;
        if entry.get().is_empty() {
            entry.remove();
        }
        let Some(touch) = self.untouch(span) else {
            return Code::GrantEnded;
        };
        if sums.is_empty() {
            return Code::Ok;
        }
        self.record(span, &touch, sums)
    }

    /// Judges a read and returns the span that it covers.
    pub(crate) fn read(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        item: &ReadItem,
    ) -> Result<Span, Refused> {
        let span = self.written(epoch, incarnation, &item.extent)?;
        let end = item.from.0.checked_add(item.length.0);
        if end.is_none_or(|end| end > item.extent.length.0) {
            return Err(refused(
                Code::OutOfRange,
                format!(
                    "the range of {} bytes at offset {} exceeds extent {}",
                    item.length, item.from, item.extent
                ),
            ));
        }
        let start = Offset(span.range.start.0 + item.from.0);
        Ok(Span {
            segment: span.segment,
            range: Range {
                start,
                end: Offset(start.0 + item.length.0),
            },
        })
    }

    /// The chunk checksums of a written extent.
    pub(crate) fn sums(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        extent: &Extent,
    ) -> Result<Vec<Checksum>, Refused> {
        let span = self.written(epoch, incarnation, extent)?;
        let space = self.spaces.get(span.segment.0);
        let record = space.and_then(|space| space.records.get(span.range));
        Ok(record
            .map(|record| record.sums.to_vec())
            .unwrap_or_default())
    }

    /// Pins a written extent for a process that reads it in place. Pins of one extent are counted.
    pub(crate) fn pin(
        &mut self,
        peer: PeerKey,
        epoch: Epoch,
        incarnation: Incarnation,
        extent: &Extent,
    ) -> Result<(), Refused> {
        let span = self.written(epoch, incarnation, extent)?;
        if self.draining {
            return Err(draining());
        }
        let held = self.peers.get(&peer);
        let first = held.is_none_or(|held| !held.pins.contains_key(&span));
        if first {
            self.check_cap(peer, held, extent.length)?;
        }
        let held = self.peers.entry(peer).or_default();
        *held.pins.entry(span).or_default() += 1;
        if first {
            held.bytes.0 += extent.length.0;
            self.census.held.0 += extent.length.0;
        }
        self.census.pins += 1;
        let touches = self
            .spaces
            .get_mut(span.segment.0)
            .map(|space| &mut space.touches);
        match touches.and_then(|touches| touches.get_mut(span.range)) {
            Some(Touch {
                toucher: Toucher::Pins { count },
                ..
            }) => *count += 1,
            _ => self.touch(span, Touch::new(Toucher::Pins { count: 1 }, GrantId(0))),
        }
        Ok(())
    }

    /// Removes one pin that was taken in this incarnation, which may be the present one or an earlier one.
    pub(crate) fn unpin(
        &mut self,
        peer: PeerKey,
        incarnation: Incarnation,
        extent: &Extent,
    ) -> Code {
        let segment = self.numbers.get(&(incarnation, extent.segment));
        let (Some(&segment), Some(end)) = (segment, extent.end()) else {
            return Code::OutOfRange;
        };
        let start = extent.offset;
        let range = Range { start, end };
        let span = Span { segment, range };
        let Entry::Occupied(mut entry) = self.peers.entry(peer) else {
            return Code::Missing;
        };
        let Some(count) = entry.get_mut().pins.get_mut(&span) else {
            return Code::Missing;
        };
        *count -= 1;
        if *count == 0 {
            entry.get_mut().pins.remove(&span);
            entry.get_mut().bytes.0 -= extent.length.0;
            self.census.held.0 -= extent.length.0;
            if entry.get().is_empty() {
                entry.remove();
            }
        }
        self.drop_pins(span, 1);
        Code::Ok
    }

    /// Frees everything that a process held. The process has ended, and its mappings with it.
    pub(crate) fn peer_gone(&mut self, peer: PeerKey) {
        self.drop_boards(peer);
        let Some(held) = self.peers.remove(&peer) else {
            return;
        };
        self.census.held.0 -= held.bytes.0;
        for span in held.holds.into_values() {
            self.untouch(span);
        }
        for (span, count) in held.pins {
            self.drop_pins(span, count);
        }
    }

    fn drop_pins(&mut self, span: Span, dropped: u64) {
        self.census.pins -= dropped;
        let touch = self
            .spaces
            .get_mut(span.segment.0)
            .and_then(|space| space.touches.get_mut(span.range));
        if let Some(Touch {
            toucher: Toucher::Pins { count },
            ..
        }) = touch
        {
            *count -= dropped;
            if *count == 0 {
                self.untouch(span);
            }
        }
    }

    fn touch(&mut self, span: Span, touch: Touch) {
        if let Some(space) = self.spaces.get_mut(span.segment.0) {
            space.touches.insert(span.range, touch);
        }
    }

    /// Adds the touch of a write. The write may leave mixed bytes. So it removes the record of an earlier
    /// epoch's write, which was never committed.
    fn touch_to_write(&mut self, span: Span, touch: Touch) {
        self.remove_records(span);
        self.touch(span, touch);
    }

    /// Removes the records of all extents that share a byte with the span.
    fn remove_records(&mut self, span: Span) {
        if let Some(space) = self.spaces.get_mut(span.segment.0) {
            for (_, record) in space.records.remove_overlapping(span.range) {
                self.unrecorded.forget(&record);
            }
        }
    }

    /// The span of a written extent. The caller must name the present incarnation, and no earlier epoch.
    fn written(
        &self,
        epoch: Epoch,
        incarnation: Incarnation,
        extent: &Extent,
    ) -> Result<Span, Refused> {
        self.check_incarnation(incarnation)?;
        if epoch < self.epoch() {
            return Err(self.stale(epoch));
        }
        let span = self.locate(extent)?;
        let space = self.spaces.get(span.segment.0);
        if space.is_none_or(|space| space.records.get(span.range).is_none()) {
            return Err(refused(
                Code::Missing,
                format!("no block is written at {extent}"),
            ));
        }
        Ok(span)
    }

    /// Checks every condition of a write except its proof.
    fn admit_write(&self, proven: &Proven) -> Result<Span, Refused> {
        self.check_term(proven.incarnation, proven.epoch)?;
        if self.draining {
            return Err(draining());
        }
        let (grant, extent) = (proven.grant, &proven.extent);
        let span = self.locate(extent)?;
        let Some(space) = self.spaces.get(span.segment.0) else {
            return Err(refused(
                Code::OutOfRange,
                format!("no segment for {extent}"),
            ));
        };
        if space.floors.highest(span.range) >= Some(grant) {
            return Err(refused(
                Code::GrantEnded,
                format!("grant {grant} for {extent} is fenced"),
            ));
        }
        let mut records = space.records.overlapping(span.range);
        if let Some((_, record)) = records.find(|(_, record)| record.epoch == proven.epoch) {
            let (code, what) = if record.grant > grant {
                (Code::GrantEnded, "has ended: the extent belongs to grant")
            } else {
                (
                    Code::AlreadyWritten,
                    "is too late: the extent was written under grant",
                )
            };
            return Err(refused(
                code,
                format!("grant {grant} for {extent} {what} {}", record.grant),
            ));
        }
        let mut pinned = false;
        self.each_board_pin(|_, pin| pinned |= pin.overlaps(&span));
        if pinned {
            return Err(refused(
                Code::InProgress,
                format!("{extent} is pinned by a view"),
            ));
        }
        if self.wants_rights() && self.reading.overlaps(&span) {
            return Err(refused(Code::InProgress, format!("{extent} is being read")));
        }
        if let Some((_, touch)) = space.touches.overlapping(span.range).next() {
            return Err(refused(
                Code::InProgress,
                format!("{extent} is in use by another client: {touch:?}"),
            ));
        }
        Ok(span)
    }

    pub(super) fn check_term(&self, incarnation: Incarnation, epoch: Epoch) -> Result<(), Refused> {
        self.check_incarnation(incarnation)?;
        // If the epoch is higher, the master of that term has not welcomed this node yet.
        if self.term.is_none() || epoch != self.epoch() {
            return Err(self.stale(epoch));
        }
        Ok(())
    }

    pub(crate) fn check_incarnation(&self, incarnation: Incarnation) -> Result<(), Refused> {
        if incarnation != self.incarnation {
            return Err(refused(
                Code::WrongIncarnation,
                format!(
                    "the request names incarnation {incarnation}, this node is {}",
                    self.incarnation
                ),
            ));
        }
        Ok(())
    }

    fn stale(&self, epoch: Epoch) -> Refused {
        refused(
            Code::StaleEpoch,
            format!(
                "the request names epoch {epoch}, this node is in {}",
                self.epoch()
            ),
        )
    }

    /// Checks the limit of held bytes per process. The limit applies from a process's second extent on. So
    /// every block that fits the node can be put and viewed.
    fn check_cap(&self, peer: PeerKey, held: Option<&Held>, more: Length) -> Result<(), Refused> {
        let held = held.map_or(0, |held| held.bytes.0);
        let bytes = held.saturating_add(self.pinned_bytes(peer).0);
        let cap = self.limits.held_per_client.0;
        if bytes > 0 && bytes.saturating_add(more.0) > cap {
            return Err(refused(
                Code::TooManyHeld,
                format!("{peer} holds {bytes} of at most {cap} bytes and requests {more} more"),
            ));
        }
        Ok(())
    }
}

pub(super) fn draining() -> Refused {
    refused(Code::Draining, "this node is shutting down")
}
