//! Which lane a transfer goes over: one whose port is near its memory.
//!
//! A device reads and writes memory of another NUMA node over the link between processors, at a fraction
//! of the speed. So of several ports those count that are on the node of the transfer's first page; where
//! none is, all do. Of the lanes that count the one goes that has the least to do, and they take turns where
//! that is the same.

// UNSAFETY: asks the kernel about an address, which it only looks up.
#![allow(unsafe_code, reason = "a system call that rustix does not have")]

use crate::memory::Slice;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The lanes of one link, by their ports' NUMA nodes, and whose turn it is.
#[derive(Debug)]
pub(super) struct LaneChooser {
    /// Of each lane's port, if it says so.
    nodes: Vec<Option<u32>>,
    /// Whether it matters where memory is.
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

    /// The number of the lane for a transfer from or into `memory`; `load` is what a lane has to do.
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
        // Of equals the first one is taken, and so the one whose turn it is.
        in_turn
            .take(count)
            .min_by_key(|lane| load(*lane))
            .unwrap_or(0)
    }
}

/// The NUMA node that the first page of the memory is on, which is touched if nobody has yet; `None` where
/// the kernel does not say.
fn node_of(memory: &Slice) -> Option<u32> {
    /// `MPOL_F_NODE | MPOL_F_ADDR`: the answer is a node, of the page at an address.
    const OF_ADDRESS: usize = 1 | 2;
    let mut node: libc::c_int = -1;
    // SAFETY: the kernel writes one int to `node`, and nothing else: there is no mask of nodes.
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
    fn all_lanes_take_turns_where_none_is_near_or_nobody_knows() {
        for node in [None, Some(7)] {
            let near = LaneChooser::new(vec![Some(0), Some(1), None]);
            let lanes: Vec<_> = (0..6).map(|_| near.lane_for(node, idle)).collect();
            assert_eq!(lanes, [0, 1, 2, 0, 1, 2], "{node:?}");
        }
    }

    /// A turn is not waited for behind a lane that is busy, and a far lane does not help a busy near one.
    #[test]
    fn the_lane_with_the_least_to_do_goes_first() {
        let near = LaneChooser::new(vec![Some(0), Some(0), Some(1)]);
        let load = |lane: usize| [5, 3, 0][lane];
        for _ in 0..3 {
            assert_eq!(near.lane_for(Some(0), load), 1);
            assert_eq!(near.lane_for(None, load), 2);
        }
    }

    #[test]
    fn one_lane_is_the_lane() {
        let near = LaneChooser::new(vec![None]);
        assert_eq!(
            (near.lane(None, idle), near.lane_for(Some(3), idle)),
            (0, 0)
        );
    }

    /// The kernel's answer for a page that was touched is a node of this machine.
    #[test]
    fn the_kernel_says_where_touched_memory_is() {
        let memory = Region::allocate(Length(1 << 20)).whole();
        memory.write_at(kvpool_types::Offset(0), &[1]);
        let Some(node) = node_of(&memory) else {
            eprintln!(
                "SKIPPED the_kernel_says_where_touched_memory_is: the kernel does not tell nodes of memory"
            );
            return;
        };
        let folder = format!("/sys/devices/system/node/node{node}");
        assert!(std::path::Path::new(&folder).is_dir(), "{folder}");
    }
}
