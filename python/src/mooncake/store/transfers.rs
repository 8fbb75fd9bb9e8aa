//! Puts and gets.

use super::args::{How, Keys, Number, key, put_options};
use super::handle::BufferHandle;
use super::lent::Lent;
use super::pool::{Buffers, Item, Parts, failed_get, within};
use super::{ObjectStore, aside, aside_with, codes};
use crate::loan::{deadline, left};
use crate::mapped::Use;
use kvpool_client::{GetBlock, GetError, GetOutcome, PutOptions, ViewOptions};
use kvpool_transport::{Region, Slice};
use kvpool_types::{Key, Length, Offset};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::time::{Duration, Instant};

/// How long a view may take. After that the bytes are copied instead.
const VIEW_TIMEOUT: Duration = Duration::from_secs(1);

#[pymethods]
impl ObjectStore {
    /// Puts values, each made of bytes-like parts. Returns one code for each key.
    fn put_values(
        &self,
        py: Python<'_>,
        keys: Keys,
        values: Vec<Vec<Bound<'_, PyAny>>>,
        how: How,
        upsert: bool,
    ) -> PyResult<Vec<i64>> {
        let Some(pool) = self.pool()?.filter(|_| keys.len() == values.len()) else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        let mut lent = Lent::new(&pool, Use::Read);
        let mut items: Vec<Item> = Vec::with_capacity(keys.len());
        for (key, parts) in keys.0.into_iter().zip(values) {
            let mut slices = Vec::with_capacity(parts.len());
            for part in parts {
                let slice = lent.object(&part)?;
                if slice.length() > Length(0) {
                    slices.push(slice);
                }
            }
            let item = key.map(|key| (key, Buffers::Host(slices)));
            items.push(item.ok_or(codes::PARAMETERS));
        }
        self.put_items(py, &pool, lent, items, &put_options(how, upsert))
    }

    /// Puts one range of memory for each key. Returns one code for each key.
    fn put_from(
        &self,
        py: Python<'_>,
        keys: Keys,
        addresses: Vec<Number>,
        lengths: Vec<Number>,
        how: How,
        upsert: bool,
    ) -> PyResult<Vec<i64>> {
        let alike = keys.len() == addresses.len() && keys.len() == lengths.len();
        let Some(pool) = self.pool()?.filter(|_| alike) else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        let lent = Lent::new(&pool, Use::Read);
        let items = items(keys, addresses.into_iter().zip(lengths), |(at, length)| {
            lent.ranges(&[at], &[length])
        });
        self.put_items(py, &pool, lent, items, &put_options(how, upsert))
    }

    /// Puts several ranges of memory for each key. Returns one code for each key.
    fn put_from_many(
        &self,
        py: Python<'_>,
        keys: Keys,
        addresses: Vec<Vec<Number>>,
        lengths: Vec<Vec<Number>>,
        how: How,
        upsert: bool,
    ) -> PyResult<Vec<i64>> {
        let alike = keys.len() == addresses.len() && keys.len() == lengths.len();
        let Some(pool) = self.pool()?.filter(|_| alike) else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        let lent = Lent::new(&pool, Use::Read);
        let items = items(keys, addresses.iter().zip(&lengths), |(at, length)| {
            lent.ranges(at, length)
        });
        self.put_items(py, &pool, lent, items, &put_options(how, upsert))
    }

    /// Gets each block into one range of memory. Returns lengths or codes.
    fn get_into(
        &self,
        py: Python<'_>,
        keys: Keys,
        addresses: Vec<Number>,
        lengths: Vec<Number>,
    ) -> PyResult<Vec<i64>> {
        let alike = keys.len() == addresses.len() && keys.len() == lengths.len();
        let Some(pool) = self.pool()?.filter(|_| alike) else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        let lent = Lent::new(&pool, Use::ReadWrite);
        let items = items(keys, addresses.into_iter().zip(lengths), |(at, length)| {
            lent.ranges(&[at], &[length])
        });
        self.get_items(py, &pool, lent, items)
    }

    /// Which ranges are host memory that Python can read or, with `write`, also write. All are false while the
    /// store is not set up.
    ///
    /// The ranges share one [`Lent`]: on an older kernel it reads the maps once, without the interpreter's
    /// lock.
    fn are_of_host(
        &self,
        py: Python<'_>,
        addresses: Vec<Number>,
        lengths: Vec<Number>,
        write: bool,
    ) -> PyResult<Vec<bool>> {
        let Some(pool) = self.pool()? else {
            return Ok(vec![false; addresses.len()]);
        };
        let how = if write { Use::ReadWrite } else { Use::Read };
        Ok(aside(py, || {
            let lent = Lent::new(&pool, how);
            let ranges = addresses.into_iter().zip(lengths);
            ranges
                .map(|(address, length)| lent.range(address, length).is_some())
                .collect()
        }))
    }

    /// Gets each block into several ranges of memory. Returns lengths or codes.
    fn get_into_many(
        &self,
        py: Python<'_>,
        keys: Keys,
        addresses: Vec<Vec<Number>>,
        lengths: Vec<Vec<Number>>,
    ) -> PyResult<Vec<i64>> {
        let alike = keys.len() == addresses.len() && keys.len() == lengths.len();
        let Some(pool) = self.pool()?.filter(|_| alike) else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        let lent = Lent::new(&pool, Use::ReadWrite);
        let items = items(keys, addresses.iter().zip(&lengths), |(at, length)| {
            lent.ranges(at, length)
        });
        self.get_items(py, &pool, lent, items)
    }

    /// Gets values as bytes, empty for a miss or an error, and one code for each key.
    fn get_values<'py>(
        &self,
        py: Python<'py>,
        keys: Keys,
    ) -> PyResult<(Bound<'py, PyList>, Vec<i64>)> {
        let empty = || PyBytes::new(py, b"");
        let Some(pool) = self.pool()? else {
            let values = PyList::new(py, keys.0.iter().map(|_| empty()))?;
            return Ok((values, vec![codes::PARAMETERS; keys.len()]));
        };
        let good: Vec<Key> = keys.0.iter().flatten().cloned().collect();
        let deadline = deadline(pool.client.timeouts().get);
        let (lengths, unknown) = aside(py, || pool.lengths(&good, deadline));
        let mut lengths = good.into_iter().zip(lengths);
        let lent = Lent::new(&pool, Use::ReadWrite);
        let mut gets = Vec::new();
        let mut values: Vec<Result<Bound<'_, PyBytes>, i64>> = Vec::with_capacity(keys.len());
        for key in &keys.0 {
            let wanted = key.as_ref().and_then(|_| lengths.next());
            values.push(match wanted {
                Some((key, Ok(length))) => {
                    let (value, slice) = lent.fresh(py, length)?;
                    gets.push(GetBlock::new(key, slice));
                    Ok(value)
                }
                Some((_, Err(code))) => Err(code),
                None => Err(codes::PARAMETERS),
            });
        }
        let (outcomes, failed) = aside_with(py, lent, || {
            let mut why = None;
            let again: Vec<Key> = gets.iter().map(|get| get.key.clone()).collect();
            let outcomes = pool.client.batch_get(gets, &within(deadline));
            let settle = |(key, outcome)| settled(&pool, &key, outcome, deadline, &mut why);
            let outcomes: Vec<Got> = again.into_iter().zip(outcomes).map(settle).collect();
            (outcomes, why)
        });
        self.remember(unknown.or(failed));
        let mut outcomes = outcomes.into_iter();
        let mut answers = Vec::with_capacity(values.len());
        let mut filled = Vec::with_capacity(values.len());
        for value in values {
            let (value, code) = match value {
                Ok(value) => match outcomes.next().unwrap_or(Got::Nothing(codes::TRANSFER)) {
                    Got::Whole(length) if length.as_usize() == value.as_bytes().len() => {
                        (value, codes::OK)
                    }
                    Got::Whole(length) => {
                        let bytes = value.as_bytes().get(..length.as_usize());
                        (PyBytes::new(py, bytes.unwrap_or_default()), codes::OK)
                    }
                    Got::Other(memory) => (PyBytes::new(py, &memory.to_vec()), codes::OK),
                    Got::Nothing(code) => (empty(), code),
                },
                Err(code) => (empty(), code),
            };
            filled.push(value);
            answers.push(code);
        }
        Ok((PyList::new(py, filled)?, answers))
    }

    /// Gets a value in place if a node on this host has it, else as a copy; `None` for a miss or an error. Also
    /// returns a code.
    fn get_handle(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = key)] key: Option<Key>,
    ) -> PyResult<(Option<BufferHandle>, i64)> {
        let (Some(pool), Some(key)) = (self.pool()?, key) else {
            return Ok((None, codes::PARAMETERS));
        };
        let (copied, why) = aside(py, || {
            let deadline = deadline(pool.client.timeouts().get);
            let options = ViewOptions {
                timeout: Some(VIEW_TIMEOUT.min(left(deadline) / 2)),
                ..ViewOptions::default()
            };
            match pool.client.get_view(&key, &options) {
                Ok(Some(view)) => (Ok(BufferHandle::new(view.memory().clone(), true)), None),
                Ok(None) => (Err(codes::NOT_FOUND), None),
                // The copy reports the failure if it fails too.
                Err(_) => {
                    let (mut copied, why) = copies(&pool, vec![key], deadline);
                    (copied.pop().unwrap_or(Err(codes::TRANSFER)), why)
                }
            }
        });
        self.remember(why);
        let code = code_of(&copied);
        Ok((copied.ok(), code))
    }

    /// Gets copies of values in one batch, `None` for a miss or an error, and one code for each key.
    fn get_handles(
        &self,
        py: Python<'_>,
        keys: Keys,
    ) -> PyResult<(Vec<Option<BufferHandle>>, Vec<i64>)> {
        let Some(pool) = self.pool()? else {
            let nothing = keys.0.iter().map(|_| None).collect();
            return Ok((nothing, vec![codes::PARAMETERS; keys.len()]));
        };
        let good: Vec<Key> = keys.0.iter().flatten().cloned().collect();
        let deadline = deadline(pool.client.timeouts().get);
        let (copied, why) = aside(py, || copies(&pool, good, deadline));
        self.remember(why);
        let mut copied = copied.into_iter();
        let mut handles = Vec::with_capacity(keys.len());
        let mut answers = Vec::with_capacity(keys.len());
        for key in keys.0 {
            let handle = key.and_then(|_| copied.next());
            let handle = handle.unwrap_or(Err(codes::PARAMETERS));
            answers.push(code_of(&handle));
            handles.push(handle.ok());
        }
        Ok((handles, answers))
    }
}

impl ObjectStore {
    /// Puts from lent memory. Returns one code for each item.
    fn put_items(
        &self,
        py: Python<'_>,
        pool: &Parts,
        lent: Lent<'_>,
        items: Vec<Item>,
        options: &PutOptions,
    ) -> PyResult<Vec<i64>> {
        let deadline = deadline(pool.client.timeouts().put);
        let refusal = lent.refusal();
        let (codes, why) = aside_with(py, lent, || pool.put(items, options, deadline));
        self.remember(why.or(refusal));
        Ok(codes)
    }

    /// Gets into lent memory. Returns a length or a code for each item.
    fn get_items(
        &self,
        py: Python<'_>,
        pool: &Parts,
        lent: Lent<'_>,
        items: Vec<Item>,
    ) -> PyResult<Vec<i64>> {
        let deadline = deadline(pool.client.timeouts().get);
        let refusal = lent.refusal();
        let (codes, why) = aside_with(py, lent, || pool.get(items, deadline));
        self.remember(why.or(refusal));
        Ok(codes)
    }
}

/// Each key with its values. An item is the code of bad parameters if its key or its values are invalid.
fn items<T>(
    keys: Keys,
    memory: impl Iterator<Item = T>,
    lend: impl Fn(T) -> Option<Buffers>,
) -> Vec<Item> {
    keys.0
        .into_iter()
        .zip(memory)
        .map(|(key, memory)| match (key, lend(memory)) {
            (Some(key), Some(buffers)) => Ok((key, buffers)),
            _ => Err(codes::PARAMETERS),
        })
        .collect()
}

/// The outcome of a get into new memory.
enum Got {
    /// The block has this many bytes, in the new memory.
    Whole(Length),
    /// The block has another length, so it is in memory of its own.
    Other(Slice),
    /// A miss or a failure, with its code.
    Nothing(i64),
}

/// Gets blocks again that have grown since their lengths were read. `why` keeps the reason of the first
/// failure.
fn settled(
    pool: &Parts,
    key: &Key,
    outcome: Result<GetOutcome, GetError>,
    deadline: Instant,
    why: &mut Option<String>,
) -> Got {
    match outcome {
        Ok(GetOutcome::Hit { length, .. }) => Got::Whole(length),
        Ok(GetOutcome::Miss) => Got::Nothing(codes::NOT_FOUND),
        Err(GetError::BufferTooSmall { .. }) => {
            let mut memory: Option<Region> = None;
            let place = |length| Some(memory.insert(Region::allocate(length)).whole());
            let found = pool.client.get_placed(key, Some(left(deadline)), place);
            match found {
                Ok(GetOutcome::Hit { length, .. }) => {
                    let block = memory.and_then(|memory| memory.slice(Offset(0), length));
                    block.map_or(Got::Nothing(codes::TRANSFER), Got::Other)
                }
                Ok(GetOutcome::Miss) => Got::Nothing(codes::NOT_FOUND),
                Err(error) => Got::Nothing(failed_get(&error, why)),
            }
        }
        Err(error) => Got::Nothing(failed_get(&error, why)),
    }
}

/// The code for a copy.
fn code_of(copied: &Result<BufferHandle, i64>) -> i64 {
    match copied {
        Ok(_) => codes::OK,
        Err(code) => *code,
    }
}

/// Copies of blocks from one batch, or a code for each, and the reason of the first failure.
fn copies(
    pool: &Parts,
    keys: Vec<Key>,
    deadline: Instant,
) -> (Vec<Result<BufferHandle, i64>>, Option<String>) {
    let (lengths, mut why) = pool.lengths(&keys, deadline);
    let regions: Vec<Result<Region, i64>> = lengths
        .into_iter()
        .map(|length| length.map(|length| Region::allocate(Length(length))))
        .collect();
    let gets = keys.iter().zip(&regions).filter_map(|(key, region)| {
        let memory = region.as_ref().ok()?.whole();
        Some(GetBlock::new(key.clone(), memory))
    });
    let outcomes = pool.client.batch_get(gets.collect(), &within(deadline));
    let mut outcomes = outcomes.into_iter();
    let copied = keys
        .iter()
        .zip(regions)
        .map(|(key, region)| -> Result<BufferHandle, i64> {
            let region = region?;
            let outcome = outcomes.next().ok_or(codes::TRANSFER)?;
            let memory = match settled(pool, key, outcome, deadline, &mut why) {
                Got::Whole(length) => region.slice(Offset(0), length),
                Got::Other(memory) => Some(memory),
                Got::Nothing(code) => return Err(code),
            };
            let memory = memory.ok_or(codes::TRANSFER)?;
            Ok(BufferHandle::new(memory, false))
        })
        .collect();
    (copied, why)
}
