//! Leases on blocks that are on media, or that are loaded from media.

use crate::support::media::*;
use crate::support::{SPACE, commit, pool, pool_at, reserve_with};
use kvpool_master::Config;
use kvpool_master::clock::{BootInstant, ManualClock};
use kvpool_master::pool::{Granted, Holder, LeaseOf, Leased, Pool, ReserveOptions};
use kvpool_types::{Code, Key};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// No lease runs out during a test.
fn long_leases() -> Config {
    Config {
        lease_ttl: Duration::from_secs(300),
        ..Config::default()
    }
}

/// The pool's only block, of key 1, is on a medium and not in memory. `lease` leases it before, while it is in
/// memory.
async fn leased_before<T>(
    pool: &Arc<Pool>,
    disk: &Arc<Disk>,
    lease: impl FnOnce(&Pool) -> T,
) -> (T, Node) {
    let node = join(pool, "n", 1, 8 * MIB, disk, 32 * MIB, 4 * MIB).await;
    wait_for_attachment(disk).await;
    put(pool, 1, &patient()).await;
    let leased = lease(pool);
    (leased, comes_again(pool, disk, node).await)
}

fn lookup(pool: &Pool, lease: bool) -> Option<BootInstant> {
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let found = pool.lookup(SPACE, &keys[..], lease);
    found.answer[0].as_ref().map(|_| found.token)
}

fn exist(pool: &Pool) -> BootInstant {
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let found = pool.exist(SPACE, &keys[..], true);
    assert!(found.answer[0]);
    found.token
}

fn release(pool: &Pool, token: BootInstant) {
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    pool.release(SPACE, &keys[..], |_| Holder::of_any(token));
}

fn renew(pool: &Pool, token: BootInstant) -> Leased<Vec<Code>> {
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    pool.renew(SPACE, &keys[..], LeaseOf::Presence, |_| {
        Holder::of_any(token)
    })
}

async fn remove(pool: &Arc<Pool>) -> Vec<Code> {
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    pool.remove(SPACE, &keys[..], false).await.unwrap().codes
}

fn is_leased(pool: &Pool) -> bool {
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let described = pool.describe(SPACE, &keys[..]).remove(0).unwrap();
    described.lease_left > Duration::ZERO
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_on_a_copy_ends_no_lease_on_the_block_that_comes_back() {
    let cold = Cold::block(long_leases()).await;
    let (pool, disk) = (&cold.pool, &cold.disk);
    disk.loads_stall.store(true, Ordering::SeqCst);
    let of_copy = exist(pool);
    disk.loads_stall.store(false, Ordering::SeqCst);
    until("in memory", || lookup(pool, false).is_some()).await;
    lookup(pool, true).unwrap();
    release(pool, of_copy);
    assert!(is_leased(pool), "the lease of the reader was ended");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_from_before_its_node_left_ends_no_lease_on_the_block_that_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), long_leases()).await;
    let disk = Disk::new(1);
    let locate = |pool: &Pool| lookup(pool, true).unwrap();
    let (before, _node) = leased_before(&pool, &disk, locate).await;
    assert!(comes_back(&pool, 1).await);
    lookup(&pool, true).unwrap();
    release(&pool, before);
    assert!(is_leased(&pool), "the lease of the second reader was ended");
}

/// The copy does not count the first holder. The second holder relies on its own lease there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_from_before_its_node_left_ends_no_lease_on_the_copy() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), long_leases()).await;
    let disk = Disk::new(1);
    let (before, _node) = leased_before(&pool, &disk, exist).await;
    disk.loads_stall.store(true, Ordering::SeqCst);
    exist(&pool);
    release(&pool, before);
    assert_eq!(remove(&pool).await, [Code::Leased]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_from_before_its_node_left_counts_at_the_copy_once_it_is_renewed() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), long_leases()).await;
    let disk = Disk::new(1);
    let (before, _node) = leased_before(&pool, &disk, exist).await;
    disk.loads_stall.store(true, Ordering::SeqCst);
    let of_copy = exist(&pool);
    let renewed = renew(&pool, before);
    assert_eq!(renewed.answer, [Code::Ok]);
    release(&pool, of_copy);
    assert_eq!(remove(&pool).await, [Code::Leased]);
    release(&pool, renewed.token);
    assert_eq!(remove(&pool).await, [Code::Ok]);
}

/// A lookup may wait longer than a lease lasts. The block was lost meanwhile, and loaded again for
/// another reader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_that_waited_ends_no_lease_on_a_block_that_came_back_again() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new(BootInstant(1_000_000)));
    let config = Config {
        lease_ttl: Duration::from_secs(1),
        drop_after: Duration::from_secs(300),
        suspect_after: Duration::from_secs(200),
        ..Config::default()
    };
    let (pool, _store) = pool_at(directory.path(), config, Arc::clone(&clock) as _).await;
    let disk = Disk::new(1);
    let (_, node) = leased_before(&pool, &disk, |_| ()).await;
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let restored = pool.restore(SPACE, &keys[..], Duration::from_secs(5)).await;
    let _node = comes_again(&pool, &disk, node).await;
    exist(&pool);
    until("in memory", || lookup(&pool, false).is_some()).await;
    clock.advance(Duration::from_secs(3));
    lookup(&pool, true).unwrap();
    pool.end_restored(SPACE, &restored);
    assert!(is_leased(&pool), "the lease of the reader was ended");
}

/// The loaded block was removed while its lookup waited for others, and its key has a new block.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_that_waited_ends_no_lease_on_the_next_block_of_a_key() {
    let cold = Cold::block(long_leases()).await;
    let pool = &cold.pool;
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let patience = Duration::from_secs(5);
    let restored = pool.restore(SPACE, &keys[..], patience).await;
    assert!(lookup(pool, false).is_some(), "it came back");
    let removed = pool.remove(SPACE, &keys[..], true).await.unwrap();
    assert_eq!(removed.removed, 1);
    put(pool, 1, &patient()).await;
    lookup(pool, true).unwrap();
    pool.end_restored(SPACE, &restored);
    assert!(is_leased(pool), "the lease of the reader was ended");
}

/// The loaded block has left memory with its node since, and another reader relies on the copy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_that_waited_ends_no_lease_on_a_copy() {
    let cold = Cold::block(long_leases()).await;
    let (pool, disk) = (&cold.pool, &cold.disk);
    let keys = [key(1)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let restored = pool.restore(SPACE, &keys[..], Duration::from_secs(5)).await;
    assert!(lookup(pool, false).is_some(), "it came back");
    let _node = comes_again(pool, disk, cold.node).await;
    disk.loads_stall.store(true, Ordering::SeqCst);
    exist(pool);
    pool.end_restored(SPACE, &restored);
    let removed = pool.remove(SPACE, &keys[..], false).await.unwrap();
    assert_eq!(removed.codes, [Code::Leased]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_came_back_and_is_read_by_nobody_may_leave() {
    let cold = Cold::block(long_leases()).await;
    let pool = &cold.pool;
    assert!(comes_back(pool, 1).await);
    assert!(lookup(pool, false).is_some());
    assert!(!is_leased(pool));
}

/// A reader that asks for presence, gets the blocks and releases the leases leaves no lease behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_came_back_is_free_when_its_last_holder_has_released_it() {
    let cold = Cold::block(long_leases()).await;
    let (pool, disk) = (&cold.pool, &cold.disk);
    disk.loads_stall.store(true, Ordering::SeqCst);
    release(pool, exist(pool));
    let of_copy = exist(pool);
    disk.loads_stall.store(false, Ordering::SeqCst);
    assert!(comes_back(pool, 1).await);
    let of_block = lookup(pool, true).unwrap();
    release(pool, of_block);
    assert!(is_leased(pool), "the lease on the copy goes on");
    release(pool, of_copy);
    assert!(!is_leased(pool), "nobody has a lease");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_on_a_copy_is_renewed_where_the_block_is() {
    let cold = Cold::block(long_leases()).await;
    let (pool, disk) = (&cold.pool, &cold.disk);
    disk.loads_stall.store(true, Ordering::SeqCst);
    let mut token = exist(pool);
    let mut renew = || {
        let renewed = renew(pool, token);
        token = renewed.token;
        renewed.answer
    };
    assert_eq!(renew(), [Code::Ok], "on the medium");
    disk.loads_stall.store(false, Ordering::SeqCst);
    until("in memory", || lookup(pool, false).is_some()).await;
    assert_eq!(renew(), [Code::Ok], "in memory");
}

/// The block of an open put gets a reader. Then a lease on the copy of the version before is
/// released.
async fn ends_no_lease_on_the_next_version(
    pool: &Arc<Pool>,
    of_copy: BootInstant,
    granted: Granted,
) {
    let committed = commit(pool, &key(1), BLOCK, granted).await;
    assert_eq!(committed, [Code::Ok]);
    lookup(pool, true).unwrap();
    release(pool, of_copy);
    assert!(is_leased(pool), "the lease of the reader was ended");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_on_a_copy_ends_no_lease_on_the_version_after_it() {
    let cold = Cold::block(long_leases()).await;
    let (pool, disk) = (&cold.pool, &cold.disk);
    disk.loads_stall.store(true, Ordering::SeqCst);
    let upsert = ReserveOptions {
        upsert: true,
        ..patient()
    };
    let granted = reserve_with(pool, &key(1), BLOCK, &upsert).await;
    // The version was given before, so the lease may protect it.
    let of_copy = exist(pool);
    ends_no_lease_on_the_next_version(pool, of_copy, granted.unwrap()).await;
}

/// When the put begins, its key has no block, and the record of the copy is being appended. So the
/// put knows of no lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_on_a_copy_that_came_during_a_put_ends_no_lease_on_its_block() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        lease_ttl: long_leases().lease_ttl,
        ..lru()
    };
    let (pool, store) = pool(directory.path(), config).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_attachment(&disk).await;
    disk.is_stalled.store(true, Ordering::SeqCst);
    let first = put(&pool, 1, &patient()).await;
    let mut number = 2;
    while present(&pool, 1..2).await[0] {
        put(&pool, number, &patient()).await;
        number += 1;
    }
    assert!(disk.ordered.lock().contains(&first.0), "it is not copied");
    let gate = store.gate.lock().await;
    disk.loads_stall.store(true, Ordering::SeqCst);
    disk.is_stalled.store(false, Ordering::SeqCst);
    until("all copies answered", || pool.open_transfers() == 0).await;
    assert!(!present(&pool, 1..2).await[0], "the copy is logged");
    let granted = reserve_with(&pool, &key(1), BLOCK, &patient()).await;
    drop(gate);
    wait_for_media(&pool, 1..2).await;
    let of_copy = exist(&pool);
    ends_no_lease_on_the_next_version(&pool, of_copy, granted.unwrap()).await;
}

/// The load of the copy ends during the put, and its holder counts at the block in memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_on_a_block_that_came_back_during_a_put_ends_no_lease_on_the_version_after_it() {
    let cold = Cold::block(long_leases()).await;
    let pool = &cold.pool;
    let upsert = ReserveOptions {
        upsert: true,
        ..patient()
    };
    let granted = reserve_with(pool, &key(1), BLOCK, &upsert).await;
    let of_copy = exist(pool);
    until("in memory", || lookup(pool, false).is_some()).await;
    ends_no_lease_on_the_next_version(pool, of_copy, granted.unwrap()).await;
}

/// The caller does not know of leases on the other blocks, and would release none of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_is_leased_up_to_its_first_gap_beside_media() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), long_leases()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 8 * MIB, &disk, 32 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 1..5 {
        put(&pool, number, &patient()).await;
    }
    let keys: Vec<Key> = (1..5).map(key).collect();
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let removed = pool.remove(SPACE, &keys[1..2], true).await.unwrap();
    assert_eq!(removed.codes, [Code::Ok]);
    assert_eq!(pool.match_prefix(SPACE, &keys[..], true).answer, 1);
    let described = pool.describe(SPACE, &keys[..]);
    let is_leased = described.iter().map(|block| {
        let block = block.as_ref();
        block.is_some_and(|block| block.lease_left > Duration::ZERO)
    });
    let is_leased: Vec<bool> = is_leased.collect();
    assert_eq!(is_leased, [true, false, false, false]);
}
