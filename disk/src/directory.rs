//! A directory of media that several processes share. Each process takes a file of its own.
//!
//! The files are `kvpool-0.ssd`, `kvpool-1.ssd` and so on. A process takes the first file that no other
//! process has locked, and creates a file if there is none. So a restarted process finds a file with its own
//! blocks, or with those of a sibling. Both belong to the pool.
//!
//! The last writes of a killed process keep its file locked. So a process creates a file at once only if live
//! processes have all others. Otherwise it waits first.

use crate::GRANULE;
use crate::arena::Arena;
use crate::engine::Engine;
use crate::file::{OpenError, Options, open};
use crate::holder;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Without a given size, a new file takes this fraction of the free space: one in `SHARE` bytes.
const SHARE: u64 = 10;
/// The least size of a new file in bytes. A smaller one is of no use.
const LEAST: u64 = 64 << 20;
/// The greatest size of a new file in bytes.
const MOST: u64 = 2 << 40;
/// How long this process waits while another process chooses its file.
const PATIENCE: Duration = Duration::from_secs(10);
/// The interval at which this process tries the lock of the directory again.
const POLL: Duration = Duration::from_millis(10);
/// The interval at which this process tries locked files again.
const AGAIN: Duration = Duration::from_millis(50);

/// Opens the first file of `directory` that no other process has locked, and creates a file if there is none.
/// Before that it waits at most `patience` for locked files whose holders are not known to be live processes.
/// If `options` gives no size, an existing file keeps its size. A new file then takes a tenth of the free
/// space, at most 2 TiB.
///
/// # Errors
///
/// Every variant of [`OpenError`] but `Busy`. A file whose creation failed is removed, unless the directory
/// could not be locked.
pub fn open_in(
    directory: &Path,
    options: &Options,
    arena: &Arc<Arena>,
) -> Result<(PathBuf, Arc<dyn Engine>), OpenError> {
    let until = Instant::now() + options.patience;
    let mut is_said = false;
    // No open waits for a lock: another file may become free first.
    let options = &Options {
        patience: Duration::ZERO,
        ..*options
    };
    let (choice, present) = loop {
        let choice = Choosing::begin(directory)?;
        let present = present(directory).map_err(system("list", directory))?;
        let mut busy = Vec::new();
        for number in &present {
            let path = file(directory, *number);
            // An empty file remains from a process that died while it created the file.
            let is_empty = std::fs::metadata(&path).is_ok_and(|found| found.len() == 0);
            let size = match options.size {
                None if is_empty => Some(share(directory)?),
                size => size,
            };
            match open(&path, &Options { size, ..*options }, arena) {
                Ok(engine) => return Ok((path, engine)),
                Err(OpenError::Busy { path }) => busy.push(path),
                Err(error) => return Err(error),
            }
        }
        let may_wait = Instant::now() < until;
        let doubtful = busy.iter().find(|path| may_wait && !holder::is_live(path));
        let Some(path) = doubtful else {
            break (choice, present);
        };
        if !std::mem::replace(&mut is_said, true) {
            tracing::info!(path = %path.display(),
                "another process has the medium and may be about to end; waiting before a new file is made");
        }
        // Other processes choose their files meanwhile.
        drop(choice);
        std::thread::sleep(AGAIN);
    };
    let size = Some(match options.size {
        Some(size) => size,
        None => share(directory)?,
    });
    for number in (0..).filter(|number| !present.contains(number)) {
        let path = file(directory, number);
        match open(&path, &Options { size, ..*options }, arena) {
            Ok(engine) => {
                // The file's name must survive a crash, as its blocks do.
                rustix::fs::fsync(&choice.directory)
                    .map_err(|errno| system("sync", directory)(errno.into()))?;
                return Ok((path, engine));
            }
            // Another process created the file meanwhile: it did not wait for the directory's lock.
            Err(OpenError::Busy { .. }) => {}
            Err(error) => {
                if choice.is_locked {
                    // The file may hold part of the free space. If it was never created, there is nothing to
                    // remove.
                    let _not_there = std::fs::remove_file(&path);
                }
                return Err(error);
            }
        }
    }
    Err(OpenError::Busy {
        path: directory.to_owned(),
    })
}

/// Finds what [`open_in`] would refuse at once. Changes nothing and takes no lock.
///
/// # Errors
///
/// [`OpenError`], as [`open_in`].
pub fn check_directory(directory: &Path) -> Result<(), OpenError> {
    open_directory(directory).map(drop)
}

fn open_directory(path: &Path) -> Result<OwnedFd, OpenError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT => OpenError::NoDirectory {
            path: path.to_owned(),
        },
        errno => system("open", path)(errno.into()),
    })
}

/// The lock of a directory. While a process holds it, no other process takes a share of the same free space.
struct Choosing {
    directory: OwnedFd,
    is_locked: bool,
}

impl Choosing {
    fn begin(path: &Path) -> Result<Self, OpenError> {
        let directory = open_directory(path)?;
        let until = Instant::now() + PATIENCE;
        loop {
            let is_locked =
                match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
                    Ok(()) => true,
                    Err(Errno::WOULDBLOCK) if Instant::now() < until => {
                        std::thread::sleep(POLL);
                        continue;
                    }
                    Err(errno) => {
                        // Every file has a lock of its own, so at worst the shares of two processes overlap.
                        tracing::warn!(path = %path.display(), error = %io::Error::from(errno),
                        "the directory is not locked while a file is chosen");
                        false
                    }
                };
            return Ok(Self {
                directory,
                is_locked,
            });
        }
    }
}

impl Drop for Choosing {
    fn drop(&mut self) {
        if self.is_locked {
            // A forked child has the descriptor too, and would keep the lock.
            let _unlocked = rustix::fs::flock(&self.directory, FlockOperation::Unlock);
        }
    }
}

fn file(directory: &Path, number: u32) -> PathBuf {
    directory.join(format!("kvpool-{number}.ssd"))
}

/// The numbers of the existing files.
fn present(directory: &Path) -> io::Result<BTreeSet<u32>> {
    let mut numbers = BTreeSet::new();
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("kvpool-")?.strip_suffix(".ssd"));
        if let Some(number) = number.and_then(|number| number.parse().ok())
            && file(directory, number).file_name() == Some(&name)
        {
            numbers.insert(number);
        }
    }
    Ok(numbers)
}

/// The size of a new file, if none is given.
fn share(directory: &Path) -> Result<u64, OpenError> {
    let room = rustix::fs::statvfs(directory)
        .map_err(|errno| system("measure", directory)(errno.into()))?;
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    share_of(free).ok_or_else(|| OpenError::Size {
        path: directory.to_owned(),
        reason: format!(
            "its filesystem has {free} bytes free, and a new file takes a tenth, at least {LEAST}: give a size"
        ),
    })
}

fn share_of(free: u64) -> Option<u64> {
    let share = (free / SHARE).min(MOST);
    (share >= LEAST).then_some(share / GRANULE as u64 * GRANULE as u64)
}

fn system(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::System { what, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::Choice;
    use std::io::Read;
    use std::process::{Child, Command, Stdio};

    const SIZE: u64 = 1 << 20;

    fn options(size: impl Into<Option<u64>>) -> Options {
        Options {
            size: size.into(),
            engine: Choice::Threads,
            ..Options::default()
        }
    }

    fn name(opened: &(PathBuf, Arc<dyn Engine>)) -> &str {
        opened.0.file_name().unwrap().to_str().unwrap()
    }

    #[test]
    fn each_holder_has_a_file_of_its_own_and_the_first_free_one_is_taken_again() {
        let (dir, arena) = (tempfile::tempdir().unwrap(), Arena::new(GRANULE).unwrap());
        let take = |size| open_in(dir.path(), &options(size), &arena).unwrap();
        let (one, two, three) = (take(Some(SIZE)), take(Some(SIZE)), take(Some(SIZE)));
        assert_eq!(
            [name(&one), name(&two), name(&three)],
            ["kvpool-0.ssd", "kvpool-1.ssd", "kvpool-2.ssd"]
        );
        drop(two);
        // An existing file keeps its size when none is given.
        let again = take(None);
        assert_eq!((name(&again), again.1.size()), ("kvpool-1.ssd", SIZE));
    }

    #[test]
    fn a_file_that_is_there_comes_before_a_new_one_of_a_lower_number() {
        let (dir, arena) = (tempfile::tempdir().unwrap(), Arena::new(GRANULE).unwrap());
        let take = || open_in(dir.path(), &options(SIZE), &arena).unwrap();
        let both = (take(), take());
        std::fs::remove_file(&both.0.0).unwrap();
        drop(both);
        let (one, two) = (take(), take());
        assert_eq!((name(&one), name(&two)), ("kvpool-1.ssd", "kvpool-0.ssd"));
    }

    fn patient() -> Options {
        Options {
            patience: Duration::from_secs(60),
            ..options(SIZE)
        }
    }

    /// Starts a process that prints a byte once it has locked the file.
    fn started(command: &mut Command) -> Child {
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = process.stdout.as_mut().unwrap();
        output.read_exact(&mut [0]).unwrap();
        process
    }

    #[test]
    fn a_file_whose_process_is_dead_is_waited_for_before_another_is_made() {
        let (dir, arena) = (tempfile::tempdir().unwrap(), Arena::new(GRANULE).unwrap());
        drop(open_in(dir.path(), &options(SIZE), &arena).unwrap());
        // The process that took the lock is dead, and its lock stays: as if a disk had not ended its writes.
        let script = r#"exec 9<>"$0"; flock --exclusive 9; echo; exec sleep 120"#;
        let mut command = Command::new("sh");
        let mut process = started(command.args(["-c", script]).arg(file(dir.path(), 0)));
        let freed = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            process.kill().unwrap();
            process.wait().unwrap();
        });
        let taken = open_in(dir.path(), &patient(), &arena).unwrap();
        freed.join().unwrap();
        assert_eq!(name(&taken), "kvpool-0.ssd");
    }

    #[test]
    fn a_file_that_a_tool_reads_is_waited_for_before_another_is_made() {
        let (dir, arena) = (tempfile::tempdir().unwrap(), Arena::new(GRANULE).unwrap());
        drop(open_in(dir.path(), &options(SIZE), &arena).unwrap());
        let to_read = Options {
            size: None,
            read_only: true,
            ..options(SIZE)
        };
        let tool = open(&file(dir.path(), 0), &to_read, &arena).unwrap();
        let freed = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            drop(tool);
        });
        let taken = open_in(dir.path(), &patient(), &arena).unwrap();
        freed.join().unwrap();
        assert_eq!(name(&taken), "kvpool-0.ssd");
    }

    #[test]
    fn files_of_live_processes_are_not_waited_for() {
        let (dir, arena) = (tempfile::tempdir().unwrap(), Arena::new(GRANULE).unwrap());
        drop(open_in(dir.path(), &options(SIZE), &arena).unwrap());
        let mut command = Command::new("flock");
        command.arg("--no-fork").arg(file(dir.path(), 0));
        let mut sibling = started(command.args(["sh", "-c", "echo; exec sleep 120"]));
        let begun = Instant::now();
        let take = || open_in(dir.path(), &patient(), &arena).unwrap();
        let (one, two) = (take(), take());
        let took = begun.elapsed();
        assert_eq!((name(&one), name(&two)), ("kvpool-1.ssd", "kvpool-2.ssd"));
        assert!(took < Duration::from_secs(30), "{took:?}");
        sibling.kill().unwrap();
        sibling.wait().unwrap();
        assert_eq!(name(&take()), "kvpool-0.ssd");
    }

    #[test]
    fn a_file_that_stays_locked_is_given_up() {
        let (dir, arena) = (tempfile::tempdir().unwrap(), Arena::new(GRANULE).unwrap());
        drop(open_in(dir.path(), &options(SIZE), &arena).unwrap());
        let reader = std::fs::File::open(file(dir.path(), 0)).unwrap();
        rustix::fs::flock(&reader, FlockOperation::LockShared).unwrap();
        let patience = Duration::from_millis(200);
        let brief = Options {
            patience,
            ..options(SIZE)
        };
        let begun = Instant::now();
        let taken = open_in(dir.path(), &brief, &arena).unwrap();
        assert_eq!(name(&taken), "kvpool-1.ssd");
        assert!(begun.elapsed() >= patience);
    }

    #[test]
    fn other_files_of_the_directory_are_left_alone() {
        let (dir, arena) = (tempfile::tempdir().unwrap(), Arena::new(GRANULE).unwrap());
        let others = ["kvpool-00.ssd", "kvpool-x.ssd", "kvpool-1.ssd.old", "data"];
        for other in others {
            std::fs::write(dir.path().join(other), "mine").unwrap();
        }
        let taken = open_in(dir.path(), &options(SIZE), &arena).unwrap();
        assert_eq!(name(&taken), "kvpool-0.ssd");
        for other in others {
            assert_eq!(std::fs::read(dir.path().join(other)).unwrap(), b"mine");
        }
    }

    #[test]
    fn holders_that_begin_at_once_get_different_files() {
        let (dir, arena) = (tempfile::tempdir().unwrap(), Arena::new(GRANULE).unwrap());
        let taken: Vec<_> = std::thread::scope(|scope| {
            let take = || open_in(dir.path(), &options(SIZE), &arena).unwrap();
            let each: Vec<_> = (0..8).map(|_| scope.spawn(take)).collect();
            each.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let names: BTreeSet<_> = taken.iter().map(name).collect();
        assert_eq!(names.len(), 8);
        assert!(names.contains("kvpool-7.ssd"), "{names:?}");
    }

    #[test]
    fn a_file_without_room_is_refused_and_not_left_behind() {
        let (dir, arena) = (tempfile::tempdir().unwrap(), Arena::new(GRANULE).unwrap());
        let refused = open_in(dir.path(), &options(1 << 50), &arena).unwrap_err();
        assert!(refused.to_string().contains("bytes free"), "{refused}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let missing = open_in(&dir.path().join("none"), &options(SIZE), &arena).unwrap_err();
        assert!(missing.to_string().contains("none"), "{missing}");
    }

    #[test]
    fn a_file_that_was_left_empty_is_used() {
        let (dir, arena) = (tempfile::tempdir().unwrap(), Arena::new(GRANULE).unwrap());
        std::fs::write(dir.path().join("kvpool-0.ssd"), "").unwrap();
        let taken = open_in(dir.path(), &options(SIZE), &arena).unwrap();
        assert_eq!((name(&taken), taken.1.size()), ("kvpool-0.ssd", SIZE));
    }

    #[test]
    fn a_share_is_a_tenth_of_the_free_room_within_limits() {
        assert_eq!(share_of(LEAST * SHARE - 1), None);
        assert_eq!(share_of(LEAST * SHARE), Some(LEAST));
        assert_eq!(share_of(100 << 30), Some(10 << 30));
        assert_eq!(share_of(u64::MAX), Some(MOST));
        assert_eq!(share_of((LEAST + 1) * SHARE), Some(LEAST));
    }
}
