//! The pool at one moment, and its last minutes, for `/`, `/v1/overview`, `/v1/events` and `kvctl
//! top`.
//!
//! ```text
//!  Metrics, Pool ── once a second ──► History ─┐
//!  Seat, Pool ───── on demand ───────► facts ──┼─► Overview (JSON) ─┬─► GET /v1/overview, kvctl top
//!                                     alerts ◄─┘                    └─► listeners of GET /v1/events
//! ```
//!
//! **Architecture Invariant:** an overview holds no lock for long that a put waits for. It copies
//! the table of segments under its read lock, and reads counters of segments without a lock.

mod alerts;
mod facts;
mod history;
mod listeners;
mod uses;
mod watch;

pub use alerts::{Alert, AlertKind, Severity};
pub use facts::{Fill, MasterFacts, MediumFacts, NodeFacts, Overview, PoolFacts, UnusedFacts};
pub use history::{History, Point};
pub use listeners::Listeners;
pub use uses::NamespaceUse;
pub use watch::Watch;
