//! The rates of the last minutes.
//!
//! The master samples them all the time. A page that sampled by itself would lack the minutes
//! before an operator opened it, and these minutes matter most.

use crate::metrics::Totals;
use serde::Serialize;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::Instant;

/// The number of points kept: five minutes of one point a second.
const MOST: usize = 300;

/// The time between two samples and its rates for each second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Point {
    /// The number of the sample.
    pub seq: u64,
    /// Keys that lookups asked for.
    pub lookups: f64,
    /// Keys that lookups found.
    pub found: f64,
    /// Blocks in the chains of `match_prefix`.
    pub prefix_asked: f64,
    /// Leading blocks found by `match_prefix`.
    pub prefix_matched: f64,
    /// Blocks committed.
    pub puts: f64,
    /// Bytes committed.
    pub put_bytes: f64,
    /// Blocks evicted from memory.
    pub evictions: f64,
    /// Blocks copied from memory to media.
    pub demotions: f64,
    /// Blocks that came back from media.
    pub loads: f64,
    /// Puts that had to wait for room, because leases, pins or quarantine kept it.
    pub put_waits: f64,
    /// Bytes used at the end.
    pub used_bytes: u64,
}

/// The points of the last minutes, oldest first, and the totals at the last sample.
#[derive(Debug, Default)]
pub struct History {
    points: VecDeque<Point>,
    last: Option<(Instant, Totals)>,
    next: u64,
}

impl History {
    /// Adds the point between the last sample and this one. The first sample makes no point.
    pub(crate) fn sample(&mut self, now: Instant, totals: Totals, used_bytes: u64) {
        let before = self.last.replace((now, totals));
        let Some((then, before)) = before else {
            return;
        };
        let seconds = now.saturating_duration_since(then);
        let seconds = seconds.max(Duration::from_millis(1)).as_secs_f64();
        let rate = |of: fn(&Totals) -> u64| {
            let more = of(&totals).saturating_sub(of(&before));
            // A chart shows no more than two digits after the point.
            (more as f64 / seconds * 100.0).round() / 100.0
        };
        self.next += 1;
        if self.points.len() == MOST {
            self.points.pop_front();
        }
        self.points.push_back(Point {
            seq: self.next,
            lookups: rate(|t| t.keys_looked_up),
            found: rate(|t| t.keys_found),
            prefix_asked: rate(|t| t.prefix_blocks_asked),
            prefix_matched: rate(|t| t.prefix_blocks_matched),
            puts: rate(|t| t.blocks_committed),
            put_bytes: rate(|t| t.bytes_committed),
            evictions: rate(|t| t.blocks_evicted),
            demotions: rate(|t| t.blocks_stored),
            loads: rate(|t| t.blocks_loaded),
            put_waits: rate(|t| t.put_waits),
            used_bytes,
        });
    }

    /// The number of the last point; 0 for none.
    pub fn last(&self) -> u64 {
        self.next
    }

    /// The points after the point with this number.
    pub fn after(&self, seq: u64) -> Vec<Point> {
        let later = self.points.iter().filter(|point| point.seq > seq);
        later.copied().collect()
    }

    /// The totals at the last sample.
    pub(crate) fn totals(&self) -> Totals {
        self.last.map(|(_, totals)| totals).unwrap_or_default()
    }

    /// True when a put had to wait within the last `points` points.
    pub(crate) fn puts_waited(&self, points: usize) -> bool {
        let last = self.points.iter().rev().take(points);
        last.into_iter().any(|point| point.put_waits > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(puts: u64) -> Totals {
        Totals {
            blocks_committed: puts,
            ..Totals::default()
        }
    }

    #[test]
    fn a_point_has_the_rates_of_the_time_between_two_samples() {
        let mut history = History::default();
        let start = Instant::now();
        history.sample(start, totals(100), 0);
        assert_eq!(history.after(0), [], "one sample has no rate");
        history.sample(start + Duration::from_secs(2), totals(130), 7);
        let points = history.after(0);
        assert_eq!((points[0].puts, points[0].used_bytes), (15.0, 7));
        // A counter that fell belongs to a new process. It must not give a negative rate.
        history.sample(start + Duration::from_secs(3), totals(0), 7);
        assert_eq!(history.after(1)[0].puts, 0.0);
    }

    #[test]
    fn the_history_is_bounded_and_a_listener_gets_what_it_lacks() {
        let mut history = History::default();
        let start = Instant::now();
        for second in 0..1000 {
            history.sample(start + Duration::from_secs(second), totals(second), 0);
        }
        assert_eq!(history.after(0).len(), MOST);
        let later: Vec<u64> = history.after(997).iter().map(|point| point.seq).collect();
        assert_eq!((later, history.last()), (vec![998, 999], 999));
    }
}
