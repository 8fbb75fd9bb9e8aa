//! The accounts of a term, compared with what they count. For tests and simulations: it walks over
//! every block.

use super::Pool;
use crate::directory::SHARDS;
use crate::placement::Extents;
use kvpool_types::{Length, SegmentId};
use std::collections::BTreeMap;

/// What is on one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    blocks: u64,
    granted: u64,
    pulled: u64,
}

impl Pool {
    /// Compares the used bytes of each segment with its blocks, its open puts, its pulls and its quarantine, and
    /// looks for ranges that two of them have. The caller ensures that nothing else runs meanwhile.
    ///
    /// # Errors
    ///
    /// The first difference, for people.
    pub fn audit(&self) -> Result<(), String> {
        let mut sums: BTreeMap<SegmentId, Sums> = BTreeMap::new();
        let mut ranges: BTreeMap<SegmentId, Vec<(u64, u64, String)>> = BTreeMap::new();
        let mut note = |replica: &crate::replica::Replica, length: Length, what: String| {
            let rounded = Extents::rounded(length).0;
            let range = (replica.offset.0, replica.offset.0 + rounded, what);
            ranges.entry(replica.segment).or_default().push(range);
            rounded
        };
        for shard in 0..SHARDS {
            for block in self.directory.snapshot(shard) {
                for replica in &block.replicas {
                    let what = format!("block {} of version {}", block.key, block.version);
                    let bytes = note(replica, block.length, what);
                    sums.entry(replica.segment).or_default().blocks += bytes;
                }
            }
        }
        self.reservations.lock().each(|pending| {
            for replica in &pending.replicas {
                let what = format!("the put of version {}", pending.version);
                let bytes = note(replica, pending.length, what);
                sums.entry(replica.segment).or_default().granted += bytes;
            }
        });
        self.replicas.each_target(|replica, length| {
            let bytes = note(replica, length, "a replica that is being made".to_owned());
            sums.entry(replica.segment).or_default().pulled += bytes;
        });
        for (segment, ranges) in &mut ranges {
            ranges.sort();
            for pair in ranges.windows(2) {
                if let [(_, end, one), (start, _, other)] = pair
                    && start < end
                {
                    return Err(format!("segment {segment}: {one} and {other} share bytes"));
                }
            }
        }
        let segments = self.placement.segments();
        for segment in segments.iter() {
            let Sums {
                blocks,
                granted,
                pulled,
            } = sums.remove(&segment.id).unwrap_or_default();
            let (used, quarantined) = (segment.used(), segment.quarantined());
            if used != blocks + granted + pulled + quarantined {
                return Err(format!(
                    "segment {}: {used} bytes used, but blocks have {blocks}, puts {granted}, pulls {pulled}, \
                     quarantine {quarantined}",
                    segment.id
                ));
            }
            let charged = segment.charged();
            if charged != blocks + granted + pulled {
                return Err(format!(
                    "segment {}: namespaces pay for {charged} bytes, but blocks have {blocks}, puts {granted}, \
                     pulls {pulled}",
                    segment.id
                ));
            }
        }
        Ok(())
    }
}
