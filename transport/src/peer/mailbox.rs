//! Short messages that peers leave for this process to fetch.

use kvpool_types::Code;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// The longest message, in bytes.
pub(super) const MAX_MESSAGE: u64 = 64 << 10;
/// Bounds on unread messages and their bytes, so that a peer cannot exhaust this process's memory.
const MAX_WAITING: usize = 4096;
const MAX_WAITING_BYTES: usize = 16 << 20;

#[derive(Default)]
pub(super) struct Mailbox(Mutex<Unread>);

#[derive(Default)]
struct Unread {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Mailbox {
    /// Stores a message, unless the mailbox is full.
    pub(super) fn leave(&self, message: &[u8]) -> Code {
        let mut waiting = self.0.lock();
        if waiting.messages.len() >= MAX_WAITING
            || waiting.bytes + message.len() > MAX_WAITING_BYTES
        {
            return Code::TooManyHeld;
        }
        waiting.bytes += message.len();
        waiting.messages.push_back(message.to_vec());
        Code::Ok
    }

    /// Takes all messages, oldest first.
    pub(super) fn fetch(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut *self.0.lock()).messages.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_bounded_and_fetched_in_order() {
        let mailbox = Mailbox::default();
        for number in 0..MAX_WAITING {
            assert_eq!(mailbox.leave(number.to_string().as_bytes()), Code::Ok);
        }
        assert_eq!(mailbox.leave(b"one more"), Code::TooManyHeld);
        let fetched = mailbox.fetch();
        assert_eq!(fetched.len(), MAX_WAITING);
        assert_eq!(fetched.first().map(Vec::as_slice), Some(&b"0"[..]));
        assert_eq!(mailbox.leave(b"again"), Code::Ok);
        assert_eq!(mailbox.fetch(), [b"again".to_vec()]);
    }
}
