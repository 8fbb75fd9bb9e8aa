//! Media that are absent for a while and return.

use super::*;

/// Dropping the first of two media takes seconds when it has many copies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_that_came_back_while_another_one_was_dropped_stays() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        ssd_drop_after: Duration::ZERO,
        ..Config::default()
    };
    let pool = pool_with(directory.path(), config).await;
    // The demoter of a term that is over drops no media. The test does it instead.
    pool.term.end();
    let [first, second] = [1, 2].map(SegmentId::on_medium);
    let (away, session, _sent) = connected(&pool);
    away.end_session(pool.now());
    let first_is_dropped = {
        // While this lock is held, no medium is dropped completely.
        let _held = pool.evicting.write();
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.insert(first, in_use(&away, session));
        drop(traffic);
        for id in [1, 2] {
            pool.tier.set_medium(medium_of(id));
        }
        let dropping = Arc::clone(&pool);
        let dropping = std::thread::spawn(move || dropping.drop_absent_media());
        while pool.tiering.traffic.lock().uses.contains_key(&first) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (back, session, _sent) = connected(&pool);
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.insert(second, in_use(&back, session));
        drop(traffic);
        dropping
    };
    first_is_dropped.join().unwrap();
    pool.retire().await;
    let left: Vec<_> = pool.tier.media().iter().map(|medium| medium.id).collect();
    assert_eq!(left, [second]);
}

/// The record of its attachment may be on its way to the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_is_not_dropped_while_it_is_offered() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        ssd_drop_after: Duration::ZERO,
        ..Config::default()
    };
    let pool = pool_with(directory.path(), config).await;
    // The test does the demoter's work.
    pool.term.end();
    pool.tier.set_medium(medium_of(1));
    let id = SegmentId::on_medium(1);
    let offered = pool.registration.lock().await;
    pool.drop_absent_media();
    assert!(pool.tier.medium(id).is_some());
    drop(offered);
    pool.drop_absent_media();
    assert!(pool.tier.medium(id).is_none());
    pool.retire().await;
}

/// Blocks whose copies were on the lost medium get other copies on the node's second medium.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_blocks_of_a_medium_that_is_gone_are_copied_again() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    attach(&pool, &node, session, medium.id);
    let has_lost = || pool.tiering.has_lost_copies.load(Ordering::Acquire);
    let offers = vec![offer(&medium, MediumState::MediumSlow)];
    pool.media_offered(&node, session, offers).await.unwrap();
    assert!(!has_lost());
    let offers = vec![offer(&medium, MediumState::MediumGone)];
    pool.media_offered(&node, session, offers).await.unwrap();
    assert!(has_lost());
    // No medium takes stores at the moment.
    pool.replace_lost_copies();
    assert!(has_lost());
    pool.retire().await;
}

/// The node sent the offer before its disk refused a write, or read the state before that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_offer_makes_no_medium_ready_that_has_refused_a_write() {
    use MediumState::{MediumReadOnly, MediumReady, MediumSlow};
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    attach(&pool, &node, session, medium.id);
    let state = || pool.tiering.traffic.lock().uses[&medium.id].state;
    let ticket = begin(&pool, &node, session, &medium, Direction::Store);
    pool.writes_refused(&node, [ticket]);
    assert_eq!(state(), MediumReadOnly);
    for (offered, now) in [(MediumReady, MediumReadOnly), (MediumSlow, MediumSlow)] {
        let offers = vec![offer(&medium, offered)];
        pool.media_offered(&node, session, offers).await.unwrap();
        assert_eq!(state(), now);
    }
    // The disk refuses another write while it is slow.
    pool.writes_refused(&node, [ticket]);
    assert_eq!(state(), MediumSlow);
    let offers = vec![offer(&medium, MediumReady)];
    pool.media_offered(&node, session, offers).await.unwrap();
    assert_eq!(state(), MediumReadOnly);
    // The offer of the next session tells the state of that session.
    pool.use_medium(&node, session, medium.id, &offer(&medium, MediumReady));
    assert_eq!(state(), MediumReady);
    pool.retire().await;
}

/// The node's other medium is slow for a moment. A medium of another node takes stores.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_blocks_of_a_medium_that_is_gone_wait_for_a_slow_one() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    // The test does the demoter's work.
    pool.term.end();
    let (node, session, _sent) = connected(&pool);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    node.add_segment(SegmentId(1));
    let published = pool.directory.publish(&[block("block", 7)]).remove(0);
    assert!(published.id.is_some());
    let (name, now) = (NodeName("m".into()), pool.now());
    let another = StoreNode::new(name, Incarnation(2), GrantKey([2; 32]), now);
    let (outbox, _to_another) = tokio::sync::mpsc::unbounded_channel();
    let of_another = another.attach(Address::default(), outbox, now);
    let another = Arc::new(another);
    for (id, node, session, state) in [
        (1, &node, session, MediumState::MediumGone),
        (2, &node, session, MediumState::MediumSlow),
        (3, &another, of_another, MediumState::MediumReady),
    ] {
        let used = Use {
            state,
            ..in_use(node, session)
        };
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.insert(SegmentId::on_medium(id), used);
    }
    let has_lost = &pool.tiering.has_lost_copies;
    has_lost.store(true, Ordering::Release);
    pool.replace_lost_copies();
    let waiting = {
        let demotions = pool.tiering.demotions.lock();
        let line = demotions.nodes.get(&node.incarnation);
        line.map(|line| line.blocks.len())
    };
    assert_eq!(waiting, Some(1));
    pool.retire().await;
}

/// The node offers the medium, and then cannot write its superblock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_on_a_medium_that_cannot_be_attached_count_no_longer() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    // The test does the demoter's work.
    pool.term.end();
    let (node, session, _sent) = connected(&pool);
    let offered = Use {
        is_attached: false,
        ..in_use(&node, session)
    };
    pool.tiering.traffic.lock().uses.insert(medium.id, offered);
    pool.drop_absent_media();
    assert!(pool.keeps_copies(medium.id, None));
    let before = BootInstant(pool.now().0.saturating_sub(31_000));
    pool.tiering
        .absent
        .lock()
        .get_mut(&medium.id)
        .unwrap()
        .since = before;
    pool.drop_absent_media();
    assert!(!pool.keeps_copies(medium.id, None));
    assert!(pool.tiering.has_lost_copies.load(Ordering::Acquire));
    pool.medium_attached(&node, session, MediumId(1), Generation(1))
        .await;
    pool.drop_absent_media();
    assert!(pool.keeps_copies(medium.id, None));
    pool.retire().await;
}

/// An operator sees each of them, and the reason of the node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn media_that_a_node_does_not_use_are_refused_until_its_session_ends() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    pool.members.insert(Arc::clone(&node));
    let offered = Use {
        is_attached: false,
        ..in_use(&node, session)
    };
    pool.tiering.traffic.lock().uses.insert(medium.id, offered);
    let unused = |path: &str, id: &[u8]| proto::UnusedMedium {
        path: path.into(),
        reason: "it\n failed".into(),
        medium_id: id.to_vec().into(),
    };
    let ids = [1, 2].map(|id| MediumId(id).to_bytes());
    let list = vec![
        unused("/a", &ids[0]),
        unused("/b", &ids[1]),
        unused("/c", &[]),
    ];
    let beside = || -> Vec<String> {
        let unused = pool.unused_media().into_iter();
        unused.map(|(_, one)| one.path).collect()
    };
    // The report of another session says nothing of this one.
    node.note_unused(session + 1, list.clone());
    assert_eq!(pool.media()[0].state, "attaching");
    assert!(beside().is_empty());

    node.note_unused(session, list.clone());
    let known = pool.media().remove(0);
    assert_eq!(known.state, "refused");
    let why = known.unused.unwrap();
    assert_eq!(
        (why.path.as_str(), why.reason.as_str()),
        ("/a", "it failed")
    );
    assert_eq!(beside(), ["/b", "/c"]);
    node.note_unused(session, vec![unused("/d", &[]); 100]);
    assert_eq!(beside().len(), 64);

    // The node reports an attachment before its next list.
    node.note_unused(session, list);
    attach(&pool, &node, session, medium.id);
    assert_eq!(pool.media()[0].state, "ready");
    pool.detach(&node, session);
    assert_eq!(pool.media()[0].state, "absent");
    assert!(beside().is_empty());
    pool.retire().await;
}
