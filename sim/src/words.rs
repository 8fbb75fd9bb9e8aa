//! The words of a master to a node that stops, in one session: how many blocks leave with the node. Each word names the
//! last report of the node that its master has processed. A node takes a word that names none for the answer to its
//! stop.

use kvpool_proto::{self as proto, master_message, node_message};
use parking_lot::Mutex;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Words(Mutex<Said>);

/// What both have said.
#[derive(Clone, Copy, Debug, Default)]
struct Said {
    /// The last heartbeat of the node.
    heartbeat: u64,
    /// The first report that the node stops: its number, and the last heartbeat before it.
    stop: Option<(u64, u64)>,
    /// The report, once the master has answered a later heartbeat. A master processes the messages of a session in
    /// their order.
    heard: Option<u64>,
}

impl Words {
    /// The node says something.
    pub(crate) fn hear(&self, message: &proto::NodeMessage) {
        use node_message::Body;
        let mut said = self.0.lock();
        match &message.body {
            Some(Body::Heartbeat(beat)) => said.heartbeat = beat.sequence,
            Some(Body::Draining(report)) if !report.out_of_service && said.stop.is_none() => {
                said.stop = Some((report.number, said.heartbeat));
            }
            _ => {}
        }
    }

    /// The master says something. Returns what is wrong with it.
    pub(crate) fn say(&self, message: &proto::MasterMessage) -> Option<String> {
        use master_message::Body;
        let mut said = self.0.lock();
        match (&message.body, said.stop) {
            (Some(Body::HeartbeatAck(ack)), Some((number, before))) if ack.sequence > before => {
                said.heard = Some(number);
                None
            }
            (Some(Body::Demoted(word)), _) => {
                let heard = said.heard.filter(|_| word.answers == 0)?;
                Some(format!(
                    "a word to a node that stops names no report, and its master has processed report {heard}"
                ))
            }
            _ => None,
        }
    }
}
