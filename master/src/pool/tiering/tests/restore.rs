//! Blocks that are loaded from media, and their leases.

use super::super::WINDOW;
use super::*;
use crate::pool::CommitItem;
use crate::replica::BlockId;
use kvpool_types::GrantId;

/// A removal looked the block up. Then the block's node was swept, and a load brought the block back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_takes_a_block_that_came_back_in_another_slot() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let publish = |name: &str, version: u64| {
        let published = pool.directory.publish(&[block(name, version)]).remove(0);
        published.id.unwrap()
    };
    let key = Key::parse("block").unwrap();
    let before = publish("block", 7);
    let removed = pool
        .directory
        .remove_by_id(before, Version(7), |_| Verdict::Remove);
    assert!(removed.is_some());
    // Other blocks take the slot.
    for number in 0..4096 {
        publish(&format!("other {number}"), 8);
    }
    let now = publish("block", 7);
    assert_ne!(before, now);
    let taken = pool.take_out(&[(Some(before), Version(7))], &[(SPACE, key.clone())]);
    assert_eq!(taken, [true]);
    assert_eq!(pool.directory.find(SPACE, key.as_ref()), None);
    pool.retire().await;
}

/// The answer to a commit was lost, and the block was evicted before the commit came again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_commit_succeeds_while_its_block_is_on_a_medium_only() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _medium) = pool_on_medium(directory.path()).await;
    let block = block("block", 7);
    assert!(pool.tier.publish(copy_at(0)));
    let commit = |version| {
        let item = CommitItem {
            key: block.key.clone(),
            version: Version(version),
            length: block.length,
            checksum: block.checksum,
            segments: smallvec::smallvec![SegmentId(1)],
            parent: None,
        };
        pool.commit(SPACE, vec![item])
    };
    assert_eq!(commit(7).await, [Code::Ok]);
    assert_eq!(commit(6).await, [Code::GrantEnded]);
    let removed = pool.tier.remove(SPACE, block.key.as_ref(), |_| true);
    assert!(removed.is_some());
    assert_eq!(commit(7).await, [Code::GrantEnded]);
    pool.retire().await;
}

/// The node with the block in memory is about to leave, or has no session. The medium belongs to another
/// node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_on_a_copy_moves_only_to_memory_that_stays() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    node.set_state(NodeState::Live);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    let key = Key::parse("block").unwrap();
    assert!(
        pool.directory
            .publish(&[block("block", 7)])
            .remove(0)
            .id
            .is_some()
    );
    let until = pool.now().after(Duration::from_secs(60));
    let moves = || {
        (
            pool.lease_in_memory(SPACE, &key, Version(7), until),
            pool.stays_in_memory(SPACE, &key, Version(7)),
        )
    };
    assert_eq!(moves(), (true, true));
    node.detach(session, pool.now());
    assert_eq!(moves(), (false, false), "without a session");
    let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
    node.attach(Address::default(), outbox, pool.now());
    assert_eq!(moves(), (true, true));
    node.drain();
    assert_eq!(moves(), (false, false), "of a node that drains");
    pool.retire().await;
}

/// The demoter would take the processor of the reader who waits for the load.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_load_wakes_the_demoter_only_if_something_waits() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    attach(&pool, &node, session, medium.id);
    {
        let _nothing_is_ordered = pool.tiering.tending.lock();
        let load = Direction::Load {
            copy: BlockId(1),
            to: block("block", 7).replicas[0],
            grant: GrantId(1),
            used: None,
        };
        let awaits = |direction: &Direction, code: Code| {
            let ended = transfer(&node, session, &medium, direction.clone());
            pool.demoter_awaits(&ended, code)
        };
        let change = |change: &dyn Fn(&mut Use)| {
            let mut traffic = pool.tiering.traffic.lock();
            change(traffic.uses.get_mut(&medium.id).unwrap());
        };
        assert!(!awaits(&load, Code::Ok));
        assert!(awaits(&load, Code::StoreFailed));
        assert!(awaits(&Direction::Store, Code::Ok));
        change(&|used| used.in_flight = WINDOW);
        assert!(awaits(&load, Code::Ok), "stores wait for the window");
        change(&|used| {
            used.in_flight = 0;
            used.emptying = Emptying::Logging;
        });
        assert!(awaits(&load, Code::Ok), "a zone is emptied");
        change(&|used| used.emptying = Emptying::Idle);
        assert!(!awaits(&load, Code::Ok));
        let taken = medium.take(Length(60 << 10), pool.directory.next_tick());
        assert!(matches!(taken, Taken::At(_)) && medium.is_next_due());
        assert!(awaits(&load, Code::Ok), "a zone is due");
    }
    pool.retire().await;
}

/// The copy moves after the lookup has read its offset. Its old zone may be written anew before the load begins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_moves_before_its_load_begins_is_loaded_from_its_new_place() {
    is_loaded_from_its_new_place(false).await;
}

/// The load at the old place failed for an earlier lookup.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_has_moved_is_loaded_although_an_earlier_load_failed() {
    is_loaded_from_its_new_place(true).await;
}

async fn is_loaded_from_its_new_place(has_failed: bool) {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    assert!(pool.tier.publish(copy_at(0)));
    let (node, session, mut sent) = connected(&pool);
    node.set_state(NodeState::Live);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    attach(&pool, &node, session, medium.id);
    let lookup = {
        // A load begins under this lock.
        let mut traffic = pool.tiering.traffic.lock();
        if has_failed {
            let key = Key::parse("block").unwrap();
            let copy = pool.tier.directory().find(SPACE, key.as_ref());
            traffic.failed.insert((copy.unwrap(), Version(7)));
        }
        let of_lookup = Arc::clone(&pool);
        let lookup = tokio::spawn(async move {
            let key = Key::parse("block").unwrap();
            let keys = [key.as_ref()];
            let patience = Duration::from_secs(5);
            let restored = of_lookup.restore(SPACE, &keys[..], patience).await;
            of_lookup.end_restored(SPACE, &restored);
            restored
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(pool.tier.publish(copy_at(8192)));
        lookup
    };
    let order = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let order = order.expect("a load is ordered").unwrap().unwrap();
    let Some(Body::Transfers(orders)) = &order.body else {
        panic!("{order:?}");
    };
    let load = &orders.transfers[0];
    assert_eq!(load.from.unwrap().offset, 8192);
    pool.transfers_done(&node, &[(load.ticket, Code::Ok)]);
    let restored = lookup.await.unwrap();
    assert!(restored.left.is_empty() && restored.unreadable.is_empty());
    pool.retire().await;
}
