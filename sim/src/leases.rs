//! The leases that readers hold, whichever leader gave them: of the places that a lookup gave, and of presence.
//!
//! - A leader that was seen to know a lease knows it until its end, at the block in memory or at its copy. It may
//!   forget the leases on blocks in memory that leave with their nodes, and those on keys that change. It may forget
//!   all leases from before a disk was forgotten by order.
//! - A leader counts at least as many holders of a block, or of its copy, as have leases there. Otherwise the release
//!   of one of them would end the leases of others. It may also not know the number: such leases end by expiry.
//! - A leader knows no leases of earlier terms. So it takes each block of an earlier term for leased until they are
//!   over. A removal without force takes no such block, in memory or on a disk.

use crate::load::number_of;
use crate::plan::{Plan, Process, TENANT_KEYS};
use crate::sight::Sight;
use kvpool_master::pool::Pool;
use kvpool_types::{Key, SegmentId, Version};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
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
    /// The version that the answer names, if it names one.
    located: Option<Version>,
    /// The block for which the leader was seen to know it.
    known: Option<Known>,
    /// The leader may have forgotten it. A later lease on the same copy does not bring it back.
    is_excused: bool,
}

/// See [`Held`].
#[derive(Clone, Copy, Debug)]
struct Known {
    /// The number of its key.
    key: u64,
    version: Version,
    /// Whether memory had the block then.
    in_memory: bool,
}

impl Held {
    /// The number of its key. The clients of the checks use several namespaces, and are not judged.
    fn number(&self, plan: &Plan) -> Option<u64> {
        let Process::Client(client) = self.reader else {
            return None;
        };
        let number = number_of(&self.key).filter(|_| client < plan.clients)?;
        Some(plan.tenant_of(client) as u64 * TENANT_KEYS + number)
    }

    /// Whether its leader may have forgotten it together with a block that left memory, or with a disk that was
    /// forgotten by order. `seen` is what is there now.
    fn may_have_left(&self, seen: &Known, lost: Lost, is_known: bool) -> bool {
        // Another reader's lease on the copy may last as long as a lease that left with memory.
        let has_left = self.known.is_some_and(|known| {
            known.version != seen.version || known.in_memory && !seen.in_memory
        });
        let was_in_memory = self.known.is_none_or(|known| known.in_memory);
        has_left || lost.disk || lost.memory && was_in_memory || lost.perhaps && !is_known
    }

    /// It lasts for `left`, and its leader does not know it.
    fn forgotten(&self, seen: &Known, left: Duration) -> Broken {
        let (reader, epoch, version) = (self.reader, self.epoch, seen.version);
        Broken {
            key: seen.key,
            asked: self.asked,
            what: format!(
                "{reader} has a lease of epoch {epoch} on version {version} of {} for {} ms more, and its leader \
                 knows of none that lasts so long",
                self.key,
                left.as_millis()
            ),
        }
    }

    /// Whether its leader gave it before this moment. A token is the end of its lease on the clock of its leader, which
    /// may drift.
    fn is_from_before(&self, moment: Option<Instant>, pool: &Pool, plan: &Plan) -> bool {
        const SLACK: Duration = Duration::from_millis(10);
        let given_ms = self.token.saturating_sub(plan.lease_ms);
        let age = Duration::from_millis(pool.clock_ms().saturating_sub(given_ms)) + SLACK;
        moment.is_some_and(|moment| moment + age >= Instant::now())
    }
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

/// A lease that somebody did not heed.
#[derive(Clone, Debug)]
pub(crate) struct Broken {
    /// The number of its key.
    pub(crate) key: u64,
    /// When the reader asked for it.
    pub(crate) asked: Instant,
    pub(crate) what: String,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    all: Mutex<Vec<Held>>,
    /// The segments at the last look.
    segments: Mutex<BTreeSet<SegmentId>>,
    losses: Mutex<Losses>,
}

/// When memory was lost, or a disk was forgotten by order. A block that was on its way back from a disk then may appear
/// later, and is lost at once.
#[derive(Clone, Copy, Debug, Default)]
struct Losses {
    /// How many disks are being forgotten by order.
    forgetting: u32,
    /// Whether a disk has been forgotten since the last look.
    has_forgotten: bool,
    /// The last look at which something had been lost, or such a block may have appeared.
    at: Option<Instant>,
    /// Whether such blocks may still be on their way.
    go_on: bool,
}

/// What may have been lost since the last look.
#[derive(Clone, Copy, Debug)]
struct Lost {
    /// Memory.
    memory: bool,
    /// A disk, by order. The leases on its copies go with it, also where their blocks are in memory again.
    disk: bool,
    /// Memory, a disk, or a block on its way back from a disk.
    perhaps: bool,
    /// The last look with such a loss, which may be this one.
    at: Option<Instant>,
}

impl Losses {
    /// Notes a look, and whether memory was lost since the last one. A journal without records on their way has those
    /// of all blocks that were on their way back.
    fn look(&mut self, memory: bool, is_idle: bool) -> Lost {
        let disk = std::mem::take(&mut self.has_forgotten) || self.forgetting > 0;
        let perhaps = memory || disk || self.go_on;
        self.go_on = perhaps && !is_idle;
        if perhaps {
            self.at = Some(Instant::now());
        }
        Lost {
            memory,
            disk,
            perhaps,
            at: self.at,
        }
    }
}

impl Leases {
    /// A reader has got a lease on these keys, some with the version of their block.
    pub(crate) fn begin(
        &self,
        given: Given,
        keys: impl IntoIterator<Item = (Key, Option<Version>)>,
    ) {
        let now = Instant::now();
        let mut all = self.all.lock();
        all.retain(|held| held.until > now);
        all.extend(keys.into_iter().map(|(key, located)| Held {
            reader: given.reader,
            key,
            token: given.token,
            epoch: given.epoch,
            asked: given.asked,
            given: now,
            until: given.until,
            located,
            known: None,
            is_excused: false,
        }));
    }

    /// A reader's lease on a key goes on under another token. A reader may have several leases with one token, which
    /// its leader gave in the same millisecond. Each of them is renewed by itself.
    pub(crate) fn renew(&self, before: u64, given: Given, key: &Key) {
        let mut all = self.all.lock();
        let is_it = |held: &&mut Held| {
            held.reader == given.reader && held.token == before && held.key == *key
        };
        let alike = all.iter_mut().filter(is_it);
        // The renewal does not say which of them it is. What stays is judged for the least time, or not at all.
        let Some(held) = alike.max_by_key(|held| (!held.is_excused, held.until)) else {
            return;
        };
        held.token = given.token;
        held.until = given.until;
        if held.is_excused && held.epoch == given.epoch {
            // The leader has said that it knows the lease, so it counts as a new one.
            held.asked = given.asked;
            held.given = Instant::now();
            held.known = None;
            held.is_excused = false;
        }
    }

    /// A reader gives back one lease on a key. The release ends no lease on a version after `newest`.
    pub(crate) fn release(&self, reader: Process, key: &Key, token: u64, newest: Version) {
        let mut all = self.all.lock();
        let is_it = |held: &Held| {
            held.reader == reader
                && held.token == token
                && held.key == *key
                && held.located.is_none_or(|located| located <= newest)
        };
        let alike = all.iter().enumerate().filter(|(_, held)| is_it(held));
        // The release does not say which of them it is. See `renew`.
        let released = alike.max_by_key(|(_, held)| (!held.is_excused, held.until));
        if let Some(at) = released.map(|(at, _)| at) {
            all.remove(at);
        }
    }

    /// A reader has died.
    pub(crate) fn forget(&self, reader: Process) {
        self.all.lock().retain(|held| held.reader != reader);
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        self.all.lock().clear();
    }

    /// The pool begins to forget a disk by order.
    pub(crate) fn disk_goes(&self) {
        self.losses.lock().forgetting += 1;
    }

    /// The pool has forgotten it, or has refused to.
    pub(crate) fn disk_has_gone(&self) {
        let mut losses = self.losses.lock();
        losses.forgetting -= 1;
        losses.has_forgotten = true;
    }

    /// Notes which memory there is. Returns what may have been lost since the last look.
    fn look_at_memory(&self, pool: &Pool) -> Lost {
        let segments = pool.placement.segments();
        let now: BTreeSet<SegmentId> = segments.iter().map(|segment| segment.id).collect();
        drop(segments);
        let before = std::mem::replace(&mut *self.segments.lock(), now.clone());
        // A block may have come back from a disk and left with its node, both since the last look.
        let has_lost = !before.is_subset(&now);
        let is_idle = pool.logged().is_some();
        self.losses.lock().look(has_lost, is_idle)
    }

    /// The leases that the leader knew at the last look, and does not know any more.
    pub(crate) fn forgotten_by(&self, sight: &Sight<'_>, plan: &Plan) -> Vec<Broken> {
        const SLACK: Duration = Duration::from_millis(2);
        let pool = sight.pool;
        let lost = self.look_at_memory(pool);
        let now = Instant::now();
        let mut broken = Vec::new();
        let mut all = self.all.lock();
        let is_open =
            |held: &&mut Held| held.until > now && held.epoch == pool.epoch.0 && !held.is_excused;
        let mut open = all.iter_mut().filter(is_open).peekable();
        if open.peek().is_none() {
            return broken;
        }
        let (terms, of_copies) = (pool.lease_terms(), pool.lease_terms_of_copies());
        for held in open {
            let Some(key) = held.number(plan) else {
                continue;
            };
            let block = sight.block(key).map(|block| block.version);
            let copy = sight.copy(key).map(|copy| copy.version);
            let Some(version) = block.or(copy) else {
                held.is_excused = true;
                continue;
            };
            let left = held.until.saturating_duration_since(now);
            let ends = [terms.get(&version), of_copies.get(&version)];
            let is_known = ends.into_iter().flatten().any(|end| *end + SLACK >= left);
            let seen = Known {
                key,
                version,
                in_memory: block.is_some(),
            };
            // Its answer may have been on its way while memory was lost.
            let is_old = held.is_from_before(lost.at, pool, plan);
            let is_first = held.known.is_none();
            if held.may_have_left(&seen, lost, is_known) || is_first && (is_old || !is_known) {
                held.is_excused = true;
                continue;
            }
            if !is_known {
                broken.push(held.forgotten(&seen, left));
            }
            held.known = Some(seen);
        }
        broken
    }

    /// A block, or a copy, whose leader counts fewer holders than have leases on it. Call it after
    /// [`Leases::forgotten_by`] at the same look.
    ///
    /// A lease without a version in its answer may be on an earlier block of its key. `may_have_changed` says so.
    pub(crate) fn uncounted(
        &self,
        sight: &Sight<'_>,
        plan: &Plan,
        may_have_changed: impl Fn(u64, Instant) -> bool,
    ) -> Option<String> {
        const SLACK: Duration = Duration::from_millis(2);
        let (pool, now) = (sight.pool, Instant::now());
        let lost_at = self.losses.lock().at;
        let all = self.all.lock();
        let counts = |held: &&Held| {
            let is_open = held.until > now + SLACK && held.epoch == pool.epoch.0;
            is_open && !held.is_excused && !held.is_from_before(lost_at, pool, plan)
        };
        let mut there: BTreeMap<(Version, bool), u64> = BTreeMap::new();
        for held in all.iter().filter(counts) {
            let Some(known) = held.known else { continue };
            let is_of_it =
                held.located == Some(known.version) || !may_have_changed(known.key, held.asked);
            if is_of_it {
                *there.entry((known.version, known.in_memory)).or_default() += 1;
            }
        }
        if there.is_empty() {
            return None;
        }
        let (blocks, copies) = (pool.lease_holders(), pool.lease_holders_of_copies());
        there.into_iter().find_map(|((version, in_memory), held)| {
            let (of_its_kind, kind) = match in_memory {
                true => (&blocks, "block"),
                false => (&copies, "copy"),
            };
            let counted = u64::from(*of_its_kind.get(&version)?);
            (counted < held).then(|| {
                format!(
                    "readers have {held} leases on the {kind} of version {version}, and its leader counts {counted}"
                )
            })
        })
    }

    /// A lease of a term before `epoch`, which its reader had at `begun` and still has.
    pub(crate) fn before(
        &self,
        epoch: u64,
        key: &Key,
        begun: Instant,
        is_of: impl Fn(usize) -> bool,
    ) -> Option<Broken> {
        const SLACK: Duration = Duration::from_millis(5);
        let now = Instant::now();
        let all = self.all.lock();
        let held = all.iter().find(|held| {
            let is_reader = matches!(held.reader, Process::Client(client) if is_of(client));
            let lasts = held.given < begun && held.until > now + SLACK;
            is_reader && lasts && held.epoch < epoch && held.key == *key
        })?;
        let left = held.until.saturating_duration_since(now).as_millis();
        Some(Broken {
            key: number_of(key)?,
            asked: held.asked,
            what: format!(
                "{} has a lease of epoch {} on {key} for {left} ms more",
                held.reader, held.epoch
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_disk_counts_as_lost_until_the_look_after_it_has_gone() {
        let leases = Leases::default();
        let look = || leases.losses.lock().look(false, true);
        assert!(!look().disk);
        leases.disk_goes();
        assert!(look().disk);
        assert!(look().perhaps);
        leases.disk_has_gone();
        assert!(look().disk);
        let lost = look();
        assert!(!lost.disk && !lost.perhaps && lost.at.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_or_a_release_is_of_one_lease_where_two_have_one_token() {
        let (leases, key) = (Leases::default(), Key::parse("key-1").unwrap());
        let given = |token| Given {
            reader: Process::Client(0),
            token,
            epoch: 1,
            asked: Instant::now(),
            until: Instant::now() + Duration::from_secs(token),
        };
        let tokens = || -> Vec<u64> {
            let all = leases.all.lock();
            all.iter().map(|held| held.token).collect()
        };
        let release =
            |token, newest| leases.release(Process::Client(0), &key, token, Version(newest));
        leases.begin(given(7), [(key.clone(), None)]);
        leases.begin(given(7), [(key.clone(), Some(Version(5)))]);
        leases.renew(7, given(8), &key);
        assert_eq!(tokens(), [7, 8]);
        leases.renew(7, given(9), &key);
        assert_eq!(tokens(), [9, 8]);
        release(9, u64::MAX);
        assert_eq!(tokens(), [8]);
        leases.begin(given(8), [(key.clone(), Some(Version(5)))]);
        leases.begin(given(8), [(key.clone(), Some(Version(6)))]);
        release(8, 4);
        assert_eq!(tokens(), [8, 8, 8], "it is of an earlier version");
        for left in [2, 1, 1] {
            release(8, 5);
            assert_eq!(tokens().len(), left);
        }
        leases.forget(Process::Client(1));
        assert_eq!(tokens(), [8]);
        leases.forget(Process::Client(0));
        assert!(tokens().is_empty());
    }
}
