//! Leases end with the operation for which they were taken.

use super::{assert_soon, get_one, key, put_twice};
use crate::testing::{Fault, Mode, Pool, pool, pool_with};
use crate::{GetBlock, GetOptions, GetOutcome, Leasing, Region, Remove, ViewOptions};
use kvpool_proto::{ExistReply, Lease, LookupReply, MatchPrefixReply, ReleaseRequest};
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::unpack;
use kvpool_types::{Code, Length, Offset};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Counts the leases that pass between master and client.
#[derive(Clone, Default)]
struct Leases(Arc<Mutex<Passed>>);

#[derive(Default)]
struct Passed {
    /// How many leases the client holds.
    held: i64,
    /// The keys and versions that releases named.
    released: Vec<(String, u64)>,
}

impl Leases {
    /// Starts to count.
    fn of(pool: &Pool) -> Self {
        let leases = Self::default();
        let take = |leases: &Self, lease: Option<Lease>, blocks: u32| {
            assert!(lease.unwrap().ttl_ms > 0);
            leases.0.lock().held += i64::from(blocks);
        };
        let of = leases.clone();
        pool.master
            .on_answer("lookup", move |reply: &mut LookupReply| {
                let present = reply.locations.iter().filter(|found| found.code == 0);
                take(&of, reply.lease, u32::try_from(present.count()).unwrap());
            });
        let of = leases.clone();
        pool.master
            .on_answer("exist", move |reply: &mut ExistReply| {
                let present = reply.present.iter().map(|byte| byte.count_ones()).sum();
                take(&of, reply.lease, present);
            });
        let of = leases.clone();
        let matched = move |reply: &mut MatchPrefixReply| take(&of, reply.lease, reply.blocks);
        pool.master.on_answer("match_prefix", matched);
        let of = leases.clone();
        pool.master
            .on_request("release", move |request: &mut ReleaseRequest| {
                let keys = unpack(&request.keys).map(|key| key.unwrap().to_string());
                let named: Vec<_> = keys.zip(request.versions.clone()).collect();
                let mut passed = of.0.lock();
                passed.held -= i64::try_from(named.len()).unwrap();
                passed.released.extend(named);
            });
        leases
    }

    /// Waits until the client holds this many leases, since releases are sent a little later. For none, also
    /// checks that the master protects no block of `names`.
    async fn settle_at(&self, pool: &Pool, holders: i64, names: &[&str]) {
        let begun = Instant::now();
        loop {
            let held = self.0.lock().held;
            let is_free = |name: &&str| pool.master.described(name).unwrap().lease_left.is_zero();
            if held == holders && (holders > 0 || names.iter().all(is_free)) {
                return;
            }
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "{held} leases, where {holders} should be left"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// How often releases named each key.
    fn released(&self) -> HashMap<String, usize> {
        let mut counts = HashMap::new();
        for (key, _) in &self.0.lock().released {
            *counts.entry(key.clone()).or_default() += 1;
        }
        counts
    }
}

#[tokio::test]
async fn a_gets_lease_ends_with_the_get_and_its_location_stays_known() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    let leases = Leases::of(&pool);
    for _ in 0..50 {
        let (outcome, bytes) = get_one(&pool, "a", 5).await;
        assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
        assert_eq!(bytes, b"bytes");
    }
    leases.settle_at(&pool, 0, &["a"]).await;
    // Reads at a cached location hold no lease, and so release none.
    assert_eq!(pool.master.calls("lookup"), 1);
    assert_eq!(pool.master.calls("release"), 1);
    // The release names the version of the block.
    let version = pool.master.described("a").unwrap().version.0;
    assert_eq!(leases.0.lock().released, [("a".to_owned(), version)]);
}

#[tokio::test]
async fn every_way_of_getting_ends_its_lease_once() {
    let pool = pool_with(|_, options| options.location_cache = 0).await;
    put_twice(&pool, "a", b"bytes").await;
    let leases = Leases::of(&pool);
    let memory = Region::allocate(Length(16));
    // One key named twice in a batch is leased once.
    let twice = (0..2).map(|n| {
        let part = memory.slice(Offset(n * 8), Length(8)).unwrap();
        GetBlock::new(key("a"), part)
    });
    pool.client
        .batch_get(twice.collect(), &GetOptions::default())
        .await;
    leases.settle_at(&pool, 0, &["a"]).await;
    assert_eq!(pool.client.get(&key("a")).await.unwrap().unwrap(), b"bytes");
    leases.settle_at(&pool, 0, &["a"]).await;
    // A buffer that is too small, a range, a view that is not possible, and a get that is cancelled.
    let small = memory.slice(Offset(0), Length(1)).unwrap();
    let gets = vec![GetBlock::new(key("a"), small.clone())];
    pool.client.batch_get(gets, &GetOptions::default()).await;
    let (a, client) = (key("a"), &pool.client);
    let (options, view) = (GetOptions::default(), ViewOptions::default());
    drop(client.get_range(&a, Offset(0), vec![small], &options).await);
    drop(client.get_view(&a, &view).await);
    pool.nodes.set(1, Mode::Hangs);
    pool.nodes.set(2, Mode::Hangs);
    let given_up = client.get(&a);
    assert!(
        tokio::time::timeout(Duration::from_millis(100), given_up)
            .await
            .is_err()
    );
    leases.settle_at(&pool, 0, &["a"]).await;
}

#[tokio::test]
async fn a_part_of_a_lease_ends_alone() {
    let pool = pool().await;
    for name in ["a", "b"] {
        put_twice(&pool, name, b"bytes").await;
    }
    let leases = Leases::of(&pool);
    let names = ["a", "b", "a"].map(key);
    let existence = pool.client.exist(&names, Leasing::Lease).await;
    let mut lease = existence.unwrap().lease;
    let part = lease.split_off(&[key("a"), key("c")]);
    assert_eq!((lease.len(), part.len()), (1, 2));
    part.release().await.unwrap();
    leases.settle_at(&pool, 1, &[]).await;
    assert!(pool.master.described("a").unwrap().lease_left.is_zero());
    assert!(!pool.master.described("b").unwrap().lease_left.is_zero());
    assert_eq!(lease.renew().await.unwrap(), 0);
    lease.release().await.unwrap();
    leases.settle_at(&pool, 0, &["a", "b"]).await;
}

/// The next renewal reports this. Otherwise the holder would believe that the key is leased.
#[tokio::test]
async fn a_key_that_left_the_lease_in_a_renewal_that_failed_is_counted() {
    let pool = pool_with(|setup, options| {
        setup.config.max_batch_keys = 1;
        options.timeouts.control = Duration::from_millis(300);
    })
    .await;
    put_twice(&pool, "a", b"bytes").await;
    put_twice(&pool, "b", b"bytes").await;
    let keys = [key("a"), key("b")];
    let mut prefix = pool.client.match_prefix(&keys).await.unwrap();
    assert_eq!(prefix.lease.len(), 2);
    pool.client
        .remove(Remove::Keys(vec![key("a")]), true)
        .await
        .unwrap();
    let silent = std::iter::repeat_n(Some(Fault::AnswerHangs), 20);
    pool.master
        .next("renew", std::iter::once(None).chain(silent));
    assert!(prefix.lease.renew().await.is_err());
    pool.master.forget_next("renew");
    assert_eq!(prefix.lease.renew().await, Ok(1));
    assert_eq!(prefix.lease.renew().await, Ok(0));
    assert_eq!(prefix.lease.len(), 1);
}

/// The first message leases a block, and the second one is never answered.
#[tokio::test]
async fn a_lookup_that_fails_in_part_gives_back_what_it_leased() {
    let pool = pool_with(|setup, _| setup.config.max_batch_keys = 1).await;
    put_twice(&pool, "a", b"bytes").await;
    put_twice(&pool, "b", b"bytes").await;
    let leases = Leases::of(&pool);
    let silent = std::iter::repeat_n(Some(Fault::AnswerHangs), 20);
    let answers = std::iter::once(None).chain(silent);
    pool.master.next("lookup", answers);
    let memory = Region::allocate(Length(10));
    let gets = ["a", "b"].into_iter().zip([0, 5]);
    let part = |at| memory.slice(Offset(at), Length(5)).unwrap();
    let gets = gets.map(|(name, at)| GetBlock::new(key(name), part(at)));
    let options = GetOptions {
        timeout: Some(Duration::from_millis(500)),
        ..GetOptions::default()
    };
    let outcomes = pool.client.batch_get(gets.collect(), &options).await;
    assert!(outcomes[1].is_err(), "{outcomes:?}");
    let begun = Instant::now();
    while !leases.released().contains_key("a") {
        assert!(begun.elapsed() < Duration::from_secs(10), "it runs on");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_lease_renewed_during_a_long_read_is_ended_by_its_last_token() {
    let ttl = Duration::from_secs(1);
    let pool = pool_with(|setup, _| setup.config.lease_ttl = ttl).await;
    put_twice(&pool, "a", b"bytes").await;
    let leases = Leases::of(&pool);
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(800)));
    pool.nodes.set(2, Mode::Slow(Duration::from_millis(800)));
    let (outcome, _) = get_one(&pool, "a", 5).await;
    assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
    assert!(pool.master.calls("renew") > 0);
    leases.settle_at(&pool, 0, &["a"]).await;
}

#[tokio::test]
async fn a_dropped_lease_ends_for_a_key_when_the_client_has_read_it() {
    let pool = pool().await;
    for name in ["a", "b"] {
        put_twice(&pool, name, b"bytes").await;
    }
    let leases = Leases::of(&pool);
    assert_eq!(
        pool.client.is_exist(&[key("a"), key("b"), key("c")]).await,
        Ok(vec![true, true, false])
    );
    drop(
        pool.client
            .match_prefix(&[key("a"), key("b")])
            .await
            .unwrap(),
    );
    // The caller must end a lease that it keeps.
    let kept = pool
        .client
        .exist(&[key("a")], Leasing::Lease)
        .await
        .unwrap();
    assert_eq!(leases.0.lock().held, 5);
    get_one(&pool, "a", 5).await.0.unwrap();
    leases.settle_at(&pool, 3, &[]).await;
    // The three leases from before the get, and the get's own lease.
    assert_eq!(leases.released(), HashMap::from([("a".to_owned(), 3)]));
    assert!(!pool.master.described("a").unwrap().lease_left.is_zero());
    get_one(&pool, "b", 5).await.0.unwrap();
    leases.settle_at(&pool, 1, &[]).await;
    kept.lease.release().await.unwrap();
    leases.settle_at(&pool, 0, &["a", "b"]).await;
}

#[tokio::test]
async fn a_known_location_that_was_freed_is_asked_for_again_and_no_fault_is_reported() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    get_one(&pool, "a", 5).await.0.unwrap();
    // This is like an eviction after which another block is in the same extent.
    let (master, freed) = (pool.master.pool(), key("a"));
    let keys = [freed.as_ref()];
    master.remove(NamespaceId(0), &keys, true).await.unwrap();
    pool.nodes.set(1, Mode::Lies);
    pool.nodes.set(2, Mode::Lies);
    let (outcome, _) = get_one(&pool, "a", 5).await;
    assert_eq!(outcome, Ok(GetOutcome::Miss));
    assert_eq!(pool.client.counters().checksum_mismatches, 0);
    assert_eq!(pool.master.calls("report_replicas"), 0);
}

#[tokio::test]
async fn a_lookup_does_not_wait_for_the_answer_to_an_unreachable_report() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    pool.master.always("report_replicas", Fault::AnswerHangs);
    pool.nodes.set(1, Mode::Fails(Code::Unreachable));
    pool.nodes.set(2, Mode::Fails(Code::Unreachable));
    let nodes = pool.nodes.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(50)).await;
        nodes.set(2, Mode::Well);
    });
    let begun = Instant::now();
    let (outcome, _) = get_one(&pool, "a", 5).await;
    assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
    // Otherwise the get would wait for half of its two seconds.
    assert_soon(begun, Duration::from_millis(900));
}
