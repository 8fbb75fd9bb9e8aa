//! Measures cases: each in turns with what bounds it, in processes that do what they are told.

mod bounds;
mod scenarios;
mod sets;

use super::agent::Handle;
use super::agent::protocol::{Answer, Command, Connect, Live, Order, Set, Work};
use super::cases::{Bound, Case, Copier, Metric, Place, Pool, SMALL, What};
use super::pairing::Pairs;
use super::pools::{Running, WINDOW_BYTES};
use super::report::{Cpu, Row};
use super::usage;
use super::veth::Veth;
use super::window::{Measured, Window, now_ns};
use crate::cluster::LOOPBACK;
use crate::connection::Connection;
use anyhow::{Context as _, bail};
use bounds::name_of;
use futures::future::{join_all, try_join_all};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// What makes the libc of the limits' process copy around the caches where blocks are large. Plain
/// copies are made by the other process, which is not told so.
const STREAMING: (&str, &str) = (
    "GLIBC_TUNABLES",
    "glibc.cpu.x86_non_temporal_threshold=65536",
);

/// How long a client polls that is to poll, as long as the client library advises.
const SPIN: Duration = Duration::from_micros(50);

/// How far ahead several clients are told when to begin.
const START: Duration = Duration::from_millis(5);

/// Longer than any window: what ends it is its count of calls.
const UNLIMITED: Duration = Duration::from_secs(3600);

/// How many first writes are a window: one alone would be measured with the waking of all who take part.
const FRESH_CALLS: u64 = 3;

/// The most blocks that one call of a fill puts.
const FILL_BATCH: u64 = 1024;

/// How the run is to be.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Pairs of each case.
    pub(crate) pairs: u32,
    /// Whether windows are a third as long.
    pub(crate) quick: bool,
    /// How many bytes transfers cycle through on each side.
    pub(crate) span: u64,
    /// How long puts are measured after a node's death.
    pub(crate) node_loss: Duration,
    /// How to reach pools; with a master, the pool that there is.
    pub(crate) connection: Connection,
    /// Between clients and daemons, and between the limits; without it all are on loopback.
    pub(crate) veth: Option<Arc<Veth>>,
}

/// What runs while cases are measured. Dropping it kills all of it.
#[derive(Debug)]
pub(crate) struct Runner {
    settings: Settings,
    seed: String,
    /// Sends, pings, and copies around the caches.
    near: Handle,
    /// Receives, answers, and copies plainly.
    far: Handle,
    clients: Vec<Handle>,
    pools: HashMap<Pool, Running>,
    /// The faster way to copy, by how.
    fastest: HashMap<String, Copier>,
    /// Where the next gets of a set begin.
    cursors: HashMap<String, u64>,
    // After the processes whose logs lie in it.
    directory: TempDir,
}

/// What came of one side of a pair.
#[derive(Clone, Debug)]
struct Outcome {
    value: f64,
    cpu: Option<Cpu>,
}

impl Runner {
    /// Starts the two processes that show limits. Call it on the main thread.
    pub(crate) async fn start(settings: Settings) -> anyhow::Result<Self> {
        let directory =
            TempDir::with_prefix("kvctl-bench-").context("cannot create a temporary directory")?;
        let seed = format!("kvctl bench {} {}", std::process::id(), now_ns());
        let agent = |name: &str, environment: &[(&str, &str)]| {
            start_agent(name, &seed, environment, &directory)
        };
        let veth = settings.veth.as_deref();
        let near = {
            let _inside = veth.map(Veth::enter_near).transpose()?;
            agent("limits", &[STREAMING])?
        };
        let far = {
            let _inside = veth.map(Veth::enter_far).transpose()?;
            agent("limits-far", &[])?
        };
        try_join_all([&near, &far].map(Handle::greeting)).await?;
        let host = veth.map_or(LOOPBACK, |_| Veth::far_address());
        let Answer::Listens(address) = far.call(&Command::Listen { host }).await? else {
            bail!("{} did not report a listening port", far.name());
        };
        let span = settings.span;
        for agent in [&near, &far] {
            let far = address;
            agent.call(&Command::Reach { span, far }).await?;
        }
        Ok(Self {
            settings,
            seed,
            near,
            far,
            clients: Vec::new(),
            pools: HashMap::new(),
            fastest: HashMap::new(),
            cursors: HashMap::new(),
            directory,
        })
    }

    /// Measures a case. `all` is where the case is found that bounds it. Call it on the main thread.
    pub(crate) async fn run(&mut self, case: &Case, all: &[Case]) -> anyhow::Result<Row> {
        let veth = self.settings.veth.clone();
        // Clients that are started meanwhile, and what this process asks of the pool.
        let _inside = veth.as_deref().map(Veth::enter_near).transpose()?;
        let other = match &case.bound {
            Bound::Case(id) | Bound::FlushAnd(id) => all.iter().find(|other| other.id == *id),
            _ => None,
        };
        let mut names = vec![client_name(case.place)];
        names.extend(other.map(|other| client_name(other.place)));
        let readers: Vec<String> = names.iter().map(|name| reader_name(name)).collect();
        names.extend(readers);
        for client in &self.clients {
            let clients = names.clone();
            client.call(&Command::Keep { clients }).await?;
        }
        if let Some(pairs) = self.scenario(case).await? {
            return Ok(Row::new(case, "", &pairs, None));
        }
        self.prepare(case).await?;
        if let Some(other) = other {
            self.prepare(other).await?;
        }
        if let Some(value) = self.memory(case).await? {
            let mut pairs = Pairs::default();
            pairs.add(value, None);
            return Ok(Row::new(case, "", &pairs, None));
        }
        // Once unmeasured: connections open, memory is touched.
        self.once(case).await?;
        let bare = self.bare_of(case).await?;
        let limit = match (&bare, other) {
            (Some(bare), None) => name_of(*bare),
            (Some(bare), Some(other)) => format!("{} + 1.5 x {}", name_of(*bare), other.id),
            (None, Some(other)) => other.id.clone(),
            (None, None) => String::new(),
        };
        self.bound(case, bare, other).await?;
        let (mut pairs, mut cpus) = (Pairs::default(), Vec::new());
        for number in 0..self.pairs_of(case) {
            let (outcome, bound) = if number % 2 == 0 {
                let bound = self.bound(case, bare, other).await?;
                (self.once(case).await?, bound)
            } else {
                let outcome = self.once(case).await?;
                (outcome, self.bound(case, bare, other).await?)
            };
            pairs.add(outcome.value, bound);
            cpus.extend(outcome.cpu);
        }
        Ok(Row::new(case, &limit, &pairs, Cpu::median(&cpus)))
    }

    /// Ends everything in order and leaves nothing in a pool that was there before.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        let cleaned = self.clean().await;
        join_all(self.clients.into_iter().map(Handle::stop)).await;
        self.near.stop().await;
        self.far.stop().await;
        join_all(self.pools.into_values().map(Running::stop)).await;
        drop(self.directory);
        cleaned
    }

    /// Ends the pools that none of the cases still to come needs.
    pub(crate) async fn forget(&mut self, coming: &[Case]) -> anyhow::Result<()> {
        let needed: Vec<Pool> = coming
            .iter()
            .map(|case| self.pool(case.place.pool))
            .collect();
        let over: Vec<Pool> = self
            .pools
            .keys()
            .copied()
            // Others are compared with what lies in them.
            .filter(|pool| !matches!(pool, Pool::Main | Pool::Keys))
            .filter(|pool| !needed.contains(pool))
            .collect();
        for pool in over {
            for client in &self.clients {
                // Connections to it and a node of it go before it does.
                client.call(&Command::Leave).await?;
            }
            if let Some(running) = self.pools.remove(&pool) {
                running.stop().await;
            }
        }
        Ok(())
    }

    /// The pool that stands for it in this run.
    fn pool(&self, pool: Pool) -> Pool {
        if self.settings.connection.master.is_some() && pool.may_be_foreign() {
            Pool::Main
        } else {
            pool
        }
    }

    fn running(&self, pool: Pool) -> anyhow::Result<&Running> {
        let pool = self.pool(pool);
        self.pools
            .get(&pool)
            .with_context(|| format!("no pool for {pool:?}"))
    }

    fn client(&self, number: usize) -> anyhow::Result<&Handle> {
        self.clients
            .get(number)
            .with_context(|| format!("no client process {number}"))
    }

    fn pairs_of(&self, case: &Case) -> u32 {
        let pairs = self.settings.pairs;
        match case.what {
            What::Put(blocks, batch) if case.place.pool == Pool::Fresh => {
                // No place is written twice, and one window is the unmeasured one.
                let windows = blocks.set(self.settings.span).slots / (FRESH_CALLS * batch);
                pairs.min(u32::try_from(windows.saturating_sub(1)).unwrap_or(u32::MAX))
            }
            _ => pairs,
        }
    }

    /// A figure of memory, for the cases that are about one.
    async fn memory(&self, case: &Case) -> anyhow::Result<Option<f64>> {
        let pool = case.place.pool;
        let value = match case.what {
            What::MasterMemory => {
                let running = self.running(pool)?;
                let master = running
                    .master()
                    .context("the process id of the daemon is unknown")?;
                let now = usage::resident(master).context("kvmaster has ended")?;
                let blocks: u64 = running.sets.values().map(|set| set.live.count()).sum();
                let more = now.anonymous.saturating_sub(running.baseline.anonymous);
                more as f64 / blocks.max(1) as f64
            }
            What::NodeMemory => {
                let nodes = self.running(pool)?.nodes();
                let node = nodes
                    .first()
                    .context("the process id of the daemon is unknown")?;
                let now = usage::resident(*node).context("kvstore-node has ended")?;
                (now.anonymous + now.files) as f64
            }
            What::ClientMemory => {
                let running = self.running(pool)?;
                let set = case
                    .what
                    .blocks(pool)
                    .and_then(|blocks| running.sets.get(&blocks.tag()))
                    .context("no block to get")?;
                let command = Command::ConnectMore {
                    like: Connect {
                        name: String::new(),
                        master: running.address().to_owned(),
                        way: case.place.way,
                        remembers: true,
                        spin: Duration::ZERO,
                    },
                    set: set.clone(),
                    count: 8,
                };
                match self.client(0)?.call(&command).await? {
                    Answer::PerConnection(bytes) => bytes,
                    other => bail!("unexpected reply of a client process: {other:?}"),
                }
            }
            _ => return Ok(None),
        };
        Ok(Some(value))
    }

    /// One window of a case.
    async fn once(&mut self, case: &Case) -> anyhow::Result<Outcome> {
        if let What::Machine(bare) = case.what {
            let value = self.bare(bare, case.metric).await?;
            return Ok(Outcome { value, cpu: None });
        }
        let pool = case.place.pool;
        let blocks = case.what.blocks(pool).context("the case has no blocks")?;
        let running = self.running(pool)?;
        let empty = || blocks.set(self.settings.span);
        let set = running
            .sets
            .get(&blocks.tag())
            .cloned()
            .unwrap_or_else(empty);
        let master = running.master();
        let nodes = running.nodes();
        let watch: Vec<u32> = master.into_iter().chain(nodes.iter().copied()).collect();
        let clients = case.place.clients;
        let begin_ns = if clients > 1 {
            now_ns() + super::window::nanos(START)
        } else {
            0
        };
        let window = self.window(case, &set);
        let cursor = self.cursors.get(&set.tag).copied().unwrap_or_default();
        let orders = (0..clients as u64).map(|number| {
            // Clients that read at once begin apart from each other.
            let from = cursor + set.live.count() * number / clients as u64;
            Order {
                client: client_name(case.place),
                set: set.clone(),
                work: work(case, from),
                window,
                watch: if number == 0 {
                    watch.clone()
                } else {
                    Vec::new()
                },
                begin_ns,
            }
        });
        let calls = self
            .clients
            .iter()
            .zip(orders)
            .map(async |(client, order)| measured(client.call(&Command::Work(order)).await?));
        let done = try_join_all(calls).await?;
        let mut all = Vec::new();
        for (of_one, live) in done {
            if matches!(
                case.what,
                What::Put(..) | What::PutRead(..) | What::Remove(..)
            ) {
                let set = Set {
                    live,
                    ..set.clone()
                };
                self.set_live(pool, set)?;
            }
            all.push(of_one);
        }
        if let (What::Get(_, batch), Some(first)) = (case.what, all.first()) {
            self.cursors
                .insert(set.tag.clone(), cursor + first.calls * batch);
        }
        let cpu = moves_bytes(case).then(|| Cpu::of(&all, master.is_some(), nodes.len()));
        Ok(Outcome {
            value: value(case, &all, cpu.as_ref()).context("the case produced no samples")?,
            cpu,
        })
    }

    /// How long one window of a case is.
    fn window(&self, case: &Case, set: &Set) -> Window {
        let millis = match case.metric {
            _ if case.place.clients > 1 => 90,
            Metric::Rate | Metric::Cpu => 36,
            Metric::Keys => 24,
            Metric::P50 | Metric::Bytes => 15,
            // The calls are counted: one in a hundred is to be among them many times.
            Metric::Tail | Metric::Seconds | Metric::Times => 60_000,
        };
        let millis = if self.settings.quick {
            millis / 3
        } else {
            millis
        };
        let calls = match case.what {
            What::Put(_, 1) if case.metric == Metric::Tail => 1000,
            What::Put(_, 1) if case.metric == Metric::P50 => 300,
            What::Put(_, _) if case.place.pool == Pool::Fresh => FRESH_CALLS,
            What::Put(blocks, batch)
            | What::PutRead(blocks, batch)
            | What::Remove(blocks, batch) => {
                // A third of the set at most, so that what is put lies where nothing was for long.
                let bytes = (set.slots * blocks.bytes / 3).min(WINDOW_BYTES);
                (bytes / (blocks.bytes * batch)).max(1)
            }
            _ => 4000,
        };
        Window {
            at_least: Duration::from_millis(millis),
            calls,
        }
    }
}

fn start_agent(
    name: &str,
    seed: &str,
    environment: &[(&str, &str)],
    directory: &TempDir,
) -> anyhow::Result<Handle> {
    let arguments = ["bench-agent".into(), seed.into()];
    Handle::start(name, &arguments, environment, directory.path())
}

/// What the client of a place is called in its process.
fn client_name(place: Place) -> String {
    let Place {
        pool,
        way,
        remembers,
        spins,
        ..
    } = place;
    format!("{pool:?}/{way:?}/{remembers}/{spins}")
}

/// What the client is called that reads what another one puts.
fn reader_name(client: &str) -> String {
    format!("{client}/reader")
}

fn measured(answer: Answer) -> anyhow::Result<(Measured, Live)> {
    match answer {
        Answer::Measured { measured, live } => Ok((measured, live)),
        other => bail!("unexpected reply of a benchmark process: {other:?}"),
    }
}

fn work(case: &Case, from: u64) -> Work {
    /// How many blocks take turns whose locations are known.
    const KNOWN: u64 = 64;
    let evicts = case.place.pool == Pool::Full;
    match case.what {
        What::Put(_, batch) => Work::Put {
            batch,
            evicts,
            reader: None,
        },
        What::PutRead(_, batch) => Work::Put {
            batch,
            evicts,
            reader: Some(reader_name(&client_name(case.place))),
        },
        What::Remove(_, batch) => Work::Remove { batch },
        What::Get(_, batch) => Work::Get {
            batch,
            from,
            among: 0,
        },
        What::GetKnown(_) => Work::Get {
            batch: 1,
            from: 0,
            among: KNOWN,
        },
        What::View(_) => Work::View { among: KNOWN },
        What::MatchPrefix(blocks) => Work::MatchPrefix { blocks },
        What::Exist { batch, lease } => Work::Exist { batch, lease },
        What::Machine(_)
        | What::MasterMemory
        | What::NodeMemory
        | What::ClientMemory
        | What::CrowdWait
        | What::CrowdEvicted
        | What::Restart
        | What::NodeLoss => Work::Exist {
            batch: 1,
            lease: false,
        },
    }
}

/// Whether what it moves is worth counting processor time by.
fn moves_bytes(case: &Case) -> bool {
    matches!(case.metric, Metric::Rate | Metric::Cpu)
}

/// What a window came to, in the metric's unit.
fn value(case: &Case, all: &[Measured], cpu: Option<&Cpu>) -> Option<f64> {
    let first = all.first()?;
    let units: u64 = all.iter().map(|measured| measured.units).sum();
    let seconds = match all {
        [one] => one.spent_ns as f64 / 1e9,
        several => {
            let begin = several.iter().map(|measured| measured.begin_ns).min()?;
            let end = several.iter().map(|measured| measured.end_ns).max()?;
            (end - begin) as f64 / 1e9
        }
    };
    Some(match case.metric {
        Metric::Rate => units as f64 / seconds / 1e9,
        Metric::P50 => first.p50_ns as f64 / 1e3,
        Metric::Keys => {
            let keys = match case.what {
                What::Put(..) | What::Remove(..) => units / SMALL,
                _ => units,
            };
            keys as f64 / seconds / 1e6
        }
        Metric::Cpu => {
            let cpu = cpu?;
            cpu.client + cpu.node?
        }
        Metric::Tail => first.p99_ns as f64 / first.p50_ns.max(1) as f64,
        Metric::Bytes | Metric::Seconds | Metric::Times => return None,
    })
}
