//! The connection options of every command, and the exit codes of a client's errors.

mod flags;

use crate::exit;
use anyhow::Context as _;
use clap::Arg;
use kvpool_client::{
    BadMaster, Client, ClientFiles, ConnectError, ControlError, Credentials, DEFAULT_MASTER,
    GetError, NodeStats, Options, PoolStats, PutError, RemoveError, Timeouts, TransportChoice,
    parse_master,
};
use kvpool_tls::ClientTls;
use kvpool_types::Code;
use kvpool_types::namespace::Namespace;
use serde::Serialize;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// The pool to use, and how to connect to it.
#[derive(Clone, Debug)]
pub struct Connection {
    /// The addresses of the masters, separated by commas; `None` if none is named.
    pub master: Option<String>,
    /// The namespace of the keys.
    pub namespace: String,
    /// The transport between this process and the store nodes.
    pub transport: Transport,
    /// The file with the caller's token.
    pub token_file: Option<PathBuf>,
    /// The timeout of one operation.
    pub timeout: Duration,
    /// The certificates of the authority that signs the pool's certificates.
    pub tls_ca: Option<PathBuf>,
    /// The certificate to present to the pool.
    pub tls_cert: Option<PathBuf>,
    /// The private key of `tls_cert`.
    pub tls_key: Option<PathBuf>,
    /// The name that every certificate of the pool must have, instead of the called host.
    pub tls_server_name: Option<String>,
}

/// The transport of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// The fastest that both ends have: shared memory on one host, then RDMA, then TCP.
    Auto,
    /// Shared memory only.
    Shm,
    /// RDMA only.
    Rdma,
    /// TCP only.
    Tcp,
}

impl Transport {
    const fn flag(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

impl Connection {
    /// The same options for the pool of `master`.
    pub fn with_master(&self, master: &str) -> Self {
        Self {
            master: Some(master.to_owned()),
            ..self.clone()
        }
    }

    /// The addresses of the masters, separated by commas: the named ones, or the default address.
    pub fn master(&self) -> &str {
        self.master.as_deref().unwrap_or(DEFAULT_MASTER)
    }

    /// The addresses of the masters.
    pub(crate) fn masters(&self) -> Vec<String> {
        kvpool_client::masters(self.master())
    }

    /// The same options as arguments of a child process.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let tls = [
            ("--tls-ca", self.tls_ca.clone().map(OsString::from)),
            ("--tls-cert", self.tls_cert.clone().map(OsString::from)),
            ("--tls-key", self.tls_key.clone().map(OsString::from)),
            (
                "--tls-server-name",
                self.tls_server_name.clone().map(OsString::from),
            ),
        ];
        let tls = tls
            .into_iter()
            .filter_map(|(flag, value)| Some([flag.into(), value?]));
        let mut arguments: Vec<OsString> = vec![
            "--master".into(),
            self.master().into(),
            "--namespace".into(),
            self.namespace.clone().into(),
            "--transport".into(),
            self.transport.flag().into(),
            "--timeout".into(),
            humantime::format_duration(self.timeout).to_string().into(),
        ];
        arguments.extend(tls.flatten());
        if let Some(file) = &self.token_file {
            arguments.push("--token-file".into());
            arguments.push(file.clone().into());
        }
        arguments
    }

    /// The caller's token, or none. Fails if the named file holds none.
    pub(crate) fn credentials(&self) -> anyhow::Result<Credentials> {
        self.check_token_file()?;
        let file = self.token_file.as_ref();
        Ok(file.map_or_else(Credentials::default, |file| Credentials::file(file)))
    }

    /// Fails if a named file cannot be used, as a command does that connects.
    pub(crate) fn check_files(&self) -> anyhow::Result<()> {
        self.check_token_file()?;
        let opened = ClientTls::open(&self.tls());
        let opened = opened.map_err(|error| connect_error(ConnectError::Tls(error.to_string())));
        opened.map(drop)
    }

    /// The trusted authorities, and the certificate to present.
    pub(crate) fn tls(&self) -> ClientFiles {
        ClientFiles {
            ca: self.tls_ca.clone(),
            cert: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            server_name: self.tls_server_name.clone(),
            ..ClientFiles::from_environment()
        }
    }

    /// The options of the client library.
    pub fn options(&self) -> Options {
        Options {
            masters: self.masters(),
            namespace: Namespace {
                name: self.namespace.clone(),
                ..Namespace::default()
            },
            transport: match self.transport {
                Transport::Auto => TransportChoice::Auto,
                Transport::Shm => TransportChoice::Shm,
                Transport::Rdma => TransportChoice::Rdma,
                Transport::Tcp => TransportChoice::Tcp,
            },
            timeouts: Timeouts {
                connect: self.timeout,
                put: self.timeout,
                get: self.timeout,
                control: self.timeout,
            },
            token_file: self.token_file.clone(),
            tls: self.tls(),
            ..Options::default()
        }
    }

    /// Connects a client to the pool.
    ///
    /// # Errors
    ///
    /// No master answers, or the master refuses the client. The error carries the exit code.
    pub async fn connect(&self) -> anyhow::Result<Client> {
        self.check_token_file()?;
        Client::connect(self.options()).await.map_err(connect_error)
    }
}

impl Connection {
    /// A command without its token would be refused for another reason than the true one.
    fn check_token_file(&self) -> anyhow::Result<()> {
        let Some(file) = &self.token_file else {
            return Ok(());
        };
        let what = || format!("the token file {}", file.display());
        // A pipe gives its bytes once, to the client library.
        if std::fs::metadata(file).is_ok_and(|there| !there.is_file() && !there.is_dir()) {
            return Ok(());
        }
        let text = std::fs::read_to_string(file).with_context(what)?;
        if text.trim().is_empty() {
            anyhow::bail!("{} is empty", what());
        }
        Ok(())
    }
}

/// The longest timeout of an operation: gRPC knows no time without end.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// The default of the timeout of an operation.
const CALL_TIMEOUT: &str = "10s";

/// The timeout of one operation, for a command whose `--timeout` is the time that it waits. The id is that of
/// [`Connection::timeout`], so clap does not add that option to the command, and passes the value on to it.
pub(crate) fn call_timeout() -> Arg {
    Arg::new("timeout")
        .long("call-timeout")
        .value_name("TIME")
        .value_parser(parse_timeout)
        .default_value(CALL_TIMEOUT)
        .help("Timeout of one operation, such as 500ms or 10s")
        .help_heading("Connection")
}

pub(crate) fn parse_timeout(text: &str) -> Result<Duration, String> {
    let timeout = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match timeout <= LONGEST_TIMEOUT {
        true => Ok(timeout),
        false => Err("a timeout is at most 365d".to_owned()),
    }
}

/// The addresses of masters in the form that the client library calls.
fn parse_masters(text: &str) -> Result<String, BadMaster> {
    let masters = kvpool_client::masters(text);
    let masters: Result<Vec<String>, BadMaster> =
        masters.iter().map(|one| parse_master(one)).collect();
    Ok(masters?.join(","))
}

/// Attaches the exit code to a failed connect.
pub fn connect_error(error: ConnectError) -> anyhow::Error {
    match error {
        ConnectError::BadAddress { .. } | ConnectError::NoMasters | ConnectError::Tls(_) => {
            exit::Usage(error.to_string()).into()
        }
        ConnectError::Refused { ref source, .. } if is_unreachable(source.code) => {
            exit::Unreachable(error.to_string()).into()
        }
        error => error.into(),
    }
}

/// Attaches the exit code to a failed control call.
pub fn control_error(error: ControlError) -> anyhow::Error {
    if is_unreachable(error.code) {
        exit::Unreachable(error.to_string()).into()
    } else {
        error.into()
    }
}

/// Attaches the exit code to a failed remove.
pub fn remove_error(error: RemoveError) -> anyhow::Error {
    if is_unreachable(error.code()) {
        exit::Unreachable(error.to_string()).into()
    } else {
        error.into()
    }
}

/// Whether the code means that no master or node answered.
pub(crate) const fn is_unreachable(code: Code) -> bool {
    matches!(
        code,
        Code::Unreachable | Code::DeadlineExceeded | Code::NoNodes | Code::NotLeader
    )
}

/// A key from the command line.
pub(crate) fn parse_key(text: &str) -> Result<kvpool_types::Key, String> {
    kvpool_types::Key::parse(text).map_err(|error| error.to_string())
}

/// Attaches the exit code to a failed get.
pub fn get_error(error: GetError) -> anyhow::Error {
    if error.code() == Code::ChecksumMismatch {
        return exit::WrongBytes { blocks: 1 }.into();
    }
    if is_unreachable(error.code()) {
        return exit::Unreachable(error.to_string()).into();
    }
    error.into()
}

/// Attaches the exit code to a failed put.
pub fn put_error(error: PutError) -> anyhow::Error {
    if is_unreachable(error.code()) {
        return exit::Unreachable(error.to_string()).into();
    }
    error.into()
}

/// The message for a caller whose token shows only the namespaces of a pool.
pub(crate) const HIDDEN: &str =
    "this token does not show the pool's nodes and room: use one with the role operator or admin";

/// Whether the caller's token shows no more of the pool than its namespaces. Whoever sees all sees counters, also of a
/// pool that is empty.
pub(crate) fn is_hidden(stats: &PoolStats) -> bool {
    stats.counters.is_empty()
}

/// The message about a pool without live nodes: the cause and the remedy. `nodes` are the nodes that the leader
/// knows.
pub(crate) fn no_node(connection: &Connection, nodes: &[NodeStats]) -> String {
    let master = connection.master();
    if !nodes.is_empty() {
        let states: Vec<String> = nodes
            .iter()
            .map(|node| format!("{} is {}", node.name, node.state))
            .collect();
        return format!("no store node takes blocks: {}", states.join(", "));
    }
    format!(
        "no store node is connected to {master}: start one with `kvstore-node --master {master} \
         --segment SIZE`, or wait until it has touched its memory"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_has_an_end() {
        assert_eq!(parse_timeout("365d"), Ok(LONGEST_TIMEOUT));
        for wrong in ["366d", "99999999999999d", "soon"] {
            assert!(parse_timeout(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn masters_are_called_with_their_scheme() {
        let read = parse_masters("a:1, https://b:2");
        assert_eq!(read.as_deref(), Ok("http://a:1,https://b:2"));
        assert!(parse_masters("a:1,b").is_err());
    }
}
