//! Chooses the lane of a transfer: one whose port is near the transfer's memory.
//!
//! A device reaches memory of another NUMA node over the interconnect, at a fraction of the speed.
//! So lanes on the NUMA node of the transfer's first page are candidates; if there are none, all
//! lanes are. The candidate with the least load is chosen, and equal candidates take turns.

// UNSAFETY: passes an address to the kernel, which only looks it up.
#![allow(unsafe_code, reason = "a system call that rustix does not have")]

use crate::memory::Slice;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The lanes of one link, by the NUMA nodes of their ports.
#[derive(Debug)]
pub(super) struct LaneChooser {
    /// The NUMA node of each lane's port, where known.
    nodes: Vec<Option<u32>>,
    /// Whether the nodes differ, so that the choice matters.
    differ: bool,
    turn: AtomicUsize,
}

impl LaneChooser {
    pub(super) fn new(nodes: Vec<Option<u32>>) -> Self {
        Self {
            differ: nodes.iter().any(|node| Some(node) != nodes.first()),
            nodes,
            turn: AtomicUsize::new(0),
        }
    }

    /// The index of the lane for a transfer from or into `memory`. `load` returns a lane's load in
    /// bytes.
    pub(super) fn lane(&self, memory: Option<&Slice>, load: impl Fn(usize) -> u64) -> usize {
        let node = memory.filter(|_| self.differ).and_then(node_of);
        self.lane_for(node, load)
    }

    fn lane_for(&self, node: Option<u32>, load: impl Fn(usize) -> u64) -> usize {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let lanes = || 0..self.nodes.len();
        let is_near = |lane: &usize| node.is_some() && self.nodes.get(*lane) == Some(&node);
        let has_near = lanes().any(|lane| is_near(&lane));
        let counts = |lane: &usize| !has_near || is_near(lane);
        let count = lanes().filter(counts).count().max(1);
        let in_turn = lanes().filter(counts).cycle().skip(turn % count);
        // `min_by_key` takes the first of equals, which is the next in turn.
        in_turn
            .take(count)
            .min_by_key(|lane| load(*lane))
            .unwrap_or(0)
    }
}

/// The NUMA node of the memory's first page, which this may allocate. `None` when the kernel does
/// not tell.
fn node_of(memory: &Slice) -> Option<u32> {
    /// `MPOL_F_NODE | MPOL_F_ADDR`: the answer is the node of the page at an address.
    const OF_ADDRESS: usize = 1 | 2;
    let mut node: libc::c_int = -1;
    // SAFETY: the kernel writes one int to `node` and nothing else, because the node mask is null.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut node,
            std::ptr::null_mut::<libc::c_ulong>(),
            0_usize,
            memory.as_ptr(),
            OF_ADDRESS,
        )
    };
    (answer == 0).then(|| u32::try_from(node).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Region;
    use kvpool_types::Length;

    fn idle(_: usize) -> u64 {
        0
    }

    #[test]
    fn lanes_near_the_memory_take_turns_and_others_do_not_come_up() {
        let near = LaneChooser::new(vec![Some(0), Some(1), Some(0), None]);
        let lanes: Vec<_> = (0..4).map(|_| near.lane_for(Some(0), idle)).collect();
        assert_eq!(lanes, [0, 2, 0, 2]);
        let lanes: Vec<_> = (0..2).map(|_| near.lane_for(Some(1), idle)).collect();
        assert_eq!(lanes, [1, 1]);
    }

    #[test]
    fn all_lanes_take_turns_when_none_is_near_or_the_node_is_unknown() {
        for node in [None, Some(7)] {
            let near = LaneChooser::new(vec![Some(0), Some(1), None]);
            let lanes: Vec<_> = (0..6).map(|_| near.lane_for(node, idle)).collect();
            assert_eq!(lanes, [0, 1, 2, 0, 1, 2], "{node:?}");
        }
    }

    /// A busy lane is skipped, but a far lane never replaces a busy near lane.
    #[test]
    fn the_least_loaded_lane_is_chosen() {
        let near = LaneChooser::new(vec![Some(0), Some(0), Some(1)]);
        let load = |lane: usize| [5, 3, 0][lane];
        for _ in 0..3 {
            assert_eq!(near.lane_for(Some(0), load), 1);
            assert_eq!(near.lane_for(None, load), 2);
        }
    }

    #[test]
    fn a_single_lane_is_always_chosen() {
        let near = LaneChooser::new(vec![None]);
        assert_eq!(
            (near.lane(None, idle), near.lane_for(Some(3), idle)),
            (0, 0)
        );
    }

    /// The kernel reports a node of this machine for a page that was touched.
    #[test]
    fn the_kernel_reports_the_node_of_touched_memory() {
        let memory = Region::allocate(Length(1 << 20)).whole();
        memory.write_at(kvpool_types::Offset(0), &[1]);
        let Some(node) = node_of(&memory) else {
            eprintln!(
                "SKIPPED the_kernel_reports_the_node_of_touched_memory: the kernel does not tell nodes of memory"
            );
            return;
        };
        let folder = format!("/sys/devices/system/node/node{node}");
        assert!(std::path::Path::new(&folder).is_dir(), "{folder}");
    }
}
