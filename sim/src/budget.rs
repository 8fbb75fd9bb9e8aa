//! What may be written to a disk whose writes have a budget.

use crate::dice::{Dice, Stream};
use crate::plan::{Fault, Plan};
use crate::world::World;
use kvpool_types::{Length, medium};
use parking_lot::Mutex;

/// The bytes of a zone here.
const ZONE: u64 = 1 << 20;
/// Seconds of a day.
const DAY: u64 = 24 * 3600;

/// The copies that were written to a disk.
#[derive(Debug, Default)]
pub(crate) struct Ledger(Mutex<Written>);

#[derive(Debug, Default)]
struct Written {
    bytes: u64,
    /// How often a node began to use the disk.
    lives: u64,
    /// A node that is drained writes beyond the budget.
    is_drained: bool,
}

impl Ledger {
    /// A node begins to use the disk.
    pub(crate) fn begin(&self) {
        let mut written = self.0.lock();
        written.lives += 1;
        written.is_drained = false;
    }

    /// The node that uses the disk is drained.
    pub(crate) fn drain(&self) {
        self.0.lock().is_drained = true;
    }

    /// So many bytes of copies are written.
    pub(crate) fn add(&self, bytes: u64) {
        let mut written = self.0.lock();
        if !written.is_drained {
            written.bytes += bytes;
        }
    }
}

impl Plan {
    /// From a stream of its own: a budget that the load uses up. Copies of pinned blocks pass it.
    pub(crate) fn draw_budget(&mut self) {
        let dice = Dice::new(self.seed, Stream::Budget);
        if self.has_disks() && self.pins.is_empty() && dice.chance(300) {
            let a_second = dice.between(2_000, 40_000);
            self.writes_per_day = Some((a_second * DAY / self.disk_bytes).max(1));
        }
    }
}

/// No disk has more copies written than its budget allows. That is what collects in the time and half of a zone.
/// For each term, and for each life of its node, it is a block more.
pub(crate) fn is_kept(world: &World, terms: u64) -> Result<(), String> {
    let plan = &world.plan;
    let Some(limit) = plan.writes_per_day.filter(|_| plan.pins.is_empty()) else {
        return Ok(());
    };
    let jumps = plan.all_faults().map(|fault| match fault {
        Fault::ClockJumps(_, ms) => *ms,
        _ => 0,
    });
    // Clocks run fast by a part in two thousand at most.
    let ms = (world.trace.now() + jumps.sum::<u64>()) * 1_001 / 1_000;
    let collected = u128::from(plan.disk_bytes) * u128::from(limit) * u128::from(ms);
    let collected = u64::try_from(collected / u128::from(DAY * 1_000)).unwrap_or(u64::MAX);
    let block = medium::footprint(Length(plan.longest_block)).map_or(ZONE, |length| length.0);
    for (node, ssd) in world.ssds.iter().enumerate() {
        let written = ssd.ledger.0.lock();
        let most = collected
            .saturating_add(ZONE / 2)
            .saturating_add((terms + written.lives) * block);
        if written.bytes > most {
            return Err(format!(
                "{} bytes of copies were written to the disk of n{node}, which may take {most}",
                written.bytes
            ));
        }
    }
    Ok(())
}
