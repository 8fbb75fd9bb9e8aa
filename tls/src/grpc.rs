//! gRPC channels to addresses `http://host:port` and `https://host:port`.

use crate::TLS_SCHEME;
use crate::client::ClientTls;
use crate::error::TlsError;
use hyper_util::rt::TokioIo;
use std::io;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

/// What is wrong with an `https://` address where no authority is known.
pub const NO_AUTHORITY: &str = "the address is https://, and no authority is trusted: name its \
    certificate with --tls-ca or KVPOOL_TLS_CA";

/// What is wrong with an `http://` address that a caller with TLS learned of.
pub const PLAIN_REFUSED: &str = "the address has no TLS, and this process calls masters with TLS only: \
    start that master with --tls-cert and --tls-key";

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
            tls: self.tls,
        }
    }

    /// A channel that connects when it is first used. It takes the current certificates each time.
    pub fn lazy(self) -> Channel {
        match self.tls {
            None => self.endpoint.connect_lazy(),
            Some((tls, authority)) => {
                self.endpoint
                    .connect_with_connector_lazy(service_fn(move |_: Uri| {
                        connect(tls.clone(), authority.clone())
                    }))
            }
        }
    }

    /// A connected channel.
    pub async fn connect(self) -> Result<Channel, tonic::transport::Error> {
        match self.tls {
            None => self.endpoint.connect().await,
            Some((tls, authority)) => {
                self.endpoint
                    .connect_with_connector(service_fn(move |_: Uri| {
                        connect(tls.clone(), authority.clone())
                    }))
                    .await
            }
        }
    }
}

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

async fn connect(tls: ClientTls, authority: String) -> io::Result<TokioIo<TlsStream<TcpStream>>> {
    let name = tls.name_of(&authority).map_err(io::Error::other)?;
    let stream = TcpStream::connect(&authority).await?;
    stream.set_nodelay(true)?;
    let stream = TlsConnector::from(tls.grpc()).connect(name, stream).await?;
    Ok(TokioIo::new(stream))
}
