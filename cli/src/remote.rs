//! A child process that executes commands, one JSON line each.
//!
//! ```text
//!  Handle::call ──Command, one JSON line──► stdin of the same program in another role
//!               ◄──Reply, one JSON line───
//! ```

use crate::exit;
use crate::process::{Child, Streams};
use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::Write;
use std::marker::PhantomData;
use std::path::Path;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::sync::Mutex;

/// A process's reply to a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply<A> {
    /// The command was executed.
    Done(A),
    /// The process failed and ends.
    Failed(Failed),
}

/// Why a process failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The message for the user.
    pub message: String,
    /// Whether the pool cannot be reached: exit code 4.
    pub unreachable: bool,
    /// The number of corrupted blocks.
    pub wrong_blocks: u64,
}

/// A running process that takes commands `C` and answers `A`. Dropping it kills the process.
#[derive(Debug)]
pub struct Handle<C, A> {
    name: String,
    id: u32,
    // One command at a time: its answer is the next line.
    inner: Mutex<Inner>,
    speaks: PhantomData<fn(C) -> A>,
}

#[derive(Debug)]
struct Inner {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    child: Child,
}

impl<C: Serialize, A: DeserializeOwned> Handle<C, A> {
    /// Starts this program with `arguments`. `name` names the process in messages and its log in
    /// `directory`; `environment` is added to the environment.
    ///
    /// Call it on the main thread: the kernel kills the child when the thread that started it ends.
    ///
    /// # Errors
    ///
    /// The log cannot be created, or the process cannot be started.
    pub fn start(
        name: &str,
        arguments: &[OsString],
        environment: &[(&str, &str)],
        directory: &Path,
    ) -> anyhow::Result<Self> {
        let own = std::env::current_exe().context("cannot find the path of this program")?;
        let log = directory.join(format!("{name}.log"));
        let mut child = Child::start(name, &own, arguments, environment, Streams::Pipes, log)?;
        let id = child.id().context("the child process ended at once")?;
        let (input, output) = child
            .take_pipes()
            .expect("invariant: the child was started with pipes");
        Ok(Self {
            name: name.to_owned(),
            id,
            inner: Mutex::new(Inner {
                input,
                output: BufReader::new(output).lines(),
                child,
            }),
            speaks: PhantomData,
        })
    }

    /// The name of the process in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process id.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Waits for the first reply, which the process sends without a command.
    ///
    /// # Errors
    ///
    /// The process has failed or ended.
    pub async fn greeting(&self) -> anyhow::Result<A> {
        self.inner.lock().await.answer(&self.name).await
    }

    /// Sends a command and waits for the reply.
    ///
    /// # Errors
    ///
    /// The process has failed or ended. The error carries the exit code of the failure.
    pub async fn call(&self, command: &C) -> anyhow::Result<A> {
        let mut line = serde_json::to_vec(command).context("cannot encode a command")?;
        line.push(b'\n');
        let mut inner = self.inner.lock().await;
        if inner.input.write_all(&line).await.is_err() {
            bail!("{} has ended{}", self.name, inner.child.log_tail());
        }
        inner.answer(&self.name).await
    }

    /// Stops the process in order, by closing its input.
    pub async fn stop(self) {
        let Inner { input, child, .. } = self.inner.into_inner();
        drop(input);
        child.stop().await;
    }
}

impl Inner {
    async fn answer<A: DeserializeOwned>(&mut self, name: &str) -> anyhow::Result<A> {
        let line = self
            .output
            .next_line()
            .await
            .with_context(|| format!("cannot read from {name}"))?;
        let Some(line) = line else {
            bail!("{name} has ended{}", self.child.log_tail());
        };
        let reply = serde_json::from_str(&line)
            .with_context(|| format!("{name} sent an invalid reply: {line}"))?;
        match reply {
            Reply::Done(answer) => Ok(answer),
            Reply::Failed(failed) => Err(failed.into_error(name)),
        }
    }
}

impl<A: Serialize> Reply<A> {
    /// Converts a result into a reply.
    pub fn of(result: anyhow::Result<A>) -> Self {
        match result {
            Ok(answer) => Self::Done(answer),
            Err(error) => Self::Failed(Failed {
                message: format!("{error:#}"),
                unreachable: error.is::<exit::Unreachable>(),
                wrong_blocks: error
                    .downcast_ref::<exit::WrongBytes>()
                    .map_or(0, |wrong| wrong.blocks),
            }),
        }
    }

    /// Writes the reply to standard output as one line.
    ///
    /// # Errors
    ///
    /// Standard output is closed.
    pub fn send(&self) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(self).context("cannot encode a reply")?;
        line.push(b'\n');
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(&line)?;
        stdout.flush()?;
        Ok(())
    }

    /// Whether this is the last reply.
    pub const fn is_last(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

impl Failed {
    /// The error with the same exit code as in the process itself.
    fn into_error(self, name: &str) -> anyhow::Error {
        let message = format!("{name}: {}", self.message);
        if self.wrong_blocks > 0 {
            let wrong = exit::WrongBytes {
                blocks: self.wrong_blocks,
            };
            return anyhow::Error::new(wrong).context(message);
        }
        if self.unreachable {
            return exit::Unreachable(message).into();
        }
        anyhow::Error::msg(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_exit_code_on_the_way() {
        let errors: [(anyhow::Error, u8); 3] = [
            (exit::WrongBytes { blocks: 2 }.into(), 5),
            (exit::Unreachable("nobody".to_owned()).into(), 4),
            (anyhow::anyhow!("else"), 1),
        ];
        for (error, code) in errors {
            assert_eq!(exit::code(&error), code);
            let line = serde_json::to_string(&Reply::<u8>::of(Err(error))).unwrap();
            let Reply::Failed(failed) = serde_json::from_str::<Reply<u8>>(&line).unwrap() else {
                panic!("{line}");
            };
            assert_eq!(exit::code(&failed.into_error("worker")), code);
        }
    }
}
