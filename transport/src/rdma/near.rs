//! Which port a transfer goes over: one that is near its memory.
//!
//! A device reads and writes memory of another NUMA node over the link between processors, at a fraction
//! of the speed. So of several ports those count that are on the node of the transfer's first page; where
//! none is, all do. Ports that count take turns.

// UNSAFETY: asks the kernel about an address, which it only looks up.
#![allow(unsafe_code, reason = "a system call that rustix does not have")]

use crate::memory::Slice;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The ports of one link, by their NUMA nodes, and whose turn it is.
#[derive(Debug)]
pub(super) struct Near {
    /// Of each port, if it says so.
    nodes: Vec<Option<u32>>,
    /// Whether it matters where memory is.
    differ: bool,
    turn: AtomicUsize,
}

impl Near {
    pub(super) fn new(nodes: Vec<Option<u32>>) -> Self {
        Self {
            differ: nodes.iter().any(|node| Some(node) != nodes.first()),
            nodes,
            turn: AtomicUsize::new(0),
        }
    }

    /// The number of the port for a transfer from or into `memory`.
    pub(super) fn port(&self, memory: Option<&Slice>) -> usize {
        let node = memory.filter(|_| self.differ).and_then(node_of);
        self.port_for(node)
    }

    fn port_for(&self, node: Option<u32>) -> usize {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let near = |port: &usize| node.is_some() && self.nodes.get(*port) == Some(&node);
        let count = (0..self.nodes.len()).filter(near).count();
        if count == 0 {
            return turn % self.nodes.len().max(1);
        }
        let mut near = (0..self.nodes.len()).filter(near);
        near.nth(turn % count).unwrap_or(0)
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

    #[test]
    fn ports_near_the_memory_take_turns_and_others_do_not_come_up() {
        let near = Near::new(vec![Some(0), Some(1), Some(0), None]);
        let ports: Vec<_> = (0..4).map(|_| near.port_for(Some(0))).collect();
        assert_eq!(ports, [0, 2, 0, 2]);
        let ports: Vec<_> = (0..2).map(|_| near.port_for(Some(1))).collect();
        assert_eq!(ports, [1, 1]);
    }

    #[test]
    fn all_ports_take_turns_where_none_is_near_or_nobody_knows() {
        for node in [None, Some(7)] {
            let near = Near::new(vec![Some(0), Some(1), None]);
            let ports: Vec<_> = (0..6).map(|_| near.port_for(node)).collect();
            assert_eq!(ports, [0, 1, 2, 0, 1, 2], "{node:?}");
        }
    }

    #[test]
    fn one_port_is_the_port() {
        let near = Near::new(vec![None]);
        assert_eq!((near.port(None), near.port_for(Some(3))), (0, 0));
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
