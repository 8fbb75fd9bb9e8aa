//! Disks that are replaced stay away, and the pool forgets them.

use crate::dice::{Dice, Stream};
use crate::plan::{Fault, Plan};
use crate::world::World;
use kvpool_master::pool::Pool;

/// After so many milliseconds an absent medium is forgotten.
const DROPPED: u64 = 2_000;

impl Plan {
    /// From a stream of its own.
    pub(crate) fn draw_absence(&mut self) {
        let dice = Dice::new(self.seed, Stream::Absence);
        if self.keeps_a_namespace() || !self.has_disks() || !dice.chance(250) {
            return;
        }
        self.ssd_drop_ms = Some(DROPPED);
        for _ in 0..dice.between(1, 2) {
            let ms = dice.between(30, [300, 1_500, 6_000][dice.index(3)]);
            let fault = Fault::NewDisk(dice.index(self.nodes), ms);
            self.faults.push((dice.between(200, self.length_ms), fault));
        }
    }
}

/// A pool at rest knows no more media than nodes have.
pub(crate) fn is_forgotten(world: &World, pool: &Pool) -> Result<(), String> {
    let media = pool.media();
    match world.plan.ssd_drop_ms {
        Some(_) if media.len() > world.plan.nodes => Err(format!(
            "{} nodes have a disk each, and the pool at rest knows {} media: {:?}",
            world.plan.nodes,
            media.len(),
            media.iter().map(|one| one.state).collect::<Vec<_>>()
        )),
        _ => Ok(()),
    }
}
