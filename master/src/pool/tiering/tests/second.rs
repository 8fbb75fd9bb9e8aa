//! Blocks that two nodes store.

use super::super::WINDOW;
use super::*;

/// The record of the first copy is on its way to the log when the second store ends. Then the node of the first copy
/// may begin to leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_is_stored_again_if_the_first_of_two_copies_does_not_stay_after_all() {
    for leaves in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, medium) = pool_on_medium(directory.path()).await;
        pool.tier.set_medium(record::Medium {
            medium: MediumId(2),
            ..medium_of(2)
        });
        let first = pool.tier.medium(SegmentId::on_medium(2)).unwrap();
        let published = pool.directory.publish(&[block("block", 7)]).remove(0);
        assert!(published.id.is_some());
        let (node, of_first, _sent) = connected(&pool);
        node.set_state(NodeState::Live);
        attach(&pool, &node, of_first, first.id);
        let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
        let other = NodeName("other".into());
        let other = StoreNode::new(other, Incarnation(2), GrantKey([2; 32]), pool.now());
        let session = other.attach(Address::default(), outbox, pool.now());
        let other = Arc::new(other);
        attach(&pool, &other, session, medium.id);
        pool.tiering.demotions.lock().expect(other.incarnation);
        let one = begin(&pool, &node, of_first, &first, Direction::Store);
        let two = begin(&pool, &other, session, &medium, Direction::Store);
        let release = hold_log(&pool);
        pool.transfers_done(&node, &[(one, Code::Ok)]);
        pool.transfers_done(&other, &[(two, Code::Ok)]);
        let is_written = || pool.tiering.traffic.lock().writes_to(medium.id);
        assert!(is_written(), "a drain waits for the first copy");
        if leaves {
            node.drain();
        }
        {
            // The demoter takes no block out of the queue.
            let mut traffic = pool.tiering.traffic.lock();
            traffic.uses.get_mut(&medium.id).unwrap().in_flight = WINDOW;
        }
        drop(release);
        pool.journal().flush().await.unwrap();
        assert!(!is_written());
        let queued = {
            let demotions = pool.tiering.demotions.lock();
            demotions.nodes[&other.incarnation].blocks.len()
        };
        assert_eq!(queued, usize::from(leaves));
        pool.retire().await;
    }
}

/// The node of the copy has come back with less memory. Without a session it may come back with more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_longer_than_the_memory_of_its_node_is_not_kept() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected_with(&pool, 1 << 16);
    node.set_state(NodeState::Live);
    attach(&pool, &node, session, medium.id);
    let length = Length(1 << 17);
    assert!(pool.tier.publish(record::Commit {
        length,
        ..copy_at(0)
    }));
    let moved = Moved {
        length,
        ..transfer(&node, session, &medium, Direction::Store).block
    };
    let is_kept = || pool.has_kept_copy(SPACE, &moved.key, moved.version, None);
    let is_good = || pool.has_good_copy_beside(&moved, SegmentId::on_medium(2));
    assert_eq!((is_kept(), is_good()), (false, false));
    node.detach(session, pool.now());
    assert!(is_kept(), "the node may come back with more memory");
    let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
    let session = node.attach(Address::default(), outbox, pool.now());
    attach(&pool, &node, session, medium.id);
    assert!(!is_kept());
    node.gives_extents(1 << 18);
    assert_eq!((is_kept(), is_good()), (true, true));
    pool.retire().await;
}
