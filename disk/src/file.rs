//! Opening a device or file: its size, its lock, direct I/O, and the choice of the engine.

use crate::GRANULE;
use crate::arena::Arena;
use crate::engine::{Engine, EngineKind};
use crate::threads::Threads;
use crate::uring::Uring;
use rustix::fs::{FallocateFlags, FileType, FlockOperation, Mode, OFlags, StatVfs};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The interval of tries to take a lock that another process has.
const POLL: Duration = Duration::from_millis(20);

/// Which engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// io_uring; threads if io_uring is not permitted.
    #[default]
    Auto,
    /// io_uring; an error if it is not permitted.
    Uring,
    /// Threads.
    Threads,
}

/// How to open a device or file.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The size in bytes, for a file. A missing file is created, and all its space is allocated at once.
    /// `None` opens a device or file as it is.
    pub size: Option<u64>,
    /// The engine.
    pub engine: Choice,
    /// Whether to use the page cache even if direct I/O is possible.
    pub buffered: bool,
    /// The most transfers in progress at a time.
    pub depth: u32,
    /// How long to wait for another process to release the device or file. The last requests of a killed
    /// process hold it until they end.
    pub patience: Duration,
    /// Whether to open for reads alone. A file may have other readers meanwhile, and a device may not. With a size this
    /// has no effect.
    pub read_only: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            size: None,
            engine: Choice::Auto,
            buffered: false,
            depth: 128,
            patience: Duration::ZERO,
            read_only: false,
        }
    }
}

/// Why a device or file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The system refused a step.
    #[error("cannot {what} {}: {source}", path.display())]
    System {
        /// The step.
        what: &'static str,
        /// The device or file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// It does not exist, and no size was given for a new file.
    #[error("{} does not exist: to make a file there, give its size", path.display())]
    Missing {
        /// The device or file.
        path: PathBuf,
    },
    /// Another process has locked it.
    #[error("{} is in use by another process", path.display())]
    Busy {
        /// The device or file.
        path: PathBuf,
    },
    /// Another process or the system itself uses the device.
    #[error("{} is in use: by another process, a mount, swap, a volume or an array", path.display())]
    DeviceBusy {
        /// The device.
        path: PathBuf,
    },
    /// The directory for a new file, or of media, does not exist.
    #[error("the directory {} does not exist: make it first, or mount its disk", path.display())]
    NoDirectory {
        /// The directory.
        path: PathBuf,
    },
    /// It is a directory.
    #[error("{} is a directory: name a file in it, or give --ssd dir={}", path.display(), path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// It is neither a file nor a block device.
    #[error("{} is neither a file nor a block device", path.display())]
    Kind {
        /// The path.
        path: PathBuf,
    },
    /// A file must have a size, and a device has its own.
    #[error("{}: {reason}", path.display())]
    Size {
        /// The device or file.
        path: PathBuf,
        /// The fault of the size.
        reason: String,
    },
}

/// An open device or file, locked against other processes.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) fd: OwnedFd,
    pub(crate) size: u64,
    /// Whether transfers bypass the page cache.
    pub(crate) is_direct: bool,
}

/// Opens a device or file, and starts an engine for it. The buffers of requests should come from `arena`,
/// which io_uring registers once.
///
/// # Errors
///
/// Every variant of [`OpenError`]. Nothing is written in that case. A missing file may have been created, unless
/// [`check`] refuses it.
pub fn open(
    path: &Path,
    options: &Options,
    arena: &Arc<Arena>,
) -> Result<Arc<dyn Engine>, OpenError> {
    let file = Arc::new(File::open(path, options)?);
    let depth = options.depth.max(1);
    let direct = file.is_direct;
    let system = |what| {
        let path = path.to_owned();
        move |source| OpenError::System { what, path, source }
    };
    if options.engine != Choice::Threads {
        match Uring::start(Arc::clone(&file), arena, depth) {
            Ok(engine) => {
                tracing::info!(path = %path.display(), engine = "io_uring", direct, "disk opened");
                return Ok(Arc::new(engine));
            }
            Err(source) if options.engine == Choice::Uring => {
                return Err(system("use io_uring for")(source));
            }
            Err(error) => tracing::warn!(path = %path.display(), %error, fallback = "threads",
                "io_uring cannot be used here (a container's seccomp profile often blocks it)"),
        }
    }
    let engine = Threads::start(file, depth).map_err(system("start threads for"))?;
    tracing::info!(path = %path.display(), engine = "threads", direct, "disk opened");
    Ok(Arc::new(engine))
}

/// Finds what [`open`] with this size would refuse at once. Changes nothing and takes no lock.
///
/// # Errors
///
/// [`OpenError`], as [`open`].
pub fn check(path: &Path, size: Option<u64>) -> Result<(), OpenError> {
    let refused = |errno: Errno| OpenError::System {
        what: "open",
        path: path.to_owned(),
        source: errno.into(),
    };
    match rustix::fs::stat(path) {
        Err(Errno::NOENT) => match size {
            Some(size) => check_new(path, size),
            None => Err(OpenError::Missing {
                path: path.to_owned(),
            }),
        },
        Err(errno) => Err(refused(errno)),
        Ok(found) if FileType::from_raw_mode(found.st_mode) == FileType::Directory => {
            Err(OpenError::Directory {
                path: path.to_owned(),
            })
        }
        Ok(_) => {
            let flags = OFlags::RDWR | OFlags::CLOEXEC;
            match rustix::fs::open(path, flags, Mode::empty()) {
                // The last process may still have it.
                Ok(_) | Err(Errno::BUSY) => Ok(()),
                Err(errno) => Err(refused(errno)),
            }
        }
    }
}

/// Checks the directory and the size of a file that does not exist yet.
fn check_new(path: &Path, size: u64) -> Result<(), OpenError> {
    if rustix::fs::lstat(path).is_ok() {
        // A link to a missing file, which may be made on another filesystem.
        return Ok(());
    }
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let room = rustix::fs::statvfs(parent).map_err(|errno| match errno {
        Errno::NOENT => OpenError::NoDirectory {
            path: parent.to_owned(),
        },
        errno => OpenError::System {
            what: "measure",
            path: parent.to_owned(),
            source: errno.into(),
        },
    })?;
    let fault = fault_of_size(size).or_else(|| fault_of_room(size, &room));
    fault.map_or(Ok(()), |reason| {
        Err(OpenError::Size {
            path: path.to_owned(),
            reason,
        })
    })
}

/// Why no medium can have this size.
fn fault_of_size(size: u64) -> Option<String> {
    let is_whole = size.is_multiple_of(GRANULE as u64) && size > 0;
    (!is_whole).then(|| format!("{size} bytes are no multiple of {GRANULE}"))
}

/// Why a file cannot grow by this many bytes. A filesystem may fill up completely before it refuses a request
/// for too much space.
fn fault_of_room(more: u64, room: &StatVfs) -> Option<String> {
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    (more > free).then(|| {
        format!("the filesystem has {free} bytes free, and size= asks for {more} more: lower it")
    })
}

/// The name of an engine in status and logs.
impl EngineKind {
    /// The name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uring => "io_uring",
            Self::Threads => "threads",
            Self::Memory => "memory",
        }
    }
}

/// Locks a device or file. Waits at most `patience` for another process to release it.
fn lock(
    fd: &OwnedFd,
    operation: FlockOperation,
    path: &Path,
    patience: Duration,
) -> Result<(), OpenError> {
    let until = Instant::now() + patience;
    let mut is_said = false;
    loop {
        match rustix::fs::flock(fd, operation) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => {
                if !std::mem::replace(&mut is_said, true) {
                    tracing::info!(path = %path.display(), ?patience,
                        "another process has the medium; waiting for it");
                }
                std::thread::sleep(POLL);
            }
            Err(Errno::WOULDBLOCK) => {
                return Err(OpenError::Busy {
                    path: path.to_owned(),
                });
            }
            Err(errno) => {
                return Err(OpenError::System {
                    what: "lock",
                    path: path.to_owned(),
                    source: errno.into(),
                });
            }
        }
    }
}

impl File {
    fn open(path: &Path, options: &Options) -> Result<Self, OpenError> {
        let system = |what: &'static str| {
            move |errno: Errno| OpenError::System {
                what,
                path: path.to_owned(),
                source: errno.into(),
            }
        };
        let size = |reason: String| OpenError::Size {
            path: path.to_owned(),
            reason,
        };
        let (access, operation) = match options.read_only && options.size.is_none() {
            true => (OFlags::RDONLY, FlockOperation::NonBlockingLockShared),
            false => (OFlags::RDWR, FlockOperation::NonBlockingLockExclusive),
        };
        let mut flags = access | OFlags::CLOEXEC;
        let there = rustix::fs::stat(path).map(|found| FileType::from_raw_mode(found.st_mode));
        match there {
            Err(Errno::NOENT) => {
                if let Some(wanted) = options.size {
                    check_new(path, wanted)?;
                    flags |= OFlags::CREATE;
                }
            }
            Ok(FileType::Directory) => {
                return Err(OpenError::Directory {
                    path: path.to_owned(),
                });
            }
            // The kernel then reserves the device for this process, so that no process mounts or formats it
            // meanwhile.
            Ok(FileType::BlockDevice) => flags |= OFlags::EXCL,
            _ => {}
        }
        let refused = |errno| match errno {
            Errno::BUSY if flags.contains(OFlags::EXCL) => OpenError::DeviceBusy {
                path: path.to_owned(),
            },
            errno => system("open")(errno),
        };
        let mode = Mode::RUSR | Mode::WUSR;
        let until = Instant::now() + options.patience;
        let open = |flags: OFlags| loop {
            match rustix::fs::open(path, flags, mode) {
                Err(Errno::BUSY) if Instant::now() < until => std::thread::sleep(POLL),
                opened => return opened,
            }
        };
        let direct = if options.buffered {
            None
        } else {
            match open(flags | OFlags::DIRECT) {
                Ok(fd) => Some(fd),
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                    tracing::warn!(path = %path.display(), fallback = "the page cache",
                        "the filesystem refuses direct I/O");
                    None
                }
                Err(Errno::NOENT) if options.size.is_none() => {
                    return Err(OpenError::Missing {
                        path: path.to_owned(),
                    });
                }
                Err(errno) => return Err(refused(errno)),
            }
        };
        let is_direct = direct.is_some();
        let fd = match direct {
            Some(fd) => fd,
            None => open(flags).map_err(refused)?,
        };
        lock(&fd, operation, path, options.patience)?;
        let found = rustix::fs::fstat(&fd).map_err(system("examine"))?;
        let held = match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => u64::try_from(found.st_size).unwrap_or(0),
            FileType::BlockDevice => {
                rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0)).map_err(system("measure"))?
            }
            _ => {
                return Err(OpenError::Kind {
                    path: path.to_owned(),
                });
            }
        };
        // The end of a file may be no whole granule.
        let present = held / GRANULE as u64 * GRANULE as u64;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        if let Some(fault) = options.size.and_then(fault_of_size) {
            return Err(size(fault));
        }
        let bytes = match options.size {
            Some(wanted) if is_file && wanted < present => {
                return Err(size(format!(
                    "the file has {present} bytes, and {wanted} are configured: a file is not cut"
                )));
            }
            Some(wanted) if is_file => {
                let room = rustix::fs::fstatvfs(&fd).map_err(system("measure"))?;
                if let Some(fault) = fault_of_room(wanted - present, &room) {
                    return Err(size(fault));
                }
                // All space is allocated now, so that no later write fails for want of space.
                rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, wanted)
                    .map_err(system("take the room of"))?;
                rustix::fs::fsync(&fd).map_err(system("sync"))?;
                wanted
            }
            Some(wanted) if wanted > present => {
                return Err(size(format!(
                    "the device has {present} bytes, and {wanted} are configured"
                )));
            }
            Some(wanted) => wanted,
            None => present,
        };
        if bytes == 0 {
            return Err(size(format!(
                "it has {held} bytes, too few for a medium; for a new file, give a size"
            )));
        }
        Ok(Self {
            fd,
            size: bytes,
            is_direct,
        })
    }
}
