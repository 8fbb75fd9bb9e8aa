//! Whole operations against a pool with injected faults.

mod announced;
mod control;
mod failover;
mod get;
mod gpu;
mod leases;
mod put;
mod read_only;
mod remove;

use crate::testing::Pool;
use crate::{GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions, PutOutcome, Region};
use kvpool_types::{Key, Length};
use std::time::{Duration, Instant};

fn assert_soon(since: Instant, limit: Duration) {
    assert!(since.elapsed() < limit, "{:?}", since.elapsed());
}

fn key(name: &str) -> Key {
    Key::parse(name).unwrap()
}

fn block(name: &str, bytes: &[u8]) -> PutBlock {
    PutBlock::new(key(name), Region::from(bytes.to_vec()).whole())
}

fn child(name: &str, parent: &str, bytes: &[u8]) -> PutBlock {
    PutBlock {
        parent: Some(key(parent)),
        ..block(name, bytes)
    }
}

/// Puts one block of two replicas.
async fn put_twice(pool: &Pool, name: &str, bytes: &[u8]) {
    let options = PutOptions {
        replicas: 2,
        ..PutOptions::default()
    };
    let outcomes = pool
        .client
        .batch_put(vec![block(name, bytes)], &options)
        .await;
    assert_eq!(outcomes, [Ok(PutOutcome::Stored { replicas: 2 })]);
}

/// Gets one block of a known length; the bytes are in the region.
async fn get_one(
    pool: &Pool,
    name: &str,
    length: usize,
) -> (Result<GetOutcome, crate::GetError>, Vec<u8>) {
    let memory = Region::allocate(Length(length as u64));
    let gets = vec![GetBlock::new(key(name), memory.whole())];
    let mut outcomes = pool.client.batch_get(gets, &GetOptions::default()).await;
    (outcomes.remove(0), memory.whole().to_vec())
}
