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
}

/// What changes when a file is written or replaced.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
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
            }),
        })
    }

    /// The value of the files as they are, or as they were when they last could be used.
    pub(crate) fn get(&self) -> Arc<T> {
        let mut state = self.state.lock();
        let now = Instant::now();
        if now.duration_since(state.looked) < LOOK {
            return Arc::clone(&state.value);
        }
        state.looked = now;
        let stamps = stamps(&self.files);
        if stamps != state.stamps {
            // Also after a failure: the same files are not read again, and the log says it once.
            state.stamps = stamps;
            match (self.load)() {
                Ok(value) => {
                    state.value = Arc::new(value);
                    tracing::info!(files = ?self.files, "TLS certificates reloaded");
                }
                Err(error) => tracing::warn!(
                    %error,
                    "changed TLS files cannot be used: the certificates loaded before stay in use"
                ),
            }
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
