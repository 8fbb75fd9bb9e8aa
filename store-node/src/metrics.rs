//! The node's metrics, in one registry. Every name begins with `kvpool_node_`. `docs/operations/metrics.md`
//! lists them.

use crate::fence::Census;
use crate::serve::Store;
use kvpool_daemon::latency::Latencies;
use kvpool_disk::medium::WRONG_KINDS;
use kvpool_types::{Code, Length};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Gauge, IntCounter, IntCounterVec, IntGauge, Opts, Registry};
use std::time::Duration;

/// The requests of clients, as [`kvpool_types::wire::frame::Op`] names them.
const REQUESTS: [&str; 11] = [
    "read",
    "write",
    "map",
    "write_begin",
    "write_end",
    "pin",
    "unpin",
    "sums",
    "ping",
    "rdma_open",
    "rdma_locate",
];

/// The counters that the code increments at each event.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    read_bytes: IntCounter,
    written_bytes: IntCounter,
    refused: IntCounterVec,
    verified: IntCounterVec,
    lateness: Gauge,
    pub(crate) sessions: IntCounter,
    pub(crate) session_open: IntGauge,
    pub(crate) heartbeats: IntCounter,
    media_stored_bytes: IntCounter,
    media_loaded_bytes: IntCounter,
    media_loaded_in_place_bytes: IntCounter,
    media_wrong: IntCounterVec,
    pulled_bytes: IntCounter,
    pub(crate) fenced: IntCounter,
    segment_bytes: IntGauge,
    requests: Latencies,
}

impl Metrics {
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new_custom(Some("kvpool_node".into()), None)?;
        let metrics = Self {
            read_bytes: IntCounter::new("read_bytes_total", "Bytes of blocks that clients read.")?,
            written_bytes: IntCounter::new(
                "written_bytes_total",
                "Bytes of blocks that clients wrote.",
            )?,
            refused: IntCounterVec::new(
                Opts::new("refused_total", "Requests refused, by error code."),
                &["code"],
            )?,
            verified: IntCounterVec::new(
                Opts::new(
                    "verified_total",
                    "Blocks whose checksum was verified again at the master's request.",
                ),
                &["outcome"],
            )?,
            lateness: Gauge::new(
                "heartbeat_lateness_seconds",
                "Delay of the last heartbeat behind its schedule.",
            )?,
            sessions: IntCounter::new("sessions_total", "Sessions that a master accepted.")?,
            session_open: IntGauge::new(
                "session_open",
                "1 while the node has a session with a master, else 0.",
            )?,
            heartbeats: IntCounter::new("heartbeats_total", "Heartbeats sent.")?,
            media_stored_bytes: IntCounter::new(
                "media_stored_bytes_total",
                "Bytes of blocks stored on media.",
            )?,
            media_loaded_bytes: IntCounter::new(
                "media_loaded_bytes_total",
                "Bytes of blocks that came back from media.",
            )?,
            media_loaded_in_place_bytes: IntCounter::new(
                "media_loaded_in_place_bytes_total",
                "Bytes of blocks that a disk wrote straight into their memory.",
            )?,
            pulled_bytes: IntCounter::new(
                "pulled_bytes_total",
                "Bytes of blocks copied from other nodes.",
            )?,
            media_wrong: IntCounterVec::new(
                prometheus::Opts::new(
                    "media_wrong_total",
                    "Blocks on media that were not what was stored, by kind.",
                ),
                &["kind"],
            )?,
            fenced: IntCounter::new("fenced_total", "Fence tickets answered to the master.")?,
            segment_bytes: IntGauge::new(
                "segment_bytes",
                "Bytes of memory that the node contributes.",
            )?,
            requests: Latencies::new(
                "request_seconds",
                "Latency of requests on the data port and the Unix socket, in seconds, by operation.",
                &REQUESTS,
            )?,
            registry,
        };
        let collectors: [Box<dyn Collector>; 16] = [
            Box::new(metrics.read_bytes.clone()),
            Box::new(metrics.written_bytes.clone()),
            Box::new(metrics.refused.clone()),
            Box::new(metrics.verified.clone()),
            Box::new(metrics.lateness.clone()),
            Box::new(metrics.sessions.clone()),
            Box::new(metrics.session_open.clone()),
            Box::new(metrics.heartbeats.clone()),
            Box::new(metrics.media_stored_bytes.clone()),
            Box::new(metrics.media_loaded_bytes.clone()),
            Box::new(metrics.media_loaded_in_place_bytes.clone()),
            Box::new(metrics.media_wrong.clone()),
            Box::new(metrics.pulled_bytes.clone()),
            Box::new(metrics.fenced.clone()),
            Box::new(metrics.segment_bytes.clone()),
            metrics.requests.collector(),
        ];
        // All series start at zero. A series that appears with its first event would have no rate for this
        // event.
        for code in Code::ALL.iter().filter(|code| **code != Code::Ok) {
            metrics.refused.with_label_values(&[code.label()]);
        }
        for kind in WRONG_KINDS {
            metrics.media_wrong.with_label_values(&[kind]);
        }
        for outcome in ["match", "mismatch"] {
            metrics.verified.with_label_values(&[outcome]);
        }
        for collector in collectors {
            metrics.registry.register(collector)?;
        }
        Ok(metrics)
    }

    /// Adds the gauges that are read from the store at every scrape.
    pub(crate) fn watch(
        &self,
        store: &Store,
        contributed: Length,
    ) -> Result<(), prometheus::Error> {
        self.segment_bytes.set(gauge(contributed.0));
        self.registry.register(Box::new(Watch::new(store.clone())?))
    }

    pub(crate) fn registry(&self) -> Registry {
        self.registry.clone()
    }

    pub(crate) fn moved(&self, read: Length, written: Length) {
        self.read_bytes.inc_by(read.0);
        self.written_bytes.inc_by(written.0);
    }

    pub(crate) fn request(&self, op: &str, took: Duration) {
        self.requests.observe(op, took);
    }

    pub(crate) fn read_bytes(&self) -> u64 {
        self.read_bytes.get()
    }

    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes.get()
    }

    pub(crate) fn refused(&self, code: Code) {
        self.refused.with_label_values(&[code.label()]).inc();
    }

    pub(crate) fn verified(&self, matches: bool) {
        let outcome = if matches { "match" } else { "mismatch" };
        self.verified.with_label_values(&[outcome]).inc();
    }

    pub(crate) fn media_stored(&self, length: Length) {
        self.media_stored_bytes.inc_by(length.0);
    }

    pub(crate) fn media_loaded(&self, length: Length, in_place: bool) {
        self.media_loaded_bytes.inc_by(length.0);
        if in_place {
            self.media_loaded_in_place_bytes.inc_by(length.0);
        }
    }

    pub(crate) fn media_wrong(&self, kind: &str) {
        self.media_wrong.with_label_values(&[kind]).inc();
    }

    pub(crate) fn pulled(&self, length: Length) {
        self.pulled_bytes.inc_by(length.0);
    }

    pub(crate) fn heartbeat(&self, late: Duration) {
        self.heartbeats.inc();
        self.lateness.set(late.as_secs_f64());
    }
}

type Reading = fn(&Census) -> u64;

const READINGS: [(&str, &str, Reading); 9] = [
    (
        "receives",
        "Writes over TCP or RDMA, and copies from media or other nodes, in progress.",
        |c| c.receives + c.loads,
    ),
    (
        "holds",
        "Announced writes through shared memory in progress.",
        |c| c.holds,
    ),
    ("pins", "Pins of views in place.", |c| c.pins),
    (
        "held_bytes",
        "Bytes held by announced writes and by views.",
        |c| c.held.0,
    ),
    (
        "boards",
        "Pin boards, at most one per shared-memory connection.",
        |c| c.boards,
    ),
    (
        "over_cap",
        "Client processes whose pins on boards exceed max_held_ratio.",
        |c| c.over_cap,
    ),
    (
        "fence_waiting",
        "Fence tickets that wait for a write or a view to end.",
        |c| c.tickets,
    ),
    ("extents", "Extents that hold a written block.", |c| {
        c.records
    }),
    (
        "floors",
        "Fenced ranges that the node remembers to refuse late writes.",
        |c| c.floors,
    ),
];

/// Gauges that read the store at every scrape.
struct Watch {
    store: Store,
    epoch: IntGauge,
    gauges: Vec<(IntGauge, Reading)>,
}

impl Watch {
    fn new(store: Store) -> Result<Self, prometheus::Error> {
        let gauges = READINGS
            .into_iter()
            .map(|(name, help, reading)| Ok((IntGauge::new(name, help)?, reading)))
            .collect::<Result<_, prometheus::Error>>()?;
        Ok(Self {
            store,
            epoch: IntGauge::new("epoch", "The epoch of the node's last session.")?,
            gauges,
        })
    }

    fn all(&self) -> impl Iterator<Item = &IntGauge> {
        std::iter::once(&self.epoch).chain(self.gauges.iter().map(|(gauge, _)| gauge))
    }
}

impl Collector for Watch {
    fn desc(&self) -> Vec<&Desc> {
        self.all().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let census = self.store.census();
        let epoch = kvpool_transport::host::Host::epoch(&self.store);
        self.epoch.set(gauge(epoch.0));
        for (to, reading) in &self.gauges {
            to.set(gauge(reading(&census)));
        }
        self.all().flat_map(Collector::collect).collect()
    }
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
