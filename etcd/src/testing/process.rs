//! etcd as a child process, alone or as a cluster.

use super::certificates::Certificates;
use crate::client::{Client, Link, Options, Repeat};
use crate::error::Error;
use crate::generated;
use crate::kv::Range;
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// How long etcd may take to answer after its start.
const PATIENCE: Duration = Duration::from_secs(30);
/// Ports below the range for outgoing connections, so that a port stays free while its server is down.
const PORTS: std::ops::Range<u16> = 18_000..32_000;
/// How often a start is tried again on other ports.
const TRIES: u32 = 5;

/// Why there is no etcd.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// It is not on this machine.
    #[error(
        "etcd is not installed (package etcd-server): put it into the path or name it in KVPOOL_ETCD"
    )]
    NotInstalled,
    /// Its process could not be started, stopped or given its files.
    #[error("etcd's process: {0}")]
    Io(#[from] std::io::Error),
    /// It ended before it answered.
    #[error("etcd ended before it answered:\n{0}")]
    Ended(String),
    /// It did not answer.
    #[error("etcd did not answer within {PATIENCE:?} ({error}):\n{log}")]
    Silent {
        /// The error of the last attempt.
        error: Error,
        /// The end of its log.
        log: String,
    },
    /// Its user could not be made.
    #[error("etcd's user could not be made: {0}")]
    User(Error),
    /// Its certificates could not be made.
    #[error("etcd's certificates could not be made: {0}")]
    Certificates(String),
}

/// Where the etcd binary is.
pub fn binary() -> Result<PathBuf, StartError> {
    if let Some(named) = std::env::var_os("KVPOOL_ETCD") {
        return Ok(named.into());
    }
    in_path("etcd").ok_or(StartError::NotInstalled)
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|file| file.is_file())
}

/// How etcd is started.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// The size of its file at which it takes no more.
    pub quota_bytes: Option<u64>,
    /// Clients speak TLS and show a certificate.
    pub tls: bool,
    /// Clients are the user `root` with this password.
    pub password: Option<String>,
    /// More flags.
    pub flags: Vec<String>,
}

/// One etcd process. Dropping it kills it; its data stays in its directory.
#[derive(Debug)]
pub struct Etcd {
    child: Child,
    binary: PathBuf,
    arguments: Vec<OsString>,
    endpoint: String,
    log: PathBuf,
    certificates: Option<Certificates>,
    password: Option<String>,
}

impl Etcd {
    /// Starts a single etcd with its files in `directory`, and waits until it answers.
    pub async fn start(directory: &Path) -> Result<Self, StartError> {
        Self::start_with(directory, &Setup::default()).await
    }

    /// Like [`Etcd::start`], with a setup.
    pub async fn start_with(directory: &Path, setup: &Setup) -> Result<Self, StartError> {
        let mut members = start_members(directory, 1, setup).await?;
        // Invariant: one member was asked for.
        members.pop().ok_or(StartError::NotInstalled)
    }

    /// Where it serves clients: itself alone.
    pub fn endpoints(&self) -> Vec<String> {
        vec![self.endpoint.clone()]
    }

    /// The options for a client of this etcd.
    pub fn options(&self) -> Options {
        Options {
            user: self
                .password
                .clone()
                .map(|password| ("root".to_owned(), password)),
            tls: self.certificates.as_ref().map(Certificates::client),
            ..Options::new(self.endpoints())
        }
    }

    /// A client of it.
    pub fn client(&self) -> Result<Client, Error> {
        Client::new(&self.options())
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything that it has logged.
    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Kills the process (SIGKILL) and waits until it has ended.
    pub fn kill(&mut self) -> Result<(), StartError> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Starts it again on the same data and ports after [`Etcd::kill`], and waits until it answers.
    pub async fn restart(&mut self) -> Result<(), StartError> {
        self.spawn_again()?;
        self.settle(self.options()).await
    }

    /// Starts the process again without waiting, because it may not answer while other members are
    /// down.
    pub fn spawn_again(&mut self) -> Result<(), StartError> {
        self.child = spawn(&self.binary, &self.arguments, &self.log)?;
        Ok(())
    }

    /// Pauses the process (SIGSTOP).
    pub fn pause(&self) -> Result<(), StartError> {
        self.signal(Signal::STOP)
    }

    /// Continues a paused process.
    pub fn resume(&self) -> Result<(), StartError> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<(), StartError> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| std::io::Error::other("no such process"))?;
        kill_process(pid, signal).map_err(|e| StartError::Io(e.into()))
    }

    /// Waits until this etcd has a leader and answers.
    async fn settle(&mut self, options: Options) -> Result<(), StartError> {
        let limit = Instant::now() + PATIENCE;
        let client = Client::new(&options).map_err(StartError::User)?;
        loop {
            let error = match client.range(Range::key("/")).await {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            if self.child.try_wait()?.is_some() {
                return Err(StartError::Ended(end_of(&self.log_text())));
            }
            if Instant::now() > limit {
                let log = end_of(&self.log_text());
                return Err(StartError::Silent { error, log });
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// Several etcd processes that form one cluster.
#[derive(Debug)]
pub struct EtcdCluster {
    members: Vec<Etcd>,
}

impl EtcdCluster {
    /// Starts a cluster with its files in `directory`, and waits until every member answers.
    pub async fn start(directory: &Path, members: usize) -> Result<Self, StartError> {
        Self::start_with(directory, members, &Setup::default()).await
    }

    /// Like [`EtcdCluster::start`], with a setup for each member.
    pub async fn start_with(
        directory: &Path,
        members: usize,
        setup: &Setup,
    ) -> Result<Self, StartError> {
        let members = start_members(directory, members, setup).await?;
        Ok(Self { members })
    }

    /// Where all members serve clients.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().flat_map(Etcd::endpoints).collect()
    }

    /// The options for a client of the cluster.
    pub fn options(&self) -> Options {
        let first = self.members.first().map(Etcd::options);
        Options {
            endpoints: self.endpoints(),
            ..first.unwrap_or_else(|| Options::new(Vec::<String>::new()))
        }
    }

    /// A client of the cluster.
    pub fn client(&self) -> Result<Client, Error> {
        Client::new(&self.options())
    }

    /// How many members there are.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// A member, to be killed or paused.
    ///
    /// # Panics
    ///
    /// No member has this index.
    pub fn member(&mut self, index: usize) -> &mut Etcd {
        &mut self.members[index]
    }

    /// The index of the leader, according to the members that answer.
    pub async fn leader(&self) -> Result<usize, Error> {
        let client = self.client()?;
        let mut failed = Error::unavailable("no member says that one leads");
        for endpoint in 0..self.members.len() {
            match client.status(endpoint).await {
                Ok(status) if status.leader == Some(status.member) => return Ok(endpoint),
                Ok(_) => {}
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }
}

async fn start_members(
    directory: &Path,
    count: usize,
    setup: &Setup,
) -> Result<Vec<Etcd>, StartError> {
    let mut tries = 0;
    loop {
        tries += 1;
        match try_start(directory, count, setup).await {
            Err(StartError::Ended(log))
                if log.contains("address already in use") && tries < TRIES =>
            {
                for index in 0..count {
                    std::fs::remove_dir_all(directory.join(format!("etcd-{index}")))?;
                }
            }
            done => return done,
        }
    }
}

async fn try_start(directory: &Path, count: usize, setup: &Setup) -> Result<Vec<Etcd>, StartError> {
    let binary = binary()?;
    std::fs::create_dir_all(directory)?;
    let certificates = match setup.tls {
        true => Some(Certificates::generate(directory)?),
        false => None,
    };
    let ports = free_ports(2 * count)?;
    let peer = |index: usize| format!("http://127.0.0.1:{}", ports[2 * index + 1]);
    let all_peers: Vec<_> = (0..count)
        .map(|index| format!("m{index}={}", peer(index)))
        .collect();
    let mut members = Vec::new();
    for index in 0..count {
        let scheme = if setup.tls { "https" } else { "http" };
        let endpoint = format!("{scheme}://127.0.0.1:{}", ports[2 * index]);
        let data = directory.join(format!("etcd-{index}"));
        let mut arguments: Vec<OsString> = Vec::new();
        let mut flag = |name: &str, value: OsString| arguments.extend([name.into(), value]);
        flag("--name", format!("m{index}").into());
        flag("--data-dir", data.into());
        flag("--listen-client-urls", endpoint.clone().into());
        flag("--advertise-client-urls", endpoint.clone().into());
        flag("--listen-peer-urls", peer(index).into());
        flag("--initial-advertise-peer-urls", peer(index).into());
        flag("--initial-cluster", all_peers.join(",").into());
        flag("--logger", "zap".into());
        flag("--log-outputs", "stderr".into());
        if count == 1 {
            // A single member needs no long election timeout. So a restart answers sooner, and leases may last one
            // second.
            flag("--heartbeat-interval", "50".into());
            flag("--election-timeout", "500".into());
        }
        if let Some(quota) = setup.quota_bytes {
            flag("--quota-backend-bytes", quota.to_string().into());
        }
        if let Some(certificates) = &certificates {
            flag("--cert-file", certificates.server_cert.clone().into());
            flag("--key-file", certificates.server_key.clone().into());
            flag("--trusted-ca-file", certificates.ca.clone().into());
            arguments.push("--client-cert-auth".into());
        }
        arguments.extend(setup.flags.iter().map(Into::into));
        let log = directory.join(format!("etcd-{index}.log"));
        members.push(Etcd {
            child: spawn(&binary, &arguments, &log)?,
            binary: binary.clone(),
            arguments,
            endpoint,
            log,
            certificates: certificates.clone(),
            password: setup.password.clone(),
        });
    }
    for member in &mut members {
        let options = Options {
            user: None,
            ..member.options()
        };
        member.settle(options).await?;
    }
    if let (Some(password), Some(first)) = (&setup.password, members.first()) {
        ask_for_password(first, password)
            .await
            .map_err(StartError::User)?;
    }
    Ok(members)
}

fn spawn(binary: &Path, arguments: &[OsString], log: &Path) -> Result<Child, StartError> {
    let output = File::options().create(true).append(true).open(log)?;
    let mut command = match in_path("setpriv") {
        Some(setpriv) => {
            let mut command = Command::new(setpriv);
            command.args(["--pdeathsig", "KILL", "--"]).arg(binary);
            command
        }
        None => Command::new(binary),
    };
    let child = command
        .args(arguments)
        // etcd reads its flags from the environment as well.
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| !name.to_string_lossy().starts_with("ETCD_")))
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()?;
    Ok(child)
}

/// Creates the user `root` and enables authentication.
async fn ask_for_password(etcd: &Etcd, password: &str) -> Result<(), Error> {
    let client = Client::new(&Options {
        user: None,
        ..etcd.options()
    })?;
    let root = || "root".to_owned();
    let make = async |link: Link| {
        let mut auth = link.auth();
        auth.role_add(generated::RoleAddRequest { name: root() })
            .await?;
        auth.user_add(generated::UserAddRequest {
            name: root(),
            password: password.to_owned(),
        })
        .await?;
        auth.user_grant_role(generated::UserGrantRoleRequest {
            user: root(),
            role: root(),
        })
        .await?;
        auth.auth_enable(generated::AuthEnableRequest {}).await
    };
    client
        .call_within(Repeat::Once, PATIENCE, make)
        .await
        .map(|_| ())
}

/// Free ports on loopback. Each caller in this process gets different ports.
fn free_ports(count: usize) -> Result<Vec<u16>, StartError> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let spread = u16::try_from(std::process::id() % 139).unwrap_or(0) * 100;
    let mut found = Vec::new();
    for _ in PORTS {
        if found.len() == count {
            return Ok(found);
        }
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + spread.wrapping_add(step) % (PORTS.end - PORTS.start);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            found.push(port);
        }
    }
    Err(std::io::Error::other("no free port").into())
}

fn end_of(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
