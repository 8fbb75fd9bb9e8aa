//! A client with a token file, against a real master and a real store node that ask for tokens.

use kvpool_auth::issue::{NewToken, SigningKey, publish};
use kvpool_auth::now;
use kvpool_client::{
    Client, Code, ConnectError, Key, Leasing, Namespace, Options, TransportChoice,
};
use kvpool_store_node::Node;
use kvpool_transport::tcp;
use kvpool_types::wire::{data::Hello, frame};
use std::path::{Path, PathBuf};
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
    key: SigningKey,
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
            key,
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
        let token = self.key.sign(&NewToken {
            subject,
            issuer: ISSUER,
            audience: "kvpool",
            begins: now() - 2 * LEEWAY,
            expires: now() - LEEWAY + seconds,
        });
        let partial = file.with_extension("partial");
        std::fs::write(&partial, token.unwrap()).unwrap();
        std::fs::rename(partial, file).unwrap();
    }

    async fn node(&self, token: &Path) -> Node {
        let config = kvpool_store_node::Config {
            master: vec![self.url()],
            name: "n".to_owned(),
            token_file: Some(token.to_owned()),
            segment: vec![bytesize::ByteSize::mib(16)],
            listen: "127.0.0.1:0".to_owned(),
            http_listen: "127.0.0.1:0".to_owned(),
            shm_path: self.path("n.sock"),
            no_rdma: true,
            auth_jwks: Some(self.path("jwks.json")),
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
        let options = self.options(Some(token_file.to_owned()), TransportChoice::Tcp);
        Client::connect(options).await.unwrap()
    }

    /// Why nobody connects with this token.
    async fn refusal(&self, token_file: Option<PathBuf>) -> Code {
        let options = self.options(token_file, TransportChoice::Tcp);
        match Client::connect(options).await {
            Err(ConnectError::Refused { source, .. }) => source.code,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it connected"),
        }
    }
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
    // Nobody, over control and over the data port.
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
    // One of several masters is asked who leads before it is called.
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
    drop(node);
    pool.master.stop().await;
}
