//! Leases end with what they were taken for.

use super::{get_one, key, put_twice};
use crate::fake::{Mode, Pool, pool, pool_with};
use crate::{GetBlock, GetOptions, GetOutcome, Leasing, Region, ViewOptions};
use kvpool_types::{Code, Length, Offset};
use std::time::{Duration, Instant};

/// Waits until the leases have so many holders together: releases are sent a moment later.
async fn settles_at(pool: &Pool, holders: i64) {
    let begun = Instant::now();
    loop {
        let now = pool.master.state().all_holders();
        if now == holders {
            return;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{now} holders, where {holders} should be left"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_gets_lease_ends_with_the_get_and_its_location_stays_known() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    for _ in 0..50 {
        let (outcome, bytes) = get_one(&pool, "a", 5).await;
        assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
        assert_eq!(bytes, b"bytes");
    }
    settles_at(&pool, 0).await;
    // Reads at a known location hold nothing, and so give nothing back.
    assert_eq!(pool.master.calls("lookup"), 1);
    assert_eq!(pool.master.calls("release"), 1);
    // The release says which block it means.
    let version = pool.master.state().blocks["a"].version;
    assert_eq!(pool.master.state().released, [("a".to_owned(), version)]);
}

#[tokio::test]
async fn every_way_of_getting_ends_its_lease_once() {
    let pool = pool_with(|options| options.location_cache = 0).await;
    put_twice(&pool, "a", b"bytes").await;
    let memory = Region::allocate(Length(16));
    // One key named twice in a batch is leased once.
    let twice = (0..2).map(|n| {
        let part = memory.slice(Offset(n * 8), Length(8)).unwrap();
        GetBlock::new(key("a"), part)
    });
    pool.client
        .batch_get(twice.collect(), &GetOptions::default())
        .await;
    settles_at(&pool, 0).await;
    assert_eq!(pool.client.get(&key("a")).await.unwrap().unwrap(), b"bytes");
    settles_at(&pool, 0).await;
    // Too small a buffer, a range, a view that cannot be had, and a get that is given up.
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
    settles_at(&pool, 0).await;
}

#[tokio::test]
async fn a_lease_renewed_during_a_long_read_is_ended_by_its_last_token() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    pool.master.state().lease_ttl_ms = 1000;
    pool.nodes.set(1, Mode::Slow(Duration::from_millis(800)));
    pool.nodes.set(2, Mode::Slow(Duration::from_millis(800)));
    let (outcome, _) = get_one(&pool, "a", 5).await;
    assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
    assert!(pool.master.calls("renew") > 0);
    settles_at(&pool, 0).await;
}

#[tokio::test]
async fn a_dropped_lease_ends_for_a_key_when_the_client_has_read_it() {
    let pool = pool().await;
    for name in ["a", "b"] {
        put_twice(&pool, name, b"bytes").await;
    }
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
    // A lease that the caller keeps is the caller's to end.
    let kept = pool
        .client
        .exist(&[key("a")], Leasing::Lease)
        .await
        .unwrap();
    assert_eq!(pool.master.state().all_holders(), 5);
    get_one(&pool, "a", 5).await.0.unwrap();
    settles_at(&pool, 3).await;
    assert_eq!(pool.master.state().holders["a"], 1);
    get_one(&pool, "b", 5).await.0.unwrap();
    settles_at(&pool, 1).await;
    kept.lease.release().await.unwrap();
    settles_at(&pool, 0).await;
}

#[tokio::test]
async fn a_known_location_that_was_freed_is_asked_for_again_and_no_fault_is_reported() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    get_one(&pool, "a", 5).await.0.unwrap();
    // As after an eviction, and another block's bytes in its place.
    pool.master.state().blocks.clear();
    pool.nodes.set(1, Mode::Lies);
    pool.nodes.set(2, Mode::Lies);
    let (outcome, _) = get_one(&pool, "a", 5).await;
    assert_eq!(outcome, Ok(GetOutcome::Miss));
    assert_eq!(pool.client.counters().checksum_mismatches, 0);
    assert!(pool.master.state().reports.is_empty());
}

#[tokio::test]
async fn a_lookup_does_not_wait_for_the_answer_to_an_unreachable_report() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    pool.master.state().report_hangs = true;
    pool.nodes.set(1, Mode::Fails(Code::Unreachable));
    pool.nodes.set(2, Mode::Fails(Code::Unreachable));
    pool.master.state().hides = false;
    let nodes = pool.nodes.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(50)).await;
        nodes.set(2, Mode::Well);
    });
    let begun = Instant::now();
    let (outcome, _) = get_one(&pool, "a", 5).await;
    assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
    // Half of the get's two seconds is what it would wait.
    assert!(
        begun.elapsed() < Duration::from_millis(900),
        "{:?}",
        begun.elapsed()
    );
}
