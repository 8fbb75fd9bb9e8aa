//! Get sessions: keys that are leased from the start of a session to its end, for any length of time.

use kvpool_client::ControlError;
use kvpool_client::Leasing;
use kvpool_client::blocking::{Client, Lease};
use kvpool_types::{Code, Key};
use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// The longest time between two renewals of a lease.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The shortest time between two renewals of a lease.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);

/// The get sessions of one store.
#[derive(Default)]
pub(super) struct GetSessions {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    open: Mutex<Open>,
    changed: Condvar,
}

#[derive(Default)]
struct Open {
    held: Vec<Arc<Held>>,
    /// Whether the keeper thread runs. It ends when no session holds a lease.
    keeping: bool,
}

/// The keys that one call of `start` leased.
struct Held {
    /// The keys whose session has not ended.
    keys: Mutex<HashSet<Key>>,
    /// The keys whose session has ended and that the lease still covers.
    ended: Mutex<Vec<Key>>,
    /// The keeper holds this lock while it asks the master. Other threads only try to lock it: see [`release`].
    leased: Mutex<Option<Leased>>,
}

/// The lease of a session.
struct Leased {
    lease: Lease,
    /// Whether keys have fallen out of the lease, for example because the master did not answer in time.
    lapsed: bool,
}

impl GetSessions {
    /// Begins a session for each of `keys` that is present. Returns for each key whether it is present. Fails if no
    /// thread can be started that renews the leases.
    pub(super) fn start(&self, client: &Client, keys: &[Key]) -> Result<Vec<bool>, ControlError> {
        let (present, lease) = client.exist(keys, Leasing::Lease)?;
        let found: HashSet<Key> = keys
            .iter()
            .zip(&present)
            .filter(|(_, present)| **present)
            .map(|(key, _)| key.clone())
            .collect();
        if found.is_empty() {
            return Ok(present);
        }
        let mut open = self.shared.open.lock();
        if !open.keeping {
            let (shared, client) = (Arc::clone(&self.shared), client.clone());
            let pause = (client.limits().lease_ttl / 4).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
            let keeper = std::thread::Builder::new().name("kvpool-sessions".into());
            // The thread waits for the lock, so it finds the session.
            if let Err(error) = keeper.spawn(move || keep(&shared, &client, pause)) {
                drop(open);
                give_back(lease);
                let message = format!("no thread can be started to renew leases: {error}");
                tracing::error!("no session is begun: {message}");
                let code = Code::Internal;
                return Err(ControlError { code, message });
            }
            open.keeping = true;
        }
        open.held.push(Arc::new(Held {
            keys: Mutex::new(found),
            ended: Mutex::default(),
            leased: Mutex::new(Some(Leased {
                lease,
                lapsed: false,
            })),
        }));
        Ok(present)
    }

    /// Ends a session of each key. Returns for each key whether it had a session. If the keeper is renewing a
    /// key's lease, the keeper gives the key back after the renewal.
    pub(super) fn end(&self, keys: &[Key]) -> Vec<bool> {
        let mut ended = Vec::new();
        let had_one = {
            let mut open = self.shared.open.lock();
            let had_one = keys.iter().map(|key| open.end(key, &mut ended)).collect();
            open.held.retain(|held| !held.keys.lock().is_empty());
            had_one
        };
        for (held, keys) in ended {
            held.ended.lock().extend(keys);
            release(&held);
        }
        had_one
    }

    /// Ends all sessions.
    pub(super) fn end_all(&self) {
        let held = std::mem::take(&mut self.shared.open.lock().held);
        self.shared.changed.notify_all();
        for held in held {
            let keys = std::mem::take(&mut *held.keys.lock());
            held.ended.lock().extend(keys);
            release(&held);
        }
    }
}

impl Open {
    /// Ends a session of a key, and adds the key to `ended`. Returns false when the key has no session.
    fn end(&self, key: &Key, ended: &mut Vec<(Arc<Held>, Vec<Key>)>) -> bool {
        let Some(held) = self.held.iter().find(|held| held.keys.lock().remove(key)) else {
            return false;
        };
        match ended.iter_mut().find(|(other, _)| Arc::ptr_eq(other, held)) {
            Some((_, keys)) => keys.push(key.clone()),
            None => ended.push((Arc::clone(held), vec![key.clone()])),
        }
        true
    }
}

/// Gives a lease back. A lease that cannot be given back expires by itself.
fn give_back(lease: Lease) {
    if let Err(error) = lease.release() {
        tracing::debug!(%error, "session lease not released, it expires by itself");
    }
}

/// Gives back the lease on keys whose sessions have ended, and the whole lease with the last key. A thread that
/// holds the lease may be in a call to the master. It calls this function afterwards, so no other thread waits
/// for it.
fn release(held: &Held) {
    let mut leases = Vec::new();
    // The list is read again after each unlock, because a thread that could not lock the lease has left its
    // keys there.
    loop {
        if held.ended.lock().is_empty() {
            break;
        }
        let Some(mut leased) = held.leased.try_lock() else {
            break;
        };
        let keys = std::mem::take(&mut *held.ended.lock());
        leases.extend(if held.keys.lock().is_empty() {
            leased.take().map(|leased| leased.lease)
        } else {
            leased.as_mut().map(|leased| leased.lease.split_off(&keys))
        });
    }
    leases.into_iter().for_each(give_back);
}

/// Records that the keeper has panicked, so that the next session starts another one.
struct Panicked<'a>(&'a Shared);

impl Drop for Panicked<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(
                "the thread that renews the leases of sessions has ended: these leases expire unless another session \
                 begins soon"
            );
            self.0.open.lock().keeping = false;
        }
    }
}

/// Renews leases, each before half of its time has passed, until no session holds one.
fn keep(shared: &Shared, client: &Client, pause: Duration) {
    let _noted = Panicked(shared);
    loop {
        let held = {
            let mut open = shared.open.lock();
            shared.changed.wait_for(&mut open, pause);
            if open.held.is_empty() {
                open.keeping = false;
                return;
            }
            open.held.clone()
        };
        for held in held {
            renew(client, &held);
            release(&held);
        }
    }
}

/// Renews the lease of a session. If keys have fallen out of the lease, takes a new lease on the keys that are
/// still present.
fn renew(client: &Client, held: &Held) {
    let mut leased = held.leased.lock();
    let Some(leased) = leased.as_mut() else {
        return;
    };
    match leased.lease.renew() {
        Ok(lost) => leased.lapsed |= lost > 0,
        Err(error) => tracing::warn!(%error, "cannot renew a session's lease, retrying"),
    }
    if !leased.lapsed {
        return;
    }
    let keys: Vec<Key> = held.keys.lock().iter().cloned().collect();
    if keys.is_empty() {
        return;
    }
    match client.exist(&keys, Leasing::Lease) {
        Ok((present, lease)) => {
            let gone = present.iter().filter(|present| !**present).count();
            tracing::warn!(
                keys = keys.len(),
                gone,
                "a session's lease expired, took a new one"
            );
            let lapsed = false;
            let before = std::mem::replace(leased, Leased { lease, lapsed });
            give_back(before.lease);
        }
        Err(error) => tracing::warn!(%error, "a session's lease expired, cannot take a new one"),
    }
}
