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
