//! A real master and real store nodes, with tokens or without, and raw requests to them.

use crate::relay::Relay;
use kvpool_auth::issue::{NewToken, SigningKey, publish};
use kvpool_auth::now;
use kvpool_client::{Client, Key, Namespace, Options, TransportChoice};
use kvpool_master::Server;
use kvpool_proto::pool_client::PoolClient;
use kvpool_proto::{self as proto, ReplicaLocation};
use kvpool_store_node::{Config, Isolation, Node};
use kvpool_transport::{Link, shm};
use kvpool_types::wire::data::{Failure, Hello, Meta, ReadItem, ReadRequest, Statuses, SumsReply};
use kvpool_types::wire::frame::{self, HEADER_BYTES, Header, Op};
use kvpool_types::wire::keys;
use kvpool_types::wire::rdma::RdmaOpen;
use kvpool_types::{
    ChecksumAlgorithm, ClientId, ClusterId, Code, Epoch, Extent, Incarnation, Length, Offset,
    ReadRight, SegmentId, Token, Version,
};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const ISSUER: &str = "tests";
const POLICY: &str = r#"
[[rule]]
subject = "a"
roles = ["writer"]
namespaces = ["a"]
[[rule]]
subject = "b"
roles = ["writer"]
namespaces = ["b"]
[[rule]]
subject = "root"
roles = ["admin"]
namespaces = ["*"]
[[rule]]
subject = "node"
roles = ["node"]
"#;

pub(crate) struct Pool {
    pub(crate) directory: TempDir,
    /// The signer of tokens; `None` in a pool without tokens.
    key: Option<SigningKey>,
    pub(crate) master: Server,
    pub(crate) nodes: Vec<Node>,
    /// The way to the one node, in a pool with a relay.
    pub(crate) relay: Option<Relay>,
}

/// The parts of a pool.
pub(crate) struct Shape {
    pub(crate) nodes: usize,
    /// Whether the master asks for tokens.
    pub(crate) has_tokens: bool,
    /// Whether the nodes ask for tokens, and for signed locations with them.
    pub(crate) node_asks: bool,
    pub(crate) ssd: Option<String>,
    pub(crate) isolation: Isolation,
    /// Whether clients reach the one node through a relay.
    pub(crate) is_relayed: bool,
}

impl Shape {
    pub(crate) const fn of(nodes: usize, has_tokens: bool, isolation: Isolation) -> Self {
        Self {
            nodes,
            has_tokens,
            node_asks: has_tokens,
            ssd: None,
            isolation,
            is_relayed: false,
        }
    }
}

/// A replica, as a lookup named it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) cluster: ClusterId,
    pub(crate) epoch: Epoch,
    pub(crate) incarnation: Incarnation,
    pub(crate) data_address: String,
    pub(crate) shm_path: String,
    pub(crate) extent: Extent,
    pub(crate) right: Option<ReadRight>,
}

impl Pool {
    /// Starts a pool whose callers need tokens, or one without.
    pub(crate) async fn start(nodes: usize, has_tokens: bool) -> Self {
        Self::with(Shape::of(nodes, has_tokens, Isolation::Shared)).await
    }

    pub(crate) async fn with(shape: Shape) -> Self {
        let Shape {
            nodes,
            has_tokens,
            node_asks,
            ssd,
            isolation,
            is_relayed,
        } = shape;
        let relay = is_relayed.then(Relay::listen);
        let advertise = relay.as_ref().map(|relay| relay.address().to_string());
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let key = has_tokens.then(|| SigningKey::generate().unwrap());
        if let Some(key) = &key {
            publish(key, &path("jwks.json")).unwrap();
            std::fs::write(path("policy.toml"), POLICY).unwrap();
            for subject in ["a", "b", "root", "node"] {
                std::fs::write(path(subject), token(key, subject)).unwrap();
            }
        }
        let file = |name: &str| has_tokens.then(|| path(name));
        let issuer = if has_tokens { ISSUER } else { "" };
        let config = kvpool_master::Config {
            listen: "127.0.0.1:0".to_owned(),
            http_listen: "127.0.0.1:0".to_owned(),
            data_dir: path("data"),
            lease_ttl: Duration::from_millis(300),
            auth_jwks: file("jwks.json"),
            auth_issuer: issuer.to_owned(),
            auth_policy: file("policy.toml"),
            ..Default::default()
        };
        let master = Server::start(config).await.unwrap();
        let mut started = Vec::new();
        for number in 0..nodes {
            let config = Config {
                master: vec![format!("http://{}", master.grpc_address())],
                name: format!("n{number}"),
                token_file: file("node"),
                segment: vec![bytesize::ByteSize::mib(16)],
                ssd: ssd
                    .iter()
                    .flat_map(|ssd| ssd.split(','))
                    .map(str::to_owned)
                    .collect(),
                listen: "127.0.0.1:0".to_owned(),
                advertise: advertise.clone().unwrap_or_default(),
                http_listen: "127.0.0.1:0".to_owned(),
                shm_path: path(&format!("n{number}.sock")),
                no_rdma: true,
                isolation,
                auth_jwks: file("jwks.json").filter(|_| node_asks),
                auth_issuer: if node_asks { issuer } else { "" }.to_owned(),
                auth_policy: file("policy.toml").filter(|_| node_asks),
                ..Default::default()
            };
            let node = Node::start(config).await.unwrap();
            if let Some(relay) = &relay {
                relay.to(node.data_address());
            }
            let begun = Instant::now();
            while !node.is_ready() {
                assert!(begun.elapsed() < Duration::from_secs(30), "not registered");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            started.push(node);
        }
        Self {
            directory,
            key,
            master,
            nodes: started,
            relay,
        }
    }

    /// Gives `subject` the namespace `namespace` instead of its own, and waits until the master knows it.
    pub(crate) async fn allow(&self, subject: &str, namespace: &str) {
        let (own, other) = (format!("[\"{subject}\"]"), format!("[\"{namespace}\"]"));
        let policy = self.directory.path().join("policy.toml");
        std::fs::write(policy, POLICY.replace(&own, &other)).unwrap();
        let begun = Instant::now();
        while self.lookup(subject, subject, "none").await.is_ok() {
            assert!(begun.elapsed() < Duration::from_secs(30), "not read");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    pub(crate) async fn stop(self) {
        drop(self.nodes);
        self.master.stop().await;
    }

    fn url(&self) -> String {
        format!("http://{}", self.master.grpc_address())
    }

    fn token_file(&self, subject: &str) -> Option<PathBuf> {
        let file = self.directory.path().join(subject);
        self.key.as_ref().map(|_| file)
    }

    pub(crate) fn token(&self, subject: &str) -> Token {
        let text = self.key.as_ref().map(|key| token(key, subject));
        text.unwrap_or_default().into()
    }

    /// A client over TCP with the token of `subject`.
    pub(crate) async fn client(&self, subject: &str, namespace: &str) -> Client {
        self.client_over(subject, namespace, TransportChoice::Tcp)
            .await
    }

    /// The same over another transport.
    pub(crate) async fn client_over(
        &self,
        subject: &str,
        namespace: &str,
        transport: TransportChoice,
    ) -> Client {
        let options = Options {
            masters: vec![self.url()],
            namespace: Namespace {
                name: namespace.to_owned(),
                ..Default::default()
            },
            transport,
            token_file: self.token_file(subject),
            ..Options::default()
        };
        Client::connect(options).await.unwrap()
    }

    fn signed<T>(&self, subject: &str, request: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(request);
        let value = format!("Bearer {}", self.token(subject).as_str());
        let metadata = request.metadata_mut();
        metadata.insert("authorization", value.parse().unwrap());
        request
    }

    /// Where the replicas of a block lie, with the token of `subject`.
    pub(crate) async fn lookup(
        &self,
        subject: &str,
        namespace: &str,
        key: &str,
    ) -> Result<Vec<Place>, tonic::Status> {
        let mut client = PoolClient::connect(self.url()).await.unwrap();
        let hello = proto::HelloRequest {
            min_version: proto::MIN_VERSION,
            max_version: proto::VERSION,
            ..Default::default()
        };
        let hello = client.hello(self.signed(subject, hello)).await?;
        let hello = hello.into_inner();
        let request = proto::LookupRequest {
            caller: Some(proto::Caller {
                cluster_id: hello.cluster_id.clone(),
                epoch: hello.epoch,
                namespace: namespace.to_owned(),
                ..Default::default()
            }),
            keys: keys::pack([&Key::parse(key).unwrap()]).into(),
            no_lease: true,
        };
        let reply = client.lookup(self.signed(subject, request)).await?;
        let reply = reply.into_inner();
        let cluster = ClusterId::from_slice(&hello.cluster_id).unwrap();
        let location = &reply.locations[0];
        let place = |replica: &ReplicaLocation| {
            let node = &reply.nodes[usize::try_from(replica.node).unwrap()];
            let right = |mac| ReadRight {
                version: Version(location.version),
                deadline_ms: reply.read_deadline_ms,
                mac,
            };
            Place {
                cluster,
                epoch: Epoch(reply.epoch),
                incarnation: Incarnation::from_slice(&node.incarnation).unwrap(),
                data_address: node.data_address.clone(),
                shm_path: node.shm_path.clone(),
                extent: Extent {
                    segment: SegmentId(replica.segment),
                    offset: Offset(replica.offset),
                    length: Length(location.length),
                },
                right: replica.read_proof.as_ref().try_into().ok().map(right),
            }
        };
        Ok(location.replicas.iter().map(place).collect())
    }
}

fn token(key: &SigningKey, subject: &str) -> String {
    let token = NewToken {
        subject,
        issuer: ISSUER,
        audience: "kvpool",
        begins: now() - 60,
        expires: now() + 600,
    };
    key.sign(&token).unwrap()
}

impl Place {
    pub(crate) fn length(&self) -> usize {
        self.extent.length.as_usize()
    }

    pub(crate) fn item(&self) -> ReadItem {
        ReadItem::whole(self.extent).with(self.right)
    }

    pub(crate) fn hello(&self, token: Token) -> Hello {
        Hello {
            min_version: frame::MIN_VERSION,
            max_version: frame::VERSION,
            cluster: self.cluster,
            client: ClientId(7),
            incarnation: self.incarnation,
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
            token,
        }
    }
}

impl Place {
    /// A link to the node over its Unix socket.
    pub(crate) async fn shm_link(&self, token: Token) -> Result<Arc<dyn Link>, Code> {
        let (path, hello) = (PathBuf::from(&self.shm_path), self.hello(token));
        let until = Instant::now() + Duration::from_secs(20);
        let linked = tokio::task::spawn_blocking(move || shm::connect(&path, hello, until));
        let linked = linked.await.unwrap();
        linked.map(|(link, _)| link).map_err(|error| error.code)
    }
}

/// A connection to a data port.
pub(crate) struct Port {
    stream: TcpStream,
    life: Incarnation,
}

impl Port {
    /// Connects to the node of `place` and says hello.
    pub(crate) fn open(place: &Place, token: Token) -> Self {
        let stream = TcpStream::connect(&place.data_address).unwrap();
        let patience = Some(Duration::from_secs(20));
        stream.set_read_timeout(patience).unwrap();
        let mut port = Self {
            stream,
            life: place.incarnation,
        };
        let (header, ..) = port.ask(Op::Hello, Epoch(0), &place.hello(token).to_bytes());
        assert_eq!(header.op, Op::HelloReply);
        port
    }

    fn ask(&mut self, op: Op, epoch: Epoch, meta: &[u8]) -> (Header, Vec<u8>, Vec<u8>) {
        let header = Header {
            version: frame::VERSION,
            op,
            request: 1,
            epoch,
            meta: u32::try_from(meta.len()).unwrap(),
            payload: 0,
        };
        self.stream.write_all(&header.encode()).unwrap();
        self.stream.write_all(meta).unwrap();
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head).unwrap();
        let header = Header::decode(&head).unwrap();
        let mut meta = vec![0; usize::try_from(header.meta).unwrap()];
        self.stream.read_exact(&mut meta).unwrap();
        let mut payload = vec![0; usize::try_from(header.payload).unwrap()];
        self.stream.read_exact(&mut payload).unwrap();
        (header, meta, payload)
    }

    /// The code of the refusal to open queue pairs.
    pub(crate) fn open_rdma(&mut self) -> Code {
        let open = RdmaOpen {
            incarnation: self.life,
            offers: Vec::new(),
        };
        let (header, meta, _) = self.ask(Op::RdmaOpen, Epoch(0), &open.to_bytes());
        assert_eq!(header.op, Op::Failure);
        Failure::decode(&meta).unwrap().code
    }

    fn request(&self, item: ReadItem) -> Vec<u8> {
        let request = ReadRequest {
            incarnation: self.life,
            items: vec![item],
        };
        request.to_bytes()
    }

    /// The code of a read, and every byte of a block that came with it.
    pub(crate) fn read(&mut self, epoch: Epoch, item: ReadItem) -> (Code, Vec<u8>) {
        let request = self.request(item);
        let (header, meta, payload) = self.ask(Op::Read, epoch, &request);
        assert_eq!(header.op, Op::Statuses);
        (Statuses::decode(&meta).unwrap().0[0], payload)
    }

    /// Asks for bytes, and reads none of the answer.
    pub(crate) fn begin_read(&mut self, epoch: Epoch, item: ReadItem) {
        let request = self.request(item);
        let header = Header {
            version: frame::VERSION,
            op: Op::Read,
            request: 1,
            epoch,
            meta: u32::try_from(request.len()).unwrap(),
            payload: 0,
        };
        self.stream.write_all(&header.encode()).unwrap();
        self.stream.write_all(&request).unwrap();
    }

    /// The bytes of the block that were received, until the block is complete or the node has ended
    /// the connection.
    pub(crate) fn rest(&mut self, length: usize) -> Vec<u8> {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head).unwrap();
        let meta = usize::try_from(Header::decode(&head).unwrap().meta).unwrap();
        let mut said = Vec::new();
        let all = u64::try_from(meta + length).unwrap();
        // An ended connection is an error, after the bytes that came before.
        let _ended = (&self.stream).take(all).read_to_end(&mut said);
        said.split_off(meta)
    }

    /// How many checksums came of an extent, or the code of the refusal.
    pub(crate) fn sums(&mut self, epoch: Epoch, item: ReadItem) -> Result<usize, Code> {
        let request = self.request(item);
        let (header, meta, _) = self.ask(Op::Sums, epoch, &request);
        assert_eq!(header.op, Op::SumsReply);
        let SumsReply(mut sums) = SumsReply::decode(&meta).unwrap();
        sums.remove(0).map(|sums| sums.len())
    }
}
