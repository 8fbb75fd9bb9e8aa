//! Statistics of durations: percentiles and rates.

use serde::Serialize;
use std::time::Duration;

/// Durations and bytes of one kind of call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples {
    durations: Vec<Duration>,
    bytes: u64,
}

/// The statistics of one kind of call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    /// The number of calls.
    pub(crate) calls: u64,
    /// The median duration, in microseconds.
    pub(crate) p50_us: f64,
    /// The duration that one call in a hundred exceeds, in microseconds.
    pub(crate) p99_us: f64,
    /// 10^9 bytes for each second spent in the call; `None` for calls that move no bytes.
    pub(crate) gb_per_s: Option<f64>,
}

impl Samples {
    /// Adds one call.
    pub(crate) fn add(&mut self, took: Duration, bytes: u64) {
        self.durations.push(took);
        self.bytes += bytes;
    }

    /// The statistics of the calls so far.
    pub(crate) fn summary(&self) -> Summary {
        let mut sorted = self.durations.clone();
        sorted.sort_unstable();
        let spent: Duration = sorted.iter().sum();
        Summary {
            calls: sorted.len() as u64,
            p50_us: micros(percentile(&sorted, 0.50)),
            p99_us: micros(percentile(&sorted, 0.99)),
            gb_per_s: (self.bytes > 0).then(|| gigabytes_a_second(self.bytes, spent)),
        }
    }
}

/// The nearest-rank percentile: the smallest sample that at least the share `rank` of the samples do not
/// exceed. `sorted` is in ascending order. Without samples it is zero.
pub fn percentile(sorted: &[Duration], rank: f64) -> Duration {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank between 0 and 1 times a count is a count"
    )]
    let at = (rank * sorted.len() as f64).ceil() as usize;
    sorted
        .get(at.saturating_sub(1))
        .or(sorted.last())
        .copied()
        .unwrap_or_default()
}

/// 10^9 bytes a second; zero when no time was spent.
pub(crate) fn gigabytes_a_second(bytes: u64, spent: Duration) -> f64 {
    if spent.is_zero() {
        return 0.0;
    }
    bytes as f64 / spent.as_secs_f64() / 1e9
}

/// A duration in microseconds.
pub(crate) fn micros(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1e3
}

/// `part` of `whole` in percent; zero of nothing.
pub(crate) fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    part as f64 * 100.0 / whole as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(values: impl IntoIterator<Item = u64>) -> Vec<Duration> {
        values.into_iter().map(Duration::from_millis).collect()
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let hundred = millis(1..=100);
        assert_eq!(percentile(&hundred, 0.50), Duration::from_millis(50));
        assert_eq!(percentile(&hundred, 0.99), Duration::from_millis(99));
        assert_eq!(percentile(&hundred, 1.0), Duration::from_millis(100));
        assert_eq!(percentile(&hundred, 0.0), Duration::from_millis(1));
        assert_eq!(
            percentile(&millis([7, 9]), 0.5),
            Duration::from_millis(7),
            "half of two samples is one"
        );
        assert_eq!(percentile(&[], 0.5), Duration::ZERO);
    }

    #[test]
    fn a_summary_does_not_depend_on_the_order_of_calls() {
        let mut samples = Samples::default();
        for took in millis([30, 10, 20]) {
            samples.add(took, 2_000_000);
        }
        let summary = samples.summary();
        assert_eq!(summary.calls, 3);
        assert_eq!(summary.p50_us, 20_000.0);
        assert_eq!(summary.p99_us, 30_000.0);
        // 6 MB in 60 ms.
        assert!((summary.gb_per_s.unwrap() - 0.1).abs() < 1e-9);
        assert_eq!(Samples::default().summary().gb_per_s, None);
    }

    #[test]
    fn percent_of_nothing_is_zero() {
        assert_eq!(percent(0, 0), 0.0);
        assert_eq!(percent(1, 8), 12.5);
    }
}
