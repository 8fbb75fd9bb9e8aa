//! A connected stream socket, plain or with a TLS session over it.
//!
//! All I/O on a socket uses [`WireRef`], so that no other module depends on TLS. For a plain socket this
//! costs one branch per call. A TLS socket copies through a buffer that stays in a core's cache: no reference
//! to shared memory is formed.
//!
//! ADR 0046 says why bytes are encrypted in user space, and what kernel TLS would need.

use crate::link::TransferError;
use crate::outcomes::{invalid, unreachable};
use kvpool_tls::rustls::pki_types::ServerName;
use kvpool_tls::{ClientTls, DATA_SCHEME, Session};
use rustix::net::RecvFlags;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// See the module's documentation.
pub(crate) struct Wire {
    socket: OwnedFd,
    tls: Option<Box<Session>>,
}

/// A borrowed [`Wire`], or a borrowed plain socket.
#[derive(Clone, Copy)]
pub(crate) struct WireRef<'a> {
    socket: BorrowedFd<'a>,
    tls: Option<&'a Session>,
}

impl Wire {
    /// Adds a TLS session. All later bytes pass through it.
    pub(crate) fn begin_session(&mut self, session: Session) {
        self.tls = Some(Box::new(session));
    }

    /// Records that the peer is known, and may send large records from now on.
    pub(crate) fn widen(&self) {
        if let Some(session) = &self.tls {
            session.widen();
        }
    }

    /// Reads what has arrived, without waiting. Takes at most `budget` bytes from the socket, and lowers
    /// `budget`. Otherwise TLS records without plaintext could keep the caller busy.
    pub(crate) fn receive_now(&self, room: &mut [u8], budget: &mut usize) -> io::Result<usize> {
        let mut receive = |room: &mut [u8]| {
            let most = room.len().min(*budget);
            let room = room.get_mut(..most).filter(|room| !room.is_empty());
            let room = room.ok_or(io::ErrorKind::InvalidData)?;
            let (_, count) = rustix::net::recv(&self.socket, room, RecvFlags::DONTWAIT)?;
            *budget -= count;
            Ok(count)
        };
        match &self.tls {
            None => receive(room),
            Some(tls) => tls.receive(room, receive),
        }
    }

    pub(crate) fn as_ref(&self) -> WireRef<'_> {
        self.into()
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    pub(crate) fn into_parts(self) -> (OwnedFd, Option<Box<Session>>) {
        (self.socket, self.tls)
    }
}

impl From<OwnedFd> for Wire {
    fn from(socket: OwnedFd) -> Self {
        Self { socket, tls: None }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl<'a> WireRef<'a> {
    pub(crate) const fn socket(self) -> BorrowedFd<'a> {
        self.socket
    }

    pub(crate) const fn tls(self) -> Option<&'a Session> {
        self.tls
    }
}

impl<'a> From<&'a Wire> for WireRef<'a> {
    fn from(wire: &'a Wire) -> Self {
        Self {
            socket: wire.socket.as_fd(),
            tls: wire.tls.as_deref(),
        }
    }
}

impl<'a> From<BorrowedFd<'a>> for WireRef<'a> {
    fn from(socket: BorrowedFd<'a>) -> Self {
        Self { socket, tls: None }
    }
}

/// The TLS settings for a node's data port.
#[derive(Clone, Debug)]
pub struct DataTls {
    tls: ClientTls,
    name: ServerName<'static>,
}

impl DataTls {
    /// Parses the address of a data port, `host:port` or `tls://host:port`. Returns `host:port`, and the TLS
    /// settings for this port.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] when the port speaks TLS and `tls` is `None`, when its host cannot be the
    /// name of a certificate, or when `tls` refuses the plain port ([`ClientTls::among`]).
    ///
    /// [`Code::InvalidArgument`]: kvpool_types::Code::InvalidArgument
    pub fn of<'a>(
        address: &'a str,
        tls: Option<&ClientTls>,
    ) -> Result<(&'a str, Option<Self>), TransferError> {
        let Some(authority) = address.strip_prefix(DATA_SCHEME) else {
            if tls.is_some_and(|tls| tls.refuses_plain_data(address)) {
                return Err(invalid(format!(
                    "{address} has no TLS, and this process calls masters with TLS only: start that node with \
                     --tls-cert and --tls-key"
                )));
            }
            return Ok((address, None));
        };
        let tls = tls.ok_or_else(|| {
            invalid(format!(
                "{address} speaks TLS, and no authority is trusted: name its certificate with --tls-ca or KVPOOL_TLS_CA"
            ))
        })?;
        let name = tls
            .name_of(authority)
            .map_err(|error| invalid(error.to_string()))?;
        let tls = tls.clone();
        Ok((authority, Some(Self { tls, name })))
    }

    /// Performs the TLS handshake on a connected socket, by `deadline`.
    pub(crate) fn handshake(
        &self,
        socket: OwnedFd,
        address: SocketAddr,
        deadline: Instant,
    ) -> Result<Wire, TransferError> {
        let name = self.name.clone();
        let session = kvpool_tls::connect_socket(&self.tls, name, socket.as_fd(), deadline);
        match session {
            Ok(session) => Ok(Wire {
                socket,
                tls: Some(Box::new(session)),
            }),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                Err(crate::outcomes::deadline_exceeded())
            }
            // A certificate that is refused now is refused at the next attempt too, and the node is healthy.
            Err(error) if kvpool_tls::is_certificate_refusal(&error) => {
                Err(invalid(format!("TLS with {address}: {error}")))
            }
            Err(error) => Err(unreachable(format!("TLS with {address}: {error}"))),
        }
    }
}
