//! The client against real etcd processes.

use kvpool_etcd::kv::{Compare, Op, Range, Txn};
use kvpool_etcd::testing::{Etcd, EtcdCluster, Setup, SlowLink, StartError};
use kvpool_etcd::watch::{Event, WatchOptions};
use kvpool_etcd::{Client, Error, Options, discover};
use std::time::{Duration, Instant};

/// A started etcd, or `None` after having said that the test skips.
macro_rules! started {
    ($name:literal, $start:expr) => {
        match $start.await {
            Ok(started) => started,
            Err(error @ StartError::NotInstalled) => {
                eprintln!("SKIPPED {}: {error}", $name);
                return;
            }
            Err(error) => panic!("{error}"),
        }
    };
}

async fn write_until_done(client: &Client, key: &str, value: &str) {
    let limit = Instant::now() + Duration::from_secs(20);
    while let Err(error) = client.put(key.to_owned(), value.to_owned(), None).await {
        assert!(error.is_retryable() && Instant::now() < limit, "{error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_does_one_or_the_other() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_transaction_does_one_or_the_other",
        Etcd::start(directory.path())
    );
    let client = etcd.client().unwrap();
    let claim = |value: &'static str| {
        Txn::new()
            .when(Compare::absent("k"))
            .then(Op::put("k", value))
            .otherwise(Op::get(Range::key("k")))
    };
    let first = client.txn(claim("one")).await.unwrap();
    assert!(first.succeeded);
    let second = client.txn(claim("two")).await.unwrap();
    assert!(!second.succeeded);
    let found = second.get(0).unwrap();
    assert_eq!(found.value, "one");
    assert_eq!(found.created, first.revision);
    assert_eq!(client.delete(Range::prefix("k")).await.unwrap(), 1);
    assert_eq!(client.get("k").await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_not_renewed_takes_its_keys_along() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_lease_that_is_not_renewed_takes_its_keys_along",
        Etcd::start(directory.path())
    );
    let client = etcd.client().unwrap();
    let lease = client.lease_grant(Duration::from_secs(1)).await.unwrap();
    assert_eq!(lease.ttl, Duration::from_secs(1));
    client.put("k", "v", Some(lease.id)).await.unwrap();
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(
            client.lease_keep_alive(lease.id).await.unwrap(),
            Some(lease.ttl)
        );
    }
    assert!(client.get("k").await.unwrap().is_some());
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(client.get("k").await.unwrap(), None);
    assert_eq!(client.lease_keep_alive(lease.id).await.unwrap(), None);
    assert_eq!(client.lease_time_to_live(lease.id).await.unwrap(), None);
    assert_eq!(
        client.lease_revoke(lease.id).await,
        Err(Error::LeaseNotFound)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_tells_every_change_in_order_and_a_quiet_one_stays_open() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_watch_tells_every_change_in_order_and_a_quiet_one_stays_open",
        Etcd::start(directory.path())
    );
    let client = etcd.client().unwrap();
    let first = client.put("p/0", "0", None).await.unwrap();
    let mut watch = client
        .watch(&WatchOptions {
            keys: Range::prefix("p/"),
            start: first,
            puts_only: false,
        })
        .await
        .unwrap();
    // Longer than a silent watch may be.
    let quiet = tokio::time::timeout(Duration::from_secs(7), async {
        let Event::Put(kv) = watch.next().await.unwrap() else {
            panic!("a deletion came first");
        };
        assert_eq!((kv.key, kv.modified), ("p/0".into(), first));
        watch.next().await
    });
    assert!(quiet.await.is_err(), "something came out of nothing");
    for n in 1..200 {
        client
            .put(format!("p/{n}"), n.to_string(), None)
            .await
            .unwrap();
    }
    client.delete(Range::key("p/7")).await.unwrap();
    for n in 1..200 {
        let Event::Put(kv) = watch.next().await.unwrap() else {
            panic!("a deletion came first");
        };
        assert_eq!(kv.value, n.to_string());
    }
    let last = watch.next().await.unwrap();
    assert!(
        matches!(&last, Event::Delete(kv) if kv.key == "p/7"),
        "{last:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_of_the_caller_does_not_break_its_watch() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_pause_of_the_caller_does_not_break_its_watch",
        Etcd::start(directory.path())
    );
    let client = etcd.client().unwrap();
    let start = client.put("k", "0", None).await.unwrap();
    let options = WatchOptions {
        keys: Range::key("k"),
        start,
        puts_only: true,
    };
    let mut watch = client.watch(&options).await.unwrap();
    watch.next().await.unwrap();
    // Longer than etcd may leave progress requests without a response.
    let pause = Duration::from_secs(4);
    for value in ["1", "2"] {
        let asks = tokio::time::timeout(Duration::from_millis(1100), watch.next());
        assert!(asks.await.is_err(), "something came out of nothing");
        client.put("k", value, None).await.unwrap();
        tokio::time::sleep(pause).await;
        let Event::Put(kv) = watch.next().await.unwrap() else {
            panic!("nothing was deleted");
        };
        assert_eq!(kv.value, value);
        // Nothing arrived meanwhile.
        tokio::time::sleep(pause).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_without_an_answer_costs_the_connection_only_if_others_have_none_either() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_call_without_an_answer_costs_the_connection_only_if_others_have_none_either",
        Etcd::start(directory.path())
    );
    let link = SlowLink::to(&etcd.endpoints()[0]).await.unwrap();
    let client = Client::new(&Options::new([link.address()])).unwrap();
    let client = client.within(Duration::from_secs(10));
    client.get("k").await.unwrap();
    link.delay(Duration::from_secs(2));
    let other = {
        let client = client.clone();
        tokio::spawn(async move { client.get("k").await })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    // The answer to the other call comes while this one waits.
    let hasty = client.within(Duration::from_millis(1500));
    let late = hasty.get("k").await.unwrap_err();
    assert!(late.is_retryable(), "{late}");
    other.await.unwrap().unwrap();
    client.get("k").await.unwrap();
    assert_eq!(link.connections(), 1);
    let late = hasty.get("k").await.unwrap_err();
    assert!(late.is_retryable(), "{late}");
    client.get("k").await.unwrap();
    assert_eq!(link.connections(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_from_before_the_history_says_so_and_one_on_a_paused_server_breaks() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_watch_from_before_the_history_says_so_and_one_on_a_paused_server_breaks",
        Etcd::start(directory.path())
    );
    let client = etcd.client().unwrap();
    let first = client.put("k", "0", None).await.unwrap();
    let last = client.put("k", "1", None).await.unwrap();
    let limit = Duration::from_secs(5);
    client.compact(last, true, limit).await.unwrap();
    assert_eq!(
        client.compact(last, true, limit).await,
        Err(Error::Compacted)
    );
    let options = |start| WatchOptions {
        keys: Range::key("k"),
        start,
        puts_only: true,
    };
    let mut watch = client.watch(&options(first)).await.unwrap();
    assert_eq!(watch.next().await, Err(Error::Compacted));
    let mut watch = client.watch(&options(last)).await.unwrap();
    watch.next().await.unwrap();
    etcd.pause().unwrap();
    let begun = Instant::now();
    let broken = watch.next().await.unwrap_err();
    assert!(broken.is_retryable(), "{broken}");
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
    etcd.resume().unwrap();
    client.watch(&options(last)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_goes_to_another_endpoint_when_one_is_paused_or_killed() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = started!(
        "a_call_goes_to_another_endpoint_when_one_is_paused_or_killed",
        EtcdCluster::start(directory.path(), 3)
    );
    let client = cluster.client().unwrap();
    write_until_done(&client, "k", "0").await;
    cluster.member(0).pause().unwrap();
    write_until_done(&client, "k", "1").await;
    let begun = Instant::now();
    assert_eq!(client.get("k").await.unwrap().unwrap().value, "1");
    assert!(
        begun.elapsed() < Duration::from_millis(900),
        "the endpoint that worked was not asked first"
    );
    cluster.member(0).resume().unwrap();
    for index in 0..3 {
        cluster.member(index).kill().unwrap();
        write_until_done(&client, "k", &format!("without {index}")).await;
        cluster.member(index).restart().await.unwrap();
    }
    assert_eq!(client.get("k").await.unwrap().unwrap().value, "without 2");
    assert_eq!(client.members().await.unwrap().len(), 3);
    cluster.leader().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_and_a_password_are_asked_for_and_given() {
    let directory = tempfile::tempdir().unwrap();
    let setup = Setup {
        tls: true,
        password: Some("sesame".into()),
        ..Setup::default()
    };
    let mut etcd = started!(
        "certificates_and_a_password_are_asked_for_and_given",
        Etcd::start_with(directory.path(), &setup)
    );
    let client = etcd.client().unwrap();
    client.put("k", "v", None).await.unwrap();
    // The server forgets its tokens; a new one is asked for.
    etcd.kill().unwrap();
    etcd.restart().await.unwrap();
    assert_eq!(client.get("k").await.unwrap().unwrap().value, "v");

    let refused = async |options: &Options| {
        let client = Client::new(options).unwrap();
        client.get("k").await.unwrap_err()
    };
    for user in [None, Some(("root".to_owned(), "wrong".to_owned()))] {
        let options = Options {
            user,
            ..etcd.options()
        };
        let error = refused(&options).await;
        assert!(matches!(error, Error::PermissionDenied { .. }), "{error}");
        assert!(!format!("{options:?}").contains("wrong"));
    }
    let mut no_certificate = etcd.options();
    if let Some(tls) = &mut no_certificate.tls {
        tls.cert = None;
        tls.key = None;
    }
    let error = refused(&no_certificate).await;
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_etcd_says_so_until_room_was_made() {
    let directory = tempfile::tempdir().unwrap();
    let setup = Setup {
        quota_bytes: Some(16 << 20),
        ..Setup::default()
    };
    let etcd = started!(
        "a_full_etcd_says_so_until_room_was_made",
        Etcd::start_with(directory.path(), &setup)
    );
    let client = etcd.client().unwrap();
    let value = vec![7u8; 1 << 20];
    let mut puts = 0;
    let full = loop {
        match client.put("k", value.clone(), None).await {
            Ok(_) => puts += 1,
            Err(error) => break error,
        }
        assert!(puts < 64);
    };
    assert_eq!(full, Error::NoSpace);
    let too_large = client.put("k", vec![7u8; 3 << 20], None).await.unwrap_err();
    assert!(matches!(too_large, Error::TooLarge { .. }), "{too_large}");
    let alarms = client.alarms().await.unwrap();
    assert_eq!(alarms.len(), 1, "{alarms:?}");
    let before = client.status(0).await.unwrap();
    let limit = Duration::from_secs(20);
    client.compact(before.revision, true, limit).await.unwrap();
    client.defragment(0, limit).await.unwrap();
    let after = client.status(0).await.unwrap();
    assert!(after.db_size < before.db_size / 2, "{before:?} {after:?}");
    client.disarm_no_space(alarms[0].0).await.unwrap();
    client.put("k", value, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn masters_are_found_with_the_leader_first() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "masters_are_found_with_the_leader_first",
        Etcd::start(directory.path())
    );
    let client = etcd.client().unwrap();
    let url = format!(
        "etcd://{}/blue",
        etcd.endpoints()[0].trim_start_matches("http://")
    );
    let location = discover::Location::parse(&url).unwrap();
    let masters = || location.masters(Duration::from_secs(1));
    assert!(masters().await.unwrap().is_empty());
    let root = discover::root("blue");
    for (key, value) in [
        ("members/a", r#"{"address":"http://a:1"}"#),
        ("members/b", r#"{"address":"http://b:1","more":[]}"#),
        ("members/c", "not json"),
        ("leader", r#"{"id":"b","address":"http://b:1"}"#),
    ] {
        client
            .put(format!("{root}{key}"), value, None)
            .await
            .unwrap();
    }
    client
        .put("/kvpool/blue2/leader", r#"{"address":"http://z:1"}"#, None)
        .await
        .unwrap();
    assert_eq!(masters().await.unwrap(), ["http://b:1", "http://a:1"]);
}
