//! Real etcd processes for tests: on free ports of the loopback, with a directory of the test's, killed
//! when they are dropped.
//!
//! The binary is `KVPOOL_ETCD`, or `etcd` in the path. With `setpriv` installed, a process dies with the
//! thread that started it, so a killed test leaves none behind. Start it from a thread that lives as
//! long as the process should.

mod certificates;
mod process;
mod slow_link;

pub use process::{Etcd, EtcdCluster, Setup, StartError, binary};
pub use slow_link::SlowLink;
