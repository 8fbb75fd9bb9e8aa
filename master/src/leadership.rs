//! Elections and terms: the work of a master while it leads and while it stands by.
//!
//! ```text
//!             ┌─ log cut too far, or unreadable (with growing delays) ────────┐
//!             ▼                                                                │
//!  start ► load ► stand by: apply the log as it grows ─── nobody leads ► campaign ── lost ─┐
//!             ▲       ▲                                                        │           │
//!             │       └────────────────────────────────────────────────────────┼───────────┘
//!             │                                                                ▼ won
//!             └── lease lost, fenced, resigned ───────── lead: Pool::lead, renew the term
//! ```
//!
//! * [`Seat`] is the view of the ports: the pool that this master leads, or the address of the
//!   leader.
//! * [`Candidate`] starts and ends the task of this state machine (`terms`). `keeper` renews the
//!   term on its own thread. `watchdog` checks whether a process listens at the leader's address.
//! * `loading` loads the metadata so that memory holds it once.
//! * `members` exchanges the state of all masters and of the store.
//!
//! **Architecture Invariant:** safety rests on the store alone. Every write of a term compares the
//! leader's key in the same transaction. A wrong belief here about who leads can only cost time.
//!
//! ADR 0011 has the rules of elections and terms.

mod candidate;
mod keeper;
mod loading;
mod log;
mod members;
mod observer;
mod recent_contacts;
mod seat;
mod terms;
mod watchdog;

pub use candidate::{Candidate, Surroundings};
pub use members::report_alone;
pub use recent_contacts::RecentContacts;
pub use seat::{Known, NotLeading, Report, Role, Seat};
