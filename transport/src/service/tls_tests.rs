//! Callers of a port that speaks TLS.

use super::tests::{OneByte, head};
use super::*;
use crate::handshake::End;
use crate::host::Refused;
use crate::socket::send_whole_now;
use kvpool_tls::rustls::{ClientConnection, StreamOwned};
use kvpool_tls::testing::Authority;
use kvpool_tls::{ClientTls, Port, ServerHandshake, ServerTls, connect_socket};
use kvpool_types::Code;
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use tempfile::TempDir;

/// Admits every hello, as [`OneByte`], over TLS.
struct Sealed(ServerTls);

/// The same, and tells how many bytes a connection has room for at a time.
struct Measured(Sealed, mpsc::Sender<usize>);

impl Serve for Measured {
    fn handshake(&self) -> Duration {
        self.0.handshake()
    }

    fn epoch(&self) -> Epoch {
        self.0.epoch()
    }

    fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.0.tls()
    }

    fn judge(&self, socket: BorrowedFd<'_>, hello: &FirstFrame) -> Result<Admitted, End> {
        self.0.judge(socket, hello)
    }

    fn serve(&self, connection: &Arc<Connection>, admitted: Admitted) {
        admitted.answer(connection.wire(), Epoch(1)).unwrap();
        let session = connection.wire().tls().unwrap();
        let ended = session.receive(&mut [0; 1], |room| {
            self.1.send(room.len()).unwrap();
            Ok(0)
        });
        assert_eq!(ended.unwrap(), 0);
    }
}

/// Refuses every caller that says no hello, with the longest reason.
struct Wordy(Option<Sealed>);

impl Serve for Wordy {
    fn handshake(&self) -> Duration {
        // A caller that keeps the accepting thread is not ended by its own time.
        Duration::from_secs(60)
    }

    fn epoch(&self) -> Epoch {
        Epoch(1)
    }

    fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.0.as_ref()?.tls()
    }

    fn judge(&self, socket: BorrowedFd<'_>, hello: &FirstFrame) -> Result<Admitted, End> {
        if hello.header.op == Op::Hello {
            return OneByte.judge(socket, hello);
        }
        Err(End::Refuse {
            request: hello.header.request,
            refused: Refused {
                code: Code::Malformed,
                message: "no hello ".repeat(8 << 10),
            },
        })
    }

    fn serve(&self, connection: &Arc<Connection>, admitted: Admitted) {
        admitted.answer(connection.wire(), Epoch(1)).unwrap();
    }
}

impl Serve for Sealed {
    fn handshake(&self) -> Duration {
        OneByte.handshake()
    }

    fn epoch(&self) -> Epoch {
        OneByte.epoch()
    }

    fn tls(&self) -> Option<Arc<ServerConfig>> {
        Some(self.0.config(Port::Data))
    }

    fn judge(&self, socket: BorrowedFd<'_>, hello: &FirstFrame) -> Result<Admitted, End> {
        OneByte.judge(socket, hello)
    }

    fn serve(&self, connection: &Arc<Connection>, admitted: Admitted) {
        admitted.answer(connection.wire(), Epoch(1)).unwrap();
        let _gone = rustix::io::read(connection.socket(), &mut [0; 1]);
    }
}

/// Both sides' settings.
fn settings() -> (ServerTls, ClientTls, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(directory.path(), "authority");
    let (server, client) = authority.ends();
    (server, client, directory)
}

type Stream = StreamOwned<ClientConnection, TcpStream>;

fn open(address: SocketAddr, client: &ClientTls) -> Stream {
    over(TcpStream::connect(address).unwrap(), client)
}

fn over(socket: TcpStream, client: &ClientTls) -> Stream {
    let limit = Some(Duration::from_secs(30));
    socket.set_read_timeout(limit).unwrap();
    let name = client.name_of("127.0.0.1:1").unwrap();
    let connection = ClientConnection::new(client.frames(), name).unwrap();
    StreamOwned::new(connection, socket)
}

/// The op of the answer to a hello.
fn greet(stream: &mut (impl Read + Write)) -> Op {
    let mut answer = [0; HEADER_BYTES];
    stream.write_all(&head(Op::Hello, 0)).unwrap();
    stream.read_exact(&mut answer).unwrap();
    Header::decode(&answer).unwrap().op
}

#[test]
fn a_connection_takes_many_bytes_at_a_time_once_its_caller_is_known() {
    let (server, client, _directory) = settings();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (says, room) = mpsc::channel();
    let serve = Measured(Sealed(server), says);
    let _service = Service::start(listener.into(), "test", 8, Arc::new(serve)).unwrap();
    assert_eq!(greet(&mut open(address, &client)), Op::HelloReply);
    let room = room.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(room, 64 << 10, "it has the buffer of a caller");
}

/// A caller that makes no room for answers.
fn connect_small(address: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, connect, socket, sockopt};
    let caller = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_recv_buffer_size(&caller, 4 << 10).unwrap();
    connect(&caller, &address).unwrap();
    TcpStream::from(caller)
}

/// The accepting thread tells callers why they are refused, and must never wait for one of them.
#[test]
fn a_refused_caller_that_reads_nothing_keeps_nobody_waiting() {
    let (server, client, _directory) = settings();
    for is_sealed in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // The sockets of its callers have no more room: the reason does not fit.
        rustix::net::sockopt::set_socket_send_buffer_size(&listener, 4 << 10).unwrap();
        let address = listener.local_addr().unwrap();
        let serve = Wordy(is_sealed.then(|| Sealed(server.clone())));
        let _service = Service::start(listener.into(), "test", 8, Arc::new(serve)).unwrap();
        let (rude, small) = (head(Op::Ping, 0), connect_small(address));
        if is_sealed {
            let mut rude_one = over(small, &client);
            rude_one.write_all(&rude).unwrap();
            assert_eq!(greet(&mut open(address, &client)), Op::HelloReply);
            drop(rude_one);
        } else {
            (&small).write_all(&rude).unwrap();
            let mut plain = TcpStream::connect(address).unwrap();
            let limit = Some(Duration::from_secs(30));
            plain.set_read_timeout(limit).unwrap();
            assert_eq!(greet(&mut plain), Op::HelloReply);
            drop(small);
        }
    }
}

/// Each record of one byte costs the caller 22 more, which the port must take and decrypt.
#[test]
fn a_hello_in_records_of_one_byte_is_cut_off() {
    let (server, client, _directory) = settings();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let _service = Service::start(listener.into(), "test", 8, Arc::new(Sealed(server))).unwrap();
    let open = || open(address, &client);
    // As long as a hello with the longest token.
    let mut hello = head(Op::Hello, 8 << 10).to_vec();
    hello.resize(HEADER_BYTES + (8 << 10), 0);
    let mut answer = [0; HEADER_BYTES];
    let mut stream = open();
    stream.write_all(&hello).unwrap();
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(Header::decode(&answer).unwrap().op, Op::HelloReply);
    let mut stream = open();
    for byte in hello.chunks(1) {
        if stream.write_all(byte).is_err() {
            break;
        }
    }
    assert!(stream.read_exact(&mut answer).is_err(), "it is answered");
}

#[test]
fn a_refusal_does_not_wait_for_a_peer_that_does_not_read() {
    let (server, client, _directory) = settings();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&peer, 4 << 10).unwrap();
    let (socket, _) = listener.accept().unwrap();
    let limit = Instant::now() + Duration::from_secs(20);
    let shaking = std::thread::spawn(move || {
        let name = client.name_of("127.0.0.1:1").unwrap();
        let session = connect_socket(&client, name, peer.as_fd(), limit).unwrap();
        (peer, session)
    });
    let mut handshake = ServerHandshake::begin(server.config(Port::Data)).unwrap();
    while !handshake.advance(socket.as_fd()).unwrap() {
        assert!(Instant::now() < limit);
        std::thread::sleep(Duration::from_millis(1));
    }
    let _silent = shaking.join().unwrap();
    // Less than the frame needs, so that the socket has room and yet not enough.
    rustix::net::sockopt::set_socket_send_buffer_size(&socket, 4 << 10).unwrap();
    let mut wire = Wire::from(OwnedFd::from(socket));
    wire.begin_session(handshake.finish().unwrap());
    let (says, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let frame = vec![0; 15 << 10];
        while send_whole_now(&wire, &frame) {}
        says.send(()).unwrap();
    });
    let ended = ended.recv_timeout(Duration::from_secs(10));
    assert!(ended.is_ok(), "the accepting thread would wait");
}
