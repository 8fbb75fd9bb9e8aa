//! Everything that chance decides, from one seed.

use parking_lot::Mutex;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

/// What has a stream of chance of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    /// The pool, its load and its first faults.
    Plan,
    /// The metadata store.
    Store,
    /// The network, and what runs over it.
    Network,
    /// The seams of the production code.
    Seams,
    /// The namespaces of a plan.
    Tenants,
    /// The administrator.
    Administrator,
    /// The disks of a plan, and their faults.
    Disks,
    /// The time until a silent node is dropped.
    Drops,
    /// Little room in the store, and little memory.
    Scarcity,
    /// The intruder, at each of its visits.
    Intruder(u64),
    /// How masters follow each other.
    Turnover,
    /// The keys whose blocks are pinned.
    Pins,
    /// The budget of writes to disks.
    Budget,
    /// Disks that are replaced.
    Absence,
    /// Quotas of copies.
    MediaQuotas,
    /// When the administrator comes.
    LateSettings,
    /// The bytes that flip on their way.
    Flips,
    /// Leaders that die just after a promise.
    Deaths,
    /// Nodes that leave while nothing else takes a block.
    Quiet,
    /// Disks that fail while their nodes start.
    Relapses,
    /// Blocks that are removed at once.
    Removals,
    /// Much that fails at once.
    Outages,
    /// The lengths of blocks.
    Lengths,
    /// Disks of two zones.
    Narrow,
    /// Blocks that move from node to node.
    Moves,
    /// Blocks that come back from disks.
    Returns,
    /// An operator who takes nodes out of service.
    Operator,
    /// A node that leaves the pool at rest.
    Departure,
    /// How often each call is made.
    Mix,
    /// Faults of one kind that come often.
    Bursts,
    /// Watches of the leader that are late.
    Watches,
    /// Faults and calls that wait for a moment.
    Ambushes,
    /// Whether they use a moment.
    Moments,
    /// What a history goes for.
    Themes,
    /// Pools that are made for a node that leaves.
    Departures,
    /// What is under way at once.
    Meetings,
    /// Old images of disks.
    Images,
    /// Superblocks whose flush fails.
    Superblocks,
    /// Disks that the pool forgets by order.
    Detachments,
    /// Disks that are attached while their nodes leave.
    LateMedia,
    /// Blocks of whole granules.
    Granules,
    /// A task of a client, by the number of the client's life.
    Task(u64, u64),
}

impl Stream {
    /// No two are equal.
    fn number(self) -> u64 {
        match self {
            Self::Plan => 0,
            Self::Store => 1,
            Self::Network => 2,
            Self::Seams => 3,
            Self::Tenants => 5,
            Self::Administrator => 6,
            Self::Disks => 7,
            Self::Drops => 8,
            Self::Scarcity => 9,
            Self::Turnover => 11,
            Self::Pins => 12,
            Self::Budget => 13,
            Self::Absence => 14,
            Self::MediaQuotas => 15,
            Self::LateSettings => 16,
            Self::Flips => 17,
            Self::Deaths => 18,
            Self::Quiet => 19,
            Self::Relapses => 20,
            Self::Lengths => 21,
            Self::Removals => 22,
            Self::Outages => 23,
            Self::Mix => 24,
            Self::Bursts => 25,
            Self::Watches => 26,
            Self::Ambushes => 27,
            Self::Moments => 28,
            Self::Narrow => 29,
            Self::Moves => 30,
            Self::Operator => 31,
            Self::Departure => 32,
            Self::Themes => 33,
            Self::Departures => 47,
            Self::Meetings => 60,
            Self::Returns => 50,
            Self::Images => 41,
            Self::Superblocks => 42,
            Self::Detachments => 43,
            Self::LateMedia => 44,
            Self::Granules => 45,
            Self::Intruder(visit) => 100 + visit,
            Self::Task(life, task) => 1_000 + 100 * life + task,
        }
    }
}

/// One stream of chance. Streams of one seed do not depend on each other, so a plan with fewer faults keeps the
/// others as they are.
#[derive(Debug)]
pub(crate) struct Dice(Mutex<ChaCha8Rng>);

impl Dice {
    /// A stream of `seed`.
    pub(crate) fn new(seed: u64, stream: Stream) -> Self {
        Self(Mutex::new(generator(seed, stream)))
    }

    /// A number below `end`; 0 for an `end` of 0.
    pub(crate) fn below(&self, end: u64) -> u64 {
        self.0.lock().random_range(0..end.max(1))
    }

    /// An index below `end`.
    pub(crate) fn index(&self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).unwrap_or(0)
    }

    /// A number from `least` to `most`.
    pub(crate) fn between(&self, least: u64, most: u64) -> u64 {
        self.0.lock().random_range(least..=most.max(least))
    }

    /// True in `permille` of 1000 cases.
    pub(crate) fn chance(&self, permille: u64) -> bool {
        self.below(1000) < permille
    }

    /// A time in microseconds, from `least` to `most`.
    pub(crate) fn micros(&self, least: u64, most: u64) -> Duration {
        Duration::from_micros(self.between(least, most))
    }
}

/// The generator of a stream.
pub(crate) fn generator(seed: u64, stream: Stream) -> ChaCha8Rng {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    generator.set_stream(stream.number());
    generator
}
