//! The key strings of other systems: building and parsing.
//!
//! | type | form |
//! |---|---|
//! | [`VllmKey`] | `vllm@{model}@{world_size}@{worker_id}@{hash:016x}[@{layer}]` |
//! | [`PoolKey`] | `{model}@pcp{n}@dcp{n}@head_or_tp_rank:{n}@pp_rank:{n}@{hex sha256}[@{layer}]` |
//! | [`LmcacheKey`] | `{model}@{world_size}@{worker_id}@{hash hex}@{dtype}[@{layer}][@{tag}%{value}]...` |
//!
//! kvpool stores any string as a key. These types are for callers that build such strings or
//! inspect them. A built string parses to the same fields, and a parsed string builds the same
//! string. A model's name contains no `@`, the separator of fields.

mod lmcache;
mod pool;
mod vllm;

#[cfg(test)]
mod tests;

pub use lmcache::LmcacheKey;
pub use pool::PoolKey;
pub use vllm::VllmKey;

use crate::key::KeyError;

/// Why a string does not have the form, or fields cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyStringError {
    /// The string ends before the field.
    #[error("{form} key: it has no {field}")]
    Missing {
        /// The form.
        form: &'static str,
        /// The field.
        field: &'static str,
    },
    /// The field has an invalid value.
    #[error("{form} key: bad {field} {value:?}")]
    BadField {
        /// The form.
        form: &'static str,
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
    },
    /// The string continues after the last field.
    #[error("{form} key: {value:?} stands behind its end")]
    Trailing {
        /// The form.
        form: &'static str,
        /// The surplus text.
        value: String,
    },
    /// The string is no valid key of any form.
    #[error("{form} key: {source}")]
    NoKey {
        /// The form.
        form: &'static str,
        /// The reason.
        source: KeyError,
    },
}

/// Reads the fields of one string, separated by `@`.
struct Fields<'a> {
    form: &'static str,
    rest: std::str::Split<'a, char>,
}

impl<'a> Fields<'a> {
    fn new(form: &'static str, text: &'a str) -> Result<Self, KeyStringError> {
        check_length(form, text.len())?;
        let rest = text.split('@');
        Ok(Self { form, rest })
    }

    fn next(&mut self, field: &'static str) -> Result<&'a str, KeyStringError> {
        self.rest.next().ok_or(KeyStringError::Missing {
            form: self.form,
            field,
        })
    }

    /// The next field, parsed by `read`.
    fn read<T>(
        &mut self,
        field: &'static str,
        read: impl FnOnce(&'a str) -> Option<T>,
    ) -> Result<T, KeyStringError> {
        let value = self.next(field)?;
        read(value).ok_or_else(|| bad(self.form, field, value))
    }

    /// The layer number, if the string continues.
    fn layer(&mut self) -> Result<Option<u32>, KeyStringError> {
        match self.rest.next() {
            None => Ok(None),
            Some(value) => match number(value) {
                Some(layer) => Ok(Some(layer)),
                None => Err(bad(self.form, "layer", value)),
            },
        }
    }

    fn finish(mut self) -> Result<(), KeyStringError> {
        match self.rest.next() {
            None => Ok(()),
            Some(value) => Err(KeyStringError::Trailing {
                form: self.form,
                value: value.to_owned(),
            }),
        }
    }
}

fn bad(form: &'static str, field: &'static str, value: &str) -> KeyStringError {
    KeyStringError::BadField {
        form,
        field,
        value: value.to_owned(),
    }
}

/// Accepts a text that may stand between two `@`.
fn name(text: &str) -> Option<String> {
    (!text.is_empty() && !text.contains('@')).then(|| text.to_owned())
}

/// Parses a number in its canonical form: no sign, no leading zeros.
fn number(text: &str) -> Option<u32> {
    let plain = text == "0" || !text.starts_with(['+', '0']);
    if plain { text.parse().ok() } else { None }
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn check_length(form: &'static str, bytes: usize) -> Result<(), KeyStringError> {
    if bytes > crate::key::MAX_KEY_BYTES {
        return Err(KeyStringError::NoKey {
            form,
            source: KeyError::TooLong(bytes),
        });
    }
    Ok(())
}
