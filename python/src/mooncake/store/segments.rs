//! The memory that a store contributes: embedded store nodes.

use kvpool_store_node::{Attachment, Config, Node, StartError};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};

/// The time between two checks whether a master has accepted a node.
const POLL: Duration = Duration::from_millis(10);
/// How long the work of a node may continue while the node is closed.
const DRAIN: Duration = Duration::from_secs(2);

/// The reasons why no segment was contributed.
#[derive(Debug, thiserror::Error)]
pub(super) enum SegmentError {
    /// The node's threads cannot be started.
    #[error("cannot start the segment's threads: {0}")]
    NoRuntime(std::io::Error),
    /// The node cannot be started.
    #[error("cannot serve the segment: {0}")]
    Start(#[from] StartError),
    /// No master answers.
    #[error(
        "no master accepted the segment within {0:?}; in a pool with tokens it needs the role node"
    )]
    NotWelcome(Duration),
    /// A file for blocks on SSD cannot be used.
    #[error("{}: {reason}; remove the file, or give another directory", path.display())]
    Medium {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A file for blocks on SSD was not attached in time.
    #[error("{} was not attached within {within:?}", path.display())]
    NotAttached {
        /// The file.
        path: PathBuf,
        /// The time that the call waited.
        within: Duration,
    },
}

/// The segment to contribute.
pub(super) struct Wanted {
    pub(super) masters: Vec<String>,
    pub(super) size: u64,
    /// The node's media, as items of its setting `ssd`.
    pub(super) ssd: Vec<String>,
    /// The node's name.
    pub(super) name: String,
    /// The listening address, `host:port`.
    pub(super) listen: String,
    /// The advertised address, `host:port`; empty for the listening address.
    pub(super) advertise: String,
    pub(super) rdma_devices: Vec<String>,
    /// How long a master may take to accept the node and to attach its media.
    pub(super) within: Duration,
}

/// The embedded nodes of one store, by name.
#[derive(Default)]
pub(super) struct Segments {
    running: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    runtime: Option<Runtime>,
    nodes: BTreeMap<String, Node>,
}

impl Segments {
    /// Contributes a segment, and returns once a master has accepted it. Returns the files of its media.
    pub(super) fn start(&self, wanted: Wanted) -> Result<Vec<PathBuf>, SegmentError> {
        let mut running = self.running.lock();
        let runtime = match running.runtime.take() {
            Some(runtime) => runtime,
            None => Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .thread_name("kvpool-segment")
                .build()
                .map_err(SegmentError::NoRuntime)?,
        };
        let started = runtime.block_on(serve(&wanted));
        running.runtime = Some(runtime);
        let node = started?;
        let media = node.media().into_iter().map(|medium| medium.path);
        let media = media.collect();
        running.nodes.insert(wanted.name, node);
        Ok(media)
    }

    /// Takes a segment and its blocks out of the pool. Returns false when no segment has this name.
    pub(super) fn stop(&self, name: &str) -> bool {
        let mut running = self.running.lock();
        let Some(node) = running.nodes.remove(name) else {
            return false;
        };
        if let Some(runtime) = &running.runtime {
            runtime.block_on(node.drain());
        }
        true
    }

    /// Takes all segments out of the pool.
    pub(super) fn close(&self) {
        let mut running = self.running.lock();
        let nodes = std::mem::take(&mut running.nodes);
        let Some(runtime) = running.runtime.take() else {
            return;
        };
        runtime.block_on(async {
            for (_, node) in nodes {
                node.drain().await;
            }
        });
        runtime.shutdown_timeout(DRAIN);
    }
}

async fn serve(wanted: &Wanted) -> Result<Node, SegmentError> {
    let tls = kvpool_client::ClientFiles::from_environment();
    let config = Config {
        master: wanted.masters.clone(),
        name: wanted.name.clone(),
        segment: vec![bytesize::ByteSize(wanted.size)],
        ssd: wanted.ssd.clone(),
        listen: wanted.listen.clone(),
        advertise: wanted.advertise.clone(),
        http_listen: "127.0.0.1:0".into(),
        // A segment may be as small as one or two objects, and this process may hold most of it.
        max_held_ratio: 1.0,
        rdma_device: wanted.rdma_devices.clone(),
        drain_timeout: DRAIN,
        tls_ca: tls.ca,
        tls_cert: tls.cert,
        tls_key: tls.key,
        tls_server_name: tls.server_name,
        // Without TLS the node accepts every caller, as the original does. The node logs a warning.
        insecure: true,
        ..Config::default()
    };
    let node = Node::start(config).await?;
    let until = Instant::now() + wanted.within;
    while !node.is_ready() {
        if Instant::now() >= until {
            node.drain().await;
            return Err(SegmentError::NotWelcome(wanted.within));
        }
        tokio::time::sleep(POLL).await;
    }
    let until = Instant::now() + wanted.within;
    while let Some(wrong) = not_in_use(&node, wanted.within) {
        let may_come = matches!(wrong, SegmentError::NotAttached { .. });
        if !may_come || Instant::now() >= until {
            node.drain().await;
            return Err(wrong);
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(node)
}

/// The first medium that is not in use, with the reason.
fn not_in_use(node: &Node, within: Duration) -> Option<SegmentError> {
    node.media().into_iter().find_map(|medium| {
        let path = medium.path;
        match medium.attachment {
            Attachment::Attached => None,
            Attachment::Pending => Some(SegmentError::NotAttached { path, within }),
            Attachment::Refused(reason) => Some(SegmentError::Medium { path, reason }),
        }
    })
}
