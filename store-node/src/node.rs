//! A running store node: starts its parts, and stops them in order.

use crate::agent::{Agent, Options};
use crate::config::{self, Config, InvalidSetting};
use crate::fence::Limits;
use crate::media::{LOCK_PATIENCE, Media, MediumStatus};
use crate::metrics::Metrics;
use crate::pulls::Pulls;
use crate::reach;
use crate::segment::{Dram, Segment};
use crate::serve::{Identity, Store};
use bytesize::ByteSize;
use kvpool_auth::{Authority, AuthorityError, Credentials};
use kvpool_daemon::advertise::{self, AdvertiseError};
use kvpool_daemon::probe::Elsewhere;
use kvpool_daemon::{
    BindError, Exposed, Guards, Health, bind, http_guard, probe, refuse_if_exposed, tokens,
};
use kvpool_proto::CODE_METADATA;
use kvpool_tls::ServerTls;
use kvpool_transport::machine::host_id;
use kvpool_transport::rdma::{Fabric, Serving};
use kvpool_transport::{shm, tcp};
use kvpool_types::{Code, Length, NodeName};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How often a drain checks whether work is still in progress.
const DRAIN_POLL: Duration = Duration::from_millis(20);
/// How long a node that drains waits for a master. An upgrade restarts masters and nodes at once.
const MASTER_RETURNS: Duration = Duration::from_secs(15);
/// How long a medium may take until it is attached again: a little longer than the time limit of a
/// disk.
const REATTACHES: Duration = Duration::from_secs(12);
/// How long connections may finish their last answers once the node has left the pool.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// The interval at which a node tries a port again that is in use.
const PORT_POLL: Duration = Duration::from_millis(50);
/// How long a node waits for a port before it logs this.
const SILENT_WAIT: Duration = Duration::from_secs(1);

/// Why a node cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The value of a setting cannot be used.
    #[error(transparent)]
    Setting(#[from] InvalidSetting),
    /// There is too little memory for a segment.
    #[error("cannot allocate segment {index} ({size}): {source}")]
    Segment {
        /// The index of the configured segment, from 0.
        index: usize,
        /// The segment's size.
        size: ByteSize,
        /// The system's error.
        source: io::Error,
    },
    /// A TLS certificate or key file cannot be used.
    #[error(transparent)]
    Tls(#[from] kvpool_tls::TlsError),
    /// A port is open to other hosts without TLS, tokens or another guard.
    #[error(transparent)]
    Exposed(#[from] Exposed),
    /// The node cannot listen on a port.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A port stays in use, maybe by a killed node with media.
    #[error("{0}. Or a killed kvstore-node has it: it keeps its ports until its disk has answered")]
    PortKept(BindError),
    /// The node has no address that clients could reach.
    #[error(transparent)]
    Advertise(#[from] AdvertiseError),
    /// Only this host can reach the node, and a master runs on another host.
    #[error(
        "{advertised} is reachable from this host only, and the master {master} is on another: pass --listen \
         0.0.0.0:{port} and --advertise HOST, the name or address by which others reach this host, with \
         TLS or --insecure; or --advertise {advertised} if all workers are on this host"
    )]
    OutOfReach {
        /// The address that the node would advertise.
        advertised: String,
        /// The port on which the node listens.
        port: u16,
        /// The master's address, as the settings give it.
        master: String,
    },
    /// The Unix socket cannot be created.
    #[error("cannot serve the Unix socket {}: {source}; set --shm-path, or --no-shm", path.display())]
    Socket {
        /// The path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The settings require RDMA, and it cannot be used.
    #[error("cannot use RDMA as configured: {0}; check --rdma-device, or pass --no-rdma")]
    Rdma(String),
    /// The machine's boot id cannot be read. Clients compare it to find nodes on their own host.
    #[error("{0}")]
    HostId(io::Error),
    /// The system refuses a file or a thread that the node needs.
    #[error("{what}: {source}")]
    System {
        /// The purpose of the file or thread.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The keys or the policy for tokens cannot be used.
    #[error("cannot judge tokens: {0}")]
    Authority(#[from] AuthorityError),
    /// A medium cannot be opened.
    #[error("cannot use --ssd: {0}")]
    Media(#[from] crate::media::MediaError),
    /// Two metrics have the same name.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError::System { what, source }
}

/// A running node. The drop ends it as a crash would; [`Node::drain`] ends it in order.
#[derive(Debug)]
pub struct Node {
    store: Store,
    agent: Arc<parking_lot::RwLock<Option<Agent>>>,
    tcp: Arc<tcp::ServerHandle>,
    shm: Option<shm::ServerHandle>,
    media: Option<Arc<Media>>,
    http: SocketAddr,
    stop_http: watch::Sender<bool>,
    http_task: JoinHandle<io::Result<()>>,
    drain_timeout: Duration,
    ssd_drain_timeout: Duration,
    move_drain_timeout: Duration,
}

impl Node {
    /// Allocates the memory, starts to serve, and keeps a session with a master from then on. Does not wait
    /// for a master's welcome: see [`Node::is_ready`].
    pub async fn start(config: Config) -> Result<Self, StartError> {
        config.validate()?;
        let masters = config.masters()?;
        let tls = config.tls().open()?;
        // A killed node with media keeps its ports until its disk has ended the last requests.
        let waits_since = (!config.media()?.is_empty()).then(Instant::now);
        let data = listen(&config.listen, "the data port", waits_since).await?;
        let http = listen(&config.http_listen, "the HTTP port", waits_since).await?;
        let data_address = data.local_addr().map_err(system("the data port"))?;
        let http_address = http.local_addr().map_err(system("the HTTP port"))?;
        let given = (!config.advertise.is_empty()).then_some(config.advertise.as_str());
        let advertised = advertise::decide(given, data_address)?;
        if advertised.loopback_only
            && let Some(master) = reach::elsewhere(&masters).await
        {
            let (advertised, master) = (advertised.address.clone(), master.to_owned());
            if given.is_none() {
                let port = data_address.port();
                return Err(StartError::OutOfReach {
                    advertised,
                    port,
                    master,
                });
            }
            tracing::warn!(
                advertised,
                master,
                "the advertised address is loopback: only workers on this host can use this node"
            );
        }
        let authority = config.auth()?.map(Authority::open).transpose()?;
        let token_file = config.token_file.clone();
        let token_file = token_file.or_else(kvpool_auth::token_file_of_environment);
        let credentials = token_file.as_deref();
        let credentials = credentials.map_or_else(Credentials::default, Credentials::file);
        // HTTP ports do not verify client certificates.
        let by_token = Guards {
            tls: tls.server.is_some(),
            tokens: authority.is_some(),
        };
        let guards = Guards {
            tokens: by_token.tokens || tls.knows_callers(),
            ..by_token
        };
        let ports = [
            ("the data port", data_address, guards),
            ("the HTTP port", http_address, by_token),
        ];
        refuse_if_exposed(&ports, config.insecure)?;

        let name = match config.name.as_str() {
            "" => config::default_name(data_address.port()),
            name => name.to_owned(),
        };
        let identity = Identity {
            name: NodeName(name.clone()),
            host: host_id().map_err(StartError::HostId)?,
        };
        check_media(&config).await?;
        let segments = allocate(&config).await?;
        let total: u64 = segments.iter().map(|segment| segment.size().0).sum();
        let metrics = Metrics::new()?;
        tls.watch(&metrics.registry(), "")?;
        tokens::watch_files(&metrics.registry(), "", authority.clone())?;
        tokens::watch_token(&metrics.registry(), "", credentials.clone())?;
        let limits = Limits {
            held_per_client: share(Length(total), config.max_held_ratio),
        };
        let store = Store::new(
            identity,
            segments,
            limits,
            metrics.clone(),
            config.isolation,
        );
        let store = store.guarded(authority.clone());
        let certificates = tls.clone();
        let client_tls = tls.client.map(|tls| tls.among(&masters));
        metrics.watch(&store, Length(total))?;

        let media = open_media(&config, &store).await?;
        let host = Arc::new(store.clone());
        let rdma = serve_rdma(&store, &config).await?;
        let tcp = serve_tcp(data, host.clone(), rdma, tls.server.clone(), &config)
            .map_err(system("the data port"))?;
        let tcp = Arc::new(tcp);
        let shm = match config.no_shm {
            true => None,
            false => Some(serve_shm(host, &name, &config)?),
        };
        let agent = Agent::start(
            store.clone(),
            Options {
                masters,
                credentials: credentials.clone(),
                tls: client_tls.clone(),
                data_address: match tls.server {
                    Some(_) => format!("{}{}", kvpool_tls::DATA_SCHEME, advertised.address),
                    None => advertised.address.clone(),
                },
                shm_path: shm
                    .as_ref()
                    .map_or_else(String::new, |shm| shm.path().to_string_lossy().into_owned()),
                media: media.clone(),
                pulls: Pulls::new(store.clone(), credentials.clone(), client_tls),
                moves_blocks: !config.move_drain_timeout.is_zero(),
                connections: {
                    let tcp = Arc::clone(&tcp);
                    Box::new(move || tcp.connections())
                },
                problems: {
                    let authority = authority.clone();
                    Box::new(move || {
                        let of_files = authority.as_ref().and_then(|it| it.problem());
                        let of_tokens = credentials.problem().into_iter().chain(of_files);
                        of_tokens.chain(certificates.problem()).collect()
                    })
                },
                connect: None,
            },
        )
        .map_err(system("the master session's thread"))?;
        let agent = Arc::new(parking_lot::RwLock::new(Some(agent)));

        let (stop_http, mut stopped) = watch::channel(false);
        let probes = Arc::new(Probes {
            store: store.clone(),
            agent: Arc::clone(&agent),
        });
        let elsewhere = Elsewhere {
            text: "this is the HTTP port of a kvstore-node, for probes and metrics: a pool is served by \
                   its kvmaster, at the port of its --listen"
                .to_owned(),
            code: (CODE_METADATA, Code::InvalidArgument.to_wire()),
        };
        let router = probe::router(metrics.registry(), probes);
        let router = http_guard::guard(router, authority, config.auth_http_open.clone());
        let http_task = tokio::spawn(probe::serve(
            http,
            probe::redirect_grpc(router, elsewhere),
            tls.server.clone(),
            async move {
                // An error means that the node has been dropped, which has the same meaning here.
                let _ = stopped.wait_for(|stopped| *stopped).await;
            },
        ));
        let node = Self {
            store,
            agent,
            tcp,
            shm,
            media,
            http: http_address,
            stop_http,
            http_task,
            drain_timeout: config.drain_timeout,
            ssd_drain_timeout: config.ssd_drain_timeout,
            move_drain_timeout: config.move_drain_timeout,
        };
        if let Some(file) = &config.ready_file {
            node.write_ready_file(file)
                .map_err(system("the ready file"))?;
        }
        tracing::info!(
            node = name,
            data = %data_address,
            advertised = %advertised,
            shm = node.shm_path().map(|path| path.display().to_string()),
            http = %http_address,
            memory = %ByteSize(total),
            "kvstore-node serves"
        );
        Ok(node)
    }

    /// The node's name.
    pub fn name(&self) -> &NodeName {
        &self.store.identity().name
    }

    /// The address of the data port.
    pub fn data_address(&self) -> SocketAddr {
        self.tcp.local_addr()
    }

    /// The address of the HTTP port.
    pub fn http_address(&self) -> SocketAddr {
        self.http
    }

    /// The path of the Unix socket, if there is one.
    pub fn shm_path(&self) -> Option<&Path> {
        self.shm.as_ref().map(shm::ServerHandle::path)
    }

    /// Whether a master has welcomed the node and the session is open.
    pub fn is_ready(&self) -> bool {
        self.agent.read().as_ref().is_some_and(Agent::is_connected)
    }

    /// The status of the node's media. They are offered when a master welcomes the node, and attached soon
    /// after.
    pub fn media(&self) -> Vec<MediumStatus> {
        let media = self.media.as_ref();
        media.map_or_else(Vec::new, |media| media.status())
    }

    /// Drains the node: the master places nothing more here, and new writes and views are refused. Work in
    /// progress may end until `drain_timeout`; then the node says goodbye to the master. Returns true when
    /// nothing was cut off.
    pub async fn drain(mut self) -> bool {
        if self.media.is_some() || !self.move_drain_timeout.is_zero() {
            self.save_blocks().await;
        }
        let deadline = Instant::now() + self.drain_timeout;
        // Set first, so that it is true when the master learns of the drain.
        self.store.drain();
        if let Some(agent) = self.agent.read().as_ref() {
            agent.drain();
        }
        let idle = self.wait_until_idle(deadline).await;

        let agent = self.agent.write().take();
        let (tcp, shm, media) = (Arc::clone(&self.tcp), self.shm.take(), self.media.take());
        let ended = tokio::task::spawn_blocking(move || {
            if let Some(agent) = agent {
                agent.leave();
            }
            if let Some(media) = media
                && !media.detach(deadline.max(Instant::now() + LAST_ANSWERS))
            {
                // Its threads wait for a disk. The end of the process ends them.
                std::mem::forget(media);
            }
            let deadline = Instant::now() + LAST_ANSWERS;
            let shm_ended = shm.is_none_or(|shm| shm.drain(deadline));
            tcp.drain(deadline) && shm_ended
        });
        let ended = ended.await.unwrap_or(false);
        self.stop_http.send_replace(true);
        match (&mut self.http_task).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "HTTP server failed"),
            Err(error) => tracing::error!(%error, "HTTP server's task failed"),
        }
        tracing::info!(cut_off = !(idle && ended), "kvstore-node stopped");
        idle && ended
    }

    /// Lets the master copy the blocks in memory to the media or move them to other nodes, most
    /// recently used first. Blocks are served meanwhile.
    async fn save_blocks(&self) {
        let begun = Instant::now();
        let for_media = self.media.as_ref().map(|_| self.ssd_drain_timeout);
        let deadline = begun + self.move_drain_timeout.max(for_media.unwrap_or_default());
        let mut heard = begun;
        if let Some(agent) = self.agent.read().as_ref() {
            agent.drain();
        }
        loop {
            let (saved, is_connected) = {
                let agent = self.agent.read();
                let agent = agent.as_ref();
                (
                    agent.map_or(Some(0), Agent::saved),
                    agent.is_some_and(Agent::is_connected),
                )
            };
            let media = self.media.as_ref();
            // The master waits for a medium that is attached again while the node drains.
            let now = Instant::now();
            let may_be_copied = media.is_some_and(|media| {
                media.is_attached() || now < begun + REATTACHES && media.may_be_attached()
            });
            let can_be_saved = may_be_copied || !self.move_drain_timeout.is_zero();
            if is_connected {
                heard = now;
            }
            // A medium is attached by a master. Without a master, it is unknown which blocks can be
            // saved.
            let is_hopeless = match is_connected {
                true => !can_be_saved,
                false => now >= heard + MASTER_RETURNS,
            };
            if saved.is_some() || is_hopeless || now >= deadline {
                let took_ms = begun.elapsed().as_millis();
                match saved {
                    Some(0) => tracing::info!(
                        took_ms,
                        "blocks were moved or copied before the stop, and none is lost"
                    ),
                    // The master tells their number, and not why.
                    Some(lost) => tracing::warn!(
                        lost,
                        took_ms,
                        "blocks were moved or copied before the stop, and some are lost: they found no place on an \
                         SSD of this node or on another node. Before the next stop, `kvctl node drain` says why"
                    ),
                    None if self.store.census().records == 0 => {
                        tracing::info!(took_ms, "the node has no blocks in memory to save");
                    }
                    None if is_connected && is_hopeless => tracing::warn!(
                        took_ms,
                        "no medium takes the blocks in memory: those without a copy are lost"
                    ),
                    None => tracing::warn!(
                        took_ms,
                        "saving blocks ended at its timeout: blocks without a copy are lost"
                    ),
                }
                return;
            }
            tokio::time::sleep(DRAIN_POLL).await;
        }
    }

    async fn wait_until_idle(&self, deadline: Instant) -> bool {
        loop {
            let census = self.store.census();
            if census.receives + census.holds + census.pins == 0 {
                return true;
            }
            if Instant::now() >= deadline {
                tracing::warn!(
                    receives = census.receives,
                    holds = census.holds,
                    pins = census.pins,
                    "drain timeout passed, cutting off work in progress"
                );
                return false;
            }
            tokio::time::sleep(DRAIN_POLL).await;
        }
    }

    /// Writes the addresses in one step, so that no reader of the file sees half of it.
    fn write_ready_file(&self, file: &Path) -> io::Result<()> {
        let text = serde_json::json!({
            "listen": self.data_address().to_string(),
            "http": self.http.to_string(),
            "shm": self.shm_path(),
        });
        let partial = file.with_extension("partial");
        std::fs::write(&partial, text.to_string())?;
        std::fs::rename(&partial, file)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.agent.write().take();
        self.http_task.abort();
    }
}

/// The state that the probes report.
struct Probes {
    store: Store,
    agent: Arc<parking_lot::RwLock<Option<Agent>>>,
}

impl Health for Probes {
    fn healthy(&self) -> Result<(), String> {
        match &*self.agent.read() {
            Some(agent) if !agent.is_alive() => Err("the master session's thread has ended".into()),
            _ => Ok(()),
        }
    }

    fn ready(&self) -> Result<(), String> {
        if self.store.is_draining() {
            return Err("the node is draining".into());
        }
        match &*self.agent.read() {
            Some(agent) if agent.is_connected() => Ok(()),
            _ => Err("no master has welcomed the node".into()),
        }
    }
}

/// Finds a wrong path of `--ssd` before the memory is touched, which takes minutes for a large segment.
async fn check_media(config: &Config) -> Result<(), StartError> {
    let media = config.media()?;
    let check = move || {
        media.iter().try_for_each(|one| match one.in_directory {
            true => kvpool_disk::check_directory(&one.path),
            false => kvpool_disk::check(&one.path, one.size.map(|size| size.0)),
        })
    };
    let checked = tokio::task::spawn_blocking(check).await;
    let checked = checked.map_err(|panic| system("the media")(io::Error::other(panic)))?;
    checked.map_err(crate::media::MediaError::from)?;
    Ok(())
}

/// Opens the media of `--ssd`; `None` if there are none.
async fn open_media(config: &Config, store: &Store) -> Result<Option<Arc<Media>>, StartError> {
    let media = config.media()?;
    if media.is_empty() {
        return Ok(None);
    }
    let store = store.clone();
    let opened = tokio::task::spawn_blocking(move || Media::open(&media, store));
    let opened = opened
        .await
        .map_err(|panic| system("the media")(io::Error::other(panic)))?;
    Ok(Some(Arc::new(opened?)))
}

async fn allocate(config: &Config) -> Result<Vec<Box<dyn Segment>>, StartError> {
    let mut segments: Vec<Box<dyn Segment>> = Vec::with_capacity(config.segment.len());
    for (index, &size) in config.segment.iter().enumerate() {
        let hugepages = config.hugepages;
        tracing::info!(segment = index, %size, "touching the segment's memory: the node serves when this ends");
        let allocated = tokio::task::spawn_blocking(move || {
            Dram::allocate(
                Length(size.0),
                hugepages,
                &format!("kvpool-segment-{index}"),
            )
        });
        let allocated = allocated
            .await
            .unwrap_or_else(|panic| Err(io::Error::other(panic)));
        let segment = allocated.map_err(|source| StartError::Segment {
            index,
            size,
            source,
        })?;
        segments.push(Box::new(segment));
    }
    Ok(segments)
}

fn serve_tcp(
    listener: TcpListener,
    host: Arc<Store>,
    rdma: Option<Arc<Serving>>,
    tls: Option<ServerTls>,
    config: &Config,
) -> io::Result<tcp::ServerHandle> {
    let listener = listener.into_std()?;
    listener.set_nonblocking(false)?;
    let options = tcp::ServerOptions {
        max_connections: config.max_connections,
        rdma,
        tls,
        ..tcp::ServerOptions::default()
    };
    tcp::Server::start(listener, host, options)
}

/// Opens the RDMA ports and registers the memory with them. If there is no port, or the memory cannot be
/// locked, the node logs this once. It is an error only if the settings name a device.
async fn serve_rdma(store: &Store, config: &Config) -> Result<Option<Arc<Serving>>, StartError> {
    if config.no_rdma {
        return Ok(None);
    }
    let (options, memory) = (config.rdma_options(), store.whole_segments());
    let opened = tokio::task::spawn_blocking(move || {
        let fabric = Fabric::shared(&options).map_err(|reason| reason.to_string())?;
        let names: Vec<String> = fabric.rails().iter().map(|r| r.name().to_owned()).collect();
        let serving = Serving::new(fabric);
        for whole in &memory {
            serving.register(whole).map_err(|error| {
                format!(
                    "cannot register {} of memory: {error} (`ulimit -l` must allow it)",
                    ByteSize(whole.length().0)
                )
            })?;
        }
        Ok((Arc::new(serving), names.join(", ")))
    });
    let opened = opened.await.unwrap_or_else(|panic| Err(panic.to_string()));
    match opened {
        Ok((serving, ports)) => {
            tracing::info!(ports, "RDMA is on");
            Ok(Some(serving))
        }
        Err(reason) if config.rdma_device.is_empty() => {
            tracing::info!(reason, "RDMA is off");
            Ok(None)
        }
        Err(reason) => Err(StartError::Rdma(reason)),
    }
}

fn serve_shm(
    host: Arc<Store>,
    name: &str,
    config: &Config,
) -> Result<shm::ServerHandle, StartError> {
    let path = if config.shm_path.as_os_str().is_empty() {
        config::default_socket(name)
    } else {
        config.shm_path.clone()
    };
    config::check_socket_path(&path)?;
    let options = shm::ServerOptions {
        max_connections: config.max_connections,
        ..shm::ServerOptions::default()
    };
    let served = make_private_directory(&path)
        // The path must be absolute, since clients open the socket from any directory.
        .and_then(|()| std::path::absolute(&path))
        .and_then(|path| shm::Server::start(&path, host, options));
    served.map_err(|source| StartError::Socket { path, source })
}

/// Creates the socket's directory, readable for this user only, if it does not exist.
fn make_private_directory(socket: &Path) -> io::Result<()> {
    match socket.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory),
        _ => Ok(()),
    }
}

/// Listens on a port. With `waits_since` it waits while the port is in use, until [`LOCK_PATIENCE`] has passed since
/// then.
async fn listen(
    addr: &str,
    what: &str,
    waits_since: Option<Instant>,
) -> Result<TcpListener, StartError> {
    let mut is_said = false;
    loop {
        match (bind(addr, what).await, waits_since) {
            (Err(error @ BindError::InUse { .. }), Some(since)) => {
                let waited = since.elapsed();
                if waited >= LOCK_PATIENCE {
                    return Err(StartError::PortKept(error));
                }
                if waited >= SILENT_WAIT && !std::mem::replace(&mut is_said, true) {
                    tracing::info!(
                        addr,
                        patience = ?LOCK_PATIENCE,
                        "{what} is in use, maybe by a killed node whose disk has not answered; waiting for it"
                    );
                }
            }
            (bound, _) => return Ok(bound?),
        }
        tokio::time::sleep(PORT_POLL).await;
    }
}

fn share(total: Length, ratio: f64) -> Length {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share between 0 and 1 of a size: to some bytes more or less"
    )]
    Length((total.0 as f64 * ratio) as u64)
}
