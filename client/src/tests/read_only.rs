//! A read-only leader: it answers calls that change nothing, without leases.

use super::{assert_soon, block, get_one, key, put_twice};
use crate::testing::{Mode, Pool, connect, options, pool, pool_with};
use crate::{
    GetError, GetOptions, GetOutcome, Leasing, PutError, PutOptions, Region, TransportChoice,
    ViewOptions,
};
use kvpool_types::{Code, Length, Offset};
use std::time::{Duration, Instant};

const WHY: &str = "read-only: the leader lease of epoch 1 expired";

fn make_read_only(pool: &Pool) {
    pool.master.cluster.outlast_term();
}

fn make_leader(pool: &Pool) {
    pool.master.cluster.confirm_term(&pool.master.pool());
}

#[tokio::test]
async fn an_unleased_block_is_copied_and_verified_and_its_location_forgotten() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    make_read_only(&pool);
    for asked in 1..4 {
        let (outcome, bytes) = get_one(&pool, "a", 5).await;
        assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
        assert_eq!(bytes, b"bytes");
        assert_eq!(pool.master.calls("lookup"), asked);
    }
    assert_eq!(pool.client.get(&key("a")).await.unwrap().unwrap(), b"bytes");
    let memory = Region::allocate(Length(3));
    let options = GetOptions::default();
    let buffers = vec![memory.whole()];
    let key_a = key("a");
    let ranged = pool.client.get_range(&key_a, Offset(1), buffers, &options);
    assert!(ranged.await.unwrap().is_hit());
    assert_eq!(memory.whole().to_vec(), b"yte");
    // No lease is held, so no lease is extended or released.
    let found = pool
        .client
        .exist(&[key("a")], Leasing::Lease)
        .await
        .unwrap();
    assert_eq!(found.present, [true]);
    assert!(found.lease.is_empty());
    let mut prefix = pool.client.match_prefix(&[key("a")]).await.unwrap();
    assert_eq!((prefix.blocks, prefix.lease.renew().await), (1, Ok(0)));
    prefix.lease.release().await.unwrap();
    assert_eq!(pool.master.calls("renew") + pool.master.calls("release"), 0);
}

#[tokio::test]
async fn an_unleased_block_gives_no_view() {
    let pool = pool_with(|setup, options| {
        setup.is_near = true;
        options.transport = TransportChoice::Auto;
    });
    let pool = pool.await;
    put_twice(&pool, "a", b"bytes").await;
    make_read_only(&pool);
    let options = ViewOptions::default();
    let error = pool.client.get_view(&key("a"), &options).await.unwrap_err();
    assert!(matches!(error, GetError::Failed { .. }), "{error:?}");
    assert_eq!(error.code(), Code::NotLeader);
    assert!(error.is_retryable());
    assert!(error.to_string().contains("no leases"), "{error}");
}

#[tokio::test]
async fn a_put_waits_to_its_deadline_and_says_why_it_is_refused_while_gets_go_on() {
    // Another master hangs, so the search for the leader repeatedly fails for a while.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let hung = format!("http://{}", silent.local_addr().unwrap());
    let pool = pool_with(|_, options| options.masters.push(hung)).await;
    put_twice(&pool, "a", b"bytes").await;
    make_read_only(&pool);
    // The first put discovers this.
    let short = PutOptions {
        timeout: Some(Duration::from_millis(700)),
        ..PutOptions::default()
    };
    let outcomes = pool.client.batch_put(vec![block("b", b"x")], &short).await;
    assert!(outcomes[0].is_err());
    let client = pool.client.clone();
    let begun = Instant::now();
    let putting = tokio::spawn(async move {
        let options = PutOptions {
            timeout: Some(Duration::from_secs(1)),
            ..PutOptions::default()
        };
        client.batch_put(vec![block("b", b"x")], &options).await
    });
    while !putting.is_finished() {
        let asked = Instant::now();
        let (outcome, _) = get_one(&pool, "a", 5).await;
        assert!(matches!(outcome, Ok(GetOutcome::Hit { .. })), "{outcome:?}");
        let took = asked.elapsed();
        assert!(took < Duration::from_millis(150), "{took:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let outcome = putting.await.unwrap().remove(0);
    assert!(begun.elapsed() > Duration::from_millis(600), "it waited");
    let Err(PutError::Failed { code, message }) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(code, Code::NotLeader);
    assert!(message.contains(WHY), "{message}");
}

#[tokio::test]
async fn a_put_goes_through_once_the_leader_may_lead_again() {
    let pool = pool().await;
    make_read_only(&pool);
    let client = pool.client.clone();
    let putting = tokio::spawn(async move { client.put(&key("b"), b"x".to_vec()).await });
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert!(!putting.is_finished());
    make_leader(&pool);
    let freed = Instant::now();
    putting.await.unwrap().unwrap();
    assert_soon(freed, Duration::from_millis(450));
}

#[tokio::test]
async fn a_commit_that_a_read_only_leader_refuses_is_not_unknown() {
    let pool = pool().await;
    for node in [1, 2] {
        pool.nodes.set(node, Mode::Slow(Duration::from_millis(100)));
    }
    let client = pool.client.clone();
    let putting = tokio::spawn(async move {
        let options = PutOptions {
            timeout: Some(Duration::from_millis(600)),
            ..PutOptions::default()
        };
        client.batch_put(vec![block("b", b"x")], &options).await
    });
    while pool.master.calls("reserve") == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    make_read_only(&pool);
    let outcome = putting.await.unwrap().remove(0);
    assert!(
        matches!(outcome, Err(PutError::Failed { .. })),
        "{outcome:?}"
    );
    assert!(outcome.unwrap_err().to_string().contains(WHY));
}

#[tokio::test]
async fn a_read_only_leader_lets_readers_in_and_hears_of_their_namespace_before_a_put() {
    let pool = pool().await;
    put_twice(&pool, "a", b"bytes").await;
    make_read_only(&pool);
    let own = || options(vec![pool.master.url()]);
    let begun = Instant::now();
    let client = connect(&pool.master, own()).await;
    assert!(begun.elapsed() < Duration::from_millis(1500));
    assert_eq!(client.is_exist(&[key("a")]).await.unwrap(), [true]);
    let mut of_a_new_namespace = own();
    of_a_new_namespace.namespace.name = "new".to_owned();
    let client = connect(&pool.master, of_a_new_namespace).await;
    let created = pool.master.calls("create_namespace");
    make_leader(&pool);
    client.put(&key("b"), b"x".to_vec()).await.unwrap();
    client.put(&key("c"), b"x".to_vec()).await.unwrap();
    assert_eq!(pool.master.calls("create_namespace"), created + 1);
}
