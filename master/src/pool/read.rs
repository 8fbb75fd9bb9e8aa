//! Reads of metadata: the locations and the presence of blocks, and the leases on these answers.

use super::{HiddenReplica, Pool};
use crate::clock::BootInstant;
use crate::directory::{BlockRef, Copies, Replica};
use crate::placement::Segments;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use kvpool_types::{Checksum, Code, Length, SegmentId, Version};
use std::cell::Cell;
use std::collections::HashSet;
use std::time::Duration;

/// How long the permission to read a location lasts beyond a lease. A read that begins later asks
/// for the location again. A caller that loses its right to a namespace can still read known blocks
/// for this time.
const READ_TIME: Duration = Duration::from_secs(60);

/// The location of a present block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Length in bytes.
    pub length: Length,
    /// Checksum of the block's bytes.
    pub checksum: Checksum,
    /// Version of the block.
    pub version: Version,
    /// Replicas on readable nodes.
    pub replicas: Copies,
}

/// An answer with the lease on the blocks in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased<T> {
    /// The answer.
    pub answer: T,
    /// The lease's end on this master's clock. Renew and release must name it.
    pub token: BootInstant,
    /// The length of the lease; zero without a lease.
    pub ttl: Duration,
    /// The highest version that was given before the call began. A block with a later version may
    /// be another block than the leased one, because its put began meanwhile.
    pub newest: Version,
}

impl<T> Leased<T> {
    fn map<U>(self, answer: impl FnOnce(T) -> U) -> Leased<U> {
        Leased {
            answer: answer(self.answer),
            token: self.token,
            ttl: self.ttl,
            newest: self.newest,
        }
    }
}

/// The identity of a lease's holder, for renew and release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The lease's end, as the master returned it.
    pub token: BootInstant,
    /// The latest version that the leased block can have. A later version of the key is another
    /// block, put after the leased block left. Leases on it belong to other holders.
    pub newest: Version,
}

impl Holder {
    /// The holder of a lease with this token, on any version.
    pub const fn of_any(token: BootInstant) -> Self {
        Self {
            token,
            newest: Version(u64::MAX),
        }
    }
}

/// What a lease protects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseOf {
    /// The presence of the blocks, in any extents.
    Presence,
    /// Also the extents that a lookup returned.
    Places,
}

/// One bit for each key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bitmap(Vec<u8>);

impl Bitmap {
    /// A bitmap for `len` keys with every bit clear.
    pub fn new(len: usize) -> Self {
        Self(vec![0; len.div_ceil(8)])
    }

    /// Sets a key's bit; an index out of range changes nothing.
    #[inline]
    pub fn set(&mut self, index: usize) {
        if let Some(byte) = self.0.get_mut(index / 8) {
            *byte |= 1 << (index % 8);
        }
    }

    /// The value of a key's bit.
    pub fn get(&self, index: usize) -> bool {
        let byte = self.0.get(index / 8);
        byte.is_some_and(|byte| byte & 1 << (index % 8) != 0)
    }

    /// The number of set bits.
    pub fn count(&self) -> usize {
        self.0.iter().map(|byte| byte.count_ones() as usize).sum()
    }

    /// The bytes: key `n` is bit `n % 8`, from the lowest, of byte `n / 8`.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// The state of the pool that a batch of reads needs, taken once.
pub(super) struct View<'a> {
    pool: &'a Pool,
    pub(super) segments: Segments<'a>,
    pub(super) hidden: parking_lot::RwLockReadGuard<'a, HashSet<HiddenReplica>>,
    /// Whether a segment is readable, for the segments that the batch has met. One answer holds for
    /// the whole batch.
    readable: [Cell<Option<(SegmentId, bool)>>; REMEMBERED],
}

/// The number of segments whose state a batch caches.
const REMEMBERED: usize = 8;

impl View<'_> {
    #[inline]
    fn is_readable(&self, replica: &Replica, version: Version) -> bool {
        self.is_segment_readable(replica.segment)
            && !self.pool.is_hidden(&self.hidden, replica, version)
    }

    #[inline]
    fn is_segment_readable(&self, id: SegmentId) -> bool {
        let place = self.readable.get(id.0 as usize % REMEMBERED);
        match place.map(Cell::get) {
            Some(Some((known, readable))) if known == id => readable,
            _ => {
                let readable = self.pool.is_reachable(&self.segments, id);
                if let Some(place) = place {
                    place.set(Some((id, readable)));
                }
                readable
            }
        }
    }

    #[inline]
    pub(super) fn is_present(&self, block: &BlockRef<'_>) -> bool {
        match block.only_segment() {
            Some(segment) if self.hidden.is_empty() => self.is_segment_readable(segment),
            _ => {
                let (replicas, version) = (block.replicas(), block.version());
                replicas.iter().any(|r| self.is_readable(r, version))
            }
        }
    }

    /// Whether readers find a replica of the block on a node that is not about to leave.
    pub(super) fn stays(&self, block: &BlockRef<'_>) -> bool {
        let stays = |replica: &Replica| {
            let segment = self.segments.get(replica.segment);
            segment.is_some_and(|segment| segment.node.stays())
                && !self.pool.is_hidden(&self.hidden, replica, block.version())
        };
        block.replicas().iter().any(stays)
    }
}

impl Pool {
    pub(super) fn view(&self) -> View<'_> {
        View {
            pool: self,
            segments: self.placement.segments(),
            hidden: self.hidden.read(),
            readable: Default::default(),
        }
    }

    /// The highest version of this term: no block that can be leased now has a later version.
    fn newest_version(&self) -> Version {
        let next = self.next_version.load(std::sync::atomic::Ordering::Acquire);
        Version(next.saturating_sub(1))
    }

    /// A lease that begins now, if `lease` is true. Call it before the batch reads its first block.
    fn lease_from_now(&self, lease: bool) -> Leased<()> {
        let (token, ttl) = match lease {
            true => (self.latest_token(), self.config.lease_ttl),
            false => (BootInstant(0), Duration::ZERO),
        };
        Leased {
            answer: (),
            token,
            ttl,
            newest: self.newest_version(),
        }
    }

    /// The deadline of the permissions that are signed now, in milliseconds on this master's clock.
    pub(crate) fn read_deadline(&self) -> BootInstant {
        self.now().after(self.config.lease_ttl + READ_TIME)
    }

    /// Locations of blocks. Unless `lease` is false, the call leases each block and marks it as
    /// recently used.
    pub fn lookup<'k>(
        &self,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
        lease: bool,
    ) -> Leased<Vec<Option<Found>>> {
        let keys = keys.into();
        let mut found = vec![None; keys.len()];
        let lease = lease && self.leads();
        let leased = self.lease_from_now(lease);
        let token = leased.token;
        let now = self.now();
        let ticks = self.directory.ticks(keys.len());
        let view = self.view();
        self.directory.visit(namespace, &keys, |index, block| {
            let (Some(mut block), Some(slot)) = (block, found.get_mut(index)) else {
                return;
            };
            let (all, version) = (block.replicas(), block.version());
            let replicas: Copies = all
                .iter()
                .filter(|r| view.is_readable(r, version))
                .copied()
                .collect();
            if replicas.is_empty() {
                return;
            }
            if lease {
                block.lease_used(token, now, ticks.of(index));
            }
            *slot = Some(Found {
                length: block.length(),
                checksum: block.checksum(),
                version: block.version(),
                replicas,
            });
        });
        self.metrics
            .looked_up(keys.len(), found.iter().flatten().count());
        drop(view);
        if lease && self.config.hot_rate.as_u64() > 0 {
            self.replicas.heat.count(namespace, &keys, &found);
        }
        leased.map(|()| found)
    }

    /// Presence of blocks.
    pub fn exist<'k>(
        &self,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
        lease: bool,
    ) -> Leased<Vec<bool>> {
        let keys = keys.into();
        let leased = self.exist_bits(namespace, &keys, lease);
        leased.map(|present| (0..keys.len()).map(|index| present.get(index)).collect())
    }

    /// Presence of blocks, as one bit for each key.
    pub fn exist_bits<'k>(
        &self,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
        lease: bool,
    ) -> Leased<Bitmap> {
        let keys = keys.into();
        let mut present = Bitmap::new(keys.len());
        let lease = lease && self.leads();
        let leased = self.lease_from_now(lease);
        let token = leased.token;
        let now = self.now();
        let ticks = self.directory.ticks(keys.len());
        let view = self.view();
        self.directory.visit(namespace, &keys, |index, block| {
            let Some(mut block) = block else {
                return;
            };
            if view.is_present(&block.view()) {
                present.set(index);
                if lease {
                    block.lease_used(token, now, ticks.of(index));
                }
            }
        });
        drop(view);
        if self.has_media() {
            self.exist_on_media(namespace, &keys, lease.then_some(token), &mut present);
            if lease {
                self.prefetch(namespace, &keys);
            }
        }
        leased.map(|()| present)
    }

    /// Sets the bits of blocks that have a readable copy on a medium, and leases these copies until
    /// `lease`. A block that was loaded into memory meanwhile is leased there too, because its
    /// holder releases it there.
    fn exist_on_media(
        &self,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        lease: Option<BootInstant>,
        present: &mut Bitmap,
    ) {
        let readable = self.tiering.readable();
        let copies = self.tier.directory();
        let (now, ticks) = (self.now(), copies.ticks(keys.len()));
        let mut leased = Vec::new();
        copies.visit(namespace, keys, |index, block| {
            let Some(mut block) = block.filter(|_| !present.get(index)) else {
                return;
            };
            let length = block.length();
            let is_readable = |r: &Replica| readable.has(r.segment, length);
            if block.replicas().iter().any(is_readable) {
                present.set(index);
                if let Some(until) = lease {
                    block.lease_used(until, now, ticks.of(index));
                    leased.push((index, block.version()));
                }
            }
        });
        if let Some(until) = lease {
            self.lease_beside_media(namespace, keys, leased, until);
        }
    }

    /// Leases blocks in memory whose copies were leased, by the index of the key and the version.
    fn lease_beside_media(
        &self,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        mut leased: Vec<(usize, Version)>,
        until: BootInstant,
    ) {
        if leased.is_empty() {
            return;
        }
        leased.sort_unstable();
        let now = self.now();
        self.directory.visit(namespace, keys, |index, block| {
            if let Some(mut block) = block
                && leased.binary_search(&(index, block.version())).is_ok()
            {
                block.lease(until, now);
            }
        });
    }

    /// The number of leading blocks of a chain that are present. Only these blocks are leased.
    pub fn match_prefix<'k>(
        &self,
        namespace: NamespaceId,
        chain: impl Into<KeyBatch<'k>>,
        lease: bool,
    ) -> Leased<usize> {
        let chain = chain.into();
        if self.has_media() {
            return self.match_prefix_over_tiers(namespace, &chain, lease);
        }
        let lease = lease && self.leads();
        let leased = self.lease_from_now(lease);
        let token = leased.token;
        let now = self.now();
        let ticks = self.directory.ticks(chain.len());
        let view = self.view();
        // If a block leaves meanwhile, some blocks after it are leased for nothing until the lease
        // expires. An early release here could end another holder's lease.
        let blocks = self.directory.visit_leading(
            namespace,
            &chain,
            |block| view.is_present(block),
            |index, mut block| {
                if lease {
                    block.lease_used(token, now, ticks.of(index));
                }
            },
        );
        self.metrics.matched(chain.len(), blocks);
        leased.map(|()| blocks)
    }

    /// [`Pool::match_prefix`] over memory and media. A block may be in either.
    fn match_prefix_over_tiers(
        &self,
        namespace: NamespaceId,
        chain: &KeyBatch<'_>,
        lease: bool,
    ) -> Leased<usize> {
        let leading = |found: &Leased<Bitmap>| {
            let present = |at: &usize| found.answer.get(*at);
            (0..chain.len()).take_while(present).count()
        };
        let mut found = self.exist_bits(namespace, chain, false);
        // No holder would release the leases on blocks after the first gap, so the first pass takes
        // none. Without a lease, that pass is the answer.
        if lease && self.leads() {
            found = self.exist_bits(namespace, chain.first(leading(&found)), true);
        }
        let blocks = leading(&found);
        self.metrics.matched(chain.len(), blocks);
        found.map(|_| blocks)
    }

    /// Extends unexpired leases. The result is [`Code::LeaseEnded`] for an expired lease, an absent
    /// block, and a lease on extents that the block may have left.
    pub fn renew<'k>(
        &self,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
        of: LeaseOf,
        holder: impl Fn(usize) -> Holder,
    ) -> Leased<Vec<Code>> {
        let keys = keys.into();
        let mut codes = vec![Code::LeaseEnded; keys.len()];
        let leased = self.lease_from_now(true);
        let until = leased.token;
        let ticks = self.directory.ticks(keys.len());
        self.directory.visit(namespace, &keys, |index, block| {
            let (Some(mut block), Some(code)) = (block, codes.get_mut(index)) else {
                return;
            };
            // Read here: a token that expired while this call waited for the block's lock is no
            // longer valid.
            let now = self.now();
            let Holder { token, newest } = holder(index);
            let moved = &self.quarantine.moved;
            let is_elsewhere =
                of == LeaseOf::Places && moved.may_be_elsewhere(block.version(), token);
            if block.version() <= newest && !is_elsewhere && block.renew(token, until, now) {
                block.touch(ticks.of(index));
                *code = Code::Ok;
            }
        });
        if of == LeaseOf::Presence && self.has_media() {
            self.renew_on_media(namespace, &keys, holder, until, &mut codes);
        }
        leased.map(|()| codes)
    }

    /// Extends leases on copies of blocks that memory does not have.
    fn renew_on_media(
        &self,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        holder: impl Fn(usize) -> Holder,
        until: BootInstant,
        codes: &mut [Code],
    ) {
        let copies = self.tier.directory();
        let ticks = copies.ticks(keys.len());
        let mut leased = Vec::new();
        copies.visit(namespace, keys, |index, block| {
            let code = codes.get_mut(index).filter(|code| **code != Code::Ok);
            let (Some(mut block), Some(code)) = (block, code) else {
                return;
            };
            let now = self.now();
            let Holder { token, newest } = holder(index);
            if block.version() > newest {
                return;
            }
            let renewed = if self.was_in_memory(block.version(), token) {
                let is_leased = block.is_leased(now, BootInstant(0)) && token > now;
                if is_leased {
                    block.lease(until, now);
                }
                is_leased
            } else {
                block.renew(token, until, now)
            };
            if renewed {
                block.touch(ticks.of(index));
                leased.push((index, block.version()));
                *code = Code::Ok;
            }
        });
        self.lease_beside_media(namespace, keys, leased, until);
    }

    /// Whether the holder of this token may have leased the block in memory before memory lost it.
    /// The count at the block's copy does not include such a holder.
    fn was_in_memory(&self, version: Version, token: BootInstant) -> bool {
        self.quarantine.moved.may_be_elsewhere(version, token)
    }

    /// Ends leases on copies of blocks that memory does not have.
    fn release_on_media(
        &self,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        holder: impl Fn(usize) -> Holder,
        codes: &mut [Code],
    ) {
        if codes.iter().all(|code| *code != Code::Missing) {
            return;
        }
        self.tier
            .directory()
            .visit(namespace, keys, |index, block| {
                let code = codes.get_mut(index).filter(|code| **code == Code::Missing);
                let (Some(mut block), Some(code)) = (block, code) else {
                    return;
                };
                let Holder { token, newest } = holder(index);
                if block.version() <= newest {
                    if !self.was_in_memory(block.version(), token) {
                        block.release(token, self.now());
                    }
                    *code = Code::Ok;
                }
            });
    }

    /// Ends leases early. A lease on an absent block gives [`Code::LeaseEnded`].
    pub fn release<'k>(
        &self,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
        holder: impl Fn(usize) -> Holder,
    ) -> Vec<Code> {
        let keys = keys.into();
        let mut codes = vec![Code::Missing; keys.len()];
        self.directory.visit(namespace, &keys, |index, block| {
            let (Some(mut block), Some(code)) = (block, codes.get_mut(index)) else {
                return;
            };
            let Holder { token, newest } = holder(index);
            *code = if block.version() <= newest {
                // The time is read under the block's lock: see `renew`.
                block.release(token, self.now());
                Code::Ok
            } else {
                Code::LeaseEnded
            };
        });
        if self.has_media() {
            self.release_on_media(namespace, &keys, holder, &mut codes);
        }
        // A waiting put may need the released blocks.
        if !self.put_queue.is_empty() {
            self.evictor_wake.wake();
        }
        codes
    }
}
