//! `kvctl node drain`.

mod outcome;
mod watch;

use crate::connection::{call_timeout, control_error, parse_timeout};
use crate::context::Context;
use anyhow::bail;
use clap::builder::NonEmptyStringValueParser;
use kvpool_client::{
    Client, ControlError, ReplicaBlocks, ReplicaChange, ReplicaTask, ReplicaTaskState, ReplicaWish,
};
use kvpool_types::Code;
use outcome::{Outcome, said};
use std::time::{Duration, Instant};
use watch::{DRAINED, GONE, Look, SUSPECT, UNREPORTED, Watch};

/// How often the progress of a drain is looked at.
const POLL: Duration = Duration::from_millis(200);
/// How long the state of the node may take to follow the end of the last task, at least. The master looks about once a
/// second.
const SETTLES: Duration = Duration::from_secs(5);
/// How long the master may take to count the blocks that are left. Its looks at a large pool are rare.
const COUNTED: Duration = Duration::from_secs(30);
/// How long the node's memory may take to be copied to SSDs that leave, before their blocks move.
const COPIED: Duration = Duration::from_secs(60);
/// How long a node takes blocks before its drain counts as cancelled. Another leader sees a draining node live for a
/// moment, before the node says that it drains.
const CANCELLED: Duration = Duration::from_secs(1);
/// How long a new leader may take to hear the node.
const UNHEARD: Duration = Duration::from_secs(15);

/// Move the blocks of a store node to other nodes, and give it no new ones
///
/// Blocks that were used last go first. Blocks on other nodes that were used earlier are evicted for them.
/// A block that stays is lost when the node stops, unless the node's SSD has a copy. The node serves until then.
/// It takes new blocks again after a restart or `kvctl node undrain`. The drain goes on when this command is
/// interrupted. If another master leads by then, no block moves any more: run the command again.
/// For a suspect node the command fails at once, and the drain waits until the node is heard again.
/// If the node becomes suspect later, the command says so and waits until the node is heard again or is dropped.
/// The command succeeds once `kvctl status` shows the node as `drained`: a stop loses no block then.
/// Its disks are still needed, unless --ssd is given. The command fails if a stop would lose blocks, unless
/// --allow-loss is given.
#[derive(Debug, clap::Args)]
#[command(arg = call_timeout(), after_help = "\
Examples:
  kvctl node drain node-2 --timeout 2m && systemctl stop kvstore-node
  kvctl node drain node-2 --ssd --timeout 2h")]
pub(super) struct Args {
    /// The node's name, as `kvctl status` shows it
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    name: String,
    /// Stop moving blocks after this long; 0s begins the drain, which goes on, and does not wait for it. With 0s the
    /// command succeeds if the node is drained already, or with --allow-loss
    #[arg(id = "wait", long = "timeout", value_name = "TIME", default_value = "5m", value_parser = parse_timeout)]
    timeout: Duration,
    /// Drain the node also when no other node takes its blocks. The pool takes no puts then
    #[arg(long)]
    force: bool,
    /// Move also the blocks that only the node's SSDs hold, because these do not come back. Each goes to the memory of
    /// another node, and from there to its SSD within the write budget. An SSD drops no copy that was used later. With
    /// --timeout 0s, run the command again later: it moves the blocks that were copied to the SSDs meanwhile
    #[arg(long)]
    ssd: bool,
    /// Succeed also when a stop would lose blocks. The output names their number
    #[arg(long)]
    allow_loss: bool,
}

/// What the tasks of a drain have done.
#[derive(Default)]
struct Moved {
    blocks: u64,
    bytes: u64,
    /// Those that the last task could not move.
    left: u64,
    failure: Option<(Code, String)>,
    /// Whether the time was over before the tasks found nothing more to move.
    is_late: bool,
}

/// Runs it.
pub(super) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let begun = Instant::now();
    let task = order(&client, &args).await?;
    let mut watch = Watch::of(&client, &args.name);
    let first = watch.look().await?;
    // Nothing would happen until the node is back. A new leader hears an unreported node soon.
    if first.state == SUSPECT {
        return Err(unheard(&args.name, &first.state));
    }
    if args.timeout.is_zero() {
        let off = match args.ssd {
            true => {
                let off = off_ssd(&client, &args.name).await;
                Some(off.map_err(|error| not_off_ssd(&args.name, error))?)
            }
            false => None,
        };
        let outcome = begun_only(&args, (&task, off.as_ref()), first, begun);
        context.output.show(&outcome, said)?;
        return outcome.check(false, args.allow_loss);
    }
    let until = begun + args.timeout;
    let mut moved = move_all(&client, &mut watch, task, until).await?;
    let copied = copied_by(args.ssd, Instant::now(), until);
    let mut settled = settle(&mut watch, &moved, copied).await?;
    if args.ssd {
        // Now the SSD has the blocks of the memory that found no other place.
        let off = move_off_ssd(&client, &mut watch, until).await?;
        settled = settle(&mut watch, &off, until).await?;
        if settled.may_hide(&off) {
            settled.left = only_on_ssd(&client, &args.name).await?;
        }
        settled.on_ssd = off.left.min(settled.left);
        moved = Moved {
            blocks: moved.blocks + off.blocks,
            bytes: moved.bytes + off.bytes,
            left: off.left.max(settled.left),
            failure: off.failure.or(moved.failure),
            is_late: off.is_late,
        };
    }
    let Settled {
        state,
        left,
        on_ssd,
    } = settled;
    let is_full = !moved.is_late && matches!(moved.failure, Some((Code::Full, _)));
    let outcome = Outcome {
        node: args.name.clone(),
        state,
        moved: moved.blocks,
        bytes: moved.bytes,
        left,
        on_ssd,
        ssd_leaves: args.ssd,
        reason: moved.reason(),
        seconds: begun.elapsed().as_secs_f64(),
        goes_on: false,
    };
    context.output.show(&outcome, said)?;
    outcome.check(is_full, args.allow_loss)
}

impl Moved {
    /// Adds a task that has ended.
    fn add(&mut self, ended: &ReplicaTask, until: Instant) {
        self.blocks += ended.changed;
        self.bytes += ended.bytes.0;
        self.left = left_of(ended);
        self.is_late = Instant::now() >= until;
    }

    /// Why the last block that stayed did not move.
    fn reason(self) -> Option<String> {
        if self.left == 0 {
            return None;
        }
        // A task that is ended before its blocks had their turn has no reason of its own.
        let late = || self.is_late.then(|| "the time was over".to_owned());
        self.failure.map(|(_, why)| why).or_else(late)
    }
}

/// Begins the drain.
async fn order(client: &Client, args: &Args) -> anyhow::Result<ReplicaTask> {
    let asked = match args.ssd {
        true => client.drain_node_and_media(&args.name, args.force).await,
        false => client.drain_node(&args.name, args.force).await,
    };
    match asked {
        Err(error) if error.code == Code::LastNode => {
            let unless = match args.ssd {
                true => "",
                false => ", unless it copies them to an SSD",
            };
            bail!(
                "{}. Nothing was changed: with --force these blocks are lost when the node stops{unless}",
                error.message
            )
        }
        // It was cancelled while it began.
        Err(error) if error.code == Code::NotDraining => Err(cancelled(&args.name)),
        begun => begun.map_err(control_error),
    }
}

/// The outcome of a command that does not wait. Its drain has just begun: one task for the memory, one for the SSDs.
fn begun_only(
    args: &Args,
    (task, off): (&ReplicaTask, Option<&ReplicaTask>),
    first: Look,
    begun: Instant,
) -> Outcome {
    let on_ssd = off.map_or(0, left_of);
    let left = first.left_blocks.unwrap_or_else(|| left_of(task) + on_ssd);
    Outcome {
        node: args.name.clone(),
        state: first.state,
        moved: task.changed,
        bytes: task.bytes.0,
        left,
        on_ssd: on_ssd.min(left),
        ssd_leaves: args.ssd,
        reason: None,
        seconds: begun.elapsed().as_secs_f64(),
        goes_on: true,
    }
}

fn unheard(name: &str, state: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "node {name} is {state}: the master does not hear it, and cannot drain it now. It drains when the master hears \
         it again, unless the node restarts or another master leads by then. Run the command again when it is back"
    )
}

fn cancelled(name: &str) -> anyhow::Error {
    anyhow::anyhow!("the drain of node {name} was cancelled: the node takes new blocks")
}

/// The blocks that a task has not moved.
const fn left_of(task: &ReplicaTask) -> u64 {
    task.blocks - task.changed - task.gone
}

/// Whether another task would move no more than this one, during which the node was silent or not.
const fn is_last(ended: &ReplicaTask, was_silent: bool) -> bool {
    // Blocks of a silent node cannot be read, and fail. They move when it is back.
    let has_failed_unheard = was_silent && left_of(ended) > 0;
    // Puts that were under way may have ended on the node since: another look finds them.
    let finds_more = ended.blocks > 0 && ended.changed > 0;
    !finds_more && !has_failed_unheard
}

/// Begins tasks until one finds nothing more to move, or the time is over. `first` is the first task.
async fn move_all(
    client: &Client,
    watch: &mut Watch<'_>,
    first: ReplicaTask,
    until: Instant,
) -> anyhow::Result<Moved> {
    let mut moved = Moved::default();
    let mut task = first;
    loop {
        let ended = wait(client, watch, task, until).await?;
        let has_lost_leader = ended.is_none();
        if let Some(ended) = ended {
            moved.add(&ended, until);
            if moved.is_late {
                moved.failure = ended.failure;
                return Ok(moved);
            }
            watch.until_heard(until).await?;
            let is_last = is_last(&ended, watch.take_silence());
            moved.failure = ended.failure;
            if is_last {
                return Ok(moved);
            }
        }
        let Some(next) = go_on(client, watch, has_lost_leader).await? else {
            return Ok(moved);
        };
        task = next;
    }
}

/// Begins a task that moves the blocks of the node's SSDs.
async fn off_ssd(client: &Client, name: &str) -> Result<ReplicaTask, ControlError> {
    let wish = ReplicaWish {
        change: ReplicaChange::Move,
        blocks: ReplicaBlocks::OnlyOnMedia,
        from: Some(name.to_owned()),
        to: Vec::new(),
        evict: true,
    };
    client.change_replicas(&wish).await
}

/// The refusal of a task that moves the blocks of the node's SSDs.
fn not_off_ssd(name: &str, error: ControlError) -> anyhow::Error {
    if error.code != Code::InvalidArgument {
        return control_error(error);
    }
    anyhow::anyhow!(
        "the master is of an earlier version, and moves no blocks off SSDs: {}. Node {name} drains without its SSDs. \
         Keep its SSDs, or start masters of this version and run the command again",
        error.message
    )
}

/// Begins tasks that move the blocks of the node's SSDs until one finds nothing more to move, or the time is over.
async fn move_off_ssd(
    client: &Client,
    watch: &mut Watch<'_>,
    until: Instant,
) -> anyhow::Result<Moved> {
    let name = watch.name();
    let mut moved = Moved::default();
    let mut has_counted = false;
    loop {
        let ended = match off_ssd(client, name).await {
            // A new leader has not taken the node out of service yet.
            Err(error) if error.code == Code::NotDraining => None,
            Err(error) if error.code == Code::Missing => {
                return departed(name, has_counted.then_some(moved));
            }
            asked => {
                let task = asked.map_err(|error| not_off_ssd(name, error))?;
                wait(client, watch, task, until).await?
            }
        };
        let Some(ended) = ended else {
            let Some(task) = go_on(client, watch, true).await? else {
                return departed(name, has_counted.then_some(moved));
            };
            // Also after the end of the time: the next task counts the blocks on the SSDs.
            let again = move_all(client, watch, task, until).await?;
            moved.blocks += again.blocks;
            moved.bytes += again.bytes;
            continue;
        };
        has_counted = true;
        moved.add(&ended, until);
        if !moved.is_late {
            watch.until_heard(until).await?;
        }
        let is_last = is_last(&ended, watch.take_silence());
        moved.failure = ended.failure;
        if moved.is_late || is_last {
            return Ok(moved);
        }
    }
}

/// The result for a node that has left the pool: the tasks of its SSDs so far, if one has counted the blocks there.
fn departed(name: &str, counted: Option<Moved>) -> anyhow::Result<Moved> {
    counted.ok_or_else(|| {
        anyhow::anyhow!(
            "node {name} has left the pool before the blocks on its SSDs were counted. Start it again with its SSDs, \
             and run the command again"
        )
    })
}

/// The blocks that only the SSDs of a node hold, although the master shows it as drained.
///
/// A new leader does not know that the SSDs leave if the node is of an earlier version. After another drain without
/// --ssd no leader knows it.
async fn only_on_ssd(client: &Client, name: &str) -> anyhow::Result<u64> {
    let task = match off_ssd(client, name).await {
        Err(error) if error.code == Code::NotDraining => return Err(cancelled(name)),
        Err(error) if error.code == Code::Missing => {
            return departed(name, None).map(|moved| moved.left);
        }
        asked => asked.map_err(|error| not_off_ssd(name, error))?,
    };
    let ended = client.cancel_replica_tasks(&[task.id]).await;
    ended.map_err(control_error)?;
    Ok(task.blocks)
}

/// Begins the next task of the drain, and never the drain itself. `None` when the node has left the pool.
///
/// The next leader first has to hear the node, and to learn from it that it drains.
async fn go_on(
    client: &Client,
    watch: &mut Watch<'_>,
    has_lost_leader: bool,
) -> anyhow::Result<Option<ReplicaTask>> {
    let name = watch.name();
    let begun = Instant::now();
    let mut heard = begun;
    // A leader of an earlier version does not say that it has not heard the node.
    let patience = match has_lost_leader {
        true => SETTLES,
        false => CANCELLED,
    };
    loop {
        let error = match client.go_on_draining(name).await {
            Ok(task) => return Ok(Some(task)),
            Err(error) => error,
        };
        // First: a node that has restarted does not drain either.
        let is_known = matches!(
            error.code,
            Code::NodeUnheard | Code::NotDraining | Code::Missing
        );
        if !is_known {
            return Err(control_error(error));
        }
        let look = watch.look().await?;
        let now = Instant::now();
        match error.code {
            Code::Missing => return Ok(None),
            Code::NodeUnheard if now >= begun + UNHEARD => return Err(unheard(name, &look.state)),
            Code::NodeUnheard => heard = now,
            _ if now >= heard + patience => return Err(cancelled(name)),
            _ => {}
        }
        tokio::time::sleep(POLL).await;
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

impl Settled {
    /// Whether the leader believes that the SSDs come back, although a move off them left blocks there.
    fn may_hide(&self, off: &Moved) -> bool {
        self.state == DRAINED && off.left > 0
    }
}

/// Until when the copies of the node's memory on its SSDs are waited for. With --ssd the count of blocks also changes
/// while clients remove blocks from the SSDs, and the move of these blocks needs the rest of the time.
fn copied_by(ssd_leaves: bool, now: Instant, until: Instant) -> Instant {
    match ssd_leaves {
        true => until.min(now + COPIED),
        false => until,
    }
}

/// Waits until the node is drained, or it is known how many blocks a stop loses. A node with an SSD copies there what
/// did not move, as long as their number changes.
async fn settle(watch: &mut Watch<'_>, moved: &Moved, until: Instant) -> anyhow::Result<Settled> {
    let name = watch.name();
    let since = Instant::now();
    let most = (since + SETTLES).max(until);
    let mut live_since = None;
    let mut unreported_since = None;
    let mut counted: Option<(u64, Instant)> = None;
    loop {
        let Look {
            state,
            left_blocks,
            has_ssd,
        } = watch.look().await?;
        let now = Instant::now();
        let settled = |state, left| Settled {
            state,
            left,
            on_ssd: if has_ssd {
                moved.left.saturating_sub(left)
            } else {
                0
            },
        };
        if state == GONE {
            return Ok(settled(state, moved.left));
        }
        live_since = (state == "live").then(|| live_since.unwrap_or(now));
        if live_since.is_some_and(|since| now >= since + CANCELLED) {
            return Err(cancelled(name));
        }
        unreported_since = (state == UNREPORTED).then(|| unreported_since.unwrap_or(now));
        if unreported_since.is_some_and(|since| now >= since + UNHEARD) {
            return Err(unheard(name, &state));
        }
        if state == DRAINED {
            return Ok(settled(state, 0));
        }
        if left_blocks != counted.map(|(left, _)| left) {
            counted = left_blocks.map(|left| (left, now));
        }
        // Without an SSD nothing else becomes of a block that did not move.
        let is_final = |(left, at): (u64, Instant)| left > 0 && (!has_ssd || now >= at + SETTLES);
        let is_settled = match counted {
            Some(counted) => live_since.is_none() && state != SUSPECT && is_final(counted),
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

/// Waits until a task has ended, or ends it at `until`. `None` when its leader has gone.
async fn wait(
    client: &Client,
    watch: &mut Watch<'_>,
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
        watch.glance().await?;
    }
    Ok(Some(task))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_client::ReplicaChange;
    use kvpool_types::Length;

    #[test]
    fn a_drained_node_whose_ssd_kept_blocks_is_counted_again() {
        let settled = |state: &str| Settled {
            state: state.to_owned(),
            left: 0,
            on_ssd: 0,
        };
        let off = |left| Moved {
            left,
            ..Moved::default()
        };
        assert!(settled(DRAINED).may_hide(&off(1)));
        assert!(!settled(DRAINED).may_hide(&off(0)));
        assert!(!settled("draining").may_hide(&off(1)));
    }

    #[test]
    fn the_reason_of_a_late_drain_is_the_one_that_the_master_gives() {
        let moved = |left, failure: Option<&str>, is_late| Moved {
            left,
            failure: failure.map(|why| (Code::Unreachable, why.to_owned())),
            is_late,
            ..Moved::default()
        };
        let reason = moved(2, Some("no other node"), true).reason();
        assert_eq!(reason.as_deref(), Some("no other node"));
        let reason = moved(2, None, true).reason();
        assert_eq!(reason.as_deref(), Some("the time was over"));
        // The master counts more blocks as left than the task has tried.
        assert_eq!(moved(2, None, false).reason(), None);
        assert_eq!(moved(0, Some("no other node"), true).reason(), None);
    }

    #[test]
    fn a_drain_goes_on_with_the_blocks_that_failed_while_its_node_was_silent() {
        let ended = |blocks, changed| ReplicaTask {
            id: 1,
            change: ReplicaChange::Move,
            state: ReplicaTaskState::Failed,
            blocks,
            changed,
            gone: 0,
            failed: blocks - changed,
            bytes: Length(0),
            failure: None,
            age: Duration::ZERO,
            idle: Duration::ZERO,
            from: "n".to_owned(),
            to: Vec::new(),
        };
        assert!(is_last(&ended(2, 0), false));
        assert!(!is_last(&ended(2, 0), true));
        assert!(is_last(&ended(0, 0), true));
        assert!(!is_last(&ended(2, 2), false));
    }

    #[test]
    fn the_blocks_of_ssds_move_although_their_number_changes_all_the_time() {
        let now = Instant::now();
        let until = now + Duration::from_secs(7200);
        assert_eq!(copied_by(true, now, until), now + COPIED);
        assert_eq!(copied_by(true, now, now), now);
        assert_eq!(copied_by(false, now, until), until);
    }

    /// A script retires the machine with its disks when the command succeeds.
    #[test]
    fn a_node_that_leaves_before_its_ssds_are_counted_fails_its_drain() {
        let why = departed("n", None).err().unwrap().to_string();
        assert!(
            why.contains("before the blocks on its SSDs were counted"),
            "{why}"
        );
        assert!(departed("n", Some(Moved::default())).is_ok());
    }

    #[test]
    fn a_master_that_moves_no_blocks_off_ssds_is_told_apart() {
        let text = |code| {
            let message = "which blocks".to_owned();
            not_off_ssd("n", ControlError { code, message }).to_string()
        };
        let earlier = text(Code::InvalidArgument);
        assert!(earlier.contains("of an earlier version"), "{earlier}");
        assert!(earlier.contains("Keep its SSDs"), "{earlier}");
        let other = text(Code::TooManyHeld);
        assert!(!other.contains("of an earlier version"), "{other}");
    }
}
