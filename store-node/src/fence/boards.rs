//! What clients have pinned on their boards: pins that nobody asked the node for.
//!
//! The memory-order argument is [`kvpool_transport::shm::board`]'s. This module keeps
//! the node's side of it. Before a pin of the old term may be ignored, its board is closed or opened
//! anew. Every decision on an extent reads all boards.

use super::admit::draining;
use super::{Aborts, Fence, PeerKey, Range, Span, refused};
use kvpool_transport::host::Refused;
use kvpool_transport::shm::board::Board;
use kvpool_types::{Code, Epoch, Extent, Incarnation, Length, Offset};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::time::Instant;

/// The most boards that are kept, so that looking at all of them stays cheap. Who is given none asks
/// for each pin.
const MOST_BOARDS: usize = 4096;

/// The board of one connection.
#[derive(Debug)]
struct Hung {
    peer: PeerKey,
    /// In which its pins were taken.
    incarnation: Incarnation,
    board: Arc<Board>,
    /// Its incarnation is over, or its connection, or the node drains: no pin is taken on it again.
    over: bool,
}

impl Hung {
    /// Whether its connection has ended: nobody else has the board any more.
    fn is_left(&self) -> bool {
        Arc::strong_count(&self.board) == 1
    }

    fn is_empty(&self) -> bool {
        let mut empty = true;
        self.board.look(|_| empty = false);
        empty
    }
}

/// All boards of a node.
#[derive(Debug, Default)]
pub(super) struct Boards(Vec<Hung>);

impl Boards {
    /// Pins count for locations of `epoch` from now on.
    pub(super) fn open(&self, epoch: Epoch) {
        for hung in self.0.iter().filter(|hung| !hung.over) {
            hung.board.open(epoch);
        }
    }

    /// No pin is taken on any of them again.
    pub(super) fn close(&mut self) {
        for hung in &mut self.0 {
            hung.board.close();
            hung.over = true;
        }
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    fn drop_peer(&mut self, peer: PeerKey) {
        self.0.retain(|hung| hung.peer != peer);
    }

    /// The processes that have a connection with a board, or have pinned something.
    fn peers(&mut self) -> HashSet<PeerKey> {
        self.sweep();
        self.0.iter().map(|hung| hung.peer).collect()
    }

    /// Closes the boards whose connections have ended, and then forgets boards without pins. The order matters:
    /// a closed board gets no further pin.
    fn sweep(&mut self) {
        self.0.retain_mut(|hung| {
            if !hung.is_left() {
                return true;
            }
            hung.board.close();
            hung.over = true;
            !hung.is_empty()
        });
    }
}

/// What was pinned on all boards, or being read, at the moment of one look.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    /// For each segment the pinned ranges, joined where they overlap, lowest first.
    joined: Vec<Vec<Range>>,
}

impl Pinned {
    fn new(mut spans: Vec<Span>, segments: usize) -> Self {
        let mut joined: Vec<Vec<Range>> = vec![Vec::new(); segments];
        spans.sort_unstable_by_key(|span| span.range.start);
        for span in spans {
            let Some(ranges) = joined.get_mut(span.segment.0) else {
                continue;
            };
            match ranges.last_mut() {
                Some(last) if span.range.start <= last.end => {
                    last.end = last.end.max(span.range.end);
                }
                _ => ranges.push(span.range),
            }
        }
        Self { joined }
    }

    /// Whether a byte of `span` is pinned.
    pub(super) fn touches(&self, span: Span) -> bool {
        let Some(ranges) = self.joined.get(span.segment.0) else {
            return false;
        };
        let at = ranges.partition_point(|range| range.end <= span.range.start);
        ranges
            .get(at)
            .is_some_and(|range| range.start < span.range.end)
    }
}

impl Fence {
    /// Hangs up the board of a new connection.
    pub(crate) fn hang(
        &mut self,
        peer: PeerKey,
        incarnation: Incarnation,
        board: Arc<Board>,
    ) -> Result<(), Refused> {
        self.check_incarnation(incarnation)?;
        if self.draining {
            return Err(draining());
        }
        self.boards.sweep();
        if self.boards.len() >= MOST_BOARDS {
            return Err(refused(
                Code::TooManyHeld,
                format!("this node has its maximum of {MOST_BOARDS} pin boards"),
            ));
        }
        // Before the first welcome the epoch is 0, in which a board is closed.
        board.open(self.epoch());
        self.boards.0.push(Hung {
            peer,
            incarnation,
            board,
            over: false,
        });
        Ok(())
    }

    /// Whether a ticket waits for a pin on a board. If so, call [`Fence::look_again`] from time to time:
    /// the node gets no message when such a pin ends.
    pub(crate) fn waits_for_boards(&self) -> bool {
        !self.on_boards.is_empty()
    }

    /// Settles the tickets that wait for pins on boards or for reads, and need wait no more. Returns the reads that
    /// a ticket has waited for long enough.
    pub(crate) fn look_again(&mut self) -> Aborts {
        self.boards.sweep();
        let mut aborts = Aborts::new();
        let waiting = std::mem::take(&mut self.on_boards);
        if waiting.is_empty() {
            return aborts;
        }
        let (pinned, now) = (self.look(), Instant::now());
        for ticket in waiting {
            // Those that are not there were settled when the master asked once more.
            if let Some(span) = self.waiting.remove(&ticket) {
                self.reading.late_in(span, now, &mut aborts);
                self.settle(ticket, span, &pinned);
            }
        }
        aborts
    }

    /// Says of each of these processes whether it holds or has pinned anything. None has a connection.
    /// Its boards are closed first, so it pins nothing after the answer.
    pub(crate) fn still_hold(&mut self, peers: &[PeerKey]) -> Vec<bool> {
        let with_boards = self.boards.peers();
        let holds = |peer: &PeerKey| self.peers.contains_key(peer) || with_boards.contains(peer);
        peers.iter().map(holds).collect()
    }

    /// Forgets the boards of a process that is gone, and its mappings with it.
    pub(super) fn drop_boards(&mut self, peer: PeerKey) {
        self.boards.drop_peer(peer);
        self.look_again();
    }

    /// Looks at all boards.
    pub(super) fn look(&self) -> Pinned {
        let mut spans = Vec::new();
        self.each_board_pin(|_, span| spans.push(span));
        self.reading.spans(&mut spans);
        Pinned::new(spans, self.spaces.len())
    }

    /// Every pin on a board that lies in the node's memory.
    pub(super) fn each_board_pin(&self, mut pin: impl FnMut(PeerKey, Span)) {
        for hung in &self.boards.0 {
            hung.board.look(|extent| {
                if let Some(span) = self.place(hung.incarnation, &extent) {
                    pin(hung.peer, span);
                }
            });
        }
    }

    /// Where an extent lies under the numbers of this incarnation: a pin may be older than the present
    /// numbers. `None` for what a client has made up.
    fn place(&self, incarnation: Incarnation, extent: &Extent) -> Option<Span> {
        let &segment = self.numbers.get(&(incarnation, extent.segment))?;
        let size = self.spaces.get(segment.0)?.size;
        let end = extent.end().filter(|end| *end <= Offset(size.0))?;
        let start = extent.offset;
        (start < end).then_some(Span {
            segment,
            range: Range { start, end },
        })
    }

    /// The bytes that a process has pinned on its boards, each pin counted.
    pub(super) fn pinned_bytes(&self, peer: PeerKey) -> Length {
        let mut bytes = 0u64;
        self.each_board_pin(|whose, span| {
            if whose == peer {
                bytes = bytes.saturating_add(span.range.length().0);
            }
        });
        Length(bytes)
    }

    /// Adds to a census what is on the boards.
    pub(super) fn count_boards(&self, census: &mut super::Census) {
        let mut by_peer: HashMap<PeerKey, u64> = HashMap::new();
        self.each_board_pin(|peer, span| {
            census.pins += 1;
            census.held.0 = census.held.0.saturating_add(span.range.length().0);
            let bytes = by_peer.entry(peer).or_default();
            *bytes = bytes.saturating_add(span.range.length().0);
        });
        census.boards = self.boards.len() as u64;
        let cap = self.limits.held_per_client.0;
        let over = by_peer.iter().filter(|(peer, pinned)| {
            let held = self.peers.get(peer).map_or(0, |held| held.bytes.0);
            held.saturating_add(**pinned) > cap
        });
        census.over_cap = over.count() as u64;
    }
}

#[cfg(test)]
mod tests;
