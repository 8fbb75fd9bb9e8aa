use super::{block, get_one, key, put_twice};
use crate::fake::{Master, connect, options, pool, pool_with, serve};
use crate::{Client, ConnectError, GetOutcome, Leasing, Options, PutOptions, Timeouts};
use kvpool_types::{Code, Key};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn impatient(masters: Vec<String>) -> Options {
    Options {
        masters,
        timeouts: Timeouts {
            connect: Duration::from_millis(800),
            ..Timeouts::default()
        },
        ..Options::default()
    }
}

#[tokio::test]
async fn a_new_term_ends_the_use_of_what_was_remembered() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    assert!(matches!(
        get_one(&pool, "a", 5).await.0,
        Ok(GetOutcome::Hit { .. })
    ));
    assert_eq!(pool.master.calls("lookup"), 1);
    pool.master.state().fail_over();
    // Any answer tells of the new term.
    assert_eq!(pool.client.is_exist(&[key("a")]).await.unwrap(), [true]);
    assert!(matches!(
        get_one(&pool, "a", 5).await.0,
        Ok(GetOutcome::Hit { .. })
    ));
    assert_eq!(pool.master.calls("lookup"), 2);
}

#[tokio::test]
async fn a_lower_term_than_the_highest_seen_is_refused() {
    let pool = pool().await;
    pool.master.state().epoch = 7;
    pool.client.is_exist(&[key("a")]).await.unwrap();
    pool.master.state().epoch = 6;
    let begun = Instant::now();
    let error = pool.client.is_exist(&[key("a")]).await.unwrap_err();
    assert_eq!(error.code, Code::StaleEpoch);
    assert!(
        begun.elapsed() < Duration::from_millis(2500),
        "{:?}",
        begun.elapsed()
    );
    pool.master.state().epoch = 7;
    pool.client.is_exist(&[key("a")]).await.unwrap();
}

#[tokio::test]
async fn a_batch_over_the_limit_is_split_and_put_back_in_order() {
    let pool = pool_with(|options| options.max_batch_keys = 7).await;
    pool.master.state().max_batch_keys = 7;
    let keys: Vec<Key> = (0..50).map(|n| key(&format!("k{n}"))).collect();
    let present = |n: usize| n.is_multiple_of(3) || n < 20;
    let blocks = (0..50)
        .filter(|n| present(*n))
        .map(|n| block(&format!("k{n}"), b"x"))
        .collect();
    let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    let found = pool.client.exist(&keys, Leasing::Lease).await.unwrap();
    assert_eq!(pool.master.calls("exist"), 8);
    let expected: Vec<bool> = (0..50).map(present).collect();
    assert_eq!(found.present, expected);
    assert_eq!(found.lease.len(), expected.iter().filter(|p| **p).count());
    let prefix = pool.client.match_prefix(&keys).await.unwrap();
    assert_eq!((prefix.blocks, prefix.lease.len()), (20, 20));
    // The message behind the first gap was not sent.
    assert_eq!(pool.master.calls("match_prefix"), 3);
}

#[tokio::test]
async fn an_exist_of_several_messages_goes_over_two_connections() {
    let pool = pool_with(|options| options.max_batch_keys = 7).await;
    pool.master.state().max_batch_keys = 7;
    let keys: Vec<Key> = (0..50).map(|n| key(&format!("k{n}"))).collect();
    pool.client.is_exist(&keys[..7]).await.unwrap();
    // Each connection is greeted once.
    let greeted = pool.master.calls("hello");
    pool.client.is_exist(&keys[7..14]).await.unwrap();
    assert_eq!(pool.master.calls("hello"), greeted);
    for _ in 0..3 {
        pool.client.is_exist(&keys).await.unwrap();
        assert_eq!(pool.master.calls("hello"), greeted + 1);
    }
}

#[tokio::test]
async fn parts_of_a_put_go_over_two_connections() {
    let pool = pool_with(|options| options.max_batch_keys = 7).await;
    pool.master.state().max_batch_keys = 7;
    let put = async |keys: std::ops::Range<u32>| {
        let blocks = keys.map(|n| block(&format!("k{n}"), b"x")).collect();
        let outcomes = pool.client.batch_put(blocks, &PutOptions::default()).await;
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        pool.master.calls("hello")
    };
    let greeted = put(0..7).await;
    assert_eq!(put(7..14).await, greeted);
    assert_eq!(put(14..50).await, greeted + 1);
}

#[tokio::test]
async fn a_release_is_sent_at_most_once() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    pool.master.state().release_fails = true;
    let prefix = pool.client.match_prefix(&[key("a")]).await.unwrap();
    assert!(prefix.lease.release().await.is_err());
    assert_eq!(pool.master.calls("release"), 1);
}

#[tokio::test]
async fn a_lease_that_has_run_out_is_not_released() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    pool.master.state().lease_ttl_ms = 20;
    let mut prefix = pool.client.match_prefix(&[key("a")]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert_eq!(prefix.lease.left(), Duration::ZERO);
    pool.master.state().renews = false;
    assert_eq!(prefix.lease.renew().await, Ok(1));
    assert!(prefix.lease.is_empty());
    let prefix = pool.client.match_prefix(&[key("a")]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    prefix.lease.release().await.unwrap();
    assert_eq!(pool.master.calls("release"), 0);
}

#[tokio::test]
async fn the_next_master_is_asked_when_one_is_gone() {
    let master = Arc::new(Master::default());
    let address = serve(Arc::clone(&master));
    let options = impatient(vec!["http://127.0.0.1:1".to_owned(), address]);
    let client = Client::connect(options).await.unwrap();
    assert_eq!(client.is_exist(&[key("a")]).await.unwrap(), [false]);
}

/// What a master of version 1 answered to a greeting, as its own code wrote it.
fn hello_of_version_1() -> Vec<u8> {
    let digits = include_str!("../../../proto/fixtures/v1/hello_reply.hex");
    let digits: Vec<u8> = digits.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

#[tokio::test]
async fn a_master_of_the_version_before_is_a_master() {
    let master = Arc::new(Master::default());
    master.state().epoch = 7;
    master.own().hello = Some(hello_of_version_1());
    master.own().is_older = true;
    let address = serve(Arc::clone(&master));
    // Also where it is one of two, and so first asked what it does not know.
    for masters in [
        vec![address.clone()],
        vec!["http://127.0.0.1:1".to_owned(), address],
    ] {
        let (_nodes, client) = connect(options(masters)).await;
        let cluster: Vec<u8> = (0x10..0x20).collect();
        assert_eq!(client.cluster_id().to_bytes().as_slice(), cluster);
        assert_eq!(client.epoch().0, 7);
        assert_eq!(client.limits().lease_ttl, Duration::from_secs(10));
        assert!(client.put(&key("a"), b"x".to_vec()).await.is_ok());
    }
}

#[tokio::test]
async fn a_master_of_a_version_to_come_is_refused() {
    let master = Arc::new(Master::default());
    let mut hello = hello_of_version_1();
    hello[1] = 3;
    master.own().hello = Some(hello);
    let error = Client::connect(impatient(vec![serve(master)]))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::VersionMismatch);
    assert!(error.to_string().contains("version 3"), "{error}");
}

#[tokio::test]
async fn connecting_to_nobody_ends_in_time_and_says_whom_it_tried() {
    let begun = Instant::now();
    let options = impatient(vec!["http://127.0.0.1:1".to_owned()]);
    let error = Client::connect(options).await.unwrap_err();
    assert_eq!(error.code(), Code::Unreachable);
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    assert!(
        begun.elapsed() < Duration::from_secs(2),
        "{:?}",
        begun.elapsed()
    );
    for bad in ["", "127.0.0.1:1", "http://"] {
        let error = Client::connect(impatient(vec![bad.to_owned()]))
            .await
            .unwrap_err();
        assert!(
            matches!(error, ConnectError::BadAddress { .. }),
            "{bad:?}: {error}"
        );
    }
    let error = Client::connect(impatient(Vec::new())).await.unwrap_err();
    assert_eq!(error, ConnectError::NoMasters);
}
