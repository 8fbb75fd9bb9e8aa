//! Where nothing takes blocks and all nodes are there, nobody misses a block in memory.

use crate::plan::Process;
use crate::sight::Sight;
use crate::world::World;
use bytes::Bytes;
use kvpool_master::directory::StoredBlock;
use kvpool_master::pool::Pool;
use kvpool_proto as proto;
use kvpool_types::{SegmentId, Version};
use parking_lot::Mutex;
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::time::Instant;

/// A node that was heard so lately is not suspect before the next look.
const HEARD: Duration = Duration::from_millis(600);

/// Since when a leader has had all nodes, and each block in memory, and what was not found meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    epoch: u64,
    /// By the numbers of the keys.
    since: BTreeMap<u64, (Version, Instant)>,
    missed: Vec<Missed>,
    /// The blocks that had been evicted at the last look.
    evicted: u64,
}

/// A block that a call did not find.
#[derive(Clone, Debug)]
struct Missed {
    reader: Process,
    /// When the call began.
    begun: Instant,
    key: u64,
    what: String,
}

impl Whole {
    /// Notes that a call of `reader` which began at `begun` did not find the block of a key. The next look judges it.
    pub(crate) fn missed(&mut self, reader: Process, begun: Instant, key: u64, what: String) {
        self.missed.push(Missed {
            reader,
            begun,
            key,
            what,
        });
    }

    /// Looks at the leader. Whoever asks finds the blocks that are in its memory, while it has all nodes.
    pub(crate) fn look(
        &mut self,
        world: &World,
        number: usize,
        sight: &Sight<'_>,
    ) -> Result<(), String> {
        let missed = std::mem::take(&mut self.missed);
        let before = std::mem::take(&mut self.since);
        if !has_all_nodes(world, number, sight.pool) {
            return Ok(());
        }
        let epoch = sight.pool.epoch.0;
        let is_same = std::mem::replace(&mut self.epoch, epoch) == epoch;
        // A block that is evicted may be back from its disk before the next look.
        let evicted = world.evicted();
        let has_evicted = std::mem::replace(&mut self.evicted, evicted) != evicted;
        let may_return = has_evicted && world.plan.has_disks();
        let now = Instant::now();
        // A node that starts again is there before the leader has dropped the blocks of its earlier life.
        let own = segments_of_lives(world, sight.pool);
        let is_there =
            |block: &StoredBlock| block.replicas.iter().any(|at| own.contains(&at.segment));
        let blocks = sight.blocks().filter(|(_, block)| is_there(block));
        let since = blocks.map(|(key, block)| {
            let then = before
                .get(&key)
                .filter(|(version, _)| *version == block.version);
            let stays = is_same && !may_return;
            let since = then.filter(|_| stays).map_or(now, |(_, since)| *since);
            (key, (block.version, since))
        });
        self.since = since.collect();
        let was_there = |missed: &Missed| {
            let since = self.since.get(&missed.key);
            let terms = &world.net.terms;
            since.is_some_and(|(_, since)| *since <= missed.begun)
                && !terms.has_heard_earlier(epoch, missed.reader, missed.begun)
        };
        match missed.into_iter().find(was_there) {
            Some(missed) => {
                let block = sight.block(missed.key).into_iter();
                let segments = block.flat_map(|block| block.replicas.iter().map(|at| at.segment));
                let segments: Vec<String> = segments.map(|segment| segment.to_string()).collect();
                Err(format!(
                    "{}, and the leader has it in the segments {}",
                    missed.what,
                    segments.join(", ")
                ))
            }
            None => Ok(()),
        }
    }

    /// No leader is there to look at.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

/// The terms of the answers about blocks that readers got. A leader that could not renew its term goes on answering
/// reads. It has only the nodes that came to it in its term, and another master may lead by then.
#[derive(Debug, Default)]
pub(crate) struct Terms(Mutex<BTreeMap<(Process, u64), Instant>>);

impl Terms {
    /// A reader gets an answer of a master.
    pub(crate) fn answered(&self, reader: Process, method: &str, reply: &Bytes) {
        let reply = reply.clone();
        let epoch = match method {
            "Lookup" => proto::LookupReply::decode(reply).map(|reply| reply.epoch),
            "Exist" => proto::ExistReply::decode(reply).map(|reply| reply.epoch),
            "MatchPrefix" => proto::MatchPrefixReply::decode(reply).map(|reply| reply.epoch),
            _ => return,
        };
        if let Ok(epoch) = epoch {
            self.0.lock().insert((reader, epoch), Instant::now());
        }
    }

    /// Whether the reader has got an answer of a term before `epoch` since `begun`.
    fn has_heard_earlier(&self, epoch: u64, reader: Process, begun: Instant) -> bool {
        let last = self.0.lock();
        let mut earlier = last.range((reader, 0)..(reader, epoch));
        earlier.any(|(_, last)| *last >= begun)
    }
}

/// The segments of the nodes that run now.
fn segments_of_lives(world: &World, pool: &Pool) -> BTreeSet<SegmentId> {
    let ports = (0..world.plan.nodes).filter_map(|node| world.net.node(node));
    let lives: Vec<_> = ports.map(|port| port.node.incarnation()).collect();
    let segments = pool.placement.segments();
    let own = segments
        .iter()
        .filter(|segment| lives.contains(&segment.node.incarnation));
    own.map(|segment| segment.id).collect()
}

/// Whether every node of the plan can be read, and stays so until the next look unless it dies.
fn has_all_nodes(world: &World, number: usize, pool: &Pool) -> bool {
    let now = world.time_at(number);
    let members = pool.members.all();
    (0..world.plan.nodes).all(|node| {
        let life = world.net.node(node).map(|port| port.node.incarnation());
        let mut known = members.iter().filter(|one| Some(one.incarnation) == life);
        known.any(|one| {
            let silent =
                now.map(|now| Duration::from_millis(now.0.saturating_sub(one.last_heard().0)));
            one.is_readable() && one.is_connected() && silent.is_some_and(|silent| silent < HEARD)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_answer_of_an_earlier_term_counts_for_the_calls_that_it_may_be_for() {
        let (terms, reader) = (Terms::default(), Process::Client(1));
        let begun = Instant::now();
        let reply = |epoch| {
            let reply = proto::LookupReply {
                epoch,
                ..proto::LookupReply::default()
            };
            Bytes::from(reply.encode_to_vec())
        };
        tokio::time::sleep(Duration::from_millis(5)).await;
        terms.answered(reader, "Lookup", &reply(6));
        assert!(!terms.has_heard_earlier(6, reader, begun));
        terms.answered(reader, "Lookup", &reply(5));
        assert!(terms.has_heard_earlier(6, reader, begun));
        assert!(!terms.has_heard_earlier(6, Process::Client(2), begun));
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(!terms.has_heard_earlier(6, reader, Instant::now()));
    }
}
