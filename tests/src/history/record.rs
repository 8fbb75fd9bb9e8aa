//! Clients that make random calls, and record their calls and the answers.

use super::values::LONGEST;
use super::{Excuse, Found, Operation, Removed, What, Wrote, decode, encode};
use crate::blocks;
use kvpool_client::{
    Client, GetBlock, GetOptions, GetOutcome, Leasing, PutBlock, PutError, PutOptions, PutOutcome,
    Region, Remove,
};
use kvpool_types::{Code, Key};
use rand::Rng;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// For how long clients change a key.
const ROUND: Duration = Duration::from_secs(5);

/// Records a history. The keys that its clients use must be new in the pool.
#[derive(Debug)]
pub struct Recorder {
    started: Instant,
    values: AtomicU64,
    operations: Mutex<Vec<Operation>>,
}

impl Default for Recorder {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            values: AtomicU64::new(0),
            operations: Mutex::default(),
        }
    }
}

impl Recorder {
    /// The excuse that blocks may have been lost between two points in time.
    pub fn lost(&self, from: Instant, to: Instant) -> Excuse {
        Excuse::Lost(self.at(from), self.at(to))
    }

    /// The excuse that blocks may have been unreachable between two points in time.
    pub fn hidden(&self, from: Instant, to: Instant) -> Excuse {
        Excuse::Hidden(self.at(from), self.at(to))
    }

    /// The history so far.
    pub fn history(&self) -> Vec<Operation> {
        self.operations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The excuse that a deposed leader may have answered between two points in time.
    pub fn deposed(&self, from: Instant, to: Instant) -> Excuse {
        Excuse::Deposed(self.at(from), self.at(to))
    }

    /// Makes a client call the pool for keys, one call after the other, until a point in time. The
    /// client changes `keys` keys for a while. Then it only reads them, and changes others. After
    /// an unknown outcome little is certain about a key, so no key is used for long. `remembers`
    /// says whether the client caches locations.
    pub async fn drive(&self, client: &Client, remembers: bool, keys: u64, until: Instant) {
        while Instant::now() < until {
            let start = Instant::now();
            let round = self.at(start).as_secs() / ROUND.as_secs();
            let (key, dice) = {
                let mut random = rand::rng();
                let dice = random.random_range(0..100);
                let earlier = match dice {
                    80.. => random.random_range(0..=round.min(4)),
                    _ => 0,
                };
                (
                    (round - earlier) * keys + random.random_range(0..keys),
                    dice,
                )
            };
            let what = match dice {
                0..12 => Some(self.put(client, key, false).await),
                12..20 => Some(self.put(client, key, true).await),
                20..26 => Some(remove(client, key).await),
                26..65 | 80..95 => get(client, key).await,
                _ => exist(client, key).await,
            };
            if let Some(what) = what {
                let operation = Operation {
                    key,
                    start: self.at(start),
                    end: self.at(Instant::now()),
                    remembers,
                    what,
                };
                self.operations
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(operation);
            }
        }
    }

    async fn put(&self, client: &Client, key: u64, upsert: bool) -> What {
        let value = self.values.fetch_add(1, Ordering::Relaxed);
        let put = PutBlock::new(name(key), Region::from(encode(key, value)).whole());
        let options = PutOptions {
            upsert,
            ..PutOptions::default()
        };
        let wrote = match client.batch_put(vec![put], &options).await.remove(0) {
            Ok(PutOutcome::Stored { .. }) => Wrote::Stored,
            Ok(PutOutcome::Present) if !upsert => Wrote::Present,
            Ok(PutOutcome::Present) | Err(PutError::OutcomeUnknown { .. }) => Wrote::Unknown,
            Err(_) => Wrote::Not,
        };
        match upsert {
            true => What::Upsert(value, wrote),
            false => What::Put(value, wrote),
        }
    }

    /// The present point in time of the history.
    pub fn now(&self) -> super::At {
        self.at(Instant::now())
    }

    fn at(&self, instant: Instant) -> super::At {
        instant.saturating_duration_since(self.started)
    }
}

/// The keys of a history, which differ from the keys of other blocks.
fn name(key: u64) -> Key {
    blocks::key(1 << 48 | key)
}

async fn remove(client: &Client, key: u64) -> What {
    // With force: a history knows no leases, which would protect the block.
    let removed = client.remove(Remove::Keys(vec![name(key)]), true).await;
    let code = removed.ok().and_then(|r| r.codes.first().copied());
    match code {
        Some(Code::Ok) => What::Remove(Removed::Done),
        Some(Code::Missing) => What::Remove(Removed::Missing),
        Some(_) => What::Remove(Removed::Refused),
        None => What::Remove(Removed::Unknown),
    }
}

async fn get(client: &Client, key: u64) -> Option<What> {
    let target = blocks::target(LONGEST);
    let get = GetBlock::new(name(key), target.clone());
    let found = match client
        .batch_get(vec![get], &GetOptions::default())
        .await
        .remove(0)
    {
        Ok(GetOutcome::Hit { length, .. }) => {
            let mut bytes = target.to_vec();
            bytes.truncate(usize::try_from(length.0).unwrap_or(usize::MAX));
            decode(key, &bytes)
        }
        Ok(GetOutcome::Miss) => Found::Nothing,
        Err(_) => return None,
    };
    Some(What::Get(found))
}

async fn exist(client: &Client, key: u64) -> Option<What> {
    let answer = client.exist(&[name(key)], Leasing::None).await.ok()?;
    answer.present.first().copied().map(What::Exist)
}
