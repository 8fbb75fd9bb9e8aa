//! The bytes that one prefill rank sends to one decode rank. Both ranks compute them from the same plan.
//!
//! A room has one view for the slot of metadata, if a sender fills it. Then it has one view for each state, in
//! the order of the receiver's states. In a view the pages of the request are in order, from the first page
//! that the receiver lacks. So a sender needs neither an address nor a page number of the receiver.

use crate::plan::{PlanError, RankSlice, Stages, sources_of, targets_of};
use crate::registration::RankDescription;
use std::collections::BTreeSet;
use std::ops::Range;

/// The most ranks of a tensor-parallel group.
const MAX_GROUP: u32 = 65_536;

/// One state of a receiver, and the part of it that one sender fills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareState {
    /// The index of the state in the receiver's description.
    pub state: usize,
    /// The parts that the sender fills.
    pub slice: RankSlice,
    /// The length of these parts in one page, in bytes.
    pub page_bytes: u64,
}

/// One rank of prefill that a receiver needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SenderRank {
    /// The rank's pipeline stage.
    pub stage: u32,
    /// Its rank in the tensor-parallel group.
    pub rank: u32,
    /// The rank's layers.
    pub layers: Range<u32>,
}

/// The states of a receiver that rank `source` of `sources` fills, among the states of `layers`.
///
/// # Errors
///
/// As [`sources_of`].
pub fn states_from(
    receiver: &RankDescription,
    (source, sources): (u32, u32),
    layers: &Range<u32>,
) -> Result<Vec<ShareState>, PlanError> {
    let (rank, ranks) = receiver.tensor;
    let mut states = Vec::new();
    for (state, region) in receiver.states.iter().enumerate() {
        if !layers.contains(&region.layer) {
            continue;
        }
        let slices = sources_of(&region.shape, rank, sources, ranks)?;
        let mine = slices.into_iter().filter(|slice| slice.source == source);
        let (_, [outer, _, part_bytes]) = region.shape.parameters();
        states.extend(mine.map(|slice| ShareState {
            state,
            page_bytes: outer * slice.parts * part_bytes,
            slice,
        }));
    }
    Ok(states)
}

/// The ranks of decode that a sender sends to, in rising order. Decode has `targets` ranks.
///
/// # Errors
///
/// As [`targets_of`].
pub fn receivers_of(sender: &RankDescription, targets: u32) -> Result<Vec<u32>, PlanError> {
    if targets > MAX_GROUP {
        return Err(PlanError::NoSuchRank {
            rank: targets,
            ranks: MAX_GROUP,
        });
    }
    let (rank, ranks) = sender.tensor;
    let mut receivers = BTreeSet::new();
    for region in &sender.states {
        let slices = targets_of(&region.shape, rank, ranks, targets)?;
        receivers.extend(slices.iter().map(|slice| slice.target));
    }
    Ok(receivers.into_iter().collect())
}

/// The ranks of prefill that a receiver needs. Prefill has `sources` ranks in each stage.
///
/// # Errors
///
/// [`PlanError::Stages`] when decode has more than one stage and other stages than prefill. Otherwise as
/// [`sources_of`].
pub fn senders_of(
    receiver: &RankDescription,
    sources: u32,
    stages: &Stages,
) -> Result<Vec<SenderRank>, PlanError> {
    let (_, own) = &receiver.pipeline;
    let (prefill, decode) = (stages.counts().len(), own.counts().len());
    if decode > 1 && own.counts() != stages.counts() {
        let number = |of: usize| u32::try_from(of).unwrap_or(u32::MAX);
        return Err(PlanError::Stages {
            prefill: number(prefill),
            decode: number(decode),
        });
    }
    let mut senders = Vec::new();
    for (stage, _) in (0..).zip(stages.counts()) {
        let layers = stages.stage(stage).unwrap_or(0..0);
        for rank in 0..sources {
            if !states_from(receiver, (rank, sources), &layers)?.is_empty() {
                let layers = layers.clone();
                senders.push(SenderRank {
                    stage,
                    rank,
                    layers,
                });
            }
        }
    }
    Ok(senders)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{PageLayout, StateRule, StateShape};
    use crate::registration::StateRegion;

    fn rank(tensor: (u32, u32), stages: &[u32]) -> RankDescription {
        let keys = StateShape::of_heads(PageLayout::TokenMajor, 16, 8, 64).unwrap();
        let latent = StateShape::whole(StateRule::OneSource, 512).unwrap();
        let states = (0..4).flat_map(|layer| {
            [("k", keys), ("mla", latent)].map(|(name, shape)| StateRegion {
                name: name.to_owned(),
                layer,
                shape,
                base: 1 << 30,
                pages: 10,
            })
        });
        RankDescription {
            address: "10.0.0.1:9000".to_owned(),
            tensor,
            pipeline: (0, Stages::new(stages).unwrap()),
            page_tokens: 16,
            hidden_bytes: 0,
            states: states.collect(),
        }
    }

    /// Row S7: the shares of all senders cover each byte of a page exactly once.
    #[test]
    fn s7_both_ends_agree_on_who_sends_what() {
        for (sources, targets) in [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (8, 1), (1, 8)] {
            for target in 0..targets {
                let receiver = rank((target, targets), &[4]);
                let stages = Stages::new(&[3, 1]).unwrap();
                let senders = senders_of(&receiver, sources, &stages).unwrap();
                let mut bytes = vec![0; receiver.states.len()];
                for sender in &senders {
                    let tensor = (sender.rank, sources);
                    for share in states_from(&receiver, tensor, &sender.layers).unwrap() {
                        bytes[share.state] += share.page_bytes;
                    }
                    let of_sender = receivers_of(&rank(tensor, &[3, 1]), targets).unwrap();
                    assert!(of_sender.contains(&target));
                }
                for (state, bytes) in receiver.states.iter().zip(bytes) {
                    assert_eq!(Ok(bytes), state.shape.page_bytes(targets), "{}", state.name);
                }
                for source in 0..sources {
                    let is_sender = senders.iter().any(|sender| sender.rank == source);
                    let of_sender = receivers_of(&rank((source, sources), &[4]), targets).unwrap();
                    assert_eq!(of_sender.contains(&target), is_sender);
                }
            }
        }
    }

    #[test]
    fn s13_decode_with_other_stages_is_refused() {
        let receiver = rank((0, 1), &[2, 2]);
        let stages = Stages::new(&[1, 3]).unwrap();
        let refused = senders_of(&receiver, 1, &stages);
        assert!(matches!(refused, Err(PlanError::Stages { .. })));
        assert!(senders_of(&receiver, 1, &Stages::new(&[2, 2]).unwrap()).is_ok());
    }
}
