//! One history: the processes of a plan, its faults, and the checks.

mod departure;
mod faults;
mod full_memory;
mod silence;

use crate::chains::Chains;
use crate::checks;
use crate::clock::MachineClock;
use crate::copies::Copies;
use crate::dice::{Dice, Stream, generator};
use crate::doubts::Doubts;
use crate::drains::{Stays, Unheard};
use crate::entropy;
use crate::history::History;
use crate::kept::Kept;
use crate::leaderless::Leaderless;
use crate::life::Life;
use crate::link::Dialer;
use crate::load::{Load, Task, Touch, connect};
use crate::master::Master;
use crate::net::{Net, NodePort, master_address, node_address};
use crate::pins::Pins;
use crate::plan::{Departs, Plan, Process, tenant_name};
use crate::replicas::Replicas;
use crate::ssd::Ssd;
use crate::store::Disk;
use crate::successor::{self, Successors};
use crate::tenants::Tenants;
use crate::trace::Trace;
use kvpool_master::clock::{BootInstant, Clock};
use kvpool_seams::simulation::{Machine, enter};
use kvpool_store_node::simulation::{self as store_node, Node, Setup};
use kvpool_types::{HostId, Incarnation, Length, SegmentId};
use parking_lot::Mutex;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Once};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// How often the rules of the whole pool are checked.
const CHECK: Duration = Duration::from_millis(40);
/// A history takes less than a second. One that takes so much longer waits for a lock that it has.
const MOST_REAL_TIME: Duration = Duration::from_secs(120);
/// The longest time at rest, which is simulated.
const RESTS: Duration = Duration::from_secs(600);
/// The rule that a history breaks which takes too long.
pub(crate) const HANGS: &str = "the history does not end: a thread waits for itself";

/// What a history came to.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The first rule that was broken.
    pub violation: Option<String>,
    /// What happened, a line an event.
    pub trace: Vec<String>,
    /// Simulated time in milliseconds.
    pub simulated_ms: u64,
    /// Messages, and requests to the store.
    pub events: u64,
    /// Puts that were acknowledged.
    pub puts: u64,
    /// Gets that were hits.
    pub hits: u64,
    /// Gets that were misses.
    pub misses: u64,
    /// Operations that failed.
    pub failures: u64,
    /// Blocks that were written to disks.
    pub disk_writes: u64,
    /// Reads of disks.
    pub disk_reads: u64,
    /// Drained nodes that left without the only replica of a block.
    pub drains: u64,
}

thread_local! {
    /// What panicked on this thread.
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static IS_SIMULATED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Notes panics of the simulation's threads instead of printing them.
fn watch_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if IS_SIMULATED.get() {
                PANICS.with_borrow_mut(|panics| panics.push(panic.to_string()));
            } else {
                others(panic);
            }
        }));
    });
}

/// Runs the history of a plan, on a thread of its own: a plan gives the same history on every machine.
pub fn run(plan: &Plan) -> Report {
    watch_panics();
    let plan = Arc::new(plan.clone());
    let (done, ended) = std::sync::mpsc::channel();
    let thread = std::thread::Builder::new()
        .name(format!("seed {}", plan.seed))
        .stack_size(8 << 20)
        .spawn(move || {
            entropy::seed_thread(plan.seed);
            IS_SIMULATED.set(true);
            let report = catch_unwind(AssertUnwindSafe(|| run_here(&plan)));
            let report = report.unwrap_or_else(|_| Report {
                violation: Some(PANICS.with_borrow(|panics| panics.join("; "))),
                ..Report::default()
            });
            // The other end waits until now, or has given up.
            let _given_up = done.send(report);
        });
    let broken = |what: String| Report {
        violation: Some(what),
        ..Report::default()
    };
    let thread = match thread {
        Ok(thread) => thread,
        Err(error) => return broken(format!("no thread: {error}")),
    };
    match ended.recv_timeout(MOST_REAL_TIME) {
        Ok(report) => match thread.join() {
            Ok(()) => report,
            Err(_) => broken("the simulator panicked at its end".to_owned()),
        },
        Err(RecvTimeoutError::Disconnected) => broken("the simulator panicked".to_owned()),
        // The thread is left behind.
        Err(RecvTimeoutError::Timeout) => broken(HANGS.to_owned()),
    }
}

fn run_here(plan: &Arc<Plan>) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            return Report {
                violation: Some(format!("no runtime: {error}")),
                ..Report::default()
            };
        }
    };
    let local = LocalSet::new();
    local.block_on(&runtime, async {
        let begun = Instant::now();
        let _entered = enter(Machine {
            now: Box::new(move || Duration::from_secs(100) + begun.elapsed()),
            generator: Box::new(generator(plan.seed, Stream::Seams)),
        });
        let world = World::new(plan);
        let ended = world.run().await;
        world.report(ended)
    })
}

/// The processes and what they share.
pub(crate) struct World {
    pub(crate) plan: Arc<Plan>,
    pub(crate) trace: Arc<Trace>,
    pub(crate) net: Arc<Net>,
    pub(crate) disk: Arc<Disk>,
    pub(crate) load: Arc<Load>,
    /// The disks of the nodes.
    pub(crate) ssds: Vec<Arc<Ssd>>,
    clocks: Vec<Arc<MachineClock>>,
    masters: Mutex<BTreeMap<usize, Arc<Master>>>,
    nodes: Mutex<BTreeMap<usize, Life>>,
    clients: Mutex<BTreeMap<usize, Life>>,
    lives: AtomicU64,
    /// Who makes the calls of ambushes.
    touchers: Mutex<BTreeMap<usize, mpsc::UnboundedSender<Touch>>>,
    /// How often an intruder came.
    pub(crate) visits: AtomicU64,
    has_healed: AtomicBool,
    /// The life of a node to which each segment's id was given first.
    pub(crate) segments: Mutex<BTreeMap<SegmentId, Incarnation>>,
    /// How many hundredths of its memory each node has.
    memory: Mutex<BTreeMap<usize, u64>>,
    /// What is known of the namespaces.
    pub(crate) tenants: Tenants,
    /// The chains that were seen in the pool.
    pub(crate) chains: Mutex<Chains>,
    /// The nodes of each block's replicas.
    pub(crate) replicas: Mutex<Replicas>,
    /// Blocks that nothing takes.
    pub(crate) kept: Mutex<Kept>,
    /// How long nobody has led.
    pub(crate) leaderless: Mutex<Leaderless>,
    /// The blocks in the memory of a node that drains.
    pub(crate) stays: Mutex<Stays>,
    /// The drained nodes that have not heard that they may leave.
    pub(crate) unheard: Mutex<Unheard>,
    /// The copies that were seen on disks.
    pub(crate) copies: Mutex<Copies>,
    /// What has left while puts of its key ran.
    pub(crate) doubts: Mutex<Doubts>,
    /// The hard-pinned blocks that were seen.
    pub(crate) pins: Mutex<Pins>,
    /// What the next leader would have.
    pub(crate) successors: Mutex<Successors>,
    /// How many nodes lost their memory, with blocks that had perhaps no other replica.
    pub(crate) losses: AtomicU64,
    /// When blocks last left with a node.
    lost_last: Mutex<Option<Instant>>,
    /// Whether a master that is dead had evicted a block.
    pub(crate) has_evicted: AtomicBool,
    /// How many wrong replicas and copies the masters found that are dead.
    found_by_dead: AtomicU64,
    /// Nodes that left once all of their blocks were elsewhere.
    pub(crate) saved: AtomicU64,
    /// Whether a node left before all of its blocks were moved.
    pub(crate) left_early: AtomicBool,
}

impl World {
    fn new(plan: &Arc<Plan>) -> Arc<Self> {
        let trace = Arc::new(Trace::new());
        let net = Net::new(plan, &trace);
        // A reader may use a location until its lease ends; a fail-over takes the rest.
        let grace = Duration::from_millis(plan.lease_ms) + Duration::from_secs(4);
        let full = Duration::from_millis(plan.full_ms());
        let clocks = (0u64..).zip(&plan.drift);
        Arc::new(Self {
            plan: Arc::clone(plan),
            load: Arc::new(Load {
                net: Arc::clone(&net),
                history: Mutex::new(History::new(grace, full)),
                whole: Mutex::default(),
                violations: Mutex::default(),
                is_over: AtomicBool::new(false),
                running: AtomicU64::new(0),
                puts: AtomicU64::new(0),
                hits: AtomicU64::new(0),
                misses: AtomicU64::new(0),
                failures: AtomicU64::new(0),
            }),
            disk: Disk::new(plan.electing > 0, plan.seed, &net.ambushes),
            clocks: clocks
                .map(|(number, ppm)| Arc::new(MachineClock::new(*ppm, 1_000_000 * (number + 1))))
                .collect(),
            ssds: (0..if plan.has_disks() { plan.nodes } else { 0 })
                .map(|node| Ssd::new(node, plan.disk_bytes, &net))
                .collect(),
            trace,
            net,
            masters: Mutex::default(),
            nodes: Mutex::default(),
            clients: Mutex::default(),
            lives: AtomicU64::new(0),
            touchers: Mutex::default(),
            visits: AtomicU64::new(0),
            has_healed: AtomicBool::new(false),
            segments: Mutex::default(),
            memory: Mutex::default(),
            tenants: Tenants::new(plan.seed),
            chains: Mutex::default(),
            replicas: Mutex::default(),
            kept: Mutex::default(),
            leaderless: Mutex::default(),
            stays: Mutex::default(),
            unheard: Mutex::default(),
            copies: Mutex::default(),
            doubts: Mutex::default(),
            pins: Mutex::default(),
            successors: Mutex::default(),
            losses: AtomicU64::new(0),
            lost_last: Mutex::default(),
            has_evicted: AtomicBool::default(),
            found_by_dead: AtomicU64::new(0),
            saved: AtomicU64::new(0),
            left_early: AtomicBool::new(false),
        })
    }

    fn report(&self, ended: Result<(), String>) -> Report {
        self.net.end();
        let load = &self.load;
        let mut violations = std::mem::take(&mut *load.violations.lock());
        violations.append(&mut self.net.violations.lock());
        let panics = PANICS.with_borrow_mut(std::mem::take);
        let first = panics.into_iter().chain(violations).next();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Report {
            violation: first.or(ended.err()),
            simulated_ms: self.trace.now(),
            trace: self.trace.take(),
            events: count(&self.net.messages) + self.disk.appends(),
            puts: count(&load.puts),
            hits: count(&load.hits),
            misses: count(&load.misses),
            failures: count(&load.failures),
            disk_writes: self.ssds.iter().map(|ssd| count(&ssd.writes)).sum(),
            disk_reads: self.ssds.iter().map(|ssd| count(&ssd.reads)).sum(),
            drains: count(&self.saved),
        }
    }

    /// The clock of a master's machine.
    pub(crate) fn clock_of(&self, master: usize) -> Option<Arc<MachineClock>> {
        self.clocks.get(master).cloned()
    }

    /// The time of a master's machine.
    pub(crate) fn time_at(&self, master: usize) -> Option<BootInstant> {
        self.clocks.get(master).map(|clock| clock.now())
    }

    /// The masters that run and were not asked to end.
    pub(crate) fn standing(&self) -> Vec<(usize, Life)> {
        let masters = self.masters.lock();
        let standing = masters.values().filter(|master| master.stands());
        let lives = standing.map(|master| (master.number, master.life.clone()));
        lives.collect()
    }

    /// The blocks that the living masters have evicted.
    pub(crate) fn evicted(&self) -> u64 {
        let masters = self.masters.lock();
        let all = masters.values();
        all.map(|master| master.seat.metrics.blocks_evicted()).sum()
    }

    async fn run(self: &Arc<Self>) -> Result<(), String> {
        for master in 0..self.plan.masters() {
            self.start_master(master)?;
        }
        for node in 0..self.plan.nodes {
            self.start_node(node)?;
        }
        for client in 0..self.plan.clients {
            self.start_client(client);
        }
        spawn_local(Arc::clone(self).set_up_tenants());
        let checker = spawn_local(Arc::clone(self).check_always());
        spawn_local(Arc::clone(self).spring_ambushes());
        spawn_local(Arc::clone(self).load_midway());
        let begun = Instant::now();
        for (at, fault) in &self.plan.faults {
            sleep_until(begun + Duration::from_millis(*at)).await;
            self.trace.note("----", fault);
            self.inflict(*fault);
            if self.has_failed() {
                break;
            }
        }
        let end = begun + Duration::from_millis(self.plan.length_ms);
        while Instant::now() < end && !self.has_failed() {
            sleep(CHECK).await;
        }
        if !self.has_failed() {
            self.trace.note("----", "faults and load end");
            self.has_healed.store(true, Ordering::Release);
            self.net.ambushes.end();
            self.net.heal();
            self.disk.heal();
            self.ssds.iter().for_each(|ssd| ssd.heal());
            self.load.is_over.store(true, Ordering::Release);
            let rest = timeout(RESTS, checks::come_to_rest(self)).await;
            rest.map_err(|_| "what is asked of a pool at rest does not end".to_owned())??;
        }
        checker.abort();
        Ok(())
    }

    /// Whether a rule was broken: then nothing more is to be learned.
    pub(crate) fn has_failed(&self) -> bool {
        let has_panicked = PANICS.with_borrow(|panics| !panics.is_empty());
        has_panicked
            || !self.load.violations.lock().is_empty()
            || !self.net.violations.lock().is_empty()
    }

    async fn check_always(self: Arc<Self>) {
        loop {
            sleep(CHECK).await;
            if let Err(wrong) = checks::of_the_pool(&self) {
                self.load.violate(wrong);
                return;
            }
        }
    }

    /// Loads a standby each time when the log has the end of a segment.
    async fn load_midway(self: Arc<Self>) {
        loop {
            self.disk.a_segment_ends().await;
            if let Err(wrong) = successor::loads_midway(&self) {
                self.load.violate(wrong);
                return;
            }
        }
    }

    fn start_master(&self, number: usize) -> Result<(), String> {
        let Some(clock) = self.clocks.get(number) else {
            return Ok(());
        };
        let started = Master::start(number, &self.plan, &self.disk, &self.net, clock);
        let master = started.map_err(|error| error.to_string())?;
        self.masters.lock().insert(number, master);
        Ok(())
    }

    fn start_node(&self, number: usize) -> Result<(), String> {
        // The master drops what the life before had in memory.
        self.blocks_leave();
        let life = Life::default();
        let percent = self.memory.lock().get(&number).copied().unwrap_or(100);
        let segment = Length(self.plan.segment_with(percent));
        let setup = Setup {
            name: format!("n{number}"),
            host: HostId(1 + number as u128),
            data_address: node_address(number),
            masters: (0..self.plan.masters()).map(master_address).collect(),
            segments: vec![segment; self.plan.segments],
            held_per_client: Length(segment.0 * self.plan.segments as u64),
            asks_for_signed_reads: self.plan.has_signed_reads,
            disks: self.disks_of(number, &life),
            moves_blocks: self.plan.departs != Some(Departs::WithoutMoves),
        };
        let (net, session_life) = (Arc::clone(&self.net), life.clone());
        let connect = move |address: &str, outgoing| {
            let session = Arc::clone(&net).session(
                number,
                session_life.clone(),
                address.to_owned(),
                outgoing,
            );
            Box::pin(session) as futures::future::BoxFuture<'static, _>
        };
        let dialer = Dialer {
            net: Arc::clone(&self.net),
            from: Process::Node(number),
            life: life.clone(),
        };
        let started = Node::start(&setup, Arc::new(connect), Arc::new(dialer));
        let (node, session) = started.map_err(|error| format!("no memory: {error}"))?;
        let port = NodePort {
            life: life.clone(),
            node: Arc::new(node),
        };
        self.net.open_node(number, port);
        let running = life.clone();
        spawn_local(async move { running.run(session).await });
        self.nodes.lock().insert(number, life);
        Ok(())
    }

    #[allow(clippy::cast_precision_loss, reason = "the number is small")]
    fn disks_of(&self, node: usize, life: &Life) -> Vec<store_node::Disk> {
        let ssd = self.ssds.get(node);
        let disk = ssd.map(|ssd| store_node::Disk {
            engine: ssd.open(life),
            writes_per_day: self.plan.writes_per_day.map(|limit| limit as f64),
        });
        disk.into_iter().collect()
    }

    fn start_client(self: &Arc<Self>, number: usize) {
        let life = Life::default();
        self.clients.lock().insert(number, life.clone());
        let (touches, touched) = mpsc::unbounded_channel();
        self.touchers.lock().insert(number, touches);
        let world = Arc::clone(self);
        let lived = self.lives.fetch_add(1, Ordering::Relaxed);
        spawn_local(async move {
            let work = async {
                let masters = world.plan.masters();
                let tenant = world.plan.tenant_of(number);
                while !world.is_ready(tenant) {
                    sleep(CHECK).await;
                }
                let name = tenant_name(tenant);
                let client = connect(&world.net, number, &life, masters, &name).await;
                let count = world.plan.tasks as u64;
                let task = |task| Task {
                    load: Arc::clone(&world.load),
                    plan: Arc::clone(&world.plan),
                    who: Process::Client(number),
                    keys: world.plan.keys_of(tenant),
                    keeps_all: world.plan.keeps_all_of(tenant),
                    dice: Dice::new(world.plan.seed, Stream::Task(lived, task)),
                    client: client.clone(),
                };
                let tasks = (0..count).map(|number| task(number).run());
                let tasks = futures::future::join_all(tasks);
                tokio::join!(tasks, task(count).lie_in_wait(touched));
            };
            life.run(work).await
        });
    }
}
