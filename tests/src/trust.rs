//! TLS and a token for a whole test binary: pools, clients and HTTP requests use them once [`trust`] and [`show`]
//! were called.

use kvpool_client::ClientFiles;
use kvpool_tls::rustls::{ClientConnection, StreamOwned};
use kvpool_tls::{ALPN_HTTP, ClientTls};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

static TRUSTED: OnceLock<ClientFiles> = OnceLock::new();
static SHOWN: OnceLock<PathBuf> = OnceLock::new();

/// A stream that speaks HTTP.
pub(crate) trait Stream: Read + Write {}

impl<S: Read + Write> Stream for S {}

/// Makes every later client and request of this process use TLS with these files. Later calls change
/// nothing.
pub fn trust(files: ClientFiles) {
    let _already = TRUSTED.set(files);
}

/// Makes every later client and request of this process show the token in `file`. Later calls change nothing.
pub fn show(file: PathBuf) {
    let _already = SHOWN.set(file);
}

/// The file of the token that clients show, if any.
pub fn token_file() -> Option<PathBuf> {
    SHOWN.get().cloned()
}

/// The header line of a request with the token, or nothing.
pub(crate) fn authorization() -> anyhow::Result<String> {
    let Some(file) = SHOWN.get() else {
        return Ok(String::new());
    };
    let token = std::fs::read_to_string(file)?;
    Ok(format!("Authorization: Bearer {}\r\n", token.trim()))
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
