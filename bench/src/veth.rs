//! Two network namespaces with a virtual link between them, for the TCP cases.
//!
//! ```text
//!  kvbench, clients, limits ── near ══ veth ══ far ── kvmaster, kvstore-node, limits-far
//! ```
//!
//! No user of TCP has plain loopback as its path: on one host, blocks go through shared memory. The
//! namespaces lose their names after they are made, so nothing is left if the run is killed.

use anyhow::{Context, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

/// The directory in which `ip netns` keeps the names.
const NAMES: &str = "/run/netns";

/// The ends of the link, from the address block for benchmarks (RFC 2544).
const NEAR: Ipv4Addr = Ipv4Addr::new(198, 18, 255, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 255, 2);

/// The two namespaces.
#[derive(Debug)]
pub(crate) struct Veth {
    near: File,
    far: File,
}

/// A namespace with a name. Dropping it removes the name.
struct Named(String);

/// Keeps the calling thread in another namespace until it is dropped. Processes and threads that it starts
/// are there too.
#[derive(Debug)]
pub(crate) struct Inside {
    back: File,
    // A namespace belongs to a thread, so this value must stay on its thread.
    stays: PhantomData<*const ()>,
}

impl Veth {
    /// Creates both namespaces. It needs root and `ip`.
    pub(crate) fn create() -> anyhow::Result<Self> {
        let process = std::process::id();
        let near = Named::new(format!("kvpool-bench-{process}-near"))?;
        let far = Named::new(format!("kvpool-bench-{process}-far"))?;
        ip(&format!(
            "link add name veth0 netns {} type veth peer name veth0 netns {}",
            near.0, far.0
        ))?;
        for (named, address) in [(&near, NEAR), (&far, FAR)] {
            let name = &named.0;
            ip(&format!("-n {name} addr add {address}/30 dev veth0"))?;
            ip(&format!("-n {name} link set veth0 up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        let veth = Self {
            near: near.open()?,
            far: far.open()?,
        };
        // Entering a namespace needs another permission than creating it.
        drop(veth.enter_near()?);
        Ok(veth)
    }

    /// The address of the daemons and the far limits.
    pub(crate) const fn far_address() -> IpAddr {
        IpAddr::V4(FAR)
    }

    /// Moves the calling thread to the end of the clients.
    pub(crate) fn enter_near(&self) -> anyhow::Result<Inside> {
        Inside::enter(&self.near)
    }

    /// Moves the calling thread to the end of the daemons.
    pub(crate) fn enter_far(&self) -> anyhow::Result<Inside> {
        Inside::enter(&self.far)
    }
}

impl Named {
    fn new(name: String) -> anyhow::Result<Self> {
        ip(&format!("netns add {name}"))?;
        Ok(Self(name))
    }

    fn open(&self) -> anyhow::Result<File> {
        let path = Path::new(NAMES).join(&self.0);
        File::open(&path).with_context(|| format!("cannot open {}", path.display()))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if let Err(error) = ip(&format!("netns del {}", self.0)) {
            tracing::warn!("cannot delete the network namespace {}: {error:#}", self.0);
        }
    }
}

impl Inside {
    fn enter(namespace: &File) -> anyhow::Result<Self> {
        let back = File::open("/proc/thread-self/ns/net")
            .context("cannot open the network namespace of the thread")?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .context("cannot enter a network namespace")?;
        Ok(Self {
            back,
            stays: PhantomData,
        })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let back = move_into_link_name_space(self.back.as_fd(), Some(LinkNameSpaceType::Network));
        if let Err(error) = back {
            // The next processes would run on another path than their rows say.
            tracing::error!(%error, "the thread cannot return to its network namespace");
        }
    }
}

/// Runs `ip`.
fn ip(arguments: &str) -> anyhow::Result<()> {
    let output = Command::new("ip")
        .args(arguments.split_ascii_whitespace())
        .output()
        .context("cannot run `ip` (package iproute2)")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`ip {arguments}`: {}", said.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    fn namespace() -> std::path::PathBuf {
        std::fs::read_link("/proc/thread-self/ns/net").unwrap()
    }

    #[test]
    fn bytes_go_from_one_end_to_the_other_and_the_thread_comes_back() {
        let veth = match Veth::create() {
            Ok(veth) => veth,
            Err(error) => {
                eprintln!("SKIPPED veth: no network namespaces here: {error:#}");
                return;
            }
        };
        let before = namespace();
        let listener = {
            let _far = veth.enter_far().unwrap();
            TcpListener::bind((Veth::far_address(), 0)).unwrap()
        };
        let port = listener.local_addr().unwrap().port();
        let mut socket = {
            let _near = veth.enter_near().unwrap();
            assert_ne!(namespace(), before);
            TcpStream::connect((Veth::far_address(), port)).unwrap()
        };
        assert_eq!(namespace(), before);
        let (mut other, from) = listener.accept().unwrap();
        assert_eq!(from.ip(), IpAddr::V4(NEAR));
        socket.write_all(b"x").unwrap();
        other.read_exact(&mut [0]).unwrap();
        let left = std::fs::read_dir(NAMES).into_iter().flatten().flatten();
        let own = format!("kvpool-bench-{}-", std::process::id());
        let mut names = left.map(|entry| entry.file_name().to_string_lossy().into_owned());
        assert!(!names.any(|name| name.starts_with(&own)), "a name is left");
    }
}
