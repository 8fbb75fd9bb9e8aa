//! Measures the cases, each in turns with its bound. The agents do the work.

mod bounds;
mod scenarios;
mod sets;

use super::agent::Handle;
use super::agent::protocol::{Answer, Command, Live, Order, Set, Work};
use super::cases::{Bound, Case, Copier, Metric, Place, Pool, SMALL, What};
use super::pairing::Pairs;
use super::pools::{Running, WINDOW_BYTES, fresh_room};
use super::report::{Cpu, Row};
use super::security::Material;
use super::usage;
use super::veth::Veth;
use super::window::{Measured, Window, now_ns};
use anyhow::{Context as _, bail};
use bounds::name_of;
use futures::future::{join_all, try_join_all};
use kvctl::cluster::LOOPBACK;
use kvctl::connection::Connection;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// Makes the libc of the near limits' process copy large blocks with non-temporal stores. The far process
/// makes the plain copies.
const STREAMING: (&str, &str) = (
    "GLIBC_TUNABLES",
    "glibc.cpu.x86_non_temporal_threshold=65536",
);

/// The polling time of a client that polls, as the client library advises.
const SPIN: Duration = Duration::from_micros(50);

/// The time from the command to the common start of several clients.
const START: Duration = Duration::from_millis(5);

/// Longer than any window: such a window ends by its number of calls.
const UNLIMITED: Duration = Duration::from_secs(3600);

/// The calls of a window of first writes. A single call would include the waking of all threads that take
/// part.
const FRESH_CALLS: u64 = 3;

/// The most blocks of one call of a fill.
const FILL_BATCH: u64 = 1024;

/// The settings of a run.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Pairs of each case.
    pub(crate) pairs: u32,
    /// Whether windows have a third of their length.
    pub(crate) quick: bool,
    /// The bytes that transfers cycle through on each side.
    pub(crate) span: u64,
    /// The size of each node's SSD medium, in bytes; `None` for nodes without one.
    pub(crate) ssd: Option<u64>,
    /// The time for which puts are measured after a node's death.
    pub(crate) node_loss: Duration,
    /// The connection options. With a master they name the existing pool.
    pub(crate) connection: Connection,
    /// The link between clients and daemons, and between the limits; `None` for loopback.
    pub(crate) veth: Option<Arc<Veth>>,
}

/// The processes of a run. Dropping it kills them.
#[derive(Debug)]
pub(crate) struct Runner {
    settings: Settings,
    seed: String,
    /// The near limits: sends, pings, and copies with non-temporal stores.
    near: Handle,
    /// The far limits: receives, answers, and makes plain copies.
    far: Handle,
    clients: Vec<Handle>,
    pools: HashMap<Pool, Running>,
    /// The faster way to copy, by the shape of the copy.
    fastest: HashMap<String, Copier>,
    /// The start of the next gets, by the tag of the set.
    cursors: HashMap<String, u64>,
    /// The files of guarded pools.
    material: Material,
    // Declared after the processes: their logs are in it.
    directory: TempDir,
}

/// The result of one side of a pair.
#[derive(Clone, Debug)]
struct Outcome {
    value: f64,
    cpu: Option<Cpu>,
}

impl Runner {
    /// Starts the two processes of the limits. Call it on the main thread.
    pub(crate) async fn start(settings: Settings) -> anyhow::Result<Self> {
        let directory =
            TempDir::with_prefix("kvbench-").context("cannot create a temporary directory")?;
        let seed = format!("kvbench {} {}", std::process::id(), now_ns());
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
        let material = Material::make(directory.path())?;
        let (cert, key) = material.pair();
        let listen = Command::Listen { host, cert, key };
        let Answer::Listens(address) = far.call(&listen).await? else {
            bail!("{} did not report a listening port", far.name());
        };
        let span = settings.span;
        for agent in [&near, &far] {
            let (far, ca) = (address, material.ca());
            agent.call(&Command::Reach { span, far, ca }).await?;
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
            material,
            directory,
        })
    }

    /// Measures a case. Its bound may be another case of `all`. Call it on the main thread.
    pub(crate) async fn run(&mut self, case: &Case, all: &[Case]) -> anyhow::Result<Row> {
        let veth = self.settings.veth.clone();
        // Clients that start in this scope, and this process's own calls, use the near namespace.
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
            return Row::new(case, "", &pairs, None);
        }
        self.prepare(case).await?;
        if let Some(other) = other {
            self.prepare(other).await?;
        }
        if let Some(value) = self.memory(case).await? {
            let mut pairs = Pairs::default();
            pairs.add(value, None);
            return Row::new(case, "", &pairs, None);
        }
        // One window is not measured: connections open and memory is touched.
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
        for number in 0..pairs_of(case, self.settings.pairs, self.settings.span) {
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
        Row::new(case, &limit, &pairs, Cpu::median(&cpus))
    }

    /// Stops all processes in order, and removes the run's blocks from an existing pool.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        let cleaned = self.clean().await;
        join_all(self.clients.into_iter().map(Handle::stop)).await;
        self.near.stop().await;
        self.far.stop().await;
        join_all(self.pools.into_values().map(Running::stop)).await;
        drop(self.directory);
        cleaned
    }

    /// Stops the pools that no coming case needs.
    pub(crate) async fn forget(&mut self, coming: &[Case]) -> anyhow::Result<()> {
        let needed: Vec<Pool> = coming
            .iter()
            .map(|case| self.pool(case.place.pool))
            .collect();
        let over: Vec<Pool> = self
            .pools
            .keys()
            .copied()
            // Cases of other pools have bounds in these pools.
            .filter(|pool| !matches!(pool, Pool::Main | Pool::Keys))
            .filter(|pool| !needed.contains(pool))
            .collect();
        for pool in over {
            for client in &self.clients {
                // The clients and an embedded node leave before the pool stops.
                client.call(&Command::Leave).await?;
            }
            if let Some(running) = self.pools.remove(&pool) {
                running.stop().await;
            }
        }
        Ok(())
    }

    /// The pool that takes its place in this run.
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

    /// The memory of a process, for the cases about memory.
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
                    like: running.connect(String::new(), case.place.way, true, Duration::ZERO),
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
            // Clients that read at the same time begin at different blocks.
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
        if let What::Put(_, batch) | What::PutRead(_, batch) | What::Remove(_, batch) = case.what {
            // A call beside a reader is not counted by the window.
            self.expect(pool, &set, (window.calls.max(1) + 1) * batch)?;
        }
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

    /// The length of one window of a case.
    fn window(&self, case: &Case, set: &Set) -> Window {
        let millis = match case.metric {
            _ if case.place.clients > 1 => 90,
            Metric::Rate | Metric::Cpu => 36,
            Metric::Keys => 24,
            Metric::P50 | Metric::Bytes => 15,
            // The number of calls ends the window: a 99th percentile needs many hundreds.
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
                // A third of the set at most, so puts reuse places that have been free for long.
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

/// The pairs of a case: those of the run, or as many as its pool has room for.
fn pairs_of(case: &Case, pairs: u32, span: u64) -> u32 {
    match case.what {
        What::Put(blocks, batch) if case.place.pool == Pool::Fresh => {
            // No place is written twice, and one window is not measured.
            let windows = fresh_room(span) / (FRESH_CALLS * batch * blocks.bytes);
            pairs.min(u32::try_from(windows.saturating_sub(1)).unwrap_or(u32::MAX))
        }
        _ => pairs,
    }
}

fn start_agent(
    name: &str,
    seed: &str,
    environment: &[(&str, &str)],
    directory: &TempDir,
) -> anyhow::Result<Handle> {
    let arguments = ["agent".into(), seed.into()];
    Handle::start(name, &arguments, environment, directory.path())
}

/// The name of the client of a place.
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

/// The name of the client that reads the blocks of another client's puts.
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
    /// The number of blocks with cached locations that take turns.
    const KNOWN: u64 = 64;
    // The pool of first writes has room for all. A place that a removal frees would be written again.
    let evicts = matches!(case.place.pool, Pool::Full | Pool::Fresh);
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

/// Whether processor time is reported by the bytes moved.
fn moves_bytes(case: &Case) -> bool {
    matches!(case.metric, Metric::Rate | Metric::Cpu)
}

/// The result of a window, in the metric's unit.
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
            // A node that moved bytes without any time was not read.
            cpu.client + cpu.node.filter(|node| *node > 0.0)?
        }
        Metric::Tail => first.p99_ns as f64 / first.p50_ns.max(1) as f64,
        Metric::Bytes | Metric::Seconds | Metric::Times => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::table;

    #[test]
    fn each_case_has_the_usual_number_of_pairs_whatever_the_span() {
        for span in [32 * MIB, 64 * MIB, 128 * MIB, 384 * MIB] {
            for case in table().iter().filter(|case| case.fits(span)) {
                assert_eq!(pairs_of(case, 9, span), 9, "{} at {span}", case.id);
            }
        }
        let fresh = |case: &Case| case.place.pool == Pool::Fresh;
        let fresh = table().into_iter().find(fresh).unwrap();
        let most = pairs_of(&fresh, 1000, 32 * MIB);
        assert!(most < 1000, "no place is written twice: {most}");
    }

    #[test]
    fn processor_time_without_that_of_the_node_is_no_result() {
        let case = table()
            .into_iter()
            .find(|case| case.id == "tcp/get-cpu/32x1MiB");
        let case = case.unwrap();
        let window = |of_node| Measured {
            calls: 1,
            spent_ns: 1,
            p50_ns: 1,
            p99_ns: 1,
            units: 100,
            begin_ns: 0,
            end_ns: 1,
            cpu_ns: vec![30, 10, of_node],
        };
        let value_of = |of_node| {
            let all = [window(of_node)];
            value(&case, &all, Some(&Cpu::of(&all, true, 1)))
        };
        assert_eq!(value_of(20), Some(0.5));
        assert_eq!(value_of(0), None);
    }
}
