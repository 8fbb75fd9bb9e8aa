//! The memory of one rank, as views of a room and as the parts of a chunk.

use crate::aux::AuxLayout;
use crate::plan::{PlanError, side_rows};
use crate::registration::{RankDescription, StateRegion};
use crate::room::{ChunkBody, PageRectangle, RoomOffer};
use crate::shares::{ShareState, states_from};
use kvpool_transport::Slice;
use kvpool_transport::peer::{ClosedRoom, RoomPart, RoomRows, RoomView};
use kvpool_types::checksum::combine;
use kvpool_types::{Checksum, Code, Length, Offset};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The most bytes of hidden states in a slot of metadata.
const MAX_HIDDEN_BYTES: u32 = 16 << 20;

/// One rank: its description, and the memory of its states.
#[derive(Clone, Debug)]
pub struct RankMemory {
    description: RankDescription,
    states: Vec<Slice>,
}

/// Why memory does not fit a description.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankMemoryError {
    /// The number of memories and of states differ.
    #[error("{states} states need as much memory, not {memories} ranges")]
    Number {
        /// The number of states.
        states: usize,
        /// The number of memories.
        memories: usize,
    },
    /// The length of a memory differs from the length of its state.
    #[error("state {name} of layer {layer} has {wanted} bytes, and its memory {found}")]
    Length {
        /// The name of the state.
        name: String,
        /// Its layer.
        layer: u32,
        /// The bytes of all its pages.
        wanted: u64,
        /// The bytes of the memory.
        found: u64,
    },
    /// Two states have the same name and layer.
    #[error("state {name} of layer {layer} is there twice")]
    Twice {
        /// The name.
        name: String,
        /// The layer.
        layer: u32,
    },
    /// The memories of two states overlap.
    #[error("the memory of state {name} of layer {layer} overlaps another state's")]
    Overlap {
        /// The name.
        name: String,
        /// The layer.
        layer: u32,
    },
    /// The layer of a state is outside the rank's pipeline stage.
    #[error("state {name} is of layer {layer}, which this rank's stage does not have")]
    OtherLayer {
        /// The name.
        name: String,
        /// The layer.
        layer: u32,
    },
    /// A page has no token, or the hidden states exceed 16 MiB.
    #[error("{page_tokens} tokens a page and {hidden_bytes} bytes of hidden states do not fit")]
    Unfit {
        /// The tokens of a page.
        page_tokens: u32,
        /// The bytes of the hidden states.
        hidden_bytes: u32,
    },
    /// A shape does not divide among the ranks.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl RankMemory {
    /// A rank with these states, and with one memory for each state.
    ///
    /// # Errors
    ///
    /// See [`RankMemoryError`].
    pub fn new(description: RankDescription, states: Vec<Slice>) -> Result<Self, RankMemoryError> {
        if description.states.len() != states.len() {
            return Err(RankMemoryError::Number {
                states: description.states.len(),
                memories: states.len(),
            });
        }
        let (page_tokens, hidden_bytes) = (description.page_tokens, description.hidden_bytes);
        if page_tokens == 0 || hidden_bytes > MAX_HIDDEN_BYTES {
            return Err(RankMemoryError::Unfit {
                page_tokens,
                hidden_bytes,
            });
        }
        let (stage, stages) = &description.pipeline;
        let layers = stages.stage(*stage).unwrap_or(0..0);
        let mut ranges: BTreeMap<usize, usize> = BTreeMap::new();
        let mut names = BTreeSet::new();
        for (state, memory) in description.states.iter().zip(&states) {
            let (name, layer) = (state.name.clone(), state.layer);
            let page = state.shape.page_bytes(description.tensor.1)?;
            let wanted = page.checked_mul(u64::from(state.pages));
            let found = memory.length().0;
            if wanted != Some(found) {
                let wanted = wanted.unwrap_or(u64::MAX);
                return Err(RankMemoryError::Length {
                    name,
                    layer,
                    wanted,
                    found,
                });
            }
            if !layers.contains(&layer) {
                return Err(RankMemoryError::OtherLayer { name, layer });
            }
            let begin = memory.as_ptr().addr();
            let end = begin.saturating_add(memory.length().as_usize());
            let before = ranges.range(..end).next_back();
            if before.is_some_and(|(_, of)| *of > begin) {
                return Err(RankMemoryError::Overlap { name, layer });
            }
            ranges.insert(begin, end);
            if !names.insert((name.clone(), layer)) {
                return Err(RankMemoryError::Twice { name, layer });
            }
        }
        Ok(Self {
            description,
            states,
        })
    }

    /// The description.
    pub const fn description(&self) -> &RankDescription {
        &self.description
    }

    pub(super) fn set_address(&mut self, address: String) {
        self.description.address = address;
    }

    /// The layers of this rank's pipeline stage.
    pub(super) fn layers(&self) -> Range<u32> {
        let (stage, stages) = &self.description.pipeline;
        stages.stage(*stage).unwrap_or(0..0)
    }

    /// The number of pages of one layer in `bytes` bytes, at least one. The layer with the largest page counts.
    pub(super) fn cells_of(&self, bytes: u64) -> u64 {
        let mut layers: BTreeMap<u32, u64> = BTreeMap::new();
        for state in &self.description.states {
            // `new` has checked that every page has a size.
            let page = state.shape.page_bytes(self.description.tensor.1);
            *layers.entry(state.layer).or_default() += page.unwrap_or(0);
        }
        let largest = layers.into_values().max().unwrap_or(0);
        (bytes / largest.max(1)).max(1)
    }

    /// The layout of a slot of metadata.
    pub(super) const fn aux_layout(&self) -> AuxLayout {
        AuxLayout::new(self.description.hidden_bytes)
    }

    /// Whether every state has these pages.
    pub(super) fn has_pages(&self, pages: &[u32]) -> bool {
        let highest = pages.iter().max();
        let fits = |state: &StateRegion| highest.is_none_or(|page| *page < state.pages);
        self.description.states.iter().all(fits)
    }

    /// The rows of some parts of pages, in memory.
    fn rows(
        &self,
        state: usize,
        parts: (u64, u64),
        pages: &[u32],
    ) -> Result<Vec<RoomRows>, PlanError> {
        let region = self.description.states.get(state).ok_or(PlanError::Unfit)?;
        let memory = self.states.get(state).ok_or(PlanError::Unfit)?;
        let ranks = self.description.tensor.1;
        let rows = side_rows(&region.shape, parts, ranks, pages, region.pages)?;
        let in_memory = rows.into_iter().map(|row| {
            let span = (row.count - 1) * row.source_stride + row.length;
            let memory = memory.slice(Offset(row.source), Length(span));
            Ok(RoomRows {
                memory: memory.ok_or(PlanError::Unfit)?,
                stride: row.source_stride,
                count: row.count,
                length: row.length,
            })
        });
        in_memory.collect()
    }

    /// The views that one sender fills with these pages of this rank. Empty if `pages` is empty.
    pub(super) fn views(
        &self,
        share: &[ShareState],
        pages: &[u32],
    ) -> Result<Vec<RoomView>, PlanError> {
        if pages.is_empty() {
            return Ok(Vec::new());
        }
        let views = share.iter().map(|share| {
            let parts = (share.slice.target_part, share.slice.parts);
            let rows = self.rows(share.state, parts, pages)?;
            RoomView::new(rows).map_err(|_| PlanError::Unfit)
        });
        views.collect()
    }

    /// The parts of one chunk for a receiver: `pages` are this rank's pages of the request.
    pub(super) fn chunk(
        &self,
        receiver: &RankDescription,
        offer: &RoomOffer,
        rectangle: &PageRectangle,
        pages: &[u32],
    ) -> Result<Vec<RoomPart>, Code> {
        let share = states_from(receiver, self.description.tensor, &self.layers());
        let share = share.map_err(|_| Code::InvalidArgument)?;
        let bounds = rectangle.pages.start as usize..rectangle.pages.end as usize;
        let pages = pages.get(bounds).ok_or(Code::OutOfRange)?;
        let skipped = rectangle.pages.start - offer.held;
        let mut parts = Vec::new();
        let first = offer.view + u32::from(offer.wants_aux);
        for (view, of) in (first..).zip(&share) {
            let theirs = receiver.states.get(of.state).ok_or(Code::Internal)?;
            if !rectangle.layers.contains(&theirs.layer) {
                continue;
            }
            let same = |ours: &StateRegion| {
                ours.layer == theirs.layer && ours.name == theirs.name && ours.shape == theirs.shape
            };
            let mine = self.description.states.iter().position(same);
            // The two ends describe a state differently, so no state of this rank fits.
            let mine = mine.ok_or(Code::InvalidArgument)?;
            let rows = self.rows(mine, (of.slice.source_part, of.slice.parts), pages);
            let view_of_rows = RoomView::new(rows.map_err(|_| Code::InvalidArgument)?);
            let rows = view_of_rows.map_err(|_| Code::InvalidArgument)?;
            let from = rows.parts(Offset(0), rows.length());
            parts.push(RoomPart {
                view,
                offset: u64::from(skipped) * of.page_bytes,
                from: from.ok_or(Code::Internal)?,
            });
        }
        Ok(parts)
    }
}

/// The ranges of a room that one chunk of a sender covers, as (view, offset, length).
pub(super) fn chunk_ranges(
    receiver: &RankDescription,
    share: &[ShareState],
    (first_view, wants_aux): (u32, bool),
    held: u32,
    (body, aux_bytes): (&ChunkBody, u64),
) -> Vec<(u32, Offset, Length)> {
    let rectangle = match body {
        ChunkBody::Pages(rectangle) => rectangle,
        // The slot of metadata is the first view of its sender.
        ChunkBody::Aux => return vec![(first_view, Offset(0), Length(aux_bytes))],
    };
    let first_view = first_view + u32::from(wants_aux);
    let skipped = u64::from(rectangle.pages.start.saturating_sub(held));
    let pages = rectangle.pages.len() as u64;
    let of_layers = (first_view..).zip(share).filter(|(_, of)| {
        let state = receiver.states.get(of.state);
        state.is_some_and(|state| rectangle.layers.contains(&state.layer))
    });
    let range = |(view, of): (u32, &ShareState)| {
        let (offset, length) = (skipped * of.page_bytes, pages * of.page_bytes);
        (view, Offset(offset), Length(length))
    };
    of_layers.map(range).collect()
}

/// The checksum of a chunk's bytes in a closed room.
pub(super) fn chunk_sum(room: &ClosedRoom, ranges: &[(u32, Offset, Length)]) -> Option<Checksum> {
    let mut whole = Checksum(0);
    for (view, offset, length) in ranges {
        whole = combine(whole, room.sum(*view, *offset, *length)?, *length);
    }
    Some(whole)
}
