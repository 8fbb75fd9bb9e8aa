//! A whole pool with standby masters: several kvmasters on a real etcd, and their store nodes.

mod store;
mod views;

pub use store::Store;
pub use views::{Leader, Status};

use crate::daemon::{Daemon, path_of};
use crate::net::Net;
use crate::relay::Relay;
use kvpool_client::{Client, Options as ClientOptions};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// The name of etcd's party in a [`Net`].
pub const ETCD: &str = "etcd";
/// The name of the party with all clients and store nodes in a [`Net`].
pub const POOL: &str = "pool";

/// The name of a master's party in a [`Net`].
pub fn party(master: usize) -> String {
    format!("master-{master}")
}

/// A network for this many masters. If it cannot be made, prints that `test` is skipped.
pub fn net_or_skip(test: &str, masters: usize) -> Option<Arc<Net>> {
    let masters: Vec<String> = (0..masters).map(party).collect();
    let parties: Vec<&str> = [ETCD, POOL]
        .into_iter()
        .chain(masters.iter().map(String::as_str))
        .collect();
    Net::or_skip(test, &parties).map(Arc::new)
}

/// Whether this machine can test standby masters. If it cannot, prints that `test` is skipped.
pub fn available(test: &str) -> bool {
    let reason = missing();
    if let Some(reason) = &reason {
        eprintln!("SKIPPED {test}: {reason}");
    }
    reason.is_none()
}

fn missing() -> Option<String> {
    if let Err(error) = kvpool_etcd::testing::binary() {
        return Some(error.to_string());
    }
    let kvmaster = path_of("kvmaster").expect("the daemons are built before the tests");
    let help = Command::new(kvmaster)
        .arg("--help")
        .output()
        .expect("kvmaster runs")
        .stdout;
    let knows = String::from_utf8_lossy(&help).contains("--etcd");
    (!knows).then(|| "this kvmaster knows no etcd".to_owned())
}

/// The network between the processes.
#[derive(Clone, Debug, Default)]
pub enum Layout {
    /// Over the loopback.
    #[default]
    Plain,
    /// Each master advertises a relay in front of it, which the test can close.
    Relayed,
    /// In a network that can be cut. The test itself is at [`POOL`].
    Cuttable(Arc<Net>),
}

/// The parts of a pool.
#[derive(Clone, Debug)]
pub struct Options {
    /// The number of masters.
    pub masters: usize,
    /// The number of etcd members: 1 or 3.
    pub etcd: usize,
    /// The number of store nodes.
    pub nodes: usize,
    /// The size of each node's only segment, in the form of its flag.
    pub segment: String,
    /// More flags for every kvmaster.
    pub master: Vec<String>,
    /// More flags for every kvstore-node; `{node}` stands for the node's name.
    pub node: Vec<String>,
    /// The network between the processes.
    pub layout: Layout,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            masters: 3,
            etcd: 1,
            nodes: 2,
            segment: "256MiB".into(),
            master: Vec::new(),
            node: Vec::new(),
            layout: Layout::Plain,
        }
    }
}

impl Options {
    /// Adds flags for every kvmaster.
    #[must_use]
    pub fn master(mut self, flags: &[&str]) -> Self {
        self.master
            .extend(flags.iter().map(|flag| (*flag).to_owned()));
        self
    }
}

/// A pool of real processes in its own directory. Dropping it kills them.
#[derive(Debug)]
pub struct Pool {
    options: Options,
    masters: Vec<Master>,
    /// The store nodes, named node-0 and so on.
    pub nodes: Vec<Daemon>,
    /// etcd.
    pub store: Store,
    directory: TempDir,
}

#[derive(Debug)]
struct Master {
    daemon: Daemon,
    relay: Option<Relay>,
    is_dead: bool,
}

impl Pool {
    /// Starts a pool and waits until one master leads, the others stand by, and every node is live.
    pub fn start(options: Options) -> anyhow::Result<Self> {
        let directory = TempDir::with_prefix("kvpool-test-")?;
        let net = match &options.layout {
            Layout::Cuttable(net) => Some(Arc::clone(net)),
            _ => None,
        };
        let store = Store::start(directory.path(), options.etcd, net)?;
        let mut pool = Self {
            options,
            masters: Vec::new(),
            nodes: Vec::new(),
            store,
            directory,
        };
        for index in 0..pool.options.masters {
            let relay = match pool.options.layout {
                Layout::Relayed => Some(Relay::listen("127.0.0.1:0")?),
                _ => None,
            };
            let daemon = pool.start_master(index, relay.as_ref(), None)?;
            if let Some(relay) = &relay {
                relay.to(&daemon.listen);
            }
            pool.masters.push(Master {
                daemon,
                relay,
                is_dead: false,
            });
        }
        for index in 0..pool.options.nodes {
            let node = pool.start_node(index)?;
            pool.nodes.push(node);
        }
        pool.wait_settled()?;
        pool.wait_live(pool.options.nodes)?;
        Ok(pool)
    }

    fn start_master(
        &self,
        index: usize,
        relay: Option<&Relay>,
        listen: Option<&str>,
    ) -> anyhow::Result<Daemon> {
        let (host, name) = (self.host(&party(index)), party(index));
        let any_port = format!("{host}:0");
        let mut flags: Vec<String> = [
            "--etcd",
            &self.store.endpoints().join(","),
            "--cluster",
            "test",
            "--listen",
            listen.unwrap_or(&any_port),
            "--http-listen",
            &any_port,
            // The test's network of namespaces is not loopback.
            "--insecure",
        ]
        .map(str::to_owned)
        .into();
        if let Some(relay) = relay {
            flags.extend(["--advertise".into(), relay.address().to_string()]);
        }
        flags.extend(self.options.master.iter().cloned());
        let directory = self.directory.path().to_owned();
        self.at(&party(index), move || {
            Daemon::start("kvmaster", &directory, &name, &flags)
        })
    }

    fn start_node(&self, index: usize) -> anyhow::Result<Daemon> {
        let name = format!("node-{index}");
        let any_port = format!("{}:0", self.host(POOL));
        let socket = self.directory.path().join(format!("{name}.sock"));
        let mut flags: Vec<String> = [
            "--name",
            &name,
            "--listen",
            &any_port,
            "--http-listen",
            &any_port,
            "--insecure",
            "--segment",
            &self.options.segment,
            "--shm-path",
            &socket.display().to_string(),
        ]
        .map(str::to_owned)
        .into();
        for url in self.urls() {
            flags.extend(["--master".to_owned(), url]);
        }
        let more = self.options.node.iter();
        flags.extend(more.map(|flag| flag.replace("{node}", &name)));
        let directory = self.directory.path().to_owned();
        self.at(POOL, move || {
            Daemon::start("kvstore-node", &directory, &name, &flags)
        })
    }

    /// The address that a party listens on.
    fn host(&self, party: &str) -> String {
        match &self.options.layout {
            Layout::Cuttable(net) => net.address(party).to_string(),
            _ => "127.0.0.1".to_owned(),
        }
    }

    /// Runs `work` in a party's network.
    fn at<R: Send + 'static>(&self, party: &str, work: impl FnOnce() -> R + Send + 'static) -> R {
        match &self.options.layout {
            Layout::Cuttable(net) => net.run(party, |_| work()),
            _ => work(),
        }
    }

    /// The network of the pool, if it can be cut.
    pub fn net(&self) -> Option<&Net> {
        match &self.options.layout {
            Layout::Cuttable(net) => Some(net),
            _ => None,
        }
    }

    /// The directory with all files of this pool.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The addresses of the masters, for clients and nodes.
    pub fn urls(&self) -> Vec<String> {
        (0..self.masters.len())
            .map(|index| self.url(index))
            .collect()
    }

    /// The address of a master, for clients and nodes.
    pub fn url(&self, index: usize) -> String {
        let master = &self.masters[index];
        match &master.relay {
            Some(relay) => format!("{}{}", crate::trust::scheme(), relay.address()),
            None => format!("{}{}", crate::trust::scheme(), master.daemon.listen),
        }
    }

    /// A master's process.
    pub fn master(&self, index: usize) -> &Daemon {
        &self.masters[index].daemon
    }

    /// Options of a client of this pool.
    pub fn client_options(&self) -> ClientOptions {
        ClientOptions {
            masters: self.urls(),
            tls: crate::trust::trusted(),
            token_file: crate::trust::token_file(),
            ..ClientOptions::default()
        }
    }

    /// A client of this pool.
    pub async fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::connect(self.client_options()).await?)
    }

    /// Kills a master at once (SIGKILL).
    pub fn kill(&mut self, index: usize) -> anyhow::Result<()> {
        self.masters[index].is_dead = true;
        self.masters[index].daemon.kill()
    }

    /// Terminates a master (SIGTERM) and waits for its end.
    pub fn terminate(&mut self, index: usize) -> anyhow::Result<()> {
        self.masters[index].is_dead = true;
        self.masters[index].daemon.terminate().map(drop)
    }

    /// Starts a master again on its port, after it was killed.
    pub fn restart(&mut self, index: usize) -> anyhow::Result<()> {
        let master = &self.masters[index];
        let listen = master.daemon.listen.clone();
        let daemon = self.start_master(index, master.relay.as_ref(), Some(&listen))?;
        self.masters[index].daemon = daemon;
        self.masters[index].is_dead = false;
        Ok(())
    }

    /// Stops a master (SIGSTOP).
    pub fn pause(&self, index: usize) -> anyhow::Result<()> {
        self.masters[index].daemon.pause()
    }

    /// Continues a stopped master (SIGCONT).
    pub fn resume(&self, index: usize) -> anyhow::Result<()> {
        self.masters[index].daemon.resume()
    }

    /// Refuses connections to a master and ends open ones. Needs [`Layout::Relayed`]. The master
    /// itself continues, and still reaches etcd.
    pub fn refuse(&mut self, index: usize) {
        let relay = self.masters[index].relay.as_mut();
        relay.expect("a relayed pool").close();
    }

    /// Admits connections to a master again.
    pub fn accept(&mut self, index: usize) -> anyhow::Result<()> {
        let relay = self.masters[index].relay.as_mut();
        relay.expect("a relayed pool").open()
    }

    /// Kills a node at once and starts it again, as a new incarnation of the same name.
    pub fn replace_node(&mut self, index: usize) -> anyhow::Result<()> {
        self.nodes[index].kill()?;
        self.nodes[index] = self.start_node(index)?;
        Ok(())
    }
}
