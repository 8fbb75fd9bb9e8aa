//! A client with a token file, against a real master and a real store node that ask for tokens.

use kvpool_auth::issue::{NewToken, SigningKey, publish};
use kvpool_auth::{MAX_TOKEN_BYTES, now};
use kvpool_client::{
    Client, Code, ConnectError, Key, Leasing, Namespace, Options, Remove, TransportChoice,
};
use kvpool_store_node::Node;
use kvpool_transport::tcp;
use kvpool_types::wire::{data::Hello, frame};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const ISSUER: &str = "tests";
const POLICY: &str = r#"
[[rule]]
subject = "writer"
roles = ["writer"]
namespaces = ["a"]
[[rule]]
subject = "reader"
roles = ["reader"]
namespaces = ["a"]
[[rule]]
subject = "node"
roles = ["node"]
"#;
/// Tokens are taken for so many seconds after their end.
const LEEWAY: u64 = 30;

struct Pool {
    directory: TempDir,
    key: Mutex<SigningKey>,
    master: kvpool_master::Server,
}

impl Pool {
    async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let key = SigningKey::generate().unwrap();
        publish(&key, &path("jwks.json")).unwrap();
        std::fs::write(path("policy.toml"), POLICY).unwrap();
        let config = kvpool_master::Config {
            listen: "127.0.0.1:0".to_owned(),
            http_listen: "127.0.0.1:0".to_owned(),
            data_dir: path("data"),
            auth_jwks: Some(path("jwks.json")),
            auth_issuer: ISSUER.to_owned(),
            auth_policy: Some(path("policy.toml")),
            ..Default::default()
        };
        let master = kvpool_master::Server::start(config).await.unwrap();
        Self {
            directory,
            key: Mutex::new(key),
            master,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn url(&self) -> String {
        format!("http://{}", self.master.grpc_address())
    }

    /// Writes a token of `subject` that is taken for another `seconds`, in one step.
    fn write_token(&self, file: &Path, subject: &str, seconds: u64) {
        let token = self.key.lock().unwrap().sign(&NewToken {
            subject,
            issuer: ISSUER,
            audience: "kvpool",
            begins: now() - 2 * LEEWAY,
            expires: now() - LEEWAY + seconds,
        });
        replace(file, &token.unwrap());
    }

    /// A token of `subject` that is `bytes` long.
    fn token_of_length(&self, subject: &str, bytes: usize) -> String {
        let key = self.key.lock().unwrap();
        let sign = |padding: usize| {
            let claims = serde_json::json!({
                "sub": subject, "iss": ISSUER, "aud": "kvpool", "exp": now() + 600,
                "padding": "x".repeat(padding),
            });
            key.sign_claims(&claims).unwrap()
        };
        // Base64 makes four characters of three.
        let rough = (bytes - sign(0).len()) / 4 * 3;
        let tokens = (rough.saturating_sub(8)..rough + 8).map(sign);
        let mut tokens = tokens.filter(|token| token.len() == bytes);
        tokens
            .next()
            .expect("no padding gives a token of this length")
    }

    /// The options of a client whose calls fail rather than wait long.
    fn tcp(&self, token_file: &Path) -> Options {
        self.options(Some(token_file.to_owned()), TransportChoice::Tcp)
    }

    async fn node(&self, token: &Path) -> Node {
        self.node_with(token, "jwks.json").await
    }

    /// A node that believes the keys in the file `jwks`.
    async fn node_with(&self, token: &Path, jwks: &str) -> Node {
        let config = kvpool_store_node::Config {
            master: vec![self.url()],
            name: "n".to_owned(),
            token_file: Some(token.to_owned()),
            segment: vec![bytesize::ByteSize::mib(16)],
            listen: "127.0.0.1:0".to_owned(),
            http_listen: "127.0.0.1:0".to_owned(),
            shm_path: self.path("n.sock"),
            no_rdma: true,
            auth_jwks: Some(self.path(jwks)),
            auth_issuer: ISSUER.to_owned(),
            auth_policy: Some(self.path("policy.toml")),
            ..Default::default()
        };
        Node::start(config).await.unwrap()
    }

    fn options(&self, token_file: Option<PathBuf>, transport: TransportChoice) -> Options {
        Options {
            masters: vec![self.url()],
            namespace: Namespace {
                name: "a".to_owned(),
                ..Default::default()
            },
            transport,
            token_file,
            ..Options::default()
        }
    }

    async fn client(&self, token_file: &Path) -> Client {
        Client::connect(self.tcp(token_file)).await.unwrap()
    }

    /// The reason that no client connects with this token.
    async fn refusal(&self, token_file: Option<PathBuf>) -> Code {
        let options = self.options(token_file, TransportChoice::Tcp);
        match Client::connect(options).await {
            Err(ConnectError::Refused { source, .. }) => source.code,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it connected"),
        }
    }
}

/// Writes a file in one step.
fn replace(file: &Path, text: &str) {
    let partial = file.with_extension("partial");
    std::fs::write(&partial, text).unwrap();
    std::fs::rename(partial, file).unwrap();
}

async fn until_ready(node: &Node) {
    let begun = Instant::now();
    while !node.is_ready() {
        assert!(begun.elapsed() < Duration::from_secs(30), "not registered");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn key(name: &str) -> Key {
    Key::parse(name).unwrap()
}

async fn exists(client: &Client, name: &str) -> Result<bool, Code> {
    let asked = client.exist(&[key(name)], Leasing::None).await;
    asked
        .map(|answer| answer.present == [true])
        .map_err(|error| error.code)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_with_tokens_serves_those_who_have_them() {
    let pool = Pool::start().await;
    let of = |name: &str| pool.path(name);
    for subject in ["node", "writer", "reader"] {
        pool.write_token(&of(subject), subject, 600);
    }
    let stranger = pool.node(&of("reader")).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!stranger.is_ready(), "a reader registered as a node");
    drop(stranger);
    let node = pool.node(&of("node")).await;
    until_ready(&node).await;
    let writer = pool.client(&of("writer")).await;
    writer.put(&key("x"), b"bytes".to_vec()).await.unwrap();
    for transport in [TransportChoice::Tcp, TransportChoice::Shm] {
        let options = pool.options(Some(of("reader")), transport);
        let reader = Client::connect(options).await.unwrap();
        let found = reader.get(&key("x")).await.unwrap();
        assert_eq!(found.as_deref(), Some(&b"bytes"[..]), "{transport:?}");
        let refused = reader.put(&key("y"), b"bytes".to_vec()).await.unwrap_err();
        assert_eq!(refused.code(), Code::Forbidden);
    }
    // A caller without a token, on the control port and on the data port.
    assert_eq!(pool.refusal(None).await, Code::Unauthenticated);
    let address = node.data_address();
    let refused = tokio::task::spawn_blocking(move || hello_without_token(address));
    assert_eq!(refused.await.unwrap(), Code::Unauthenticated);
    drop(node);
    pool.master.stop().await;
}

/// The answer of a data port to a hello without a token.
fn hello_without_token(address: std::net::SocketAddr) -> Code {
    let hello = Hello {
        min_version: frame::MIN_VERSION,
        max_version: frame::VERSION,
        cluster: kvpool_types::ClusterId(0),
        client: kvpool_types::ClientId(1),
        incarnation: kvpool_types::Incarnation(0),
        checksum_algorithm: kvpool_types::ChecksumAlgorithm::Crc64Nvme as u8,
        token: kvpool_types::Token::default(),
    };
    let limit = Instant::now() + Duration::from_secs(10);
    let opened = tcp::connect_with(address, hello, limit, &tcp::ConnectOptions::default());
    match opened {
        Ok(_) => Code::Ok,
        Err(error) => error.code,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_token_ends_calls_with_its_own_code_and_without_a_wait() {
    let pool = Pool::start().await;
    let file = pool.path("token");
    pool.write_token(&file, "writer", 8);
    let client = pool.client(&file).await;
    assert_eq!(exists(&client, "x").await, Ok(false));
    tokio::time::sleep(Duration::from_secs(10)).await;
    let begun = Instant::now();
    assert_eq!(exists(&client, "x").await, Err(Code::TokenExpired));
    let error = client.list("", 10, None).await.map(drop).unwrap_err();
    assert_eq!(error.code, Code::TokenExpired);
    assert_eq!(pool.refusal(Some(file.clone())).await, Code::TokenExpired);
    // With several masters, the client first asks one which master leads.
    let mut several = pool.options(Some(file.clone()), TransportChoice::Tcp);
    several.masters.push("http://127.0.0.1:1".to_owned());
    match Client::connect(several).await {
        Err(ConnectError::Refused { source, .. }) => assert_eq!(source.code, Code::TokenExpired),
        other => panic!("{other:?}"),
    }
    // Each of these has a timeout of 3 s or 5 s, which none of them reaches.
    assert!(
        begun.elapsed() < Duration::from_secs(3),
        "{:?}",
        begun.elapsed()
    );
    // A file that is renewed a moment before the call is read at once.
    pool.write_token(&file, "writer", 600);
    assert_eq!(exists(&client, "x").await, Ok(false));
    pool.master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_are_renewed_under_load_fail_no_call_and_no_session() {
    let pool = Pool::start().await;
    let (file, own) = (pool.path("token"), pool.path("node"));
    pool.write_token(&file, "writer", 6);
    pool.write_token(&own, "node", 6);
    let node = pool.node(&own).await;
    until_ready(&node).await;
    let client = pool.client(&file).await;
    client.put(&key("x"), b"bytes".to_vec()).await.unwrap();
    let (calls, ends) = (AtomicU64::new(0), AtomicBool::new(false));
    let callers = (0..4).map(|_| async {
        while !ends.load(Ordering::Relaxed) {
            assert_eq!(exists(&client, "x").await, Ok(true));
            client.list("", 10, None).await.unwrap();
            assert!(client.get(&key("x")).await.unwrap().is_some());
            calls.fetch_add(3, Ordering::Relaxed);
        }
    });
    // Each token is renewed well before its end; the first ones have ended by the last renewal.
    let renewals = async {
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_secs(2)).await;
            pool.write_token(&file, "writer", 6);
            pool.write_token(&own, "node", 6);
            assert!(node.is_ready(), "the node's session ended");
        }
        ends.store(true, Ordering::Relaxed);
    };
    tokio::join!(futures::future::join_all(callers), renewals);
    println!("{} calls under 6 tokens", calls.load(Ordering::Relaxed));
    // A large block takes connections that were not open before, and the first token has ended.
    let large: Vec<u8> = (0..4u32 << 20).map(|at| at.to_le_bytes()[1]).collect();
    client.put(&key("large"), large.clone()).await.unwrap();
    let found = client.get(&key("large")).await.unwrap();
    assert!(
        found.as_deref() == Some(&large[..]),
        "4 MiB came back otherwise"
    );
    drop(node);
    pool.master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_longest_token_opens_every_port_and_a_longer_one_opens_none() {
    let pool = Pool::start().await;
    let (file, own) = (pool.path("token"), pool.path("node"));
    replace(&own, &pool.token_of_length("node", MAX_TOKEN_BYTES));
    let node = pool.node(&own).await;
    until_ready(&node).await;
    replace(&file, &pool.token_of_length("writer", MAX_TOKEN_BYTES));
    for transport in [TransportChoice::Tcp, TransportChoice::Shm] {
        let options = pool.options(Some(file.clone()), transport);
        let client = Client::connect(options).await.unwrap();
        let name = key(&format!("{transport:?}"));
        client.put(&name, b"bytes".to_vec()).await.unwrap();
        let found = client.get(&name).await.unwrap();
        assert_eq!(found.as_deref(), Some(&b"bytes"[..]), "{transport:?}");
        // Over gRPC.
        client.list("", 10, None).await.unwrap();
    }
    // HTTP: the token is good, and its subject sees no views.
    let longest = std::fs::read_to_string(&file).unwrap();
    assert_eq!(http_status(&pool, &longest), 403);
    let over = pool.token_of_length("writer", MAX_TOKEN_BYTES + 1);
    replace(&file, &over);
    assert_eq!(
        pool.refusal(Some(file.clone())).await,
        Code::Unauthenticated
    );
    assert_eq!(http_status(&pool, &over), 401);
    drop(node);
    pool.master.stop().await;
}

/// The status of a page that needs a token.
fn http_status(pool: &Pool, token: &str) -> u16 {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(pool.master.http_address()).unwrap();
    let limit = Some(Duration::from_secs(20));
    stream.set_read_timeout(limit).unwrap();
    let request =
        format!("GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    let head = std::str::from_utf8(&head).unwrap();
    head.rsplit(' ').next().unwrap().parse().unwrap()
}

/// The file may be renewed just after the client has read it. Here the node drops the key before
/// the master does, so that only the dial is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_dial_whose_token_is_refused_reads_the_file_again() {
    let pool = Pool::start().await;
    let (file, own) = (pool.path("token"), pool.path("node"));
    pool.write_token(&own, "node", 600);
    pool.write_token(&file, "writer", 600);
    let before = std::fs::read_to_string(&file).unwrap();
    let fresh = SigningKey::generate().unwrap();
    publish(&fresh, &pool.path("jwks.json")).unwrap();
    publish(&fresh, &pool.path("node-jwks.json")).unwrap();
    *pool.key.lock().unwrap() = fresh;
    let node = pool.node_with(&own, "node-jwks.json").await;
    until_ready(&node).await;
    // The master has read the second key by then.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let renewed = pool.path("renewed");
    pool.write_token(&renewed, "writer", 600);
    let writer = pool.client(&renewed).await;
    writer.put(&key("x"), b"bytes".to_vec()).await.unwrap();
    let after = std::fs::read_to_string(&renewed).unwrap();
    for transport in [TransportChoice::Tcp, TransportChoice::Shm] {
        replace(&file, &before);
        let mut options = pool.options(Some(file.clone()), transport);
        // No time for the look that comes by itself.
        options.timeouts.get = Duration::from_millis(700);
        let reader = Client::connect(options).await.unwrap();
        replace(&file, &after);
        let found = reader.get(&key("x")).await.unwrap();
        assert_eq!(found.as_deref(), Some(&b"bytes"[..]), "{transport:?}");
    }
    drop(node);
    pool.master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_rotated_under_load_and_no_call_fails() {
    let pool = Pool::start().await;
    let (file, own) = (pool.path("token"), pool.path("node"));
    pool.write_token(&file, "writer", 600);
    pool.write_token(&own, "node", 600);
    let node = pool.node(&own).await;
    until_ready(&node).await;
    let client = pool.client(&file).await;
    let (calls, ends) = (AtomicU64::new(0), AtomicBool::new(false));
    let callers = (0..4u64).map(|caller| {
        let (client, calls, ends) = (&client, &calls, &ends);
        async move {
            let name = key(&format!("k{caller}"));
            while !ends.load(Ordering::Relaxed) {
                client.put(&name, vec![7; 100_000]).await.unwrap();
                let found = client.get(&name).await.unwrap();
                assert!(found.is_none_or(|found| found == [7; 100_000]));
                assert!(exists(client, "absent").await.is_ok());
                client.list("", 10, None).await.unwrap();
                let one = Remove::Keys(vec![name.clone()]);
                client.remove(one, false).await.unwrap();
                calls.fetch_add(5, Ordering::Relaxed);
            }
        }
    });
    let rotations = async {
        for _ in 0..3 {
            // As docs/operations/security.md has it: the key, two seconds, tokens, and the end of the old key.
            let fresh = SigningKey::generate().unwrap();
            publish(&fresh, &pool.path("jwks.json")).unwrap();
            tokio::time::sleep(Duration::from_secs(2)).await;
            *pool.key.lock().unwrap() = fresh;
            pool.write_token(&file, "writer", 600);
            pool.write_token(&own, "node", 600);
            tokio::time::sleep(Duration::from_secs(3)).await;
            let only = pool.path("only.json");
            let _absent = std::fs::remove_file(&only);
            publish(&pool.key.lock().unwrap(), &only).unwrap();
            std::fs::rename(&only, pool.path("jwks.json")).unwrap();
            tokio::time::sleep(Duration::from_secs(2)).await;
            assert!(node.is_ready(), "the node's session ended");
            // A new client too.
            assert_eq!(exists(&pool.client(&file).await, "absent").await, Ok(false));
        }
        ends.store(true, Ordering::Relaxed);
    };
    tokio::join!(futures::future::join_all(callers), rotations);
    println!("{} calls under 4 keys", calls.load(Ordering::Relaxed));
    drop(node);
    pool.master.stop().await;
}
