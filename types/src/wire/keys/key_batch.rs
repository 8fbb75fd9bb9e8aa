//! The keys of one request, by index.

use super::{DIGESTS, Run, unpack};
use crate::key::{Digest, KeyRef};
use crate::wire::{DecodeError, Reader};
use std::borrow::Cow;

/// Keys in order. If a message is one run of digests, as for kvpool's own chains, the keys are read from the
/// message without allocation.
#[derive(Clone, Debug)]
pub struct KeyBatch<'a>(Form<'a>);

#[derive(Clone, Debug)]
enum Form<'a> {
    Run {
        prefix: &'a str,
        suffix: &'a str,
        digests: &'a [Digest],
    },
    List(Cow<'a, [KeyRef<'a>]>),
}

/// Why packed keys were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// One request has too many keys.
    #[error("more than {most} keys in one request: split it")]
    TooMany {
        /// The maximum.
        most: usize,
    },
    /// The bytes are not packed keys.
    #[error(transparent)]
    Malformed(#[from] DecodeError),
}

impl<'a> KeyBatch<'a> {
    /// Reads the keys in `packed`, at most `most`.
    ///
    /// # Errors
    ///
    /// See [`BatchError`].
    pub fn unpack(packed: &'a [u8], most: usize) -> Result<Self, BatchError> {
        if let Some(run) = one_run(packed)? {
            return if run.len() > most {
                Err(BatchError::TooMany { most })
            } else {
                Ok(run)
            };
        }
        let mut keys = Vec::new();
        for key in unpack(packed) {
            if keys.len() == most {
                return Err(BatchError::TooMany { most });
            }
            keys.push(key?);
        }
        Ok(Self(Form::List(Cow::Owned(keys))))
    }

    /// The number of keys.
    pub fn len(&self) -> usize {
        match &self.0 {
            Form::Run { digests, .. } => digests.len(),
            Form::List(keys) => keys.len(),
        }
    }

    /// Whether the batch is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The key at `index`; `None` past the end.
    #[inline]
    pub fn get(&self, index: usize) -> Option<KeyRef<'_>> {
        match &self.0 {
            Form::Run {
                prefix,
                suffix,
                digests,
            } => digests.get(index).map(|digest| KeyRef::Digest {
                prefix,
                suffix,
                digest,
            }),
            Form::List(keys) => keys.get(index).copied(),
        }
    }

    /// The keys in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = KeyRef<'_>> + ExactSizeIterator {
        (0..self.len()).map(|index| {
            self.get(index)
                .expect("invariant: the index is below the length")
        })
    }

    /// The first `count` keys, or all of them.
    #[must_use]
    pub fn first(&self, count: usize) -> KeyBatch<'_> {
        let count = count.min(self.len());
        KeyBatch(match &self.0 {
            Form::Run {
                prefix,
                suffix,
                digests,
            } => Form::Run {
                prefix,
                suffix,
                digests: digests.get(..count).unwrap_or_default(),
            },
            Form::List(keys) => Form::List(Cow::Borrowed(keys.get(..count).unwrap_or_default())),
        })
    }

    /// The keys from index `from` on.
    #[must_use]
    pub fn skip(&self, from: usize) -> KeyBatch<'_> {
        KeyBatch(match &self.0 {
            Form::Run {
                prefix,
                suffix,
                digests,
            } => Form::Run {
                prefix,
                suffix,
                digests: digests.get(from..).unwrap_or_default(),
            },
            Form::List(keys) => Form::List(Cow::Borrowed(keys.get(from..).unwrap_or_default())),
        })
    }
}

/// The batch, if `packed` is exactly one run of digests.
fn one_run(packed: &[u8]) -> Result<Option<KeyBatch<'_>>, DecodeError> {
    if packed.first() != Some(&DIGESTS) {
        return Ok(None);
    }
    let mut keys = unpack(packed);
    let Run::Digests {
        left,
        prefix,
        suffix,
    } = keys.read_run()?
    else {
        return Ok(None);
    };
    let (digests, rest) = rest_of(&keys.reader).as_chunks();
    let whole = rest.is_empty() && digests.len() as u64 == u64::from(left);
    Ok(whole.then_some(KeyBatch(Form::Run {
        prefix,
        suffix,
        digests,
    })))
}

fn rest_of<'a>(reader: &Reader<'a>) -> &'a [u8] {
    let mut rest = reader.clone();
    rest.take(reader.remaining()).unwrap_or_default()
}

impl<'a> From<&'a [KeyRef<'a>]> for KeyBatch<'a> {
    fn from(keys: &'a [KeyRef<'a>]) -> Self {
        Self(Form::List(Cow::Borrowed(keys)))
    }
}

impl<'a> From<&'a Vec<KeyRef<'a>>> for KeyBatch<'a> {
    fn from(keys: &'a Vec<KeyRef<'a>>) -> Self {
        keys.as_slice().into()
    }
}

impl<'a, const N: usize> From<&'a [KeyRef<'a>; N]> for KeyBatch<'a> {
    fn from(keys: &'a [KeyRef<'a>; N]) -> Self {
        keys.as_slice().into()
    }
}

impl<'a> From<&'a KeyBatch<'_>> for KeyBatch<'a> {
    fn from(keys: &'a KeyBatch<'_>) -> Self {
        keys.skip(0)
    }
}
