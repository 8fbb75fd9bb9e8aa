//! Calls that move no bytes, timed: exist, match_prefix, views.

use super::blocks::{is_right, key};
use super::moves::check;
use super::protocol::Set;
use super::serve::Clock;
use crate::window::{Measured, Meter};
use anyhow::{Context as _, bail};
use kvctl::connection::{control_error, get_error};
use kvpool_client::{GetOptions, Leasing, ViewOptions, blocking};
use kvpool_types::{Key, Length};
use std::time::Instant;

/// The number of batches of random keys that take turns.
const BATCHES: u64 = 8;

/// Times `exist` of randomly picked blocks that are present. After the window it checks `exist` of absent
/// keys.
pub(super) fn exist(
    client: &blocking::Client,
    seed: &str,
    set: &Set,
    batch: u64,
    lease: bool,
    clock: Clock<'_>,
) -> anyhow::Result<Measured> {
    let leasing = if lease { Leasing::Lease } else { Leasing::None };
    let count = set.live.count().max(1);
    // The state of an xorshift generator, which must not be zero.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        set.live.first + state % count
    };
    let batches: Vec<Vec<Key>> = (0..BATCHES)
        .map(|_| (0..batch).map(|_| key(seed, set, random())).collect())
        .collect();
    let measured = clock.time(|window| {
        let mut meter = Meter::default();
        for keys in batches.iter().cycle() {
            if meter.fills(window) {
                break;
            }
            let begin = Instant::now();
            let answer = client.exist(keys, leasing);
            meter.add(begin.elapsed(), batch);
            let (present, _lease) = answer.map_err(control_error)?;
            if present.len() != keys.len() || !present.iter().all(|present| *present) {
                bail!("exist missed blocks that were put");
            }
        }
        Ok(meter)
    })?;
    let absent: Vec<Key> = (0..batch)
        .map(|number| key(seed, set, set.live.end + number))
        .collect();
    let (present, _lease) = client
        .exist(&absent, Leasing::None)
        .map_err(control_error)?;
    if present.iter().any(|present| *present) {
        bail!("exist reported blocks that were never put");
    }
    Ok(measured)
}

/// Times `match_prefix` of the set's oldest blocks, which are a chain. After the window it checks a chain
/// with an absent block in the middle.
pub(super) fn match_prefix(
    client: &blocking::Client,
    seed: &str,
    set: &Set,
    blocks: u64,
    clock: Clock<'_>,
) -> anyhow::Result<Measured> {
    let first = set.live.first;
    let mut keys: Vec<Key> = (first..first + blocks)
        .map(|number| key(seed, set, number))
        .collect();
    let measured = clock.time(|window| {
        let mut meter = Meter::default();
        while !meter.fills(window) {
            let begin = Instant::now();
            let answer = client.match_prefix(&keys);
            meter.add(begin.elapsed(), blocks);
            let found = answer.map_err(control_error)?.blocks;
            if found != keys.len() {
                bail!("match_prefix found {found} of {blocks} blocks of a chain");
            }
        }
        Ok(meter)
    })?;
    let middle = keys.len() / 2;
    if let Some(key_there) = keys.get_mut(middle) {
        *key_there = key(seed, set, set.live.end);
    }
    let found = client.match_prefix(&keys).map_err(control_error)?.blocks;
    if found != middle {
        bail!("match_prefix found {found} blocks of a chain of {middle}");
    }
    Ok(measured)
}

/// Times views of a few blocks whose locations are cached. It verifies the bytes of the last view.
pub(super) fn views(
    client: &blocking::Client,
    seed: &str,
    set: &Set,
    among: u64,
    clock: Clock<'_>,
) -> anyhow::Result<Measured> {
    let numbers: Vec<u64> = (0..among.min(set.live.count()))
        .map(|at| set.live.first + at)
        .collect();
    let keys: Vec<Key> = numbers
        .iter()
        .map(|number| key(seed, set, *number))
        .collect();
    let options = ViewOptions {
        unverified: true,
        ..ViewOptions::default()
    };
    for key in &keys {
        // A read of one byte looks the block up and caches its location.
        let byte = kvpool_client::Region::allocate(Length(1)).whole();
        client
            .get_range(
                key,
                kvpool_types::Offset(0),
                vec![byte],
                &GetOptions::default(),
            )
            .map_err(get_error)?;
    }
    let mut last = None;
    let measured = clock.time(|window| {
        let mut meter = Meter::default();
        for (number, key) in numbers.iter().zip(&keys).cycle() {
            if meter.fills(window) {
                break;
            }
            let begin = Instant::now();
            let view = client.get_view(key, &options);
            meter.add(begin.elapsed(), set.block);
            let view = view
                .map_err(get_error)?
                .context("a block of the benchmark was evicted")?;
            if view.length() != Length(set.block) {
                check(false)?;
            }
            last = Some((*number, view));
        }
        Ok(meter)
    })?;
    let (number, view) = last.context("the case took no view")?;
    check(is_right(seed, set, number, &[view.memory().clone()]))?;
    Ok(measured)
}
