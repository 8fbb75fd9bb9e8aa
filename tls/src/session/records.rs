//! The records of TLS 1.3, sealed and opened in place.
//!
//! rustls makes the handshake and supplies the first and all later keys ([`Rekeys`]). ring seals and opens. This
//! module knows the layout of a record (RFC 8446, section 5). It also knows three messages that follow a handshake: a
//! new key, a ticket and an alert.
//!
//! After a wrong record the session receives nothing more. The peer gets no alert: its connection ends.
//!
//! ADR 0046 says why records are kept here.

use super::invalid;
use super::unsent::Unsent;
use parking_lot::Mutex;
use ring::aead::{self, Aad, LessSafeKey, UnboundKey};
use rustls::crypto::cipher::{AeadKey, Iv, Nonce, make_tls13_aad};
use rustls::kernel::KernelConnection;
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, Error, ExtractedSecrets, InvalidMessage,
    PeerMisbehaved,
};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The bytes that are received at a time: four records.
const RECEIVED: usize = 64 << 10;
/// The same for a caller. Any host can be a caller, so it costs little memory.
const RECEIVED_OF_CALLER: usize = 4 << 10;
/// The most plaintext of a record.
const PLAIN: usize = 16 << 10;
/// Kind, version and length.
const HEAD: usize = 5;
/// The bytes of an authentication tag, with every cipher of TLS 1.3.
const TAG: usize = 16;
/// The most bytes that follow the head: a sender may pad.
const SEALED: usize = PLAIN + 256;
/// The version in the head of each record.
const VERSION: [u8; 2] = [3, 3];
/// The most records without data that come in a row.
const IDLE_RECORDS: u32 = 32;

/// The kinds of records.
mod kind {
    pub(super) const ALERT: u8 = 21;
    pub(super) const HANDSHAKE: u8 = 22;
    pub(super) const DATA: u8 = 23;
}

/// The kinds of messages that follow a handshake.
mod message {
    pub(super) const TICKET: u8 = 4;
    pub(super) const NEW_KEY: u8 = 24;
}

/// The result of a handshake.
pub(crate) struct Agreed {
    pub(crate) secrets: ExtractedSecrets,
    pub(crate) rekeys: Box<dyn Rekeys>,
    /// The most records of one key.
    pub(crate) records_of_key: u64,
    /// Records that arrived with the end of the handshake; the last may be incomplete.
    pub(crate) sealed: Vec<u8>,
}

/// Supplies the next key of each direction.
pub(crate) trait Rekeys: Send + Sync {
    /// The next key for sending.
    fn sending(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error>;
    /// The next key for receiving.
    fn receiving(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error>;
}

impl<Data: Send + Sync> Rekeys for KernelConnection<Data> {
    fn sending(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        self.update_tx_secret()
    }

    fn receiving(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        self.update_rx_secret()
    }
}

/// See the module's documentation.
pub(super) struct Records {
    incoming: Mutex<Incoming>,
    sealing: Mutex<Sealing>,
    rekeys: Mutex<Box<dyn Rekeys>>,
    /// The peer has a new key, and wants one of this side.
    owes_key: AtomicBool,
}

/// A key, and the number of its next record.
struct Key {
    key: LessSafeKey,
    iv: Iv,
    next: u64,
}

struct Sealing {
    key: Key,
    /// The most records of one key.
    limit: u64,
}

/// Bytes that have arrived, and the key that opens them.
struct Incoming {
    key: Key,
    bytes: Vec<u8>,
    /// Decrypted bytes that no caller has taken.
    plain: Range<usize>,
    /// The part that is not decrypted yet. It lies behind `plain`.
    sealed: Range<usize>,
    /// The bytes that are received at a time.
    piece: usize,
    /// The records without data since the last one with some.
    idle: u32,
    ended: bool,
    /// Why nothing more is received.
    failed: Option<Error>,
}

impl Key {
    fn new((next, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, Error> {
        let of = |algorithm, key: AeadKey, iv| {
            let key = UnboundKey::new(algorithm, key.as_ref());
            let key = key.map_err(|_| Error::EncryptError)?;
            Ok(Self {
                key: LessSafeKey::new(key),
                iv,
                next,
            })
        };
        match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => of(&aead::AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => of(&aead::AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
                of(&aead::CHACHA20_POLY1305, key, iv)
            }
            _ => Err(Error::General("a cipher that kvpool does not know".into())),
        }
    }

    /// The nonce of the next record. No two records of a key have the same.
    fn nonce(&mut self) -> Result<aead::Nonce, Error> {
        let nonce = Nonce::new(&self.iv, self.next).0;
        self.next = self.next.checked_add(1).ok_or(Error::EncryptError)?;
        Ok(aead::Nonce::assume_unique_for_key(nonce))
    }

    /// Seals a record of `kind` with `length` bytes. They begin behind the room for its head.
    fn seal(&mut self, kind: u8, length: usize, record: &mut [u8]) -> Result<(), Error> {
        let sealed = length + 1 + TAG;
        let (head, rest) = record.split_at_mut(HEAD);
        let (inside, tag) = rest.split_at_mut(length + 1);
        let aad = make_tls13_aad(sealed);
        head.copy_from_slice(&aad);
        if let Some(last) = inside.last_mut() {
            *last = kind;
        }
        let nonce = self.nonce()?;
        let made = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(aad), inside);
        tag.copy_from_slice(made.map_err(|_| Error::EncryptError)?.as_ref());
        Ok(())
    }

    /// Opens the part of a record after its head. Returns its kind and its length without padding.
    fn open(&mut self, sealed: &mut [u8]) -> Result<(u8, usize), Error> {
        let aad = Aad::from(make_tls13_aad(sealed.len()));
        let nonce = self.nonce()?;
        let inside = self.key.open_in_place(nonce, aad, sealed);
        let inside = inside.map_err(|_| Error::DecryptError)?;
        if inside.len() > PLAIN + 1 {
            return Err(Error::PeerSentOversizedRecord);
        }
        let last = inside.iter().rposition(|&byte| byte != 0);
        let kind = last.and_then(|last| Some((*inside.get(last)?, last)));
        Ok(kind.ok_or(PeerMisbehaved::IllegalTlsInnerPlaintext)?)
    }
}

impl Records {
    pub(super) fn new(agreed: Agreed) -> Result<Self, Error> {
        let Agreed {
            secrets,
            rekeys,
            records_of_key,
            sealed,
        } = agreed;
        Ok(Self {
            incoming: Mutex::new(Incoming {
                key: Key::new(secrets.rx)?,
                plain: 0..0,
                sealed: 0..sealed.len(),
                bytes: sealed,
                piece: RECEIVED_OF_CALLER,
                idle: 0,
                ended: false,
                failed: None,
            }),
            sealing: Mutex::new(Sealing {
                key: Key::new(secrets.tx)?,
                // The message about a new key is a record of the old one.
                limit: records_of_key.saturating_sub(1),
            }),
            rekeys: Mutex::new(rekeys),
            owes_key: AtomicBool::new(false),
        })
    }

    pub(super) fn widen(&self) {
        self.incoming.lock().piece = RECEIVED;
    }

    pub(super) fn has_received(&self) -> bool {
        let incoming = self.incoming.lock();
        // An error counts as well: the next receive returns it.
        !incoming.plain.is_empty()
            || incoming.failed.is_some()
            || !matches!(incoming.record(), Ok(None))
    }

    pub(super) fn receive(
        &self,
        mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
        take: impl FnOnce(&[u8]) -> usize,
    ) -> io::Result<usize> {
        let mut incoming = self.incoming.lock();
        loop {
            if !incoming.plain.is_empty() {
                let plain = incoming.plain.clone();
                let count = take(incoming.bytes.get(plain).unwrap_or_default());
                incoming.plain.start += count;
                return Ok(count);
            }
            if incoming.ended {
                return Ok(0);
            }
            if let Some(error) = &incoming.failed {
                return Err(invalid(error.clone()));
            }
            match self.open_next(&mut incoming) {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => {
                    incoming.failed = Some(error);
                    continue;
                }
            }
            let count = receive(incoming.room())?;
            if count == 0 {
                return Ok(0);
            }
            incoming.sealed.end += count;
        }
    }

    /// Opens the next record. False while it has not arrived as a whole.
    fn open_next(&self, incoming: &mut Incoming) -> Result<bool, Error> {
        let Some(range) = incoming.record()? else {
            return Ok(false);
        };
        incoming.sealed.start = range.end;
        let sealed = incoming.bytes.get_mut(range.clone()).unwrap_or_default();
        let (kind, length) = incoming.key.open(sealed)?;
        let plain = range.start..range.start + length;
        if kind == kind::DATA && length > 0 {
            incoming.idle = 0;
            incoming.plain = plain;
            return Ok(true);
        }
        incoming.idle += 1;
        if incoming.idle > IDLE_RECORDS {
            return Err(Error::General(
                "too many records without data in a row".into(),
            ));
        }
        let inside = incoming.bytes.get(plain).unwrap_or_default();
        match kind {
            kind::DATA => {}
            kind::ALERT => incoming.ended |= is_end(inside)?,
            kind::HANDSHAKE => {
                if let Some(wants_key) = new_key(inside)? {
                    incoming.key = Key::new(self.rekeys.lock().receiving()?)?;
                    if wants_key {
                        self.owes_key.store(true, Ordering::Release);
                    }
                }
            }
            _ => return Err(InvalidMessage::InvalidContentType.into()),
        }
        Ok(true)
    }

    /// Encrypts `count` bytes, which `fill` writes in order.
    pub(super) fn encrypt(
        &self,
        count: usize,
        fill: &mut impl FnMut(&mut [u8]),
        unsent: &mut Unsent,
    ) -> io::Result<()> {
        let mut sealing = self.sealing.lock();
        let mut left = count;
        while left > 0 {
            let owes_key = self.owes_key.swap(false, Ordering::AcqRel);
            if sealing.key.next >= sealing.limit || owes_key {
                self.change_key(&mut sealing, unsent).map_err(invalid)?;
            }
            let length = left.min(PLAIN);
            let whole = HEAD + length + 1 + TAG;
            let record = unsent.room(whole);
            fill(record.get_mut(HEAD..HEAD + length).unwrap_or_default());
            let sealed = sealing.key.seal(kind::DATA, length, record);
            sealed.map_err(invalid)?;
            unsent.grow(whole);
            left -= length;
        }
        Ok(())
    }

    /// Tells the peer of a new key, and uses it from the next record on.
    fn change_key(&self, sealing: &mut Sealing, unsent: &mut Unsent) -> Result<(), Error> {
        // The message has kind, length in three bytes, and one flag: 0 lets the peer keep its own
        // key.
        const SAID: [u8; 5] = [message::NEW_KEY, 0, 0, 1, 0];
        let next = Key::new(self.rekeys.lock().sending()?)?;
        let whole = HEAD + SAID.len() + 1 + TAG;
        let record = unsent.room(whole);
        if let Some(room) = record.get_mut(HEAD..HEAD + SAID.len()) {
            room.copy_from_slice(&SAID);
        }
        sealing.key.seal(kind::HANDSHAKE, SAID.len(), record)?;
        unsent.grow(whole);
        sealing.key = next;
        Ok(())
    }
}

impl Incoming {
    /// Where the next record lies, without its head. `None` while it has not arrived as a whole.
    fn record(&self) -> Result<Option<Range<usize>>, Error> {
        let bytes = self.bytes.get(self.sealed.clone()).unwrap_or_default();
        let Some(&[kind, major, minor, high, low]) = bytes.first_chunk() else {
            return Ok(None);
        };
        if kind != kind::DATA || [major, minor] != VERSION {
            return Err(InvalidMessage::InvalidContentType.into());
        }
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length > SEALED {
            return Err(InvalidMessage::MessageTooLarge.into());
        }
        if length <= TAG {
            return Err(InvalidMessage::MessageTooShort.into());
        }
        let start = self.sealed.start + HEAD;
        let is_whole = bytes.len() >= HEAD + length;
        Ok(is_whole.then_some(start..start + length))
    }

    /// Room for the next bytes from the socket. Called only when no plaintext is left.
    fn room(&mut self) -> &mut [u8] {
        let kept = self.sealed.len();
        self.bytes.copy_within(self.sealed.clone(), 0);
        (self.plain, self.sealed) = (0..0, 0..kept);
        let end = kept + self.piece;
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes.get_mut(kept..end).unwrap_or_default()
    }
}

/// Whether an alert announces the end of the peer's data. Other alerts are errors.
fn is_end(alert: &[u8]) -> Result<bool, Error> {
    let &[_level, description] = alert else {
        return Err(InvalidMessage::MessageTooShort.into());
    };
    match AlertDescription::from(description) {
        AlertDescription::CloseNotify => Ok(true),
        AlertDescription::UserCanceled => Ok(false),
        other => Err(Error::AlertReceived(other)),
    }
}

/// Reads the messages of a record that are of the handshake's kind. Returns whether the sender has a new key, and
/// then whether it wants one of this side. A message about a new key is the last of its record. Tickets are ignored,
/// because clients do not resume sessions.
fn new_key(mut messages: &[u8]) -> Result<Option<bool>, Error> {
    while let Some((&[kind, high, middle, low], rest)) = messages.split_first_chunk() {
        let length = u32::from_be_bytes([0, high, middle, low]) as usize;
        let (body, rest) = rest
            .split_at_checked(length)
            .ok_or(InvalidMessage::MessageTooShort)?;
        match (kind, body) {
            (message::NEW_KEY, &[wants @ (0 | 1)]) if rest.is_empty() => {
                return Ok(Some(wants == 1));
            }
            (message::NEW_KEY, _) => return Err(InvalidMessage::InvalidKeyUpdate.into()),
            (message::TICKET, _) => {}
            _ => return Err(Error::General("a message that no session has".into())),
        }
        messages = rest;
    }
    if messages.is_empty() {
        return Ok(None);
    }
    Err(InvalidMessage::MessageTooShort.into())
}

#[cfg(test)]
mod tests;
