//! A filesystem with one file, whose faults the test chooses. To a daemon it is a failing disk.
//!
//! It is mounted with FUSE. So the daemon meets real errors of the kernel, on the engine that it
//! uses in production.

mod trap;

pub use trap::{Point, Trap};

use anyhow::Context;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, SessionACL, TimeOrNow, WriteFlags,
};
use kvpool_types::medium::DATA_START;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};
use trap::Held;

const NAME: &str = "ssd";
const ROOT: INodeNo = INodeNo::ROOT;
const FILE: INodeNo = INodeNo(2);
const FOREVER: Duration = Duration::from_secs(3600);

/// The behaviour of reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// All succeed.
    None,
    /// All fail.
    Fails(Errno),
    /// Writes fail, and reads succeed.
    RefusesWrites(Errno),
    /// Large requests transfer half of their bytes. A small read returns no bytes, and a small
    /// write fails with `EIO`. So the request for the rest of a large one fails too. Linux repeats
    /// a write of which no byte is taken without end, and reports that to no program.
    Short,
    /// Each takes this long.
    Late(Duration),
    /// None ends before the fault does.
    Hangs,
}

/// The most bytes of a small request.
const SMALL: u32 = 192 << 10;

fn half(size: u32) -> u32 {
    match size > SMALL {
        true => size / 2 / 4096 * 4096,
        false => 0,
    }
}

/// The mounted filesystem. It is unmounted on drop, after its fault has ended.
#[derive(Debug)]
pub struct FaultyDisk {
    session: Option<BackgroundSession>,
    shared: Arc<Shared>,
    mount: tempfile::TempDir,
}

#[derive(Debug)]
struct Shared {
    backing: File,
    fault: Mutex<Fault>,
    changed: Condvar,
    trap: Mutex<Option<Arc<Held>>>,
}

impl FaultyDisk {
    /// Mounts the filesystem. A file in `place` holds its bytes.
    ///
    /// # Errors
    ///
    /// Without `/dev/fuse`, or without the right to mount.
    pub fn mount(place: &Path) -> anyhow::Result<Self> {
        let backing = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(place.join("backing"))?;
        let shared = Arc::new(Shared {
            backing,
            fault: Mutex::new(Fault::None),
            changed: Condvar::new(),
            trap: Mutex::default(),
        });
        let mount = tempfile::tempdir_in(place)?;
        let mut config = Config::default();
        config.acl = SessionACL::Owner;
        let files = OneFile(Arc::clone(&shared));
        let session =
            fuser::spawn_mount(files, mount.path(), &config).context("mount with FUSE")?;
        Ok(Self {
            session: Some(session),
            shared,
            mount,
        })
    }

    /// The file to use as a medium. The first process that opens it creates it.
    pub fn path(&self) -> PathBuf {
        self.mount.path().join(NAME)
    }

    /// Begins or ends a fault.
    pub fn set(&self, fault: Fault) {
        *self
            .shared
            .fault
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = fault;
        self.shared.changed.notify_all();
    }

    /// Sets a trap for the next request of this kind. It replaces the trap before it.
    pub fn trap(&self, point: Point) -> Trap {
        let (trap, held) = Trap::new(point);
        if let Some(before) = self.shared.trap().replace(held) {
            before.end(Fault::None);
        }
        trap
    }
}

impl Drop for FaultyDisk {
    fn drop(&mut self) {
        // A hanging request would keep the daemon running, and the daemon keeps the mount.
        self.set(Fault::None);
        if let Some(session) = self.session.take() {
            drop(session);
            // The kernel may close the files of a killed daemon's io_uring only after the daemon has ended. Until then
            // it refuses the session's unmount. Where that unmount succeeded, this one finds no mount.
            let mut unmount = Command::new("umount");
            let _or_no_mount = unmount.arg("-l").arg(self.mount.path()).output();
        }
    }
}

impl Shared {
    fn fault(&self) -> Fault {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn trap(&self) -> MutexGuard<'_, Option<Arc<Held>>> {
        self.trap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while_it_hangs(&self) {
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .changed
            .wait_while(fault, |fault| *fault == Fault::Hangs);
        drop(waited);
    }

    /// Runs a request now, or later on its own thread.
    fn run(self: &Arc<Self>, point: Point, request: impl FnOnce(&Self, Fault) + Send + 'static) {
        let (shared, fault) = (Arc::clone(self), self.fault());
        let trap = self.trap().clone();
        if let Some(held) = trap.filter(|held| held.springs(point)) {
            std::thread::spawn(move || {
                let fault = held.wait_for_release();
                request(&shared, fault);
            });
            return;
        }
        match fault {
            Fault::Late(delay) => {
                std::thread::spawn(move || {
                    std::thread::sleep(delay);
                    request(&shared, Fault::None);
                });
            }
            Fault::Hangs => {
                std::thread::spawn(move || {
                    shared.wait_while_it_hangs();
                    request(&shared, Fault::None);
                });
            }
            _ => request(self, fault),
        }
    }

    fn size(&self) -> u64 {
        self.backing.metadata().map_or(0, |held| held.len())
    }

    fn attributes(&self, of: INodeNo) -> FileAttr {
        let size = if of == FILE { self.size() } else { 0 };
        let now = SystemTime::now();
        FileAttr {
            ino: of,
            size,
            blocks: size / 512,
            atime: now,
            mtime: now,
            ctime: now,
            crtime: now,
            kind: if of == FILE {
                FileType::RegularFile
            } else {
                FileType::Directory
            },
            perm: 0o700,
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// The filesystem: a directory with one file.
struct OneFile(Arc<Shared>);

impl Filesystem for OneFile {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        // An empty file does not exist yet.
        if name == NAME && self.0.size() > 0 {
            reply.entry(&Duration::ZERO, &self.0.attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let known = ino == ROOT || ino == FILE;
        match known {
            true => reply.attr(&Duration::ZERO, &self.0.attributes(ino)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match size.map_or(Ok(()), |size| self.0.backing.set_len(size)) {
            Ok(()) => reply.attr(&Duration::ZERO, &self.0.attributes(ino)),
            Err(error) => reply.error(error.into()),
        }
    }

    fn create(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let attributes = self.0.attributes(FILE);
        let flags = FopenFlags::FOPEN_DIRECT_IO;
        reply.created(&FOREVER, &attributes, Generation(0), FileHandle(0), flags);
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.0.run(Point::Read, move |shared, fault| {
            let length = match fault {
                Fault::Fails(errno) => return reply.error(errno),
                Fault::Short => half(size),
                _ => size,
            };
            let mut bytes = vec![0; length as usize];
            match shared.backing.read_at(&mut bytes, offset) {
                Ok(read) => reply.data(bytes.get(..read).unwrap_or_default()),
                Err(error) => reply.error(error.into()),
            }
        });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let bytes = data.to_vec();
        let point = match offset < DATA_START {
            true => Point::Superblock,
            false => Point::Extent,
        };
        self.0.run(point, move |shared, fault| {
            let length = match fault {
                Fault::Fails(errno) | Fault::RefusesWrites(errno) => return reply.error(errno),
                Fault::Short => half(u32::try_from(bytes.len()).unwrap_or(0)) as usize,
                _ => bytes.len(),
            };
            if length == 0 {
                return reply.error(Errno::EIO);
            }
            let bytes = bytes.get(..length).unwrap_or_default();
            match shared.backing.write_all_at(bytes, offset) {
                Ok(()) => reply.written(u32::try_from(length).unwrap_or(u32::MAX)),
                Err(error) => reply.error(error.into()),
            }
        });
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        // 4 GiB, all of it free.
        reply.statfs(1 << 20, 1 << 20, 1 << 20, 8, 8, 4096, 255, 4096);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.0.run(Point::Flush, move |shared, fault| match fault {
            Fault::Fails(errno) => reply.error(errno),
            _ => match shared.backing.sync_data() {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error.into()),
            },
        });
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        _: i32,
        reply: ReplyEmpty,
    ) {
        match self.0.backing.set_len(self.0.size().max(offset + length)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error.into()),
        }
    }
}
