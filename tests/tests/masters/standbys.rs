//! A standby holds the same metadata as the leader: after a take-over at rest, every key gives the
//! same answer.

use kvpool_client::{Client, Remove};
use kvpool_tests::history::{Found, decode, encode};
use kvpool_tests::masters::{self, Options, Pool};
use kvpool_types::Key;
use rand::Rng;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

const KEYS: u64 = 240;
/// The number of keys that change at a time. Each key has a last change beside changes of other
/// keys.
const AT_A_TIME: u64 = 4;
const BURST: Duration = Duration::from_millis(50);

fn name(key: u64) -> Key {
    kvpool_tests::blocks::key(key)
}

/// A client's view of every key.
async fn seen(client: &Client) -> Vec<Found> {
    let mut all = Vec::new();
    for key in 0..KEYS {
        let bytes = client.get(&name(key)).await.unwrap();
        all.push(bytes.map_or(Found::Nothing, |bytes| decode(key, &bytes)));
    }
    all
}

/// Puts, upserts and removes at random: a few keys, then the next few, until all have changed.
async fn churn(client: &Client, values: &AtomicU64, since: Instant) {
    loop {
        let burst = u64::try_from(since.elapsed().as_nanos() / BURST.as_nanos()).unwrap();
        let first = burst * AT_A_TIME;
        if first >= KEYS {
            return;
        }
        let (key, dice) = {
            let mut random = rand::rng();
            let key = random.random_range(first..first + AT_A_TIME);
            (key, random.random_range(0..10))
        };
        let bytes = encode(key, values.fetch_add(1, Ordering::Relaxed));
        let block =
            kvpool_client::PutBlock::new(name(key), kvpool_client::Region::from(bytes).whole());
        let options = kvpool_client::PutOptions::default();
        // The outcome of an operation that a take-over interrupts does not matter.
        match dice {
            0..4 => drop(client.batch_put(vec![block], &options).await),
            4..7 => drop(client.upsert(vec![block], &options).await),
            _ => {
                let what = Remove::Keys(vec![name(key)]);
                drop(client.remove(what, true).await);
            }
        }
    }
}

/// Makes several clients change all keys, and disturbs the leader with `amid` meanwhile.
async fn trouble(pool: &mut Pool, values: &Arc<AtomicU64>, amid: fn(&mut Pool)) {
    let mut churning = JoinSet::new();
    let since = Instant::now();
    for _ in 0..6 {
        let client = pool.client().await.unwrap();
        let values = Arc::clone(values);
        churning.spawn(async move { churn(&client, &values, since).await });
    }
    tokio::time::sleep(BURST * 20).await;
    amid(pool);
    churning.join_all().await;
}

/// Ends the leader at rest, `times` times, and compares the next leader's answers.
async fn compare(pool: &mut Pool, times: usize) {
    for time in 0..times {
        let leader = pool.wait_settled().unwrap();
        pool.wait_live(2).unwrap();
        let before = seen(&pool.client().await.unwrap()).await;
        pool.kill(leader.index).unwrap();
        let next = pool.wait_leader(leader.epoch).unwrap();
        pool.wait_live(2).unwrap();
        let after = seen(&pool.client().await.unwrap()).await;
        let differ: Vec<_> = (0..KEYS)
            .zip(before.iter().zip(&after))
            .filter(|(_, (before, after))| before != after)
            .collect();
        assert!(
            differ.is_empty(),
            "take-over {time}: {leader:?} then {next:?}: {} keys differ: {differ:?}\n{}",
            differ.len(),
            pool.logs()
        );
        pool.restart(leader.index).unwrap();
    }
}

async fn rounds(test: &str, amid: fn(&mut Pool)) {
    if !masters::available(test) {
        return;
    }
    let mut pool = Pool::start(Options::default()).unwrap();
    let values = Arc::new(AtomicU64::new(0));
    for round in 0..3 {
        println!("round {round}");
        trouble(&mut pool, &values, amid).await;
        compare(&mut pool, 3).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_key_answers_after_a_take_over_as_it_did_before() {
    let test = "every_key_answers_after_a_take_over_as_it_did_before";
    rounds(test, |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_it_does_when_an_earlier_leader_was_killed_amid_changes() {
    let test = "so_it_does_when_an_earlier_leader_was_killed_amid_changes";
    rounds(test, |pool| {
        let leader = pool.wait_settled().unwrap();
        pool.kill(leader.index).unwrap();
        pool.wait_leader(leader.epoch).unwrap();
        pool.restart(leader.index).unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_it_does_when_an_earlier_leader_was_stopped_amid_changes() {
    let test = "so_it_does_when_an_earlier_leader_was_stopped_amid_changes";
    rounds(test, |pool| {
        let leader = pool.wait_settled().unwrap();
        pool.pause(leader.index).unwrap();
        pool.wait_leader(leader.epoch).unwrap();
        pool.resume(leader.index).unwrap();
    })
    .await;
}
