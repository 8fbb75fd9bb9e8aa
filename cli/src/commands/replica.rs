//! `kvctl replica`: replicas copied, moved and dropped by the pool itself.

use crate::connection::{control_error, parse_key};
use crate::context::Context;
use crate::output;
use anyhow::bail;
use clap::Subcommand;
use clap::builder::NonEmptyStringValueParser;
use kvpool_client::{
    Client, Key, ReplicaBlocks, ReplicaChange, ReplicaTask, ReplicaTaskState, ReplicaWish,
};
use serde::Serialize;
use std::time::Duration;

/// The names of the states in JSON and tables.
const fn state_label(state: ReplicaTaskState) -> &'static str {
    match state {
        ReplicaTaskState::Running => "running",
        ReplicaTaskState::Done => "done",
        ReplicaTaskState::Failed => "failed",
        ReplicaTaskState::Cancelled => "cancelled",
    }
}

/// Copy, move or drop replicas of blocks, or show the tasks that do
///
/// The leader works through a task, the block that was used last first. Bytes go from store node to
/// store node. Each command waits for the task's end, unless --no-wait is given.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl replica copy greeting --to node-2
  kvctl replica move --from node-1 --to node-2 --every-block
  kvctl replica drop greeting --from node-1
  kvctl replica tasks")]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Give each block one more replica on each target
    Copy(Copy),
    /// Move a replica of each block to another node
    Move(Move),
    /// Drop a replica of each block; the last readable one stays
    Drop(Drop),
    /// Show the tasks that the leader knows
    Tasks,
    /// End a task; what it has changed stays
    Cancel(Cancel),
}

#[derive(Debug, clap::Args)]
struct Which {
    /// The keys
    #[arg(value_parser = parse_key, required_unless_present_any = ["pattern", "every_block"])]
    keys: Vec<Key>,
    /// Every block of the namespace in whose key this regular expression matches anywhere
    #[arg(long, value_name = "REGEX", conflicts_with_all = ["keys", "every_block"])]
    pattern: Option<String>,
    /// Every block of every namespace that has a replica on --from
    #[arg(long, conflicts_with = "keys", requires = "from")]
    every_block: bool,
    /// Return when the task has begun
    #[arg(long)]
    no_wait: bool,
}

#[derive(Debug, clap::Args)]
struct Copy {
    #[command(flatten)]
    which: Which,
    /// With --every-block: the node whose blocks are copied
    #[arg(long, value_name = "NODE", value_parser = NonEmptyStringValueParser::new())]
    from: Option<String>,
    /// The node that gets the replica; repeat it for several. Without it: the node with the most room
    #[arg(long, value_name = "NODE", value_parser = NonEmptyStringValueParser::new())]
    to: Vec<String>,
    /// Evict blocks that were used earlier where a target has no free room
    #[arg(long)]
    evict: bool,
}

#[derive(Debug, clap::Args)]
struct Move {
    #[command(flatten)]
    which: Which,
    /// The node whose replica moves. Without it: any
    #[arg(long, value_name = "NODE", value_parser = NonEmptyStringValueParser::new())]
    from: Option<String>,
    /// The node that gets the replica. Without it: the node with the most room
    #[arg(long, value_name = "NODE", value_parser = NonEmptyStringValueParser::new())]
    to: Option<String>,
    /// Evict blocks that were used earlier where a target has no free room
    #[arg(long)]
    evict: bool,
}

#[derive(Debug, clap::Args)]
struct Drop {
    #[command(flatten)]
    which: Which,
    /// The node whose replica is dropped
    #[arg(long, value_name = "NODE", value_parser = NonEmptyStringValueParser::new())]
    from: String,
}

#[derive(Debug, clap::Args)]
struct Cancel {
    /// The task's id, as `kvctl replica tasks` shows it
    #[arg(value_name = "TASK_ID", value_parser = parse_id)]
    id: u64,
}

#[derive(Serialize)]
struct Shown {
    id: String,
    change: &'static str,
    state: &'static str,
    from: String,
    to: Vec<String>,
    blocks: u64,
    changed: u64,
    gone: u64,
    failed: u64,
    bytes: u64,
    age_seconds: f64,
    failure: Option<String>,
}

impl From<ReplicaTask> for Shown {
    fn from(task: ReplicaTask) -> Self {
        Self {
            id: format!("{:016x}", task.id),
            change: match task.change {
                ReplicaChange::Copy => "copy",
                ReplicaChange::Move => "move",
                ReplicaChange::Drop => "drop",
            },
            state: state_label(task.state),
            from: task.from,
            to: task.to,
            blocks: task.blocks,
            changed: task.changed,
            gone: task.gone,
            failed: task.failed,
            bytes: task.bytes.0,
            age_seconds: task.age.as_secs_f64(),
            failure: task.failure.map(|(code, why)| format!("{code}: {why}")),
        }
    }
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let (wish, no_wait) = match args.command {
        Command::Copy(copy) => (
            ReplicaWish {
                change: ReplicaChange::Copy,
                blocks: copy.which.blocks(),
                from: copy.from,
                to: copy.to,
                evict: copy.evict,
            },
            copy.which.no_wait,
        ),
        Command::Move(moved) => (
            ReplicaWish {
                change: ReplicaChange::Move,
                blocks: moved.which.blocks(),
                from: moved.from,
                to: moved.to.into_iter().collect(),
                evict: moved.evict,
            },
            moved.which.no_wait,
        ),
        Command::Drop(dropped) => (
            ReplicaWish {
                change: ReplicaChange::Drop,
                blocks: dropped.which.blocks(),
                from: Some(dropped.from),
                to: Vec::new(),
                evict: false,
            },
            dropped.which.no_wait,
        ),
        Command::Tasks => {
            let tasks = client.replica_tasks(&[]).await.map_err(control_error)?;
            return show(tasks, context);
        }
        Command::Cancel(cancel) => {
            let tasks = client.cancel_replica_tasks(&[cancel.id]).await;
            let tasks = tasks.map_err(control_error)?;
            if tasks.is_empty() {
                bail!("the leader knows no task {:016x}", cancel.id);
            }
            return show(tasks, context);
        }
    };
    let begun = client.change_replicas(&wish).await.map_err(control_error)?;
    let task = match no_wait {
        true => begun,
        false => wait(&client, begun.id).await?,
    };
    let failure = task.failure.clone();
    let (state, failed) = (task.state, task.failed);
    show(vec![task], context)?;
    match (state, failure) {
        (ReplicaTaskState::Failed, Some((code, why))) => {
            bail!("blocks that were not changed: {failed}; the last reason: {why} ({code})")
        }
        _ => Ok(()),
    }
}

/// Waits for a task's end.
pub(super) async fn wait(client: &Client, id: u64) -> anyhow::Result<ReplicaTask> {
    loop {
        let task = client.wait_replica_task(id, Duration::from_secs(1)).await;
        match task.map_err(control_error)? {
            None => bail!(
                "task {id:016x} has ended with its leader: run the command again, it changes what is left"
            ),
            Some(task) if task.state != ReplicaTaskState::Running => return Ok(task),
            Some(_) => {}
        }
    }
}

fn show(tasks: Vec<ReplicaTask>, context: &Context) -> anyhow::Result<()> {
    let tasks: Vec<Shown> = tasks.into_iter().map(Shown::from).collect();
    context.output.show(&tasks, |tasks| {
        if tasks.is_empty() {
            return "no tasks".to_owned();
        }
        let mut table = output::table([
            "task", "change", "state", "from", "to", "blocks", "changed", "skipped", "failed",
            "bytes",
        ]);
        for task in tasks {
            let or_any = |name: &str| if name.is_empty() { "any" } else { name }.to_owned();
            table.add_row([
                task.id.clone(),
                task.change.to_owned(),
                task.state.to_owned(),
                or_any(&task.from),
                or_any(&task.to.join(" ")),
                output::count(task.blocks),
                output::count(task.changed),
                output::count(task.gone),
                output::count(task.failed),
                output::count(task.bytes),
            ]);
        }
        table.to_string()
    })
}

impl Which {
    fn blocks(&self) -> ReplicaBlocks {
        match &self.pattern {
            Some(pattern) => ReplicaBlocks::Pattern(pattern.clone()),
            None if self.every_block => ReplicaBlocks::OnNode,
            None => ReplicaBlocks::Keys(self.keys.clone()),
        }
    }
}

fn parse_id(text: &str) -> Result<u64, String> {
    // A parsed number may also begin with a sign.
    let is_id = text.len() == 16 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    let id = is_id.then(|| u64::from_str_radix(text, 16).ok());
    id.flatten()
        .ok_or_else(|| "a task id has 16 hexadecimal digits".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_id_has_hexadecimal_digits_alone() {
        assert_eq!(parse_id("00ff00ff00ff00ff"), Ok(0x00ff_00ff_00ff_00ff));
        for wrong in ["+0ff00ff00ff00ff", "ff", "", "xxxxxxxxxxxxxxxx"] {
            assert!(parse_id(wrong).is_err(), "{wrong}");
        }
    }
}
