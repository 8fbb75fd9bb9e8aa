//! Child processes that cannot outlive this one.
//!
//! Every child starts through this program's hidden command `tether`. It asks the kernel for a SIGKILL at
//! the death of the parent and then replaces itself by the program. The children therefore end even if
//! this process is killed with SIGKILL. Otherwise dropping a `Child` kills it, and `Child::stop` stops it
//! in order.

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// The time between SIGTERM and SIGKILL.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of log lines in an error message.
const LOG_LINES: usize = 12;

/// A running program.
#[derive(Debug)]
pub(crate) struct Child {
    name: String,
    log: PathBuf,
    process: tokio::process::Child,
}

/// How a child's standard streams are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Streams {
    /// Standard input is empty; output and errors go to the log.
    Log,
    /// Input and output are pipes; errors go to the log.
    Pipes,
}

impl Child {
    /// Starts `program`, named `name` in messages, with its log at `log`.
    ///
    /// `environment` is added to the environment of this process.
    ///
    /// Call it on the main thread: the kernel kills the child when the starting thread ends.
    pub(crate) fn start(
        name: &str,
        program: &Path,
        arguments: &[OsString],
        environment: &[(&str, &str)],
        streams: Streams,
        log: PathBuf,
    ) -> anyhow::Result<Self> {
        let file =
            File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let own = std::env::current_exe().context("cannot find the path of this program")?;
        let mut command = tokio::process::Command::new(own);
        command
            .arg("tether")
            .arg(std::process::id().to_string())
            .arg(program)
            // The rest are arguments of the child, also where this program has a flag of that name.
            .arg("--")
            .args(arguments)
            .envs(environment.iter().copied())
            .stderr(
                file.try_clone()
                    .context("cannot duplicate the handle of the log")?,
            )
            // A separate process group: an interrupt at the terminal reaches this process alone,
            // which then ends its children in order.
            .process_group(0)
            .kill_on_drop(true);
        match streams {
            Streams::Log => command.stdin(Stdio::null()).stdout(file),
            Streams::Pipes => command.stdin(Stdio::piped()).stdout(Stdio::piped()),
        };
        let process = command
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        Ok(Self {
            name: name.to_owned(),
            log,
            process,
        })
    }

    /// The process id; `None` after its exit was observed.
    pub(crate) fn id(&self) -> Option<u32> {
        self.process.id()
    }

    /// Takes the child's input and output; `None` on a second call or without [`Streams::Pipes`].
    pub(crate) fn take_pipes(
        &mut self,
    ) -> Option<(tokio::process::ChildStdin, tokio::process::ChildStdout)> {
        Some((self.process.stdin.take()?, self.process.stdout.take()?))
    }

    /// Fails with the last lines of the log if the child has ended.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        let status = self
            .process
            .try_wait()
            .with_context(|| format!("cannot query the status of {}", self.name))?;
        match status {
            Some(status) => bail!("{} ended ({status}){}", self.name, self.log_tail()),
            None => Ok(()),
        }
    }

    /// The last lines of the child's log, as a suffix of a message.
    pub(crate) fn log_tail(&self) -> String {
        let Ok(text) = std::fs::read(&self.log) else {
            return String::new();
        };
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let (_, tail) = lines.split_at(lines.len().saturating_sub(LOG_LINES));
        if tail.is_empty() {
            return String::new();
        }
        format!("; last lines of its log:\n  {}", tail.join("\n  "))
    }

    /// Kills the child and waits for its exit.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        let killed = self.process.kill().await;
        killed.with_context(|| format!("cannot kill {}", self.name))
    }

    /// Sends SIGTERM, waits, and kills the child if it takes too long.
    pub(crate) async fn stop(mut self) {
        if let Some(pid) = self.process.id().and_then(pid) {
            // A failure means that the child has ended already.
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
        if tokio::time::timeout(STOP_TIMEOUT, self.process.wait())
            .await
            .is_err()
        {
            tracing::warn!(
                name = self.name,
                "process did not stop after SIGTERM: killed"
            );
            let _ = self.process.kill().await;
        }
    }
}

/// Runs a program that dies with the process that started it
///
/// Every program that starts a `Child` has it as the hidden command `tether`.
#[derive(Debug, clap::Args)]
pub struct Tether {
    /// The process id of the parent.
    parent: u32,
    /// The program.
    program: OsString,
    /// The arguments of the program.
    #[arg(last = true)]
    arguments: Vec<OsString>,
}

impl Tether {
    /// Replaces this process by the program, which the kernel kills when the parent dies. Returns only on
    /// failure.
    pub fn run(self) -> anyhow::Error {
        let Self {
            parent,
            program,
            arguments,
        } = self;
        if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
            return anyhow::Error::new(error).context("cannot set the parent-death signal");
        }
        // If the parent died before the kernel was asked, another process has adopted this one.
        if rustix::process::getppid() != pid(parent) {
            return anyhow::anyhow!("the parent process has ended");
        }
        let error = std::process::Command::new(&program).args(arguments).exec();
        anyhow::Error::new(error).context(format!("cannot run {}", Path::new(&program).display()))
    }
}

fn pid(raw: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(raw).ok()?)
}
