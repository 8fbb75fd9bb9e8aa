//! The properties of this host.

use kvpool_transport::machine::host_id;
use kvpool_transport::rdma::{Fabric, Rail, RdmaOptions};

use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use std::fs;
use std::sync::Arc;

/// The bit of CAP_IPC_LOCK in a set of capabilities.
const CAP_IPC_LOCK: u32 = 14;

/// This host, within the limits of this process.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Host {
    /// The machine's boot id. Processes with the same id may share memory. Empty if unknown.
    pub(crate) id: String,
    /// The number of cores that this process may use.
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) memory_available_bytes: u64,
    /// The memory that the process may lock, in bytes; `None` for no limit.
    pub(crate) memlock_bytes: Option<u64>,
    /// Whether the process may exceed that limit (CAP_IPC_LOCK).
    pub(crate) may_lock_more: bool,
    pub(crate) huge_pages: HugePages,
    /// The most open files and connections; `None` for no limit.
    pub(crate) open_files: Option<u64>,
    pub(crate) rdma: Rdma,
}

/// Huge pages of the default size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct HugePages {
    /// The bytes of a page.
    pub(crate) page_bytes: u64,
    /// The number of pages that are set aside.
    pub(crate) total: u64,
    /// The number of pages that are free.
    pub(crate) free: u64,
}

/// RDMA on this host.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Rdma {
    /// The usable ports.
    pub(crate) ports: Vec<Port>,
    /// The reason why RDMA cannot be used; `None` if it can.
    pub(crate) reason: Option<String>,
}

/// One port of an RDMA device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Port {
    /// The device and the port, as in `mlx5_0:1`.
    pub(crate) name: String,
    pub(crate) gigabits: u32,
    pub(crate) numa_node: Option<u32>,
    pub(crate) gid_index: u8,
    pub(crate) mtu: u32,
    /// The longest work request.
    pub(crate) slice_bytes: u32,
    /// The most parts of memory of a work request.
    pub(crate) scatter: u32,
    pub(crate) queue_depth: u32,
    /// The most reads that a queue pair sends before an answer.
    pub(crate) reads_out: u8,
    /// The most reads of its peer that a queue pair serves at once.
    pub(crate) reads_in: u8,
    /// The longest registration.
    pub(crate) registration_bytes: u64,
    pub(crate) registrations: u32,
}

impl Host {
    /// Reads the properties of this host and opens its RDMA ports. Blocks.
    pub(crate) fn read() -> (Self, Option<Arc<Fabric>>) {
        let (rdma, fabric) = match Fabric::open(&RdmaOptions::default()) {
            Ok(fabric) => (Rdma::of(&fabric), Some(fabric)),
            Err(reason) => (Rdma::none(reason.to_string()), None),
        };
        let meminfo = read("/proc/meminfo");
        let host = Self {
            id: host_id().map(|id| id.to_string()).unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: number(&meminfo, "MemTotal") << 10,
            memory_available_bytes: number(&meminfo, "MemAvailable") << 10,
            memlock_bytes: getrlimit(Resource::Memlock).current,
            may_lock_more: has_capability(&read("/proc/self/status"), CAP_IPC_LOCK),
            huge_pages: HugePages::of(&meminfo),
            open_files: getrlimit(Resource::Nofile).current,
            rdma,
        };
        (host, fabric)
    }

    /// Whether memory of any size can be registered for RDMA.
    pub(crate) fn may_lock_all(&self) -> bool {
        self.may_lock_more
            || self
                .memlock_bytes
                .is_none_or(|limit| limit >= self.memory_bytes)
    }
}

impl HugePages {
    fn of(meminfo: &str) -> Self {
        Self {
            page_bytes: number(meminfo, "Hugepagesize") << 10,
            total: number(meminfo, "HugePages_Total"),
            free: number(meminfo, "HugePages_Free"),
        }
    }
}

impl Rdma {
    fn of(fabric: &Fabric) -> Self {
        Self {
            ports: fabric.rails().iter().map(|rail| Port::of(rail)).collect(),
            reason: None,
        }
    }

    pub(crate) const fn none(reason: String) -> Self {
        Self {
            ports: Vec::new(),
            reason: Some(reason),
        }
    }
}

impl Port {
    fn of(rail: &Rail) -> Self {
        let limits = rail.limits();
        Self {
            name: rail.name().to_owned(),
            gigabits: rail.gigabits(),
            numa_node: rail.numa_node(),
            gid_index: rail.gid_index(),
            mtu: rail.mtu(),
            slice_bytes: limits.slice,
            scatter: limits.scatter,
            queue_depth: limits.queue_depth,
            reads_out: limits.reads_out,
            reads_in: limits.reads_in,
            registration_bytes: limits.registration,
            registrations: limits.registrations,
        }
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The number after a name in /proc/meminfo.
fn number(meminfo: &str, name: &str) -> u64 {
    meminfo
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or_default()
}

/// Whether the capability is among the effective ones in /proc/self/status.
fn has_capability(status: &str, bit: u32) -> bool {
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|rest| u64::from_str_radix(rest.trim(), 16).ok())
        .is_some_and(|set| set >> bit & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_models_of_the_kernel_are_parsed() {
        let meminfo = "MemTotal:  12 kB\nHugePages_Total:      8\nHugePages_Free:  3\n\
                       Hugepagesize:       2048 kB\n";
        let expected = HugePages {
            page_bytes: 2 << 20,
            total: 8,
            free: 3,
        };
        assert_eq!(HugePages::of(meminfo), expected);
        let status = "Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t0000000000004000\n";
        assert!(has_capability(status, CAP_IPC_LOCK));
        assert!(!has_capability(status, 13));
        assert!(!has_capability("", CAP_IPC_LOCK));
    }

    #[test]
    fn memory_can_be_registered_where_the_limit_or_a_capability_allows_all_of_it() {
        let (mut host, _) = Host::read();
        host.memory_bytes = 1 << 30;
        for (limit, more, all) in [
            (None, false, true),
            (Some(1 << 30), false, true),
            (Some(8 << 20), false, false),
            (Some(8 << 20), true, true),
        ] {
            (host.memlock_bytes, host.may_lock_more) = (limit, more);
            assert_eq!(host.may_lock_all(), all, "{limit:?} {more}");
        }
    }
}
