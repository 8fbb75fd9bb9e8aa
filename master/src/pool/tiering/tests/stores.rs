//! Stores of blocks: when they are ordered, and what happens to their blocks meanwhile.

use super::super::WINDOW;
use super::super::lines::Waiting;
use super::*;
use crate::replica::BlockId;
use kvpool_types::{Namespace, NamespaceSettings, Setting};

/// The evictor orders stores too. It must not wait for a scan of all blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ordering_stores_walks_over_no_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let has_lost = &pool.tiering.has_lost_copies;
    has_lost.store(true, Ordering::Release);
    // Without media the thread of the demoter does nothing.
    pool.tend_media();
    assert!(
        has_lost.load(Ordering::Acquire),
        "the walk is left to the demoter"
    );
    let (node, session, _sent) = connected(&pool);
    attach(&pool, &node, session, SegmentId::on_medium(1));
    let stores_are_ordered = pool.tiering.tending.lock();
    pool.replace_lost_copies();
    assert!(!has_lost.load(Ordering::Acquire));
    drop(stores_are_ordered);
    pool.retire().await;
}

/// The session may end between the check of the session and the order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_begins_in_the_session_of_its_medium_alone() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let medium = Medium::new(medium_of(1), pool.directory.accounts()).unwrap();
    let (node, session, mut sent) = connected(&pool);
    let from = Place {
        medium: medium.id,
        offset: Offset(8192),
    };
    let transfer = |session| transfer(&node, session, &medium, Direction::Forward { from });
    let order = proto::Transfer::default;
    {
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.insert(medium.id, in_use(&node, session));
        assert!(!traffic.begin(&medium, transfer(session - 1), order()));
        let used = &traffic.uses[&medium.id];
        assert_eq!((used.in_flight, used.forwards, used.busy.len()), (0, 0, 0));
        assert!(traffic.open.is_empty());
        assert!(sent.try_recv().is_err());
        assert!(traffic.begin(&medium, transfer(session), order()));
        assert_eq!(traffic.open.len(), 1);
        assert!(sent.try_recv().is_ok());
        node.detach(session, pool.now());
        assert!(!traffic.begin(&medium, transfer(session), order()));
    }
    pool.retire().await;
}

/// The node already has a new session, and will offer its medium in a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_takes_stores_in_the_present_session_of_its_node_alone() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let (node, first, _sent) = connected(&pool);
    let used = in_use(&node, first);
    assert!(used.takes_stores());
    let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
    let second = node.attach(Address::default(), outbox, pool.now());
    assert!(!used.takes_stores());
    assert!(in_use(&node, second).takes_stores());
    pool.retire().await;
}

/// The evictor removes thousands of blocks from the directory before it records the first eviction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_ends_while_its_block_is_evicted_leaves_a_copy() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let block = block("block", 7);
    let id = pool.directory.publish(&[block]).remove(0).id.unwrap();
    let (node, session, _sent) = connected(&pool);
    attach(&pool, &node, session, medium.id);
    let ticket = begin(&pool, &node, session, &medium, Direction::Store);
    let end = {
        let _until_noted = pool.evicting.read();
        let evicted = pool
            .directory
            .remove_by_id(id, Version(7), |_| Verdict::Remove);
        let (ended, of) = (Arc::clone(&pool), Arc::clone(&node));
        let end = std::thread::spawn(move || ended.transfers_done(&of, &[(ticket, Code::Ok)]));
        std::thread::sleep(Duration::from_millis(50));
        pool.note_left_memory(&[evicted.unwrap()]);
        end
    };
    end.join().unwrap();
    pool.journal().flush().await.unwrap();
    let key = Key::parse("block").unwrap();
    assert!(pool.is_on_medium(SPACE, &key, Version(7)));
    pool.retire().await;
}

/// A put makes its block visible, and then queues the block for its copy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_may_leave_once_it_was_in_its_line_when_stores_were_ordered() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let put = |name: &str| {
        let tick = pool.directory.ticks(1).of(0);
        let block = NewBlock {
            tick,
            ..block(name, 7)
        };
        assert!(pool.directory.publish(&[block]).remove(0).id.is_some());
    };
    let evict = |before| -> Vec<String> {
        let evicted = pool
            .directory
            .evict_before(before, u64::MAX, pool.now(), |_| true);
        let names = evicted.iter().map(|block| block.key.shown().to_string());
        names.collect()
    };
    put("early");
    let before = pool.order_stores();
    put("late");
    assert_eq!(evict(before), ["early"]);

    let queueing = pool.tiering.queueing.lock();
    let ordering = std::thread::spawn({
        let pool = Arc::clone(&pool);
        move || pool.order_stores()
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!ordering.is_finished(), "a block is not in its line yet");
    drop(queueing);
    assert_eq!(evict(ordering.join().unwrap()), ["late"]);
    pool.retire().await;
}

/// The journal's thread publishes a block, and ends its put a little later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_ends_before_the_put_of_its_block_leaves_a_copy() {
    for (of_put, has_copy) in [(7, true), (8, false)] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, medium) = pool_on_medium(directory.path()).await;
        let key = Key::parse("block").unwrap();
        let block = block("block", 7);
        let pending = Pending::granted(Version(of_put), block.length, Copies::new());
        let mut reservations = pool.reservations.lock();
        reservations.insert(SPACE, key.as_ref(), pending);
        drop(reservations);
        assert!(pool.directory.publish(&[block]).remove(0).id.is_some());
        let (node, session, _sent) = connected(&pool);
        attach(&pool, &node, session, medium.id);
        let ticket = begin(&pool, &node, session, &medium, Direction::Store);
        pool.transfers_done(&node, &[(ticket, Code::Ok)]);
        pool.journal().flush().await.unwrap();
        assert_eq!(pool.is_on_medium(SPACE, &key, Version(7)), has_copy);
        pool.retire().await;
    }
}

/// A pull copies the block to another node while the block is being stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_replica_of_a_block_takes_no_copy_from_it() {
    for (of_put, has_copy) in [(7, true), (8, false)] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, medium) = pool_on_medium(directory.path()).await;
        let key = Key::parse("block").unwrap();
        let id = pool.directory.publish(&[block("block", 7)]).remove(0).id;
        let (node, session, _sent) = connected(&pool);
        attach(&pool, &node, session, medium.id);
        let ticket = begin(&pool, &node, session, &medium, Direction::Store);
        pool.queue_for_media(std::iter::once(Put {
            namespace: SPACE,
            key: &key,
            parent: None,
            block: id.unwrap(),
            version: Version(of_put),
            bytes: 100,
            hard_pin: false,
            replicas: &[],
        }));
        pool.transfers_done(&node, &[(ticket, Code::Ok)]);
        pool.journal().flush().await.unwrap();
        assert_eq!(pool.is_on_medium(SPACE, &key, Version(7)), has_copy);
        pool.retire().await;
    }
}

/// Two nodes with the block store it. The later copy would replace the first one, and might leave with its node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_copy_replaces_only_a_copy_that_may_leave() {
    // Zone 0 is being written, and zone 1 is emptied next.
    for (offset, drains, replaces) in [(0, false, false), (1 << 18, false, true), (0, true, true)] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, medium) = pool_on_medium(directory.path()).await;
        pool.tier.set_medium(record::Medium {
            medium: MediumId(2),
            ..medium_of(2)
        });
        let first = SegmentId::on_medium(2);
        let key = Key::parse("block").unwrap();
        let block = block("block", 7);
        assert!(pool.tier.publish(record::Commit {
            namespace: block.namespace,
            key: block.key.clone(),
            version: block.version,
            length: block.length,
            checksum: block.checksum,
            replicas: smallvec::smallvec![(first, Offset(offset))],
            parent: None,
            hard_pin: false,
        }));
        assert!(pool.directory.publish(&[block]).remove(0).id.is_some());
        let (stays, of_first, _sent) = connected(&pool);
        stays.set_state(NodeState::Live);
        attach(&pool, &stays, of_first, first);
        let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
        let other = NodeName("other".into());
        let other = StoreNode::new(other, Incarnation(2), GrantKey([2; 32]), pool.now());
        let session = other.attach(Address::default(), outbox, pool.now());
        let other = Arc::new(other);
        attach(&pool, &other, session, medium.id);
        let ticket = begin(&pool, &other, session, &medium, Direction::Store);
        if drains {
            stays.drain();
        }
        pool.transfers_done(&other, &[(ticket, Code::Ok)]);
        pool.journal().flush().await.unwrap();
        assert!(pool.is_on_medium(SPACE, &key, Version(7)));
        let copies = u64::from(replaces);
        assert_eq!(medium.copies(), copies, "{offset} {drains}");
        let is_free = {
            let traffic = pool.tiering.traffic.lock();
            traffic.uses[&medium.id].busy.is_empty()
        };
        assert!(is_free, "the zone may be written again");
        pool.retire().await;
    }
}

/// The zone of the other copy is emptied and written again while the answer is found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_leaves_with_its_zone_meanwhile_is_no_copy_that_stays() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    // The test does the demoter's work.
    pool.term.end();
    pool.tier.set_medium(record::Medium {
        medium: MediumId(2),
        ..medium_of(2)
    });
    let first = pool.tier.medium(SegmentId::on_medium(2)).unwrap();
    let block = block("block", 7);
    assert!(pool.tier.publish(record::Commit {
        namespace: block.namespace,
        key: block.key.clone(),
        version: block.version,
        length: block.length,
        checksum: block.checksum,
        // Zone 1 is emptied next.
        replicas: smallvec::smallvec![(first.id, Offset(1 << 18))],
        parent: None,
        hard_pin: false,
    }));
    let (node, session, _sent) = connected(&pool);
    node.set_state(NodeState::Live);
    attach(&pool, &node, session, first.id);
    let moved = transfer(&node, session, &medium, Direction::Store).block;
    let asking = {
        let mut asking: Option<std::thread::JoinHandle<bool>> = None;
        let mut answer_waits = None;
        let (asked, beside) = (Arc::clone(&pool), medium.id);
        let copies = pool.tier.directory();
        copies.visit(SPACE, &[block.key.as_ref()], |_, _| {
            let (asked, moved) = (Arc::clone(&asked), moved.clone());
            let ask = move || asked.has_good_copy_beside(&moved, beside);
            asking = Some(std::thread::spawn(ask));
            std::thread::sleep(Duration::from_millis(50));
            answer_waits = Some(pool.tiering.traffic.lock());
        });
        // The thread reads the copy, and waits for this lock.
        std::thread::sleep(Duration::from_millis(50));
        let removed = pool.tier.remove(SPACE, block.key.as_ref(), |_| true);
        assert!(removed.is_some());
        first.emptied();
        for _ in 0..2 {
            let taken = first.take(Length(150 << 10), pool.directory.next_tick());
            assert!(matches!(taken, Taken::At(_)));
        }
        assert_eq!(first.cursor(), 1);
        drop(answer_waits);
        asking.unwrap()
    };
    assert!(!asking.join().unwrap());
    pool.retire().await;
}

/// The record of the first copy is on its way to the log when the second store ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_copy_does_not_replace_one_whose_record_is_on_its_way() {
    for (drains, copies) in [(false, (1, 0)), (true, (0, 1))] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, medium) = pool_on_medium(directory.path()).await;
        pool.tier.set_medium(record::Medium {
            medium: MediumId(2),
            ..medium_of(2)
        });
        let first = pool.tier.medium(SegmentId::on_medium(2)).unwrap();
        let published = pool.directory.publish(&[block("block", 7)]).remove(0);
        assert!(published.id.is_some());
        let (stays, of_first, _sent) = connected(&pool);
        stays.set_state(NodeState::Live);
        attach(&pool, &stays, of_first, first.id);
        let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
        let other = NodeName("other".into());
        let other = StoreNode::new(other, Incarnation(2), GrantKey([2; 32]), pool.now());
        let session = other.attach(Address::default(), outbox, pool.now());
        let other = Arc::new(other);
        attach(&pool, &other, session, medium.id);
        let one = begin(&pool, &stays, of_first, &first, Direction::Store);
        let two = begin(&pool, &other, session, &medium, Direction::Store);
        let release = hold_log(&pool);
        pool.transfers_done(&stays, &[(one, Code::Ok)]);
        if drains {
            stays.drain();
        }
        pool.transfers_done(&other, &[(two, Code::Ok)]);
        assert_eq!((first.copies(), medium.copies()), (0, 0));
        drop(release);
        pool.journal().flush().await.unwrap();
        assert_eq!((first.copies(), medium.copies()), copies, "{drains}");
        let left = {
            let traffic = pool.tiering.traffic.lock();
            let of_block = transfer(&other, session, &medium, Direction::Store).block;
            let busy = traffic.uses.values().map(|used| used.busy.len());
            (
                traffic.recording.places(&of_block).len(),
                busy.sum::<usize>(),
            )
        };
        assert_eq!(left, (0, 0));
        pool.retire().await;
    }
}

/// Only a write discovers that an offset cannot be written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_failed_is_tried_once_more() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    assert!(
        pool.directory
            .publish(&[block("block", 7)])
            .remove(0)
            .id
            .is_some()
    );
    let (node, session, _sent) = connected(&pool);
    attach(&pool, &node, session, medium.id);
    pool.tiering.demotions.lock().expect(node.incarnation);
    let waiting = || {
        let mut demotions = pool.tiering.demotions.lock();
        let line = demotions.nodes.get_mut(&node.incarnation).unwrap();
        std::mem::take(&mut line.blocks).len()
    };
    for expected in [1, 0] {
        let ticket = begin(&pool, &node, session, &medium, Direction::Store);
        pool.transfers_done(&node, &[(ticket, Code::StoreFailed)]);
        assert_eq!(waiting(), expected);
    }
    pool.retire().await;
}

/// Meanwhile the other blocks go to the node's other medium.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_only_a_slow_medium_takes_waits_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, slow) = pool_on_medium(directory.path()).await;
    pool.tier.set_medium(record::Medium {
        medium: MediumId(2),
        ..medium_of(2)
    });
    let (node, session, mut sent) = connected(&pool);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    node.add_segment(SegmentId(1));
    attach(&pool, &node, session, slow.id);
    {
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.get_mut(&slow.id).unwrap().state = MediumState::MediumSlow;
        let of_another = Use {
            namespaces: vec!["another".into()],
            ..in_use(&node, session)
        };
        traffic.uses.insert(SegmentId::on_medium(2), of_another);
    }
    assert!(
        pool.directory
            .publish(&[block("block", 7)])
            .remove(0)
            .id
            .is_some()
    );
    node.drain();
    pool.demote_all_of(&node);
    let early = tokio::time::timeout(Duration::from_millis(300), sent.recv()).await;
    assert!(early.is_err(), "{early:?}");
    let offers = vec![offer(&slow, MediumState::MediumReady)];
    pool.media_offered(&node, session, offers).await.unwrap();
    let order = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let order = order.expect("the block goes").unwrap().unwrap();
    assert!(matches!(order.body, Some(Body::Transfers(_))), "{order:?}");
    pool.retire().await;
}

/// The medium for the first block's namespace is busy. The medium for the second block's namespace is idle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_goes_to_its_medium_while_another_medium_is_busy() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, busy) = pool_on_medium(directory.path()).await;
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
    let (node, session, mut sent) = connected(&pool);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    node.add_segment(SegmentId(1));
    // A drain begins with the most recently used block.
    for (name, version) in [("b", 8), ("a", 7)] {
        let block = NewBlock {
            namespace: pool.namespace(name).unwrap(),
            tick: pool.directory.ticks(1).of(0),
            ..block(name, version)
        };
        assert!(pool.directory.publish(&[block]).remove(0).id.is_some());
    }
    {
        let used = |name: &str, in_flight| Use {
            namespaces: vec![name.into()],
            in_flight,
            ..in_use(&node, session)
        };
        let mut traffic = pool.tiering.traffic.lock();
        traffic.uses.insert(busy.id, used("a", WINDOW));
        traffic.uses.insert(SegmentId::on_medium(2), used("b", 0));
    }
    node.drain();
    pool.demote_all_of(&node);
    let order = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let order = order.expect("the block goes").unwrap().unwrap();
    let Some(Body::Transfers(orders)) = &order.body else {
        panic!("{order:?}");
    };
    assert_eq!(orders.transfers[0].version, 8);
    let first = {
        let _after_the_round = pool.tiering.tending.lock();
        let demotions = pool.tiering.demotions.lock();
        let line = demotions.nodes.get(&node.incarnation);
        line.and_then(|line| line.blocks.front().map(|one| one.version))
    };
    assert_eq!(first, Some(Version(7)), "it keeps its place");
    pool.retire().await;
}

/// A put of the key is open when the store ends. Memory keeps the pinned block if that put fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_block_is_stored_again_after_another_put_of_its_key() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, mut sent) = pinned_in_memory(&pool);
    attach(&pool, &node, session, medium.id);
    pool.tiering.demotions.lock().expect(node.incarnation);
    let key = Key::parse("block").unwrap();
    let pending = Pending::granted(Version(8), Length(100), Copies::new());
    let mut reservations = pool.reservations.lock();
    reservations.insert(SPACE, key.as_ref(), pending);
    drop(reservations);
    let mut store = transfer(&node, session, &medium, Direction::Store);
    store.block.hard_pin = true;
    let ticket = {
        let mut traffic = pool.tiering.traffic.lock();
        assert!(traffic.begin(&medium, store, proto::Transfer::default()));
        traffic.last_ticket
    };
    assert!(sent.try_recv().is_ok());
    pool.transfers_done(&node, &[(ticket, Code::Ok)]);
    let early = tokio::time::timeout(Duration::from_millis(300), sent.recv()).await;
    assert!(early.is_err(), "the put is open: {early:?}");
    assert_eq!(pool.reservations.lock().take_in(SPACE).len(), 1);
    let order = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let order = order.expect("the block goes").unwrap().unwrap();
    let Some(Body::Transfers(orders)) = &order.body else {
        panic!("{order:?}");
    };
    assert_eq!(orders.transfers[0].version, 7);
    pool.retire().await;
}

/// Both nodes would order the store in one round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_block_on_two_nodes_is_stored_once_unless_a_disk_is_slow() {
    for is_slow in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, medium) = pool_on_medium(directory.path()).await;
        pool.tier.set_medium(record::Medium {
            medium: MediumId(2),
            ..medium_of(2)
        });
        let (node, session, mut sent) = connected(&pool);
        let (outbox, mut to_other) = tokio::sync::mpsc::unbounded_channel();
        let other = NodeName("other".into());
        let other = StoreNode::new(other, Incarnation(2), GrantKey([2; 32]), pool.now());
        let of_other = other.attach(Address::default(), outbox, pool.now());
        let other = Arc::new(other);
        for (id, node, session) in [(1, &node, session), (2, &other, of_other)] {
            let segment = Segment::new(SegmentId(id), Arc::clone(node), Length(1 << 20), 1.0);
            pool.placement.insert(Arc::new(segment));
            node.add_segment(SegmentId(id));
            attach(&pool, node, session, SegmentId::on_medium(id));
            pool.tiering.demotions.lock().expect(node.incarnation);
        }
        let at = [1, 2].map(|id| Replica {
            segment: SegmentId(id),
            extent: ExtentIndex(0),
            offset: Offset(0),
        });
        let pinned = NewBlock {
            replicas: Copies::from_slice(&at),
            hard_pin: true,
            ..block("block", 7)
        };
        let published = pool.directory.publish(std::slice::from_ref(&pinned));
        let published = published.into_iter().next().unwrap();
        pool.queue_for_media(std::iter::once(Put {
            namespace: SPACE,
            key: &pinned.key,
            parent: None,
            block: published.id.unwrap(),
            version: pinned.version,
            bytes: 100,
            hard_pin: true,
            replicas: &at,
        }));
        pool.tend_media();
        assert!(sent.try_recv().is_ok(), "its turn comes at once");
        assert!(to_other.try_recv().is_err(), "it is being stored");
        if is_slow {
            let mut traffic = pool.tiering.traffic.lock();
            traffic.uses.get_mut(&medium.id).unwrap().state = MediumState::MediumSlow;
        } else {
            let ticket = pool.tiering.traffic.lock().last_ticket;
            pool.transfers_done(&node, &[(ticket, Code::Ok)]);
            pool.tend_media();
            pool.journal().flush().await.unwrap();
            assert_eq!(medium.copies(), 1);
        }
        pool.tend_media();
        assert_eq!(to_other.try_recv().is_ok(), is_slow);
        pool.retire().await;
    }
}

/// The operator may raise the quota. Nothing else would find the block again, except a walk over all blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_block_waits_for_the_quota_of_media_except_during_a_drain() {
    for drains in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, medium) = pool_on_medium(directory.path()).await;
        let namespace = Namespace {
            name: "a".into(),
            ..Namespace::default()
        };
        let quota = NamespaceSettings::default().with(Setting::MediaHard, 4096);
        let created = pool.create_namespace(namespace, quota).await;
        assert!(created.unwrap());
        let (node, session, mut sent) = connected(&pool);
        let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
        pool.placement.insert(Arc::new(segment));
        node.add_segment(SegmentId(1));
        attach(&pool, &node, session, medium.id);
        pool.tiering.demotions.lock().expect(node.incarnation);
        let pinned = NewBlock {
            namespace: pool.namespace("a").unwrap(),
            hard_pin: true,
            ..block("block", 7)
        };
        let published = pool.directory.publish(std::slice::from_ref(&pinned));
        let published = published.into_iter().next().unwrap();
        if drains {
            node.drain();
            pool.demote_all_of(&node);
        } else {
            pool.queue_for_media(std::iter::once(Put {
                namespace: pinned.namespace,
                key: &pinned.key,
                parent: None,
                block: published.id.unwrap(),
                version: pinned.version,
                bytes: 100,
                hard_pin: true,
                replicas: &pinned.replicas,
            }));
        }
        let mut orders = || {
            let sent = std::iter::from_fn(|| sent.try_recv().ok());
            let bodies = sent.filter_map(|message| message.unwrap().body);
            let is_order = |body: &Body| matches!(body, Body::Transfers(_));
            bodies.filter(is_order).count()
        };
        pool.tend_media();
        assert_eq!(orders(), 0, "the quota takes no copy");
        let waiting = {
            let _after_the_round = pool.tiering.tending.lock();
            let demotions = pool.tiering.demotions.lock();
            demotions.nodes[&node.incarnation].at_quota.len()
        };
        assert_eq!(waiting, usize::from(!drains));
        let change = |settings: &mut NamespaceSettings| {
            settings.set(Setting::MediaHard, Some(1 << 20));
        };
        assert!(pool.change_namespace("a", change).await.is_ok());
        pool.tend_media();
        assert_eq!(orders(), usize::from(!drains));
        pool.retire().await;
    }
}

/// The queue was too long while the disk hung.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pinned_blocks_that_were_dropped_from_the_queue_are_queued_again() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    // The test does the demoter's work.
    pool.term.end();
    let (node, session, _sent) = pinned_in_memory(&pool);
    attach(&pool, &node, session, medium.id);
    {
        let mut demotions = pool.tiering.demotions.lock();
        demotions.expect(node.incarnation);
        let line = demotions.nodes.get_mut(&node.incarnation).unwrap();
        line.has_missed_pins = true;
    }
    pool.tend_media();
    pool.replace_lost_copies();
    let queued = {
        let demotions = pool.tiering.demotions.lock();
        demotions.nodes[&node.incarnation].pinned.len()
    };
    assert_eq!(queued, 1);
    pool.retire().await;
}

/// Blocks of chains and blocks that come again could use up the budget for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_block_is_admitted_while_any_budget_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let (node, session, _sent) = connected(&pool);
    let block = transfer(&node, session, &medium, Direction::Store).block;
    let admission = &pool.tiering.admission;
    admission.set_budget(&medium, u64::MAX, pool.now());
    tokio::time::sleep(Duration::from_millis(5)).await;
    admission.set_budget(&medium, 1, pool.now());
    // Of a budget of 128 KiB, 8 KiB are left.
    admission.wrote(medium.id, Length((120 << 10) - 4096));
    for is_pinned in [true, false] {
        let waiting = Waiting {
            block: BlockId(0),
            version: block.version,
            bytes: block.length.0,
            was_lost: false,
            is_pinned,
            parent: None,
        };
        assert_eq!(pool.is_admitted(&medium, &waiting, &block), is_pinned);
    }
    pool.retire().await;
}

/// Each new copy would drop the copy of another block, which is read too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_block_waits_for_its_turn_when_pinned_copies_do_not_fit_the_medium() {
    let copy = |name: &str, length, offset| record::Commit {
        namespace: SPACE,
        key: Key::parse(name).unwrap(),
        version: Version(7),
        length: Length(length),
        checksum: Checksum(1),
        replicas: smallvec::smallvec![(SegmentId::on_medium(1), Offset(offset))],
        parent: None,
        hard_pin: true,
    };
    for is_full in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, medium) = pool_on_medium(directory.path()).await;
        let (node, session, _sent) = connected(&pool);
        node.set_state(NodeState::Live);
        let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
        pool.placement.insert(Arc::new(segment));
        node.add_segment(SegmentId(1));
        for _ in 0..20 {
            pool.directory.ticks(1);
        }
        let used = NewBlock {
            hard_pin: true,
            tick: Tick(5),
            ..block("block", 7)
        };
        assert!(pool.directory.publish(&[used]).remove(0).id.is_some());
        assert!(pool.tier.publish(copy("block", 100, 1 << 18)));
        if is_full {
            assert!(pool.tier.publish(copy("second", 200 << 10, 2 << 18)));
            assert!(pool.tier.publish(copy("third", 200 << 10, 3 << 18)));
        }
        let queued = {
            // The demoter would take the block out of the queue.
            let _no_stores = pool.tiering.tending.lock();
            attach(&pool, &node, session, medium.id);
            pool.tiering.demotions.lock().expect(node.incarnation);
            pool.drop_oldest(&medium, &node, session);
            let demotions = pool.tiering.demotions.lock();
            let line = &demotions.nodes[&node.incarnation];
            (line.pinned.len(), line.blocks.len())
        };
        assert_eq!(queued, if is_full { (0, 1) } else { (1, 0) });
        pool.retire().await;
    }
}

/// A node in a session, with the pinned block "block" in its memory.
fn pinned_in_memory(pool: &Pool) -> (Arc<StoreNode>, u64, Sent) {
    let (node, session, sent) = connected(pool);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(1 << 20), 1.0);
    pool.placement.insert(Arc::new(segment));
    node.add_segment(SegmentId(1));
    let pinned = NewBlock {
        hard_pin: true,
        ..block("block", 7)
    };
    assert!(pool.directory.publish(&[pinned]).remove(0).id.is_some());
    (node, session, sent)
}
