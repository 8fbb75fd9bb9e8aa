//! Ranks of prefill and one rank of decode, all in this process, and their hand-offs.

use anyhow::bail;
use kvpool_handoff::plan::{PageLayout, PlanError, Stages, StateShape};
use kvpool_handoff::registration::{RankDescription, StateRegion};
use kvpool_handoff::room::{PollState, RoomId};
use kvpool_handoff::session::{
    HandoffError, HandoffOptions, HandoffSession, RankMemory, Receiving, Sending, TransferState,
};
use kvpool_transport::Region;
use kvpool_types::{Length, Offset};
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

/// The layers of a request.
pub(super) const LAYERS: u32 = 16;
const TOKENS: u32 = 16;
const HEADS: u32 = 32;
const HEAD_BYTES: u32 = 128;
/// The bytes of one page in all layers.
pub(crate) const PAGE_BYTES: u64 = LAYERS as u64 * TOKENS as u64 * (HEADS * HEAD_BYTES) as u64;

/// The longest time of one hand-off.
const WAIT: Duration = Duration::from_secs(120);
/// How often decode's room is polled until prefill may send.
const POLL: Duration = Duration::from_micros(50);

/// One group of prefill and its decode rank.
pub(super) struct Group {
    prefill: Vec<HandoffSession>,
    decode: HandoffSession,
    pages: u32,
    next_room: u64,
}

impl Group {
    /// Starts `ranks` ranks of prefill and one of decode, with memory for one request.
    pub(super) fn start(ranks: u32, pages: u32) -> anyhow::Result<Self> {
        let prefill = (0..ranks).map(|rank| start_rank((rank, ranks), pages));
        Ok(Self {
            prefill: prefill.collect::<anyhow::Result<_>>()?,
            decode: start_rank((0, 1), pages)?,
            pages,
            next_room: 1,
        })
    }

    /// The time from the moment when all layers are computed to the end at decode.
    pub(super) fn push(&mut self) -> anyhow::Result<Duration> {
        let pages = 0..self.pages;
        self.send(|sending| {
            let mut ranks = sending.iter();
            ranks.try_for_each(|rank| rank.produced(pages.clone(), 0..LAYERS))
        })
    }

    /// The time from the first layer's computing to the end at decode. Each layer takes `compute`, in which this
    /// thread sleeps, and is sent when it is computed.
    pub(super) fn push_by_layer(&mut self, compute: Duration) -> anyhow::Result<Duration> {
        let pages = 0..self.pages;
        self.send(|sending| {
            for layer in 0..LAYERS {
                std::thread::sleep(compute);
                for rank in sending {
                    rank.produced(pages.clone(), layer..layer + 1)?;
                }
            }
            Ok(())
        })
    }

    /// The time from decode's request to its end, when prefill offers all pages.
    pub(super) fn pull(&mut self) -> anyhow::Result<Duration> {
        let (room, until) = self.new_room();
        let offered = self.open(|rank, pages| rank.offer(room, pages, 1, until))?;
        let begin = Instant::now();
        let receiving = self.receive(room, until)?;
        end(begin, &receiving, &offered, until)
    }

    /// The time from the beginning of `produce`, which names all pages as computed, to the end at decode.
    fn send(
        &mut self,
        produce: impl FnOnce(&[Sending]) -> Result<(), HandoffError>,
    ) -> anyhow::Result<Duration> {
        let (room, until) = self.new_room();
        let sending = self.open(|rank, pages| rank.send(room, pages, 1, until))?;
        let receiving = self.receive(room, until)?;
        wait_until_open(&receiving, until)?;
        let begin = Instant::now();
        produce(&sending)?;
        for rank in &sending {
            rank.finish(Vec::new())?;
        }
        end(begin, &receiving, &sending, until)
    }

    /// The room of a new request, and its deadline.
    fn new_room(&mut self) -> (RoomId, Instant) {
        let room = RoomId(self.next_room);
        self.next_room += 1;
        (room, Instant::now() + WAIT)
    }

    /// Opens the room on each rank of prefill.
    fn open(
        &self,
        open: impl Fn(&HandoffSession, Vec<u32>) -> Result<Sending, HandoffError>,
    ) -> Result<Vec<Sending>, HandoffError> {
        let ranks = self.prefill.iter();
        ranks.map(|rank| open(rank, self.all_pages())).collect()
    }

    fn receive(&self, room: RoomId, until: Instant) -> anyhow::Result<Receiving> {
        let ranks = self.prefill.iter();
        let addresses: Vec<_> = ranks.map(|rank| rank.address().to_owned()).collect();
        let stages = stages()?;
        let prefill = (u32::try_from(addresses.len())?, &stages);
        let pages = (0, self.all_pages());
        let receiving = self
            .decode
            .receive(room, pages, &addresses, prefill, false, until);
        Ok(receiving?)
    }

    fn all_pages(&self) -> Vec<u32> {
        (0..self.pages).collect()
    }
}

fn stages() -> Result<Stages, PlanError> {
    Stages::new(&[LAYERS])
}

fn start_rank((rank, ranks): (u32, u32), pages: u32) -> anyhow::Result<HandoffSession> {
    let shape = StateShape::of_heads(PageLayout::TokenMajor, TOKENS, HEADS, HEAD_BYTES)?;
    let bytes = Length(shape.page_bytes(ranks)? * u64::from(pages));
    let (mut states, mut memories) = (Vec::new(), Vec::new());
    for layer in 0..LAYERS {
        let memory = Region::allocate(bytes).whole();
        // The first use of memory costs a page fault: no round pays for it.
        memory.write_at(Offset(0), &vec![1; bytes.as_usize()]);
        states.push(StateRegion {
            name: "k".to_owned(),
            layer,
            shape,
            base: 0,
            pages,
        });
        memories.push(memory);
    }
    let description = RankDescription {
        address: String::new(),
        tensor: (rank, ranks),
        pipeline: (0, stages()?),
        page_tokens: TOKENS,
        hidden_bytes: 0,
        states,
    };
    let memory = RankMemory::new(description, memories)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let session = HandoffSession::start(listener, memory, HandoffOptions::default());
    Ok(session?)
}

/// Waits until prefill may send.
fn wait_until_open(receiving: &Receiving, until: Instant) -> anyhow::Result<()> {
    loop {
        let state = receiving.state();
        match state.poll {
            PollState::WaitingForInput => return Ok(()),
            PollState::Bootstrapping if Instant::now() < until => std::thread::sleep(POLL),
            _ => bail!("the room did not open: {}", told(&state)),
        }
    }
}

/// Waits for the success of both ends. Returns the time from `begin` to decode's.
fn end(
    begin: Instant,
    receiving: &Receiving,
    sending: &[Sending],
    until: Instant,
) -> anyhow::Result<Duration> {
    let state = receiving.wait(until);
    let took = begin.elapsed();
    must_succeed(&state)?;
    for rank in sending {
        must_succeed(&rank.wait(until))?;
    }
    Ok(took)
}

fn must_succeed(state: &TransferState) -> anyhow::Result<()> {
    match state.poll {
        PollState::Success => Ok(()),
        _ => bail!("the hand-off did not succeed: {}", told(state)),
    }
}

/// The state in words, with the reason of a failure.
fn told(state: &TransferState) -> String {
    match state.failure {
        Some(code) => format!("it failed with {}", code.label()),
        None => format!("its state after {} s is {:?}", WAIT.as_secs(), state.poll),
    }
}
