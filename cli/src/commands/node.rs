//! `kvctl node`: store nodes taken out of service, directories made for them, and waiting for them.

mod directory;
mod wait;

use crate::connection::control_error;
use crate::context::Context;
use crate::output;
use anyhow::bail;
use clap::Subcommand;
use kvpool_client::{Client, ReplicaTask, ReplicaTaskState};
use kvpool_types::Code;
use serde::Serialize;
use std::time::{Duration, Instant};

/// How often the progress of a drain is looked at.
const POLL: Duration = Duration::from_millis(200);

/// Take a store node out of service, or make directories for one
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl node drain node-2
  kvctl node drain node-2 --timeout 2m
  kvctl node directory /run/kvpool --owner 65532:65532")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Drain(Drain),
    Directory(directory::Args),
    Wait(wait::Args),
}

/// Move the blocks of a store node to other nodes, and give it no new ones
///
/// Blocks that were used last go first. Blocks on other nodes that were used earlier are evicted for them.
/// A block that stays is lost when the node stops. The node serves until then. It takes new blocks again
/// after a restart. The drain goes on when this command is interrupted. `kvctl status` shows the node as
/// `drained` once a stop loses no block. Its disks are still needed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  kvctl node drain node-2 --timeout 2m && systemctl stop kvstore-node")]
struct Drain {
    /// The node's name, as `kvctl status` shows it
    name: String,
    /// Stop moving blocks after this long
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    timeout: Duration,
    /// Drain the node also when no other node takes its blocks. The pool takes no puts then
    #[arg(long)]
    force: bool,
}

#[derive(Serialize)]
struct Outcome {
    node: String,
    moved: u64,
    bytes: u64,
    /// Blocks that are on the node only.
    left: u64,
    /// Why the last of these was not moved.
    reason: Option<String>,
    seconds: f64,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let Drain {
        name,
        timeout,
        force,
    } = match args.command {
        Command::Drain(drain) => drain,
        Command::Directory(args) => return directory::run(&args, context),
        Command::Wait(args) => return wait::run(&args, context).await,
    };
    let client = context.connection.connect().await?;
    let begun = Instant::now();
    let (mut moved, mut bytes) = (0, 0);
    let (left, failure) = loop {
        let task = match client.drain_node(&name, force).await {
            Err(error) if error.code == Code::LastNode => bail!(
                "{}. Nothing was changed: with --force these blocks are lost when the node stops, unless it \
                 copies them to an SSD",
                error.message
            ),
            begun => begun.map_err(control_error)?,
        };
        let Some(task) = wait(&client, task, begun + timeout).await? else {
            // The task has ended with its leader. Another one moves what is left.
            continue;
        };
        moved += task.changed;
        bytes += task.bytes.0;
        let left = task.blocks - task.changed - task.gone;
        // Puts that were under way may have ended on the node since: another look finds them.
        if task.blocks == 0 || task.changed == 0 || begun.elapsed() >= timeout {
            break (left, task.failure);
        }
    };
    let is_over = begun.elapsed() >= timeout;
    let is_full = !is_over && matches!(failure, Some((Code::Full, _)));
    let outcome = Outcome {
        node: name,
        moved,
        bytes,
        left,
        reason: failure.filter(|_| left > 0).map(|(_, why)| why),
        seconds: begun.elapsed().as_secs_f64(),
    };
    context.output.show(&outcome, said)?;
    // Old blocks stay when the other nodes are full. Any other reason is a fault to mend first.
    anyhow::ensure!(
        left == 0 || is_full,
        "{left} blocks would be lost with node {}: mend the cause and run the command again",
        outcome.node
    );
    Ok(())
}

fn said(outcome: &Outcome) -> String {
    let (moved, left) = (output::count(outcome.moved), output::count(outcome.left));
    let begin = format!(
        "node {} takes no new blocks: moved {moved} blocks in {:.1} s.",
        outcome.node, outcome.seconds
    );
    if outcome.left == 0 {
        return format!("{begin} It can be stopped now: `kvctl status` shows it as drained.");
    }
    let reason = outcome.reason.as_deref().unwrap_or("the time was over");
    format!(
        "{begin} {left} blocks are on this node only and leave the pool when it stops (last reason: {reason}). \
         `kvctl status` shows the node as drained once no such block is left."
    )
}

/// Waits until a task has ended, or ends it at `until`. `None` when its leader has gone.
async fn wait(
    client: &Client,
    task: ReplicaTask,
    until: Instant,
) -> anyhow::Result<Option<ReplicaTask>> {
    let id = task.id;
    let mut task = task;
    while task.state == ReplicaTaskState::Running {
        if Instant::now() >= until {
            let ended = client.cancel_replica_tasks(&[id]).await;
            let ended = ended.map_err(control_error)?.into_iter().next();
            return Ok(Some(ended.unwrap_or(task)));
        }
        let seen = client.wait_replica_task(id, POLL).await;
        match seen.map_err(control_error)? {
            Some(seen) => task = seen,
            None => return Ok(None),
        }
    }
    Ok(Some(task))
}
