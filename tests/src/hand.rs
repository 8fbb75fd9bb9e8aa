//! The `kvpool-test-hand` process. A test can stop, continue and kill it while it holds a write or
//! a view.

use crate::daemon::path_of;
use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// A running hand. Dropping it kills it.
#[derive(Debug)]
pub struct Hand {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Hand {
    /// Starts a hand with these arguments.
    pub fn start(arguments: &[&str]) -> anyhow::Result<Self> {
        let mut child = Command::new(path_of("kvpool-test-hand")?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take().context("a pipe")?;
        let stdout = BufReader::new(child.stdout.take().context("a pipe")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            child,
            stdin,
            lines,
        })
    }

    /// The next line that the process prints, within 20 s.
    pub fn line(&self) -> anyhow::Result<String> {
        self.lines
            .recv_timeout(Duration::from_secs(20))
            .context("the hand said nothing")
    }

    /// Every printed line that was not read yet.
    pub fn printed(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }

    /// Sends the process a line.
    pub fn say(&mut self, line: &str) -> anyhow::Result<()> {
        Ok(writeln!(self.stdin, "{line}")?)
    }

    /// Stops the process (SIGSTOP).
    pub fn pause(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)
    }

    /// Continues the process (SIGCONT).
    pub fn resume(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)
    }

    /// Kills the process and waits for its end.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        Ok(kill_process(pid.context("no such process")?, signal)?)
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}
