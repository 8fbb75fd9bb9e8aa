//! Drains and silence of one node.

use super::*;
use std::sync::Arc;
use std::time::Duration;

/// A report of a node that waits for the moves of its blocks.
fn report(session: Option<u64>, number: u64) -> DrainReport {
    DrainReport {
        session,
        moves: true,
        number,
    }
}

#[test]
fn a_draining_node_that_was_silent_for_a_while_still_drains() {
    let key = GrantKey([1; 32]);
    let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
    let node = Arc::new(node);
    let members = Members::default();
    members.insert(Arc::clone(&node));
    node.heard(BootInstant(0), Some(Reported::default()));
    assert_eq!(node.state(), NodeState::Live);
    for drains in [false, true] {
        if drains {
            node.drain();
        }
        let before = node.state();
        let now = BootInstant(node.last_heard().0 + 5000);
        let (second, hour) = (Duration::from_secs(1), Duration::from_secs(3600));
        let judged = members.judge(now, second, second, hour);
        assert!(judged.lost.is_empty() && judged.has_suspect);
        assert_eq!(node.state(), NodeState::Suspect);
        assert!(node.heard(now, None));
        assert_eq!(node.state(), before);
        assert_eq!(node.is_placeable(), !drains);
    }
}

#[test]
fn a_drain_makes_no_silent_node_readable() {
    let key = GrantKey([1; 32]);
    for before in [NodeState::Unreported, NodeState::Suspect, NodeState::Gone] {
        let name = NodeName("n".into());
        let node = StoreNode::new(name, Incarnation(7), key.clone(), BootInstant(0));
        node.set_state(before);
        node.drain();
        assert_eq!((node.state(), node.is_readable()), (before, false));
        assert!(node.drains());
        node.heard(BootInstant(1), Some(Reported::default()));
        let after = match before {
            NodeState::Gone => NodeState::Gone,
            _ => NodeState::Draining,
        };
        assert_eq!(node.state(), after);
        assert!(!node.is_placeable());
    }
}

/// The message that ends the silence has read the flag just before the drain sets it.
#[test]
fn a_node_that_speaks_while_its_drain_begins_drains() {
    let key = GrantKey([1; 32]);
    let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
    let before = node.state();
    node.drain();
    assert!(node.end_silence(before, NodeState::Live));
    assert_eq!(node.state(), NodeState::Draining);
}

/// The message that ends the silence has read the flag just before the cancellation clears it.
#[test]
fn a_node_that_speaks_while_its_drain_is_cancelled_is_live() {
    let key = GrantKey([1; 32]);
    let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
    let before = node.state();
    node.drain();
    assert_eq!(node.undrain(), UndrainOutcome::Now);
    assert!(node.end_silence(before, NodeState::Draining));
    assert_eq!(node.state(), NodeState::Live);
}

#[test]
fn a_silent_node_stays_suspect_when_its_drain_is_cancelled() {
    let key = GrantKey([1; 32]);
    let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
    node.drain();
    node.set_state(NodeState::Suspect);
    assert_eq!(node.undrain(), UndrainOutcome::Now);
    assert!(!node.is_readable() && !node.is_placeable());
    node.heard(BootInstant(1), None);
    assert_eq!(node.state(), NodeState::Live);
    assert_eq!(node.undrain(), UndrainOutcome::Unconfirmed);
    node.confirm_undrain(1);
    assert_eq!(node.undrain(), UndrainOutcome::Before);
}

/// A node that stops waits for such a node.
#[test]
fn a_node_may_return_for_a_while_after_it_was_heard_unless_it_leaves() {
    let key = GrantKey([1; 32]);
    let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
    let patience = Duration::from_secs(30);
    let may_return = |ms| node.may_return(BootInstant(ms), patience);
    assert!(may_return(29_999), "the term has not heard it yet");
    assert!(!may_return(30_000));
    let (outbox, _inbox) = tokio::sync::mpsc::unbounded_channel();
    let session = node.attach(Address::default(), outbox, BootInstant(40_000));
    node.heard(BootInstant(40_000), Some(Reported::default()));
    node.set_can_pull(true);
    assert!(!may_return(41_000), "it is there");
    node.set_state(NodeState::Suspect);
    assert!(may_return(45_000));
    node.heard(BootInstant(46_000), None);
    node.detach(session, BootInstant(46_000));
    assert!(may_return(47_000));
    node.set_can_pull(false);
    assert!(!may_return(47_000), "it copies no blocks");
    node.set_can_pull(true);
    node.drain();
    assert!(!may_return(47_000), "it leaves too");
}

/// The blocks of the first drain are counted while the drain is cancelled and the node stops.
#[test]
fn the_word_of_a_cancelled_drain_is_no_answer_to_a_stop() {
    let key = GrantKey([1; 32]);
    let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
    node.drain();
    let first = node.question().unwrap();
    assert_eq!(node.undrain(), UndrainOutcome::Now);
    assert!(node.says_it_drains(report(None, 0)));
    node.tell_left(first, 0);
    assert!(node.awaits_word());
    node.tell_left(node.question().unwrap(), 0);
    assert!(!node.awaits_word());
}

/// The node stops between the end of an operator's drain and the word of that end.
#[test]
fn the_word_to_a_node_names_the_report_that_it_answers() {
    let key = GrantKey([1; 32]);
    let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
    let (outbox, mut inbox) = tokio::sync::mpsc::unbounded_channel();
    let session = node.attach(Address::default(), outbox, BootInstant(0));
    let mut answered = |node: &StoreNode| {
        node.tell_left(node.question().unwrap(), 0);
        match inbox.try_recv().unwrap().unwrap().body {
            Some(proto::master_message::Body::Demoted(word)) => word.answers,
            other => panic!("{other:?}"),
        }
    };
    assert!(node.says_it_drains(report(Some(session), 1)));
    assert_eq!(answered(&node), 1);
    assert!(node.says_it_drains(report(None, 3)));
    assert_eq!(answered(&node), 3);
    // It was on its way when the session before ended.
    assert!(node.says_it_drains(report(None, 2)));
    assert_eq!(answered(&node), 3);
}

/// The node stops while the blocks are counted that an operator's drain has left. The stop moves them.
#[test]
fn a_word_is_no_answer_to_a_report_that_came_after_the_count() {
    let key = GrantKey([1; 32]);
    let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
    let (outbox, mut inbox) = tokio::sync::mpsc::unbounded_channel();
    let session = node.attach(Address::default(), outbox, BootInstant(0));
    assert!(node.says_it_drains(report(Some(session), 1)));
    let counted = node.question().unwrap();
    assert!(node.says_it_drains(report(None, 2)));
    node.tell_left(counted, 5);
    assert!(inbox.try_recv().is_err());
    assert!(node.awaits_word());
    node.tell_left(node.question().unwrap(), 0);
    assert!(inbox.try_recv().is_ok());
    assert!(!node.awaits_word());
}

/// A medium is attached while the order is on its way, or the node stops just then.
#[test]
fn a_node_that_has_not_reported_its_drain_gets_no_word_of_it() {
    let key = GrantKey([1; 32]);
    let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
    let (outbox, mut inbox) = tokio::sync::mpsc::unbounded_channel();
    let session = node.attach(Address::default(), outbox, BootInstant(0));
    node.leave(None);
    node.tell_left(node.question().unwrap(), 0);
    assert!(inbox.try_recv().is_err());
    assert!(node.says_it_drains(report(Some(session), 1)));
    node.tell_left(node.question().unwrap(), 0);
    assert!(inbox.try_recv().is_ok());
    assert_eq!(node.undrain(), UndrainOutcome::Now);
    assert!(inbox.try_recv().is_ok(), "the cancellation");
    node.leave(None);
    node.tell_left(node.question().unwrap(), 0);
    assert!(
        inbox.try_recv().is_err(),
        "the report was of the drain before"
    );
    assert!(node.says_it_drains(report(None, 2)));
    node.tell_left(node.question().unwrap(), 0);
    assert!(inbox.try_recv().is_ok());
}

/// The leader's order may be on its way before the leader has heard the report.
#[test]
fn a_report_that_media_leave_counts_for_the_drain_of_now_and_stays_with_the_node() {
    let key = GrantKey([1; 32]);
    let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
    let (outbox, mut inbox) = tokio::sync::mpsc::unbounded_channel();
    let session = node.attach(Address::default(), outbox, BootInstant(0));
    let drain = node.leave(None);
    node.tell_to_leave(drain);
    let mut told = || match inbox.try_recv().unwrap().unwrap().body {
        Some(proto::master_message::Body::Drain(order)) => order.media_leave,
        other => panic!("{other:?}"),
    };
    assert!(!told());
    node.says_media_leave(session);
    assert!(node.media_leave());
    assert!(told(), "the order before this one says otherwise");
    assert_eq!(node.undrain(), UndrainOutcome::Now);
    node.leave(Some(false));
    node.says_media_leave(session);
    assert!(!node.media_leave(), "the report is of the drain before");
    node.confirm_undrain(1);
    node.says_media_leave(session);
    assert!(node.media_leave());
}
