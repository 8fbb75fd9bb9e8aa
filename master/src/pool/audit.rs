//! Checks of a term's counters against the blocks and extents that they count. The checks scan
//! every block, so only tests and simulations call them.

use super::Pool;
use crate::accounts::{Balance, Item};
use crate::directory::{Directory, SHARDS, StoredBlock, Tick};
use crate::placement::Extents;
use crate::replica::Replica;
use crate::store::LogSeq;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Length, NamespaceSettings, SegmentId, Version, medium};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

/// A range of a segment, and its holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The segment.
    pub segment: SegmentId,
    /// The offsets in bytes, rounded to the granularity of extents.
    pub range: Range<u64>,
    /// The holder of the range.
    pub holder: Holder,
    /// The version of the block or put.
    pub version: Version,
}

/// The holder of a range in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// A replica of a block.
    Block,
    /// An open put.
    Put,
    /// A replica that a node is copying.
    Pull,
    /// A block that a node is loading from a medium.
    Load,
    /// No holder: the range was freed, but may still be read or written.
    Quarantine,
}

impl std::fmt::Display for Use {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let holder = match self.holder {
            Holder::Block => "the block",
            Holder::Put => "the put",
            Holder::Pull => "a new replica",
            Holder::Load => "a load",
            Holder::Quarantine => return f.write_str("what was freed"),
        };
        write!(f, "{holder} of version {}", self.version)
    }
}

/// The content of a pool at one moment.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The blocks in memory, without their parents.
    pub blocks: Vec<StoredBlock>,
    /// The copies on media.
    pub copies: Vec<StoredBlock>,
    /// All ranges of memory that blocks, open puts, pulls and loads hold.
    pub uses: Vec<Use>,
}

/// Every block of a directory, without its parent.
fn all_of(directory: &Directory) -> Vec<StoredBlock> {
    let mut blocks = Vec::new();
    let all = directory.scan(&[], usize::MAX, |block| blocks.push(block.stored()));
    debug_assert_eq!(all, Ok(None), "an empty page is the start");
    blocks
}

impl Pool {
    /// Every block, as a snapshot would record it.
    pub fn stored_blocks(&self) -> Vec<StoredBlock> {
        let shards = 0..SHARDS;
        shards
            .flat_map(|shard| self.directory.snapshot(shard))
            .collect()
    }

    /// Every copy on a medium, as a snapshot would record it.
    pub fn stored_copies(&self) -> Vec<StoredBlock> {
        let shards = 0..SHARDS;
        shards
            .flat_map(|shard| self.tier.directory().snapshot(shard))
            .collect()
    }

    /// The clock against which the deadlines of locations are judged, in milliseconds.
    pub fn clock_ms(&self) -> u64 {
        self.now().0
    }

    /// The remaining lease time of each block in memory, by the block's version.
    pub fn lease_terms(&self) -> BTreeMap<Version, Duration> {
        self.lease_terms_in(&self.directory)
    }

    /// The same for each copy on a medium.
    pub fn lease_terms_of_copies(&self) -> BTreeMap<Version, Duration> {
        self.lease_terms_in(self.tier.directory())
    }

    fn lease_terms_in(&self, directory: &Directory) -> BTreeMap<Version, Duration> {
        let now = self.now();
        let mut terms = BTreeMap::new();
        let all = directory.scan(&[], usize::MAX, |block| {
            let left = block.lease_until().0.saturating_sub(now.0);
            terms.insert(block.version(), Duration::from_millis(left));
        });
        debug_assert_eq!(all, Ok(None), "an empty page is the start");
        terms
    }

    /// The number of holders of leases on each block in memory, by the block's version. Without the
    /// blocks of which the number is unknown.
    pub fn lease_holders(&self) -> BTreeMap<Version, u8> {
        self.lease_holders_in(&self.directory)
    }

    /// The same for each copy on a medium.
    pub fn lease_holders_of_copies(&self) -> BTreeMap<Version, u8> {
        self.lease_holders_in(self.tier.directory())
    }

    fn lease_holders_in(&self, directory: &Directory) -> BTreeMap<Version, u8> {
        let now = self.now();
        let mut holders = BTreeMap::new();
        let all = directory.scan(&[], usize::MAX, |block| {
            if let Some(count) = block.known_holders(now) {
                holders.insert(block.version(), count);
            }
        });
        debug_assert_eq!(all, Ok(None), "an empty page is the start");
        holders
    }

    /// For each medium, the ticks at which the writing of its zones ended last.
    pub fn sealed_zones(&self) -> BTreeMap<SegmentId, Vec<Tick>> {
        let media = self.tier.media().into_iter();
        media
            .map(|medium| (medium.id, medium.sealed_zones()))
            .collect()
    }

    /// The position in the log of the last record of this term, if every record is durable. `None`
    /// while a record is not durable yet, and after the journal has failed.
    pub fn logged(&self) -> Option<LogSeq> {
        let journal = self.journal();
        let is_whole = journal.is_idle() && journal.has_room().is_ok();
        is_whole.then(|| journal.position())
    }

    /// The settings of the namespaces that have some.
    pub fn settings(&self) -> Vec<(NamespaceId, NamespaceSettings)> {
        self.namespaces.with_settings()
    }

    /// The number of orders without an answer, loads in progress, and removals that are not yet logged.
    pub fn open_transfers(&self) -> usize {
        self.tiering.open()
    }

    /// Scans all blocks and copies once. The caller ensures that nothing else runs meanwhile.
    pub fn survey(&self) -> Survey {
        let blocks = all_of(&self.directory);
        Survey {
            uses: self.uses(&blocks),
            copies: all_of(self.tier.directory()),
            blocks,
        }
    }

    fn uses(&self, blocks: &[StoredBlock]) -> Vec<Use> {
        let mut uses = Vec::new();
        let mut note = |replica: &Replica, length: Length, holder, version| {
            uses.push(Use {
                segment: replica.segment,
                range: replica.offset.0..replica.offset.0 + Extents::rounded(length).0,
                holder,
                version,
            });
        };
        for block in blocks {
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
        self.tiering.each_load(|replica, length, version| {
            note(replica, length, Holder::Load, version);
        });
        uses
    }

    /// Compares the used bytes of each segment and medium, and the account of each namespace, with
    /// their holders. The holders are blocks, open puts, pulls, loads, copies and the quarantine.
    /// Also finds ranges with two holders.
    ///
    /// The survey must describe this moment.
    ///
    /// # Errors
    ///
    /// A text that describes the first difference.
    pub fn audit(&self, survey: &Survey) -> Result<(), String> {
        let mut uses = survey.uses.clone();
        self.quarantine.each(|extent| {
            let end = extent.offset.0 + Extents::rounded(extent.length).0;
            uses.push(Use {
                segment: extent.segment,
                range: extent.offset.0..end,
                holder: Holder::Quarantine,
                version: Version(0),
            });
        });
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
            .into_iter()
            .filter(|one| one.holder != Holder::Quarantine)
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
        self.audit_media(&survey.copies)?;
        self.audit_accounts(survey)
    }

    /// Compares the used bytes of each medium with the copies on it.
    fn audit_media(&self, copies: &[StoredBlock]) -> Result<(), String> {
        let mut places: BTreeMap<SegmentId, Vec<Range<u64>>> = BTreeMap::new();
        for copy in copies {
            let footprint = medium::footprint(copy.length).unwrap_or(copy.length);
            for at in &copy.replicas {
                let range = at.offset.0..at.offset.0 + footprint.0;
                places.entry(at.segment).or_default().push(range);
            }
        }
        for medium in self.tier.media() {
            let mut places = places.remove(&medium.id).unwrap_or_default();
            places.sort_by_key(|range| range.start);
            for pair in places.windows(2) {
                if let [one, other] = pair
                    && other.start < one.end
                {
                    return Err(format!(
                        "medium {}: copies at {one:?} and {other:?} share bytes",
                        medium.id
                    ));
                }
            }
            let sum: u64 = places.iter().map(|range| range.end - range.start).sum();
            if medium.used().0 != sum {
                return Err(format!(
                    "medium {}: {} bytes used, and copies have {sum}",
                    medium.id,
                    medium.used()
                ));
            }
        }
        match places.keys().next() {
            None => Ok(()),
            Some(gone) => Err(format!("copies lie on medium {gone}, which is unknown")),
        }
    }

    /// Compares the account of each namespace with its blocks, open puts and copies.
    fn audit_accounts(&self, survey: &Survey) -> Result<(), String> {
        let mut sums: BTreeMap<NamespaceId, Balance> = BTreeMap::new();
        for block in &survey.blocks {
            let sum = sums.entry(block.namespace).or_default();
            sum.blocks += 1;
            sum.resident += Extents::rounded(block.length).0 * block.replicas.len() as u64;
        }
        self.reservations.lock().each(|namespace, pending| {
            let sum = sums.entry(namespace).or_default();
            sum.puts += 1;
            sum.reserved += Extents::rounded(pending.length).0 * pending.replicas.len() as u64;
        });
        for copy in &survey.copies {
            let footprint = medium::footprint(copy.length).unwrap_or(copy.length);
            let sum = sums.entry(copy.namespace).or_default();
            sum.copies += 1;
            sum.media += footprint.0;
        }
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
                (Item::Media, sum.media),
                (Item::Copies, sum.copies),
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
