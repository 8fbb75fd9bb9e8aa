//! One lock stripe of the directory: the blocks whose keys hash to it.

use super::block::{Dropped, NewBlock, Removed, Replicas, Tick};
use super::common::{Common, Prepared};
use super::entries::Entries;
use super::entry::{Entry, MAX_OFFSET, QueueState, Rest};
use super::hash;
use super::interner::NOT_INTERNED;
use super::lineage::Aftermath;
use super::orders::Orders;
use super::queues::SPREAD;
use super::{BlockId, Copies, Replica};
use crate::clock::BootInstant;
use crate::placement::Extents;
use crate::replica::ExtentIndex;
use crate::slab::{NONE, Rare, Slab};
use hashbrown::HashTable;
use kvpool_seams::maps::HashMap;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Key, KeyRef, Length, Offset, SegmentId};

/// A key that is stored in full.
#[derive(Debug)]
struct LongKey {
    namespace: NamespaceId,
    hash: u64,
    key: Key,
}

/// The blocks of one stripe.
#[derive(Debug, Default)]
pub(super) struct Stripe {
    number: u32,
    bits: u32,
    pub(super) entries: Entries,
    index: HashTable<u32>,
    long_keys: Slab<Rare<LongKey>>,
    long_key_bytes: u64,
    /// The replicas of blocks with several replicas.
    spread: Slab<Rare<Box<[Replica]>>>,
    pub(super) queues: Orders,
    /// Ends of soft pins, by slot.
    soft_until: HashMap<u32, BootInstant>,
    /// The bytes of all replicas.
    pub(super) bytes: u64,
}

impl Stripe {
    pub(super) fn new(number: u32, bits: u32) -> Self {
        Self {
            number,
            bits,
            ..Self::default()
        }
    }

    pub(super) fn id(&self, slot: u32) -> BlockId {
        BlockId(slot << self.bits | self.number)
    }

    /// The slot of a key's block.
    #[inline]
    pub(super) fn find(&self, wanted: &Prepared<'_>) -> Option<u32> {
        self.index
            .find(wanted.hash, |slot| self.is(*slot, wanted))
            .copied()
    }

    /// The probable slot of a key's block, from the index alone and without reading the block.
    #[inline]
    pub(super) fn candidate(&self, hash: u64) -> Option<u32> {
        self.index.find(hash, |_| true).copied()
    }

    /// True when the slot holds the wanted block. The slot may be vacant.
    #[inline]
    pub(super) fn is(&self, slot: u32, wanted: &Prepared<'_>) -> bool {
        let Some(entry) = self.entries.get(slot) else {
            return false;
        };
        match wanted.key {
            KeyRef::Digest { digest, .. } if entry.affixes != NOT_INTERNED => {
                entry.affixes == wanted.affixes && hash::same(&entry.digest, digest)
            }
            _ => self.is_long(entry, wanted),
        }
    }

    /// [`Stripe::is`] for a block whose key is stored beside it, and for a text key.
    #[cold]
    fn is_long(&self, entry: &Entry, wanted: &Prepared<'_>) -> bool {
        if entry.affixes != NOT_INTERNED {
            return false;
        }
        let long = self.long_keys.at(entry.long_key()).held();
        long.hash == wanted.hash
            && long.namespace == wanted.namespace
            && long.key.as_ref() == wanted.key
    }

    pub(super) fn namespace(&self, slot: u32, common: &Common) -> NamespaceId {
        let entry = self.entries.at(slot);
        if entry.affixes == NOT_INTERNED {
            return self.long_keys.at(entry.long_key()).held().namespace;
        }
        common
            .interner
            .with(entry.affixes, |namespace, _, _, _| namespace)
    }

    pub(super) fn key(&self, slot: u32, common: &Common) -> Key {
        let entry = self.entries.at(slot);
        if entry.affixes == NOT_INTERNED {
            return self.long_keys.at(entry.long_key()).held().key.clone();
        }
        common.interner.with(entry.affixes, |_, prefix, suffix, _| {
            KeyRef::Digest {
                prefix,
                suffix,
                digest: &entry.digest,
            }
            .to_key()
        })
    }

    pub(super) fn replicas(&self, slot: u32) -> Replicas<'_> {
        let entry = self.entries.at(slot);
        if entry.is_spread() {
            return Replicas::many(self.spread.at(entry.extent).held());
        }
        Replicas::one(Replica {
            segment: SegmentId(entry.segment),
            extent: ExtentIndex(entry.extent),
            offset: Offset(entry.offset()),
        })
    }

    /// The segment of the only replica; `None` for several replicas.
    #[inline]
    pub(super) fn only_segment(&self, slot: u32) -> Option<SegmentId> {
        let entry = self.entries.at(slot);
        (!entry.is_spread()).then_some(SegmentId(entry.segment))
    }

    pub(super) fn soft_until(&self, slot: u32) -> Option<BootInstant> {
        self.soft_until
            .get(&slot)
            .copied()
            .filter(|_| self.entries.at(slot).is_soft_pinned())
    }

    /// The bytes that the block's eviction would free.
    pub(super) fn weight(&self, slot: u32) -> u64 {
        u64::from(self.entries.rest(slot).length) * self.replicas(slot).len() as u64
    }

    /// The bytes of the block's extents.
    pub(super) fn footprint(&self, slot: u32) -> u64 {
        let length = Length(u64::from(self.entries.rest(slot).length));
        Extents::rounded(length).0 * self.replicas(slot).len() as u64
    }

    /// Moves a block to the order of its namespace.
    pub(super) fn correct_order(&mut self, slot: u32, common: &Common) {
        let order = common.order_of(self.namespace(slot, common));
        if self.entries.links(slot).order != order {
            let until = self.soft_until(slot).map(|until| until.0);
            self.queues
                .change_order(&mut self.entries, slot, order, until);
        }
    }

    /// Adds a block whose key is absent.
    pub(super) fn insert(
        &mut self,
        key: &Prepared<'_>,
        block: &NewBlock,
        length: u32,
        common: &Common,
    ) -> u32 {
        let mut entry = Entry::new();
        let affixes = match key.key {
            KeyRef::Digest {
                prefix,
                suffix,
                digest,
            } => {
                entry.digest = *digest;
                let interner = &common.interner;
                interner.acquire(key.namespace, prefix, suffix)
            }
            KeyRef::Text(_) => None,
        };
        entry.affixes = affixes.unwrap_or(NOT_INTERNED);
        if affixes.is_none() {
            let key = LongKey {
                namespace: key.namespace,
                hash: key.hash,
                key: block.key.clone(),
            };
            self.long_key_bytes += key.key.as_ref().text_len() as u64;
            entry.set_long_key(self.long_keys.insert(Rare::Held(key)));
        }
        entry.set_tick(block.tick.0);
        let rest = Rest::new(block.version, block.checksum, length);
        let slot = self.entries.insert(entry, rest);
        assert!(
            slot < u32::MAX >> self.bits,
            "invariant: memory ends before block ids do"
        );
        self.set_replicas(slot, &block.replicas);
        let Self {
            index,
            entries,
            long_keys,
            ..
        } = self;
        index.insert_unique(key.hash, slot, |slot| {
            hash_of(entries.at(*slot), long_keys, common)
        });
        self.bytes += self.weight(slot);
        common.count_added(key.namespace, self.footprint(slot));
        self.entries.links_mut(slot).order = common.order_of(key.namespace);
        self.set_pins(slot, block);
        self.queues.put(
            &mut self.entries,
            slot,
            self.soft_until.get(&slot).map(|until| until.0),
        );
        slot
    }

    /// Replaces an old version. Lineage and leases stay, because the key's holders are the same.
    pub(super) fn replace(
        &mut self,
        slot: u32,
        block: &NewBlock,
        length: u32,
        common: &Common,
    ) -> Removed {
        let old = self.removed(slot, common);
        let before = self.footprint(slot);
        self.bytes -= self.weight(slot);
        let inner = matches!(
            self.entries.at(slot).queue_state(),
            QueueState::Inner | QueueState::RootWithChildren
        );
        self.queues.take(&mut self.entries, slot);
        self.clear_spread(slot);
        let rest = self.entries.rest_mut(slot);
        rest.version = block.version;
        rest.checksum = block.checksum;
        rest.length = length;
        let entry = self.entries.at_mut(slot);
        entry.set_lost_parent(false);
        entry.set_tick(block.tick.0.max(entry.tick()));
        self.set_replicas(slot, &block.replicas);
        self.bytes += self.weight(slot);
        common.count_changed(old.namespace, before, self.footprint(slot));
        self.set_pins(slot, block);
        if !inner {
            self.put_back(slot);
        }
        old
    }

    /// Removes a block.
    pub(super) fn remove(
        &mut self,
        slot: u32,
        common: &Common,
        aftermath: &mut Aftermath,
    ) -> Removed {
        let removed = self.removed(slot, common);
        self.bytes -= self.weight(slot);
        common.count_removed(removed.namespace, self.footprint(slot));
        self.queues.take(&mut self.entries, slot);
        let hash = self.hash(slot, common);
        if let Ok(found) = self.index.find_entry(hash, |other| *other == slot) {
            found.remove();
        }
        self.clear_spread(slot);
        self.soft_until.remove(&slot);
        let node = self.entries.rest(slot).lineage;
        let entry = self.entries.remove(slot);
        if node != NONE {
            common.lineage.lock().remove(node, aftermath);
        }
        if entry.affixes == NOT_INTERNED {
            let key = self.long_keys.remove(entry.long_key()).into_held();
            self.long_key_bytes -= key.key.as_ref().text_len() as u64;
        } else {
            common.interner.release(entry.affixes);
        }
        removed
    }

    /// Removes a replica, and the block with its last replica.
    pub(super) fn drop_replica(
        &mut self,
        slot: u32,
        common: &Common,
        aftermath: &mut Aftermath,
        which: impl Fn(&Replica) -> bool,
    ) -> Option<Dropped> {
        let replicas = self.replicas(slot).to_vec();
        let replica = *replicas.iter().find(|replica| which(replica))?;
        let Removed {
            namespace,
            key,
            version,
            length,
            lease_until,
            ..
        } = self.removed(slot, common);
        let removed = if replicas.len() == 1 {
            Some(self.remove(slot, common, aftermath))
        } else {
            let left: Vec<Replica> = replicas.into_iter().filter(|r| *r != replica).collect();
            self.change_replicas(slot, &left, namespace, common);
            self.end_aside(slot);
            None
        };
        Some(Dropped {
            namespace,
            key,
            version,
            length,
            replica,
            lease_until,
            removed,
        })
    }

    /// Adds a replica. A block that was set aside for its segment returns to its queue.
    pub(super) fn add_replica(&mut self, slot: u32, replica: Replica, common: &Common) {
        let namespace = self.namespace(slot, common);
        let mut replicas = self.replicas(slot).to_vec();
        replicas.push(replica);
        self.change_replicas(slot, &replicas, namespace, common);
        self.end_aside(slot);
    }

    fn change_replicas(
        &mut self,
        slot: u32,
        replicas: &[Replica],
        namespace: NamespaceId,
        common: &Common,
    ) {
        let before = self.footprint(slot);
        self.bytes -= self.weight(slot);
        self.clear_spread(slot);
        self.set_replicas(slot, replicas);
        self.bytes += self.weight(slot);
        common.count_changed(namespace, before, self.footprint(slot));
    }

    /// Records a use by a new holder of a lease. Most calls need this, so it reads the block only
    /// once.
    #[inline]
    pub(super) fn lease_used(&mut self, slot: u32, until: u64, now: u64, tick: u64) {
        let entry = self.entries.at_mut(slot);
        entry.lease(until, now);
        if entry.is_plainly_listed() {
            if tick > entry.tick() {
                entry.set_tick(tick);
                self.queues.move_listed(&mut self.entries, slot, tick);
            }
        } else {
            self.touch(slot, tick);
        }
    }

    /// Records a use. A use older than the last known use only ends a root's preferred eviction.
    pub(super) fn touch(&mut self, slot: u32, tick: u64) {
        let entry = self.entries.at_mut(slot);
        if tick <= entry.tick() && !entry.has_lost_parent() {
            return;
        }
        let place = entry.queue_state();
        self.queues.take(&mut self.entries, slot);
        let entry = self.entries.at_mut(slot);
        entry.set_lost_parent(false);
        entry.set_tick(tick.max(entry.tick()));
        if !matches!(place, QueueState::Inner | QueueState::RootWithChildren) {
            self.put_back(slot);
        }
    }

    /// Puts a block without children that is in no queue into its queue.
    pub(super) fn put_back(&mut self, slot: u32) {
        let until = self.soft_until(slot).map(|until| until.0);
        self.queues.put(&mut self.entries, slot, until);
    }

    /// Returns a block that eviction met leased to its queue.
    pub(super) fn unpark(&mut self, slot: u32) {
        if self.entries.at(slot).queue_state() == QueueState::Parked {
            self.queues.take(&mut self.entries, slot);
            self.put_back(slot);
        }
    }

    /// Returns a block that was set aside for its segment to its queue. A block whose lease runs stays aside: in its
    /// queue it would count as the next victim.
    fn end_aside(&mut self, slot: u32) {
        if self.queues.is_aside(slot) {
            self.unpark(slot);
        }
    }

    /// Sets a leased block aside until its lease ends.
    pub(super) fn park(&mut self, slot: u32, common: &Common) {
        let until = common.absolute(self.entries.at(slot).lease_until());
        self.queues.take(&mut self.entries, slot);
        self.queues.park(&mut self.entries, slot, until.0);
    }

    /// Sets a block aside until its segment takes blocks again. If the block has a parent, any segment
    /// counts, since ancestors may lie there.
    pub(super) fn set_aside(&mut self, slot: u32, has_parent: bool) {
        let segment = self.only_segment(slot).filter(|_| !has_parent);
        let group = segment.map_or(SPREAD, |segment| segment.0);
        self.queues.take(&mut self.entries, slot);
        self.queues.set_aside(&mut self.entries, slot, group);
    }

    /// Returns up to `most` blocks of a group that was set aside to their queues; false when none
    /// is left.
    pub(super) fn recall(&mut self, group: u32, most: usize) -> bool {
        for _ in 0..most {
            let Some(slot) = self.queues.first_aside(group) else {
                return false;
            };
            self.queues.take(&mut self.entries, slot);
            self.put_back(slot);
        }
        true
    }

    /// Re-examines every block whose timer has expired.
    pub(super) fn wake(&mut self, now: BootInstant, common: &Common) {
        while let Some(slot) = self.queues.pop_timer(now.0) {
            let pin_is_over = self.soft_until(slot).is_some_and(|until| until <= now);
            if pin_is_over {
                self.soft_until.remove(&slot);
            }
            let leased = self.entries.at(slot).is_leased(common.relative(now));
            let parked = self.entries.at(slot).queue_state() == QueueState::Parked;
            self.queues.take(&mut self.entries, slot);
            if pin_is_over {
                self.entries.at_mut(slot).set_soft_pinned(false);
            }
            if parked && leased {
                self.park(slot, common);
            } else {
                self.put_back(slot);
            }
        }
    }

    /// The hash of a block's key.
    pub(super) fn hash(&self, slot: u32, common: &Common) -> u64 {
        hash_of(self.entries.at(slot), &self.long_keys, common)
    }

    /// The description of a block that leaves.
    fn removed(&self, slot: u32, common: &Common) -> Removed {
        let (entry, rest) = (self.entries.at(slot), self.entries.rest(slot));
        Removed {
            namespace: self.namespace(slot, common),
            key: self.key(slot, common),
            version: rest.version,
            length: Length(u64::from(rest.length)),
            replicas: Copies::from_slice(&self.replicas(slot)),
            lease_until: common.absolute(entry.lease_until()),
            tick: Tick(entry.tick()),
        }
    }

    fn set_pins(&mut self, slot: u32, block: &NewBlock) {
        let entry = self.entries.at_mut(slot);
        entry.set_hard_pinned(block.hard_pin);
        entry.set_soft_pinned(block.soft_pin_until.is_some());
        match block.soft_pin_until {
            Some(until) => self.soft_until.insert(slot, until),
            None => self.soft_until.remove(&slot),
        };
    }

    fn set_replicas(&mut self, slot: u32, replicas: &[Replica]) {
        let entry = self.entries.at_mut(slot);
        match replicas {
            [one] if one.offset.0 < MAX_OFFSET => {
                entry.segment = one.segment.0;
                entry.extent = one.extent.0;
                entry.set_offset(one.offset.0);
            }
            _ => {
                entry.set_spread(true);
                entry.extent = self.spread.insert(Rare::Held(replicas.into()));
            }
        }
    }

    /// Sets the extent of the replica at `segment` and `offset`.
    pub(super) fn set_extent(
        &mut self,
        slot: u32,
        segment: SegmentId,
        offset: Offset,
        extent: ExtentIndex,
    ) {
        let entry = self.entries.at_mut(slot);
        if !entry.is_spread() {
            entry.extent = extent.0;
            return;
        }
        let number = entry.extent;
        let Rare::Held(replicas) = self.spread.at_mut(number) else {
            return;
        };
        let mut here = replicas
            .iter_mut()
            .filter(|replica| replica.segment == segment && replica.offset == offset);
        if let Some(replica) = here.next() {
            replica.extent = extent;
        }
    }

    fn clear_spread(&mut self, slot: u32) {
        let entry = self.entries.at_mut(slot);
        if entry.is_spread() {
            entry.set_spread(false);
            let number = entry.extent;
            self.spread.remove(number);
        }
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        let tables = self.index.allocation_size() + self.soft_until.allocation_size();
        self.entries.memory_bytes()
            + tables as u64
            + self.long_keys.memory_bytes()
            + self.long_key_bytes
            + self.spread.memory_bytes()
            + self.queues.memory_bytes()
    }
}

fn hash_of(entry: &Entry, long_keys: &Slab<Rare<LongKey>>, common: &Common) -> u64 {
    if entry.affixes == NOT_INTERNED {
        return long_keys.at(entry.long_key()).held().hash;
    }
    common
        .seed
        .digest(common.interner.hash(entry.affixes), &entry.digest)
}
