//! The name of a block.
//!
//! A key is a string of 1 byte to 1 KiB. Many strings contain 64 lower-case hex digits, a SHA-256. Such a key
//! is stored as the 32 bytes of the digest, with a prefix and a suffix that many keys share. Any other string
//! is stored as text. The key of a block in kvpool's own chains ([`crate::chain`]) is a digest with empty
//! prefix and suffix.

use std::fmt;

/// The longest key, in bytes of its string form.
pub const MAX_KEY_BYTES: usize = 1024;

const HEX_DIGITS: usize = 64;

/// A SHA-256 digest.
pub type Digest = [u8; 32];

/// Why a string is not a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The string is empty.
    #[error("a key has at least one byte")]
    Empty,
    /// The string exceeds [`MAX_KEY_BYTES`].
    #[error("a key has at most {MAX_KEY_BYTES} bytes, this one has {0}")]
    TooLong(usize),
}

/// A key that borrows its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyRef<'a> {
    /// A digest between a prefix and a suffix.
    Digest {
        /// The text before the digest's 64 hex digits.
        prefix: &'a str,
        /// The text after them.
        suffix: &'a str,
        /// The digest.
        digest: &'a Digest,
    },
    /// A string without a digest.
    Text(&'a str),
}

/// A key that owns its parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key(Repr);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Repr {
    Digest {
        digest: Digest,
        affixes: Option<Box<(Box<str>, Box<str>)>>,
    },
    Text(Box<str>),
}

impl Key {
    /// The key of a block of kvpool's own chains.
    pub const fn from_digest(digest: Digest) -> Self {
        Self(Repr::Digest {
            digest,
            affixes: None,
        })
    }

    /// Parses a key's string form.
    ///
    /// # Errors
    ///
    /// See [`KeyError`].
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        KeyRef::parse(text, &mut [0; 32]).map(KeyRef::to_key)
    }

    /// The key in a form that is safe in a log.
    pub fn shown(&self) -> ShownKey<'_> {
        ShownKey(self.as_ref())
    }

    /// The key's parts.
    pub fn as_ref(&self) -> KeyRef<'_> {
        match &self.0 {
            Repr::Digest {
                digest,
                affixes: None,
            } => KeyRef::Digest {
                prefix: "",
                suffix: "",
                digest,
            },
            Repr::Digest {
                digest,
                affixes: Some(affixes),
            } => KeyRef::Digest {
                prefix: &affixes.0,
                suffix: &affixes.1,
                digest,
            },
            Repr::Text(text) => KeyRef::Text(text),
        }
    }
}

impl<'a> KeyRef<'a> {
    /// Parses a key's string form without copying. A digest in the string is stored in `digest`.
    ///
    /// # Errors
    ///
    /// See [`KeyError`].
    // Inlined, because callers parse thousands of keys in a row. A call would return the key
    // through memory just written, and stall on each.
    #[inline]
    pub fn parse(text: &'a str, digest: &'a mut Digest) -> Result<Self, KeyError> {
        if text.is_empty() {
            return Err(KeyError::Empty);
        }
        if text.len() > MAX_KEY_BYTES {
            return Err(KeyError::TooLong(text.len()));
        }
        let Some((prefix, found, suffix)) = split_digest(text) else {
            return Ok(Self::Text(text));
        };
        *digest = found;
        Ok(Self::Digest {
            prefix,
            suffix,
            digest,
        })
    }
}

impl KeyRef<'_> {
    /// A key that owns copies of the parts.
    pub fn to_key(self) -> Key {
        Key(match self {
            Self::Digest {
                prefix: "",
                suffix: "",
                digest,
            } => Repr::Digest {
                digest: *digest,
                affixes: None,
            },
            Self::Digest {
                prefix,
                suffix,
                digest,
            } => Repr::Digest {
                digest: *digest,
                affixes: Some(Box::new((prefix.into(), suffix.into()))),
            },
            Self::Text(text) => Repr::Text(text.into()),
        })
    }

    /// The length of the key's string form, in bytes.
    pub fn text_len(&self) -> usize {
        match self {
            Self::Digest { prefix, suffix, .. } => prefix.len() + HEX_DIGITS + suffix.len(),
            Self::Text(text) => text.len(),
        }
    }
}

/// A key as a log shows it. Control characters are escaped, so that a key cannot add lines to the log.
#[derive(Clone, Copy, Debug)]
pub struct ShownKey<'a>(KeyRef<'a>);

impl fmt::Display for ShownKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        text.escape_debug().fmt(f)
    }
}

impl fmt::Display for KeyRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Digest {
                prefix,
                suffix,
                digest,
            } => {
                f.write_str(prefix)?;
                for byte in digest.iter() {
                    write!(f, "{byte:02x}")?;
                }
                f.write_str(suffix)
            }
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_ref().fmt(f)
    }
}

impl std::str::FromStr for Key {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        Self::parse(text)
    }
}

/// Splits `text` at its first run of 64 lower-case hex digits. Each window is scanned from its end;
/// a window with another character is skipped up to that character.
fn split_digest(text: &str) -> Option<(&str, Digest, &str)> {
    let mut from = 0;
    while let Some(window) = text.as_bytes().get(from..from + HEX_DIGITS) {
        match window.iter().rposition(|byte| nibble(*byte).is_none()) {
            Some(stray) => from += stray + 1,
            None => {
                let (prefix, rest) = text.split_at(from);
                let (_, suffix) = rest.split_at(HEX_DIGITS);
                return Some((prefix, parse_hex(window)?, suffix));
            }
        }
    }
    None
}

/// Whether `text` would be stored as a digest. Such a key must not also have a text form on a wire.
pub(crate) fn holds_digest(text: &str) -> bool {
    split_digest(text).is_some()
}

/// Whether a string of `prefix` and a digest is split exactly at the end of `prefix`.
pub(crate) fn may_precede_digest(prefix: &str) -> bool {
    let digit_before = prefix
        .bytes()
        .next_back()
        .is_some_and(|byte| nibble(byte).is_some());
    !digit_before && !holds_digest(prefix)
}

fn parse_hex(hex: &[u8]) -> Option<Digest> {
    let mut digest = [0; 32];
    for (byte, pair) in digest.iter_mut().zip(hex.chunks_exact(2)) {
        *byte = nibble(*pair.first()?)? << 4 | nibble(*pair.last()?)?;
    }
    Some(digest)
}

const fn nibble(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
