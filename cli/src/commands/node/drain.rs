//! `kvctl node drain`.

use crate::connection::{HIDDEN, call_timeout, control_error, is_hidden, parse_timeout};
use crate::context::Context;
use crate::output;
use anyhow::bail;
use clap::builder::NonEmptyStringValueParser;
use kvpool_client::{Client, ReplicaTask, ReplicaTaskState};
use kvpool_types::Code;
use serde::Serialize;
use std::time::{Duration, Instant};

/// How often the progress of a drain is looked at.
const POLL: Duration = Duration::from_millis(200);
/// How long the state of the node may take to follow the end of the last task, at least. The master looks about once a
/// second.
const SETTLES: Duration = Duration::from_secs(5);
/// How long the master may take to count the blocks that are left. Its looks at a large pool are rare.
const COUNTED: Duration = Duration::from_secs(30);
/// How long a node is seen live before its drain counts as cancelled. Another leader sees a draining node live for a
/// moment, before the node says that it drains.
const CANCELLED: Duration = Duration::from_secs(1);
/// How long a node may be silent while it settles. A new leader hears nodes only after a while.
const SILENT: Duration = Duration::from_secs(15);

/// Move the blocks of a store node to other nodes, and give it no new ones
///
/// Blocks that were used last go first. Blocks on other nodes that were used earlier are evicted for them.
/// A block that stays is lost when the node stops, unless the node's SSD has a copy. The node serves until then.
/// It takes new blocks again after a restart or `kvctl node undrain`. The drain goes on when this command is
/// interrupted. For a suspect node the command fails at once, and the drain waits until the node is heard again.
/// The command ends well once `kvctl status` shows the node as `drained`: a stop loses no block then.
/// Its disks are still needed. The command fails if a stop would lose blocks, unless --allow-loss is given.
#[derive(Debug, clap::Args)]
#[command(arg = call_timeout(), after_help = "\
Example:
  kvctl node drain node-2 --timeout 2m && systemctl stop kvstore-node")]
pub(super) struct Args {
    /// The node's name, as `kvctl status` shows it
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    name: String,
    /// Stop moving blocks after this long; 0s begins the drain, which goes on, and does not wait for it
    #[arg(id = "wait", long = "timeout", value_name = "TIME", default_value = "5m", value_parser = parse_timeout)]
    timeout: Duration,
    /// Drain the node also when no other node takes its blocks. The pool takes no puts then
    #[arg(long)]
    force: bool,
    /// End well also when a stop would lose blocks. The output names their number
    #[arg(long)]
    allow_loss: bool,
}

#[derive(Serialize)]
struct Outcome {
    node: String,
    /// The node's state at the end; `gone` for a node that has left the pool.
    state: String,
    moved: u64,
    bytes: u64,
    /// Blocks that are on the node only, and that a stop loses.
    left: u64,
    /// Blocks that did not move, and whose only copy is on the node's SSD.
    on_ssd: u64,
    /// Why the last of these was not moved.
    reason: Option<String>,
    seconds: f64,
}

/// What the tasks of a drain have done.
struct Moved {
    blocks: u64,
    bytes: u64,
    /// Those that the last task could not move.
    left: u64,
    failure: Option<(Code, String)>,
}

/// Runs it.
pub(super) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let begun = Instant::now();
    let moved = move_all(&client, &args, begun).await?;
    let is_over = begun.elapsed() >= args.timeout;
    let is_full = !is_over && matches!(moved.failure, Some((Code::Full, _)));
    let Settled {
        state,
        left,
        on_ssd,
    } = settle(&client, &args, &moved, begun).await?;
    let outcome = Outcome {
        moved: moved.blocks,
        bytes: moved.bytes,
        on_ssd,
        left,
        reason: moved.failure.filter(|_| moved.left > 0).map(|(_, why)| why),
        seconds: begun.elapsed().as_secs_f64(),
        node: args.name,
        state,
    };
    context.output.show(&outcome, said)?;
    outcome.check(is_full, args.allow_loss)
}

fn unheard(name: &str, state: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "node {name} is {state}: the master does not hear it, and cannot drain it now. It drains when the master hears \
         it again, unless the node restarts or another master leads by then. Run the command again when it is back"
    )
}

/// Fails for a node that the master hears no more. Nothing would happen until it is back.
async fn check_is_heard(client: &Client, name: &str) -> anyhow::Result<()> {
    let stats = client.stats().await.map_err(control_error)?;
    anyhow::ensure!(!is_hidden(&stats), HIDDEN);
    let node = stats.nodes.iter().find(|node| node.name == name);
    // A new leader hears an unreported node soon.
    match node.filter(|node| node.state == "suspect") {
        Some(node) => Err(unheard(name, &node.state)),
        None => Ok(()),
    }
}

fn cancelled(name: &str) -> anyhow::Error {
    anyhow::anyhow!("the drain of node {name} was cancelled: the node takes new blocks")
}

/// Begins tasks until one finds nothing more to move, or the time is over.
async fn move_all(client: &Client, args: &Args, begun: Instant) -> anyhow::Result<Moved> {
    let name = &args.name;
    let (mut blocks, mut bytes) = (0, 0);
    let mut has_begun = false;
    let mut back_until = begun;
    loop {
        // A drain that was cancelled meanwhile is not begun again.
        let asked = match has_begun {
            true => client.go_on_draining(name).await,
            false => client.drain_node(name, args.force).await,
        };
        let task = match asked {
            Err(error) if error.code == Code::LastNode => bail!(
                "{}. Nothing was changed: with --force these blocks are lost when the node stops, unless it \
                 copies them to an SSD",
                error.message
            ),
            Err(error) if error.code == Code::NotDraining => {
                if Instant::now() >= back_until {
                    return Err(cancelled(name));
                }
                tokio::time::sleep(POLL).await;
                continue;
            }
            asked => asked.map_err(control_error)?,
        };
        if !std::mem::replace(&mut has_begun, true) {
            check_is_heard(client, name).await?;
        }
        let waited = match args.timeout.is_zero() {
            // The task goes on without this command.
            true => Some(task),
            false => wait(client, task, begun + args.timeout).await?,
        };
        let Some(task) = waited else {
            // The task has ended with its leader. Another one moves what is left, once it has heard from the node
            // that it drains.
            back_until = Instant::now() + SETTLES;
            continue;
        };
        blocks += task.changed;
        bytes += task.bytes.0;
        let left = task.blocks - task.changed - task.gone;
        // Puts that were under way may have ended on the node since: another look finds them.
        if task.blocks == 0 || task.changed == 0 || begun.elapsed() >= args.timeout {
            return Ok(Moved {
                blocks,
                bytes,
                left,
                failure: task.failure,
            });
        }
    }
}

/// How the node is when its state follows what was moved.
struct Settled {
    state: String,
    /// Blocks that a stop loses.
    left: u64,
    /// Blocks that did not move, and whose only copy is on the node's SSD.
    on_ssd: u64,
}

/// Waits until the node is drained, or it is known how many blocks a stop loses. A node with an SSD copies there what
/// did not move, as long as their number changes.
async fn settle(
    client: &Client,
    args: &Args,
    moved: &Moved,
    begun: Instant,
) -> anyhow::Result<Settled> {
    let name = &args.name;
    let since = Instant::now();
    let settles = if args.timeout.is_zero() {
        Duration::ZERO
    } else {
        SETTLES
    };
    let most = (since + settles).max(begun + args.timeout);
    let mut live_since = None;
    let mut silent_since = None;
    let mut counted: Option<(u64, Instant)> = None;
    loop {
        let stats = client.stats().await.map_err(control_error)?;
        anyhow::ensure!(!is_hidden(&stats), HIDDEN);
        let now = Instant::now();
        let has_ssd = stats.media.iter().any(|medium| medium.node == *name);
        let Some(node) = stats.nodes.into_iter().find(|node| node.name == *name) else {
            let (state, left) = ("gone".to_owned(), moved.left);
            return Ok(Settled {
                state,
                left,
                on_ssd: 0,
            });
        };
        let settled = |state, left| Settled {
            state,
            left,
            on_ssd: if has_ssd {
                moved.left.saturating_sub(left)
            } else {
                0
            },
        };
        let state = node.state;
        live_since = (state == "live").then(|| live_since.unwrap_or(now));
        if live_since.is_some_and(|since| now >= since + CANCELLED) {
            return Err(cancelled(name));
        }
        let is_silent = matches!(state.as_str(), "suspect" | "unreported");
        silent_since = is_silent.then(|| silent_since.unwrap_or(now));
        if silent_since.is_some_and(|since| now >= since + SILENT) {
            return Err(unheard(name, &state));
        }
        if state == "drained" {
            return Ok(settled(state, 0));
        }
        if node.left_blocks != counted.map(|(left, _)| left) {
            counted = node.left_blocks.map(|left| (left, now));
        }
        // Without an SSD nothing else becomes of a block that did not move.
        let is_final = |(left, at): (u64, Instant)| left > 0 && (!has_ssd || now >= at + SETTLES);
        let is_settled = match counted {
            Some(counted) => live_since.is_none() && is_final(counted),
            // An older master counts nothing.
            None => moved.left > 0 && now >= most.min(since + COUNTED),
        };
        if is_settled || now >= most {
            let left = counted.map_or(moved.left, |(left, _)| left);
            return Ok(settled(state, left));
        }
        tokio::time::sleep(POLL).await;
    }
}

impl Outcome {
    fn may_stop(&self) -> bool {
        matches!(self.state.as_str(), "drained" | "gone")
    }

    /// Fails unless a stop of the node loses no block, or loses only blocks whose loss the operator accepts.
    fn check(&self, is_full: bool, allow_loss: bool) -> anyhow::Result<()> {
        let node = &self.node;
        if self.left > 0 {
            // Old blocks stay when the other nodes are full. Any other reason is a fault to mend first.
            let remedy = match is_full {
                true => "add a store node, or make room on the others,",
                false => "mend the cause",
            };
            anyhow::ensure!(
                allow_loss,
                "{} blocks would be lost with node {node}: {remedy} and run the command again. To accept their loss, \
                 repeat it with --allow-loss",
                output::count(self.left)
            );
            return Ok(());
        }
        anyhow::ensure!(
            self.may_stop(),
            "node {node} is {}, and not drained yet: run the command again, or wait until `kvctl status` shows it as \
             drained",
            self.state
        );
        Ok(())
    }
}

fn said(outcome: &Outcome) -> String {
    let (moved, left) = (output::count(outcome.moved), output::count(outcome.left));
    let begin = format!(
        "node {} takes no new blocks: moved {moved} blocks in {:.1} s.",
        outcome.node, outcome.seconds
    );
    let on_ssd = match outcome.on_ssd {
        0 => String::new(),
        blocks => format!(
            " {} blocks have only a copy on its SSD, and are back when the node is.",
            output::count(blocks)
        ),
    };
    let reason = outcome.reason.as_deref().unwrap_or("the time was over");
    match (outcome.left, outcome.state.as_str()) {
        (0, "drained") => {
            format!("{begin}{on_ssd} It can be stopped now: `kvctl status` shows it as drained.")
        }
        (0, "gone") => format!("{begin}{on_ssd} It has left the pool."),
        (0, state) => format!("{begin}{on_ssd} It is {state}, and not drained yet."),
        _ => format!(
            "{begin} {left} blocks are on this node only and leave the pool when it stops (last reason: \
             {reason}).{on_ssd} `kvctl status` shows the node as drained once no such block is left."
        ),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(state: &str, left: u64, on_ssd: u64) -> Outcome {
        Outcome {
            node: "n".into(),
            state: state.into(),
            moved: 3,
            bytes: 3,
            left,
            on_ssd,
            reason: None,
            seconds: 1.0,
        }
    }

    /// A script stops the node when the command succeeds.
    #[test]
    fn a_drain_fails_while_a_stop_would_lose_blocks_unless_the_loss_is_accepted() {
        for is_full in [false, true] {
            let refused = outcome("draining", 2, 0).check(is_full, false);
            let why = refused.unwrap_err().to_string();
            assert!(why.contains("2 blocks would be lost"), "{why}");
            assert!(why.contains("--allow-loss"), "{why}");
            assert_eq!(why.contains("add a store node"), is_full, "{why}");
            assert!(outcome("draining", 2, 0).check(is_full, true).is_ok());
            assert!(outcome("drained", 0, 4).check(is_full, false).is_ok());
            // Nobody knows what a stop loses.
            assert!(outcome("suspect", 0, 0).check(is_full, true).is_err());
        }
    }

    /// An operator stops the node when the command says that it may be stopped.
    #[test]
    fn a_drain_says_that_the_node_can_be_stopped_only_when_it_is_drained() {
        for (state, left) in [("draining", 0), ("draining", 2), ("suspect", 0)] {
            let outcome = outcome(state, left, 0);
            let text = said(&outcome);
            assert!(!text.contains("can be stopped"), "{text}");
            assert!(!outcome.may_stop());
        }
        let drained = outcome("drained", 0, 4);
        let text = said(&drained);
        assert!(
            text.contains("can be stopped now") && drained.may_stop(),
            "{text}"
        );
        assert!(
            text.contains("4 blocks have only a copy on its SSD"),
            "{text}"
        );
        assert!(!text.contains("leave the pool"), "{text}");
        let both = said(&outcome("draining", 2, 4));
        assert!(both.contains("2 blocks are on this node only"), "{both}");
        assert!(
            both.contains("4 blocks have only a copy on its SSD"),
            "{both}"
        );
    }
}
