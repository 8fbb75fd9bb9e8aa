use super::*;
use crate::handshake::End;
use crate::host::Refused;
use kvpool_types::wire::data::{Failure, HelloReply, Meta};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op, VERSION};
use kvpool_types::{Code, Length};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

/// Admits every hello, and ends each connection after one more byte from its peer.
pub(super) struct OneByte;

const HANDSHAKE: Duration = Duration::from_secs(2);

impl Serve for OneByte {
    fn handshake(&self) -> Duration {
        HANDSHAKE
    }

    fn epoch(&self) -> Epoch {
        Epoch(1)
    }

    fn judge(&self, _: BorrowedFd<'_>, hello: &FirstFrame) -> Result<Admitted, End> {
        if hello.header.op != Op::Hello {
            return Err(End::Refuse {
                request: hello.header.request,
                refused: Refused {
                    code: Code::Malformed,
                    message: "no hello".to_owned(),
                },
            });
        }
        Ok(Admitted {
            client: Default::default(),
            request: hello.header.request,
            reply: HelloReply {
                version: VERSION,
                cluster: Default::default(),
                node: kvpool_types::NodeName("n".to_owned()),
                incarnation: Default::default(),
                host: Default::default(),
                checksum_algorithm: 1,
                features: kvpool_types::wire::features::Features::default(),
            },
            memory: Ok(()),
        })
    }

    fn serve(&self, connection: &Arc<Connection>, admitted: Admitted) {
        admitted.answer(connection.socket(), Epoch(1)).unwrap();
        let _gone = rustix::io::read(connection.socket(), &mut [0; 1]);
    }
}

fn start(limit: usize) -> (Service, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let service = Service::start(listener.into(), "test", limit, Arc::new(OneByte)).unwrap();
    (service, address)
}

pub(super) fn head(op: Op, meta: u32) -> [u8; HEADER_BYTES] {
    let header = Header {
        version: VERSION,
        op,
        request: 5,
        epoch: Epoch(0),
        meta,
        payload: 0,
    };
    header.encode()
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    let limit = Some(Duration::from_secs(30));
    stream.set_read_timeout(limit).unwrap();
    stream
}

/// The answer to a frame; `None` when the connection is closed without an answer.
fn ask(stream: &mut TcpStream, frame: &[u8]) -> Option<(Op, Vec<u8>)> {
    stream.write_all(frame).unwrap();
    let mut answer = [0; HEADER_BYTES];
    stream.read_exact(&mut answer).ok()?;
    let header = Header::decode(&answer).unwrap();
    let mut meta = vec![0; Length(header.meta.into()).as_usize()];
    stream.read_exact(&mut meta).unwrap();
    Some((header.op, meta))
}

fn greet(address: SocketAddr) -> TcpStream {
    let mut stream = connect(address);
    let (op, _) = ask(&mut stream, &head(Op::Hello, 0)).unwrap();
    assert_eq!(op, Op::HelloReply);
    stream
}

/// The code of the failure that answers a frame.
fn refused(address: SocketAddr, frame: &[u8]) -> Code {
    let mut stream = connect(address);
    let (op, meta) = ask(&mut stream, frame).unwrap();
    assert_eq!(op, Op::Failure);
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "it stays open");
    Failure::decode(&meta).unwrap().code
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn the_end_of_a_connection_is_seen_after_its_slot_is_free() {
    let (service, address) = start(1);
    let mut first = greet(address);
    let places = service.shared.connections.lock();
    first.write_all(b"1").unwrap();
    first
        .set_read_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    let early = first.read(&mut [0; 1]).unwrap_err();
    assert_eq!(early.kind(), io::ErrorKind::WouldBlock);
    drop(places);
    assert_eq!(first.read(&mut [0; 1]).unwrap(), 0);
    let mut second = greet(address);
    second.write_all(b"1").unwrap();
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0, "refused");
    assert!(service.drain(Instant::now() + Duration::from_secs(5)));
}

#[test]
fn callers_before_hello_take_no_slot_and_no_thread() {
    let (service, address) = start(2);
    let known = greet(address);
    let before = threads();
    // Some callers send nothing, others half a hello.
    let mut callers: Vec<TcpStream> = Vec::new();
    for number in 0..600 {
        let mut caller = connect(address);
        match number % 3 {
            0 => {}
            1 => caller.write_all(b"KVP1").unwrap(),
            _ => caller.write_all(&head(Op::Hello, 4096)).unwrap(),
        }
        callers.push(caller);
    }
    // A new caller is admitted while they are connected, and the oldest of them is closed.
    let second = greet(address);
    assert_eq!(service.connections(), 2);
    assert!(threads() <= before + 4, "{} threads", threads());
    assert_eq!(callers[0].read(&mut [0; 1]).unwrap_or(0), 0);
    let newest = callers.last().unwrap();
    newest.set_nonblocking(true).unwrap();
    let mut newest = newest;
    assert_eq!(
        newest.read(&mut [0; 1]).unwrap_err().kind(),
        io::ErrorKind::WouldBlock,
        "the newest caller was closed before its time"
    );
    // Only connections after hello count against the limit. A refused caller is told so.
    assert_eq!(refused(address, &head(Op::Hello, 0)), Code::TooManyHeld);
    drop((known, second));
}

#[test]
fn a_hello_has_a_bounded_size_and_a_bounded_time() {
    let (_service, address) = start(2);
    // The header alone suffices for a refusal: the announced bytes are not awaited.
    let large = head(
        Op::Hello,
        u32::try_from(acceptor::MAX_HELLO_BYTES + 1).unwrap(),
    );
    assert_eq!(refused(address, &large), Code::Oversized);
    assert_eq!(refused(address, &head(Op::Ping, 0)), Code::Malformed);
    // A trickle of bytes does not extend the time.
    let began = Instant::now();
    let mut slow = connect(address);
    slow.set_read_timeout(Some(Duration::from_millis(100)))
        .unwrap();
    let closed = loop {
        if slow.write_all(b"K").is_err() {
            break true;
        }
        match slow.read(&mut [0; 1]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => break true,
        }
        if began.elapsed() > HANDSHAKE + Duration::from_secs(20) {
            break false;
        }
    };
    assert!(closed, "after {:?}", began.elapsed());
}

/// Each refusal used to delay the callers behind it for half a second.
#[test]
fn refused_callers_delay_no_other_caller() {
    let (_service, address) = start(2);
    let rude: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut caller = connect(address);
            caller.write_all(&head(Op::Ping, 0)).unwrap();
            caller
        })
        .collect();
    let began = Instant::now();
    drop(greet(address));
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "a hello took {:?} behind refused ones",
        began.elapsed()
    );
    drop(rude);
}
