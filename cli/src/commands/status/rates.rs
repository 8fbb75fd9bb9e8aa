//! The rates of a pool and its hit shares.

use crate::output;
use crate::stats::percent;
use kvpool_client::PoolStats;
use serde::Serialize;
use std::collections::BTreeMap;

/// Hit shares since the master started; `None` without requests.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct HitRate {
    /// The share of the keys that gets looked up.
    lookups: Option<f64>,
    /// The share of the blocks that match_prefix requested.
    prefix: Option<f64>,
}

/// Rates for each second.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Rates {
    /// The time between the two statistics.
    over_seconds: f64,
    puts: f64,
    put_bytes: f64,
    /// Keys that gets looked up.
    lookups: f64,
    evicted: f64,
    evicted_bytes: f64,
}

fn counter(counters: &BTreeMap<String, u64>, name: &str) -> u64 {
    counters.get(name).copied().unwrap_or_default()
}

impl HitRate {
    pub(super) fn of(counters: &BTreeMap<String, u64>) -> Self {
        let share = |found: &str, asked: &str| {
            let asked = counter(counters, asked);
            (asked > 0).then(|| percent(counter(counters, found), asked))
        };
        Self {
            lookups: share("keys_found_total", "keys_looked_up_total"),
            prefix: share("prefix_blocks_matched_total", "prefix_blocks_asked_total"),
        }
    }

    /// The text for people.
    pub(super) fn text(&self) -> String {
        let of = |share: Option<f64>| {
            share.map_or_else(|| "none yet".to_owned(), |share| format!("{share:.1} %"))
        };
        format!(
            "of lookups {}, of prefixes {}",
            of(self.lookups),
            of(self.prefix)
        )
    }
}

impl Rates {
    /// The rates between two statistics of one master; `None` if the master restarted between them.
    pub(super) fn between(before: &PoolStats, after: &PoolStats) -> Option<Self> {
        let over = after.uptime.checked_sub(before.uptime)?.as_secs_f64();
        if after.epoch != before.epoch || over <= 0.0 {
            return None;
        }
        let rate = |name| {
            let more = counter(&after.counters, name).checked_sub(counter(&before.counters, name));
            Some(more? as f64 / over)
        };
        Some(Self {
            over_seconds: over,
            puts: rate("blocks_committed_total")?,
            put_bytes: rate("bytes_committed_total")?,
            lookups: rate("keys_looked_up_total")?,
            evicted: rate("blocks_evicted_total")?,
            evicted_bytes: rate("bytes_evicted_total")?,
        })
    }

    /// The rows for people: name and value.
    pub(super) fn rows(&self) -> [(&'static str, String); 3] {
        let both = |count: f64, bytes: f64| format!("{}, {}/s", a_second(count), size(bytes));
        [
            ("puts", both(self.puts, self.put_bytes)),
            ("lookups", a_second(self.lookups)),
            ("evicted", both(self.evicted, self.evicted_bytes)),
        ]
    }
}

fn a_second(count: f64) -> String {
    if count < 10.0 {
        format!("{count:.1}/s")
    } else {
        format!("{}/s", output::count(whole(count)))
    }
}

fn size(bytes: f64) -> String {
    output::bytes(whole(bytes))
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is not negative, and beyond the range it becomes its end"
)]
const fn whole(rate: f64) -> u64 {
    rate.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::status::tests::stats;
    use std::time::Duration;

    #[test]
    fn rates_are_of_the_time_between_two_looks_at_one_life_of_a_master() {
        let before = stats(&[
            ("blocks_committed_total", 100),
            ("bytes_committed_total", 0),
        ]);
        let mut after = stats(&[
            ("blocks_committed_total", 130),
            ("bytes_committed_total", 4096),
        ]);
        after.uptime = before.uptime + Duration::from_secs(2);
        let rates = Rates::between(&before, &after).unwrap();
        assert_eq!((rates.puts, rates.put_bytes), (15.0, 2048.0));
        assert_eq!(rates.rows()[0].1, "15/s, 2.0 KiB/s");
        assert_eq!(Rates::between(&after, &before), None, "started anew");
        after.epoch.0 += 1;
        assert_eq!(Rates::between(&before, &after), None, "another term");
    }

    #[test]
    fn a_hit_rate_of_nothing_is_none() {
        let of = |pairs: &[(&str, u64)]| HitRate::of(&stats(pairs).counters);
        assert_eq!(of(&[]).lookups, None);
        let half = of(&[("keys_looked_up_total", 8), ("keys_found_total", 4)]);
        assert_eq!(half.lookups, Some(50.0));
        assert_eq!(half.text(), "of lookups 50.0 %, of prefixes none yet");
    }
}
