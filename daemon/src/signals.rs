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
pub fn shutdown() -> io::Result<impl Future<Output = Signal> + Send + 'static> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => Signal::Terminate,
            _ = interrupt.recv() => Signal::Interrupt,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{getpid, kill_process};

    // One test for both: signals go to the whole process, so two would hear each other's.
    #[tokio::test]
    async fn it_ends_on_either_signal_and_says_which() {
        for (sent, heard) in [
            (rustix::process::Signal::TERM, Signal::Terminate),
            (rustix::process::Signal::INT, Signal::Interrupt),
        ] {
            let shutdown = shutdown().unwrap();
            kill_process(getpid(), sent).unwrap();
            assert_eq!(shutdown.await, heard);
        }
    }
}
