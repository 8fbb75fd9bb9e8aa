//! Iteration over all blocks: page by page, or one durable shard at once.

use super::Directory;
use super::block::BlockRef;
use super::common::shard_of_hash;
use super::{BlockId, Replica};
use crate::clock::BootInstant;
use crate::slab::NONE;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Key, Length, Version};

/// The number of slots examined under one lock.
const STRIDE: u32 = 512;

/// The given page was not returned by a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the page does not come from an earlier reply")]
pub struct BadPage;

/// The fields of a block that a snapshot stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Namespace of the key.
    pub namespace: NamespaceId,
    /// Key of the block.
    pub key: Key,
    /// Version of the block.
    pub version: Version,
    /// Length in bytes.
    pub length: Length,
    /// Checksum of the block's bytes.
    pub checksum: Checksum,
    /// Replicas of the block.
    pub replicas: Vec<Replica>,
    /// Key of the block before this one in the chain, if they are linked.
    pub parent: Option<Key>,
    /// Until this time eviction takes the block last.
    pub soft_pin_until: Option<BootInstant>,
    /// A hard-pinned block is never evicted.
    pub hard_pin: bool,
}

impl Directory {
    /// Passes up to `limit` blocks to `f` from `page` on; an empty page is the start. Returns the
    /// next page, or `None` at the end. A block that is present during the whole scan is passed
    /// exactly once. A block that comes or leaves meanwhile is passed at most once.
    ///
    /// # Errors
    ///
    /// [`BadPage`] when no scan returned `page`.
    pub fn scan(
        &self,
        page: &[u8],
        limit: usize,
        mut f: impl FnMut(BlockRef<'_>),
    ) -> Result<Option<Vec<u8>>, BadPage> {
        let (mut number, mut slot) = parse(page)?;
        let mut left = limit.max(1);
        while let Some(cell) = self.stripes.get(number as usize) {
            let stripe = cell.lock();
            let end = stripe.entries.high().min(slot.saturating_add(STRIDE));
            while slot < end && left > 0 {
                if stripe.entries.get(slot).is_some() {
                    f(BlockRef {
                        common: &self.common,
                        stripe: &stripe,
                        slot,
                    });
                    left -= 1;
                }
                slot += 1;
            }
            if slot >= stripe.entries.high() {
                (number, slot) = (number + 1, 0);
            }
            if left == 0 {
                break;
            }
        }
        let more = (number as usize) < self.stripes.len();
        Ok(more.then(|| [number.to_le_bytes(), slot.to_le_bytes()].concat()))
    }

    /// Every block of one of the [`SHARDS`](super::SHARDS). The stripe's lock, which other shards
    /// share, is released every few hundred blocks. Nothing may be published meanwhile. A block
    /// that leaves meanwhile may be in the result or not. A parent is included when it is linked at
    /// that time and still present a little later.
    pub fn snapshot(&self, shard: u32) -> Vec<StoredBlock> {
        let mut records = Vec::new();
        let mut parents: Vec<(usize, BlockId, u32)> = Vec::new();
        let number = self.common.stripe_of_shard(shard);
        let mut slot = 0;
        loop {
            let stripe = self.lock(number);
            let high = stripe.entries.high();
            let end = high.min(slot + STRIDE);
            for slot in slot..end {
                let in_shard = || shard_of_hash(stripe.hash(slot, &self.common)) == shard;
                if stripe.entries.get(slot).is_none() || !in_shard() {
                    continue;
                }
                let node = stripe.entries.rest(slot).lineage;
                if node != NONE
                    && let Some((parent, node)) = self.common.lineage.lock().parent(node)
                {
                    parents.push((records.len(), parent, node));
                }
                let block = BlockRef {
                    common: &self.common,
                    stripe: &stripe,
                    slot,
                };
                records.push(block.stored());
            }
            if end >= high {
                break;
            }
            slot = end;
        }
        for (record, parent, node) in parents {
            if let Some(record) = records.get_mut(record)
                && let Some((stripe, slot)) = self.lock_block(parent)
                && stripe.entries.rest(slot).lineage == node
            {
                record.parent = Some(stripe.key(slot, &self.common));
            }
        }
        records
    }
}

impl BlockRef<'_> {
    /// The block as a snapshot stores it, without its parent.
    pub(crate) fn stored(&self) -> StoredBlock {
        StoredBlock {
            namespace: self.namespace(),
            key: self.key(),
            version: self.version(),
            length: self.length(),
            checksum: self.checksum(),
            replicas: self.replicas().to_vec(),
            parent: None,
            soft_pin_until: self.soft_pin_until(),
            hard_pin: self.is_hard_pinned(),
        }
    }
}

fn parse(page: &[u8]) -> Result<(u32, u32), BadPage> {
    if page.is_empty() {
        return Ok((0, 0));
    }
    let (parts, rest) = page.as_chunks::<4>();
    match parts {
        [number, slot] if rest.is_empty() => {
            Ok((u32::from_le_bytes(*number), u32::from_le_bytes(*slot)))
        }
        _ => Err(BadPage),
    }
}
