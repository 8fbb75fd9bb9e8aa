//! Copies that move to another zone, or are dropped with their zone.

use super::super::OpenLoad;
use super::*;
use crate::clock::ManualClock;
use kvpool_types::GrantId;

/// A lookup may come at any moment of a move.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_moves_is_there_at_every_moment() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let key = Key::parse("block").unwrap();
    assert!(pool.tier.publish(copy_at(0)));
    let moves = std::thread::spawn({
        let pool = Arc::clone(&pool);
        move || {
            for n in 1..50_000 {
                assert!(pool.tier.publish(copy_at(n % 2 * 8192)));
            }
        }
    });
    let mut looks = 0;
    while !moves.is_finished() {
        looks += 1;
        assert!(pool.is_on_medium(SPACE, &key, Version(7)), "look {looks}");
    }
    moves.join().unwrap();
    let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    assert_eq!(medium.copies(), 1, "the others are free");
    pool.retire().await;
}

/// A standby that starts may read records a second time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_whose_record_is_read_again_lies_where_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    for offset in [0, 0, 8192, 8192, 0] {
        assert!(pool.tier.publish(copy_at(offset)));
        let extents = medium.extents();
        let copies = extents.iter().filter(|range| range.usage != RangeUse::Free);
        let at: Vec<u64> = copies.map(|range| range.offset.0).collect();
        assert_eq!(at, [offset]);
    }
    pool.retire().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_moves_keeps_its_holders() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    let (key, now) = (Key::parse("block").unwrap(), pool.now());
    let token = now.after(Duration::from_secs(60));
    let with = |what: &dyn Fn(&mut BlockMut<'_>)| {
        let copies = pool.tier.directory();
        copies.visit(SPACE, &[key.as_ref()], |_, copy| what(&mut copy.unwrap()));
    };
    assert!(pool.tier.publish(copy_at(0)));
    with(&|copy| copy.lease(token, now));
    assert!(pool.tier.publish(copy_at(8192)));
    with(&|copy| assert!(copy.view().is_leased(now, BootInstant(0))));
    with(&|copy| copy.release(token, now));
    with(&|copy| assert!(!copy.view().is_leased(now, BootInstant(0))));
    pool.retire().await;
}

/// The last stores to a zone may end after the writes went on to the next zone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_recorded_after_its_zone_was_left_is_not_used_by_that() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    let key = Key::parse("block").unwrap();
    let tick = || pool.directory.ticks(1).of(0);
    let used_at = || {
        let mut at = Tick::default();
        let copies = pool.tier.directory();
        copies.visit(SPACE, &[key.as_ref()], |_, copy| {
            at = copy.unwrap().view().tick();
        });
        at
    };
    medium.begin_term(tick());
    let half = Length(150 << 10);
    assert_eq!(medium.take(half, tick()), Taken::At(Offset(0)));
    medium.emptied();
    assert!(matches!(medium.take(half, tick()), Taken::At(_)));
    assert_eq!(medium.cursor(), 1);
    assert!(pool.tier.publish(copy_at(0)));
    let left = medium.sealed(0);
    assert!(used_at() <= left, "{:?} is behind {left:?}", used_at());
    // A real use counts, and it is kept while the copy moves.
    let used = tick();
    let copies = pool.tier.directory();
    copies.visit(SPACE, &[key.as_ref()], |_, copy| copy.unwrap().touch(used));
    assert!(used_at() > left);
    assert!(pool.tier.publish(copy_at(8192)));
    assert_eq!(used_at(), used);
    pool.retire().await;
}

/// The block's copy is in the zone behind the cursor, which is emptied next. The copy was not used.
fn copy_in_a_zone_that_is_due(pool: &Pool, at: u64) -> Arc<Medium> {
    pool.tier.set_medium(medium_of(1));
    let medium = pool.tier.medium(SegmentId::on_medium(1)).unwrap();
    assert!(pool.tier.publish(copy_at(at)));
    assert_eq!(medium.oldest().len(), 1);
    medium.begin_term(pool.directory.next_tick());
    let taken = medium.take(Length(60 << 10), pool.directory.next_tick());
    assert!(matches!(taken, Taken::At(_)) && medium.is_next_due());
    medium
}

/// A node answers an order to move the block's copy to the beginning of the medium.
fn answer_move(
    pool: &Arc<Pool>,
    node: &Arc<StoreNode>,
    session: u64,
    medium: &Medium,
    from: u64,
    code: Code,
) {
    let from = Place {
        medium: medium.id,
        offset: Offset(from),
    };
    let ticket = begin(pool, node, session, medium, Direction::Forward { from });
    pool.transfers_done(node, &[(ticket, code)]);
}

/// The location of the block's copy.
fn lies_at(tier: &Tier) -> Option<u64> {
    let (key, mut at) = (Key::parse("block").unwrap(), None);
    let copies = tier.directory();
    copies.visit(SPACE, &[key.as_ref()], |_, copy| {
        at = copy.map(|copy| copy.view().replicas()[0].offset.0);
    });
    at
}

/// The record of a moved copy is late, and the session breaks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_zone_is_emptied_behind_what_an_earlier_session_recorded() {
    const FROM: u64 = 1 << 18;
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let medium = copy_in_a_zone_that_is_due(&pool, FROM);
    let (node, first, _sent) = connected(&pool);
    let used = Use {
        emptying: Emptying::Logging,
        ..in_use(&node, first)
    };
    pool.tiering.traffic.lock().uses.insert(medium.id, used);
    let release = hold_log(&pool);
    answer_move(&pool, &node, first, &medium, FROM, Code::Ok);

    let (outbox, _sent) = tokio::sync::mpsc::unbounded_channel();
    let second = node.attach(Address::default(), outbox, pool.now());
    pool.media_left(&node, first);
    let ready = offer(&medium, MediumState::MediumReady);
    pool.use_medium(&node, second, medium.id, &ready);
    let attach = |used: &mut Use| used.is_attached = true;
    pool.tiering
        .traffic
        .lock()
        .uses
        .get_mut(&medium.id)
        .map(attach);
    pool.tend_media();
    assert_eq!(lies_at(&pool.tier), Some(FROM), "it is on its way");
    pool.set_emptying(medium.id, &node, first, Emptying::Idle);
    pool.tend_media();
    assert_eq!(lies_at(&pool.tier), Some(FROM), "of an earlier session");
    drop(release);
    pool.journal().flush().await.unwrap();
    assert_eq!(lies_at(&pool.tier), Some(0));
    pool.tend_media();
    let is_empty = || {
        pool.tend_media();
        !medium.is_next_due()
    };
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while !is_empty() {
        assert!(std::time::Instant::now() < until, "the zone is not emptied");
        std::thread::sleep(Duration::from_millis(1));
    }
    pool.retire().await;
}

/// Another live node, to which this medium is attached, and its session.
fn other_node_on(pool: &Pool, medium: SegmentId) -> (Arc<StoreNode>, u64, Sent) {
    let (outbox, sent) = tokio::sync::mpsc::unbounded_channel();
    let other = NodeName("other".into());
    let other = StoreNode::new(other, Incarnation(2), GrantKey([2; 32]), pool.now());
    let session = other.attach(Address::default(), outbox, pool.now());
    other.set_state(NodeState::Live);
    other.gives_extents(1 << 20);
    let other = Arc::new(other);
    attach(pool, &other, session, medium);
    (other, session, sent)
}

/// Another node stores the block while its copy moves. The node of one of the two copies may be about to leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_between_zones_replaces_no_copy_that_stays_elsewhere() {
    const FROM: u64 = 1 << 18;
    for (stays, copies) in [(true, (0, 1)), (false, (1, 0))] {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool_in(directory.path()).await;
        let medium = copy_in_a_zone_that_is_due(&pool, FROM);
        let second = SegmentId::on_medium(2);
        pool.tier.set_medium(record::Medium {
            medium: MediumId(2),
            ..medium_of(2)
        });
        let (node, session, _sent) = connected(&pool);
        let used = Use {
            emptying: Emptying::Logging,
            ..in_use(&node, session)
        };
        pool.tiering.traffic.lock().uses.insert(medium.id, used);
        let (other, _, _sent) = other_node_on(&pool, second);
        let from = Place {
            medium: medium.id,
            offset: Offset(FROM),
        };
        let ticket = begin(&pool, &node, session, &medium, Direction::Forward { from });
        assert!(pool.tier.publish(record::Commit {
            replicas: smallvec::smallvec![(second, Offset(0))],
            ..copy_at(0)
        }));
        if !stays {
            other.drain();
        }
        pool.transfers_done(&node, &[(ticket, Code::Ok)]);
        pool.journal().flush().await.unwrap();
        let there = pool.tier.medium(second).unwrap();
        assert_eq!((medium.copies(), there.copies()), copies);
        let moves = {
            let traffic = pool.tiering.traffic.lock();
            let used = &traffic.uses[&medium.id];
            (used.forwards, used.busy.len())
        };
        assert_eq!(moves, (0, 0));
        pool.retire().await;
    }
}

/// The record of another node's copy is on its way to the log when the move ends. Then the medium of that copy may be
/// dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_between_zones_ends_when_the_copy_that_stays_elsewhere_is_recorded() {
    const FROM: u64 = 1 << 18;
    for stays in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool_in(directory.path()).await;
        let medium = copy_in_a_zone_that_is_due(&pool, FROM);
        pool.tier.set_medium(record::Medium {
            medium: MediumId(2),
            ..medium_of(2)
        });
        let second = pool.tier.medium(SegmentId::on_medium(2)).unwrap();
        let published = pool.directory.publish(&[block("block", 7)]).remove(0);
        assert!(published.id.is_some());
        let (node, session, _sent) = connected(&pool);
        let used = Use {
            emptying: Emptying::Logging,
            ..in_use(&node, session)
        };
        pool.tiering.traffic.lock().uses.insert(medium.id, used);
        let (other, of_other, _sent) = other_node_on(&pool, second.id);
        let from = Place {
            medium: medium.id,
            offset: Offset(FROM),
        };
        let moved = begin(&pool, &node, session, &medium, Direction::Forward { from });
        let stored = begin(&pool, &other, of_other, &second, Direction::Store);
        let release = hold_log(&pool);
        pool.transfers_done(&other, &[(stored, Code::Ok)]);
        pool.transfers_done(&node, &[(moved, Code::Ok)]);
        let moves = || {
            let traffic = pool.tiering.traffic.lock();
            let used = &traffic.uses[&medium.id];
            (used.forwards, used.busy.len(), used.has_unmoved)
        };
        assert_eq!(moves(), (1, 2, false), "its zone could be emptied");
        assert_eq!(medium.copies(), 1);
        if !stays {
            assert_eq!(pool.tier.drop_medium(second.id), 0);
        }
        drop(release);
        pool.journal().flush().await.unwrap();
        assert_eq!(moves(), (0, 0, !stays));
        assert_eq!(medium.copies(), u64::from(!stays));
        assert_eq!(second.copies(), u64::from(stays));
        pool.retire().await;
    }
}

/// While a block moves to another offset, the copy at its old offset is found damaged or is dropped with its
/// zone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_gone_takes_none_out_of_another_place() {
    const FROM: u64 = 1 << 18;
    for is_wrong in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap());
        let metrics = Arc::new(Metrics::new().unwrap());
        let kept = Arc::clone(&store) as Arc<dyn MetadataStore>;
        let pool = Pool::start(Config::default(), kept, Arc::new(BootClock), metrics);
        let pool = pool.await.unwrap();
        let records = vec![Record::Medium(medium_of(1)), Record::Commit(copy_at(FROM))];
        pool.log(records, || {}).await.unwrap();
        let medium = copy_in_a_zone_that_is_due(&pool, FROM);
        let (node, session, _sent) = connected(&pool);
        let used = Use {
            emptying: Emptying::Logging,
            ..in_use(&node, session)
        };
        pool.tiering.traffic.lock().uses.insert(medium.id, used);
        let release = hold_log(&pool);
        answer_move(&pool, &node, session, &medium, FROM, Code::Ok);
        match is_wrong {
            true => {
                let code = Code::ChecksumMismatch;
                answer_move(&pool, &node, session, &medium, FROM, code);
            }
            false => pool.drop_oldest(&medium, &node, session),
        }
        assert_eq!(lies_at(&pool.tier), None);
        drop(release);
        pool.journal().flush().await.unwrap();
        assert_eq!(lies_at(&pool.tier), Some(0));
        pool.retire().await;
        let config = Config::default();
        let next = Standby::load(&*store, &config, Arc::new(BootClock));
        let next = next.await.unwrap();
        assert_eq!(lies_at(&next.tier), Some(0), "is wrong: {is_wrong}");
    }
}

/// Called between the check of the copy and its removal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_has_moved_stays_when_its_old_place_was_read_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    pool.tier.set_medium(medium_of(1));
    assert!(pool.tier.publish(copy_at(8192)));
    let block = block("block", 7);
    let gone = |offset| record::ReplicaGone {
        namespace: block.namespace,
        key: block.key.clone(),
        version: block.version,
        segment: SegmentId::on_medium(1),
        offset,
    };
    assert!(!pool.tier.copy_gone(&gone(Some(Offset(0)))));
    assert_eq!(lies_at(&pool.tier), Some(8192));
    // This is a record of an earlier build.
    assert!(pool.tier.copy_gone(&gone(None)));
    assert_eq!(lies_at(&pool.tier), None);
    pool.retire().await;
}

/// No zone takes the copy, and the node with the block in memory is about to leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_copy_is_loaded_where_the_memory_with_its_block_leaves() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, medium) = pool_on_medium(directory.path()).await;
    assert!(pool.tier.publish(record::Commit {
        hard_pin: true,
        ..copy_at(1 << 18)
    }));
    let (node, session, _sent) = connected(&pool);
    let (leaving, _, _to_it) = connected(&pool);
    for (id, node) in [(1, &leaving), (2, &node)] {
        node.set_state(NodeState::Live);
        let segment = Segment::new(SegmentId(id), Arc::clone(node), Length(1 << 20), 1.0);
        pool.placement.insert(Arc::new(segment));
    }
    let published = pool.directory.publish(&[block("block", 7)]).remove(0);
    assert!(published.id.is_some());
    attach(&pool, &node, session, medium.id);
    pool.load_pinned(SPACE, &Key::parse("block").unwrap());
    assert!(pool.tiering.traffic.lock().loading.is_empty());
    leaving.drain();
    pool.drop_oldest(&medium, &node, session);
    assert_eq!(lies_at(&pool.tier), Some(1 << 18));
    assert_eq!(pool.tiering.traffic.lock().loading.len(), 1);
    pool.retire().await;
}

/// The medium's node cannot write for a moment. A node that never can must not block the zone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_whose_move_failed_moves_later() {
    const FROM: u64 = 1 << 18;
    for codes in [[Code::Full, Code::Unreachable, Code::Ok], [Code::Full; 3]] {
        let directory = tempfile::tempdir().unwrap();
        let pool = pool_in(directory.path()).await;
        let medium = copy_in_a_zone_that_is_due(&pool, FROM);
        let copies = pool.tier.directory();
        let (key, used) = (Key::parse("block").unwrap(), copies.ticks(2).of(0));
        copies.visit(SPACE, &[key.as_ref()], |_, copy| copy.unwrap().touch(used));
        let (node, session, mut sent) = connected(&pool);
        attach(&pool, &node, session, medium.id);
        for code in codes {
            let order = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
            let order = order.expect("a move is ordered").unwrap().unwrap();
            let Some(Body::Transfers(orders)) = &order.body else {
                panic!("{order:?}");
            };
            assert_eq!(lies_at(&pool.tier), Some(FROM));
            pool.transfers_done(&node, &[(orders.transfers[0].ticket, code)]);
        }
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while lies_at(&pool.tier) == Some(FROM) {
            assert!(std::time::Instant::now() < until, "it stays in its zone");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let has_moved = codes.contains(&Code::Ok);
        assert_eq!(lies_at(&pool.tier).is_some(), has_moved, "{codes:?}");
        pool.retire().await;
    }
}

/// A loaded block is recorded only while its copy is in the tier.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_leaves_its_zone_after_its_load() {
    const FROM: u64 = 1 << 18;
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let medium = copy_in_a_zone_that_is_due(&pool, FROM);
    let (copy, to) = (medium.oldest()[0], block("block", 7).replicas[0]);
    let (node, session, _sent) = connected(&pool);
    {
        let mut traffic = pool.tiering.traffic.lock();
        let load = OpenLoad::new(1, to, Length(100));
        traffic.loading.insert((copy, Version(7)), load);
        traffic.uses.insert(medium.id, in_use(&node, session));
    }
    pool.drop_oldest(&medium, &node, session);
    assert_eq!(lies_at(&pool.tier), Some(FROM));
    pool.tiering.traffic.lock().loading.clear();
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while lies_at(&pool.tier).is_some() {
        assert!(std::time::Instant::now() < until, "it stays in its zone");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    pool.retire().await;
}

/// A removal takes the copy out of its zone while a load reads it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_zone_without_copies_waits_for_the_load_that_reads_it() {
    const FROM: u64 = 1 << 18;
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let medium = copy_in_a_zone_that_is_due(&pool, FROM);
    let (copy, to) = (medium.oldest()[0], block("block", 7).replicas[0]);
    let (node, session, _sent) = connected(&pool);
    let used = Use {
        emptying: Emptying::Logging,
        ..in_use(&node, session)
    };
    pool.tiering.traffic.lock().uses.insert(medium.id, used);
    let ticket = {
        let place = Place {
            medium: medium.id,
            offset: Offset(FROM),
        };
        let direction = Direction::Load {
            copy,
            to,
            grant: GrantId(1),
            used: None,
        };
        let load = Transfer {
            place,
            ..transfer(&node, session, &medium, direction)
        };
        let mut traffic = pool.tiering.traffic.lock();
        assert!(traffic.begin(&medium, load, proto::Transfer::default()));
        traffic.last_ticket
    };
    let block = block("block", 7);
    assert!(pool.tier.copy_gone(&record::ReplicaGone {
        namespace: block.namespace,
        key: block.key,
        version: block.version,
        segment: medium.id,
        offset: None,
    }));
    pool.set_emptying(medium.id, &node, session, Emptying::Idle);
    for _ in 0..20 {
        pool.tend_media();
        assert!(medium.is_next_due(), "its zone may be written");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    pool.transfers_done(&node, &[(ticket, Code::StoreFailed)]);
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while medium.is_next_due() {
        assert!(std::time::Instant::now() < until, "the zone is not emptied");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    pool.retire().await;
}

/// A pool whose clock stands still, and its clock.
async fn pool_at_a_moment(directory: &std::path::Path) -> (Arc<Pool>, Arc<ManualClock>) {
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let clock = Arc::new(ManualClock::new(BootInstant(1_000_000)));
    let of_pool = Arc::clone(&clock);
    let pool = Pool::start(Config::default(), Arc::new(store), of_pool, metrics);
    (pool.await.unwrap(), clock)
}

/// The master would look at the zone at each store, each load and each round of eviction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_zone_whose_copies_cannot_leave_pauses_until_they_may() {
    const FROM: u64 = 1 << 18;
    for end in ["time", "load", "change"] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, clock) = pool_at_a_moment(directory.path()).await;
        let medium = copy_in_a_zone_that_is_due(&pool, FROM);
        let (copy, to) = (medium.oldest()[0], block("block", 7).replicas[0]);
        let (node, session, _sent) = connected(&pool);
        {
            let _nothing_is_ordered = pool.tiering.tending.lock();
            let mut traffic = pool.tiering.traffic.lock();
            let load = OpenLoad::new(1, to, Length(100));
            traffic.loading.insert((copy, Version(7)), load);
            traffic.uses.insert(medium.id, in_use(&node, session));
            drop(traffic);
            pool.drop_oldest(&medium, &node, session);
            if end != "load" {
                pool.tiering.traffic.lock().loading.clear();
            }
        }
        for _ in 0..20 {
            pool.tend_media();
            assert_eq!(lies_at(&pool.tier), Some(FROM), "the pause lasts");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        match end {
            "time" => clock.advance(Duration::from_millis(100)),
            "load" => {
                let direction = Direction::Load {
                    copy,
                    to,
                    grant: GrantId(1),
                    used: None,
                };
                let mut load = transfer(&node, session, &medium, direction);
                load.place.offset = Offset(FROM);
                pool.load_succeeded(&load);
            }
            _ => {
                let other = record::Commit {
                    key: Key::parse("other").unwrap(),
                    ..copy_at(FROM + 8192)
                };
                assert!(pool.tier.publish(other));
            }
        }
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while lies_at(&pool.tier).is_some() {
            assert!(std::time::Instant::now() < until, "it stays: {end}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        pool.retire().await;
    }
}

/// The copy fits neither the written zone nor memory. Memory may be too small, or the namespace's quota.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_copy_that_cannot_leave_its_zone_does_not_stop_the_others() {
    const FROM: u64 = 1 << 18;
    let directory = tempfile::tempdir().unwrap();
    let (pool, clock) = pool_at_a_moment(directory.path()).await;
    let pinned = Key::parse("pinned").unwrap();
    let medium = copy_in_a_zone_that_is_due(&pool, FROM);
    assert!(pool.tier.publish(record::Commit {
        key: pinned.clone(),
        length: Length(200 << 10),
        hard_pin: true,
        ..copy_at(FROM + 8192)
    }));
    assert_eq!((medium.next_zone(), medium.copies()), (1, 2));
    let (node, session, _sent) = connected_with(&pool, 64 << 10);
    node.set_state(NodeState::Live);
    let segment = Segment::new(SegmentId(1), Arc::clone(&node), Length(64 << 10), 1.0);
    pool.placement.insert(Arc::new(segment));
    attach(&pool, &node, session, medium.id);
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while medium.is_next_due() {
        assert!(std::time::Instant::now() < until, "no zone is emptied");
        pool.tend_media();
        clock.advance(Duration::from_millis(20));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(medium.next_zone(), 2);
    assert!(pool.has_copy(SPACE, pinned.as_ref()));
    assert_eq!(lies_at(&pool.tier), None, "only pinned copies stay");
    let taken = medium.take(Length(200 << 10), pool.directory.next_tick());
    assert_eq!(taken, Taken::At(Offset(2 << 18)));
    pool.retire().await;
}

/// The blocks of a pool may have very different lengths.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_used_copy_moves_behind_one_that_does_not_fit() {
    const FROM: u64 = 1 << 18;
    let directory = tempfile::tempdir().unwrap();
    let pool = pool_in(directory.path()).await;
    let long = Key::parse("long").unwrap();
    let medium = copy_in_a_zone_that_is_due(&pool, FROM);
    assert!(pool.tier.publish(record::Commit {
        key: long.clone(),
        length: Length(200 << 10),
        ..copy_at(FROM + 8192)
    }));
    let copies = pool.tier.directory();
    for key in [Key::parse("block").unwrap(), long] {
        let used = copies.ticks(2).of(0);
        copies.visit(SPACE, &[key.as_ref()], |_, copy| copy.unwrap().touch(used));
    }
    let (node, session, mut sent) = connected(&pool);
    attach(&pool, &node, session, medium.id);
    let order = tokio::time::timeout(Duration::from_secs(20), sent.recv()).await;
    let order = order.expect("a move is ordered").unwrap().unwrap();
    let Some(Body::Transfers(orders)) = &order.body else {
        panic!("{order:?}");
    };
    let from = orders.transfers[0].from.unwrap();
    assert_eq!((from.offset, from.length), (FROM, 100));
    pool.retire().await;
}
