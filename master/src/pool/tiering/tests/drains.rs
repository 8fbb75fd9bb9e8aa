//! Drains of nodes to their media.

use super::super::drained::Room;
use super::*;
use crate::membership::DrainReport;
use crate::replica::BlockId;
use kvpool_types::GrantId;

/// A node may be suspect for a moment while its medium is attached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_to_a_medium_begins_while_its_node_is_suspect() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let (node, session, mut sent) = connected(&pool);
    node.drain();
    node.set_state(NodeState::Suspect);
    let offered = Use {
        is_attached: false,
        ..in_use(&node, session)
    };
    let medium = SegmentId::on_medium(1);
    pool.tiering.traffic.lock().uses.insert(medium, offered);
    pool.medium_attached(&node, session, MediumId(1), Generation(1))
        .await;
    let told = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let told = told.expect("the drain has begun").unwrap().unwrap();
    assert!(matches!(told.body, Some(Body::Demoted(_))), "{told:?}");
    pool.retire().await;
}

/// The term and the drain begin at one tick if no block is used in between. The drain fills its medium nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zones_of_an_earlier_term_are_not_taken_for_zones_of_a_drain() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    // The test does the demoter's work.
    pool.term.end();
    attach(&pool, &node, session, medium.id);
    medium.begin_term(pool.directory.next_tick());
    node.drain();
    pool.demote_all_of(&node);
    let since = {
        let demotions = pool.tiering.demotions.lock();
        demotions.nodes[&node.incarnation].drains.unwrap()
    };
    assert!(medium.oldest_sealed() < since);
    assert!(
        pool.directory.next_tick() >= since,
        "zones of the drain are"
    );
    pool.retire().await;
}

/// The slow medium's last stores are not recorded when the session ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_stores_on_a_medium_that_has_become_slow() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, slow) = pool_on_medium(directory.path()).await;
    pool.tier.set_medium(record::Medium {
        medium: MediumId(2),
        ..medium_of(2)
    });
    assert!(
        pool.directory
            .publish(&[block("block", 7)])
            .remove(0)
            .id
            .is_some()
    );
    let (node, session, mut sent) = connected(&pool);
    node.drain();
    attach(&pool, &node, session, slow.id);
    let ticket = begin(&pool, &node, session, &slow, Direction::Store);
    {
        let mut traffic = pool.tiering.traffic.lock();
        let used = traffic.uses.get_mut(&slow.id).unwrap();
        used.state = MediumState::MediumSlow;
        let offered = Use {
            is_attached: false,
            ..in_use(&node, session)
        };
        traffic.uses.insert(SegmentId::on_medium(2), offered);
    }
    let order = sent.recv().await.unwrap().unwrap();
    assert!(matches!(order.body, Some(Body::Transfers(_))), "{order:?}");
    pool.medium_attached(&node, session, MediumId(2), Generation(1))
        .await;
    let early = tokio::time::timeout(Duration::from_millis(300), sent.recv()).await;
    assert!(early.is_err(), "{early:?}");
    pool.transfers_done(&node, &[(ticket, Code::Ok)]);
    let told = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let told = told.expect("the drain has ended").unwrap().unwrap();
    assert!(matches!(told.body, Some(Body::Demoted(_))), "{told:?}");
    pool.retire().await;
}

/// The media of a draining node are read until it leaves. There may be a load in progress at every moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_no_load() {
    for state in [MediumState::MediumReady, MediumState::MediumReadOnly] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, medium) = pool_on_medium(directory.path()).await;
        let (node, session, mut sent) = connected(&pool);
        node.drain();
        attach(&pool, &node, session, medium.id);
        let load = Direction::Load {
            copy: BlockId(1),
            to: block("block", 7).replicas[0],
            grant: GrantId(1),
            used: None,
        };
        begin(&pool, &node, session, &medium, load);
        let order = sent.recv().await.unwrap().unwrap();
        assert!(matches!(order.body, Some(Body::Transfers(_))), "{order:?}");
        {
            let mut traffic = pool.tiering.traffic.lock();
            traffic.uses.get_mut(&medium.id).unwrap().state = state;
        }
        pool.demote_all_of(&node);
        let told = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
        let told = told.expect("the drain has ended").unwrap().unwrap();
        assert!(matches!(told.body, Some(Body::Demoted(_))), "{told:?}");
        pool.retire().await;
    }
}

/// Puts blocks into the memory of a node that drains.
fn draining_with(pool: &Pool, node: &Arc<StoreNode>, blocks: &[NewBlock]) {
    let segment = Segment::new(SegmentId(1), Arc::clone(node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    node.add_segment(SegmentId(1));
    node.drain();
    let published = pool.directory.publish(blocks);
    assert!(published.iter().all(|one| one.id.is_some()));
}

/// The scan has seen the copy. Then the copy is dropped with its zone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_dropped_while_a_drain_begins_is_made_again() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, mut sent) = connected(&pool);
    draining_with(&pool, &node, &[block("block", 7)]);
    assert!(pool.tier.publish(copy_of(block("block", 7), 1 << 18)));
    attach(&pool, &node, session, medium.id);
    {
        // While this lock is held, the scan waits for the block's copy.
        let held = pool.tiering.absent.lock();
        let (draining, of) = (Arc::clone(&pool), Arc::clone(&node));
        let begun = std::thread::spawn(move || draining.demote_all_of(&of));
        std::thread::sleep(Duration::from_millis(100));
        pool.tend_media();
        assert!(sent.try_recv().is_err(), "told before the walk has ended");
        let copy = medium.oldest()[0];
        let removed = pool.tier.remove_copy(copy, Version(7), |_| Verdict::Remove);
        assert!(pool.queue_again(&removed.unwrap(), Tick::default(), true));
        drop(held);
        begun.join().unwrap();
    }
    let order = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let order = order.expect("the block goes").unwrap().unwrap();
    assert!(matches!(order.body, Some(Body::Transfers(_))), "{order:?}");
    pool.retire().await;
}

/// The node's other medium takes the blocks that were being stored on the lost one, and the blocks with
/// copies there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_copies_the_blocks_of_a_medium_that_is_gone_to_another() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, gone) = pool_on_medium(directory.path()).await;
    let left = record::Medium {
        medium: MediumId(2),
        ..medium_of(2)
    };
    let (node, session, mut sent) = connected(&pool);
    draining_with(&pool, &node, &[block("block", 7), block("copied", 8)]);
    assert!(pool.tier.publish(copy_of(block("copied", 8), 8192)));
    attach(&pool, &node, session, gone.id);
    begin(&pool, &node, session, &gone, Direction::Store);
    assert!(sent.try_recv().is_ok(), "the store on the medium");
    attach(&pool, &node, session, left.id);
    pool.tier.set_medium(left);
    let since = pool.directory.next_tick();
    {
        let mut demotions = pool.tiering.demotions.lock();
        let walk = demotions.begin_drain(node.incarnation, since);
        demotions.end_walk(node.incarnation, walk, Vec::new());
    }
    let offers = vec![offer(&gone, MediumState::MediumGone)];
    pool.media_offered(&node, session, offers).await.unwrap();
    let mut stored = Vec::new();
    while stored.len() < 2 {
        let order = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
        let order = order.expect("the blocks go").unwrap().unwrap();
        let Some(Body::Transfers(orders)) = &order.body else {
            panic!("{order:?}");
        };
        let versions = orders.transfers.iter().map(|order| order.version);
        stored.extend(versions);
    }
    stored.sort_unstable();
    assert_eq!(stored, [7, 8]);
    pool.retire().await;
}

/// The version of a block that was put in this term.
fn put_now(pool: &Pool, number: u64) -> u64 {
    pool.first_version.0 + number
}

/// Blocks in the memory of a draining node, in address order. A block that `is_copied` accepts has a copy at
/// the offset that it returns.
fn copied_on(
    pool: &Pool,
    node: &Arc<StoreNode>,
    blocks: u64,
    is_copied: impl Fn(u64) -> Option<u64>,
) -> Arc<Segment> {
    let segment = Arc::new(Segment::new(
        SegmentId(1),
        Arc::clone(node),
        Length(1 << 20),
        1.0,
    ));
    pool.placement.insert(Arc::clone(&segment));
    node.add_segment(SegmentId(1));
    node.drain();
    node.set_state(NodeState::Draining);
    for number in 0..blocks {
        let mut put = block(&format!("block-{number}"), put_now(pool, number));
        let offset = Offset(number * Extents::rounded(put.length).0);
        let extent = segment.allocate_at(offset, put.length, SPACE).unwrap();
        put.replicas = Copies::from_slice(&[Replica {
            segment: SegmentId(1),
            extent,
            offset,
        }]);
        if let Some(at) = is_copied(number) {
            assert!(pool.tier.publish(copy_of(put.clone(), at)));
        }
        let published = pool.directory.publish(&[put]).remove(0);
        let owner = published.id.unwrap();
        segment.extents().set_owner(extent, owner);
    }
    segment
}

/// The numbers of the blocks in memory.
fn in_memory(pool: &Pool, blocks: u64) -> Vec<u64> {
    let is_there = |number: &u64| {
        let key = Key::parse(&format!("block-{number}")).unwrap();
        pool.is_in_memory(SPACE, &key, Version(put_now(pool, *number)))
    };
    (0..blocks).filter(is_there).collect()
}

/// The drain empties each zone that was sealed before it, one after another. It keeps the zone that is being
/// written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_during_a_drain_takes_no_room_of_blocks_whose_zones_are_emptied() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    // Zone 0 is being written, and zone 1 is next.
    let segment = copied_on(&pool, &node, 4, |number| Some(number << 18));
    attach(&pool, &node, session, medium.id);
    let since = pool.directory.next_tick();
    // The scan has not ended, so the node is not told.
    {
        let mut demotions = pool.tiering.demotions.lock();
        demotions.begin_drain(node.incarnation, since);
    }
    let room = Room {
        bytes: 1 << 20,
        piece: Length(0),
    };
    pool.evict_copied_on(&segment, room, &mut None);
    assert_eq!(in_memory(&pool, 4), [1, 2, 3]);
    pool.retire().await;
}

/// If every second block has a copy, no two neighbours can leave. If one more block has a copy, the two
/// neighbours may lie across the border of two sets of ranges.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_on_a_node_that_drains_evicts_nothing_before_a_piece_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    let place = |number: u64| (number.is_multiple_of(2) && number != 62).then_some(number * 8192);
    let segment = copied_on(&pool, &node, 80, place);
    attach(&pool, &node, session, medium.id);
    {
        let mut demotions = pool.tiering.demotions.lock();
        let walk = demotions.begin_drain(node.incarnation, Tick::default());
        demotions.end_walk(node.incarnation, walk, Vec::new());
        let line = demotions.nodes.get_mut(&node.incarnation).unwrap();
        line.is_told = true;
    }
    let extent = Extents::rounded(Length(100)).0;
    // No range is free behind the blocks.
    let behind = 80 * extent;
    let held = segment.allocate_at(Offset(behind), Length((1 << 20) - behind), SPACE);
    assert!(held.is_some());
    let room = Room {
        bytes: 0,
        piece: Length(2 * extent),
    };
    let made = pool.evict_copied_on(&segment, room, &mut None);
    assert_eq!((made.bytes, made.has_piece), (0, false));
    assert_eq!(in_memory(&pool, 80).len(), 80);
    let last = block("block-63", put_now(&pool, 63));
    assert!(pool.tier.publish(copy_of(last, 63 * 8192)));
    let made = pool.evict_copied_on(&segment, room, &mut None);
    assert_eq!((made.bytes, made.has_piece), (2 * extent, true));
    let stay = in_memory(&pool, 80);
    let left: Vec<u64> = (0..80).filter(|number| !stay.contains(number)).collect();
    assert_eq!(left, [63, 64]);
    pool.retire().await;
}

/// Waits until a node is shown in this state. The node sends messages meanwhile.
async fn until_shown(pool: &Pool, node: &StoreNode, label: &str) {
    for _ in 0..1000 {
        pool.heard(node, None);
        if pool.state_label(node) == label {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the node is shown as {}", pool.state_label(node));
}

/// The next count of the blocks may come a second later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_not_drained_once_the_medium_with_its_copies_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    let _segment = copied_on(&pool, &node, 1, |_| Some(0));
    attach(&pool, &node, session, medium.id);
    pool.members.insert(Arc::clone(&node));
    until_shown(&pool, &node, NodeState::DRAINED).await;
    let offers = vec![offer(&medium, MediumState::MediumGone)];
    pool.media_offered(&node, session, offers).await.unwrap();
    assert_eq!(pool.state_label(&node), "draining");
    pool.retire().await;
}

/// The copy is found wrong when its zone is emptied. The next count of the blocks may come a second later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_not_drained_once_a_copy_of_its_blocks_is_found_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    let _segment = copied_on(&pool, &node, 1, |_| Some(0));
    attach(&pool, &node, session, medium.id);
    pool.members.insert(Arc::clone(&node));
    until_shown(&pool, &node, NodeState::DRAINED).await;
    let from = Place {
        medium: medium.id,
        offset: Offset(0),
    };
    let mut moves = transfer(&node, session, &medium, Direction::Forward { from });
    moves.block.key = Key::parse("block-0").unwrap();
    moves.block.version = Version(put_now(&pool, 0));
    moves.place.offset = Offset(8192);
    let ticket = {
        let mut traffic = pool.tiering.traffic.lock();
        assert!(traffic.begin(&medium, moves, proto::Transfer::default()));
        traffic.last_ticket
    };
    pool.transfers_done(&node, &[(ticket, Code::ChecksumMismatch)]);
    assert_eq!(medium.copies(), 0);
    assert_eq!(pool.state_label(&node), "draining");
    pool.retire().await;
}

/// A store to the medium is in progress, and no block would be lost with the node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_stops_with_a_medium_is_drained_only_once_it_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let published = pool.directory.publish(&[block("block", 7)]).remove(0);
    assert!(published.id.is_some());
    let (node, session, mut sent) = connected(&pool);
    attach(&pool, &node, session, medium.id);
    let ticket = begin(&pool, &node, session, &medium, Direction::Store);
    pool.members.insert(Arc::clone(&node));
    let order = sent.recv().await.unwrap().unwrap();
    assert!(matches!(order.body, Some(Body::Transfers(_))), "{order:?}");
    pool.draining(&node, false);
    // This is longer than the interval between two counts of the blocks.
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        pool.heard(&node, None);
        assert_eq!(pool.state_label(&node), "draining");
    }
    pool.transfers_done(&node, &[(ticket, Code::Ok)]);
    let told = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let told = told.expect("the drain has ended").unwrap().unwrap();
    assert!(matches!(told.body, Some(Body::Demoted(_))), "{told:?}");
    until_shown(&pool, &node, NodeState::DRAINED).await;
    pool.retire().await;
}

/// A node's report that it stops.
fn stop() -> DrainReport {
    DrainReport {
        session: None,
        moves: true,
        number: 0,
    }
}

/// The drain waited for puts while its node restarted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_moves_no_block_of_the_next_incarnation() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let (before, ..) = connected(&pool);
    before.drain();
    before.set_state(NodeState::Gone);
    let (node, _session, _sent) = connected(&pool);
    pool.members.insert(Arc::clone(&node));
    pool.move_all_of(&before).await;
    assert!(pool.replica_tasks(&[]).is_empty());
    node.drain();
    pool.move_all_of(&node).await;
    assert_eq!(pool.replica_tasks(&[]).len(), 1);
    pool.retire().await;
}

/// The slow medium takes no stores meanwhile, so the blocks stay in the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_drain_leaves_the_blocks_of_its_node_to_their_turns() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, slow) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    draining_with(&pool, &node, &[block("block", 7)]);
    attach(&pool, &node, session, slow.id);
    {
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.get_mut(&slow.id).unwrap().state = MediumState::MediumSlow;
    }
    pool.demote_all_of(&node);
    let line = || {
        let demotions = pool.tiering.demotions.lock();
        let line = demotions.nodes.get(&node.incarnation);
        line.map(|line| (line.drains.is_some(), line.blocks.len()))
    };
    assert_eq!(line(), Some((true, 1)));
    assert_eq!(node.undrain(), crate::membership::UndrainOutcome::Now);
    pool.end_line_of_drain(&node);
    let queued = async {
        while line() != Some((false, 1)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let queued = tokio::time::timeout(Duration::from_secs(20), queued).await;
    assert!(queued.is_ok(), "{:?}", line());
    // A late step of the drain does not begin another drain.
    pool.demote_all_of(&node);
    assert_eq!(line(), Some((false, 1)));
    pool.retire().await;
}

/// The node stops just after the cancellation, before the line of the cancelled drain is ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_after_a_cancelled_drain_keeps_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, slow) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    draining_with(&pool, &node, &[block("block", 7)]);
    attach(&pool, &node, session, slow.id);
    {
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.get_mut(&slow.id).unwrap().state = MediumState::MediumSlow;
    }
    assert_eq!(node.undrain(), crate::membership::UndrainOutcome::Now);
    assert!(node.says_it_drains(stop()));
    pool.demote_all_of(&node);
    pool.end_line_of_drain(&node);
    {
        let demotions = pool.tiering.demotions.lock();
        let line = demotions.nodes.get(&node.incarnation);
        let seen = line.map(|line| (line.drains.is_some(), line.blocks.len()));
        assert_eq!(seen, Some((true, 1)));
    }
    pool.retire().await;
}

/// Nobody takes blocks out of the line of a node whose medium takes no stores.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_drain_leaves_no_line_beside_a_medium_that_takes_no_stores() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    draining_with(&pool, &node, &[block("block", 7)]);
    attach(&pool, &node, session, medium.id);
    {
        let mut traffic = pool.tiering.traffic.lock();
        let used = traffic.uses.get_mut(&medium.id).unwrap();
        used.state = MediumState::MediumReadOnly;
    }
    let since = pool.directory.next_tick();
    pool.tiering
        .demotions
        .lock()
        .begin_drain(node.incarnation, since);
    assert_eq!(node.undrain(), crate::membership::UndrainOutcome::Now);
    pool.end_line_of_drain(&node);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let has_line = || {
        let demotions = pool.tiering.demotions.lock();
        demotions.nodes.contains_key(&node.incarnation)
    };
    assert!(!has_line());
    pool.retire().await;
}
