//! Releases of leases whose operation has ended.
//!
//! ```text
//!  a get that located its blocks ── ends ──────────────► ended ─┐
//!  Lease of exist or match_prefix ─ dropped ─► dropped ─┐       ├─► Release, in batches
//!  a get of one of its keys ─────── hits ────► read ────┴───────┘
//! ```
//!
//! The lease of a view stays for [`LINGER`], for another view of the same block.
//!
//! No caller waits for a release. The first release is sent at once. The releases of the next milliseconds
//! follow in one message. So a reader in a loop costs the master at most a few hundred messages per second.
//! Each release is sent at most once: if it is lost, the lease expires by itself.
//!
//! ADR 0024 says why a lease ends with its operation.

use crate::cache::{Leased, Located};
use crate::clock::{BootTime, Deadline};
use crate::control::{Call, Control};
use crate::errors::ControlError;
use crate::lease::all_of;
use crate::message_limits::MessageLimits;
use crate::packed::Packed;
use kvpool_proto::ReleaseRequest;
use kvpool_seams::maps::HashMap;
use kvpool_types::wire::keys::pack;
use kvpool_types::{Epoch, Key, Version};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long releases are collected after a message was sent. The blocks that stay leased meanwhile are few
/// beside a pool. A put that waits for room is hardly delayed.
const GATHER: Duration = Duration::from_millis(5);
/// The time limit of one message. Later releases are collected meanwhile.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a view's lease is kept for another view of the same block. A pin needs a lease, and a request
/// for one takes many times as long as the view itself.
const LINGER: Duration = Duration::from_millis(50);
/// The most leases of views that are kept so.
const MOST_LINGERING: usize = 64;
/// The most leases that wait to be sent, and the most keys of dropped leases. Leases beyond it expire by
/// themselves.
const MOST: usize = 1 << 16;

/// The least time between two removals of expired leases from the index of dropped leases. One takes under a
/// millisecond for [`MOST`] leases, with the queue locked.
const TRIM: Duration = Duration::from_millis(250);

/// The keys that one reply leased, and their lease.
#[derive(Clone, Debug)]
pub(crate) struct LeasePart {
    pub(crate) keys: Packed,
    pub(crate) leased: Leased,
}

impl LeasePart {
    /// An upper bound of each block's version.
    pub(crate) fn versions(&self) -> Vec<u64> {
        vec![self.leased.newest.0; self.keys.len()]
    }
}

/// A lease on one block, counted once.
#[derive(Clone, Debug)]
pub(crate) struct HeldLease {
    pub(crate) key: Key,
    /// The block's version. For a lease of several blocks, an upper bound of their versions.
    pub(crate) newest: Version,
    pub(crate) leased: Leased,
}

/// The leases that one client releases by itself.
#[derive(Debug)]
pub(crate) struct Releases {
    control: Arc<Control>,
    /// The approximate most bytes of one message.
    message_bytes: usize,
    queue: Mutex<Queue>,
    /// Whether a lease was ever dropped, so that reads must be recorded.
    remembers: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    ended: Vec<HeldLease>,
    dropped: VecDeque<LeasePart>,
    dropped_keys: usize,
    read: Vec<Key>,
    index: Index,
    /// The unreleased leases of ended views, oldest first.
    lingering: VecDeque<Lingering>,
    changes: Changes,
    /// Whether a task is sending releases.
    sending: bool,
}

/// The number of changes of keys by this client. It is read before a lease is requested, or when a lingering
/// one is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes(u64);

/// A lease that no operation uses at the moment, and the location of its block.
#[derive(Debug)]
struct Lingering {
    located: Arc<Located>,
    held: HeldLease,
    since: BootTime,
}

/// The leases of dropped [`crate::Lease`]s by key. They are indexed at the first read after the drop.
#[derive(Debug, Default)]
struct Index {
    keys: HashMap<Key, SmallVec<[Leased; 1]>>,
    /// The number of leases of all keys together: [`MOST`] at most.
    leases: usize,
    /// When the last of the leases has expired.
    until: Option<BootTime>,
    /// The time from which the next added lease may trim the index.
    next_trim: Option<BootTime>,
}

impl Index {
    /// Adds the keys of a lease. Leases beyond [`MOST`] are not added and expire by themselves.
    fn add(&mut self, part: &LeasePart, now: BootTime) {
        if self.next_trim.is_none_or(|at| at.left(now).is_zero()) {
            self.trim(now);
        }
        if self.leases + part.keys.len() > MOST || !part.leased.runs(now) {
            return;
        }
        for key in part.keys.iter() {
            let leases = self.keys.entry(key).or_default();
            if leases.len() == leases.capacity() {
                let before = leases.len();
                leases.retain(|leased| leased.runs(now));
                self.leases -= before - leases.len();
            }
            leases.push(part.leased);
            self.leases += 1;
        }
        self.until = self.until.max(Some(part.leased.until));
    }

    /// Drops expired leases. Keys may be asked for again and again and never be read.
    fn trim(&mut self, now: BootTime) {
        let before = self.leases;
        self.leases = 0;
        self.keys.retain(|_, leases| {
            leases.retain(|leased| leased.runs(now));
            self.leases += leases.len();
            !leases.is_empty()
        });
        debug_assert!(self.leases <= before, "the index lost count of its leases");
        self.next_trim = Some(now.after(TRIM));
    }

    /// Takes out the leases on a key that was read.
    fn take(&mut self, key: &Key) -> impl Iterator<Item = HeldLease> {
        let found = self.keys.remove_entry(key);
        let count = found.as_ref().map_or(0, |(_, leases)| leases.len());
        debug_assert!(count <= self.leases, "the index lost count of its leases");
        self.leases = self.leases.saturating_sub(count);
        found.into_iter().flat_map(|(key, leases)| {
            leases.into_iter().map(move |leased| HeldLease {
                key: key.clone(),
                newest: leased.newest,
                leased,
            })
        })
    }
}

impl Queue {
    /// Drops expired entries of dropped leases, and the oldest entries beyond [`MOST`] keys.
    fn forget_lapsed(&mut self, now: BootTime) {
        while let Some(first) = self.dropped.front()
            && (self.dropped_keys > MOST || !first.leased.runs(now))
        {
            debug_assert!(
                self.dropped_keys >= first.keys.len(),
                "dropped keys miscounted"
            );
            self.dropped_keys -= first.keys.len();
            self.dropped.pop_front();
        }
        debug_assert!(
            !self.dropped.is_empty() || self.dropped_keys == 0,
            "{} keys of no dropped lease",
            self.dropped_keys
        );
    }

    /// The leases to release now: those of ended operations, and those of dropped leases on keys that were
    /// read.
    fn take(&mut self, now: BootTime) -> Vec<HeldLease> {
        let mut ended = std::mem::take(&mut self.ended);
        while let Some(first) = self.lingering.front()
            && (self.lingering.len() > MOST_LINGERING
                || first.since.after(LINGER).left(now).is_zero())
        {
            ended.extend(self.lingering.pop_front().map(|first| first.held));
        }
        if let Some(until) = self.index.until
            && until.left(now).is_zero()
        {
            self.index = Index::default();
        }
        self.forget_lapsed(now);
        let read = std::mem::take(&mut self.read);
        if !read.is_empty() {
            self.dropped_keys = 0;
            for part in std::mem::take(&mut self.dropped) {
                self.index.add(&part, now);
            }
            for key in read {
                ended.extend(self.index.take(&key));
            }
        }
        ended
    }
}

impl Releases {
    pub(crate) fn new(control: Arc<Control>, message_bytes: usize) -> Self {
        Self {
            control,
            message_bytes,
            queue: Mutex::default(),
            remembers: AtomicBool::new(false),
        }
    }

    /// The calls to the master that gave the leases.
    pub(crate) const fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Releases leases whose operation has ended.
    pub(crate) fn end(self: &Arc<Self>, held: Vec<HeldLease>) {
        if held.is_empty() {
            return;
        }
        let mut queue = self.queue.lock();
        if queue.ended.len() < MOST {
            queue.ended.extend(held);
        }
        self.send_soon(&mut queue);
    }

    /// Keeps a lease that its holder has dropped. Each key of it is released when this client reads the key.
    pub(crate) fn drop_lease(&self, parts: Vec<LeasePart>) {
        let now = BootTime::now();
        let parts = parts.into_iter().filter(|part| part.leased.runs(now));
        let mut queue = self.queue.lock();
        for part in parts {
            queue.dropped_keys += part.keys.len();
            queue.dropped.push_back(part);
            self.remembers.store(true, Ordering::Release);
        }
        queue.forget_lapsed(now);
    }

    /// Whether [`Releases::read`] may have an effect.
    pub(crate) fn remembers(&self) -> bool {
        self.remembers.load(Ordering::Acquire)
    }

    /// Releases the dropped leases on `keys`, which were read.
    pub(crate) fn read(self: &Arc<Self>, keys: impl IntoIterator<Item = Key>) {
        let mut queue = self.queue.lock();
        if queue.read.len() < MOST {
            queue.read.extend(keys);
        }
        self.send_soon(&mut queue);
    }

    /// Takes the unreleased lease of an earlier view of `key`, and the location of its block.
    fn take_lingering(
        &self,
        key: &Key,
        epoch: Epoch,
        now: BootTime,
    ) -> Option<(Lingering, Changes)> {
        let mut queue = self.queue.lock();
        let is_good = |one: &Lingering| {
            let lease = &one.held.leased;
            one.held.key == *key && lease.epoch == epoch && lease.is_fresh(now)
        };
        let at = queue.lingering.iter().rposition(is_good)?;
        // The count is taken at this moment. A later change of the key does not find the lease here.
        let changes = queue.changes;
        queue.lingering.remove(at).map(|found| (found, changes))
    }

    /// The number of changes so far. Call this before requesting a lease that may linger.
    pub(crate) fn changes(&self) -> Changes {
        self.queue.lock().changes
    }

    /// Releases the lingering leases on keys that this client changed, so that its next view sees the change.
    pub(crate) fn forget<'a>(self: &Arc<Self>, keys: impl IntoIterator<Item = &'a Key>) {
        let mut queue = self.queue.lock();
        queue.changes.0 += 1;
        if queue.lingering.is_empty() {
            return;
        }
        for key in keys {
            while let Some(at) = queue.lingering.iter().position(|one| one.held.key == *key) {
                let lingering = queue.lingering.remove(at);
                queue.ended.extend(lingering.map(|one| one.held));
            }
        }
    }

    /// Releases all unreleased leases of ended views.
    pub(crate) fn forget_all(self: &Arc<Self>) {
        let mut queue = self.queue.lock();
        queue.changes.0 += 1;
        let all = std::mem::take(&mut queue.lingering);
        queue.ended.extend(all.into_iter().map(|one| one.held));
    }

    /// Keeps a lease for another view of its block. If this client has changed keys since `begun`, the lease
    /// is released instead.
    fn linger(self: &Arc<Self>, located: Arc<Located>, held: HeldLease, begun: Changes) {
        let since = BootTime::now();
        let mut queue = self.queue.lock();
        // `forget` counts changes under this lock. So a lease on the old version is either queued before the
        // change, and `forget` finds it, or it is never queued.
        if queue.changes == begun {
            queue.lingering.push_back(Lingering {
                located,
                held,
                since,
            });
        } else {
            queue.ended.push(held);
        }
        self.send_soon(&mut queue);
    }

    fn send_soon(self: &Arc<Self>, queue: &mut Queue) {
        if !std::mem::replace(&mut queue.sending, true) {
            let this = Arc::clone(self);
            self.control.spawn(async move { this.send_all().await });
        }
    }

    /// Sends the queued releases, and releases that are queued meanwhile, until the queue is empty.
    async fn send_all(&self) {
        loop {
            let now = BootTime::now();
            let held = {
                let mut queue = self.queue.lock();
                let held = queue.take(now);
                if queue.dropped.is_empty() && queue.index.keys.is_empty() {
                    self.remembers.store(false, Ordering::Release);
                }
                if held.is_empty() && queue.lingering.is_empty() {
                    queue.sending = false;
                    return;
                }
                held
            };
            if !held.is_empty()
                && let Err(error) = self
                    .send(held, Call::by(Deadline::after(SEND_TIMEOUT)).aside())
                    .await
            {
                tracing::debug!(%error, "leases not released, they expire by themselves");
            }
            tokio::time::sleep(GATHER).await;
        }
    }

    /// Releases the unexpired leases in `held`, each at most once. Leases of an earlier term are void.
    pub(crate) async fn send(
        &self,
        mut held: Vec<HeldLease>,
        call: Call,
    ) -> Result<(), ControlError> {
        let (now, epoch) = (BootTime::now(), self.control.epoch());
        let limits = MessageLimits {
            keys: self.control.limits().max_batch_keys,
            bytes: self.message_bytes,
        };
        let call = call.under(epoch).once();
        held.retain(|held| held.leased.epoch == epoch && held.leased.runs(now));
        let (keys, rest): (Vec<Key>, Vec<_>) = held
            .into_iter()
            .map(|held| (held.key, (held.newest.0, held.leased.token)))
            .unzip();
        let calls = limits.split_keys(&keys).into_iter().filter_map(|run| {
            let (keys, rest) = (keys.get(run.clone())?, rest.get(run)?);
            let token = rest.first()?.1;
            let alike = rest.iter().all(|(_, other)| *other == token);
            let request = ReleaseRequest {
                caller: None,
                keys: pack(keys).into(),
                // A master without a token per key ignores token 0.
                token: if alike { token } else { 0 },
                versions: rest.iter().map(|(newest, _)| *newest).collect(),
                tokens: match alike {
                    true => Vec::new(),
                    false => rest.iter().map(|(_, token)| *token).collect(),
                },
            };
            Some(self.control.call(request, call))
        });
        all_of(calls).await
    }
}

/// The leases of one operation, which are released when the operation ends in any way.
#[derive(Debug)]
pub(crate) struct Holding {
    releases: Arc<Releases>,
    held: Vec<HeldLease>,
}

impl Holding {
    /// Holds no lease yet.
    pub(crate) const fn new(releases: Arc<Releases>) -> Self {
        Self {
            releases,
            held: Vec::new(),
        }
    }

    /// Adds the lease that came with a lookup of `key`, if any.
    pub(crate) fn add_located(&mut self, key: &Key, located: &Located) {
        self.held.extend(located.lease.map(|leased| HeldLease {
            key: key.clone(),
            newest: located.version,
            leased,
        }));
    }

    /// Replaces the lease `before` on `key` by the renewed lease `after`.
    pub(crate) fn renewed(&mut self, key: &Key, before: Leased, after: Leased) {
        let is_it = |held: &&mut HeldLease| held.leased.token == before.token && held.key == *key;
        if before != after
            && let Some(held) = self.held.iter_mut().find(is_it)
        {
            held.leased = after;
        }
    }

    /// Takes over the lease that an earlier view of `key` left, and returns the location of its block.
    pub(crate) fn take_lingering(&mut self, key: &Key) -> Option<(Arc<Located>, Changes)> {
        let (epoch, now) = (self.releases.control.epoch(), BootTime::now());
        let (Lingering { located, held, .. }, changes) =
            self.releases.take_lingering(key, epoch, now)?;
        self.held.push(held);
        Some((located, changes))
    }

    /// Keeps the lease on `located` for another view of the block, unless this client has changed keys since
    /// `begun`.
    pub(crate) fn linger(&mut self, located: &Arc<Located>, begun: Changes) {
        let token = located.lease.map(|lease| lease.token);
        let is_it = |held: &HeldLease| Some(held.leased.token) == token;
        if let Some(at) = self.held.iter().position(is_it) {
            let held = self.held.swap_remove(at);
            self.releases.linger(Arc::clone(located), held, begun);
        }
    }

    /// Takes the leases out; the caller must release them.
    pub(crate) fn take(&mut self) -> Vec<HeldLease> {
        std::mem::take(&mut self.held)
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let held = self.take();
        self.releases.end(held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_never_read_keeps_no_leases_that_have_run_out() {
        let (begun, step) = (BootTime::now(), Duration::from_millis(10));
        let key = Key::parse("key").unwrap();
        let mut index = Index::default();
        // Each lease overlaps the next one, so the index is never empty of unexpired leases.
        for n in 0..1000 {
            let now = begun.after(step * n);
            let leased = Leased {
                token: n.into(),
                until: now.after(step * 2),
                ttl: step * 2,
                epoch: Epoch(1),
                newest: Version(0),
            };
            let keys = Packed::of([&key]);
            index.add(&LeasePart { keys, leased }, now);
        }
        let kept: usize = index.keys.values().map(|leases| leases.len()).sum();
        assert!(kept <= 8, "{kept} leases are kept, 2 run");
    }

    fn part(names: impl Iterator<Item = u32>, token: u64, until: BootTime) -> LeasePart {
        let keys: Vec<Key> = names
            .map(|n| Key::parse(&format!("k{n}")).unwrap())
            .collect();
        LeasePart {
            keys: Packed::of(&keys),
            leased: Leased {
                token,
                until,
                ttl: Duration::from_secs(5),
                epoch: Epoch(1),
                newest: Version(1),
            },
        }
    }

    #[test]
    fn keys_that_are_never_read_leave_the_index_when_their_leases_have_run_out() {
        let (begun, mut index) = (BootTime::now(), Index::default());
        for second in 0..200 {
            let now = begun.after(Duration::from_secs(second.into()));
            let until = now.after(Duration::from_secs(5));
            index.add(&part(second * 100..(second + 1) * 100, 1, until), now);
        }
        // Leases of five seconds are unexpired. Leases of the last second may not be trimmed yet.
        assert!(index.keys.len() <= 700, "{} keys", index.keys.len());
    }

    #[test]
    fn a_key_that_is_asked_for_without_end_has_a_bounded_number_of_leases() {
        let (now, mut index) = (BootTime::now(), Index::default());
        let until = now.after(Duration::from_secs(5));
        for token in 0..(MOST as u64 + 1000) {
            index.add(&part(0..1, token, until), now);
        }
        let key = Key::parse("k0").unwrap();
        let leases = index.take(&key).count();
        assert!(leases <= MOST, "{leases} leases");
        assert!(index.keys.is_empty());
    }
}
