//! A node whose blocks are loaded from its medium, and its report about them to the next master.

use crate::support::{
    Master, PATIENCE, SEGMENT, Session, config, extent, grant, range, ready, tcp_link, write,
};
use kvpool_proto::master_message::Body as ToNode;
use kvpool_proto::node_message::Body;
use kvpool_proto::{self as proto, ExtentRange};
use kvpool_store_node::{Attachment, Config, Node};
use kvpool_types::{Checksum, Code, Extent, SegmentId};
use std::time::{Duration, Instant};

const MEDIUM: SegmentId = SegmentId(SegmentId::ON_MEDIUM | 32);
const LENGTH: u64 = 100_000;

/// A node that has offered its medium, and the offer.
async fn with_offer(
    master: &mut Master,
    directory: &tempfile::TempDir,
) -> (Node, Session, proto::Media) {
    let path = directory.path().join("disk");
    let config = Config {
        ssd: vec![format!("path={}", path.display()), "size=256MiB".into()],
        ..config(vec![master.url()], directory)
    };
    let node = Node::start(config).await.unwrap();
    let mut session = master.session().await;
    session.welcome(1, SEGMENT);
    ready(&node).await;
    let Body::Media(media) = session.word().await else {
        panic!("the node offers its medium");
    };
    (node, session, media)
}

/// A node with a medium that the master has attached.
async fn with_medium(master: &mut Master, directory: &tempfile::TempDir) -> (Node, Session) {
    let (node, mut session, media) = with_offer(master, directory).await;
    session.say(ToNode::AttachMedium(proto::AttachMedium {
        medium_id: media.media[0].medium_id.clone(),
        generation: 1,
        segment_id: MEDIUM.0,
    }));
    let attached = session.word().await;
    assert!(matches!(attached, Body::MediumAttached(_)), "{attached:?}");
    (node, session)
}

/// The code with which a transfer of one block ends.
async fn transfer(session: &mut Session, order: proto::Transfer) -> Code {
    let transfers = vec![order];
    session.say(ToNode::Transfers(proto::Transfers { transfers }));
    match session.word().await {
        Body::TransfersDone(done) => Code::from_peer(done.transfers[0].code),
        other => panic!("{other:?} where the end of a transfer belongs"),
    }
}

/// Puts a block, stores it on the medium, and loads it to `to` under grant 6.
async fn load(node: &Node, session: &mut Session, to: Extent) {
    let link = tcp_link(node, session.incarnation()).await.unwrap();
    let put = grant(session.incarnation(), 1, 5, extent(0, LENGTH));
    let Checksum(checksum) = write(&link, put).await.unwrap();
    let on_medium = ExtentRange {
        segment: MEDIUM.0,
        offset: 0,
        length: LENGTH,
    };
    let store = proto::Transfer {
        ticket: 1,
        from: Some(range(&put.extent)),
        to: Some(on_medium),
        version: 5,
        checksum,
        ..proto::Transfer::default()
    };
    assert_eq!(transfer(session, store).await, Code::Ok);
    let granted = grant(session.incarnation(), 1, 6, to);
    let load = proto::Transfer {
        ticket: 2,
        from: Some(on_medium),
        to: Some(range(&to)),
        version: 5,
        checksum,
        grant: granted.mac.to_vec().into(),
        grant_id: 6,
    };
    assert_eq!(transfer(session, load).await, Code::Ok);
}

fn is_recorded_below(session: &Session, epoch: u64, grant: u64) {
    session.say(ToNode::HeartbeatAck(proto::HeartbeatAck {
        sequence: 1,
        epoch,
        clock_ms: 0,
        loads_recorded_below: grant,
    }));
}

/// Fences an extent, and returns when the node has heard everything before.
async fn fence(session: &mut Session, ticket: u64, extent: Extent) {
    session.fence_all(std::iter::once(ticket), extent);
    while !matches!(session.word().await, Body::Fenced(_)) {}
}

/// The next session, of a master that has not welcomed the node yet.
async fn again(master: &mut Master, session: Session) -> Session {
    session.cut();
    master.session().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_names_a_load_until_it_hears_that_the_record_is_durable() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = with_medium(&mut master, &directory).await;
    let to = extent(1 << 20, LENGTH);
    load(&node, &mut session, to).await;

    let mut session = again(&mut master, session).await;
    assert_eq!(session.register.loaded, [range(&to)]);
    session.welcome(1, SEGMENT);
    is_recorded_below(&session, 1, 7);
    fence(&mut session, 70, extent(8 << 20, 10)).await;
    let session = again(&mut master, session).await;
    assert_eq!(session.register.loaded, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_names_a_load_of_an_earlier_term_until_the_extent_is_fenced() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, epoch) = Master::start().await;
    let (node, mut session) = with_medium(&mut master, &directory).await;
    let to = extent(1 << 20, LENGTH);
    load(&node, &mut session, to).await;

    epoch.store(2, std::sync::atomic::Ordering::Relaxed);
    let mut session = again(&mut master, session).await;
    session.welcome(2, SEGMENT);
    is_recorded_below(&session, 2, 100);
    fence(&mut session, 70, extent(8 << 20, 10)).await;
    let mut session = again(&mut master, session).await;
    assert_eq!(session.register.loaded, [range(&to)]);
    session.welcome(2, SEGMENT);
    fence(&mut session, 71, to).await;
    let session = again(&mut master, session).await;
    assert_eq!(session.register.loaded, []);
}

/// After many fences the answer to a heartbeat is late. The node still leaves a master that never
/// answers one.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_speaks_without_answering_heartbeats_is_left_later_than_a_silent_one() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    master
        .answers
        .store(false, std::sync::atomic::Ordering::Relaxed);
    let _node = crate::support::node(vec![master.url()], &directory).await;
    let session = master.session().await;
    session.welcome(1, SEGMENT);
    let speaks = async {
        for ticket in 1.. {
            session.fence_all(std::iter::once(ticket), extent(8 << 20, 10));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    // The node leaves a silent master after a second.
    let two_seconds = tokio::time::sleep(Duration::from_secs(2));
    let mut next = std::pin::pin!(master.session());
    tokio::select! {
        () = speaks => {}
        () = two_seconds => {}
        _ = &mut next => panic!("the master was left although it spoke"),
    }
    let speaks = async {
        for ticket in 1000.. {
            session.fence_all(std::iter::once(ticket), extent(8 << 20, 10));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        () = speaks => {}
        _ = next => {}
    }
}

/// A new master attaches a medium again, which may take long. It reports when the blocks are saved.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_waits_for_a_medium_that_may_be_attached_yet() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session, _) = with_offer(&mut master, &directory).await;
    let drain = tokio::spawn(node.drain());
    assert!(matches!(session.word().await, Body::Draining(_)));
    session.silence(Duration::from_secs(1)).await;
    session.say(ToNode::Demoted(proto::Demoted {
        left: 0,
        answers: 0,
    }));
    assert!(matches!(session.word().await, Body::Goodbye(_)));
    session.cut();
    let ended = tokio::time::timeout(PATIENCE, drain).await;
    assert!(ended.unwrap().unwrap());
}

/// Another node has a copy of the medium. Nobody attaches this one.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_waits_for_no_medium_that_its_master_refuses() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session, offered) = with_offer(&mut master, &directory).await;
    let reason = "another node has a copy";
    session.say(ToNode::RefuseMedium(proto::RefuseMedium {
        medium_id: offered.media[0].medium_id.clone(),
        reason: reason.into(),
    }));
    let Body::Media(list) = session.word().await else {
        panic!("the node lists what it does not use");
    };
    assert_eq!(list.media, offered.media);
    let medium = node.media().remove(0);
    assert_eq!(medium.attachment, Attachment::Refused(reason.into()));
    let [unused] = list.unused.as_slice() else {
        panic!("{list:?}");
    };
    assert_eq!(unused.path, medium.path.display().to_string());
    assert_eq!(unused.reason, reason);

    let begun = Instant::now();
    let drain = tokio::spawn(node.drain());
    while !matches!(session.word().await, Body::Goodbye(_)) {}
    session.cut();
    let ended = tokio::time::timeout(PATIENCE, drain).await;
    assert!(ended.unwrap().unwrap());
    // A medium that may be attached yet has 12 s.
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(6), "{took:?}");
}
