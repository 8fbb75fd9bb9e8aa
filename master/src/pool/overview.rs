//! The pool as an overview sees it.

use super::Pool;
use crate::accounts::Balance;
use crate::membership::StoreNode;
use crate::overview::{Fill, NamespaceUse};
use kvpool_types::Incarnation;
use kvpool_types::ids::NamespaceId;
use std::collections::HashMap;
use std::sync::Arc;

impl Pool {
    /// The number of puts that wait for room.
    pub fn puts_waiting(&self) -> usize {
        self.put_queue.len()
    }

    /// Every node with the usage of its segments, by name.
    ///
    /// The table of segments stays read-locked only while a few numbers of each segment are copied.
    /// A longer read lock would make a writer wait, and puts wait behind that writer.
    pub(crate) fn nodes_with_fill(&self) -> Vec<(Arc<StoreNode>, Fill)> {
        let mut fills: HashMap<Incarnation, Fill> = HashMap::new();
        {
            let segments = self.placement.segments();
            for segment in segments.iter() {
                let fill = fills.entry(segment.node.incarnation).or_default();
                fill.segments += 1;
                fill.capacity_bytes += segment.size.0;
                fill.used_bytes += segment.used();
                fill.quarantine_bytes += segment.quarantined();
            }
        }
        let nodes = self.members.all().into_iter();
        nodes
            .map(|node| {
                let fill = fills.get(&node.incarnation).copied();
                (node, fill.unwrap_or_default())
            })
            .collect()
    }

    /// The `most` namespaces with the most bytes, and the number of the others.
    pub(crate) fn largest_namespaces(&self, most: usize) -> (Vec<NamespaceUse>, usize) {
        let accounts = self.directory.accounts();
        let mut all = Vec::with_capacity(self.namespaces.count());
        self.namespaces
            .each(|id, _| all.push((id, accounts.balance(id))));
        let left_off = all.len().saturating_sub(most);
        let order = |(id, balance): &(NamespaceId, Balance)| {
            (std::cmp::Reverse(balance.memory + balance.media), *id)
        };
        all.sort_unstable_by_key(order);
        all.truncate(most);
        let uses = all.into_iter().filter_map(|(id, balance)| {
            Some(NamespaceUse::new(
                self.namespaces.get(id)?.fields.name,
                balance,
            ))
        });
        (uses.collect(), left_off)
    }
}
