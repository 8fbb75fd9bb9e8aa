//! A cursor over received bytes that never reads past their end.

use super::DecodeError;

/// Reads little-endian values from the front of a byte slice.
///
/// # Errors
///
/// Every read fails with [`DecodeError::Truncated`] when too few bytes are left. A string also fails
/// with [`DecodeError::NotUtf8`].
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// A reader of `bytes`. `what` names the value in errors.
    pub const fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { bytes, what }
    }

    /// Whether all bytes have been read.
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The number of bytes not yet read.
    pub const fn remaining(&self) -> usize {
        self.bytes.len()
    }

    /// The next `count` bytes.
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let (head, tail) = self
            .bytes
            .split_at_checked(count)
            .ok_or(DecodeError::Truncated { what: self.what })?;
        self.bytes = tail;
        Ok(head)
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], DecodeError> {
        let (head, tail) = self
            .bytes
            .split_first_chunk::<N>()
            .ok_or(DecodeError::Truncated { what: self.what })?;
        self.bytes = tail;
        Ok(head)
    }

    /// The next byte.
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        self.array::<1>().map(|b| b[0])
    }

    /// The next 2 bytes as a number.
    pub fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(|b| u16::from_le_bytes(*b))
    }

    /// The next 4 bytes as a number.
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(|b| u32::from_le_bytes(*b))
    }

    /// The next 8 bytes as a number.
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(|b| u64::from_le_bytes(*b))
    }

    /// The next 16 bytes as a number.
    pub fn u128(&mut self) -> Result<u128, DecodeError> {
        self.array().map(|b| u128::from_le_bytes(*b))
    }

    /// A string that follows its 16-bit length.
    pub fn str16(&mut self) -> Result<&'a str, DecodeError> {
        let len = self.u16()?;
        let bytes = self.take(usize::from(len))?;
        std::str::from_utf8(bytes).map_err(|_| DecodeError::NotUtf8 { what: self.what })
    }

    /// Checks that all bytes have been read.
    ///
    /// # Errors
    ///
    /// [`DecodeError::Trailing`] when bytes are left.
    pub const fn finish(self) -> Result<(), DecodeError> {
        if self.bytes.is_empty() {
            Ok(())
        } else {
            Err(DecodeError::Trailing {
                what: self.what,
                left: self.bytes.len(),
            })
        }
    }
}

/// Appends a string after its 16-bit length. A longer string is cut at a character boundary; the
/// protocol's fields that may be longer are not written with this.
pub(super) fn put_str16(out: &mut Vec<u8>, text: &str) {
    let mut end = text.len().min(usize::from(u16::MAX));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let len = u16::try_from(end).expect("invariant: cut to 16 bits above");
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}
