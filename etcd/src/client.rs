//! The connections to etcd, and the endpoints that a call tries.

use crate::error::{Error, wants_new_token};
use crate::generated;
use parking_lot::Mutex;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};

/// The largest response accepted, in bytes. etcd does not limit its responses.
const MAX_ANSWER_BYTES: usize = 256 << 20;

/// How to connect to etcd.
#[derive(Clone)]
pub struct Options {
    /// Client addresses: `host:port`, optionally with `http://` or `https://`.
    pub endpoints: Vec<String>,
    /// User name and password, if etcd requires authentication.
    pub user: Option<(String, String)>,
    /// The TLS certificates, if etcd uses TLS.
    pub tls: Option<Tls>,
    /// Timeout of one call at one endpoint.
    pub request_timeout: Duration,
}

impl Options {
    /// Connections without TLS to the endpoints, with a timeout of 1 s for each call.
    pub fn new(endpoints: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            user: None,
            tls: None,
            request_timeout: Duration::from_secs(1),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("endpoints", &self.endpoints)
            .field("user", &self.user.as_ref().map(|(name, _)| name))
            .field("tls", &self.tls)
            .field("request_timeout", &self.request_timeout)
            .finish()
    }
}

/// The PEM files of TLS connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The authority that signed etcd's certificate.
    pub ca: PathBuf,
    /// The client's certificate, if etcd requires it. It needs `key`.
    pub cert: Option<PathBuf>,
    /// The key of `cert`.
    pub key: Option<PathBuf>,
}

impl Tls {
    fn read(&self) -> Result<ClientTlsConfig, Error> {
        let file = |path: &Path| {
            std::fs::read(path).map_err(|e| Error::Other {
                reason: format!("{}: {e}", path.display()),
            })
        };
        let mut config =
            ClientTlsConfig::new().ca_certificate(Certificate::from_pem(file(&self.ca)?));
        match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => {
                config = config.identity(Identity::from_pem(file(cert)?, file(key)?));
            }
            (None, None) => {}
            _ => {
                return Err(Error::Other {
                    reason: "etcd TLS: the client certificate and its key must be set together"
                        .into(),
                });
            }
        }
        Ok(config)
    }
}

/// A handle to etcd, cheap to clone. Calls may come from any runtime with a timer. Connections live in the runtime in
/// which the client was made.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<Inner>,
    request_timeout: Duration,
}

#[derive(Debug)]
struct Inner {
    slots: Vec<Slot>,
    /// The endpoint that answered last, or the next endpoint after a failure.
    preferred: AtomicUsize,
    user: Option<(String, String)>,
    token: Mutex<Option<MetadataValue<Ascii>>>,
    home: Handle,
}

/// One endpoint and its connection, which opens on first use.
#[derive(Debug)]
struct Slot {
    address: String,
    endpoint: Endpoint,
    connection: Mutex<Connection>,
}

#[derive(Debug)]
struct Connection {
    /// Counts the connections to this endpoint, so that two callers do not replace the same connection twice.
    number: u64,
    channel: Channel,
    /// When this connection last had an answer.
    answered: Option<Instant>,
}

/// The connection and token of one call.
pub(crate) struct Link {
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
}

impl Link {
    pub(crate) fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        request
    }

    pub(crate) fn kv(self) -> generated::kv_client::KvClient<Channel> {
        generated::kv_client::KvClient::new(self.channel)
            .max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn watch(self) -> generated::watch_client::WatchClient<Channel> {
        generated::watch_client::WatchClient::new(self.channel)
            .max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn lease(self) -> generated::lease_client::LeaseClient<Channel> {
        generated::lease_client::LeaseClient::new(self.channel)
    }

    pub(crate) fn maintenance(self) -> generated::maintenance_client::MaintenanceClient<Channel> {
        generated::maintenance_client::MaintenanceClient::new(self.channel)
    }

    pub(crate) fn cluster(self) -> generated::cluster_client::ClusterClient<Channel> {
        generated::cluster_client::ClusterClient::new(self.channel)
    }

    pub(crate) fn auth(self) -> generated::auth_client::AuthClient<Channel> {
        generated::auth_client::AuthClient::new(self.channel)
    }
}

/// Whether a call may be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// Try every endpoint in turn until one answers: the call is idempotent.
    Every,
    /// Try one endpoint: on an error the caller must find out whether the call took effect.
    Once,
}

impl Client {
    /// A client of the endpoints. Nothing is connected yet. Must be called in a runtime.
    pub fn new(options: &Options) -> Result<Self, Error> {
        let other = |reason: String| Error::Other { reason };
        let home = Handle::try_current().map_err(|e| other(e.to_string()))?;
        let tls = options.tls.as_ref().map(Tls::read).transpose()?;
        let slots = options
            .endpoints
            .iter()
            .map(|address| Slot::new(address, tls.as_ref(), options.request_timeout, &home))
            .collect::<Result<Vec<_>, _>>()?;
        if slots.is_empty() {
            return Err(other("no etcd endpoint is configured".into()));
        }
        Ok(Self {
            inner: Arc::new(Inner {
                slots,
                preferred: AtomicUsize::new(0),
                user: options.user.clone(),
                token: Mutex::new(None),
                home,
            }),
            request_timeout: options.request_timeout,
        })
    }

    /// The same client with another timeout of one call at one endpoint.
    #[must_use]
    pub fn within(&self, request_timeout: Duration) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            request_timeout,
        }
    }

    /// The endpoints, as they were configured.
    pub fn endpoints(&self) -> impl Iterator<Item = &str> {
        self.inner.slots.iter().map(|slot| slot.address.as_str())
    }

    pub(crate) fn request_timeout(&self) -> Duration {
        self.request_timeout
    }

    /// Calls the endpoint that answered last. A call that may be repeated then tries the other
    /// endpoints in turn.
    pub(crate) async fn call<T, F, Fut>(&self, repeat: Repeat, make: F) -> Result<T, Error>
    where
        F: Fn(Link) -> Fut,
        Fut: Future<Output = Result<T, Status>>,
    {
        self.call_within(repeat, self.request_timeout, make).await
    }

    /// Like [`Client::call`], with another timeout for each endpoint.
    pub(crate) async fn call_within<T, F, Fut>(
        &self,
        repeat: Repeat,
        limit: Duration,
        make: F,
    ) -> Result<T, Error>
    where
        F: Fn(Link) -> Fut,
        Fut: Future<Output = Result<T, Status>>,
    {
        let count = self.inner.slots.len();
        let first = self.inner.preferred.load(Ordering::Relaxed) % count;
        let attempts = match repeat {
            Repeat::Every => count,
            Repeat::Once => 1,
        };
        let mut failed = Error::unavailable("no endpoint was tried");
        for attempt in 0..attempts {
            let index = (first + attempt) % count;
            match self.call_at(index, limit, &make).await {
                Err(error @ Error::Unavailable { .. }) => {
                    self.prefer((index + 1) % count);
                    failed = error;
                }
                answer => {
                    self.prefer(index);
                    return answer;
                }
            }
        }
        Err(failed)
    }

    /// Makes a call at one endpoint, twice if the first token was refused.
    pub(crate) async fn call_at<T, F, Fut>(
        &self,
        index: usize,
        limit: Duration,
        make: F,
    ) -> Result<T, Error>
    where
        F: Fn(Link) -> Fut,
        Fut: Future<Output = Result<T, Status>>,
    {
        // Invariant: there is at least one slot, so the remainder names one.
        let slot = &self.inner.slots[index % self.inner.slots.len()];
        let (number, channel) = slot.connection();
        let begun = Instant::now();
        let once = async {
            let token = self.token(&channel).await?;
            let answer = make(Link {
                channel: channel.clone(),
                token: token.clone(),
            });
            match answer.await {
                // etcd did nothing, so even a call that is not idempotent may be repeated.
                Err(status) if self.inner.user.is_some() && wants_new_token(&status) => {
                    self.forget(token.as_ref());
                    let token = self.token(&channel).await?;
                    let channel = channel.clone();
                    make(Link { channel, token }).await
                }
                answer => answer,
            }
        };
        match tokio::time::timeout(limit, once).await {
            Ok(Ok(answer)) => {
                slot.note_answer(number);
                Ok(answer)
            }
            Ok(Err(status)) => Err(match Error::from(status) {
                Error::Unavailable { reason } => {
                    Error::unavailable(format!("{}: {reason}", slot.address))
                }
                error => error,
            }),
            Err(_) => {
                // TCP detects a host that vanished without closing its sockets only after minutes. Other calls on
                // this connection have deadlines of their own.
                slot.renew(number, begun, &self.inner.home);
                Err(Error::unavailable(format!(
                    "{}: no answer within {limit:?}",
                    slot.address
                )))
            }
        }
    }

    fn prefer(&self, index: usize) {
        if self.inner.preferred.load(Ordering::Relaxed) != index {
            self.inner.preferred.store(index, Ordering::Relaxed);
        }
    }

    /// The token of the configured user.
    async fn token(&self, channel: &Channel) -> Result<Option<MetadataValue<Ascii>>, Status> {
        let Some((name, password)) = &self.inner.user else {
            return Ok(None);
        };
        if let Some(token) = self.inner.token.lock().clone() {
            return Ok(Some(token));
        }
        let request = generated::AuthenticateRequest {
            name: name.clone(),
            password: password.clone(),
        };
        let link = Link {
            channel: channel.clone(),
            token: None,
        };
        let answer = link.auth().authenticate(request).await?.into_inner();
        let token = MetadataValue::try_from(answer.token).map_err(|_| {
            Status::internal("etcd returned a token that is not a valid header value")
        })?;
        *self.inner.token.lock() = Some(token.clone());
        Ok(Some(token))
    }

    /// Forgets a token that was refused, unless it has been replaced already.
    fn forget(&self, refused: Option<&MetadataValue<Ascii>>) {
        let mut token = self.inner.token.lock();
        if token.as_ref() == refused {
            *token = None;
        }
    }
}

impl Slot {
    fn new(
        address: &str,
        tls: Option<&ClientTlsConfig>,
        limit: Duration,
        home: &Handle,
    ) -> Result<Self, Error> {
        let refused = |reason: &str| Error::Other {
            reason: format!("etcd endpoint {address}: {reason}"),
        };
        let uri = match (address.split_once("://"), tls) {
            (None, None) => format!("http://{address}"),
            (None, Some(_)) => format!("https://{address}"),
            (Some(("http", _)), None) | (Some(("https", _)), Some(_)) => address.to_owned(),
            (Some(("http", _)), Some(_)) => {
                return Err(refused(
                    "the address says http://, but TLS certificates are configured",
                ));
            }
            (Some(("https", _)), None) => {
                return Err(refused(
                    "the address says https://, but no CA is configured",
                ));
            }
            _ => return Err(refused("the address is not host:port")),
        };
        // No HTTP/2 pings: etcd closes a connection that sends pings more often than every 5 s, and rarer pings
        // detect a failure too late. Instead every call has a deadline, and watches request progress.
        let mut endpoint = Endpoint::from_shared(uri)
            .map_err(|e| refused(&e.to_string()))?
            .connect_timeout(limit)
            .tcp_nodelay(true);
        if let Some(tls) = tls {
            endpoint = endpoint
                .tls_config(tls.clone())
                .map_err(|e| refused(&e.to_string()))?;
        }
        let connection = Mutex::new(Connection {
            number: 0,
            channel: connect(&endpoint, home),
            answered: None,
        });
        Ok(Self {
            address: address.to_owned(),
            endpoint,
            connection,
        })
    }

    fn connection(&self) -> (u64, Channel) {
        let connection = self.connection.lock();
        (connection.number, connection.channel.clone())
    }

    fn note_answer(&self, number: u64) {
        let mut connection = self.connection.lock();
        if connection.number == number {
            connection.answered = Some(Instant::now());
        }
    }

    /// Makes the next call open a new connection, unless another caller has replaced connection
    /// `number` already, or the connection had an answer after `begun`: then only the call is slow.
    fn renew(&self, number: u64, begun: Instant, home: &Handle) {
        let mut connection = self.connection.lock();
        let is_alive = connection.answered.is_some_and(|at| at > begun);
        if connection.number == number && !is_alive {
            *connection = Connection {
                number: number + 1,
                channel: connect(&self.endpoint, home),
                answered: None,
            };
        }
    }
}

/// Tasks of the runtime that made a connection serve it. This home runtime runs all the time.
fn connect(endpoint: &Endpoint, home: &Handle) -> Channel {
    let _home = home.enter();
    endpoint.connect_lazy()
}
