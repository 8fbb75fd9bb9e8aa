//! The blocks of one thread: their keys, and their bytes in this process's memory.
//!
//! A block's bytes are a pattern, stamped with the digest of its key at each 4 KiB. The patterns are written
//! once and a put writes the stamps alone, so making a block costs little beside putting it.

use crate::fill::{self, CHUNK};
use anyhow::Context as _;
use kvpool_client::{GetBlock, PutBlock, Region, Slice};
use kvpool_types::key::Digest;
use kvpool_types::{Key, Length, Offset};
use sha2::{Digest as _, Sha256};

/// The bytes of a stamp: the digest of the block's key.
const STAMP: usize = size_of::<Digest>();

/// The blocks of one thread.
#[derive(Debug)]
pub(super) struct Blocks {
    seed: String,
    block_bytes: u64,
    batch: u64,
    /// The blocks of a put.
    source: Region,
    /// The blocks of a get.
    target: Region,
}

impl Blocks {
    /// Allocates the memory of one put and one get of `batch` blocks, and writes the patterns.
    pub(super) fn new(seed: String, block_bytes: u64, batch: u64) -> anyhow::Result<Self> {
        let bytes = Length(block_bytes * batch);
        let blocks = Self {
            seed,
            block_bytes,
            batch,
            source: Region::allocate(bytes),
            target: Region::allocate(bytes),
        };
        for place in 0..batch {
            for region in [&blocks.source, &blocks.target] {
                let slice = blocks.slice(region, place)?;
                fill::fill(&blocks.pattern(place), block_bytes, |offset, bytes| {
                    slice.write_at(Offset(offset), bytes);
                });
            }
        }
        Ok(blocks)
    }

    /// The key of block `number`.
    pub(super) fn key(&self, number: u64) -> Key {
        Key::from_digest(self.digest(b"block", number))
    }

    /// The key of a block that is never put.
    pub(super) fn absent_key(&self, number: u64) -> Key {
        Key::from_digest(self.digest(b"absent", number))
    }

    /// Block `number`, ready to be put. Its bytes stay until a block is requested whose number differs by a
    /// multiple of the batch.
    pub(super) fn put(&self, number: u64) -> anyhow::Result<PutBlock> {
        let slice = self.slice(&self.source, number % self.batch)?;
        self.stamp(&slice, &self.digest(b"block", number));
        Ok(PutBlock::new(self.key(number), slice))
    }

    /// A get of `key` as block `at` of a call.
    pub(super) fn get(&self, key: Key, at: u64) -> anyhow::Result<GetBlock> {
        Ok(GetBlock::new(key, self.slice(&self.target, at)?))
    }

    /// Overwrites the stamps at `at`, so bytes of an earlier get are not right for any block.
    pub(super) fn clear(&self, at: u64) -> anyhow::Result<()> {
        self.stamp(&self.slice(&self.target, at)?, &[0; STAMP]);
        Ok(())
    }

    /// Whether the bytes at `at` are those of block `number`.
    pub(super) fn is_right(&self, number: u64, at: u64) -> anyhow::Result<bool> {
        let slice = self.slice(&self.target, at)?;
        let stamp = self.digest(b"block", number);
        let (mut expected, mut found) = ([0; CHUNK], [0; CHUNK]);
        let mut right = true;
        let pattern = self.pattern(number % self.batch);
        fill::fill(&pattern, self.block_bytes, |offset, bytes| {
            let (expected, found) = (&mut expected[..bytes.len()], &mut found[..bytes.len()]);
            expected.copy_from_slice(bytes);
            let stamped = expected.iter_mut().zip(stamp);
            stamped.for_each(|(byte, of_stamp)| *byte = of_stamp);
            slice.read_at(Offset(offset), found);
            right &= expected == found;
        });
        Ok(right)
    }

    /// Writes `stamp` at the start of each chunk.
    fn stamp(&self, slice: &Slice, stamp: &Digest) {
        for offset in (0..self.block_bytes).step_by(CHUNK) {
            let left = usize::try_from(self.block_bytes - offset).unwrap_or(STAMP);
            let (stamp, _) = stamp.split_at(STAMP.min(left));
            slice.write_at(Offset(offset), stamp);
        }
    }

    fn slice(&self, region: &Region, at: u64) -> anyhow::Result<Slice> {
        region
            .slice(Offset(at * self.block_bytes), Length(self.block_bytes))
            .with_context(|| format!("no memory for block {at} of a call"))
    }

    /// The digest of the pattern at `place` of the source.
    fn pattern(&self, place: u64) -> Digest {
        self.digest(b"pattern", place)
    }

    fn digest(&self, kind: &[u8], number: u64) -> Digest {
        let mut hash = Sha256::new_with_prefix(&self.seed);
        hash.update(kind);
        hash.update(number.to_le_bytes());
        hash.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies a block from where it is put to where block `at` is got.
    fn transfer(blocks: &Blocks, number: u64, at: u64) {
        let put = blocks.put(number).unwrap();
        let got = blocks.get(put.key, at).unwrap();
        let bytes = put.buffers[0].to_vec();
        got.buffers[0].write_at(Offset(0), &bytes);
    }

    #[test]
    fn a_block_is_right_only_under_its_own_number() {
        for block_bytes in [1, 31, 33, 4096, 10_000] {
            let blocks = Blocks::new("s".to_owned(), block_bytes, 2).unwrap();
            transfer(&blocks, 5, 0);
            assert!(blocks.is_right(5, 0).unwrap(), "{block_bytes}");
            assert!(!blocks.is_right(5, 1).unwrap(), "{block_bytes}");
            for other in [4, 6, 7] {
                assert!(!blocks.is_right(other, 0).unwrap(), "{block_bytes}");
            }
        }
    }

    #[test]
    fn every_changed_byte_makes_a_block_wrong() {
        let blocks = Blocks::new("s".to_owned(), 9000, 1).unwrap();
        transfer(&blocks, 3, 0);
        let slice = blocks.get(blocks.key(3), 0).unwrap().buffers.remove(0);
        for at in [0, 31, 32, 4095, 4096, 4130, 8999] {
            let mut byte = [0];
            slice.read_at(Offset(at), &mut byte);
            slice.write_at(Offset(at), &[byte[0] ^ 1]);
            assert!(!blocks.is_right(3, 0).unwrap(), "{at}");
            slice.write_at(Offset(at), &byte);
        }
        assert!(blocks.is_right(3, 0).unwrap());
    }

    #[test]
    fn bytes_of_an_earlier_get_are_not_right_after_the_stamps_are_cleared() {
        let blocks = Blocks::new("s".to_owned(), 8192, 1).unwrap();
        transfer(&blocks, 3, 0);
        blocks.clear(0).unwrap();
        assert!(!blocks.is_right(3, 0).unwrap());
    }

    #[test]
    fn no_key_is_put_under_another_number_thread_or_as_an_absent_key() {
        let one = Blocks::new("s/0".to_owned(), 8, 1).unwrap();
        let other = Blocks::new("s/1".to_owned(), 8, 1).unwrap();
        let keys = [one.key(1), one.key(2), one.absent_key(1), other.key(1)];
        for (at, key) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(key));
        }
    }
}
