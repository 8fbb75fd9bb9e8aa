//! What a worker process is told and what it answers: one JSON object a line.

use crate::workload::Prompt;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// What a worker is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Get what the pool has of the prompt, compute and put the rest. The leases that this takes
    /// are kept until [`Command::Release`].
    Prefill {
        /// The request's number.
        request: u64,
        /// Its prompt.
        prompt: Prompt,
    },
    /// Get the whole chain, check every byte, and end the leases that this takes.
    Decode {
        /// The request's prompt.
        prompt: Prompt,
    },
    /// End the leases that a prefill took.
    Release {
        /// The request's number.
        request: u64,
    },
}

/// What a worker answers: first [`Answer::Ready`], then one a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The worker has reached the pool.
    Ready,
    /// The prefill is done.
    Prefilled(Prefilled),
    /// The decode is done.
    Decoded(Decoded),
    /// The leases are given back.
    Released,
}

/// What became of a prefill.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Prefilled {
    /// The blocks of the prompt.
    pub(crate) blocks: u64,
    /// How many leading ones the pool had.
    pub(crate) hits: u64,
    /// Blocks that were leased and yet were not there.
    pub(crate) lost: u64,
    /// Blocks that could not be got, by code.
    pub(crate) unreadable: BTreeMap<String, u64>,
    /// Blocks whose bytes were not those of their key.
    pub(crate) wrong: u64,
    /// Blocks that were put.
    pub(crate) put: u64,
    /// Blocks that the pool turned out to have when they were put.
    pub(crate) existed: u64,
    /// Blocks that could not be put, by code.
    pub(crate) refused: BTreeMap<String, u64>,
    /// The calls; `None` for one that had nothing to do.
    pub(crate) match_prefix: Option<Call>,
    pub(crate) get: Option<Call>,
    pub(crate) put_call: Option<Call>,
}

/// What became of a decode, or of the gets of a prefill.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Decoded {
    /// Blocks that the pool had, and whose bytes were checked.
    pub(crate) checked: u64,
    /// Blocks that the pool did not have (any more).
    pub(crate) missing: u64,
    /// Blocks that could not be got, by code.
    pub(crate) failed: BTreeMap<String, u64>,
    /// Blocks whose bytes were not those of their key.
    pub(crate) wrong: u64,
    /// The call; `None` when there was nothing to get.
    pub(crate) call: Option<Call>,
}

/// One call of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Call {
    /// How long it took, in nanoseconds.
    pub(crate) nanos: u64,
    /// The bytes of blocks that it moved.
    pub(crate) bytes: u64,
}

impl Call {
    /// A call that took so long.
    pub(crate) fn new(took: Duration, bytes: u64) -> Self {
        Self {
            nanos: u64::try_from(took.as_nanos()).unwrap_or(u64::MAX),
            bytes,
        }
    }

    /// How long it took.
    pub(crate) const fn took(&self) -> Duration {
        Duration::from_nanos(self.nanos)
    }
}
