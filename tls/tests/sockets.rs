//! Handshakes and sessions over real sockets.

use kvpool_tls::rustls::crypto::CryptoProvider;
use kvpool_tls::rustls::crypto::ring::default_provider;
use kvpool_tls::rustls::pki_types::pem::PemObject as _;
use kvpool_tls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use kvpool_tls::rustls::version::TLS13;
use kvpool_tls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConnection, StreamOwned,
};
use kvpool_tls::testing::{Authority, Life};
use kvpool_tls::{
    ClientAuth, ClientTls, Port, ServerFiles, ServerHandshake, ServerTls, Session, Version,
    connect_socket,
};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

struct Ends {
    client: (TcpStream, Session),
    server: (TcpStream, Session),
    _directory: TempDir,
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn server_tls(authority: &Authority) -> ServerTls {
    let pair = authority.sign("server", Life::Valid);
    ServerTls::open(ServerFiles {
        cert: pair.cert,
        key: pair.key,
        client_ca: Some(authority.ca.clone()),
        client_auth: ClientAuth::All,
        min_version: Version::Tls13,
    })
    .unwrap()
}

/// Drives a server's handshake to its end.
fn accept(tls: &ServerTls, socket: &TcpStream) -> io::Result<Session> {
    let mut handshake = ServerHandshake::begin(tls.config(Port::Data))?;
    let limit = soon();
    while !handshake.advance(socket.as_fd())? {
        assert!(Instant::now() < limit, "the handshake does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    handshake.finish()
}

fn open() -> Ends {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(directory.path(), "authority");
    let tls = server_tls(&authority);
    let pair = authority.sign("client", Life::Valid);
    let client_tls = ClientTls::open(&authority.client(Some(&pair))).unwrap();
    let client_tls = client_tls.unwrap();
    let (client, server) = sockets();
    let accepting = {
        let server = server.try_clone().unwrap();
        std::thread::spawn(move || accept(&tls, &server).unwrap())
    };
    let name = client_tls.name_of("127.0.0.1:1").unwrap();
    let session = connect_socket(&client_tls, name, client.as_fd(), soon()).unwrap();
    for stream in [&client, &server] {
        let limit = Some(Duration::from_secs(20));
        stream.set_read_timeout(limit).unwrap();
        stream.set_write_timeout(limit).unwrap();
    }
    Ends {
        client: (client, session),
        server: (server, accepting.join().unwrap()),
        _directory: directory,
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (at * 7 + at / 251).to_le_bytes()[0])
        .collect()
}

fn receive_exact((stream, session): (&TcpStream, &Session), room: &mut [u8]) {
    let mut filled = 0;
    while filled < room.len() {
        let mut stream = stream;
        let count = session.receive(&mut room[filled..], |room| stream.read(room));
        let count = count.unwrap();
        assert!(count > 0, "it ended");
        filled += count;
    }
}

#[test]
fn bytes_of_every_length_arrive_in_pieces_of_any_length() {
    let ends = open();
    for length in [1, 16_383, 16_384, 16_385, 65_536, 65_537, 1 << 20] {
        let bytes = pattern(length);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (stream, session) = &ends.client;
                let mut stream = stream;
                session.send(&bytes, |bytes| stream.write(bytes)).unwrap();
            });
            let mut received = vec![0; length];
            for piece in received.chunks_mut(1 + length / 3) {
                receive_exact((&ends.server.0, &ends.server.1), piece);
            }
            assert!(received == bytes, "{length}");
        });
        assert!(!ends.server.1.has_received());
    }
}

/// Anybody can be a caller, and there may be many.
#[test]
fn a_caller_has_a_small_buffer_until_it_is_known() {
    let ends = open();
    let bytes = pattern(60_000);
    let (stream, session) = &ends.client;
    let mut stream = stream;
    session.send(&bytes, |bytes| stream.write(bytes)).unwrap();
    let (stream, session) = &ends.server;
    let mut rooms = Vec::new();
    let mut received = vec![0; bytes.len()];
    let mut filled = 0;
    while filled < received.len() {
        if filled > 0 {
            // What has come and is not decrypted yet stays.
            session.widen();
        }
        let mut stream = stream;
        let count = session.receive(&mut received[filled..], |room| {
            rooms.push(room.len());
            stream.read(room)
        });
        filled += count.unwrap();
    }
    assert!(received == bytes);
    assert_eq!(rooms.first(), Some(&4096));
    assert_eq!(rooms.last(), Some(&(64 << 10)), "{rooms:?}");
}

/// A peer that leaves its records to rustls, with each cipher, and with new keys on both sides.
#[test]
fn every_cipher_is_the_one_of_rustls() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(directory.path(), "authority");
    let tls = server_tls(&authority);
    let pair = authority.sign("client", Life::Valid);
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(&authority.ca).unwrap())
        .unwrap();
    let all = default_provider().cipher_suites;
    let suites: Vec<_> = all
        .into_iter()
        .filter(|suite| suite.tls13().is_some())
        .collect();
    assert_eq!(suites.len(), 3);
    for suite in suites {
        let provider = CryptoProvider {
            cipher_suites: vec![suite],
            ..default_provider()
        };
        let config = ClientConfig::builder_with_provider(provider.into())
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_root_certificates(roots.clone());
        let cert = CertificateDer::from_pem_file(&pair.cert).unwrap();
        let key = PrivateKeyDer::from_pem_file(&pair.key).unwrap();
        let config = config.with_client_auth_cert(vec![cert], key).unwrap();
        let (client, server) = sockets();
        let serving = {
            let tls = tls.clone();
            std::thread::spawn(move || {
                let session = accept(&tls, &server).unwrap();
                // What it receives it sends back.
                let mut room = vec![0; 200_000];
                loop {
                    let mut stream = &server;
                    let count = session.receive(&mut room, |room| stream.read(room));
                    match count.unwrap() {
                        0 => return,
                        count => {
                            let send = |bytes: &[u8]| stream.write(bytes);
                            session.send(&room[..count], send).unwrap();
                        }
                    }
                }
            })
        };
        let name = "localhost".try_into().unwrap();
        let connection = ClientConnection::new(config.into(), name).unwrap();
        let mut stream = StreamOwned::new(connection, client);
        for length in [1, 100_000, 16_384] {
            let bytes = pattern(length);
            for _ in 0..2 {
                stream.write_all(&bytes).unwrap();
                let mut answer = vec![0; length];
                stream.read_exact(&mut answer).unwrap();
                assert!(answer == bytes, "{suite:?} {length}");
            }
            stream.conn.refresh_traffic_keys().unwrap();
        }
        stream.conn.send_close_notify();
        stream.flush().unwrap();
        serving.join().unwrap();
    }
}

/// A node of an earlier build leaves its records to rustls: its new keys and its refusals are understood.
#[test]
fn a_server_that_leaves_its_records_to_rustls_is_understood() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(directory.path(), "authority");
    let tls = server_tls(&authority);
    let pair = authority.sign("client", Life::Valid);
    for pair in [Some(&pair), None] {
        let client = ClientTls::open(&authority.client(pair)).unwrap().unwrap();
        let (ours, theirs) = sockets();
        let config = tls.config(Port::Data);
        let is_known = pair.is_some();
        let serving = std::thread::spawn(move || {
            let connection = ServerConnection::new(config).unwrap();
            let mut stream = StreamOwned::new(connection, theirs);
            let mut room = vec![0; 50_000];
            for _ in 0..3 {
                let received = stream.read_exact(&mut room);
                assert_eq!(received.is_ok(), is_known);
                if !is_known {
                    // The refusal has left.
                    let _rest = stream.sock.read(&mut room);
                    return;
                }
                stream.conn.refresh_traffic_keys().unwrap();
                stream.write_all(&room).unwrap();
            }
        });
        let name = client.name_of("localhost:1").unwrap();
        let session = connect_socket(&client, name, ours.as_fd(), soon()).unwrap();
        let bytes = pattern(50_000);
        let mut stream = &ours;
        if is_known {
            for _ in 0..3 {
                session.send(&bytes, |bytes| stream.write(bytes)).unwrap();
                let mut answer = vec![0; bytes.len()];
                receive_exact((&ours, &session), &mut answer);
                assert!(answer == bytes);
            }
        } else {
            let told = session.receive(&mut [0; 9], |room| stream.read(room));
            let told = told.unwrap_err().to_string();
            assert!(told.contains("CertificateRequired"), "{told}");
        }
        drop(ours);
        serving.join().unwrap();
    }
}

/// A sender that waits for its socket must not keep the receiver of the same session from emptying
/// the other direction: both ends would wait for ever.
#[test]
fn both_directions_flow_at_once() {
    let ends = Arc::new(open());
    let bytes = Arc::new(pattern(24 << 20));
    let mut threads = Vec::new();
    for (is_client, sends) in [(true, true), (true, false), (false, true), (false, false)] {
        let (ends, bytes) = (Arc::clone(&ends), Arc::clone(&bytes));
        threads.push(std::thread::spawn(move || {
            let (stream, session) = if is_client {
                &ends.client
            } else {
                &ends.server
            };
            if sends {
                let mut stream = stream;
                session.send(&bytes, |bytes| stream.write(bytes)).unwrap();
            } else {
                let mut received = vec![0; bytes.len()];
                receive_exact((stream, session), &mut received);
                assert!(received == *bytes);
            }
        }));
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn what_a_full_socket_does_not_take_waits_in_the_session() {
    let ends = open();
    let (stream, session) = &ends.client;
    stream.set_nonblocking(true).unwrap();
    let frame = pattern(60_000);
    let mut stream = stream;
    let mut taken = 0;
    while !session.has_unsent() {
        let from = taken % frame.len();
        let count = session.send_some(&frame[from..], |bytes| stream.write(bytes));
        let count = count.unwrap();
        assert!(session.has_unsent() || from + count == frame.len());
        taken += count;
        assert!(taken < 1 << 30, "the socket is never full");
    }
    let refused = session.send_some(&frame, |bytes| stream.write(bytes));
    assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    stream.set_nonblocking(false).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            session
                .flush(|bytes| (&ends.client.0).write(bytes))
                .unwrap()
        });
        let mut received = vec![0; taken];
        receive_exact((&ends.server.0, &ends.server.1), &mut received);
        let mut expected = frame.iter().cycle();
        assert!(received.iter().all(|byte| expected.next() == Some(byte)));
    });
    assert!(!session.has_unsent());
}

#[test]
fn strangers_learn_why_and_nobody_waits_for_the_silent() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(directory.path(), "authority");
    let stranger = Authority::new(directory.path(), "stranger");
    let tls = server_tls(&authority);
    let foreign = stranger.sign("foreign", Life::Valid);
    let expired = authority.sign("expired", Life::Expired);
    for pair in [None, Some(&foreign), Some(&expired)] {
        let client = ClientTls::open(&authority.client(pair)).unwrap().unwrap();
        let (ours, theirs) = sockets();
        let tls = tls.clone();
        let accepting = std::thread::spawn(move || {
            let refused = accept(&tls, &theirs).err();
            (refused, theirs)
        });
        let name = client.name_of("localhost:1").unwrap();
        // TLS 1.3: the client is told after its own handshake.
        let session = connect_socket(&client, name, ours.as_fd(), soon()).unwrap();
        let (refused, _theirs) = accepting.join().unwrap();
        let refused = refused.expect("a refusal");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{pair:?}");
        let mut stream = &ours;
        let told = session.receive(&mut [0; 9], |room| stream.read(room));
        assert!(told.unwrap_err().to_string().contains("alert"), "{pair:?}");
    }
    // A client does not trust a server of another authority.
    let client = ClientTls::open(&stranger.client(None)).unwrap().unwrap();
    let (ours, theirs) = sockets();
    let accepting = std::thread::spawn(move || accept(&tls, &theirs).err());
    let name = client.name_of("localhost:1").unwrap();
    let error = connect_socket(&client, name.clone(), ours.as_fd(), soon()).unwrap_err();
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
    assert!(accepting.join().unwrap().is_some());
    // A server that says nothing.
    let (ours, _theirs) = sockets();
    let deadline = Instant::now() + Duration::from_millis(200);
    let error = connect_socket(&client, name, ours.as_fd(), deadline).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(deadline.elapsed() < Duration::from_secs(5));
}
