//! One framed connection.
//!
//! The connection's own thread answers calls that need no wait, in order. A call that waits for
//! room or for durability also begins on that thread. If the call does not end soon, it continues
//! as a task of the runtime, so that it delays no call behind it. A lookup that waits for a load
//! from a medium becomes a task at once. When the connection ends, its waiting calls are dropped.

use super::greeting::Greeted;
use super::stream::Framed;
use super::waiting_calls::WaitingCalls;
use super::wire::{Error, answer, failure};
use super::{ConnectionSlot, Shared};
use crate::open_connections::EndRequests;
use crate::service::calls::Calls;
use crate::service::passing::{Called, call_span};
use crate::service::refused::{Refused, refused};
use crate::service::rights::{Allowed, Bearer};
use crate::store::journal::{end_loan, lend_thread};
use futures::future::BoxFuture;
use kvpool_proto::HelloRequest;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::frame::{Header, Op};
use kvpool_types::wire::incoming::Incoming;
use kvpool_types::{Code, Epoch, Token};
use parking_lot::Mutex;
use prost::Message;
use prost::bytes::Bytes;
use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tracing::Instrument;

/// How long the peer may stall a half-sent request or an unread answer.
const STALL: Duration = Duration::from_secs(5);
/// How long the connection's own thread waits for a commit or a reservation while no other request
/// is behind it. The call's completion then wakes this thread directly, without a third thread in
/// between.
const SOON: Duration = Duration::from_millis(1);

/// One framed connection.
#[derive(Debug)]
pub(super) struct Connection {
    shared: Arc<Shared>,
    socket: Framed,
    answers: Arc<Answers>,
    greeted: Greeted,
}

/// The sending side, shared with calls that answer later.
#[derive(Debug)]
pub(super) struct Answers {
    /// Outside the lock: ending the connection must not wait for a client that reads slowly.
    socket: Framed,
    /// The unsent rest of a frame. A sender holds the lock while it sends.
    rest: Mutex<Vec<u8>>,
}

impl Answers {
    fn new(socket: Framed) -> Self {
        Self {
            socket,
            rest: Mutex::default(),
        }
    }

    /// Sends one answer. Disconnects a client that leaves its socket full for too long: the client
    /// may be stopped, and its answers must not accumulate here.
    fn send(&self, frame: &[u8]) -> io::Result<()> {
        let mut unsent = self.rest.lock();
        let rest = std::mem::take(&mut *unsent);
        let sent = self
            .socket
            .write_all(&rest)
            .and_then(|()| self.socket.write_all(frame))
            .and_then(|()| self.socket.flush());
        sent.inspect_err(|_| {
            // The call fails only when the connection has already ended.
            let _ended = self.socket.shutdown(Shutdown::Both);
        })
    }

    /// [`Answers::send`] from a thread of the runtime, which a full socket must not block.
    async fn send_from_task(self: Arc<Self>, mut frame: Vec<u8>) -> io::Result<()> {
        if let Some(mut rest) = self.rest.try_lock()
            && rest.is_empty()
        {
            match self.socket.write_now(&frame) {
                Ok(sent) if sent == frame.len() && !self.socket.has_unsent() => return Ok(()),
                Ok(sent) => *rest = std::mem::take(&mut frame).split_off(sent),
                Err(error) if is_transient(error.kind()) => {}
                Err(error) => return Err(error),
            }
        }
        let sent = tokio::task::spawn_blocking(move || self.send(&frame)).await;
        // The runtime is shutting down, and the connection with it.
        sent.unwrap_or(Ok(()))
    }
}

impl EndRequests for Answers {
    fn end_requests(&self) {
        // The call fails only when the connection has already ended.
        let _ended = self.socket.shutdown(Shutdown::Read);
    }
}

/// A request after its first poll.
enum Begun {
    Answered(Vec<u8>),
    /// The call may have to wait.
    Goes(BoxFuture<'static, Vec<u8>>),
}

impl Connection {
    pub(super) fn new(shared: Arc<Shared>, socket: Framed, greeted: Greeted) -> io::Result<Self> {
        socket.set_timeouts(STALL)?;
        let answers = Arc::new(Answers::new(socket.try_clone()?));
        Ok(Self {
            shared,
            socket,
            answers,
            greeted,
        })
    }

    /// Answers the hello, and serves until the connection ends.
    pub(super) fn serve(mut self, runtime: &Handle) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        let Some(_open) = shared.open.add(Arc::clone(&self.answers) as _) else {
            // The master is stopping.
            return Ok(());
        };
        // A term that ended after the hello did not find this connection in its table.
        if !self.greeted.calls.are_led_at(&shared.seat) {
            return Ok(());
        }
        self.answers.send(&self.greeted.reply)?;
        // Calls have no payload.
        let mut incoming = Incoming::new(0);
        let ended = self.converse(&mut incoming, runtime);
        if let Err(Error::Decode(error)) = &ended {
            let refused = refused(error.code(), error.to_string());
            let epoch = shared.seat.known().epoch;
            self.answers.send(&failure(0, epoch, &refused))?;
        }
        // Other handles of the socket may live a little longer, so dropping this one does not close
        // it.
        let _ended = self.socket.shutdown(Shutdown::Both);
        match ended {
            Err(Error::Closed) => Ok(()),
            other => other,
        }
    }

    fn converse(&mut self, incoming: &mut Incoming, runtime: &Handle) -> Result<(), Error> {
        let (calls, spin) = (self.greeted.calls.clone(), self.greeted.spin);
        let mut waiting = WaitingCalls::new(self.shared.seat.wait_budget.clone());
        loop {
            let (header, meta) = self.next(incoming, spin)?;
            if header.op == Op::Greet {
                let frame = self.greet_again(&calls, &header, meta);
                self.answers.send(&frame)?;
                continue;
            }
            match begin(&calls, &self.greeted.bearer, &header, meta) {
                Begun::Answered(frame) => self.answers.send(&frame)?,
                Begun::Goes(mut call) => {
                    // The connection continues to read. So the client can end leases, and sees that
                    // the master is alive.
                    let Some(permits) = waiting.permit(&header) else {
                        let reason = "waiting calls hold the most memory allowed (max_waiting, 64 MiB a connection)";
                        let refused = refused(Code::TooManyHeld, reason);
                        let frame = failure(header.request, calls.epoch(), &refused);
                        self.answers.send(&frame)?;
                        continue;
                    };
                    let timeout = patience(header.op, incoming.has_begun());
                    if let Some(frame) = wait_for(&mut call, timeout) {
                        self.answers.send(&frame)?;
                        end_loan();
                        continue;
                    }
                    let answers = Arc::clone(&self.answers);
                    let answered = async move {
                        if let Err(error) = answers.send_from_task(call.await).await {
                            tracing::debug!(%error, "reply not sent");
                        }
                    };
                    waiting.spawn(permits, answered, runtime);
                }
            }
        }
    }

    /// A hello on an open connection brings a new token. A refused hello changes nothing.
    fn greet_again(&mut self, calls: &Calls, header: &Header, meta: Bytes) -> Vec<u8> {
        let judged = decode(meta).and_then(|mut request: HelloRequest| {
            let token = Token::from(std::mem::take(&mut request.token));
            let bearer = Bearer::new(self.shared.seat.guard.clone(), token);
            let reply = calls.hello(bearer.allow(request)?)?;
            Ok((reply, bearer))
        });
        let reply = judged.map(|(reply, bearer)| {
            self.greeted.bearer = Arc::new(bearer);
            reply
        });
        encode(header, calls.epoch(), reply)
    }

    /// Waits for the next request. Polls for `spin` first while spare cores exist.
    fn next(&mut self, incoming: &mut Incoming, spin: Duration) -> Result<(Header, Bytes), Error> {
        if let Some(request) = take(incoming)? {
            return Ok(request);
        }
        if !spin.is_zero()
            && let Some(request) = self.poll_busily(incoming, spin)?
        {
            return Ok(request);
        }
        loop {
            match fill(incoming, |room| self.socket.read(room)) {
                Ok(0) if incoming.has_begun() => {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                }
                Ok(0) => return Err(Error::Closed),
                Ok(_) => {
                    if let Some(request) = take(incoming)? {
                        return Ok(request);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // An idle connection may stay, but a half-sent request may not stall.
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && !incoming.has_begun() => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn poll_busily(
        &mut self,
        incoming: &mut Incoming,
        spin: Duration,
    ) -> Result<Option<(Header, Bytes)>, Error> {
        let shared = Arc::clone(&self.shared);
        let Some(_slot) = ConnectionSlot::take(&shared.spinning, shared.most_spinning) else {
            return Ok(None);
        };
        let until = Instant::now() + spin;
        while Instant::now() < until {
            match fill(incoming, |room| self.socket.read_now(room)) {
                Ok(0) if incoming.has_begun() => {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                }
                Ok(0) => return Err(Error::Closed),
                Ok(_) => {
                    if let Some(request) = take(incoming)? {
                        return Ok(Some(request));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }
}

fn begin(calls: &Calls, bearer: &Arc<Bearer>, header: &Header, meta: Bytes) -> Begun {
    let epoch = calls.epoch();
    let asks = matches!(
        header.op,
        Op::Reserve | Op::Lookup | Op::Exist | Op::MatchPrefix
    );
    if asks && !calls.have_nodes_returned() {
        // The work runs as a task, so that the connection answers pings meanwhile.
        let (calls, bearer, header) = (calls.clone(), Arc::clone(bearer), *header);
        return Begun::Goes(Box::pin(async move {
            calls.nodes_returned().await;
            match begin(&calls, &bearer, &header, meta) {
                Begun::Answered(frame) => frame,
                Begun::Goes(call) => call.await,
            }
        }));
    }
    macro_rules! now {
        ($call:ident) => {
            encode(
                header,
                epoch,
                allowed(bearer, meta).and_then(|request| {
                    let begun = Instant::now();
                    let span = call_span(header.op.name(), &*request);
                    let reply = span.in_scope(|| calls.$call(request));
                    calls.took(header.op.name(), begun.elapsed());
                    reply
                }),
            )
        };
    }
    macro_rules! later {
        ($call:ident) => {{
            let (calls, header) = (calls.clone(), *header);
            let request = allowed(bearer, meta);
            let call = Box::pin(async move {
                let reply = match request {
                    Ok(request) => {
                        let begun = Instant::now();
                        let span = call_span(header.op.name(), &*request);
                        let reply = calls.$call(request).instrument(span).await;
                        calls.took(header.op.name(), begun.elapsed());
                        reply
                    }
                    Err(refused) => Err(refused),
                };
                encode(&header, epoch, reply)
            });
            return Begun::Goes(call);
        }};
    }
    Begun::Answered(match header.op {
        Op::Exist => now!(exist),
        Op::MatchPrefix => now!(match_prefix),
        Op::Lookup if calls.have_media() => later!(lookup_restored),
        Op::Lookup => now!(lookup),
        Op::Renew => now!(renew),
        Op::Release => now!(release),
        Op::Reserve => later!(reserve),
        Op::Commit => later!(commit),
        Op::Ping => answer(Op::Pong, header.request, epoch, |_| {}),
        Op::Unknown => {
            let reason = "this master does not know the operation";
            failure(header.request, epoch, &refused(Code::Unimplemented, reason))
        }
        other => failure(
            header.request,
            epoch,
            &refused(
                Code::InvalidArgument,
                format!("a master does not answer {other:?}"),
            ),
        ),
    })
}

/// How long the connection's own thread waits for a call. `is_followed`: another request is behind it.
fn patience(op: Op, is_followed: bool) -> Duration {
    match op {
        // A load from a medium takes about as long as [`SOON`] or longer. No record delays its answer, so this
        // thread need not be lent to the journal.
        Op::Lookup => Duration::ZERO,
        _ if is_followed => Duration::ZERO,
        _ => SOON,
    }
}

/// Waits for a call on this thread, at most `timeout`. Polls it once if the timeout is zero.
fn wait_for(call: &mut BoxFuture<'static, Vec<u8>>, timeout: Duration) -> Option<Vec<u8>> {
    struct Unpark(std::thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let until = Instant::now() + timeout;
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = Context::from_waker(&waker);
    // If no other request is behind this one, the thread may do the disk I/O itself.
    let mut lends = !timeout.is_zero();
    loop {
        let mut poll = || call.as_mut().poll(&mut context);
        let polled = if std::mem::take(&mut lends) {
            lend_thread(poll)
        } else {
            poll()
        };
        if let Poll::Ready(frame) = polled {
            return Some(frame);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        std::thread::park_timeout(left);
    }
}

/// The next request that has already arrived.
fn take(incoming: &mut Incoming) -> Result<Option<(Header, Bytes)>, DecodeError> {
    let frame = incoming.next_frame()?;
    Ok(frame.map(|frame| (frame.header, Bytes::copy_from_slice(frame.meta))))
}

/// Reads once and returns the number of bytes.
fn fill(
    incoming: &mut Incoming,
    read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
) -> io::Result<usize> {
    let count = read(incoming.room())?;
    incoming.filled(count);
    Ok(count)
}

fn is_transient(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Decodes a request and checks that its caller may make it.
fn allowed<M: Message + Default + Called>(
    bearer: &Bearer,
    meta: Bytes,
) -> Result<Allowed<M>, Refused> {
    bearer.allow(decode(meta)?)
}

fn decode<M: Message + Default>(meta: Bytes) -> Result<M, Refused> {
    M::decode(meta).map_err(|error| refused(Code::Malformed, error.to_string()))
}

fn encode<M: Message>(header: &Header, epoch: Epoch, reply: Result<M, Refused>) -> Vec<u8> {
    match reply {
        Ok(reply) => answer(Op::Reply, header.request, epoch, |out| {
            out.reserve(reply.encoded_len());
            reply
                .encode(out)
                .expect("invariant: a vector takes what is appended");
        }),
        Err(refused) => failure(header.request, epoch, &refused),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::BootClock;
    use crate::config::Config;
    use crate::leadership::Seat;
    use crate::metrics::Metrics;
    use crate::pool::Pool;
    use crate::service::calls::calls_at;
    use crate::store::{EmbeddedOptions, EmbeddedStore};
    use kvpool_daemon::callers::Callers;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;
    use tokio::sync::Semaphore;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_connection_whose_term_ended_after_the_hello_ends() {
        let directory = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
        let metrics = Arc::new(Metrics::new().unwrap());
        let begun = Pool::start(
            Config::default(),
            Arc::new(store),
            Arc::new(BootClock),
            Arc::clone(&metrics),
        );
        let pool = begun.await.unwrap();
        let seat = Seat::new(Config::default(), metrics, Arc::new(BootClock));
        let seat = Arc::new(seat);
        let shared = Arc::new(Shared {
            open: seat.connections(),
            most_spinning: 1,
            spinning: AtomicUsize::new(0),
            callers: Callers::new(1, 1 << 20),
            tls: None,
            connection_permits: Arc::new(Semaphore::new(1)),
            seat,
        });
        for has_ended in [false, true] {
            shared.seat.lead(Arc::clone(&pool), "");
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (socket, _) = listener.accept().unwrap();
            let bearer = Bearer::new(shared.seat.guard.clone(), Token::from(String::new()));
            let greeted = Greeted {
                calls: calls_at(&shared.seat, None).unwrap(),
                bearer: Arc::new(bearer),
                spin: Duration::ZERO,
                reply: b"hello".to_vec(),
                _permit: shared.take_permit().unwrap(),
                _presence: None,
            };
            if has_ended {
                shared.seat.step_down("the term is over");
            } else {
                client.shutdown(Shutdown::Write).unwrap();
            }
            let socket = Framed::new(socket, None);
            let connection = Connection::new(Arc::clone(&shared), socket, greeted).unwrap();
            let runtime = Handle::current();
            let serving = std::thread::spawn(move || {
                let _entered = runtime.enter();
                connection.serve(&runtime)
            });
            let limit = Some(Duration::from_secs(10));
            client.set_read_timeout(limit).unwrap();
            let mut answer = Vec::new();
            let ended = client.read_to_end(&mut answer);
            assert!(ended.is_ok(), "it goes on: {ended:?}");
            assert_eq!(answer.is_empty(), has_ended, "{answer:?}");
            serving.join().unwrap().unwrap();
        }
        pool.stop().await;
    }

    #[test]
    fn only_a_call_that_writes_and_has_no_request_behind_it_is_waited_for() {
        for op in [Op::Commit, Op::Reserve] {
            assert_eq!(patience(op, false), SOON, "{op:?}");
            assert_eq!(patience(op, true), Duration::ZERO, "{op:?}");
        }
        for is_followed in [false, true] {
            assert_eq!(patience(Op::Lookup, is_followed), Duration::ZERO);
        }
        // With no patience a call is polled once. It then goes on as a task.
        let polls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&polls);
        let mut call: BoxFuture<'static, Vec<u8>> = Box::pin(std::future::poll_fn(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            Poll::<Vec<u8>>::Pending
        }));
        assert_eq!(wait_for(&mut call, patience(Op::Lookup, false)), None);
        assert_eq!(polls.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_connection_whose_client_does_not_read_is_ended_without_waiting_for_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        let answers = Arc::new(Answers::new(Framed::new(socket, None)));
        let sending = {
            let answers = Arc::clone(&answers);
            std::thread::spawn(move || answers.send(&vec![0; 64 << 20]))
        };
        let limit = Instant::now() + Duration::from_secs(10);
        while answers.rest.try_lock().is_some() {
            assert!(Instant::now() < limit, "nothing is sent");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (done, ended) = std::sync::mpsc::channel();
        let ender = Arc::clone(&answers);
        std::thread::spawn(move || {
            ender.end_requests();
            let _left = done.send(());
        });
        assert!(
            ended.recv_timeout(Duration::from_secs(5)).is_ok(),
            "it waits for the client"
        );
        drop(client);
        let _cut_off = sending.join().unwrap();
    }
}
