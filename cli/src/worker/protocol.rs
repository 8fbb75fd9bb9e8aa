//! The commands of a worker and its answers, one JSON object a line.

use crate::workload::Prompt;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// A command to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Command {
    /// Get the blocks of the prompt that the pool has, then compute and put the others. The leases last until
    /// [`Command::Release`].
    Prefill {
        /// The request's number.
        request: u64,
        /// Its prompt.
        prompt: Prompt,
    },
    /// Get the whole chain, verify every byte, and release the leases.
    Decode {
        /// The request's prompt.
        prompt: Prompt,
    },
    /// Release the leases of a prefill.
    Release {
        /// The request's number.
        request: u64,
    },
}

/// An answer of a worker: first [`Answer::Ready`], then one for each command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The worker has reached the pool.
    Ready,
    /// The prefill is done.
    Prefilled(Prefilled),
    /// The decode is done.
    Decoded(Decoded),
    /// The leases are released.
    Released,
}

/// The result of a prefill.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Prefilled {
    /// The blocks of the prompt.
    pub(crate) blocks: u64,
    /// The leading blocks that the pool had.
    pub(crate) hits: u64,
    /// Blocks that were absent in spite of their lease.
    pub(crate) lost: u64,
    /// Blocks whose get failed, by code.
    pub(crate) unreadable: BTreeMap<String, u64>,
    /// Blocks with wrong bytes.
    pub(crate) wrong: u64,
    /// Blocks that were put.
    pub(crate) put: u64,
    /// Blocks that were present when they were put.
    pub(crate) existed: u64,
    /// Blocks whose put failed, by code.
    pub(crate) refused: BTreeMap<String, u64>,
    /// The calls; `None` for a call without blocks.
    pub(crate) match_prefix: Option<Call>,
    pub(crate) get: Option<Call>,
    pub(crate) put_call: Option<Call>,
}

/// The result of a decode, or of the gets of a prefill.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Decoded {
    /// Blocks that the pool had and the worker verified.
    pub(crate) checked: u64,
    /// Blocks that the pool did not have.
    pub(crate) missing: u64,
    /// Blocks whose get failed, by code.
    pub(crate) failed: BTreeMap<String, u64>,
    /// Blocks with wrong bytes.
    pub(crate) wrong: u64,
    /// The call; `None` without blocks.
    pub(crate) call: Option<Call>,
}

/// One call of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Call {
    /// The duration, in nanoseconds.
    pub(crate) nanos: u64,
    /// The bytes of the blocks.
    pub(crate) bytes: u64,
}

impl Call {
    /// A call with its duration.
    pub(crate) fn new(took: Duration, bytes: u64) -> Self {
        Self {
            nanos: u64::try_from(took.as_nanos()).unwrap_or(u64::MAX),
            bytes,
        }
    }

    /// The duration.
    pub(crate) const fn took(&self) -> Duration {
        Duration::from_nanos(self.nanos)
    }
}
