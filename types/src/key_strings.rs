//! The key strings of other systems, built and parsed.
//!
//! | type | form |
//! |---|---|
//! | [`VllmKey`] | `vllm@{model}@{world_size}@{worker_id}@{hash:016x}[@{layer}]` |
//! | [`PoolKey`] | `{model}@pcp{n}@dcp{n}@head_or_tp_rank:{n}@pp_rank:{n}@{hex sha256}[@{layer}]` |
//! | [`LmcacheKey`] | `{model}@{world_size}@{worker_id}@{hash hex}@{dtype}[@{layer}][@{tag}%{value}]...` |
//!
//! kvpool stores any string as a key; these types are for callers that make such strings or look into
//! them. What is built parses back to the same fields, and what parses builds the same string. A
//! model's name holds no `@`, which stands between the fields.

mod lmcache;
mod pool;
mod vllm;

#[cfg(test)]
mod tests;

pub use lmcache::LmcacheKey;
pub use pool::PoolKey;
pub use vllm::VllmKey;

use crate::key::KeyError;

/// Why a string is no key of its form, or fields make none.
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
    /// The field holds what it cannot.
    #[error("{form} key: bad {field} {value:?}")]
    BadField {
        /// The form.
        form: &'static str,
        /// The field.
        field: &'static str,
        /// What it holds.
        value: String,
    },
    /// Something stands behind the last field.
    #[error("{form} key: {value:?} stands behind its end")]
    Trailing {
        /// The form.
        form: &'static str,
        /// What stands there.
        value: String,
    },
    /// The string is no key at all.
    #[error("{form} key: {source}")]
    NoKey {
        /// The form.
        form: &'static str,
        /// Why.
        source: KeyError,
    },
}

/// Reads the fields of one string, divided by `@`.
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

    /// The next field, which must be what `read` takes.
    fn read<T>(
        &mut self,
        field: &'static str,
        read: impl FnOnce(&'a str) -> Option<T>,
    ) -> Result<T, KeyStringError> {
        let value = self.next(field)?;
        read(value).ok_or_else(|| bad(self.form, field, value))
    }

    /// A layer's number, if the string goes on.
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

/// Passes a text that may stand between two `@`.
fn name(text: &str) -> Option<String> {
    (!text.is_empty() && !text.contains('@')).then(|| text.to_owned())
}

/// Reads a number in the one way that it is written: no sign, no zeros in front.
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
