//! A running kvmaster with its two ports.

use crate::clock::BootClock;
use crate::config::Config;
use crate::leadership::{self, Seat};
use crate::metrics::Metrics;
use crate::overview::Watch;
use crate::pool::Pool;
use crate::service::rights::Guard;
use crate::service::{self, NodesService, PoolService, framed};
use crate::standalone;
use crate::store::{EmbeddedStore, StoreError};
use anyhow::Context;
use kvpool_auth::Authority;
use kvpool_daemon::advertise::{self, AdvertiseError, Advertised};
use kvpool_daemon::probe::Elsewhere;
use kvpool_daemon::tls::Tls;
use kvpool_daemon::{Guards, bind, http_guard, probe, refuse_if_exposed, tokens};
use kvpool_proto::nodes_server::NodesServer;
use kvpool_proto::pool_server::PoolServer;
use kvpool_proto::{CODE_METADATA, MAX_MESSAGE_BYTES};
use kvpool_tls::ServerTls;
use kvpool_types::{Code, Epoch};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// How long requests in progress may take to end after the master stops.
const DRAIN: Duration = Duration::from_secs(3);

/// The most calls of one gRPC connection that are in progress at a time. A call costs its caller a
/// few bytes and the master some KiB, even before the caller has shown a token. So the master needs
/// a bound. A standby has one connection for all calls that it forwards, and many of them wait.
/// Further calls wait at the sender.
const MOST_CALLS: u32 = 256;

/// A running kvmaster.
#[derive(Debug)]
pub struct Server {
    lead: Lead,
    grpc: SocketAddr,
    http: SocketAddr,
    stop: watch::Sender<bool>,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
    /// Why a port is no longer served.
    port_failed: watch::Receiver<Option<String>>,
}

/// The interval of the checks of a standalone master's log and directory.
const LOOK: Duration = Duration::from_millis(250);

/// How this master became the leader.
#[derive(Debug)]
enum Lead {
    /// The only master of an embedded store.
    Alone(Arc<Pool>, Arc<EmbeddedStore>),
    /// The winner of an election in etcd.
    Elected(leadership::Candidate),
}

impl Server {
    /// Binds the ports, recovers the metadata, and serves. The ports are bound first, so that a
    /// port in use is reported before anything changes. With etcd the master serves before it
    /// leads: it then names the leader.
    ///
    /// # Errors
    ///
    /// A text for the operator: a setting or file cannot be used, a port is in use, or the metadata
    /// cannot be recovered.
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        let tls = config.tls().open()?;
        let grpc = bind(&config.listen, "the gRPC port").await?;
        let http = bind(&config.http_listen, "the HTTP port").await?;
        let addresses = (grpc.local_addr()?, http.local_addr()?);
        let advertised = advertised(&config, addresses.0)?;
        let address = advertised.as_ref();
        let address = address.map_or_else(String::new, |own| format!("{}{own}", tls.scheme()));
        let authority = config.auth()?.map(Authority::open).transpose()?;
        // HTTP ports ask for no certificate.
        let by_token = Guards {
            tls: tls.server.is_some(),
            tokens: authority.is_some(),
        };
        let guards = Guards {
            tokens: by_token.tokens || tls.knows_callers(),
            ..by_token
        };
        let ports = [
            ("the gRPC port", addresses.0, guards),
            ("the HTTP port", addresses.1, by_token),
        ];
        refuse_if_exposed(&ports, config.insecure)?;
        let ready_file = config.ready_file.clone();
        let clock = Arc::new(BootClock);
        let metrics = Arc::new(Metrics::new()?);
        tls.watch(metrics.registry(), "kvpool_master_")?;
        tokens::watch_files(metrics.registry(), "kvpool_master_", authority.clone())?;
        let seat = Seat::new(
            config.clone(),
            Arc::clone(&metrics),
            Arc::clone(&clock) as _,
        );
        let seat = seat.guarded(Guard::new(authority)).certified(tls.clone());
        let seat = Arc::new(seat);
        let (stop, stopped) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let http_address = advertised.map_or_else(String::new, |own| own.beside(addresses.1));
        let lead = if config.etcd.is_empty() {
            let (store, pool) = standalone::begin(config, clock, metrics).await?;
            seat.lead(Arc::clone(&pool), &address);
            let report =
                leadership::report_alone(Arc::clone(&seat), Arc::clone(&store) as _, http_address);
            let stopping = told(stopped.clone());
            tasks.spawn(async move {
                tokio::select! {
                    () = report => {}
                    () = stopping => {}
                }
            });
            Lead::Alone(pool, store)
        } else {
            let candidate =
                leadership::Candidate::start(Arc::clone(&seat), clock, address, http_address)
                    .await?;
            Lead::Elected(candidate)
        };
        let (port_failure, port_failed) = watch::channel(None);
        serve(
            &seat,
            tls,
            (grpc, http),
            &stopped,
            &port_failure,
            &mut tasks,
        );
        if let Some(file) = ready_file {
            write_ready_file(&file, addresses.0, addresses.1)?;
        }
        let (grpc, http) = addresses;
        tracing::info!(%grpc, %http, role = seat.role().label(), "kvmaster serving");
        Ok(Self {
            lead,
            grpc,
            http,
            stop,
            tasks: tokio::sync::Mutex::new(tasks),
            port_failed,
        })
    }

    /// The address of gRPC.
    pub fn grpc_address(&self) -> SocketAddr {
        self.grpc
    }

    /// The address of HTTP.
    pub fn http_address(&self) -> SocketAddr {
        self.http
    }

    /// Completes when a node proves a later epoch than a standalone master's, after that epoch is
    /// stored. With elections it never completes, because another election decides.
    ///
    /// # Errors
    ///
    /// The store did not store the later epoch.
    pub async fn superseded(&self) -> anyhow::Result<Epoch> {
        match &self.lead {
            Lead::Alone(pool, _) => {
                let later = pool.superseded().await;
                Ok(pool.give_way(later).await?)
            }
            Lead::Elected(_) => std::future::pending().await,
        }
    }

    /// Completes when only a restart helps: the log has failed, the directory was moved, or a port
    /// is no longer served. Returns the reason.
    pub async fn failed(&self) -> String {
        tokio::select! {
            why = self.port_has_failed() => why,
            why = self.store_has_failed() => why,
        }
    }

    async fn port_has_failed(&self) -> String {
        let mut failed = self.port_failed.clone();
        let why = match failed.wait_for(Option::is_some).await {
            Ok(why) => why.clone(),
            // The sender was dropped because the server stops.
            Err(_) => None,
        };
        match why {
            Some(why) => why,
            None => std::future::pending().await,
        }
    }

    /// With elections, another master leads in this case.
    async fn store_has_failed(&self) -> String {
        let Lead::Alone(pool, store) = &self.lead else {
            return std::future::pending().await;
        };
        loop {
            tokio::time::sleep(LOOK).await;
            if let Err(error) = pool.healthy() {
                return error;
            }
            let store = Arc::clone(store);
            // The check may wait for the disk, so it runs on a blocking thread.
            match tokio::task::spawn_blocking(move || store.check()).await {
                Ok(Err(StoreError::Closed)) | Err(_) => return std::future::pending().await,
                Ok(Err(error)) => return error.to_string(),
                Ok(Ok(())) => {}
            }
        }
    }

    /// Stops taking requests, waits a while for requests in progress, gives up the lead, and closes
    /// the store.
    pub async fn stop(&self) {
        if let Lead::Alone(pool, _) = &self.lead {
            pool.quiesce();
        }
        if let Lead::Elected(candidate) = &self.lead {
            // First, so that another master can lead while the last requests end here.
            candidate.stop().await;
        }
        let _everyone_left = self.stop.send(true);
        let mut tasks = self.tasks.lock().await;
        let _in_time =
            tokio::time::timeout(DRAIN, async { while tasks.join_next().await.is_some() {} }).await;
        tasks.shutdown().await;
        if let Lead::Alone(pool, _) = &self.lead {
            pool.stop().await;
        }
        tracing::info!("kvmaster stopped");
    }
}

/// This master's address for other machines. A standalone master may have none. A master that
/// stands for election needs one.
fn advertised(config: &Config, listen: SocketAddr) -> Result<Option<Advertised>, AdvertiseError> {
    match advertise::decide(config.advertise.as_deref(), listen) {
        Err(_) if config.advertise.is_none() && config.etcd.is_empty() => Ok(None),
        decided => decided.map(Some),
    }
}

/// Serves both ports until `stopped` says so.
fn serve(
    seat: &Arc<Seat>,
    tls: Tls,
    (grpc, http): (TcpListener, TcpListener),
    stopped: &watch::Receiver<bool>,
    failure: &watch::Sender<Option<String>>,
    tasks: &mut JoinSet<()>,
) {
    let watch = Arc::new(Watch::new(Arc::clone(seat)));
    tasks.spawn(Arc::clone(&watch).run(told(stopped.clone())));
    let router = service::router(Arc::clone(seat), Arc::clone(&watch));
    let served = grpc.local_addr().map_or_else(
        |_| "the port of --listen".to_owned(),
        |address| address.to_string(),
    );
    let elsewhere = Elsewhere {
        text: format!(
            "this is the HTTP port of a kvmaster, for probes and metrics; the pool is at {served}"
        ),
        code: (CODE_METADATA, Code::InvalidArgument.to_wire()),
    };
    let router = http_guard::guard(
        router,
        seat.guard.authority().cloned(),
        seat.config.auth_http_open.clone(),
    );
    let router = probe::redirect_grpc(router, elsewhere);
    let http_stopped = told(stopped.clone());
    let failed = failure.clone();
    let http_tls = tls.server.clone();
    tasks.spawn(async move {
        if let Err(error) = probe::serve(http, router, http_tls, http_stopped).await {
            let _nobody_asks = failed.send(Some(format!("the HTTP port failed: {error}")));
        }
    });
    let clients =
        PoolServer::new(PoolService::new(Arc::clone(seat), watch).calling_with(tls.clone()))
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let nodes = NodesService::new(Arc::clone(seat), stopped.clone())
        .with_certificates(tls.server.as_ref().is_some_and(ServerTls::asks_daemons));
    let nodes = NodesServer::new(nodes).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let serving = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .initial_stream_window_size(4 << 20)
        .initial_connection_window_size(16 << 20)
        .max_concurrent_streams(MOST_CALLS)
        .add_service(clients)
        .add_service(nodes);
    let incoming = framed::serve(Arc::clone(seat), grpc, tls.server, stopped.clone(), tasks);
    let grpc_stopped = told(stopped.clone());
    let failed = failure.clone();
    tasks.spawn(async move {
        let served = serving
            .serve_with_incoming_shutdown(incoming, grpc_stopped)
            .await;
        if let Err(error) = served {
            let _nobody_asks = failed.send(Some(format!("the gRPC port failed: {error}")));
        }
    });
}

async fn told(mut stopped: watch::Receiver<bool>) {
    // An error means that the sender was dropped, which also means stop.
    let _stopped = stopped.wait_for(|stopped| *stopped).await;
}

/// Writes the addresses in one step, so that a reader of the file never sees half of it.
fn write_ready_file(file: &Path, grpc: SocketAddr, http: SocketAddr) -> anyhow::Result<()> {
    let text = serde_json::json!({ "listen": grpc.to_string(), "http": http.to_string() });
    let partial = file.with_extension("partial");
    std::fs::write(&partial, text.to_string())
        .and_then(|()| std::fs::rename(&partial, file))
        .with_context(|| format!("ready file {}", file.display()))
}
