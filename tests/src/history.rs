//! Histories of concurrent clients, and a check that a correct pool could have given their answers.
//!
//! A history is the list of operations with their answers, each between two points in time. [`check`]
//! decides for every answer whether some order of the concurrent operations explains it. It derives, for
//! each key, the intervals in which a block was certainly present or a value was certainly gone. It
//! rejects only an answer that contradicts them. A legal history is never rejected; an illegal one may
//! pass if enough operations overlap. The tests beside it hold both.
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
//! * A client with a location cache may read a value that was present up to [`Rules::stale`] before the
//!   get began: a cached location is used until its lease ends.
//! * An [`Excuse`] allows more in the cases that it names.
//! * An operation with an unknown outcome may take effect once, at any time after it began, or never.

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

/// What a client did and was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The number of the key.
    pub key: u64,
    /// When the client began.
    pub start: At,
    /// When it was answered.
    pub end: At,
    /// Whether the client remembers where values are.
    pub remembers: bool,
    /// The rest.
    pub what: What,
}

/// An operation and its answer. Every put and upsert of a history has a value of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A put, which leaves a value that is there.
    Put(u64, Wrote),
    /// An upsert, which replaces it.
    Upsert(u64, Wrote),
    /// A remove.
    Remove(Removed),
    /// A get that was answered.
    Get(Found),
    /// An exist that was answered.
    Exist(bool),
}

/// What a client was told of a value that it put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrote {
    /// It is there.
    Stored,
    /// A value was there already. (Possibly this one: an earlier try whose answer was lost.)
    Present,
    /// It is not there and will not be.
    Not,
    /// Neither.
    Unknown,
}

/// What a client was told of a remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removed {
    /// The key was there and is not any more.
    Done,
    /// Nothing was there.
    Missing,
    /// It was refused in the end; an earlier try whose answer was lost may have been done.
    Refused,
    /// Nothing of use: it may be done yet.
    Unknown,
}

/// What a get found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The value with this number, whole.
    Value(u64),
    /// Bytes that are no value of the key.
    Torn,
    /// A miss.
    Nothing,
}

/// A time in which answers may be otherwise than those of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excuse {
    /// Blocks may have been lost for good between two points: a node died, or the pool was full.
    Lost(At, At),
    /// Blocks may have been out of reach between two points: a node was suspect.
    Hidden(At, At),
    /// A deposed leader may have answered between two points: any read may show what was true up to
    /// [`Rules::stale`] before it began.
    Deposed(At, At),
}

/// What a pool may do.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// How long a value that was replaced or removed may still be read where that is allowed: one lease.
    pub stale: Duration,
    /// A put or upsert may take effect more than once until it is answered: a client whose commit's
    /// answer was lost does the whole again. In between another client may have changed the key.
    pub repeats: bool,
    /// Where more is allowed.
    pub excuses: Vec<Excuse>,
}

/// An answer that nothing explains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// What rule it breaks.
    pub kind: Kind,
    /// The operation that was answered so.
    pub operation: Operation,
    /// Why it is wrong, for people.
    pub why: String,
}

/// The rules that an answer can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The bytes are no value of the key.
    Torn,
    /// The value was never put, or its put failed for certain, or came later.
    NeverWritten,
    /// The value had been replaced.
    Stale,
    /// The value had been removed.
    Resurrected,
    /// The key was said to be there while nothing was.
    Phantom,
    /// The key was said to be absent while a value was there.
    Lost,
}
