//! The metrics of a kvmaster. `docs/operations/metrics.md` has their table.

mod drains;
pub(crate) mod namespaces;

use crate::membership::{NodeState, StoreNode};
use crate::overview::NamespaceUse;
use crate::placement::Usage;
use crate::pool::{MEDIUM_STATES, MediumView};
use drains::LeftBlocks;
use kvpool_daemon::latency::Latencies;
use kvpool_proto::ClusterReply;
use kvpool_types::{Code, Length};
use namespaces::NamespaceGauges;
use parking_lot::Mutex;
use prometheus::proto::MetricType;
use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// The calls of clients, as `Pool` names them.
const CALLS: [&str; 19] = [
    "hello",
    "create_namespace",
    "change_namespace",
    "delete_namespace",
    "list_namespaces",
    "reserve",
    "commit",
    "revoke",
    "lookup",
    "exist",
    "match_prefix",
    "renew",
    "release",
    "remove",
    "list",
    "describe",
    "report_replicas",
    "stats",
    "detach_medium",
];

/// The counters, gauges and histograms of one master, over their own registry.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    keys_looked_up: IntCounter,
    keys_found: IntCounter,
    prefix_blocks_asked: IntCounter,
    prefix_blocks_matched: IntCounter,
    blocks_committed: IntCounter,
    bytes_committed: IntCounter,
    blocks_removed: IntCounter,
    blocks_evicted: IntCounter,
    bytes_evicted: IntCounter,
    put_waits: IntCounter,
    puts_called: IntCounter,
    puts_waiting: IntGauge,
    puts_refused: IntCounterVec,
    puts_failed: IntCounterVec,
    put_passes: IntCounter,
    eviction_rounds: IntCounter,
    eviction_rounds_beyond_target: IntCounter,
    eviction_seconds: Histogram,
    requests: Latencies,
    grants_expired: IntCounter,
    blocks_lost: IntCounter,
    checksum_reports: IntCounter,
    unreachable_reports: IntCounter,
    replicas_corrupt: IntCounter,
    replicas_copied: IntCounter,
    replicas_moved: IntCounter,
    replicas_dropped: IntCounter,
    replica_bytes: IntCounter,
    copies_stored: IntCounter,
    bytes_stored: IntCounter,
    copies_loaded: IntCounter,
    bytes_loaded: IntCounter,
    copies_dropped: IntCounter,
    copies_forwarded: IntCounter,
    bytes_forwarded: IntCounter,
    copies_refused: IntCounter,
    copies_too_long: IntCounter,
    evicted_without_copy: IntCounter,
    media_due_bytes: IntGauge,
    nodes: IntGaugeVec,
    left_blocks: LeftBlocks,
    nodes_dropped: IntCounter,
    media: IntGaugeVec,
    namespaces: NamespaceGauges,
    calls_limited: IntCounter,
    media_bytes: IntGauge,
    media_used_bytes: IntGauge,
    media_copies: IntGauge,
    hot_blocks: IntGauge,
    hot_replica_bytes: IntGauge,
    used_bytes: IntGauge,
    capacity_bytes: IntGauge,
    quarantine_bytes: IntGauge,
    above_watermark_ms: IntGauge,
    standing: Standing,
    terms_begun: IntCounter,
    above_for: Mutex<Duration>,
}

/// Metrics of this master's role, of the other masters, and of the store.
#[derive(Debug)]
struct Standing {
    leads: IntGauge,
    epoch: IntGauge,
    log_applied: IntGauge,
    log_last: IntGauge,
    log_cut: IntGauge,
    snapshot_oldest: IntGauge,
    store_bytes: IntGauge,
    store_in_use_bytes: IntGauge,
    store_alarms: IntGauge,
    term_left_ms: IntGauge,
}

/// The counters whose rates the overview shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) keys_looked_up: u64,
    pub(crate) keys_found: u64,
    pub(crate) prefix_blocks_asked: u64,
    pub(crate) prefix_blocks_matched: u64,
    pub(crate) blocks_committed: u64,
    pub(crate) bytes_committed: u64,
    pub(crate) blocks_evicted: u64,
    pub(crate) blocks_stored: u64,
    pub(crate) blocks_loaded: u64,
    pub(crate) put_waits: u64,
    pub(crate) blocks_lost: u64,
    pub(crate) checksum_reports: u64,
    pub(crate) unreachable_reports: u64,
    pub(crate) replicas_corrupt: u64,
}

fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Whether a put that ended with `code` was refused. The block of a present key is in the pool.
pub(crate) fn is_refusal(code: Code) -> bool {
    !matches!(code, Code::Ok | Code::Exists)
}

impl Metrics {
    /// Metrics with value zero.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(format!("kvpool_master_{name}"), help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(format!("kvpool_master_{name}"), help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let eviction_seconds = Histogram::with_opts(HistogramOpts::new(
            "kvpool_master_eviction_round_seconds",
            "Duration of eviction rounds, in seconds.",
        ))?;
        registry.register(Box::new(eviction_seconds.clone()))?;
        let requests = Latencies::new(
            "kvpool_master_request_seconds",
            "Latency of calls of clients, in seconds, by operation.",
            &CALLS,
        )?;
        registry.register(requests.collector())?;
        let media = Opts::new("kvpool_master_media", "Media of the pool, by state.");
        let media = IntGaugeVec::new(media, &["state"])?;
        for state in MEDIUM_STATES {
            media.with_label_values(&[state]).set(0);
        }
        registry.register(Box::new(media.clone()))?;
        let namespaces = NamespaceGauges::new(&registry)?;
        let nodes = Opts::new("kvpool_master_nodes", "Store nodes of the pool, by state.");
        let nodes = IntGaugeVec::new(nodes, &["state"])?;
        for state in NodeState::PRESENT {
            nodes.with_label_values(&[state]).set(0);
        }
        registry.register(Box::new(nodes.clone()))?;
        let left_blocks = LeftBlocks::new(&registry)?;
        let by_code = |name: &str, help: &str| {
            let counter = Opts::new(format!("kvpool_master_{name}"), help);
            let counter = IntCounterVec::new(counter, &["code"])?;
            // From zero on: a series that appears at its first event has no rate for that event.
            for code in Code::ALL.iter().filter(|code| is_refusal(**code)) {
                counter.with_label_values(&[code.label()]);
            }
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let puts_refused = by_code(
            "puts_refused_total",
            "Blocks whose reserve or commit ended with an error, by code.",
        )?;
        let puts_failed = by_code(
            "puts_failed_total",
            "Blocks that were refused and not asked for again, by the last code.",
        )?;
        Ok(Self {
            keys_looked_up: counter("keys_looked_up_total", "Keys that clients looked up.")?,
            keys_found: counter("keys_found_total", "Keys that lookups found in the pool.")?,
            replicas_copied: counter(
                "replicas_copied_total",
                "Replicas added by copies from node to node.",
            )?,
            replicas_moved: counter("replicas_moved_total", "Replicas moved from node to node.")?,
            replicas_dropped: counter("replicas_dropped_total", "Replicas dropped by tasks.")?,
            replica_bytes: counter(
                "replica_bytes_total",
                "Bytes of blocks copied or moved from node to node.",
            )?,
            copies_stored: counter(
                "blocks_stored_total",
                "Blocks copied from memory to a medium.",
            )?,
            bytes_stored: counter("bytes_stored_total", "Bytes of blocks copied to media.")?,
            copies_loaded: counter(
                "blocks_loaded_total",
                "Blocks that came back from a medium to memory.",
            )?,
            bytes_loaded: counter(
                "bytes_loaded_total",
                "Bytes of blocks that came back from media.",
            )?,
            copies_dropped: counter(
                "copies_dropped_total",
                "Copies dropped from media to make room.",
            )?,
            copies_forwarded: counter(
                "copies_forwarded_total",
                "Copies moved on a medium because they were used since they were written.",
            )?,
            bytes_forwarded: counter(
                "bytes_forwarded_total",
                "Bytes of copies moved on a medium.",
            )?,
            copies_refused: counter(
                "copies_refused_total",
                "Copies that a medium's write budget or the namespace's quota of media refused.",
            )?,
            copies_too_long: counter(
                "copies_too_long_total",
                "Blocks not copied because they are longer than a zone of every medium of their node.",
            )?,
            evicted_without_copy: counter(
                "blocks_evicted_without_copy_total",
                "Blocks evicted from memory in a pool with media that no medium has.",
            )?,
            prefix_blocks_asked: counter(
                "prefix_blocks_asked_total",
                "Blocks in the chains of match_prefix requests.",
            )?,
            prefix_blocks_matched: counter(
                "prefix_blocks_matched_total",
                "Leading blocks of those chains found in the pool.",
            )?,
            blocks_committed: counter(
                "blocks_committed_total",
                "Blocks committed: readers can find them.",
            )?,
            bytes_committed: counter("bytes_committed_total", "Bytes of committed blocks.")?,
            blocks_removed: counter(
                "blocks_removed_total",
                "Blocks removed by explicit request.",
            )?,
            blocks_evicted: counter("blocks_evicted_total", "Blocks evicted to make room.")?,
            bytes_evicted: counter("bytes_evicted_total", "Bytes of evicted blocks.")?,
            put_waits: counter("put_waits_total", "Puts that had to wait for room.")?,
            puts_called: counter(
                "puts_called_total",
                "Times a waiting put was woken to take room.",
            )?,
            puts_waiting: gauge("puts_waiting", "Puts that wait for room now.")?,
            puts_refused,
            puts_failed,
            put_passes: counter(
                "put_passes_total",
                "Passes over batches of puts: one per put, plus one per wake-up or end of another writer.",
            )?,
            eviction_rounds: counter("eviction_rounds_total", "Eviction rounds run.")?,
            eviction_rounds_beyond_target: counter(
                "eviction_rounds_beyond_target_total",
                "Eviction rounds whose last victim was not needed to reach their target.",
            )?,
            eviction_seconds,
            requests,
            namespaces,
            calls_limited: counter(
                "calls_limited_total",
                "Calls that a rate of their namespace refused.",
            )?,
            grants_expired: counter(
                "grants_expired_total",
                "Puts whose grants expired before the commit.",
            )?,
            blocks_lost: counter(
                "blocks_lost_total",
                "Blocks whose last replica was lost with its node.",
            )?,
            checksum_reports: counter(
                "checksum_reports_total",
                "Reports of clients that a replica has a checksum mismatch.",
            )?,
            unreachable_reports: counter(
                "unreachable_reports_total",
                "Reports of clients that a replica is unreachable.",
            )?,
            replicas_corrupt: counter(
                "replicas_corrupt_total",
                "Replicas whose own node found a checksum mismatch.",
            )?,
            media_due_bytes: gauge(
                "media_due_bytes",
                "Bytes whose copy to a medium is due or in progress.",
            )?,
            nodes,
            left_blocks,
            nodes_dropped: counter(
                "nodes_dropped_total",
                "Store nodes dropped with their blocks after a long silence.",
            )?,
            media,
            media_bytes: gauge(
                "media_bytes",
                "Bytes of all media for blocks, also of absent ones.",
            )?,
            media_used_bytes: gauge("media_used_bytes", "Used bytes of all media.")?,
            media_copies: gauge("media_copies", "Copies of blocks on all media.")?,
            hot_blocks: gauge(
                "hot_blocks",
                "Blocks with further replicas because they are hot.",
            )?,
            hot_replica_bytes: gauge("hot_replica_bytes", "Bytes of these further replicas.")?,
            used_bytes: gauge("used_bytes", "Used bytes: blocks, grants and quarantine.")?,
            capacity_bytes: gauge(
                "capacity_bytes",
                "Capacity: bytes of the segments of live nodes.",
            )?,
            quarantine_bytes: gauge(
                "quarantine_bytes",
                "Bytes in quarantine: freed, not yet reusable.",
            )?,
            above_watermark_ms: gauge(
                "above_watermark_milliseconds_max",
                "Longest time that usage stayed above the high watermark.",
            )?,
            standing: Standing {
                leads: gauge("leads", "1 on the leader, 0 on all other masters.")?,
                epoch: gauge("epoch", "Epoch of the latest term that this master knows.")?,
                log_applied: gauge(
                    "log_applied",
                    "Last group of the log that this master has applied.",
                )?,
                log_last: gauge("log_last", "Last group of the log in the metadata store.")?,
                log_cut: gauge("log_cut", "Last group that was cut from the log.")?,
                snapshot_oldest: gauge(
                    "snapshot_oldest",
                    "Last group that the oldest snapshot contains.",
                )?,
                store_bytes: gauge("store_bytes", "Size of the metadata store, in bytes.")?,
                store_in_use_bytes: gauge(
                    "store_in_use_bytes",
                    "Bytes of the metadata store in use.",
                )?,
                store_alarms: gauge(
                    "store_alarms",
                    "Active alarms of the metadata store: etcd's own, no writes taken, or a full data directory.",
                )?,
                term_left_ms: gauge(
                    "term_left_milliseconds",
                    "Time until the leader lease expires without a renewal.",
                )?,
            },
            terms_begun: counter("terms_begun_total", "Terms that this master began.")?,
            above_for: Mutex::default(),
            registry,
        })
    }

    /// The registry behind `/metrics`.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(crate) fn looked_up(&self, asked: usize, found: usize) {
        self.keys_looked_up.inc_by(asked as u64);
        self.keys_found.inc_by(found as u64);
    }

    pub(crate) fn matched(&self, asked: usize, matched: usize) {
        self.prefix_blocks_asked.inc_by(asked as u64);
        self.prefix_blocks_matched.inc_by(matched as u64);
    }

    pub(crate) fn committed(&self, lengths: impl Iterator<Item = Length>) {
        let (mut blocks, mut bytes) = (0, 0);
        for length in lengths {
            blocks += 1;
            bytes += length.0;
        }
        self.blocks_committed.inc_by(blocks);
        self.bytes_committed.inc_by(bytes);
    }

    pub(crate) fn removed(&self, blocks: usize) {
        self.blocks_removed.inc_by(blocks as u64);
    }

    pub(crate) fn evicted(&self, blocks: usize, bytes: u64) {
        self.blocks_evicted.inc_by(blocks as u64);
        self.bytes_evicted.inc_by(bytes);
    }

    /// Notes the latency of one call of a client.
    pub(crate) fn request(&self, op: &str, took: Duration) {
        self.requests.observe(op, took);
    }

    /// Counts a put that waits for room.
    pub(crate) fn put_waits(&self) {
        self.put_waits.inc();
    }

    /// Counts a waiting put that was woken.
    pub(crate) fn put_called(&self) {
        self.puts_called.inc();
    }

    /// Counts the blocks of a put that were refused. A present key is no refusal.
    pub(crate) fn puts_refused(&self, codes: impl Iterator<Item = Code>) {
        for code in codes.filter(|code| is_refusal(*code)) {
            self.puts_refused.with_label_values(&[code.label()]).inc();
        }
    }

    /// Counts the blocks of puts that failed in the end.
    pub(crate) fn puts_failed(&self, codes: impl Iterator<Item = Code>) {
        for code in codes {
            self.puts_failed.with_label_values(&[code.label()]).inc();
        }
    }

    /// Records how many puts wait for room.
    pub(crate) fn watch_puts(&self, waiting: usize) {
        self.puts_waiting.set(whole(waiting as u64));
    }

    /// Counts a node that was dropped for its silence.
    pub(crate) fn node_dropped(&self) {
        self.nodes_dropped.inc();
    }

    /// Records the labels of the nodes.
    pub(crate) fn watch_nodes(&self, labels: &[&str]) {
        for state in NodeState::PRESENT {
            let with = labels.iter().filter(|of| **of == state).count();
            let gauge = self.nodes.with_label_values(&[state]);
            gauge.set(whole(with as u64));
        }
    }

    /// Records how many blocks a stop of each node would lose.
    pub(crate) fn watch_left_blocks(&self, nodes: &[Arc<StoreNode>]) {
        let counted = nodes
            .iter()
            .filter_map(|node| Some((node.name.0.clone(), drains::left_of(node)?)));
        self.left_blocks.set(counted.collect());
    }

    /// Records the use of the largest namespaces.
    pub(crate) fn watch_namespaces(&self, largest: &[NamespaceUse]) {
        self.namespaces.set(largest);
    }

    /// Counts a call that a rate refused.
    pub(crate) fn call_limited(&self) {
        self.calls_limited.inc();
    }

    /// Counts a pass over the batch of a put.
    pub(crate) fn put_passes(&self) {
        self.put_passes.inc();
    }

    /// Records an eviction round: its goal, the bytes it freed, the size of its last victim, and
    /// its duration.
    pub(crate) fn eviction_round(&self, goal: u64, freed: u64, last: u64, took: Duration) {
        self.eviction_rounds.inc();
        self.eviction_seconds.observe(took.as_secs_f64());
        if freed.saturating_sub(last) >= goal {
            self.eviction_rounds_beyond_target.inc();
        }
    }

    pub(crate) fn grants_expired(&self, puts: usize) {
        self.grants_expired.inc_by(puts as u64);
    }

    pub(crate) fn blocks_lost(&self, count: u64) {
        self.blocks_lost.inc_by(count);
    }

    pub(crate) fn reported(&self, code: Code) {
        match code {
            Code::ChecksumMismatch => self.checksum_reports.inc(),
            _ => self.unreachable_reports.inc(),
        }
    }

    /// Counts a replica added by a copy.
    pub(crate) fn replica_copied(&self, length: Length) {
        self.replicas_copied.inc();
        self.replica_bytes.inc_by(length.0);
    }

    /// Counts a replica that went to another node.
    pub(crate) fn replica_moved(&self, length: Length) {
        self.replicas_moved.inc();
        self.replica_bytes.inc_by(length.0);
    }

    /// Counts a replica that a task dropped.
    pub(crate) fn replica_dropped(&self) {
        self.replicas_dropped.inc();
    }

    /// Counts a block copied to a medium.
    pub(crate) fn copy_stored(&self, length: Length) {
        self.copies_stored.inc();
        self.bytes_stored.inc_by(length.0);
    }

    /// Counts a block that came back from a medium.
    pub(crate) fn copy_loaded(&self, length: Length) {
        self.copies_loaded.inc();
        self.bytes_loaded.inc_by(length.0);
    }

    /// Counts copies dropped to make room on a medium.
    pub(crate) fn copies_dropped(&self, copies: usize) {
        self.copies_dropped.inc_by(copies as u64);
    }

    /// Counts a copy that moved on its medium.
    pub(crate) fn copy_forwarded(&self, length: Length) {
        self.copies_forwarded.inc();
        self.bytes_forwarded.inc_by(length.0);
    }

    /// Records the number of hot blocks, and the bytes of their further replicas.
    pub(crate) fn hot(&self, blocks: usize, bytes: u64) {
        self.hot_blocks
            .set(i64::try_from(blocks).unwrap_or(i64::MAX));
        self.hot_replica_bytes
            .set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Counts a block that is too long for the zones of every medium.
    pub(crate) fn copy_too_long(&self) {
        self.copies_too_long.inc();
    }

    /// Counts a block that a write budget, or the quota of media, kept off a medium.
    pub(crate) fn copy_refused(&self) {
        self.copies_refused.inc();
    }

    /// Counts a block that left memory without a copy.
    pub(crate) fn evicted_without_copy(&self) {
        self.evicted_without_copy.inc();
    }

    pub(crate) fn corrupt_replica(&self) {
        self.replicas_corrupt.inc();
    }

    /// Records how far the copying to media is behind.
    pub(crate) fn watch_media(&self, due: u64) {
        self.media_due_bytes.set(whole(due));
    }

    /// Records the state of the media, and of `unused` more that nodes do not use.
    pub(crate) fn watch_each_medium(&self, media: &[MediumView], unused: usize) {
        for state in MEDIUM_STATES {
            let beside = if state == "refused" { unused } else { 0 };
            let with = media.iter().filter(|medium| medium.state == state).count() + beside;
            let gauge = self.media.with_label_values(&[state]);
            gauge.set(whole(with as u64));
        }
        let sum = |of: fn(&MediumView) -> u64| whole(media.iter().map(of).sum());
        self.media_bytes.set(sum(|medium| medium.record.size.0));
        self.media_used_bytes.set(sum(|medium| medium.used.0));
        self.media_copies.set(sum(|medium| medium.copies));
    }

    /// Records the usage of the pool; called every `tick`.
    pub(crate) fn watch_usage(&self, usage: &Usage, tick: Duration) {
        self.used_bytes.set(whole(usage.used));
        self.capacity_bytes.set(whole(usage.capacity));
        self.quarantine_bytes.set(whole(usage.quarantined));
        let mut above_for = self.above_for.lock();
        if usage.used > usage.limit {
            *above_for += tick;
            let ms = i64::try_from(above_for.as_millis()).unwrap_or(i64::MAX);
            self.above_watermark_ms
                .set(self.above_watermark_ms.get().max(ms));
        } else {
            *above_for = Duration::ZERO;
        }
    }

    pub(crate) fn term_begun(&self) {
        self.terms_begun.inc();
    }

    /// Records the master's role and the store's state; `applied` is the last group that it holds.
    pub(crate) fn watch_standing(&self, told: &ClusterReply, applied: u64) {
        let Standing {
            leads,
            epoch,
            log_applied,
            log_last,
            log_cut,
            snapshot_oldest,
            store_bytes,
            store_in_use_bytes,
            store_alarms,
            term_left_ms,
        } = &self.standing;
        leads.set(i64::from(told.role == "leader"));
        epoch.set(whole(told.epoch));
        log_applied.set(whole(applied));
        log_last.set(whole(told.log_last));
        log_cut.set(whole(told.log_cut));
        let oldest = told.snapshots.iter().map(|s| s.through).min();
        snapshot_oldest.set(whole(oldest.unwrap_or(0)));
        store_bytes.set(whole(told.store_bytes));
        store_in_use_bytes.set(whole(told.store_in_use_bytes));
        store_alarms.set(whole(told.alarms.len() as u64));
        term_left_ms.set(whole(told.term_left_ms));
    }

    /// The counters whose rates the overview shows.
    pub(crate) fn totals(&self) -> Totals {
        Totals {
            keys_looked_up: self.keys_looked_up.get(),
            keys_found: self.keys_found.get(),
            prefix_blocks_asked: self.prefix_blocks_asked.get(),
            prefix_blocks_matched: self.prefix_blocks_matched.get(),
            blocks_committed: self.blocks_committed.get(),
            bytes_committed: self.bytes_committed.get(),
            blocks_evicted: self.blocks_evicted.get(),
            blocks_stored: self.copies_stored.get(),
            blocks_loaded: self.copies_loaded.get(),
            put_waits: self.put_waits.get(),
            blocks_lost: self.blocks_lost.get(),
            checksum_reports: self.checksum_reports.get(),
            unreachable_reports: self.unreachable_reports.get(),
            replicas_corrupt: self.replicas_corrupt.get(),
        }
    }

    /// Blocks that were evicted since the process began.
    pub fn blocks_evicted(&self) -> u64 {
        self.blocks_evicted.get()
    }

    /// Every counter and gauge by its short name, for the stats call.
    pub fn snapshot(&self) -> HashMap<String, u64> {
        let mut all: HashMap<String, u64> = HashMap::new();
        for family in self.registry.gather() {
            if family.get_field_type() == MetricType::HISTOGRAM {
                continue;
            }
            let name = family
                .name()
                .trim_start_matches("kvpool_master_")
                .to_owned();
            for metric in family.get_metric() {
                let counter = metric.get_counter().get_value();
                let gauge = metric.get_gauge().get_value();
                #[allow(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "counters and gauges here hold whole numbers that are not negative"
                )]
                let value = counter.max(gauge) as u64;
                // A metric with labels counts as its sum.
                *all.entry(name.clone()).or_default() += value;
            }
        }
        all
    }
}
