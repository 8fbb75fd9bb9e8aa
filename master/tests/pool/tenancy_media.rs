//! Quotas and deletions of namespaces whose blocks lie on media.

use crate::support::Gated;
use crate::support::media::{Disk, Node, join, until, wait_for_attachment};
use crate::support::tenants::*;
use kvpool_master::Config;
use kvpool_master::pool::Pool;
use kvpool_types::{Code, Key, KeyRef, Namespace, NamespaceSettings, Setting};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A node of 16 MiB. Another namespace uses most of it, so every block gets its copy at once.
struct Busy {
    pool: Arc<Pool>,
    store: Arc<Gated>,
    disk: Arc<Disk>,
    node: Node,
    other: Tenant,
}

impl Busy {
    async fn new(directory: &Path, config: Config) -> Self {
        let (pool, store) = crate::support::pool(directory, config).await;
        let disk = Disk::new(1);
        let node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 16 * MIB).await;
        wait_for_attachment(&disk).await;
        let other = Tenant::new(&pool, "other", &[]).await;
        other.put_paced(0..16 * MIB / BLOCK).await;
        Self {
            pool,
            store,
            disk,
            node,
            other,
        }
    }

    /// Creates a namespace and writes this many blocks to it.
    async fn tenant(&self, blocks: u64, settings: &[(Setting, u64)]) -> Tenant {
        let tenant = Tenant::new(&self.pool, "tenant", settings).await;
        for n in 0..blocks {
            tenant.put(n).await;
            until("it has its copy", || tenant.balance().copies == n + 1).await;
        }
        tenant
    }
}

fn keys(numbers: std::ops::Range<u64>) -> Vec<Key> {
    numbers.map(key).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_presence_of_blocks_on_media_evicts_nothing_at_a_quota() {
    let directory = tempfile::tempdir().unwrap();
    let busy = Busy::new(directory.path(), patient()).await;
    let tenant = busy.tenant(100, &[(Setting::MemoryHard, 32 * BLOCK)]).await;
    assert_eq!(tenant.balance().blocks, 32);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let loads = busy.disk.loads.load(Ordering::SeqCst);
    let asked = keys(0..20);
    let asked: Vec<KeyRef<'_>> = asked.iter().map(Key::as_ref).collect();
    for _ in 0..10 {
        let there = busy.pool.exist(tenant.id, &asked[..], true);
        assert_eq!(there.answer, [true; 20]);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(tenant.balance().blocks, 32, "nobody waits for them");
    let loaded = busy.disk.loads.load(Ordering::SeqCst) - loads;
    assert_eq!(loaded, 0, "they take the place of others");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_is_longer_than_the_quota_does_not_come_back_and_evicts_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let busy = Busy::new(directory.path(), patient()).await;
    let tenant = Tenant::new(&busy.pool, "tenant", &[]).await;
    let wait = Duration::from_secs(10);
    tenant.try_put(1000, 40 * BLOCK, wait).await.unwrap();
    until("it has its copy", || tenant.balance().copies == 1).await;
    let changed = busy.pool.change_namespace("tenant", |settings| {
        settings.set(Setting::MemoryHard, Some(32 * BLOCK));
    });
    changed.await.unwrap();
    tenant.put_paced(0..32).await;
    until("it has left", || tenant.balance().blocks == 32).await;
    let begun = std::time::Instant::now();
    assert_eq!(tenant.restore(&[1000]).await, [1000]);
    assert!(
        begun.elapsed() < Duration::from_secs(2),
        "nothing to wait for"
    );
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(tenant.balance().blocks, 32);
}

/// Leases of the term before keep the namespace's blocks for a while. Its lookups wait meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookups_that_wait_for_a_quota_evict_only_what_they_load() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        lease_ttl: Duration::from_millis(1500),
        ..patient()
    };
    let busy = Busy::new(directory.path(), config.clone()).await;
    let tenant = busy.tenant(100, &[(Setting::MemoryHard, 32 * BLOCK)]).await;
    let Busy {
        pool,
        store,
        disk,
        node,
        other,
    } = busy;
    drop((tenant, node, other));
    stop(pool, store).await;
    let (second, _store) = crate::support::pool(directory.path(), config).await;
    let _node = join(&second, "n", 1, 16 * MIB, &disk, 512 * MIB, 16 * MIB).await;
    let tenant = Tenant::of(&second, "tenant");
    until("the medium is attached", || tenant.has(0)).await;
    assert_eq!(tenant.balance().blocks, 32);
    assert_eq!(tenant.restore(&[0, 1, 2, 3]).await, [0; 0]);
    assert_eq!(tenant.balance().blocks, 32, "four came, four left");
    for n in 4..40 {
        assert_eq!(tenant.restore(&[n]).await, [0; 0], "{n}");
        let blocks = tenant.balance().blocks;
        assert!((31..=32).contains(&blocks), "{n}: {blocks} blocks");
    }
    assert_eq!(disk.wrong.load(Ordering::SeqCst), 0);
}

/// Lookups load blocks while puts continue, all below one hard quota.
async fn most_while_blocks_come_back(hard: &[(Setting, u64)]) -> (u64, u64) {
    let directory = tempfile::tempdir().unwrap();
    let busy = Busy::new(directory.path(), patient()).await;
    let tenant = busy.tenant(60, hard).await;
    assert_eq!(tenant.balance().blocks, 10);
    let is_over = Arc::new(AtomicBool::new(false));
    let (watched, until_over) = (tenant.clone(), Arc::clone(&is_over));
    let most = std::thread::spawn(move || {
        let mut most = (0, 0);
        while !until_over.load(Ordering::SeqCst) {
            let balance = watched.balance();
            most = (most.0.max(balance.blocks), most.1.max(balance.memory));
        }
        most
    });
    let puts = {
        let tenant = tenant.clone();
        tokio::spawn(async move { tenant.fill(100..130).await })
    };
    for first in (0..48).step_by(4) {
        let numbers: Vec<u64> = (first..first + 4).collect();
        tenant.restore(&numbers).await;
    }
    puts.await.unwrap();
    assert!(busy.disk.loads.load(Ordering::SeqCst) > 20);
    is_over.store(true, Ordering::SeqCst);
    most.join().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_come_back_pass_no_hard_quota_of_blocks() {
    let (blocks, _) = most_while_blocks_come_back(&[(Setting::BlocksHard, 10)]).await;
    assert_eq!(blocks, 10, "in memory at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_come_back_pass_no_hard_quota_of_memory() {
    let hard = 10 * BLOCK;
    let (_, bytes) = most_while_blocks_come_back(&[(Setting::MemoryHard, hard)]).await;
    assert_eq!(bytes, hard, "in memory at once");
}

/// The block left memory while its copy was written, so nothing of the namespace counts at its deletion.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_namespace_gets_no_copy() {
    let directory = tempfile::tempdir().unwrap();
    let busy = Busy::new(directory.path(), patient()).await;
    let tenant = Tenant::new(&busy.pool, "tenant", &[]).await;
    let before = busy.disk.ordered.lock().len();
    busy.disk.is_stalled.store(true, Ordering::SeqCst);
    tenant.put(1).await;
    until("its copy is ordered", || {
        busy.disk.ordered.lock().len() > before
    })
    .await;
    busy.other.fill(1000..1000 + 2 * 16 * MIB / BLOCK).await;
    until("it has left memory", || {
        tenant.balance() == Default::default()
    })
    .await;
    assert_eq!(busy.pool.delete_namespace("tenant", false).await, Ok(0));
    busy.disk.is_stalled.store(false, Ordering::SeqCst);
    until("the disk has no orders", || busy.pool.bytes_due() == 0).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (sums, named) = (busy.pool.balance(), busy.other.balance());
    assert_eq!(sums.copies, named.copies, "a copy without a namespace");
}

/// A load that stalls delays a deletion. Clients create namespaces meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_waits_for_a_load_holds_up_no_creation() {
    let directory = tempfile::tempdir().unwrap();
    let busy = Busy::new(directory.path(), patient()).await;
    let tenant = busy.tenant(20, &[(Setting::BlocksHard, 10)]).await;
    busy.disk.loads_stall.store(true, Ordering::SeqCst);
    let loads = {
        let tenant = tenant.clone();
        tokio::spawn(async move { tenant.restore(&[0]).await })
    };
    until("the load is ordered", || {
        let balance = tenant.balance();
        balance.memory > balance.resident
    })
    .await;
    let deletion = {
        let pool = Arc::clone(&busy.pool);
        tokio::spawn(async move { pool.delete_namespace("tenant", true).await })
    };
    until("the deletion has begun", || {
        busy.pool.namespace("tenant") == Err(Code::UnknownNamespace)
    })
    .await;
    let new = Namespace {
        name: "new".into(),
        ..Namespace::default()
    };
    let none = NamespaceSettings::default();
    let creation = busy.pool.create_namespace(new, none);
    let created = tokio::time::timeout(Duration::from_secs(3), creation).await;
    assert_eq!(created.expect("it waits for the deletion"), Ok(true));
    let change = busy.pool.change_namespace("new", |settings| {
        settings.set(Setting::Priority, Some(1));
    });
    let changed = tokio::time::timeout(Duration::from_secs(3), change).await;
    assert!(changed.expect("it waits for the deletion").is_ok());
    assert!(!deletion.is_finished());
    busy.disk.loads_stall.store(false, Ordering::SeqCst);
    assert!(deletion.await.unwrap().is_ok());
    loads.await.unwrap();
    check_sums(&busy.pool).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_stop_at_the_hard_quota_of_media_and_those_of_others_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let busy = Busy::new(directory.path(), patient()).await;
    let hard = 4 * MIB;
    let tenant = Tenant::new(&busy.pool, "tenant", &[(Setting::MediaHard, hard)]).await;
    let refused = || busy.pool.counters()["copies_refused_total"];
    let (before, others) = (refused(), busy.other.balance().copies);
    for n in 0..128 {
        tenant.put_paced(n..n + 1).await;
        busy.other.put_paced(5000 + n..5001 + n).await;
        let media = tenant.balance().media;
        assert!(media <= hard, "{media} of {hard} bytes");
    }
    until("the disk has no orders", || busy.pool.bytes_due() == 0).await;
    let media = tenant.balance().media;
    assert!(media <= hard, "{media} of {hard} bytes");
    assert!(media + 2 * BLOCK > hard, "{media} of {hard} bytes are used");
    assert!(refused() > before);
    let others = busy.other.balance().copies - others;
    assert!(others > 100, "{others} copies of the other namespace");
    check_sums(&busy.pool).await;
}
