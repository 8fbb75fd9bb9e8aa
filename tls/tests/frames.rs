//! Frames over TLS on the runtime.

use kvpool_tls::rustls::crypto::ring::default_provider;
use kvpool_tls::rustls::pki_types::pem::PemObject as _;
use kvpool_tls::rustls::pki_types::{CertificateDer, ServerName};
use kvpool_tls::rustls::version::TLS12;
use kvpool_tls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use kvpool_tls::testing::{Authority, Life};
use kvpool_tls::{
    Caller, ClientAuth, ClientTls, Port, ServerFiles, ServerTls, Version, accept, connect_socket,
};
use std::future::poll_fn;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

const RECORDS: usize = 1000;

fn server(authority: &Authority) -> ServerTls {
    let pair = authority.sign("server", Life::Valid);
    ServerTls::open(ServerFiles {
        cert: pair.cert,
        key: pair.key,
        client_ca: None,
        client_auth: ClientAuth::None,
        min_version: Version::Tls12,
    })
    .unwrap()
}

/// A caller whose bytes never run out must not keep the thread, and time limits must be looked at.
#[tokio::test]
async fn a_task_that_reads_gives_way_while_bytes_are_at_hand() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(directory.path(), "authority");
    let tls = server(&authority);
    let client = ClientTls::open(&authority.client(None)).unwrap().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let flooding = tokio::task::spawn_blocking(move || {
        let mut socket = TcpStream::connect(address).unwrap();
        let name = client.name_of("localhost:1").unwrap();
        let soon = Instant::now() + Duration::from_secs(20);
        let session = connect_socket(&client, name, socket.as_fd(), soon).unwrap();
        for _ in 0..RECORDS {
            session.send(b"x", |bytes| socket.write(bytes)).unwrap();
        }
        (socket, session)
    });
    let (stream, _) = listener.accept().await.unwrap();
    let Caller::Frames(mut stream) = accept(tls.config(Port::Control), stream).await.unwrap()
    else {
        panic!("the caller speaks frames");
    };
    let _open = flooding.await.unwrap();
    // From now on the runtime knows that bytes are at hand.
    stream.read_u8().await.unwrap();

    let mut count = 1;
    {
        let mut reading = pin!(async {
            while count < RECORDS {
                stream.read_u8().await.unwrap();
                count += 1;
            }
        });
        let ended = poll_fn(|context| Poll::Ready(reading.as_mut().poll(context).is_ready())).await;
        assert!(!ended, "{RECORDS} records in one turn");
        reading.await;
    }
    assert_eq!(count, RECORDS);
}

#[tokio::test]
async fn frames_over_an_older_version_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new(directory.path(), "authority");
    let tls = server(&authority);
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(&authority.ca).unwrap() {
        roots.add(certificate.unwrap()).unwrap();
    }
    let mut old = ClientConfig::builder_with_provider(default_provider().into())
        .with_protocol_versions(&[&TLS12])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    old.alpn_protocols = vec![kvpool_tls::ALPN_FRAMES.to_vec()];
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let calling = std::thread::spawn(move || {
        let name = ServerName::try_from("localhost").unwrap();
        let client = ClientConnection::new(Arc::new(old), name).unwrap();
        let mut stream = StreamOwned::new(client, TcpStream::connect(address).unwrap());
        // It may be closed before or after its first byte.
        let _said = stream.write_all(b"x");
        let _ended = stream.read(&mut [0]);
    });
    let (stream, _) = listener.accept().await.unwrap();
    let refused = accept(tls.config(Port::Control), stream).await;
    let refused = refused.expect_err("a refusal").to_string();
    assert!(refused.contains("frames need TLS 1.3"), "{refused}");
    calling.join().unwrap();
}
