//! The arguments of Python callers, read in place.

use super::codes;
use kvpool_client::PutOptions;
use kvpool_types::Key;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};
use std::time::Duration;

/// An address, an offset or a length, as any Python int. An int below 0 or above 64 bits has no value. This
/// fails its item, not the call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Number(Option<u64>);

impl Number {
    pub(super) const fn value(self) -> Option<u64> {
        self.0
    }
}

impl From<u64> for Number {
    fn from(value: u64) -> Self {
        Self(Some(value))
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Number {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<u64>() {
            Ok(value) => Ok(Self(Some(value))),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => Ok(Self(None)),
            Err(error) => Err(error),
        }
    }
}

/// The key of a string; `None` for a string that is no key: empty, over 1 KiB, or not UTF-8.
pub(super) fn key(text: &Bound<'_, PyAny>) -> PyResult<Option<Key>> {
    let text = text.cast::<PyString>().map_err(|_| {
        let kind = text.get_type();
        PyTypeError::new_err(format!("a key must be a str, not {kind}"))
    })?;
    Ok(text.to_str().ok().and_then(|text| Key::parse(text).ok()))
}

/// Keys in the order given; `None` for strings that are no keys.
pub(super) struct Keys(pub(super) Vec<Option<Key>>);

impl<'a, 'py> FromPyObject<'a, 'py> for Keys {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(list) = object.cast::<PyList>() {
            return list
                .iter()
                .map(|text| key(&text))
                .collect::<PyResult<_>>()
                .map(Self);
        }
        if let Ok(tuple) = object.cast::<PyTuple>() {
            return tuple
                .iter()
                .map(|text| key(&text))
                .collect::<PyResult<_>>()
                .map(Self);
        }
        // A str is a sequence of strs, but a caller never means its characters as keys.
        let kind = object.get_type();
        Err(PyTypeError::new_err(format!(
            "keys must be a list of str, not {kind}"
        )))
    }
}

impl Keys {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Calls `ask` with the valid keys, and puts its answers in their places. The answer of any other key is
    /// the code of bad parameters.
    pub(super) fn ask(self, ask: impl FnOnce(Vec<Key>) -> Vec<i64>) -> Vec<i64> {
        let count = self.len();
        let bad: Vec<usize> = (0..count)
            .filter(|at| matches!(self.0.get(*at), Some(None)))
            .collect();
        let good: Vec<Key> = self.0.into_iter().flatten().collect();
        let answers = if good.is_empty() {
            Vec::new()
        } else {
            ask(good)
        };
        if bad.is_empty() {
            return answers;
        }
        let mut answers = answers.into_iter();
        let mut bad = bad.into_iter().peekable();
        (0..count)
            .map(|at| match bad.next_if_eq(&at) {
                Some(_) => codes::PARAMETERS,
                None => answers.next().unwrap_or(codes::PARAMETERS),
            })
            .collect()
    }
}

/// The options of a put, as Python passes them: replicas, preferred nodes, whether to prefer this host,
/// soft pin in milliseconds, hard pin.
pub(super) type How = (u32, Vec<String>, bool, Option<u64>, bool);

/// The client's form of these options.
pub(super) fn put_options(how: How, upsert: bool) -> PutOptions {
    let (replicas, preferred_nodes, prefer_same_host, soft_pin_ms, hard_pin) = how;
    PutOptions {
        replicas,
        preferred_nodes,
        prefer_same_host,
        soft_pin: soft_pin_ms.map(Duration::from_millis),
        hard_pin,
        upsert,
        timeout: None,
    }
}
