//! A thread that ends work at its deadline, whatever the peer does.

use parking_lot::{Condvar, Mutex};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// A thread that calls `scan` whenever a deadline may have passed. Stops when dropped.
pub(crate) struct Timer(Arc<TimerShared>);

struct TimerShared {
    state: Mutex<TimerState>,
    changed: Condvar,
}

struct TimerState {
    /// The time of the next scan; `None` waits for a deadline.
    next: Option<Instant>,
    stopped: bool,
}

impl Timer {
    /// Starts the thread. `scan` ends late work and returns the next deadline.
    pub(crate) fn start(
        name: &str,
        mut scan: impl FnMut(Instant) -> Option<Instant> + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(TimerShared {
            state: Mutex::new(TimerState {
                next: None,
                stopped: false,
            }),
            changed: Condvar::new(),
        });
        let timer = Self(shared.clone());
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                while shared.wait() {
                    if let Some(due) = scan(Instant::now()) {
                        shared.scan_by(due);
                    }
                }
            })?;
        Ok(timer)
    }

    /// Ensures a scan at `deadline` at the latest.
    pub(crate) fn scan_by(&self, deadline: Instant) {
        self.0.scan_by(deadline);
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.0.state.lock().stopped = true;
        self.0.changed.notify_all();
    }
}

impl TimerShared {
    /// Waits until a scan is due; false when the timer has stopped.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.stopped {
                return false;
            }
            match state.next {
                Some(next) if next <= Instant::now() => {
                    state.next = None;
                    return true;
                }
                Some(next) => {
                    self.changed.wait_until(&mut state, next);
                }
                None => self.changed.wait(&mut state),
            }
        }
    }

    fn scan_by(&self, deadline: Instant) {
        let mut state = self.state.lock();
        if state.next.is_none_or(|next| deadline < next) {
            state.next = Some(deadline);
            self.changed.notify_all();
        }
    }
}
