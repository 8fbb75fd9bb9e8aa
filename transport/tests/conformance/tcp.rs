//! The guarantees of TCP alone.

use super::*;
use kvpool_transport::tcp::{
    ConnectOptions, Server, ServerHandle, ServerOptions, connect, connect_with,
};
use kvpool_types::wire::data::{Failure, Meta, ReadItem, ReadRequest, Statuses, WriteRequest};
use kvpool_types::wire::features::Features;
use kvpool_types::wire::frame::{HEADER_BYTES, Header, MAX_META_BYTES, Op, VERSION};
use rustix::net::{SocketAddrAny, getpeername, getsockname, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::fs::DirEntry;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;

pub(crate) fn serve(host: &Arc<TestHost>, options: ServerOptions) -> ServerHandle {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = ServerOptions {
        tls: options.tls.or_else(tls::server),
        ..options
    };
    Server::start(listener, host.clone(), options).unwrap()
}

/// A peer that speaks frames by hand.
struct Raw(TcpStream);

impl Raw {
    fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        Self(stream)
    }

    fn greet(host: &TestHost, server: &ServerHandle) -> Self {
        let mut raw = Self::connect(server.local_addr());
        raw.send(Op::Hello, 1, &host.hello().to_bytes(), 0);
        assert_eq!(raw.receive().0.op, Op::HelloReply);
        raw
    }

    fn send(&mut self, op: Op, request: u64, meta: &[u8], payload: u64) {
        let header = Header {
            version: VERSION,
            op,
            request,
            epoch: EPOCH,
            meta: u32::try_from(meta.len()).unwrap(),
            payload,
        };
        self.0.write_all(&header.encode()).unwrap();
        self.0.write_all(meta).unwrap();
    }

    fn receive(&mut self) -> (Header, Vec<u8>) {
        let mut head = [0; HEADER_BYTES];
        self.0.read_exact(&mut head).unwrap();
        let header = Header::decode(&head).unwrap();
        let mut meta = vec![0; header.meta as usize];
        self.0.read_exact(&mut meta).unwrap();
        (header, meta)
    }

    /// The code of the failure that arrives, after which the connection must end.
    fn failure(mut self) -> Code {
        let (header, meta) = self.receive();
        assert_eq!(header.op, Op::Failure);
        assert_eq!(self.0.read(&mut [0; 16]).unwrap(), 0, "the connection ends");
        Failure::decode(&meta).unwrap().code
    }
}

#[test]
fn malformed_frames_are_answered_and_change_nothing() {
    let host = TestHost::new(Length(1 << 20));
    let server = serve(&host, ServerOptions::default());
    let bystander = connect(server.local_addr(), host.hello(), soon())
        .unwrap()
        .0;
    let extent = host.stored(b"still here");

    let mut raw = Raw::connect(server.local_addr());
    raw.0
        .write_all(b"GET / HTTP/1.1\r\nHost: kvpool.example\r\n\r\n")
        .unwrap();
    assert_eq!(raw.failure(), Code::Malformed);

    let mut raw = Raw::connect(server.local_addr());
    raw.send(Op::Ping, 1, &[], 0);
    assert_eq!(raw.failure(), Code::Malformed, "hello must come first");

    let mut raw = Raw::connect(server.local_addr());
    raw.send(Op::Hello, 1, b"short", 0);
    assert_eq!(raw.failure(), Code::Malformed);

    for version in [0, VERSION + 1] {
        let mut raw = Raw::connect(server.local_addr());
        let header = Header {
            version,
            op: Op::Hello,
            request: 1,
            epoch: EPOCH,
            meta: 0,
            payload: 0,
        };
        raw.0.write_all(&header.encode()).unwrap();
        assert_eq!(raw.failure(), Code::VersionMismatch);
    }

    let mut raw = Raw::greet(&host, &server);
    raw.send(Op::Read, 2, &[], 1 << 40);
    assert_eq!(raw.failure(), Code::Oversized);

    let mut raw = Raw::greet(&host, &server);
    let mut header = Header {
        version: VERSION,
        op: Op::Read,
        request: 2,
        epoch: EPOCH,
        meta: u32::MAX,
        payload: 0,
    };
    raw.0.write_all(&header.encode()).unwrap();
    assert_eq!(raw.failure(), Code::Oversized);
    header.meta = 0;

    let mut raw = Raw::greet(&host, &server);
    raw.0.write_all(&header.encode()).unwrap();
    assert_eq!(raw.failure(), Code::Malformed, "a read without its meta");

    let grant = host.grant(5000);
    let write = WriteRequest {
        incarnation: Incarnation(77),
        grants: vec![grant],
    };
    let mut raw = Raw::greet(&host, &server);
    raw.send(Op::Write, 2, &write.to_bytes(), 5000);
    assert_eq!(raw.failure(), Code::Malformed, "a payload without the sums");
    assert!(!host.is_written(grant.id));

    let mut raw = Raw::greet(&host, &server);
    raw.send(Op::Map, 2, &[], 0);
    let (header, meta) = raw.receive();
    assert_eq!((header.op, header.request), (Op::Failure, 2));
    assert_eq!(Failure::decode(&meta).unwrap().code, Code::InvalidArgument);
    raw.send(Op::Ping, 3, &[], 0);
    assert_eq!(raw.receive().0.op, Op::Pong, "the connection goes on");

    let into = room(10);
    let read = wait(bystander.read(EPOCH, vec![read_op(extent, &into)], soon()));
    assert_eq!(
        read,
        [Ok(checksum(b"still here"))],
        "others are still served"
    );
}

#[test]
fn fencing_ends_a_receive_in_progress() {
    let host = TestHost::new(Length(16 << 20));
    let server = serve(&host, ServerOptions::default());
    let grant = host.grant(8 << 20);
    let write = WriteRequest {
        incarnation: Incarnation(77),
        grants: vec![grant],
    };
    let mut raw = Raw::greet(&host, &server);
    raw.send(
        Op::Write,
        2,
        &write.to_bytes(),
        write.payload_bytes().unwrap(),
    );
    raw.0.write_all(&vec![0xaa; 1 << 20]).unwrap();
    assert!(host.wait_for(|held| held.receiving == 1));
    assert!(
        host.fence(grant.id, Duration::from_secs(2)),
        "the guard of a fenced receive is dropped at once, not when the peer goes on"
    );
    // Bytes that the peer sends later are dropped.
    let before = host.slice(&grant.extent).to_vec();
    let _refused = raw.0.write_all(&vec![0xbb; 4 << 20]);
    std::thread::sleep(Duration::from_millis(100));
    assert!(host.slice(&grant.extent).to_vec() == before);
    assert!(!host.is_written(grant.id));
}

#[test]
fn a_stalled_receive_is_ended() {
    let host = TestHost::new(Length(16 << 20));
    let options = ServerOptions {
        stall: Duration::from_millis(200),
        ..ServerOptions::default()
    };
    let server = serve(&host, options);
    let grant = host.grant(1 << 20);
    let write = WriteRequest {
        incarnation: Incarnation(77),
        grants: vec![grant],
    };
    let mut idle = Raw::greet(&host, &server);
    let mut raw = Raw::greet(&host, &server);
    raw.send(
        Op::Write,
        2,
        &write.to_bytes(),
        write.payload_bytes().unwrap(),
    );
    assert!(host.wait_for(|held| held.receiving == 1));
    assert!(host.wait_for(|held| held.receiving == 0));
    std::thread::sleep(Duration::from_millis(500));
    idle.send(Op::Ping, 2, &[], 0);
    assert_eq!(idle.receive().0.op, Op::Pong, "an idle connection stays");
}

/// A client of a later version may send operations that this version lacks.
#[test]
fn an_unknown_operation_is_answered_and_the_connection_continues() {
    let host = TestHost::new(Length(1 << 20));
    let server = serve(&host, ServerOptions::default());
    let mut raw = Raw::greet(&host, &server);
    for payload in [0, 5, 200_000] {
        let mut head = Header {
            version: VERSION,
            op: Op::Ping,
            request: 7,
            epoch: EPOCH,
            meta: 3,
            payload,
        }
        .encode();
        head[6..8].copy_from_slice(&999u16.to_le_bytes());
        raw.0.write_all(&head).unwrap();
        let rest = vec![0xab; 3 + usize::try_from(payload).unwrap()];
        raw.0.write_all(&rest).unwrap();
        let (header, meta) = raw.receive();
        assert_eq!((header.op, header.request), (Op::Failure, 7));
        let told = Failure::decode(&meta).unwrap().code;
        assert_eq!(told, Code::Unimplemented);
        raw.send(Op::Ping, 8, &[], 0);
        assert_eq!(raw.receive().0.op, Op::Pong);
    }
}

/// Both ends send their features. Older ends send none and are served.
#[test]
fn a_hello_is_refused_for_required_unknown_features_only() {
    let host = TestHost::new(Length(4096));
    let server = serve(&host, ServerOptions::default());
    let hello = host.hello().to_bytes();
    let say = |features: u32| {
        let mut raw = Raw::connect(server.local_addr());
        let mut head = Header {
            version: VERSION,
            op: Op::Hello,
            request: 1,
            epoch: EPOCH,
            meta: u32::try_from(hello.len()).unwrap() + 4,
            payload: 0,
        }
        .encode();
        Features(features).mark(&mut head);
        raw.0.write_all(&head).unwrap();
        raw.0.write_all(&hello).unwrap();
        // A field of a later version.
        raw.0.write_all(&[1, 2, 3, 4]).unwrap();
        raw
    };
    for features in [0, 1, 0xffff] {
        let mut raw = say(features);
        let mut head = [0; HEADER_BYTES];
        raw.0.read_exact(&mut head).unwrap();
        assert_eq!(Header::decode(&head).unwrap().op, Op::HelloReply);
        assert_eq!(Features::of(&head), Features::OURS);
    }
    assert_eq!(say(1 << 31).failure(), Code::VersionMismatch);
}

#[test]
fn a_silent_connection_is_ended_and_too_many_are_refused() {
    let host = TestHost::new(Length(4096));
    let options = ServerOptions {
        handshake: Duration::from_secs(1),
        max_connections: 2,
        ..ServerOptions::default()
    };
    let server = serve(&host, options);
    // A caller before hello does not count.
    let mut silent = Raw::connect(server.local_addr());
    let first = Raw::greet(&host, &server);
    let _second = Raw::greet(&host, &server);
    assert_eq!(server.connections(), 2);
    let mut third = Raw::connect(server.local_addr());
    third.send(Op::Hello, 1, &host.hello().to_bytes(), 0);
    assert_eq!(third.failure(), Code::TooManyHeld);
    assert_eq!(silent.0.read(&mut [0; 16]).unwrap(), 0);
    drop(first);
    while server.connections() == 2 {
        std::thread::yield_now();
    }
    let _third = Raw::greet(&host, &server);
}

/// Both ends of this process's connections to its own server.
fn ends(server: &ServerHandle) -> Vec<OwnedFd> {
    let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let number = |entry: DirEntry| entry.file_name().to_str()?.parse().ok();
    open.filter_map(|entry| number(entry.ok()?))
        .filter_map(|number| pidfd_getfd(&this, number, PidfdGetfdFlags::empty()).ok())
        .filter(|end| {
            let port = |address: SocketAddrAny| Some(SocketAddr::try_from(address).ok()?.port());
            let here = getsockname(end).ok().and_then(port);
            let there = getpeername(end).ok().flatten().and_then(port);
            there.is_some() && [here, there].contains(&Some(server.local_addr().port()))
        })
        .collect()
}

/// Otherwise the connections of lost hosts would use up the limit forever.
#[test]
fn both_ends_enable_keepalive() {
    let host = TestHost::new(Length(4096));
    let server = serve(&host, ServerOptions::default());
    let (_link, _) = connect(server.local_addr(), host.hello(), soon()).unwrap();
    let ends = ends(&server);
    assert_eq!(ends.len(), 2 * server.connections());
    for end in ends {
        assert!(sockopt::socket_keepalive(&end).unwrap());
        let asked = sockopt::tcp_keepintvl(&end).unwrap() * sockopt::tcp_keepcnt(&end).unwrap();
        let lost = sockopt::tcp_keepidle(&end).unwrap() + asked;
        assert!(lost < Duration::from_secs(300), "lost after {lost:?}");
        let unacknowledged = sockopt::tcp_user_timeout(&end).unwrap();
        assert_eq!(Duration::from_millis(unacknowledged.into()), lost);
    }
}

/// A peer that answers hello and then nothing, or as much as it is told to.
fn deaf_peer(
    host: Arc<TestHost>,
    answer: impl FnOnce(&mut TcpStream, Header) + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        use kvpool_transport::host::Host;
        let mut raw = Raw(listener.accept().unwrap().0);
        let (header, _) = raw.receive();
        let reply = Host::hello(&*host, &host.hello()).unwrap();
        raw.send(Op::HelloReply, header.request, &reply.to_bytes(), 0);
        let (header, _) = raw.receive();
        answer(&mut raw.0, header);
    });
    address
}

/// Small transfers go another way than large ones.
#[test]
fn a_link_that_is_closed_ends_all_that_is_under_way() {
    for length in [1000, 1 << 20] {
        let host = TestHost::new(Length(4 << 20));
        let (done, wait_done) = std::sync::mpsc::channel::<()>();
        let address = deaf_peer(host.clone(), move |_, _| {
            let _done = wait_done.recv();
        });
        let entered = runtime().enter();
        let link = connect(address, host.hello(), soon()).unwrap().0;
        let extent = host.grant(length).extent;
        let into = room(length.try_into().unwrap());
        let reading = runtime().spawn(link.read(EPOCH, vec![read_op(extent, &into)], soon()));
        drop(entered);
        std::thread::sleep(Duration::from_millis(100));
        let begin = Instant::now();
        link.close();
        assert_eq!(codes(&wait(reading).unwrap()), [Code::Unreachable]);
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(2), "{length} bytes: {took:?}");
        drop(done);
    }
}

#[test]
fn nothing_is_written_after_the_deadline_of_a_read() {
    let host = TestHost::new(Length(4 << 20));
    let (go, gone) = std::sync::mpsc::channel();
    let address = deaf_peer(host.clone(), move |stream, header| {
        let meta = Statuses(vec![Code::Ok]).to_bytes();
        let answer = Header {
            op: Op::Statuses,
            meta: u32::try_from(meta.len()).unwrap(),
            payload: 2 << 20,
            ..header
        };
        stream.write_all(&answer.encode()).unwrap();
        stream.write_all(&meta).unwrap();
        stream.write_all(&vec![1; 1 << 20]).unwrap();
        gone.recv().unwrap();
        // The rest arrives after the deadline, when the caller may reuse the memory.
        let _refused = stream.write_all(&vec![2; 1 << 20]);
        gone.recv().unwrap();
    });
    let options = ConnectOptions {
        connections: 1,
        ..ConnectOptions::default()
    };
    let link = connect_with(address, host.hello(), soon(), &options)
        .unwrap()
        .0;
    let into = room(2 << 20);
    let extent = host.grant(2 << 20).extent;
    let begin = Instant::now();
    let deadline = begin + Duration::from_millis(300);
    let read = wait(link.read(EPOCH, vec![read_op(extent, &into)], deadline));
    let took = begin.elapsed();
    assert_eq!(codes(&read), [Code::DeadlineExceeded]);
    assert!(
        // The peer resumes when told to, so without the deadline the read would not end. An
        // emulated processor under load was 436 ms late once.
        took >= Duration::from_millis(300) && took < Duration::from_secs(2),
        "{took:?}"
    );
    assert!(gathered(&into).contains(&1), "the payload was on its way");
    into[0].write_at(Offset(0), &vec![9; 2 << 20]);
    go.send(()).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(gathered(&into).iter().all(|byte| *byte == 9));
    go.send(()).unwrap();
}

#[test]
fn a_peer_that_never_answers_delays_no_other() {
    let host = TestHost::new(Length(4 << 20));
    let (done, wait_done) = std::sync::mpsc::channel::<()>();
    let address = deaf_peer(host.clone(), move |_, _| {
        let _done = wait_done.recv();
    });
    let link = connect(address, host.hello(), soon()).unwrap().0;
    let extent = host.grant(1000).extent;
    let begin = Instant::now();
    let reads: Vec<_> = (0..20u64)
        .map(|i| {
            let deadline = begin + Duration::from_millis(100 + 10 * i);
            link.read(EPOCH, vec![read_op(extent, &room(1000))], deadline)
        })
        .collect();
    for read in reads {
        let read = wait(read);
        assert!(matches!(
            codes(&read)[..],
            [Code::DeadlineExceeded | Code::Unreachable]
        ));
    }
    assert!(
        begin.elapsed() < Duration::from_secs(1),
        "{:?}",
        begin.elapsed()
    );
    drop(done);

    // A peer that does not even answer hello.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let begin = Instant::now();
    let refused = connect(
        listener.local_addr().unwrap(),
        host.hello(),
        begin + Duration::from_millis(200),
    );
    assert_eq!(refused.unwrap_err().code, Code::DeadlineExceeded);
    assert!(begin.elapsed() < Duration::from_millis(700));
}

#[test]
fn a_link_outlives_its_connections_but_not_the_node() {
    let host = TestHost::new(Length(4 << 20));
    let bytes = pattern(100_000, 1);
    let extent = host.stored(&bytes);
    let server = serve(&host, ServerOptions::default());
    let address = server.local_addr();
    let link = connect(address, host.hello(), soon()).unwrap().0;
    let read = || wait(link.read(EPOCH, vec![read_op(extent, &room(100_000))], soon()));
    assert_eq!(codes(&read()), [Code::Ok]);
    drop(server);
    let listener = TcpListener::bind(address).unwrap();
    let server = Server::start(listener, host.clone(), ServerOptions::default()).unwrap();
    // The first read may use a connection that was cut; the link reconnects for the others.
    let _cut = [read(), read()];
    assert_eq!(codes(&read()), [Code::Ok]);
    assert!(link.is_open());
    drop(server);
    for _ in 0..4 {
        assert_eq!(codes(&read()), [Code::Unreachable]);
    }
    assert!(!link.is_open());
}

#[test]
fn a_drain_finishes_requests_in_progress() {
    let host = TestHost::new(Length(4 << 20));
    let server = serve(&host, ServerOptions::default());
    let bytes = pattern(1 << 20, 1);
    let grant = host.grant(1 << 20);
    let link = connect(server.local_addr(), host.hello(), soon())
        .unwrap()
        .0;
    host.block(true);
    let write = link.write(vec![write_op(grant, &bytes)], soon());
    // The request is read before the drain begins.
    std::thread::sleep(Duration::from_millis(100));
    let drained = std::thread::scope(|scope| {
        let drain = scope.spawn(|| server.drain(soon()));
        std::thread::sleep(Duration::from_millis(100));
        host.block(false);
        drain.join().unwrap()
    });
    assert!(drained);
    assert_eq!(wait(write), [Ok(checksum(&bytes))]);
    assert_eq!(server.connections(), 0);
}

#[test]
fn bytes_are_counted_and_few_connections_are_used() {
    let opened = open(TransportKind::Tcp, 64 << 20);
    let bytes = pattern(1 << 20, 1);
    let extent = opened.host.stored(&bytes);
    for _ in 0..50 {
        let read = read_op(extent, &room(1 << 20));
        wait(opened.link.read(EPOCH, vec![read], soon()));
    }
    let server = opened._server.downcast_ref::<ServerHandle>().unwrap();
    assert!(server.connections() <= 2);
    assert!(opened.host.counted().0 >= 49 << 20);
}

#[test]
fn no_more_checksums_are_collected_than_one_answer_holds() {
    let host = TestHost::new(Length(16 << 20));
    let server = serve(&host, ServerOptions::default());
    let extent = host.stored(&pattern(16 << 20, 1));
    let item = ReadItem {
        extent,
        from: Offset(0),
        length: extent.length,
        right: None,
    };
    let request = ReadRequest {
        incarnation: Incarnation(77),
        items: vec![item; 4096],
    };
    let mut raw = Raw::greet(&host, &server);
    raw.send(Op::Sums, 2, &request.to_bytes(), 0);
    let (header, meta) = raw.receive();
    assert_eq!(header.op, Op::Failure);
    assert_eq!(Failure::decode(&meta).unwrap().code, Code::Oversized);
    let collected = host.summed() as u64 * extent.length.chunks() * 8;
    assert!(collected <= MAX_META_BYTES, "{collected} bytes");
    raw.send(Op::Ping, 3, &[], 0);
    assert_eq!(raw.receive().0.op, Op::Pong, "the connection goes on");
}

#[test]
fn an_item_of_a_read_must_be_an_extent() {
    let host = TestHost::new(Length(1 << 20));
    let server = serve(&host, ServerOptions::default());
    let mut raw = Raw::greet(&host, &server);
    let request = ReadRequest {
        incarnation: Incarnation(77),
        items: vec![ReadItem {
            extent: Extent {
                segment: SEGMENT,
                offset: Offset(u64::MAX),
                length: Length(2),
            },
            from: Offset(0),
            length: Length(1),
            right: None,
        }],
    };
    raw.send(Op::Read, 2, &request.to_bytes(), 0);
    assert_eq!(raw.failure(), Code::Malformed);
}
