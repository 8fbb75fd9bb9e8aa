use super::{assert_soon, block, get_one, key, put_twice};
use crate::clock::Deadline;
use crate::testing::{Fault, Setup, connect, leader, options, pool, pool_with};
use crate::{
    Client, ConnectError, GetOutcome, Leasing, Options, PutOptions, ReplicaBlocks, ReplicaChange,
    ReplicaWish, Timeouts,
};
use kvpool_proto::{ExistReply, HelloReply};
use kvpool_types::{ClusterId, Code, Key, Length};
use prost::Message;
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
    pool.master.resign_to("").await;
    pool.master.lead().await;
    // Any answer carries the new term.
    assert_eq!(pool.client.is_exist(&[key("a")]).await.unwrap(), [true]);
    assert!(matches!(
        get_one(&pool, "a", 5).await.0,
        Ok(GetOutcome::Hit { .. })
    ));
    assert_eq!(pool.master.calls("lookup"), 2);
}

#[tokio::test]
async fn a_lower_term_than_the_highest_seen_is_refused() {
    let pool = pool_with(|setup, _| setup.epoch = 7).await;
    pool.client.is_exist(&[key("a")]).await.unwrap();
    pool.master
        .on_answer("exist", |reply: &mut ExistReply| reply.epoch = 6);
    let begun = Instant::now();
    let error = pool.client.is_exist(&[key("a")]).await.unwrap_err();
    assert_eq!(error.code, Code::StaleEpoch);
    assert_soon(begun, Duration::from_millis(2500));
    pool.master.on_answer("exist", |_: &mut ExistReply| {});
    pool.client.is_exist(&[key("a")]).await.unwrap();
}

#[tokio::test]
async fn a_batch_over_the_limit_is_split_and_put_back_in_order() {
    let pool = pool_with(|setup, _| setup.config.max_batch_keys = 7).await;
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
async fn a_hello_that_tells_of_a_new_term_is_the_only_one() {
    let pool = pool().await;
    // This is enough for the greeting of the connection itself.
    pool.client.is_exist(&[key("a")]).await.unwrap();
    let greeted = pool.master.calls("hello");
    let epoch = pool.client.epoch();
    pool.master
        .on_answer("hello", move |reply: &mut HelloReply| {
            reply.epoch = epoch.0 + 1;
            reply.max_block_bytes = 16;
        });
    let deadline = Deadline::after(Duration::from_secs(5));
    let limits = pool.client.inner.control.limits_now(deadline).await;
    assert_eq!(limits.max_block, Length(16));
    assert_eq!(pool.client.epoch().0, epoch.0 + 1);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(pool.master.calls("hello"), greeted + 1);
}

#[tokio::test]
async fn an_exist_of_several_messages_goes_over_two_connections() {
    let pool = pool_with(|setup, _| setup.config.max_batch_keys = 7).await;
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
    let pool = pool_with(|setup, _| setup.config.max_batch_keys = 7).await;
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
    pool.master.always("release", Fault::AnswerLost);
    let prefix = pool.client.match_prefix(&[key("a")]).await.unwrap();
    assert!(prefix.lease.release().await.is_err());
    assert_eq!(pool.master.calls("release"), 1);
}

/// The repeated call finds a node that does not drain any more.
#[tokio::test]
async fn a_drain_whose_cancellation_is_repeated_counts_as_cancelled() {
    let pool = pool().await;
    pool.client.drain_node("n1", false).await.unwrap();
    pool.master.next("undrain_node", [Fault::AnswerLost]);
    assert!(pool.client.undrain_node("n1").await.unwrap());
    assert_eq!(pool.master.calls("undrain_node"), 2);
    assert!(!pool.client.undrain_node("n1").await.unwrap());
}

/// A drain goes on under the next leader. Two tasks move the same blocks, but two copies make two replicas.
#[tokio::test]
async fn a_move_off_media_is_repeated_and_a_copy_is_not() {
    let pool = pool().await;
    pool.client.drain_node_and_media("n1", false).await.unwrap();
    let off = ReplicaWish {
        change: ReplicaChange::Move,
        blocks: ReplicaBlocks::OnlyOnMedia,
        from: Some("n1".to_owned()),
        to: Vec::new(),
        evict: true,
    };
    pool.master.next("change_replicas", [Fault::AnswerLost]);
    let task = pool.client.change_replicas(&off).await.unwrap();
    assert_eq!((task.blocks, task.from.as_str()), (0, "n1"));
    assert_eq!(pool.master.calls("change_replicas"), 2);
    let copy = ReplicaWish {
        change: ReplicaChange::Copy,
        blocks: ReplicaBlocks::Pattern("x".to_owned()),
        from: None,
        ..off
    };
    pool.master.next("change_replicas", [Fault::AnswerLost]);
    assert!(pool.client.change_replicas(&copy).await.is_err());
    assert_eq!(pool.master.calls("change_replicas"), 3);
}

#[tokio::test]
async fn a_lease_that_has_run_out_is_not_released() {
    let ttl = Duration::from_millis(20);
    let pool = pool_with(|setup, _| setup.config.lease_ttl = ttl).await;
    put_twice(&pool, "a", b"bytes").await;
    let mut prefix = pool.client.match_prefix(&[key("a")]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert_eq!(prefix.lease.left(), Duration::ZERO);
    assert_eq!(prefix.lease.renew().await, Ok(1));
    assert!(prefix.lease.is_empty());
    let prefix = pool.client.match_prefix(&[key("a")]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(30)).await;
    prefix.lease.release().await.unwrap();
    assert_eq!(pool.master.calls("release"), 0);
}

#[tokio::test]
async fn the_next_master_is_asked_when_one_is_gone() {
    let master = leader(Setup::default()).await;
    let options = impatient(vec!["http://127.0.0.1:1".to_owned(), master.url()]);
    let client = Client::connect(options).await.unwrap();
    assert_eq!(client.is_exist(&[key("a")]).await.unwrap(), [false]);
}

/// The encoded answer of a master of version 1 to a greeting.
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
    let cluster: Vec<u8> = (0x10..0x20).collect();
    let setup = Setup {
        id: ClusterId::from_slice(&cluster).unwrap(),
        epoch: 7,
        ..Setup::default()
    };
    let master = leader(setup).await;
    master.on_answer("hello", |reply: &mut HelloReply| {
        *reply = HelloReply::decode(hello_of_version_1().as_slice()).unwrap();
    });
    master.always("cluster", Fault::Unknown);
    let address = master.url();
    // The same holds for one of two masters, which is first asked a question that it does not know.
    for masters in [
        vec![address.clone()],
        vec!["http://127.0.0.1:1".to_owned(), address],
    ] {
        let client = connect(&master, options(masters)).await;
        assert_eq!(client.cluster_id().to_bytes().as_slice(), cluster);
        assert_eq!(client.epoch().0, 7);
        assert_eq!(client.limits().lease_ttl, Duration::from_secs(10));
        assert!(client.put(&key("a"), b"x".to_vec()).await.is_ok());
    }
}

#[tokio::test]
async fn a_master_of_a_version_to_come_is_refused() {
    let master = leader(Setup::default()).await;
    master.on_answer("hello", |reply: &mut HelloReply| {
        let mut hello = hello_of_version_1();
        hello[1] = 3;
        *reply = HelloReply::decode(hello.as_slice()).unwrap();
    });
    let error = Client::connect(impatient(vec![master.url()]))
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
    assert_soon(begun, Duration::from_secs(2));
    for bad in ["", "127.0.0.1", "http://"] {
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
