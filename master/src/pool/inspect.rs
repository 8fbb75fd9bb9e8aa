//! Blocks as operators see them: descriptions and listings, over memory and media.

use super::Pool;
use super::remove::STEP;
use crate::clock::BootInstant;
use crate::directory::{BadPage, BlockMut, BlockRef};
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use kvpool_types::{Checksum, Key, KeyRef, Length, NodeName, Offset, SegmentId, Version};
use regex::Regex;
use std::time::Duration;

/// The first byte of a page token on media.
const ON_MEDIA: u8 = b'm';
/// The length of a page token in memory, in bytes.
const MEMORY_PAGE: usize = 8;

/// Some rows of a listing, and the token of the next page.
type Step = (Vec<Listed>, Option<Vec<u8>>);

/// One replica as an operator sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescribedReplica {
    /// The node with the replica.
    pub node: NodeName,
    /// The segment with the replica.
    pub segment: SegmentId,
    /// The offset in the segment, in bytes.
    pub offset: Offset,
    /// The node's state, "hidden" for a replica under re-verification, or the state of the medium.
    pub state: &'static str,
}

/// One block as an operator sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Length in bytes.
    pub length: Length,
    /// Checksum of the block's bytes.
    pub checksum: Checksum,
    /// Version of the block.
    pub version: Version,
    /// All replicas.
    pub replicas: Vec<DescribedReplica>,
    /// The remaining time of the lease.
    pub lease_left: Duration,
    /// The remaining time of the soft pin.
    pub soft_pin_left: Duration,
    /// A hard-pinned block is never evicted.
    pub hard_pin: bool,
}

/// One row of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The key as text.
    pub key: String,
    /// Length of the block in bytes.
    pub length: Length,
    /// The number of replicas.
    pub replicas: usize,
    /// True while a lease runs.
    pub leased: bool,
    /// True while a pin holds.
    pub pinned: bool,
}

/// One page of a listing.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// The blocks.
    pub blocks: Vec<Listed>,
    /// The token of the next page; empty at the end.
    pub next: Vec<u8>,
}

impl Pool {
    /// Lengths, replicas and protection of blocks. Takes no lease.
    pub fn describe<'k>(
        &self,
        namespace: NamespaceId,
        keys: impl Into<KeyBatch<'k>>,
    ) -> Vec<Option<Described>> {
        let keys = keys.into();
        let mut described = vec![None; keys.len()];
        let now = self.now();
        let view = self.view();
        self.directory.visit(namespace, &keys, |index, block| {
            let (Some(block), Some(slot)) = (block, described.get_mut(index)) else {
                return;
            };
            let replicas = block
                .replicas()
                .iter()
                .filter_map(|replica| {
                    let node = &view.segments.get(replica.segment)?.node;
                    let hidden = self.is_hidden(&view.hidden, replica, block.version());
                    Some(DescribedReplica {
                        node: node.name.clone(),
                        segment: replica.segment,
                        offset: replica.offset,
                        state: if hidden {
                            "hidden"
                        } else {
                            self.state_label(node)
                        },
                    })
                })
                .collect();
            *slot = Some(Described {
                length: block.length(),
                checksum: block.checksum(),
                version: block.version(),
                replicas,
                lease_left: block.lease_until().since(now),
                soft_pin_left: view_of_pin(&block, now),
                hard_pin: block.view().is_hard_pinned(),
            });
        });
        drop(view);
        self.describe_copies(namespace, &keys, &mut described);
        described
    }

    /// Adds the copies on media.
    fn describe_copies(
        &self,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        described: &mut [Option<Described>],
    ) {
        let media = self.media();
        if media.is_empty() {
            return;
        }
        self.tier.directory().visit(namespace, keys, |index, copy| {
            let (Some(copy), Some(slot)) = (copy, described.get_mut(index)) else {
                return;
            };
            let described = slot.get_or_insert_with(|| Described {
                length: copy.length(),
                checksum: copy.checksum(),
                version: copy.version(),
                replicas: Vec::new(),
                lease_left: Duration::ZERO,
                soft_pin_left: Duration::ZERO,
                hard_pin: copy.view().is_hard_pinned(),
            });
            let view = copy.view();
            let replicas = view.replicas();
            let replicas = replicas.iter().filter_map(|replica| {
                let on = media
                    .iter()
                    .find(|medium| medium.record.id == replica.segment)?;
                Some(DescribedReplica {
                    node: on.record.node.clone(),
                    segment: replica.segment,
                    offset: replica.offset,
                    state: on.state,
                })
            });
            if described.version == copy.version() {
                described.replicas.extend(replicas);
            }
        });
    }

    /// One page of at most `limit` keys of a namespace that match `pattern`: first the blocks in
    /// memory, then the blocks that are only on media. Takes no lease. The call may examine every
    /// block, so it yields to other tasks every few blocks.
    ///
    /// # Errors
    ///
    /// [`BadPage`] when no listing returned `page`.
    pub async fn list(
        &self,
        namespace: NamespaceId,
        pattern: Option<&Regex>,
        page: &[u8],
        limit: usize,
    ) -> Result<Page, BadPage> {
        let mut result = Page {
            next: page.to_vec(),
            ..Page::default()
        };
        let mut looked = 0;
        loop {
            let step = limit.saturating_sub(result.blocks.len()).clamp(1, STEP);
            let (blocks, next) = match result.next.split_first() {
                Some((&ON_MEDIA, page)) if page.len() != MEMORY_PAGE - 1 => {
                    let (blocks, next) = self.step_on_media(namespace, pattern, page, step)?;
                    (blocks, next.map(on_media).unwrap_or_default())
                }
                _ => {
                    let (blocks, next) =
                        self.step_in_memory(namespace, pattern, &result.next, step)?;
                    let end = || match self.has_media() {
                        true => on_media(Vec::new()),
                        false => Vec::new(),
                    };
                    (blocks, next.unwrap_or_else(end))
                }
            };
            result.blocks.extend(blocks);
            result.next = next;
            if result.next.is_empty() || result.blocks.len() >= limit {
                return Ok(result);
            }
            looked += step;
            if looked >= STEP {
                looked = 0;
                tokio::task::yield_now().await;
            }
        }
    }

    /// The blocks of one step in memory, and the next page.
    fn step_in_memory(
        &self,
        namespace: NamespaceId,
        pattern: Option<&Regex>,
        page: &[u8],
        step: usize,
    ) -> Result<Step, BadPage> {
        let now = self.now();
        let mut blocks = Vec::new();
        let next = self.directory.scan(page, step, |block| {
            if let Some(key) = matching(&block, namespace, pattern) {
                blocks.push(Listed {
                    key: key.to_string(),
                    length: block.length(),
                    replicas: block.replicas().len(),
                    leased: block.is_leased(now, self.lease_floor_of(block.version())),
                    pinned: block.is_hard_pinned()
                        || block.soft_pin_until().is_some_and(|until| until > now),
                });
            }
        })?;
        Ok((blocks, next))
    }

    /// The blocks of one step on media that are not in memory, and the next page.
    fn step_on_media(
        &self,
        namespace: NamespaceId,
        pattern: Option<&Regex>,
        page: &[u8],
        step: usize,
    ) -> Result<Step, BadPage> {
        let mut copies = Vec::new();
        let next = self.tier.directory().scan(page, step, |copy| {
            if let Some(key) = matching(&copy, namespace, pattern) {
                copies.push((key, copy.length(), copy.replicas().len()));
            }
        })?;
        // The directories are never locked together.
        let keys: Vec<KeyRef<'_>> = copies.iter().map(|(key, ..)| key.as_ref()).collect();
        let mut in_memory = vec![false; keys.len()];
        self.directory.visit(namespace, &keys[..], |index, block| {
            if let Some(slot) = in_memory.get_mut(index) {
                *slot = block.is_some();
            }
        });
        let only = copies.iter().zip(in_memory).filter(|(_, is_in)| !is_in);
        let listed = only.map(|((key, length, replicas), _)| Listed {
            key: key.to_string(),
            length: *length,
            replicas: *replicas,
            leased: false,
            pinned: false,
        });
        Ok((listed.collect(), next))
    }
}

/// The token of a page on media.
fn on_media(mut page: Vec<u8>) -> Vec<u8> {
    page.insert(0, ON_MEDIA);
    page
}

/// The key of a block, if the listing includes the block.
fn matching(block: &BlockRef<'_>, namespace: NamespaceId, pattern: Option<&Regex>) -> Option<Key> {
    let key = (block.namespace() == namespace).then(|| block.key())?;
    let is_wanted = |pattern: &Regex| pattern.is_match(&key.to_string());
    pattern.is_none_or(is_wanted).then_some(key)
}

fn view_of_pin(block: &BlockMut<'_>, now: BootInstant) -> Duration {
    block
        .view()
        .soft_pin_until()
        .map_or(Duration::ZERO, |until| until.since(now))
}
