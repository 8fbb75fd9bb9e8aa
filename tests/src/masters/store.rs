//! The etcd of a pool.

use super::ETCD;
use crate::net::Net;
use crate::relay::Relay;
use crate::resident::Resident;
use anyhow::Context;
use kvpool_etcd::testing::EtcdCluster;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// The longest time until etcd answers again.
const PATIENCE: Duration = Duration::from_secs(60);

/// A real etcd of one or more members. Dropping it kills them.
#[derive(Debug)]
pub struct Store {
    /// `None` only while the resident thread has it.
    etcd: Option<EtcdCluster>,
    home: Home,
    endpoints: Vec<String>,
    /// etcd listens on the loopback of its namespace. These relays carry connections from outside.
    _relays: Vec<Relay>,
}

/// The thread that starts the members. They die with it, and are in its namespace.
#[derive(Debug)]
enum Home {
    Here(Resident),
    Party(Arc<Net>),
}

impl Home {
    fn run<R: Send + 'static>(&self, work: impl FnOnce(&Runtime) -> R + Send + 'static) -> R {
        match self {
            Self::Here(resident) => resident.run(work),
            Self::Party(net) => net.run(ETCD, work),
        }
    }
}

impl Store {
    /// Starts etcd with its files in `directory`. With a network, it runs at [`ETCD`].
    pub fn start(directory: &Path, members: usize, net: Option<Arc<Net>>) -> anyhow::Result<Self> {
        let outside = net.as_ref().map(|net| net.address(ETCD));
        let home = match net {
            Some(net) => Home::Party(net),
            None => Home::Here(Resident::start(|| Ok(()))?),
        };
        let directory = directory.join("etcd");
        let etcd =
            home.run(move |runtime| runtime.block_on(EtcdCluster::start(&directory, members)))?;
        let mut endpoints = etcd.endpoints();
        let mut relays = Vec::new();
        if let Some(outside) = outside {
            for endpoint in &mut endpoints {
                let inside = endpoint.trim_start_matches("http://").to_owned();
                let (_, port) = inside.rsplit_once(':').context("a port")?;
                let address = format!("{outside}:{port}");
                *endpoint = format!("http://{address}");
                let relay = home.run(move |_| Relay::listen(&address))?;
                relay.to(&inside);
                relays.push(relay);
            }
        }
        Ok(Self {
            etcd: Some(etcd),
            home,
            endpoints,
            _relays: relays,
        })
    }

    /// The addresses of etcd for masters.
    pub fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// The number of members.
    pub fn members(&self) -> usize {
        self.endpoints.len()
    }

    /// The member that leads.
    pub fn leader(&mut self) -> anyhow::Result<usize> {
        self.with(|etcd, runtime| Ok(runtime.block_on(etcd.leader())?))
    }

    /// Kills a member at once (SIGKILL).
    pub fn kill(&mut self, member: usize) -> anyhow::Result<()> {
        self.with(move |etcd, _| Ok(etcd.member(member).kill()?))
    }

    /// Starts a killed member again on its data, and waits until it answers.
    pub fn restart(&mut self, member: usize) -> anyhow::Result<()> {
        self.with(move |etcd, runtime| Ok(runtime.block_on(etcd.member(member).restart())?))
    }

    /// Kills every member at once.
    pub fn kill_all(&mut self) -> anyhow::Result<()> {
        (0..self.members()).try_for_each(|member| self.kill(member))
    }

    /// Starts every member again after [`Store::kill_all`], and waits until one leads.
    pub fn restart_all(&mut self) -> anyhow::Result<()> {
        self.with(|etcd, _| {
            (0..etcd.len()).try_for_each(|member| Ok(etcd.member(member).spawn_again()?))
        })?;
        let limit = Instant::now() + PATIENCE;
        while let Err(error) = self.leader() {
            anyhow::ensure!(Instant::now() < limit, "etcd does not come back: {error}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Stops a member (SIGSTOP).
    pub fn pause(&mut self, member: usize) -> anyhow::Result<()> {
        self.with(move |etcd, _| Ok(etcd.member(member).pause()?))
    }

    /// Continues a stopped member (SIGCONT).
    pub fn resume(&mut self, member: usize) -> anyhow::Result<()> {
        self.with(move |etcd, _| Ok(etcd.member(member).resume()?))
    }

    /// Lends etcd to the thread that its members depend on.
    fn with<R: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut EtcdCluster, &Runtime) -> anyhow::Result<R> + Send + 'static,
    ) -> anyhow::Result<R> {
        let mut etcd = self.etcd.take().context("etcd was lost to a panic")?;
        let (etcd, outcome) = self.home.run(move |runtime| {
            let outcome = work(&mut etcd, runtime);
            (etcd, outcome)
        });
        self.etcd = Some(etcd);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::http_get_within;

    fn has_etcd(test: &str) -> bool {
        let missing = kvpool_etcd::testing::binary().err();
        if let Some(reason) = &missing {
            eprintln!("SKIPPED {test}: {reason}");
        }
        missing.is_none()
    }

    #[test]
    fn three_members_lose_their_leader_and_all_of_them_and_come_back() {
        if !has_etcd("three_members_lose_their_leader_and_all_of_them_and_come_back") {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let mut store = Store::start(directory.path(), 3, None).unwrap();
        let first = store.leader().unwrap();
        store.kill(first).unwrap();
        let limit = Instant::now() + Duration::from_secs(20);
        let second = loop {
            match store.leader() {
                Ok(second) => break second,
                Err(error) => assert!(Instant::now() < limit, "{error}"),
            }
        };
        assert_ne!(first, second);
        store.restart(first).unwrap();
        store.kill_all().unwrap();
        assert!(store.leader().is_err());
        store.restart_all().unwrap();
    }

    #[test]
    fn etcd_in_a_network_is_reached_from_outside_and_can_be_cut_off() {
        let test = "etcd_in_a_network_is_reached_from_outside_and_can_be_cut_off";
        if !has_etcd(test) {
            return;
        }
        let Some(net) = Net::or_skip(test, &[ETCD, "master-0"]).map(Arc::new) else {
            return;
        };
        let directory = tempfile::tempdir().unwrap();
        let store = Store::start(directory.path(), 1, Some(Arc::clone(&net))).unwrap();
        let address = store.endpoints()[0]
            .trim_start_matches("http://")
            .to_owned();
        let asked = move || {
            let address = address.clone();
            let limit = Duration::from_secs(1);
            net.run("master-0", move |_| {
                http_get_within(&address, "/health", limit)
            })
            .map(|text| text.contains("true"))
            .map(|healthy| (healthy, Arc::clone(&net)))
        };
        let (healthy, net) = asked().unwrap();
        assert!(healthy);
        net.cut(ETCD, "master-0").unwrap();
        asked().unwrap_err();
        net.heal(ETCD, "master-0").unwrap();
        assert!(asked().unwrap().0);
    }
}
