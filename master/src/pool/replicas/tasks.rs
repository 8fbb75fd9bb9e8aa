//! The table of tasks, with the progress of each.

use super::{Wish, Work};
use crate::clock::BootInstant;
use kvpool_types::{Code, Incarnation, Length, Version};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The most tasks that run at once.
const MOST_RUNNING: usize = 4096;
/// The most ended tasks that the table keeps. Callers ask how their task ended.
const MOST_ENDED: usize = 16_384;
/// A wait for room ends when the task has not asked for this long. The task may pause while the log
/// is full, or while other tasks use the source or the target. Otherwise it asks every 20 ms.
const INTERRUPTION: Duration = Duration::from_secs(1);

/// A task's number. It is drawn at random, so that a caller of one term never meets another term's
/// task under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub u64);

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What happens to a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The block gets one more replica.
    Copy,
    /// A replica moves to another node.
    Move,
    /// A replica is dropped.
    Drop,
}

impl Change {
    /// The change's name in messages and labels.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Move => "move",
            Self::Drop => "drop",
        }
    }
}

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// Work is left.
    Running,
    /// Every block was changed, or had left meanwhile.
    Done,
    /// At least one block was not changed.
    Failed,
    /// A caller ended it. Pulls in progress end on their own, and still count.
    Cancelled,
}

/// The description of a task for callers.
#[derive(Clone, Debug)]
pub struct TaskView {
    /// The task's number.
    pub id: TaskId,
    /// The change, and its nodes.
    pub wish: Wish,
    /// The state.
    pub state: TaskState,
    /// The number of blocks, each counted once for each target.
    pub blocks: u64,
    /// How many of them were changed.
    pub changed: u64,
    /// How many of them had left, or needed no change.
    pub gone: u64,
    /// How many of them could not be changed.
    pub failed: u64,
    /// The bytes that arrived at their targets.
    pub bytes: u64,
    /// The last failure; of a task that a caller ended, the reason for which its blocks waited last.
    pub failure: Option<(Code, String)>,
    /// The time since it began.
    pub age: Duration,
    /// The time since its last change.
    pub idle: Duration,
}

/// The outcome for one block of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Changed(Length),
    Gone,
    Failed(Code, String),
}

/// A task.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) id: TaskId,
    pub(super) wish: Wish,
    blocks: u64,
    /// The number of blocks that had failed before the task began.
    failed_before: u64,
    /// Whether its blocks lie on media of the node that it empties. They are loaded before the mover has them.
    is_of_media: bool,
    begun: BootInstant,
    progress: Mutex<Progress>,
}

#[derive(Debug)]
struct Progress {
    /// Blocks of media that are still to be loaded, or whose copies are not settled.
    unsettled: u64,
    left: VecDeque<Work>,
    /// Blocks that wait for a node or for room, with the time of the next attempt.
    later: VecDeque<(BootInstant, Work)>,
    in_progress: u64,
    changed: u64,
    gone: u64,
    failed: u64,
    bytes: u64,
    failure: Option<(Code, String)>,
    /// Why the last block that waits does so.
    waits_for: Option<(Code, String)>,
    last_change: BootInstant,
    /// The waits for room since the last block was begun, by target.
    starved: HashMap<Incarnation, Starved>,
    is_cancelled: bool,
    /// Whether the task belongs to a drain that an operator cancelled.
    is_of_cancelled_drain: bool,
    /// Whether the node that the drain of the task empties has left the pool.
    has_lost_node: bool,
    /// The blocks that have left the pool with their nodes since then, while the task runs.
    swept: HashSet<Version>,
}

/// A wait for room on one target.
#[derive(Clone, Copy, Debug)]
struct Starved {
    since: BootInstant,
    asked: BootInstant,
    /// The length of the smallest block that has waited.
    length: Length,
}

impl Task {
    /// A task of which `failed` blocks have failed before it begins, the last one with `failure`.
    pub(super) fn new(
        wish: Wish,
        work: VecDeque<Work>,
        (failed, failure): (u64, Option<(Code, String)>),
        now: BootInstant,
    ) -> Self {
        Self {
            id: TaskId(kvpool_seams::random()),
            wish,
            blocks: work.len() as u64 + failed,
            failed_before: failed,
            is_of_media: false,
            begun: now,
            progress: Mutex::new(Progress {
                unsettled: 0,
                left: work,
                later: VecDeque::new(),
                in_progress: 0,
                changed: 0,
                gone: 0,
                failed,
                bytes: 0,
                failure,
                waits_for: None,
                last_change: now,
                starved: HashMap::new(),
                is_cancelled: false,
                is_of_cancelled_drain: false,
                has_lost_node: false,
                swept: HashSet::new(),
            }),
        }
    }

    /// A task of so many blocks on media. Each is fed to the task and settled, or ended otherwise.
    pub(super) fn of_media(wish: Wish, blocks: u64, now: BootInstant) -> Self {
        let mut task = Self::new(wish, VecDeque::new(), (0, None), now);
        task.blocks = blocks;
        task.is_of_media = true;
        task.progress.get_mut().unsettled = blocks;
        task
    }

    /// Whether the blocks of the task lie on media.
    pub(super) fn is_of_media(&self) -> bool {
        self.is_of_media
    }

    /// Gives the mover a block that has been loaded.
    pub(super) fn feed(&self, work: Work) {
        let mut progress = self.progress.lock();
        if !progress.is_cancelled {
            progress.left.push_back(work);
        }
    }

    /// Notes that nothing more is done for so many blocks that were fed.
    pub(super) fn settled(&self, blocks: u64) {
        let mut progress = self.progress.lock();
        progress.unsettled = progress.unsettled.saturating_sub(blocks);
    }

    /// Counts the end of a block that was not loaded.
    pub(super) fn end_unfed(&self, outcome: Outcome, now: BootInstant) {
        let mut progress = self.progress.lock();
        if !progress.is_cancelled {
            progress.unsettled = progress.unsettled.saturating_sub(1);
            progress.count(outcome, now);
        }
    }

    /// Counts every block that was not loaded as failed.
    pub(super) fn give_up_unfed(&self, code: Code, why: &str, now: BootInstant) {
        let mut progress = self.progress.lock();
        let unfed = std::mem::take(&mut progress.unsettled);
        if unfed > 0 {
            progress.failed += unfed;
            progress.failure = Some((code, why.to_owned()));
            progress.last_change = now;
        }
    }

    /// Whether the mover works on blocks of the task.
    pub(super) fn is_moving(&self) -> bool {
        self.progress.lock().is_moving()
    }

    /// The next block whose time has come. The caller ends it, or gives it back.
    pub(super) fn next(&self, now: BootInstant) -> Option<Work> {
        let mut progress = self.progress.lock();
        let is_due = progress.later.front().is_some_and(|(at, _)| *at <= now);
        let next = match is_due {
            true => progress.later.pop_front().map(|(_, work)| work),
            false => progress.left.pop_front(),
        };
        progress.in_progress += u64::from(next.is_some());
        next
    }

    /// Returns a block whose change was not begun.
    pub(super) fn give_back(&self, work: Work) {
        let mut progress = self.progress.lock();
        progress.in_progress -= 1;
        if !progress.is_cancelled {
            progress.left.push_front(work);
        }
    }

    /// How long the task has asked for room on a target without beginning a block. The wait of a
    /// larger block does not count for a smaller one, since the smaller block may find room.
    pub(super) fn starves(
        &self,
        target: Incarnation,
        length: Length,
        now: BootInstant,
    ) -> Duration {
        let mut progress = self.progress.lock();
        let before = progress.starved.get(&target).copied();
        let goes_on =
            before.filter(|wait| now.since(wait.asked) <= INTERRUPTION && length >= wait.length);
        let wait = Starved {
            since: goes_on.map_or(now, |wait| wait.since),
            asked: now,
            length: goes_on.map_or(length, |wait| wait.length),
        };
        progress.starved.insert(target, wait);
        now.since(wait.since)
    }

    /// Notes that a block was begun.
    pub(super) fn is_fed(&self) {
        let mut progress = self.progress.lock();
        progress.starved.clear();
        progress.waits_for = None;
    }

    /// Tries a block again at `at`. Until then it waits for this reason.
    pub(super) fn try_later(&self, work: Work, at: BootInstant, reason: (Code, String)) {
        let mut progress = self.progress.lock();
        progress.in_progress -= 1;
        progress.waits_for = Some(reason);
        if !progress.is_cancelled {
            progress.later.push_back((at, work));
        }
    }

    /// Counts the outcome for a block.
    pub(super) fn end(&self, outcome: Outcome, now: BootInstant) {
        let mut progress = self.progress.lock();
        progress.in_progress -= 1;
        progress.count(outcome, now);
    }

    /// The outcome for a block that the pool does not have any more. A block that was removed has not failed.
    pub(super) fn missing(&self, version: Version) -> Outcome {
        let progress = self.progress.lock();
        let is_swept = progress.swept.contains(&version);
        drop(progress);
        match is_swept {
            true => self.without_place(),
            false => Outcome::Gone,
        }
    }

    /// The outcome for a block that has no replica on a node of the pool.
    pub(super) fn without_place(&self) -> Outcome {
        let has_lost_node = self.progress.lock().has_lost_node;
        match self.wish.from.as_ref().filter(|_| has_lost_node) {
            Some(node) => {
                let why = format!("node {node} has left the pool before the block moved");
                Outcome::Failed(Code::Missing, why)
            }
            None => Outcome::Gone,
        }
    }

    /// Whether a caller has ended the task. Its pulls may still be in progress.
    pub(super) fn is_cancelled(&self) -> bool {
        self.progress.lock().is_cancelled
    }

    fn cancel(&self, now: BootInstant) {
        let mut progress = self.progress.lock();
        if progress.state() == TaskState::Running {
            progress.unsettled = 0;
            progress.left.clear();
            progress.later.clear();
            progress.is_cancelled = true;
            progress.last_change = now;
            // Otherwise nobody would learn why the blocks that are left were not changed.
            if let Some(reason) = progress.waits_for.take() {
                progress.failure = Some(reason);
            }
        }
    }

    /// Ends the task together with its drain.
    fn end_with_drain(&self, now: BootInstant) {
        self.progress.lock().is_of_cancelled_drain = true;
        self.cancel(now);
    }

    fn is_running(&self) -> bool {
        let progress = self.progress.lock();
        progress.unsettled > 0 || progress.is_moving()
    }

    pub(super) fn view(&self, now: BootInstant) -> TaskView {
        let progress = self.progress.lock();
        TaskView {
            id: self.id,
            wish: self.wish.clone(),
            state: progress.state(),
            blocks: self.blocks,
            changed: progress.changed,
            gone: progress.gone,
            failed: progress.failed,
            bytes: progress.bytes,
            failure: progress.failure.clone(),
            age: now.since(self.begun),
            idle: now.since(progress.last_change),
        }
    }
}

impl Progress {
    fn is_moving(&self) -> bool {
        !self.left.is_empty() || !self.later.is_empty() || self.in_progress > 0
    }

    fn count(&mut self, outcome: Outcome, now: BootInstant) {
        self.last_change = now;
        match outcome {
            Outcome::Changed(length) => {
                self.changed += 1;
                self.bytes += length.0;
            }
            Outcome::Gone => self.gone += 1,
            Outcome::Failed(code, message) => {
                self.failed += 1;
                self.failure = Some((code, message));
            }
        }
    }

    fn state(&self) -> TaskState {
        let is_running = self.unsettled > 0 || self.is_moving();
        match () {
            () if self.is_cancelled => TaskState::Cancelled,
            () if is_running => TaskState::Running,
            () if self.failed > 0 => TaskState::Failed,
            () => TaskState::Done,
        }
    }
}

/// All known tasks.
#[derive(Debug, Default)]
pub(super) struct Tasks(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    running: BTreeMap<TaskId, Arc<Task>>,
    ended: VecDeque<Arc<Task>>,
    /// Tasks that may run, and whose node has left the pool.
    without_node: Vec<Arc<Task>>,
}

impl Tasks {
    /// Adds a task; `None` while too many run.
    pub(super) fn add(&self, task: Task) -> Option<Arc<Task>> {
        let mut table = self.0.lock();
        table.sort_out();
        if table.running.len() >= MOST_RUNNING {
            return None;
        }
        let task = Arc::new(task);
        table.running.insert(task.id, Arc::clone(&task));
        Some(task)
    }

    /// The tasks with blocks left to change.
    pub(super) fn running(&self) -> Vec<Arc<Task>> {
        let mut table = self.0.lock();
        table.sort_out();
        table.running.values().cloned().collect()
    }

    pub(super) fn is_running(&self, id: TaskId) -> bool {
        let table = self.0.lock();
        table.running.get(&id).is_some_and(|task| task.is_running())
    }

    /// The number of blocks that a task failed to change. `None` if a caller ended the task, or if
    /// it is unknown.
    pub(super) fn tried_in_vain(&self, id: TaskId) -> Option<u64> {
        let table = self.0.lock();
        let mut tasks = table.running.values().chain(&table.ended);
        let task = tasks.find(|task| task.id == id)?;
        let progress = task.progress.lock();
        (!progress.is_cancelled).then(|| progress.failed - task.failed_before)
    }

    /// Whether a caller has ended a task.
    pub(super) fn is_cancelled(&self, id: TaskId) -> bool {
        let table = self.0.lock();
        let mut tasks = table.running.values().chain(&table.ended);
        let task = tasks.find(|task| task.id == id);
        task.is_some_and(|task| task.is_cancelled())
    }

    /// Whether a task belongs to a drain that was cancelled.
    pub(super) fn is_of_cancelled_drain(&self, id: TaskId) -> bool {
        let table = self.0.lock();
        let mut tasks = table.running.values().chain(&table.ended);
        let task = tasks.find(|task| task.id == id);
        task.is_some_and(|task| task.progress.lock().is_of_cancelled_drain)
    }

    pub(super) fn views(&self, ids: &[TaskId], now: BootInstant) -> Vec<TaskView> {
        let table = self.0.lock();
        let all = table.running.values().chain(&table.ended);
        let wanted = all.filter(|task| ids.is_empty() || ids.contains(&task.id));
        wanted.map(|task| task.view(now)).collect()
    }

    pub(super) fn cancel(&self, ids: &[TaskId], now: BootInstant) {
        let table = self.0.lock();
        for task in ids.iter().filter_map(|id| table.running.get(id)) {
            task.cancel(now);
        }
    }

    /// Records that the node has left the pool that these tasks empty.
    pub(super) fn lose_node(&self, ids: &[TaskId]) {
        let mut table = self.0.lock();
        let Table {
            running,
            without_node,
            ..
        } = &mut *table;
        for task in ids.iter().filter_map(|id| running.get(id)) {
            task.progress.lock().has_lost_node = true;
            without_node.push(Arc::clone(task));
        }
    }

    /// Records that a block leaves the pool together with its last node.
    pub(super) fn swept(&self, version: Version) {
        let table = self.0.lock();
        for task in &table.without_node {
            task.progress.lock().swept.insert(version);
        }
    }

    /// Ends the tasks of a cancelled drain. Tasks that have ended already are marked too.
    pub(super) fn end_with_drain(&self, ids: &[TaskId], now: BootInstant) {
        let table = self.0.lock();
        let all = table.running.values().chain(&table.ended);
        for task in all.filter(|task| ids.contains(&task.id)) {
            task.end_with_drain(now);
        }
    }
}

impl Table {
    fn sort_out(&mut self) {
        let ended: Vec<TaskId> = self
            .running
            .iter()
            .filter(|(_, task)| !task.is_running())
            .map(|(id, _)| *id)
            .collect();
        self.without_node.retain(|task| task.is_running());
        for id in ended {
            if let Some(task) = self.running.remove(&id) {
                task.progress.lock().swept = HashSet::new();
                self.ended.push_back(task);
            }
        }
        while self.ended.len() > MOST_ENDED {
            self.ended.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replica::BlockId;
    use kvpool_types::NodeName;

    fn wish() -> Wish {
        Wish {
            change: Change::Move,
            from: None,
            to: Vec::new(),
            evict: true,
        }
    }

    fn work(version: u64) -> Work {
        Work {
            block: BlockId(1),
            version: Version(version),
            to: None,
            failures: 0,
            waits: 0,
            brought: None,
        }
    }

    /// The mover has nothing to do while blocks are loaded. A caller must not take the task for ended then.
    #[test]
    fn a_task_of_media_runs_until_every_block_was_loaded_or_given_up() {
        let (now, full) = (BootInstant(0), "full");
        let of = |blocks| Task::of_media(wish(), blocks, now);
        assert_eq!(of(0).view(now).state, TaskState::Done, "nothing to load");
        let task = of(3);
        task.end_unfed(Outcome::Gone, now);
        task.end_unfed(Outcome::Failed(Code::Full, full.to_owned()), now);
        assert!(task.is_running() && !task.is_moving());
        task.feed(work(1));
        assert!(task.is_moving());
        assert!(task.next(now).is_some());
        task.end(Outcome::Changed(Length(5)), now);
        assert!(task.is_running() && !task.is_moving(), "its copy is to go");
        task.settled(1);
        let ended = task.view(now);
        assert_eq!((ended.changed, ended.gone, ended.failed), (1, 1, 1));
        assert_eq!((ended.state, ended.bytes), (TaskState::Failed, 5));
        let cancelled = of(2);
        cancelled.end_with_drain(now);
        cancelled.end_unfed(Outcome::Gone, now);
        assert!(!cancelled.is_running());
        assert_eq!(cancelled.view(now).gone, 0);
        let given_up = of(2);
        given_up.give_up_unfed(Code::Unreachable, "gone", now);
        assert_eq!(given_up.view(now).failed, 2);
        assert!(!given_up.is_running());
    }

    /// Both blocks are missing when their turns come.
    #[test]
    fn a_block_that_was_removed_before_its_node_left_has_not_failed() {
        let now = BootInstant(0);
        let wish = Wish {
            from: Some(NodeName("n".into())),
            ..wish()
        };
        let tasks = Tasks::default();
        let work = VecDeque::from([work(1), work(2)]);
        let task = tasks.add(Task::new(wish, work, (0, None), now)).unwrap();
        tasks.swept(Version(1));
        assert_eq!(task.missing(Version(1)), Outcome::Gone, "of another node");
        tasks.lose_node(&[task.id]);
        tasks.swept(Version(2));
        for version in [1, 2] {
            assert!(task.next(now).is_some());
            task.end(task.missing(Version(version)), now);
        }
        let ended = task.view(now);
        assert_eq!((ended.gone, ended.failed), (1, 1), "{ended:?}");
        // The list of an ended task is no longer needed.
        assert!(tasks.running().is_empty());
        tasks.swept(Version(3));
        assert!(task.progress.lock().swept.is_empty());
    }

    #[test]
    fn a_wait_for_room_is_of_one_target_and_ends_when_nobody_asks() {
        let task = Task::new(wish(), VecDeque::new(), (0, None), BootInstant(0));
        let waits = |target, length, now| {
            let waits = task.starves(Incarnation(target), Length(length), BootInstant(now));
            waits.as_millis()
        };
        assert_eq!(waits(1, 64, 1000), 0);
        assert_eq!(waits(1, 64, 1900), 900);
        assert_eq!(waits(2, 64, 1900), 0, "another target");
        assert_eq!(waits(1, 128, 2800), 1800, "a larger block");
        assert_eq!(waits(1, 32, 2800), 0, "a smaller block");
        assert_eq!(waits(1, 64, 3800), 1000);
        assert_eq!(waits(1, 64, 4801), 0, "nobody asked for more than a second");
        task.is_fed();
        assert_eq!(waits(1, 64, 4900), 0, "a block was begun");
    }
}
