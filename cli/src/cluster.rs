//! A new pool on this machine: one kvmaster and some kvstore-nodes as child processes, with metadata and
//! logs in a temporary directory.

use crate::connection::control_error;
use crate::process::{Child, Streams};
use anyhow::{Context, bail};
use kvpool_client::Client;
use serde::Deserialize;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Timeout for the start of a daemon. A store node first touches all its memory.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);

/// An extent's length is rounded up to a multiple of this, in bytes.
pub(crate) const GRANULE: u64 = 64;

/// The address of daemons that only this host may reach.
pub const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The pool to start.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The number of store nodes.
    pub nodes: u32,
    /// The memory of each node, in bytes.
    pub node_bytes: u64,
    /// The memory of the last node in bytes, if it differs.
    pub last_node_bytes: Option<u64>,
    /// Which blocks are evicted first.
    pub policy: Policy,
    /// When a commit is acknowledged.
    pub commit_ack: CommitAck,
    /// The eviction settings; `None`: the defaults of kvmaster.
    pub eviction: Option<Eviction>,
    /// The SSD of each node: a file beside the metadata.
    pub ssd: Option<Ssd>,
    /// Keep the directory (metadata and logs).
    pub keep: bool,
    /// The address that the daemons listen on.
    pub host: IpAddr,
    /// Flags of TLS and tokens.
    pub security: Security,
}

/// Flags of TLS and tokens, for a pool that asks who its callers are or encrypts.
#[derive(Clone, Debug, Default)]
pub struct Security {
    /// Flags of every daemon.
    pub daemon: Vec<OsString>,
    /// Further flags of store nodes.
    pub node: Vec<OsString>,
    /// Whether the daemons serve TLS.
    pub has_tls: bool,
}

impl Security {
    const fn scheme(&self) -> &'static str {
        if self.has_tls { "https://" } else { "http://" }
    }
}

/// The SSD of a node.
#[derive(Clone, Copy, Debug)]
pub struct Ssd {
    /// The size of the file, in bytes.
    pub bytes: u64,
    /// The write budget, in drive writes per day.
    pub dwpd: Option<f64>,
}

impl Ssd {
    fn flag(self, file: &Path) -> String {
        let dwpd = self
            .dwpd
            .map_or_else(String::new, |dwpd| format!(",dwpd={dwpd}"));
        format!("path={},size={}{dwpd}", file.display(), self.bytes)
    }
}

/// The eviction settings, as shares of the pool's bytes.
#[derive(Clone, Copy, Debug)]
pub struct Eviction {
    /// The used share above which eviction starts.
    pub high_watermark: f64,
    /// The share that a round frees below the high watermark.
    pub ratio: f64,
}

impl Eviction {
    /// As [`Eviction::JUST_ENOUGH`], with a little free room: blocks that come back from an SSD do not
    /// wait for eviction.
    pub const NEARLY_ENOUGH: Self = Self {
        high_watermark: 1.0,
        ratio: 0.02,
    };

    /// Eviction starts only in a full pool, and frees only what a put needs.
    pub const JUST_ENOUGH: Self = Self {
        high_watermark: 1.0,
        ratio: 0.0,
    };
}

/// Which blocks are evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Leaves of chains before their parents, least recently used first.
    Prefix,
    /// Least recently used first, chains or not.
    Lru,
}

impl Policy {
    const fn flag(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Lru => "lru",
        }
    }
}

/// When a commit is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CommitAck {
    /// After its record is on disk.
    Durable,
    /// Before its record is on disk: a crash of the master may lose it.
    Memory,
}

impl CommitAck {
    const fn flag(self) -> &'static str {
        match self {
            Self::Durable => "durable",
            Self::Memory => "memory",
        }
    }
}

/// A running pool. Dropping it kills its processes and removes its directory.
#[derive(Debug)]
pub struct Cluster {
    // Declared before the directory: daemons are dropped before the directory is removed.
    daemons: Vec<Child>,
    plan: Plan,
    master: String,
    directory: Directory,
}

#[derive(Debug)]
enum Directory {
    Temporary(TempDir),
    Kept(PathBuf),
}

/// The ready file that a daemon writes when it serves.
#[derive(Deserialize)]
struct Ready {
    listen: String,
}

impl Cluster {
    /// Starts the daemons from this program's own directory and waits until all serve.
    ///
    /// Call it on the main thread: the kernel kills a daemon when the thread that started it ends.
    ///
    /// # Errors
    ///
    /// A daemon is not beside this program, ends, or does not serve within a minute. The error has the
    /// last lines of its log.
    pub async fn start(plan: &Plan) -> anyhow::Result<Self> {
        let directory =
            TempDir::with_prefix("kvpool-").context("cannot create a temporary directory")?;
        let directory = if plan.keep {
            let path = directory.keep();
            // Logged at the start, because a failed run needs the path most.
            tracing::info!("metadata and logs are in {}", path.display());
            Directory::Kept(path)
        } else {
            Directory::Temporary(directory)
        };
        let mut cluster = Self {
            daemons: Vec::new(),
            plan: plan.clone(),
            master: String::new(),
            directory,
        };
        let any_port = SocketAddr::new(plan.host, 0).to_string();
        let listening = cluster
            .launch(
                "kvmaster",
                "kvmaster",
                master_arguments(plan, &any_port, cluster.path()),
            )
            .await?;
        cluster.master = format!("{}{listening}", plan.security.scheme());
        for number in 0..plan.nodes {
            let name = format!("node-{number}");
            let is_last = number + 1 == plan.nodes;
            let last = plan.last_node_bytes.filter(|_| is_last);
            let bytes = last.unwrap_or(plan.node_bytes);
            let mut arguments =
                node_arguments(bytes, &any_port, &cluster.master, &name, cluster.path());
            if let Some(ssd) = plan.ssd {
                let file = cluster.path().join(format!("{name}.ssd"));
                arguments.extend(["--ssd".into(), ssd.flag(&file).into()]);
            }
            arguments.extend(plan.security.daemon.iter().cloned());
            arguments.extend(plan.security.node.iter().cloned());
            cluster.launch(&name, "kvstore-node", arguments).await?;
        }
        Ok(cluster)
    }

    /// Waits until all nodes have registered: a node serves before it registers.
    ///
    /// # Errors
    ///
    /// The pool does not answer, a daemon has ended, or a minute has passed.
    pub async fn joined(&mut self, client: &Client, plan: &Plan) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let stats = client.stats().await.map_err(control_error)?;
            let live = stats.nodes.iter().filter(|node| node.state == "live");
            if live.count() == plan.nodes as usize {
                return Ok(());
            }
            for daemon in &mut self.daemons {
                daemon.check()?;
            }
            if Instant::now() > deadline {
                bail!(
                    "not all nodes have registered within {}; run again with --keep to keep their logs",
                    humantime::format_duration(START_TIMEOUT),
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The master's address in the form that clients accept.
    pub fn master(&self) -> &str {
        &self.master
    }

    /// Kills the master, restarts it on the same files and port, and returns when it serves.
    ///
    /// # Errors
    ///
    /// The master cannot be killed, or does not serve again within a minute.
    pub async fn restart_master(&mut self) -> anyhow::Result<()> {
        let master = self.daemons.first_mut().context("there is no master")?;
        master.kill().await?;
        // A stale file would pass for the ready file of the restarted master.
        let _ = tokio::fs::remove_file(self.path().join("kvmaster.ready")).await;
        let listen = self
            .master
            .trim_start_matches(self.plan.security.scheme())
            .to_owned();
        let arguments = master_arguments(&self.plan, &listen, self.path());
        self.launch("kvmaster", "kvmaster", arguments).await?;
        // `launch` appended the new master: it replaces the killed one at index 0.
        drop(self.daemons.swap_remove(0));
        Ok(())
    }

    /// Kills the first node and does not restart it.
    ///
    /// # Errors
    ///
    /// The pool has no node, or it cannot be killed.
    pub async fn kill_node(&mut self) -> anyhow::Result<()> {
        let node = self.daemons.get_mut(1).context("there is no node")?;
        node.kill().await
    }

    /// The process ids of kvmaster and of the nodes.
    pub fn ids(&self) -> (Option<u32>, Vec<u32>) {
        let mut ids = self.daemons.iter().map(Child::id);
        (ids.next().flatten(), ids.flatten().collect())
    }

    /// The directory of metadata and logs.
    pub fn path(&self) -> &Path {
        match &self.directory {
            Directory::Temporary(directory) => directory.path(),
            Directory::Kept(path) => path,
        }
    }

    /// Stops all daemons in order, nodes first.
    pub async fn stop(mut self) {
        while let Some(daemon) = self.daemons.pop() {
            daemon.stop().await;
        }
    }

    /// Starts one daemon and waits until it serves. Returns the address that it listens on.
    async fn launch(
        &mut self,
        name: &str,
        program: &str,
        mut arguments: Vec<OsString>,
    ) -> anyhow::Result<String> {
        let ready = self.path().join(format!("{name}.ready"));
        arguments.extend(["--ready-file".into(), ready.clone().into()]);
        let log = self.path().join(format!("{name}.log"));
        let mut child = Child::start(name, &beside(program)?, &arguments, &[], Streams::Log, log)?;
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            // The file is complete only when it parses: it may be seen while it is being written.
            if let Ok(text) = tokio::fs::read(&ready).await
                && let Ok(Ready { listen }) = serde_json::from_slice(&text)
            {
                self.daemons.push(child);
                return Ok(listen);
            }
            child.check()?;
            if Instant::now() > deadline {
                bail!(
                    "{name} was not ready within {}{}",
                    humantime::format_duration(START_TIMEOUT),
                    child.log_tail()
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

/// The path of a program in this program's own directory.
fn beside(program: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the path of this program")?;
    let path = own.with_file_name(program);
    if !path.is_file() {
        bail!(
            "{} does not exist: the daemons must be in the directory of this program (cargo build --bins)",
            path.display()
        );
    }
    Ok(path)
}

/// Any free port of the loopback address.
const ANY_PORT: &str = "127.0.0.1:0";

fn master_arguments(plan: &Plan, listen: &str, directory: &Path) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec![
        "--listen".into(),
        listen.into(),
        "--http-listen".into(),
        ANY_PORT.into(),
        // The pool listens on loopback, or in a network namespace that reaches nothing else.
        "--insecure".into(),
        "--data-dir".into(),
        directory.join("master").into(),
        "--commit-ack".into(),
        plan.commit_ack.flag().into(),
        "--eviction-policy".into(),
        plan.policy.flag().into(),
    ];
    if let Some(eviction) = plan.eviction {
        arguments.extend([
            "--eviction-high-watermark-ratio".into(),
            eviction.high_watermark.to_string().into(),
            "--eviction-ratio".into(),
            eviction.ratio.to_string().into(),
        ]);
    }
    arguments.extend(plan.security.daemon.iter().cloned());
    arguments
}

fn node_arguments(
    bytes: u64,
    listen: &str,
    master: &str,
    name: &str,
    directory: &Path,
) -> Vec<OsString> {
    vec![
        "--master".into(),
        master.into(),
        "--listen".into(),
        listen.into(),
        "--http-listen".into(),
        ANY_PORT.into(),
        "--insecure".into(),
        "--name".into(),
        name.into(),
        "--segment".into(),
        bytes.to_string().into(),
        "--shm-path".into(),
        directory.join(format!("{name}.sock")).into(),
    ]
}
