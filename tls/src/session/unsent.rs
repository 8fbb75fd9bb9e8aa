//! Ciphertext that the socket has not accepted yet.

use std::io;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Unsent {
    bytes: Vec<u8>,
    sent: usize,
    end: usize,
}

impl Unsent {
    pub(super) const fn is_empty(&self) -> bool {
        self.sent == self.end
    }

    /// Room for `count` bytes after the unsent bytes. [`Unsent::grow`] then adds the number that
    /// was written.
    pub(super) fn room(&mut self, count: usize) -> &mut [u8] {
        let end = self.end + count;
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes.get_mut(self.end..end).unwrap_or_default()
    }

    pub(super) const fn grow(&mut self, count: usize) {
        self.end += count;
    }

    /// Sends the unsent bytes. On an error the rest stays.
    pub(super) fn drain(
        &mut self,
        send: &mut impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> io::Result<()> {
        while let Some(rest) = self.bytes.get(self.sent..self.end)
            && !rest.is_empty()
        {
            match send(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        (self.sent, self.end) = (0, 0);
        Ok(())
    }
}
