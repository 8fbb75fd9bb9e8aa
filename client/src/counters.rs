//! The counters of a client.

use crate::latencies::Latencies;
use kvpool_transport::TransportKind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The number of operations, bytes and events since the client connected.
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
    /// Gets whose block was absent.
    misses,
    /// Gets that failed.
    get_errors,
    /// Puts that moved bytes.
    puts_stored,
    /// Puts of blocks that were present.
    puts_present,
    /// Puts that failed.
    put_errors,
    /// Bytes read and verified through shared memory.
    shm_read_bytes,
    /// Bytes read and verified through RDMA.
    rdma_read_bytes,
    /// Bytes read and verified through TCP.
    tcp_read_bytes,
    /// Bytes written to replicas, through shared memory.
    shm_written_bytes,
    /// Bytes written to replicas, through RDMA.
    rdma_written_bytes,
    /// Bytes written to replicas, through TCP.
    tcp_written_bytes,
    /// Views that callers got.
    views,
    /// Locations taken from the cache.
    cache_hits,
    /// Locations that the master was asked for.
    cache_misses,
    /// Calls to the master that were repeated.
    control_retries,
    /// Repeated reads and writes of one block, on another replica or the same one.
    transfer_retries,
    /// Reads whose bytes did not match their checksum while their lease ran.
    checksum_mismatches,
    /// Reads that ended after their lease and were repeated.
    leases_outrun,
    /// Times that a new highest epoch was seen.
    epochs_seen,
    /// Links to nodes that were opened.
    links_opened,
    /// Failed attempts to open a link.
    link_failures,
}

impl Counting {
    /// Adds one to `counter`.
    pub(crate) fn one(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    /// Adds `bytes` that were verified after a read over `kind`.
    pub(crate) fn read(&self, kind: TransportKind, bytes: u64) {
        match kind {
            TransportKind::Shm => &self.shm_read_bytes,
            TransportKind::Rdma => &self.rdma_read_bytes,
            TransportKind::Tcp => &self.tcp_read_bytes,
        }
        .fetch_add(bytes, Relaxed);
    }

    /// Adds `bytes` that were written to one replica over `kind`.
    pub(crate) fn written(&self, kind: TransportKind, bytes: u64) {
        match kind {
            TransportKind::Shm => &self.shm_written_bytes,
            TransportKind::Rdma => &self.rdma_written_bytes,
            TransportKind::Tcp => &self.tcp_written_bytes,
        }
        .fetch_add(bytes, Relaxed);
    }
}
