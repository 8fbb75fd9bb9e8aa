//! Scenarios: an event happens while clients put. Each has a full pool of its own.

use super::{MIB, Runner, Settings};
use crate::agent::protocol::{Answer, Command, Live, Loaded, Set, Way, Writer};
use crate::cases::{Case, What};
use crate::pairing::Pairs;
use crate::pools::Running;
use crate::usage::Threads;
use crate::window::{nanos, now_ns};
use anyhow::{Context as _, bail};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The small blocks of a crowd, in bytes.
const SMALL: u64 = 64 << 10;
/// The number of clients that put them.
const SMALL_WRITERS: u64 = 8;
/// The number of large blocks that would fill the pool.
const LARGE_SHARE: u64 = 8;
/// The high watermark of the pool of a crowd; see [`crate::pools`].
const CROWD_WATERMARK: f64 = 0.95;
/// The interval of the pool's statistics while a crowd puts.
const LOOK: Duration = Duration::from_millis(2);

/// The blocks put while the master is killed, in bytes.
const MEDIUM: u64 = 256 << 10;
/// The time of puts before the master is killed.
const BEFORE: Duration = Duration::from_secs(1);
/// The time of puts after the master serves again. It is longer than the leases of the last term.
const AFTER_RESTART: Duration = Duration::from_secs(8);
/// The time of puts in the other scenarios.
const AFTER: Duration = Duration::from_secs(3);
/// The longest restart of the master.
const OUTAGE: Duration = Duration::from_secs(60);

/// The blocks put while a node is away, in bytes.
const TINY: u64 = 4 << 10;
/// The longest time until the master notices a lost node.
const NOTICED: Duration = Duration::from_secs(30);

/// The most runs of a scenario, because each takes seconds.
const TIMES: u32 = 3;

impl Runner {
    /// The pairs of a scenario; `None` for other cases.
    pub(super) async fn scenario(&mut self, case: &Case) -> anyhow::Result<Option<Pairs>> {
        if !matches!(
            case.what,
            What::CrowdWait | What::CrowdEvicted | What::Restart | What::NodeLoss
        ) {
            return Ok(None);
        }
        self.start_clients(1).await?;
        let mut pairs = Pairs::default();
        for _ in 0..self.settings.pairs.min(TIMES) {
            let pool = case.place.pool;
            let Settings {
                span,
                ssd,
                ref connection,
                ..
            } = self.settings;
            let mut running =
                Running::start(pool, span, ssd, connection, None, &self.material).await?;
            let value = Box::pin(self.happen(case.what, &mut running)).await;
            if value.is_ok() {
                // Clients leave before the pool stops. A failed client has ended already.
                let none = Command::Keep {
                    clients: Vec::new(),
                };
                self.client(0)?.call(&none).await?;
            }
            running.stop().await;
            pairs.add(value?, None);
        }
        Ok(Some(pairs))
    }

    async fn happen(&self, what: What, running: &mut Running) -> anyhow::Result<f64> {
        match what {
            What::CrowdWait => Ok(self.crowd(running).await?.0),
            What::CrowdEvicted => Ok(self.crowd(running).await?.1),
            What::Restart => self.restart(running).await,
            _ => self.node_loss(running).await,
        }
    }

    /// The longest call in seconds, and the bytes evicted beyond need, divided by the size of a large block.
    async fn crowd(&self, running: &Running) -> anyhow::Result<(f64, f64)> {
        let capacity = running.capacity().await?;
        let large = capacity / LARGE_SHARE / MIB * MIB;
        let client = self.connect(running, "fill").await?;
        let fill = self.put_over(set("fill", SMALL, capacity), capacity, &client);
        let mut filled = fill.await?;
        // The blocks that are certainly present.
        let held = capacity / SMALL * 8 / 10;
        filled.live.first = filled.live.end.saturating_sub(held);
        let shuffle = Command::Shuffle {
            client,
            set: filled,
        };
        self.client(0)?.call(&shuffle).await?;
        let mut writers = vec![self.writer(running, "large", large, 1).await?];
        for number in 0..SMALL_WRITERS {
            let name = format!("small-{number}");
            writers.push(self.writer(running, &name, SMALL, 1).await?);
        }
        let load = self.load(writers, AFTER);
        tokio::pin!(load);
        let mut least = u64::MAX;
        let loaded = loop {
            tokio::select! {
                loaded = &mut load => break loaded?,
                () = tokio::time::sleep(LOOK) => least = least.min(running.stats().await?.used.0),
            }
        };
        put_by_each(&loaded)?;
        if least == u64::MAX {
            bail!("the load ended before the pool's statistics were read");
        }
        let longest = loaded.iter().map(|one| one.longest_ns).max();
        let longest = Duration::from_nanos(longest.unwrap_or_default());
        // The room of a waiting large put is free for a moment before the put gets it.
        let needed = capacity as f64 * CROWD_WATERMARK - large as f64;
        let beyond = (needed - least as f64).max(0.0) / large as f64;
        Ok((longest.as_secs_f64(), beyond))
    }

    /// The longest time without a put after the master serves again, in seconds.
    async fn restart(&self, running: &mut Running) -> anyhow::Result<f64> {
        let capacity = running.capacity().await?;
        let client = self.connect(running, "fill").await?;
        self.put_over(set("fill", MEDIUM, capacity), capacity, &client)
            .await?;
        let mut writers = Vec::new();
        for number in 0..2 {
            let name = format!("writer-{number}");
            writers.push(self.writer(running, &name, MEDIUM, 16).await?);
        }
        let over = running.path()?.join("load.over");
        let fell = async {
            tokio::time::sleep(BEFORE).await;
            running.restart_master().await?;
            let up = now_ns();
            tokio::time::sleep(AFTER_RESTART).await;
            std::fs::write(&over, []).context("cannot write the file that ends the load")?;
            anyhow::Ok((up, now_ns()))
        };
        let load = self.load_until(writers, BEFORE + OUTAGE + AFTER_RESTART, Some(over.clone()));
        let (loaded, (up, end)) = tokio::try_join!(load, fell)?;
        Ok(Duration::from_nanos(longest_gap(&loaded, up, end)).as_secs_f64())
    }

    /// The master's processor time for a put after a node was killed, divided by that before.
    async fn node_loss(&self, running: &mut Running) -> anyhow::Result<f64> {
        let capacity = running.capacity().await?;
        let client = self.connect(running, "fill").await?;
        self.put_over(set("fill", TINY, capacity), capacity, &client)
            .await?;
        let before = self.cost_of_a_put(running, "before", AFTER).await?;
        running.kill_node().await?;
        let deadline = Instant::now() + NOTICED;
        while running
            .stats()
            .await?
            .nodes
            .iter()
            .all(|node| node.state == "live")
        {
            if Instant::now() > deadline {
                bail!("the master did not detect the killed node within {NOTICED:?}");
            }
            tokio::time::sleep(LOOK * 10).await;
        }
        let after = self
            .cost_of_a_put(running, "after", self.settings.node_loss)
            .await?;
        Ok(after / before)
    }

    /// The master's processor time for one put, in nanoseconds.
    async fn cost_of_a_put(
        &self,
        running: &Running,
        name: &str,
        lasts: Duration,
    ) -> anyhow::Result<f64> {
        let writer = self.writer(running, name, TINY, 64).await?;
        let master = running
            .master()
            .context("the process id of the daemon is unknown")?;
        let threads = Threads::of(master);
        let loaded = self.load(vec![writer], lasts).await?;
        let spent = nanos(threads.since());
        if spent == 0 {
            bail!("the processor time of kvmaster cannot be read");
        }
        Ok(spent as f64 / put_by_each(&loaded)? as f64)
    }

    async fn connect(&self, running: &Running, name: &str) -> anyhow::Result<String> {
        let name = format!("scenario/{name}");
        let connect = running.connect(name, Way::Shm, false, Duration::ZERO);
        let name = connect.name.clone();
        self.client(0)?.call(&Command::Connect(connect)).await?;
        Ok(name)
    }

    async fn writer(
        &self,
        running: &Running,
        name: &str,
        block: u64,
        batch: u64,
    ) -> anyhow::Result<Writer> {
        Ok(Writer {
            client: self.connect(running, name).await?,
            set: set(name, block, block * batch),
            batch,
        })
    }

    async fn load(&self, writers: Vec<Writer>, lasts: Duration) -> anyhow::Result<Vec<Loaded>> {
        self.load_until(writers, lasts, None).await
    }

    async fn load_until(
        &self,
        writers: Vec<Writer>,
        lasts: Duration,
        until: Option<PathBuf>,
    ) -> anyhow::Result<Vec<Loaded>> {
        let load = Command::Load {
            writers,
            lasts,
            until,
        };
        match self.client(0)?.call(&load).await? {
            Answer::Loaded(loaded) => Ok(loaded),
            other => bail!("unexpected reply of a benchmark process: {other:?}"),
        }
    }
}

/// Blocks that cycle through `bytes` of a client's memory, at most as much as a filling client has.
fn set(name: &str, block: u64, bytes: u64) -> Set {
    Set {
        tag: format!("scenario/{name}/{block}"),
        block,
        pieces: 1,
        group: 1,
        chained: false,
        slots: (bytes.min(32 * MIB.max(block)) / block).max(1),
        live: Live::default(),
    }
}

/// The blocks that the writers put. Without a block of each writer, the times of the case have no
/// meaning.
fn put_by_each(loaded: &[Loaded]) -> anyhow::Result<u64> {
    if let Some(idle) = loaded.iter().find(|one| one.put == 0) {
        bail!("a writer stored no block: {} were refused", idle.refused);
    }
    let put: u64 = loaded.iter().map(|one| one.put).sum();
    if put == 0 {
        bail!("there was no writer");
    }
    Ok(put)
}

/// The longest time between `up` and `end` without the end of a call.
fn longest_gap(loaded: &[Loaded], up: u64, end: u64) -> u64 {
    let ends = loaded.iter().flat_map(|one| &one.ends_ns).copied();
    let mut moments: Vec<u64> = ends.filter(|at| (up..end).contains(at)).collect();
    moments.extend([up, end]);
    moments.sort_unstable();
    let gaps = moments.iter().zip(moments.iter().skip(1));
    gaps.map(|(from, to)| to - from).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(ends_ns: &[u64]) -> Loaded {
        Loaded {
            ends_ns: ends_ns.to_vec(),
            ..Loaded::default()
        }
    }

    #[test]
    fn the_longest_gap_begins_when_the_master_is_up_and_counts_to_the_end() {
        let two = [loaded(&[1, 5, 16]), loaded(&[12, 18, 40])];
        assert_eq!(longest_gap(&two, 10, 20), 4, "12 to 16");
        assert_eq!(longest_gap(&two, 6, 20), 6, "up to the first");
        assert_eq!(longest_gap(&two, 10, 30), 12, "the last to the end");
        assert_eq!(longest_gap(&[], 10, 30), 20, "none at all");
    }

    #[test]
    fn a_writer_that_stored_nothing_is_an_error() {
        let [one, none] = [3, 0].map(|put| Loaded {
            put,
            refused: 7,
            ..Loaded::default()
        });
        assert_eq!(put_by_each(&[one.clone(), one.clone()]).unwrap(), 6);
        let error = put_by_each(&[one, none]).unwrap_err();
        assert!(error.to_string().contains("7 were refused"), "{error}");
        assert!(put_by_each(&[]).is_err());
    }

    #[test]
    fn a_set_has_a_place_for_its_block_and_fills_no_more_than_a_client_has() {
        assert_eq!(set("a", SMALL, SMALL).slots, 1);
        assert_eq!(set("a", 64 * MIB, 64 * MIB).slots, 1);
        assert_eq!(set("a", SMALL, 512 * MIB).slots * SMALL, 32 * MIB);
        assert_eq!(set("a", MEDIUM, MEDIUM * 16).slots, 16);
    }
}
