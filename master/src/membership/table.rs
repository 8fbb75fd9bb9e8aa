//! The table of nodes, by name.

use super::StoreNode;
use crate::clock::BootInstant;
use bytes::Bytes;
use kvpool_types::{
    Epoch, Extent, HostId, Incarnation, IncarnationSecret, Length, NodeName, SegmentId,
};
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// The fields of a node's registration.
#[derive(Clone, Debug)]
pub struct Registration {
    /// The node's name.
    pub name: NodeName,
    /// The node's incarnation.
    pub incarnation: Incarnation,
    /// `host:port` of the data port.
    pub data_address: String,
    /// The path of the Unix socket; empty for none.
    pub shm_path: String,
    /// The machine of the node.
    pub host: HostId,
    /// The highest epoch that ever welcomed the node.
    pub epoch_seen: Epoch,
    /// The proof of the incarnation; `None` from a node without a secret.
    pub secret: Option<IncarnationSecret>,
    /// The proof of `epoch_seen`; empty for none.
    pub epoch_proof: Bytes,
    /// The size of each segment, with its id if an earlier welcome gave one.
    pub segments: Vec<(Length, Option<SegmentId>)>,
    /// Ranges that the node cannot fence yet.
    pub held: Vec<Extent>,
    /// Ranges that loads from media wrote, and whose records may not be durable.
    pub loaded: Vec<Extent>,
    /// Whether the node can copy blocks from other nodes.
    pub can_pull: bool,
    /// Whether the node understands the order to end a drain.
    pub can_undrain: bool,
    /// The node's version of kvpool; empty when unknown.
    pub version: String,
    /// Whether the node asks readers for signed locations.
    pub wants_signed_reads: bool,
}

/// Every node that holds or may hold blocks.
#[derive(Debug, Default)]
pub struct Members {
    nodes: RwLock<BTreeMap<NodeName, Arc<StoreNode>>>,
    dropped: Mutex<Dropped>,
}

/// What the silence of the nodes means.
#[derive(Debug, Default)]
pub struct Judged {
    /// Nodes that have been silent for too long.
    pub lost: Vec<Arc<StoreNode>>,
    /// Whether a node has become suspect.
    pub has_suspect: bool,
}

/// The most dropped incarnations known by name. An older one is recognised by the segment ids that
/// it names: a welcome gave them, and no node has them now.
const MOST_DROPPED: usize = 16_384;

/// The last incarnations that were dropped.
#[derive(Debug, Default)]
struct Dropped {
    order: VecDeque<(NodeName, Incarnation)>,
    lives: HashSet<Incarnation>,
}

impl Dropped {
    fn add(&mut self, life: Incarnation, name: NodeName) {
        if !self.lives.insert(life) {
            return;
        }
        self.order.push_back((name, life));
        if self.order.len() > MOST_DROPPED
            && let Some((_, oldest)) = self.order.pop_front()
        {
            self.lives.remove(&oldest);
        }
    }
}

impl Members {
    /// The current incarnation of a node.
    pub fn get(&self, name: &NodeName) -> Option<Arc<StoreNode>> {
        self.nodes.read().get(name).cloned()
    }

    /// Every node, by name.
    pub fn all(&self) -> Vec<Arc<StoreNode>> {
        self.nodes.read().values().cloned().collect()
    }

    /// The number of nodes.
    pub fn count(&self) -> usize {
        self.nodes.read().len()
    }

    pub(crate) fn insert(&self, node: Arc<StoreNode>) {
        self.nodes.write().insert(node.name.clone(), node);
    }

    /// Removes a node if it still has this incarnation, and refuses this incarnation from now on.
    pub(crate) fn drop_incarnation(&self, name: &NodeName, incarnation: Incarnation) {
        self.dropped.lock().add(incarnation, name.clone());
        let mut nodes = self.nodes.write();
        if nodes
            .get(name)
            .is_some_and(|node| node.incarnation == incarnation)
        {
            nodes.remove(name);
        }
    }

    /// True when an incarnation was dropped.
    pub fn is_dropped(&self, incarnation: Incarnation) -> bool {
        self.dropped.lock().lives.contains(&incarnation)
    }

    /// The last dropped incarnations, oldest first, for snapshots.
    pub fn dropped(&self) -> Vec<(NodeName, Incarnation)> {
        self.dropped.lock().order.iter().cloned().collect()
    }

    /// Makes silent nodes suspect, sooner after a broken session.
    pub fn judge(
        &self,
        now: BootInstant,
        suspect_after: Duration,
        broken_after: Duration,
        drop_after: Duration,
    ) -> Judged {
        let mut judged = Judged::default();
        for node in self.nodes.read().values() {
            if now.since(node.last_heard()) >= drop_after {
                judged.lost.push(Arc::clone(node));
            } else if let Some(silent) = node.suspect_if_silent(now, suspect_after, broken_after) {
                tracing::warn!(node = %node.name, silent_ms = silent.as_millis(), "node suspect: no heartbeat");
                judged.has_suspect = true;
            }
        }
        judged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_dropped_incarnations_is_bounded_and_keeps_the_last() {
        let members = Members::default();
        let name = NodeName("n".into());
        let lives = MOST_DROPPED as u128 + 10;
        for life in 0..lives {
            members.drop_incarnation(&name, Incarnation(life));
            members.drop_incarnation(&name, Incarnation(life));
        }
        assert_eq!(members.dropped().len(), MOST_DROPPED);
        assert!(!members.is_dropped(Incarnation(9)));
        assert!(members.is_dropped(Incarnation(10)));
        assert!(members.is_dropped(Incarnation(lives - 1)));
    }
}
