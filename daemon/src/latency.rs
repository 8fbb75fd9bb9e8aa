//! Histograms of latency by operation, the same buckets for every daemon.

use prometheus::core::Collector;
use prometheus::{Histogram, HistogramOpts, HistogramVec};
use std::time::Duration;

/// The upper ends of the buckets, in seconds: 10 us to 10 s, three a decade.
pub fn buckets() -> Vec<f64> {
    let seconds = |us: &u64| Duration::from_micros(*us).as_secs_f64();
    kvpool_trace::LATENCY_BUCKETS_US
        .iter()
        .map(seconds)
        .collect()
}

/// One histogram for each of a fixed set of operations, under the label `op`.
#[derive(Clone, Debug)]
pub struct Latencies {
    all: HistogramVec,
    /// Resolved once, because the lookup by label takes a lock.
    by_op: Vec<(&'static str, Histogram)>,
}

impl Latencies {
    /// Histograms of `ops`, at zero.
    pub fn new(name: &str, help: &str, ops: &[&'static str]) -> Result<Self, prometheus::Error> {
        let opts = HistogramOpts::new(name, help).buckets(buckets());
        let all = HistogramVec::new(opts, &["op"])?;
        let one = |op: &&'static str| Ok((*op, all.get_metric_with_label_values(&[*op])?));
        let by_op = ops
            .iter()
            .map(one)
            .collect::<Result<_, prometheus::Error>>()?;
        Ok(Self { all, by_op })
    }

    /// The collector, for a registry.
    pub fn collector(&self) -> Box<dyn Collector> {
        Box::new(self.all.clone())
    }

    /// Notes one operation. An operation outside the fixed set is not counted.
    pub fn observe(&self, op: &str, took: Duration) {
        if let Some((_, histogram)) = self.by_op.iter().find(|(known, _)| *known == op) {
            histogram.observe(took.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_counts_in_the_bucket_of_its_latency_and_an_unknown_one_nowhere() {
        let latencies = Latencies::new("request_seconds", "Latency.", &["get", "put"]).unwrap();
        latencies.observe("get", Duration::from_micros(20));
        latencies.observe("other", Duration::from_micros(20));
        let families = latencies.collector().collect();
        let metrics = families[0].get_metric();
        assert_eq!(metrics.len(), 2);
        let count = |op: &str| {
            let of_op = |metric: &&prometheus::proto::Metric| metric.get_label()[0].value() == op;
            let metric = metrics.iter().find(of_op).unwrap();
            let buckets = metric.get_histogram().get_bucket();
            (buckets[0].cumulative_count(), buckets[1].cumulative_count())
        };
        assert_eq!(count("get"), (0, 1));
        assert_eq!(count("put"), (0, 0));
    }
}
