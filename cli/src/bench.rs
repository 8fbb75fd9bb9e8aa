//! `kvctl bench`: every case of the pool beside what the machine can do, measured in turns.
//!
//! ```text
//!  cases ──► runner ──Command──► agent: clients       ──► pools
//!    │         │    ──Command──► agent: limits ◄─bare TCP─► limits-far
//!    │         └──► pairing ──► report
//!    └ what is done, what bounds it, what is asked of it
//! ```
//!
//! Cases over TCP have a runner of their own, whose far processes are in another network namespace ([`veth`]).
//!
//! A case never decides how it is measured, and what measures it knows no goals.

pub(crate) mod agent;
pub(crate) mod cases;
pub(crate) mod left_out;
mod limits;
pub(crate) mod machine;
mod pairing;
mod pools;
pub(crate) mod report;
pub(crate) mod runner;
mod usage;
pub(crate) mod veth;
mod window;
