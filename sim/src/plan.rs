//! What a seed stands for: the pool, its load, and the faults, each with its time. A plan is plain data, so that a
//! failing one can be made smaller.

use crate::dice::{Dice, Stream};
use kvpool_types::{NamespaceSettings, Setting};
use std::fmt;

/// Keys of a namespace have numbers from a multiple of this one on.
pub(crate) const TENANT_KEYS: u64 = 1_000;

/// No node is silent for so many milliseconds.
const LATE_DROP: u64 = 20_000;

/// A process of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Process {
    /// A kvmaster.
    Master(usize),
    /// A store node.
    Node(usize),
    /// A process with a client.
    Client(usize),
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (letter, number) = match self {
            Self::Master(number) => ('m', number),
            Self::Node(number) => ('n', number),
            Self::Client(number) => ('c', number),
        };
        f.pad(&format!("{letter}{number}"))
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process dies, and starts again after so many milliseconds.
    Crash(Process, u64),
    /// The node says goodbye, and starts again after so many milliseconds.
    Leave(usize, u64),
    /// The node is drained, as at SIGTERM: its blocks move to others for at most four seconds. Then it leaves, and
    /// starts again after so many milliseconds.
    Drain(usize, u64),
    /// The master steps down as at SIGTERM, ends, and starts again after so many milliseconds.
    Retire(usize, u64),
    /// The leader dies just after a reader has got a lease, and starts again after so many milliseconds.
    LeaderDies(u64),
    /// The process stops (SIGSTOP): nothing leaves it and nothing reaches it for so many milliseconds.
    Stop(Process, u64),
    /// No message passes from the first to the second for so many milliseconds.
    Cut(Process, Process, u64),
    /// The store answers this master nothing for so many milliseconds.
    StoreStalls(usize, u64),
    /// For so many milliseconds this master's writes to the store have an unknown outcome.
    StoreUnknown(usize, u64),
    /// The store has no room for so many milliseconds.
    StoreFull(u64),
    /// The node is killed for want of memory, and starts again after so many milliseconds. From then on its machine has
    /// so many hundredths of the planned memory.
    LittleMemory(usize, u64, u64),
    /// The clock of this master jumps ahead by so many milliseconds, as after a suspension.
    ClockJumps(usize, u64),
    /// The node's machine loses its power, and starts again after so many milliseconds.
    PowerCut(usize, u64),
    /// The node dies, and its disk is as it was when that life began. It starts again after so many milliseconds.
    RolledBack(usize, u64),
    /// The second node dies, and gets a copy of the disk of the first as it was when the first began to use it. It
    /// starts again after so many milliseconds.
    Cloned(usize, usize, u64),
    /// The node dies, and starts again after so many milliseconds with a blank disk.
    NewDisk(usize, u64),
    /// The disk of the node goes wrong in this way for so many milliseconds.
    Disk(usize, DiskFault, u64),
    /// An intruder tries whatever nobody may, at this node and its master.
    Intruder(usize),
    /// The administrator gives this namespace a hard quota of so many bytes.
    Quota(usize, u64),
    /// The administrator deletes this namespace with its blocks, and creates it again after so many milliseconds.
    Delete(usize, u64),
}

/// How a disk goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// It answers nothing.
    Stalls,
    /// Some requests fail, and what they write is written in part.
    Fails,
    /// It takes no writes.
    IsFull,
    /// It is gone until the node starts again.
    IsGone,
    /// At once: bits of its data flip, or granules are swapped.
    Rots,
}

impl fmt::Display for DiskFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Stalls => "stalls",
            Self::Fails => "fails",
            Self::IsFull => "is full",
            Self::IsGone => "is gone",
            Self::Rots => "rots",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Crash(who, ms) => write!(f, "{who} crashes, starts again after {ms} ms"),
            Self::Leave(who, ms) => write!(f, "n{who} leaves, starts again after {ms} ms"),
            Self::Drain(who, ms) => {
                write!(
                    f,
                    "n{who} is drained and leaves, starts again after {ms} ms"
                )
            }
            Self::Retire(who, ms) => {
                write!(f, "m{who} steps down and ends, starts again after {ms} ms")
            }
            Self::LeaderDies(ms) => {
                write!(
                    f,
                    "the leader dies after a lease, starts again after {ms} ms"
                )
            }
            Self::Stop(who, ms) => write!(f, "{who} is stopped for {ms} ms"),
            Self::Cut(from, to, ms) => write!(f, "nothing passes from {from} to {to} for {ms} ms"),
            Self::StoreStalls(who, ms) => write!(f, "the store stalls for m{who} for {ms} ms"),
            Self::StoreUnknown(who, ms) => {
                write!(f, "outcomes at the store are unknown to m{who} for {ms} ms")
            }
            Self::StoreFull(ms) => write!(f, "the store is full for {ms} ms"),
            Self::LittleMemory(who, percent, ms) => write!(
                f,
                "n{who} is killed for want of memory, starts again after {ms} ms with {percent} % of it"
            ),
            Self::ClockJumps(who, ms) => write!(f, "the clock of m{who} jumps ahead by {ms} ms"),
            Self::PowerCut(who, ms) => {
                write!(f, "n{who} loses its power, starts again after {ms} ms")
            }
            Self::RolledBack(who, ms) => write!(
                f,
                "n{who} crashes and its disk is rolled back, starts again after {ms} ms"
            ),
            Self::Cloned(from, to, ms) => write!(
                f,
                "n{to} crashes and gets an old copy of the disk of n{from}, starts again after {ms} ms"
            ),
            Self::NewDisk(who, ms) => write!(
                f,
                "n{who} crashes and gets a blank disk, starts again after {ms} ms"
            ),
            Self::Disk(who, fault, ms) => write!(f, "the disk of n{who} {fault} for {ms} ms"),
            Self::Intruder(node) => write!(f, "an intruder tries n{node}"),
            Self::Quota(tenant, bytes) => {
                write!(
                    f,
                    "{} gets a hard quota of {bytes} bytes",
                    tenant_name(*tenant)
                )
            }
            Self::Delete(tenant, ms) => write!(
                f,
                "{} is deleted, and created again after {ms} ms",
                tenant_name(*tenant)
            ),
        }
    }
}

/// How often single messages suffer, in permille.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Noise {
    /// A call or its answer is lost, and the connection with it.
    pub lost: u64,
    /// A call that may be repeated arrives twice.
    pub twice: u64,
    /// A message takes up to some seconds, so later ones go before it.
    pub slow: u64,
    /// A byte of a block is wrong after a reader got it.
    pub flipped: u64,
    /// A byte of a block is wrong on its way to a node. Readers notice it, so the block is lost.
    pub flipped_writes: u64,
}

/// A namespace of the load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenant {
    /// Its quotas and its share.
    pub settings: NamespaceSettings,
    /// So many keys, whose blocks all fit its guaranteed share and must stay; `None`: the keys of the plan.
    pub keys: Option<u64>,
}

/// The name of a namespace.
pub(crate) fn tenant_name(tenant: usize) -> String {
    format!("t{tenant}")
}

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// Masters that elect a leader; 0: one over a store on its own disk.
    pub electing: usize,
    /// Store nodes.
    pub nodes: usize,
    /// The bytes of a node's segment.
    pub segment_bytes: u64,
    /// Segments of a node.
    pub segments: usize,
    /// The bytes for blocks on a node's disk; 0: nodes have no disk.
    pub disk_bytes: u64,
    /// How often a node may write its disk in a day; `None` for no limit.
    pub writes_per_day: Option<u64>,
    /// A medium that is absent for so many milliseconds is forgotten; `None` for a day.
    pub ssd_drop_ms: Option<u64>,
    /// Whether eviction goes by the last use alone, and not by chains.
    pub evicts_by_use: bool,
    /// The longest pause of a task between two calls, in microseconds.
    pub longest_pause: u64,
    /// Processes with clients.
    pub clients: usize,
    /// Tasks of each that put and get.
    pub tasks: usize,
    /// Different keys.
    pub keys: u64,
    /// The longest block.
    pub longest_block: u64,
    /// How long faults and load go on, in milliseconds.
    pub length_ms: u64,
    /// The lease TTL in milliseconds.
    pub lease_ms: u64,
    /// A node that is silent for so many milliseconds is dropped with its blocks in memory.
    pub drop_ms: u64,
    /// Whether nothing is ever evicted, removed or replaced, so that every acknowledged block must stay.
    pub keeps_all: bool,
    /// The namespaces. Those of one process share one.
    pub tenants: Vec<Tenant>,
    /// How late the first settings of namespaces come, in milliseconds.
    pub settings_late_ms: u64,
    /// The keys whose blocks are hard-pinned.
    pub pins: Vec<u64>,
    /// Whether nodes ask for locations that the leader signed.
    pub has_signed_reads: bool,
    /// By how many parts of a million the clock of each master runs fast.
    pub drift: Vec<i64>,
    /// Single messages.
    pub noise: Noise,
    /// Faults and their times in milliseconds.
    pub faults: Vec<(u64, Fault)>,
}

impl Plan {
    /// The plan of a seed.
    pub fn of(seed: u64) -> Self {
        let dice = Dice::new(seed, Stream::Plan);
        let electing = match dice.below(4) {
            0 => 0,
            1 | 2 => 2,
            _ => 3,
        };
        let keeps_all = dice.chance(250);
        let longest_block = [3_000, 40_000, 150_000][dice.index(3)];
        let keys = dice.between(8, 60);
        let nodes = usize::try_from(dice.between(1, 3)).unwrap_or(1);
        let segment_bytes = if keeps_all {
            8 << 20
        } else {
            // Between a third and all of the keys fit.
            let all = keys * longest_block / 2 / nodes as u64;
            let share = all * dice.between(30, 110) / 100;
            share.max(3 * longest_block).next_multiple_of(64 << 10)
        };
        let calm = dice.chance(150);
        let noise = |most| if calm { 0 } else { dice.below(most) };
        let mut plan = Self {
            seed,
            electing,
            nodes,
            segment_bytes,
            segments: usize::try_from(dice.between(1, 2)).unwrap_or(1),
            disk_bytes: 0,
            ssd_drop_ms: None,
            evicts_by_use: false,
            longest_pause: 150_000,
            writes_per_day: None,
            clients: usize::try_from(dice.between(1, 3)).unwrap_or(1),
            tasks: usize::try_from(dice.between(1, 3)).unwrap_or(1),
            keys,
            longest_block,
            length_ms: dice.between(4_000, 14_000),
            lease_ms: dice.between(300, 3_000),
            drop_ms: LATE_DROP,
            keeps_all,
            tenants: vec![Tenant::default()],
            settings_late_ms: 0,
            pins: Vec::new(),
            has_signed_reads: seed % 2 == 1,
            drift: (0..electing.max(1))
                .map(|_| i64::try_from(dice.below(1000)).unwrap_or(0) - 500)
                .collect(),
            noise: Noise {
                lost: noise(15),
                twice: noise(15),
                slow: noise(25),
                flipped: noise(15),
                flipped_writes: 0,
            },
            faults: Vec::new(),
        };
        let count = if calm {
            dice.below(3)
        } else {
            dice.between(1, 10)
        };
        for _ in 0..count {
            let at = dice.between(200, plan.length_ms);
            let fault = plan.draw_fault(&dice);
            plan.faults.push((at, fault));
        }
        if !keeps_all {
            plan.draw_tenants();
        }
        // A block with a wrong byte is lost, which excuses what is missing: half of the histories have none.
        if Dice::new(seed, Stream::Flips).chance(500) {
            plan.noise.flipped = 0;
        }
        if !plan.keeps_all && !plan.tenants.iter().any(Tenant::keeps_all) {
            plan.noise.flipped_writes = plan.noise.flipped;
            let drops = Dice::new(seed, Stream::Drops);
            if drops.chance(250) {
                plan.drop_ms = drops.between(1_200, 3_000);
            }
        }
        plan.draw_disks();
        plan.draw_scarcity();
        plan.draw_turnover();
        plan.draw_deaths();
        plan.draw_absence();
        plan.draw_media_quotas();
        plan.draw_late_settings();
        plan.draw_pins();
        plan.draw_budget();
        plan.faults.sort_by_key(|(at, _)| *at);
        plan
    }

    /// From a stream of its own, so that the rest of the plan is as without it.
    fn draw_tenants(&mut self) {
        let dice = Dice::new(self.seed, Stream::Tenants);
        if !dice.chance(400) {
            return;
        }
        let pool_bytes = self.segment_bytes * self.nodes as u64;
        let count = dice.between(1, 3);
        let drawn = (0..count).map(|_| Tenant::drawn(&dice, pool_bytes, self.longest_block));
        self.tenants = drawn.collect();
        let keeper = Tenant::keeper(pool_bytes, self.nodes as u64, self.longest_block);
        if dice.chance(400)
            && let (Some(keeper), Some(first)) = (keeper, self.tenants.first_mut())
        {
            *first = keeper;
        }
        // Somebody else makes room necessary.
        self.clients = self.clients.max(self.tenants.len().min(2));
        for _ in 0..dice.below(4) {
            let tenant = dice.index(self.tenants.len());
            if self.tenants.get(tenant).is_some_and(Tenant::keeps_all) {
                continue;
            }
            let hard = (pool_bytes * dice.between(10, 90) / 100).max(self.longest_block + 4096);
            let fault = match dice.below(2) {
                0 => Fault::Quota(tenant, hard),
                _ => Fault::Delete(tenant, dice.between(1, 1_500)),
            };
            self.faults.push((dice.between(200, self.length_ms), fault));
        }
    }

    /// From a stream of its own.
    fn draw_disks(&mut self) {
        let dice = Dice::new(self.seed, Stream::Disks);
        if !dice.chance(500) {
            return;
        }
        // A zone has a mebibyte, and there are at least two.
        self.disk_bytes = dice.between(2, 6) << 20;
        if dice.chance(500) {
            // No zone is written twice.
            self.disk_bytes = dice.between(48, 64) << 20;
        }
        self.evicts_by_use = dice.chance(500);
        if !self.keeps_all && !self.tenants.iter().any(Tenant::keeps_all) {
            // Blocks leave memory, and come back, all the time.
            let most = (self.segment_bytes / 2).max(3 * self.longest_block);
            self.segment_bytes = most.next_multiple_of(64 << 10);
            self.longest_pause = 40_000;
        }
        self.writes_per_day = dice.chance(200).then(|| dice.between(1_000, 100_000));
        for _ in 0..dice.below(5) {
            let node = dice.index(self.nodes);
            let ms = dice.between(30, [300, 1_500, 6_000][dice.index(3)]);
            let fault = match dice.below(9) {
                8 => Fault::Cloned(dice.index(self.nodes), node, ms),
                0 | 1 => Fault::PowerCut(node, ms),
                2 => Fault::RolledBack(node, ms),
                3 => Fault::Disk(node, DiskFault::Stalls, ms),
                4 => Fault::Disk(node, DiskFault::Fails, ms),
                5 => Fault::Disk(node, DiskFault::IsFull, ms),
                6 => Fault::Disk(node, DiskFault::IsGone, ms),
                _ => Fault::Disk(node, DiskFault::Rots, ms),
            };
            self.faults.push((dice.between(200, self.length_ms), fault));
        }
    }

    /// From a stream of its own.
    fn draw_scarcity(&mut self) {
        let dice = Dice::new(self.seed, Stream::Scarcity);
        if !dice.chance(400) {
            return;
        }
        // Blocks that all stay need the memory that was planned for them.
        let stay = |tenant: &Tenant| tenant.settings.get(Setting::Guaranteed).is_some();
        let may_shrink = !self.keeps_all && !self.tenants.iter().any(stay);
        for _ in 0..dice.between(1, 3) {
            let ms = dice.between(30, [300, 1_500, 6_000][dice.index(3)]);
            let fault = match may_shrink && dice.chance(500) {
                true => Fault::LittleMemory(dice.index(self.nodes), dice.between(30, 95), ms),
                false => Fault::StoreFull(ms),
            };
            self.faults.push((dice.between(200, self.length_ms), fault));
        }
    }

    /// From a stream of its own. Masters follow each other while leases of their predecessors run, and room is used
    /// again soon.
    fn draw_turnover(&mut self) {
        let dice = Dice::new(self.seed, Stream::Turnover);
        if !dice.chance(250) {
            return;
        }
        self.lease_ms = dice.between(2_000, 6_000);
        self.longest_pause = self.longest_pause.min(30_000);
        for _ in 0..dice.between(2, 5) {
            let master = dice.index(self.masters());
            let ms = dice.between(30, 300);
            let fault = match dice.below(3) {
                0 => Fault::Crash(Process::Master(master), ms),
                _ => Fault::Retire(master, ms),
            };
            self.faults.push((dice.between(200, self.length_ms), fault));
        }
    }

    /// From a stream of its own. Readers of the next leader hold leases of the one that died.
    fn draw_deaths(&mut self) {
        let dice = Dice::new(self.seed, Stream::Deaths);
        if !dice.chance(300) {
            return;
        }
        self.lease_ms = dice.between(2_000, 6_000);
        self.longest_pause = self.longest_pause.min(30_000);
        for _ in 0..dice.between(1, 3) {
            let at = dice.between(200, self.length_ms);
            // Two leaders in a row die within one lease.
            for later in 0..dice.between(1, 2) {
                let fault = Fault::LeaderDies(dice.between(30, 300));
                self.faults.push((at + 700 * later, fault));
            }
        }
    }

    /// The bytes of each segment of a node with so many hundredths of the planned memory. The longest block has room.
    pub fn segment_with(&self, percent: u64) -> u64 {
        let planned = self.segment_bytes / self.segments as u64;
        let least = (self.longest_block * 5 / 4).min(planned);
        (planned * percent / 100).max(least).next_multiple_of(4096)
    }

    /// Whether nodes have disks.
    pub fn has_disks(&self) -> bool {
        self.disk_bytes > 0
    }

    /// The namespace of a process's tasks.
    pub fn tenant_of(&self, client: usize) -> usize {
        client % self.tenants.len().max(1)
    }

    /// The keys of a namespace.
    pub fn keys_of(&self, tenant: usize) -> std::ops::Range<u64> {
        let count = self.tenants.get(tenant).and_then(|tenant| tenant.keys);
        let first = tenant as u64 * TENANT_KEYS;
        first..first + count.unwrap_or(self.keys)
    }

    /// Whether the blocks of a namespace all stay.
    pub fn keeps_all_of(&self, tenant: usize) -> bool {
        self.keeps_all || self.tenants.get(tenant).is_some_and(Tenant::keeps_all)
    }

    /// The number of masters.
    pub fn masters(&self) -> usize {
        self.electing.max(1)
    }

    /// Whether a silent node is dropped while faults go on.
    pub fn drops_nodes(&self) -> bool {
        self.drop_ms < LATE_DROP
    }

    /// Whether a reader under a lease always finds the committed bytes: nothing makes bytes wrong on their way, and
    /// the clock of no master runs ahead of what readers count.
    pub fn reads_are_right(&self) -> bool {
        self.noise.flipped == 0 && self.leases_are_kept()
    }

    /// Whether no lease ends before its reader counts on it: the clock of no master jumps.
    pub fn leases_are_kept(&self) -> bool {
        let mut faults = self.faults.iter();
        !faults.any(|(_, fault)| matches!(fault, Fault::ClockJumps(..)))
    }

    fn draw_fault(&self, dice: &Dice) -> Fault {
        let master = dice.index(self.masters());
        let ms = dice.between(30, [300, 1_500, 6_000][dice.index(3)]);
        match dice.below(17) {
            15 | 16 => Fault::Intruder(dice.index(self.nodes)),
            0 | 1 => Fault::Crash(Process::Master(master), ms),
            2 => Fault::Crash(Process::Node(dice.index(self.nodes)), ms),
            3 => Fault::Crash(Process::Client(dice.index(self.clients)), ms),
            4 => Fault::Stop(self.draw_process(dice), ms),
            5 | 6 => {
                let (from, to) = self.draw_pair(dice);
                Fault::Cut(from, to, ms)
            }
            7 => Fault::StoreStalls(master, ms),
            8 => Fault::StoreUnknown(master, ms.min(400)),
            9 => Fault::ClockJumps(master, ms),
            10 => Fault::Leave(dice.index(self.nodes), ms),
            14 => Fault::Retire(master, ms),
            11 | 12 => Fault::Drain(dice.index(self.nodes), ms),
            _ => Fault::Stop(Process::Node(dice.index(self.nodes)), ms),
        }
    }

    /// Two processes that have a connection.
    fn draw_pair(&self, dice: &Dice) -> (Process, Process) {
        loop {
            let (from, to) = (self.draw_process(dice), self.draw_process(dice));
            let are_clients = matches!((from, to), (Process::Client(_), Process::Client(_)));
            if from != to && !are_clients {
                return (from, to);
            }
        }
    }

    fn draw_process(&self, dice: &Dice) -> Process {
        match dice.below(3) {
            0 => Process::Master(dice.index(self.masters())),
            1 => Process::Node(dice.index(self.nodes)),
            _ => Process::Client(dice.index(self.clients)),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let masters = match self.electing {
            0 => "1 master with its own store".to_owned(),
            several => format!("{several} masters that elect a leader"),
        };
        writeln!(
            f,
            "seed {}: {masters}; {} nodes with {} segments of {} KiB; {} clients with {} tasks each",
            self.seed,
            self.nodes,
            self.segments,
            self.segment_bytes >> 10,
            self.clients,
            self.tasks
        )?;
        writeln!(
            f,
            "  {} keys, blocks to {} bytes, leases of {} ms, {} ms of load{}{}{}",
            self.keys,
            self.longest_block,
            self.lease_ms,
            self.length_ms,
            if self.keeps_all {
                ", nothing is evicted"
            } else {
                ""
            },
            if self.has_signed_reads {
                ", signed locations"
            } else {
                ""
            },
            if self.drops_nodes() {
                format!(", silent nodes are dropped after {} ms", self.drop_ms)
            } else {
                String::new()
            }
        )?;
        if self.has_disks() {
            let limit = self.writes_per_day;
            writeln!(
                f,
                "  each node has a disk of {} KiB{}{}{}",
                self.disk_bytes >> 10,
                if self.evicts_by_use {
                    ", eviction goes by use"
                } else {
                    ""
                },
                limit.map_or(String::new(), |limit| format!(
                    ", which may be written {limit} times a day"
                )),
                self.ssd_drop_ms.map_or(String::new(), |ms| format!(
                    "; one that is absent for {ms} ms is forgotten"
                ))
            )?;
        }
        for (tenant, settings) in self
            .tenants
            .iter()
            .map(|tenant| tenant.settings)
            .enumerate()
        {
            if !settings.is_empty() {
                let settings = settings
                    .iter()
                    .map(|(name, value)| format!("{name} {value}"));
                let settings: Vec<String> = settings.collect();
                writeln!(f, "  {}: {}", tenant_name(tenant), settings.join(", "))?;
            }
        }
        if self.settings_late_ms > 0 {
            let ms = self.settings_late_ms;
            writeln!(f, "  the first settings come after {ms} ms")?;
        }
        if !self.pins.is_empty() {
            writeln!(f, "  blocks of keys {:?} are hard-pinned", self.pins)?;
        }
        let Noise {
            lost,
            twice,
            slow,
            flipped,
            flipped_writes,
        } = self.noise;
        writeln!(
            f,
            "  of 1000 messages {lost} are lost, {twice} come twice, {slow} are slow; of 1000 blocks \
             {flipped} have a wrong byte when they are read, and {flipped_writes} when they are written; \
             clocks drift by {:?} ppm",
            self.drift
        )?;
        for (at, fault) in &self.faults {
            writeln!(f, "  {at:>6} ms: {fault}")?;
        }
        Ok(())
    }
}
