//! Prefill's rooms: writes chunks into the rooms of receivers, and performs the actions of the machines.

use super::RequestTimes;
use super::agent::{Agent, Call, Event, SendingCall};
use super::handle::TransferCell;
use crate::Moment;
use crate::aux::AuxField;
use crate::registration::RankDescription;
use crate::room::{
    ChunkBody, PageRectangle, PollState, RoomId, RoomOffer, RoomOutcome, RoomSenderPlan,
    SenderAction, SenderEvent, ToReceiver, ToSender,
};
use crate::wire::HandoffMessage;
use kvpool_transport::peer::{RoomPart, RoomPass};
use kvpool_transport::{Region, Slice, TransferError};
use kvpool_types::{Checksum, Code, Epoch, GrantKey, Incarnation};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest time until a write starts: it waits for a permit and for a connection.
const CONNECT: Duration = Duration::from_secs(2);

/// A call to send pages.
#[derive(Clone, Debug)]
pub(super) struct SendCall {
    pub(super) room: RoomId,
    /// This rank's pages of the request, from its first token.
    pub(super) pages: Vec<u32>,
    pub(super) receivers: usize,
    pub(super) times: RequestTimes,
    /// Whether the call is an offer: all pages are computed and wait for decode to ask.
    pub(super) is_offer: bool,
}

/// A room of prefill: the state beside its machine.
pub(super) struct SendingRoom {
    pub(super) cell: Arc<TransferCell>,
    pages: Arc<Vec<u32>>,
    /// The session of each receiver. The last messages need it after the machine has gone.
    sessions: Vec<Option<Incarnation>>,
    /// The slot of metadata. `None` until the request is computed.
    aux: Option<Slice>,
    deadline: Instant,
    under_way: usize,
    is_cancelled: bool,
}

/// One write of a chunk.
struct ChunkWrite {
    receiver: Arc<RankDescription>,
    address: String,
    session: Incarnation,
    offer: RoomOffer,
    body: ChunkBody,
    pages: Arc<Vec<u32>>,
    aux: Option<Slice>,
    deadline: Instant,
}

impl Agent {
    pub(super) fn open_sending(&mut self, call: SendCall, cell: Arc<TransferCell>) {
        let id = call.room;
        let pages = u32::try_from(call.pages.len()).unwrap_or(u32::MAX);
        let RequestTimes { deadline, patience } = call.times;
        let plan = RoomSenderPlan {
            room: id,
            rectangle: PageRectangle {
                pages: 0..pages,
                layers: self.memory.layers(),
            },
            receivers: call.receivers,
            limits: self.limits.with_patience(patience),
            deadline: self.moment(deadline),
            chunk_cells: self.memory.cells_of(self.chunks.bytes),
            cells_under_way: self.memory.cells_of(self.chunks.bytes_under_way),
        };
        let (now, mut out) = (self.now(), Vec::new());
        self.senders.bury_if_ended(now, id);
        self.publish_ended();
        self.open_rooms.lock().insert(id);
        let answers = match self.senders.open(now, plan, &mut out) {
            Ok(answers) => answers,
            Err(code) => {
                self.unpin(id, call.pages.len());
                self.close_number(id);
                cell.change(|state| {
                    state.poll = PollState::Failed;
                    state.failure = Some(code);
                    state.is_released = true;
                });
                return;
            }
        };
        let its_cell = Arc::clone(&cell);
        let room = SendingRoom {
            cell,
            pages: Arc::new(call.pages),
            sessions: Vec::new(),
            aux: None,
            deadline,
            under_way: 0,
            is_cancelled: false,
        };
        self.sending.insert(id, room);
        self.answer_receivers(answers);
        self.perform_sender(id, out);
        let end = SendingCall::End(Code::Internal);
        self.maybe_fails(Event::Call(Call::OfSending(id, its_cell, end)));
    }

    pub(super) fn of_sending(&mut self, id: RoomId, call: SendingCall) {
        match call {
            SendingCall::Produced(rectangle) => {
                self.sender_event(id, SenderEvent::Produced(rectangle));
            }
            SendingCall::ProducedAll(aux) => self.produced_all(id, &aux),
            SendingCall::End(code) => self.sender_event(id, SenderEvent::Abort { code }),
        }
    }

    pub(super) fn produced_all(&mut self, id: RoomId, aux: &[u8]) {
        let layout = self.memory.aux_layout();
        if let Some(room) = self.sending.get_mut(&id) {
            let bytes = usize::try_from(layout.slot_bytes()).unwrap_or(0);
            let mut slot = vec![0; bytes];
            for (place, byte) in slot.iter_mut().zip(aux) {
                *place = *byte;
            }
            let has_room = layout.put(&mut slot, AuxField::Room, &id.0.to_le_bytes());
            debug_assert!(has_room, "invariant: a slot has a field for the room");
            room.aux = Some(Region::from(slot).whole());
        }
        self.sender_event(id, SenderEvent::ProducedAll);
    }

    pub(super) fn take_message(
        &mut self,
        now: Moment,
        from: Incarnation,
        address: &str,
        message: ToSender,
    ) {
        let tag = message.tag();
        let is_registered = self.ranks.get(from).is_some();
        let held_back = self.held_back(now, from, &message);
        if is_registered && matches!(message, ToSender::Offer(_)) {
            self.watch_asker(now, from, address);
        }
        // This check comes before the desk's, because the desk forgets an attempt that a process gives up.
        let gives_up = self.gives_up(now, from, &message);
        let gives_up = gives_up.filter(|_| is_registered);
        let mut out = Vec::new();
        let answer = match message {
            ToSender::Offer(_) if !is_registered => {
                let code = Code::InvalidArgument;
                Some(ToReceiver::Refuse { tag, code })
            }
            ToSender::Offer(offer) if held_back.is_some() => {
                self.senders.hold_back(now, from, &offer);
                held_back
            }
            ToSender::Decline { .. } => {
                if is_registered {
                    self.declined(now, (from, message), gives_up.is_some(), &mut out);
                }
                None
            }
            message => self.senders.take(now, from, message, &mut out),
        };
        if let Some(answer) = answer {
            let answer = HandoffMessage::ToReceiver(answer);
            self.peers.send(address, Some(from), &answer);
        }
        self.perform_sender(tag.room, out);
        if let Some(code) = gives_up {
            // This comes after the desk's part, so that the aborted attempt gets no answer about the end.
            self.end_waiting(tag.room, code);
        }
    }

    pub(super) fn sender_event(&mut self, id: RoomId, event: SenderEvent) {
        let (now, mut out) = (self.now(), Vec::new());
        self.senders.handle(now, id, event, &mut out);
        self.perform_sender(id, out);
    }

    fn perform_sender(&mut self, id: RoomId, actions: Vec<SenderAction>) {
        if let (Some(room), Some(machine)) = (self.sending.get_mut(&id), self.senders.room(id)) {
            let all = 0..machine.receivers();
            room.sessions = all.map(|to| machine.receiver_session(to)).collect();
        }
        let mut ends_writes = false;
        for action in actions {
            match action {
                SenderAction::Send { to, message } => self.tell_receiver(id, to, message),
                SenderAction::Write {
                    to,
                    id: chunk,
                    body,
                } => self.write(id, (to, chunk), body),
                SenderAction::CancelWrites => {
                    if let Some(room) = self.sending.get_mut(&id) {
                        room.is_cancelled = true;
                        ends_writes = room.under_way == 0;
                    }
                }
                SenderAction::ReleasePages => {
                    if let Some(room) = self.sending.get(&id) {
                        let (cell, pages) = (Arc::clone(&room.cell), room.pages.len());
                        self.unpin(id, pages);
                        // This must come before the caller learns of the release: the caller may send the same
                        // room again.
                        self.close_number(id);
                        cell.change(|state| state.is_released = true);
                    }
                }
            }
        }
        if ends_writes {
            return self.sender_event(id, SenderEvent::WritesEnded);
        }
        self.publish_sender(id);
    }

    fn tell_receiver(&mut self, id: RoomId, to: usize, message: ToReceiver) {
        let session = self
            .sending
            .get(&id)
            .and_then(|room| *room.sessions.get(to)?);
        let address = session.and_then(|session| self.addresses.get(&session));
        if let Some(address) = address {
            let message = HandoffMessage::ToReceiver(message);
            self.peers.send(address, session, &message);
        }
    }

    fn write(&mut self, id: RoomId, (to, chunk): (usize, u32), body: ChunkBody) {
        let events = self.events.clone();
        let written = move |outcome| {
            drop(events.send(Event::Written {
                room: id,
                to,
                id: chunk,
                outcome,
            }));
        };
        let write = self.chunk_write(id, to, body);
        let write = write.and_then(|write| Some((self.peers.starts(&write.address)?, write)));
        if let Some(room) = self.sending.get_mut(&id) {
            room.under_way += 1;
        }
        let Some((starts, write)) = write else {
            return written(Err(Code::Unreachable));
        };
        let (endpoint, memory) = (Arc::clone(&self.endpoint), Arc::clone(&self.memory));
        let connect = write.deadline.min(Instant::now() + CONNECT);
        tokio::spawn(async move {
            // All peers share the threads: a peer that does not answer must not occupy them all.
            let turn = tokio::time::timeout_at(connect.into(), starts.acquire_owned()).await;
            let Ok(Ok(turn)) = turn else {
                tracing::debug!(
                    room = id.0,
                    chunk,
                    "a write into a room had no turn to start"
                );
                return written(Err(Code::DeadlineExceeded));
            };
            let starting = tokio::task::spawn_blocking(move || {
                let _turn = turn;
                let link = endpoint.link(&write.address, connect)?;
                if link.session() != write.session {
                    return Err(failed(Code::WrongIncarnation));
                }
                let parts = write.parts(&memory).map_err(failed)?;
                let pass = RoomPass {
                    epoch: Epoch(write.offer.epoch),
                    key: GrantKey(write.offer.key.0),
                };
                Ok(link.write_room(&pass, &parts, write.deadline))
            });
            let outcome = match starting.await {
                Ok(Ok(writing)) => writing.await,
                Ok(Err(error)) => Err(error),
                Err(_) => Err(failed(Code::Internal)),
            };
            if let Err(error) = &outcome {
                tracing::debug!(room = id.0, chunk, %error, "a write into a room failed");
            }
            written(outcome.map_err(|error| error.code));
        });
    }

    fn chunk_write(&self, id: RoomId, to: usize, body: ChunkBody) -> Option<ChunkWrite> {
        let (room, machine) = (self.sending.get(&id)?, self.senders.room(id)?);
        let session = machine.receiver_session(to)?;
        Some(ChunkWrite {
            receiver: Arc::clone(self.ranks.get(session)?),
            address: self.addresses.get(&session)?.clone(),
            session,
            offer: machine.offer(to)?.clone(),
            body,
            pages: Arc::clone(&room.pages),
            aux: room.aux.clone(),
            deadline: room.deadline.min(Instant::now() + self.limits.stalled),
        })
    }

    pub(super) fn written(
        &mut self,
        id: RoomId,
        (to, chunk): (usize, u32),
        outcome: Result<Checksum, Code>,
    ) {
        let Some(room) = self.sending.get_mut(&id) else {
            return;
        };
        room.under_way -= 1;
        let is_last = room.is_cancelled && room.under_way == 0;
        let event = SenderEvent::Written {
            to,
            id: chunk,
            outcome,
        };
        self.sender_event(id, event);
        if is_last {
            self.sender_event(id, SenderEvent::WritesEnded);
        }
    }

    fn publish_sender(&mut self, id: RoomId) {
        if let (Some(room), Some(machine)) = (self.sending.get(&id), self.senders.room(id)) {
            let (poll, failure) = (machine.poll(), machine.failure());
            room.cell.change(|state| {
                state.poll = poll;
                state.failure = failure;
            });
        }
        self.publish_ended();
    }

    pub(super) fn publish_ended(&mut self) {
        for (id, outcome) in self.senders.take_ended() {
            let Some(room) = self.sending.remove(&id) else {
                continue;
            };
            room.cell.change(|state| match outcome {
                RoomOutcome::Success => state.poll = PollState::Success,
                RoomOutcome::Failed(code) => {
                    state.poll = PollState::Failed;
                    state.failure = Some(code);
                }
            });
        }
    }
}

impl ChunkWrite {
    fn parts(&self, memory: &super::memory::RankMemory) -> Result<Vec<RoomPart>, Code> {
        match &self.body {
            ChunkBody::Pages(rectangle) => {
                memory.chunk(&self.receiver, &self.offer, rectangle, &self.pages)
            }
            ChunkBody::Aux if self.receiver.hidden_bytes != memory.description().hidden_bytes => {
                Err(Code::InvalidArgument)
            }
            ChunkBody::Aux => Ok(vec![RoomPart {
                view: self.offer.view,
                offset: 0,
                from: self.aux.iter().cloned().collect(),
            }]),
        }
    }
}

fn failed(code: Code) -> TransferError {
    TransferError {
        code,
        message: "before the first byte".to_owned(),
    }
}
