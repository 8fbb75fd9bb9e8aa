use super::Control;
use crate::frame::decode_header;
use crate::threads;
use crate::wire::Wire;
use kvpool_tls::testing::Authority;
use kvpool_tls::{Port, ServerHandshake, Session, connect_socket};
use kvpool_types::wire::data::{Meta, ReadItem, ReadRequest};
use kvpool_types::wire::features::Features;
use kvpool_types::wire::frame::{HEADER_BYTES, Op};
use kvpool_types::{Epoch, Extent, Incarnation, Length, Offset, SegmentId};
use rustix::net::{RecvFlags, sockopt};
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A request of `items` items.
fn request(items: usize) -> ReadRequest {
    let item = ReadItem {
        extent: Extent {
            segment: SegmentId(1),
            offset: Offset(0),
            length: Length(4096),
        },
        from: Offset(0),
        length: Length(4096),
        right: None,
    };
    ReadRequest {
        incarnation: Incarnation(7),
        items: vec![item; items],
    }
}

/// No other thread needs to run for a request to reach the socket.
#[test]
fn a_request_has_been_sent_when_the_call_returns() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let control = Control::start(
        std::os::fd::OwnedFd::from(ours),
        "test",
        Features::default(),
    )
    .unwrap();
    for _ in 0..100 {
        control.request(Op::Sums, Epoch(1), &request(3), |_| {});
        let mut head = [0; HEADER_BYTES];
        let flags = RecvFlags::DONTWAIT;
        let (received, _) = rustix::net::recv(&theirs, &mut head[..], flags).unwrap();
        assert_eq!(received, HEADER_BYTES);
        let mut meta = vec![0; decode_header(&head).unwrap().meta as usize];
        let (received, _) = rustix::net::recv(&theirs, &mut meta[..], flags).unwrap();
        assert_eq!(received, meta.len());
    }
}

#[test]
fn a_channel_that_cannot_start_its_sender_ends_its_receiver() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let control = threads::testing::at_most(1, || {
        Control::start(OwnedFd::from(ours), "test", Features::default())
    });
    assert!(control.is_err());
    let limit = Some(Duration::from_secs(5));
    theirs.set_read_timeout(limit).unwrap();
    // The receiving thread holds the socket.
    assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "the socket is open");
}

/// The requesting threads send some frames, the sending thread others, and both parts of some.
#[test]
fn frames_are_sent_whole_and_in_order_by_any_thread() {
    const THREADS: u64 = 4;
    const EACH: u64 = 500;
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    // A small buffer, so that the socket is often full.
    sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
    let control = Control::start(
        std::os::fd::OwnedFd::from(ours),
        "test",
        Features::default(),
    )
    .unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let control = &control;
            scope.spawn(move || {
                for at in 0..EACH {
                    let items = ((at * 37 + thread) % 200) as usize;
                    control.request(Op::Sums, Epoch(1), &request(items), |_| {});
                }
            });
        }
        for number in 1..=THREADS * EACH {
            let mut head = [0; HEADER_BYTES];
            theirs.read_exact(&mut head).unwrap();
            let header = decode_header(&head).unwrap();
            assert_eq!((header.op, header.request), (Op::Sums, number));
            let mut meta = vec![0; header.meta as usize];
            theirs.read_exact(&mut meta).unwrap();
            let read = ReadRequest::decode(&meta).unwrap();
            assert_eq!(read, request(read.items.len()));
            if number % 100 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    // The queue is sent before the socket is closed.
    for _ in 0..50 {
        control.request(Op::Sums, Epoch(1), &request(100), |_| {});
    }
    drop(control);
    let mut rest = Vec::new();
    theirs.read_to_end(&mut rest).unwrap();
    let one = {
        let mut meta = Vec::new();
        request(100).encode(&mut meta);
        HEADER_BYTES + meta.len()
    };
    assert_eq!(rest.len(), 50 * one);
}

/// Both ends of a TLS connection with small buffers.
pub(crate) fn sealed() -> (Wire, (TcpStream, Session)) {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(directory.path(), "authority");
    let (server, client) = authority.ends();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // From the start: a peer that has once announced more room gets larger segments, which are taken whole.
    sockopt::set_socket_recv_buffer_size(&listener, 1).unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    let limit = Instant::now() + Duration::from_secs(20);
    let shaking = std::thread::spawn(move || {
        let name = client.name_of("127.0.0.1:1").unwrap();
        let session = connect_socket(&client, name, ours.as_fd(), limit).unwrap();
        // As a link's socket: without a limit of the handshake.
        ours.set_read_timeout(None).unwrap();
        ours.set_write_timeout(None).unwrap();
        sockopt::set_socket_send_buffer_size(&ours, 32 << 10).unwrap();
        let mut wire = Wire::from(OwnedFd::from(ours));
        wire.begin_session(session);
        wire
    });
    let mut handshake = ServerHandshake::begin(server.config(Port::Data)).unwrap();
    while !handshake.advance(theirs.as_fd()).unwrap() {
        assert!(Instant::now() < limit);
        std::thread::sleep(Duration::from_millis(1));
    }
    let session = handshake.finish().unwrap();
    (shaking.join().unwrap(), (theirs, session))
}

/// As when the node's process is stopped.
#[test]
fn a_request_over_tls_does_not_wait_for_a_peer_that_reads_nothing() {
    const LARGE: usize = 420;
    // What lies in the buffers before a large request decides whether it finds room, and enough of it. The last
    // request is pushed on by no other one.
    let trials = (0..6).flat_map(|small| [1, 2, 10].map(|large| (small, large)));
    for (small, large) in trials {
        let sizes = [vec![25; small], vec![LARGE; large]].concat();
        let (wire, peer) = sealed();
        let control = Control::start(wire, "test", Features::default()).unwrap();
        let (says, asked) = mpsc::channel();
        let asking = {
            let sizes = sizes.clone();
            std::thread::spawn(move || {
                for items in sizes {
                    control.request(Op::Sums, Epoch(1), &request(items), |_| {});
                }
                says.send(()).unwrap();
                control
            })
        };
        let asked = asked.recv_timeout(Duration::from_secs(10));
        assert!(asked.is_ok(), "a request waits for the socket");
        let _open = asking.join().unwrap();

        // All requests arrive when the peer goes on, whole and in order.
        sockopt::set_socket_recv_buffer_size(&peer.0, 256 << 10).unwrap();
        for (number, items) in (1..).zip(&sizes) {
            receive(&peer, number, *items);
        }
    }
}

fn receive((socket, session): &(TcpStream, Session), number: u64, items: usize) {
    let mut socket = socket;
    let limit = Some(Duration::from_secs(20));
    socket.set_read_timeout(limit).unwrap();
    let mut read_exact = |mut room: &mut [u8]| {
        while !room.is_empty() {
            let count = session.receive(room, |room| socket.read(room)).unwrap();
            assert!(count > 0, "the connection ended");
            room = &mut room[count..];
        }
    };
    let mut head = [0; HEADER_BYTES];
    read_exact(&mut head);
    let header = decode_header(&head).unwrap();
    assert_eq!((header.op, header.request), (Op::Sums, number));
    let mut meta = vec![0; header.meta as usize];
    read_exact(&mut meta);
    assert_eq!(ReadRequest::decode(&meta).unwrap(), request(items));
}
