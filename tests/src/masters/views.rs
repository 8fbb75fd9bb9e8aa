//! The reports of a pool's masters, and waits for a wanted state.

use super::{Pool, party};
use crate::raw::http_get_within;
use anyhow::{Context, bail};
use serde_json::Value;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// The longest time for a master's answer. A stopped master never answers.
const ASKING: Duration = Duration::from_millis(500);
/// The longest time of any wait.
const PATIENCE: Duration = Duration::from_secs(30);

/// A master's report about itself and the pool.
#[derive(Clone, Debug)]
pub struct Status {
    /// The role: leader, read-only, standby or starting.
    pub role: String,
    /// The latest term that the master knows.
    pub epoch: u64,
    /// The whole answer, under the names of `pool.proto`.
    pub all: Value,
}

/// The leading master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Its index.
    pub index: usize,
    /// Its term.
    pub epoch: u64,
}

impl Pool {
    /// The JSON that a master's HTTP port answers. The request is made in the master's network, so
    /// cuts do not matter.
    pub fn get(&self, index: usize, path: &str) -> anyhow::Result<Value> {
        let (http, path) = (self.masters[index].daemon.http.clone(), path.to_owned());
        let body = self.at(&party(index), move || http_get_within(&http, &path, ASKING))?;
        Ok(serde_json::from_str(&body)?)
    }

    /// A master's report.
    pub fn status(&self, index: usize) -> anyhow::Result<Status> {
        let all = self.get(index, "/api/v1/cluster")?;
        Ok(Status {
            role: all["role"].as_str().context("a role")?.to_owned(),
            epoch: all["epoch"].as_u64().context("an epoch")?,
            all,
        })
    }

    /// The reports of all masters that answer.
    pub fn statuses(&self) -> Vec<(usize, Status)> {
        let alive = (0..self.masters.len()).filter(|index| !self.masters[*index].is_dead);
        alive
            .filter_map(|index| Some((index, self.status(index).ok()?)))
            .collect()
    }

    /// The leader: of the answering masters that report the role, the one with the highest epoch.
    pub fn leader(&self) -> Option<Leader> {
        let leaders = self
            .statuses()
            .into_iter()
            .filter(|(_, s)| s.role == "leader");
        let leaders = leaders.map(|(index, status)| Leader {
            index,
            epoch: status.epoch,
        });
        leaders.max_by_key(|leader| leader.epoch)
    }

    /// The masters that stand by.
    pub fn standbys(&self) -> Vec<usize> {
        let standbys = self
            .statuses()
            .into_iter()
            .filter(|(_, s)| s.role == "standby");
        standbys.map(|(index, _)| index).collect()
    }

    /// Waits until a master leads with an epoch above `epoch`.
    pub fn wait_leader(&self, epoch: u64) -> anyhow::Result<Leader> {
        let mut found = None;
        self.wait_for(&format!("a leader after epoch {epoch}"), || {
            found = self.leader().filter(|leader| leader.epoch > epoch);
            Ok(found.is_some())
        })?;
        found.context("a leader that was just found")
    }

    /// Waits until one master leads and every other one stands by.
    pub fn wait_settled(&self) -> anyhow::Result<Leader> {
        let mut found = None;
        self.wait_for("one leader and standbys", || {
            found = self.leader();
            Ok(found.is_some() && self.standbys().len() + 1 == self.masters.len())
        })?;
        found.context("a leader that was just found")
    }

    /// Waits until the leader has `count` live nodes.
    pub fn wait_live(&self, count: usize) -> anyhow::Result<()> {
        self.wait_for(&format!("{count} live nodes"), || {
            let Some(leader) = self.leader() else {
                return Ok(false);
            };
            let Ok(nodes) = self.get(leader.index, "/api/v1/nodes") else {
                return Ok(false);
            };
            let nodes = nodes.as_array().into_iter().flatten();
            Ok(nodes.filter(|node| node["state"] == "live").count() == count)
        })
    }

    /// One number at the top level of the leader's counters.
    pub fn gauge(&self, name: &str) -> anyhow::Result<u64> {
        let leader = self.leader().context("nobody leads")?;
        let counters = self.get(leader.index, "/api/v1/counters")?;
        counters[name]
            .as_u64()
            .with_context(|| format!("no {name} in {counters}"))
    }

    /// Waits until `condition` holds. Fails after 30 s with an error that names `what`.
    pub fn wait_for(
        &self,
        what: &str,
        mut condition: impl FnMut() -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let limit = Instant::now() + PATIENCE;
        while !condition()? {
            if Instant::now() > limit {
                bail!(
                    "{what}: not within {PATIENCE:?}; the masters: {:#?}\n{}",
                    self.statuses(),
                    self.logs()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The last lines that each master and node logged.
    pub fn logs(&self) -> String {
        let masters = self.masters.iter().map(|master| &master.daemon).enumerate();
        let nodes = self.nodes.iter().enumerate();
        let named = masters
            .map(|(index, daemon)| (party(index), daemon))
            .chain(nodes.map(|(index, daemon)| (format!("node-{index}"), daemon)));
        let mut all = String::new();
        for (name, daemon) in named {
            let text = daemon.log_text();
            let lines: Vec<&str> = text.lines().collect();
            let tail = lines.len().saturating_sub(25);
            let _never_fails = writeln!(all, "--- the log of {name} ends with");
            for line in lines.iter().skip(tail) {
                all.push_str(line);
                all.push('\n');
            }
        }
        all
    }
}
