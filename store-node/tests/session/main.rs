//! The node against the other end of its session: its reports, its reactions to orders, and its
//! return.

mod boards;
mod failover;
mod loads;
mod rights;
mod support;

use kvpool_proto::node_message::Body;
use kvpool_store_node::{Config, Node, StartError};
use kvpool_types::{Checksum, Code, Epoch, Incarnation, SegmentId};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use support::{
    INTERVAL, Master, PATIENCE, SEGMENT, config, extent, grant, node, pattern, read, ready,
    shm_link, tcp_link, welcomed, write,
};

fn fenced(body: Body) -> Vec<u64> {
    match body {
        Body::Fenced(fenced) => fenced.tickets,
        other => panic!("{other:?} where tickets belong"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_says_who_it_is_and_serves_nobody_before_its_welcome() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let node = node(vec![master.url()], &directory).await;
    let mut session = master.session().await;
    let register = session.register.clone();
    assert_eq!(register.name, "node-t");
    assert_eq!(register.data_address, node.data_address().to_string());
    assert_eq!(
        register.shm_path,
        node.shm_path().unwrap().to_str().unwrap()
    );
    assert_eq!(register.host_id.len(), 16);
    assert_eq!((register.cluster_id.len(), register.epoch_seen), (0, 0));
    let offered: Vec<_> = register
        .segments
        .iter()
        .map(|s| (s.size_bytes, s.id))
        .collect();
    assert_eq!(offered, [(16 << 20, 0)]);
    assert!(!node.is_ready());
    let refused = tcp_link(&node, Incarnation(0)).await.unwrap_err();
    assert_eq!(refused.code, Code::StaleEpoch);

    session.welcome(1, SEGMENT);
    for expected in 1..5 {
        let (_, body) = session.next().await.unwrap();
        let Body::Heartbeat(beat) = body else {
            panic!("{body:?}");
        };
        assert_eq!(beat.sequence, expected);
    }
    ready(&node).await;
    let refused = tcp_link(&node, Incarnation(1)).await.unwrap_err();
    assert_eq!(refused.code, Code::WrongIncarnation);
    tcp_link(&node, session.incarnation()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_other_hosts_cannot_reach_starts_for_a_master_elsewhere_only_when_told_so() {
    let directory = tempfile::tempdir().unwrap();
    let elsewhere = || config(vec!["http://192.0.2.1:7070".into()], &directory);
    let error = Node::start(elsewhere()).await.unwrap_err();
    assert!(matches!(error, StartError::OutOfReach { .. }), "{error}");
    let text = error.to_string();
    for part in ["http://192.0.2.1:7070", "--listen 0.0.0.0:", "--advertise"] {
        assert!(text.contains(part), "{text}");
    }
    for advertise in ["127.0.0.1", "node.example"] {
        let advertise = advertise.to_owned();
        let told = Config {
            advertise,
            ..elsewhere()
        };
        Node::start(told).await.unwrap();
    }
}

/// A killed node keeps its ports until its disk has ended the last requests.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_an_ssd_waits_for_a_port_in_use_and_one_without_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    let without = || Config {
        listen: listen.clone(),
        ..config(vec!["http://127.0.0.1:1".into()], &directory)
    };
    let refused = Node::start(without()).await.unwrap_err();
    assert!(matches!(refused, StartError::Bind(_)), "{refused}");
    let path = directory.path().join("ssd");
    let with = Config {
        ssd: vec![format!("path={}", path.display()), "size=8MiB".into()],
        ..without()
    };
    let freed = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        drop(taken);
    });
    let node = Node::start(with).await.unwrap();
    freed.await.unwrap();
    assert_eq!(node.data_address().to_string(), listen);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_welcome_of_the_version_before_is_a_welcome() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, epoch) = Master::start().await;
    let node = node(vec![master.url()], &directory).await;
    let mut session = master.session().await;
    assert!(session.register.min_version <= 1 && session.register.max_version >= 1);
    // As a master of version 1 wrote it.
    let digits = include_str!("../../../proto/fixtures/v1/welcome.hex");
    let digits: Vec<u8> = digits.bytes().filter(u8::is_ascii_hexdigit).collect();
    let bytes: Vec<u8> = digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect();
    let welcome = prost::Message::decode(bytes.as_slice()).unwrap();
    epoch.store(7, Ordering::Relaxed);
    session.say(kvpool_proto::master_message::Body::Welcome(welcome));
    ready(&node).await;
    assert!(matches!(
        session.next().await,
        Some((_, Body::Heartbeat(_)))
    ));
}

/// Whether a node reports that an operator takes it out of service; `None` for another message.
fn out_of_service(body: &Body) -> Option<bool> {
    match body {
        Body::Draining(draining) => Some(draining.out_of_service),
        _ => None,
    }
}

/// A later leader learns of an operator's drain from the node alone, and of its end too.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_taken_back_drains_no_more_in_this_session_and_the_next() {
    use kvpool_proto::master_message::Body as Order;
    use kvpool_proto::{Drain, Undrain};
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    assert!(session.register.can_undrain);
    assert_eq!(session.register.version, env!("CARGO_PKG_VERSION"));
    for number in 1..3 {
        session.say(Order::Drain(Drain::default()));
        assert_eq!(out_of_service(&session.word().await), Some(true));
        session.say(Order::Undrain(Undrain { number }));
        let heard = session.word().await;
        assert!(
            matches!(&heard, Body::Undrained(told) if told.number == number),
            "{heard:?}"
        );
        session.silence(INTERVAL * 2).await;
    }
    session.cut();
    let mut session = master.session().await;
    session.welcome(1, SEGMENT);
    ready(&node).await;
    session.silence(INTERVAL * 4).await;
}

/// One answer to an operator's drain comes before the node is told to stop, and one is on its way then. The operator
/// cancels the drain meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_waits_for_the_answer_to_its_stop() {
    use kvpool_proto::master_message::Body as Order;
    use kvpool_proto::{Demoted, Drain, Undrain};
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let waits = Config {
        move_drain_timeout: PATIENCE,
        ..config(vec![master.url()], &directory)
    };
    let node = Node::start(waits).await.unwrap();
    let mut session = master.session().await;
    session.welcome(1, SEGMENT);
    ready(&node).await;
    let answer = |answers| Order::Demoted(Demoted { left: 0, answers });
    session.say(Order::Drain(Drain::default()));
    let Body::Draining(first) = session.word().await else {
        panic!("no report of the drain");
    };
    session.say(answer(first.number));
    session.silence(INTERVAL * 2).await;
    let stopped = tokio::spawn(node.drain());
    let Body::Draining(stop) = session.word().await else {
        panic!("no report of the stop");
    };
    assert!(first.out_of_service && !stop.out_of_service);
    assert!(0 < first.number && first.number < stop.number);
    session.say(answer(first.number));
    session.say(Order::Undrain(Undrain { number: 1 }));
    let heard = session.word().await;
    assert!(matches!(heard, Body::Undrained(_)), "{heard:?}");
    session.silence(INTERVAL * 6).await;
    session.say(answer(stop.number));
    assert!(matches!(session.word().await, Body::Goodbye(_)));
    session.cut();
    let ended = tokio::time::timeout(PATIENCE, stopped).await;
    assert!(ended.unwrap().unwrap());
}

/// A later leader counts the blocks on the media only if it hears that they leave.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_tells_each_leader_whether_its_media_leave_until_it_is_taken_back() {
    use kvpool_proto::master_message::Body as Order;
    use kvpool_proto::{Drain, Undrain};
    let leave = |body: &Body| match body {
        Body::Draining(draining) => Some(draining.media_leave),
        _ => None,
    };
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    session.say(Order::Drain(Drain { media_leave: true }));
    assert_eq!(leave(&session.word().await), Some(true));
    session.cut();
    let mut session = master.session().await;
    session.welcome(1, SEGMENT);
    ready(&node).await;
    assert_eq!(leave(&session.word().await), Some(true));
    session.say(Order::Undrain(Undrain { number: 1 }));
    assert!(matches!(session.word().await, Body::Undrained(_)));
    session.say(Order::Drain(Drain::default()));
    assert_eq!(leave(&session.word().await), Some(false));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fenced_extent_is_gone_and_its_grant_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    let link = tcp_link(&node, session.incarnation()).await.unwrap();
    let first = grant(session.incarnation(), 1, 5, extent(4096, 200_000));
    write(&link, first).await.unwrap();
    assert_eq!(read(&link, 1, &first).await, Ok(()));
    assert_eq!(write(&link, first).await, Err(Code::AlreadyWritten));

    session.fence(70, &first);
    assert_eq!(fenced(session.word().await), [70]);
    assert_eq!(read(&link, 1, &first).await, Err(Code::Missing));
    assert_eq!(write(&link, first).await, Err(Code::GrantEnded));
    let second = grant(session.incarnation(), 1, 6, extent(4096, 200_000));
    write(&link, second).await.unwrap();
    assert_eq!(read(&link, 1, &second).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_view_keeps_its_extent_from_being_fenced() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    let link = shm_link(&node, session.incarnation()).await.unwrap();
    let block = grant(session.incarnation(), 1, 5, extent(0, 100_000));
    write(&link, block).await.unwrap();
    let view = link
        .pin(Epoch(1), block.extent, support::deadline())
        .await
        .unwrap();
    session.fence(70, &block);
    session.silence(INTERVAL * 6).await;
    assert!(view.to_vec() == pattern(&block), "the view is whole");
    drop(view);
    assert_eq!(fenced(session.word().await), [70]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_lost_its_master_is_back_at_once_with_its_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, epoch) = Master::start().await;
    let (node, session) = welcomed(&mut master, &directory).await;
    let incarnation = session.incarnation();
    let link = shm_link(&node, incarnation).await.unwrap();
    let block = grant(incarnation, 1, 5, extent(0, 100_000));
    write(&link, block).await.unwrap();
    let view = link
        .pin(Epoch(1), block.extent, support::deadline())
        .await
        .unwrap();

    let cut = Instant::now();
    session.cut();
    let session = master.session().await;
    assert!(
        cut.elapsed() < Duration::from_millis(500),
        "{:?}",
        cut.elapsed()
    );
    assert_eq!(session.incarnation(), incarnation);
    assert_eq!(session.register.epoch_seen, 1);
    assert_eq!(session.register.segments[0].id, SEGMENT.0);
    assert_eq!(session.register.held.len(), 1);
    let held = &session.register.held[0];
    assert_eq!(
        (held.segment, held.offset, held.length),
        (SEGMENT.0, 0, 100_000)
    );

    epoch.store(2, Ordering::Relaxed);
    session.welcome(2, SEGMENT);
    ready(&node).await;
    let link = tcp_link(&node, incarnation).await.unwrap();
    assert_eq!(read(&link, 2, &block).await, Ok(()));
    assert_eq!(read(&link, 1, &block).await, Err(Code::StaleEpoch));
    let late = grant(incarnation, 1, 6, extent(1 << 20, 100));
    assert_eq!(write(&link, late).await, Err(Code::StaleEpoch));
    let fresh = grant(incarnation, 2, 7, extent(1 << 20, 100));
    write(&link, fresh).await.unwrap();
    drop(view);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_whose_term_is_over_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, epoch) = Master::start().await;
    epoch.store(3, Ordering::Relaxed);
    let node = node(vec![master.url()], &directory).await;
    let session = master.session().await;
    session.welcome(3, SEGMENT);
    ready(&node).await;
    session.cut();
    let session = master.session().await;
    session.welcome(2, SEGMENT);
    let again = master.session().await;
    assert_eq!(again.register.epoch_seen, 3);
    assert!(!node.is_ready());
    let link = tcp_link(&node, again.incarnation()).await.unwrap();
    let stale = grant(again.incarnation(), 2, 9, extent(0, 10));
    assert_eq!(write(&link, stale).await, Err(Code::StaleEpoch));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_incarnation_begins_anew_and_still_knows_who_holds_its_memory() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, session) = welcomed(&mut master, &directory).await;
    let old = session.incarnation();
    let link = shm_link(&node, old).await.unwrap();
    let block = grant(old, 1, 5, extent(0, 100_000));
    write(&link, block).await.unwrap();
    let view = link
        .pin(Epoch(1), block.extent, support::deadline())
        .await
        .unwrap();

    let link = tcp_link(&node, old).await.unwrap();
    session.cut();
    let session = master.session().await;
    session.refuse(Code::IncarnationDropped);
    let session = master.session().await;
    assert_ne!(session.incarnation(), old);
    assert_eq!(session.register.segments[0].id, 0);
    assert!(session.register.held.is_empty(), "they cannot be named yet");
    session.welcome(1, SegmentId(32));
    // Now they can, and are.
    let mut session = master.session().await;
    assert_eq!(session.register.held.len(), 1);
    assert_eq!(session.register.held[0].segment, 32);
    session.welcome(1, SegmentId(32));
    ready(&node).await;
    assert_eq!(read(&link, 1, &block).await, Err(Code::WrongIncarnation));
    let over = kvpool_types::Extent {
        segment: SegmentId(32),
        ..extent(50_000, 100)
    };
    let new = session.incarnation();
    let other = tcp_link(&node, new).await.unwrap();
    let write_over = grant(new, 1, 6, over);
    assert_eq!(write(&other, write_over).await, Err(Code::InProgress));
    assert_eq!(
        view.to_vec(),
        pattern(&block),
        "nobody wrote under the view"
    );
    session.fence(9, &write_over);
    session.silence(INTERVAL * 4).await;
    drop(view);
    assert_eq!(fenced(session.word().await), [9]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_checked_again_when_the_master_asks() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    let link = tcp_link(&node, session.incarnation()).await.unwrap();
    let block = grant(session.incarnation(), 1, 5, extent(0, 300_000));
    let checksum = write(&link, block).await.unwrap();
    for (ticket, checksum, expected) in [(1, checksum, true), (2, Checksum(checksum.0 ^ 1), false)]
    {
        session.verify(ticket, &block.extent, checksum);
        let Body::Verified(verified) = session.word().await else {
            panic!("a verdict");
        };
        assert_eq!((verified.ticket, verified.matches), (ticket, expected));
    }
    session.verify(3, &extent(1 << 20, 10), checksum);
    let Body::Verified(verified) = session.word().await else {
        panic!("a verdict");
    };
    assert!(!verified.matches, "nothing is written there");
}

/// A report of one reader may name thousands of blocks.
#[tokio::test(flavor = "multi_thread")]
async fn many_verifications_are_answered_in_their_session_and_end_with_it() {
    const TICKETS: u64 = 1500;
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    let link = tcp_link(&node, session.incarnation()).await.unwrap();
    let block = grant(session.incarnation(), 1, 5, extent(0, 4 << 20));
    let checksum = write(&link, block).await.unwrap();
    let ask = |session: &support::Session| {
        for ticket in 1..=TICKETS {
            session.verify(ticket, &block.extent, checksum);
        }
    };
    let begun = Instant::now();
    ask(&session);
    let mut tickets = Vec::new();
    for _ in 0..TICKETS {
        tickets.push(verdict(session.word().await));
    }
    let all = begun.elapsed();
    tickets.sort_unstable();
    assert!(tickets.into_iter().eq(1..=TICKETS), "each once");

    ask(&session);
    for _ in 0..16 {
        verdict(session.word().await);
    }
    session.cut();
    let mut session = master.session().await;
    session.welcome(1, SEGMENT);
    let begun = Instant::now();
    session.verify(7, &block.extent, checksum);
    assert_eq!(verdict(session.word().await), 7);
    let one = begun.elapsed();
    assert!(
        one < all / 4,
        "behind {TICKETS} of a session before: {one:?} of {all:?}"
    );
}

fn verdict(body: Body) -> u64 {
    match body {
        Body::Verified(verified) if verified.matches => verified.ticket,
        other => panic!("{other:?} where a verdict belongs"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_master_is_left_for_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let (mut silent, _) = Master::start().await;
    let (mut other, _) = Master::start().await;
    silent.answers.store(false, Ordering::Relaxed);
    let node = node(vec![silent.url(), other.url()], &directory).await;
    let session = silent.session().await;
    session.welcome(1, SEGMENT);
    ready(&node).await;
    other.forget();
    let since = Instant::now();
    let next = other.session().await;
    assert!(
        since.elapsed() < Duration::from_secs(2),
        "{:?}",
        since.elapsed()
    );
    assert_eq!(next.incarnation(), session.incarnation());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_finds_the_master_that_is_there() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    // No process listens on a port that was just closed.
    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = format!("http://{}", nobody.local_addr().unwrap());
    drop(nobody);
    let _node = node(vec![gone, master.url()], &directory).await;
    master.session().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_node_says_so_waits_for_views_and_takes_its_leave() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    let socket = node.shm_path().unwrap().to_owned();
    let incarnation = session.incarnation();
    let link = shm_link(&node, incarnation).await.unwrap();
    let block = grant(incarnation, 1, 5, extent(0, 1000));
    write(&link, block).await.unwrap();
    let view = link
        .pin(Epoch(1), block.extent, support::deadline())
        .await
        .unwrap();

    let drain = tokio::spawn(node.drain());
    assert_eq!(out_of_service(&session.word().await), Some(false));
    // An operator cannot take it back.
    let order = kvpool_proto::Undrain { number: 1 };
    session.say(kvpool_proto::master_message::Body::Undrain(order));
    assert!(matches!(session.word().await, Body::Undrained(_)));
    let refused = grant(incarnation, 1, 6, extent(4096, 1000));
    assert_eq!(write(&link, refused).await, Err(Code::Draining));
    assert_eq!(read(&link, 1, &block).await, Ok(()));
    session.silence(INTERVAL * 4).await;
    drop(view);
    assert!(matches!(session.word().await, Body::Goodbye(_)));
    drop(link);
    // A real master ends the stream when it hears the goodbye.
    session.cut();
    assert!(
        tokio::time::timeout(PATIENCE, drain)
            .await
            .unwrap()
            .unwrap()
    );
    assert!(!socket.exists());
}

/// Invariant 6: heartbeats never wait behind data.
#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_leave_on_time_while_eight_threads_saturate_the_data_port() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    let incarnation = session.incarnation();
    let link = tcp_link(&node, incarnation).await.unwrap();
    let block = grant(incarnation, 1, 5, extent(0, 4 << 20));
    write(&link, block).await.unwrap();

    let until = Instant::now() + Duration::from_secs(3);
    let mut readers = Vec::new();
    for _ in 0..8 {
        let link = tcp_link(&node, incarnation).await.unwrap();
        readers.push(std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            let mut blocks = 0u64;
            while Instant::now() < until {
                runtime.block_on(read(&link, 1, &block)).unwrap();
                blocks += 1;
            }
            blocks
        }));
    }
    let mut gaps = Vec::new();
    let mut last = None;
    while Instant::now() < until {
        let (at, body) = session.next().await.unwrap();
        if matches!(body, Body::Heartbeat(_))
            && let Some(before) = last.replace(at)
        {
            gaps.push(at.duration_since(before));
        }
    }
    let blocks: u64 = readers.into_iter().map(|r| r.join().unwrap()).sum();
    assert!(blocks > 50, "the port was busy: {blocks} blocks");
    // The other end runs on the same busy machine: a message that arrives late here may have left
    // in time.
    let slack = Duration::from_millis(400);
    let worst = gaps.iter().max().unwrap();
    assert!(*worst < INTERVAL + slack, "a heartbeat was {worst:?} apart");
    let expected = 3.0 / INTERVAL.as_secs_f64();
    assert!(
        gaps.len() as f64 > expected * 0.8,
        "{} heartbeats of {expected}",
        gaps.len()
    );
}

/// More than there is room for on the way back.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_fences_is_answered_in_the_same_session() {
    const TICKETS: u64 = 300 * kvpool_proto::MAX_TICKETS as u64;
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (_node, mut session) = welcomed(&mut master, &directory).await;
    for first in (1..=TICKETS).step_by(kvpool_proto::MAX_TICKETS) {
        let tickets = first..first + kvpool_proto::MAX_TICKETS as u64;
        session.fence_all(tickets, extent(0, 64));
    }
    let mut answered = 0;
    while answered < TICKETS {
        let tickets = fenced(session.word().await);
        assert!(tickets.len() <= kvpool_proto::MAX_TICKETS);
        for ticket in tickets {
            answered += 1;
            assert_eq!(ticket, answered, "each once, in order");
        }
    }
}
