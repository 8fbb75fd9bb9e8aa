//! A node leaves a pool at rest whose memory is full, and leases keep all blocks there. The blocks that it got last
//! wait until the leases end, and then move. Older blocks of the other node are evicted for them.

use super::{CHECK, World};
use crate::checks::{self, is_on};
use crate::dice::Dice;
use crate::history::bytes_of;
use crate::life::Life;
use crate::load::{connect, name};
use crate::plan::Process;
use kvpool_client::{Client, ControlError, PutBlock, PutOptions, Region};
use kvpool_master::pool::Pool;
use kvpool_types::{Epoch, Incarnation, Key, NamespaceSettings, Version};
use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{Instant, sleep};

/// The namespace of the blocks.
const FILLING: &str = "filling";
/// The length of each block.
const LENGTH: usize = 64 << 10;
/// The blocks of one put.
const BATCH: u64 = 8;
/// So many blocks of the node must stay.
const LATEST: usize = 4;
/// How long the task has asked for room when the store is full.
const ASKED: Duration = Duration::from_millis(300);
/// For how long the leases run then.
const LEASED: Duration = Duration::from_millis(1_200);
/// How long the store is full. A task gives up a block after it has asked for ten seconds.
const FULL: Duration = Duration::from_secs(11);
/// How long the node waits for its blocks.
const PATIENCE: Duration = Duration::from_secs(25);

/// The blocks that fill memory, as a node has them that leaves.
struct Filling {
    /// The blocks that the node got last, and that are nowhere else.
    latest: Vec<(Key, Version)>,
    others: Vec<Key>,
}

impl Filling {
    fn of(pool: &Pool, node: Incarnation) -> Option<Self> {
        let namespace = pool.namespace(FILLING).ok()?;
        let mut blocks = pool.stored_blocks();
        blocks.retain(|block| block.namespace == namespace);
        blocks.sort_by_key(|block| Reverse(block.version));
        let (mut latest, mut others) = (Vec::new(), Vec::new());
        for block in blocks {
            let is_here = block.replicas.iter().all(|at| is_on(pool, at, node));
            match is_here && latest.len() < LATEST {
                true => latest.push((block.key, block.version)),
                false => others.push(block.key),
            }
        }
        (latest.len() == LATEST && !others.is_empty()).then_some(Self { latest, others })
    }
}

impl World {
    /// See the module's documentation. In half of the cases the store is full while the leases end.
    pub(super) async fn a_node_leaves_full_memory(
        self: &Arc<Self>,
        dice: &Dice,
    ) -> Result<(), String> {
        let life = Life::default();
        let client = connect(&self.net, 99, &life, self.plan.masters(), FILLING).await;
        self.fill_memory(&client).await;
        let pool = checks::at_rest(self, Duration::ZERO).await?;
        let number = dice.index(self.plan.nodes);
        let Some(port) = self.net.node(number) else {
            return Ok(());
        };
        let node = port.node.incarnation();
        let Some(filling) = Filling::of(&pool, node) else {
            let said = "does not leave: too few of the blocks that fill memory are there";
            self.trace.note(Process::Node(number), said);
            return Ok(());
        };
        let epoch = pool.epoch;
        drop(pool);
        let is_full = dice.chance(500);
        self.trace.note(
            "----",
            format_args!(
                "n{number} leaves a pool full of leased blocks, the store is full: {is_full}"
            ),
        );
        let latest: Vec<Key> = filling.latest.iter().map(|(key, _)| key.clone()).collect();
        let refused =
            |error: ControlError| format!("blocks of a pool at rest are not leased: {error}");
        let older = client
            .match_prefix(&filling.others)
            .await
            .map_err(refused)?;
        let newer = client.match_prefix(&latest).await.map_err(refused)?;
        port.node.drain();
        sleep(ASKED).await;
        let late = is_full.then(|| self.fill_store());
        sleep(LEASED).await;
        drop((older, newer));
        Self::word_to(&port, PATIENCE).await;
        self.judge_word(number, &port);
        let lost = self.unmoved(node, &filling, epoch).await?;
        self.left_early.store(true, Ordering::Release);
        self.node_is_lost();
        Arc::clone(self).leave(port, number, Duration::ZERO).await;
        if let Some(late) = late {
            // Its caller may have waited for too long.
            let _created = late.await;
        }
        let _pool = checks::at_rest(self, Duration::ZERO).await?;
        match lost {
            Some(lost) => Err(format!(
                "n{number} leaves a full pool at rest, and version {lost} did not move when leases ended, the store \
                 was full: {is_full}"
            )),
            None => Ok(()),
        }
    }

    /// The store is full for a while. The leader notices it at the next record, which is of a new namespace.
    fn fill_store(self: &Arc<Self>) -> JoinHandle<Result<(), String>> {
        self.disk.fill(FULL);
        let world = Arc::clone(self);
        spawn_local(async move {
            let settings = NamespaceSettings::default();
            world.set_up("late", &settings).await
        })
    }

    /// The first of the latest blocks that did not move, as the leader sees it. One that leads since a term after
    /// `epoch` moves them anew, and has time for it.
    async fn unmoved(
        &self,
        node: Incarnation,
        filling: &Filling,
        epoch: Epoch,
    ) -> Result<Option<Version>, String> {
        let until = Instant::now() + PATIENCE;
        loop {
            let is_late = Instant::now() >= until;
            match checks::leading(self).first() {
                Some((_, pool)) => {
                    let lost = Self::only_on(pool, node, filling);
                    if lost.is_none() || pool.epoch == epoch || is_late {
                        return Ok(lost);
                    }
                }
                None if is_late => {
                    return Err("nobody leads a full pool at rest, which a node leaves".to_owned());
                }
                None => {}
            }
            sleep(CHECK).await;
        }
    }

    /// The first of the latest blocks without a replica on another node.
    fn only_on(pool: &Pool, node: Incarnation, filling: &Filling) -> Option<Version> {
        let blocks = pool.stored_blocks();
        let is_elsewhere = |version: Version| {
            let mut known = blocks.iter().filter(|block| block.version == version);
            known.any(|block| block.replicas.iter().any(|at| !is_on(pool, at, node)))
        };
        let mut latest = filling.latest.iter().map(|(_, version)| *version);
        latest.find(|version| !is_elsewhere(*version))
    }

    /// Puts twice as much as memory takes.
    async fn fill_memory(&self, client: &Client) {
        let bytes = self.plan.segment_bytes * self.plan.nodes as u64;
        let count = 2 * bytes / LENGTH as u64;
        let options = PutOptions::default();
        for first in (0..count).step_by(usize::try_from(BATCH).unwrap_or(1)) {
            let blocks = (first..first + BATCH).map(|key| {
                let bytes = bytes_of(key, 1, LENGTH);
                PutBlock::new(name(key), Region::from(bytes).whole())
            });
            // A put may find no room while others leave.
            let _outcomes = client.batch_put(blocks.collect(), &options).await;
        }
    }
}
