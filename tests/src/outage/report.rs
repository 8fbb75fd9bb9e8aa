//! The observations of a load: the longest times without success, and errors.

use super::{Operation, Outcome, What};
use crate::blocks::check_all;
use kvpool_client::Client;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// A disturbance of the pool.
#[derive(Clone, Debug)]
pub struct Event {
    /// Its name. Events of one name are summarised together.
    pub name: String,
    /// The time at which it began.
    pub at: Instant,
}

/// The longest times without a success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gaps {
    /// For puts.
    pub put: Duration,
    /// For gets with cached locations.
    pub get: Duration,
    /// For gets that ask the master.
    pub lookup: Duration,
}

/// The observations of a load.
#[derive(Clone, Debug)]
pub struct Report {
    /// The time at which it began.
    pub started: Instant,
    /// The time at which it had ended.
    pub ended: Instant,
    /// The events during the load, in order.
    pub events: Vec<Event>,
    /// Every operation, in the order of their ends.
    pub operations: Vec<Operation>,
    /// The number of blocks that were put before the load began. They have the lowest numbers.
    pub standing: u64,
    /// The length of every block in bytes.
    pub length: usize,
}

impl Report {
    /// For every event, the longest times without a success between it and the next one.
    pub fn gaps(&self) -> Vec<(Event, Gaps)> {
        let ends = self.events.iter().skip(1).map(|event| event.at);
        let spans = self.events.iter().zip(ends.chain([self.ended]));
        spans
            .map(|(event, until)| {
                let gap = |what| self.gap(what, event.at, until);
                let gaps = Gaps {
                    put: gap(What::Put),
                    get: gap(What::Get),
                    lookup: gap(What::Lookup),
                };
                (event.clone(), gaps)
            })
            .collect()
    }

    /// The longest time between two consecutive successes that overlaps a span.
    pub fn gap(&self, what: What, from: Instant, until: Instant) -> Duration {
        let successes = self.done(what).map(|operation| operation.end);
        let (mut longest, mut last) = (Duration::ZERO, self.started);
        for end in successes.chain([until]) {
            let end = end.min(until);
            if end > from {
                longest = longest.max(end.saturating_duration_since(last));
            }
            last = last.max(end);
        }
        longest
    }

    fn done(&self, what: What) -> impl Iterator<Item = &Operation> {
        let is_one = move |o: &&Operation| o.what == what && o.outcome == Outcome::Done;
        self.operations.iter().filter(is_one)
    }

    /// The number of gets that returned wrong bytes.
    pub fn wrong(&self) -> usize {
        self.count(&Outcome::Wrong)
    }

    /// The number of gets that missed a block that was put before the load began.
    pub fn missed(&self) -> usize {
        self.count(&Outcome::Missed)
    }

    /// For each such get, the last event and the time since it.
    pub fn missed_at(&self) -> Vec<(String, Duration)> {
        let missed = self
            .operations
            .iter()
            .filter(|o| o.outcome == Outcome::Missed);
        let after = |end: Instant| {
            let before = self.events.iter().rev().find(|event| event.at <= end)?;
            Some((before.name.clone(), end - before.at))
        };
        missed
            .filter_map(|operation| after(operation.end))
            .collect()
    }

    fn count(&self, outcome: &Outcome) -> usize {
        let is_one = |operation: &&Operation| operation.outcome == *outcome;
        self.operations.iter().filter(is_one).count()
    }

    /// The numbers of failed operations of a kind, by error message.
    pub fn failures(&self, what: What) -> BTreeMap<String, usize> {
        let mut failures = BTreeMap::new();
        for operation in self.operations.iter().filter(|o| o.what == what) {
            if let Outcome::Failed(code, _) = &operation.outcome {
                *failures.entry(code.to_string()).or_default() += 1;
            }
        }
        failures
    }

    /// The number of acknowledged puts.
    pub fn acknowledged(&self) -> usize {
        self.done(What::Put).count()
    }

    /// The puts that were acknowledged under an epoch although they began after a put of a higher
    /// epoch had ended, each with that other put. Two leaders were then believed at once.
    pub fn epochs_gone_back(&self) -> Vec<(Operation, Operation)> {
        let mut by_start: Vec<&Operation> = self.done(What::Put).collect();
        by_start.sort_by_key(|operation| operation.start);
        let mut ended = self.done(What::Put).peekable();
        let mut highest: Option<&Operation> = None;
        let mut gone_back = Vec::new();
        for operation in by_start {
            while let Some(before) = ended.next_if(|before| before.end < operation.start) {
                if highest.is_none_or(|highest| highest.epoch < before.epoch) {
                    highest = Some(before);
                }
            }
            if let Some(highest) = highest
                && highest.epoch > operation.epoch
            {
                gone_back.push((operation.clone(), highest.clone()));
            }
        }
        gone_back
    }

    /// Gets every acknowledged block, including the blocks from before the load. Returns the
    /// numbers of lost and of wrong blocks. No block may have been evicted.
    pub async fn lost_and_wrong(&self, client: &Client) -> anyhow::Result<(usize, usize)> {
        let put = self.done(What::Put).map(|operation| operation.block);
        self.lost_and_wrong_of((0..self.standing).chain(put).collect(), client)
            .await
    }

    /// Gets the last `count` acknowledged blocks. Returns the numbers of lost and of wrong blocks.
    pub async fn newest(&self, count: usize, client: &Client) -> anyhow::Result<(usize, usize)> {
        let put: Vec<u64> = self.done(What::Put).map(|o| o.block).collect();
        let newest = put.get(put.len().saturating_sub(count)..);
        self.lost_and_wrong_of(newest.unwrap_or_default().to_vec(), client)
            .await
    }

    async fn lost_and_wrong_of(
        &self,
        mut blocks: Vec<u64>,
        client: &Client,
    ) -> anyhow::Result<(usize, usize)> {
        let (mut lost, mut wrong) = (0, 0);
        blocks.sort_unstable();
        for run in blocks.chunk_by(|one, next| one + 1 == *next) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else {
                continue;
            };
            let tally = check_all(client, *first..last + 1, self.length).await;
            anyhow::ensure!(tally.failed == 0, "{} gets failed", tally.failed);
            lost += tally.missed;
            wrong += tally.wrong;
        }
        Ok((lost, wrong))
    }
}

/// The gaps of many events by name, for medians.
#[derive(Debug, Default)]
pub struct Summary(BTreeMap<String, Vec<Gaps>>);

impl Summary {
    /// Adds the events of a report.
    pub fn add(&mut self, report: &Report) {
        for (event, gaps) in report.gaps() {
            self.0.entry(event.name).or_default().push(gaps);
        }
    }

    /// The longest gaps of the events with this name.
    pub fn worst(&self, name: &str) -> Gaps {
        let most = |of: fn(&Gaps) -> Duration| {
            let gaps = self.0.get(name).into_iter().flatten();
            gaps.map(of).max().unwrap_or_default()
        };
        Gaps {
            put: most(|gaps| gaps.put),
            get: most(|gaps| gaps.get),
            lookup: most(|gaps| gaps.lookup),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<44} {:>4}  {:>19}  {:>19}  {:>19}",
            "longest time without a success (median, max)", "runs", "put", "lookup", "cached get"
        )?;
        for (name, gaps) in &self.0 {
            let columns: [fn(&Gaps) -> Duration; 3] = [|g| g.put, |g| g.lookup, |g| g.get];
            write!(f, "{name:<44} {:>4}", gaps.len())?;
            for column in columns {
                let mut times: Vec<Duration> = gaps.iter().map(column).collect();
                times.sort_unstable();
                let (median, max) = (times.get(times.len() / 2), times.last());
                let seconds = |time: Option<&Duration>| time.map_or(0.0, Duration::as_secs_f64);
                let text = format!("{:.3} s, {:.3} s", seconds(median), seconds(max));
                write!(f, "  {text:>19}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::{Code, Epoch};

    /// A report of puts: start, end, epoch; an epoch of 0 failed.
    fn report(puts: &[(u64, u64, u64)], events: &[u64], ended: u64) -> Report {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let mut operations: Vec<Operation> = puts
            .iter()
            .map(|&(start, end, epoch)| Operation {
                what: What::Put,
                block: start,
                start: at(start),
                end: at(end),
                outcome: match epoch {
                    0 => Outcome::Failed(Code::NotLeader, String::new()),
                    _ => Outcome::Done,
                },
                epoch: Epoch(epoch),
            })
            .collect();
        operations.sort_by_key(|operation| operation.end);
        let events = events.iter().map(|&ms| Event {
            name: "kill".into(),
            at: at(ms),
        });
        Report {
            started: zero,
            ended: at(ended),
            events: events.collect(),
            operations,
            standing: 0,
            length: 0,
        }
    }

    fn put_gaps(report: &Report) -> Vec<u128> {
        let gaps = report.gaps().into_iter();
        gaps.map(|(_, gaps)| gaps.put.as_millis()).collect()
    }

    #[test]
    fn an_outage_lasts_from_the_last_success_before_it_to_the_first_after_it() {
        let puts = [
            (0, 10, 1),
            (10, 20, 1),
            (15, 400, 0),
            (500, 700, 2),
            (700, 710, 2),
        ];
        assert_eq!(put_gaps(&report(&puts, &[50], 720)), [680]);
        // A gap before an event, or after the next one, does not belong to it.
        let puts = [(0, 300, 1), (300, 310, 1), (320, 330, 2), (600, 610, 2)];
        assert_eq!(put_gaps(&report(&puts, &[310, 450], 620)), [120, 280]);
        // An outage without an end lasts to the end of the load.
        assert_eq!(put_gaps(&report(&[(0, 10, 1)], &[50], 1010)), [1000]);
    }

    #[test]
    fn an_acknowledgement_under_a_lower_epoch_after_one_of_a_higher_is_found() {
        let good = [(0, 10, 1), (5, 30, 2), (8, 40, 1), (31, 50, 2)];
        assert!(report(&good, &[], 60).epochs_gone_back().is_empty());
        let bad = [(0, 10, 1), (5, 30, 2), (31, 40, 1), (41, 50, 2)];
        let found = report(&bad, &[], 60).epochs_gone_back();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].0.epoch, found[0].1.epoch), (Epoch(1), Epoch(2)));
        // A failure is not an acknowledgement.
        let failed = [(0, 10, 2), (20, 30, 0)];
        assert!(report(&failed, &[], 60).epochs_gone_back().is_empty());
    }
}
