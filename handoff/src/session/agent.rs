//! The thread that owns a session's machines. It takes events and performs the machines' actions.

use super::ChunkSizes;
use super::handle::{TransferCell, has_ended};
use super::memory::RankMemory;
use super::offering::WaitingOffer;
use super::peers::Peers;
use super::receiving::{ReceiveCall, ReceivingRoom};
use super::sending::{SendCall, SendingRoom};
use crate::Moment;
use crate::pins::PinLedger;
use crate::registration::{
    RankDescription, RegisteredRanks, RegistrationError, RegistrationOutcome,
};
use crate::room::{
    PageRectangle, PollState, ReceiverDesk, ReceiverEvent, RoomChunk, RoomId, RoomLimits, RoomTag,
    SenderDesk, SenderEvent, ToSender,
};
use crate::wire::HandoffMessage;
use kvpool_transport::peer::{ClosedRoom, Endpoint};
use kvpool_types::{Checksum, Code, Incarnation};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How long a session that closes waits for its transfers.
const CLOSING: Duration = Duration::from_secs(3);

/// The most sessions whose addresses are known.
const MAX_ADDRESSES: usize = 8192;
/// How long the session waits for the delivery of its last messages.
const FAREWELL: Duration = Duration::from_secs(1);
/// The most events between two checks of deadlines and retries.
const BATCH: usize = 256;
/// The time between two checks whether a closing session can end.
const LOOK: Duration = Duration::from_millis(2);

/// A request of the session's caller.
#[derive(Debug)]
pub(super) enum Call {
    Receive(ReceiveCall, Arc<TransferCell>),
    Send(SendCall, Arc<TransferCell>),
    /// The cell tells apart the requests that used this number.
    OfSending(RoomId, Arc<TransferCell>, SendingCall),
    EndReceiving(RoomTag, Code),
    /// Tells the processes at these addresses that this process asks for nothing of the request.
    Decline(RoomTag, Vec<String>, Code),
    Close,
}

/// A call about pages that are being sent.
#[derive(Debug)]
pub(super) enum SendingCall {
    Produced(PageRectangle),
    ProducedAll(Vec<u8>),
    End(Code),
}

/// An event of a session.
#[derive(Debug)]
pub(super) enum Event {
    Call(Call),
    Letter {
        from: Incarnation,
        address: String,
        message: Box<HandoffMessage>,
        /// The length of the letter in bytes.
        bytes: u64,
    },
    LinkUp {
        address: String,
        session: Incarnation,
    },
    LinkBroken {
        address: String,
    },
    PeerLost {
        session: Incarnation,
    },
    Written {
        room: RoomId,
        to: usize,
        id: u32,
        outcome: Result<Checksum, Code>,
    },
    Fenced {
        tag: RoomTag,
        room: Option<ClosedRoom>,
    },
    Verified {
        tag: RoomTag,
        is_equal: bool,
        is_own_room: bool,
    },
}

/// The state of the agent's thread.
pub(super) struct Agent {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) memory: Arc<RankMemory>,
    pub(super) limits: RoomLimits,
    pub(super) chunks: ChunkSizes,
    /// How long an unused peer stays connected.
    pub(super) idle: Duration,
    pub(super) events: mpsc::UnboundedSender<Event>,
    pub(super) peers: Peers,
    /// The ranks that have registered, as receivers.
    pub(super) ranks: RegisteredRanks,
    pub(super) addresses: HashMap<Incarnation, String>,
    pub(super) receivers: ReceiverDesk,
    pub(super) receiving: HashMap<RoomTag, ReceivingRoom>,
    /// The pages that open rooms receive into.
    pub(super) pages_in_use: HashSet<u32>,
    pub(super) senders: SenderDesk,
    pub(super) sending: HashMap<RoomId, SendingRoom>,
    /// The rooms that are being sent. The caller may not open their numbers again.
    pub(super) open_rooms: Arc<Mutex<HashSet<RoomId>>>,
    /// The pins of offers, and the breakers of receivers.
    pub(super) pins: PinLedger,
    /// The offers that wait for pins.
    pub(super) waiting: BTreeMap<RoomId, WaitingOffer>,
    /// The number of offers that wait.
    pub(super) waiting_offers: Arc<AtomicU64>,
    /// The processes that asked for rooms which have not opened, and that lost their connections. Each has the
    /// moment at which it counts as lost.
    pub(super) lost: BTreeMap<Incarnation, Moment>,
    pub(super) failure_probability: f64,
    /// The pages of rooms that are being sent.
    pub(super) pinned: Arc<AtomicU64>,
    /// The bytes of letters that wait for the agent.
    pub(super) waiting_bytes: Arc<AtomicU64>,
    pub(super) origin: Instant,
}

impl Agent {
    /// Runs until the session is closed. Returns false when a peer may still touch pages of decode.
    pub(super) async fn run(mut self, mut events: mpsc::UnboundedReceiver<Event>) -> bool {
        let mut closes_at: Option<Instant> = None;
        let mut sweeps_at = Instant::now() + self.idle;
        loop {
            let now = Instant::now();
            if let Some(end) = closes_at {
                // The other ends learn of the end from the last messages.
                let is_silent = !self.peers.has_unsent() || now + CLOSING - FAREWELL >= end;
                if now >= end || (!self.holds_pages() && is_silent) {
                    break;
                }
            }
            if now >= sweeps_at {
                self.sweep();
                sweeps_at = now + self.idle;
            }
            let wake = self.next_wake().map(|moment| self.origin + moment.0);
            let looks_at = closes_at.map(|_| now + LOOK);
            let wake = wake.into_iter().chain(looks_at).chain([sweeps_at]).min();
            let event = match wake.filter(|wake| *wake > now) {
                Some(wake) => {
                    let receiving = tokio::time::timeout_at(wake.into(), events.recv());
                    receiving.await.ok()
                }
                // A machine has work now. Events that wait are taken before it.
                None => events.try_recv().ok().map(Some),
            };
            match event {
                Some(Some(Event::Call(Call::Close))) => {
                    closes_at.get_or_insert(Instant::now() + CLOSING);
                    self.end_all(Code::Draining);
                }
                Some(Some(event)) => self.take_or_refuse(event, closes_at.is_some()),
                Some(None) => break,
                None => {}
            }
            // One check of deadlines serves many events, because the check visits all rooms.
            for _ in 0..BATCH {
                match events.try_recv() {
                    Ok(Event::Call(Call::Close)) => {
                        closes_at.get_or_insert(Instant::now() + CLOSING);
                        self.end_all(Code::Draining);
                    }
                    Ok(event) => self.take_or_refuse(event, closes_at.is_some()),
                    Err(_) => break,
                }
            }
            self.tick();
        }
        // These calls came too late, and their pages were never used.
        events.close();
        while let Ok(event) = events.try_recv() {
            self.refuse(event);
        }
        for cell in self.cells().filter(|cell| !has_ended(&cell.get())) {
            // The outcome of these transfers is unknown.
            cell.change(|state| {
                state.poll = PollState::Failed;
                state.failure.get_or_insert(Code::Draining);
            });
        }
        !self.receives()
    }

    /// A closing session opens no further room.
    fn take_or_refuse(&mut self, event: Event, closes: bool) {
        match event {
            Event::Call(Call::Receive(..) | Call::Send(..)) if closes => self.refuse(event),
            event => self.take(event),
        }
    }

    /// Ends a call that came too late.
    fn refuse(&mut self, event: Event) {
        let cell = match event {
            Event::Call(Call::Receive(_, cell)) => cell,
            Event::Call(Call::Send(call, cell)) => {
                if !call.is_offer {
                    self.unpin(call.room, call.pages.len());
                }
                self.close_number(call.room);
                cell
            }
            _ => return,
        };
        cell.change(|state| {
            state.poll = PollState::Failed;
            state.failure = Some(Code::Draining);
            state.is_released = true;
        });
    }

    /// Whether a room still holds pages of decode.
    fn receives(&self) -> bool {
        let mut rooms = self.receiving.values();
        rooms.any(|room| !room.cell.get().is_released)
    }

    pub(super) fn now(&self) -> Moment {
        Moment(self.origin.elapsed())
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Call(Call::Receive(call, cell)) => self.open_receiving(call, cell),
            Event::Call(Call::Send(call, cell)) if call.is_offer => self.offer(call, cell),
            Event::Call(Call::Send(call, cell)) => self.open_sending(call, cell),
            Event::Call(Call::Decline(tag, addresses, code)) => {
                let message = HandoffMessage::ToSender(ToSender::Decline { tag, code });
                for address in &addresses {
                    self.peers.send(address, None, &message);
                }
            }
            Event::Call(Call::OfSending(room, cell, call)) => {
                // A room that has ended leaves its number to the next room.
                let open = self.sending.get(&room);
                if open.is_some_and(|open| Arc::ptr_eq(&open.cell, &cell)) {
                    self.of_sending(room, call);
                } else if let SendingCall::End(code) = call {
                    self.end_own_offer(room, &cell, code);
                }
            }
            Event::Call(Call::EndReceiving(tag, code)) => {
                self.receiver_event(tag, ReceiverEvent::Abort { code });
            }
            Event::Call(Call::Close) => {}
            Event::Letter {
                from,
                address,
                message,
                bytes,
            } => {
                self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
                self.letter(from, address, *message);
            }
            Event::LinkUp { address, session } => self.link_up(&address, session),
            Event::LinkBroken { address } => self.link_broken(&address),
            // The registration stays. A process that was only slow continues on its own connection, and
            // registers once on each connection. The sweep forgets a process that has ended.
            Event::PeerLost { session } => self.fail_rooms_with(session),
            Event::Written {
                room,
                to,
                id,
                outcome,
            } => self.written(room, (to, id), outcome),
            Event::Fenced { tag, room } => self.fenced(tag, room),
            Event::Verified {
                tag,
                is_equal,
                is_own_room,
            } => self.receiver_event(
                tag,
                ReceiverEvent::Verified {
                    is_equal,
                    is_own_room,
                },
            ),
        }
    }

    fn letter(&mut self, from: Incarnation, address: String, message: HandoffMessage) {
        if self.addresses.len() >= MAX_ADDRESSES {
            self.forget_strangers();
        }
        self.addresses.insert(from, address.clone());
        let now = self.now();
        match message {
            HandoffMessage::Register(rank) => {
                if let Err(error) = self.register(from, &address, Arc::new(rank)) {
                    tracing::warn!(address, %error, "a rank's registration is refused");
                }
                // Connects, to learn of the peer's death.
                self.peers.know(&address);
            }
            HandoffMessage::ToSender(message) => self.take_message(now, from, &address, message),
            HandoffMessage::ToReceiver(message) => {
                let (tag, mut out) = (message.tag(), Vec::new());
                let answer = self.receivers.take(now, from, message, &mut out);
                if let Some(answer) = answer {
                    let answer = HandoffMessage::ToSender(answer);
                    self.peers.send(&address, Some(from), &answer);
                }
                self.perform_receiver(tag, out);
            }
        }
    }

    /// Registers a rank. Forgets sessions without a connection only if that makes room for the rank.
    fn register(
        &mut self,
        from: Incarnation,
        address: &str,
        rank: Arc<RankDescription>,
    ) -> Result<RegistrationOutcome, RegistrationError> {
        match self.ranks.register(from, Arc::clone(&rank)) {
            Err(RegistrationError::Full(_) | RegistrationError::NoMemory { .. }) => {
                self.forget_strangers();
                self.addresses.insert(from, address.to_owned());
                self.ranks.register(from, rank)
            }
            registered => registered,
        }
    }

    fn link_up(&mut self, address: &str, session: Incarnation) {
        let gone = self.peers.note_session(address, session);
        for (tag, from) in self.shares_at(address) {
            self.receiver_event(tag, ReceiverEvent::LinkUp { from, session });
        }
        // The rooms that continue with the new incarnation come first.
        if let Some(gone) = gone {
            self.peer_lost(gone);
        }
        self.lost.remove(&session);
        for (room, from) in self.targets_of(session) {
            self.sender_event(room, SenderEvent::LinkUp { from, session });
        }
    }

    fn link_broken(&mut self, address: &str) {
        for (tag, from) in self.shares_at(address) {
            self.receiver_event(tag, ReceiverEvent::LinkBroken { from });
        }
        let at = self.addresses.iter().filter(|(_, at)| *at == address);
        let sessions: Vec<Incarnation> = at.map(|(session, _)| *session).collect();
        for session in sessions {
            let until = self.now() + self.limits.grace;
            self.note_lost(session, until);
            for (room, from) in self.targets_of(session) {
                self.sender_event(room, SenderEvent::LinkBroken { from });
            }
        }
    }

    /// A process has ended: another process is at its address.
    fn peer_lost(&mut self, session: Incarnation) {
        self.fail_rooms_with(session);
        self.forget(session);
    }

    fn fail_rooms_with(&mut self, session: Incarnation) {
        let rooms = self.receivers.rooms();
        let found = rooms.filter_map(|room| Some((room.tag(), room.sender(session)?)));
        for (tag, from) in found.collect::<Vec<_>>() {
            self.receiver_event(tag, ReceiverEvent::PeerLost { from });
        }
        for (room, from) in self.targets_of(session) {
            self.sender_event(room, SenderEvent::PeerLost { from });
        }
        let now = self.now();
        self.note_lost(session, now);
        // This must come before the session and its offers are forgotten.
        self.end_deserted_offers();
    }

    fn forget(&mut self, session: Incarnation) {
        self.ranks.forget(session);
        self.addresses.remove(&session);
        self.senders.forget(session);
        self.lost.remove(&session);
        self.pins.forget(session);
    }

    /// The parts of open rooms whose sender is at an address.
    fn shares_at(&self, address: &str) -> Vec<(RoomTag, usize)> {
        let mut shares = Vec::new();
        for (tag, room) in &self.receiving {
            let senders = room.senders.iter().enumerate();
            let here = senders.filter(|(_, sender)| sender.address == address);
            shares.extend(here.map(|(from, _)| (*tag, from)));
        }
        shares
    }

    /// The receivers of open rooms that belong to one session.
    fn targets_of(&self, session: Incarnation) -> Vec<(RoomId, usize)> {
        let mut targets = Vec::new();
        for room in self.senders.rooms() {
            let all = (0..room.receivers()).map(|to| (to, room.receiver_session(to)));
            let those = all.filter(|(_, of)| *of == Some(session));
            targets.extend(those.map(|(to, _)| (room.room(), to)));
        }
        targets
    }

    fn next_wake(&self) -> Option<Moment> {
        let receivers = self.receivers.rooms().filter_map(|room| room.next_wake());
        let senders = self.senders.rooms().filter_map(|room| room.next_wake());
        let offers = (self.next_late_offer().into_iter()).chain(self.next_deserted_offer());
        receivers.chain(senders).chain(offers).min()
    }

    fn tick(&mut self) {
        let now = self.now();
        let is_due = |wake: Option<Moment>| wake.is_some_and(|wake| wake <= now);
        let rooms = self.receivers.rooms();
        let due = rooms.filter(|room| is_due(room.next_wake()));
        for tag in due.map(|room| room.tag()).collect::<Vec<_>>() {
            self.receiver_event(tag, ReceiverEvent::Tick);
        }
        let rooms = self.senders.rooms();
        let due = rooms.filter(|room| is_due(room.next_wake()));
        for room in due.map(|room| room.room()).collect::<Vec<_>>() {
            self.sender_event(room, SenderEvent::Tick);
        }
        self.end_late_offers();
        self.end_deserted_offers();
        self.open_admitted();
    }

    fn sweep(&mut self) {
        let now = self.now();
        let asked: HashSet<Incarnation> = self.senders.asked(now).map(|(_, by)| by).collect();
        self.lost.retain(|session, _| asked.contains(session));
        let in_use: HashSet<&str> = self
            .receiving
            .values()
            .flat_map(|room| &room.senders)
            .map(|sender| sender.address.as_str())
            .chain(self.addresses.iter().filter_map(|(session, address)| {
                (!self.targets_of(*session).is_empty()).then_some(address.as_str())
            }))
            .collect();
        // The registration stays: the peer's own connection to this process may still be open, and the peer
        // registers once on each connection.
        self.peers
            .retain(self.idle, |address| in_use.contains(address));
    }

    /// Makes room for a registration: forgets the sessions to which this process has no connection.
    fn forget_strangers(&mut self) {
        let is_stranger = |(session, address): &(&Incarnation, &String)| {
            self.peers.session(address) != Some(**session) && self.targets_of(**session).is_empty()
        };
        let strangers = self.addresses.iter().filter(is_stranger);
        for session in strangers.map(|(session, _)| *session).collect::<Vec<_>>() {
            self.forget(session);
        }
    }

    fn end_all(&mut self, code: Code) {
        for tag in self.receiving.keys().copied().collect::<Vec<_>>() {
            self.receiver_event(tag, ReceiverEvent::Abort { code });
        }
        for room in self.sending.keys().copied().collect::<Vec<_>>() {
            self.sender_event(room, SenderEvent::Abort { code });
        }
        self.end_waiting_offers(code);
    }

    fn cells(&self) -> impl Iterator<Item = &Arc<TransferCell>> {
        let receiving = self.receiving.values().map(|room| &room.cell);
        receiving.chain(self.sending.values().map(|room| &room.cell))
    }

    fn holds_pages(&self) -> bool {
        self.cells().any(|cell| !cell.get().is_released)
    }

    /// Gives a room's pages back to the caller.
    pub(super) fn unpin(&mut self, room: RoomId, pages: usize) {
        self.pinned.fetch_sub(pages as u64, Ordering::Relaxed);
        // A push has no pin in the ledger, so this frees none for it.
        self.pins.free(room);
    }

    /// Frees the number of a room for another request.
    pub(super) fn close_number(&self, room: RoomId) {
        self.open_rooms.lock().remove(&room);
    }
}

/// The chunks of a room, each with the index of its sender.
pub(super) type AnnouncedChunks = Vec<(usize, RoomChunk)>;
