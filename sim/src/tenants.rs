//! Namespaces that share the pool: their settings, an administrator who sets, changes and deletes them, and the rules
//! that hold for them.

use crate::dice::{Dice, Stream};
use crate::history::Outcome;
use crate::life::Life;
use crate::load::connect;
use crate::plan::{Tenant, in_words, tenant_name};
use crate::sight::Sight;
use crate::world::World;
use kvpool_client::{Client, Namespace};
use kvpool_master::pool::audit::{Holder, Use};
use kvpool_master::pool::{NamespaceView, Pool};
use kvpool_types::{Code, Epoch, NamespaceSettings, SegmentId, Setting, Version};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// The number of the administrator's process.
const ADMINISTRATOR: usize = 98;
/// How long the administrator tries to change something.
const TRIES: Duration = Duration::from_secs(8);

/// How long copies may be under way.
const UNDER_WAY: Duration = Duration::from_secs(3);

/// A term, a namespace, and the label of what is counted.
type Place = (Epoch, String, &'static str);

/// What is known of the namespaces.
#[derive(Debug)]
pub(crate) struct Tenants {
    /// Held while the administrator changes something.
    changes: tokio::sync::Mutex<()>,
    dice: Dice,
    /// The settings that a master has acknowledged; none while a change is under way.
    acknowledged: Mutex<BTreeMap<usize, NamespaceSettings>>,
    /// What each namespace had of a quota's item in one term, and the quota, at the last look.
    seen: Mutex<BTreeMap<Place, (u64, Option<u64>)>>,
    /// The loads under way at the last look.
    loads: Mutex<u64>,
    moves: Mutex<Moves>,
    /// The quota of copies of each namespace in one term, since when, and the most copies it had then.
    media: Mutex<BTreeMap<(Epoch, String), MediaQuota>>,
}

/// The replicas that pulls make or have made, while their blocks may count twice.
#[derive(Debug, Default)]
struct Moves {
    pulled: BTreeMap<(SegmentId, u64), (u64, Version)>,
    /// The blocks at the last look, by their places.
    blocks: BTreeMap<(SegmentId, u64), Version>,
    /// Whether a namespace was above its hard quota at the last look.
    is_above: bool,
}

impl Moves {
    /// The bytes of the blocks that move. One that has moved stays at its former place too until the log has the
    /// removal there. If its new node is suspect by then, both replicas stay for a while.
    fn look(&mut self, pool: &Pool, uses: &[Use]) -> u64 {
        let place = |one: &Use| (one.segment, one.range.start);
        let all_blocks = || uses.iter().filter(|one| one.holder == Holder::Block);
        let blocks: BTreeMap<_, _> = all_blocks().map(|one| (place(one), one.version)).collect();
        // Whatever takes more bytes later heeds the quota. So a look at which all are below it ends the allowance.
        let is_above = std::mem::take(&mut self.is_above);
        let is_logging = pool.logged().is_none();
        self.pulled.retain(|at, (_, version)| {
            let is_there = blocks.get(at) == Some(version);
            let mut others = blocks.iter().filter(|(other, _)| *other != at);
            is_above && is_there && (is_logging || others.any(|(_, other)| other == version))
        });
        let before = std::mem::replace(&mut self.blocks, blocks);
        // A pull may begin and end between two looks.
        let has_moved = |one: &&Use| {
            let is_new = before.get(&place(one)) != Some(&one.version);
            is_new && before.values().any(|version| *version == one.version)
        };
        let pulls = uses.iter().filter(|one| one.holder == Holder::Pull);
        for pull in pulls.chain(all_blocks().filter(has_moved)) {
            let bytes = pull.range.end - pull.range.start;
            self.pulled.insert(place(pull), (bytes, pull.version));
        }
        self.pulled.values().map(|(bytes, _)| bytes).sum()
    }
}

/// See [`Tenants`].
#[derive(Clone, Copy, Debug)]
struct MediaQuota {
    hard: u64,
    since: Instant,
    most: u64,
}

impl Tenants {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            changes: tokio::sync::Mutex::default(),
            dice: Dice::new(seed, Stream::Administrator),
            acknowledged: Mutex::default(),
            seen: Mutex::default(),
            loads: Mutex::default(),
            moves: Mutex::default(),
            media: Mutex::default(),
        }
    }

    /// Copies stop at the hard quota of media. Those that were under way when it came end somewhat later.
    fn watch_media(&self, epoch: Epoch, view: &NamespaceView) -> Result<(), String> {
        let name = view.known.fields.name.to_string();
        let has = view.balance.media;
        let mut media = self.media.lock();
        let Some(hard) = view.known.settings.get(Setting::MediaHard) else {
            media.remove(&(epoch, name));
            return Ok(());
        };
        let new = MediaQuota {
            hard,
            since: Instant::now(),
            most: 0,
        };
        let quota = media.entry((epoch, name.clone())).or_insert(new);
        if quota.hard != hard {
            *quota = new;
        }
        if quota.since.elapsed() < UNDER_WAY {
            quota.most = quota.most.max(has);
        }
        match has > hard.max(quota.most) {
            true => Err(format!(
                "{name} has {has} on media, above its quota of {hard}"
            )),
            false => Ok(()),
        }
    }
}

impl Tenant {
    /// A namespace in a pool of `pool_bytes`.
    pub(crate) fn drawn(dice: &Dice, pool_bytes: u64, longest_block: u64) -> Self {
        let mut settings = NamespaceSettings::default();
        let hard = (pool_bytes * dice.between(20, 80) / 100).max(longest_block + 4096);
        if dice.chance(600) {
            settings.set(Setting::MemoryHard, Some(hard));
        }
        if dice.chance(300) {
            settings.set(Setting::BlocksHard, Some(dice.between(2, 20)));
        }
        if dice.chance(300) {
            settings.set(
                Setting::MemorySoft,
                Some(hard * dice.between(10, 100) / 100),
            );
        }
        if dice.chance(200) {
            let share = (pool_bytes / 5).min(hard);
            settings.set(Setting::Guaranteed, Some(share));
        }
        if dice.chance(400) {
            settings.set(Setting::Priority, Some(dice.below(10)));
        }
        Self {
            settings,
            keys: None,
        }
    }

    /// A namespace whose blocks all stay, because they fit its guaranteed share.
    pub(crate) fn keeper(pool_bytes: u64, nodes: u64, longest_block: u64) -> Option<Self> {
        let each = nodes * longest_block.next_multiple_of(4096);
        let keys = (pool_bytes / 4 / each).min(6);
        let share = keys * each;
        (keys > 0).then(|| Self {
            settings: NamespaceSettings::default()
                .with(Setting::Guaranteed, share)
                .with(Setting::Priority, 0),
            keys: Some(keys),
        })
    }

    /// Whether its blocks all stay.
    pub(crate) const fn keeps_all(&self) -> bool {
        self.keys.is_some()
    }
}

/// Tries for a while until `change` is done.
async fn insist<T, E: std::fmt::Display>(
    world: &World,
    what: &str,
    change: impl AsyncFn() -> Result<T, E>,
) -> Option<T> {
    let until = Instant::now() + TRIES;
    let dice = &world.tenants.dice;
    loop {
        // An administrator who has no patience leaves before the answer, and asks again.
        let patience = match dice.chance(400) {
            true => dice.micros(500, 12_000),
            false => TRIES,
        };
        match timeout(patience, change()).await {
            Ok(Ok(done)) => {
                world.note_admin(what);
                return Some(done);
            }
            Ok(Err(error)) => world.note_admin(&format!("{what}: {error}")),
            Err(_) => world.note_admin(&format!("{what}: the administrator gives up")),
        }
        if Instant::now() >= until || world.has_failed() {
            return None;
        }
        sleep(Duration::from_millis(100)).await;
    }
}

impl World {
    fn note_admin(&self, what: &str) {
        self.trace.note("admn", what);
    }

    async fn administrator(&self) -> Client {
        let life = Life::default();
        connect(
            &self.net,
            ADMINISTRATOR,
            &life,
            self.plan.masters(),
            "administrator",
        )
        .await
    }

    /// Creates the namespaces of the plan that have settings.
    pub(crate) async fn set_up_tenants(self: Arc<Self>) {
        if self.plan.settings_late_ms > 0 {
            sleep(Duration::from_millis(self.plan.settings_late_ms)).await;
        }
        let _one_at_a_time = self.tenants.changes.lock().await;
        let client = self.administrator().await;
        for (tenant, settings) in (0..).zip(self.plan.tenants.iter().map(|one| one.settings)) {
            if !settings.is_empty() {
                self.set(&client, tenant, settings).await;
            }
        }
    }

    /// Creates a namespace with these settings, in a pool at rest.
    pub(crate) async fn set_up(
        &self,
        name: &str,
        settings: &NamespaceSettings,
    ) -> Result<(), String> {
        let client = self.administrator().await;
        let fields = Namespace {
            name: name.to_owned(),
            ..Namespace::default()
        };
        let what = format!("{name} gets {}", in_words(settings));
        let created = insist(self, &what, async || {
            client.create_namespace(fields.clone(), settings).await
        });
        let created = created.await.map(drop);
        created.ok_or_else(|| format!("{name} cannot be created in a pool at rest"))
    }

    async fn set(&self, client: &Client, tenant: usize, settings: NamespaceSettings) {
        let name = tenant_name(tenant);
        self.tenants.acknowledged.lock().remove(&tenant);
        let what = format!("{name} gets {}", in_words(&settings));
        let fields = Namespace {
            name: name.clone(),
            ..Namespace::default()
        };
        let changed = insist(self, &what, async || {
            client.create_namespace(fields.clone(), &settings).await?;
            let settings_of_none = Setting::ALL
                .iter()
                .filter(|one| settings.get(**one).is_none());
            let clear: Vec<Setting> = settings_of_none.copied().collect();
            client.change_namespace(&name, &settings, &clear).await
        });
        if let Some(changed) = changed.await {
            let mut acknowledged = self.tenants.acknowledged.lock();
            acknowledged.insert(tenant, changed.settings);
        }
    }

    /// Gives a namespace another hard quota.
    pub(crate) async fn change_quota(self: Arc<Self>, tenant: usize, hard: u64) {
        let _one_at_a_time = self.tenants.changes.lock().await;
        let Some(known) = self.plan.tenants.get(tenant) else {
            return;
        };
        let mut settings = known.settings;
        settings.set(Setting::MemoryHard, Some(hard));
        for lower in [Setting::MemorySoft, Setting::Guaranteed] {
            let value = settings.get(lower);
            settings.set(lower, value.map(|value| value.min(hard)));
        }
        let client = self.administrator().await;
        self.set(&client, tenant, settings).await;
    }

    /// Deletes a namespace with its blocks, and creates it again after `away`.
    pub(crate) async fn delete_tenant(self: Arc<Self>, tenant: usize, away: Duration) {
        let _one_at_a_time = self.tenants.changes.lock().await;
        let client = self.administrator().await;
        let name = tenant_name(tenant);
        self.tenants.acknowledged.lock().remove(&tenant);
        let keys: Vec<u64> = self.plan.keys_of(tenant).collect();
        let removals: Vec<(u64, u64)> = {
            let mut history = self.load.history.lock();
            let begun = keys
                .iter()
                .map(|key| (*key, history.begin(*key, None, true)));
            begun.collect()
        };
        let what = format!("{name} is deleted");
        let deleted = insist(&self, &what, async || {
            match client.delete_namespace(&name, true).await {
                // An earlier try has deleted it, or goes on. Or nobody has created it yet.
                Err(unknown) if unknown.code == Code::UnknownNamespace => {
                    self.note_admin(&format!("{name} is unknown"));
                    Ok(false)
                }
                deleted => deleted.map(|_blocks| true),
            }
        });
        let is_done = deleted.await == Some(true);
        let end = |outcome: Outcome| {
            for (key, number) in &removals {
                self.load.history.lock().end(*key, *number, outcome);
            }
        };
        if is_done {
            end(Outcome::Done(Instant::now()));
        }
        sleep(away).await;
        let settings = self.plan.tenants.get(tenant).map(|one| one.settings);
        self.set(&client, tenant, settings.unwrap_or_default())
            .await;
        if !is_done {
            // A deletion that goes on ends before the namespace can be created again.
            end(Outcome::Unknown);
        }
    }

    /// Once the pool is at rest, every namespace takes its settings.
    pub(crate) async fn settle_tenants(&self) -> Result<(), String> {
        let _one_at_a_time = self.tenants.changes.lock().await;
        let client = self.administrator().await;
        for (tenant, settings) in (0..).zip(self.plan.tenants.iter().map(|one| one.settings)) {
            self.set(&client, tenant, settings).await;
            if !self.tenants.acknowledged.lock().contains_key(&tenant) {
                let name = tenant_name(tenant);
                return Err(format!(
                    "{name} does not take its settings in a pool at rest"
                ));
            }
        }
        Ok(())
    }

    /// Whether blocks of a tenant may be put: one that keeps all has its share before its first block.
    pub(crate) fn is_ready(&self, tenant: usize) -> bool {
        let keeps = self.plan.tenants.get(tenant).is_some_and(Tenant::keeps_all);
        !keeps || self.tenants.acknowledged.lock().contains_key(&tenant)
    }
}

/// What holds for namespaces at every moment: none passes its hard quotas, except by blocks that move.
pub(crate) fn keep_their_rules(world: &World, sight: &Sight<'_>) -> Result<(), String> {
    let (pool, uses) = (sight.pool, &sight.survey.uses);
    let (views, _) = pool.namespaces_after("", usize::MAX);
    // A block that moves counts twice, and no quota holds it back.
    let moving = world.tenants.moves.lock().look(pool, uses);
    // A load that began before the quota ends with a block more.
    let loads = uses.iter().filter(|one| one.holder == Holder::Load).count() as u64;
    let loads_before = std::mem::replace(&mut *world.tenants.loads.lock(), loads);
    let mut seen = world.tenants.seen.lock();
    for view in views {
        let balance = view.balance;
        let name = view.known.fields.name.to_string();
        let place = (pool.epoch, name, "blocks that stay");
        let mut keepers = (0..).zip(&world.plan.tenants);
        if keepers.any(|(tenant, one)| one.keeps_all() && tenant_name(tenant) == place.1) {
            let now = (balance.blocks, None);
            let (had, _) = seen.insert(place, now).unwrap_or_default();
            if balance.blocks < had && world.losses.load(Ordering::Acquire) == 0 {
                return Err(format!(
                    "a namespace within its guaranteed share had {had} blocks, and has {}",
                    balance.blocks
                ));
            }
        }
        for (setting, has, more) in [
            (Setting::MemoryHard, balance.memory, moving),
            (
                Setting::BlocksHard,
                balance.blocks + balance.puts,
                loads_before,
            ),
        ] {
            let name = view.known.fields.name.to_string();
            let place = (pool.epoch, name, setting.label());
            let hard = view.known.settings.get(setting);
            let (had, before) = seen.get(&place).copied().unwrap_or((has, hard));
            if setting == Setting::MemoryHard && hard.is_some_and(|hard| has > hard) {
                world.tenants.moves.lock().is_above = true;
            }
            // A quota that is new may be passed already.
            if let Some(hard) = hard.filter(|hard| before == Some(*hard))
                && has > hard.max(had) + more
            {
                return Err(format!(
                    "{} has {has}, above its {setting} of {hard}; it had {had}",
                    place.1
                ));
            }
            // What moves now counts once again when it has moved.
            let kept = match setting {
                Setting::MemoryHard if before == hard => has.min(had),
                _ => has,
            };
            seen.insert(place, (kept, hard));
        }
        world.tenants.watch_media(pool.epoch, &view)?;
    }
    Ok(())
}

/// What masters acknowledged is there at the end.
pub(crate) fn have_their_settings(world: &World, pool: &Pool) -> Result<(), String> {
    for (tenant, settings) in world.tenants.acknowledged.lock().iter() {
        let name = tenant_name(*tenant);
        let held = pool.namespace_view(&name).map(|view| view.known.settings);
        if held != Some(*settings) {
            return Err(format!(
                "{name} was given {settings:?} and has {held:?} at the end"
            ));
        }
    }
    Ok(())
}
