//! Reads with signed locations across the death of the leader that signed them.

use kvpool_client::{Client, GetOptions, GetOutcome, TransportChoice};
use kvpool_tests::blocks::{Tally, bytes_of, check_all_by, key, put_all, target};
use kvpool_tests::guard::Tokens;
use kvpool_tests::masters::{self, Pool};
use kvpool_tests::relay::Relay;
use kvpool_types::Offset;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BLOCKS: Range<u64> = 0..16;
const LENGTH: usize = 100_000;
/// A reader's time limit for a read. A fail-over takes less, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn options() -> GetOptions {
    GetOptions {
        timeout: Some(PATIENCE),
        ..GetOptions::default()
    }
}

async fn connect(pool: &Pool) -> Client {
    let mut options = pool.client_options();
    // A client that maps the segment presents no location, so use TCP.
    options.transport = TransportChoice::Tcp;
    options.timeouts.connect = PATIENCE;
    Client::connect(options).await.unwrap()
}

/// Reads whole blocks and a part of each.
async fn read_all(client: &Client) -> Tally {
    let mut tally = check_all_by(client, BLOCKS, LENGTH, &options()).await;
    for number in BLOCKS {
        let (key, into, from) = (key(number), target(1000), 70_000);
        let (buffers, options) = (vec![into.clone()], options());
        let read = client.get_range(&key, Offset(from as u64), buffers, &options);
        match read.await {
            Ok(GetOutcome::Hit { .. }) => {
                let is_right = into.to_vec() == bytes_of(&key, LENGTH)[from..from + 1000];
                tally.right += usize::from(is_right);
                tally.wrong += usize::from(!is_right);
            }
            Ok(GetOutcome::Miss) => tally.missed += 1,
            Err(error) => {
                eprintln!("{error}");
                tally.failed += 1;
            }
        }
    }
    tally
}

fn all_right() -> Tally {
    Tally {
        right: 2 * BLOCKS.count(),
        ..Tally::default()
    }
}

/// Reads all blocks again and again until `ends`. Returns the number of rounds.
async fn read_until(client: Client, ends: Arc<AtomicBool>) -> u64 {
    let mut rounds = 0;
    while !ends.load(Ordering::Relaxed) {
        assert_eq!(read_all(&client).await, all_right(), "round {rounds}");
        rounds += 1;
    }
    rounds
}

/// Every node requires locations that the leader signed. A read without a signature gets nothing.
#[tokio::test(flavor = "multi_thread")]
async fn reads_with_signed_locations_go_on_when_the_leader_that_signed_them_dies() {
    if !masters::available(
        "reads_with_signed_locations_go_on_when_the_leader_that_signed_them_dies",
    ) {
        return;
    }
    let tokens = Tokens::new().unwrap();
    let relay = Relay::listen("127.0.0.1:0").unwrap();
    let advertise = ["--advertise".to_owned(), relay.address().to_string()];
    let mut pool = Pool::start(masters::Options {
        masters: 2,
        nodes: 1,
        master: tokens.flags(),
        node: [tokens.node_flags(), advertise.into()].concat(),
        ..masters::Options::default()
    })
    .unwrap();
    relay.to(&pool.nodes[0].listen);
    let writer = connect(&pool).await;
    put_all(&writer, BLOCKS, LENGTH).await.unwrap();
    let first = pool.wait_settled().unwrap();

    // Running readers: the dying leader signed their cached locations.
    let ends = Arc::new(AtomicBool::new(false));
    let mut readers = Vec::new();
    for _ in 0..3 {
        let client = connect(&pool).await;
        assert_eq!(read_all(&client).await, all_right());
        let reading = tokio::spawn(read_until(client.clone(), Arc::clone(&ends)));
        readers.push((client.counters().epochs_seen, client, reading));
    }
    pool.kill(first.index).unwrap();
    let second = pool.wait_leader(first.epoch).unwrap();
    pool.wait_live(1).unwrap();
    let begun = Instant::now();
    for (seen, client, _) in &readers {
        while client.counters().epochs_seen == *seen {
            assert!(begun.elapsed() < PATIENCE, "it asks no later leader");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    ends.store(true, Ordering::Relaxed);
    for (_, client, reading) in readers {
        let rounds = reading.await.unwrap();
        let again = client.counters().transfer_retries;
        println!("{rounds} rounds, {again} reads were asked for anew");
    }

    // A reader's requests are in flight when the leader dies, and reach a node in the next term.
    pool.restart(first.index).unwrap();
    pool.wait_settled().unwrap();
    let reader = connect(&pool).await;
    assert_eq!(read_all(&reader).await, all_right());
    let before = reader.counters().transfer_retries;
    relay.hold();
    let reading = tokio::spawn({
        let reader = reader.clone();
        async move { read_all(&reader).await }
    });
    let begun = Instant::now();
    while relay.held() == 0 {
        assert!(begun.elapsed() < PATIENCE, "nothing is read");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    pool.kill(second.index).unwrap();
    pool.wait_leader(second.epoch).unwrap();
    pool.wait_live(1).unwrap();
    relay.release();
    assert_eq!(reading.await.unwrap(), all_right());
    let retries = reader.counters().transfer_retries - before;
    println!("{retries} reads were asked for anew");
    assert!(retries > 0, "the node took a location of the earlier term");
}
