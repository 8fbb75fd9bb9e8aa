//! The state of a medium, derived from the outcomes and ages of its requests.

use kvpool_disk::IoError;
use kvpool_proto::MediumState;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// This many failed requests in a row make a medium gone.
const FAILURES: u32 = 8;
/// A medium with a request older than this is slow. It is ready again when all such requests have ended.
const SLOW: Duration = Duration::from_millis(1500);

/// The health of one medium. A medium that is full or gone stays so until the node restarts.
#[derive(Debug, Default)]
pub(super) struct Health {
    path: PathBuf,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    last: u64,
    /// The begin of each request in progress, as time since boot.
    running: BTreeMap<u64, Duration>,
    failures: u32,
    refuses_writes: bool,
    is_gone: bool,
}

impl Health {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            inner: Mutex::default(),
        }
    }

    /// The device or file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Logs a state that is sent to the master.
    pub(super) fn log(&self, state: MediumState) {
        let path = self.path.display();
        match state {
            MediumState::MediumReady => tracing::info!(%path, "medium is ready again"),
            MediumState::MediumReadOnly => {
                tracing::error!(%path, "medium takes no writes: blocks on it are read, and none is added");
            }
            MediumState::MediumSlow => {
                tracing::warn!(%path, "medium is slow: its blocks are misses until it answers");
            }
            MediumState::MediumGone => {
                tracing::error!(%path, "medium failed: its blocks are misses until the node starts again");
            }
        }
    }

    /// Records the begin of a request. Pass the returned number to [`Health::finished`].
    pub(super) fn begin(&self) -> u64 {
        let mut inner = self.inner.lock();
        inner.last += 1;
        let number = inner.last;
        inner.running.insert(number, kvpool_seams::boot_time());
        number
    }

    /// Records the end of a request, whatever its outcome.
    pub(super) fn finished(&self, number: u64) {
        self.inner.lock().running.remove(&number);
    }

    /// Records the outcome that the device gave to a request.
    pub(super) fn note(&self, outcome: Result<(), &IoError>) {
        let mut inner = self.inner.lock();
        match outcome {
            Ok(()) => inner.failures = 0,
            Err(IoError::NoSpace | IoError::ReadOnly) => inner.refuses_writes = true,
            Err(IoError::Gone(_)) => inner.is_gone = true,
            Err(error) if error.is_of_host() => {}
            Err(IoError::Medium(_) | IoError::Short { .. } | IoError::System(_)) => {
                inner.failures += 1;
                inner.is_gone |= inner.failures >= FAILURES;
            }
            Err(_) => {}
        }
    }

    /// The state at `now`, a time since boot.
    pub(super) fn state(&self, now: Duration) -> MediumState {
        let inner = self.inner.lock();
        // The first entry began first.
        let oldest = inner.running.values().next();
        let is_slow = oldest.is_some_and(|began| now.saturating_sub(*began) > SLOW);
        match () {
            () if inner.is_gone => MediumState::MediumGone,
            () if is_slow => MediumState::MediumSlow,
            () if inner.refuses_writes => MediumState::MediumReadOnly,
            () => MediumState::MediumReady,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn broken() -> IoError {
        IoError::Medium(io::Error::other("EIO"))
    }

    fn state(health: &Health) -> MediumState {
        health.state(kvpool_seams::boot_time())
    }

    #[test]
    fn a_medium_is_gone_after_failures_in_a_row_and_not_after_scattered_ones() {
        let health = Health::default();
        for _ in 0..3 {
            for _ in 1..FAILURES {
                health.note(Err(&broken()));
            }
            health.note(Ok(()));
        }
        assert_eq!(state(&health), MediumState::MediumReady);
        for _ in 0..FAILURES {
            health.note(Err(&broken()));
        }
        assert_eq!(state(&health), MediumState::MediumGone);
        health.note(Ok(()));
        assert_eq!(
            state(&health),
            MediumState::MediumGone,
            "until the node starts again"
        );
        let health = Health::default();
        health.note(Err(&IoError::Gone(io::Error::other("ENODEV"))));
        assert_eq!(state(&health), MediumState::MediumGone);
    }

    #[test]
    fn errors_of_the_host_make_no_medium_gone() {
        const ENOMEM: i32 = 12;
        const EFAULT: i32 = 14;
        const ENOLINK: i32 = 67;
        let system = |number| IoError::System(io::Error::from_raw_os_error(number));
        let health = Health::default();
        let kept = IoError::System(io::Error::other("the engine kept a buffer"));
        for error in [system(ENOMEM), system(EFAULT), kept] {
            for _ in 0..2 * FAILURES {
                health.note(Err(&error));
            }
        }
        assert_eq!(state(&health), MediumState::MediumReady);
        for _ in 0..FAILURES {
            health.note(Err(&system(ENOLINK)));
        }
        assert_eq!(state(&health), MediumState::MediumGone);
    }

    #[test]
    fn a_medium_without_room_is_read_only() {
        for refusal in [IoError::NoSpace, IoError::ReadOnly] {
            let health = Health::default();
            health.note(Err(&refusal));
            health.note(Ok(()));
            assert_eq!(state(&health), MediumState::MediumReadOnly);
        }
    }

    #[test]
    fn a_medium_is_slow_while_a_request_is_old() {
        let health = Health::default();
        let (first, second) = (health.begin(), health.begin());
        assert_eq!(state(&health), MediumState::MediumReady);
        let later = kvpool_seams::boot_time() + SLOW * 2;
        assert_eq!(health.state(later), MediumState::MediumSlow);
        health.finished(first);
        assert_eq!(health.state(later), MediumState::MediumSlow);
        health.finished(second);
        assert_eq!(health.state(later), MediumState::MediumReady);
    }
}
