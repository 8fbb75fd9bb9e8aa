//! Histograms of latency by operation: whole batches, calls to the master, transfers by transport.
//!
//! A read of shared memory on the calling thread has no entry of its own. The latency of its get includes it.

use kvpool_trace::LATENCY_BUCKETS_US;
use kvpool_transport::TransportKind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The operations that a client measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measured {
    /// A batch of gets, from its call to its return.
    Get,
    /// A batch of puts, from its call to its return.
    Put,
    /// One attempt of a call to the master, by the method's name.
    Call(&'static str),
    /// A read from one store node, unless the calling thread does it at once.
    Read(TransportKind),
    /// A write to one store node.
    Write(TransportKind),
}

/// The names of the operations, in the order of their histograms. Calls have the names of [`Measured::Call`].
const OPERATIONS: [&str; 17] = [
    "get",
    "put",
    "read_shm",
    "read_rdma",
    "read_tcp",
    "write_shm",
    "write_rdma",
    "write_tcp",
    "Exist",
    "MatchPrefix",
    "Lookup",
    "Reserve",
    "Commit",
    "Renew",
    "Release",
    "Revoke",
    "Remove",
];

impl Measured {
    fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Put => "put",
            Self::Call(method) => method,
            Self::Read(TransportKind::Shm) => "read_shm",
            Self::Read(TransportKind::Rdma) => "read_rdma",
            Self::Read(TransportKind::Tcp) => "read_tcp",
            Self::Write(TransportKind::Shm) => "write_shm",
            Self::Write(TransportKind::Rdma) => "write_rdma",
            Self::Write(TransportKind::Tcp) => "write_tcp",
        }
    }
}

/// One more bucket than there are upper ends, since the last bucket has none.
const BUCKETS: usize = LATENCY_BUCKETS_US.len() + 1;

#[derive(Debug, Default)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    nanoseconds: AtomicU64,
}

/// The histograms of one client.
#[derive(Debug, Default)]
pub(crate) struct Latencies([Histogram; OPERATIONS.len()]);

impl Latencies {
    /// Counts one operation. Operations that are not in [`OPERATIONS`] are ignored.
    pub(crate) fn observe(&self, what: Measured, took: Duration) {
        let name = what.name();
        let at = OPERATIONS.iter().position(|known| *known == name);
        let Some(histogram) = at.and_then(|at| self.0.get(at)) else {
            return;
        };
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = LATENCY_BUCKETS_US.partition_point(|end| *end < us);
        if let Some(count) = histogram.buckets.get(bucket) {
            count.fetch_add(1, Relaxed);
        }
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        histogram.nanoseconds.fetch_add(nanoseconds, Relaxed);
    }

    /// The present histograms of all operations that were done at least once.
    pub(crate) fn snapshot(&self) -> Vec<Latency> {
        let of = |(operation, histogram): (&&'static str, &Histogram)| {
            let counts: Vec<u64> = histogram.buckets.iter().map(|n| n.load(Relaxed)).collect();
            Latency {
                operation,
                total: Duration::from_nanos(histogram.nanoseconds.load(Relaxed)),
                counts,
            }
        };
        let all = OPERATIONS.iter().zip(&self.0).map(of);
        all.filter(|latency| latency.count() > 0).collect()
    }
}

/// The latencies of one operation since the client connected.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Latency {
    /// `get` and `put` are whole batches. `read_` and `write_` with a transport are transfers with one store
    /// node. Capitalized names are attempts of calls to the master.
    pub operation: &'static str,
    /// The sum of all latencies.
    pub total: Duration,
    counts: Vec<u64>,
}

impl Latency {
    /// The number of times that the operation was done.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The buckets, each with its upper end and its count. A latency counts in the first bucket whose upper
    /// end it does not exceed. The last bucket has no upper end.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        let ends = LATENCY_BUCKETS_US.iter();
        let ends = ends.map(|us| Some(Duration::from_micros(*us)));
        ends.chain([None]).zip(self.counts.iter().copied())
    }

    /// The upper end of the bucket in which the quantile `q` (0 to 1) lies. `None` if this is the last
    /// bucket, or if nothing was counted.
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let wanted = (self.count() as f64 * q.clamp(0.0, 1.0)).max(1.0);
        let mut below = 0;
        for (end, count) in self.buckets() {
            below += count;
            if below as f64 >= wanted {
                return end;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_counts_in_the_bucket_of_its_latency() {
        let latencies = Latencies::default();
        for us in [9, 10, 11, 900, 20_000_000] {
            latencies.observe(Measured::Get, Duration::from_micros(us));
        }
        latencies.observe(
            Measured::Read(TransportKind::Tcp),
            Duration::from_micros(30),
        );
        latencies.observe(Measured::Call("Lookup"), Duration::from_micros(70));
        latencies.observe(Measured::Call("Stats"), Duration::from_micros(70));

        let all = latencies.snapshot();
        let names: Vec<&str> = all.iter().map(|latency| latency.operation).collect();
        assert_eq!(names, ["get", "read_tcp", "Lookup"]);
        let get = &all[0];
        assert_eq!(get.count(), 5);
        assert_eq!(get.total, Duration::from_micros(20_000_930));
        let counts: Vec<u64> = get.buckets().map(|(_, count)| count).collect();
        assert_eq!((counts[0], counts[1], counts[6], counts[19]), (2, 1, 1, 1));
        assert_eq!(get.quantile(0.5), Some(Duration::from_micros(25)));
        assert_eq!(get.quantile(0.8), Some(Duration::from_millis(1)));
        assert_eq!(get.quantile(1.0), None);
    }

    #[test]
    fn every_measured_operation_but_a_rare_call_has_a_histogram() {
        let kinds = [TransportKind::Shm, TransportKind::Rdma, TransportKind::Tcp];
        let transfers = kinds.map(|kind| [Measured::Read(kind), Measured::Write(kind)]);
        let calls = [
            "Exist",
            "MatchPrefix",
            "Lookup",
            "Reserve",
            "Commit",
            "Renew",
            "Release",
        ];
        let mut all = vec![Measured::Get, Measured::Put];
        all.extend(transfers.into_iter().flatten());
        all.extend(calls.map(Measured::Call));
        for what in all {
            assert!(OPERATIONS.contains(&what.name()), "{what:?}");
        }
    }
}
