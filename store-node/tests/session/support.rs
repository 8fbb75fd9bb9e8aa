//! A minimal master, with which a test sends the messages of a real one. It moves no bytes and
//! knows no blocks. It only holds the other end of the session.

use bytes::Bytes;
use bytesize::ByteSize;
use kvpool_proto as proto;
use kvpool_store_node::{Config, Node};
use kvpool_transport::{Link, Region, Slice, TransferError, WriteOp, shm, tcp};
use kvpool_types::wire::data::Hello;
use kvpool_types::wire::frame;
use kvpool_types::{
    Checksum, ChecksumAlgorithm, ClientId, ClusterId, Code, Epoch, Extent, Grant, GrantId,
    GrantKey, Incarnation, Length, Offset, SegmentId,
};
use proto::master_message::Body as ToNode;
use proto::node_message::Body as FromNode;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

pub(crate) const CLUSTER: ClusterId = ClusterId(0xc1);
pub(crate) const KEY: GrantKey = GrantKey([7; 32]);
/// The master's clock when it welcomes a node.
pub(crate) const CLOCK_MS: u64 = 1_000_000;
pub(crate) const SEGMENT: SegmentId = SegmentId(31);
/// The heartbeat interval that nodes are given.
pub(crate) const INTERVAL: Duration = Duration::from_millis(50);
/// Longer than anything here should take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The other end of every session that a node opens.
pub(crate) struct Master {
    pub(crate) address: SocketAddr,
    sessions: mpsc::UnboundedReceiver<Session>,
    /// Whether heartbeats are answered.
    pub(crate) answers: Arc<AtomicBool>,
    server: JoinHandle<()>,
}

/// One session, its registration taken.
pub(crate) struct Session {
    pub(crate) register: proto::Register,
    outbox: mpsc::UnboundedSender<Result<proto::MasterMessage, Status>>,
    inbox: mpsc::UnboundedReceiver<(Instant, FromNode)>,
    reader: JoinHandle<()>,
}

struct Service {
    sessions: mpsc::UnboundedSender<Session>,
    answers: Arc<AtomicBool>,
    epoch: Arc<std::sync::atomic::AtomicU64>,
}

#[tonic::async_trait]
impl proto::nodes_server::Nodes for Service {
    type SessionStream = UnboundedReceiverStream<Result<proto::MasterMessage, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<proto::NodeMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut stream = request.into_inner();
        let (outbox, outgoing) = mpsc::unbounded_channel();
        let (heard, inbox) = mpsc::unbounded_channel();
        let sessions = self.sessions.clone();
        let (answers, epoch) = (Arc::clone(&self.answers), Arc::clone(&self.epoch));
        let replies = outbox.clone();
        tokio::spawn(async move {
            let first = stream.message().await.unwrap().unwrap().body.unwrap();
            let FromNode::Register(register) = first else {
                panic!("a session begins with a registration, not {first:?}");
            };
            let reader = tokio::spawn(async move {
                while let Ok(Some(message)) = stream.message().await {
                    let body = message.body.unwrap();
                    if let FromNode::Heartbeat(beat) = &body
                        && answers.load(Ordering::Relaxed)
                    {
                        let _ = replies.send(Ok(proto::MasterMessage {
                            body: Some(ToNode::HeartbeatAck(proto::HeartbeatAck {
                                sequence: beat.sequence,
                                epoch: epoch.load(Ordering::Relaxed),
                                clock_ms: 0,
                                loads_recorded_below: 0,
                            })),
                        }));
                    }
                    let _ = heard.send((Instant::now(), body));
                }
            });
            let _ = sessions.send(Session {
                register,
                outbox,
                inbox,
                reader,
            });
        });
        Ok(Response::new(UnboundedReceiverStream::new(outgoing)))
    }
}

impl Master {
    pub(crate) async fn start() -> (Self, Arc<std::sync::atomic::AtomicU64>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (taken, sessions) = mpsc::unbounded_channel();
        let answers = Arc::new(AtomicBool::new(true));
        let epoch = Arc::new(std::sync::atomic::AtomicU64::new(1));
        let service = proto::nodes_server::NodesServer::new(Service {
            sessions: taken,
            answers: Arc::clone(&answers),
            epoch: Arc::clone(&epoch),
        });
        let server = tokio::spawn(async move {
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .unwrap();
        });
        let master = Self {
            address,
            sessions,
            answers,
            server,
        };
        (master, epoch)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Lets go of the sessions that were opened until now: a node that waits for a welcome knocks at
    /// others too.
    pub(crate) fn forget(&mut self) {
        while self.sessions.try_recv().is_ok() {}
    }

    /// The next session that the node opens.
    pub(crate) async fn session(&mut self) -> Session {
        tokio::time::timeout(PATIENCE, self.sessions.recv())
            .await
            .expect("the node registers")
            .unwrap()
    }
}

/// A master that refuses every node as a standby does; when each refusal was.
pub(crate) fn stands_by(mut master: Master, leader: String) -> Arc<Mutex<Vec<Instant>>> {
    let refusals = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&refusals);
    tokio::spawn(async move {
        while let Some(session) = master.sessions.recv().await {
            session.refuse_naming(Code::NotLeader, &leader);
            noted.lock().unwrap().push(Instant::now());
        }
    });
    refusals
}

impl Drop for Master {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Session {
    pub(crate) fn say(&self, body: ToNode) {
        let _ = self
            .outbox
            .send(Ok(proto::MasterMessage { body: Some(body) }));
    }

    pub(crate) fn welcome(&self, epoch: u64, segment: SegmentId) {
        self.say(ToNode::Welcome(proto::Welcome {
            version: proto::VERSION,
            cluster_id: Bytes::copy_from_slice(&CLUSTER.to_bytes()),
            epoch,
            segment_ids: vec![segment.0],
            grant_key: Bytes::copy_from_slice(&KEY.0),
            heartbeat_interval_ms: u64::try_from(INTERVAL.as_millis()).unwrap(),
            epoch_proof: Bytes::copy_from_slice(&epoch.to_le_bytes()),
            clock_ms: CLOCK_MS,
            loads_recorded_below: 1,
        }));
    }

    pub(crate) fn refuse(&self, code: Code) {
        self.refuse_naming(code, "");
    }

    /// Refuses as a standby does that names this leader.
    pub(crate) fn refuse_naming(&self, code: Code, leader: &str) {
        self.say(ToNode::Refusal(proto::Refusal {
            code: code.to_wire().into(),
            message: "so says the test".into(),
            leader: leader.into(),
        }));
    }

    pub(crate) fn fence(&self, ticket: u64, grant: &Grant) {
        self.say(ToNode::Fence(proto::Fence {
            items: vec![proto::FenceItem {
                ticket,
                grant: grant.id.0,
                extent: Some(range(&grant.extent)),
                before: 0,
            }],
        }));
    }

    /// Asks for many fences of one extent, in one message.
    pub(crate) fn fence_all(&self, tickets: impl Iterator<Item = u64>, extent: Extent) {
        let items = tickets.map(|ticket| proto::FenceItem {
            ticket,
            grant: 0,
            extent: Some(range(&extent)),
            before: 0,
        });
        self.say(ToNode::Fence(proto::Fence {
            items: items.collect(),
        }));
    }

    pub(crate) fn verify(&self, ticket: u64, extent: &Extent, checksum: Checksum) {
        self.say(ToNode::Verify(proto::Verify {
            ticket,
            extent: Some(range(extent)),
            checksum: checksum.0,
        }));
    }

    /// The next message, whichever it is, and when it came.
    pub(crate) async fn next(&mut self) -> Option<(Instant, FromNode)> {
        tokio::time::timeout(PATIENCE, self.inbox.recv())
            .await
            .expect("the node speaks")
    }

    /// The next message that is no heartbeat.
    pub(crate) async fn word(&mut self) -> FromNode {
        loop {
            let (_, body) = self.next().await.expect("the session goes on");
            if !matches!(body, FromNode::Heartbeat(_)) {
                return body;
            }
        }
    }

    /// Asserts that only heartbeats arrive for a while.
    pub(crate) async fn silence(&mut self, time: Duration) {
        let word = tokio::time::timeout(time, self.word()).await;
        assert!(word.is_err(), "{word:?}");
    }

    /// Ends the session as a dying master does.
    pub(crate) fn cut(self) {
        self.reader.abort();
    }

    pub(crate) fn incarnation(&self) -> Incarnation {
        Incarnation::from_slice(&self.register.incarnation).unwrap()
    }
}

pub(crate) fn range(extent: &Extent) -> proto::ExtentRange {
    proto::ExtentRange {
        segment: extent.segment.0,
        offset: extent.offset.0,
        length: extent.length.0,
    }
}

/// A node with one segment of 16 MiB.
pub(crate) async fn node(masters: Vec<String>, directory: &tempfile::TempDir) -> Node {
    Node::start(config(masters, directory)).await.unwrap()
}

pub(crate) fn config(masters: Vec<String>, directory: &tempfile::TempDir) -> Config {
    Config {
        master: masters,
        name: "node-t".into(),
        segment: vec![ByteSize::mib(16)],
        listen: "127.0.0.1:0".into(),
        http_listen: "127.0.0.1:0".into(),
        shm_path: directory.path().join("node.sock"),
        drain_timeout: PATIENCE,
        ..Config::default()
    }
}

/// A node that a master has welcomed in epoch 1.
pub(crate) async fn welcomed(
    master: &mut Master,
    directory: &tempfile::TempDir,
) -> (Node, Session) {
    let node = node(vec![master.url()], directory).await;
    let session = master.session().await;
    session.welcome(1, SEGMENT);
    ready(&node).await;
    (node, session)
}

pub(crate) async fn ready(node: &Node) {
    let since = Instant::now();
    while !node.is_ready() {
        assert!(since.elapsed() < PATIENCE, "the node is welcomed");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub(crate) fn extent(offset: u64, length: u64) -> Extent {
    Extent {
        segment: SEGMENT,
        offset: Offset(offset),
        length: Length(length),
    }
}

pub(crate) fn grant(incarnation: Incarnation, epoch: u64, id: u64, extent: Extent) -> Grant {
    KEY.sign(incarnation, Epoch(epoch), GrantId(id), extent)
}

pub(crate) fn hello(incarnation: Incarnation) -> Hello {
    Hello {
        min_version: frame::MIN_VERSION,
        max_version: frame::VERSION,
        cluster: CLUSTER,
        client: ClientId(rand::random()),
        incarnation,
        checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
        token: kvpool_types::Token::default(),
    }
}

pub(crate) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// A TCP link to the node. Connecting blocks, and so happens on another thread.
pub(crate) async fn tcp_link(
    node: &Node,
    incarnation: Incarnation,
) -> Result<Arc<dyn Link>, TransferError> {
    let address = node.data_address();
    tokio::task::spawn_blocking(move || tcp::connect(address, hello(incarnation), deadline()))
        .await
        .unwrap()
        .map(|(link, _)| link)
}

pub(crate) async fn shm_link(
    node: &Node,
    incarnation: Incarnation,
) -> Result<Arc<dyn Link>, TransferError> {
    let path = node.shm_path().unwrap().to_owned();
    tokio::task::spawn_blocking(move || shm::connect(&path, hello(incarnation), deadline()))
        .await
        .unwrap()
        .map(|(link, _)| link)
}

/// Writes recognisable bytes under a grant.
pub(crate) async fn write(link: &Arc<dyn Link>, grant: Grant) -> Result<Checksum, Code> {
    let from = vec![Region::from(pattern(&grant)).whole()];
    let mut outcomes = link.write(vec![WriteOp { grant, from }], deadline()).await;
    outcomes.remove(0).map_err(|error| error.code)
}

pub(crate) fn pattern(grant: &Grant) -> Vec<u8> {
    (0..grant.extent.length.0)
        .map(|at| u8::try_from((at * 31 + grant.id.0) % 251).unwrap())
        .collect()
}

/// Reads a whole extent, and asserts that it holds the bytes that were written under the grant.
pub(crate) async fn read(link: &Arc<dyn Link>, epoch: u64, grant: &Grant) -> Result<(), Code> {
    let memory: Slice = Region::allocate(grant.extent.length).whole();
    let op = kvpool_transport::ReadOp {
        extent: grant.extent,
        from: Offset(0),
        into: vec![memory.clone()],
        right: None,
    };
    let mut outcomes = link.read(Epoch(epoch), vec![op], deadline()).await;
    outcomes.remove(0).map_err(|error| error.code)?;
    assert!(memory.to_vec() == pattern(grant), "other bytes were read");
    Ok(())
}
