//! A running kvmaster: its pool behind its two ports.

use crate::clock::BootClock;
use crate::config::Config;
use crate::pool::Pool;
use crate::service::{self, NodesService, PoolService, framed};
use crate::store::{EmbeddedOptions, EmbeddedStore};
use anyhow::Context;
use kvpool_daemon::{bind, probe, warn_if_exposed};
use kvpool_proto::MAX_MESSAGE_BYTES;
use kvpool_proto::nodes_server::NodesServer;
use kvpool_proto::pool_server::PoolServer;
use kvpool_types::Epoch;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// How long requests in progress may take to end once the master stops.
const DRAIN: Duration = Duration::from_secs(3);

/// A kvmaster that serves.
#[derive(Debug)]
pub struct Server {
    pool: Arc<Pool>,
    grpc: SocketAddr,
    http: SocketAddr,
    stop: watch::Sender<bool>,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
}

impl Server {
    /// Binds the ports, recovers the metadata, and serves. The ports are bound first, so that one in
    /// use is told before anything is changed.
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        let grpc = bind(&config.listen, "the gRPC port").await?;
        let http = bind(&config.http_listen, "the HTTP port").await?;
        warn_if_exposed(grpc.local_addr()?, false);
        let options = EmbeddedOptions {
            directory: config.data_dir.clone(),
            cache: config.store_cache,
        };
        let store = EmbeddedStore::open(&options)
            .with_context(|| format!("data directory {}", config.data_dir.display()))?;
        let ready_file = config.ready_file.clone();
        let pool = Pool::start(config, Arc::new(store), Arc::new(BootClock)).await?;
        let (stop, stopped) = watch::channel(false);
        let server = Self {
            grpc: grpc.local_addr()?,
            http: http.local_addr()?,
            tasks: tokio::sync::Mutex::new(JoinSet::new()),
            pool: Arc::clone(&pool),
            stop,
        };
        let mut tasks = server.tasks.lock().await;
        let router = service::router(Arc::clone(&pool));
        let http_stopped = told(stopped.clone());
        tasks.spawn(async move {
            if let Err(error) = probe::serve(http, router, http_stopped).await {
                tracing::error!(%error, "the HTTP port failed");
            }
        });
        let clients = PoolServer::new(PoolService::new(Arc::clone(&pool)))
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let calls = Arc::clone(&pool);
        let nodes =
            NodesServer::new(NodesService::new(pool)).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let serving = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(Duration::from_secs(10)))
            .initial_stream_window_size(4 << 20)
            .initial_connection_window_size(16 << 20)
            .add_service(clients)
            .add_service(nodes);
        let incoming = framed::serve(calls, grpc, stopped.clone(), &mut tasks);
        tasks.spawn(async move {
            let served = serving
                .serve_with_incoming_shutdown(incoming, told(stopped))
                .await;
            if let Err(error) = served {
                tracing::error!(%error, "the gRPC port failed");
            }
        });
        drop(tasks);
        if let Some(file) = ready_file {
            write_ready_file(&file, server.grpc, server.http)?;
        }
        let Self {
            grpc, http, pool, ..
        } = &server;
        tracing::info!(%grpc, %http, cluster = %pool.cluster, epoch = %pool.epoch, "kvmaster serves");
        Ok(server)
    }

    /// Where gRPC is served.
    pub fn grpc_address(&self) -> SocketAddr {
        self.grpc
    }

    /// Where HTTP is served.
    pub fn http_address(&self) -> SocketAddr {
        self.http
    }

    /// Ends when a node knows a later term than this master's. It is stored by then.
    pub async fn superseded(&self) -> anyhow::Result<Epoch> {
        Ok(self.pool.superseded().await?)
    }

    /// Stops taking requests, lets those in progress end for a while, and closes the store.
    pub async fn stop(&self) {
        self.pool.quiesce();
        let _everyone_left = self.stop.send(true);
        let mut tasks = self.tasks.lock().await;
        // Sessions of nodes last for ever: they are cut when the time is up.
        let _in_time =
            tokio::time::timeout(DRAIN, async { while tasks.join_next().await.is_some() {} }).await;
        tasks.shutdown().await;
        self.pool.stop().await;
        tracing::info!("kvmaster stopped");
    }
}

async fn told(mut stopped: watch::Receiver<bool>) {
    // An error means that the server is gone, which is the same.
    let _stopped = stopped.wait_for(|stopped| *stopped).await;
}

/// Writes the addresses in one step, so that whoever waits for the file never reads half of it.
fn write_ready_file(file: &Path, grpc: SocketAddr, http: SocketAddr) -> anyhow::Result<()> {
    let text = serde_json::json!({ "listen": grpc.to_string(), "http": http.to_string() });
    let partial = file.with_extension("partial");
    std::fs::write(&partial, text.to_string())
        .and_then(|()| std::fs::rename(&partial, file))
        .with_context(|| format!("ready file {}", file.display()))
}
