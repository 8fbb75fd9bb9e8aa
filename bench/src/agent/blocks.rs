//! The blocks of a run: their keys, their bytes, and their places in this process's memory.

use super::protocol::Set;
use anyhow::Context as _;
use kvctl::fill;
use kvpool_client::{Region, Slice};
use kvpool_types::key::Digest;
use kvpool_types::{Key, Length, Offset};
use sha2::{Digest as _, Sha256};

/// The length of a stamp: each block begins with the digest of its key. Blocks of one place differ only
/// there.
const STAMP: usize = size_of::<Digest>();

/// The memory of puts (source) and of gets (target).
#[derive(Debug, Default)]
pub(super) struct Memory {
    source: Option<Region>,
    target: Option<Region>,
    /// The tag of the set whose bytes are in the source.
    filled: Option<String>,
}

/// The digest of block `number`.
pub(super) fn digest(seed: &str, set: &Set, number: u64) -> Digest {
    let mut hash = Sha256::new_with_prefix(seed);
    hash.update(&set.tag);
    hash.update(number.to_le_bytes());
    hash.finalize().into()
}

/// The key of block `number`.
pub(super) fn key(seed: &str, set: &Set, number: u64) -> Key {
    Key::from_digest(digest(seed, set, number))
}

/// The seed of a place's bytes.
fn place_digest(seed: &str, set: &Set, place: u64) -> Digest {
    let mut hash = Sha256::new_with_prefix(seed);
    hash.update(b"place");
    hash.update(set.block.to_le_bytes());
    hash.update(place.to_le_bytes());
    hash.finalize().into()
}

impl Set {
    /// The length of one buffer, in bytes.
    const fn piece(&self) -> u64 {
        self.block / self.pieces
    }

    /// The buffers of block `number` in `region`: one buffer, or one for each layer.
    fn buffers(&self, region: &Region, number: u64) -> Option<Vec<Slice>> {
        let place = number % self.slots;
        if self.pieces == 1 {
            let from = Offset(place * self.block);
            return Some(vec![region.slice(from, Length(self.block))?]);
        }
        let start = place / self.group * self.group * self.block;
        let within = place % self.group;
        (0..self.pieces)
            .map(|layer| {
                let from = start + (layer * self.group + within) * self.piece();
                region.slice(Offset(from), Length(self.piece()))
            })
            .collect()
    }
}

impl Memory {
    /// Allocates `span` bytes as the target, and as many as the source if `source`. It touches all pages, so
    /// no window pays for first touches.
    pub(super) fn new(span: u64, source: bool) -> Self {
        let region = || {
            let region = Region::allocate(Length(span));
            for page in (0..span).step_by(4096) {
                region.whole().write_at(Offset(page), &[1]);
            }
            region
        };
        Self {
            source: source.then(region),
            target: Some(region()),
            filled: None,
        }
    }

    /// The target of block `number`.
    pub(super) fn target(&self, set: &Set, number: u64) -> anyhow::Result<Vec<Slice>> {
        buffers(self.target.as_ref(), set, number)
    }

    /// The source of block `number`.
    pub(super) fn source(&self, set: &Set, number: u64) -> anyhow::Result<Vec<Slice>> {
        buffers(self.source.as_ref(), set, number)
    }

    /// Writes the bytes of all places of the set, unless the source has them already.
    pub(super) fn fill(&mut self, seed: &str, set: &Set) -> anyhow::Result<()> {
        if self.filled.as_ref() == Some(&set.tag) {
            return Ok(());
        }
        for place in 0..set.slots {
            let slices = self.source(set, place)?;
            fill::fill(
                &place_digest(seed, set, place),
                set.block,
                |offset, bytes| {
                    if let Some((slice, offset)) = part(&slices, offset, set.piece()) {
                        slice.write_at(offset, bytes);
                    }
                },
            );
        }
        self.filled = Some(set.tag.clone());
        Ok(())
    }

    /// Writes the stamp of block `number`.
    pub(super) fn stamp(&self, seed: &str, set: &Set, number: u64) -> anyhow::Result<()> {
        let digest = digest(seed, set, number);
        if let Some(first) = self.source(set, number)?.first() {
            first.write_at(Offset(0), &digest);
        }
        Ok(())
    }

    /// Overwrites the first and the last bytes in the target of block `number`, so the bytes of an earlier
    /// get are not right.
    pub(super) fn forget(&self, set: &Set, number: u64) -> anyhow::Result<()> {
        let target = self.target(set, number)?;
        if let (Some(first), Some(last)) = (target.first(), target.last()) {
            // No block begins or ends with so many zeros.
            let wrong = [0; STAMP];
            first.write_at(Offset(0), &wrong);
            last.write_at(Offset(last.length().0 - STAMP as u64), &wrong);
        }
        Ok(())
    }

    /// Whether the target of block `number` begins with its stamp.
    pub(super) fn is_stamped(&self, seed: &str, set: &Set, number: u64) -> anyhow::Result<bool> {
        let mut stamp = [0; STAMP];
        if let Some(first) = self.target(set, number)?.first() {
            first.read_at(Offset(0), &mut stamp);
        }
        Ok(stamp == digest(seed, set, number))
    }
}

fn buffers(region: Option<&Region>, set: &Set, number: u64) -> anyhow::Result<Vec<Slice>> {
    region
        .and_then(|region| set.buffers(region, number))
        .with_context(|| format!("no memory for block {number} of {}", set.tag))
}

/// The slice with the byte at `offset` of a block, and the offset in that slice.
fn part(slices: &[Slice], offset: u64, piece: u64) -> Option<(&Slice, Offset)> {
    let slice = slices.get(usize::try_from(offset / piece).ok()?)?;
    Some((slice, Offset(offset % piece)))
}

/// Whether `slices` hold the bytes of block `number`.
pub(super) fn is_right(seed: &str, set: &Set, number: u64, slices: &[Slice]) -> bool {
    let place = place_digest(seed, set, number % set.slots);
    let stamp = digest(seed, set, number);
    // A view is one slice, also of a set with several pieces.
    let piece = set.block / slices.len().max(1) as u64;
    let wrong = fill::first_wrong(&place, set.block, |offset, bytes| {
        let Some((slice, at)) = part(slices, offset, piece) else {
            return;
        };
        slice.read_at(at, bytes);
        if offset == 0
            && let Some(head) = bytes.get_mut(..STAMP)
        {
            if head == stamp {
                head.copy_from_slice(&place);
            } else {
                // The stamp is of another block: make the comparison fail.
                head.fill(!place.first().copied().unwrap_or_default());
            }
        }
    });
    wrong.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::protocol::Live;

    fn set(pieces: u64, group: u64) -> Set {
        Set {
            tag: "t".to_owned(),
            block: 32 << 10,
            pieces,
            group,
            chained: false,
            slots: 4,
            live: Live::default(),
        }
    }

    #[test]
    fn a_block_is_right_only_under_its_own_number() {
        for set in [set(1, 1), set(4, 2)] {
            let mut memory = Memory::new(128 << 10, true);
            memory.fill("s", &set).unwrap();
            memory.stamp("s", &set, 6).unwrap();
            let slices = memory.source(&set, 6).unwrap();
            assert!(is_right("s", &set, 6, &slices));
            assert!(!is_right("s", &set, 2, &slices), "the same place, earlier");
            assert!(!is_right("s", &set, 7, &slices));
            let last = slices.last().unwrap();
            let at = Offset(last.length().0 - 1);
            let mut byte = [0];
            last.read_at(at, &mut byte);
            last.write_at(at, &[byte[0] ^ 1]);
            assert!(!is_right("s", &set, 6, &slices), "the last byte counts");
        }
    }

    #[test]
    fn bytes_of_an_earlier_get_are_not_right() {
        for set in [set(1, 1), set(4, 2)] {
            let mut memory = Memory::new(128 << 10, true);
            memory.fill("s", &set).unwrap();
            memory.stamp("s", &set, 6).unwrap();
            let copy = |bytes: Option<usize>| {
                let source = memory.source(&set, 6).unwrap();
                for (from, to) in source.iter().zip(memory.target(&set, 6).unwrap()) {
                    let all = from.to_vec();
                    to.write_at(Offset(0), &all[..bytes.unwrap_or(all.len())]);
                }
            };
            let has_bytes = || is_right("s", &set, 6, &memory.target(&set, 6).unwrap());
            let is_stamped = || memory.is_stamped("s", &set, 6).unwrap();
            copy(None);
            assert!(has_bytes() && is_stamped());
            memory.forget(&set, 6).unwrap();
            assert!(!has_bytes() && !is_stamped(), "a get that writes nothing");
            copy(Some(4096));
            assert!(!has_bytes(), "a get that writes the beginning alone");
            assert!(is_stamped());
        }
    }

    #[test]
    fn scattered_blocks_share_their_group_and_no_byte() {
        let set = set(4, 2);
        let memory = Memory::new(128 << 10, true);
        for number in 0..4 {
            for slice in memory.source(&set, number).unwrap() {
                slice.write_at(Offset(0), &vec![u8::try_from(number).unwrap(); 8 << 10]);
            }
        }
        for number in 0..4 {
            for slice in memory.source(&set, number).unwrap() {
                assert!(slice.to_vec().iter().all(|byte| u64::from(*byte) == number));
            }
        }
    }
}
