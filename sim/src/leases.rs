//! The leases that readers hold, whichever leader gave them: of the places that a lookup gave, and of presence.
//!
//! A leader knows no leases of earlier terms. So it takes each block of an earlier term for leased until they are over.
//! A removal without force takes no such block, in memory or on a disk.

use crate::plan::Process;
use kvpool_types::Key;
use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// A lease on a key.
#[derive(Clone, Debug)]
struct Held {
    reader: Process,
    key: Key,
    token: u64,
    epoch: u64,
    asked: Instant,
    /// When the reader had the answer.
    given: Instant,
    until: Instant,
}

/// A lease as an answer gives it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Given {
    pub(crate) reader: Process,
    pub(crate) token: u64,
    pub(crate) epoch: u64,
    pub(crate) asked: Instant,
    pub(crate) until: Instant,
}

/// A lease that a removal has to heed.
#[derive(Clone, Debug)]
pub(crate) struct Earlier {
    /// When the reader asked for it.
    pub(crate) asked: Instant,
    pub(crate) what: String,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Leases(Mutex<Vec<Held>>);

impl Leases {
    /// A reader has got a lease on these keys.
    pub(crate) fn begin(&self, given: Given, keys: impl IntoIterator<Item = Key>) {
        let now = Instant::now();
        let mut all = self.0.lock();
        all.retain(|held| held.until > now);
        all.extend(keys.into_iter().map(|key| Held {
            reader: given.reader,
            key,
            token: given.token,
            epoch: given.epoch,
            asked: given.asked,
            given: now,
            until: given.until,
        }));
    }

    /// A reader's lease on a key goes on under another token.
    pub(crate) fn renew(&self, before: u64, given: Given, key: &Key) {
        let mut all = self.0.lock();
        let is_it = |held: &&mut Held| {
            held.reader == given.reader && held.token == before && held.key == *key
        };
        for held in all.iter_mut().filter(is_it) {
            held.token = given.token;
            held.until = given.until;
        }
    }

    /// Forgets those that are given back.
    pub(crate) fn end(&self, is_over: impl Fn(Process, &Key, u64) -> bool) {
        let mut all = self.0.lock();
        all.retain(|held| !is_over(held.reader, &held.key, held.token));
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }

    /// A lease of a term before `epoch`, which its reader had at `begun` and still has.
    pub(crate) fn before(
        &self,
        epoch: u64,
        key: &Key,
        begun: Instant,
        is_of: impl Fn(usize) -> bool,
    ) -> Option<Earlier> {
        const SLACK: Duration = Duration::from_millis(5);
        let now = Instant::now();
        let all = self.0.lock();
        let held = all.iter().find(|held| {
            let is_reader = matches!(held.reader, Process::Client(client) if is_of(client));
            let lasts = held.given < begun && held.until > now + SLACK;
            is_reader && lasts && held.epoch < epoch && held.key == *key
        })?;
        let left = held.until.saturating_duration_since(now).as_millis();
        Some(Earlier {
            asked: held.asked,
            what: format!(
                "{} has a lease of epoch {} on {key} for {left} ms more",
                held.reader, held.epoch
            ),
        })
    }
}
