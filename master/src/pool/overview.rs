//! The pool as an overview sees it.

use super::Pool;
use crate::directory::BadPage;
use crate::membership::StoreNode;
use crate::overview::{Fill, NamespaceUse, Tally};
use kvpool_types::ids::NamespaceId;
use std::collections::HashMap;
use std::sync::Arc;

impl Pool {
    /// The number of puts that wait for room.
    pub fn puts_waiting(&self) -> usize {
        self.put_queue.len()
    }

    /// Every node with the fill of its segments, by name.
    ///
    /// The table of segments is read-locked only while a few numbers of each segment are copied: a waiting writer
    /// would make puts wait for this reader.
    pub(crate) fn nodes_with_fill(&self) -> Vec<(Arc<StoreNode>, Fill)> {
        let mut fills: HashMap<*const StoreNode, Fill> = HashMap::new();
        {
            let segments = self.placement.segments();
            for segment in segments.iter() {
                let fill = fills.entry(Arc::as_ptr(&segment.node)).or_default();
                fill.segments += 1;
                fill.capacity_bytes += segment.size.0;
                fill.used_bytes += segment.used();
                fill.quarantine_bytes += segment.quarantined();
            }
        }
        let nodes = self.members.all().into_iter();
        nodes
            .map(|node| {
                let fill = fills.get(&Arc::as_ptr(&node)).copied();
                (node, fill.unwrap_or_default())
            })
            .collect()
    }

    /// Counts up to `limit` blocks behind `page` of the directory of memory or of media, by namespace. Returns the
    /// next page.
    pub(crate) fn count_uses(
        &self,
        on_media: bool,
        page: &[u8],
        limit: usize,
        tally: &mut Tally,
    ) -> Result<Option<Vec<u8>>, BadPage> {
        let (directory, counts) = if on_media {
            (self.tier.directory(), &mut tally.media)
        } else {
            (&self.directory, &mut tally.memory)
        };
        if directory.blocks() == 0 {
            return Ok(None);
        }
        directory.scan(page, limit, |block| {
            let (blocks, bytes) = counts.entry(block.namespace()).or_default();
            *blocks += 1;
            *bytes += block.length().0 * block.replicas().len() as u64;
        })
    }

    /// Every namespace with its counts.
    pub(crate) fn name_uses(&self, tally: &Tally) -> Vec<NamespaceUse> {
        let of = |counts: &HashMap<NamespaceId, (u64, u64)>, id| {
            counts.get(&id).copied().unwrap_or_default()
        };
        let mut uses = Vec::new();
        self.namespaces.each(|id, name| {
            let (blocks, bytes) = of(&tally.memory, id);
            let (copies, copy_bytes) = of(&tally.media, id);
            uses.push(NamespaceUse {
                name: name.to_owned(),
                blocks,
                bytes,
                copies,
                copy_bytes,
            });
        });
        uses
    }
}
