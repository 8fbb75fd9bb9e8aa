//! The accounts of a term, compared with what they count. For tests and simulations: it walks over
//! every block.

use super::Pool;
use crate::accounts::{Balance, Item};
use crate::directory::{SHARDS, StoredBlock};
use crate::placement::Extents;
use crate::replica::Replica;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Length, SegmentId, Version};
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a segment, and who has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The segment.
    pub segment: SegmentId,
    /// Offsets in bytes, rounded as extents are.
    pub range: Range<u64>,
    /// Who has them.
    pub holder: Holder,
    /// The version of the block or put.
    pub version: Version,
}

/// Who has bytes of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// A replica of a block.
    Block,
    /// An open put.
    Put,
    /// A replica that is being made.
    Pull,
}

impl std::fmt::Display for Use {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let holder = match self.holder {
            Holder::Block => "the block",
            Holder::Put => "the put",
            Holder::Pull => "a new replica",
        };
        write!(f, "{holder} of version {}", self.version)
    }
}

impl Pool {
    /// Every block, as it would stand in a snapshot.
    pub fn stored_blocks(&self) -> Vec<StoredBlock> {
        let shards = 0..SHARDS;
        shards
            .flat_map(|shard| self.directory.snapshot(shard))
            .collect()
    }

    /// All bytes that blocks, open puts and pulls have.
    pub fn uses(&self) -> Vec<Use> {
        let mut uses = Vec::new();
        let mut note = |replica: &Replica, length: Length, holder, version| {
            uses.push(Use {
                segment: replica.segment,
                range: replica.offset.0..replica.offset.0 + Extents::rounded(length).0,
                holder,
                version,
            });
        };
        for block in self.stored_blocks() {
            for replica in &block.replicas {
                note(replica, block.length, Holder::Block, block.version);
            }
        }
        self.reservations.lock().each(|_, pending| {
            for replica in &pending.replicas {
                note(replica, pending.length, Holder::Put, pending.version);
            }
        });
        self.replicas.each_target(|replica, length, version| {
            note(replica, length, Holder::Pull, version);
        });
        uses
    }

    /// Compares the used bytes of each segment, and the account of each namespace, with the blocks, open puts,
    /// pulls and quarantine. Looks for ranges that two of them have. The caller ensures that nothing else runs
    /// meanwhile.
    ///
    /// # Errors
    ///
    /// The first difference, for people.
    pub fn audit(&self) -> Result<(), String> {
        let mut uses = self.uses();
        uses.sort_by_key(|one| (one.segment, one.range.start, one.range.end));
        for pair in uses.windows(2) {
            if let [one, other] = pair
                && one.segment == other.segment
                && other.range.start < one.range.end
            {
                return Err(format!(
                    "segment {}: {one} and {other} share bytes",
                    one.segment
                ));
            }
        }
        let mut sums: BTreeMap<SegmentId, BTreeMap<Holder, u64>> = BTreeMap::new();
        for Use {
            segment,
            range,
            holder,
            ..
        } in uses
        {
            let of_segment = sums.entry(segment).or_default();
            *of_segment.entry(holder).or_default() += range.end - range.start;
        }
        for segment in self.placement.segments().iter() {
            let sums = sums.remove(&segment.id).unwrap_or_default();
            let held: u64 = sums.values().sum();
            let (used, quarantined) = (segment.used(), segment.quarantined());
            if used != held + quarantined {
                return Err(format!(
                    "segment {}: {used} bytes used, but {sums:?} are held and {quarantined} in quarantine",
                    segment.id
                ));
            }
            let charged = segment.charged();
            if charged != held {
                return Err(format!(
                    "segment {}: namespaces pay for {charged} bytes, but {sums:?} are held",
                    segment.id
                ));
            }
        }
        self.audit_accounts()
    }

    /// Compares what each namespace pays for with its blocks and open puts.
    fn audit_accounts(&self) -> Result<(), String> {
        let mut sums: BTreeMap<NamespaceId, Balance> = BTreeMap::new();
        for block in self.stored_blocks() {
            let sum = sums.entry(block.namespace).or_default();
            sum.blocks += 1;
            sum.resident += Extents::rounded(block.length).0 * block.replicas.len() as u64;
        }
        self.reservations.lock().each(|namespace, pending| {
            let sum = sums.entry(namespace).or_default();
            sum.puts += 1;
            sum.reserved += Extents::rounded(pending.length).0 * pending.replicas.len() as u64;
        });
        for (namespace, sum) in sums {
            if self.namespaces.get(namespace).is_none() {
                return Err(format!(
                    "namespace {namespace} was deleted, and holds {sum:?}"
                ));
            }
            let account = self.directory.accounts().of(namespace);
            for (item, is) in [
                (Item::Blocks, sum.blocks),
                (Item::Resident, sum.resident),
                (Item::Puts, sum.puts),
                (Item::Reserved, sum.reserved),
            ] {
                let counted = account.get(item);
                if counted != is {
                    return Err(format!(
                        "{item:?} of namespace {namespace} is counted as {counted}, and is {is}"
                    ));
                }
            }
        }
        Ok(())
    }
}
