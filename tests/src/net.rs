//! A private network that a test can cut. Every process runs in a network namespace, and a hub
//! routes between the namespaces.
//!
//! ```text
//!   etcd ─────┐        ┌───── master-0
//!             │  hub   ├───── master-1      cut("etcd", "master-0"): the hub swallows what either
//!   pool ─────┘        └───── master-2      sends to the other, and says nothing
//! ```
//!
//! A cut is silent: packets vanish, no connection is reset and no address becomes unreachable, as
//! with a dead switch. A namespace loses its name after its creation and then lives as long as its
//! processes. So a test that panics or is killed leaves nothing behind.

use crate::resident::Resident;
use anyhow::{Context, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The directory in which `ip netns` keeps the names.
const NAMES: &str = "/run/netns";
/// The prefix of every name. The number of the process follows.
const PREFIX: &str = "kvpool-test-";

/// A network whose parties can be cut off from each other.
#[derive(Debug)]
pub struct Net {
    hub: Resident,
    parties: Vec<Party>,
}

#[derive(Debug)]
struct Party {
    name: String,
    address: Ipv4Addr,
    namespace: Arc<File>,
    resident: Resident,
}

impl Net {
    /// Makes a network of these parties. If this process may not make one, prints that `test` is
    /// skipped.
    pub fn or_skip(test: &str, parties: &[&str]) -> Option<Self> {
        if let Err(reason) = permitted() {
            let reason = format!("{reason:#}").replace('\n', " ");
            eprintln!("SKIPPED {test}: no network namespaces here: {reason}");
            return None;
        }
        Some(Self::new(parties).expect("what was just permitted works"))
    }

    /// Makes a network of these parties.
    pub fn new(parties: &[&str]) -> anyhow::Result<Self> {
        sweep();
        let (_, hub) = settle()?;
        let mut net = Self {
            hub,
            parties: Vec::new(),
        };
        net.hub.run(|_| forward())?;
        for (index, name) in parties.iter().enumerate() {
            let party = net.connect(name, u8::try_from(index + 1)?)?;
            net.parties.push(party);
        }
        Ok(net)
    }

    /// Lays the link between the hub and a new party.
    fn connect(&self, name: &str, index: u8) -> anyhow::Result<Party> {
        let (namespace, resident) = settle()?;
        let (near, far) = (format!("party{index}"), "eth0");
        // Addresses that are reserved for network benchmarks, so they occur nowhere else.
        let (hub, address) = (
            Ipv4Addr::new(198, 18, index, 1),
            Ipv4Addr::new(198, 18, index, 2),
        );
        let process = std::process::id();
        let there = format!("/proc/{process}/fd/{}", namespace.as_raw_fd());
        self.hub.run(move |_| {
            ip(&format!(
                "link add name {near} type veth peer name {far} netns {there}"
            ))?;
            ip(&format!("addr add {hub}/24 dev {near}"))?;
            ip(&format!("link set {near} up"))
        })?;
        resident.run(move |_| {
            ip(&format!("addr add {address}/24 dev {far}"))?;
            ip(&format!("link set {far} up"))?;
            ip(&format!("route add default via {hub}"))
        })?;
        Ok(Party {
            name: name.to_owned(),
            address,
            namespace,
            resident,
        })
    }

    /// The address of a party, which all other parties use.
    pub fn address(&self, party: &str) -> Ipv4Addr {
        self.party(party).address
    }

    /// Moves the calling thread to a party. Every socket that this thread opens from now on is
    /// there, and so is every socket of the threads and processes that it starts. Test runners
    /// reuse threads: see [`Net::inside`].
    pub fn enter(&self, party: &str) -> anyhow::Result<()> {
        enter(&self.party(party).namespace)
    }

    /// Runs `work` on a new thread at a party.
    pub fn inside<R: Send>(&self, party: &str, work: impl FnOnce() -> R + Send) -> R {
        let there = move || {
            self.enter(party).expect("a party that stands");
            work()
        };
        let done = std::thread::scope(|scope| scope.spawn(there).join());
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Runs `work` on a party's thread that stays until the network is dropped.
    pub fn run<R: Send + 'static>(
        &self,
        party: &str,
        work: impl FnOnce(&tokio::runtime::Runtime) -> R + Send + 'static,
    ) -> R {
        self.party(party).resident.run(work)
    }

    /// Makes every packet between two parties vanish.
    pub fn cut(&self, one: &str, other: &str) -> anyhow::Result<()> {
        self.rules("add", one, other)
    }

    /// Ends a cut.
    pub fn heal(&self, one: &str, other: &str) -> anyhow::Result<()> {
        self.rules("del", one, other)
    }

    fn rules(&self, what: &'static str, one: &str, other: &str) -> anyhow::Result<()> {
        let (one, other) = (self.address(one), self.address(other));
        self.hub.run(move |_| {
            ip(&format!("rule {what} from {one} to {other} blackhole"))?;
            ip(&format!("rule {what} from {other} to {one} blackhole"))
        })
    }

    fn party(&self, name: &str) -> &Party {
        let found = self.parties.iter().find(|party| party.name == name);
        found.unwrap_or_else(|| panic!("there is no party {name}"))
    }
}

/// A new namespace and a thread in it.
fn settle() -> anyhow::Result<(Arc<File>, Resident)> {
    let namespace = Arc::new(namespace()?);
    let there = Arc::clone(&namespace);
    let resident = Resident::start(move || {
        enter(&there)?;
        ip("link set lo up")
    })?;
    Ok((namespace, resident))
}

/// A new namespace, without a name.
fn namespace() -> anyhow::Result<File> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("{PREFIX}{}-{number}", std::process::id());
    ip(&format!("netns add {name}"))?;
    let opened = File::open(Path::new(NAMES).join(&name));
    ip(&format!("netns del {name}"))?;
    Ok(opened?)
}

fn enter(namespace: &File) -> anyhow::Result<()> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .context("entering a network namespace")
}

/// Makes the calling thread's namespace forward packets.
fn forward() -> anyhow::Result<()> {
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").context("/proc/sys/net/ipv4/ip_forward")
}

/// Whether this process may make a [`Net`].
fn permitted() -> anyhow::Result<()> {
    let (_, hub) = settle()?;
    hub.run(|_| {
        forward()?;
        ip("link add name party type veth peer name other")?;
        ip("rule add from 198.18.1.2 to 198.18.2.2 blackhole")
    })
}

/// Deletes names of killed processes. Such a process was killed between making a name and deleting
/// it.
fn sweep() {
    let entries = std::fs::read_dir(NAMES).into_iter().flatten();
    for name in entries.flatten().map(|entry| entry.file_name()) {
        let name = name.to_string_lossy();
        let process = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split('-').next());
        if process.is_some_and(|id| !PathBuf::from("/proc").join(id).exists()) {
            let _another_was_first = ip(&format!("netns del {name}"));
        }
    }
}

/// Runs `ip` in the namespace of the calling thread.
fn ip(arguments: &str) -> anyhow::Result<()> {
    let output = Command::new("ip")
        .args(arguments.split_ascii_whitespace())
        .output()
        .context("`ip` (package iproute2)")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`ip {arguments}`: {}", said.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
