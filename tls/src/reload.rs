//! A value made of files, made anew when they change.
//!
//! A handshake looks at the files, at most once a second. So no task is needed, and no file system
//! that tells of changes. Kubernetes replaces a mounted secret by a link, which changes the inode.

use crate::error::TlsError;
use parking_lot::Mutex;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The least time between two looks at the files.
const LOOK: Duration = Duration::from_secs(1);

type Load<T> = Box<dyn Fn() -> Result<T, TlsError> + Send + Sync>;

/// See the module's documentation.
pub(crate) struct Reloaded<T> {
    files: Vec<PathBuf>,
    load: Load<T>,
    state: Mutex<State<T>>,
}

struct State<T> {
    value: Arc<T>,
    stamps: Vec<Option<Stamp>>,
    looked: Instant,
    /// A thread is looking at the files, or reading them.
    is_looking: bool,
}

/// What changes when a file is written or replaced.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

/// Says at its end that nobody looks any more, also when the load panicked.
struct Looking<'a, T>(&'a Mutex<State<T>>);

impl<T> Drop for Looking<'_, T> {
    fn drop(&mut self) {
        self.0.lock().is_looking = false;
    }
}

impl<T> Reloaded<T> {
    /// Loads the value. Fails when the files cannot be used.
    pub(crate) fn open(
        files: Vec<PathBuf>,
        load: impl Fn() -> Result<T, TlsError> + Send + Sync + 'static,
    ) -> Result<Self, TlsError> {
        // Before the load, so that a change during the load is seen later.
        let stamps = stamps(&files);
        let value = Arc::new(load()?);
        Ok(Self {
            files,
            load: Box::new(load),
            state: Mutex::new(State {
                value,
                stamps,
                looked: Instant::now(),
                is_looking: false,
            }),
        })
    }

    /// The value of the files as they are, or as they were when they last could be used. While one thread looks
    /// at the files, the others get the value before and do not wait for the file system.
    pub(crate) fn get(&self) -> Arc<T> {
        let before = {
            let mut state = self.state.lock();
            if state.is_looking || state.looked.elapsed() < LOOK {
                return Arc::clone(&state.value);
            }
            state.is_looking = true;
            state.stamps.clone()
        };
        let looking = Looking(&self.state);
        let stamps = stamps(&self.files);
        let loaded = (stamps != before).then(|| (self.load)());
        drop(looking);
        let mut state = self.state.lock();
        state.looked = Instant::now();
        // Also after a failure: the same files are not read again, and the log says it once.
        state.stamps = stamps;
        match loaded {
            None => {}
            Some(Ok(value)) => {
                state.value = Arc::new(value);
                tracing::info!(files = ?self.files, "TLS certificates reloaded");
            }
            Some(Err(error)) => tracing::warn!(
                %error,
                "changed TLS files cannot be used: the certificates loaded before stay in use"
            ),
        }
        Arc::clone(&state.value)
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Option<Stamp>> {
    let stamp = |file: &PathBuf| {
        let found = std::fs::metadata(file).ok()?;
        Some(Stamp {
            device: found.dev(),
            inode: found.ino(),
            size: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
        })
    };
    files.iter().map(stamp).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As where the files are on a file system that does not answer.
    #[test]
    fn a_handshake_does_not_wait_while_another_one_reads_the_files() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("value");
        std::fs::write(&file, "1").unwrap();
        let (begins, has_begun) = std::sync::mpsc::channel();
        let (answers, answer) = std::sync::mpsc::channel();
        let (first, answer) = (std::sync::atomic::AtomicBool::new(true), Mutex::new(answer));
        let value = Reloaded::open(vec![file.clone()], move || {
            if first.swap(false, std::sync::atomic::Ordering::Relaxed) {
                return Ok(1);
            }
            begins.send(()).unwrap();
            answer.lock().recv().unwrap();
            Ok(2)
        })
        .unwrap();
        std::fs::write(&file, "22").unwrap();
        std::thread::sleep(LOOK + Duration::from_millis(50));
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| *value.get());
            has_begun.recv().unwrap();
            let quick = scope.spawn(|| *value.get());
            let begun = Instant::now();
            while !quick.is_finished() && begun.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let waits = !quick.is_finished();
            answers.send(()).unwrap();
            assert!(!waits, "it waits for the files");
            assert_eq!((quick.join().unwrap(), slow.join().unwrap()), (1, 2));
        });
    }

    #[test]
    fn changed_files_count_and_broken_ones_do_not() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("value");
        std::fs::write(&file, "1").unwrap();
        let source = file.clone();
        let value = Reloaded::open(vec![file.clone()], move || {
            let text = std::fs::read_to_string(&source).unwrap_or_default();
            text.parse::<u32>()
                .map_err(|_| TlsError::Incomplete("no number"))
        })
        .unwrap();
        let after_change = |text: &str| {
            std::fs::write(&file, text).unwrap();
            std::thread::sleep(LOOK + Duration::from_millis(50));
            *value.get()
        };
        assert_eq!(*value.get(), 1);
        assert_eq!(after_change("22"), 22);
        assert_eq!(after_change("broken"), 22);
        assert_eq!(after_change("333"), 333);
        std::fs::remove_file(&file).unwrap();
        std::thread::sleep(LOOK + Duration::from_millis(50));
        assert_eq!(*value.get(), 333);
    }
}
