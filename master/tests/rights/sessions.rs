//! The session of a store node, whose token is renewed meanwhile.

use super::audit::Log;
use super::callers::Fixture;
use super::calls::code_of;
use kvpool_proto as proto;
use kvpool_types::Code;
use proto::master_message::Body as ToNode;
use proto::node_message::Body as FromNode;
use proto::nodes_client::NodesClient;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;

/// A session that the master has welcomed.
pub(crate) struct Session {
    outbox: UnboundedSender<proto::NodeMessage>,
    inbox: Streaming<proto::MasterMessage>,
    sequence: u64,
}

/// Registers the node `name` with a token.
pub(crate) async fn open(it: &Fixture, token: &str, name: &str) -> Result<Session, Code> {
    let mut nodes = NodesClient::connect(it.url()).await.unwrap();
    let (outbox, outgoing) = unbounded_channel();
    let register = proto::Register {
        min_version: proto::MIN_VERSION,
        max_version: proto::VERSION,
        name: name.to_owned(),
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
    let body = Some(FromNode::Register(register));
    outbox.send(proto::NodeMessage { body }).unwrap();
    let outgoing = UnboundedReceiverStream::new(outgoing);
    let opened = nodes.session(it.request(outgoing, token)).await;
    let mut inbox = opened.map_err(|status| code_of(&status))?.into_inner();
    let first = inbox.message().await.map_err(|status| code_of(&status))?;
    let first = first.and_then(|message| message.body);
    assert!(matches!(first, Some(ToNode::Welcome(_))), "{first:?}");
    Ok(Session {
        outbox,
        inbox,
        sequence: 0,
    })
}

impl Session {
    fn send(&self, body: FromNode) {
        let body = Some(body);
        self.outbox.send(proto::NodeMessage { body }).unwrap();
    }

    fn renew(&self, token: impl Into<String>) {
        let token = token.into();
        self.send(FromNode::RenewToken(proto::RenewToken { token }));
    }

    /// Whether the master answers a heartbeat. Otherwise it has ended the session.
    async fn lives(&mut self) -> bool {
        self.sequence += 1;
        self.send(FromNode::Heartbeat(proto::Heartbeat {
            sequence: self.sequence,
            ..Default::default()
        }));
        let answered = async {
            while let Ok(Some(message)) = self.inbox.message().await {
                if let Some(ToNode::HeartbeatAck(ack)) = message.body
                    && ack.sequence == self.sequence
                {
                    return true;
                }
            }
            false
        };
        let answered = tokio::time::timeout(Duration::from_secs(20), answered).await;
        answered.expect("neither an answer nor an end")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_new_token_does_not_end_the_session_of_the_token_before() {
    let log = Log::keep();
    let it = Fixture::start().await;
    let mut session = open(&it, &it.token("node", 600), "node-renewing")
        .await
        .unwrap();
    assert!(session.lives().await);
    let bad = [
        "x.y.z".to_owned(),
        String::new(),
        it.token("node", -60),
        it.token("reader", 600),
    ];
    for token in &bad {
        session.renew(token);
        assert!(session.lives().await, "{token}");
    }
    let warned = log.lines(&[" WARN ", "node=node-renewing", "new token is refused"]);
    assert_eq!(warned, bad.len());
    // A good token counts from now on. The leeway for clocks is 30 s, and this token expires soon.
    session.renew(it.token("node", -27));
    assert!(session.lives().await);
    let ends = async {
        while session.lives().await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(20), ends).await;
    assert!(ended.is_ok(), "the renewed token does not count");
    it.stop().await;
}
