//! A store that is set up: the client, what it registered, and the segments and sessions it holds.

use super::codes;
use super::segments::Segments;
use super::sessions::Sessions;
use super::staging::Staging;
use crate::memory::Memory;
use kvpool_client::blocking::Client;
use kvpool_client::{GetBlock, GetError, GetOptions, Lookup, PutBlock, PutOptions};
use kvpool_transport::Slice;
use kvpool_types::{Key, Length};
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// What a store holds while it is set up. In a child made by fork it must not be used, and is never
/// taken apart: its threads are not there, and it would speak in its parent's name.
pub(super) struct Pool {
    parts: Option<Box<Parts>>,
    process: u32,
}

/// The parts of a [`Pool`].
pub(super) struct Parts {
    pub(super) client: Client,
    pub(super) memory: Memory,
    pub(super) segments: Segments,
    pub(super) sessions: Sessions,
    pub(super) staging: Staging,
}

/// How many pools the process has, and which process that is. A child made by fork finds both as they
/// were.
static LIVING: AtomicUsize = AtomicUsize::new(0);
static OWNER: AtomicU32 = AtomicU32::new(0);

/// The process of which this one is a fork, if it had pools then. Their threads waited on locks in
/// memory that this process uses for its own threads, so nothing here may use such locks as well.
pub(super) fn forked_from() -> Option<u32> {
    let owner = OWNER.load(Ordering::Acquire);
    let is_fork = owner != std::process::id() && LIVING.load(Ordering::Acquire) > 0;
    is_fork.then_some(owner)
}

impl Pool {
    pub(super) fn new(client: Client) -> Self {
        OWNER.store(std::process::id(), Ordering::Release);
        LIVING.fetch_add(1, Ordering::AcqRel);
        Self {
            parts: Some(Box::new(Parts {
                client,
                memory: Memory::default(),
                segments: Segments::default(),
                sessions: Sessions::default(),
                staging: Staging::default(),
            })),
            process: std::process::id(),
        }
    }
}

impl Deref for Pool {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        self.parts
            .as_ref()
            .expect("invariant: the parts are there until the drop")
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let parts = self.parts.take();
        if self.process != std::process::id() {
            std::mem::forget(parts);
        } else if let Some(parts) = parts {
            parts.sessions.end_all();
            parts.segments.close();
            drop(parts);
            LIVING.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// A block to move, or the code of what is wrong with it.
pub(super) type Item = Result<(Key, Vec<Slice>), i64>;

impl Parts {
    /// Puts the items that can be put: one code an item. Also why the first that failed did.
    pub(super) fn put(&self, items: Vec<Item>, options: &PutOptions) -> (Vec<i64>, Option<String>) {
        let mut why = None;
        let codes = spread(items, |items| {
            let blocks = items
                .into_iter()
                .map(|(key, buffers)| PutBlock {
                    key,
                    parent: None,
                    buffers,
                })
                .collect();
            let outcomes = self.client.batch_put(blocks, options);
            let code = |outcome| match outcome {
                Ok(_) => codes::OK,
                Err(error) => {
                    let code = codes::of_put(&error);
                    why.get_or_insert_with(|| error.to_string());
                    code
                }
            };
            outcomes.into_iter().map(code).collect()
        });
        (codes, why)
    }

    /// Gets the items that can be got: the length of each, or a code.
    pub(super) fn get(&self, items: Vec<Item>) -> (Vec<i64>, Option<String>) {
        let mut why = None;
        let codes = spread(items, |items| {
            let gets = items
                .into_iter()
                .map(|(key, buffers)| GetBlock { key, buffers })
                .collect();
            let outcomes = self.client.batch_get(gets, &GetOptions::default());
            let code = |outcome| match outcome {
                Ok(found) => length_of(found),
                Err(error) => {
                    why.get_or_insert_with(|| GetError::to_string(&error));
                    codes::of_get(&error)
                }
            };
            outcomes.into_iter().map(code).collect()
        });
        (codes, why)
    }

    /// The length of each of `keys`, which are leased and whose places are then known; or a code.
    pub(super) fn lengths(&self, keys: &[Key]) -> Vec<Result<u64, i64>> {
        let gets = keys
            .iter()
            .map(|key| GetBlock {
                key: key.clone(),
                buffers: Vec::new(),
            })
            .collect();
        // No buffer holds a block, which has at least one byte, and the error says how long it is.
        self.client
            .batch_get(gets, &GetOptions::default())
            .into_iter()
            .map(|outcome| match outcome {
                Err(GetError::BufferTooSmall { block, .. }) => Ok(block.0),
                Err(error) => Err(codes::of_get(&error)),
                Ok(Lookup::Hit { length, .. }) => Ok(length.0),
                Ok(Lookup::Miss) => Err(codes::NOT_FOUND),
            })
            .collect()
    }
}

/// The length of a block that was found, or that it was not.
pub(super) fn length_of(found: Lookup) -> i64 {
    match found {
        Lookup::Hit { length, .. } => as_count(length),
        Lookup::Miss => codes::NOT_FOUND,
    }
}

/// A number of bytes as Python is told it.
pub(super) fn as_count(length: Length) -> i64 {
    i64::try_from(length.0).unwrap_or(i64::MAX)
}

/// Does the good items in one go, and puts each answer in its item's place.
fn spread(items: Vec<Item>, work: impl FnOnce(Vec<(Key, Vec<Slice>)>) -> Vec<i64>) -> Vec<i64> {
    let mut codes: Vec<i64> = Vec::with_capacity(items.len());
    let mut good = Vec::with_capacity(items.len());
    let mut places = Vec::with_capacity(items.len());
    for (at, item) in items.into_iter().enumerate() {
        match item {
            Ok(item) => {
                good.push(item);
                places.push(at);
                codes.push(codes::PARAMETERS);
            }
            Err(code) => codes.push(code),
        }
    }
    if good.is_empty() {
        return codes;
    }
    for (at, answer) in places.into_iter().zip(work(good)) {
        if let Some(code) = codes.get_mut(at) {
            *code = answer;
        }
    }
    codes
}
