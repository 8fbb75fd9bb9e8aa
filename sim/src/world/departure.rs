//! A node leaves a pool at rest. Nothing else goes on but one hindrance that ends, so all of its blocks must stay.

use super::{CHECK, World};
use crate::checks::{self, RING, is_on};
use crate::copies::is_right;
use crate::dice::{Dice, Stream};
use crate::drains;
use crate::life::Life;
use crate::load::{Task, connect};
use crate::net::NodePort;
use crate::plan::{Departs, DiskFault, Plan, Process, Tenant, tenant_name};
use kvpool_master::pool::Pool;
use kvpool_types::{Incarnation, NodeName, Setting, Version};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{Instant, sleep};

/// How long the node waits for its blocks. A move waits for 5 s where no node takes the block.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the store is full. A pull that fails all the while has no try left by then.
const FULL: Duration = Duration::from_millis(2_500);
/// How long a session is cut. The node is suspect by then.
const CUT: Duration = Duration::from_millis(900);
/// The same for an order that the node cannot hear.
const CUT_FOR_LONG: Duration = Duration::from_secs(8);
/// How long a node takes for its next session, and to hear what its master says there.
const HEARD: Duration = Duration::from_secs(6);
/// How often the leader is asked whether it has heard of the drain.
const MOMENT: Duration = Duration::from_millis(3);
/// How long an order takes at most in a pool at rest.
const ORDERED: Duration = Duration::from_secs(1);
/// How long the disk answers nothing, and how long before the drain that begins. A medium is slow after 1.5 s. It is
/// slow still when the moves of a node without others are given up.
const STALL: Duration = Duration::from_secs(9);
const STALLED_BEFORE: Duration = Duration::from_millis(2_200);
/// The keys of a namespace that are read meanwhile.
const READ: u64 = 32;

/// What goes wrong meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hindrance {
    Nothing,
    /// The store has no room for a while.
    StoreIsFull,
    /// The node's session breaks.
    SessionBreaks,
    /// An operator takes the node out of service while it has no session.
    OrderIsLate,
    /// The node's disk answers nothing for a while.
    DiskStalls,
    /// The node's disk takes no writes.
    DiskIsFull,
    /// The leader dies, and the next one uses the node's disk late, while the node is silent.
    AttachmentIsLate,
}

impl Hindrance {
    /// One that matters to the pool.
    fn drawn(dice: &Dice, departs: Option<Departs>, has_disks: bool) -> Self {
        let of_pool = match departs {
            Some(Departs::Alone) => Some(Self::DiskStalls),
            Some(Departs::WithoutMoves) => Some(Self::AttachmentIsLate),
            Some(Departs::WithRoom) => Some(Self::DiskIsFull),
            Some(Departs::WithoutRoom) | None => None,
        };
        if let Some(of_pool) = of_pool
            && dice.chance(700)
        {
            return [of_pool, Self::StoreIsFull][dice.index(2)];
        }
        let all = [
            Self::StoreIsFull,
            Self::SessionBreaks,
            Self::OrderIsLate,
            Self::Nothing,
            Self::DiskStalls,
            Self::DiskIsFull,
        ];
        all[dice.index(if has_disks { all.len() } else { 4 })]
    }
}

impl World {
    /// See the module's documentation. In some histories alone, since it takes time.
    pub(crate) async fn a_node_leaves(self: &Arc<Self>) -> Result<(), String> {
        let plan = &self.plan;
        let dice = Dice::new(plan.seed, Stream::Departure);
        if plan.departs == Some(Departs::WithoutRoom) && plan.nodes > 1 {
            return Box::pin(self.a_node_leaves_full_memory(&dice)).await;
        }
        if !draws_departure(plan, &dice) {
            return Ok(());
        }
        let pool = checks::at_rest(self, Duration::ZERO).await?;
        let number = dice.index(plan.nodes);
        let Some(port) = self.net.node(number) else {
            return Ok(());
        };
        let node = port.node.incarnation();
        let hindrance = Hindrance::drawn(&dice, plan.departs, plan.has_disks());
        let must_save = self.has_room_for_all_of(&pool, number, node, hindrance);
        let mut before = versions_on(&pool, node);
        drop(pool);
        self.trace.note(
            "----",
            format_args!(
                "n{number} leaves the pool at rest with {} blocks, hindrance: {hindrance:?}, \
                 must save all: {must_save}",
                before.len()
            ),
        );
        let found = self.found_wrong();
        let begun = self.begin_departure(number, &port, hindrance, &mut before);
        let readers = begun.await?;
        let saved = Self::word_to(&port, PATIENCE).await;
        self.judge_word(number, &port);
        match saved {
            Some(0) => {
                self.saved.fetch_add(1, Ordering::Relaxed);
                checks::nothing_left_on(self, &port, found)?;
            }
            left if must_save => {
                return Err(format!(
                    "n{number} leaves the pool at rest, and of {} blocks {left:?} have no other place: {hindrance:?}",
                    before.len()
                ));
            }
            _ => self.left_early.store(true, Ordering::Release),
        }
        self.ssds.iter().for_each(|ssd| ssd.heal());
        self.node_is_lost();
        Arc::clone(self).leave(port, number, Duration::ZERO).await;
        // What a late reader has loaded would be new to the next leader.
        for reader in readers {
            let _ended = reader.await;
        }
        let pool = checks::at_rest(self, Duration::ZERO).await?;
        // The next leader may make room in a full memory.
        let is_judged = must_save && hindrance != Hindrance::AttachmentIsLate;
        match first_lost(&pool, &before).filter(|_| is_judged) {
            Some(lost) => Err(format!(
                "n{number} has left the pool at rest in order, and version {lost} is lost: {hindrance:?}"
            )),
            None => Ok(()),
        }
    }

    /// The node begins to stop. Returns the readers that read meanwhile. `blocks` loses those that have left before.
    async fn begin_departure(
        self: &Arc<Self>,
        number: usize,
        port: &NodePort,
        hindrance: Hindrance,
        blocks: &mut BTreeSet<Version>,
    ) -> Result<Vec<JoinHandle<()>>, String> {
        if self.plan.has_disks() && self.plan.disk_bytes < RING {
            // What the node writes takes the zones of older copies.
            self.left_early.store(true, Ordering::Release);
        }
        let first_reader = self.hinder(number, hindrance).await;
        if hindrance == Hindrance::OrderIsLate {
            self.order_without_a_session(number, port).await?;
        }
        port.node.drain();
        if hindrance == Hindrance::AttachmentIsLate {
            self.attach_in_silence(number).await;
        }
        let ssd = self.ssds.get(number);
        ssd.into_iter().for_each(|ssd| ssd.ledger.drain());
        let reader = spawn_local(Arc::clone(self).read_all());
        if matches!(hindrance, Hindrance::SessionBreaks | Hindrance::DiskStalls) {
            self.drop_evicted(port.node.incarnation(), blocks).await;
        }
        Ok(first_reader.into_iter().chain([reader]).collect())
    }

    /// Takes those out of `blocks` that were evicted before the leader heard of the drain. Reads from a disk make room
    /// in memory.
    async fn drop_evicted(&self, node: Incarnation, blocks: &mut BTreeSet<Version>) {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            let heard = checks::leading(self).into_iter().map(|(_, pool)| pool);
            let mut heard = heard.filter(|pool| drains::drains(pool, node));
            if let Some(pool) = heard.next() {
                let there = all_versions(&pool);
                return blocks.retain(|version| there.contains(version));
            }
            sleep(MOMENT).await;
        }
    }

    /// Whether every block of the node has a place to go. A disk with many zones takes all of them. Without one, a
    /// segment of another node has much more room than they need, so that nothing is evicted.
    fn has_room_for_all_of(
        &self,
        pool: &Pool,
        number: usize,
        node: Incarnation,
        hindrance: Hindrance,
    ) -> bool {
        let plan = &self.plan;
        // No node takes a block with wrong bytes.
        if plan.noise.flipped_writes > 0 {
            return false;
        }
        let blocks = pool.stored_blocks().into_iter();
        let here = blocks.filter(|block| block.replicas.iter().any(|at| is_on(pool, at, node)));
        let bytes: u64 = here
            .map(|block| block.length.0.next_multiple_of(4096))
            .sum();
        let needed = 3 * bytes + 2 * plan.longest_block;
        let segments = pool.placement.segments();
        let others = segments
            .iter()
            .filter(|one| one.node.incarnation != node && one.node.is_placeable());
        let rooms = others.map(|one| {
            let in_one_piece = one.extents().largest_free().0;
            in_one_piece.min(one.limit().saturating_sub(one.used()))
        });
        let moves = rooms.max().is_some_and(|room| room >= needed);
        if !plan.has_disks() {
            return moves;
        }
        let has_quota = |tenant: &Tenant| tenant.settings.get(Setting::MediaHard).is_some();
        let mut ssd = self.ssds.get(number).into_iter();
        let stores = plan.disk_bytes >= RING
            && is_right(plan, number)
            && ssd.any(|ssd| ssd.is_sound())
            && !plan.tenants.iter().any(has_quota);
        match hindrance {
            Hindrance::DiskIsFull => stores && moves,
            // Nothing is copied to the disk of a node that an operator takes out of service before it stops.
            Hindrance::OrderIsLate => false,
            // A slow medium, or a node without a session, has its blocks moved first. Others may be evicted for them.
            _ => stores && (plan.nodes == 1 || moves),
        }
    }

    /// Lets the hindrance begin. Returns a reader that may have begun with it.
    async fn hinder(
        self: &Arc<Self>,
        number: usize,
        hindrance: Hindrance,
    ) -> Option<JoinHandle<()>> {
        let node = Process::Node(number);
        match hindrance {
            Hindrance::Nothing | Hindrance::OrderIsLate | Hindrance::AttachmentIsLate => {}
            Hindrance::StoreIsFull => self.disk.fill(FULL),
            Hindrance::SessionBreaks => {
                self.cut_off(node, CUT);
            }
            Hindrance::DiskStalls => {
                if let Some(ssd) = self.ssds.get(number) {
                    ssd.inflict(DiskFault::Stalls, STALL);
                    // A request waits for so long that the node calls the medium slow.
                    let reader = spawn_local(Arc::clone(self).read_all());
                    sleep(STALLED_BEFORE).await;
                    return Some(reader);
                }
            }
            Hindrance::DiskIsFull => {
                if let Some(ssd) = self.ssds.get(number) {
                    ssd.inflict(DiskFault::IsFull, PATIENCE);
                }
            }
        }
        None
    }

    /// No message passes between a node and the masters.
    fn cut_off(&self, node: Process, wait: Duration) {
        for master in (0..self.plan.masters()).map(Process::Master) {
            self.net.cut(node, master, wait);
            self.net.cut(master, node, wait);
        }
    }

    /// An operator takes the node out of service while it has no session. It hears of that in its next one: it must say
    /// so to a later leader.
    async fn order_without_a_session(&self, number: usize, port: &NodePort) -> Result<(), String> {
        let node = port.node.incarnation();
        let has_session = || {
            let leading = checks::leading(self);
            let mut members = leading.iter().flat_map(|(_, pool)| pool.members.all());
            members.any(|one| one.incarnation == node && one.is_connected())
        };
        let no_order = |why: &str| {
            let said = format_args!("gets no order without a session: {why}").to_string();
            self.trace.note(Process::Node(number), said);
        };
        if self.plan.drops_nodes() {
            no_order("it would be dropped");
            return Ok(());
        }
        self.cut_off(Process::Node(number), CUT_FOR_LONG);
        let healed = Instant::now() + CUT_FOR_LONG;
        // A connection is resent over for a while.
        while has_session() && Instant::now() < healed {
            sleep(CHECK).await;
        }
        let Some((_, pool)) = checks::leading(self).into_iter().next() else {
            no_order("nobody leads");
            return Ok(());
        };
        if Instant::now() + ORDERED >= healed {
            no_order("its session lasts");
            return Ok(());
        }
        let name = NodeName(format!("n{number}"));
        if let Err(refused) = pool.drain_node(&name, true).await {
            no_order(&refused.to_string());
            return Ok(());
        }
        let until = healed + HEARD;
        while !port.node.drains() {
            if Instant::now() >= until {
                // Only the leader of the order knows it until the node has heard it. A leader that hears neither
                // nodes nor clients gives way to one that nodes ask.
                let leading = checks::leading(self);
                if leading.iter().all(|(_, now)| now.epoch != pool.epoch) {
                    return Ok(());
                }
                return Err(format!(
                    "n{number} was taken out of service without a session, and does not know it after the next began"
                ));
            }
            sleep(CHECK).await;
        }
        Ok(())
    }

    /// Reads all blocks of all namespaces.
    async fn read_all(self: Arc<Self>) {
        let life = Life::default();
        for tenant in 0..self.plan.tenants.len() {
            let name = tenant_name(tenant);
            let client = connect(&self.net, 99, &life, self.plan.masters(), &name).await;
            let keys = self.plan.keys_of(tenant);
            let task = Task {
                load: Arc::clone(&self.load),
                plan: Arc::clone(&self.plan),
                who: Process::Client(99),
                keys: keys.start..keys.end.min(keys.start + READ),
                keeps_all: self.plan.keeps_all_of(tenant),
                dice: Dice::new(
                    self.plan.seed,
                    Stream::Task(u64::from(u32::MAX) + 1, tenant as u64),
                ),
                client,
            };
            task.get_all().await;
        }
    }
}

/// Whether a node leaves at rest. This takes time, so it does not in all histories.
fn draws_departure(plan: &Plan, dice: &Dice) -> bool {
    let share = match plan.disk_bytes {
        _ if plan.departs.is_some() => 1_000,
        RING.. => 700,
        _ => 400,
    };
    (plan.nodes > 1 || plan.has_disks()) && dice.chance(share)
}

/// The first of these blocks that is neither in memory nor on a disk.
fn first_lost(pool: &Pool, before: &BTreeSet<Version>) -> Option<Version> {
    before.difference(&all_versions(pool)).next().copied()
}

/// The blocks in memory and on disks.
fn all_versions(pool: &Pool) -> BTreeSet<Version> {
    let copies = pool.stored_copies().into_iter();
    let all = pool.stored_blocks().into_iter().chain(copies);
    all.map(|block| block.version).collect()
}

/// The blocks with a replica in the memory of a node.
fn versions_on(pool: &Pool, node: Incarnation) -> BTreeSet<Version> {
    let blocks = pool.stored_blocks().into_iter();
    let here = blocks.filter(|block| block.replicas.iter().any(|at| is_on(pool, at, node)));
    here.map(|block| block.version).collect()
}
