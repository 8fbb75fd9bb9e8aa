//! What a seed stands for: the pool, its load, and the faults, each with its time. A plan is plain data, so that a
//! failing one can be made smaller.

use crate::dice::Dice;
use std::fmt;

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
    /// The process stops (SIGSTOP): nothing leaves it and nothing reaches it for so many milliseconds.
    Stop(Process, u64),
    /// No message passes from the first to the second for so many milliseconds.
    Cut(Process, Process, u64),
    /// The store answers this master nothing for so many milliseconds.
    StoreStalls(usize, u64),
    /// For so many milliseconds this master's writes to the store have an unknown outcome.
    StoreUnknown(usize, u64),
    /// The clock of this master jumps ahead by so many milliseconds, as after a suspension.
    ClockJumps(usize, u64),
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
            Self::Stop(who, ms) => write!(f, "{who} is stopped for {ms} ms"),
            Self::Cut(from, to, ms) => write!(f, "nothing passes from {from} to {to} for {ms} ms"),
            Self::StoreStalls(who, ms) => write!(f, "the store stalls for m{who} for {ms} ms"),
            Self::StoreUnknown(who, ms) => {
                write!(f, "outcomes at the store are unknown to m{who} for {ms} ms")
            }
            Self::ClockJumps(who, ms) => write!(f, "the clock of m{who} jumps ahead by {ms} ms"),
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
    /// A byte of a block is wrong after its transfer.
    pub flipped: u64,
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
    /// Whether nothing is ever evicted, removed or replaced, so that every acknowledged block must stay.
    pub keeps_all: bool,
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
        let dice = Dice::new(seed, 0);
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
            clients: usize::try_from(dice.between(1, 3)).unwrap_or(1),
            tasks: usize::try_from(dice.between(1, 3)).unwrap_or(1),
            keys,
            longest_block,
            length_ms: dice.between(4_000, 14_000),
            lease_ms: dice.between(300, 3_000),
            keeps_all,
            has_signed_reads: seed % 2 == 1,
            drift: (0..electing.max(1))
                .map(|_| i64::try_from(dice.below(1000)).unwrap_or(0) - 500)
                .collect(),
            noise: Noise {
                lost: noise(15),
                twice: noise(15),
                slow: noise(25),
                flipped: noise(15),
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
        plan.faults.sort_by_key(|(at, _)| *at);
        plan
    }

    /// The number of masters.
    pub fn masters(&self) -> usize {
        self.electing.max(1)
    }

    /// Whether a reader under a lease always finds the committed bytes: nothing makes bytes wrong on their way, and
    /// the clock of no master runs ahead of what readers count.
    pub fn reads_are_right(&self) -> bool {
        let mut faults = self.faults.iter();
        let jumps = faults.any(|(_, fault)| matches!(fault, Fault::ClockJumps(..)));
        self.noise.flipped == 0 && !jumps
    }

    fn draw_fault(&self, dice: &Dice) -> Fault {
        let master = dice.index(self.masters());
        let ms = dice.between(30, [300, 1_500, 6_000][dice.index(3)]);
        match dice.below(14) {
            0 | 1 => Fault::Crash(Process::Master(master), ms),
            2 => Fault::Crash(Process::Node(dice.index(self.nodes)), ms),
            3 => Fault::Crash(Process::Client(dice.index(self.clients)), ms),
            4 => Fault::Stop(self.draw_process(dice), ms),
            5 | 6 => {
                let from = self.draw_process(dice);
                Fault::Cut(from, self.draw_process(dice), ms)
            }
            7 => Fault::StoreStalls(master, ms),
            8 => Fault::StoreUnknown(master, ms.min(400)),
            9 => Fault::ClockJumps(master, ms),
            10 => Fault::Leave(dice.index(self.nodes), ms),
            11 | 12 => Fault::Drain(dice.index(self.nodes), ms),
            _ => Fault::Stop(Process::Node(dice.index(self.nodes)), ms),
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
            "  {} keys, blocks to {} bytes, leases of {} ms, {} ms of load{}{}",
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
            }
        )?;
        let Noise {
            lost,
            twice,
            slow,
            flipped,
        } = self.noise;
        writeln!(
            f,
            "  of 1000 messages {lost} are lost, {twice} come twice, {slow} are slow, {flipped} have a wrong byte; \
             clocks drift by {:?} ppm",
            self.drift
        )?;
        for (at, fault) in &self.faults {
            writeln!(f, "  {at:>6} ms: {fault}")?;
        }
        Ok(())
    }
}
