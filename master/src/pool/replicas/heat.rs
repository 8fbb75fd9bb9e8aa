//! Hot blocks get further replicas.
//!
//! ```text
//!  lookups ─► bytes by block ─► rate ─┬─ above what its replicas should serve ─► one more replica
//!                                     └─ far below, for some seconds ──────────► the latest one leaves
//! ```
//!
//! A block is hot when clients look it up faster than `hot_rate` for each replica. Clients choose
//! among remote replicas at random, so each replica serves its share. The further replicas of all
//! blocks take at most `hot_budget` bytes. The leader keeps its list of them in memory. After a
//! fail-over they are ordinary replicas, and leave with their block.
//!
//! A read from a cached location is not a lookup. So a client that reads one block again and again
//! counts once for each lease.
//!
//! ADR 0040 says why lookups are counted.

use super::super::Pool;
use super::super::read::Found;
use super::tasks::{Change, TaskId, TaskState};
use super::{Left, Wish};
use crate::clock::BootInstant;
use crate::directory::Tick;
use crate::membership::StoreNode;
use crate::replica::BlockId;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use kvpool_types::{Key, Length, NodeName, Version};
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Each thread counts one block for this many bytes that it has looked up. So the lookup of a small
/// block mostly costs one addition.
const SAMPLE: u64 = 1 << 20;
/// The time between two updates of the rates.
const LOOK: Duration = Duration::from_secs(1);
/// A further replica leaves after this many updates in a row at which it was not needed.
const COOL: u32 = 5;
/// The most blocks that are counted between two updates.
const MOST: usize = 1 << 16;

thread_local! {
    /// The bytes since this thread's last sample.
    static UNCOUNTED: Cell<u64> = const { Cell::new(0) };
}

type Name = (NamespaceId, Key);

/// The state of hot blocks.
#[derive(Debug, Default)]
pub(in crate::pool) struct Heat {
    /// The bytes looked up since the last update, by block.
    counted: Mutex<HashMap<Name, u64>>,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    looked: Option<BootInstant>,
    blocks: HashMap<Name, Hot>,
}

#[derive(Debug, Default)]
struct Hot {
    /// The rate in bytes per second, averaged over this update and earlier ones.
    rate: u64,
    /// The number of updates in a row at which the last further replica was not needed.
    cool: u32,
    further: Vec<Further>,
}

/// A replica that the block has only because it is hot.
#[derive(Debug)]
struct Further {
    node: NodeName,
    version: Version,
    length: Length,
    /// The task that adds or drops the replica.
    task: TaskId,
}

/// The present replicas of a block.
struct Present {
    id: BlockId,
    version: Version,
    length: Length,
    tick: Tick,
    holders: Vec<NodeName>,
}

impl Heat {
    /// Counts the blocks that a lookup found.
    pub(in crate::pool) fn count(
        &self,
        namespace: NamespaceId,
        keys: &KeyBatch<'_>,
        found: &[Option<Found>],
    ) {
        for (index, one) in found.iter().enumerate() {
            let Some(one) = one else { continue };
            let full = UNCOUNTED.with(|uncounted| {
                let bytes = uncounted.get() + one.length.0;
                uncounted.set(bytes % SAMPLE);
                bytes - bytes % SAMPLE
            });
            if full == 0 {
                continue;
            }
            let Some(key) = keys.get(index) else { continue };
            let mut counted = self.counted.lock();
            let name = (namespace, key.to_key());
            if counted.len() < MOST || counted.contains_key(&name) {
                *counted.entry(name).or_default() += full;
            }
        }
    }
}

impl Known {
    /// The bytes of all further replicas.
    fn spent(&self) -> u64 {
        let all = self.blocks.values().flat_map(|hot| &hot.further);
        all.map(|further| further.length.0).sum()
    }

    /// Updates the rates.
    fn take(&mut self, counted: HashMap<Name, u64>, passed: Duration) {
        for hot in self.blocks.values_mut() {
            hot.rate /= 2;
        }
        let millis = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX).max(1);
        for (name, bytes) in counted {
            let hot = self.blocks.entry(name).or_default();
            hot.rate += bytes.saturating_mul(1000) / millis / 2;
        }
        self.blocks
            .retain(|_, hot| hot.rate > 0 || !hot.further.is_empty());
    }
}

impl Pool {
    /// Adds and drops further replicas.
    pub(super) fn tend_hot_blocks(self: &Arc<Self>) {
        let (per_replica, now) = (self.config.hot_rate.as_u64(), self.now());
        if per_replica == 0 {
            return;
        }
        let mut known = self.replicas.heat.known.lock();
        let passed = known.looked.map_or(LOOK, |looked| now.since(looked));
        if passed < LOOK {
            return;
        }
        known.looked = Some(now);
        let counted = std::mem::take(&mut *self.replicas.heat.counted.lock());
        known.take(counted, passed);
        let mut spent = known.spent();
        for ((namespace, key), hot) in &mut known.blocks {
            match self.present(*namespace, key) {
                Some(block) => self.tend_hot(hot, &block, per_replica, &mut spent),
                None => hot.further.clear(),
            }
        }
        let further = known.blocks.values().filter(|hot| !hot.further.is_empty());
        self.metrics.hot(further.count(), known.spent());
    }

    fn tend_hot(
        self: &Arc<Self>,
        hot: &mut Hot,
        block: &Present,
        per_replica: u64,
        spent: &mut u64,
    ) {
        let is_running = |task| {
            let views = self.replicas.tasks.views(&[task], self.now());
            views.iter().any(|view| view.state == TaskState::Running)
        };
        let mut runs = false;
        hot.further.retain(|further| {
            let goes = is_running(further.task);
            runs |= goes;
            goes || further.version == block.version && block.holders.contains(&further.node)
        });
        if runs {
            return;
        }
        let replicas = block.holders.len() as u64;
        let is_needed = hot.rate * 2 > per_replica * replicas.saturating_sub(1);
        hot.cool = match is_needed {
            true => 0,
            false => hot.cool + 1,
        };
        let is_short = hot.rate > per_replica * replicas;
        if is_short && *spent + block.length.0 <= self.config.hot_budget.as_u64() {
            if let Some(further) = self.add_further(block) {
                *spent += block.length.0;
                hot.further.push(further);
            }
        } else if hot.cool >= COOL
            && let Some(last) = hot.further.last_mut()
        {
            hot.cool = 0;
            let wish = Wish {
                change: Change::Drop,
                from: Some(last.node.clone()),
                to: Vec::new(),
                evict: false,
            };
            if let Ok(task) = self.begin_task(
                wish,
                vec![(block.tick, block.id, block.version)],
                &Left::default(),
            ) {
                last.task = task.id;
            }
        }
    }

    /// Begins to copy a block to the emptiest node without it.
    fn add_further(self: &Arc<Self>, block: &Present) -> Option<Further> {
        let target: Arc<StoreNode> = {
            let segments = self.placement.segments();
            let targets = self.targets(&segments, None, &block.holders).ok()?;
            targets.into_iter().next()?
        };
        let wish = Wish {
            change: Change::Copy,
            from: None,
            to: vec![target.name.clone()],
            evict: true,
        };
        let task = self.begin_task(
            wish,
            vec![(block.tick, block.id, block.version)],
            &Left::default(),
        );
        Some(Further {
            node: target.name.clone(),
            version: block.version,
            length: block.length,
            task: task.ok()?.id,
        })
    }

    fn present(&self, namespace: NamespaceId, key: &Key) -> Option<Present> {
        let segments = self.placement.segments();
        let mut present = None;
        self.directory
            .visit(namespace, &[key.as_ref()], |_, block| {
                present = block.map(|block| {
                    let replicas = block.replicas();
                    let holders = replicas.iter().filter_map(|replica| {
                        let segment = segments.get(replica.segment)?;
                        Some(segment.node.name.clone())
                    });
                    let holders = holders.collect();
                    let (version, length) = (block.version(), block.length());
                    let view = block.view();
                    Present {
                        id: view.id(),
                        version,
                        length,
                        tick: view.tick(),
                        holders,
                    }
                });
            });
        present
    }
}
