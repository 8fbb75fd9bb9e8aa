//! The report of a demo or a replay.

use crate::exit;
use crate::output;
use crate::stats::{self, Samples, Summary};
use crate::worker::Blocks;
use crate::worker::protocol::{Call, Decoded, Prefilled};
use kvpool_client::PoolStats;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// The counts of a run.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    requests: u64,
    asked: u64,
    hits: u64,
    lost: u64,
    put: u64,
    existed: u64,
    refused: BTreeMap<String, u64>,
    unreadable: BTreeMap<String, u64>,
    decoded: u64,
    decode_missing: u64,
    wrong: u64,
    tokens_asked: u64,
    tokens_saved: u64,
    bytes_put: u64,
    bytes_got: u64,
    match_prefix: Samples,
    get: Samples,
    put_calls: Samples,
    decode_get: Samples,
}

/// The settings of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Setting {
    /// The source of the requests.
    pub(crate) workload: String,
    /// The bytes of a block.
    pub(crate) block_bytes: u64,
    /// The tokens of a block.
    pub(crate) block_tokens: usize,
    /// The memory of all store nodes.
    pub(crate) pool_bytes: u64,
    /// The blocks that fit into the pool.
    pub(crate) capacity_blocks: u64,
    /// The eviction policy.
    pub(crate) policy: crate::cluster::Policy,
    /// When commits are acknowledged.
    pub(crate) commit_ack: crate::cluster::CommitAck,
    /// Store node processes.
    pub(crate) nodes: u32,
    /// Prefill worker processes.
    pub(crate) prefill_workers: u32,
    /// Decode worker processes.
    pub(crate) decode_workers: u32,
}

/// The numbers of a finished run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    setting: Setting,
    requests: u64,
    /// Blocks of all prompts.
    blocks_asked: u64,
    /// Leading blocks that the pool had.
    blocks_hit: u64,
    /// Hits in percent of the requested blocks.
    hit_rate: f64,
    blocks_put: u64,
    /// Blocks after a gap of the chain, which were present when they were put.
    blocks_existed: u64,
    /// Blocks whose put failed, by code.
    puts_refused: BTreeMap<String, u64>,
    /// Blocks whose get failed, by code.
    gets_failed: BTreeMap<String, u64>,
    /// Blocks that were absent in spite of their lease. Anything but 0 is a fault of the pool.
    leased_blocks_lost: u64,
    /// Blocks that decode workers got and verified.
    blocks_decoded: u64,
    /// Blocks evicted between the prefill and the decode.
    decode_misses: u64,
    bytes_put: u64,
    bytes_got: u64,
    /// Bytes compared with the bytes of their digest.
    bytes_verified: u64,
    /// Blocks with wrong bytes. Anything but 0 is a fault of the pool.
    wrong_blocks: u64,
    /// Blocks evicted by the master.
    evictions: u64,
    /// Of pools with an SSD.
    #[serde(skip_serializing_if = "Option::is_none")]
    ssd: Option<OfSsd>,
    prompt_tokens: u64,
    prefill_tokens_saved: u64,
    seconds: f64,
    /// 10^9 bytes put and got for each second of the run, with the time to fill and verify them.
    gb_per_s: f64,
    operations: Operations,
}

/// The blocks that moved between memory and the SSD.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct OfSsd {
    /// Copied to the SSD.
    stored: u64,
    /// Moved on the SSD because they were used.
    forwarded: u64,
    /// Came back to memory.
    loaded: u64,
    /// Kept off the SSD by its budget, or by a quota.
    refused: u64,
    /// Left memory without a copy.
    evicted_without_copy: u64,
    /// Blocks written to the SSD for each block put.
    writes_a_put: f64,
}

impl OfSsd {
    pub(crate) fn read(stats: &PoolStats) -> Self {
        let counter = |name: &str| stats.counters.get(name).copied().unwrap_or_default();
        Self {
            stored: counter("blocks_stored_total"),
            forwarded: counter("copies_forwarded_total"),
            loaded: counter("blocks_loaded_total"),
            refused: counter("copies_refused_total"),
            evicted_without_copy: counter("blocks_evicted_without_copy_total"),
            writes_a_put: 0.0,
        }
    }
}

#[derive(Clone, Debug, Serialize)]
struct Operations {
    match_prefix: Summary,
    get: Summary,
    put: Summary,
    decode_get: Summary,
}

impl Tally {
    /// Counts one request. `tokens` is the length of its prompt.
    pub(crate) fn add(
        &mut self,
        tokens: u64,
        blocks: Blocks,
        prefilled: Prefilled,
        decoded: Decoded,
    ) {
        self.requests += 1;
        self.asked += prefilled.blocks;
        self.hits += prefilled.hits;
        self.lost += prefilled.lost;
        self.put += prefilled.put;
        self.existed += prefilled.existed;
        for (code, count) in prefilled.refused {
            *self.refused.entry(code).or_default() += count;
        }
        for (code, count) in prefilled.unreadable.into_iter().chain(decoded.failed) {
            *self.unreadable.entry(code).or_default() += count;
        }
        self.decoded += decoded.checked;
        self.decode_missing += decoded.missing;
        self.wrong += prefilled.wrong + decoded.wrong;
        self.tokens_asked += tokens;
        // The last block of a trace's prompt may be partly filled.
        self.tokens_saved += tokens.min(prefilled.hits * blocks.tokens.get() as u64);
        self.bytes_put += record(&mut self.put_calls, prefilled.put_call);
        self.bytes_got += record(&mut self.get, prefilled.get);
        self.bytes_got += record(&mut self.decode_get, decoded.call);
        record(&mut self.match_prefix, prefilled.match_prefix);
    }

    /// Ends the count. `evictions` is the master's.
    pub(crate) fn finish(
        self,
        setting: Setting,
        elapsed: Duration,
        evictions: u64,
        ssd: Option<OfSsd>,
    ) -> Report {
        let ssd = ssd.map(|of| OfSsd {
            writes_a_put: (of.stored + of.forwarded) as f64 / self.put.max(1) as f64,
            ..of
        });
        Report {
            ssd,
            setting,
            requests: self.requests,
            blocks_asked: self.asked,
            blocks_hit: self.hits,
            hit_rate: stats::percent(self.hits, self.asked),
            blocks_put: self.put,
            blocks_existed: self.existed,
            puts_refused: self.refused,
            gets_failed: self.unreadable,
            leased_blocks_lost: self.lost,
            blocks_decoded: self.decoded,
            decode_misses: self.decode_missing,
            bytes_put: self.bytes_put,
            bytes_got: self.bytes_got,
            // Workers verify all blocks that they get, and no others.
            bytes_verified: self.bytes_got,
            wrong_blocks: self.wrong,
            evictions,
            prompt_tokens: self.tokens_asked,
            prefill_tokens_saved: self.tokens_saved,
            seconds: elapsed.as_secs_f64(),
            gb_per_s: stats::gigabytes_a_second(self.bytes_put + self.bytes_got, elapsed),
            operations: Operations {
                match_prefix: self.match_prefix.summary(),
                get: self.get.summary(),
                put: self.put_calls.summary(),
                decode_get: self.decode_get.summary(),
            },
        }
    }
}

fn record(samples: &mut Samples, call: Option<Call>) -> u64 {
    let Some(call) = call else { return 0 };
    samples.add(call.took(), call.bytes);
    call.bytes
}

impl Report {
    /// Whether the pool did its part.
    ///
    /// # Errors
    ///
    /// The first that applies of [`exit::WrongBytes`], [`exit::LeasedLost`] and [`exit::NothingVerified`].
    pub(crate) fn verdict(&self) -> anyhow::Result<()> {
        if self.wrong_blocks > 0 {
            let blocks = self.wrong_blocks;
            return Err(exit::WrongBytes { blocks }.into());
        }
        if self.leased_blocks_lost > 0 {
            let blocks = self.leased_blocks_lost;
            return Err(exit::LeasedLost { blocks }.into());
        }
        if self.bytes_verified == 0 {
            return Err(exit::NothingVerified.into());
        }
        Ok(())
    }

    /// The tables for people.
    pub(crate) fn tables(&self) -> String {
        let setting = &self.setting;
        let mut facts = output::facts();
        let mut fact = |name: &str, value: String| {
            facts.add_row([name.to_owned(), value]);
        };
        fact("workload", setting.workload.clone());
        fact(
            "pool",
            format!(
                "{} nodes, {} ({} blocks of {}), eviction {}",
                setting.nodes,
                output::bytes(setting.pool_bytes),
                output::count(setting.capacity_blocks),
                output::bytes(setting.block_bytes),
                output::label(&setting.policy),
            ),
        );
        fact(
            "workers",
            format!(
                "{} prefill, {} decode, each a process",
                setting.prefill_workers, setting.decode_workers
            ),
        );
        fact("requests", output::count(self.requests));
        fact("blocks asked", output::count(self.blocks_asked));
        fact(
            "prefix hits",
            format!(
                "{} ({:.2} %)",
                output::count(self.blocks_hit),
                self.hit_rate
            ),
        );
        fact(
            "prefill tokens saved",
            format!(
                "{} of {}",
                output::count(self.prefill_tokens_saved),
                output::count(self.prompt_tokens)
            ),
        );
        fact("blocks put", output::count(self.blocks_put));
        fact("blocks evicted", output::count(self.evictions));
        if let Some(ssd) = &self.ssd {
            fact("blocks copied to SSD", output::count(ssd.stored));
            fact("writes to SSD a put", format!("{:.2}", ssd.writes_a_put));
            fact("blocks back from SSD", output::count(ssd.loaded));
        }
        fact("bytes put", output::bytes(self.bytes_put));
        fact("bytes got", output::bytes(self.bytes_got));
        fact("bytes verified", output::bytes(self.bytes_verified));
        fact("wrong blocks", output::count(self.wrong_blocks));
        fact("missing at decode", output::count(self.decode_misses));
        if self.leased_blocks_lost > 0 {
            fact("leased yet lost", output::count(self.leased_blocks_lost));
        }
        for (code, blocks) in &self.puts_refused {
            fact(&format!("puts refused: {code}"), output::count(*blocks));
        }
        for (code, blocks) in &self.gets_failed {
            fact(&format!("gets failed: {code}"), output::count(*blocks));
        }
        fact(
            "time",
            format!(
                "{:.1} s: {:.0} requests/s, {:.2} GB/s put and got",
                self.seconds,
                self.requests as f64 / self.seconds,
                self.gb_per_s
            ),
        );

        let mut operations = output::table(["operation", "calls", "p50", "p99", "GB/s"]);
        let rows = [
            ("match_prefix", &self.operations.match_prefix),
            ("get (prefill)", &self.operations.get),
            ("put", &self.operations.put),
            ("get (decode)", &self.operations.decode_get),
        ];
        for (name, summary) in rows {
            operations.add_row([
                name.to_owned(),
                output::count(summary.calls),
                output::micros(summary.p50_us),
                output::micros(summary.p99_us),
                summary
                    .gb_per_s
                    .map_or_else(String::new, |rate| format!("{rate:.2}")),
            ]);
        }
        output::align_right(&mut operations, 1..5);
        format!("{facts}\n{operations}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{CommitAck, Policy};
    use std::num::NonZeroUsize;

    /// The report of a run with one request.
    fn report(prefilled: Prefilled, decoded: Decoded) -> Report {
        let blocks = Blocks {
            bytes: 64,
            tokens: NonZeroUsize::MIN,
        };
        let setting = Setting {
            workload: "one request".to_owned(),
            block_bytes: blocks.bytes,
            block_tokens: 1,
            pool_bytes: 1 << 20,
            capacity_blocks: 1 << 14,
            policy: Policy::Prefix,
            commit_ack: CommitAck::Memory,
            nodes: 1,
            prefill_workers: 1,
            decode_workers: 1,
        };
        let mut tally = Tally::default();
        tally.add(1, blocks, prefilled, decoded);
        tally.finish(setting, Duration::from_secs(1), 0, None)
    }

    fn verified(blocks: u64) -> Decoded {
        Decoded {
            checked: blocks,
            call: Some(Call::new(Duration::from_micros(1), blocks * 64)),
            ..Decoded::default()
        }
    }

    #[test]
    fn a_run_succeeds_only_with_verified_blocks_and_no_fault_of_the_pool() {
        let good = report(Prefilled::default(), verified(2));
        assert!(good.verdict().is_ok());

        let nothing = report(Prefilled::default(), verified(0));
        let error = nothing.verdict().unwrap_err();
        assert!(error.is::<exit::NothingVerified>(), "{error}");

        let lost = Prefilled {
            lost: 3,
            ..Prefilled::default()
        };
        let error = report(lost, verified(2)).verdict().unwrap_err();
        assert_eq!(error.downcast::<exit::LeasedLost>().unwrap().blocks, 3);

        let wrong = Decoded {
            wrong: 1,
            ..verified(2)
        };
        let error = report(Prefilled::default(), wrong).verdict().unwrap_err();
        assert_eq!(error.downcast::<exit::WrongBytes>().unwrap().blocks, 1);
    }
}
