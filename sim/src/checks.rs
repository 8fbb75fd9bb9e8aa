//! The rules of the whole pool, checked all the time and at the end.

use crate::absence;
use crate::budget;
use crate::chains::{self, Orphan};
use crate::copies::{Lost, is_right};
use crate::dice::{Dice, Stream};
use crate::drains;
use crate::history::bytes_of;
use crate::intruder::NO_EPOCH;
use crate::leaderless;
use crate::leases::Broken;
use crate::life::Life;
use crate::load::{Task, connect, name};
use crate::net::NodePort;
use crate::pins::Unpinned;
use crate::plan::{Fault, Plan, Process, Tenant, tenant_name};
use crate::removed;
use crate::rest;
use crate::sight::Sight;
use crate::successor::{self, lines};
use crate::tenants;
use crate::world::World;
use kvpool_client::{Client, PutOutcome};
use kvpool_master::pool::audit::Holder;
use kvpool_master::pool::{Pool, TaskState};
use kvpool_master::replica::Replica;
use kvpool_types::{Incarnation, Key, Setting, Version};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Disks with fewer bytes for blocks are written more than once.
pub(crate) const RING: u64 = 48 << 20;
/// Once faults and load end, every call ends within this time.
const CALLS_END: Duration = Duration::from_secs(8);
/// Once nothing runs, the pool is at rest within this time: grants and leases end, all extents are fenced, and
/// nodes that were away are back.
const REST: Duration = Duration::from_secs(40);
/// So few blocks may all stay behind on a node that is drained.
const FEW: u64 = 6;
/// How long a signed location counts at most.
const LOCATIONS_END: Duration = Duration::from_secs(70);
/// How long rest must last. A message that was slow when faults ended is on its way for up to 3 s. A node whose
/// heartbeats wait behind it becomes suspect, and nobody reads from it meanwhile.
const SETTLED: Duration = Duration::from_secs(4);

/// The pools of the masters that lead now.
pub(crate) fn leading(world: &World) -> Vec<(usize, Arc<Pool>)> {
    let masters = world.net.masters().into_iter();
    let pools = masters.filter_map(|(number, seat)| Some((number, seat.pool().ok()?)));
    pools.filter(|(_, pool)| pool.leads()).collect()
}

/// What holds at every moment: one leader, exact accounts, no two uses of one extent, and a segment's id names this
/// segment for ever.
pub(crate) fn of_the_pool(world: &World) -> Result<(), String> {
    if let Some(collision) = world.ssds.iter().find_map(|ssd| ssd.collision()) {
        return Err(collision);
    }
    leaderless::ends(world)?;
    let leading = leading(world);
    if let [(one, first), (other, second), ..] = leading.as_slice() {
        return Err(format!(
            "m{one} leads in epoch {} and m{other} leads in epoch {}",
            first.epoch, second.epoch
        ));
    }
    for (number, pool) in &leading {
        of_a_leader(world, *number, pool)?;
    }
    if leading.is_empty() {
        world.load.whole.lock().forget();
        world.unheard.lock().forget();
    }
    Ok(())
}

/// What holds at every moment for the state of a leader.
fn of_a_leader(world: &World, number: usize, pool: &Pool) -> Result<(), String> {
    if pool.epoch >= NO_EPOCH {
        return Err(format!("m{number} believes a stranger's epoch"));
    }
    let sight = &Sight::of(pool, &world.plan);
    pool.audit(&sight.survey)
        .map_err(|wrong| format!("m{number} in epoch {}: {wrong}", pool.epoch))?;
    ids_name_one_segment(world, number, pool)?;
    keys_have_one_version(sight)?;
    removed::stay_away(world, sight)?;
    // A block that comes back from a disk has left its chain, and one with a wrong byte is dropped. Eviction by use
    // knows no chains.
    let plan = &world.plan;
    if plan.noise.flipped_writes == 0 && !plan.has_disks() && !plan.evicts_by_use {
        parents_stay(world, sight)?;
    }
    if world.plan.has_disks() {
        copies_stay(world, sight)?;
        world.copies.lock().media_stay(pool, &world.plan)?;
        budget::is_kept(world, pool.epoch.0)?;
    }
    if !world.plan.pins.is_empty() {
        pins_stay(world, sight)?;
    }
    tenants::keep_their_rules(world, sight).map_err(|wrong| format!("at m{number}: {wrong}"))?;
    let promises = &world.net.promises;
    let kept = match promises.broken_by(sight) {
        Some(broken) => Err(broken),
        None => leased_stay(world, sight),
    };
    kept.map_err(|broken| format!("at m{number} in epoch {}: {broken}", pool.epoch))?;
    world.doubts.lock().judge(&world.load.history.lock())?;
    leases_stay(world, sight)?;
    // A reader that finds a wrong byte reports it, and the replica goes.
    if world.plan.noise.flipped_writes == 0 {
        world.replicas.lock().look(sight)?;
    }
    kept_stay(world, sight)?;
    drained_stay(world, sight)?;
    drains::labels_are_true(world, sight)
        .map_err(|wrong| format!("at m{number} in epoch {}: {wrong}", pool.epoch))?;
    successor::has_all(world, number, sight)
        .map_err(|wrong| format!("at m{number} in epoch {}: {wrong}", pool.epoch))?;
    // A wrong byte hides its replica for a while.
    if !world.plan.flips_bytes() {
        world.load.whole.lock().look(world, number, sight)?;
    }
    Ok(())
}

/// A segment's id names this segment for ever.
fn ids_name_one_segment(world: &World, number: usize, pool: &Pool) -> Result<(), String> {
    let mut known = world.segments.lock();
    for segment in pool.placement.segments().iter() {
        let life = segment.node.incarnation;
        let first = *known.entry(segment.id).or_insert(life);
        if first != life {
            return Err(format!(
                "m{number} in epoch {} gives the id of segment {} to a second node, {}",
                pool.epoch, segment.id, segment.node.name
            ));
        }
    }
    Ok(())
}

/// A key's block in memory and its copy are of one version: a commit takes earlier copies out, and no copy of an
/// earlier version is recorded after it.
fn keys_have_one_version(sight: &Sight<'_>) -> Result<(), String> {
    for (key, block) in sight.blocks() {
        let copy = sight.copy(key).map(|copy| copy.version);
        if let Some(copy) = copy.filter(|copy| *copy != block.version) {
            return Err(format!(
                "key {key} has version {} in memory, and version {copy} on a disk",
                block.version
            ));
        }
    }
    Ok(())
}

/// Eviction takes no block before the blocks behind it in its chain.
fn parents_stay(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let is_excused = world.has_just_lost();
    let orphans = world.chains.lock().look(sight, is_excused);
    let history = world.load.history.lock();
    for Orphan { key, parent, seen } in orphans {
        if !history.may_have_left(parent, seen) {
            return Err(format!(
                "key {parent} has left the pool before key {key}, which is behind it in its chain"
            ));
        }
    }
    Ok(())
}

/// A block on which a lease runs leaves memory only when its key changes, or with its node.
fn leased_stay(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let gone = world.net.promises.gone_from(sight);
    let plan = &world.plan;
    // A reader that finds a wrong byte reports it, and the replica goes. A block may have moved to a node that was
    // lost.
    if plan.noise.flipped_writes > 0 || plan.drops_nodes() || world.has_just_lost() {
        return Ok(());
    }
    // A namespace goes with its blocks. The clients of the checks use several namespaces.
    let is_deleted = |client: usize| {
        let mut own = (0..plan.tenants.len())
            .filter(|tenant| client >= plan.clients || *tenant == plan.tenant_of(client));
        own.any(|tenant| plan.deletes(tenant))
    };
    let history = world.load.history.lock();
    let mut doubts = world.doubts.lock();
    for gone in gone {
        // Namespaces have equal keys.
        let Process::Client(client) = gone.reader else {
            continue;
        };
        let mut keys = plan.keys_of(plan.tenant_of(client));
        let number = keys.find(|number| name(*number) == gone.key);
        if let Some(number) = number.filter(|_| !is_deleted(client)) {
            doubts.left(&history, number, gone.since, gone.what)?;
        }
    }
    Ok(())
}

/// A leader that knew a lease knows it until its end, unless the key changes, and counts its holder. A namespace takes
/// its blocks along.
fn leases_stay(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let broken = world.net.promises.leases.forgotten_by(sight, &world.plan);
    let history = world.load.history.lock();
    for Broken { key, asked, what } in broken {
        if !history.may_have_changed(key, asked) {
            return Err(what);
        }
    }
    // A damaged replica takes its leases along, perhaps while their answers are on their way.
    if world.plan.noise.flipped_writes > 0 {
        return Ok(());
    }
    let may_have_changed = |key, since| history.may_have_changed(key, since);
    let leases = &world.net.promises.leases;
    match leases.uncounted(sight, &world.plan, may_have_changed) {
        Some(uncounted) => Err(uncounted),
        None => Ok(()),
    }
}

/// Where nothing takes blocks, one that was there is there at every later look.
fn kept_stay(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let plan = &world.plan;
    // A node that stays may have no room for the blocks of those that leave.
    if may_lose(world) || world.evicted() > 0 || world.has_evicted.load(Ordering::Acquire) {
        return Ok(());
    }
    for tenant in (0..plan.tenants.len()).filter(|tenant| plan.keeps_all_of(*tenant)) {
        world.kept.lock().look(sight, plan, tenant)?;
    }
    Ok(())
}

/// A drain takes no block out of the pool, and leaves none in a zone alone that it may empty.
fn drained_stay(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let left = world.stays.lock().look(sight, world);
    let history = world.load.history.lock();
    for (key, version, since) in left.lost {
        if !history.may_have_changed(key, since) {
            return Err(format!(
                "the block of key {key}, version {version}, has left the memory of a node that drains, and has no copy"
            ));
        }
    }
    for (key, version, since) in left.doomed {
        if !history.may_have_changed(key, since) {
            return Err(format!(
                "the block of key {key}, version {version}, has left the memory of a node that drains, and the drain \
                 may empty the zone of its copy"
            ));
        }
    }
    Ok(())
}

/// A copy leaves a disk that goes right, and has room, only when its key changes.
fn copies_stay(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let lost = world.copies.lock().look(sight, world);
    let history = world.load.history.lock();
    let mut doubts = world.doubts.lock();
    for Lost {
        key,
        version,
        since,
    } in lost
    {
        let what = format!(
            "the copy of key {key}, version {version}, has left its disk, and nothing took it"
        );
        doubts.left(&history, key, since, what)?;
    }
    Ok(())
}

/// A hard-pinned block leaves only when its key changes, or with its last place.
fn pins_stay(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let left = world.pins.lock().look(sight, world)?;
    let history = world.load.history.lock();
    let mut doubts = world.doubts.lock();
    for Unpinned {
        key,
        version,
        since,
    } in left
    {
        // A put replaces also a block that nobody can reach just then.
        let what =
            format!("the hard-pinned block of key {key}, version {version}, has left the pool");
        doubts.left(&history, key, since, what)?;
    }
    Ok(())
}

/// A node that takes blocks when another one begins to drain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taker {
    node: Incarnation,
    /// The blocks that the draining node has then.
    blocks: u64,
}

/// A node that takes the blocks of one that is drained.
pub(crate) fn takes_from(world: &World, drained: Incarnation) -> Option<Taker> {
    let leading = leading(world);
    let (_, pool) = leading.first()?;
    let members = pool.members.all();
    let mut others = members.iter().filter(|node| node.is_placeable());
    let other = others.find(|node| node.incarnation != drained && node.is_connected());
    let blocks = pool.stored_blocks().into_iter();
    let here = blocks.filter(|block| block.replicas.iter().any(|at| is_on(pool, at, drained)));
    Some(Taker {
        node: other?.incarnation,
        blocks: here.count() as u64,
    })
}

pub(crate) fn is_on(pool: &Pool, replica: &Replica, node: Incarnation) -> bool {
    let segments = pool.placement.segments();
    let segment = segments.get(replica.segment);
    segment.is_some_and(|segment| segment.node.incarnation == node)
}

/// A drained node does not leave most of its blocks behind where another one takes them all the while. A slow network
/// may cost some blocks all of their tries. A node with a disk writes its blocks there, within a budget. While nobody
/// leads, nobody moves blocks.
pub(crate) fn most_have_moved(
    world: &World,
    drained: usize,
    left: u64,
    taker: &Taker,
) -> Result<(), String> {
    let moves = world.plan.keeps_all && !world.plan.has_disks();
    let takes = |pool: &Pool| {
        let members = pool.members.all();
        let mut known = members.iter().filter(|one| one.incarnation == taker.node);
        known.any(|one| one.is_placeable() && one.is_connected())
    };
    let had = taker.blocks;
    let leaves_most = moves && had >= FEW && left * 2 > had;
    match leaves_most && leading(world).iter().any(|(_, pool)| takes(pool)) {
        true => Err(format!(
            "n{drained} leaves with {left} of {had} blocks, and {} had room",
            taker.node
        )),
        false => Ok(()),
    }
}

/// The key of a block that has its only place in the memory of this node.
pub(crate) fn only_on(pool: &Pool, node: Incarnation) -> Option<Key> {
    let copies = pool.stored_copies().into_iter();
    let copies: BTreeSet<Version> = copies.map(|copy| copy.version).collect();
    let is_there = |replica: &Replica| is_on(pool, replica, node);
    let mut blocks = pool.stored_blocks().into_iter();
    let only = blocks
        .find(|block| block.replicas.iter().all(is_there) && !copies.contains(&block.version));
    only.map(|block| block.key)
}

/// What a master says to a node that wants to leave: no block has its only replica there. Masters had found `found`
/// wrong replicas and copies before the node began to wait.
///
/// If nobody leads now, the pool counts as it was when the leader said so. The next leader may know of a later put.
pub(crate) fn nothing_left_on(world: &World, port: &NodePort, found: u64) -> Result<(), String> {
    // A wrong replica or copy counts as one until somebody finds it.
    if world.found_wrong() != found {
        return Ok(());
    }
    let left = match leading(world).first() {
        Some((_, pool)) => only_on(pool, port.node.incarnation()),
        None => world.net.answers.left_with(&port.life),
    };
    match left {
        Some(key) => Err(format!(
            "a leader has said that a node may leave which has the only replica of {key}"
        )),
        None => Ok(()),
    }
}

/// Why the pool is not at rest yet.
fn unrest(world: &World) -> Result<Arc<Pool>, String> {
    let leading = leading(world);
    let Some((number, pool)) = leading.first() else {
        return Err("nobody leads".to_owned());
    };
    let open = pool.reservations();
    if open > 0 {
        return Err(format!("{open} puts are open at m{number}"));
    }
    let transfers = pool.open_transfers();
    if transfers > 0 {
        return Err(format!("{transfers} transfers are open at m{number}"));
    }
    let tasks = pool.replica_tasks(&[]).into_iter();
    let running = tasks
        .filter(|task| task.state == TaskState::Running)
        .count();
    if running > 0 {
        return Err(format!("{running} tasks of replicas run at m{number}"));
    }
    let mut uses = pool.survey().uses.into_iter();
    if let Some(left) = uses.find(|one| matches!(one.holder, Holder::Pull | Holder::Load)) {
        return Err(format!("{left:?} is in use at m{number}"));
    }
    for segment in pool.placement.segments().iter() {
        if segment.quarantined() > 0 {
            return Err(format!(
                "{} bytes of segment {} are in quarantine",
                segment.quarantined(),
                segment.id
            ));
        }
    }
    for node in 0..world.plan.nodes {
        let Some(port) = world.net.node(node) else {
            return Err(format!("n{node} is down"));
        };
        if !port.node.is_connected() {
            return Err(format!("n{node} has no session"));
        }
        let mut ssd = world.ssds.get(node).into_iter();
        if ssd.any(|ssd| ssd.is_sound()) && !port.node.has_attached() {
            return Err(format!("the disk of n{node} is not attached"));
        }
        let census = port.node.census();
        if census.receives > 0 || census.tickets > 0 {
            return Err(format!("n{node} is not idle: {census:?}"));
        }
        let incarnation = port.node.incarnation();
        let members = pool.members.all();
        let known = members.iter().find(|one| one.incarnation == incarnation);
        if known.is_none_or(|known| !known.is_readable() || known.drains()) {
            return Err(format!("n{node} is not in service at m{number}"));
        }
        let mut ssd = world.ssds.get(node).into_iter();
        if ssd.any(|ssd| ssd.is_sound()) && !has_ready_medium(pool, node) {
            return Err(format!("m{number} does not use the disk of n{node}"));
        }
    }
    Ok(Arc::clone(pool))
}

/// Whether the leader reads a medium of the node, and writes it.
fn has_ready_medium(pool: &Pool, node: usize) -> bool {
    let name = format!("n{node}");
    let mut media = pool.media().into_iter();
    media.any(|medium| medium.record.node.0 == name && medium.state == "ready")
}

/// The leader's pool, once it has been at rest for `settled`.
pub(crate) async fn at_rest(world: &World, settled: Duration) -> Result<Arc<Pool>, String> {
    let begun = Instant::now();
    let mut at_rest: Option<Instant> = None;
    loop {
        match unrest(world) {
            Ok(pool) => {
                let since = *at_rest.get_or_insert_with(Instant::now);
                if since.elapsed() >= settled || world.has_failed() {
                    return Ok(pool);
                }
            }
            Err(why) if begun.elapsed() > REST || world.has_failed() => {
                return Err(format!("the pool does not come to rest: {why}"));
            }
            Err(_) => at_rest = None,
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// The leader's pool at rest, once the log has everything that the leader did. A load ends before its record is
/// durable: a leader that dies by then takes the block's place in memory with it, and the copy stays.
async fn logged_at_rest(world: &World) -> Result<Arc<Pool>, String> {
    let begun = Instant::now();
    loop {
        let pool = at_rest(world, Duration::ZERO).await?;
        let logged = pool.logged();
        let is_whole = logged.is_some_and(|logged| world.disk.ends_at(pool.epoch, logged));
        if is_whole || world.has_failed() {
            return Ok(pool);
        }
        if begun.elapsed() > REST {
            return Err("the pool is at rest, and the log lacks what its leader did".to_owned());
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// The end of a history: every call ends, the pool comes to rest, and it works.
pub(crate) async fn come_to_rest(world: &Arc<World>) -> Result<(), String> {
    let begun = Instant::now();
    while world.load.running.load(Ordering::Acquire) > 0 {
        if begun.elapsed() > CALLS_END {
            let running = world.load.running.load(Ordering::Acquire);
            return Err(format!("{running} calls have not ended"));
        }
        sleep(Duration::from_millis(20)).await;
    }
    let begun = Instant::now();
    let pool = at_rest(world, SETTLED).await?;
    if world.has_failed() {
        return Ok(());
    }
    world.trace.note(
        "----",
        format_args!(
            "at rest within {} ms, {} blocks",
            (begun.elapsed() - SETTLED).as_millis(),
            pool.blocks()
        ),
    );
    let life = Life::default();
    let client = connect(&world.net, 99, &life, world.plan.masters(), "last").await;
    for tenant in 0..world.plan.tenants.len() {
        if world.plan.keeps_all_of(tenant) && !may_lose(world) {
            all_is_there(world, &life, tenant).await?;
        }
    }
    nothing_comes_back(world, &life).await;
    tenants::have_their_settings(world, &pool)?;
    absence::is_forgotten(world, &pool)?;
    world.settle_tenants().await?;
    rest::quotas_are_reached(world).await?;
    rest::eviction_ends(world).await?;
    has_room(world, &client).await?;
    rest::soft_quotas_count(world).await?;
    intruders_find_nothing(world).await;
    world.a_node_leaves().await?;
    // First one that follows the log, then one that reads all of it.
    the_next_leader_knows_all(world, false).await?;
    the_next_leader_knows_all(world, true).await?;
    of_the_pool(world)
}

/// Whether a node may have lost blocks that had no other replica: with its memory, or by a wrong byte.
fn may_lose(world: &World) -> bool {
    let plan = &world.plan;
    let is_excused = world.left_early.load(Ordering::Acquire) || plan.noise.flipped_writes > 0;
    if is_excused || plan.drops_nodes() {
        return true;
    }
    let has = |is_it: &dyn Fn(&Fault) -> bool| plan.all_faults().any(is_it);
    let is_of_disk = |fault: &Fault| matches!(fault, Fault::Disk(..));
    let drains = has(&|fault| matches!(fault, Fault::Drain(..) | Fault::OutOfService(..)));
    // A disk that goes wrong takes nothing from memory, but for what a drained node wrote there.
    if drains && has(&|fault| fault.loss().is_some() && is_of_disk(fault)) {
        return true;
    }
    // Before the first of these faults has happened, nothing is lost.
    let loses = has(&|fault| fault.loss().is_some() && !is_of_disk(fault));
    loses && world.losses.load(Ordering::Acquire) > 0
}

/// Invariant 5: every acknowledged block is readable.
async fn all_is_there(world: &World, life: &Life, tenant: usize) -> Result<(), String> {
    let name_of_all = tenant_name(tenant);
    let client = connect(&world.net, 99, life, world.plan.masters(), &name_of_all).await;
    let keys = world.plan.keys_of(tenant);
    let stored = world.load.history.lock().stored();
    for key in stored.into_iter().filter(|key| keys.contains(key)) {
        match client.get(&name(key)).await {
            Ok(Some(_)) => {}
            Ok(None) => {
                return Err(format!(
                    "key {key} was acknowledged, nothing was evicted or removed, and it is gone"
                ));
            }
            Err(error) => return Err(format!("key {key} was acknowledged: {error}")),
        }
    }
    Ok(())
}

/// No block is there that was removed or replaced. The history judges each get.
async fn nothing_comes_back(world: &World, life: &Life) {
    // Nobody remembers a location any more.
    sleep(Duration::from_millis(world.plan.lease_ms) + SETTLED).await;
    for tenant in 0..world.plan.tenants.len() {
        let name_of_all = tenant_name(tenant);
        let client = connect(&world.net, 99, life, world.plan.masters(), &name_of_all).await;
        let task = Task {
            load: Arc::clone(&world.load),
            plan: Arc::clone(&world.plan),
            who: Process::Client(99),
            keys: world.plan.keys_of(tenant),
            keeps_all: world.plan.keeps_all_of(tenant),
            dice: Dice::new(
                world.plan.seed,
                Stream::Task(u64::from(u32::MAX), tenant as u64),
            ),
            client,
        };
        task.get_all().await;
    }
}

/// What readers once showed to nodes opens nothing any more. In some histories all signed locations have ended.
async fn intruders_find_nothing(world: &Arc<World>) {
    if world.plan.seed % 16 == 1 {
        sleep(LOCATIONS_END).await;
    }
    for node in 0..world.plan.nodes {
        Arc::clone(world).intrude(node).await;
    }
}

/// A leader that follows at rest has the same blocks at the same places. Its predecessor dies, or all masters die at
/// once.
async fn the_next_leader_knows_all(world: &Arc<World>, all_die: bool) -> Result<(), String> {
    let pool = logged_at_rest(world).await?;
    let before = all_of(&pool);
    let links = chains::links_of(&pool.stored_blocks());
    let epoch = pool.epoch;
    drop(pool);
    // Of other masters, which may have led before.
    let mut evicted = 0;
    if let Some((leader, _)) = leading(world).first() {
        for number in (0..world.plan.masters()).filter(|number| all_die || number == leader) {
            world.crash(Process::Master(number), Duration::ZERO);
        }
        evicted = world.evicted();
    }
    let pool = at_rest(world, Duration::ZERO).await?;
    if pool.epoch == epoch {
        return Err("a master that died still leads".to_owned());
    }
    // It may make room in a full memory.
    let evicted = world.evicted().saturating_sub(evicted);
    let after = all_of(&pool);
    // A small disk is a ring, and the new leader may write there again.
    let plan = &world.plan;
    let copies_stay = plan.disk_bytes >= RING
        && plan.noise.flipped_writes == 0
        && (0..plan.nodes).all(|node| is_right(plan, node));
    let mut lost: Vec<&String> = before.difference(&after).collect();
    lost.retain(|line| line.starts_with("block") || copies_stay && evicted == 0);
    let lost = lost.get(usize::try_from(evicted).unwrap_or(usize::MAX));
    // It may write a copy at once.
    let mut made = after.difference(&before);
    let made = made.find(|line| line.starts_with("block"));
    if let Some((child, parent)) = world.chains.lock().lost_at(&pool.stored_blocks(), &links) {
        return Err(format!(
            "the block of version {child} is not behind the one of version {parent} at the next leader"
        ));
    }
    match (lost, made) {
        (None, None) => Ok(()),
        (lost, made) => Err(format!(
            "the pool was at rest, and the next leader lacks {lost:?} and has {made:?}"
        )),
    }
}

/// Every block and every copy, with its places.
fn all_of(pool: &Pool) -> BTreeSet<String> {
    let blocks = lines(pool, "block", &pool.stored_blocks());
    let copies = lines(pool, "copy", &pool.stored_copies());
    blocks.into_iter().chain(copies).collect()
}

/// The room of each segment, for a reader of a failed history.
fn rooms(world: &World) -> String {
    let mut text = String::new();
    for (_, pool) in leading(world) {
        text += &format!("{} puts wait", pool.puts_waiting());
        for segment in pool.placement.segments().iter() {
            text += &format!(
                ", {} of {}: {} of {} bytes used, to {} at most, takes blocks: {}",
                segment.id,
                segment.node.name,
                segment.used(),
                segment.size,
                segment.limit(),
                segment.node.is_placeable()
            );
        }
    }
    text
}

/// Whether eviction may take every block of a pool at rest: none is pinned, and none is in a guaranteed share.
pub(crate) fn all_may_leave(plan: &Plan) -> bool {
    let has_share = |tenant: &Tenant| tenant.settings.get(Setting::Guaranteed).is_some();
    plan.pins.is_empty() && !plan.tenants.iter().any(has_share)
}

/// The largest block finds room, and comes back.
async fn has_room(world: &World, client: &Client) -> Result<(), String> {
    // Blocks that stay, or that others may not evict, may leave no room in one piece for the largest.
    let length = match all_may_leave(&world.plan) {
        true => world.plan.longest_block,
        false => world.plan.longest_block.min(4096),
    };
    match is_kept(world, client, 1_000_000, length).await? {
        true => Ok(()),
        false => Err("a block that was just put is absent".to_owned()),
    }
}

/// Puts a block of a new key, and gets it. False when it is gone by then.
async fn is_kept(world: &World, client: &Client, key: u64, length: u64) -> Result<bool, String> {
    let bytes = bytes_of(key, 1, usize::try_from(length).unwrap_or(17));
    match client.put(&name(key), bytes.clone()).await {
        Ok(PutOutcome::Stored { .. }) => {}
        Ok(PutOutcome::Present) => return Err("a key that nobody put is present".to_owned()),
        Err(error) => {
            return Err(format!(
                "a put into the pool at rest does not get room: {error}; {}",
                rooms(world)
            ));
        }
    }
    match client.get(&name(key)).await {
        Ok(Some(found)) if found == bytes => Ok(true),
        Ok(Some(_)) => Err("wrong bytes from the pool at rest".to_owned()),
        Ok(None) => Ok(false),
        Err(error) => Err(format!("a get from the pool at rest fails: {error}")),
    }
}
