//! Real etcd processes for tests: on free ports of the loopback, with a directory of the test's, killed
//! when they are dropped.
//!
//! The binary is the one in `KVPOOL_ETCD`, or `etcd` in the path. Processes die with the thread that
//! started them (where `setpriv` is there to ask for it), so that a killed test leaves none behind:
//! start them from a thread that lives as long as they are to.

mod certificates;
mod process;

pub use process::{Etcd, EtcdCluster, Setup, StartError, binary};
