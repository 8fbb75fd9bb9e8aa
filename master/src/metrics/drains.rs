//! The gauge of the blocks that stops of draining nodes would lose.

use super::whole;
use crate::membership::{NodeState, StoreNode};
use parking_lot::Mutex;
use prometheus::{IntGaugeVec, Opts, Registry};
use std::collections::BTreeMap;

/// The gauge, by node.
#[derive(Debug)]
pub(super) struct LeftBlocks {
    left: IntGaugeVec,
    /// The nodes that have series now, with their values.
    shown: Mutex<BTreeMap<String, u64>>,
}

impl LeftBlocks {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let opts = Opts::new(
            "kvpool_master_node_left_blocks",
            "Blocks that a stop of a draining node would lose, by node.",
        );
        let left = IntGaugeVec::new(opts, &["node"])?;
        registry.register(Box::new(left.clone()))?;
        Ok(Self {
            left,
            shown: Mutex::default(),
        })
    }

    /// Sets the counts. A node that is not among them loses its series.
    pub(super) fn set(&self, counts: BTreeMap<String, u64>) {
        let mut shown = self.shown.lock();
        for (node, left) in &counts {
            self.left.with_label_values(&[node]).set(whole(*left));
        }
        for gone in shown.keys().filter(|node| !counts.contains_key(*node)) {
            // It fails only for a series that is not there.
            let _absent = self.left.remove_label_values(&[gone]);
        }
        *shown = counts;
    }
}

/// How many blocks a stop of the node would lose: none of a node that does not drain. `None` while they are not
/// counted, and until the leader hears whether the node drains.
pub(super) fn left_of(node: &StoreNode) -> Option<u64> {
    match node.state() {
        _ if node.drains() => node.left_blocks(),
        NodeState::Unreported => None,
        _ => Some(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::BootInstant;
    use kvpool_types::{GrantKey, Incarnation, NodeName};

    /// The node drains on under the next leader. A 0 would say that its stop loses no block.
    #[test]
    fn a_node_that_the_leader_has_not_heard_has_no_count() {
        let key = GrantKey([7; 32]);
        let node = StoreNode::new(NodeName("n".into()), Incarnation(7), key, BootInstant(0));
        assert_eq!(left_of(&node), None);
        node.set_state(NodeState::Live);
        assert_eq!(left_of(&node), Some(0));
        node.drain();
        assert_eq!(left_of(&node), None, "not counted yet");
        node.note_count(Some(3));
        assert_eq!(left_of(&node), Some(3));
    }

    /// A count from before would be taken for the present one.
    #[test]
    fn a_node_whose_blocks_are_not_counted_has_no_series() {
        let registry = Registry::new();
        let gauge = LeftBlocks::new(&registry).unwrap();
        let set = |counts: &[(&str, u64)]| {
            let counts = counts.iter();
            gauge.set(counts.map(|(node, left)| ((*node).into(), *left)).collect());
        };
        set(&[("a", 7), ("b", 0)]);
        set(&[("b", 0), ("c", 9)]);
        let families = registry.gather();
        let series = families[0].get_metric().iter();
        let mut series: Vec<_> = series
            .map(|one| {
                (
                    one.get_label()[0].value().to_owned(),
                    one.get_gauge().get_value(),
                )
            })
            .collect();
        series.sort_by(|one, other| one.0.cmp(&other.0));
        assert_eq!(series, [("b".to_owned(), 0.0), ("c".to_owned(), 9.0)]);
    }
}
