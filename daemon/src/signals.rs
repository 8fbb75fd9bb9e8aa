//! The signals that ask a daemon to end in order.

use std::fmt;
use std::future::Future;
use std::io;
use tokio::signal::unix::{SignalKind, signal};

/// The signal that asked the process to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM: an init system or an orchestrator.
    Terminate,
    /// SIGINT: Ctrl-C.
    Interrupt,
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Terminate => "SIGTERM",
            Self::Interrupt => "SIGINT",
        })
    }
}

/// Returns a future that completes at the first SIGTERM or SIGINT with that signal.
///
/// The process catches the signals from this call on, not from the first poll. So no signal is lost while the daemon
/// starts, and no signal ends the process by itself. Must be called inside a tokio runtime. Fails when the handlers
/// cannot be installed.
///
/// SIGHUP ends nothing: a closed terminal and a request to read settings again send it. While the future is polled,
/// each is logged.
pub fn shutdown() -> io::Result<impl Future<Output = Signal> + Send + 'static> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => return Signal::Terminate,
                _ = interrupt.recv() => return Signal::Interrupt,
                Some(()) = hangup.recv() => tracing::info!(
                    "SIGHUP: the files of --auth-jwks, --auth-policy, --token-file and --tls-* are read again by \
                     themselves; other settings need a restart"
                ),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{getpid, kill_process};

    // One test for all: signals go to the whole process, so two would hear each other's.
    #[tokio::test]
    async fn it_ends_on_either_signal_and_says_which() {
        for (sent, heard) in [
            (rustix::process::Signal::TERM, Signal::Terminate),
            (rustix::process::Signal::INT, Signal::Interrupt),
        ] {
            let shutdown = shutdown().unwrap();
            kill_process(getpid(), rustix::process::Signal::HUP).unwrap();
            kill_process(getpid(), sent).unwrap();
            assert_eq!(shutdown.await, heard);
        }
    }
}
