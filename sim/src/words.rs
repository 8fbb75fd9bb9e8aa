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

#[cfg(test)]
mod tests {
    use super::*;

    fn from_node(body: node_message::Body) -> proto::NodeMessage {
        proto::NodeMessage { body: Some(body) }
    }

    fn from_master(body: master_message::Body) -> proto::MasterMessage {
        proto::MasterMessage { body: Some(body) }
    }

    fn heartbeat(sequence: u64) -> proto::NodeMessage {
        from_node(node_message::Body::Heartbeat(proto::Heartbeat {
            sequence,
            ..proto::Heartbeat::default()
        }))
    }

    fn answer(sequence: u64) -> proto::MasterMessage {
        from_master(master_message::Body::HeartbeatAck(proto::HeartbeatAck {
            sequence,
            ..proto::HeartbeatAck::default()
        }))
    }

    fn word(answers: u64) -> proto::MasterMessage {
        from_master(master_message::Body::Demoted(proto::Demoted {
            left: 0,
            answers,
        }))
    }

    #[test]
    fn a_word_names_a_report_once_a_later_heartbeat_was_answered() {
        let words = Words::default();
        words.hear(&heartbeat(1));
        words.hear(&from_node(node_message::Body::Draining(proto::Draining {
            number: 3,
            ..proto::Draining::default()
        })));
        assert_eq!(words.say(&answer(1)), None);
        assert_eq!(words.say(&word(0)), None, "the report is on its way");
        words.hear(&heartbeat(2));
        assert_eq!(words.say(&answer(2)), None);
        assert_eq!(words.say(&word(3)), None);
        let wrong = words.say(&word(0)).unwrap_or_default();
        assert!(wrong.contains("report 3"), "{wrong}");
    }
}
