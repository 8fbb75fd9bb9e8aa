//! The shared parts of the cluster tests: real daemons as child processes, signals and faults, and
//! blocks with checkable bytes.
//!
//! Nothing here replaces a part of kvpool: the daemons are the binaries that users run.

pub mod accounts;
pub mod blocks;
pub mod calls;
pub mod churn;
pub mod cluster;
pub mod commits;
pub mod daemon;
pub mod faulty_disk;
pub mod fuzz;
pub mod grants;
pub mod guard;
pub mod hand;
pub mod history;
pub mod hostile;
pub mod masters;
pub mod net;
pub mod outage;
pub mod promql;
pub mod raw;
pub mod relay;
pub mod requests;
pub mod resident;
pub mod trust;

pub use cluster::{Cluster, Options};
pub use daemon::Daemon;
pub use hand::Hand;
