//! Nodes that leave in order: because they stop, or because an operator takes them out of service.

use crate::checks::{RING, is_on, leading};
use crate::dice::{Dice, Stream};
use crate::plan::{Ambush, DiskFault, Fault, LATE_DROP, Loss, Plan, Process, Trick};
use crate::sight::Sight;
use crate::world::World;
use kvpool_master::membership::NodeState;
use kvpool_master::pool::Pool;
use kvpool_master::replica::Replica;
use kvpool_types::{Incarnation, SegmentId, Version};
use std::collections::BTreeSet;

impl Plan {
    /// From a stream of its own: faults that excuse a loss give way to drains, of several nodes at once. Every
    /// acknowledged block must be there at the end.
    pub(crate) fn draw_quiet_drains(&mut self) {
        let dice = Dice::new(self.seed, Stream::Quiet);
        if !self.keeps_all || self.nodes < 2 || !dice.chance(600) {
            return;
        }
        // What excuses a lost block would hide what a drain lost. Drains of all nodes at once leave nobody who stays.
        let drains = |fault: &Fault| matches!(fault, Fault::Drain(..) | Fault::OutOfService(..));
        let stays = |fault: &Fault| fault.loss().is_none() && !drains(fault);
        self.faults.retain(|(_, fault)| stays(fault));
        let is_calm = |ambush: &Ambush| match &ambush.trick {
            Trick::Fault(fault) => stays(fault),
            _ => true,
        };
        self.ambushes.retain(is_calm);
        self.noise.flipped_writes = 0;
        self.drop_ms = LATE_DROP;
        if dice.chance(700) {
            // On a disk the blocks of a node that left wait for its next life.
            self.disk_bytes = 0;
        }
        // Two may leave, and one stays.
        self.nodes = self.nodes.max(3);
        // Puts are under way when nodes leave.
        self.clients = self.clients.max(2);
        self.tasks = 3;
        self.longest_pause = self.longest_pause.min(40_000);
        self.noise.slow = self.noise.slow.max(50);
        let mut at = 0;
        for _ in 0..dice.between(2, 4) {
            // A node that comes too late finds none that stays, and leaves with its blocks.
            at += dice.between(1_000, 4_000);
            let node = dice.index(self.nodes);
            let down = dice.between(30, 800);
            self.faults.push((at, Fault::Drain(node, down)));
            // Commits wait for the log for longer than the drain waits for them. One of several masters would lose its
            // term.
            if self.electing == 0 && dice.chance(300) {
                let begins = at - dice.below(200);
                self.faults
                    .push((begins, Fault::StoreStalls(0, dice.between(4_300, 6_000))));
            }
            if dice.chance(600) {
                let next = Fault::Drain((node + 1) % self.nodes, down);
                let later = [3, 20, 200][dice.index(3)];
                self.faults.push((at + dice.below(later), next));
            }
        }
        self.length_ms = self.length_ms.max(at + 2_000);
    }

    /// From a stream of its own: an operator takes nodes out of service, in half of the histories all of them. Other
    /// nodes are silent or leave while one is called drained.
    pub(crate) fn draw_operator(&mut self) {
        let dice = Dice::new(self.seed, Stream::Operator);
        if !dice.chance(200) {
            return;
        }
        if dice.chance(500) {
            // Each node has a replica of most blocks, and no third one takes any.
            self.nodes = 2;
            self.two_replicas = true;
        }
        let mut at = dice.between(500, 3_000);
        for _ in 0..dice.between(1, 2) {
            let node = dice.index(self.nodes);
            let (force, down) = (dice.chance(400), dice.between(30, 1_500));
            self.faults
                .push((at, Fault::OutOfService(node, force, down)));
            let other = (node + 1) % self.nodes;
            let later = at + dice.between(5, [60, 2_500][dice.index(2)]);
            let next = match dice.below(5) {
                0 => Fault::Stop(Process::Node(other), dice.between(900, 2_500)),
                1 => Fault::Drain(other, down),
                2 | 3 => Fault::OutOfService(other, true, down),
                _ => Fault::Disk(node, DiskFault::IsGone, 0),
            };
            if other != node || matches!(next, Fault::Disk(..)) && self.has_disks() {
                self.faults.push((later, next));
            }
            at = later + dice.between(3_000, 6_000);
        }
        self.length_ms = self.length_ms.max(at);
    }
}

/// Whether an operator's order without force must be refused: the node serves, no other node takes blocks, and a block
/// has its only place on this one.
pub(crate) fn is_last(pool: &Pool, node: Incarnation) -> bool {
    let members = pool.members.all();
    let mut own = members.iter().filter(|one| one.incarnation == node);
    let mut others = members.iter().filter(|one| one.incarnation != node);
    if own.all(|one| one.drains()) || others.any(|one| one.is_placeable() && one.is_connected()) {
        return false;
    }
    let copies = pool.stored_copies().into_iter();
    let copies: BTreeSet<Version> = copies.map(|copy| copy.version).collect();
    let is_only_here = |replicas: &[Replica], version: Version| {
        replicas.iter().any(|at| is_on(pool, at, node)) && !copies.contains(&version)
    };
    let mut blocks = pool.stored_blocks().into_iter();
    blocks.any(|block| is_only_here(&block.replicas, block.version))
}

/// Whether the node drains, as this master sees it.
pub(crate) fn drains(pool: &Pool, node: Incarnation) -> bool {
    let members = pool.members.all();
    let mut own = members.iter().filter(|one| one.incarnation == node);
    own.any(|one| one.drains())
}

/// Whether the leader calls the node drained.
pub(crate) fn is_called_drained(world: &World, node: Incarnation) -> bool {
    leading(world).iter().any(|(_, pool)| {
        let members = pool.members.all();
        let mut own = members.iter().filter(|one| one.incarnation == node);
        own.any(|one| pool.state_label(one) == NodeState::DRAINED)
    })
}

/// Whether copies stay on disks until a doubt is raised about drained nodes: zones are not emptied, and no copy is found
/// wrong. A disk that is gone is such a doubt for its own node.
fn copies_last(plan: &Plan) -> bool {
    let lasts = |fault: &Fault| match fault {
        Fault::Delete(..) => false,
        Fault::Disk(_, DiskFault::IsGone, _) => plan.nodes == 1,
        other => other.loss().is_none_or(|(_, loss)| loss < Loss::Writes),
    };
    !plan.has_disks() || plan.disk_bytes >= RING && plan.all_faults().all(lasts)
}

/// A node that is called drained can stop: no block would be lost with it, and it was told so.
///
/// A node that becomes silent or leaves, and a medium that is gone, end the label at once. A drained node gets no block:
/// its puts and pulls were counted, and a load leaves the copy where it is.
pub(crate) fn labels_are_true(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let (plan, pool) = (&world.plan, sight.pool);
    for node in pool.members.all() {
        if pool.state_label(&node) != NodeState::DRAINED {
            continue;
        }
        if node.awaits_word() {
            return Err(format!(
                "{} is called drained, and was not told that it may leave",
                node.name
            ));
        }
        // A replica with a wrong byte leaves when a reader finds it.
        if plan.noise.flipped_writes > 0 || !copies_last(plan) {
            continue;
        }
        let own = node.segments();
        let gone: Vec<SegmentId> = pool
            .media()
            .into_iter()
            .filter(|medium| medium.state == "gone")
            .map(|medium| medium.record.id)
            .collect();
        let copies: BTreeSet<Version> = sight
            .survey
            .copies
            .iter()
            .filter(|copy| copy.replicas.iter().any(|at| !gone.contains(&at.segment)))
            .map(|copy| copy.version)
            .collect();
        let segments = pool.placement.segments();
        let stays = |at: &Replica| {
            let segment = segments.get(at.segment);
            segment.is_some_and(|one| one.node.is_readable() && !one.node.drains())
        };
        let mut blocks = sight.survey.blocks.iter();
        let lost = blocks.find(|block| {
            block.replicas.iter().any(|at| own.contains(&at.segment))
                && !block.replicas.iter().any(stays)
                && !copies.contains(&block.version)
        });
        if let Some(lost) = lost {
            return Err(format!(
                "{} is called drained, and version {} of {} would be lost with it",
                node.name, lost.version, lost.key
            ));
        }
    }
    Ok(())
}
