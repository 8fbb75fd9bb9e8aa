//! The framed connection to a master, for the hot calls.
//!
//! A master of an older version does not speak the protocol and is called over gRPC. The client tries frames
//! again after [`AGAIN`].

use super::master::{CONNECT_TIMEOUT, PING_INTERVAL, PING_TIMEOUT};
use crate::clock::Deadline;
use crate::errors::ControlError;
use futures::future::BoxFuture;
use kvpool_auth::Credentials;
use kvpool_proto::{HelloReply, HelloRequest};
use kvpool_tls::{ClientTls, addresses};
use kvpool_transport::channel::Reply;
use kvpool_transport::{Channel, TransferError};
use kvpool_types::wire::features::Features;
use kvpool_types::wire::frame::Op;
use kvpool_types::{Code, Epoch};
use parking_lot::RwLock;
use prost::Message as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// How long a master that does not speak the protocol is called over gRPC.
const AGAIN: Duration = Duration::from_secs(30);
/// How long a master may take to answer a ping after a call that was too short for a ping during the call.
const PROBE_TIMEOUT: Duration = Duration::from_millis(300);

/// The framed connection to one master.
#[derive(Debug)]
pub(super) struct Framed {
    /// `host:port`.
    address: String,
    spin: Duration,
    credentials: Credentials,
    /// The number of the last token that the master got over `channel`.
    greeted: AtomicU64,
    /// `None` for a plain connection.
    tls: Option<ClientTls>,
    channel: RwLock<Option<Arc<Channel>>>,
    /// Whether a call got no answer in time. The master, or the network to it, may be gone.
    doubtful: AtomicBool,
    /// Held while the connection is being opened or probed.
    opening: tokio::sync::Mutex<Opening>,
    /// Whether the log already says that gRPC is used instead. All connections to the master share this.
    told: Arc<AtomicBool>,
}

/// The state of attempts to open the connection and to ping the master over it.
#[derive(Default)]
struct Opening {
    /// The time before which the connection is not opened again.
    not_before: Option<Instant>,
    /// A ping whose caller had no time left. The next caller waits for its answer. A caller's short deadline
    /// proves nothing about the master.
    probe: Option<BoxFuture<'static, bool>>,
}

impl std::fmt::Debug for Opening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opening")
            .field("not_before", &self.not_before)
            .finish_non_exhaustive()
    }
}

impl Framed {
    /// A connection to `address`, which is opened at its first use.
    pub(super) fn new(
        address: String,
        spin: Duration,
        credentials: Credentials,
        tls: Option<ClientTls>,
        told: Arc<AtomicBool>,
    ) -> Self {
        Self {
            address,
            spin,
            credentials,
            greeted: AtomicU64::new(0),
            tls,
            channel: RwLock::new(None),
            doubtful: AtomicBool::new(false),
            opening: tokio::sync::Mutex::default(),
            told,
        }
    }

    /// The connection, which is first opened with `greeting` if need be. `None` when the master does not
    /// speak the protocol.
    pub(super) async fn channel(
        &self,
        greeting: impl FnOnce() -> HelloRequest,
        deadline: Deadline,
    ) -> Result<Option<Arc<Channel>>, ControlError> {
        if let Some(channel) = self.open_channel()
            && !self.doubtful.load(Ordering::Acquire)
            && self.has_told_token()
        {
            return Ok(Some(channel));
        }
        let late = |_| {
            let why = format!("a connection to {} is still being opened", self.address);
            ControlError::new(Code::DeadlineExceeded, why)
        };
        let mut opening = deadline.run(self.opening.lock()).await.map_err(late)?;
        if let Some(channel) = self.open_channel()
            && self.is_there(&channel, &mut opening.probe, deadline).await
        {
            if self.has_told_token() {
                return Ok(Some(channel));
            }
            // The client sends the new token over the open connection, so calls in progress
            // continue. If the master refuses the token, the client opens a new connection.
            let (number, greeting) = self.with_token(greeting());
            match greet(&channel, &greeting, deadline.at_most(CONNECT_TIMEOUT)).await {
                Ok(()) => {
                    self.greeted.store(number, Ordering::Release);
                    return Ok(Some(channel));
                }
                Err(error) if refuses_caller(error.code) => return Err(error),
                // There was too little time for the answer, which proves nothing about the master.
                Err(error) if deadline.has_passed() => return Err(error),
                Err(_) => channel.fail(silent()),
            }
            return Err(ControlError::new(
                Code::Unreachable,
                "the master did not take the renewed token in time",
            ));
        }
        let not_before = &mut opening.not_before;
        if not_before.is_some_and(|then| Instant::now() < then) {
            return Ok(None);
        }
        let limit = deadline.at_most(CONNECT_TIMEOUT);
        let (number, greeting) = self.with_token(greeting());
        let opened = limit.run(self.open(greeting, limit));
        let opened = opened.await.unwrap_or_else(|_| {
            let why = "the master did not answer the hello in time";
            Err(ControlError::new(Code::Unreachable, why))
        });
        match opened {
            Ok(channel) => {
                *not_before = None;
                opening.probe = None;
                self.greeted.store(number, Ordering::Release);
                *self.channel.write() = Some(Arc::clone(&channel));
                Ok(Some(channel))
            }
            Err(error) if error.code == Code::VersionMismatch => {
                if !self.told.swap(true, Ordering::AcqRel) {
                    tracing::warn!(
                        master = self.address, %error,
                        "framed connection failed, using gRPC for all calls (slower)"
                    );
                }
                *not_before = Some(Instant::now() + AGAIN);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the master has the present token.
    fn has_told_token(&self) -> bool {
        self.credentials.is_none()
            || self.credentials.number() == self.greeted.load(Ordering::Acquire)
    }

    fn with_token(&self, greeting: HelloRequest) -> (u64, HelloRequest) {
        let current = self.credentials.current();
        let token = current.token.as_str().to_owned();
        (current.number, HelloRequest { token, ..greeting })
    }

    /// Records that a call got no answer in time. The next call first pings the master.
    pub(super) fn doubt(&self) {
        self.doubtful.store(true, Ordering::Release);
    }

    /// Whether the master answers a ping on `channel`. Without [`Framed::doubt`] no ping is sent. A channel
    /// without an answer is closed. A caller without time for the answer uses the channel, and the doubt
    /// stays.
    async fn is_there(
        &self,
        channel: &Arc<Channel>,
        probe: &mut Option<BoxFuture<'static, bool>>,
        deadline: Deadline,
    ) -> bool {
        if !self.doubtful.load(Ordering::Acquire) {
            return true;
        }
        let asked = probe.get_or_insert_with(|| {
            let (channel, limit) = (Arc::clone(channel), Deadline::after(PROBE_TIMEOUT));
            Box::pin(async move {
                let answers = matches!(limit.run(channel.ping(Epoch(0))).await, Ok(Ok(())));
                if !answers {
                    channel.fail(silent());
                }
                answers
            })
        });
        let Ok(answers) = deadline.run(asked).await else {
            return true;
        };
        *probe = None;
        self.doubtful.store(false, Ordering::Release);
        answers
    }

    fn open_channel(&self) -> Option<Arc<Channel>> {
        let channel = self.channel.read();
        channel
            .as_ref()
            .filter(|channel| channel.is_open())
            .cloned()
    }

    async fn open(
        &self,
        greeting: HelloRequest,
        deadline: Deadline,
    ) -> Result<Arc<Channel>, ControlError> {
        let failed =
            |what: &dyn std::fmt::Display| ControlError::new(Code::Unreachable, what.to_string());
        let found = addresses::resolve(&self.address)
            .await
            .map_err(|error| failed(&error))?;
        let greeting = HelloRequest {
            spin_us: u32::try_from(self.spin.as_micros()).unwrap_or(u32::MAX),
            ..greeting
        };
        let opened = addresses::first_of(found, async |address| {
            let connected = match &self.tls {
                None => Channel::connect(address, self.spin).await,
                Some(tls) => Channel::connect_tls(address, self.spin, tls, &self.address).await,
            };
            let channel = connected.map_err(|error| failed(&format!("{address}: {error}")))?;
            greet(&channel, &greeting, deadline).await?;
            Ok(Arc::new(channel))
        });
        let opened = opened.await;
        opened.unwrap_or_else(|| Err(failed(&"it names no host")))
    }
}

/// Whether the master understood the hello and refused the caller.
const fn refuses_caller(code: Code) -> bool {
    matches!(
        code,
        Code::Unauthenticated | Code::TokenExpired | Code::Forbidden
    )
}

async fn greet(
    channel: &Channel,
    greeting: &HelloRequest,
    deadline: Deadline,
) -> Result<(), ControlError> {
    let mismatch = |message: String| ControlError::new(Code::VersionMismatch, message);
    match call(channel, Op::Greet, Epoch(0), greeting, deadline).await {
        Ok(reply) => {
            let reply = HelloReply::decode(reply.as_slice());
            let features = reply.map_or(0, |reply| reply.features);
            let shared = Features(features).shared();
            shared
                .map(drop)
                .map_err(|error| mismatch(error.to_string()))
        }
        // A master that speaks gRPC only closes the connection, because it reads the hello as a bad preface.
        Err(error) if matches!(error.code, Code::Unreachable | Code::Malformed) => {
            Err(mismatch(error.message))
        }
        Err(error) => Err(ControlError::new(error.code, error.message)),
    }
}

/// Makes a call and waits until `deadline` for its answer, the protobuf reply. During a long wait it pings
/// the master at intervals.
pub(super) async fn call(
    channel: &Channel,
    op: Op,
    epoch: Epoch,
    message: &impl prost::Message,
    deadline: Deadline,
) -> Result<Vec<u8>, TransferError> {
    let encode = |out: &mut Vec<u8>| {
        out.reserve(message.encoded_len());
        message
            .encode(out)
            .expect("invariant: a vector takes what is appended");
    };
    let mut call = std::pin::pin!(channel.call(op, epoch, encode));
    loop {
        let waited = deadline.at_most(PING_INTERVAL).run(call.as_mut()).await;
        if let Ok(answered) = waited {
            return read(answered?);
        }
        if deadline.has_passed() {
            return Err(TransferError {
                code: Code::DeadlineExceeded,
                message: "no answer in time".to_owned(),
            });
        }
        let there = deadline.at_most(PING_TIMEOUT).run(channel.ping(epoch));
        // An answer to the call also proves that the master is there.
        let is_silent = tokio::select! {
            answered = call.as_mut() => return read(answered?),
            there = there => there.is_err(),
        };
        if is_silent && !deadline.has_passed() {
            channel.fail(silent());
        }
    }
}

fn silent() -> TransferError {
    TransferError {
        code: Code::Unreachable,
        message: "the master does not answer".to_owned(),
    }
}

fn read(reply: Reply) -> Result<Vec<u8>, TransferError> {
    reply.expect(Op::Reply)?;
    Ok(reply.meta)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::wire::frame::{HEADER_BYTES, Header, VERSION};
    use prost::Message;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    /// Reads one request and returns its number.
    fn take(stream: &mut TcpStream) -> std::io::Result<u64> {
        let mut head = [0; HEADER_BYTES];
        stream.read_exact(&mut head)?;
        let header = Header::decode(&head).unwrap();
        let mut meta = vec![0; usize::try_from(header.meta).unwrap()];
        stream.read_exact(&mut meta)?;
        Ok(header.request)
    }

    fn answer(stream: &mut TcpStream, request: u64) {
        let meta = HelloReply::default().encode_to_vec();
        let header = Header {
            version: VERSION,
            op: Op::Reply,
            request,
            epoch: Epoch(1),
            meta: u32::try_from(meta.len()).unwrap(),
            payload: 0,
        };
        stream.write_all(&header.encode()).unwrap();
        stream.write_all(&meta).unwrap();
    }

    fn listener() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        (listener, address)
    }

    fn framed(address: String) -> Framed {
        let (credentials, told) = (Credentials::default(), Arc::default());
        Framed::new(address, Duration::ZERO, credentials, None, told)
    }

    /// This is like a cut of the network: the first connection stays open, and nothing arrives over it any
    /// more. Without the doubt, every later call would wait on it in vain.
    #[tokio::test]
    async fn a_connection_that_fell_silent_is_not_used_for_ever() {
        let (listener, address) = listener();
        let serving = std::thread::spawn(move || {
            let (mut silent, _) = listener.accept().unwrap();
            let greeting = take(&mut silent).unwrap();
            answer(&mut silent, greeting);
            let (mut lively, _) = listener.accept().unwrap();
            while let Ok(request) = take(&mut lively) {
                answer(&mut lively, request);
            }
            drop(silent);
        });
        let framed = framed(address);
        let deadline = || Deadline::after(Duration::from_millis(1500));
        let mut answers = Vec::new();
        for _ in 0..2 {
            let channel = framed.channel(HelloRequest::default, deadline()).await;
            let channel = channel.unwrap().unwrap();
            let short = Deadline::after(Duration::from_millis(200));
            let request = HelloRequest::default();
            let answered = call(&channel, Op::Exist, Epoch(0), &request, short).await;
            if answered.is_err() {
                framed.doubt();
            }
            answers.push(answered.map(|_| ()).map_err(|error| error.code));
        }
        assert_eq!(answers, [Err(Code::DeadlineExceeded), Ok(())]);
        drop(framed);
        serving.join().unwrap();
    }

    /// A caller's short deadline proves nothing about the master, and other callers wait on the same
    /// connection.
    #[tokio::test]
    async fn a_caller_with_little_time_does_not_end_the_connection_of_others() {
        let (listener, address) = listener();
        let (ask, asked) = std::sync::mpsc::channel::<()>();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let greeting = take(&mut stream).unwrap();
            answer(&mut stream, greeting);
            let long = take(&mut stream).unwrap();
            let ping = take(&mut stream).unwrap();
            asked.recv().unwrap();
            let pong = Header {
                version: VERSION,
                op: Op::Pong,
                request: ping,
                epoch: Epoch(1),
                meta: 0,
                payload: 0,
            };
            stream.write_all(&pong.encode()).unwrap();
            answer(&mut stream, long);
            // The connection ends when the client closes it.
            let _ended = take(&mut stream);
        });
        let framed = framed(address);
        let within = |time| framed.channel(HelloRequest::default, Deadline::after(time));
        let channel = within(Duration::from_secs(5)).await.unwrap().unwrap();
        let request = HelloRequest::default();
        let limit = Deadline::after(Duration::from_secs(5));
        let long = call(&channel, Op::Exist, Epoch(0), &request, limit);
        let others = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            framed.doubt();
            let _too_short = within(Duration::from_millis(5)).await;
            assert!(channel.is_open(), "the master has had 5 ms");
            ask.send(()).unwrap();
            within(Duration::from_secs(5)).await.unwrap().unwrap();
            assert!(!framed.doubtful.load(Ordering::SeqCst), "it has answered");
        };
        let (answered, ()) = futures::join!(long, others);
        answered.unwrap();
        drop((channel, framed));
        serving.join().unwrap();
    }

    /// `localhost` may stand for two addresses while the master listens at one. Another program, or none,
    /// listens at the other.
    #[tokio::test]
    async fn every_address_of_a_master_is_tried() {
        let Ok(wrong) = TcpListener::bind("[::1]:0") else {
            eprintln!("not run: this host has no ::1");
            return;
        };
        let port = wrong.local_addr().unwrap().port();
        let right = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = right.accept().unwrap();
            while let Ok(request) = take(&mut stream) {
                answer(&mut stream, request);
            }
        });
        let order = format!("[::1]:{port} 127.0.0.1:{port}");
        let found = order.split(' ').map(|address| address.parse().unwrap());
        let opened: Option<Result<(), ControlError>> =
            addresses::first_of(found.collect(), async |address| {
                let channel = Channel::connect(address, Duration::ZERO).await.unwrap();
                let deadline = Deadline::after(Duration::from_secs(30));
                greet(&channel, &HelloRequest::default(), deadline).await
            })
            .await;
        opened.unwrap().unwrap();
        drop(wrong);
        serving.join().unwrap();
    }
}
