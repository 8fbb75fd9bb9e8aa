//! What a seed stands for: the pool, its load, and the faults, each with its time. A plan is plain data, so that a
//! failing one can be made smaller.

mod ambush;
mod departures;
mod detach;
mod draw;
mod images;
mod late_media;
mod losses;
mod meeting;
mod mix;
mod moves;
mod narrow;
mod returns;
mod superblocks;
mod theme;

pub use ambush::{Ambush, Logged, Moment, Said, Trick};
pub use departures::Departs;
pub(crate) use losses::Loss;
pub use mix::{Call, Mix};
pub(crate) use narrow::NARROW;

use crate::dice::Dice;
use kvpool_types::NamespaceSettings;
use std::fmt;

/// Keys of a namespace have numbers from a multiple of this one on.
pub(crate) const TENANT_KEYS: u64 = 1_000;

/// No node is silent for so many milliseconds.
pub(crate) const LATE_DROP: u64 = 20_000;

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
    /// The node is drained, as at SIGTERM: its blocks move to others for at most four seconds, or 20 where nothing
    /// else takes blocks. Then it leaves, and starts again after so many milliseconds.
    Drain(usize, u64),
    /// An operator takes the node out of service, with force or without. The node stops a while after it is drained, or
    /// after seven seconds; a third of the nodes stop at once. It starts again after so many milliseconds.
    OutOfService(usize, bool, u64),
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
    /// An operator has the pool forget the disk of the node, with the copies there. Nothing, unless the node is away.
    Detach(usize),
    /// The disk of the node goes wrong in this way, for so many milliseconds unless [`DiskFault`] says otherwise.
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
    /// Its flushes fail, and what was not flushed may be lost.
    LosesFlushes,
    /// The place of a damaged superblock takes no writes. Nothing, unless one superblock is damaged and one is not.
    BadSector,
}

impl fmt::Display for DiskFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Stalls => "stalls",
            Self::Fails => "fails",
            Self::IsFull => "is full",
            Self::IsGone => "is gone",
            Self::Rots => "rots",
            Self::LosesFlushes => "loses flushes",
            Self::BadSector => "takes no write over a damaged superblock",
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
            Self::OutOfService(who, force, ms) => {
                let how = if *force { " by force" } else { "" };
                write!(
                    f,
                    "n{who} is taken out of service{how}, starts again after {ms} ms"
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
            Self::Disk(who, fault @ (DiskFault::IsGone | DiskFault::Rots), _) => {
                write!(f, "the disk of n{who} {fault}")
            }
            Self::Disk(who, fault, ms) => write!(f, "the disk of n{who} {fault} for {ms} ms"),
            Self::Detach(who) => write!(f, "an operator has the disk of n{who} forgotten"),
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
    /// A request of a disk takes long, and others overtake it.
    pub slow_disk: u64,
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

/// The settings that a namespace has.
pub(crate) fn in_words(settings: &NamespaceSettings) -> String {
    let settings = settings.iter();
    let settings: Vec<String> = settings
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    settings.join(", ")
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
    /// The bytes of all segments of a node.
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
    /// How often each call is made.
    pub mix: Mix,
    /// Of 1000 puts so many are removed at once.
    pub removed_at_once: u64,
    /// Processes with clients.
    pub clients: usize,
    /// Tasks of each that put and get.
    pub tasks: usize,
    /// Different keys.
    pub keys: u64,
    /// The longest block.
    pub longest_block: u64,
    /// The length of every block, if all have one.
    pub one_length: Option<u64>,
    /// Whether every put asks for two replicas; otherwise every other one does.
    pub two_replicas: bool,
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
    /// Faults and calls that wait for a moment.
    pub ambushes: Vec<Ambush>,
    /// The departure at rest that the pool is made for, if any.
    pub departs: Option<Departs>,
}

impl Plan {
    /// Keeps the faults that stay, and the ambushes with such a fault or without one.
    pub(crate) fn keep_faults(&mut self, stays: impl Fn(&Fault) -> bool) {
        self.faults.retain(|(_, fault)| stays(fault));
        self.ambushes.retain(|ambush| match &ambush.trick {
            Trick::Fault(fault) => stays(fault),
            _ => true,
        });
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

    /// Whether nodes have disks of more than two zones.
    pub(crate) fn has_wide_disks(&self) -> bool {
        self.has_disks() && self.disk_bytes != NARROW
    }

    /// Disks with so much room that no zone is written twice.
    fn add_roomy_disks(&mut self, dice: &Dice) {
        self.disk_bytes = dice.between(48, 64) << 20;
    }

    /// Half as much memory, so that blocks leave it and come back.
    fn halve_memory(&mut self) {
        let least = 3 * self.longest_block;
        self.segment_bytes = (self.segment_bytes / 2)
            .max(least)
            .next_multiple_of(64 << 10);
    }

    /// Whether some namespace has a quota or a guaranteed share. They are drawn for the memory that nodes have then.
    pub(crate) fn has_settings(&self) -> bool {
        self.tenants.iter().any(|one| !one.settings.is_empty())
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

    /// Whether all blocks of one namespace stay, or of each. Nothing may remove or replace them, or take their nodes.
    pub(crate) fn keeps_a_namespace(&self) -> bool {
        self.keeps_all || self.tenants.iter().any(Tenant::keeps_all)
    }

    /// No silent node and no absent disk is forgotten, and no byte becomes wrong on its way to memory. Disks may be
    /// written without limit.
    pub(crate) fn keep_nodes_and_disks(&mut self) {
        self.noise.flipped_writes = 0;
        self.drop_ms = LATE_DROP;
        self.ssd_drop_ms = None;
        self.writes_per_day = None;
    }

    /// The number of masters.
    pub fn masters(&self) -> usize {
        self.electing.max(1)
    }

    /// Whether a silent node is dropped while faults go on.
    pub fn drops_nodes(&self) -> bool {
        self.drop_ms < LATE_DROP
    }

    /// Whether bytes become wrong on their way.
    pub const fn flips_bytes(&self) -> bool {
        self.noise.flipped > 0 || self.noise.flipped_writes > 0
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
            self.segment_with(100) >> 10,
            self.clients,
            self.tasks
        )?;
        writeln!(
            f,
            "  {} keys, blocks {} {} bytes, leases of {} ms, {} ms of load{}{}{}{}",
            self.keys,
            self.one_length.map_or("to", |_| "of"),
            self.one_length.unwrap_or(self.longest_block),
            self.lease_ms,
            self.length_ms,
            if self.keeps_all {
                ", nothing is evicted, removed or replaced"
            } else {
                ""
            },
            if self.has_signed_reads {
                ", signed locations"
            } else {
                ""
            },
            if self.evicts_by_use {
                ", eviction goes by use"
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
                "  each node has a disk of {} KiB{}{}",
                self.disk_bytes >> 10,
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
                writeln!(f, "  {}: {}", tenant_name(tenant), in_words(&settings))?;
            }
        }
        if self.settings_late_ms > 0 {
            let ms = self.settings_late_ms;
            writeln!(f, "  the first settings come after {ms} ms")?;
        }
        if let Some(departs) = self.departs {
            writeln!(f, "  a node leaves at rest: {departs:?}")?;
        }
        if self.two_replicas {
            writeln!(f, "  each put asks for two replicas")?;
        }
        if self.removed_at_once > 0 {
            let share = self.removed_at_once;
            writeln!(f, "  of 1000 puts {share} are removed at once")?;
        }
        if self.mix != Mix::USUAL {
            writeln!(f, "  calls by weight: {}", self.mix)?;
        }
        if !self.pins.is_empty() {
            writeln!(f, "  blocks of keys {:?} are hard-pinned", self.pins)?;
        }
        let Noise {
            lost,
            twice,
            slow,
            slow_disk,
            flipped,
            flipped_writes,
        } = self.noise;
        writeln!(
            f,
            "  of 1000 messages {lost} are lost, {twice} come twice, {slow} are slow; of 1000 requests of \
             disks {slow_disk} are slow; of 1000 blocks {flipped} have a wrong byte when they are read, and \
             {flipped_writes} when they are written; clocks drift by {:?} ppm",
            self.drift
        )?;
        for (at, fault) in &self.faults {
            writeln!(f, "  {at:>6} ms: {fault}")?;
        }
        for ambush in &self.ambushes {
            writeln!(f, "  {ambush}")?;
        }
        Ok(())
    }
}
