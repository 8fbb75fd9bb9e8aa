//! What holds for the eviction of namespaces in a pool at rest.

use crate::checks::{all_may_leave, leading};
use crate::dice::{Dice, Stream};
use crate::history::bytes_of;
use crate::life::Life;
use crate::load::{connect, name};
use crate::plan::{DiskFault, Fault, Plan, tenant_name};
use crate::world::World;
use kvpool_client::{Client, PutBlock, PutOptions, Region};
use kvpool_master::pool::Pool;
use kvpool_types::{NamespaceSettings, Setting};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long eviction takes at most once no lease is left.
const EVICTED: Duration = Duration::from_secs(2);
/// How long the pool settles after a put.
const SETTLED: Duration = Duration::from_millis(700);
/// How long nothing is evicted then.
const CALM: Duration = Duration::from_millis(1_200);
/// The length of the blocks that fill memory: any block that leaves gives room for one.
const LENGTH: usize = 4096;
/// The blocks of a namespace that leaves first, and of one that leaves last.
const BLOCKS: usize = 6;
/// The blocks of one put.
const BATCH: usize = 8;
/// The bytes of a pool that is filled. More would take long.
const SMALL: u64 = 3 << 20;
/// In so many bytes the blocks of both namespaces and of a put find room, also where free room is in pieces.
const ROOMY: u64 = 2 * (2 * BLOCKS + BATCH) as u64 * LENGTH as u64;

impl Plan {
    /// From a stream of its own: the administrator comes late, when there are blocks already.
    pub(crate) fn draw_late_settings(&mut self) {
        let dice = Dice::new(self.seed, Stream::LateSettings);
        if self.has_settings() && dice.chance(400) {
            self.settings_late_ms = dice.between(0, 2_000);
        }
    }

    /// From a stream of its own: the copies of some namespaces have a hard quota.
    pub(crate) fn draw_media_quotas(&mut self) {
        let dice = Dice::new(self.seed, Stream::MediaQuotas);
        // Copies to a disk that stalls are under way for as long.
        let is_stall = |fault: &Fault| matches!(fault, Fault::Disk(_, DiskFault::Stalls, _));
        let stalls = self.all_faults().any(is_stall);
        if !self.has_disks() || self.keeps_all || stalls || !dice.chance(300) {
            return;
        }
        let all = self.keys * self.longest_block / 2;
        let least = 2 * self.longest_block + 8192;
        for tenant in self.tenants.iter_mut().filter(|one| !one.keeps_all()) {
            if dice.chance(600) {
                let hard = (all * dice.between(5, 50) / 100).max(least);
                tenant.settings.set(Setting::MediaHard, Some(hard));
            }
        }
    }
}

/// The leader of a pool at rest.
fn leader(world: &World) -> Result<std::sync::Arc<Pool>, String> {
    let pool = leading(world).into_iter().next();
    pool.map(|(_, pool)| pool)
        .ok_or_else(|| "nobody leads a pool at rest".to_owned())
}

/// The first namespace with more in memory than its hard quotas allow.
fn above_hard(pool: &Pool) -> Option<String> {
    let (views, _) = pool.namespaces_after("", usize::MAX);
    views.into_iter().find_map(|view| {
        let (has, known) = (view.balance, view.known);
        let limits = [
            (Setting::MemoryHard, has.memory),
            (Setting::BlocksHard, has.blocks),
        ];
        limits.into_iter().find_map(|(setting, has)| {
            let hard = known.settings.get(setting).filter(|hard| has > *hard)?;
            let name = &known.fields.name;
            Some(format!("{name} has {has}, above its {setting} of {hard}"))
        })
    })
}

/// Eviction brings every namespace below its hard quotas, once no lease is left.
pub(crate) async fn quotas_are_reached(world: &World) -> Result<(), String> {
    let until = Instant::now() + Duration::from_millis(world.plan.lease_ms) + EVICTED;
    loop {
        let Some(above) = above_hard(&*leader(world)?) else {
            return Ok(());
        };
        if Instant::now() > until {
            return Err(format!("at rest {above}"));
        }
        sleep(Duration::from_millis(40)).await;
    }
}

/// Once a put of each namespace has its room, nothing more is evicted.
pub(crate) async fn eviction_ends(world: &World) -> Result<(), String> {
    let life = Life::default();
    for tenant in 0..world.plan.tenants.len() {
        if world.plan.keeps_all_of(tenant) {
            continue;
        }
        let name = tenant_name(tenant);
        let client = connect(&world.net, 99, &life, world.plan.masters(), &name).await;
        put(&client, 900..901, 64).await;
    }
    sleep(SETTLED).await;
    let before = world.evicted();
    sleep(CALM).await;
    let after = world.evicted();
    match before == after {
        true => Ok(()),
        false => Err(format!(
            "{} blocks were evicted in a pool at rest, where nobody needs room",
            after - before
        )),
    }
}

/// Puts blocks of these keys. Says how many are stored.
async fn put(client: &Client, keys: std::ops::Range<u64>, length: usize) -> usize {
    let blocks = keys.map(|key| {
        let bytes = bytes_of(key, 1, length);
        PutBlock::new(name(key), Region::from(bytes).whole())
    });
    let options = PutOptions::default();
    let put = client.batch_put(blocks.collect(), &options);
    let outcomes = put.await.into_iter();
    outcomes.filter(Result::is_ok).count()
}

/// Whether each segment takes at least so many bytes.
fn is_roomy(pool: &Pool) -> bool {
    let segments = pool.placement.segments();
    segments.iter().all(|one| one.limit() >= ROOMY)
}

/// Memory is filled. The blocks of a namespace within its soft quota stay while another is above its own.
pub(crate) async fn soft_quotas_count(world: &World) -> Result<(), String> {
    let plan = &world.plan;
    if plan.nodes > 1 || plan.segments > 1 || plan.segment_bytes > SMALL {
        // Somebody may need room of one segment.
        return Ok(());
    }

    if plan.has_disks() {
        // A block may wait for its copy, and others may not leave.
        return Ok(());
    }
    let life = Life::default();
    // Otherwise a put may rightly find no room.
    let has_room = all_may_leave(plan) && is_roomy(&*leader(world)?);
    let soft = 2 * LENGTH as u64;
    let mut clients = Vec::new();
    for (name, quota) in [("within", 1 << 30), ("above", soft)] {
        let settings = NamespaceSettings::default().with(Setting::MemorySoft, quota);
        world.set_up(name, &settings).await?;
        let client = connect(&world.net, 99, &life, plan.masters(), name).await;
        let stored = put(&client, 1..1 + BLOCKS as u64, LENGTH).await;
        if stored < BLOCKS && has_room {
            return Err(format!(
                "{stored} of {BLOCKS} blocks of {name} find room in a pool at rest whose blocks may all leave"
            ));
        }
        if stored < BLOCKS {
            return Ok(());
        }
        clients.push(client);
    }
    let pool = leader(world)?;
    let held = |name: &str| {
        pool.namespace_view(name)
            .map_or(0, |view| view.balance.memory)
    };
    let within = held("within");
    let filler = connect(&world.net, 99, &life, plan.masters(), "filler").await;
    for first in (1..plan.segment_bytes / LENGTH as u64).step_by(BATCH) {
        // Names of keys repeat after a thousand of them.
        let stored = put(&filler, first..first + BATCH as u64, LENGTH).await;
        if held("above") <= soft {
            return Ok(());
        }
        if stored == 0 && has_room {
            return Err(format!(
                "a put finds no room in a pool at rest, where a namespace has {} above its soft quota of {soft}",
                held("above")
            ));
        }
        if stored == 0 {
            return Ok(());
        }
        // Room in one piece may cost a neighbour whatever its quota.
        if held("within") < within / 2 {
            return Err(format!(
                "most blocks within a soft quota left before those of a namespace with {}, above its own of {soft}",
                held("above")
            ));
        }
    }
    Ok(())
}
