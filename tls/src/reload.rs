//! A value that is loaded from files, and loaded again after they change.
//!
//! A handshake checks the files, at most once a second. So no task is needed, and no notification
//! of the file system. Kubernetes replaces a mounted secret by a link, which changes the inode. A
//! daemon also checks the files without handshakes, so that operators learn of files that cannot be
//! used.

use crate::error::TlsError;
use parking_lot::{Mutex, MutexGuard};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The shortest time between two checks of the files.
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
    /// The stamps of the files from which the value was loaded.
    stamps: Vec<Option<Stamp>>,
    looked: Instant,
    /// A thread is checking the files, or reading them.
    is_looking: bool,
    /// Why the files could not be used at the last check.
    failure: Option<String>,
}

impl<T> State<T> {
    /// Stores why the files cannot be used. Returns true if the log does not have this reason yet.
    fn is_new_failure(&mut self, failure: String) -> bool {
        let is_new = self.failure.as_ref() != Some(&failure);
        self.failure = Some(failure);
        is_new
    }
}

/// The attributes that change when a file is written, replaced, or given to another user.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    /// The time of the last change of the inode, which no program can set back.
    changed: (i64, i64),
}

/// Records on drop that the check has ended, also after a panic of the load.
struct Looking<'a, T>(&'a Mutex<State<T>>);

impl<'a, T> Looking<'a, T> {
    /// Ends the check. The next check cannot begin before the caller has stored the result.
    fn end(self) -> MutexGuard<'a, State<T>> {
        let mut state = self.0.lock();
        state.is_looking = false;
        // The drop would wait for the lock that is held here.
        std::mem::forget(self);
        state
    }
}

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
        // The stamps are taken before the load, so that the next check sees a change during the
        // load.
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
                failure: None,
            }),
        })
    }

    /// The value of the present files, or of the last files that could be used. While one thread checks the files,
    /// other threads get the earlier value and do not wait for the file system.
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
        let mut state = looking.end();
        state.looked = Instant::now();
        match loaded {
            // The files equal those of the value in use, even if they differed in between.
            None => state.failure = None,
            Some(Ok(value)) => {
                state.value = Arc::new(value);
                state.stamps = stamps;
                state.failure = None;
                tracing::info!(files = ?self.files, "TLS certificates reloaded");
            }
            // The stamps stay those of the value in use, so the next check reads the files again. The failure may
            // have had a cause that the stamps do not show, such as a lack of descriptors or memory.
            Some(Err(error)) => {
                if state.is_new_failure(error.to_string()) {
                    tracing::warn!(
                        %error,
                        "changed TLS files cannot be used: the certificates loaded before stay in use"
                    );
                }
            }
        }
        Arc::clone(&state.value)
    }
}

impl<T> Reloaded<T> {
    /// Why the files could not be used at the last check; `None` if they could. This makes no
    /// check.
    pub(crate) fn failure(&self) -> Option<String> {
        self.state.lock().failure.clone()
    }
}

impl<T: Send + Sync + 'static> Reloaded<T> {
    /// Checks the files once a second, as long as the value lives.
    pub(crate) fn keep_looking(self: &Arc<Self>) -> std::io::Result<()> {
        let watched = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("kvpool-tls".to_owned());
        thread.spawn(move || look_each_second(&watched)).map(drop)
    }
}

fn look_each_second<T>(watched: &Weak<Reloaded<T>>) {
    loop {
        std::thread::sleep(LOOK);
        let Some(files) = watched.upgrade() else {
            return;
        };
        files.get();
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
            changed: (found.ctime(), found.ctime_nsec()),
        })
    };
    files.iter().map(stamp).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    impl<T> Reloaded<T> {
        /// The value of a look at the files, however long ago the last one was.
        fn look(&self) -> Arc<T> {
            std::thread::sleep(LOOK + Duration::from_millis(50));
            self.get()
        }
    }

    /// As when no descriptor was free, or the file was unreadable until it was given to this user.
    #[test]
    fn files_that_could_not_be_read_once_are_read_again_and_the_log_says_it_once() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("value");
        std::fs::write(&file, "1").unwrap();
        let loads = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&loads);
        let value = Reloaded::open(vec![file.clone()], move || {
            match counted.fetch_add(1, Ordering::Relaxed) {
                1 | 2 => Err(TlsError::Incomplete("no descriptor is free")),
                load => Ok(load),
            }
        })
        .unwrap();
        std::fs::write(&file, "22").unwrap();
        assert_eq!(*value.look(), 0);
        let failure = || value.state.lock().failure.clone();
        let why = failure().expect("a failure");
        assert!(!value.state.lock().is_new_failure(why.clone()));
        assert_eq!(*value.look(), 0);
        assert_eq!(failure(), Some(why));
        assert_eq!((*value.look(), failure()), (3, None));
        // The value is that of the files now.
        assert_eq!(*value.look(), 3);
        assert_eq!(loads.load(Ordering::Relaxed), 4);
        assert!(value.state.lock().is_new_failure("another one".to_owned()));
    }

    /// As by a program that copies times too.
    #[test]
    fn a_file_of_the_same_size_and_time_counts_as_changed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("value");
        std::fs::write(&file, "1").unwrap();
        let time = std::fs::metadata(&file).unwrap().modified().unwrap();
        let source = file.clone();
        let value = Reloaded::open(vec![file.clone()], move || {
            Ok(std::fs::read_to_string(&source).unwrap())
        })
        .unwrap();
        std::thread::sleep(Duration::from_millis(50));
        std::fs::write(&file, "2").unwrap();
        let written = std::fs::File::options().write(true).open(&file).unwrap();
        written.set_modified(time).unwrap();
        assert_eq!(*value.look(), "2");
    }

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
    fn files_that_cannot_be_used_are_told_without_a_handshake_until_they_can() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("value");
        std::fs::write(&file, "1").unwrap();
        let source = file.clone();
        let value = Arc::new(
            Reloaded::open(vec![file.clone()], move || {
                let text = std::fs::read_to_string(&source).unwrap_or_default();
                text.parse::<u32>()
                    .map_err(|_| TlsError::Incomplete("no number"))
            })
            .unwrap(),
        );
        value.keep_looking().unwrap();
        let becomes = |wanted: Option<&str>| {
            let begun = Instant::now();
            while value.failure().as_deref() != wanted {
                assert!(begun.elapsed() < Duration::from_secs(20), "{wanted:?}");
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        std::fs::write(&file, "broken").unwrap();
        becomes(Some("no number"));
        std::fs::write(&file, "22").unwrap();
        becomes(None);
        assert_eq!(*value.state.lock().value, 22);
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
