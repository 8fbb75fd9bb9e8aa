//! The cost of signed locations: the same gets with and without signatures, and the two keyed
//! hashes alone.
//!
//! Both pools have a master with tokens, so every call to the master costs the same. The node of
//! one pool requires signed locations. Each round gets all blocks from each pool in one batch, over
//! TCP, in turns. `KVPOOL_ROUNDS` sets the number of rounds (200).

#[allow(
    dead_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "it belongs to the tests, which use all of it"
)]
#[path = "../tests/signed_reads/pool.rs"]
mod pool;
#[allow(
    dead_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "it belongs to the tests, which use all of it"
)]
#[path = "../tests/signed_reads/relay.rs"]
mod relay;

use kvpool_client::{Client, GetBlock, GetOptions, Key};
use kvpool_store_node::Isolation;
use kvpool_transport::Region;
use kvpool_types::{Epoch, Extent, GrantKey, Incarnation, Length, Offset, SegmentId, Version};
use pool::{Pool, Shape};
use std::hint::black_box;
use std::time::{Duration, Instant};

const BLOCKS: usize = 64;
const HASHES: u32 = 1_000_000;

fn main() {
    hashes();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        for length in [4 << 10, 64 << 10] {
            gets(length).await;
        }
    });
}

/// The keyed hash of one block, at the master and at the node.
fn hashes() {
    let signer = GrantKey([7; 32]).signer();
    let signer = signer.for_reads(Incarnation(9), Epoch(1));
    let extent = |at: u32| Extent {
        segment: SegmentId(1),
        offset: Offset(u64::from(at) * 4096),
        length: Length(4096),
    };
    let begun = Instant::now();
    for at in 0..HASHES {
        black_box(signer.sign(extent(at), Version(at.into()), 1000));
    }
    let signed = begun.elapsed() / HASHES;
    let right = signer.sign(extent(1), Version(1), 1000);
    let begun = Instant::now();
    for _ in 0..HASHES {
        black_box(signer.verify(black_box(extent(1)), black_box(&right)));
    }
    let verified = begun.elapsed() / HASHES;
    println!("one block: sign {signed:?}, verify {verified:?}");
}

async fn gets(length: usize) {
    let rounds = std::env::var("KVPOOL_ROUNDS").ok();
    let rounds: usize = rounds.and_then(|text| text.parse().ok()).unwrap_or(200);
    let shape = |node_asks| Shape {
        node_asks,
        ..Shape::of(1, true, Isolation::Shared)
    };
    let pools = [
        Pool::with(shape(false)).await,
        Pool::with(shape(true)).await,
    ];
    let keys: Vec<Key> = (0..BLOCKS)
        .map(|n| Key::parse(&format!("k{n}")).expect("a key"))
        .collect();
    let mut clients = Vec::new();
    for pool in &pools {
        let client = pool.client("a", "a").await;
        for key in &keys {
            client.put(key, vec![1; length]).await.expect("a put");
        }
        clients.push(client);
    }
    let into: Vec<Region> = keys
        .iter()
        .map(|_| Region::allocate(Length(length as u64)))
        .collect();
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (client, times) in clients.iter().zip(&mut times) {
            times.push(round(client, &keys, &into).await);
        }
    }
    let [without, with] = times.map(|mut times| {
        times.sort();
        times.get(times.len() / 2).copied().unwrap_or_default()
    });
    println!(
        "{BLOCKS} blocks of {length} bytes, median of {rounds}: {without:?} without, {with:?} with, ratio {:.3}",
        with.as_secs_f64() / without.as_secs_f64()
    );
    drop(clients);
    for pool in pools {
        pool.stop().await;
    }
}

async fn round(client: &Client, keys: &[Key], into: &[Region]) -> Duration {
    let blocks = keys.iter().zip(into).map(|(key, into)| GetBlock {
        key: key.clone(),
        buffers: vec![into.whole()],
    });
    let begun = Instant::now();
    let got = client
        .batch_get(blocks.collect(), &GetOptions::default())
        .await;
    let took = begun.elapsed();
    assert!(got.iter().all(Result::is_ok), "{got:?}");
    took
}
