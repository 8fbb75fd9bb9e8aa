//! What leaders answer to nodes that stop: how many blocks leave with them. Blocks may have come to a node, or have
//! lost their other replicas, since an earlier answer. So a node that stops waits for the answer to its stop.

use crate::life::Life;
use kvpool_proto::{self as proto, master_message, node_message};
use kvpool_types::Key;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The nodes that got an answer from a leader that had heard of their stop. An answer may say that no block leaves with
/// the node. Then it stands here with a block that does, as its leader saw the pool.
#[derive(Debug, Default)]
pub(crate) struct Answers(Mutex<Vec<(Life, Option<Key>)>>);

/// Whether the leader of one session has heard that the node stops.
#[derive(Debug, Default)]
pub(crate) struct Stop(AtomicBool);

impl Stop {
    /// A message of the node reaches its leader.
    pub(crate) fn hears(&self, message: &proto::NodeMessage) {
        if let Some(node_message::Body::Draining(draining)) = &message.body
            && !draining.out_of_service
        {
            self.0.store(true, Ordering::Release);
        }
    }

    /// Whether a message that the leader sends now is an answer to the stop.
    pub(crate) fn is_answered_by(&self, message: &proto::MasterMessage) -> bool {
        let is_word = matches!(&message.body, Some(master_message::Body::Demoted(_)));
        is_word && self.0.load(Ordering::Acquire)
    }
}

/// Whether the leader says that no block leaves with the node.
pub(crate) fn says_none(message: &proto::MasterMessage) -> bool {
    matches!(&message.body, Some(master_message::Body::Demoted(word)) if word.left == 0)
}

/// What is wrong with a message of a leader: each answer names a report of the node. A node takes an answer that names
/// none for the answer to its stop.
pub(crate) fn names_no_report(message: &proto::MasterMessage) -> Option<String> {
    let Some(master_message::Body::Demoted(word)) = &message.body else {
        return None;
    };
    let is_wrong = word.answers == 0;
    is_wrong.then(|| "an answer to a node that drains names no report of the node".to_owned())
}

impl Answers {
    /// An answer to its stop reaches a node. `left` is a block that leaves with the node in spite of the answer.
    pub(crate) fn reach(&self, node: &Life, left: Option<Key>) {
        self.0.lock().push((node.clone(), left));
    }

    /// Whether an answer to its stop has reached the node.
    pub(crate) fn have_reached(&self, node: &Life) -> bool {
        self.0.lock().iter().any(|(life, _)| life.is_same(node))
    }

    /// The block that leaves with the node in spite of the last answer.
    pub(crate) fn left_with(&self, node: &Life) -> Option<Key> {
        let answers = self.0.lock();
        let last = answers.iter().rfind(|(life, _)| life.is_same(node));
        last.and_then(|(_, left)| left.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(out_of_service: bool) -> proto::NodeMessage {
        let draining = proto::Draining {
            out_of_service,
            ..proto::Draining::default()
        };
        proto::NodeMessage {
            body: Some(node_message::Body::Draining(draining)),
        }
    }

    fn word(answers: u64) -> proto::MasterMessage {
        proto::MasterMessage {
            body: Some(master_message::Body::Demoted(proto::Demoted {
                left: 0,
                answers,
            })),
        }
    }

    #[test]
    fn the_last_answer_to_a_node_counts() {
        let (answers, node) = (Answers::default(), Life::default());
        let key = Key::parse("key-2").unwrap();
        answers.reach(&node, None);
        answers.reach(&node, Some(key.clone()));
        answers.reach(&Life::default(), None);
        assert_eq!(answers.left_with(&node), Some(key));
        answers.reach(&node, None);
        assert_eq!(answers.left_with(&node), None);
        assert!(answers.have_reached(&node) && !answers.have_reached(&Life::default()));
        assert!(says_none(&word(1)) && !says_none(&proto::MasterMessage::default()));
    }

    #[test]
    fn an_answer_names_a_report() {
        assert_eq!(names_no_report(&word(3)), None);
        assert!(names_no_report(&word(0)).is_some());
    }

    #[test]
    fn an_answer_to_an_operators_order_is_none_to_the_stop() {
        let stop = Stop::default();
        assert!(!stop.is_answered_by(&word(0)), "it names no report");
        stop.hears(&report(true));
        assert!(!stop.is_answered_by(&word(1)));
        stop.hears(&report(false));
        assert!(stop.is_answered_by(&word(2)));
    }
}
