//! The plan of a transfer: layouts, ranks and page lists become rows of bytes.
//!
//! ```text
//!  StateShape ─┐
//!  rank counts ┴► sources_of(target) ──► RankSlice ─┐
//!  page lists ──────────────────────────────────────┴► rows ──► StridedRow (merged)
//! ```
//!
//! A state is one region of a rank that is divided into pages: the keys of one layer, its values,
//! or an opaque state. A page holds `outer` runs, and each run holds `parts` parts of `part_bytes`. Ranks
//! divide the parts among themselves. Every layout of the documents is a page of this form (rows G19, S7):
//!
//! | layout | outer | parts | part_bytes |
//! |---|---|---|---|
//! | token-major | tokens | heads | bytes of a head |
//! | head-major | 1 | heads | tokens x bytes of a head |
//! | opaque, sliced along a dimension | product of the dimensions before | the dimension | the rest |
//! | opaque, copied or of one source | 1 | 1 | bytes of the page |

mod chunks;
mod ranks;
mod rows;
#[cfg(test)]
mod tests;

pub use chunks::{PageChunk, PageChunker};
pub use ranks::{RankSlice, Stages, sources_of, targets_of};
pub use rows::{PagePair, StridedRow, rows, side_rows};

/// Why a plan cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Neither number of ranks divides the other.
    #[error("{sources} source ranks and {targets} target ranks: one must divide the other")]
    Indivisible {
        /// The number of source ranks.
        sources: u32,
        /// The number of target ranks.
        targets: u32,
    },
    /// The parts of a state do not divide among the ranks.
    #[error("{parts} parts do not divide among {ranks} ranks")]
    UnevenParts {
        /// The number of parts of all ranks together.
        parts: u64,
        /// The number of ranks.
        ranks: u32,
    },
    /// A state with the rule copy needs as many targets as sources.
    #[error("a copied state needs as many targets as sources, not {sources} and {targets}")]
    CopiedAcrossRanks {
        /// The number of source ranks.
        sources: u32,
        /// The number of target ranks.
        targets: u32,
    },
    /// A rank is outside its group.
    #[error("rank {rank} of {ranks} does not exist")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// The two ends have different numbers of pipeline stages, and decode has more than one.
    #[error("decode has {decode} pipeline stages, prefill {prefill}: decode needs as many, or 1")]
    Stages {
        /// The number of prefill's stages.
        prefill: u32,
        /// The number of decode's stages.
        decode: u32,
    },
    /// A dimension is zero, or a page over all ranks has 2^62 bytes or more.
    #[error("the state has an empty dimension, or is too large")]
    Unfit,
    /// A page lies outside its region.
    #[error("page {page} lies outside a region of {pages} pages")]
    NoSuchPage {
        /// The page.
        page: u32,
        /// The number of pages of the region.
        pages: u32,
    },
    /// The shape of a state does not have this dimension.
    #[error("dimension {dimension} of a state with {dimensions} dimensions does not exist")]
    NoSuchDimension {
        /// The dimension.
        dimension: usize,
        /// The number of dimensions.
        dimensions: usize,
    },
}

/// How the ranks of one side share a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateRule {
    /// Rank `i` of the targets takes all that rank `i` of the sources holds.
    Copy,
    /// Each rank holds a share of the parts. With more ranks than parts, several ranks hold the same part.
    Slice,
    /// Every rank holds the same bytes (MLA). So one source suffices for a target.
    OneSource,
}

/// The order of tokens and heads inside a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageLayout {
    /// `[token][head][bytes]`.
    TokenMajor,
    /// `[head][token][bytes]`.
    HeadMajor,
}

/// The shape of one page of a state over all ranks of one side. Source and target have equal
/// shapes, and differ only in the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    rule: StateRule,
    outer: u64,
    parts: u64,
    part_bytes: u64,
}

/// The upper bound of a size. The sum of a few sizes below it never overflows.
const MAX_BYTES: u64 = 1 << 62;

impl StateShape {
    /// The keys or values of one layer: pages of `tokens` tokens, `heads` heads over all ranks, and
    /// `head_bytes` bytes for one head of one token.
    ///
    /// # Errors
    ///
    /// [`PlanError::Unfit`].
    pub fn of_heads(
        layout: PageLayout,
        tokens: u32,
        heads: u32,
        head_bytes: u32,
    ) -> Result<Self, PlanError> {
        let (tokens, heads, head) = (u64::from(tokens), u64::from(heads), u64::from(head_bytes));
        match layout {
            PageLayout::TokenMajor => Self::new(StateRule::Slice, tokens, heads, head),
            PageLayout::HeadMajor => Self::new(StateRule::Slice, 1, heads, tokens * head),
        }
    }

    /// An opaque state that is sliced along one of its dimensions. The last dimension counts bytes.
    ///
    /// # Errors
    ///
    /// [`PlanError::NoSuchDimension`], [`PlanError::Unfit`].
    pub fn sliced(dimensions: &[u32], along: usize) -> Result<Self, PlanError> {
        let no_such = PlanError::NoSuchDimension {
            dimension: along,
            dimensions: dimensions.len(),
        };
        let Some((before, rest)) = dimensions.split_at_checked(along) else {
            return Err(no_such);
        };
        let Some((parts, after)) = rest.split_first() else {
            return Err(no_such);
        };
        let product = |of: &[u32]| {
            let fold = |product: u64, next: &u32| product.checked_mul(u64::from(*next));
            of.iter().try_fold(1, fold).ok_or(PlanError::Unfit)
        };
        let (outer, part_bytes) = (product(before)?, product(after)?);
        Self::new(StateRule::Slice, outer, u64::from(*parts), part_bytes)
    }

    /// An opaque state that is never sliced: `bytes` bytes a page on each rank.
    ///
    /// # Errors
    ///
    /// [`PlanError::Unfit`].
    pub fn whole(rule: StateRule, bytes: u64) -> Result<Self, PlanError> {
        Self::new(rule, 1, 1, bytes)
    }

    /// A shape by its numbers. A page over all ranks has `outer` runs, a run has `parts` parts, and a part has
    /// `part_bytes` bytes.
    ///
    /// # Errors
    ///
    /// [`PlanError::Unfit`].
    pub fn new(
        rule: StateRule,
        outer: u64,
        parts: u64,
        part_bytes: u64,
    ) -> Result<Self, PlanError> {
        let bytes = outer
            .checked_mul(parts)
            .and_then(|runs| runs.checked_mul(part_bytes));
        match bytes {
            Some(1..MAX_BYTES) => Ok(Self {
                rule,
                outer,
                parts,
                part_bytes,
            }),
            _ => Err(PlanError::Unfit),
        }
    }

    /// The rule, `outer`, `parts` and `part_bytes`.
    pub(crate) const fn parameters(&self) -> (StateRule, [u64; 3]) {
        (self.rule, [self.outer, self.parts, self.part_bytes])
    }

    /// How ranks share the state.
    pub const fn rule(&self) -> StateRule {
        self.rule
    }

    /// The bytes of one page on one of `ranks` ranks.
    ///
    /// # Errors
    ///
    /// [`PlanError::UnevenParts`].
    pub fn page_bytes(&self, ranks: u32) -> Result<u64, PlanError> {
        Ok(self.outer * self.parts_of(ranks)? * self.part_bytes)
    }

    /// The number of parts that one of `ranks` ranks holds.
    fn parts_of(&self, ranks: u32) -> Result<u64, PlanError> {
        let uneven = PlanError::UnevenParts {
            parts: self.parts,
            ranks,
        };
        match (self.rule, u64::from(ranks)) {
            (_, 0) => Err(uneven),
            (StateRule::Copy | StateRule::OneSource, _) => Ok(self.parts),
            (StateRule::Slice, ranks) if self.parts.is_multiple_of(ranks) => Ok(self.parts / ranks),
            (StateRule::Slice, ranks) if ranks.is_multiple_of(self.parts) => Ok(1),
            (StateRule::Slice, _) => Err(uneven),
        }
    }

    /// The first part that a rank holds.
    fn first_part(&self, rank: u32, ranks: u32) -> u64 {
        match self.rule {
            StateRule::Copy | StateRule::OneSource => 0,
            // With more ranks than parts, neighbouring ranks hold the same part.
            StateRule::Slice => {
                let first = u128::from(rank) * u128::from(self.parts) / u128::from(ranks);
                u64::try_from(first).expect("invariant: a rank is below the number of ranks")
            }
        }
    }
}
