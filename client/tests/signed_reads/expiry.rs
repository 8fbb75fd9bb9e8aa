//! Locations that end before they are used. They last a lease and a minute, so this takes as long.

use crate::pool::{Place, Pool, Port, Shape};
use crate::relay::Relay;
use crate::{bytes, key, only};
use kvpool_client::{Client, GetBlock, GetError, GetOptions, Lease};
use kvpool_store_node::Isolation;
use kvpool_transport::Region;
use kvpool_types::wire::frame::Op;
use kvpool_types::{Code, Length, Offset};
use std::time::{Duration, Instant};

/// So small that a read takes the connection that is open.
const LENGTH: usize = 100_000;
/// Longer than any part of the test.
const PATIENCE: Duration = Duration::from_secs(150);

fn options(release: bool) -> GetOptions {
    GetOptions {
        // Half of it is the first attempt's.
        timeout: Some(2 * PATIENCE),
        // Then the location is not remembered.
        release,
    }
}

async fn get_with(
    client: &Client,
    name: &str,
    options: &GetOptions,
) -> Result<Option<Vec<u8>>, GetError> {
    let into = Region::allocate(Length(LENGTH as u64));
    let block = GetBlock::new(key(name), into.whole());
    let outcome = client.batch_get(vec![block], options).await.remove(0)?;
    Ok(outcome.is_hit().then(|| into.whole().to_vec()))
}

async fn get(client: &Client, name: &str) -> Result<Option<Vec<u8>>, GetError> {
    get_with(client, name, &options(false)).await
}

/// Bytes 70,000 to 71,000.
async fn get_part(client: &Client, name: &str) -> Result<Option<Vec<u8>>, GetError> {
    let into = Region::allocate(Length(1000));
    let (key, buffers, options) = (key(name), vec![into.whole()], options(false));
    let read = client.get_range(&key, Offset(70_000), buffers, &options);
    Ok(read.await?.is_hit().then(|| into.whole().to_vec()))
}

/// A client with an open link to the node, which knows no location.
async fn connected(pool: &Pool, subject: &str, name: &str) -> Client {
    let client = pool.client(subject, subject).await;
    let found = get_with(&client, name, &options(true)).await;
    assert!(found.unwrap().is_some());
    client
}

/// Waits until the relay keeps `count` requests of `op` back.
async fn until_waiting(relay: &Relay, op: Op, count: usize) {
    let begun = Instant::now();
    loop {
        let waiting = relay.waiting();
        if waiting.iter().filter(|there| **there == op).count() >= count {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{waiting:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Renews a lease as an engine does whose request waits, and reads nothing. Returns when the location of `place`
/// has ended.
async fn outlast(lease: &mut Lease, pool: &Pool, place: &Place) {
    let begun = Instant::now();
    let mut port = Port::open(place, pool.token("a"));
    loop {
        lease.renew().await.unwrap();
        match port.read(place.epoch, place.item()) {
            (Code::Ok, block) => assert!(block == bytes(0, LENGTH)),
            (code, sent) => {
                assert_eq!((code, sent.len()), (Code::LocationExpired, 0));
                return;
            }
        }
        assert!(begun.elapsed() < PATIENCE, "a location without an end");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_location_that_ends_on_its_way_to_the_node_is_asked_for_anew() {
    let pool = Pool::with(Shape {
        is_relayed: true,
        ..Shape::of(1, true, Isolation::Shared)
    })
    .await;
    let relay = pool.relay.as_ref().unwrap();
    let writer = pool.client("a", "a").await;
    let names = ["p0", "p1", "p2", "p3"];
    for (seed, name) in (0u8..).zip(names) {
        writer.put(&key(name), bytes(seed, LENGTH)).await.unwrap();
    }
    let other = pool.client("b", "b").await;
    other.put(&key("z"), bytes(9, LENGTH)).await.unwrap();
    let whole = connected(&pool, "a", "p1").await;
    let range = connected(&pool, "a", "p2").await;
    // Requests for checksums use the connections in turn.
    for _ in 0..4 {
        assert!(get_part(&range, "p2").await.unwrap().is_some());
    }
    let loser = connected(&pool, "b", "z").await;

    // An engine holds a prefix, of which it has read one block.
    let engine = pool.client("a", "a").await;
    let prefix: Vec<_> = names.iter().map(key).collect();
    let mut held = engine.match_prefix(&prefix).await.unwrap();
    assert_eq!(held.blocks, names.len());
    assert!(get(&engine, "p0").await.unwrap() == Some(bytes(0, LENGTH)));

    // Requests with locations that the master has just signed are kept back.
    relay.hold();
    let begin = |client: &Client, name: &'static str| {
        let client = client.clone();
        tokio::spawn(async move { get(&client, name).await })
    };
    let (whole_read, lost) = (begin(&whole, "p1"), begin(&loser, "z"));
    let range_read = tokio::spawn({
        let range = range.clone();
        async move { get_part(&range, "p2").await }
    });
    until_waiting(relay, Op::Read, 2).await;
    until_waiting(relay, Op::Sums, 1).await;
    // This one was signed after theirs.
    let mut place = only(&pool, "a", "p0").await;
    place.data_address = pool.nodes[0].data_address().to_string();
    outlast(&mut held.lease, &pool, &place).await;
    pool.allow("b", "c").await;

    relay.release();
    assert!(whole_read.await.unwrap().unwrap() == Some(bytes(1, LENGTH)));
    let part = bytes(2, LENGTH)[70_000..71_000].to_vec();
    assert!(range_read.await.unwrap().unwrap() == Some(part));
    // A caller that has lost its right meanwhile gets no new location.
    assert_eq!(lost.await.unwrap().unwrap_err().code(), Code::Forbidden);
    for client in [&whole, &range, &loser] {
        // The node refused locations that were signed too long ago.
        assert!(client.counters().transfer_retries > 0);
    }
    // The engine's remembered location ended with its lease, so it shows the node none that has ended.
    for (seed, name) in (0u8..).zip(names) {
        assert!(get(&engine, name).await.unwrap() == Some(bytes(seed, LENGTH)));
    }
    assert_eq!(engine.counters().transfer_retries, 0);
    drop((writer, other, whole, range, loser, engine, held));
    pool.stop().await;
}
