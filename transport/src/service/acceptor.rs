//! The door of a server: where callers stay until they have said hello.
//!
//! ```text
//! accept ──► caller ──hello, whole──► judged ──admitted──► a thread of its own
//!              │                         └──refused──► told why, kept a moment to read it
//!              └─ too slow, too large, or the oldest of too many: closed
//! ```
//!
//! Anybody who reaches the port can be a caller, so a caller costs a descriptor and a few KiB: no thread, a
//! frame of bounded size, a bounded time. Callers are bounded in number apart from connections, and take
//! no place of those.
//!
//! ADR 0027 has the bounds on callers.

use super::{Admitted, ServiceShared};
use crate::frame::{ReceiveError, decode_header, encode_head};
use crate::handshake::End;
use crate::host::Refused;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::data::{Failure, Meta};
use kvpool_types::wire::features::Features;
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op};
use kvpool_types::{Code, Length};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most callers at a time; over it the oldest one is closed.
const MOST_CALLERS: usize = 256;
/// The largest meta part of a hello, in bytes. The only part of variable length is the token.
pub(crate) const MAX_HELLO_BYTES: u64 = 8 << 10;
/// How long a refused caller may take to read why.
const LINGER: Duration = Duration::from_millis(500);
/// What is read from a refused caller at a time, to be thrown away.
const SCRATCH: usize = 4 << 10;

/// Marks the events of the listening socket, and of the descriptor that ends accepting.
const LISTENING: u64 = 0;
const WAKE: u64 = 1;
const FIRST_CALLER: u64 = 2;

/// The first frame of a connection, which has no payload.
pub(crate) struct FirstFrame {
    pub(crate) header: Header,
    pub(crate) meta: Vec<u8>,
}

struct Caller {
    socket: OwnedFd,
    until: Instant,
    stage: Stage,
}

enum Stage {
    /// Its header is coming.
    Header(Vec<u8>),
    /// Its meta is coming.
    Meta(Header, Vec<u8>),
    /// It has been told why it is refused.
    Leaving,
}

/// What a look at a caller came to.
enum CallerEvent {
    More,
    Whole(FirstFrame),
    End(End),
}

/// See the module's documentation. It lives on the accepting thread.
pub(super) struct Acceptor {
    shared: Arc<ServiceShared>,
    listener: OwnedFd,
    events: OwnedFd,
    callers: BTreeMap<u64, Caller>,
    next: u64,
}

impl Acceptor {
    pub(super) fn open(shared: Arc<ServiceShared>, listener: OwnedFd) -> io::Result<Self> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = |fd: BorrowedFd<'_>, mark| {
            epoll::add(
                &events,
                fd,
                epoll::EventData::new_u64(mark),
                epoll::EventFlags::IN,
            )
        };
        watch(listener.as_fd(), LISTENING)?;
        watch(shared.wake.as_fd(), WAKE)?;
        // Somebody who hangs up between the event and the call must not make it wait.
        rustix::io::ioctl_fionbio(&listener, true)?;
        Ok(Self {
            shared,
            listener,
            events,
            callers: BTreeMap::new(),
            next: FIRST_CALLER,
        })
    }

    /// Lets callers in until the service stops.
    pub(super) fn attend(&mut self) {
        let mut space = [MaybeUninit::uninit(); 64];
        loop {
            let timeout = self.end_late(Instant::now());
            let events = match epoll::wait(&self.events, &mut space, timeout.as_ref()) {
                Ok((events, _)) => events,
                Err(Errno::INTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "accepting connections stopped");
                    return;
                }
            };
            for event in events {
                // A copy: the field of a packed structure cannot be borrowed.
                let data = event.data;
                match data.u64() {
                    WAKE => return,
                    LISTENING => self.accept(),
                    caller => self.read_caller(caller),
                }
            }
        }
    }

    /// Closes who has taken too long; how long until the next one has.
    fn end_late(&mut self, now: Instant) -> Option<Timespec> {
        self.callers.retain(|_, caller| caller.until > now);
        let next = self.callers.values().map(|caller| caller.until).min()?;
        // The kernel's clock ticks in whole milliseconds: without one more it would be too early.
        let timeout = next.saturating_duration_since(now) + Duration::from_millis(1);
        Timespec::try_from(timeout).ok()
    }

    fn accept(&mut self) {
        match rustix::net::accept_with(&self.listener, rustix::net::SocketFlags::CLOEXEC) {
            Ok(socket) => self.receive(socket),
            // The other side has gone already, or a signal came.
            Err(Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) => {}
            Err(error) => {
                // Most likely there are no descriptors left. Callers hold some.
                tracing::warn!(%error, "a connection could not be accepted");
                if self.callers.pop_first().is_none() {
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }

    fn receive(&mut self, socket: OwnedFd) {
        while self.callers.len() >= MOST_CALLERS {
            tracing::debug!("too many callers have not said hello: the oldest one is closed");
            self.callers.pop_first();
        }
        let number = self.next;
        self.next += 1;
        let mark = epoll::EventData::new_u64(number);
        if let Err(error) = epoll::add(&self.events, &socket, mark, epoll::EventFlags::IN) {
            tracing::warn!(%error, "a connection cannot be watched, and is closed");
            return;
        }
        let caller = Caller {
            socket,
            until: Instant::now() + self.shared.serve.handshake(),
            stage: Stage::Header(Vec::with_capacity(HEADER_BYTES)),
        };
        self.callers.insert(number, caller);
        // Its hello is here already, most times.
        self.read_caller(number);
    }

    fn read_caller(&mut self, number: u64) {
        let Some(caller) = self.callers.get_mut(&number) else {
            // It was closed after the kernel had told of it.
            return;
        };
        match caller.look() {
            CallerEvent::More => {}
            CallerEvent::End(end) => self.turn_away(number, end),
            CallerEvent::Whole(frame) => {
                let admitted = self.shared.serve.judge(caller.socket.as_fd(), &frame);
                match admitted {
                    Ok(admitted) => self.let_in(number, admitted),
                    Err(end) => self.turn_away(number, end),
                }
            }
        }
    }

    fn let_in(&mut self, number: u64, admitted: Admitted) {
        let Some(caller) = self.callers.remove(&number) else {
            return;
        };
        if let Err(error) = epoll::delete(&self.events, &caller.socket) {
            tracing::debug!(%error, "a connection is still watched at the door");
        }
        let request = admitted.request;
        if let Err(caller) = self.shared.open(caller.socket, admitted) {
            let refused = Refused {
                code: Code::TooManyHeld,
                message: format!("at most {} connections are served", self.shared.limit),
            };
            self.tell(caller, request, &refused);
        }
    }

    fn turn_away(&mut self, number: u64, end: End) {
        let Some(caller) = self.callers.remove(&number) else {
            return;
        };
        match end {
            End::Over => {}
            End::Io(error) => tracing::debug!(%error, "a caller failed"),
            End::Refuse { request, refused } => {
                tracing::debug!(%refused, "a caller is refused");
                // Watched anew under its new number.
                let _watched = epoll::delete(&self.events, &caller.socket);
                self.tell(caller.socket, request, &refused);
            }
        }
    }

    /// Says why a caller is refused, and keeps it a moment: closing at once with bytes unread would make
    /// the kernel throw the answer away.
    fn tell(&mut self, socket: OwnedFd, request: u64, refused: &Refused) {
        let failure = Failure {
            code: refused.code,
            message: refused.message.clone(),
        };
        let epoch = self.shared.serve.epoch();
        let Ok(frame) = encode_head(Op::Failure, request, epoch, 0, |out| failure.encode(out))
        else {
            return;
        };
        // The socket is fresh, so a small frame has room; who made none is not waited for.
        if crate::socket::send_some(socket.as_fd(), &frame) < frame.len() {
            return;
        }
        if rustix::net::shutdown(&socket, rustix::net::Shutdown::Write).is_err() {
            return;
        }
        let number = self.next;
        self.next += 1;
        let mark = epoll::EventData::new_u64(number);
        if epoll::add(&self.events, &socket, mark, epoll::EventFlags::IN).is_err() {
            return;
        }
        let caller = Caller {
            socket,
            until: Instant::now() + LINGER,
            stage: Stage::Leaving,
        };
        self.callers.insert(number, caller);
    }
}

impl Caller {
    /// Reads what is there of its first frame, and nothing behind it.
    fn look(&mut self) -> CallerEvent {
        loop {
            match &mut self.stage {
                Stage::Header(bytes) => {
                    if let Err(seen) = fill(&self.socket, bytes, HEADER_BYTES) {
                        return seen;
                    }
                    let Some(head) = bytes.first_chunk() else {
                        return CallerEvent::More;
                    };
                    match check(head) {
                        Ok(header) => self.stage = Stage::Meta(header, Vec::new()),
                        Err(error) => return CallerEvent::End(error.into()),
                    }
                }
                Stage::Meta(header, bytes) => {
                    let wanted = Length(header.meta.into()).as_usize();
                    if let Err(seen) = fill(&self.socket, bytes, wanted) {
                        return seen;
                    }
                    return CallerEvent::Whole(FirstFrame {
                        header: *header,
                        meta: std::mem::take(bytes),
                    });
                }
                Stage::Leaving => return leave(&self.socket),
            }
        }
    }
}

/// Judges the header before any room is made for what it announces.
fn check(head: &[u8; HEADER_BYTES]) -> Result<Header, ReceiveError> {
    let header = decode_header(head)?;
    let error = if let (Op::Hello, Err(error)) = (header.op, Features::of(head).shared()) {
        error
    } else if u64::from(header.meta) > MAX_HELLO_BYTES {
        DecodeError::Oversized {
            what: "first frame of a connection",
            size: header.meta.into(),
            limit: MAX_HELLO_BYTES,
        }
    } else if header.payload > 0 {
        DecodeError::BadValue {
            what: "payload of a hello",
            value: header.payload,
        }
    } else {
        return Ok(header);
    };
    Err(ReceiveError::Decode {
        error,
        request: header.request,
    })
}

/// Reads until there are `wanted` bytes.
fn fill(socket: &OwnedFd, bytes: &mut Vec<u8>, wanted: usize) -> Result<(), CallerEvent> {
    while bytes.len() < wanted {
        let have = bytes.len();
        bytes.resize(wanted, 0);
        let room = bytes.get_mut(have..).unwrap_or_default();
        let received = rustix::net::recv(socket, room, RecvFlags::DONTWAIT);
        let count = received.as_ref().map_or(0, |(_, count)| *count);
        bytes.truncate(have + count);
        match received {
            Ok((_, 0)) => return Err(CallerEvent::End(End::Over)),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(CallerEvent::More),
            Err(error) => return Err(CallerEvent::End(End::Io(error.into()))),
        }
    }
    Ok(())
}

/// Throws away what still comes; over when the other side has closed.
fn leave(socket: &OwnedFd) -> CallerEvent {
    let mut scratch = [0; SCRATCH];
    match rustix::net::recv(socket, &mut scratch, RecvFlags::DONTWAIT) {
        Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR) => CallerEvent::More,
        Ok((_, 0)) | Err(_) => CallerEvent::End(End::Over),
    }
}
