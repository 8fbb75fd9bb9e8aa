//! A handshake without a socket: received bytes go in, bytes to send come out.

use crate::session::{Agreed, Rekeys};
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};
use rustls::{Error, ExtractedSecrets, SupportedCipherSuite};

/// The bytes of a record's head: kind, version, and the length of the rest.
const HEAD: usize = 5;

/// One end of a handshake.
pub(crate) trait Side: Sized {
    /// rustls' state of this end.
    type Data;

    /// Processes the records in `received`.
    fn process<'c, 'i>(
        &'c mut self,
        received: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;

    /// Whether [`Side::process`] has a message to send, without more input.
    fn has_message(&self) -> bool;

    /// The secrets of a complete handshake, and the source of later keys.
    fn secrets(self) -> Result<(ExtractedSecrets, Box<dyn Rekeys>, SupportedCipherSuite), Error>;
}

macro_rules! side {
    ($connection:ty, $data:ty) => {
        impl Side for $connection {
            type Data = $data;

            fn process<'c, 'i>(
                &'c mut self,
                received: &'i mut [u8],
            ) -> UnbufferedStatus<'c, 'i, $data> {
                self.process_tls_records(received)
            }

            fn has_message(&self) -> bool {
                self.wants_write()
            }

            fn secrets(
                self,
            ) -> Result<(ExtractedSecrets, Box<dyn Rekeys>, SupportedCipherSuite), Error> {
                let (secrets, rekeys) = self.dangerous_into_kernel_connection()?;
                let suite = rekeys.negotiated_cipher_suite();
                Ok((secrets, Box::new(rekeys), suite))
            }
        }
    };
}

side!(
    UnbufferedClientConnection,
    rustls::client::ClientConnectionData
);
side!(
    UnbufferedServerConnection,
    rustls::server::ServerConnectionData
);

/// The next action of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The caller sends [`Steps::to_send`] to the peer.
    Send,
    /// The caller receives, and adds the bytes to [`Steps::arrived`].
    Receive,
    /// The handshake is complete.
    Finish,
}

/// See the module's documentation.
pub(crate) struct Steps<S> {
    side: S,
    /// Received bytes that rustls has not seen. Bytes after the handshake stay here: they are not
    /// for rustls.
    pub(crate) arrived: Vec<u8>,
    /// The number of bytes that complete the record at the end of `shown`.
    lacking: usize,
    /// Bytes that rustls has seen and not consumed.
    shown: Vec<u8>,
    /// Bytes for the peer that the caller has not sent.
    pub(crate) to_send: Vec<u8>,
}

impl<S: Side> Steps<S> {
    pub(crate) const fn new(side: S) -> Self {
        Self {
            side,
            arrived: Vec::new(),
            lacking: 0,
            shown: Vec::new(),
            to_send: Vec::new(),
        }
    }

    /// Processes the received bytes. After an error, [`Steps::to_send`] has the alert for the peer.
    pub(crate) fn advance(&mut self) -> Result<Next, Error> {
        loop {
            let UnbufferedStatus { discard, state } = self.side.process(&mut self.shown);
            let next = match state {
                Ok(ConnectionState::EncodeTlsData(data)) => {
                    encode(data, &mut self.to_send).map(|()| None)
                }
                Ok(ConnectionState::TransmitTlsData(data)) => {
                    data.done();
                    Ok(Some(Next::Send))
                }
                Ok(ConnectionState::BlockedHandshake) => Ok(Some(Next::Receive)),
                Ok(ConnectionState::WriteTraffic(_)) => Ok(Some(Next::Finish)),
                Ok(_) => Err(Error::General("the peer has ended its handshake".into())),
                Err(error) => Err(error),
            };
            self.shown.drain(..discard.min(self.shown.len()));
            match next {
                Ok(None) => {}
                Ok(Some(Next::Receive)) if self.show() => {}
                Ok(Some(next)) => return Ok(next),
                Err(error) => {
                    self.queue_alert();
                    return Err(error);
                }
            }
        }
    }

    /// Shows rustls the received bytes, up to the end of a record. Returns false when it showed
    /// none.
    fn show(&mut self) -> bool {
        if self.lacking == 0 {
            let Some(&[_, _, _, high, low]) = self.arrived.first_chunk::<HEAD>() else {
                return false;
            };
            self.lacking = HEAD + usize::from(u16::from_be_bytes([high, low]));
        }
        let count = self.lacking.min(self.arrived.len());
        self.shown.extend(self.arrived.drain(..count));
        self.lacking -= count;
        count > 0
    }

    /// rustls panics when a handshake continues after an error. So after an error only its alert is
    /// requested.
    fn queue_alert(&mut self) {
        while self.side.has_message() {
            let state = self.side.process(&mut self.shown).state;
            let Ok(ConnectionState::EncodeTlsData(alert)) = state else {
                return;
            };
            if encode(alert, &mut self.to_send).is_err() {
                return;
            }
        }
    }

    /// The result of a complete handshake.
    pub(crate) fn finish(self) -> Result<Agreed, Error> {
        if !self.shown.is_empty() {
            return Err(Error::HandshakeNotComplete);
        }
        let (secrets, rekeys, suite) = self.side.secrets()?;
        let suite = suite.tls13().ok_or_else(|| {
            Error::General("frames need TLS 1.3, and the peer speaks an older version".to_owned())
        })?;
        Ok(Agreed {
            secrets,
            rekeys,
            records_of_key: suite.common.confidentiality_limit,
            sealed: self.arrived,
        })
    }
}

/// Appends a message to `to_send`.
fn encode<Data>(mut message: EncodeTlsData<'_, Data>, to_send: &mut Vec<u8>) -> Result<(), Error> {
    let start = to_send.len();
    loop {
        let room = to_send.get_mut(start..).unwrap_or_default();
        match message.encode(room) {
            Ok(written) => {
                to_send.truncate(start + written);
                return Ok(());
            }
            Err(EncodeError::InsufficientSize(needed)) => {
                to_send.resize(start + needed.required_size, 0);
            }
            Err(error) => return Err(Error::General(error.to_string())),
        }
    }
}
