//! A store that is set up: the client, its registered memory, and its segments and sessions.

use super::codes;
use super::get_sessions::GetSessions;
use super::put_sessions::PutSessions;
use super::segments::Segments;
use crate::home::{Home, Resident, end_aside};
use crate::loan::left;
use crate::memory::Memory;
use crate::places::{Placed, by_place, put_by_place};
use kvpool_client::blocking::Client;
use kvpool_client::{GetBlock, GetError, GetOptions, GetOutcome, GpuSlice, PutBlock, PutOptions};
use kvpool_transport::Slice;
use kvpool_types::{Key, Length};
use std::ops::Deref;
use std::time::Instant;

/// The state of a store that is set up. A child made by fork must neither use nor drop it. It lacks the
/// threads, and its messages would go out in the parent's name.
pub(super) struct Pool {
    parts: Option<Box<Parts>>,
    home: Home,
}

/// The parts of a [`Pool`].
pub(super) struct Parts {
    pub(super) client: Client,
    pub(super) memory: Memory,
    pub(super) segments: Segments,
    pub(super) get_sessions: GetSessions,
    pub(super) put_sessions: PutSessions,
    /// Dropped last, after all threads of the other parts.
    _resident: Resident,
}

impl Pool {
    pub(super) fn new(client: Client, resident: Resident) -> Self {
        Self {
            parts: Some(Box::new(Parts {
                client,
                memory: Memory::default(),
                segments: Segments::default(),
                get_sessions: GetSessions::default(),
                put_sessions: PutSessions::default(),
                _resident: resident,
            })),
            home: Home::here(),
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
        if !self.home.is_here() {
            std::mem::forget(parts);
        } else if let Some(parts) = parts {
            // The last call of a closed store may come here with the interpreter's lock held.
            end_aside(|| {
                parts.get_sessions.end_all();
                parts.segments.close();
                drop(parts);
            });
        }
    }
}

/// The memory from which a block is put, or into which it is got.
pub(super) type Buffers = Placed<Vec<Slice>, Vec<GpuSlice>>;

/// A block to move, or the code of an invalid item.
pub(super) type Item = Result<(Key, Buffers), i64>;

impl Parts {
    /// Puts the valid items. Returns one code for each item, and the reason of the first failure.
    pub(super) fn put(
        &self,
        items: Vec<Item>,
        options: &PutOptions,
        deadline: Instant,
    ) -> (Vec<i64>, Option<String>) {
        let within = || PutOptions {
            timeout: Some(left(deadline)),
            ..options.clone()
        };
        let mut why = None;
        let codes = spread(items, |items| {
            let puts = items.into_iter().map(|(key, buffers)| match buffers {
                Buffers::Host(slices) => Placed::Host(put(key, slices)),
                Buffers::Device(slices) => Placed::Device(put(key, slices)),
            });
            let outcomes = put_by_place(
                puts.collect(),
                |puts| self.client.batch_put(puts, &within()),
                |puts| self.client.batch_put_gpu(puts, &within()),
            );
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

    /// Gets the valid items. Returns a length or a code for each item, and the reason of the first failure.
    pub(super) fn get(&self, items: Vec<Item>, deadline: Instant) -> (Vec<i64>, Option<String>) {
        let mut why = None;
        let codes = spread(items, |items| {
            let outcomes = by_place(
                placed(items),
                |items| self.client.batch_get(gets(items), &within(deadline)),
                |items| self.client.batch_get_gpu(gets(items), &within(deadline)),
            );
            let code = |outcome| match outcome {
                Ok(found) => length_of(found),
                Err(error) => failed_get(&error, &mut why),
            };
            outcomes.into_iter().map(code).collect()
        });
        (codes, why)
    }

    /// The length of each key's block, or a code, and the reason of the first failed get. This leases the found
    /// blocks and caches their locations.
    pub(super) fn lengths(
        &self,
        keys: &[Key],
        deadline: Instant,
    ) -> (Vec<Result<u64, i64>>, Option<String>) {
        let gets = keys
            .iter()
            .map(|key| GetBlock {
                key: key.clone(),
                buffers: Vec::new(),
            })
            .collect();
        let mut why = None;
        // A block has at least one byte. So a get without buffers fails, and its error has the length.
        let length = |outcome| match outcome {
            Err(GetError::BufferTooSmall { block, .. }) => Ok(block.0),
            Err(error) => Err(failed_get(&error, &mut why)),
            Ok(GetOutcome::Hit { length, .. }) => Ok(length.0),
            Ok(GetOutcome::Miss) => Err(codes::NOT_FOUND),
        };
        let outcomes = self.client.batch_get(gets, &within(deadline));
        let lengths = outcomes.into_iter().map(length).collect();
        (lengths, why)
    }
}

/// The code of a failed get. `why` keeps the reason of the first failure.
pub(super) fn failed_get(error: &GetError, why: &mut Option<String>) -> i64 {
    why.get_or_insert_with(|| error.to_string());
    codes::of_get(error)
}

/// The options of a get with the time that the call has left.
pub(super) fn within(deadline: Instant) -> GetOptions {
    GetOptions {
        timeout: Some(left(deadline)),
        ..GetOptions::default()
    }
}

/// A key with its buffers, by the place of the buffers.
type PlacedItem = Placed<(Key, Vec<Slice>), (Key, Vec<GpuSlice>)>;

/// Sorts each key with its buffers by their place.
fn placed(items: Vec<(Key, Buffers)>) -> Vec<PlacedItem> {
    let place = |(key, buffers)| match buffers {
        Buffers::Host(slices) => Placed::Host((key, slices)),
        Buffers::Device(slices) => Placed::Device((key, slices)),
    };
    items.into_iter().map(place).collect()
}

const fn put<B>(key: Key, buffers: Vec<B>) -> PutBlock<B> {
    PutBlock {
        key,
        parent: None,
        buffers,
    }
}

fn gets<B>(items: Vec<(Key, Vec<B>)>) -> Vec<GetBlock<B>> {
    let get = |(key, buffers)| GetBlock { key, buffers };
    items.into_iter().map(get).collect()
}

/// The length of a found block, or the code of a miss.
pub(super) fn length_of(found: GetOutcome) -> i64 {
    match found {
        GetOutcome::Hit { length, .. } => as_count(length),
        GetOutcome::Miss => codes::NOT_FOUND,
    }
}

/// A number of bytes as a Python result.
pub(super) fn as_count(length: Length) -> i64 {
    i64::try_from(length.0).unwrap_or(i64::MAX)
}

/// Calls `work` once with the valid items, and puts each answer in its item's place.
fn spread(items: Vec<Item>, work: impl FnOnce(Vec<(Key, Buffers)>) -> Vec<i64>) -> Vec<i64> {
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
