//! Connections that record why they ended. gRPC's own errors do not name the reason.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How long a recorded refusal counts as the reason of failed calls.
const EXPLAINS: Duration = Duration::from_secs(10);
/// After this time the same reason is logged again.
const AGAIN: Duration = Duration::from_secs(60);

/// Why each server refused a connection of this process: the reason, its time, and when it was logged.
static REFUSALS: Mutex<BTreeMap<String, Refusal>> = Mutex::new(BTreeMap::new());

struct Refusal {
    why: String,
    at: Instant,
    logged: Instant,
}

/// Why the server at `host:port` refused a connection of this process a moment ago.
#[must_use]
pub fn refusal(authority: &str) -> Option<String> {
    let refusals = REFUSALS.lock();
    let refusal = refusals.get(authority)?;
    (refusal.at.elapsed() < EXPLAINS).then(|| refusal.why.clone())
}

/// The first byte of a TLS record that holds an alert. No HTTP/2 connection begins with it.
const ALERT: u8 = 21;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Watched<S> {
    stream: S,
    authority: String,
    has_tls: bool,
    /// Whether a byte was received.
    has_begun: bool,
}

impl<S> Watched<S> {
    pub(super) const fn new(stream: S, authority: String, has_tls: bool) -> Self {
        Self {
            stream,
            authority,
            has_tls,
            has_begun: false,
        }
    }

    /// Records a refusal. A client retries often, so the log gets each reason at most once a
    /// minute.
    fn tell(&self, error: &io::Error) {
        let (authority, why, at) = (&self.authority, error.to_string(), Instant::now());
        let mut refusals = REFUSALS.lock();
        let before = refusals.get(authority);
        let same = before.filter(|before| before.why == why && before.logged.elapsed() < AGAIN);
        let logged = same.map_or(at, |same| same.logged);
        if logged == at {
            tracing::warn!(authority, %error, "a connection was refused");
        }
        refusals.insert(authority.clone(), Refusal { why, at, logged });
    }
}

/// Whether the error is an alert, with which the peer names the reason of its close.
fn is_alert(error: &io::Error) -> bool {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
    matches!(cause, Some(rustls::Error::AlertReceived(_)))
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut this.stream).poll_read(context, buffer));
        if let Err(error) = &read
            && is_alert(error)
        {
            this.tell(error);
        }
        let first = buffer.filled().get(before).copied();
        let is_first = !std::mem::replace(&mut this.has_begun, true);
        // This comes before the refusal is cleared, because a cleared refusal would be logged
        // again.
        if is_first && !this.has_tls && first == Some(ALERT) {
            let why = "the port speaks TLS: call it with https://";
            let error = io::Error::new(io::ErrorKind::InvalidData, why);
            this.tell(&error);
            return Poll::Ready(Err(error));
        }
        if is_first && first.is_some() {
            REFUSALS.lock().remove(&this.authority);
        }
        Poll::Ready(read)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// The second byte that a plain caller reads from a port that sends these.
    async fn second_of(authority: &str, bytes: &[u8]) -> io::Result<u8> {
        let (mut server, client) = tokio::io::duplex(64);
        server.write_all(bytes).await?;
        let mut client = Watched::new(client, authority.to_owned(), false);
        client.read_u8().await?;
        client.read_u8().await
    }

    #[tokio::test]
    async fn a_plain_caller_of_a_tls_port_is_told_so() {
        let alert = [21, 3, 3, 0, 2, 2, 50];
        let refused = second_of("master:7070", &alert).await.unwrap_err();
        assert!(refused.to_string().contains("speaks TLS"), "{refused}");
        assert_eq!(refusal("master:7070"), Some(refused.to_string()));
        assert_eq!(refusal("other:7070"), None);
        // Only the first byte identifies the protocol of the port.
        assert_eq!(second_of("master:7070", &[0, 21]).await.unwrap(), 21);
    }

    /// A client tries again and again, and an operator reads the reason once.
    #[tokio::test]
    async fn a_tls_port_that_is_called_without_tls_again_is_logged_once() {
        let logged = || {
            REFUSALS
                .lock()
                .get("again:7070")
                .map(|refusal| refusal.logged)
        };
        let alert = [21, 3, 3, 0, 2, 2, 50];
        second_of("again:7070", &alert).await.unwrap_err();
        let first = logged();
        assert!(first.is_some());
        second_of("again:7070", &alert).await.unwrap_err();
        assert_eq!(logged(), first);
        // A port that speaks plain gRPC now has refused nothing.
        second_of("again:7070", &[0, 21]).await.unwrap();
        assert_eq!(logged(), None);
    }
}
