//! Blocks that leave the media of a node for other nodes.

use super::super::demoter::MOST_HELD;
use super::super::evacuate::MOST_MOVED;
use super::*;
use crate::membership::UndrainOutcome;
use crate::replica::BlockId;
use kvpool_types::{GrantId, Namespace, NamespaceSettings};
use std::collections::HashSet;

/// Otherwise each block of a drain would count as used now, and later blocks would be evicted for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_of_a_drain_is_no_use_of_its_block() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    for _ in 0..20 {
        pool.directory.ticks(1);
    }
    let to = {
        let segments = pool.placement.segments();
        segments.allocate_on(&node, Length(100), SPACE).unwrap()
    };
    let load = Direction::Load {
        copy: BlockId(1),
        to,
        grant: GrantId(1),
        used: Some(Tick(5)),
    };
    pool.publish_loaded(transfer(&node, session, &medium, load));
    let mut used = None;
    let key = Key::parse("block").unwrap();
    pool.directory.visit(SPACE, &[key.as_ref()], |_, block| {
        used = block.map(|block| block.view().tick());
    });
    assert_eq!(used, Some(Tick(5)));
    pool.retire().await;
}

/// Another node may have a block in memory whose only copy leaves. Its own medium takes the block.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_in_memory_get_other_copies_when_a_medium_leaves_for_good() {
    for is_for_good in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, _medium) = pool_on_medium(directory.path()).await;
        // The test does the demoter's work.
        pool.term.end();
        let (node, _session, _sent) = connected(&pool);
        node.set_state(NodeState::Live);
        pool.members.insert(Arc::clone(&node));
        let has_lost = || pool.tiering.has_lost_copies.load(Ordering::Acquire);
        assert!(!has_lost());
        let begun = match is_for_good {
            true => pool.drain_node_and_media(&node.name, true).await,
            false => pool.drain_node(&node.name, true).await,
        };
        assert!(begun.is_ok(), "{begun:?}");
        assert_eq!(has_lost(), is_for_good);
        pool.tiering.has_lost_copies.store(false, Ordering::Release);
        let next = pool.go_on_draining(&node.name).await;
        assert!(next.is_ok(), "{next:?}");
        assert!(!has_lost(), "the same drain scans no block again");
        pool.retire().await;
    }
}

/// The next leader has given no order. The node reports that its media leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_in_memory_get_other_copies_when_a_node_reports_that_its_medium_leaves() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    // The test does the demoter's work.
    pool.term.end();
    let (node, session, _sent) = connected(&pool);
    attach(&pool, &node, session, medium.id);
    let block = block("block", 7);
    assert!(pool.tier.publish(record::Commit {
        namespace: block.namespace,
        key: block.key.clone(),
        version: block.version,
        length: block.length,
        checksum: block.checksum,
        replicas: smallvec::smallvec![(medium.id, Offset(0))],
        parent: None,
        hard_pin: false,
    }));
    node.drain();
    let is_kept = || pool.has_kept_copy(SPACE, &block.key, block.version, None);
    let has_lost = || pool.tiering.has_lost_copies.load(Ordering::Acquire);
    assert!(is_kept());
    assert!(!has_lost());
    pool.media_leave(&node, session);
    assert!(!is_kept());
    assert!(has_lost());
    pool.retire().await;
}

/// A block that only passes through memory is evicted next. One that memory takes leaves nothing behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_is_given_up_only_for_a_block_that_memory_takes() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, _session, _sent) = connected(&pool);
    node.set_state(NodeState::Live);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    let block = block("block", 7);
    let published = pool.directory.publish(std::slice::from_ref(&block));
    assert!(published.iter().all(|one| one.id.is_some()));
    assert!(pool.tier.publish(record::Commit {
        namespace: block.namespace,
        key: block.key.clone(),
        version: block.version,
        length: block.length,
        checksum: block.checksum,
        replicas: smallvec::smallvec![(medium.id, Offset(0))],
        parent: None,
        hard_pin: false,
    }));
    let own = HashSet::from([medium.id]);
    let moved = || transfer(&node, 1, &medium, Direction::Store).block;
    pool.settle_moved(&own, vec![(moved(), false)], &|| false)
        .await;
    assert_eq!(medium.copies(), 1);
    pool.settle_moved(&own, vec![(moved(), true)], &|| true)
        .await;
    assert_eq!(medium.copies(), 1, "the drain is over");
    node.drain();
    pool.settle_moved(&own, vec![(moved(), true)], &|| false)
        .await;
    assert_eq!(medium.copies(), 1, "the node with the block leaves too");
    assert_eq!(node.undrain(), UndrainOutcome::Now);
    pool.settle_moved(&own, vec![(moved(), true)], &|| false)
        .await;
    assert_eq!(medium.copies(), 0);
    pool.retire().await;
}

/// The write budget of a medium may be used up for long. Neither the blocks of many batches nor a drain wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_wait_for_stores_at_once_in_a_bounded_queue_and_during_no_drain() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    pool.tiering.demotions.lock().expect(node.incarnation);
    let moved = transfer(&node, session, &medium, Direction::Store).block;
    let at = Replica {
        segment: SegmentId(1),
        extent: ExtentIndex(0),
        offset: Offset(0),
    };
    let queue = || {
        let put = Put {
            namespace: SPACE,
            key: &moved.key,
            parent: None,
            block: BlockId(1),
            version: moved.version,
            bytes: 100,
            hard_pin: false,
            replicas: std::slice::from_ref(&at),
        };
        pool.queue_moved_for_media(&put, Tick(5));
    };
    let queued = || {
        let demotions = pool.tiering.demotions.lock();
        demotions.nodes[&node.incarnation].moved.len()
    };
    let own = HashSet::from([medium.id]);
    queue();
    assert_eq!(queued(), 1);
    pool.settle_moved(&own, vec![(moved.clone(), false)], &|| true)
        .await;
    assert_eq!(queued(), 1, "the task is over, and the block has no copy");
    // Memory does not have the block.
    pool.settle_moved(&own, vec![(moved.clone(), false)], &|| false)
        .await;
    assert_eq!(queued(), 0);
    queue();
    let since = pool.directory.next_tick();
    pool.tiering
        .demotions
        .lock()
        .begin_drain(node.incarnation, since);
    assert_eq!(queued(), 0, "the walk of the drain finds it");
    queue();
    assert_eq!(queued(), 0, "it is in the queue of the drain");
    pool.tiering.demotions.lock().end_drain(node.incarnation);
    (0..=MOST_MOVED).for_each(|_| queue());
    assert_eq!(queued(), MOST_MOVED);
    pool.retire().await;
}

/// The medium for the first blocks' namespace has no write budget, perhaps for days. As many blocks as are examined at
/// once wait for it, or one. The medium for the last block's namespace has no limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_moved_block_goes_to_its_medium_while_others_wait_for_the_budget_of_another() {
    for waiting in [1, MOST_HELD] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, spent) = pool_on_medium(directory.path()).await;
        pool.tier.set_medium(record::Medium {
            medium: MediumId(2),
            ..medium_of(2)
        });
        for name in ["a", "b"] {
            let namespace = Namespace {
                name: name.into(),
                ..Namespace::default()
            };
            let created = pool.create_namespace(namespace, NamespaceSettings::default());
            assert!(created.await.unwrap());
        }
        // The test does the demoter's work.
        pool.term.end();
        let (node, session, mut sent) = connected(&pool);
        let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
        pool.placement.insert(Arc::new(segment));
        node.add_segment(SegmentId(1));
        {
            let used = |name: &str| Use {
                namespaces: vec![name.into()],
                ..in_use(&node, session)
            };
            let mut traffic = pool.tiering.traffic.lock();
            traffic.uses.insert(spent.id, used("a"));
            traffic.uses.insert(SegmentId::on_medium(2), used("b"));
        }
        let admission = &pool.tiering.admission;
        admission.set_budget(&spent, 1, pool.now());
        admission.wrote(spent.id, Length(4096));
        pool.tiering.demotions.lock().expect(node.incarnation);
        for number in 1..=waiting + 1 {
            let name = if number <= waiting { "a" } else { "b" };
            let block = NewBlock {
                namespace: pool.namespace(name).unwrap(),
                ..block(&format!("block-{number}"), number.try_into().unwrap())
            };
            let published = pool.directory.publish(std::slice::from_ref(&block));
            let put = Put {
                namespace: block.namespace,
                key: &block.key,
                parent: None,
                block: published[0].id.unwrap(),
                version: block.version,
                bytes: block.length.0,
                hard_pin: false,
                replicas: &block.replicas,
            };
            pool.queue_moved_for_media(&put, Tick(5));
        }
        // The first round may have no time for the last block.
        (0..2).for_each(|_| pool.tend_media());
        let order = sent.try_recv().unwrap().unwrap();
        let Some(Body::Transfers(orders)) = &order.body else {
            panic!("{order:?}");
        };
        assert_eq!(orders.transfers.len(), 1);
        let last = u64::try_from(waiting + 1).unwrap();
        assert_eq!(orders.transfers[0].version, last);
        assert!(sent.try_recv().is_err(), "the others wait");
        let queued = {
            let demotions = pool.tiering.demotions.lock();
            demotions.nodes[&node.incarnation].moved.len()
        };
        assert_eq!(queued, waiting);
        pool.retire().await;
    }
}

/// The budget takes one of two blocks. Only the pinned block would be lost with its node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_block_uses_the_write_budget_before_a_block_that_moved_off_media() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    // The test does the demoter's work.
    pool.term.end();
    let (node, session, mut sent) = connected(&pool);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    node.add_segment(SegmentId(1));
    attach(&pool, &node, session, medium.id);
    pool.tiering.demotions.lock().expect(node.incarnation);
    let admission = &pool.tiering.admission;
    admission.set_budget(&medium, u64::MAX, pool.now());
    tokio::time::sleep(Duration::from_millis(5)).await;
    admission.set_budget(&medium, 1, pool.now());
    // Of a budget of 128 KiB, 4 KiB are left. The first block overdraws it.
    admission.wrote(medium.id, Length((124 << 10) - 4096));
    let pinned = NewBlock {
        hard_pin: true,
        ..block("pinned", 8)
    };
    for block in [block("block", 7), pinned] {
        let published = pool.directory.publish(std::slice::from_ref(&block));
        let published = published.into_iter().next().unwrap();
        let put = Put {
            namespace: SPACE,
            key: &block.key,
            parent: None,
            block: published.id.unwrap(),
            version: block.version,
            bytes: 100,
            hard_pin: block.hard_pin,
            replicas: &block.replicas,
        };
        match block.hard_pin {
            true => pool.queue_for_media(std::iter::once(put)),
            false => pool.queue_moved_for_media(&put, Tick(5)),
        }
    }
    pool.tend_media();
    let mut ordered = Vec::new();
    while let Ok(Ok(message)) = sent.try_recv() {
        if let Some(Body::Transfers(orders)) = message.body {
            ordered.extend(orders.transfers.iter().map(|order| order.version));
        }
    }
    assert_eq!(ordered, [8]);
    pool.retire().await;
}
