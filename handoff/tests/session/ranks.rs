//! Ranks whose bytes encode their right places, so that every end can compute each byte.

use kvpool_handoff::plan::{PageLayout, Stages, StateRule, StateShape};
use kvpool_handoff::registration::{RankDescription, StateRegion};
use kvpool_handoff::room::PollState;
use kvpool_handoff::session::TransferState;
use kvpool_handoff::session::{HandoffOptions, HandoffSession, RankMemory};
use kvpool_transport::{Region, Slice};
use kvpool_types::{Length, Offset};
use std::net::TcpListener;
use std::time::{Duration, Instant};

pub(crate) const TOKENS: u32 = 16;
pub(crate) const PAGES: u32 = 40;
const HEADS: u32 = 8;
const HEAD_BYTES: u32 = 32;
/// The bytes before and after the memory of each state.
const GUARD: u64 = 4096;
const GUARD_BYTES: [u8; 4096] = [0xc3; 4096];
/// Names of the states of a layer, with their number.
const NAMES: [&str; 3] = ["k", "v", "mla"];

/// The shape of a group of ranks.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) tensor: u32,
    pub(crate) stages: Vec<u32>,
    pub(crate) layout: PageLayout,
}

impl Group {
    pub(crate) fn of(tensor: u32, stages: &[u32], layout: PageLayout) -> Self {
        Self {
            tensor,
            stages: stages.to_vec(),
            layout,
        }
    }

    pub(crate) fn layers(&self) -> Stages {
        Stages::new(&self.stages).unwrap()
    }
}

/// One rank and its memory.
pub(crate) struct Rank {
    pub(crate) session: HandoffSession,
    group: Group,
    rank: u32,
    states: Vec<(StateRegion, Slice)>,
    /// The memory around each state.
    guards: Vec<Slice>,
}

fn shapes(layout: PageLayout) -> [StateShape; 3] {
    let keys = StateShape::of_heads(layout, TOKENS, HEADS, HEAD_BYTES).unwrap();
    let latent = StateShape::whole(StateRule::OneSource, 640).unwrap();
    [keys, keys, latent]
}

/// The right value of one byte. `page` counts in the request, and `offset` in a page that one rank would hold
/// whole.
fn byte(page: u32, layer: u32, name: usize, offset: u64) -> u8 {
    let mut mixed = u64::from(page) * 0x9e37_79b9 + u64::from(layer) * 0x85eb_ca6b;
    mixed = (mixed + name as u64 * 0xc2b2_ae35 + offset).wrapping_mul(0x2545_f491_4f6c_dd1d);
    mixed.to_le_bytes()[5]
}

impl Rank {
    pub(crate) fn start(group: &Group, stage: u32, rank: u32) -> Self {
        Self::start_with(group, stage, rank, HandoffOptions::default())
    }

    pub(crate) fn start_with(
        group: &Group,
        stage: u32,
        rank: u32,
        options: HandoffOptions,
    ) -> Self {
        Self::start_at("127.0.0.1:0", group, (stage, rank), options)
    }

    pub(crate) fn start_at(
        listen: &str,
        group: &Group,
        (stage, rank): (u32, u32),
        options: HandoffOptions,
    ) -> Self {
        let own = group.layers().stage(stage).unwrap();
        let (mut states, mut guards) = (Vec::new(), Vec::new());
        for layer in own {
            for (name, shape) in NAMES.iter().zip(shapes(group.layout)) {
                let bytes = shape.page_bytes(group.tensor).unwrap() * u64::from(PAGES);
                let region = Region::allocate(Length(bytes + 2 * GUARD));
                let part = |from, length| region.slice(Offset(from), Length(length)).unwrap();
                let memory = part(GUARD, bytes);
                for guard in [part(0, GUARD), part(GUARD + bytes, GUARD)] {
                    guard.write_at(Offset(0), &GUARD_BYTES);
                    guards.push(guard);
                }
                let described = StateRegion {
                    name: (*name).to_owned(),
                    layer,
                    shape,
                    base: memory.as_ptr().addr() as u64,
                    pages: PAGES,
                };
                states.push((described, memory));
            }
        }
        let description = RankDescription {
            address: String::new(),
            tensor: (rank, group.tensor),
            pipeline: (stage, group.layers()),
            page_tokens: TOKENS,
            hidden_bytes: 128,
            states: states.iter().map(|(state, _)| state.clone()).collect(),
        };
        let memories = states.iter().map(|(_, memory)| memory.clone());
        let memory = RankMemory::new(description, memories.collect()).unwrap();
        let listener = TcpListener::bind(listen).unwrap();
        Self {
            session: HandoffSession::start(listener, memory, options).unwrap(),
            group: group.clone(),
            rank,
            states,
            guards,
        }
    }

    pub(crate) fn address(&self) -> String {
        self.session.address().to_owned()
    }

    /// The right bytes of this rank's page for a page of the request.
    fn wanted(&self, state: &StateRegion, page: u32) -> Vec<u8> {
        let name = NAMES.iter().position(|name| *name == state.name).unwrap();
        let (outer, parts, part_bytes) = match (name, self.group.layout) {
            (2, _) => (1, 1, 640),
            (_, PageLayout::TokenMajor) => (u64::from(TOKENS), HEADS, u64::from(HEAD_BYTES)),
            (_, PageLayout::HeadMajor) => (1, HEADS, u64::from(HEAD_BYTES * TOKENS)),
        };
        let own = match name {
            2 => 0..1,
            _ => {
                let each = (parts / self.group.tensor).max(1);
                let first = self.rank * parts / self.group.tensor;
                first..first + each
            }
        };
        let mut bytes = Vec::new();
        for run in 0..outer {
            for part in own.clone() {
                let begin = (run * u64::from(parts) + u64::from(part)) * part_bytes;
                let of_part = (0..part_bytes).map(|at| byte(page, state.layer, name, begin + at));
                bytes.extend(of_part);
            }
        }
        bytes
    }

    /// Fills pages of this rank with the bytes of pages of a request.
    pub(crate) fn fill(&self, pages: &[u32]) {
        for (state, memory) in &self.states {
            for (of_request, page) in (0..).zip(pages) {
                let bytes = self.wanted(state, of_request);
                let at = u64::from(*page) * bytes.len() as u64;
                memory.write_at(Offset(at), &bytes);
            }
        }
    }

    /// Compares this rank's pages with the pages of the request from `held` on. Names the first byte that
    /// differs.
    pub(crate) fn check(&self, held: u32, pages: &[u32]) -> Result<(), String> {
        for (state, memory) in &self.states {
            for (of_request, page) in (held..).zip(pages) {
                let wanted = self.wanted(state, of_request);
                let at = u64::from(*page) * wanted.len() as u64;
                let part = memory.slice(Offset(at), Length(wanted.len() as u64));
                let found = part.unwrap().to_vec();
                if let Some(at) = wanted.iter().zip(&found).position(|(one, two)| one != two) {
                    return Err(format!(
                        "{} of layer {}, page {of_request}: byte {at} differs",
                        state.name, state.layer
                    ));
                }
            }
        }
        Ok(())
    }

    /// All bytes of this rank.
    pub(crate) fn image(&self) -> Vec<Vec<u8>> {
        let all = self.states.iter();
        all.map(|(_, memory)| memory.to_vec()).collect()
    }

    /// Whether the memory around the states is unchanged.
    pub(crate) fn guards_are_whole(&self) -> bool {
        let mut guards = self.guards.iter();
        guards.all(|guard| guard.to_vec() == GUARD_BYTES)
    }

    /// Sets every byte of some pages.
    pub(crate) fn set(&self, pages: &[u32], value: u8) {
        for (state, memory) in &self.states {
            let bytes = state.shape.page_bytes(self.group.tensor).unwrap();
            for page in pages {
                let all = vec![value; usize::try_from(bytes).unwrap()];
                memory.write_at(Offset(u64::from(*page) * bytes), &all);
            }
        }
    }
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

pub(crate) fn succeeded(state: &TransferState) {
    assert_eq!(state.poll, PollState::Success, "{:?}", state.failure);
    assert!(state.is_released);
}
