//! Decides which process or device may touch which bytes, and when an extent can no longer be touched.
//!
//! One [`Fence`] holds the state by which a node keeps the pool's third invariant: no extent is reused while
//! anything can still read or write it. The caller's lock protects this state. The fence does no I/O. It reads
//! the clock only to find reads that take too long.
//!
//! ```text
//!              prove (mac, term)      admitted             finished
//!   grant ─────────────────────► ─────────────► touch ───────────────► record
//!                                                 │                      │
//!   Fence(ticket, grant, extent) ── closes ───────┴──────────────────────┘ forgotten
//!                                   waits for the touch to end, then: fenced(ticket)
//! ```
//!
//! *Touches* are *receives*, *loads* from media, announced shared-memory writes (*holds*) and *pins* of views. A
//! receive is a write over TCP or RDMA, or a copy from another node. A new term aborts receives, and they end soon. A
//! load may not, so the node reports its extent as held. Touches never overlap: a write is refused while
//! anything touches a byte of its extent, and only a written extent, whole, can be pinned.
//!
//! Clients also pin views on *boards*, in memory that they share with the node, without a message. So the
//! node reads all boards whenever it decides on an extent, and again from time to time while a ticket
//! waits for a pin. An extent that a board names is never reported fenced. A client that pins more than
//! its share is counted, and the node refuses its requests.
//!
//! All state is kept by segment index and offset in the node's own memory, not by the master's segment
//! numbers. A new incarnation gets new segment numbers, but processes still hold the same memory.
//!
//! ADR 0004 says why every extent is freed by one rule.

mod admit;
mod boards;
mod floors;
mod loads;
mod ranges;
mod reading;
mod record;
mod rights;
mod touch;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub(crate) use admit::Proven;
pub(crate) use ranges::Range;
pub(crate) use touch::PeerKey;

use boards::{Boards, Pinned};
use floors::Floors;
use kvpool_transport::host::{Abort, Refused};
use kvpool_types::{
    Checksum, Code, Epoch, Extent, GrantId, GrantSigner, Incarnation, Length, Offset, SegmentId,
    Version,
};
use loads::Unrecorded;
use ranges::Ranges;
use reading::Reading;
use record::{Record, Sums};
use rights::ReadTerm;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use touch::{Held, Touch, Toucher};

/// The index of one of the node's own segments, in the order of its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SegmentIndex(pub(crate) usize);

/// A range of one of the node's own segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    /// The segment.
    pub(crate) segment: SegmentIndex,
    /// The bytes of the segment.
    pub(crate) range: Range,
}

impl Span {
    /// Whether the two spans share a byte.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let (one, two) = (self.range, other.range);
        self.segment == other.segment && one.start < two.end && two.start < one.end
    }
}

/// The state that a master's welcome sets.
#[derive(Clone, Debug)]
pub(crate) struct Term {
    /// The epoch that the node is now in.
    pub(crate) epoch: Epoch,
    /// The signer with the key of the epoch's grants.
    pub(crate) signer: GrantSigner,
    /// The master's number for each of the node's segments, in order.
    pub(crate) segments: Vec<SegmentId>,
    /// How many milliseconds the master's clock is ahead of this node's. `None`: the master signs no
    /// locations.
    pub(crate) ahead_ms: Option<i64>,
    /// Whether the master reports which loads have durable records.
    pub(crate) says_what_is_recorded: bool,
}

/// Why a welcome is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TermError {
    /// The master's term is over: the node has seen a later one.
    #[error("epoch {offered} is below epoch {seen}, which this node has seen")]
    Deposed {
        /// The epoch in the welcome.
        offered: Epoch,
        /// The highest epoch that the node was welcomed to.
        seen: Epoch,
    },
    /// The welcome numbers another count of segments than the node has.
    #[error("the master numbers {theirs} segments, this node offered {ours}")]
    SegmentCount {
        /// The count in the welcome.
        theirs: usize,
        /// The node's count.
        ours: usize,
    },
    /// The master gives this incarnation's segments other numbers, so it does not know their blocks.
    #[error("the master has given other numbers to this node's segments")]
    Renumbered,
}

/// One extent to fence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FenceItem {
    /// The master's number for this request, which the answer repeats.
    pub(crate) ticket: u64,
    /// The grant to close, if any.
    pub(crate) grant: Option<GrantId>,
    /// The first grant on the extent that the master gives only after the answer. `None`: the master does not
    /// say.
    pub(crate) before: Option<GrantId>,
    /// The extent to fence.
    pub(crate) extent: Extent,
}

/// Receives to abort. The caller aborts them after it has released the lock.
pub(crate) type Aborts = Vec<Arc<dyn Abort>>;

/// The state of one segment's bytes.
#[derive(Debug)]
struct Space {
    size: Length,
    records: Ranges<Record>,
    floors: Floors,
    touches: Ranges<Touch>,
}

impl Space {
    /// Whether `range` was or is being written under a grant of `epoch` whose id is at least `before`.
    fn is_granted_since(&self, before: GrantId, range: Range, epoch: Epoch) -> bool {
        let mut records = self.records.overlapping(range);
        let mut touches = self.touches.overlapping(range);
        // A grant of another epoch or another pool is closed, whatever its number.
        records.any(|(_, record)| record.epoch == epoch && record.grant >= before)
            || touches.any(|(_, touch)| !touch.closed && touch.grant >= before)
    }
}

/// The limits of a fence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The most bytes that one client may hold: its announced writes and its pinned extents.
    pub(crate) held_per_client: Length,
}

/// The number of touches, tickets and records of a fence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census {
    /// Receives in progress: writes over TCP or RDMA, and copies from other nodes.
    pub(crate) receives: u64,
    /// Loads from media in progress.
    pub(crate) loads: u64,
    /// Announced shared-memory writes.
    pub(crate) holds: u64,
    /// The counts of the pins of views: pins by request, and pins on boards.
    pub(crate) pins: u64,
    /// The bytes that processes hold. An announced write or a pinned extent counts once per process. A pin on
    /// a board always counts.
    pub(crate) held: Length,
    /// Pin boards.
    pub(crate) boards: u64,
    /// Processes whose pins on boards exceed the limit of one process.
    pub(crate) over_cap: u64,
    /// Fence tickets that wait.
    pub(crate) tickets: u64,
    /// Written extents.
    pub(crate) records: u64,
    /// Ranges with floors, which refuse closed grants.
    pub(crate) floors: u64,
}

impl Census {
    /// The count of the touches of this kind.
    const fn of(&mut self, toucher: &Toucher) -> &mut u64 {
        match toucher {
            Toucher::Receive { .. } => &mut self.receives,
            Toucher::Load => &mut self.loads,
            Toucher::Hold => &mut self.holds,
            Toucher::Pins { .. } => &mut self.pins,
        }
    }
}

/// Which extents a process or device may touch, and the fence tickets that wait.
#[derive(Debug)]
pub(crate) struct Fence {
    limits: Limits,
    incarnation: Incarnation,
    term: Option<Term>,
    /// The key and clock for judging read rights, while the term's master signs them.
    reads: Option<ReadTerm>,
    /// Whether reads need a right.
    wants_rights: bool,
    /// The reads in progress, recorded while reads need signed locations.
    reading: Arc<Reading>,
    /// Loads whose records may not be durable.
    unrecorded: Unrecorded,
    /// Every number that a segment has had in this process, with the incarnation in which it had it. Another
    /// pool may give the number to another segment. A pin names the segment by its number at the time of the
    /// pin.
    numbers: HashMap<(Incarnation, SegmentId), SegmentIndex>,
    spaces: Vec<Space>,
    peers: HashMap<PeerKey, Held>,
    boards: Boards,
    waiting: HashMap<u64, Span>,
    /// The tickets that wait for a pin on a board, or for a read.
    on_boards: Vec<u64>,
    fenced: Vec<u64>,
    draining: bool,
    census: Census,
}

impl Fence {
    /// The fence of segments with these sizes. It admits nothing before a welcome.
    pub(crate) fn new(incarnation: Incarnation, sizes: &[Length], limits: Limits) -> Self {
        let spaces = sizes.iter().map(|&size| Space {
            size,
            records: Ranges::default(),
            floors: Floors::default(),
            touches: Ranges::default(),
        });
        Self {
            limits,
            incarnation,
            term: None,
            reads: None,
            wants_rights: false,
            reading: Arc::default(),
            unrecorded: Unrecorded::default(),
            numbers: HashMap::new(),
            spaces: spaces.collect(),
            peers: HashMap::new(),
            boards: Boards::default(),
            waiting: HashMap::new(),
            on_boards: Vec::new(),
            fenced: Vec::new(),
            draining: false,
            census: Census::default(),
        }
    }

    pub(crate) const fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The present epoch; 0 before the first welcome.
    pub(crate) fn epoch(&self) -> Epoch {
        self.term.as_ref().map_or(Epoch(0), |term| term.epoch)
    }

    /// The master's numbers of the segments; empty before the first welcome.
    pub(crate) fn segment_ids(&self) -> &[SegmentId] {
        self.term.as_ref().map_or(&[], |term| &term.segments)
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining
    }

    pub(crate) const fn limits(&self) -> Limits {
        self.limits
    }

    pub(crate) fn census(&self) -> Census {
        let mut census = Census {
            tickets: self.waiting.len() as u64,
            records: self.spaces.iter().map(|s| s.records.len() as u64).sum(),
            floors: self.spaces.iter().map(|s| s.floors.len() as u64).sum(),
            ..self.census
        };
        self.count_boards(&mut census);
        census
    }

    /// Enters a term. A higher epoch ends all grants of the previous one. Their receives are aborted, and
    /// bytes that their holders still write do not count. Reads of signed locations are aborted too.
    pub(crate) fn enter(&mut self, term: Term) -> Result<Aborts, TermError> {
        if term.segments.len() != self.spaces.len() {
            return Err(TermError::SegmentCount {
                theirs: term.segments.len(),
                ours: self.spaces.len(),
            });
        }
        let seen = self.epoch();
        if term.epoch < seen {
            return Err(TermError::Deposed {
                offered: term.epoch,
                seen,
            });
        }
        if let Some(present) = &self.term
            && present.segments != term.segments
        {
            return Err(TermError::Renumbered);
        }
        let mut aborts = Vec::new();
        if term.epoch > seen {
            self.boards.open(term.epoch);
            aborts = self.close_everything();
            self.reading.all(&mut aborts);
        }
        for (position, &id) in term.segments.iter().enumerate() {
            let number = (self.incarnation, id);
            self.numbers.insert(number, SegmentIndex(position));
        }
        let reads = |ahead_ms| ReadTerm::new(&term.signer, self.incarnation, term.epoch, ahead_ms);
        self.reads = term.ahead_ms.map(reads);
        self.term = Some(term);
        Ok(aborts)
    }

    /// Begins a new incarnation, which knows no block and no grant of the old one. Extents that processes
    /// still hold, or that disks may write, stay held.
    pub(crate) fn renew(&mut self, incarnation: Incarnation) -> Aborts {
        self.boards.close();
        self.incarnation = incarnation;
        self.term = None;
        self.reads = None;
        for space in &mut self.spaces {
            space.records.clear();
        }
        self.unrecorded = Unrecorded::default();
        let mut aborts = self.close_everything();
        self.reading.all(&mut aborts);
        aborts
    }

    /// Closes every grant of the present epoch and forgets its tickets, since the ticket numbers belong to
    /// that term's master.
    fn close_everything(&mut self) -> Aborts {
        self.waiting.clear();
        self.on_boards.clear();
        self.fenced.clear();
        let mut aborts = Vec::new();
        for space in &mut self.spaces {
            space.floors.clear();
            for (_, touch) in space.touches.iter_mut() {
                touch.tickets.clear();
                close(touch, &mut aborts);
            }
        }
        aborts
    }

    /// Refuses new writes and pins from now on.
    pub(crate) fn drain(&mut self) {
        self.draining = true;
        self.boards.close();
    }

    /// Fences extents: closes their grants and forgets what was written under them. [`Fence::take_fenced`]
    /// reports each ticket once nothing touches its extent any more.
    ///
    /// A master repeats unanswered tickets in a new session. It may receive the answer of the old session
    /// first, and grant the extent to another block. The repeated ticket must not remove that block.
    pub(crate) fn fence(&mut self, items: &[FenceItem]) -> Aborts {
        let epoch = self.epoch();
        let mut aborts = Vec::new();
        // This call of `look` sees every pin that was taken before the master freed these extents.
        let pinned = self.look();
        for item in items {
            let here = self.clamp(&item.extent);
            let Some((span, space)) =
                here.and_then(|span| Some((span, self.spaces.get_mut(span.segment.0)?)))
            else {
                // The extent does not lie in this node, so nothing can touch it.
                self.fenced.push(item.ticket);
                continue;
            };
            let is_answered = |before| space.is_granted_since(before, span.range, epoch);
            if item.before.is_some_and(is_answered) {
                self.fenced.push(item.ticket);
                continue;
            }
            if let Some(grant) = item.grant {
                space.floors.raise(span.range, grant);
            }
            for (range, record) in space.records.remove_overlapping(span.range) {
                self.unrecorded.forget(&record);
                if record.epoch == epoch {
                    space.floors.raise(range, record.grant);
                }
            }
            for (_, touch) in space.touches.overlapping_mut(span.range) {
                close(touch, &mut aborts);
            }
            self.settle(item.ticket, span, &pinned);
        }
        aborts
    }

    /// The tickets that were fenced since the last call.
    pub(crate) fn take_fenced(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.fenced)
    }

    pub(crate) fn has_fenced(&self) -> bool {
        !self.fenced.is_empty()
    }

    /// The extents that processes hold or have pinned, and those that a disk may still write, under the present
    /// segment numbers.
    pub(crate) fn held(&self) -> Vec<Extent> {
        let ids = self.segment_ids();
        let mut extents: Vec<Extent> = ids
            .iter()
            .zip(&self.spaces)
            .flat_map(|(&segment, space)| {
                let held = space
                    .touches
                    .iter()
                    .filter(|(_, touch)| !matches!(touch.toucher, Toucher::Receive { .. }));
                held.map(move |(range, _)| extent(segment, range))
            })
            .collect();
        // Each extent is listed once. Some extents overlap others.
        let mut seen: HashSet<Extent> = extents.iter().copied().collect();
        self.each_board_pin(|_, span| {
            let id = ids.get(span.segment.0);
            let pinned = id.map(|&segment| extent(segment, span.range));
            extents.extend(pinned.filter(|pinned| seen.insert(*pinned)));
        });
        extents
    }

    /// Reports the ticket, or makes it wait for a touch of its extent.
    fn settle(&mut self, ticket: u64, span: Span, pinned: &Pinned) {
        let blocker = self
            .spaces
            .get_mut(span.segment.0)
            .and_then(|space| space.touches.overlapping_mut(span.range).next());
        match blocker {
            Some((_, touch)) => {
                if self.waiting.insert(ticket, span).is_none() {
                    touch.tickets.push(ticket);
                }
            }
            None if pinned.touches(span) => {
                if self.waiting.insert(ticket, span).is_none() {
                    self.on_boards.push(ticket);
                }
            }
            None => {
                self.waiting.remove(&ticket);
                self.fenced.push(ticket);
            }
        }
    }

    /// Removes a touch and settles the tickets that waited for it.
    fn untouch(&mut self, span: Span) -> Option<Touch> {
        let space = self.spaces.get_mut(span.segment.0)?;
        let mut touch = space.touches.remove(span.range)?;
        match touch.toucher {
            Toucher::Pins { .. } => {}
            _ => *self.census.of(&touch.toucher) -= 1,
        }
        let tickets = std::mem::take(&mut touch.tickets);
        if !tickets.is_empty() {
            let pinned = self.look();
            for ticket in tickets {
                if let Some(waited) = self.waiting.remove(&ticket) {
                    self.settle(ticket, waited, &pinned);
                }
            }
        }
        Some(touch)
    }

    /// Records a whole written extent, unless its grant was closed during the write.
    fn record(&mut self, span: Span, touch: &Touch, sums: Vec<Checksum>) -> Code {
        if touch.closed {
            return Code::GrantEnded;
        }
        self.keep(span, touch.grant, sums.len(), sums.into())
    }

    /// Records a whole extent that was written under `grant`.
    fn keep(&mut self, span: Span, grant: GrantId, count: usize, sums: Sums) -> Code {
        if count as u64 != span.range.length().chunks() {
            return Code::InvalidArgument;
        }
        let epoch = self.epoch();
        let Some(space) = self.spaces.get_mut(span.segment.0) else {
            return Code::OutOfRange;
        };
        // The record itself refuses every other grant of this epoch from now on.
        space.floors.forget(span.range);
        let record = Record {
            epoch,
            grant,
            version: Version(grant.0),
            sums,
        };
        space.records.insert(span.range, record);
        Code::Ok
    }

    /// The span of an extent in the node's own memory.
    pub(crate) fn locate(&self, extent: &Extent) -> Result<Span, Refused> {
        let segment = self.segment(extent.segment)?;
        let size = self.spaces.get(segment.0).map_or(Length(0), |s| s.size);
        let end = extent.end().filter(|end| end.0 <= size.0);
        match end {
            Some(end) if extent.length > Length(0) => Ok(Span {
                segment,
                range: Range {
                    start: extent.offset,
                    end,
                },
            }),
            _ => Err(refused(
                Code::OutOfRange,
                format!("extent {extent} is empty or outside its segment of {size} bytes"),
            )),
        }
    }

    /// The span of the part of an extent that lies in the node's own memory.
    fn clamp(&self, extent: &Extent) -> Option<Span> {
        let segment = self.segment(extent.segment).ok()?;
        let size = self.spaces.get(segment.0)?.size;
        let end = extent.end().map_or(size.0, |end| end.0.min(size.0));
        let range = Range {
            start: extent.offset,
            end: Offset(end),
        };
        (range.length() > Length(0)).then_some(Span { segment, range })
    }

    /// The index of the segment that the master's number means.
    pub(crate) fn segment(&self, id: SegmentId) -> Result<SegmentIndex, Refused> {
        let position = self.segment_ids().iter().position(|&ours| ours == id);
        position.map(SegmentIndex).ok_or_else(|| {
            refused(
                Code::OutOfRange,
                format!("segment {id} is not one of this node's"),
            )
        })
    }
}

fn extent(segment: SegmentId, range: Range) -> Extent {
    Extent {
        segment,
        offset: range.start,
        length: range.length(),
    }
}

/// Closes the grant under which a touch writes, and collects the abort of a receive.
fn close(touch: &mut Touch, aborts: &mut Aborts) {
    touch.closed = true;
    if let Toucher::Receive { abort } = &touch.toucher {
        aborts.push(Arc::clone(abort));
    }
}

fn refused(code: Code, message: impl Into<String>) -> Refused {
    Refused {
        code,
        message: message.into(),
    }
}
