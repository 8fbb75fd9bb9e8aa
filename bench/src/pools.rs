//! The pools of a run and their blocks. A pool starts when the first case needs it.

use super::agent::protocol::{Connect, Live, Set, Way};
use super::cases::{Blocks, Kept, Pool};
use super::security::{Access, Material};
use super::usage::{self, Resident};
use super::veth::Veth;
use anyhow::{Context as _, bail};
use kvctl::cluster::{Cluster, CommitAck, Eviction, LOOPBACK, Plan, Policy, Security, Ssd};
use kvctl::connection::{Connection, control_error};
use kvpool_client::{Client, PoolStats};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

const MIB: u64 = 1 << 20;

/// The share of a pool that is filled at most. Eviction begins above it.
const FILLED: f64 = 0.9;

/// The longest wait for the leases of removed blocks.
const ROOM_TIMEOUT: Duration = Duration::from_secs(60);

/// The most bytes that a window puts after its first call.
pub(super) const WINDOW_BYTES: u64 = 128 * MIB;

/// A running pool.
#[derive(Debug)]
pub(super) struct Running {
    cluster: Option<Cluster>,
    /// The tokens and certificates that clients present to the pool.
    access: Access,
    connection: Connection,
    /// A client for statistics; no case is measured with it.
    client: Client,
    /// The client's runtime in the network namespace of the clients; `None` for the runtime of the program.
    runtime: Option<Runtime>,
    /// The blocks in the pool, by the tag of the set.
    pub(super) sets: HashMap<String, Set>,
    /// The master's memory before the first block.
    pub(super) baseline: Resident,
}

impl Pool {
    /// Whether the pool that `--master` names takes its place.
    pub(super) const fn may_be_foreign(self) -> bool {
        matches!(self, Self::Main | Self::Keys)
    }

    fn plan(self, span: u64) -> Plan {
        let window = WINDOW_BYTES.min(span);
        let node_bytes = match self {
            // The room of removed blocks is free only after their leases.
            Self::Main | Self::Guarded(_) => 3 * span + 2 * window,
            Self::Durable => 2 * span + window,
            Self::Fresh => fresh_bytes(span),
            Self::Local => 0,
            Self::Keys | Self::GuardedKeys(_) => 64 * MIB,
            Self::Million => 256 * MIB,
            // The reserve, a twentieth of the pool, has room for some of the largest batches, as in a real
            // pool.
            Self::Full => (4 * span).max(2048 * MIB),
            // A segment is a multiple of a page.
            Self::Crowded | Self::Restarted => CROWD_BYTES.min(2 * span),
            Self::NodeLost => (CROWD_BYTES.min(2 * span) / 10 * 9).next_multiple_of(MIB),
        };
        Plan {
            nodes: match self {
                Self::Local => 0,
                Self::NodeLost => 2,
                _ => 1,
            },
            node_bytes,
            last_node_bytes: (self == Self::NodeLost)
                .then(|| (CROWD_BYTES.min(2 * span) / 10).next_multiple_of(MIB)),
            policy: Policy::Prefix,
            commit_ack: match self {
                Self::Durable | Self::Restarted => CommitAck::Durable,
                _ => CommitAck::Memory,
            },
            eviction: (self == Self::Crowded).then_some(Eviction {
                high_watermark: 0.95,
                ratio: 0.0,
            }),
            ssd: None,
            keep: false,
            host: LOOPBACK,
            security: Security::default(),
        }
    }
}

/// The most bytes of a pool of a scenario.
const CROWD_BYTES: u64 = 512 * MIB;

/// The bytes of [`Pool::Fresh`]: at least enough first writes for the pairs of a usual run.
fn fresh_bytes(span: u64) -> u64 {
    (2 * span + WINDOW_BYTES.min(span)).max(640 * MIB)
}

/// The bytes that first writes can fill without eviction.
pub(super) fn fresh_room(span: u64) -> u64 {
    fresh_bytes(span) / 10 * 9
}

/// The bytes of the segment that the client's process serves to [`Pool::Local`].
pub(super) fn local_segment(span: u64) -> u64 {
    3 * span + 2 * WINDOW_BYTES.min(span)
}

impl Running {
    /// Starts a pool. Call it on the main thread.
    pub(super) async fn start(
        pool: Pool,
        span: u64,
        ssd: Option<u64>,
        connection: &Connection,
        veth: Option<&Veth>,
        material: &Material,
    ) -> anyhow::Result<Self> {
        let mut plan = pool.plan(span);
        let access = pool.guard().map(|guard| material.access(guard));
        let access = access.unwrap_or_default();
        if let Some(guard) = pool.guard() {
            plan.security = material.flags(guard);
        }
        plan.ssd = ssd.map(|bytes| Ssd { bytes, dwpd: None });
        let mut cluster = {
            let _inside = veth.map(Veth::enter_far).transpose()?;
            if veth.is_some() {
                plan.host = Veth::far_address();
            }
            Cluster::start(&plan).await?
        };
        let mut connection = connection.with_master(cluster.master());
        access.apply(&mut connection);
        let runtime = veth.map(|_| runtime()).transpose()?;
        let client = match &runtime {
            Some(runtime) => {
                let connection = connection.clone();
                let connect = async move { connection.connect().await };
                runtime.spawn(connect).await??
            }
            None => connection.connect().await?,
        };
        cluster.joined(&client, &plan).await?;
        let mut running = Self {
            cluster: Some(cluster),
            access,
            connection,
            client,
            runtime,
            sets: HashMap::new(),
            baseline: Resident::default(),
        };
        running.baseline = running
            .master()
            .and_then(usage::resident)
            .unwrap_or_default();
        Ok(running)
    }

    /// Connects to the existing pool.
    pub(super) async fn foreign(connection: &Connection) -> anyhow::Result<Self> {
        Ok(Self {
            cluster: None,
            access: Access::of(connection),
            connection: connection.clone(),
            client: connection.connect().await?,
            runtime: None,
            sets: HashMap::new(),
            baseline: Resident::default(),
        })
    }

    /// The master's address.
    pub(super) fn address(&self) -> &str {
        self.connection.master()
    }

    /// A client of the pool, to be connected.
    pub(super) fn connect(
        &self,
        name: String,
        way: Way,
        remembers: bool,
        spin: Duration,
    ) -> Connect {
        Connect {
            name,
            master: self.address().to_owned(),
            access: self.access.clone(),
            way,
            remembers,
            spin,
        }
    }

    /// A directory that is deleted with the pool.
    pub(super) fn path(&self) -> anyhow::Result<&std::path::Path> {
        let cluster = self
            .cluster
            .as_ref()
            .context("this pool was not started by the benchmark")?;
        Ok(cluster.path())
    }

    /// The process id of the master, if this run started it.
    pub(super) fn master(&self) -> Option<u32> {
        self.cluster.as_ref()?.ids().0
    }

    /// The process ids of the nodes, if this run started them.
    pub(super) fn nodes(&self) -> Vec<u32> {
        self.cluster
            .as_ref()
            .map(|cluster| cluster.ids().1)
            .unwrap_or_default()
    }

    /// The data port of the first node.
    pub(super) async fn data_port(&self) -> anyhow::Result<u16> {
        let stats = self.client.stats().await.map_err(control_error)?;
        let node = stats.nodes.first().context("the pool has no store node")?;
        let (_, port) = node
            .data_address
            .rsplit_once(':')
            .context("the store node has no data port")?;
        Ok(port.parse()?)
    }

    /// The statistics of the master.
    pub(super) async fn stats(&self) -> anyhow::Result<PoolStats> {
        self.client.stats().await.map_err(control_error)
    }

    /// Kills the master, restarts it on its files, and returns when it serves.
    pub(super) async fn restart_master(&mut self) -> anyhow::Result<()> {
        let cluster = self
            .cluster
            .as_mut()
            .context("this pool was not started by the benchmark")?;
        cluster.restart_master().await
    }

    /// Kills the first node.
    pub(super) async fn kill_node(&mut self) -> anyhow::Result<()> {
        let cluster = self
            .cluster
            .as_mut()
            .context("this pool was not started by the benchmark")?;
        cluster.kill_node().await
    }

    /// The capacity of the nodes, in bytes.
    pub(super) async fn capacity(&self) -> anyhow::Result<u64> {
        Ok(self.client.stats().await.map_err(control_error)?.capacity.0)
    }

    /// Waits until the node in a client's process has registered.
    pub(super) async fn wait_for_node(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + ROOM_TIMEOUT;
        while self.capacity().await? == 0 {
            if Instant::now() > deadline {
                bail!("the store node inside the client process has not joined its pool");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Waits until `bytes` fit without eviction.
    pub(super) async fn wait_for_room(&self, bytes: u64) -> anyhow::Result<()> {
        let deadline = Instant::now() + ROOM_TIMEOUT;
        loop {
            let stats = self.client.stats().await.map_err(control_error)?;
            let filled = stats.capacity.0 as f64 * FILLED;
            if (stats.used.0 + bytes) as f64 <= filled {
                return Ok(());
            }
            if bytes as f64 > filled || Instant::now() > deadline {
                bail!(
                    "the pool has no room for another {}: {} of {} are used",
                    kvctl::output::bytes(bytes),
                    kvctl::output::bytes(stats.used.0),
                    kvctl::output::bytes(stats.capacity.0)
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Stops the processes that this run started.
    pub(super) async fn stop(self) {
        drop(self.client);
        if let Some(runtime) = self.runtime {
            runtime.shutdown_background();
        }
        if let Some(cluster) = self.cluster {
            cluster.stop().await;
        }
    }
}

/// A runtime whose threads are in the network namespace of the calling thread.
fn runtime() -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("bench-pool")
        .enable_all()
        .build()
        .context("cannot start a runtime")
}

impl Blocks {
    /// The tag of a set of such blocks, unique in its pool.
    pub(super) fn tag(self) -> String {
        let kept = match self.kept {
            Kept::Span => "span".to_owned(),
            Kept::Exactly(count) => count.to_string(),
        };
        let chained = if self.chained { "/chain" } else { "" };
        let Self {
            bytes,
            pieces,
            group,
            ..
        } = self;
        format!("{bytes}/{pieces}/{group}/{kept}{chained}")
    }

    /// An empty set of such blocks. Transfers cycle through `span` bytes.
    pub(super) fn set(self, span: u64) -> Set {
        let slots = match self.kept {
            Kept::Span => span / self.bytes,
            Kept::Exactly(count) => count,
        };
        Set {
            tag: self.tag(),
            block: self.bytes,
            pieces: self.pieces,
            group: self.group,
            chained: self.chained,
            slots,
            live: Live::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::table;

    #[test]
    fn every_set_fits_the_memory_and_the_pool_that_it_is_put_into() {
        for span in [32 * MIB, 128 * MIB, 384 * MIB] {
            for case in table().iter().filter(|case| case.fits(span)) {
                let pool = case.place.pool;
                let Some(blocks) = case.what.blocks(pool) else {
                    continue;
                };
                let set = blocks.set(span);
                assert!(
                    set.slots >= 4 && set.slots.is_multiple_of(set.group),
                    "{}",
                    case.id
                );
                assert!(set.slots * set.block <= span, "{}", case.id);
                if pool == Pool::Full {
                    // This pool evicts.
                    continue;
                }
                let bytes = match pool {
                    Pool::Local => local_segment(span),
                    _ => pool.plan(span).node_bytes,
                };
                let needed = set.slots * set.block + WINDOW_BYTES.min(set.slots * set.block);
                assert!(needed as f64 <= bytes as f64 * FILLED, "{}", case.id);
            }
        }
    }
}
