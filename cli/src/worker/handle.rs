//! A worker process, seen from the process that tells it what to do.

use super::Options;
use super::protocol::{Answer, Command};
use crate::exit;
use crate::process::{Child, Streams};
use anyhow::{Context, bail};
use std::path::Path;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::sync::Mutex;

/// A running worker. Dropping it kills the process.
#[derive(Debug)]
pub(crate) struct Handle {
    name: String,
    // One command at a time: its answer is the next line.
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    child: Child,
}

impl Handle {
    /// Starts a worker called `name`, with its log in `directory`. Call it on the main thread.
    pub(crate) fn start(name: &str, options: &Options, directory: &Path) -> anyhow::Result<Self> {
        let own = std::env::current_exe().context("cannot tell where kvctl is")?;
        let log = directory.join(format!("{name}.log"));
        let mut child = Child::start(name, &own, &options.arguments(), Streams::Pipes, log)?;
        let (input, output) = child
            .take_pipes()
            .expect("invariant: the child was started with pipes");
        Ok(Self {
            name: name.to_owned(),
            inner: Mutex::new(Inner {
                input,
                output: BufReader::new(output).lines(),
                child,
            }),
        })
    }

    /// Waits until the worker has reached the pool.
    pub(crate) async fn ready(&self) -> anyhow::Result<()> {
        let mut inner = self.inner.lock().await;
        match inner.answer(&self.name).await? {
            Answer::Ready => Ok(()),
            other => bail!("{} began with {other:?}", self.name),
        }
    }

    /// Gives a command and waits for its answer.
    pub(crate) async fn call(&self, command: &Command) -> anyhow::Result<Answer> {
        let mut line = serde_json::to_vec(command).context("cannot write a command")?;
        line.push(b'\n');
        let mut inner = self.inner.lock().await;
        if inner.input.write_all(&line).await.is_err() {
            bail!("{} is gone{}", self.name, inner.child.log_tail());
        }
        inner.answer(&self.name).await
    }

    /// Lets the worker end in order: the end of its input tells it to.
    pub(crate) async fn stop(self) {
        let Inner { input, child, .. } = self.inner.into_inner();
        drop(input);
        child.stop().await;
    }
}

impl Inner {
    async fn answer(&mut self, name: &str) -> anyhow::Result<Answer> {
        let line = self
            .output
            .next_line()
            .await
            .with_context(|| format!("cannot hear {name}"))?;
        let Some(line) = line else {
            bail!("{name} is gone{}", self.child.log_tail());
        };
        let answer = serde_json::from_str(&line)
            .with_context(|| format!("{name} says what cannot be understood: {line}"))?;
        match answer {
            Answer::Failed(failed) if failed.unreachable => {
                Err(exit::Unreachable(format!("{name}: {}", failed.message)).into())
            }
            Answer::Failed(failed) => bail!("{name}: {}", failed.message),
            answer => Ok(answer),
        }
    }
}
