//! Conversions between a rank's description and its protobuf fields.

use super::{HandoffDecodeError, fields};
use crate::plan::{Stages, StateRule, StateShape};
use crate::registration::{RankDescription, StateRegion};

const RULES: [(u32, StateRule); 3] = [
    (1, StateRule::Copy),
    (2, StateRule::Slice),
    (3, StateRule::OneSource),
];

impl From<&RankDescription> for fields::Rank {
    fn from(rank: &RankDescription) -> Self {
        Self {
            address: rank.address.clone(),
            tensor_rank: rank.tensor.0,
            tensor_ranks: rank.tensor.1,
            stage: rank.pipeline.0,
            stage_layers: rank.pipeline.1.counts(),
            page_tokens: rank.page_tokens,
            hidden_bytes: rank.hidden_bytes,
            states: rank.states.iter().map(Into::into).collect(),
        }
    }
}

impl From<&StateRegion> for fields::State {
    fn from(state: &StateRegion) -> Self {
        let (rule, [outer, parts, part_bytes]) = state.shape.parameters();
        let number = RULES.iter().find(|(_, each)| *each == rule);
        Self {
            name: state.name.clone(),
            layer: state.layer,
            rule: number.map_or(0, |(number, _)| *number),
            outer,
            parts,
            part_bytes,
            base: state.base,
            pages: state.pages,
        }
    }
}

impl TryFrom<fields::Rank> for RankDescription {
    type Error = HandoffDecodeError;

    fn try_from(rank: fields::Rank) -> Result<Self, HandoffDecodeError> {
        let stages = Stages::new(&rank.stage_layers);
        let stages = stages.map_err(|_| HandoffDecodeError::Field("stage_layers"))?;
        if stages.stage(rank.stage).is_none() {
            return Err(HandoffDecodeError::Field("stage"));
        }
        if rank.tensor_rank >= rank.tensor_ranks {
            return Err(HandoffDecodeError::Field("tensor_rank"));
        }
        let states = rank.states.into_iter().map(TryInto::try_into);
        Ok(Self {
            address: rank.address,
            tensor: (rank.tensor_rank, rank.tensor_ranks),
            pipeline: (rank.stage, stages),
            page_tokens: rank.page_tokens,
            hidden_bytes: rank.hidden_bytes,
            states: states.collect::<Result<_, _>>()?,
        })
    }
}

impl TryFrom<fields::State> for StateRegion {
    type Error = HandoffDecodeError;

    fn try_from(state: fields::State) -> Result<Self, HandoffDecodeError> {
        let rule = RULES.iter().find(|(number, _)| *number == state.rule);
        let (_, rule) = rule.ok_or(HandoffDecodeError::Field("rule"))?;
        let shape = StateShape::new(*rule, state.outer, state.parts, state.part_bytes);
        Ok(Self {
            name: state.name,
            layer: state.layer,
            shape: shape.map_err(|_| HandoffDecodeError::Field("shape"))?,
            base: state.base,
            pages: state.pages,
        })
    }
}
