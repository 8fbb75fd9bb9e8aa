//! Pools that are made for a node that leaves them at rest. Elsewhere it seldom has blocks that must move or be copied.

use super::{Call, Fault, Plan};
use crate::dice::{Dice, Stream};

/// The pool that a node leaves at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departs {
    /// The node is the only one. Its disk takes all blocks, and its memory does not.
    Alone,
    /// The same, and the node waits for no moves to other nodes. Its blocks are copied to its disk alone.
    WithoutMoves,
    /// Two nodes have disks, and the memory of each takes all blocks.
    WithRoom,
    /// Two nodes have no disks, and their memory is full of leased blocks.
    WithoutRoom,
}

impl Plan {
    /// From a stream of its own. What takes copies from disks, or blocks from the pool, gives way.
    pub(super) fn draw_departures(&mut self) {
        let dice = Dice::new(self.seed, Stream::Departures);
        if self.keeps_all || self.has_settings() || !dice.chance(250) {
            return;
        }
        self.keep_faults(|fault| {
            !fault.takes_memory() && !fault.takes_from_namespace() && !fault.harms_disk()
        });
        self.keep_nodes_and_disks();
        // They were drawn for the memory that this pool would have had.
        self.pins.clear();
        self.segments = 1;
        self.longest_pause = self.longest_pause.min(40_000);
        self.add_roomy_disks(&dice);
        let departs = [
            Departs::Alone,
            Departs::WithoutMoves,
            Departs::WithRoom,
            Departs::WithoutRoom,
        ][dice.index(4)];
        match departs {
            Departs::Alone | Departs::WithoutMoves => {
                self.nodes = 1;
                self.keys = self.keys.max(24);
                let all = self.keys * self.longest_block / 2;
                let share = all * dice.between(30, 50) / 100;
                let least = 4 * self.longest_block;
                self.segment_bytes = share.max(least).next_multiple_of(64 << 10);
                self.drains_slowly(&dice);
            }
            Departs::WithRoom => {
                self.nodes = 2;
                self.keys = self.keys.min(24);
                self.longest_block = self.longest_block.min(40_000);
                self.segment_bytes = 8 << 20;
            }
            Departs::WithoutRoom => {
                self.nodes = 2;
                self.disk_bytes = 0;
                self.longest_block = self.longest_block.min(40_000);
                self.segment_bytes = dice.between(24, 32) << 16;
                self.lease_ms = dice.between(2_000, 4_000);
            }
        }
        let longest = self.longest_block;
        self.one_length = self.one_length.map(|length| length.min(longest));
        self.departs = Some(departs);
    }

    /// Single requests of the disk are slow while the only node drains, and blocks on the disk are read meanwhile.
    fn drains_slowly(&mut self, dice: &Dice) {
        self.noise.slow_disk = [20, 60, 150][dice.index(3)];
        self.raise_calls(&[(Call::Upsert, 3), (Call::Get, 12)]);
        for _ in 0..dice.between(1, 3) {
            let at = dice.between(1_500, self.length_ms);
            let down = dice.between(30, 300);
            self.faults.push((at, Fault::Drain(0, down)));
        }
    }
}
