//! Letters: messages of authenticated senders, which this process handles as they arrive.
//!
//! ```text
//!  PeerLink::post ──► [from, to, number, address, body, code of all] ──► open ──► LetterBox ──► answer
//! ```
//!
//! Each letter carries a code, computed with a key of the two sessions and the secret. The numbers of a
//! sender's letters rise, so a letter that is repeated or overtaken is refused. The answer tells the sender
//! the outcome.

use super::secret::Secret;
use hmac::{Hmac, KeyInit, Mac};
use kvpool_types::{Code, Incarnation};
use parking_lot::Mutex;
use sha2::Sha256;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The longest letter, in bytes.
pub(super) const MAX_LETTER: u64 = 8 << 20;
/// The longest address in a letter, in bytes.
pub(super) const MAX_ADDRESS: usize = 512;
/// The most senders whose last number is stored. Beyond it, the oldest sender is forgotten.
const MAX_SENDERS: usize = 65_536;
const CODE_BYTES: usize = 32;
const HEAD_BYTES: usize = 16 + 16 + 8 + 2;

/// A message from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    /// The session of the sender.
    pub from: Incarnation,
    /// The address at which the sender takes letters: "host:port".
    pub address: String,
    /// The message.
    pub body: Vec<u8>,
}

/// Takes letters. Calls come from the threads of connections and must not block.
pub trait LetterBox: Send + Sync {
    /// Takes a letter. The sender gets the code.
    fn take(&self, letter: Letter) -> Code;
}

/// How an endpoint exchanges letters.
#[derive(Clone)]
pub struct LetterOptions {
    /// The address that peers use for their answers: "host:port". `None` for the listener's own.
    pub address: Option<String>,
    /// Takes the letters that arrive.
    pub letter_box: Arc<dyn LetterBox>,
}

impl std::fmt::Debug for LetterOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LetterOptions({:?})", self.address)
    }
}

/// Seals the letters of one session.
#[derive(Debug)]
pub(super) struct LetterWriter {
    secret: Secret,
    from: Incarnation,
    address: String,
    next: AtomicU64,
}

impl LetterWriter {
    pub(super) const fn new(secret: Secret, from: Incarnation, address: String) -> Self {
        Self {
            secret,
            from,
            address,
            next: AtomicU64::new(1),
        }
    }

    /// The bytes of a letter to a session. Letters to one session must be sent in the order of
    /// these calls.
    pub(super) fn seal(&self, to: Incarnation, body: &[u8]) -> Vec<u8> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let address = self.address.as_bytes();
        let length = u16::try_from(address.len()).expect("invariant: an address is short");
        let mut letter = Vec::with_capacity(HEAD_BYTES + address.len() + body.len() + CODE_BYTES);
        letter.extend(self.from.to_bytes());
        letter.extend(to.to_bytes());
        letter.extend(number.to_le_bytes());
        letter.extend(length.to_le_bytes());
        letter.extend(address);
        letter.extend(body);
        let code = code(&self.secret, self.from, to, &letter).finalize();
        letter.extend(code.into_bytes());
        letter
    }
}

fn code(secret: &Secret, from: Incarnation, to: Incarnation, bytes: &[u8]) -> Hmac<Sha256> {
    let key = secret.letter_key(from, to);
    let mut code =
        Hmac::<Sha256>::new_from_slice(&key).expect("invariant: HMAC takes keys of any length");
    code.update(bytes);
    code
}

/// Opens the letters to one session.
pub(super) struct LetterReader {
    secret: Secret,
    to: Incarnation,
    letter_box: Arc<dyn LetterBox>,
    last: Mutex<LastNumbers>,
}

/// The number of each sender's last letter.
#[derive(Default)]
struct LastNumbers {
    by_sender: HashMap<Incarnation, u64>,
    /// The senders in the order of their first letters.
    order: VecDeque<Incarnation>,
}

impl LastNumbers {
    /// Records a number. Returns false when it is not above the last one.
    fn note(&mut self, sender: Incarnation, number: u64) -> bool {
        if let Some(known) = self.by_sender.get_mut(&sender) {
            let rises = number > *known;
            *known = number.max(*known);
            return rises;
        }
        if self.order.len() >= MAX_SENDERS
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_sender.remove(&oldest);
        }
        self.by_sender.insert(sender, number);
        self.order.push_back(sender);
        true
    }
}

impl LetterReader {
    pub(super) fn new(secret: Secret, to: Incarnation, letter_box: Arc<dyn LetterBox>) -> Self {
        Self {
            secret,
            to,
            letter_box,
            last: Mutex::default(),
        }
    }

    /// Opens a letter and hands it over.
    ///
    /// - [`Code::Malformed`]: the bytes are no letter.
    /// - [`Code::WrongIncarnation`]: it is for another session.
    /// - [`Code::GrantRefused`]: its code is wrong.
    /// - [`Code::StaleEpoch`]: it was sent before, or another one overtook it.
    pub(super) fn take(&self, bytes: &[u8]) -> Code {
        let Some((letter, to, number)) = self.opened(bytes) else {
            return Code::Malformed;
        };
        if to != self.to {
            return Code::WrongIncarnation;
        }
        let Some((sealed, given)) = bytes.split_last_chunk::<CODE_BYTES>() else {
            return Code::Malformed;
        };
        let right = code(&self.secret, letter.from, to, sealed);
        if right.verify_slice(given).is_err() {
            return Code::GrantRefused;
        }
        // Held until the letter is taken, so that two letters of one sender keep their order.
        let mut last = self.last.lock();
        if !last.note(letter.from, number) {
            return Code::StaleEpoch;
        }
        self.letter_box.take(letter)
    }

    fn opened(&self, bytes: &[u8]) -> Option<(Letter, Incarnation, u64)> {
        let (sealed, _) = bytes.split_last_chunk::<CODE_BYTES>()?;
        let (from, rest) = sealed.split_first_chunk::<16>()?;
        let (to, rest) = rest.split_first_chunk::<16>()?;
        let (number, rest) = rest.split_first_chunk::<8>()?;
        let (length, rest) = rest.split_first_chunk::<2>()?;
        let length = usize::from(u16::from_le_bytes(*length));
        let (address, body) = rest.split_at_checked(length)?;
        let letter = Letter {
            from: session(*from),
            address: String::from_utf8(address.to_vec()).ok()?,
            body: body.to_vec(),
        };
        let number = u64::from_le_bytes(*number);
        (length <= MAX_ADDRESS).then_some((letter, session(*to), number))
    }
}

const fn session(bytes: [u8; 16]) -> Incarnation {
    Incarnation(u128::from_le_bytes(bytes))
}
