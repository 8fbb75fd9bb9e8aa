//! Decode's rooms: opens them at the transport, and performs the actions of their machines.

use super::RequestTimes;
use super::agent::{Agent, AnnouncedChunks, Event};
use super::handle::{TransferCell, TransferState};
use super::memory::{chunk_ranges, chunk_sum};
use crate::Moment;
use crate::plan::{PlanError, Stages};
use crate::registration::RankDescription;
use crate::room::{
    PageRectangle, PollState, ReceiverAction, ReceiverEvent, RoomKey, RoomOutcome,
    RoomReceiverPlan, RoomTag, SenderShare, ToSender,
};
use crate::shares::{SenderRank, ShareState, receivers_of, senders_of, states_from};
use crate::wire::HandoffMessage;
use kvpool_transport::Region;
use kvpool_transport::peer::{ClosedRoom, RoomView};
use kvpool_types::{Code, Epoch, Length};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the writes of a failed room may continue before their connections are closed.
const PATIENCE: Duration = Duration::from_millis(100);
/// The pause before the next attempt to close a room in which a write has not ended.
const CLOSE_AGAIN: Duration = Duration::from_millis(100);

/// The longest time from the start of a room to its failure on purpose, in microseconds.
const MAX_FAILURE_MICROS: u64 = 3000;

/// A call to receive into pages.
#[derive(Clone, Debug)]
pub(super) struct ReceiveCall {
    pub(super) tag: RoomTag,
    /// This rank's pages for the request's pages from `held` on.
    pub(super) pages: Vec<u32>,
    pub(super) held: u32,
    pub(super) senders: Vec<ReceivingSender>,
    pub(super) wants_aux: bool,
    pub(super) times: RequestTimes,
}

/// One sender of a room.
#[derive(Clone, Debug)]
pub(super) struct ReceivingSender {
    pub(super) address: String,
    pub(super) rank: SenderRank,
    pub(super) share: Vec<ShareState>,
    /// This rank among the sender's receivers.
    pub(super) receiver: u32,
}

/// A room of decode: the state beside its machine.
pub(super) struct ReceivingRoom {
    pub(super) cell: Arc<TransferCell>,
    pub(super) senders: Vec<ReceivingSender>,
    epoch: Epoch,
    held: u32,
    /// The pages that no other room may receive into. Empty once they are released.
    pages: Vec<u32>,
    /// The first view of each sender.
    views: Vec<u32>,
    /// The slot of metadata. The first sender fills it.
    aux: Option<Region>,
    closed: Option<Arc<ClosedRoom>>,
}

/// The senders that a receiver needs. `addresses` names all prefill ranks: the ranks of the first stage, then
/// those of the next stage.
pub(super) fn senders_at(
    receiver: &RankDescription,
    addresses: &[String],
    (sources, stages): (u32, &Stages),
) -> Result<Vec<ReceivingSender>, PlanError> {
    // The check comes first: the caller chose the number of ranks, and each rank costs work.
    let ranks = u64::from(sources) * stages.counts().len() as u64;
    if ranks != addresses.len() as u64 {
        return Err(PlanError::NoSuchRank {
            rank: u32::try_from(addresses.len()).unwrap_or(u32::MAX),
            ranks: u32::try_from(ranks).unwrap_or(u32::MAX),
        });
    }
    let mut senders = Vec::new();
    for rank in senders_of(receiver, sources, stages)? {
        let index = rank.stage as usize * sources as usize + rank.rank as usize;
        let address = addresses.get(index).ok_or(PlanError::NoSuchRank {
            rank: rank.rank,
            ranks: sources,
        })?;
        let share = states_from(receiver, (rank.rank, sources), &rank.layers)?;
        // The sender has the same states as the receiver, for the sender's own layers.
        let of_sender = RankDescription {
            tensor: (rank.rank, sources),
            states: receiver
                .states
                .iter()
                .filter(|state| rank.layers.contains(&state.layer))
                .cloned()
                .collect(),
            ..receiver.clone()
        };
        let receivers = receivers_of(&of_sender, receiver.tensor.1)?;
        let own = receivers.iter().position(|each| *each == receiver.tensor.0);
        senders.push(ReceivingSender {
            address: address.clone(),
            receiver: own.and_then(|own| u32::try_from(own).ok()).unwrap_or(0),
            rank,
            share,
        });
    }
    Ok(senders)
}

impl Agent {
    pub(super) fn open_receiving(&mut self, call: ReceiveCall, cell: Arc<TransferCell>) {
        if let Err(code) = self.try_receiving(call, &cell) {
            cell.change(|state| {
                state.poll = PollState::Failed;
                state.failure = Some(code);
                state.is_released = true;
            });
        }
    }

    fn try_receiving(&mut self, call: ReceiveCall, cell: &Arc<TransferCell>) -> Result<(), Code> {
        let is_free = |page: &u32| !self.pages_in_use.contains(page);
        if !call.pages.iter().all(is_free) {
            return Err(Code::InProgress);
        }
        let now = self.now();
        let slot = Length(self.memory.aux_layout().slot_bytes());
        let aux = call.wants_aux.then(|| Region::allocate(slot));
        let mut views: Vec<RoomView> = Vec::new();
        let (mut first_views, mut shares) = (Vec::new(), Vec::new());
        let held = call.held;
        let count = u32::try_from(call.pages.len()).map_err(|_| Code::TooLarge)?;
        let end = held.checked_add(count).ok_or(Code::TooLarge)?;
        for (index, sender) in call.senders.iter().enumerate() {
            let view = u32::try_from(views.len()).map_err(|_| Code::TooLarge)?;
            let aux = aux.as_ref().filter(|_| index == 0);
            if let Some(aux) = aux {
                let slot = RoomView::new(vec![aux.whole().into()]);
                views.push(slot.map_err(|_| Code::Internal)?);
            }
            let of_states = self.memory.views(&sender.share, &call.pages);
            views.extend(of_states.map_err(|_| Code::OutOfRange)?);
            first_views.push(view);
            shares.push(SenderShare {
                session: self.peers.session(&sender.address),
                rectangle: PageRectangle {
                    pages: 0..end,
                    layers: sender.rank.layers.clone(),
                },
                receiver: sender.receiver,
                view,
                wants_aux: aux.is_some(),
            });
        }
        if views.is_empty() {
            // The receiver holds all pages of the request, so there is nothing to write.
            let nothing = Region::allocate(Length(1)).whole();
            views.push(RoomView::new(vec![nothing.into()]).map_err(|_| Code::Internal)?);
        }
        let pass = self.endpoint.open_room(views).map_err(|_| Code::Internal)?;
        let RequestTimes { deadline, patience } = call.times;
        let left = deadline.saturating_duration_since(Instant::now());
        let limits = self.limits.with_patience(patience);
        let plan = RoomReceiverPlan {
            tag: call.tag,
            epoch: pass.epoch.0,
            key: RoomKey(pass.key.0),
            held,
            pages: count,
            senders: shares,
            limits,
            deadline: now + left,
        };
        let room = ReceivingRoom {
            cell: Arc::clone(cell),
            senders: call.senders,
            epoch: pass.epoch,
            held,
            pages: call.pages,
            views: first_views,
            aux,
            closed: None,
        };
        self.pages_in_use.extend(&room.pages);
        self.receiving.insert(call.tag, room);
        let mut out = Vec::new();
        self.receivers.open(now, plan, &mut out)?;
        self.perform_receiver(call.tag, out);
        self.maybe_fails(Event::Call(super::agent::Call::EndReceiving(
            call.tag,
            Code::Internal,
        )));
        Ok(())
    }

    pub(super) fn receiver_event(&mut self, tag: RoomTag, event: ReceiverEvent) {
        let (now, mut out) = (self.now(), Vec::new());
        self.receivers.handle(now, tag, event, &mut out);
        self.perform_receiver(tag, out);
    }

    pub(super) fn perform_receiver(&mut self, tag: RoomTag, actions: Vec<ReceiverAction>) {
        for action in actions {
            match action {
                ReceiverAction::Send { to, message } => self.tell_sender(tag, to, message),
                ReceiverAction::CloseRoom => self.close_room(tag),
                ReceiverAction::Verify(chunks) => self.verify(tag, chunks),
                ReceiverAction::ReleasePages => {
                    self.release_receiving(tag, |state| state.is_released = true);
                }
            }
        }
        self.publish_receiver(tag);
    }

    fn tell_sender(&mut self, tag: RoomTag, to: usize, message: ToSender) {
        let room = self.receiving.get(&tag);
        if let Some(sender) = room.and_then(|room| room.senders.get(to)) {
            // The caller named the process by its address, so any incarnation may answer.
            let message = HandoffMessage::ToSender(message);
            self.peers.send(&sender.address, None, &message);
        }
    }

    /// Closes a room at the transport, on a thread that may block.
    fn close_room(&self, tag: RoomTag) {
        let Some(room) = self.receiving.get(&tag) else {
            return;
        };
        let (endpoint, events) = (Arc::clone(&self.endpoint), self.events.clone());
        let epoch = room.epoch;
        tokio::task::spawn_blocking(move || {
            let room = loop {
                match endpoint.close_room(epoch, PATIENCE) {
                    Ok(room) => break room,
                    Err(error) => {
                        tracing::error!(%error, %tag, "a write into a room does not end");
                        std::thread::sleep(CLOSE_AGAIN);
                    }
                }
            };
            // The agent may have ended.
            drop(events.send(Event::Fenced { tag, room }));
        });
    }

    pub(super) fn fenced(&mut self, tag: RoomTag, closed: Option<ClosedRoom>) {
        if let Some(room) = self.receiving.get_mut(&tag) {
            room.closed = closed.map(Arc::new);
        }
        self.receiver_event(tag, ReceiverEvent::Fenced);
    }

    /// Compares chunks with memory, on a thread that may block.
    fn verify(&self, tag: RoomTag, chunks: AnnouncedChunks) {
        let Some(room) = self.receiving.get(&tag) else {
            return;
        };
        let (closed, aux) = (room.closed.clone(), room.aux.clone());
        let (senders, views) = (room.senders.clone(), room.views.clone());
        let (memory, held) = (Arc::clone(&self.memory), room.held);
        let events = self.events.clone();
        tokio::task::spawn_blocking(move || {
            let layout = memory.aux_layout();
            let is_right = |(from, chunk): &(usize, crate::room::RoomChunk)| {
                let (closed, sender) = (closed.as_ref()?, senders.get(*from)?);
                let first = (*views.get(*from)?, *from == 0 && aux.is_some());
                let body = (&chunk.body, layout.slot_bytes());
                let ranges = chunk_ranges(memory.description(), &sender.share, first, held, body);
                Some(chunk_sum(closed, &ranges)? == chunk.checksum)
            };
            let is_equal = chunks.iter().all(|chunk| is_right(chunk) == Some(true));
            let is_own_room =
                aux.is_none_or(|aux| layout.room(&aux.whole().to_vec()) == Some(tag.room));
            drop(events.send(Event::Verified {
                tag,
                is_equal,
                is_own_room,
            }));
        });
    }

    fn publish_receiver(&mut self, tag: RoomTag) {
        let Some(room) = self.receiving.get(&tag) else {
            return;
        };
        if let Some(machine) = self.receivers.room(tag) {
            let (poll, failure) = (machine.poll(), machine.failure());
            room.cell.change(|state| {
                state.poll = poll;
                state.failure = failure;
            });
        }
        let Some(outcome) = self.receivers.outcome(tag) else {
            return;
        };
        let aux = room.aux.as_ref().map(|aux| aux.whole().to_vec());
        self.release_receiving(tag, |state| match outcome {
            RoomOutcome::Success => {
                state.poll = PollState::Success;
                state.is_released = true;
                state.aux = aux;
            }
            RoomOutcome::Failed(code) => {
                state.poll = PollState::Failed;
                state.failure = Some(code);
                state.is_released = true;
            }
        });
        if self.receivers.room(tag).is_none() {
            self.receiving.remove(&tag);
        }
    }

    /// Gives the pages back to the caller. A second call only changes the state.
    fn release_receiving(&mut self, tag: RoomTag, change: impl FnOnce(&mut TransferState)) {
        let Some(room) = self.receiving.get_mut(&tag) else {
            return;
        };
        for page in std::mem::take(&mut room.pages) {
            self.pages_in_use.remove(&page);
        }
        room.cell.change(change);
    }

    /// Fails a room with the session's failure probability (row S12).
    pub(super) fn maybe_fails(&self, end: Event) {
        if self.failure_probability <= 0.0 || rand::random::<f64>() >= self.failure_probability {
            return;
        }
        let events = self.events.clone();
        if rand::random() {
            // The send cannot fail: this agent is alive.
            drop(events.send(end));
            return;
        }
        let delay = Duration::from_micros(rand::random::<u64>() % MAX_FAILURE_MICROS);
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            drop(events.send(end));
        });
    }

    /// The moment of a deadline.
    pub(super) fn moment(&self, deadline: Instant) -> Moment {
        self.now() + deadline.saturating_duration_since(Instant::now())
    }
}
