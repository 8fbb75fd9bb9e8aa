//! The registration that each end sends the other once: its layout and memory regions (row C7).

use crate::plan::{PlanError, Stages, StateShape};
use kvpool_types::Incarnation;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One state of a rank: a region of its memory that is divided into pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateRegion {
    /// The name, equal at both ends: `k`, `v`, `mla`, `mamba`, ...
    pub name: String,
    /// The layer.
    pub layer: u32,
    /// The shape of a page over all ranks.
    pub shape: StateShape,
    /// The address of the first page in the rank's process.
    pub base: u64,
    /// The number of pages.
    pub pages: u32,
}

/// The registration of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankDescription {
    /// The address of its data port.
    pub address: String,
    /// The rank in its tensor-parallel group, and the group's size.
    pub tensor: (u32, u32),
    /// The rank's pipeline stage, and the layers of each stage.
    pub pipeline: (u32, Stages),
    /// The number of tokens of a page.
    pub page_tokens: u32,
    /// The bytes of the hidden states in a slot of metadata.
    pub hidden_bytes: u32,
    /// The states.
    pub states: Vec<StateRegion>,
}

/// The reasons to refuse a registration. A refused registration changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistrationError {
    /// The pages of the two ends have different numbers of tokens.
    #[error("pages of {theirs} tokens do not fit pages of {ours} tokens")]
    PageTokens {
        /// This process's number.
        ours: u32,
        /// The other end's number.
        theirs: u32,
    },
    /// The process registered before with other values.
    #[error("session {0} registered before with another layout")]
    Changed(Incarnation),
    /// The ranks or the shapes make no plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Too many processes are registered.
    #[error("{0} processes are registered already")]
    Full(usize),
    /// The description of this process is too large.
    #[error("the description takes {bytes} bytes of memory, at most {most}", most = MAX_DESCRIPTION)]
    TooLarge {
        /// The bytes of the description.
        bytes: usize,
    },
    /// The descriptions of all processes would be too large together.
    #[error("all descriptions take {bytes} bytes of memory with this one, at most {most}")]
    NoMemory {
        /// The bytes of all descriptions with this one.
        bytes: usize,
        /// The most bytes.
        most: usize,
    },
}

/// The most memory of one description, in bytes: about 40,000 states. A message may be much longer.
const MAX_DESCRIPTION: usize = 4 << 20;
/// The most memory of all descriptions, in bytes.
const MAX_DESCRIPTIONS: usize = 256 << 20;

impl RankDescription {
    /// The approximate memory of a description, in bytes.
    fn bytes(&self) -> usize {
        let states = self.states.iter();
        let states = states.map(|state| size_of::<StateRegion>() + state.name.len());
        let stages = size_of_val(self.pipeline.1.counts().as_slice());
        size_of::<Self>() + self.address.len() + stages + states.sum::<usize>()
    }
}

/// The outcome of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationOutcome {
    /// The process is known now.
    New,
    /// The process was known, with the same values.
    Repeated,
}

/// The ranks of the other side that have registered with this process.
#[derive(Clone, Debug)]
pub struct RegisteredRanks {
    page_tokens: u32,
    capacity: usize,
    ranks: BTreeMap<Incarnation, Arc<RankDescription>>,
    /// The memory of all descriptions, and its limit, in bytes.
    bytes: usize,
    most_bytes: usize,
}

impl RegisteredRanks {
    /// Admits at most `capacity` ranks whose pages have `page_tokens` tokens.
    pub const fn new(page_tokens: u32, capacity: usize) -> Self {
        Self {
            page_tokens,
            capacity,
            ranks: BTreeMap::new(),
            bytes: 0,
            most_bytes: MAX_DESCRIPTIONS,
        }
    }

    /// Registers a process. A repeated registration with the same values changes nothing.
    ///
    /// # Errors
    ///
    /// See [`RegistrationError`].
    pub fn register(
        &mut self,
        session: Incarnation,
        rank: impl Into<Arc<RankDescription>>,
    ) -> Result<RegistrationOutcome, RegistrationError> {
        let rank = rank.into();
        if let Some(known) = self.ranks.get(&session) {
            return match *known == rank {
                true => Ok(RegistrationOutcome::Repeated),
                false => Err(RegistrationError::Changed(session)),
            };
        }
        let (ours, theirs) = (self.page_tokens, rank.page_tokens);
        if ours != theirs {
            return Err(RegistrationError::PageTokens { ours, theirs });
        }
        let (tensor, ranks) = rank.tensor;
        if tensor >= ranks {
            let rank = tensor;
            return Err(PlanError::NoSuchRank { rank, ranks }.into());
        }
        for state in &rank.states {
            state.shape.page_bytes(ranks)?;
        }
        self.check_room(&rank)?;
        self.bytes += rank.bytes();
        self.ranks.insert(session, rank);
        Ok(RegistrationOutcome::New)
    }

    fn check_room(&self, rank: &RankDescription) -> Result<(), RegistrationError> {
        // This refusal comes first, because forgetting other processes cannot change it.
        let bytes = rank.bytes();
        if bytes > MAX_DESCRIPTION {
            return Err(RegistrationError::TooLarge { bytes });
        }
        if self.ranks.len() >= self.capacity {
            return Err(RegistrationError::Full(self.capacity));
        }
        let (bytes, most) = (self.bytes + bytes, self.most_bytes);
        if bytes > most {
            return Err(RegistrationError::NoMemory { bytes, most });
        }
        Ok(())
    }

    /// The description that a process registered.
    pub fn get(&self, session: Incarnation) -> Option<&Arc<RankDescription>> {
        self.ranks.get(&session)
    }

    /// Forgets a process that has ended.
    pub fn forget(&mut self, session: Incarnation) {
        if let Some(rank) = self.ranks.remove(&session) {
            self.bytes -= rank.bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PageLayout;

    fn rank(page_tokens: u32, tp: (u32, u32)) -> RankDescription {
        let state = StateRegion {
            name: "k".to_owned(),
            layer: 0,
            shape: StateShape::of_heads(PageLayout::TokenMajor, page_tokens, 8, 64).unwrap(),
            base: 1 << 40,
            pages: 100,
        };
        RankDescription {
            address: "10.0.0.1:9000".to_owned(),
            tensor: tp,
            pipeline: (0, Stages::new(&[4]).unwrap()),
            page_tokens,
            hidden_bytes: 0,
            states: vec![state],
        }
    }

    #[test]
    fn c7_a_rank_registers_once_and_repeats_are_harmless() {
        let mut ranks = RegisteredRanks::new(64, 2);
        let (one, two) = (Incarnation(1), Incarnation(2));
        assert_eq!(
            ranks.register(one, rank(64, (0, 2))),
            Ok(RegistrationOutcome::New)
        );
        assert_eq!(
            ranks.register(one, rank(64, (0, 2))),
            Ok(RegistrationOutcome::Repeated)
        );
        let changed = ranks.register(one, rank(64, (1, 2)));
        assert_eq!(changed, Err(RegistrationError::Changed(one)));
        let (ours, theirs) = (64, 32);
        let refused = ranks.register(two, rank(32, (0, 2)));
        assert_eq!(refused, Err(RegistrationError::PageTokens { ours, theirs }));
        assert!(ranks.register(two, rank(64, (2, 2))).is_err());
        assert!(
            ranks.register(two, rank(64, (0, 3))).is_err(),
            "8 heads, 3 ranks"
        );
        assert_eq!(
            ranks.register(two, rank(64, (1, 2))),
            Ok(RegistrationOutcome::New)
        );
        let full = ranks.register(Incarnation(3), rank(64, (1, 2)));
        assert_eq!(full, Err(RegistrationError::Full(2)));
        let mut oversized = rank(64, (1, 2));
        oversized.states[0].name = "n".repeat(MAX_DESCRIPTION);
        let refused = ranks.register(Incarnation(3), oversized);
        assert!(matches!(refused, Err(RegistrationError::TooLarge { .. })));
        assert_eq!(
            ranks.register(two, rank(64, (1, 2))),
            Ok(RegistrationOutcome::Repeated),
            "all places are taken"
        );
        ranks.forget(one);
        assert!(ranks.get(one).is_none() && ranks.get(two).is_some());
    }

    #[test]
    fn descriptions_that_take_too_much_memory_are_refused() {
        let with_name = |bytes: usize| {
            let mut rank = rank(64, (0, 2));
            rank.states[0].name = "n".repeat(bytes);
            rank
        };
        let mut ranks = RegisteredRanks::new(64, 1000);
        ranks.most_bytes = 4 * MAX_DESCRIPTION;
        let refused = ranks.register(Incarnation(0), with_name(MAX_DESCRIPTION));
        assert!(matches!(refused, Err(RegistrationError::TooLarge { .. })));
        let large = || with_name(MAX_DESCRIPTION - 4096);
        let mut number = 0;
        let refused = loop {
            number += 1;
            if let Err(error) = ranks.register(Incarnation(number), large()) {
                break error;
            }
        };
        assert!(matches!(refused, RegistrationError::NoMemory { .. }));
        assert_eq!(number, 5, "four descriptions of almost 4 MiB fit");
        ranks.forget(Incarnation(1));
        assert_eq!(
            ranks.register(Incarnation(number), large()),
            Ok(RegistrationOutcome::New)
        );
    }
}
