//! The far end of streams and pings.

use super::core::pin;
use super::{OPENING, Opening, Purpose, ping, stream, tls};
use kvpool_tls::rustls::ServerConfig;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

/// A port that receives streams and answers pings, with a thread for each connection. It is served until the
/// process ends.
#[derive(Debug)]
pub(crate) struct Far {
    address: SocketAddr,
}

impl Far {
    /// Starts to serve at an address of this host.
    pub(crate) fn listen(host: IpAddr, tls: Arc<ServerConfig>) -> io::Result<Self> {
        let listener = TcpListener::bind((host, 0))?;
        let address = listener.local_addr()?;
        std::thread::Builder::new()
            .name("bench-far".to_owned())
            .spawn(move || {
                for socket in listener.incoming() {
                    // The near end notices a failed connection.
                    let Ok(socket) = socket else { continue };
                    let tls = Arc::clone(&tls);
                    std::thread::spawn(move || serve(socket, tls));
                }
            })?;
        Ok(Self { address })
    }

    /// The address of the port.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }
}

fn serve(mut socket: TcpStream, tls: Arc<ServerConfig>) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let mut bytes = [0; OPENING];
    socket.read_exact(&mut bytes)?;
    let opening = Opening::from_bytes(bytes).ok_or(io::ErrorKind::InvalidData)?;
    let _pinned = opening.core.map(pin);
    match opening.purpose {
        Purpose::Stream => stream::receive(&mut socket, opening.first, opening.second),
        Purpose::TlsStream => {
            let mut socket = tls::accept(socket, tls)?;
            stream::receive(&mut socket, opening.first, opening.second)
        }
        Purpose::Ping | Purpose::SpinningPing => ping::answer(socket, opening),
    }
}
