//! A whole pool: one kvmaster and its store nodes.

use crate::Daemon;
use anyhow::bail;
use kvpool_client::{Client, Options as ClientOptions};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The parts of a pool.
#[derive(Clone, Debug)]
pub struct Options {
    /// The number of store nodes.
    pub nodes: usize,
    /// The size of each node's only segment, in the form of its flag.
    pub segment: String,
    /// More flags for kvmaster.
    pub master: Vec<String>,
    /// More flags for every kvstore-node.
    pub node: Vec<String>,
    /// The master's data directory, if it is outside the pool's own directory.
    pub data_dir: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nodes: 1,
            segment: "64MiB".into(),
            master: Vec::new(),
            node: Vec::new(),
            data_dir: None,
        }
    }
}

impl Options {
    /// Adds flags for kvmaster.
    #[must_use]
    pub fn master(mut self, flags: &[&str]) -> Self {
        self.master
            .extend(flags.iter().map(|flag| (*flag).to_owned()));
        self
    }
}

/// A pool of real processes in its own directory. Dropping it kills them.
#[derive(Debug)]
pub struct Cluster {
    options: Options,
    /// The master.
    pub master: Daemon,
    /// The store nodes, named node-0 and so on.
    pub nodes: Vec<Daemon>,
    // Declared after the daemons: a running one could make a file during the removal.
    directory: TempDir,
}

impl Cluster {
    /// Starts a pool and waits until every node is live.
    pub fn start(options: Options) -> anyhow::Result<Self> {
        let directory = TempDir::with_prefix("kvpool-test-")?;
        let master = start_master(directory.path(), &options, "127.0.0.1:0")?;
        let mut cluster = Self {
            options,
            master,
            nodes: Vec::new(),
            directory,
        };
        for _ in 0..cluster.options.nodes {
            cluster.add_node()?;
        }
        cluster.wait_live(cluster.options.nodes)?;
        Ok(cluster)
    }

    /// The directory with all files of this pool.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The master's URL, for clients.
    pub fn master_url(&self) -> String {
        format!("{}{}", crate::trust::scheme(), self.master.listen)
    }

    /// Starts one more node.
    pub fn add_node(&mut self) -> anyhow::Result<()> {
        let node = self.start_node(self.nodes.len())?;
        self.nodes.push(node);
        Ok(())
    }

    /// Starts node `index` again, as a new incarnation of the same name.
    pub fn restart_node(&mut self, index: usize) -> anyhow::Result<()> {
        self.nodes[index] = self.start_node(index)?;
        Ok(())
    }

    /// The path of node `index`'s Unix socket.
    pub fn node_socket(&self, index: usize) -> PathBuf {
        self.directory().join(format!("node-{index}.sock"))
    }

    /// Starts another process of node `index`. An earlier process may still run.
    pub fn start_node(&self, index: usize) -> anyhow::Result<Daemon> {
        let (name, flags) = self.node_flags(index);
        Daemon::start("kvstore-node", self.directory(), &name, &flags)
    }

    /// Starts a process of node `index` without waiting until it serves.
    pub fn spawn_node(&self, index: usize) -> anyhow::Result<Daemon> {
        let (name, flags) = self.node_flags(index);
        Daemon::spawn("kvstore-node", self.directory(), &name, &flags)
    }

    fn node_flags(&self, index: usize) -> (String, Vec<String>) {
        let name = format!("node-{index}");
        let socket = self.node_socket(index);
        let mut flags = flags(&[
            "--master",
            &self.master_url(),
            "--name",
            &name,
            "--listen",
            "127.0.0.1:0",
            "--http-listen",
            "127.0.0.1:0",
            "--segment",
            &self.options.segment,
            "--shm-path",
            &socket.display().to_string(),
        ]);
        flags.extend(self.options.node.iter().cloned());
        (name, flags)
    }

    /// The flags of a small node `name` of the master at `url`, followed by `more`. The flags of a
    /// cluster's own nodes are not included.
    pub fn flags_of_node(url: &str, name: &str, more: &[&str]) -> Vec<String> {
        let own = [
            "--master",
            url,
            "--name",
            name,
            "--segment",
            "16MiB",
            "--listen",
            "127.0.0.1:0",
            "--http-listen",
            "127.0.0.1:0",
            "--no-shm",
        ];
        flags(&[&own, more].concat())
    }

    /// Starts the master again on its data and its port, after it was killed.
    pub fn restart_master(&mut self) -> anyhow::Result<()> {
        let listen = self.master.listen.clone();
        self.master = start_master(self.directory.path(), &self.options, &listen)?;
        Ok(())
    }

    /// The master's data directory.
    pub fn data_dir(&self) -> PathBuf {
        let own = self.directory().join("master-data");
        self.options.data_dir.clone().unwrap_or(own)
    }

    /// Adds flags for the master, from its next start on.
    pub fn add_master_flags(&mut self, flags: &[&str]) {
        let flags = flags.iter().map(|flag| (*flag).to_owned());
        self.options.master.extend(flags);
    }

    /// The states of the nodes as the master sees them, by name.
    pub fn node_states(&self) -> anyhow::Result<Vec<(String, String)>> {
        let nodes: serde_json::Value =
            serde_json::from_str(&self.master.http_get("/api/v1/nodes")?)?;
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let nodes = nodes.as_array().cloned().unwrap_or_default();
        Ok(nodes
            .iter()
            .map(|node| (text(&node["name"]), text(&node["state"])))
            .collect())
    }

    /// Waits until `count` nodes are live.
    pub fn wait_live(&self, count: usize) -> anyhow::Result<()> {
        self.wait_for(&format!("{count} live nodes"), || {
            Ok(self
                .node_states()?
                .iter()
                .filter(|(_, state)| state == "live")
                .count()
                == count)
        })
    }

    /// Waits until `condition` holds. Fails after 30 s with an error that names `what`.
    pub fn wait_for(
        &self,
        what: &str,
        mut condition: impl FnMut() -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let limit = Instant::now() + Duration::from_secs(30);
        while !condition()? {
            if Instant::now() > limit {
                bail!(
                    "{what}: not within 30 s; nodes {:?}; counters {}\n{}",
                    self.node_states()?,
                    self.master.http_get("/api/v1/counters")?,
                    self.logs()
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The last lines that each daemon logged.
    fn logs(&self) -> String {
        let mut all = String::new();
        for daemon in self.nodes.iter().chain([&self.master]) {
            let text = daemon.log_text();
            let lines: Vec<&str> = text.lines().collect();
            let tail = lines.len().saturating_sub(25);
            all.push_str("--- a daemon's log ends with\n");
            for line in lines.iter().skip(tail) {
                all.push_str(line);
                all.push('\n');
            }
        }
        all
    }

    /// The master's counters, from the JSON of /api/v1/counters.
    pub fn counters(&self) -> anyhow::Result<serde_json::Value> {
        Ok(serde_json::from_str(
            &self.master.http_get("/api/v1/counters")?,
        )?)
    }

    /// One number at the top level of the counters.
    pub fn gauge(&self, name: &str) -> anyhow::Result<u64> {
        let counters = self.counters()?;
        counters[name]
            .as_u64()
            .ok_or_else(|| anyhow::anyhow!("no {name} in {counters}"))
    }

    /// Options of a client of this pool.
    pub fn client_options(&self) -> ClientOptions {
        ClientOptions {
            masters: vec![self.master_url()],
            tls: crate::trust::trusted(),
            token_file: crate::trust::token_file(),
            ..ClientOptions::default()
        }
    }

    /// A client of this pool.
    pub async fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::connect(self.client_options()).await?)
    }
}

fn start_master(directory: &Path, options: &Options, listen: &str) -> anyhow::Result<Daemon> {
    let data = options.data_dir.clone();
    let data = data.unwrap_or_else(|| directory.join("master-data"));
    let data = data.display().to_string();
    let mut flags = flags(&[
        "--listen",
        listen,
        "--http-listen",
        "127.0.0.1:0",
        "--data-dir",
        &data,
    ]);
    flags.extend(options.master.iter().cloned());
    Daemon::start("kvmaster", directory, "master", &flags)
}

fn flags(flags: &[&str]) -> Vec<String> {
    flags.iter().map(|flag| (*flag).to_owned()).collect()
}
