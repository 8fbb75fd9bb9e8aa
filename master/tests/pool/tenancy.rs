//! Namespaces as tenants: exact accounts, quotas, guaranteed shares, priorities, records.

use crate::support::tenants::*;
use crate::support::{join, pool};
use kvpool_master::Config;
use kvpool_master::placement::PlacementHints;
use kvpool_master::pool::{Holder, ReserveOptions};
use kvpool_types::{Code, Incarnation, Key, Length, Setting};
use std::sync::Arc;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sums_over_namespaces_are_what_the_pool_holds_also_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let (first, store) = pool(directory.path(), patient()).await;
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3)] {
        join(&first, name, incarnation, 16 * MIB).await;
    }
    let tenants = [
        Tenant::new(&first, "one", &[]).await,
        Tenant::new(&first, "two", &[(Setting::MemoryHard, 6 * MIB)]).await,
        Tenant::of(&first, "default"),
    ];
    let twice = ReserveOptions {
        hints: PlacementHints {
            replicas: 2,
            ..PlacementHints::default()
        },
        timeout: Duration::from_secs(20),
        ..ReserveOptions::default()
    };
    // Odd lengths, two replicas, five times the pool: blocks are replaced, removed and evicted.
    for n in 0..1200 {
        for tenant in &tenants {
            let bytes = BLOCK + n % 777;
            let options = match n % 3 {
                0 => twice.clone(),
                _ => ReserveOptions {
                    upsert: n % 5 == 0,
                    ..ReserveOptions {
                        hints: PlacementHints::default(),
                        ..twice.clone()
                    }
                },
            };
            let put = tenant.try_put_with(n % 900, bytes, &options).await;
            assert!(matches!(put, Ok(()) | Err(Code::Exists)), "{put:?}");
            if n % 7 == 0 {
                let gone = [key(n / 2)];
                let keys: Vec<_> = gone.iter().map(Key::as_ref).collect();
                first.remove(tenant.id, &keys, true).await.unwrap();
            }
        }
        if n % 100 == 0 {
            check_sums(&first).await;
        }
    }
    // A put that its writer abandons.
    let keys = [key(77_777)];
    let refs: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let open = first
        .reserve(tenants[0].id, &refs[..], &[Length(100)], &twice)
        .await;
    let version = open[0].as_ref().unwrap().version;
    let balance = tenants[0].balance();
    assert_eq!((balance.puts, balance.reserved), (1, 2 * 128));
    assert_eq!(first.balance(), first.counted_balance());
    assert_eq!(
        first.revoke(tenants[0].id, &refs[..], &[version]),
        [Code::Ok]
    );
    // A node is gone for good, with its blocks.
    first.drop_node(&first.members.get(&"c".into_name()).unwrap());
    check_sums(&first).await;
    let before = balances(&first);
    assert!(
        before.values().all(|balance| balance.blocks > 0),
        "{before:?}"
    );
    drop(tenants);
    stop(first, store).await;
    let (second, _store) = pool(directory.path(), patient()).await;
    let mut after = balances(&second);
    for (name, balance) in &before {
        let now = after.remove(name).unwrap();
        assert_eq!(
            (now.blocks, now.resident),
            (balance.blocks, balance.resident),
            "{name}"
        );
        assert_eq!(now.memory, now.resident, "{name}: no put is open");
    }
    assert_eq!(second.balance(), second.counted_balance());
}

trait IntoName {
    fn into_name(self) -> kvpool_types::NodeName;
}

impl IntoName for &str {
    fn into_name(self) -> kvpool_types::NodeName {
        kvpool_types::NodeName(self.to_owned())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hard_quota_is_never_passed_and_its_puts_evict_their_own_blocks_only() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), patient()).await;
    join(&pool, "only", 1, 64 * MIB).await;
    let hard = 4 * MIB;
    let bounded = Tenant::new(&pool, "bounded", &[(Setting::MemoryHard, hard)]).await;
    let counted = Tenant::new(&pool, "counted", &[(Setting::BlocksHard, 10)]).await;
    let other = Tenant::new(&pool, "other", &[]).await;
    other.fill(0..100).await;
    for n in 0..5 * hard / BLOCK {
        bounded.put(n).await;
        counted.put(n).await;
        let used = bounded.balance().memory;
        assert!(used <= hard, "{used} of {hard} bytes");
        assert!(counted.balance().blocks <= 10);
    }
    assert_eq!(bounded.balance().memory, hard, "the quota is used");
    assert_eq!(counted.balance().blocks, 10);
    assert!(
        (0..100).all(|n| other.has(n)),
        "no block of another namespace left"
    );
    let last = 5 * hard / BLOCK - 1;
    assert!(bounded.has(last) && !bounded.has(0), "the oldest left");
    check_sums(&pool).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_at_a_quota_whose_blocks_are_leased_waits_and_fails_with_the_quotas_code() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        lease_ttl: Duration::from_secs(3600),
        ..patient()
    };
    let (pool, _store) = pool(directory.path(), config).await;
    join(&pool, "only", 1, 64 * MIB).await;
    let bytes = Tenant::new(&pool, "bytes", &[(Setting::MemoryHard, 8 * BLOCK)]).await;
    let blocks = Tenant::new(&pool, "blocks", &[(Setting::BlocksHard, 8)]).await;
    let other = Tenant::new(&pool, "other", &[]).await;
    for tenant in [&bytes, &blocks] {
        tenant.fill(0..8).await;
        (0..8).for_each(|n| tenant.lease(n));
    }
    let wait = Duration::from_millis(300);
    let begun = std::time::Instant::now();
    assert_eq!(bytes.try_put(9, BLOCK, wait).await, Err(Code::MemoryQuota));
    assert!(begun.elapsed() >= wait, "it waits for its blocks");
    assert_eq!(blocks.try_put(9, BLOCK, wait).await, Err(Code::BlocksQuota));
    // No quota ever takes such a block, so the put does not wait.
    let begun = std::time::Instant::now();
    let put = bytes.try_put(10, 9 * BLOCK, Duration::from_secs(60)).await;
    assert_eq!(put, Err(Code::OverQuota));
    let quota = Some((Setting::MemoryHard, 8 * BLOCK));
    assert_eq!(pool.refusing_quota(bytes.id, Code::OverQuota), quota);
    assert_eq!(pool.refusing_quota(bytes.id, Code::MemoryQuota), quota);
    assert_eq!(pool.refusing_quota(bytes.id, Code::Full), None);
    let quota = Some((Setting::BlocksHard, 8));
    assert_eq!(pool.refusing_quota(blocks.id, Code::BlocksQuota), quota);
    let none = Tenant::new(&pool, "none", &[(Setting::BlocksHard, 0)]).await;
    let put = none.try_put(1, BLOCK, Duration::from_secs(60)).await;
    assert_eq!(put, Err(Code::OverQuota));
    let quota = Some((Setting::BlocksHard, 0));
    assert_eq!(pool.refusing_quota(none.id, Code::OverQuota), quota);
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert!(
        (0..8).all(|n| bytes.has(n) && blocks.has(n)),
        "a leased block left"
    );
    // Puts that wait for their quota delay no other put.
    let waiting = {
        let bytes = bytes.clone();
        tokio::spawn(async move { bytes.try_put(11, BLOCK, Duration::from_secs(20)).await })
    };
    tokio::time::sleep(Duration::from_millis(50)).await;
    // A pass locks out all other puts. While the quota does not change, there are few passes.
    let passes = || pool.counters()["put_passes_total"];
    let before = passes();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let made = passes() - before;
    assert!(made <= 16, "{made} passes in two seconds");
    for n in 0..50 {
        other
            .try_put(n, BLOCK, Duration::from_millis(500))
            .await
            .unwrap();
    }
    // A raised quota lets the waiting put continue.
    let raised = pool.change_namespace("bytes", |settings| {
        settings.set(Setting::MemoryHard, Some(9 * BLOCK));
    });
    raised.await.unwrap();
    assert_eq!(waiting.await.unwrap(), Ok(()));
    check_sums(&pool).await;
}

/// The end of a lease wakes no put.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_at_a_quota_goes_on_soon_after_a_block_may_leave() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        lease_ttl: Duration::from_secs(3600),
        ..patient()
    };
    let (pool, _store) = pool(directory.path(), config).await;
    join(&pool, "only", 1, 64 * MIB).await;
    let tenant = Tenant::new(&pool, "one", &[(Setting::MemoryHard, 8 * BLOCK)]).await;
    tenant.fill(0..8).await;
    let lease = |n| {
        let leased = pool.lookup(tenant.id, &[key(n).as_ref()][..], true);
        leased.token
    };
    let mut tokens: Vec<_> = (0..8).map(lease).collect();
    let mut waits = Vec::new();
    for n in 8..20 {
        let waiting = tokio::spawn({
            let tenant = tenant.clone();
            async move { tenant.put(n).await }
        });
        tokio::time::sleep(Duration::from_millis(10)).await;
        let token = tokens.remove(0);
        pool.release(tenant.id, &[key(n - 8).as_ref()][..], |_| {
            Holder::of_any(token)
        });
        let released = std::time::Instant::now();
        waiting.await.unwrap();
        waits.push(released.elapsed());
        tokens.push(lease(n));
    }
    let shortest = waits.iter().min().unwrap();
    assert!(*shortest < Duration::from_millis(120), "{waits:?}");
}

/// Each share alone is below the pool's size.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guaranteed_shares_beyond_the_pool_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), patient()).await;
    Tenant::new(&pool, "one", &[(Setting::Guaranteed, 20 * MIB)]).await;
    assert_eq!(pool.guaranteed(), (20 * MIB, 0), "there is no node");
    join(&pool, "only", 1, 32 * MIB).await;
    assert_eq!(pool.guaranteed(), (20 * MIB, 0));
    Tenant::new(&pool, "two", &[(Setting::Guaranteed, 20 * MIB)]).await;
    let (shares, excess) = pool.guaranteed();
    assert_eq!(shares, 40 * MIB);
    assert!(excess > 8 * MIB, "{excess}: the high watermark counts");
    assert_eq!(pool.counters()["guaranteed_excess_bytes"], excess);
    pool.delete_namespace("two", true).await.unwrap();
    assert_eq!(pool.guaranteed(), (20 * MIB, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eviction_for_others_never_takes_a_namespace_below_its_guaranteed_share() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), patient()).await;
    join(&pool, "only", 1, 32 * MIB).await;
    let share = 100 * BLOCK;
    let kept = Tenant::new(&pool, "kept", &[(Setting::Guaranteed, share)]).await;
    let loud = Tenant::new(&pool, "loud", &[]).await;
    // These blocks are the oldest of the pool, and twice the share.
    kept.fill(0..200).await;
    for n in 0..1500 {
        loud.put(n).await;
        let resident = kept.balance().resident;
        assert!(resident >= share, "{resident} of {share} bytes are left");
    }
    assert_eq!(kept.balance().resident, share, "the rest served others");
    assert!(
        (100..200).all(|n| kept.has(n)),
        "the newest of its blocks stay"
    );
    // A block that needs contiguous room takes no block of the share either.
    loud.try_put(5000, 8 * MIB, Duration::from_secs(20))
        .await
        .unwrap();
    assert_eq!(kept.balance().resident, share);
    // The namespace's own puts may evict its blocks: they are its share.
    pool.change_namespace("kept", |settings| {
        settings.set(Setting::MemoryHard, Some(share));
    })
    .await
    .unwrap();
    kept.fill(1000..1100).await;
    assert!((1000..1100).all(|n| kept.has(n)));
    check_sums(&pool).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_over_a_soft_quota_leave_first_and_then_the_lowest_priority() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), patient()).await;
    join(&pool, "only", 1, 32 * MIB).await;
    let dear = Tenant::new(&pool, "dear", &[(Setting::Priority, 9)]).await;
    let plain = Tenant::new(&pool, "plain", &[]).await;
    let cheap = Tenant::new(&pool, "cheap", &[(Setting::Priority, 0)]).await;
    let soft = Tenant::new(
        &pool,
        "soft",
        &[(Setting::MemorySoft, 20 * BLOCK), (Setting::Priority, 9)],
    )
    .await;
    dear.fill(0..100).await;
    plain.fill(0..100).await;
    cheap.fill(0..100).await;
    soft.fill(0..100).await;
    let left = |tenant: &Tenant| tenant.balance().blocks;
    let mut n = 1000;
    while left(&soft) > 20 {
        plain.put(n).await;
        n += 1;
        assert!(n < 3000);
        if left(&soft) > 20 {
            assert_eq!(
                (left(&dear), left(&cheap)),
                (100, 100),
                "others before what is over"
            );
        }
    }
    while left(&cheap) > 0 {
        plain.put(n).await;
        n += 1;
        assert!(n < 3000);
        if left(&cheap) > 0 {
            assert_eq!(
                (left(&dear), left(&soft)),
                (100, 20),
                "a higher class before a lower one"
            );
        }
    }
    for _ in 0..300 {
        plain.put(n).await;
        n += 1;
    }
    assert_eq!(
        (left(&dear), left(&soft)),
        (100, 20),
        "its own class serves its puts"
    );
    check_sums(&pool).await;
}

/// The blocks are in the common order when the namespace gets its first settings.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_hold_for_blocks_that_were_there_before_them() {
    let directory = tempfile::tempdir().unwrap();
    let (first, store) = pool(directory.path(), patient()).await;
    join(&first, "only", 1, 32 * MIB).await;
    let early = Tenant::new(&first, "early", &[]).await;
    let loud = Tenant::new(&first, "loud", &[]).await;
    early.fill(0..100).await;
    let changed = first.change_namespace("early", |settings| {
        settings.set(Setting::Guaranteed, Some(100 * BLOCK));
    });
    changed.await.unwrap();
    loud.fill(0..700).await;
    assert_eq!(early.balance().blocks, 100);
    drop((early, loud));
    stop(first, store).await;
    // The same holds after a restart, when leases of the term before protect every block for a
    // while.
    let (second, _store) = pool(directory.path(), patient()).await;
    let node = join(&second, "only", 1, 32 * MIB).await;
    assert_eq!(node.incarnation, Incarnation(1));
    let [early, loud] = ["early", "loud"].map(|name| Tenant::of(&second, name));
    loud.fill(1000..1700).await;
    assert_eq!(early.balance().blocks, 100);
    check_sums(&second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quota_that_is_lowered_is_reached_by_eviction() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), patient()).await;
    join(&pool, "only", 1, 32 * MIB).await;
    let tenant = Tenant::new(&pool, "tenant", &[]).await;
    tenant.fill(0..100).await;
    let lowered = pool.change_namespace("tenant", |settings| {
        settings.set(Setting::MemoryHard, Some(30 * BLOCK));
    });
    lowered.await.unwrap();
    for _ in 0..500 {
        if tenant.balance().memory <= 30 * BLOCK {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(tenant.balance().blocks, 30, "to the quota, and no further");
    assert!(tenant.has(99) && !tenant.has(0));
}

/// Ten namespaces with quotas write five times the pool. `KVPOOL_TENANCY_SECONDS` sets the least
/// duration. The first five reach their hard quotas; the others fill the pool.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_namespaces_with_quotas_write_five_times_the_pool() {
    const POOL: u64 = 64 * MIB;
    const SHARE: u64 = 2 * MIB;
    let hard_of = |number: u64| if number < 5 { 4 * MIB } else { 16 * MIB };
    let seconds = std::env::var("KVPOOL_TENANCY_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok()).unwrap_or(3);
    let directory = tempfile::tempdir().unwrap();
    let (first, store) = pool(directory.path(), patient()).await;
    join(&first, "a", 1, POOL / 2).await;
    join(&first, "b", 2, POOL / 2).await;
    let mut tenants = Vec::new();
    for number in 0..10 {
        let hard = hard_of(number);
        let quotas = [
            (Setting::MemoryHard, hard),
            (Setting::MemorySoft, hard / 2),
            (Setting::Guaranteed, SHARE),
            (Setting::Priority, number % 3),
        ];
        let tenant = Tenant::new(&first, &format!("t{number}"), &quotas).await;
        tenants.push((tenant, hard));
    }
    let begun = std::time::Instant::now();
    let writers = tenants.iter().cloned().map(|(tenant, hard)| {
        tokio::spawn(async move {
            let (mut written, mut n, mut was_full, mut most) = (0, 0, false, 0);
            while written < POOL / 2 || begun.elapsed().as_secs() < seconds {
                let bytes = BLOCK - n % 1000;
                let options = ReserveOptions {
                    timeout: Duration::from_secs(30),
                    ..ReserveOptions::default()
                };
                tenant.try_put_with(n, bytes, &options).await.unwrap();
                (written, n) = (written + bytes, n + 1);
                let balance = tenant.balance();
                assert!(balance.memory <= hard, "{} of {hard} bytes", balance.memory);
                most = most.max(balance.memory);
                // Only its own puts at its quota take blocks of its share, and that quota is higher.
                was_full |= balance.resident >= SHARE;
                assert!(!was_full || balance.resident >= SHARE, "{balance:?}");
            }
            (written, most)
        })
    });
    let (mut written, mut most) = (0, Vec::new());
    for writer in writers.collect::<Vec<_>>() {
        let (bytes, reached) = writer.await.unwrap();
        written += bytes;
        most.push(reached);
    }
    println!(
        "{written} bytes written to a pool of {POOL}, in {:?}; the most of each: {most:?}",
        begun.elapsed()
    );
    assert!(written >= 5 * POOL);
    for ((tenant, hard), most) in tenants.iter().zip(&most).take(5) {
        let name = &tenant.name;
        assert!(most + 2 * BLOCK > *hard, "{name} reached {most} of {hard}");
    }
    assert!(
        first.counters()["blocks_evicted_total"] > (written - POOL) / BLOCK / 2,
        "most blocks were evicted"
    );
    check_sums(&first).await;
    let before = balances(&first);
    drop(tenants);
    stop(first, store).await;
    let (second, _store) = pool(directory.path(), patient()).await;
    assert_eq!(second.balance(), second.counted_balance());
    for (name, now) in balances(&second) {
        assert_eq!(
            (now.blocks, now.memory),
            (before[&name].blocks, before[&name].memory),
            "{name}"
        );
    }
}

/// The leases of a dead node's blocks, and the node in the table, change no account.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_and_shares_hold_beside_a_silent_node() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        suspect_after: Duration::from_millis(300),
        drop_after: Duration::from_secs(1 << 21),
        ..patient()
    };
    let (pool, _store) = pool(directory.path(), config).await;
    let dead = join(&pool, "dead", 1, 16 * MIB).await;
    let live = join(&pool, "live", 2, 16 * MIB).await;
    let beating = {
        let (pool, live) = (Arc::clone(&pool), Arc::clone(&live));
        tokio::spawn(async move {
            loop {
                pool.heard(&live, Some(kvpool_master::membership::Reported::default()));
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
    };
    let kept = Tenant::new(&pool, "kept", &[(Setting::Guaranteed, 100 * BLOCK)]).await;
    let bounded = Tenant::new(&pool, "bounded", &[(Setting::MemoryHard, 50 * BLOCK)]).await;
    let loud = Tenant::new(&pool, "loud", &[]).await;
    kept.fill(0..100).await;
    bounded.fill(0..50).await;
    crate::support::media::until("the node's silence", || !dead.is_readable()).await;
    for n in 1000..1400 {
        loud.put(n).await;
        bounded.put(n).await;
        assert!(bounded.balance().memory <= 50 * BLOCK);
        assert!(kept.balance().resident >= 100 * BLOCK);
    }
    assert_eq!(
        kept.balance().blocks,
        100,
        "the silent node's blocks count, and stay"
    );
    check_sums(&pool).await;
    pool.drop_node(&dead);
    for _ in 0..500 {
        if pool.balance() == pool.counted_balance() && kept.balance().blocks < 100 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(
        pool.balance(),
        pool.counted_balance(),
        "its charges ended with it"
    );
    beating.abort();
}
