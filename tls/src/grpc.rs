//! gRPC channels to addresses `http://host:port` and `https://host:port`.

#[cfg(test)]
mod tests;
mod watched;

use crate::TLS_SCHEME;
use crate::addresses;
use crate::client::ClientTls;
use crate::error::TlsError;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::{BoxError, ServiceExt as _, service_fn};
use watched::Watched;
pub use watched::refusal;

/// The message for an `https://` address without a configured authority.
pub const NO_AUTHORITY: &str = "the address is https://, and no authority is trusted: name its \
    certificate with --tls-ca or KVPOOL_TLS_CA";

/// The message for an `http://` address that a master or etcd named to a caller with TLS.
pub const PLAIN_REFUSED: &str = "the address has no TLS, and this process calls masters with TLS only: \
    start that master with --tls-cert and --tls-key";

/// The message for an `https://` address whose port does not speak TLS.
const NO_TLS: &str = "the port does not speak TLS: call it with http://, or give it a certificate";

/// The way to one server.
#[derive(Clone, Debug)]
pub struct GrpcWay {
    endpoint: Endpoint,
    /// The client's side and `host:port`, for TLS.
    tls: Option<(ClientTls, String)>,
}

impl GrpcWay {
    /// To `address`. An `https://` address needs `tls`. An `http://` address is refused if `tls` refuses plain
    /// addresses ([`ClientTls::among`]).
    pub fn to(address: &str, tls: Option<&ClientTls>) -> Result<Self, GrpcAddressError> {
        let Some(authority) = address.strip_prefix(TLS_SCHEME) else {
            if tls.is_some_and(ClientTls::refuses_plain) {
                return Err(GrpcAddressError::Plain);
            }
            return Ok(Self {
                endpoint: Endpoint::from_shared(address.to_owned())?,
                tls: None,
            });
        };
        let authority = authority.trim_end_matches('/').to_owned();
        let tls = tls.ok_or(GrpcAddressError::NoAuthority)?;
        tls.name_of(&authority)?;
        Ok(Self {
            // tonic leaves TLS to the connector when the address is plain.
            endpoint: Endpoint::from_shared(format!("http://{authority}"))?,
            tls: Some((tls.clone(), authority)),
        })
    }

    /// The same with other options.
    #[must_use]
    pub fn with(self, change: impl FnOnce(Endpoint) -> Endpoint) -> Self {
        Self {
            endpoint: change(self.endpoint),
            ..self
        }
    }

    /// The `host:port` that it leads to.
    #[must_use]
    pub fn authority(&self) -> String {
        if let Some((_, authority)) = &self.tls {
            return authority.clone();
        }
        let uri = self.endpoint.uri();
        let (host, port) = (uri.host().unwrap_or_default(), uri.port_u16());
        format!("{host}:{}", port.unwrap_or(HTTP_PORT))
    }

    /// A channel that connects when it is first used. It takes the current certificates each time.
    pub fn lazy(self) -> Channel {
        match self.tls {
            None => {
                let connect = plain_connector(&self.endpoint);
                self.endpoint
                    .connect_with_connector_lazy(service_fn(connect))
            }
            Some((tls, authority)) => {
                let connect = move |_: Uri| connect(tls.clone(), authority.clone());
                self.endpoint
                    .connect_with_connector_lazy(service_fn(connect))
            }
        }
    }

    /// A connected channel.
    pub async fn connect(self) -> Result<Channel, tonic::transport::Error> {
        match self.tls {
            None => {
                let connect = plain_connector(&self.endpoint);
                let connected = self.endpoint.connect_with_connector(service_fn(connect));
                connected.await
            }
            Some((tls, authority)) => {
                let connect = move |_: Uri| connect(tls.clone(), authority.clone());
                let connected = self.endpoint.connect_with_connector(service_fn(connect));
                connected.await
            }
        }
    }

    /// A channel that is connected to one of `found`, the addresses of [`authority`](Self::authority).
    /// The endpoint's time to connect bounds the connection alone, and no lookup.
    pub async fn connect_at(
        self,
        found: Vec<SocketAddr>,
    ) -> Result<Channel, tonic::transport::Error> {
        match self.tls {
            None => {
                let connect = move |uri: Uri| {
                    let authority = uri.authority().map(ToString::to_string);
                    connect_plain(found.clone(), authority.unwrap_or_default())
                };
                let connected = self.endpoint.connect_with_connector(service_fn(connect));
                connected.await
            }
            Some((tls, authority)) => {
                let connect =
                    move |_: Uri| connect_to(found.clone(), tls.clone(), authority.clone());
                let connected = self.endpoint.connect_with_connector(service_fn(connect));
                connected.await
            }
        }
    }
}

/// The port of an `http://` address without one.
const HTTP_PORT: u16 = 80;

/// Why an address cannot be called.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrpcAddressError {
    /// It is no address.
    #[error(transparent)]
    Bad(#[from] tonic::transport::Error),
    /// It has a name that no certificate can have.
    #[error(transparent)]
    Name(#[from] TlsError),
    /// It needs TLS, for which no authority is named.
    #[error("{NO_AUTHORITY}")]
    NoAuthority,
    /// It is plain, and the caller was given addresses with TLS alone.
    #[error("{PLAIN_REFUSED}")]
    Plain,
}

type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The stream under gRPC.
type Stream<S> = TokioIo<Watched<S>>;

/// Connects as tonic does by itself: to the address of a name that answers first, within the endpoint's time.
fn plain_connector(
    endpoint: &Endpoint,
) -> impl Fn(Uri) -> BoxFuture<'static, Result<Stream<TcpStream>, BoxError>> + Clone + Send + 'static
{
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(endpoint.get_connect_timeout());
    move |uri: Uri| {
        let connector = connector.clone();
        Box::pin(async move {
            let authority = uri.authority().map(ToString::to_string);
            let stream = connector.oneshot(uri).await?.into_inner();
            let watched = Watched::new(stream, authority.unwrap_or_default(), false);
            Ok(TokioIo::new(watched))
        })
    }
}

/// Connects to the first of `found`, the addresses of `authority`, that answers.
async fn connect_plain(found: Vec<SocketAddr>, authority: String) -> io::Result<Stream<TcpStream>> {
    let attempt = |address: SocketAddr| async move {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok::<_, io::Error>(stream)
    };
    let connected = addresses::first_of(found, attempt).await;
    let stream = connected.unwrap_or_else(|| Err(io::Error::other("it names no host")))?;
    Ok(TokioIo::new(Watched::new(stream, authority, false)))
}

async fn connect(tls: ClientTls, authority: String) -> io::Result<Stream<TlsStream<TcpStream>>> {
    let found = addresses::resolve(&authority).await?;
    connect_to(found, tls, authority).await
}

/// Connects to the first of `found`, the addresses of `authority`, that makes the handshake.
async fn connect_to(
    found: Vec<SocketAddr>,
    tls: ClientTls,
    authority: String,
) -> io::Result<Stream<TlsStream<TcpStream>>> {
    let name = tls.name_of(&authority).map_err(io::Error::other)?;
    let connector = TlsConnector::from(tls.grpc());
    let attempt = |address: SocketAddr| {
        let (connector, name) = (connector.clone(), name.clone());
        async move {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let connected = connector.connect(name, stream).await;
            connected.map_err(|error| match speaks_no_tls(&error) {
                true => io::Error::new(error.kind(), NO_TLS),
                false => error,
            })
        }
    };
    let connected = addresses::first_of(found, attempt).await;
    let stream = connected.unwrap_or_else(|| Err(io::Error::other("it names no host")))?;
    Ok(TokioIo::new(Watched::new(stream, authority, true)))
}

/// Whether the first bytes of the peer are no TLS.
fn speaks_no_tls(error: &io::Error) -> bool {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
    matches!(cause, Some(rustls::Error::InvalidMessage(_)))
}
