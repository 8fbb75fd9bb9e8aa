//! Descriptors passed beside frames, and the identity of a Unix socket's peer.

// UNSAFETY: reads socket options that no safe binding covers.
#![allow(unsafe_code, reason = "two socket options have no safe binding")]

use crate::host::ProcessIdentity;
use crate::socket::Gather;
use kvpool_types::ClientId;
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use rustix::process::{Pid, PidfdFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `SO_PEERPIDFD` of Linux 6.5 and later, which the bindings lack.
const SO_PEERPIDFD: libc::c_int = 77;

/// The file system of pidfds since Linux 6.9, where each process has its own inode.
const PID_FS_MAGIC: rustix::fs::FsWord = 0x5049_4446;

/// The process that opened the other end of a Unix socket.
pub(super) struct Credentials {
    pub(super) pid: i32,
    pub(super) uid: u32,
}

/// The credentials of the peer at the time it connected.
pub(super) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut raw = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    // SAFETY: the kernel writes a `ucred` for this option, and any bytes are a valid `ucred`.
    unsafe { socket_option(socket, libc::SO_PEERCRED, &mut raw) }?;
    Ok(Credentials {
        pid: raw.pid,
        uid: raw.uid,
    })
}

/// A pidfd of the process that opened the other end.
pub(super) fn peer_process(socket: BorrowedFd<'_>, pid: i32) -> io::Result<OwnedFd> {
    let mut raw: RawFd = -1;
    // SAFETY: the kernel writes a descriptor number for this option.
    match unsafe { socket_option(socket, SO_PEERPIDFD, &mut raw) } {
        Ok(()) => {
            // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
            Ok(unsafe { OwnedFd::from_raw_fd(raw) })
        }
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            let pid = Pid::from_raw(pid).ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "the client's process is not visible: it is in another pid namespace",
                )
            })?;
            Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
        }
        Err(error) => Err(error),
    }
}

/// Identifies the process behind a pidfd. Unlike the process id, the identity is valid in every pid
/// namespace.
pub(super) fn identify(
    process: &OwnedFd,
    pid: i32,
    client: ClientId,
) -> io::Result<ProcessIdentity> {
    // Before Linux 6.9 all pidfds share one inode, on another file system.
    let is_own = rustix::fs::fstatfs(process)?.f_type == PID_FS_MAGIC;
    Ok(match pid {
        _ if is_own => ProcessIdentity::Inode(rustix::fs::fstat(process)?.st_ino),
        0 => ProcessIdentity::Client(client),
        pid => ProcessIdentity::Pid(pid),
    })
}

/// # Safety
///
/// For this option the kernel must write at most a `T`, and a valid one.
unsafe fn socket_option<T>(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    value: &mut T,
) -> io::Result<()> {
    let mut length = libc::socklen_t::try_from(size_of::<T>())
        .expect("invariant: socket options are a few bytes");
    // SAFETY: the value is borrowed uniquely and its size is passed; the caller guarantees the
    // option.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_mut(value).cast(),
            &raw mut length,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Sends a frame with a descriptor attached to its first byte.
pub(super) fn send_with_fd(
    socket: BorrowedFd<'_>,
    frame: &[u8],
    fd: BorrowedFd<'_>,
) -> io::Result<()> {
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        unreachable!("invariant: the space is for one descriptor");
    }
    let sent = loop {
        let sent = rustix::net::sendmsg(
            socket,
            &[IoSlice::new(frame)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        match sent {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut rest = Gather::default();
    rest.push_bytes(frame.get(sent..).unwrap_or_default());
    rest.send_all(socket)
}

/// Receives up to `bytes`, and a descriptor if one is attached. Returns 0 when the peer has closed.
pub(crate) fn receive_with_fd(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let received = rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        match received {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let fd = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        })
        .next();
    Ok((received.bytes, fd))
}

/// Whether the process of a pidfd has exited.
pub(super) fn is_gone(process: &OwnedFd) -> bool {
    let mut polled = [rustix::event::PollFd::from_borrowed_fd(
        process.as_fd(),
        rustix::event::PollFlags::IN,
    )];
    let now = rustix::event::Timespec::default();
    matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(1..))
}
