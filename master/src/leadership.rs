//! Who leads, and what a master does while it leads and while it does not.
//!
//! ```text
//!             ┌─ the log is cut too far, or cannot be read (ever more seldom) ┐
//!             ▼                                                                │
//!  start ► load ► stand by: apply the log as it grows ─── nobody leads ► campaign ── lost ─┐
//!             ▲       ▲                                                        │           │
//!             │       └────────────────────────────────────────────────────────┼───────────┘
//!             │                                                                ▼ won
//!             └── the lease is lost, fenced, resigned ── lead: Pool::lead, renew the term
//! ```
//!
//! * [`Seat`] is what the ports see of it: the pool that is led here, or who leads elsewhere.
//! * [`Candidate`] starts and ends the task that goes through this (`terms`); `keeper` renews the term on a thread of
//!   its own; `watchdog` tells whether anything listens where the leader should.
//! * `members` tells the other masters of this one, and this one of them and of the store.
//!
//! **Architecture Invariant:** safety rests on the store alone. Every write of a term is compared with
//! the leader's key in the same transaction; whatever is believed here about who leads can only cost
//! time.
//!
//! ADR 0011 has the rules of elections and terms.

mod candidate;
mod keeper;
mod log;
mod members;
mod observer;
mod recent_contacts;
mod seat;
mod terms;
mod watchdog;

pub use candidate::Candidate;
pub use members::report_alone;
pub use recent_contacts::RecentContacts;
pub use seat::{Known, NotLeading, Report, Role, Seat};
