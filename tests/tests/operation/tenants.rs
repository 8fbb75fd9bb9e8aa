//! Namespaces with quotas over real processes. Their usage is exact after the master was killed,
//! and after a standby took over.

use kvpool_client::{Client, NamespaceInfo, Options, PutBlock, PutOptions};
use kvpool_tests::blocks;
use kvpool_tests::cluster::{self, Cluster};
use kvpool_tests::masters::{self, Pool};
use kvpool_types::{Key, Namespace, NamespaceSettings, Setting};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 64 << 10;
/// The bytes of both nodes together.
const POOL: u64 = 64 * MIB;
const SEGMENT: &str = "32MiB";
const TENANTS: u64 = 10;
const SHARE: u64 = 2 * MIB;
/// The number of blocks in one put.
const BATCH: u64 = 8;
/// Leases of the term before protect every block for this long.
const LEASE_TTL: &str = "500ms";

fn name(tenant: u64) -> String {
    format!("tenant-{tenant}")
}

/// The first half reaches its quotas; the second half fills the pool.
fn hard(tenant: u64) -> u64 {
    if tenant < TENANTS / 2 {
        4 * MIB
    } else {
        16 * MIB
    }
}

fn settings(tenant: u64) -> NamespaceSettings {
    NamespaceSettings::default()
        .with(Setting::MemoryHard, hard(tenant))
        .with(Setting::MemorySoft, hard(tenant) / 2)
        .with(Setting::Guaranteed, SHARE)
        .with(Setting::Priority, tenant % 3)
}

fn namespace(tenant: u64) -> Namespace {
    Namespace {
        name: name(tenant),
        ..Namespace::default()
    }
}

/// Writes a fifth of the blocks. Puts that fail because of the master are repeated.
async fn write(options: Options, tenant: u64, first: u64) {
    let client = loop {
        let options = Options {
            namespace: namespace(tenant),
            ..options.clone()
        };
        if let Ok(client) = Client::connect(options).await {
            break client;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let length = usize::try_from(BLOCK).unwrap();
    let last = first + POOL / 2 / BLOCK;
    let limit = Instant::now() + Duration::from_secs(240);
    let by_default = PutOptions::default();
    let mut at = first;
    while at < last {
        let keys: Vec<Key> = (at..at + BATCH).map(blocks::key).collect();
        let puts = keys
            .iter()
            .map(|key| PutBlock::new(key.clone(), blocks::source(key, length)));
        let outcomes = client.batch_put(puts.collect(), &by_default).await;
        if outcomes.iter().all(Result::is_ok) {
            at += BATCH;
        }
        assert!(Instant::now() < limit, "{}: {outcomes:?}", name(tenant));
    }
}

/// Polls the namespaces until told to stop. Returns the largest usage of each in bytes.
async fn watch(client: Client, is_over: Arc<AtomicBool>) -> BTreeMap<String, u64> {
    let mut most: BTreeMap<String, u64> = BTreeMap::new();
    let mut has_share: BTreeMap<String, bool> = BTreeMap::new();
    while !is_over.load(Ordering::SeqCst) {
        // There is no leader for a while.
        for seen in client.namespaces().await.unwrap_or_default() {
            let Some(hard) = seen.settings.get(Setting::MemoryHard) else {
                continue;
            };
            let (name, memory) = (seen.namespace.name, seen.memory.0);
            assert!(memory <= hard, "{name}: {memory} of {hard} bytes");
            // A namespace's own puts take blocks of its share only at its hard quota, which is
            // higher.
            let has_share = has_share.entry(name.clone()).or_default();
            *has_share |= memory >= SHARE + BATCH * BLOCK;
            assert!(
                !*has_share || memory >= SHARE,
                "{name}: {memory} bytes are left"
            );
            let most = most.entry(name).or_default();
            *most = memory.max(*most);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    most
}

/// Ten namespaces write five times the pool. Returns the largest usage of each in bytes.
async fn write_all(options: &Options, first: u64) -> BTreeMap<String, u64> {
    let is_over = Arc::new(AtomicBool::new(false));
    let client = Client::connect(options.clone()).await.unwrap();
    let watching = tokio::spawn(watch(client, Arc::clone(&is_over)));
    let mut writers = JoinSet::new();
    for tenant in 0..TENANTS {
        writers.spawn(write(options.clone(), tenant, first));
    }
    while let Some(ended) = writers.join_next().await {
        ended.unwrap();
    }
    is_over.store(true, Ordering::SeqCst);
    let most = watching.await.unwrap();
    println!("the most of each: {most:?}");
    most
}

/// The first half must reach its quotas. Otherwise the quotas were not tested.
fn assert_quotas_are_reached(most: &BTreeMap<String, u64>) {
    for tenant in 0..TENANTS / 2 {
        let most = most[&name(tenant)];
        assert!(most + BATCH * BLOCK >= hard(tenant), "{most} bytes");
    }
}

/// The namespaces, once the sum of their usage equals the bytes on the nodes.
async fn at_rest(client: &Client) -> BTreeMap<String, NamespaceInfo> {
    let limit = Instant::now() + Duration::from_secs(30);
    loop {
        let stats = client.stats().await;
        let seen = client.namespaces().await;
        if let (Ok(stats), Ok(seen)) = (stats, seen) {
            let memory: u64 = seen.iter().map(|one| one.memory.0).sum();
            let blocks: u64 = seen.iter().map(|one| one.blocks).sum();
            let puts: u64 = seen.iter().map(|one| one.open_puts).sum();
            let held = stats.used.0 - stats.quarantine.0;
            if (memory, blocks, puts) == (held, stats.blocks, 0) {
                let named = seen.into_iter();
                return named.map(|one| (one.namespace.name.clone(), one)).collect();
            }
            assert!(
                Instant::now() < limit,
                "{memory} bytes and {blocks} blocks of namespaces, {puts} puts: {stats:?}"
            );
        }
        assert!(Instant::now() < limit, "no leader answers");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn create_all(client: &Client) {
    for tenant in 0..TENANTS {
        let settings = settings(tenant);
        let created = client.create_namespace(namespace(tenant), &settings).await;
        assert!(created.unwrap());
    }
}

/// The usage and the settings of every namespace, without fields that change at rest.
fn compared(all: &BTreeMap<String, NamespaceInfo>) -> Vec<(&str, u64, u64, NamespaceSettings)> {
    all.iter()
        .map(|(name, one)| (name.as_str(), one.memory.0, one.blocks, one.settings))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_and_accounts_are_exact_after_the_master_was_killed() {
    let options = cluster::Options {
        nodes: 2,
        segment: SEGMENT.into(),
        ..cluster::Options::default()
    };
    let mut cluster = Cluster::start(options.master(&["--lease-ttl", LEASE_TTL])).unwrap();
    let client = cluster.client().await.unwrap();
    create_all(&client).await;
    let of_pool = cluster.client_options();
    assert_quotas_are_reached(&write_all(&of_pool, 0).await);
    let before = at_rest(&client).await;
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(2).unwrap();
    let after = at_rest(&client).await;
    assert_eq!(compared(&before), compared(&after));
    // The master is killed once more while all namespaces write.
    let writing = {
        let of_pool = of_pool.clone();
        tokio::spawn(async move { write_all(&of_pool, 1 << 20).await })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    writing.await.unwrap();
    at_rest(&client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_and_accounts_are_exact_after_a_standby_took_over() {
    if !masters::available("quotas_and_accounts_are_exact_after_a_standby_took_over") {
        return;
    }
    let options = masters::Options {
        segment: SEGMENT.into(),
        ..masters::Options::default()
    };
    let mut pool = Pool::start(options.master(&["--lease-ttl", LEASE_TTL])).unwrap();
    let client = pool.client().await.unwrap();
    create_all(&client).await;
    let of_pool = pool.client_options();
    let writing = {
        let of_pool = of_pool.clone();
        tokio::spawn(async move { write_all(&of_pool, 0).await })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    let leader = pool.wait_settled().unwrap();
    pool.kill(leader.index).unwrap();
    pool.wait_leader(leader.epoch).unwrap();
    assert_quotas_are_reached(&writing.await.unwrap());
    pool.restart(leader.index).unwrap();
    let leader = pool.wait_settled().unwrap();
    pool.wait_live(2).unwrap();
    let before = at_rest(&client).await;
    pool.kill(leader.index).unwrap();
    pool.wait_leader(leader.epoch).unwrap();
    pool.wait_live(2).unwrap();
    let after = at_rest(&client).await;
    assert_eq!(compared(&before), compared(&after));
}
