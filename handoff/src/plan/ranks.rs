//! Which source ranks a target rank needs, and which parts of each source rank (rows G19, S7, S13).

use super::{PlanError, StateRule, StateShape};
use std::ops::Range;

/// The parts of a state that go from one source rank to one target rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSlice {
    /// The source rank.
    pub source: u32,
    /// The target rank.
    pub target: u32,
    /// The first part, counted from the source rank's first part.
    pub source_part: u64,
    /// The first part, counted from the target rank's first part.
    pub target_part: u64,
    /// The number of parts.
    pub parts: u64,
}

/// The slices that together are all parts of one target rank, in the order of the parts.
///
/// # Errors
///
/// [`PlanError::Indivisible`], [`PlanError::UnevenParts`], [`PlanError::CopiedAcrossRanks`],
/// [`PlanError::NoSuchRank`].
pub fn sources_of(
    shape: &StateShape,
    target: u32,
    sources: u32,
    targets: u32,
) -> Result<Vec<RankSlice>, PlanError> {
    if target >= targets {
        return Err(PlanError::NoSuchRank {
            rank: target,
            ranks: targets,
        });
    }
    if sources == 0 || (!sources.is_multiple_of(targets) && !targets.is_multiple_of(sources)) {
        return Err(PlanError::Indivisible { sources, targets });
    }
    let (of_source, of_target) = (shape.parts_of(sources)?, shape.parts_of(targets)?);
    let whole = |source| RankSlice {
        source,
        target,
        source_part: 0,
        target_part: 0,
        parts: shape.parts,
    };
    match shape.rule {
        StateRule::Copy if sources == targets => return Ok(vec![whole(target)]),
        StateRule::Copy => return Err(PlanError::CopiedAcrossRanks { sources, targets }),
        StateRule::OneSource => return Ok(vec![whole(spread(target, sources, targets))]),
        StateRule::Slice => {}
    }
    let begin = shape.first_part(target, targets);
    let mut slices = Vec::new();
    let mut part = begin;
    while part < begin + of_target {
        let source = holder(shape, part, target, sources, targets);
        let first = shape.first_part(source, sources);
        let end = (first + of_source).min(begin + of_target);
        slices.push(RankSlice {
            source,
            target,
            source_part: part - first,
            target_part: part - begin,
            parts: end - part,
        });
        part = end;
    }
    Ok(slices)
}

/// The slices that one source rank sends, one or more for each target that needs it.
///
/// # Errors
///
/// As [`sources_of`].
pub fn targets_of(
    shape: &StateShape,
    source: u32,
    sources: u32,
    targets: u32,
) -> Result<Vec<RankSlice>, PlanError> {
    if source >= sources {
        return Err(PlanError::NoSuchRank {
            rank: source,
            ranks: sources,
        });
    }
    let mut slices = Vec::new();
    for target in 0..targets {
        let of_target = sources_of(shape, target, sources, targets)?;
        slices.extend(of_target.into_iter().filter(|slice| slice.source == source));
    }
    Ok(slices)
}

/// The source rank for a state that every source rank holds. The targets use all sources in turn.
fn spread(target: u32, sources: u32, targets: u32) -> u32 {
    if sources >= targets {
        target * (sources / targets)
    } else {
        target / (targets / sources)
    }
}

/// A source rank that holds `part`. Where several ranks hold the part, the targets use them in turn.
fn holder(shape: &StateShape, part: u64, target: u32, sources: u32, targets: u32) -> u32 {
    let holders = (u64::from(sources) / shape.parts).max(1);
    // A peer may register a shape of any size, so the product needs 128 bits.
    let first = u128::from(part) * u128::from(sources) / u128::from(shape.parts);
    // The targets that hold one part are neighbours, and so are the sources.
    let turn = u64::from(spread(target, sources, targets)) % holders;
    u32::try_from(first + u128::from(turn))
        .expect("invariant: a rank is below the number of sources")
}

/// The layers of each pipeline stage, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stages(Vec<Range<u32>>);

impl Stages {
    /// Stages from the number of layers of each stage.
    ///
    /// # Errors
    ///
    /// [`PlanError::Unfit`] for no stage, an empty stage, or more than 2^32 layers.
    pub fn new(layers: &[u32]) -> Result<Self, PlanError> {
        let mut begin = 0u32;
        let mut stages = Vec::with_capacity(layers.len());
        for count in layers {
            let end = begin.checked_add(*count).ok_or(PlanError::Unfit)?;
            stages.push(begin..end);
            begin = end;
        }
        if stages.is_empty() || stages.iter().any(Range::is_empty) {
            return Err(PlanError::Unfit);
        }
        Ok(Self(stages))
    }

    /// The number of layers of each stage.
    pub fn counts(&self) -> Vec<u32> {
        let count = |stage: &Range<u32>| stage.end - stage.start;
        self.0.iter().map(count).collect()
    }

    /// The number of layers.
    pub fn layers(&self) -> u32 {
        self.0.last().map_or(0, |last| last.end)
    }

    /// The layers of one stage.
    pub fn stage(&self, rank: u32) -> Option<Range<u32>> {
        self.0.get(rank as usize).cloned()
    }

    /// The stages of prefill whose layers a stage of decode takes, with these layers. Row S13: decode has as
    /// many stages as prefill, or one.
    ///
    /// # Errors
    ///
    /// [`PlanError::Stages`], [`PlanError::NoSuchRank`].
    pub fn sources_of(
        &self,
        decode_rank: u32,
        decode: &Self,
    ) -> Result<Vec<(u32, Range<u32>)>, PlanError> {
        let numbered = || (0..).zip(self.0.iter().cloned());
        let count = |of: &Self| u32::try_from(of.0.len()).unwrap_or(u32::MAX);
        if decode_rank >= count(decode) {
            return Err(PlanError::NoSuchRank {
                rank: decode_rank,
                ranks: count(decode),
            });
        }
        let mismatch = PlanError::Stages {
            prefill: count(self),
            decode: count(decode),
        };
        if decode.layers() != self.layers() {
            return Err(mismatch);
        }
        match decode.0.len() {
            1 => Ok(numbered().collect()),
            _ if decode == self => Ok(numbered()
                .filter(|(rank, _)| *rank == decode_rank)
                .collect()),
            _ => Err(mismatch),
        }
    }
}
