//! TLS and a token for a whole test binary. Pools, clients and HTTP requests use them after calls
//! of [`trust`] and [`show`].

use kvpool_client::ClientFiles;
use kvpool_tls::rustls::{ClientConnection, StreamOwned};
use kvpool_tls::{ALPN_HTTP, ClientTls};
use parking_lot::Mutex;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

static TRUSTED: Mutex<Option<ClientFiles>> = Mutex::new(None);
static SHOWN: OnceLock<PathBuf> = OnceLock::new();

/// A stream that speaks HTTP.
pub(crate) trait Stream: Read + Write {}

impl<S: Read + Write> Stream for S {}

/// Makes every later client and request of this process use TLS with these files.
pub fn trust(files: ClientFiles) {
    *TRUSTED.lock() = Some(files);
}

/// Makes every later client and request of this process present the token in `file`. Only the first
/// call has an effect.
pub fn show(file: PathBuf) {
    let _already = SHOWN.set(file);
}

/// The file of the token that clients present, if any.
pub fn token_file() -> Option<PathBuf> {
    SHOWN.get().cloned()
}

/// The header line with the token for a request; empty without a token.
pub(crate) fn authorization() -> anyhow::Result<String> {
    let Some(file) = SHOWN.get() else {
        return Ok(String::new());
    };
    let token = std::fs::read_to_string(file)?;
    Ok(format!("Authorization: Bearer {}\r\n", token.trim()))
}

/// The files that clients trust; empty before a call of [`trust`].
pub fn trusted() -> ClientFiles {
    TRUSTED.lock().clone().unwrap_or_default()
}

/// The scheme of the masters' addresses.
pub fn scheme() -> &'static str {
    match TRUSTED.lock().is_some() {
        true => "https://",
        false => "http://",
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
