//! Connections that rustls encrypts, without kvpool's own code.

use crate::security::SERVER_NAME;
use anyhow::Context as _;
use kvpool_tls::rustls::crypto::ring::default_provider;
use kvpool_tls::rustls::pki_types::pem::PemObject as _;
use kvpool_tls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use kvpool_tls::rustls::version::TLS13;
use kvpool_tls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
};
use std::io::{self, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

/// The settings of the far end.
pub(crate) fn server(cert: &Path, key: &Path) -> anyhow::Result<Arc<ServerConfig>> {
    let cert = CertificateDer::from_pem_file(cert).context("cannot read the certificate")?;
    let key = PrivateKeyDer::from_pem_file(key).context("cannot read the key")?;
    let config = ServerConfig::builder_with_provider(default_provider().into())
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![cert], key)?;
    Ok(Arc::new(config))
}

/// The settings of the near end.
pub(crate) fn client(ca: &Path) -> anyhow::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca).context("cannot read the authority")?)?;
    let config = ClientConfig::builder_with_provider(default_provider().into())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(config))
}

/// The near end of a connection.
pub(super) fn connect(
    socket: TcpStream,
    config: Arc<ClientConfig>,
) -> io::Result<StreamOwned<ClientConnection, TcpStream>> {
    let name = ServerName::try_from(SERVER_NAME).map_err(io::Error::other)?;
    let session = ClientConnection::new(config, name).map_err(io::Error::other)?;
    Ok(StreamOwned::new(session, socket))
}

/// The far end of a connection.
pub(super) fn accept(
    socket: TcpStream,
    config: Arc<ServerConfig>,
) -> io::Result<StreamOwned<ServerConnection, Wide>> {
    let session = ServerConnection::new(config).map_err(io::Error::other)?;
    Ok(StreamOwned::new(
        session,
        Wide(BufReader::with_capacity(WIDTH, socket)),
    ))
}

/// The bytes of one receive. rustls alone asks for 4 KiB at a time.
const WIDTH: usize = 64 << 10;

/// A socket that receives in large pieces.
#[derive(Debug)]
pub(super) struct Wide(BufReader<TcpStream>);

impl Read for Wide {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.0.read(room)
    }
}

impl Write for Wide {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.get_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.get_mut().flush()
    }
}
