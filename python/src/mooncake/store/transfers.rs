//! Puts and gets.

use super::args::{How, Keys, Number, key, put_options};
use super::handle::BufferHandle;
use super::lent::Lent;
use super::pool::{Buffers, Item, Parts, within};
use super::{ObjectStore, aside, aside_with, codes};
use crate::loan::{deadline, left};
use crate::mapped::Use;
use kvpool_client::{GetBlock, GetError, GetOutcome, PutOptions, ViewOptions};
use kvpool_transport::{Region, Slice};
use kvpool_types::{Key, Length, Offset};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use std::time::{Duration, Instant};

/// How long it may take at most to get a view, before the bytes are copied instead.
const VIEW_TIMEOUT: Duration = Duration::from_secs(1);

#[pymethods]
impl ObjectStore {
    /// Puts values, each made of parts that are bytes-like: one code a key.
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

    /// Puts one range of memory a key: one code a key.
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

    /// Puts several ranges of memory a key: one code a key.
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

    /// Gets into one range of memory a key: lengths or codes.
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

    /// Which ranges are memory of the host that Python can read, or also write. None is while the store is not set up.
    ///
    /// The ranges share one [`Lent`]: an older kernel's maps are read once, without the interpreter's lock.
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

    /// Gets into several ranges of memory a key: lengths or codes.
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

    /// Gets values as bytes; empty where there is none.
    fn get_values<'py>(&self, py: Python<'py>, keys: Keys) -> PyResult<Bound<'py, PyList>> {
        let Some(pool) = self.pool()? else {
            return PyList::new(py, keys.0.iter().map(|_| PyBytes::new(py, b"")));
        };
        let good: Vec<Key> = keys.0.iter().flatten().cloned().collect();
        let deadline = deadline(pool.client.timeouts().get);
        let lengths = aside(py, || pool.lengths(&good, deadline));
        let mut lengths = good.into_iter().zip(lengths);
        let lent = Lent::new(&pool, Use::ReadWrite);
        let mut gets = Vec::new();
        let mut values: Vec<Option<Bound<'_, PyBytes>>> = Vec::with_capacity(keys.len());
        for key in &keys.0 {
            let wanted = key.as_ref().and_then(|_| lengths.next());
            values.push(match wanted {
                Some((key, Ok(length))) => {
                    let (value, slice) = lent.fresh(py, length)?;
                    gets.push(GetBlock::new(key, slice));
                    Some(value)
                }
                _ => None,
            });
        }
        let outcomes = aside_with(py, lent, || {
            let again: Vec<Key> = gets.iter().map(|get| get.key.clone()).collect();
            let outcomes = pool.client.batch_get(gets, &within(deadline));
            let settle = |(key, outcome)| settled(&pool, &key, outcome, deadline);
            again
                .into_iter()
                .zip(outcomes)
                .map(settle)
                .collect::<Vec<_>>()
        });
        let mut outcomes = outcomes.into_iter();
        let values = values.into_iter().map(|value| {
            let empty = || PyBytes::new(py, b"");
            let Some(value) = value else { return empty() };
            match outcomes.next() {
                Some(Got::Whole(length)) if length.as_usize() == value.as_bytes().len() => value,
                Some(Got::Whole(length)) => {
                    let bytes = value
                        .as_bytes()
                        .get(..length.as_usize())
                        .unwrap_or_default();
                    PyBytes::new(py, bytes)
                }
                Some(Got::Other(memory)) => PyBytes::new(py, &memory.to_vec()),
                Some(Got::Nothing) | None => empty(),
            }
        });
        PyList::new(py, values.collect::<Vec<_>>())
    }

    /// Gets a value in place where it lies on this host, else a copy; `None` where there is none.
    fn get_handle(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = key)] key: Option<Key>,
    ) -> PyResult<Option<BufferHandle>> {
        let (Some(pool), Some(key)) = (self.pool()?, key) else {
            return Ok(None);
        };
        Ok(aside(py, || {
            let deadline = deadline(pool.client.timeouts().get);
            let options = ViewOptions {
                timeout: Some(VIEW_TIMEOUT.min(left(deadline) / 2)),
                ..ViewOptions::default()
            };
            match pool.client.get_view(&key, &options) {
                Ok(view) => view.map(|view| BufferHandle::new(view.memory().clone(), true)),
                Err(_) => copies(&pool, vec![key], deadline).pop().flatten(),
            }
        }))
    }

    /// Gets copies of values, moved together; `None` where there is none.
    fn get_handles(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<Option<BufferHandle>>> {
        let Some(pool) = self.pool()? else {
            return Ok(keys.0.iter().map(|_| None).collect());
        };
        let good: Vec<Key> = keys.0.iter().flatten().cloned().collect();
        let deadline = deadline(pool.client.timeouts().get);
        let mut found = aside(py, || copies(&pool, good, deadline)).into_iter();
        let place = |key: Option<Key>| key.and_then(|_| found.next().flatten());
        Ok(keys.0.into_iter().map(place).collect())
    }
}

impl ObjectStore {
    /// Puts from lent memory: one code an item.
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

    /// Gets into lent memory: a length or a code an item.
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

/// Keys and what goes with each, or the code of bad parameters where either is not one.
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

/// What a get into new memory came to.
enum Got {
    /// That many bytes of it.
    Whole(Length),
    /// A version of another length, in memory of its own.
    Other(Slice),
    Nothing,
}

/// Gets again what has become longer since its length was asked for.
fn settled(
    pool: &Parts,
    key: &Key,
    outcome: Result<GetOutcome, GetError>,
    deadline: Instant,
) -> Got {
    match outcome {
        Ok(GetOutcome::Hit { length, .. }) => Got::Whole(length),
        Err(GetError::BufferTooSmall { .. }) => {
            let mut memory: Option<Region> = None;
            let place = |length| Some(memory.insert(Region::allocate(length)).whole());
            let found = pool.client.get_placed(key, Some(left(deadline)), place);
            let block = match (found, memory) {
                (Ok(GetOutcome::Hit { length, .. }), Some(memory)) => {
                    memory.slice(Offset(0), length)
                }
                _ => None,
            };
            block.map_or(Got::Nothing, Got::Other)
        }
        _ => Got::Nothing,
    }
}

/// Copies of blocks, moved together.
fn copies(pool: &Parts, keys: Vec<Key>, deadline: Instant) -> Vec<Option<BufferHandle>> {
    let lengths = pool.lengths(&keys, deadline);
    let regions: Vec<Option<Region>> = lengths
        .iter()
        .map(|length| length.ok().map(|length| Region::allocate(Length(length))))
        .collect();
    let gets = keys.iter().zip(&regions).filter_map(|(key, region)| {
        let memory = region.as_ref()?.whole();
        Some(GetBlock::new(key.clone(), memory))
    });
    let outcomes = pool.client.batch_get(gets.collect(), &within(deadline));
    let mut outcomes = outcomes.into_iter();
    keys.iter()
        .zip(regions)
        .map(|(key, region)| {
            let region = region?;
            let memory = match settled(pool, key, outcomes.next()?, deadline) {
                Got::Whole(length) => region.slice(Offset(0), length),
                Got::Other(memory) => Some(memory),
                Got::Nothing => None,
            };
            memory.map(|memory| BufferHandle::new(memory, false))
        })
        .collect()
}
