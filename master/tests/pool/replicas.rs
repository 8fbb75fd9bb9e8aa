//! Replicas are copied and moved by nodes that the test controls: they answer when the test says
//! so.

use crate::support::replicas::*;
use crate::support::{SPACE, commit, lead, media, pool, reserve_with};
use kvpool_master::Config;
use kvpool_master::clock::BootClock;
use kvpool_master::pool::{Change, Holder, LeaseOf, Pool, ReserveOptions, TaskState};
use kvpool_master::store::MetadataStore;
use kvpool_master::store::journal::JournalOptions;
use kvpool_types::{Code, Key, Namespace, NamespaceSettings};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard};

#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_changes_meanwhile_gets_no_replica() {
    for is_replaced in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, a, b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
        let task = begin(&pool, Change::Copy, None, &key(1)).await;
        let pull = b.next().await;
        let keys = [key(1)];
        let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
        pool.remove(SPACE, &keys, true).await.unwrap();
        if is_replaced {
            // Only `a` takes the block. The version of a block is compared, not its key.
            pool.draining(&b.node, false);
            put(&pool, &key(1)).await;
        }
        pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
        let ended = end(&pool, &task).await;
        assert_eq!((ended.changed, ended.gone), (0, 1), "{ended:?}");
        let expected: &[&str] = if is_replaced { &["a"] } else { &[] };
        assert_eq!(holders(&pool, &key(1)), expected);
        let left = if is_replaced { BLOCK } else { 0 };
        wait_used(&pool, left).await;
        drop(a);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_is_logged_before_the_replica_does_not_get_it() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        lease_ttl: Duration::from_millis(10),
        ..Config::default()
    };
    let (pool, store) = pool(directory.path(), config).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    let task = begin(&pool, Change::Copy, None, &key(1)).await;
    let pull = b.next().await;
    // The next version goes to `a` alone.
    pool.draining(&b.node, false);
    let upsert = ReserveOptions {
        upsert: true,
        timeout: Duration::from_secs(10),
        ..ReserveOptions::default()
    };
    let granted = reserve_with(&pool, &key(1), BLOCK, &upsert).await.unwrap();
    // The log has both records, but neither is durable yet, so the old version is still the block.
    let shut = store.gate.lock().await;
    let committed = tokio::spawn(commit(&pool, &key(1), BLOCK, granted));
    tokio::time::sleep(Duration::from_millis(200)).await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(shut);
    assert_eq!(committed.await.unwrap(), [Code::Ok]);
    let ended = end(&pool, &task).await;
    assert_eq!((ended.changed, ended.gone), (0, 1), "{ended:?}");
    assert_eq!(holders(&pool, &key(1)), ["a"]);
    wait_used(&pool, BLOCK).await;
    drop(a);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_moved_replica_stays_shut_while_a_reader_has_a_lease() {
    let directory = tempfile::tempdir().unwrap();
    let ttl = Duration::from_secs(2);
    let (pool, a, b) = with_a_block(directory.path(), ttl).await;
    let task = begin(&pool, Change::Move, Some("a"), &key(1)).await;
    let pull = b.next().await;
    pool.lookup(SPACE, &[key(1).as_ref()][..], true);
    let leased = std::time::Instant::now();
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    assert_eq!(end(&pool, &task).await.changed, 1);
    assert_eq!(holders(&pool, &key(1)), ["b"]);
    let of_a = || used_on(&pool, &a.node);
    while leased.elapsed() < ttl * 3 / 4 {
        assert_eq!(
            of_a(),
            BLOCK,
            "free after {:?} of a lease",
            leased.elapsed()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    while of_a() > 0 {
        assert!(leased.elapsed() < ttl * 4, "the extent was leaked");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A long read that renewed its lease would continue at the old location.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_of_a_place_ends_when_the_replica_has_moved() {
    let directory = tempfile::tempdir().unwrap();
    let ttl = Duration::from_secs(4);
    let (pool, a, b) = with_a_block(directory.path(), ttl).await;
    let task = begin(&pool, Change::Move, Some("a"), &key(1)).await;
    let pull = b.next().await;
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let before = pool.lookup(SPACE, &keys[..], true).token;
    let renew = |token, of| {
        let renewed = pool.renew(SPACE, &keys[..], of, |_| Holder::of_any(token));
        (renewed.answer, renewed.token)
    };
    assert_eq!(renew(before, LeaseOf::Places).0, [Code::Ok]);
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    assert_eq!(end(&pool, &task).await.changed, 1);
    assert_eq!(used_on(&pool, &a.node), BLOCK, "free under a lease");
    assert_eq!(renew(before, LeaseOf::Places).0, [Code::LeaseEnded]);
    let after = pool.lookup(SPACE, &keys[..], true).token;
    assert_eq!(renew(after, LeaseOf::Places).0, [Code::Ok]);
    // A reader that asked for presence still has its lease.
    let (answer, mut token) = renew(before, LeaseOf::Presence);
    assert_eq!(answer, [Code::Ok]);
    let moved = std::time::Instant::now();
    while used_on(&pool, &a.node) > 0 {
        assert!(moved.elapsed() < ttl * 3 / 2, "shut beyond a lease");
        tokio::time::sleep(ttl / 20).await;
        let (answer, renewed) = renew(token, LeaseOf::Presence);
        assert_eq!(answer, [Code::Ok]);
        token = renewed;
    }
}

/// A damaged replica leaves its block, which has another replica.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_of_a_place_ends_when_the_replica_is_found_damaged() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_a_block(directory.path(), Duration::from_secs(4)).await;
    let task = begin(&pool, Change::Copy, None, &key(1)).await;
    let pull = b.next().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    assert_eq!(end(&pool, &task).await.changed, 1);
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let found = pool.lookup(SPACE, &keys[..], true);
    let suspected = suspected_on(&pool, &a);
    pool.verified(suspected, false);
    assert_eq!(holders(&pool, &key(1)), ["b"]);
    let renew = |token| pool.renew(SPACE, &keys[..], LeaseOf::Places, |_| Holder::of_any(token));
    assert_eq!(renew(found.token).answer, [Code::LeaseEnded]);
    // A lease that is given in the same millisecond has the same token, and counts as given before.
    tokio::time::sleep(Duration::from_millis(5)).await;
    let after = pool.lookup(SPACE, &keys[..], true).token;
    assert_eq!(renew(after).answer, [Code::Ok]);
}

/// A reader puts a block whose only replica is hidden again. Another block gets the old extent
/// before the node answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_at_the_place_of_a_hidden_replica_that_left_is_readable() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let found = |key: &Key| {
        let found = pool.lookup(SPACE, &[key.as_ref()][..], false);
        found.answer.into_iter().next().flatten()
    };
    let suspected = suspected_on(&pool, &a);
    let segment = suspected.extent.segment;
    let code = Code::ChecksumMismatch;
    let reported = pool.report(
        SPACE,
        &[(key(1).as_ref(), suspected.version, segment, code)],
    );
    assert_eq!(reported, [Code::Ok]);
    assert!(found(&key(1)).is_none());
    put(&pool, &key(1)).await;
    assert!(found(&key(1)).is_some());
    wait_used(&pool, BLOCK).await;
    let taker = async {
        for number in 2..50 {
            put(&pool, &key(number)).await;
            let described = pool.describe(SPACE, &[key(number).as_ref()][..]);
            let replica = described[0].as_ref().unwrap().replicas[0].clone();
            if replica.offset == suspected.extent.offset {
                assert_eq!(replica.state, "live");
                return key(number);
            }
        }
        panic!("no block got the place");
    };
    let taker = taker.await;
    assert!(found(&taker).is_some());
    let corrupt = || pool.counters()["replicas_corrupt_total"];
    let damaged = suspected_on(&pool, &a);
    pool.verified(suspected, false);
    assert_eq!(corrupt(), 0, "no replica was dropped");
    assert!(found(&taker).is_some());
    assert!(found(&key(1)).is_some());
    pool.verified(damaged, false);
    assert_eq!(corrupt(), 1);
    assert!(found(&key(1)).is_none());
}

/// The block left while it was copied, so its replica came too late. If the master died before the
/// Time for a task to reach the log.
async fn moment() {
    tokio::time::sleep(Duration::from_millis(50)).await;
}

/// Lets two groups of records pass the gate, one after the other.
async fn two_groups_pass<'g>(
    gate: &'g Mutex<()>,
    mut held: MutexGuard<'g, ()>,
) -> MutexGuard<'g, ()> {
    for _ in 0..2 {
        let mut next = std::pin::pin!(gate.lock());
        assert!(futures::poll!(next.as_mut()).is_pending());
        drop(held);
        held = next.await;
        moment().await;
    }
    held
}

/// log removed the replica, the block would return.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_finds_nothing_waits_until_a_late_replica_is_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), Config::default()).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    let disk = media::Disk::new(1);
    let _c = media::join(&pool, "c", 3, 4 * MIB, &disk, 64 * MIB, 4 * MIB).await;
    media::wait_for_attachment(&disk).await;
    begin_to(&pool, Change::Copy, None, &["b"], &key(1)).await;
    let pull = b.next().await;
    let suspected = suspected_on(&pool, &a);
    // The next groups pass one by one. The first has a put. The second has the replica, the loss
    // and the removal.
    let first = store.gate.lock().await;
    let other = Arc::clone(&pool);
    let other = tokio::spawn(async move { put(&other, &key(9)).await });
    moment().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    pool.verified(suspected, false);
    let removing = Arc::clone(&pool);
    let removal = tokio::spawn(async move {
        let keys = [key(1)];
        let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
        removing.remove(SPACE, &keys[..], false).await
    });
    moment().await;
    let held = two_groups_pass(&store.gate, first).await;
    other.await.unwrap();
    assert!(!removal.is_finished(), "the replica is not taken back yet");
    drop(held);
    assert_eq!(removal.await.unwrap().unwrap().codes, [Code::Missing]);
    let store = store as Arc<dyn MetadataStore>;
    let journal = JournalOptions::default();
    let next = lead(&store, Config::default(), journal, Arc::new(BootClock)).await;
    assert!(next.stored_blocks().iter().all(|block| block.key != key(1)));
    drop(a);
}

/// The same without media. The log has no record of each block that leaves with its node.
#[tokio::test(flavor = "multi_thread")]
async fn a_removal_waits_until_a_late_replica_of_a_lost_block_is_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), Config::default()).await;
    let a = join(&pool, "a", 1).await;
    put(&pool, &key(1)).await;
    let b = join(&pool, "b", 2).await;
    begin_to(&pool, Change::Copy, None, &["b"], &key(1)).await;
    let pull = b.next().await;
    // The first group has a namespace. The second has the replica and the loss of the node.
    let first = store.gate.lock().await;
    let other = Arc::clone(&pool);
    let other = tokio::spawn(async move {
        let new = Namespace {
            name: "new".into(),
            ..Namespace::default()
        };
        let none = NamespaceSettings::default();
        other.create_namespace(new, none).await.unwrap()
    });
    moment().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Ok)]);
    pool.said_goodbye(&a.node);
    while !pool.stored_blocks().is_empty() {
        moment().await;
    }
    let removing = Arc::clone(&pool);
    let removal = tokio::spawn(async move {
        let keys = [key(1)];
        let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
        removing.remove(SPACE, &keys[..], false).await
    });
    moment().await;
    let held = two_groups_pass(&store.gate, first).await;
    assert!(other.await.unwrap());
    assert!(!removal.is_finished(), "the replica is not taken back yet");
    drop(held);
    assert_eq!(removal.await.unwrap().unwrap().codes, [Code::Missing]);
    let store = store as Arc<dyn MetadataStore>;
    let journal = JournalOptions::default();
    let next = lead(&store, Config::default(), journal, Arc::new(BootClock)).await;
    assert!(next.stored_blocks().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_waited_for_a_node_is_pulled_again_after_a_failure() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
    pool.detach(&b.node, b.session);
    let task = begin(&pool, Change::Move, Some("a"), &key(1)).await;
    // The task looks for a node every 50 ms, more often than a pull may fail.
    tokio::time::sleep(Duration::from_millis(700)).await;
    let b = join(&pool, "b", 2).await;
    let pull = b.next().await;
    pool.pulled(&b.node, &[(pull.ticket, Code::Unreachable)]);
    let again = b.next().await;
    pool.pulled(&b.node, &[(again.ticket, Code::Ok)]);
    assert_eq!(end(&pool, &task).await.changed, 1);
    assert_eq!(holders(&pool, &key(1)), ["b"]);
    drop(a);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_failed_reads_another_replica() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _a, _b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    let c = join(&pool, "c", 3).await;
    begin_to(&pool, Change::Copy, None, &["c"], &key(1)).await;
    let first = c.next().await;
    pool.pulled(&c.node, &[(first.ticket, Code::Unreachable)]);
    let second = c.next().await;
    assert_ne!(first.from_incarnation, second.from_incarnation);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_fails_or_is_lost_is_tried_again_and_leaks_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_a_block(directory.path(), Duration::from_millis(10)).await;
    let task = begin(&pool, Change::Copy, None, &key(1)).await;
    let first = b.next().await;
    pool.pulled(&b.node, &[(first.ticket, Code::Unreachable)]);
    // The session ends before the second pull is answered, and the node returns.
    let second = b.next().await;
    pool.detach(&b.node, b.session);
    let again = join(&pool, "b", 2).await;
    let third = again.next().await;
    // A late answer to the lost order changes nothing.
    pool.pulled(&b.node, &[(second.ticket, Code::Ok)]);
    assert_eq!(holders(&pool, &key(1)), ["a"]);
    pool.pulled(&again.node, &[(third.ticket, Code::Ok)]);
    let ended = end(&pool, &task).await;
    assert_eq!(
        (ended.state, ended.changed),
        (TaskState::Done, 1),
        "{ended:?}"
    );
    let mut both = holders(&pool, &key(1));
    both.sort();
    assert_eq!(both, ["a", "b"]);
    wait_used(&pool, 2 * BLOCK).await;
    drop(a);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tasks_never_bring_a_block_to_one_node_or_drop_one_replica_twice() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    // Both replicas are to move to `c`, so the second task has to wait for the first.
    let c = join(&pool, "c", 3).await;
    let one = begin_to(&pool, Change::Move, Some("a"), &["c"], &key(1)).await;
    let first = c.next().await;
    let two = begin_to(&pool, Change::Move, Some("b"), &["c"], &key(1)).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(c.pulls.lock().is_empty(), "both replicas go to one node");
    pool.pulled(&c.node, &[(first.ticket, Code::Ok)]);
    assert_eq!(end(&pool, &one).await.changed, 1);
    let two = end(&pool, &two).await;
    assert_eq!((two.changed, two.gone), (0, 1), "{two:?}");
    let held = |pool: &Arc<Pool>| {
        let mut held = holders(pool, &key(1));
        held.sort();
        held
    };
    assert_eq!(held(&pool), ["b", "c"]);
    // The same move twice goes to one of two nodes, not to both.
    let drop_b = begin(&pool, Change::Drop, Some("b"), &key(1)).await;
    assert_eq!(end(&pool, &drop_b).await.changed, 1);
    let one = begin(&pool, Change::Move, Some("c"), &key(1)).await;
    let two = begin(&pool, Change::Move, Some("c"), &key(1)).await;
    let (at_a, at_b) = loop {
        let ordered = (a.pulls.lock().len(), b.pulls.lock().len());
        if ordered != (0, 0) {
            tokio::time::sleep(Duration::from_millis(200)).await;
            break (a.pulls.lock().pop(), b.pulls.lock().pop());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert!(at_a.is_none() || at_b.is_none(), "{at_a:?}, {at_b:?}");
    for (node, pull) in [(&a, at_a), (&b, at_b)] {
        let done: Vec<_> = pull.iter().map(|pull| (pull.ticket, Code::Ok)).collect();
        pool.pulled(&node.node, &done);
    }
    let changed = [
        end(&pool, &one).await.changed,
        end(&pool, &two).await.changed,
    ];
    assert_eq!(changed.iter().sum::<u64>(), 1, "{changed:?}");
    assert_eq!(held(&pool).len(), 1);
    wait_used(&pool, BLOCK).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_every_node_has_needs_no_further_replica() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, a, b) = with_two_replicas(directory.path(), Duration::from_millis(10)).await;
    // No block is lost with `a`, so its drain succeeds.
    for (change, from) in [
        (Change::Copy, None),
        (Change::Move, Some("a")),
        (Change::Move, None),
    ] {
        let task = end(&pool, &begin(&pool, change, from, &key(1)).await).await;
        assert_eq!((task.state, task.gone), (TaskState::Done, 1), "{task:?}");
    }
    // No node takes the only block of `a` while `b` takes none. That is a failure.
    put(&pool, &key(2)).await;
    let of = holders(&pool, &key(2)).remove(0);
    for node in [&a, &b] {
        pool.draining(&node.node, false);
    }
    let alone = begin(&pool, Change::Move, Some(&of), &key(2)).await;
    for _ in 0..1000 {
        if pool.replica_tasks(&[alone.id])[0].state != TaskState::Running {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let alone = pool.replica_tasks(&[alone.id]).remove(0);
    assert_eq!(
        (alone.state, alone.failed),
        (TaskState::Failed, 1),
        "{alone:?}"
    );
}

/// `--replica-bandwidth`: after one block the source has used up its bytes for a day.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_sends_no_more_than_its_bandwidth() {
    for (bandwidth, most) in [(1, 1), (0, 3)] {
        let directory = tempfile::tempdir().unwrap();
        let config = Config {
            replica_bandwidth: bytesize::ByteSize(bandwidth),
            ..Config::default()
        };
        let (pool, _) = pool(directory.path(), config).await;
        let _a = join(&pool, "a", 1).await;
        for number in 1..=3 {
            put(&pool, &key(number)).await;
        }
        let b = join(&pool, "b", 2).await;
        for number in 1..=3 {
            begin(&pool, Change::Copy, None, &key(number)).await;
        }
        let first = b.next().await;
        pool.pulled(&b.node, &[(first.ticket, Code::Ok)]);
        tokio::time::sleep(Duration::from_millis(500)).await;
        let ordered = 1 + b.pulls.lock().len();
        assert_eq!(ordered, most, "pulls at {bandwidth} bytes a second");
    }
}
