//! One daemon as a child process.

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The longest time for a daemon to serve, or to end.
const PATIENCE: Duration = Duration::from_secs(30);

static FILTER: OnceLock<String> = OnceLock::new();

/// Sets the log filter of daemons that this process starts later, in the form of `RUST_LOG`. Only
/// the first call has an effect.
pub fn log_at(filter: &str) {
    let _already = FILTER.set(filter.to_owned());
}

fn filter() -> String {
    let told = std::env::var("KVPOOL_TEST_LOG").unwrap_or("info".into());
    FILTER.get().cloned().unwrap_or(told)
}

/// A running daemon. Dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// The address of its main port, `host:port`.
    pub listen: String,
    /// The address of its HTTP port, `host:port`.
    pub http: String,
    log: PathBuf,
    ready: PathBuf,
}

impl Daemon {
    /// Starts a binary of this workspace and waits until it serves. Its log goes to
    /// `directory/name.log`.
    pub fn start(
        binary: &str,
        directory: &Path,
        name: &str,
        arguments: &[String],
    ) -> anyhow::Result<Self> {
        let mut daemon = Self::spawn(binary, directory, name, arguments)?;
        daemon.wait_until_it_serves()?;
        Ok(daemon)
    }

    /// Starts a binary of this workspace. Its addresses are empty until it serves.
    pub fn spawn(
        binary: &str,
        directory: &Path,
        name: &str,
        arguments: &[String],
    ) -> anyhow::Result<Self> {
        let ready = directory.join(format!("{name}.ready"));
        let _absent = std::fs::remove_file(&ready);
        let log = directory.join(format!("{name}.log"));
        let output = File::options().create(true).append(true).open(&log)?;
        let child = Command::new(path_of(binary)?)
            .args(arguments)
            .arg("--ready-file")
            .arg(&ready)
            .env("RUST_LOG", filter())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()?;
        Ok(Self {
            child,
            listen: String::new(),
            http: String::new(),
            log,
            ready,
        })
    }

    fn wait_until_it_serves(&mut self) -> anyhow::Result<()> {
        let limit = Instant::now() + PATIENCE;
        loop {
            if let Ok(text) = std::fs::read_to_string(&self.ready) {
                let addresses: serde_json::Value = serde_json::from_str(&text)?;
                let field = |name: &str| addresses[name].as_str().map(str::to_owned);
                self.listen = field("listen").context("the ready file names no listen")?;
                self.http = field("http").context("the ready file names no http")?;
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!(
                    "{}: ended with {status} before it served:\n{}",
                    self.ready.display(),
                    self.log_text()
                );
            }
            if Instant::now() > limit {
                bail!(
                    "{}: did not serve within {PATIENCE:?}:\n{}",
                    self.ready.display(),
                    self.log_text()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The daemon's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The whole log of the daemon.
    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.context("no such process")?, signal)?;
        Ok(())
    }

    /// Stops the process (SIGSTOP). When this returns, none of its threads runs.
    pub fn pause(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)?;
        let limit = Instant::now() + PATIENCE;
        while !self.is_stopped()? {
            if Instant::now() > limit {
                bail!("not stopped within {PATIENCE:?} of SIGSTOP");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn is_stopped(&self) -> anyhow::Result<bool> {
        for task in std::fs::read_dir(format!("/proc/{}/task", self.pid()))? {
            let stat = std::fs::read_to_string(task?.path().join("stat"))?;
            // The state follows the name, which is in parentheses and may contain anything.
            let state = stat.rsplit_once(") ").map(|(_, rest)| rest);
            if !state.is_some_and(|state| state.starts_with('T')) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Continues a stopped process (SIGCONT).
    pub fn resume(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)
    }

    /// Kills the process at once (SIGKILL) and waits for its end.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Asks the process to end (SIGTERM) and waits for its exit status.
    pub fn terminate(&mut self) -> anyhow::Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        let limit = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > limit {
                bail!(
                    "no end within {PATIENCE:?} of SIGTERM:\n{}",
                    self.log_text()
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the process ends by itself.
    pub fn wait_for_end(&mut self) -> anyhow::Result<ExitStatus> {
        let limit = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > limit {
                bail!("no end within {PATIENCE:?}:\n{}", self.log_text());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The body of a GET on its HTTP port.
    pub fn http_get(&self, path: &str) -> anyhow::Result<String> {
        crate::raw::http_get(&self.http, path)
    }

    /// The value of a metric without labels.
    pub fn metric(&self, name: &str) -> anyhow::Result<f64> {
        let text = self.http_get("/metrics")?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
            .with_context(|| format!("no metric {name} in:\n{text}"))?;
        Ok(line.trim().parse()?)
    }

    /// Changes one byte of the node's first segment without any message, as a memory fault would.
    pub fn flip_byte(&self, offset: u64) -> anyhow::Result<()> {
        use std::os::unix::fs::FileExt;
        for entry in std::fs::read_dir(format!("/proc/{}/fd", self.pid()))? {
            let path = entry?.path();
            let Ok(target) = std::fs::read_link(&path) else {
                continue;
            };
            if target.to_string_lossy().starts_with("/memfd:") {
                let memory = File::options().read(true).write(true).open(&path)?;
                let mut byte = [0];
                memory.read_exact_at(&mut byte, offset)?;
                memory.write_all_at(&[byte[0] ^ 0x10], offset)?;
                return Ok(());
            }
        }
        bail!("the process has no segment")
    }

    /// The number of threads of the process.
    pub fn threads(&self) -> anyhow::Result<usize> {
        Ok(std::fs::read_dir(format!("/proc/{}/task", self.pid()))?.count())
    }

    /// The resident memory of the process, in bytes.
    pub fn resident_bytes(&self) -> anyhow::Result<u64> {
        self.status_bytes("VmRSS:")
    }

    /// The peak resident memory of the process, in bytes.
    pub fn peak_bytes(&self) -> anyhow::Result<u64> {
        self.status_bytes("VmHWM:")
    }

    fn status_bytes(&self, name: &str) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .with_context(|| format!("no {name} line"))?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib * 1024)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// The path of a binary of this workspace, which is beside the directory of the running test.
pub fn path_of(binary: &str) -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let directory = test
        .ancestors()
        .find(|directory| directory.join(binary).is_file())
        .with_context(|| {
            format!("{binary} is not built: `cargo xtask test` builds it before the tests")
        })?;
    Ok(directory.join(binary))
}
