//! What a client counts of its own work.

use crate::latencies::Latencies;
use kvpool_transport::TransportKind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What one client has done since it connected.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The counters as they are counted.
        #[derive(Debug, Default)]
        pub(crate) struct Counting {
            $(pub(crate) $name: AtomicU64,)*
            pub(crate) latencies: Latencies,
        }

        impl Counting {
            /// The values now.
            pub(crate) fn snapshot(&self) -> Counters {
                Counters {
                    $($name: self.$name.load(Relaxed),)*
                }
            }
        }

        impl Counters {
            /// Every counter with its name, for tables and JSON.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Gets that found their block.
    hits,
    /// Gets that did not.
    misses,
    /// Gets that failed.
    get_errors,
    /// Puts that moved bytes.
    puts_stored,
    /// Puts of blocks that were there.
    puts_present,
    /// Puts that failed.
    put_errors,
    /// Bytes got and verified, through shared memory.
    shm_read_bytes,
    /// Bytes got and verified, through RDMA.
    rdma_read_bytes,
    /// Bytes got and verified, through TCP.
    tcp_read_bytes,
    /// Bytes written to replicas, through shared memory.
    shm_written_bytes,
    /// Bytes written to replicas, through RDMA.
    rdma_written_bytes,
    /// Bytes written to replicas, through TCP.
    tcp_written_bytes,
    /// Views handed out.
    views,
    /// Locations taken from the cache.
    cache_hits,
    /// Locations asked of the master.
    cache_misses,
    /// Calls to the master that were repeated.
    control_retries,
    /// Reads and writes of one block that were repeated, on another replica or the same.
    transfer_retries,
    /// Reads whose bytes did not match their checksum while their lease ran.
    checksum_mismatches,
    /// Reads that ended after their lease and were done again.
    leases_outrun,
    /// Times that a new leader's term was seen.
    epochs_seen,
    /// Links to nodes that were opened.
    links_opened,
    /// Attempts to open one that failed.
    link_failures,
}

impl Counting {
    /// Counts one.
    pub(crate) fn one(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    /// Counts `bytes` verified after a read.
    pub(crate) fn read(&self, kind: TransportKind, bytes: u64) {
        match kind {
            TransportKind::Shm => &self.shm_read_bytes,
            TransportKind::Rdma => &self.rdma_read_bytes,
            TransportKind::Tcp => &self.tcp_read_bytes,
        }
        .fetch_add(bytes, Relaxed);
    }

    /// Counts `bytes` written to one replica.
    pub(crate) fn written(&self, kind: TransportKind, bytes: u64) {
        match kind {
            TransportKind::Shm => &self.shm_written_bytes,
            TransportKind::Rdma => &self.rdma_written_bytes,
            TransportKind::Tcp => &self.tcp_written_bytes,
        }
        .fetch_add(bytes, Relaxed);
    }
}
