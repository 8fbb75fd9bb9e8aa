//! Damaged extents: each is refused by its kind, and no load gives wrong bytes.

use super::device::Device;
use super::rig::{self, Block, CLUSTER};
use crate::medium::{DATA_START, Formatted, Generation, Medium, header_bytes};
use crate::{Arena, Engine, GRANULE};
use kvpool_types::MediumId;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) const SIZE: u64 = DATA_START + (1 << 20);
const ROUNDS: usize = 10_500;
/// The lengths of the blocks, one after the other. Each offset was used twice before.
pub(super) const LENGTHS: [usize; 9] = [
    1, 4096, 5000, 65_536, 65_537, 150_000, 4096, 200_001, 135_168,
];

/// A medium, and the earlier contents of its extents.
pub(super) struct Rig {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) arena: Arc<Arena>,
    pub(super) medium: Medium,
    /// The blocks that the directory names.
    pub(super) blocks: Vec<Block>,
    /// Older bytes at the same offsets.
    older: Vec<Vec<u8>>,
    /// Bytes of the same blocks at the same offsets of another medium of the same cluster.
    foreign: Vec<Vec<u8>>,
    counts: BTreeMap<&'static str, u64>,
}

/// A formatted and attached medium in memory.
pub(super) fn medium(arena: &Arc<Arena>, id: u128) -> (Arc<dyn Engine>, Medium) {
    let engine: Arc<dyn Engine> = Device::blank(SIZE);
    Formatted::format(
        Arc::clone(&engine),
        Arc::clone(arena),
        CLUSTER,
        MediumId(id),
    )
    .unwrap();
    let medium = rig::opened(&engine, arena).attach(CLUSTER, Generation(1));
    (engine, medium.unwrap())
}

/// One block at each offset, for one pass over the zone.
pub(super) fn blocks(life: u64) -> Vec<Block> {
    let mut next = DATA_START;
    let place = |(n, length): (usize, &usize)| {
        let number = life * 100 + n as u64;
        // An offset has the same version in all passes, so only the number distinguishes its stores.
        let version = if n == 2 { 7 } else { 1000 + number };
        let block = Block::new(next, number, version, *length);
        next = block.range().end;
        block
    };
    LENGTHS.iter().enumerate().map(place).collect()
}

impl Rig {
    pub(super) fn new() -> Self {
        let arena = Arena::new(8 << 20).unwrap();
        let (engine, ours) = medium(&arena, 1);
        let (other_engine, other) = medium(&arena, 2);
        let read = |engine: &Arc<dyn Engine>, blocks: &[Block]| -> Vec<_> {
            let peek = |block: &Block| rig::peek(engine, &arena, block.range());
            blocks.iter().map(peek).collect()
        };
        let mut older = vec![];
        for life in 1..=3 {
            older = read(&engine, &blocks(life));
            for block in blocks(life) {
                rig::store(&ours, &arena, &block).unwrap();
                rig::store(&other, &arena, &block).unwrap();
            }
        }
        let foreign = read(&other_engine, &blocks(3));
        Self {
            engine,
            arena,
            medium: ours,
            blocks: blocks(3),
            older,
            foreign,
            counts: BTreeMap::new(),
        }
    }

    fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
    }

    /// Loads a block, and returns the kind of the error.
    pub(super) fn kind(&self, n: usize) -> &'static str {
        let block = &self.blocks[n];
        let outcome = rig::load_block(&self.medium, &self.arena, block);
        outcome.map_or_else(|wrong| wrong.kind(), |()| "intact")
    }

    /// Replaces an extent, expects one kind of refusal, and puts the extent back.
    fn expect(&mut self, n: usize, bytes: &[u8], name: &'static str, allowed: &[&str]) {
        let range = self.blocks[n].range();
        let former = rig::peek(&self.engine, &self.arena, range.clone());
        rig::poke(&self.engine, &self.arena, range.start, bytes);
        let kind = self.kind(n);
        assert!(allowed.contains(&kind), "{name} of block {n}: {kind}");
        rig::poke(&self.engine, &self.arena, range.start, &former);
        self.count(name);
    }

    fn bytes(&self, n: usize) -> Vec<u8> {
        rig::peek(&self.engine, &self.arena, self.blocks[n].range())
    }

    fn header(&self, n: usize) -> usize {
        usize::try_from(header_bytes(self.blocks[n].length()).unwrap()).unwrap()
    }

    /// The error that damage at one byte of an extent must cause.
    fn kinds_at(&self, n: usize, at: usize) -> &'static [&'static str] {
        match at {
            0..8 => &["magic"],
            48..56 => &["length", "header_crc"],
            _ if at < self.header(n) => &["header_crc"],
            _ if at < self.header(n) + self.blocks[n].bytes.len() => &["chunk"],
            _ => &["intact"],
        }
    }

    fn one(&mut self, random: &mut StdRng) {
        let n = random.random_range(0..LENGTHS.len());
        let mut bytes = self.bytes(n);
        match random.random_range(0..9) {
            0..2 => {
                let at = random.random_range(0..bytes.len());
                bytes[at] ^= 1 << random.random_range(0..8);
                self.expect(n, &bytes, "flipped bit", self.kinds_at(n, at));
            }
            2 => {
                let at = random.random_range(0..bytes.len() / GRANULE) * GRANULE;
                bytes[at..at + GRANULE].fill(0);
                let kinds = self.kinds_at(n, at);
                self.expect(n, &bytes, "zeroed granule", kinds);
            }
            3 => {
                // Two data granules are exchanged.
                let first = self.header(n) / GRANULE;
                let mut granules: Vec<_> = (first..bytes.len() / GRANULE).collect();
                granules.shuffle(random);
                let [a, b, ..] = granules[..] else { return };
                let (a, b) = (a.min(b) * GRANULE, a.max(b) * GRANULE);
                let (left, right) = bytes.split_at_mut(b);
                left[a..a + GRANULE].swap_with_slice(&mut right[..GRANULE]);
                self.expect(n, &bytes, "swapped granules", &["chunk"]);
            }
            4 => {
                // The older extent comes back, or its first granules: a write was lost or torn.
                let granules = random.random_range(1..=bytes.len() / GRANULE);
                let end = granules * GRANULE;
                bytes[..end].copy_from_slice(&self.older[n][..end]);
                self.expect(n, &bytes, "stale extent", &["stale"]);
            }
            5 => {
                // The new header is followed by older data.
                let start = self.header(n);
                bytes[start..].copy_from_slice(&self.older[n][start..]);
                self.expect(n, &bytes, "stale data", &["chunk"]);
            }
            6 => {
                let other = (n + random.random_range(1..LENGTHS.len())) % LENGTHS.len();
                let theirs = self.bytes(other);
                let end = theirs.len().min(bytes.len());
                bytes[..end].copy_from_slice(&theirs[..end]);
                self.expect(n, &bytes, "misdirected extent", &["misdirected"]);
            }
            7 => {
                let theirs = self.foreign[n].clone();
                self.expect(n, &theirs, "another medium's extent", &["other_medium"]);
            }
            _ => self.random_damage(n, bytes, random),
        }
    }

    /// Damage at several offsets: any error is right, and wrong bytes are not.
    fn random_damage(&mut self, n: usize, mut bytes: Vec<u8>, random: &mut StdRng) {
        for _ in 0..random.random_range(1..20) {
            let at = random.random_range(0..bytes.len());
            let end = (at + random.random_range(1..9000)).min(bytes.len());
            random.fill(&mut bytes[at..end]);
        }
        let any = crate::medium::WRONG_KINDS;
        let range = self.blocks[n].range();
        let former = rig::peek(&self.engine, &self.arena, range.clone());
        rig::poke(&self.engine, &self.arena, range.start, &bytes);
        // `load_block` panics on wrong bytes.
        if let Err(wrong) = rig::load_block(&self.medium, &self.arena, &self.blocks[n]) {
            assert!(any.contains(&wrong.kind()));
        }
        rig::poke(&self.engine, &self.arena, range.start, &former);
        self.count("random damage");
    }

    pub(super) fn all_intact(&self) -> bool {
        (0..LENGTHS.len()).all(|n| self.kind(n) == "intact")
    }
}

#[test]
fn ten_thousand_corruptions_of_extents_are_refused_by_kind() {
    let mut rig = Rig::new();
    assert!(rig.all_intact());
    let mut random = StdRng::seed_from_u64(36);
    for _ in 0..ROUNDS {
        rig.one(&mut random);
    }
    assert!(rig.all_intact(), "the damage was undone");
    println!("corruptions: {:#?}", rig.counts);
    println!("refusals: {:?}", rig.medium.wrong_counts());
    assert!(rig.counts.values().sum::<u64>() >= 10_000);
    assert!(rig.counts.len() == 8 && rig.counts.values().all(|count| *count > 500));
}
