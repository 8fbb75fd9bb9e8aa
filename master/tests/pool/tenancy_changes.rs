//! Namespaces are created, changed and deleted, even if callers leave. Also rates, and the demands
//! of batches.

use crate::support::tenants::*;
use crate::support::{item, join, pool};
use kvpool_master::Config;
use kvpool_master::accounts::Balance;
use kvpool_master::pool::{NamespaceRefused, ReserveOptions};
use kvpool_types::{Code, Key, Length, Namespace, NamespaceSettings, Setting};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Long enough for a call to reach the store, whose gate is shut.
const AT_THE_GATE: Duration = Duration::from_millis(200);

fn named(name: &str) -> Namespace {
    Namespace {
        name: name.into(),
        ..Namespace::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_whose_caller_leaves_goes_on_to_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), patient()).await;
    join(&pool, "only", 1, 32 * MIB).await;
    let gone = Tenant::new(&pool, "gone", &[]).await;
    gone.fill(0..10).await;
    let gate = store.gate.lock().await;
    let left = tokio::time::timeout(AT_THE_GATE, pool.delete_namespace("gone", true)).await;
    assert!(left.is_err(), "{left:?}");
    drop(gate);
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let none = NamespaceSettings::default();
        match pool.create_namespace(named("gone"), none).await {
            Ok(is_new) => break assert!(is_new),
            Err(error) => assert_eq!(error, NamespaceRefused::Code(Code::InProgress)),
        }
        assert!(Instant::now() < deadline, "the namespace stays closed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let again = Tenant::of(&pool, "gone");
    assert!(again.id > gone.id);
    again.put(1).await;
    check_sums(&pool).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_whose_caller_leaves_hold_for_blocks_that_were_there() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), patient()).await;
    join(&pool, "only", 1, 32 * MIB).await;
    let early = Tenant::new(&pool, "early", &[]).await;
    let loud = Tenant::new(&pool, "loud", &[]).await;
    early.fill(0..100).await;
    let gate = store.gate.lock().await;
    let change = pool.change_namespace("early", |settings| {
        settings.set(Setting::Guaranteed, Some(100 * BLOCK));
    });
    let left = tokio::time::timeout(AT_THE_GATE, change).await;
    assert!(left.is_err(), "{left:?}");
    drop(gate);
    // The call waits for the change before it.
    let changed = pool.change_namespace("early", |settings| {
        settings.set(Setting::Priority, Some(5));
    });
    let settings = changed.await.unwrap();
    assert_eq!(settings.get(Setting::Guaranteed), Some(100 * BLOCK));
    loud.fill(0..700).await;
    assert_eq!(early.balance().blocks, 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_whose_caller_leaves_keeps_its_number() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), patient()).await;
    let none = NamespaceSettings::default();
    let gate = store.gate.lock().await;
    let creation = pool.create_namespace(named("first"), none);
    let left = tokio::time::timeout(AT_THE_GATE, creation).await;
    assert!(left.is_err(), "{left:?}");
    let second = {
        let pool = Arc::clone(&pool);
        tokio::spawn(async move { pool.create_namespace(named("second"), none).await })
    };
    tokio::time::sleep(AT_THE_GATE).await;
    drop(gate);
    assert_eq!(second.await.unwrap(), Ok(true));
    let [first, second] = ["first", "second"].map(|name| pool.namespace(name));
    assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
    assert_ne!(first, second);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_a_known_namespace_connects_while_others_are_changed_and_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), patient()).await;
    join(&pool, "only", 1, 32 * MIB).await;
    let gone = Tenant::new(&pool, "gone", &[]).await;
    gone.fill(0..10).await;
    Tenant::new(&pool, "changed", &[]).await;
    Tenant::new(&pool, "kept", &[]).await;
    let gate = store.gate.lock().await;
    let of_pool = Arc::clone(&pool);
    let deletion = tokio::spawn(async move { of_pool.delete_namespace("gone", true).await });
    let of_pool = Arc::clone(&pool);
    let change = tokio::spawn(async move {
        let cheap = |settings: &mut NamespaceSettings| settings.set(Setting::Priority, Some(1));
        of_pool.change_namespace("changed", cheap).await
    });
    let of_pool = Arc::clone(&pool);
    let none = NamespaceSettings::default();
    let creation = tokio::spawn(async move { of_pool.create_namespace(named("new"), none).await });
    tokio::time::sleep(AT_THE_GATE).await;
    let connects = pool.create_namespace(named("kept"), none);
    let connects = tokio::time::timeout(Duration::from_secs(2), connects).await;
    assert_eq!(connects.expect("it waits for the store"), Ok(false));
    assert!(!deletion.is_finished() && !change.is_finished());
    drop(gate);
    assert_eq!(deletion.await.unwrap(), Ok(10));
    assert!(change.await.unwrap().is_ok());
    assert_eq!(creation.await.unwrap(), Ok(true));
}

/// A batch of a namespace at its quota makes only the room that its quota takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_demands_no_more_of_others_than_its_quota_takes() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        eviction_ratio: 0.0,
        ..patient()
    };
    let (pool, _store) = pool(directory.path(), config).await;
    join(&pool, "only", 1, 64 * MIB).await;
    let other = Tenant::new(&pool, "other", &[]).await;
    let bytes = Tenant::new(&pool, "bytes", &[(Setting::MemoryHard, 10 * BLOCK)]).await;
    let blocks = Tenant::new(&pool, "blocks", &[(Setting::BlocksHard, 10)]).await;
    other.fill(0..1200).await;
    for bounded in [bytes, blocks] {
        let before = other.balance().blocks;
        let keys: Vec<Key> = (0..400).map(key).collect();
        let refs: Vec<_> = keys.iter().map(Key::as_ref).collect();
        let options = ReserveOptions {
            timeout: Duration::from_secs(5),
            ..ReserveOptions::default()
        };
        let lengths = vec![Length(BLOCK); keys.len()];
        let granted = pool
            .reserve(bounded.id, &refs[..], &lengths, &options)
            .await;
        let granted = granted.iter().filter(|outcome| outcome.is_ok()).count();
        assert!((1..=10).contains(&granted), "{granted} grants");
        tokio::time::sleep(Duration::from_millis(200)).await;
        let left = before - other.balance().blocks;
        assert!(left <= 12, "{}: {left} blocks left", bounded.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_is_changed_shown_and_deleted_and_stays_so_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let (first, store) = pool(directory.path(), patient()).await;
    join(&first, "only", 1, 32 * MIB).await;
    let kept = Tenant::new(&first, "kept", &[(Setting::Priority, 3)]).await;
    let gone = Tenant::new(&first, "gone", &[(Setting::Priority, 4)]).await;
    kept.fill(0..10).await;
    gone.fill(0..10).await;
    (0..10).for_each(|n| gone.lease(n));

    let bad = first.change_namespace("kept", |settings| settings.set(Setting::Priority, Some(10)));
    assert!(matches!(bad.await, Err(NamespaceRefused::Settings(_))));
    let unknown = first.change_namespace("none", |_| {}).await;
    assert_eq!(unknown, Err(NamespaceRefused::Code(Code::UnknownNamespace)));
    let shown = first.namespace_view("kept").unwrap().known.settings;
    assert_eq!(
        shown,
        set(&[(Setting::Priority, 3)]),
        "a refused change changes nothing"
    );
    let changed = first.change_namespace("kept", |settings| {
        settings.set(Setting::Priority, None);
        settings.set(Setting::BlocksHard, Some(50));
    });
    assert_eq!(changed.await, Ok(set(&[(Setting::BlocksHard, 50)])));

    assert_eq!(
        first.delete_namespace("default", true).await,
        Err(Code::InvalidArgument)
    );
    assert_eq!(
        first.delete_namespace("none", true).await,
        Err(Code::UnknownNamespace)
    );
    assert_eq!(
        first.delete_namespace("gone", false).await,
        Err(Code::NamespaceInUse)
    );
    assert!(
        (0..10).all(|n| gone.has(n)),
        "a refused deletion changes nothing"
    );
    gone.put(11).await;
    // An open put ends, and its writer cannot bring the namespace back.
    let keys = [key(12)];
    let refs: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let options = ReserveOptions::default();
    let open = first.reserve(gone.id, &refs[..], &[Length(BLOCK)], &options);
    let open = open.await.into_iter().next().unwrap().unwrap();
    assert_eq!(first.delete_namespace("gone", true).await, Ok(11));
    let late = first
        .commit(gone.id, vec![item(&keys[0], BLOCK, open)])
        .await;
    assert_eq!(late, [Code::UnknownNamespace]);
    let late = gone.try_put(13, BLOCK, Duration::from_millis(100)).await;
    assert_eq!(late, Err(Code::UnknownNamespace));
    assert_eq!(first.namespace("gone"), Err(Code::UnknownNamespace));
    assert!((0..10).all(|n| kept.has(n)), "only its own blocks leave");
    check_sums(&first).await;
    let (gone_id, kept_id) = (gone.id, kept.id);
    drop((kept, gone));
    stop(first, store).await;

    let (second, _store) = pool(directory.path(), patient()).await;
    assert_eq!(second.namespace("gone"), Err(Code::UnknownNamespace));
    assert_eq!(second.namespace("kept"), Ok(kept_id));
    let shown = second.namespace_view("kept").unwrap();
    assert_eq!(shown.known.settings, set(&[(Setting::BlocksHard, 50)]));
    assert_eq!(shown.balance.blocks, 10);
    let again = Tenant::new(&second, "gone", &[]).await;
    assert!(again.id > gone_id, "an id is not used again");
    assert_eq!(again.balance(), Balance::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_namespace_at_its_rate_is_refused_with_a_hint_and_no_other_is() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), patient()).await;
    join(&pool, "only", 1, 32 * MIB).await;
    let calls = Tenant::new(&pool, "calls", &[(Setting::Requests, 10)]).await;
    let bytes = Tenant::new(&pool, "bytes", &[(Setting::Bytes, MIB)]).await;
    let other = Tenant::new(&pool, "other", &[]).await;
    // The rate is so low that the test makes no further call.
    let taken = (0..1000).take_while(|_| pool.admit(calls.id, false).is_ok());
    let taken = taken.count();
    assert!((10..20).contains(&taken), "{taken} calls at once");
    let (code, wait) = pool.admit(calls.id, true).unwrap_err();
    assert_eq!(code, Code::RequestRate);
    assert!(wait <= Duration::from_millis(101), "{wait:?}");
    // A large call is served once, and is then paid for.
    assert_eq!(pool.admit(bytes.id, true), Ok(()));
    pool.moved(bytes.id, || 11 * MIB);
    let (code, wait) = pool.admit(bytes.id, true).unwrap_err();
    assert_eq!(code, Code::ByteRate);
    assert!(
        wait > Duration::from_secs(5) && wait < Duration::from_secs(11),
        "{wait:?}"
    );
    assert_eq!(
        pool.admit(bytes.id, false),
        Ok(()),
        "a call that moves nothing"
    );
    assert!((0..1000).all(|_| pool.admit(other.id, true).is_ok()));
    tokio::time::sleep(Duration::from_millis(250)).await;
    assert_eq!(pool.admit(calls.id, false), Ok(()), "the hint was right");
    let cleared = pool.change_namespace("bytes", |settings| settings.set(Setting::Bytes, None));
    cleared.await.unwrap();
    assert_eq!(pool.admit(bytes.id, true), Ok(()));
}
