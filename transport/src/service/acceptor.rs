//! The acceptor of a server. It holds callers until they have said hello.
//!
//! ```text
//! accept ──► caller ──complete hello──► judged ──admitted──► a thread for the connection
//!              │                           └──refused──► told why, kept a moment to read the reason
//!              └─ too slow, too large, or the oldest of too many: closed
//! ```
//!
//! Any host that reaches the port can be a caller. So a caller costs a descriptor and a few KiB,
//! without a thread, with a bounded frame and a bounded time. The number of callers has its own
//! bound, apart from that of connections.
//!
//! ADR 0027 explains the bounds on callers.

use super::{Admitted, ServiceShared};
use crate::frame::{ReceiveError, decode_header, encode_head};
use crate::handshake::End;
use crate::host::Refused;
use crate::wire::Wire;
use kvpool_tls::ServerHandshake;
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

/// The most callers at a time. Above it the oldest is closed.
const MOST_CALLERS: usize = 256;
/// The largest meta part of a hello, in bytes: a token of 8 KiB, and 256 bytes for the rest.
pub(crate) const MAX_HELLO_BYTES: u64 = (8 << 10) + 256;
/// The most bytes that are read from a caller after its TLS handshake. A hello takes one or two TLS records.
const MAX_CALLER_BYTES: usize = 64 << 10;
/// How long a refused caller stays connected to read the reason.
const LINGER: Duration = Duration::from_millis(500);
/// The bytes read from a refused caller at a time, and discarded.
const SCRATCH: usize = 4 << 10;

/// Identify the events of the listening socket, and of the descriptor that ends accepting.
const LISTENING: u64 = 0;
const WAKE: u64 = 1;
const FIRST_CALLER: u64 = 2;

/// The first frame of a connection, which has no payload.
pub(crate) struct FirstFrame {
    pub(crate) header: Header,
    pub(crate) meta: Vec<u8>,
}

struct Caller {
    /// The socket, with its TLS session once the handshake is complete.
    socket: Wire,
    until: Instant,
    /// The bytes that may still be read from the socket.
    budget: usize,
    stage: Stage,
}

enum Stage {
    /// The TLS handshake is incomplete.
    Handshake(Box<ServerHandshake>),
    /// The header is incomplete.
    Header(Vec<u8>),
    /// The meta part is incomplete.
    Meta(Header, Vec<u8>),
    /// The caller was refused and told why.
    Leaving,
}

/// The result of reading from a caller.
enum CallerEvent {
    More,
    Whole(FirstFrame),
    End(End),
}

/// See the module's documentation. Lives on the accepting thread.
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
        // A peer that hangs up between the event and the call must not block the accept.
        rustix::io::ioctl_fionbio(&listener, true)?;
        Ok(Self {
            shared,
            listener,
            events,
            callers: BTreeMap::new(),
            next: FIRST_CALLER,
        })
    }

    /// Admits callers until the service stops.
    pub(super) fn run(&mut self) {
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
                // A copy, because a packed structure's field cannot be borrowed.
                let data = event.data;
                match data.u64() {
                    WAKE => return,
                    LISTENING => self.accept(),
                    caller => self.read_caller(caller),
                }
            }
        }
    }

    /// Closes the callers that are past their time limit. Returns the time until the next limit.
    fn end_late(&mut self, now: Instant) -> Option<Timespec> {
        self.callers.retain(|_, caller| caller.until > now);
        let next = self.callers.values().map(|caller| caller.until).min()?;
        // The timeout has whole milliseconds, so one more is added to avoid waking too early.
        let timeout = next.saturating_duration_since(now) + Duration::from_millis(1);
        Timespec::try_from(timeout).ok()
    }

    fn accept(&mut self) {
        match rustix::net::accept_with(&self.listener, rustix::net::SocketFlags::CLOEXEC) {
            Ok(socket) => self.receive(socket),
            // The peer has closed already, or a signal arrived.
            Err(Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) => {}
            Err(error) => {
                // Most likely the process is out of descriptors, and callers hold some.
                tracing::warn!(%error, "a connection could not be accepted");
                if self.callers.pop_first().is_none() {
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }

    fn receive(&mut self, socket: OwnedFd) {
        while self.callers.len() >= MOST_CALLERS {
            tracing::debug!("too many callers: the oldest is closed before its hello");
            self.callers.pop_first();
        }
        let number = self.next;
        self.next += 1;
        let mark = epoll::EventData::new_u64(number);
        if let Err(error) = epoll::add(&self.events, &socket, mark, epoll::EventFlags::IN) {
            tracing::warn!(%error, "registering a connection with epoll failed: closed");
            return;
        }
        let stage = match self.shared.serve.tls().map(ServerHandshake::begin) {
            None => Stage::Header(Vec::with_capacity(HEADER_BYTES)),
            Some(Ok(handshake)) => Stage::Handshake(Box::new(handshake)),
            Some(Err(error)) => {
                tracing::warn!(%error, "a TLS handshake could not begin: connection closed");
                return;
            }
        };
        let caller = Caller {
            socket: socket.into(),
            until: Instant::now() + self.shared.serve.handshake(),
            budget: MAX_CALLER_BYTES,
            stage,
        };
        self.callers.insert(number, caller);
        // The hello has usually arrived already.
        self.read_caller(number);
    }

    fn read_caller(&mut self, number: u64) {
        let Some(caller) = self.callers.get_mut(&number) else {
            // The caller was closed after the kernel had reported its event.
            return;
        };
        match caller.read() {
            CallerEvent::More => {}
            CallerEvent::End(end) => self.refuse_caller(number, end),
            CallerEvent::Whole(frame) => {
                let admitted = self.shared.serve.judge(caller.socket.as_fd(), &frame);
                match admitted {
                    Ok(admitted) => self.admit(number, admitted),
                    Err(end) => self.refuse_caller(number, end),
                }
            }
        }
    }

    fn admit(&mut self, number: u64, admitted: Admitted) {
        let Some(caller) = self.callers.remove(&number) else {
            return;
        };
        if let Err(error) = epoll::delete(&self.events, &caller.socket) {
            tracing::debug!(%error, "removing a connection from epoll failed");
        }
        let request = admitted.request;
        if let Err(caller) = self.shared.open(caller.socket, admitted) {
            let refused = Refused {
                code: Code::TooManyHeld,
                message: format!("the limit of {} connections is reached", self.shared.limit),
            };
            self.send_refusal(caller, request, &refused);
        }
    }

    fn refuse_caller(&mut self, number: u64, end: End) {
        let Some(caller) = self.callers.remove(&number) else {
            return;
        };
        match end {
            End::Over => {}
            End::Io(error) => tracing::debug!(%error, "caller failed"),
            End::Refuse { request, refused } => {
                tracing::debug!(%refused, "caller refused");
                // The socket is registered again under a new number.
                let _watched = epoll::delete(&self.events, &caller.socket);
                self.send_refusal(caller.socket, request, &refused);
            }
        }
    }

    /// Tells a caller why it is refused, and keeps it for a moment. Closing at once with unread
    /// bytes would make the kernel discard the answer.
    fn send_refusal(&mut self, socket: Wire, request: u64, refused: &Refused) {
        let failure = Failure {
            code: refused.code,
            message: refused.message.clone(),
        };
        let epoch = self.shared.serve.epoch();
        let Ok(frame) = encode_head(Op::Failure, request, epoch, 0, |out| failure.encode(out))
        else {
            return;
        };
        // A new socket has room for a small frame. A peer that left no room gets no answer.
        if !crate::socket::send_whole_now(&socket, &frame) {
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
            budget: 0,
            stage: Stage::Leaving,
        };
        self.callers.insert(number, caller);
    }
}

impl Caller {
    /// Reads the available bytes of the first frame, and none after it.
    fn read(&mut self) -> CallerEvent {
        loop {
            match &mut self.stage {
                Stage::Handshake(handshake) => match handshake.advance(self.socket.as_fd()) {
                    Ok(false) => return CallerEvent::More,
                    Ok(true) => {
                        if let Err(error) = self.finish_handshake() {
                            return CallerEvent::End(End::Io(error));
                        }
                    }
                    Err(error) => return CallerEvent::End(End::Io(error)),
                },
                Stage::Header(bytes) => {
                    if let Err(seen) = fill(&self.socket, &mut self.budget, bytes, HEADER_BYTES) {
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
                    if let Err(seen) = fill(&self.socket, &mut self.budget, bytes, wanted) {
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

impl Caller {
    fn finish_handshake(&mut self) -> io::Result<()> {
        let next = Stage::Header(Vec::with_capacity(HEADER_BYTES));
        if let Stage::Handshake(handshake) = std::mem::replace(&mut self.stage, next) {
            self.socket.begin_session(handshake.finish()?);
        }
        Ok(())
    }
}

/// Judges the header before any buffer is allocated for the announced sizes.
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

/// Reads until `bytes` holds `wanted` bytes; fails once `budget` is spent.
fn fill(
    socket: &Wire,
    budget: &mut usize,
    bytes: &mut Vec<u8>,
    wanted: usize,
) -> Result<(), CallerEvent> {
    while bytes.len() < wanted {
        let have = bytes.len();
        bytes.resize(wanted, 0);
        let room = bytes.get_mut(have..).unwrap_or_default();
        let received = socket.receive_now(room, budget);
        let count = received.as_ref().map_or(0, |count| *count);
        bytes.truncate(have + count);
        match received {
            Ok(0) => return Err(CallerEvent::End(End::Over)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(CallerEvent::More);
            }
            Err(error) => return Err(CallerEvent::End(End::Io(error))),
        }
    }
    Ok(())
}

/// Discards the bytes that arrive; ends when the peer has closed.
fn leave(socket: &Wire) -> CallerEvent {
    let mut scratch = [0; SCRATCH];
    match rustix::net::recv(socket, &mut scratch, RecvFlags::DONTWAIT) {
        Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR) => CallerEvent::More,
        Ok((_, 0)) | Err(_) => CallerEvent::End(End::Over),
    }
}
