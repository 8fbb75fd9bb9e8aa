//! The store of several masters, one of which leads: etcd, and the election by it.
//!
//! ```text
//!  leader   ─► every write: one transaction "the leader's key is still the one I created" ─► etcd
//!  others   ─► watch the leader's key; follow the log ◄──────────────────────────────────────┘
//! ```
//!
//! `docs/operations/etcd.md` lists the keys. The leader's key is bound to its lease. A term's epoch is the
//! revision at which that key was created: revisions only grow, and a transaction can compare them.
//! `epoch_floor` is added to the revision, for a new etcd whose nodes know higher epochs. The log has one key
//! for each group. Its first key marks the cut. So a cut only deletes keys, which a full etcd still allows.
//!
//! * `write` has the fenced transaction. While its outcome is unknown, the store repeats it until the term is
//!   abandoned. Every transaction is idempotent.
//! * `log`, `snapshots`: the log and the snapshots. `election`: leases, the leader, the members.
//! * `follow`: the log as it grows, for a standby. `maintenance`: keeps etcd small. `patience`: time limits of calls.
//!
//! **Architecture Invariant:** no write of a term takes effect after another term has begun. An
//! acknowledged group is in the log exactly once.

mod election;
mod follow;
mod keys;
mod log;
mod maintenance;
mod patience;
mod snapshots;
mod write;

pub use election::LeaderWatch;
pub use follow::LogWatch;
pub use kvpool_etcd::Tls as TlsOptions;
pub use kvpool_etcd::kv::Revision;
pub use kvpool_etcd::lease::LeaseId;
pub use maintenance::{Maintained, Usage};

use super::{
    LogSeq, LogSpan, MetadataStore, OpenError, ShardIndex, Snapshot, SnapshotPositions, Stalled,
    StoreError,
};
use async_trait::async_trait;
use bytes::Bytes;
use bytesize::ByteSize;
use keys::{Keys, decimal, from_decimal};
use kvpool_etcd::kv::{Compare, Op, Range, Txn};
use kvpool_etcd::{Client, Error, discover};
use kvpool_types::{ClusterId, Epoch};
use parking_lot::Mutex;
use patience::Patience;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

const FORMAT: u64 = 1;
/// The most bytes of one value, and of the values of one transaction with several values. etcd takes requests
/// of 1.5 MiB by default.
const STEP_BYTES: usize = 1 << 20;
/// The most keys that one transaction puts, or the most ranges that it deletes. etcd takes 128 by
/// default.
const STEP_KEYS: usize = 100;
/// The first and the longest pause before a failed request is repeated.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(250));

/// The options of an etcd store.
#[derive(Clone)]
pub struct EtcdOptions {
    /// The client addresses of etcd.
    pub endpoints: Vec<String>,
    /// The name of the cluster, which is the prefix of its keys.
    pub cluster: String,
    /// User name and password, if etcd requires them.
    pub user: Option<(String, String)>,
    /// The certificates, if etcd uses TLS.
    pub tls: Option<TlsOptions>,
    /// The time limit of one request to one endpoint.
    pub request_timeout: Duration,
    /// How long [`EtcdStore::open`] tries to reach etcd.
    pub connect_timeout: Duration,
    /// The size of an endpoint's file above which it is defragmented, if half of it is free.
    pub defragment_above: ByteSize,
    /// Whether this store compacts etcd's history, defragments its files and disarms its alarm of a
    /// full disk. Each action concerns the whole etcd: switch it off if other applications share
    /// that etcd.
    pub compact: bool,
}

impl EtcdOptions {
    /// The default options for a cluster in an etcd without TLS or password.
    pub fn new(
        endpoints: impl IntoIterator<Item = impl Into<String>>,
        cluster: impl Into<String>,
    ) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            cluster: cluster.into(),
            user: None,
            tls: None,
            request_timeout: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(10),
            defragment_above: ByteSize::mib(96),
            compact: true,
        }
    }
}

impl fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdOptions")
            .field("endpoints", &self.endpoints)
            .field("cluster", &self.cluster)
            .field("user", &self.user.as_ref().map(|(name, _)| name))
            .field("tls", &self.tls)
            .field("request_timeout", &self.request_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("defragment_above", &self.defragment_above)
            .field("compact", &self.compact)
            .finish()
    }
}

/// A [`MetadataStore`] in etcd. Any number of processes may have it open.
///
/// The connections belong to the runtime in which the store was opened, which must run as long as the store
/// is used. Other runtimes may make calls.
#[derive(Debug)]
pub struct EtcdStore {
    client: Client,
    keys: Keys,
    options: EtcdOptions,
    stop: watch::Sender<write::Stop>,
    /// The last term that this process began.
    standing: Mutex<Option<election::Standing>>,
    stall: Mutex<Option<write::Stall>>,
    /// The time limit of writes.
    patience: Mutex<Patience>,
    /// The number of writes that wait until etcd has space.
    space_waits: AtomicUsize,
    /// The bytes that this process has put.
    written: AtomicU64,
    snapshots: tokio::sync::Mutex<snapshots::State>,
    upkeep: tokio::sync::Mutex<maintenance::Upkeep>,
}

impl EtcdStore {
    /// Opens the store, or creates one. Tries until `connect_timeout` has passed.
    ///
    /// # Errors
    ///
    /// [`OpenError`] when etcd does not answer in time, refuses the settings, or holds a later
    /// format.
    pub async fn open(options: &EtcdOptions) -> Result<Self, OpenError> {
        Self::open_and_tell(options, &Waits::default()).await
    }

    /// [`EtcdStore::open`], for a caller that repeats it: `waits` limits the messages in the log.
    pub(crate) async fn open_and_tell(
        options: &EtcdOptions,
        waits: &Waits,
    ) -> Result<Self, OpenError> {
        let refused = |reason: String| OpenError::Refused {
            endpoints: options.endpoints.join(","),
            reason,
        };
        if !discover::is_cluster_name(&options.cluster) {
            return Err(refused(format!(
                "{:?} is no name for a cluster: 1 to 64 letters, digits, '.', '_' or '-'",
                options.cluster
            )));
        }
        let client = Client::new(&kvpool_etcd::Options {
            endpoints: options.endpoints.clone(),
            user: options.user.clone(),
            tls: options.tls.clone(),
            request_timeout: options.request_timeout,
        })
        .map_err(|e| refused(e.to_string()))?;
        let keys = Keys::new(&options.cluster);
        let path = || format!("{} in etcd at {}", keys.root(), options.endpoints.join(","));
        let limit = Instant::now() + options.connect_timeout;
        let format = loop {
            let error = match prepare(&client, &keys).await {
                Ok(format) => break format,
                Err(error) => error,
            };
            if !error.is_retryable() {
                return Err(refused(error.to_string()));
            }
            if waits.is_due(Instant::now()) {
                let etcd = options.endpoints.join(",");
                tracing::warn!(etcd, %error, "waiting for etcd (--etcd)");
            }
            if Instant::now() >= limit {
                return Err(OpenError::Unreachable {
                    endpoints: options.endpoints.join(","),
                    reason: error.to_string(),
                });
            }
            tokio::time::sleep(BACKOFF.1).await;
        };
        waits.end();
        match from_decimal("the format", &format) {
            Ok(FORMAT) => {}
            Ok(found) => {
                return Err(OpenError::Format {
                    path: path(),
                    found,
                    known: FORMAT,
                });
            }
            Err(error) => {
                return Err(OpenError::Corrupt {
                    path: path(),
                    reason: error.to_string(),
                });
            }
        }
        Ok(Self {
            client,
            keys,
            options: options.clone(),
            stop: watch::Sender::new(write::Stop::default()),
            standing: Mutex::new(None),
            stall: Mutex::new(None),
            patience: Mutex::new(Patience::new(
                options.request_timeout,
                options.endpoints.len(),
            )),
            space_waits: AtomicUsize::new(0),
            written: AtomicU64::new(0),
            snapshots: tokio::sync::Mutex::default(),
            upkeep: tokio::sync::Mutex::default(),
        })
    }
}

/// When to log that etcd does not answer: at once, then at growing intervals.
#[derive(Debug, Default)]
pub(crate) struct Waits(Mutex<Option<(Instant, Duration)>>);

impl Waits {
    const FIRST: Duration = Duration::from_secs(5);
    const MOST: Duration = Duration::from_secs(300);

    fn is_due(&self, now: Instant) -> bool {
        let mut last = self.0.lock();
        let next = match *last {
            None => Self::FIRST,
            Some((at, pause)) if now.duration_since(at) < pause => return false,
            Some((_, pause)) => (pause * 2).min(Self::MOST),
        };
        *last = Some((now, next));
        true
    }

    /// etcd has answered.
    fn end(&self) {
        if self.0.lock().take().is_some() {
            tracing::info!("etcd answers");
        }
    }
}

/// The stored format. A store without a format is new: it gets this format, and an empty log.
async fn prepare(client: &Client, keys: &Keys) -> Result<Bytes, Error> {
    // A full etcd refuses every transaction that could put a key, so the format is read first.
    if let Some(found) = client.get(keys.format()).await? {
        return Ok(found.value);
    }
    let make = Txn::new()
        .when(Compare::absent(keys.format()))
        .then(Op::put(keys.format(), decimal(FORMAT)))
        .then(Op::put(keys.last(), decimal(0)));
    client.txn_repeatable(make).await?;
    let found = client.get(keys.format()).await?;
    Ok(found.map(|found| found.value).unwrap_or_default())
}

impl From<Error> for StoreError {
    fn from(error: Error) -> Self {
        match error {
            Error::NoSpace => Self::NoSpace,
            Error::LeaseNotFound => Self::LeaseGone,
            error => Self::Unavailable {
                reason: error.to_string(),
            },
        }
    }
}

#[async_trait]
impl MetadataStore for EtcdStore {
    async fn cluster_id(&self, fresh: ClusterId) -> Result<ClusterId, StoreError> {
        self.check_open()?;
        let key = self.keys.cluster_id();
        let mut found = self.client.get(key.clone()).await?;
        if found.is_none() {
            let make = Txn::new()
                .when(Compare::absent(key.clone()))
                .then(Op::put(key.clone(), format!("{:032x}", fresh.0)));
            self.client.txn_repeatable(make).await?;
            found = self.client.get(key).await?;
        }
        let id = found.as_ref().and_then(|found| {
            let text = std::str::from_utf8(&found.value).ok()?;
            u128::from_str_radix(text, 16).ok()
        });
        id.map(ClusterId)
            .ok_or_else(|| keys::corrupt("the cluster's id", "is no hexadecimal number"))
    }

    async fn epoch(&self) -> Result<Epoch, StoreError> {
        self.check_open()?;
        let read = Txn::new()
            .then(Op::get(Range::key(self.keys.term())))
            .then(Op::get(Range::key(self.keys.epoch_floor())));
        let read = self.client.txn_repeatable(read).await?;
        write::latest_epoch(read.get(0), read.get(1))
    }

    async fn begin_epoch(&self, at_least: Epoch) -> Result<Epoch, StoreError> {
        self.take_over(at_least).await
    }

    async fn append(&self, epoch: Epoch, seq: LogSeq, group: Bytes) -> Result<(), StoreError> {
        self.append_group(epoch, seq, group).await
    }

    fn is_full(&self) -> bool {
        self.space_waits.load(Ordering::Acquire) > 0
    }

    fn stalled(&self) -> Option<Stalled> {
        let stall = self.stall.lock();
        stall.as_ref().map(write::Stall::describe)
    }

    async fn log_span(&self) -> Result<LogSpan, StoreError> {
        self.check_open()?;
        log::span(&self.client, &self.keys).await
    }

    async fn read_log(
        &self,
        after: LogSeq,
        limit_bytes: u64,
    ) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
        self.check_open()?;
        log::read(&self.client, &self.keys, after, limit_bytes).await
    }

    async fn put_snapshot(
        &self,
        epoch: Epoch,
        shard: ShardIndex,
        seq: LogSeq,
        parts: Vec<Bytes>,
    ) -> Result<(), StoreError> {
        self.replace_snapshot(epoch, shard, seq, parts).await
    }

    async fn read_snapshot(&self, shard: ShardIndex) -> Result<Option<Snapshot>, StoreError> {
        self.check_open()?;
        self.load_snapshot(shard).await
    }

    async fn snapshots(&self) -> Result<Vec<ShardIndex>, StoreError> {
        Ok(self.positions().await?.into_keys().collect())
    }

    async fn snapshot_positions(&self) -> Result<SnapshotPositions, StoreError> {
        self.positions().await
    }

    async fn truncate_log(&self, epoch: Epoch, through: LogSeq) -> Result<(), StoreError> {
        self.cut(epoch, through).await
    }

    async fn size_on_disk(&self) -> Result<u64, StoreError> {
        self.check_open()?;
        let statuses = self.statuses().await?;
        Ok(statuses
            .iter()
            .map(|(_, status)| status.db_size)
            .max()
            .unwrap_or(0))
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.stop.send_modify(|stop| stop.closed = true);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_etcd_is_logged_at_once_and_then_at_growing_intervals() {
        let (waits, start) = (Waits::default(), Instant::now());
        let logged = |until: u64| {
            let due = |second: &u64| waits.is_due(start + Duration::from_secs(*second));
            (0..until).filter(due).collect::<Vec<u64>>()
        };
        assert_eq!(logged(60), [0, 5, 15, 35]);
        waits.end();
        assert_eq!(logged(10), [0, 5], "etcd had answered");
    }
}
