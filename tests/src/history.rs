//! Histories of concurrent clients, and a check that a correct pool could have given their answers.
//!
//! A history is the list of operations with their answers, each between two points in time.
//! [`check`] decides for every answer whether some order of the concurrent operations explains it.
//! For each key it derives the intervals in which a block was certainly present, or a value was
//! certainly gone. It rejects only an answer that contradicts them. A legal history is never
//! rejected. An illegal history may pass if enough operations overlap. The tests in `tests.rs`
//! check both claims.
//!
//! ```text
//!          put a ├────┤ stored                        get ├──┤ a: the value is gone since `!`
//!                        upsert b ├────┤! stored
//!                                  ┌── b is surely there ─────────────┐
//!                                                 get ├──┤ miss       remove ├──…
//!                                                      lost
//! ```
//!
//! The model is one register per key, with three relaxations:
//!
//! * A client with a location cache may read a value that was present up to [`Rules::stale`] before
//!   the get began. The client uses a cached location until its lease ends.
//! * An [`Excuse`] allows more in the cases that it names.
//! * An operation with an unknown outcome may take effect once, at any time after it began, or
//!   never.

mod check;
mod intervals;
mod record;
mod values;

#[cfg(test)]
mod simulate;
#[cfg(test)]
mod tests;

pub use check::check;
pub use record::Recorder;
pub use values::{decode, encode};

use std::time::Duration;

/// A point in time, counted from the start of the history.
pub type At = Duration;

/// An operation of a client, and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The number of the key.
    pub key: u64,
    /// The time at which the client began it.
    pub start: At,
    /// The time of the answer.
    pub end: At,
    /// Whether the client caches locations.
    pub remembers: bool,
    /// The kind of operation, with its answer.
    pub what: What,
}

/// An operation and its answer. Every put and upsert of a history has its own value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A put, which keeps a present value.
    Put(u64, Wrote),
    /// An upsert, which replaces a present value.
    Upsert(u64, Wrote),
    /// A remove.
    Remove(Removed),
    /// A get with an answer.
    Get(Found),
    /// An exist with an answer.
    Exist(bool),
}

/// The answer to a put or upsert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrote {
    /// The value is present.
    Stored,
    /// A value was already present: perhaps this value, from an earlier attempt whose answer was
    /// lost.
    Present,
    /// The value is absent and will stay so.
    Not,
    /// The value may be present or not.
    Unknown,
}

/// The answer to a remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removed {
    /// The key was present and is not any more.
    Done,
    /// The key was absent.
    Missing,
    /// The remove was refused in the end. An earlier attempt without an answer may have been done.
    Refused,
    /// The outcome is unknown: the remove may still be done.
    Unknown,
}

/// The result of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The whole value with this number.
    Value(u64),
    /// Bytes that are not a value of the key.
    Torn,
    /// A miss.
    Nothing,
}

/// A time in which answers may differ from a register's answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excuse {
    /// Blocks may have been lost for good between two points, because a node died or the pool was
    /// full.
    Lost(At, At),
    /// Blocks may have been unreachable between two points, because a node was suspect.
    Hidden(At, At),
    /// A deposed leader may have answered between two points. Any read may show the state of up to
    /// [`Rules::stale`] before it began.
    Deposed(At, At),
}

/// The permitted behaviour of a pool.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// How long a replaced or removed value may still be read by clients with cached locations: one
    /// lease.
    pub stale: Duration,
    /// Whether a put or upsert may take effect more than once before its answer. A client that lost
    /// the answer to its commit repeats the whole put, and another client may have changed the key
    /// in between.
    pub repeats: bool,
    /// The times in which more is permitted.
    pub excuses: Vec<Excuse>,
}

/// An answer without an explanation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The broken rule.
    pub kind: Kind,
    /// The operation with this answer.
    pub operation: Operation,
    /// The contradiction, for people.
    pub why: String,
}

/// The rules that an answer can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The bytes are not a value of the key.
    Torn,
    /// The value was never put, its put certainly failed, or its put came later.
    NeverWritten,
    /// The value had been replaced.
    Stale,
    /// The value had been removed.
    Resurrected,
    /// The key was reported as present while no value was present.
    Phantom,
    /// The key was reported as absent while a value was present.
    Lost,
}
