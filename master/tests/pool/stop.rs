//! A master that is told to stop does not wait for connections that never end.

use kvpool_master::{Config, Server};
use kvpool_proto as proto;
use proto::master_message::Body as ToNode;
use proto::nodes_client::NodesClient;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;

/// Less than the time that requests in progress may take.
const AT_ONCE: Duration = Duration::from_secs(2);

async fn started(directory: &TempDir) -> Server {
    let config = Config {
        listen: "127.0.0.1:0".to_owned(),
        http_listen: "127.0.0.1:0".to_owned(),
        data_dir: directory.path().join("data"),
        ..Config::default()
    };
    Server::start(config).await.unwrap()
}

async fn stops_at_once(server: &Server) {
    let since = Instant::now();
    server.stop().await;
    let took = since.elapsed();
    assert!(took < AT_ONCE, "it took {took:?}");
}

/// The session of a node that the master has welcomed.
async fn session(
    server: &Server,
) -> (
    UnboundedSender<proto::NodeMessage>,
    Streaming<proto::MasterMessage>,
) {
    let url = format!("http://{}", server.grpc_address());
    let mut client = NodesClient::connect(url).await.unwrap();
    let (outbox, outgoing) = unbounded_channel();
    let register = proto::Register {
        min_version: proto::MIN_VERSION,
        max_version: proto::VERSION,
        name: "node-t".to_owned(),
        incarnation: vec![7; 16].into(),
        data_address: "127.0.0.1:1".to_owned(),
        host_id: vec![7; 16].into(),
        segments: vec![proto::OfferedSegment {
            size_bytes: 1 << 20,
            id: 0,
        }],
        checksum_algorithm: kvpool_types::ChecksumAlgorithm::Crc64Nvme as u32,
        ..Default::default()
    };
    let body = Some(proto::node_message::Body::Register(register));
    outbox.send(proto::NodeMessage { body }).unwrap();
    let outgoing = UnboundedReceiverStream::new(outgoing);
    let mut inbox = client.session(outgoing).await.unwrap().into_inner();
    let first = inbox.message().await.unwrap().unwrap();
    assert!(matches!(first.body, Some(ToNode::Welcome(_))), "{first:?}");
    (outbox, inbox)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_nobody_asks_anything_stops_at_once() {
    let directory = tempfile::tempdir().unwrap();
    stops_at_once(&started(&directory).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_session_of_a_node_does_not_delay_the_stop() {
    let directory = tempfile::tempdir().unwrap();
    let server = started(&directory).await;
    let (_outbox, mut inbox) = session(&server).await;
    stops_at_once(&server).await;
    while let Ok(Some(_)) = inbox.message().await {}
}
