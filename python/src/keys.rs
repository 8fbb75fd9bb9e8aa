//! Keys, namespaces and chains of Python callers.

// UNSAFETY: promises `lists` that reading a key runs no Python code.
#![allow(unsafe_code, reason = "keys of a list are read without counting each")]

mod lists;

use crate::errors::Fault;
use crate::pool::Whole;
use kvpool_client::{Namespace as Fields, PackedKeys};
use kvpool_types::chain;
use kvpool_types::{Key, KeyRef};
pub(crate) use lists::list_of_alike;
use lists::{bytes_of, for_each_borrowed, text_of};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString, PyTuple};
use std::num::NonZeroUsize;

/// Calls `each` for every item of a sequence, in order. Refuses a single string or bytes object, because its
/// items are never the intended keys.
pub(crate) fn for_each<'py>(
    items: &Bound<'py, PyAny>,
    what: &str,
    mut each: impl FnMut(&Bound<'py, PyAny>) -> PyResult<()>,
) -> PyResult<()> {
    if let Ok(list) = items.cast::<PyList>() {
        return list.iter().try_for_each(|item| each(&item));
    }
    if let Ok(tuple) = items.cast::<PyTuple>() {
        return tuple.iter().try_for_each(|item| each(&item));
    }
    if is_one_text(items) {
        return Err(PyTypeError::new_err(format!(
            "{what} is a sequence, not one {}",
            items.get_type().name()?
        )));
    }
    for item in items.try_iter()? {
        each(&item?)?;
    }
    Ok(())
}

/// The number of items that a sequence reports; 0 if it reports none.
pub(crate) fn length_hint(items: &Bound<'_, PyAny>) -> usize {
    items.len().unwrap_or_default()
}

fn is_one_text(items: &Bound<'_, PyAny>) -> bool {
    items.is_instance_of::<PyString>()
        || items.is_instance_of::<PyBytes>()
        || items.is_instance_of::<PyByteArray>()
}

/// Calls `found` with a key, without a copy: a string or the 32 bytes of a digest. An object of another type
/// raises an exception. A string or bytes object that is no valid key is a fault of that key alone.
fn with_key<T>(
    key: &Bound<'_, PyAny>,
    found: impl FnOnce(KeyRef<'_>) -> T,
) -> PyResult<Result<T, Fault>> {
    // Exact strings are the common case, so they skip the check for bytes.
    let is_string = key.is_exact_instance_of::<PyString>();
    if !is_string && let Some(bytes) = bytes_of(key) {
        return Ok(match <&[u8; 32]>::try_from(bytes) {
            Ok(digest) => Ok(found(KeyRef::Digest {
                prefix: "",
                suffix: "",
                digest,
            })),
            Err(_) => Err(Fault::invalid(format!(
                "a key of bytes is a digest of 32 bytes, this one has {}",
                bytes.len()
            ))),
        });
    }
    let text = match text_of(key) {
        Some(Ok(text)) => text,
        None => {
            return Err(PyTypeError::new_err(format!(
                "a key is a str or 32 bytes, not {}",
                key.get_type().name()?
            )));
        }
        Some(Err(error)) => {
            return Ok(Err(Fault::invalid(format!(
                "a key must be valid Unicode: {error}"
            ))));
        }
    };
    Ok(match KeyRef::parse(text, &mut [0; 32]) {
        Ok(key) => Ok(found(key)),
        Err(error) => Err(Fault::invalid(error.to_string())),
    })
}

/// A key, or the fault of the object.
pub(crate) fn read_key(key: &Bound<'_, PyAny>) -> PyResult<Result<Key, Fault>> {
    with_key(key, |key| key.to_key())
}

/// The keys of a call that has no result for each key. The first invalid key raises an exception.
pub(crate) fn read_keys(keys: &Bound<'_, PyAny>) -> PyResult<Vec<Key>> {
    let mut read = Vec::with_capacity(length_hint(keys));
    for_each(keys, "keys", |key| {
        let key = read_key(key)?.map_err(|fault| fault.at(&format!("keys[{}]", read.len())))?;
        read.push(key);
        Ok(())
    })?;
    Ok(read)
}

/// The same keys, packed for the wire: one call may have thousands.
pub(crate) fn pack_keys(keys: &Bound<'_, PyAny>, mut packed: PackedKeys) -> PyResult<PackedKeys> {
    let mut at = 0;
    let pack = |key: &Bound<'_, PyAny>| {
        let packing = with_key(key, |key| packed.push(key))?;
        packing.map_err(|fault| fault.at(&format!("keys[{at}]")))?;
        at += 1;
        Ok(())
    };
    match keys.cast::<PyList>() {
        // SAFETY: reading a key runs no Python code. Only the error for an object that is no key does, and the
        // item is not used after it.
        Ok(list) => unsafe { for_each_borrowed(list, pack) }?,
        Err(_) => for_each(keys, "keys", pack)?,
    }
    Ok(packed)
}

/// Keys given as text only, packed for the wire.
pub(crate) struct PackedTexts {
    /// The valid keys.
    pub(crate) keys: PackedKeys,
    /// The number of texts.
    pub(crate) count: usize,
    /// The indices of the texts that are no keys: empty, too long, or not UTF-8.
    pub(crate) bad: Vec<usize>,
}

/// Packs the keys of a list or tuple of strings. An object of another type raises an exception.
pub(crate) fn pack_texts(keys: &Bound<'_, PyAny>, packer: PackedKeys) -> PyResult<PackedTexts> {
    let mut packed = PackedTexts {
        keys: packer,
        count: 0,
        bad: Vec::new(),
    };
    let pack = |key: &Bound<'_, PyAny>| {
        let Some(text) = text_of(key) else {
            return Err(PyTypeError::new_err(format!(
                "a key must be a str, not {}",
                key.get_type().name()?
            )));
        };
        let is_key = match text {
            Ok(text) => match KeyRef::parse(text, &mut [0; 32]) {
                Ok(key) => {
                    packed.keys.push(key);
                    true
                }
                Err(_) => false,
            },
            Err(_) => false,
        };
        if !is_key {
            packed.bad.push(packed.count);
        }
        packed.count += 1;
        Ok(())
    };
    match keys.cast::<PyList>() {
        // SAFETY: reading a key runs no Python code. Only the error for an object that is no key does, and the
        // item is not used after it.
        Ok(list) => unsafe { for_each_borrowed(list, pack) }?,
        Err(_) => for_each(keys, "keys", pack)?,
    }
    Ok(packed)
}

/// A namespace: its name, and the fields from which the keys of its chains are derived.
///
/// Pools with equal names of namespaces see each other's blocks. Chains of `chain_keys` have equal keys when
/// the other four fields are equal. A name is up to 255 bytes of `A-Z a-z 0-9 . _ / : @ -`; an empty name
/// means "default". The other fields are any text of up to 1 KiB. Another name or a longer text raises
/// InvalidArgumentError.
#[pyclass(frozen, eq, hash, get_all, module = "kvpool")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Namespace {
    name: String,
    model: String,
    dtype: String,
    parallel_rank: String,
    salt: String,
}

#[pymethods]
impl Namespace {
    #[new]
    #[pyo3(signature = (name="", *, model="", dtype="", parallel_rank="", salt=""))]
    fn new(
        name: &str,
        model: &str,
        dtype: &str,
        parallel_rank: &str,
        salt: &str,
    ) -> Result<Self, Fault> {
        let namespace = Self {
            name: name.to_owned(),
            model: model.to_owned(),
            dtype: dtype.to_owned(),
            parallel_rank: parallel_rank.to_owned(),
            salt: salt.to_owned(),
        };
        let checked = namespace.fields().validate();
        checked.map_err(|error| Fault::invalid(error.to_string()))?;
        Ok(namespace)
    }

    /// The digest from which the keys of the namespace's chains are derived: 32 bytes.
    #[getter]
    fn seed<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.fields().seed())
    }

    fn __repr__(&self) -> String {
        let Self {
            name,
            model,
            dtype,
            parallel_rank,
            salt,
        } = self;
        format!(
            "Namespace({name:?}, model={model:?}, dtype={dtype:?}, \
             parallel_rank={parallel_rank:?}, salt={salt:?})"
        )
    }
}

impl Namespace {
    /// The client's form of the namespace.
    pub(crate) fn fields(&self) -> Fields {
        Fields {
            name: self.name.clone(),
            model: self.model.clone(),
            dtype: self.dtype.clone(),
            parallel_rank: self.parallel_rank.clone(),
            salt: self.salt.clone(),
        }
    }
}

/// Returns the keys of all full blocks of `tokens`, `block_tokens` tokens each. A key is a digest of 32
/// bytes that depends on the block's tokens and on all tokens before it.
///
/// `tokens`: a sequence of ints from 0 to 2**32 - 1, or a buffer of ints, such as a numpy array. A uint32
/// buffer is read in place; other integer types of 32 or 64 bits are converted. Tokens after the last full
/// block have no key.
///
/// Raises InvalidArgumentError (a ValueError) for a token out of range or `block_tokens` below 1, and
/// TypeError for any other type.
#[pyfunction]
pub(crate) fn chain_keys<'py>(
    py: Python<'py>,
    namespace: &Namespace,
    block_tokens: Whole,
    tokens: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyList>> {
    let block_tokens = usize::try_from(block_tokens.read("block_tokens")?)
        .ok()
        .and_then(NonZeroUsize::new)
        .ok_or_else(|| Fault::invalid("a block has at least one token"))?;
    let seed = namespace.fields().seed();
    let tokens = read_tokens(tokens)?;
    let keys = py.detach(|| chain::chain_keys(seed, block_tokens, &tokens));
    let digests = keys.iter().map(|key| match key.as_ref() {
        KeyRef::Digest { digest, .. } => PyBytes::new(py, digest),
        KeyRef::Text(_) => unreachable!("invariant: the keys of a chain are digests"),
    });
    PyList::new(py, digests)
}

fn read_tokens(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    // Lists come first: they are by far the most common, and have no buffer.
    if !tokens.is_instance_of::<PyList>() && !is_one_text(tokens) {
        if let Ok(buffer) = PyBuffer::<u32>::get(tokens) {
            return one_dimension(&buffer)?.to_vec(tokens.py());
        }
        if let Some(read) = convert::<i64>(tokens)
            .or_else(|| convert::<i32>(tokens))
            .or_else(|| convert::<u64>(tokens))
        {
            return read;
        }
    }
    let mut read = Vec::with_capacity(length_hint(tokens));
    for_each(tokens, "tokens", |token| {
        let token: i128 = match token.extract::<i64>() {
            Ok(token) => token.into(),
            Err(error) if error.is_instance_of::<PyTypeError>(token.py()) => return Err(error),
            // The token is too large for 64 bits, so it is out of range.
            Err(_) => i128::MAX,
        };
        read.push(read_token(token)?);
        Ok(())
    })?;
    Ok(read)
}

/// The tokens of a buffer with another integer type; `None` for a buffer with a type that is not `T`.
fn convert<T: Element + Into<i128>>(tokens: &Bound<'_, PyAny>) -> Option<PyResult<Vec<u32>>> {
    let buffer = PyBuffer::<T>::get(tokens).ok()?;
    let read = || {
        let wide = one_dimension(&buffer)?.to_vec(tokens.py())?;
        wide.into_iter()
            .map(|token| read_token(token.into()))
            .collect()
    };
    Some(read())
}

fn one_dimension<T: Element>(buffer: &PyBuffer<T>) -> PyResult<&PyBuffer<T>> {
    if buffer.dimensions() != 1 {
        return Err(Fault::invalid(format!(
            "tokens have one dimension, not {}",
            buffer.dimensions()
        ))
        .into());
    }
    Ok(buffer)
}

fn read_token(token: i128) -> PyResult<u32> {
    let read = u32::try_from(token);
    read.map_err(|_| Fault::invalid("a token is an int from 0 to 2**32 - 1").into())
}
