//! The results of a load: a tally for each thread, and the report of all.

use super::Load;
use crate::{output, stats};
use hdrhistogram::Histogram;
use kvpool_types::Code;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// The longest recorded latency, in nanoseconds. Timeouts of calls are far shorter.
const LONGEST: u64 = 3_600_000_000_000;

/// The decimal digits to which latencies are kept.
const DIGITS: u8 = 3;

/// The results of one thread, or of several.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) put: Calls,
    pub(super) get: Calls,
    /// Blocks that were compared byte by byte.
    pub(super) verified: u64,
    /// Blocks with wrong bytes, a wrong length, or a key that was never put.
    pub(super) wrong: u64,
}

/// The calls of one kind.
#[derive(Debug)]
pub(super) struct Calls {
    /// The latencies of all calls, in nanoseconds.
    latencies: Histogram<u64>,
    /// Blocks stored or got.
    blocks: u64,
    bytes: u64,
    /// Blocks that the pool had when they were put.
    pub(super) present: u64,
    /// Requested keys that were never put, and were not found.
    pub(super) absent: u64,
    /// Requested keys that were put, and were not found.
    pub(super) evicted: u64,
    /// Blocks that failed, by code.
    failed: BTreeMap<String, u64>,
    first_error: Option<anyhow::Error>,
}

impl Calls {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            latencies: Histogram::new_with_bounds(1, LONGEST, DIGITS)?,
            blocks: 0,
            bytes: 0,
            present: 0,
            absent: 0,
            evicted: 0,
            failed: BTreeMap::new(),
            first_error: None,
        })
    }

    /// Counts a call with its latency, and the blocks and bytes that it moved.
    pub(super) fn add(&mut self, took: Duration, blocks: u64, bytes: u64) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(LONGEST);
        self.latencies.saturating_record(nanos.max(1));
        self.blocks += blocks;
        self.bytes += bytes;
    }

    /// Counts a block that failed.
    pub(super) fn fail(&mut self, code: Code, error: impl FnOnce() -> anyhow::Error) {
        *self.failed.entry(code.label().to_owned()).or_default() += 1;
        self.first_error.get_or_insert_with(error);
    }

    fn merge(&mut self, other: Self) -> anyhow::Result<()> {
        self.latencies.add(&other.latencies)?;
        self.blocks += other.blocks;
        self.bytes += other.bytes;
        self.present += other.present;
        self.absent += other.absent;
        self.evicted += other.evicted;
        for (code, blocks) in other.failed {
            *self.failed.entry(code).or_default() += blocks;
        }
        self.first_error = self.first_error.take().or(other.first_error);
        Ok(())
    }

    fn summary(self, elapsed: Duration) -> Option<Summary> {
        let seconds = elapsed.as_secs_f64();
        let micros = |nanos: u64| nanos as f64 / 1e3;
        let quantile = |rank: f64| micros(self.latencies.value_at_quantile(rank));
        (!self.latencies.is_empty()).then(|| Summary {
            calls: self.latencies.len(),
            blocks: self.blocks,
            bytes: self.bytes,
            calls_per_s: self.latencies.len() as f64 / seconds,
            blocks_per_s: self.blocks as f64 / seconds,
            gb_per_s: stats::gigabytes_a_second(self.bytes, elapsed),
            latency_us: Latency {
                p50: quantile(0.5),
                p90: quantile(0.9),
                p99: quantile(0.99),
                p999: quantile(0.999),
                max: micros(self.latencies.max()),
            },
            present: self.present,
            absent: self.absent,
            evicted: self.evicted,
            failed: self.failed,
        })
    }
}

impl Tally {
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            put: Calls::new()?,
            get: Calls::new()?,
            verified: 0,
            wrong: 0,
        })
    }

    /// The tally of all threads.
    pub(super) fn of(
        threads: impl IntoIterator<Item = anyhow::Result<Self>>,
    ) -> anyhow::Result<Self> {
        let mut threads = threads.into_iter();
        threads.try_fold(Self::new()?, |all, one| all.merge(one?))
    }

    fn merge(mut self, other: Self) -> anyhow::Result<Self> {
        self.put.merge(other.put)?;
        self.get.merge(other.get)?;
        self.verified += other.verified;
        self.wrong += other.wrong;
        Ok(self)
    }

    /// Makes the report. If no block was moved and a call failed, the failure is the result.
    pub(super) fn finish(mut self, load: &Load, elapsed: Duration) -> anyhow::Result<Report> {
        let first_error = self.put.first_error.take().or(self.get.first_error.take());
        if let Some(error) = first_error
            && self.put.blocks + self.get.blocks == 0
        {
            return Err(error.context("no block was put or got"));
        }
        Ok(Report {
            load: load.clone(),
            seconds: elapsed.as_secs_f64(),
            put: self.put.summary(elapsed),
            get: self.get.summary(elapsed),
            verified_blocks: self.verified,
            wrong_blocks: self.wrong,
        })
    }
}

/// The results of a load.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    load: Load,
    /// From the first call to the end of the last.
    seconds: f64,
    /// `None` if no call put.
    put: Option<Summary>,
    /// `None` if no call got.
    get: Option<Summary>,
    verified_blocks: u64,
    wrong_blocks: u64,
}

#[derive(Debug, Serialize)]
struct Summary {
    calls: u64,
    blocks: u64,
    bytes: u64,
    calls_per_s: f64,
    blocks_per_s: f64,
    /// 10^9 bytes a second.
    gb_per_s: f64,
    latency_us: Latency,
    present: u64,
    absent: u64,
    evicted: u64,
    failed: BTreeMap<String, u64>,
}

/// Percentiles of the time of one call, in microseconds.
#[derive(Debug, Serialize)]
struct Latency {
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

impl Report {
    /// The blocks that did not have the bytes that were put.
    pub(crate) const fn wrong_blocks(&self) -> u64 {
        self.wrong_blocks
    }

    /// The tables for people.
    pub(crate) fn tables(&self) -> String {
        let Load {
            block_bytes,
            batch,
            threads,
            blocks_per_thread,
            ..
        } = self.load;
        let mut facts = output::facts();
        let threads_and_calls = format!(
            "{threads} threads, {batch} blocks of {} a call",
            output::bytes(block_bytes)
        );
        facts.add_row(["load", &threads_and_calls]);
        let in_pool = block_bytes * blocks_per_thread * u64::from(threads);
        facts.add_row([
            "blocks in the pool",
            &format!("at most {}", output::bytes(in_pool)),
        ]);
        facts.add_row(["time", &format!("{:.1} s", self.seconds)]);
        facts.add_row(["verified blocks", &output::count(self.verified_blocks)]);
        facts.add_row(["wrong blocks", &output::count(self.wrong_blocks)]);

        let mut rates = output::table([
            "call", "calls/s", "blocks/s", "GB/s", "p50", "p90", "p99", "p99.9", "max",
        ]);
        for (name, calls) in [("put", &self.put), ("get", &self.get)] {
            let Some(calls) = calls else { continue };
            calls.facts(name, &mut facts);
            let Latency {
                p50,
                p90,
                p99,
                p999,
                max,
            } = calls.latency_us;
            let mut row = vec![
                name.to_owned(),
                format!("{:.0}", calls.calls_per_s),
                format!("{:.0}", calls.blocks_per_s),
                format!("{:.2}", calls.gb_per_s),
            ];
            row.extend([p50, p90, p99, p999, max].map(output::micros));
            rates.add_row(row);
        }
        output::align_right(&mut rates, 1..9);
        format!("{facts}\n{rates}")
    }
}

impl Summary {
    /// Adds the counts that are not zero.
    fn facts(&self, name: &str, facts: &mut output::Table) {
        let counts = [
            ("present already", self.present),
            ("absent keys", self.absent),
            ("evicted", self.evicted),
        ];
        for (what, blocks) in counts {
            if blocks > 0 {
                facts.add_row([format!("{name}: {what}"), output::count(blocks)]);
            }
        }
        for (code, blocks) in &self.failed {
            facts.add_row([format!("{name} failed: {code}"), output::count(*blocks)]);
        }
    }
}
