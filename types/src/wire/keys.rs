//! Keys packed for a message: runs of keys that share a prefix and a suffix.
//!
//! ```text
//! batch = run*
//! run   = 1 u32:count str16:prefix str16:suffix (32-byte digest)*count
//!       | 2 u32:count (str16:text)*count
//! ```
//!
//! A batch of kvpool's own block keys is one run: 32 bytes a key, and 9 bytes for the run.
//!
//! ADR 0006 says why keys are packed.

mod key_batch;

pub use key_batch::{BatchError, KeyBatch};

use super::{DecodeError, Reader, reader::put_str16};
use crate::key::{Digest, Key, KeyRef, MAX_KEY_BYTES};

const DIGESTS: u8 = 1;
const TEXTS: u8 = 2;
const COUNT_BYTES: usize = 4;

/// Packs keys in order.
#[derive(Clone, Debug, Default)]
pub struct Packer {
    out: Vec<u8>,
    open: Option<OpenRun>,
}

#[derive(Clone, Debug)]
struct OpenRun {
    count_at: usize,
    count: u32,
    /// The positions of the shared prefix and suffix of a digest run in `out`; `None` for texts.
    affixes: Option<(std::ops::Range<usize>, std::ops::Range<usize>)>,
}

impl Packer {
    /// A packer with enough capacity for `keys` of kvpool's own block keys.
    pub fn with_room_for(keys: usize) -> Self {
        const RUN_BYTES: usize = 1 + COUNT_BYTES + 2 + 2;
        Self {
            out: Vec::with_capacity(RUN_BYTES + keys * size_of::<Digest>()),
            open: None,
        }
    }

    /// Appends one key.
    #[inline]
    pub fn push(&mut self, key: KeyRef<'_>) {
        if !self.fits_open_run(key) {
            self.open_run(key);
        }
        let run = self
            .open
            .as_mut()
            .expect("invariant: a run was just opened");
        run.count += 1;
        match key {
            KeyRef::Digest { digest, .. } => self.out.extend_from_slice(digest),
            KeyRef::Text(text) => put_str16(&mut self.out, text),
        }
    }

    /// The packed bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.close_run();
        self.out
    }

    /// The bytes packed so far.
    pub fn len(&self) -> usize {
        self.out.len()
    }

    /// Whether nothing was packed.
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    #[inline]
    fn fits_open_run(&self, key: KeyRef<'_>) -> bool {
        match (&self.open, key) {
            (
                Some(OpenRun {
                    affixes: Some((pre, suf)),
                    ..
                }),
                KeyRef::Digest { prefix, suffix, .. },
            ) => self.holds(pre, prefix) && self.holds(suf, suffix),
            (Some(OpenRun { affixes: None, .. }), KeyRef::Text(_)) => true,
            _ => false,
        }
    }

    /// Whether the affix at `at` equals `affix`. Most affixes are empty, which skips the
    /// comparison.
    #[inline]
    fn holds(&self, at: &std::ops::Range<usize>, affix: &str) -> bool {
        at.len() == affix.len() && (affix.is_empty() || &self.out[at.clone()] == affix.as_bytes())
    }

    fn open_run(&mut self, key: KeyRef<'_>) {
        self.close_run();
        self.out.push(if matches!(key, KeyRef::Text(_)) {
            TEXTS
        } else {
            DIGESTS
        });
        let count_at = self.out.len();
        self.out.extend_from_slice(&[0; COUNT_BYTES]);
        let affixes = match key {
            KeyRef::Digest { prefix, suffix, .. } => {
                Some((self.put_affix(prefix), self.put_affix(suffix)))
            }
            KeyRef::Text(_) => None,
        };
        self.open = Some(OpenRun {
            count_at,
            count: 0,
            affixes,
        });
    }

    /// Writes the number of keys of the open run.
    fn close_run(&mut self) {
        if let Some(run) = self.open.take()
            && let Some(count) = self.out.get_mut(run.count_at..run.count_at + COUNT_BYTES)
        {
            count.copy_from_slice(&run.count.to_le_bytes());
        }
    }

    fn put_affix(&mut self, affix: &str) -> std::ops::Range<usize> {
        put_str16(&mut self.out, affix);
        self.out.len() - affix.len()..self.out.len()
    }
}

/// Packs keys in order.
pub fn pack<'a>(keys: impl IntoIterator<Item = &'a Key>) -> Vec<u8> {
    let keys = keys.into_iter();
    let (least, most) = keys.size_hint();
    let mut packer = Packer::with_room_for(most.unwrap_or(least));
    for key in keys {
        packer.push(key.as_ref());
    }
    packer.finish()
}

/// Reads packed keys in order, without copying. Ends after the first error.
#[derive(Clone, Debug)]
pub struct Keys<'a> {
    reader: Reader<'a>,
    run: Run<'a>,
    failed: bool,
}

#[derive(Clone, Copy, Debug)]
enum Run<'a> {
    Digests {
        left: u32,
        prefix: &'a str,
        suffix: &'a str,
    },
    Texts {
        left: u32,
    },
}

/// Reads the keys in `packed`.
pub const fn unpack(packed: &[u8]) -> Keys<'_> {
    Keys {
        reader: Reader::new(packed, "keys"),
        run: Run::Texts { left: 0 },
        failed: false,
    }
}

impl<'a> Keys<'a> {
    fn read(&mut self) -> Result<Option<KeyRef<'a>>, DecodeError> {
        loop {
            match &mut self.run {
                Run::Digests {
                    left,
                    prefix,
                    suffix,
                } if *left > 0 => {
                    *left -= 1;
                    let digest = self.reader.array()?;
                    return Ok(Some(KeyRef::Digest {
                        prefix,
                        suffix,
                        digest,
                    }));
                }
                Run::Texts { left } if *left > 0 => {
                    *left -= 1;
                    let text = self.reader.str16()?;
                    check_len(text.len())?;
                    if crate::key::holds_digest(text) {
                        return Err(DecodeError::BadValue {
                            what: "text key with a digest",
                            value: 0,
                        });
                    }
                    return Ok(Some(KeyRef::Text(text)));
                }
                _ if self.reader.is_empty() => return Ok(None),
                _ => self.run = self.read_run()?,
            }
        }
    }

    fn read_run(&mut self) -> Result<Run<'a>, DecodeError> {
        let tag = self.reader.u8()?;
        let left = self.reader.u32()?;
        match tag {
            DIGESTS => {
                let (prefix, suffix) = (self.reader.str16()?, self.reader.str16()?);
                check_len(prefix.len() + 64 + suffix.len())?;
                check_prefix(prefix)?;
                Ok(Run::Digests {
                    left,
                    prefix,
                    suffix,
                })
            }
            TEXTS => Ok(Run::Texts { left }),
            _ => Err(DecodeError::BadValue {
                what: "key run",
                value: tag.into(),
            }),
        }
    }
}

/// Refuses a prefix whose last characters would belong to the run of digits at which the key's string is
/// split. Otherwise the same key would have two encodings.
fn check_prefix(prefix: &str) -> Result<(), DecodeError> {
    if crate::key::may_precede_digest(prefix) {
        Ok(())
    } else {
        Err(DecodeError::BadValue {
            what: "key prefix with a digit of the digest",
            value: 0,
        })
    }
}

fn check_len(len: usize) -> Result<(), DecodeError> {
    if (1..=MAX_KEY_BYTES).contains(&len) {
        Ok(())
    } else {
        Err(DecodeError::BadValue {
            what: "key length",
            value: len as u64,
        })
    }
}

impl<'a> Iterator for Keys<'a> {
    type Item = Result<KeyRef<'a>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let read = self.read();
        self.failed = read.is_err();
        read.transpose()
    }
}

#[cfg(test)]
mod tests;
