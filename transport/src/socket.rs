//! Sends from and receives into scattered memory.
//!
//! The kernel sizes socket buffers and controls congestion, because it knows the path. A receive buffer that
//! shrinks would drop bytes that the peer was allowed to send.
//!
//! ADR 0029 says why kvpool leaves TCP to the kernel.

// UNSAFETY: hands the addresses of slices to the kernel, which copies from and to them. No
// reference is formed.
#![allow(unsafe_code, reason = "vectored I/O on shared memory")]

mod payload;

pub(crate) use payload::LargePayload;

use crate::memory::Slice;
use crate::wire::WireRef;
use kvpool_tls::Session;
use kvpool_types::{Length, Offset};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, sockopt};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// The most pieces of memory in one call.
const MAX_VECTORS: usize = 1024;
/// How bytes are sent by a caller that must not wait.
const NOW: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

/// Memory to send from, in order.
#[derive(Default)]
pub(crate) struct Gather<'a>(Vectors<'a>);

/// Memory to receive into, in order.
#[derive(Default)]
pub(crate) struct Scatter<'a>(Vectors<'a>);

#[derive(Default)]
struct Vectors<'a> {
    all: Vec<libc::iovec>,
    /// The index of the first vector that is not used up.
    next: usize,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> Gather<'a> {
    /// Appends bytes of this process.
    pub(crate) fn push_bytes(&mut self, bytes: &'a [u8]) {
        self.0.push(bytes.as_ptr().cast_mut(), bytes.len());
    }

    /// Appends a whole slice.
    pub(crate) fn push_slice(&mut self, slice: &'a Slice) {
        self.0.push(slice.as_ptr(), slice.length().as_usize());
    }

    /// Sends everything. Fails with `WouldBlock` when the socket's timeout passes without progress.
    pub(crate) fn send_all<'s>(mut self, socket: impl Into<WireRef<'s>>) -> io::Result<()> {
        let wire = socket.into();
        let socket = wire.socket();
        if let Some(tls) = wire.tls() {
            return self.send_sealed(socket, tls);
        }
        while let Some(mut message) = self.0.message() {
            // SAFETY: the message names vectors that live as long as `self`. They name memory that
            // is borrowed or counted for `'a`, and the kernel only reads it.
            let sent =
                unsafe { libc::sendmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_NOSIGNAL) };
            match moved(sent) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.0.advance(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn send_sealed(mut self, socket: BorrowedFd<'_>, tls: &Session) -> io::Result<()> {
        let length = self.0.left();
        let fill = |room: &mut [u8]| {
            self.0.copy_out(room);
        };
        tls.send_filled(length, fill, |bytes| {
            Ok(rustix::net::send(socket, bytes, SendFlags::NOSIGNAL)?)
        })
    }
}

impl<'a> Scatter<'a> {
    /// Appends bytes of this process.
    pub(crate) fn push_bytes(&mut self, bytes: &'a mut [u8]) {
        self.0.push(bytes.as_mut_ptr(), bytes.len());
    }

    /// Appends a part of a slice. Panics unless it lies inside and is writable.
    pub(crate) fn push_part(&mut self, slice: &'a Slice, from: Offset, length: Length) {
        let inside = from
            .0
            .checked_add(length.0)
            .is_some_and(|end| end <= slice.length().0);
        assert!(
            inside && slice.is_writable(),
            "invariant: bytes are received into writable memory"
        );
        self.0.push(
            slice.as_ptr().wrapping_add(from.as_usize()),
            length.as_usize(),
        );
    }

    /// The number of bytes that still fit.
    pub(crate) fn left(&self) -> u64 {
        self.0.left() as u64
    }

    /// Whether no room is left.
    pub(crate) fn is_full(&self) -> bool {
        self.0.next == self.0.all.len()
    }

    /// Waits for at least one byte and receives the available bytes. Returns 0 when the peer has
    /// closed. Fails with `WouldBlock` when the socket's timeout passes.
    ///
    /// With TLS the first byte may need a whole record, in any number of parts. Each has the
    /// socket's timeout.
    pub(crate) fn receive<'s>(&mut self, socket: impl Into<WireRef<'s>>) -> io::Result<usize> {
        self.receive_after(socket.into(), || Ok(()))
    }

    /// As [`Scatter::receive`], by `deadline`, also within a record of TLS. Changes the socket's
    /// timeouts. Fails with `WouldBlock` or `TimedOut` at the deadline.
    pub(crate) fn receive_by<'s>(
        &mut self,
        socket: impl Into<WireRef<'s>>,
        deadline: Instant,
    ) -> io::Result<usize> {
        let wire = socket.into();
        self.receive_after(wire, || {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            set_timeouts(wire.socket(), Some(left))?;
            Ok(wait_until_ready(wire.socket(), PollFlags::IN, deadline)?)
        })
    }

    /// As [`Scatter::receive`]. `before` is called before each wait for the socket, and its error
    /// ends the call.
    fn receive_after(
        &mut self,
        wire: WireRef<'_>,
        mut before: impl FnMut() -> io::Result<()>,
    ) -> io::Result<usize> {
        let socket = wire.socket();
        if let Some(tls) = wire.tls() {
            return self.receive_sealed(socket, tls, before);
        }
        loop {
            let Some(mut message) = self.0.message() else {
                return Ok(0);
            };
            before()?;
            // SAFETY: the message names vectors that live as long as `self`. They name memory that
            // is uniquely borrowed, or counted and writable, for `'a`. The kernel writes at most
            // that memory.
            let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
            match moved(received) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(count) => {
                    self.0.advance(count);
                    return Ok(count);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn receive_sealed(
        &mut self,
        socket: BorrowedFd<'_>,
        tls: &Session,
        mut before: impl FnMut() -> io::Result<()>,
    ) -> io::Result<usize> {
        if self.is_full() {
            return Ok(0);
        }
        tls.receive_with(
            |bytes| receive_into(socket, bytes, &mut before),
            |plain| self.0.copy_in(plain),
        )
    }
}

/// Waits for bytes; a signal does not end the wait. `before` is called before each wait.
fn receive_into(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    before: &mut impl FnMut() -> io::Result<()>,
) -> io::Result<usize> {
    loop {
        before()?;
        match rustix::net::recv(socket, &mut *bytes, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            received => return Ok(received.map(|(_, count)| count)?),
        }
    }
}

impl Vectors<'_> {
    /// The bytes of the vectors that are not used up.
    fn left(&self) -> usize {
        let left = self.all.get(self.next..).unwrap_or_default();
        left.iter().map(|vector| vector.iov_len).sum()
    }

    /// Fills `piece` from the vectors, and uses them up. Returns the number of bytes.
    fn copy_out(&mut self, piece: &mut [u8]) -> usize {
        let mut filled = 0;
        while let Some(vector) = self.all.get(self.next) {
            let count = vector.iov_len.min(piece.len() - filled);
            let Some(room) = piece.get_mut(filled..filled + count).filter(|_| count > 0) else {
                break;
            };
            // SAFETY: the vector names memory that is borrowed or counted for the life of `self`, and
            // `count` lies within it and within `room`, which is memory of this function's caller.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    vector.iov_base.cast::<u8>().cast_const(),
                    room.as_mut_ptr(),
                    count,
                );
            }
            filled += count;
            self.advance(count);
        }
        filled
    }

    /// Fills the vectors from the start of `bytes`, and uses them up. Returns the number of bytes.
    fn copy_in(&mut self, mut bytes: &[u8]) -> usize {
        let all = bytes.len();
        while let Some(vector) = self.all.get(self.next)
            && !bytes.is_empty()
        {
            let (now, rest) = bytes.split_at(vector.iov_len.min(bytes.len()));
            // SAFETY: the vector names memory that is uniquely borrowed, or counted and writable, for
            // the life of `self`, and `now` is no longer than the vector.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    now.as_ptr(),
                    vector.iov_base.cast::<u8>(),
                    now.len(),
                );
            }
            self.advance(now.len());
            bytes = rest;
        }
        all - bytes.len()
    }

    fn push(&mut self, start: *mut u8, length: usize) {
        if length > 0 {
            self.all.push(libc::iovec {
                iov_base: start.cast(),
                iov_len: length,
            });
        }
    }

    /// The message of the next call; `None` when all vectors are used up.
    fn message(&mut self) -> Option<libc::msghdr> {
        let left = self.all.get_mut(self.next..)?;
        if left.is_empty() {
            return None;
        }
        // SAFETY: a message header has plain numbers and pointers, for which zero is valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = left.as_mut_ptr();
        message.msg_iovlen = left.len().min(MAX_VECTORS);
        Some(message)
    }

    fn advance(&mut self, mut count: usize) {
        while let Some(vector) = self.all.get_mut(self.next) {
            if count < vector.iov_len {
                vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(count).cast();
                vector.iov_len -= count;
                return;
            }
            count -= vector.iov_len;
            self.next += 1;
        }
    }
}

/// Waits until data arrives or the connection ends.
///
/// A blocking receive is also woken when the peer frees room for sent data: by TCP during a large
/// payload, by Unix sockets after every message. This wait is not.
pub(crate) fn wait_to_receive<'s>(socket: impl Into<WireRef<'s>>) -> io::Result<()> {
    let wire = socket.into();
    if wire.tls().is_some_and(Session::has_received) {
        return Ok(());
    }
    let socket = wire.socket();
    let mut poll = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    match rustix::event::poll(&mut poll, None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Waits until the socket is ready for `events`, or has failed. Fails with `TIMEDOUT` at `deadline`.
///
/// The timeout of a socket is no such limit: the kernel counts it in coarse ticks, and may add a quarter of a
/// second to 3 s.
pub(crate) fn wait_until_ready(
    socket: BorrowedFd<'_>,
    events: PollFlags,
    deadline: Instant,
) -> Result<(), Errno> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Errno::TIMEDOUT);
        }
        let limit = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        let mut poll = [PollFd::from_borrowed_fd(socket, events)];
        match rustix::event::poll(&mut poll, Some(&limit)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Sends as many bytes as the socket takes without blocking. Returns their number.
///
/// With TLS, encrypted bytes that the socket did not take count as sent. They wait in the session: see
/// [`has_unsent`] and [`flush`]. A poll for writability beforehand would not help: the kernel promises less
/// space than a TLS record takes.
pub(crate) fn send_some<'s>(socket: impl Into<WireRef<'s>>, mut bytes: &[u8]) -> usize {
    let wire = socket.into();
    let socket = wire.socket();
    let all = bytes.len();
    if let Some(tls) = wire.tls() {
        let sent = tls.send_some(bytes, |bytes| Ok(rustix::net::send(socket, bytes, NOW)?));
        return sent.unwrap_or(0);
    }
    while !bytes.is_empty()
        && let Ok(sent) = rustix::net::send(socket, bytes, NOW)
    {
        bytes = bytes.get(sent..).unwrap_or_default();
    }
    all - bytes.len()
}

/// Whether bytes that count as sent wait in a TLS session.
pub(crate) fn has_unsent<'s>(socket: impl Into<WireRef<'s>>) -> bool {
    socket.into().tls().is_some_and(Session::has_unsent)
}

/// Sends the bytes that wait in a TLS session. Fails as [`Gather::send_all`] does.
pub(crate) fn flush<'s>(socket: impl Into<WireRef<'s>>) -> io::Result<()> {
    let wire = socket.into();
    let Some(tls) = wire.tls() else {
        return Ok(());
    };
    tls.flush(|bytes| {
        let sent = rustix::net::send(wire.socket(), bytes, SendFlags::NOSIGNAL)?;
        Ok(sent)
    })
}

/// Sends a frame if the socket takes all of it at once, and never waits. Otherwise the peer gets at most a
/// part of the frame, and the connection cannot be used any more.
pub(crate) fn send_whole_now<'s>(socket: impl Into<WireRef<'s>>, bytes: &[u8]) -> bool {
    let wire = socket.into();
    send_some(wire, bytes) == bytes.len() && !has_unsent(wire)
}

fn moved(count: isize) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Sets the timeout of each send and receive; `None` means no timeout.
pub(crate) fn set_timeouts(socket: BorrowedFd<'_>, limit: Option<Duration>) -> io::Result<()> {
    // The kernel takes a limit of zero as no limit.
    let limit = limit.map(|limit| limit.max(Duration::from_millis(1)));
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, limit)?;
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Send, limit)?;
    Ok(())
}

/// Lets the kernel end a TCP connection to a lost peer, for example after a host failure. After a
/// minute of silence it sends three keepalives. Unacknowledged data is retransmitted for the same
/// total time.
pub(crate) fn notice_lost_peer(socket: BorrowedFd<'_>) {
    const QUIET: Duration = Duration::from_secs(60);
    const PAUSE: Duration = Duration::from_secs(10);
    const TIMES: u32 = 3;
    let lost = (QUIET + PAUSE * TIMES).as_millis();
    let set = sockopt::set_socket_keepalive(socket, true)
        .and_then(|()| sockopt::set_tcp_keepidle(socket, QUIET))
        .and_then(|()| sockopt::set_tcp_keepintvl(socket, PAUSE))
        .and_then(|()| sockopt::set_tcp_keepcnt(socket, TIMES))
        .and_then(|()| {
            sockopt::set_tcp_user_timeout(socket, u32::try_from(lost).unwrap_or(u32::MAX))
        });
    if let Err(error) = set {
        tracing::debug!(%error, "setting TCP keepalive failed: a lost peer is detected late");
    }
}

/// Ends all I/O on a socket: blocked calls return at once.
pub(crate) fn shut_down(socket: BorrowedFd<'_>) {
    // It fails only when the connection has ended already.
    let _ended = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::{Scatter, wait_to_receive};
    use std::io::{self, Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    /// The number of voluntary context switches of a thread of this process.
    fn sleeps(thread: i32) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
            .unwrap();
        line.trim().parse().unwrap()
    }

    #[test]
    fn a_waiting_receiver_sleeps_while_others_send() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let waiting = ours.try_clone().unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let waiter = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get())
                .unwrap();
            wait_to_receive(waiting.as_fd()).unwrap();
        });
        let thread = told.recv().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let before = sleeps(thread);
        for _ in 0..100 {
            ours.write_all(&[1]).unwrap();
            theirs.read_exact(&mut [0]).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        let slept = sleeps(thread) - before;
        assert!(slept < 10, "it was woken {slept} times for room to send");
        theirs.write_all(&[1]).unwrap();
        waiter.join().unwrap();
    }

    /// The kernel rounds a socket's timeout of this length up to ticks of up to a quarter of a second. The waits
    /// begin at different places in a tick.
    #[test]
    fn a_receive_ends_at_its_deadline_and_not_at_a_tick_of_the_kernel() {
        let waits: Vec<_> = (0..8)
            .map(|_| {
                std::thread::sleep(Duration::from_millis(32));
                std::thread::spawn(|| {
                    let (ours, _theirs) = UnixStream::pair().unwrap();
                    let deadline = Instant::now() + Duration::from_millis(2200);
                    let mut byte = [0];
                    let mut scatter = Scatter::default();
                    scatter.push_bytes(&mut byte);
                    let late = scatter.receive_by(ours.as_fd(), deadline).unwrap_err();
                    let ended = Instant::now();
                    assert_eq!(late.kind(), io::ErrorKind::TimedOut);
                    assert!(ended >= deadline, "it ended early");
                    ended - deadline
                })
            })
            .collect();
        let mut late: Vec<_> = waits.into_iter().map(|wait| wait.join().unwrap()).collect();
        late.sort_unstable();
        // A busy machine may delay some of the threads.
        assert!(late[4] < Duration::from_millis(70), "{late:?} late");
    }
}
