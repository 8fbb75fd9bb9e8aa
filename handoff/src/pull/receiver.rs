//! Decode's end of one pull.

use super::pingpong::{PingPong, Turn, chunk_of};
use super::{PullMode, PullReady, ToPullSender};
use crate::Moment;
use crate::pins::PullId;
use crate::room::PollState;
use kvpool_types::Code;
use std::time::Duration;

/// An event of a pull at decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullEvent {
    /// The answer to [`PullStep::Allocate`]: all pages, or none (P10).
    Allocated(bool),
    /// A read has ended. `Ok` means that every page matches its checksum in the ready notice.
    Read(u32, Result<(), Code>),
    /// A scatter has ended.
    Scattered(u32),
    /// The engine uses the pages of a delayed pull.
    Use,
    /// The engine drops the pull, or the sender aborted it.
    Abort(Code),
    /// Time has passed.
    Tick,
}

/// What decode is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullStep {
    /// Send a message to the sender.
    Send(ToPullSender),
    /// Reserve this many pages, all or none, and report [`PullEvent::Allocated`].
    Allocate(u32),
    /// Read pages, given as indices into the ready notice, compare them with its checksums and
    /// report [`PullEvent::Read`]. With a buffer they go there, otherwise to their own pages.
    Read {
        /// The number of the read.
        chunk: u32,
        /// The indices of the pages.
        pages: Vec<u32>,
        /// The buffer of a delayed pull: 0 or 1.
        buffer: Option<u8>,
    },
    /// Scatter a buffer to where the engine wants its pages, and report [`PullEvent::Scattered`].
    Scatter {
        /// The number of the read.
        chunk: u32,
        /// The buffer.
        buffer: u8,
    },
    /// End the reads that are under way. Each still reports its end.
    CancelReads,
    /// The allocated pages are free. Comes after the last read and scatter: for an eager pull only
    /// after a failure, for a delayed one always.
    ReleasePages,
}

/// How a receiver pulls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullOptions {
    /// The number of pages of one read.
    pub chunk_pages: u32,
    /// The time before the sender's TTL at which a pull ends, so that clocks may differ.
    pub margin: Duration,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            chunk_pages: 16,
            margin: Duration::from_secs(5),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A delayed pull that nobody uses yet: it holds no memory.
    Proxy,
    Allocating,
    Moving,
    /// Reads and scatters end, after a failure.
    Ending(Code),
    Success,
    Failed(Code),
}

/// Decode's end of one pull.
#[derive(Clone, Debug)]
pub struct PullReceiver {
    pull: PullId,
    mode: PullMode,
    /// The pages to read: indices into the ready notice.
    wanted: Vec<u32>,
    chunk_pages: u32,
    order: PingPong,
    phase: Phase,
    /// The pages that are allocated.
    allocated: u32,
    deadline: Moment,
}

impl PullReceiver {
    /// Takes a ready notice. `held` names the pages that decode has already, in rising order.
    ///
    /// # Errors
    ///
    /// [`Code::Malformed`] for a notice without pages, or with a wrong number of checksums.
    pub fn begin(
        now: Moment,
        ready: &PullReady,
        held: &[u32],
        options: PullOptions,
        out: &mut Vec<PullStep>,
    ) -> Result<Self, Code> {
        let count = u32::try_from(ready.pages.len()).map_err(|_| Code::Malformed)?;
        if count == 0 || ready.sums.len() != ready.pages.len() || options.chunk_pages == 0 {
            return Err(Code::Malformed);
        }
        let wanted: Vec<u32> = (0..count)
            .filter(|page| held.binary_search(page).is_err())
            .collect();
        let chunks = wanted.len().div_ceil(options.chunk_pages as usize);
        let chunks = u32::try_from(chunks).map_err(|_| Code::Malformed)?;
        let mut pull = Self {
            pull: ready.pull,
            mode: ready.mode,
            wanted,
            chunk_pages: options.chunk_pages,
            order: PingPong::new(chunks),
            phase: Phase::Proxy,
            allocated: 0,
            deadline: now + ready.ttl.saturating_sub(options.margin),
        };
        let held = held.iter().copied().filter(|page| *page < count).collect();
        match pull.mode {
            PullMode::Delayed => out.push(PullStep::Send(ToPullSender::Ack {
                pull: pull.pull,
                held,
            })),
            PullMode::Eager if pull.wanted.is_empty() => {
                pull.phase = Phase::Success;
                pull.say_done(out);
            }
            PullMode::Eager => {
                out.push(PullStep::Send(ToPullSender::Ack {
                    pull: pull.pull,
                    held,
                }));
                pull.allocate(out);
            }
        }
        Ok(pull)
    }

    /// The pull.
    pub const fn pull(&self) -> PullId {
        self.pull
    }

    /// The poll state, in the words of a room.
    pub const fn poll(&self) -> PollState {
        match self.phase {
            Phase::Proxy | Phase::Allocating => PollState::WaitingForInput,
            Phase::Moving => PollState::Transferring,
            Phase::Ending(_) | Phase::Failed(_) => PollState::Failed,
            Phase::Success => PollState::Success,
        }
    }

    /// Why the pull failed.
    pub const fn failure(&self) -> Option<Code> {
        match self.phase {
            Phase::Ending(code) | Phase::Failed(code) => Some(code),
            _ => None,
        }
    }

    /// Whether nothing of the pull is left to do.
    pub const fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Success | Phase::Failed(_))
    }

    /// The number of pages that the pull has allocated: 0 for a proxy.
    pub const fn allocated(&self) -> u32 {
        self.allocated
    }

    /// When [`PullEvent::Tick`] has work.
    pub const fn next_wake(&self) -> Option<Moment> {
        match self.phase {
            Phase::Proxy | Phase::Allocating | Phase::Moving => Some(self.deadline),
            Phase::Ending(_) | Phase::Success | Phase::Failed(_) => None,
        }
    }

    /// Takes an event. Steps are added to `out`, in order.
    pub fn handle(&mut self, now: Moment, event: PullEvent, out: &mut Vec<PullStep>) {
        match (event, self.phase) {
            (PullEvent::Use, Phase::Proxy) if self.wanted.is_empty() => {
                self.phase = Phase::Success;
                self.say_done(out);
            }
            (PullEvent::Use, Phase::Proxy) => self.allocate(out),
            (PullEvent::Allocated(true), Phase::Allocating) => {
                self.allocated = self.needed();
                self.phase = Phase::Moving;
                self.go_on(out);
            }
            // The pages came after the pull had failed.
            (PullEvent::Allocated(true), Phase::Failed(_)) => out.push(PullStep::ReleasePages),
            (PullEvent::Allocated(false), Phase::Allocating) => {
                self.phase = Phase::Failed(Code::Full);
                let pull = self.pull;
                out.push(PullStep::Send(ToPullSender::Busy { pull }));
            }
            (PullEvent::Read(chunk, Ok(())), Phase::Moving) if self.order.read(chunk) => {
                self.go_on(out);
            }
            (PullEvent::Read(chunk, Err(code)), Phase::Moving) => {
                self.order.ended(chunk);
                self.fail(code, out);
            }
            (PullEvent::Scattered(chunk), Phase::Moving) if self.order.scattered(chunk) => {
                self.go_on(out);
            }
            (PullEvent::Read(chunk, _) | PullEvent::Scattered(chunk), Phase::Ending(code)) => {
                self.order.ended(chunk);
                self.end(code, out);
            }
            (PullEvent::Abort(code), _) => self.fail(code, out),
            (PullEvent::Tick, _) if now >= self.deadline => self.fail(Code::DeadlineExceeded, out),
            _ => {}
        }
    }

    /// An eager pull needs a page for each page, a delayed one two buffers.
    fn needed(&self) -> u32 {
        let wanted = u32::try_from(self.wanted.len()).unwrap_or(u32::MAX);
        match self.mode {
            PullMode::Eager => wanted,
            PullMode::Delayed => wanted.min(self.chunk_pages.saturating_mul(2)),
        }
    }

    fn allocate(&mut self, out: &mut Vec<PullStep>) {
        self.phase = Phase::Allocating;
        out.push(PullStep::Allocate(self.needed()));
    }

    fn go_on(&mut self, out: &mut Vec<PullStep>) {
        loop {
            let turns = self.order.turns();
            if turns.is_empty() {
                break;
            }
            for turn in turns {
                self.turn(turn, out);
            }
        }
        if self.order.is_done() {
            self.phase = Phase::Success;
            if self.mode == PullMode::Delayed {
                self.release(out);
            }
            self.allocated = 0;
            self.say_done(out);
        }
    }

    fn turn(&mut self, turn: Turn, out: &mut Vec<PullStep>) {
        match (turn, self.mode) {
            (Turn::Read { chunk, buffer }, mode) => {
                let pages = chunk_of(chunk, self.chunk_pages, self.wanted.len());
                let pages = self.wanted.get(pages).unwrap_or_default().to_vec();
                let buffer = (mode == PullMode::Delayed).then_some(buffer);
                out.push(PullStep::Read {
                    chunk,
                    pages,
                    buffer,
                });
            }
            (Turn::Scatter { chunk, buffer }, PullMode::Delayed) => {
                out.push(PullStep::Scatter { chunk, buffer });
            }
            // An eager read lands where its pages belong.
            (Turn::Scatter { chunk, .. }, PullMode::Eager) => {
                self.order.scattered(chunk);
            }
        }
    }

    fn fail(&mut self, code: Code, out: &mut Vec<PullStep>) {
        match self.phase {
            Phase::Proxy | Phase::Allocating => {
                self.phase = Phase::Failed(code);
                self.say_done(out);
            }
            Phase::Moving => {
                self.phase = Phase::Ending(code);
                if self.order.is_busy() {
                    out.push(PullStep::CancelReads);
                }
                self.end(code, out);
            }
            Phase::Ending(_) | Phase::Success | Phase::Failed(_) => {}
        }
    }

    /// Gives the pages back once nothing touches them.
    fn end(&mut self, code: Code, out: &mut Vec<PullStep>) {
        if self.order.is_busy() {
            return;
        }
        self.phase = Phase::Failed(code);
        self.release(out);
        self.say_done(out);
    }

    fn release(&mut self, out: &mut Vec<PullStep>) {
        self.allocated = 0;
        out.push(PullStep::ReleasePages);
    }

    fn say_done(&self, out: &mut Vec<PullStep>) {
        let pull = self.pull;
        out.push(PullStep::Send(ToPullSender::PullDone { pull }));
    }
}
