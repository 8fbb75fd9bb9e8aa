//! The progress of a sender towards one receiver.

use crate::Moment;
use crate::room::messages::{ChunkBody, RoomChunk, RoomOffer, RoomRoot};
use crate::room::{PageRectangle, RoomTag};
use kvpool_types::{Checksum, Incarnation};

/// The state of one chunk's write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteState {
    /// The write starts at this moment.
    Waits(Moment),
    UnderWay,
    InPlace(Checksum),
}

/// One receiver, from its sender's view.
#[derive(Clone, Debug, Default)]
pub(super) struct Target {
    pub(super) session: Option<Incarnation>,
    pub(super) offer: Option<RoomOffer>,
    chunks: Vec<(ChunkBody, WriteState)>,
    pub(super) has_aux: bool,
    pub(super) done: Option<(u32, RoomRoot)>,
    pub(super) is_complete: bool,
    /// The receiver has fenced its pages after an abort.
    pub(super) has_aborted: bool,
    /// The receiver's process has ended.
    pub(super) is_gone: bool,
    pub(super) next_retry: Moment,
    pub(super) broken_until: Option<Moment>,
}

impl Target {
    pub(super) fn tag(&self) -> Option<RoomTag> {
        self.offer.as_ref().map(|offer| offer.tag)
    }

    /// Whether a write has been started.
    pub(super) fn has_begun(&self) -> bool {
        let waits = |state: &WriteState| matches!(state, WriteState::Waits(_));
        self.chunks.iter().any(|(_, state)| !waits(state))
    }

    /// Whether a write is under way.
    pub(super) fn writes(&self) -> bool {
        let is = |state: &WriteState| *state == WriteState::UnderWay;
        self.chunks.iter().any(|(_, state)| is(state))
    }

    /// Whether the sender must still tell the receiver of an abort.
    pub(super) fn needs_abort(&self) -> bool {
        self.offer.is_some() && !self.has_aborted && !self.is_gone && !self.is_complete
    }

    pub(super) fn is_broken(&self, now: Moment) -> bool {
        !self.is_complete && self.broken_until.is_some_and(|until| now >= until)
    }

    /// Adds pages as chunks of at most `cells`. An empty rectangle adds no chunk: the receiver holds these
    /// pages.
    pub(super) fn add(&mut self, rectangle: &PageRectangle, cells: u64) {
        if !rectangle.is_empty() {
            let waits = WriteState::Waits(Moment::default());
            let chunks = rectangle.split(cells).into_iter();
            self.chunks
                .extend(chunks.map(|chunk| (ChunkBody::Pages(chunk), waits)));
        }
    }

    pub(super) fn add_aux(&mut self) {
        self.has_aux = true;
        let waits = WriteState::Waits(Moment::default());
        self.chunks.push((ChunkBody::Aux, waits));
    }

    /// The pages times layers whose writes are under way.
    fn cells_under_way(&self) -> u64 {
        let under_way = |(_, state): &&(ChunkBody, WriteState)| *state == WriteState::UnderWay;
        let all = self.chunks.iter().filter(under_way);
        all.map(|(body, _)| cells(body)).sum()
    }

    /// The chunks whose writes start now, while at most `most` cells are under way. A write's deadline counts
    /// from its start. So a write that waits in a connection's queue would lose that time.
    pub(super) fn start(&mut self, now: Moment, most: u64) -> Vec<(u32, ChunkBody)> {
        let mut started = Vec::new();
        let mut under_way = self.cells_under_way();
        for (id, (body, state)) in (0..).zip(&mut self.chunks) {
            let is_due = matches!(state, WriteState::Waits(at) if *at <= now);
            if is_due && fits(under_way, body, most) {
                under_way += cells(body);
                *state = WriteState::UnderWay;
                started.push((id, body.clone()));
            }
        }
        started
    }

    pub(super) fn state(&self, id: u32) -> Option<WriteState> {
        self.chunks.get(id as usize).map(|(_, state)| *state)
    }

    pub(super) fn set(&mut self, id: u32, state: WriteState) {
        if let Some((_, known)) = self.chunks.get_mut(id as usize) {
            *known = state;
        }
    }

    pub(super) fn all_in_place(&self) -> bool {
        let is = |state: &WriteState| matches!(state, WriteState::InPlace(_));
        self.chunks.iter().all(|(_, state)| is(state))
    }

    /// A chunk that is in place, for a message to the receiver.
    pub(super) fn announced(&self, id: u32) -> Option<RoomChunk> {
        match self.chunks.get(id as usize)? {
            (body, WriteState::InPlace(checksum)) => Some(RoomChunk {
                id,
                body: body.clone(),
                checksum: *checksum,
            }),
            _ => None,
        }
    }

    pub(super) fn all_announced(&self) -> Vec<RoomChunk> {
        let count = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX);
        (0..count).filter_map(|id| self.announced(id)).collect()
    }

    pub(super) fn next_wake(&self, most: u64) -> Option<Moment> {
        if self.is_complete {
            return None;
        }
        let under_way = self.cells_under_way();
        let waits = self.chunks.iter().filter_map(|(body, state)| match state {
            // A chunk without room under way waits for the end of a write, not for the clock.
            WriteState::Waits(at) if self.offer.is_some() && fits(under_way, body, most) => {
                Some(*at)
            }
            _ => None,
        });
        let repeats = self.done.map(|_| self.next_retry);
        waits.chain(repeats).chain(self.broken_until).min()
    }
}

fn cells(body: &ChunkBody) -> u64 {
    match body {
        ChunkBody::Pages(rectangle) => rectangle.cells(),
        ChunkBody::Aux => 1,
    }
}

/// Whether a chunk may start beside the chunks under way. With nothing under way every chunk may.
fn fits(under_way: u64, body: &ChunkBody, most: u64) -> bool {
    under_way == 0 || under_way.saturating_add(cells(body)) <= most
}
