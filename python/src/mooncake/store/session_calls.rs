//! The Python methods of sessions and ranges.

use super::args::{How, Keys, Number, put_options};
use super::lent::Lent;
use super::pool::{Buffers, Item};
use super::ranges::{self, Fragment};
use super::{ObjectStore, aside, aside_with, codes};
use crate::loan::deadline;
use crate::mapped::Use;
use kvpool_transport::{Region, Slice};
use pyo3::prelude::*;

#[pymethods]
impl ObjectStore {
    /// Reads one fragment of a block for each item of the lists. Returns lengths or codes. A fragment starts at
    /// its offset in the block and fills its memory.
    fn get_ranges(
        &self,
        py: Python<'_>,
        keys: Keys,
        addresses: Vec<Number>,
        lengths: Vec<Number>,
        offsets: Vec<Number>,
    ) -> PyResult<Vec<i64>> {
        let count = keys.len();
        let alike = [addresses.len(), lengths.len(), offsets.len()] == [count; 3];
        let Some(pool) = self.pool()?.filter(|_| alike) else {
            return Ok(vec![codes::PARAMETERS; count]);
        };
        let lent = Lent::new(&pool, Use::ReadWrite);
        let memory = addresses.into_iter().zip(lengths).zip(offsets);
        let fragments: Vec<Fragment> = keys
            .0
            .into_iter()
            .zip(memory)
            .map(|(key, ((address, length), offset))| {
                let fragment = (key, offset.value(), lent.range(address, length));
                match fragment {
                    (Some(key), Some(offset), Some(slice)) => Ok((key, offset, slice)),
                    _ => Err(codes::PARAMETERS),
                }
            })
            .collect();
        let refusal = lent.refusal();
        let (answers, why) = aside_with(py, lent, || ranges::read(&pool.client, fragments));
        self.remember(why.or(refusal));
        Ok(answers)
    }

    /// Begins a get session for each key that is present. Returns 0 or a code for each key. The keys are leased
    /// until their sessions end.
    fn get_session_start(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<i64>> {
        let Some(pool) = self.pool()? else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        let mut why = None;
        let answers = keys.ask(|keys| {
            aside(py, || match pool.get_sessions.start(&pool.client, &keys) {
                Ok(present) => present
                    .into_iter()
                    .map(|present| if present { codes::OK } else { codes::NOT_FOUND })
                    .collect(),
                Err(error) => {
                    why = Some(error.to_string());
                    vec![codes::of_control(&error); keys.len()]
                }
            })
        });
        self.remember(why);
        Ok(answers)
    }

    /// Ends the get session of each key. Returns 0, or the code for a key without a session.
    fn get_session_end(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<i64>> {
        let Some(pool) = self.pool()? else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        Ok(keys.ask(|keys| {
            aside(py, || {
                let ended = pool.get_sessions.end(&keys).into_iter();
                ended
                    .map(|ended| if ended { codes::OK } else { codes::NOT_FOUND })
                    .collect()
            })
        }))
    }

    /// Begins a put session for each key. Returns 0 or a code for each key.
    fn put_session_start(
        &self,
        py: Python<'_>,
        keys: Keys,
        sizes: Vec<Number>,
        how: How,
    ) -> PyResult<Vec<i64>> {
        let Some(pool) = self.pool()?.filter(|_| keys.len() == sizes.len()) else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        let options = put_options(how, false);
        Ok(aside(py, || {
            let most = pool.client.limits().max_block.0;
            let start = |(key, size): (Option<_>, Number)| match (key, size.value()) {
                (Some(key), Some(size)) => pool.put_sessions.start(&key, size, most, &options),
                _ => codes::PARAMETERS,
            };
            keys.0.into_iter().zip(sizes).map(start).collect()
        }))
    }

    /// Writes ranges of blocks with open put sessions. Returns the number of bytes, or a code, for each key.
    fn put_session_write(
        &self,
        py: Python<'_>,
        keys: Keys,
        addresses: Vec<Vec<Number>>,
        lengths: Vec<Vec<Number>>,
        offsets: Vec<Vec<Number>>,
    ) -> PyResult<Vec<i64>> {
        let count = keys.len();
        let alike = [addresses.len(), lengths.len(), offsets.len()] == [count; 3];
        let Some(pool) = self.pool()?.filter(|_| alike) else {
            return Ok(vec![codes::PARAMETERS; count]);
        };
        let lent = Lent::new(&pool, Use::Read);
        let memory = addresses.iter().zip(&lengths).zip(&offsets);
        let writes: Vec<_> = keys
            .0
            .into_iter()
            .zip(memory)
            .map(|(key, ((addresses, lengths), offsets))| {
                Some((key?, writes(&lent, addresses, lengths, offsets)?))
            })
            .collect();
        self.remember(lent.refusal());
        Ok(aside_with(py, lent, || {
            let write = |write: Option<(_, Vec<(u64, Slice)>)>| match write {
                Some((key, ranges)) => pool.put_sessions.write(&key, &ranges),
                None => codes::PARAMETERS,
            };
            writes.into_iter().map(write).collect()
        }))
    }

    /// Puts the blocks of put sessions and ends the sessions. Returns one code for each key.
    fn put_session_end(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<i64>> {
        let Some(pool) = self.pool()? else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        let (codes, why) = aside(py, || {
            let deadline = deadline(pool.client.timeouts().put);
            let mut same_options = None;
            let mut why = None;
            let mut codes = Vec::with_capacity(keys.len());
            let mut run: Vec<Item> = Vec::new();
            // Sessions that end together nearly always began together, with equal options.
            for key in keys.0 {
                let ended = match &key {
                    Some(key) => pool.put_sessions.end(key),
                    None => Err(codes::PARAMETERS),
                };
                let item = match (key, ended) {
                    (Some(key), Ok((bytes, options))) => {
                        if same_options.as_ref().is_some_and(|same| *same != options) {
                            let items = std::mem::take(&mut run);
                            let options = same_options.take().unwrap_or_default();
                            let (done, failed) = pool.put(items, &options, deadline);
                            codes.extend(done);
                            why = why.or(failed);
                        }
                        same_options = Some(options);
                        let whole = vec![Region::from(bytes).whole()];
                        Ok((key, Buffers::Host(whole)))
                    }
                    (_, Err(code)) => Err(code),
                    (None, Ok(_)) => Err(codes::PARAMETERS),
                };
                run.push(item);
            }
            let options = same_options.unwrap_or_default();
            let (done, failed) = pool.put(run, &options, deadline);
            codes.extend(done);
            (codes, why.or(failed))
        });
        self.remember(why);
        Ok(codes)
    }

    /// Drops put sessions. Returns 0, or the code for a key without a session.
    fn put_session_revoke(&self, py: Python<'_>, keys: Keys) -> PyResult<Vec<i64>> {
        let Some(pool) = self.pool()? else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        Ok(keys.ask(|keys| {
            aside(py, || {
                keys.iter()
                    .map(|key| {
                        if pool.put_sessions.revoke(key) {
                            codes::OK
                        } else {
                            codes::NOT_FOUND
                        }
                    })
                    .collect()
            })
        }))
    }
}

/// The ranges to write into one block; `None` if the lists do not match or a range is out of bounds.
fn writes(
    lent: &Lent<'_>,
    addresses: &[Number],
    lengths: &[Number],
    offsets: &[Number],
) -> Option<Vec<(u64, Slice)>> {
    if [lengths.len(), offsets.len()] != [addresses.len(); 2] {
        return None;
    }
    addresses
        .iter()
        .zip(lengths)
        .zip(offsets)
        .map(|((address, length), offset)| Some((offset.value()?, lent.range(*address, *length)?)))
        .collect()
}
