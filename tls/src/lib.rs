//! TLS for kvpool's ports, with rustls and ring.
//!
//! ```text
//!  files ──Reloaded──► ServerTls ──► async handshake (tokio-rustls) ─┐
//!    ▲ looked at once a second      └► handshake of an acceptor ─────┼─► Session, on a blocking socket
//!    └ kept when the new ones fail                                   │
//!  files ──Reloaded──► ClientTls ──► handshake by a deadline ────────┘
//!                                  └► gRPC channels (feature `grpc`)
//! ```
//!
//! The crate knows certificates, sockets, and the addresses of a name. It knows no frames, masters or nodes.
//!
//! ADR 0045 says why TLS is one block of settings, and how ports and addresses show it.

#![forbid(unsafe_code)]

pub mod addresses;
mod client;
mod error;
mod frames;
#[cfg(feature = "grpc")]
pub mod grpc;
mod handshake;
mod pem;
mod reload;
mod server;
mod session;
#[cfg(feature = "testing")]
pub mod testing;

pub use client::{ClientFiles, ClientTls};
pub use error::{TlsError, is_certificate_refusal};
pub use frames::{Caller, FrameStream, accept, connect};
pub use handshake::{ServerHandshake, connect_socket};
pub use rustls;
pub use server::{ClientAuth, Port, ServerFiles, ServerTls, Version};
pub use session::Session;
pub use tokio_rustls;

/// The ALPN name of gRPC.
pub const ALPN_GRPC: &[u8] = b"h2";
/// The ALPN name of frames.
pub const ALPN_FRAMES: &[u8] = b"kvpool/1";
/// The ALPN name of HTTP/1.1.
pub const ALPN_HTTP: &[u8] = b"http/1.1";

/// The scheme of the address of a master without TLS.
pub const PLAIN_SCHEME: &str = "http://";

/// The scheme of the address of a master with TLS.
pub const TLS_SCHEME: &str = "https://";
/// The scheme of the address of a TLS data port.
pub const DATA_SCHEME: &str = "tls://";

fn provider() -> std::sync::Arc<rustls::crypto::CryptoProvider> {
    std::sync::Arc::new(rustls::crypto::ring::default_provider())
}
