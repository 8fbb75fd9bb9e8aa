//! Queries that only the master answers: presence, sizes, descriptions, removals.

use super::args::{Keys, key};
use super::pool::as_count;
use super::{ObjectStore, aside, codes};
use crate::keys::{PackedTexts, list_of_alike, pack_texts};
use kvpool_client::{Leasing, Remove, Removed};
use kvpool_types::Key;
use pyo3::prelude::*;
use pyo3::types::PyList;

/// A replica: its node, its segment's number, the offset there, and its state.
type Replica = (String, u64, u64, String);

/// A described block: its length in bytes, and its replicas.
type Described = (u64, Vec<Replica>);

#[pymethods]
impl ObjectStore {
    /// Whether each key is present: 1, 0 or a code. Present keys are leased.
    fn exist<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let Some(pool) = self.pool()? else {
            let Keys(keys) = keys.extract()?;
            return list_of_alike(py, &vec![codes::PARAMETERS; keys.len()]);
        };
        let PackedTexts { keys, count, bad } = pack_texts(keys, pool.client.packer())?;
        let asked = count - bad.len();
        let present = aside(py, || pool.client.exist_packed(keys, Leasing::Lease));
        let mut answers: Vec<i64> = match present {
            Ok((present, _)) => present.into_iter().map(i64::from).collect(),
            Err(error) => {
                self.remember(Some(error.to_string()));
                vec![codes::of_control(&error); asked]
            }
        };
        // Insertion starts with the first index, so that the later indices are right.
        for at in bad {
            answers.insert(at, codes::PARAMETERS);
        }
        list_of_alike(py, &answers)
    }

    /// The length of a block in bytes, or a code.
    fn size(&self, py: Python<'_>, #[pyo3(from_py_with = key)] key: Option<Key>) -> PyResult<i64> {
        let (Some(pool), Some(key)) = (self.pool()?, key) else {
            return Ok(codes::PARAMETERS);
        };
        Ok(match aside(py, || pool.client.get_size(&key)) {
            Ok(Some(length)) => as_count(length),
            Ok(None) => codes::NOT_FOUND,
            Err(error) => {
                self.remember(Some(error.to_string()));
                codes::of_control(&error)
            }
        })
    }

    /// The master's description of each key; `None` for an absent key. A code when the master does not answer.
    fn describe(&self, py: Python<'_>, keys: Keys) -> PyResult<(i64, Vec<Option<Described>>)> {
        let nothing = |keys: &Keys| keys.0.iter().map(|_| None).collect();
        let Some(pool) = self.pool()? else {
            return Ok((codes::PARAMETERS, nothing(&keys)));
        };
        let good: Vec<Key> = keys.0.iter().flatten().cloned().collect();
        let described = match aside(py, || pool.client.describe(&good)) {
            Ok(described) => described,
            Err(error) => {
                self.remember(Some(error.to_string()));
                return Ok((codes::of_control(&error), nothing(&keys)));
            }
        };
        let mut described = described.into_iter().map(|described| {
            let described = described?;
            let replica = |replica: kvpool_client::DescribedReplica| {
                let extent = replica.extent;
                let segment = u64::from(extent.segment.0);
                (replica.node, segment, extent.offset.0, replica.state)
            };
            let replicas = described.replicas.into_iter().map(replica).collect();
            Some((described.length.0, replicas))
        });
        let place = |key: Option<Key>| key.and_then(|_| described.next().flatten());
        Ok((codes::OK, keys.0.into_iter().map(place).collect()))
    }

    /// Removes blocks. Returns one code for each key.
    fn remove(&self, py: Python<'_>, keys: Keys, force: bool) -> PyResult<Vec<i64>> {
        let Some(pool) = self.pool()? else {
            return Ok(vec![codes::PARAMETERS; keys.len()]);
        };
        let mut why = None;
        let answers = keys.ask(|keys| {
            aside(py, || {
                let what = Remove::Keys(keys.clone());
                match pool.client.remove(what, force) {
                    Ok(removed) => {
                        let codes = removed.codes.into_iter();
                        let code = |(key, code)| match codes::of(code, codes::RPC) {
                            codes::NOT_FOUND if pool.put_sessions.is_open(key) => codes::NOT_READY,
                            code => code,
                        };
                        keys.iter().zip(codes).map(code).collect()
                    }
                    Err(error) => {
                        why = Some(error.to_string());
                        vec![codes::of_remove(&error); keys.len()]
                    }
                }
            })
        });
        self.remember(why);
        Ok(answers)
    }

    /// Removes the blocks whose keys match a regular expression. Returns their number, or a code.
    fn remove_pattern(&self, py: Python<'_>, pattern: String, force: bool) -> PyResult<i64> {
        self.remove_many(py, Remove::Pattern(pattern), force)
    }

    /// Removes all blocks of this tenant. Returns their number, or a code.
    fn remove_namespace(&self, py: Python<'_>, force: bool) -> PyResult<i64> {
        self.remove_many(py, Remove::Namespace, force)
    }
}

impl ObjectStore {
    fn remove_many(&self, py: Python<'_>, what: Remove, force: bool) -> PyResult<i64> {
        let Some(pool) = self.pool()? else {
            return Ok(codes::PARAMETERS);
        };
        Ok(match aside(py, || pool.client.remove(what, force)) {
            Ok(Removed { removed, .. }) => i64::try_from(removed).unwrap_or(i64::MAX),
            Err(error) => {
                self.remember(Some(error.to_string()));
                codes::of_remove(&error)
            }
        })
    }
}
