//! The store nodes: their addresses, sessions and states.
//!
//! ```text
//!        register, first heartbeat     silence > suspect_after
//!  (recovered) ────────► live ───────────────────────────────► suspect
//!   unreported            ▲  ◄──────────── speaks again ─────────┘ │
//!                         │ draining (SIGTERM)                     │ silence > drop_after
//!                         ▼                                        ▼
//!                      draining ── goodbye / new incarnation ──► gone (its blocks are dropped)
//! ```
//!
//! A draining node becomes suspect like a live one. When it speaks, it is draining again.
//! A node that is silent when its drain begins becomes draining when it speaks.
//! An operator may cancel a drain that an operator began: the node is live again, or suspect if it is silent.
//!
//! **Architecture Invariant:** a slow peer is not a dead peer. Silence alone never drops a block
//! before `drop_after`; it only makes the node suspect.

mod cancellations;
mod departure;
mod table;
mod unused;

use cancellations::Cancellations;
pub use cancellations::DrainReport;
pub(crate) use cancellations::{Question, UndrainOutcome};
use departure::Departure;
pub use table::{Judged, Members, Registration};
pub use unused::UnusedMedium;

use crate::clock::BootInstant;
use kvpool_proto as proto;
use kvpool_types::{
    Epoch, GrantKey, GrantSigner, HostId, Incarnation, Length, NodeName, ReadSigner, SegmentId,
};
use parking_lot::{Mutex, RwLock};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;

/// The state of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum NodeState {
    /// Known from the metadata store, but silent in this term.
    Unreported = 0,
    /// Heard in time.
    Live = 1,
    /// Silent for too long: no new blocks and no reads, but its blocks are kept.
    Suspect = 2,
    /// About to leave: its blocks may be read, and it takes no new blocks.
    Draining = 3,
    /// Dropped from the pool, together with its blocks.
    Gone = 4,
}

impl NodeState {
    const ALL: [Self; 5] = [
        Self::Unreported,
        Self::Live,
        Self::Suspect,
        Self::Draining,
        Self::Gone,
    ];

    /// The label of a draining node with nothing left to move. Such a node may stop.
    pub const DRAINED: &str = "drained";

    /// The labels of the nodes in the table. A node that is gone is not in the table.
    pub const PRESENT: [&str; 5] = [
        Self::Unreported.label(),
        Self::Live.label(),
        Self::Suspect.label(),
        Self::Draining.label(),
        Self::DRAINED,
    ];

    /// The state's name in tables, JSON and labels.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unreported => "unreported",
            Self::Live => "live",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
            Self::Gone => "gone",
        }
    }
}

/// The addresses of a node.
#[derive(Clone, Debug, Default)]
pub struct Address {
    /// `host:port` of the data port.
    pub data: String,
    /// The path of the Unix socket; empty if the node has none.
    pub shm_path: String,
    /// The machine of the node.
    pub host: HostId,
}

/// The channel of messages to the node of a session.
pub type Outbox = UnboundedSender<Result<proto::MasterMessage, tonic::Status>>;

/// The most problems that are kept of a node.
const MOST_PROBLEMS: usize = 4;
/// The most characters that are kept of one problem, and of other texts of a node.
const LONGEST_PROBLEM: usize = 500;

/// The figures of the last heartbeat.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reported {
    /// Bytes in shared-memory writes and views.
    pub held_bytes: u64,
    /// Open data connections.
    pub connections: u64,
    /// Bytes read from the node since its start.
    pub read_bytes: u64,
    /// Bytes written to the node since its start.
    pub written_bytes: u64,
}

/// What a node's silence since its last message may mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Silence {
    /// It is too short, or the session had ended before.
    #[default]
    Plain,
    /// The node became suspect while its session was open. The master itself may have been cut off.
    Open,
    /// The master was cut off, and the node has got its one extension.
    Excused,
}

#[derive(Debug, Default)]
struct NodeSession {
    number: u64,
    outbox: Option<Outbox>,
    /// When the last session ended.
    broken: BootInstant,
    last_heard: BootInstant,
    silence: Silence,
    reported: Reported,
    /// The media that the node does not use.
    unused: Vec<UnusedMedium>,
}

impl NodeSession {
    fn end(&mut self, now: BootInstant) {
        if self.outbox.take().is_some() {
            self.broken = now;
        }
        self.unused.clear();
    }
}

/// One incarnation of one store node.
#[derive(Debug)]
pub struct StoreNode {
    /// The name, which all incarnations share.
    pub name: NodeName,
    /// The incarnation.
    pub incarnation: Incarnation,
    /// The key that signs the node's grants in this term.
    pub key: GrantKey,
    /// The signer with that key.
    pub signer: GrantSigner,
    address: RwLock<Address>,
    segments: RwLock<Vec<SegmentId>>,
    /// The bytes of the longest extent that any of its segments gives.
    longest_extent: AtomicU64,
    state: AtomicU8,
    /// True while the node is about to leave, because it stops or because an operator drains it.
    drains: AtomicBool,
    /// True once the node has announced its shutdown. An incarnation never revokes that.
    stops: AtomicBool,
    /// True when the node understands the order to end a drain.
    can_undrain: AtomicBool,
    /// The node's version of kvpool. Empty before its first session of the term, and from nodes that do not tell it.
    version: RwLock<String>,
    /// The cancelled drains. The lock is held while a drain begins or is cancelled, and while the node is told.
    cancellations: Mutex<Cancellations>,
    /// True once the node has said that it waits until its blocks have moved to other nodes.
    waits_for_moves: AtomicBool,
    /// True from the node's own announcement of its shutdown until it is told that no block of it waits any more.
    awaits_word: AtomicBool,
    /// True when the node can copy blocks from other nodes.
    pulls: AtomicBool,
    /// True when the node asks readers for signed locations.
    wants_signed_reads: AtomicBool,
    /// True once an operator takes the node out of service.
    leaves: AtomicBool,
    /// True while an operator drains the node and its media do not come back.
    media_leave: AtomicBool,
    /// True once the drain has begun and the node must be told.
    is_told_to_leave: AtomicBool,
    /// The number of the pool's doubts before the last check, plus one, if that check found nothing left to move;
    /// 0 if it found something.
    nothing_left_at: AtomicU64,
    /// The number of blocks that a stop would lose, plus one, when they were last counted; 0 if they are not
    /// counted.
    left: AtomicU64,
    session: Mutex<NodeSession>,
    next_session: AtomicU64,
    /// The faults that the node reports of its token, key and certificate files.
    problems: RwLock<Vec<String>>,
    pub(crate) departure: Departure,
}

impl StoreNode {
    /// A node that is silent so far in this term. Its silence counts from `now`.
    pub(crate) fn new(
        name: NodeName,
        incarnation: Incarnation,
        key: GrantKey,
        now: BootInstant,
    ) -> Self {
        Self {
            name,
            incarnation,
            signer: key.signer(),
            key,
            address: RwLock::default(),
            segments: RwLock::default(),
            longest_extent: AtomicU64::new(0),
            state: AtomicU8::new(NodeState::Unreported as u8),
            drains: AtomicBool::new(false),
            stops: AtomicBool::new(false),
            can_undrain: AtomicBool::new(false),
            version: RwLock::default(),
            cancellations: Mutex::default(),
            waits_for_moves: AtomicBool::new(false),
            awaits_word: AtomicBool::new(false),
            pulls: AtomicBool::new(false),
            wants_signed_reads: AtomicBool::new(false),
            leaves: AtomicBool::new(false),
            media_leave: AtomicBool::new(false),
            is_told_to_leave: AtomicBool::new(false),
            nothing_left_at: AtomicU64::new(0),
            left: AtomicU64::new(0),
            session: Mutex::new(NodeSession {
                last_heard: now,
                ..NodeSession::default()
            }),
            next_session: AtomicU64::new(1),
            problems: RwLock::default(),
            departure: Departure::default(),
        }
    }

    /// The node's state.
    pub fn state(&self) -> NodeState {
        let raw = usize::from(self.state.load(Ordering::Acquire));
        NodeState::ALL.get(raw).copied().unwrap_or(NodeState::Gone)
    }

    pub(crate) fn set_state(&self, state: NodeState) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Changes the state, unless it is no longer `from`.
    pub(crate) fn change_state(&self, from: NodeState, to: NodeState) -> bool {
        let (from, to) = (from as u8, to as u8);
        // `drain` and `undrain` set the flag and then read the state. `end_silence` changes the state and then
        // reads the flag. Since all four accesses have one order, one of the two sees the other's write.
        let order = Ordering::SeqCst;
        let changed = self.state.compare_exchange(from, to, order, order);
        changed.is_ok()
    }

    /// As [`StoreNode::begin_drain`], when the node has reported the drain.
    #[cfg(test)]
    pub(crate) fn drain(&self) {
        let mut cancellations = self.cancellations.lock();
        cancellations.is_reported = true;
        self.begin_drain();
    }

    /// Records that the node is about to leave. The caller holds `cancellations`.
    ///
    /// The state of a silent node does not change, so its blocks do not become readable.
    /// [`StoreNode::heard`] finds the flag later.
    fn begin_drain(&self) {
        self.drains.store(true, Ordering::SeqCst);
        self.change_state(NodeState::Live, NodeState::Draining);
    }

    /// Records the node's own report that it drains. Returns false if the report is out of date: the node did not
    /// know of a cancellation, or the report is of an earlier session.
    pub(crate) fn says_it_drains(&self, report: DrainReport) -> bool {
        let stops = report.session.is_none();
        let mut cancellations = self.cancellations.lock();
        if !stops && cancellations.open().is_some() {
            return false;
        }
        if !stops && self.session_number() != report.session {
            return false;
        }
        if stops {
            self.stops.store(true, Ordering::Release);
        }
        if report.moves {
            self.waits_for_moves.store(true, Ordering::Release);
        }
        // A report of an earlier session may come late.
        cancellations.reported = cancellations.reported.max(report.number);
        cancellations.is_reported = true;
        // The node asks again in each session, since an earlier session may have lost the answer.
        self.await_word(true);
        self.begin_drain();
        true
    }

    /// Cancels the drain of a node that does not stop, and tells the node.
    pub(crate) fn undrain(&self) -> UndrainOutcome {
        let mut cancellations = self.cancellations.lock();
        if self.stops() {
            return UndrainOutcome::Stops;
        }
        if !self.drains() {
            let open = cancellations.open();
            return open.map_or(UndrainOutcome::Before, |_| UndrainOutcome::Unconfirmed);
        }
        cancellations.made += 1;
        cancellations.is_reported = false;
        self.leaves.store(false, Ordering::Release);
        self.media_leave.store(false, Ordering::Release);
        self.is_told_to_leave.store(false, Ordering::Release);
        self.waits_for_moves.store(false, Ordering::Release);
        self.await_word(false);
        self.nothing_left_at.store(0, Ordering::Release);
        self.note_count(None);
        self.drains.store(false, Ordering::SeqCst);
        self.change_state(NodeState::Draining, NodeState::Live);
        self.tell_to_stay(cancellations.made);
        UndrainOutcome::Now
    }

    fn tell_to_stay(&self, number: u64) {
        let order = proto::Undrain { number };
        self.send(proto::master_message::Body::Undrain(order));
    }

    /// Records that the node has confirmed a cancellation.
    pub(crate) fn confirm_undrain(&self, number: u64) {
        let mut cancellations = self.cancellations.lock();
        let number = number.min(cancellations.made);
        cancellations.confirmed = cancellations.confirmed.max(number);
    }

    /// True if the node has confirmed every cancellation. It then reports no cancelled drain to the next leader.
    pub(crate) fn knows_cancellations(&self) -> bool {
        self.cancellations.lock().open().is_none()
    }

    /// The number of the drain that the node is in; `None` if it does not drain. A drain that begins after a
    /// cancellation has another number.
    pub(crate) fn current_drain(&self) -> Option<u64> {
        let cancellations = self.cancellations.lock();
        self.drains().then_some(cancellations.made)
    }

    /// What a word to the node would answer now; `None` if the node does not drain. It is read before the blocks are
    /// counted that the word names.
    pub(crate) fn question(&self) -> Option<Question> {
        let cancellations = self.cancellations.lock();
        self.drains().then_some(cancellations.question())
    }

    /// True once the node has announced its shutdown.
    pub(crate) fn stops(&self) -> bool {
        self.stops.load(Ordering::Acquire)
    }

    pub(crate) fn can_undrain(&self) -> bool {
        self.can_undrain.load(Ordering::Acquire)
    }

    /// The node's version of kvpool; empty when unknown.
    pub fn version(&self) -> String {
        self.version.read().clone()
    }

    pub(crate) fn set_version(&self, version: &str) {
        version.clone_into(&mut self.version.write());
    }

    pub(crate) fn set_can_undrain(&self, can_undrain: bool) {
        self.can_undrain.store(can_undrain, Ordering::Release);
    }

    /// True while the node is about to leave, because it stops or because an operator drains it.
    pub fn drains(&self) -> bool {
        self.drains.load(Ordering::SeqCst)
    }

    /// True when the node, which is about to leave, waits until its blocks have moved to other nodes.
    pub(crate) fn waits_for_moves(&self) -> bool {
        self.waits_for_moves.load(Ordering::Acquire)
    }

    /// True from the node's own announcement of its shutdown until it is told that no block of it waits any more.
    pub fn awaits_word(&self) -> bool {
        self.awaits_word.load(Ordering::Acquire)
    }

    pub(crate) fn await_word(&self, awaits: bool) {
        self.awaits_word.store(awaits, Ordering::Release);
    }

    /// True once an operator takes the node out of service: nothing is copied to its media any more.
    pub(crate) fn leaves(&self) -> bool {
        self.leaves.load(Ordering::Acquire)
    }

    /// True while an operator drains the node and its media do not come back.
    pub(crate) fn media_leave(&self) -> bool {
        self.media_leave.load(Ordering::Acquire)
    }

    /// Records that the media do not come back, as an earlier leader has told the node. A report of an earlier session
    /// or of a cancelled drain does not count. Returns true if this was not known.
    pub(crate) fn says_media_leave(&self, session: u64) -> bool {
        let cancellations = self.cancellations.lock();
        let is_current = cancellations.open().is_none() && self.session_number() == Some(session);
        if !is_current || !self.drains() {
            return false;
        }
        let is_known = self.media_leave.swap(true, Ordering::AcqRel);
        // The node forgets its report when it hears an order that was sent before.
        let is_told = self.is_told_to_leave();
        if is_told {
            self.order_drain();
        }
        !is_known
    }

    /// Records that the media of a node out of service do not come back, and tells the node. If this drain was
    /// cancelled, nothing happens. Returns true if this was not known.
    pub(crate) fn media_leave_too(&self, drain: u64) -> bool {
        let cancellations = self.cancellations.lock();
        if cancellations.made != drain || !self.drains() {
            return false;
        }
        let is_known = self.media_leave.swap(true, Ordering::AcqRel);
        let is_told = self.is_told_to_leave();
        if is_told && !is_known {
            self.order_drain();
        }
        !is_known
    }

    /// Takes the node out of service for an operator. Returns the number of the drain. A drain that goes on does not
    /// say whether the `media` leave too.
    pub(crate) fn leave(&self, media: Option<bool>) -> u64 {
        let cancellations = self.cancellations.lock();
        self.leaves.store(true, Ordering::Release);
        if let Some(media) = media {
            self.media_leave.store(media, Ordering::Release);
        }
        self.begin_drain();
        cancellations.made
    }

    /// Tells the node that it is out of service, now and at the beginning of each later session. If this drain
    /// was cancelled, nothing happens.
    pub(crate) fn tell_to_leave(&self, drain: u64) {
        let cancellations = self.cancellations.lock();
        if cancellations.made == drain {
            self.is_told_to_leave.store(true, Ordering::Release);
            self.order_drain();
        }
    }

    fn order_drain(&self) {
        let media_leave = self.media_leave();
        let order = proto::Drain { media_leave };
        self.send(proto::master_message::Body::Drain(order));
    }

    /// Tells the node that no block of it waits any more, and how many blocks leave with it. Sends nothing if this
    /// drain was cancelled, or if the node has not reported it: a node that stops since would take the message for the
    /// answer to its stop. Nor is it an answer to a report that came after the count. That report gets its own answer.
    pub(crate) fn tell_left(&self, asked: Question, left: u64) {
        let cancellations = self.cancellations.lock();
        if !cancellations.is_reported {
            return;
        }
        if cancellations.question() == asked && self.drains() {
            self.await_word(false);
            let answers = cancellations.reported;
            let word = proto::Demoted { left, answers };
            self.send(proto::master_message::Body::Demoted(word));
        }
    }

    /// Repeats to the node, in a new session, the orders that an earlier session may have lost.
    pub(crate) fn repeat_orders(&self) {
        let cancellations = self.cancellations.lock();
        if let Some(number) = cancellations.open() {
            self.tell_to_stay(number);
        }
        if self.is_told_to_leave() {
            self.order_drain();
        }
    }

    pub(crate) fn is_told_to_leave(&self) -> bool {
        self.is_told_to_leave.load(Ordering::Acquire)
    }

    /// Records whether a check found nothing left to move. The pool had `doubts` doubts when the check began.
    pub(crate) fn note_left(&self, is_nothing_left: bool, doubts: u64) {
        let nothing_left_at = if is_nothing_left { doubts + 1 } else { 0 };
        self.nothing_left_at
            .store(nothing_left_at, Ordering::Release);
    }

    /// Records how many blocks a stop would lose; `None` if they are not counted.
    pub(crate) fn note_count(&self, left: Option<u64>) {
        let left = left.map_or(0, |left| left + 1);
        self.left.store(left, Ordering::Release);
    }

    /// The number of blocks that a stop of this draining node would lose, when they were last counted. `None` if
    /// they are not counted, or the node does not drain.
    pub fn left_blocks(&self) -> Option<u64> {
        let left = self.left.load(Ordering::Acquire).checked_sub(1);
        left.filter(|_| self.drains())
    }

    /// True for a draining node with nothing left to move. A check that began before the latest of `doubts` does
    /// not count.
    pub(crate) fn is_drained(&self, doubts: u64) -> bool {
        let nothing_left_at = self.nothing_left_at.load(Ordering::Acquire);
        self.state() == NodeState::Draining && nothing_left_at == doubts + 1
    }

    /// True when the node's blocks may be read.
    pub fn is_readable(&self) -> bool {
        matches!(self.state(), NodeState::Live | NodeState::Draining)
    }

    /// True when the node's blocks may be read, and nothing says that it will soon be gone.
    pub(crate) fn stays(&self) -> bool {
        self.is_readable() && !self.drains() && self.is_connected()
    }

    /// True when the node takes new blocks.
    pub fn is_placeable(&self) -> bool {
        self.state() == NodeState::Live && !self.drains()
    }

    /// True when the node can copy blocks from other nodes.
    pub fn can_pull(&self) -> bool {
        self.pulls.load(Ordering::Acquire)
    }

    /// True when an order to copy a block reaches the node now.
    pub(crate) fn pulls_now(&self) -> bool {
        self.is_placeable() && self.can_pull() && self.is_connected()
    }

    /// True when no order to copy a block reaches the node now, but soon may: it does not leave, and was heard
    /// within `patience`. A new leader hears each node first.
    pub(crate) fn may_return(&self, now: BootInstant, patience: Duration) -> bool {
        let is_away = !self.is_connected() || self.state() == NodeState::Suspect;
        let may_pull = self.can_pull() || self.state() == NodeState::Unreported;
        let leaves = self.drains() || self.state() == NodeState::Gone;
        is_away && may_pull && !leaves && now.since(self.last_heard()) < patience
    }

    pub(crate) fn set_can_pull(&self, can_pull: bool) {
        self.pulls.store(can_pull, Ordering::Release);
    }

    pub(crate) fn set_wants_signed_reads(&self, wants: bool) {
        self.wants_signed_reads.store(wants, Ordering::Release);
    }

    /// The signer of permissions to read this node's extents in `epoch`; `None` if the node asks for none.
    pub(crate) fn read_signer(&self, epoch: Epoch) -> Option<ReadSigner> {
        let wants = self.wants_signed_reads.load(Ordering::Acquire);
        wants.then(|| self.signer.for_reads(self.incarnation, epoch))
    }

    /// The number of the open session; `None` without one.
    pub(crate) fn session_number(&self) -> Option<u64> {
        let session = self.session.lock();
        session.outbox.as_ref().map(|_| session.number)
    }

    /// The node's addresses.
    pub fn address(&self) -> Address {
        self.address.read().clone()
    }

    /// The node's segments, in the order in which it offers them.
    pub fn segments(&self) -> Vec<SegmentId> {
        self.segments.read().clone()
    }

    pub(crate) fn add_segment(&self, id: SegmentId) {
        self.segments.write().push(id);
    }

    /// The longest extent that any segment of the node gives, even an empty one.
    pub(crate) fn longest_extent(&self) -> Length {
        Length(self.longest_extent.load(Ordering::Acquire))
    }

    /// Notes that a segment of the node gives extents of up to `limit` bytes. An incarnation never changes its
    /// segments.
    pub(crate) fn gives_extents(&self, limit: u64) {
        self.longest_extent.fetch_max(limit, Ordering::AcqRel);
    }

    /// The time of the node's last message.
    pub fn last_heard(&self) -> BootInstant {
        self.session.lock().last_heard
    }

    /// Counts the node's silence from `now` on.
    pub(crate) fn wait_from(&self, now: BootInstant) {
        self.session.lock().last_heard = now;
    }

    /// Makes the node suspect if it is silent for `suspect_after`, or for `broken_after` since its session
    /// ended. Returns the length of the silence if the state changed.
    fn suspect_if_silent(
        &self,
        now: BootInstant,
        suspect_after: Duration,
        broken_after: Duration,
    ) -> Option<Duration> {
        let mut session = self.session.lock();
        let silent = now.since(session.last_heard);
        let broken = now.since(session.broken.max(session.last_heard));
        let is_broken = session.outbox.is_none() && broken >= broken_after;
        if silent < suspect_after && !is_broken {
            return None;
        }
        let state @ (NodeState::Live | NodeState::Draining) = self.state() else {
            return None;
        };
        let has_changed = self.change_state(state, NodeState::Suspect);
        if has_changed && session.outbox.is_some() && session.silence == Silence::Plain {
            session.silence = Silence::Open;
        }
        has_changed.then_some(silent)
    }

    /// Gives a suspect node time until its next session, because the master was cut off from `since` until `now`.
    ///
    /// A node gets this time at most once before it speaks again. It gets none if it was already silent for
    /// `suspect_after` at `since`, or if its session ended first. Returns true if the state changed.
    pub(crate) fn excuse(
        &self,
        since: BootInstant,
        now: BootInstant,
        suspect_after: Duration,
    ) -> bool {
        let mut session = self.session.lock();
        let was_well = since.since(session.last_heard) < suspect_after;
        if session.silence != Silence::Open || !was_well {
            return false;
        }
        session.silence = Silence::Excused;
        session.last_heard = now;
        drop(session);
        self.end_silence(NodeState::Suspect, self.state_when_heard())
    }

    /// The figures of the last heartbeat.
    pub fn reported(&self) -> Reported {
        self.session.lock().reported
    }

    /// The faults that the node reports of its token, key and certificate files, one sentence each.
    pub fn problems(&self) -> Vec<String> {
        self.problems.read().clone()
    }

    /// Records the problems in a heartbeat. Operators read them, so they are cut short and have no control
    /// characters.
    pub(crate) fn note_problems(&self, said: Vec<String>) {
        if said.is_empty() && self.problems.read().is_empty() {
            return;
        }
        let said = said.into_iter().take(MOST_PROBLEMS);
        *self.problems.write() = said.map(|said| short(&said)).collect();
    }

    /// True while a session is open.
    pub fn is_connected(&self) -> bool {
        self.session.lock().outbox.is_some()
    }

    /// Opens a session over `outbox`, in place of any other, and returns its number.
    pub(crate) fn attach(&self, address: Address, outbox: Outbox, now: BootInstant) -> u64 {
        *self.address.write() = address;
        let number = self.next_session.fetch_add(1, Ordering::Relaxed);
        let mut session = self.session.lock();
        session.number = number;
        session.outbox = Some(outbox);
        session.last_heard = now;
        session.unused.clear();
        number
    }

    /// Closes a session, unless a newer one has replaced it.
    pub(crate) fn detach(&self, number: u64, now: BootInstant) {
        let mut session = self.session.lock();
        if session.number == number {
            session.end(now);
        }
    }

    /// Ends the current session. The node reconnects and learns the reason.
    pub(crate) fn end_session(&self, now: BootInstant) {
        self.session.lock().end(now);
    }

    /// Records a message of the node; true when its state changed. A suspect node returns to its
    /// former state. A node sends heartbeats only after it has processed the term's welcome, so the
    /// first heartbeat makes an unreported node live.
    pub(crate) fn heard(&self, now: BootInstant, reported: Option<Reported>) -> bool {
        {
            let mut session = self.session.lock();
            session.last_heard = now;
            session.silence = Silence::Plain;
            if let Some(reported) = reported {
                session.reported = reported;
            }
        }
        let before = self.state();
        let welcomed = before == NodeState::Unreported && reported.is_some();
        let back = before == NodeState::Suspect;
        if !welcomed && !back {
            return false;
        }
        let has_changed = self.end_silence(before, self.state_when_heard());
        if has_changed {
            tracing::info!(node = %self.name, state = self.state().label(), "node state changed");
        }
        has_changed
    }

    fn state_when_heard(&self) -> NodeState {
        match self.drains() {
            true => NodeState::Draining,
            false => NodeState::Live,
        }
    }

    /// Changes the state of a silent node from `before` to `state`. Returns false if another thread has changed it.
    fn end_silence(&self, before: NodeState, state: NodeState) -> bool {
        let has_changed = self.change_state(before, state);
        if !has_changed {
            return false;
        }
        // A drain that began meanwhile did not find the node live. A cancelled drain did not find it draining.
        loop {
            let drains = self.drains();
            match drains {
                true => self.change_state(NodeState::Live, NodeState::Draining),
                false => self.change_state(NodeState::Draining, NodeState::Live),
            };
            if self.drains() == drains {
                return true;
            }
        }
    }

    /// Sends a message, if a session is open.
    pub(crate) fn send(&self, body: proto::master_message::Body) {
        if let Some(outbox) = &self.session.lock().outbox {
            // A failed send means that the session is ending. The next session repeats the
            // requests.
            let _ended = outbox.send(Ok(proto::MasterMessage { body: Some(body) }));
        }
    }
}

/// A text of a node as operators read it.
fn short(said: &str) -> String {
    let shown = said.chars().filter(|one| !one.is_control());
    shown.take(LONGEST_PROBLEM).collect()
}

#[cfg(test)]
mod tests;
