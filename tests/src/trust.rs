//! TLS for a whole test binary: pools, clients and HTTP requests use it once [`trust`] was called.

use kvpool_client::ClientFiles;
use kvpool_tls::rustls::{ClientConnection, StreamOwned};
use kvpool_tls::{ALPN_HTTP, ClientTls};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};

static TRUSTED: OnceLock<ClientFiles> = OnceLock::new();

/// A stream that speaks HTTP.
pub(crate) trait Stream: Read + Write {}

impl<S: Read + Write> Stream for S {}

/// Makes every later client and request of this process use TLS with these files. Later calls change
/// nothing.
pub fn trust(files: ClientFiles) {
    let _already = TRUSTED.set(files);
}

/// What clients trust; nothing where [`trust`] was not called.
pub fn trusted() -> ClientFiles {
    TRUSTED.get().cloned().unwrap_or_default()
}

/// What the addresses of masters begin with.
pub fn scheme() -> &'static str {
    match TRUSTED.get() {
        Some(_) => "https://",
        None => "http://",
    }
}

/// The stream of an HTTP request to `address`.
pub(crate) fn stream(stream: TcpStream, address: &str) -> anyhow::Result<Box<dyn Stream>> {
    let Some(tls) = ClientTls::open(&trusted())? else {
        return Ok(Box::new(stream));
    };
    let mut config = (*tls.grpc()).clone();
    config.alpn_protocols = vec![ALPN_HTTP.to_vec()];
    let connection = ClientConnection::new(Arc::new(config), tls.name_of(address)?)?;
    Ok(Box::new(StreamOwned::new(connection, stream)))
}
