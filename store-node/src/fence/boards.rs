//! The pin boards of clients: pins that the node sees without a message.
//!
//! [`kvpool_transport::shm::board`] has the argument about memory order. This module keeps the
//! node's part of it. Before pins of an old term are ignored, their boards are closed or opened
//! again. Every decision on an extent reads all boards.

use super::admit::draining;
use super::{Aborts, Fence, PeerKey, Range, Span, refused};
use kvpool_transport::host::Refused;
use kvpool_transport::shm::board::Board;
use kvpool_types::{Code, Epoch, Extent, Incarnation, Length, Offset};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::time::Instant;

/// The most boards that are kept, so that reading all of them stays cheap. A client without a board sends a
/// request for each pin.
const MOST_BOARDS: usize = 4096;

/// The board of one connection.
#[derive(Debug)]
struct Hung {
    peer: PeerKey,
    /// The incarnation in which its pins were taken.
    incarnation: Incarnation,
    board: Arc<Board>,
    /// Whether no new pin can be taken on the board: its incarnation or connection has ended, or the node
    /// drains.
    over: bool,
}

impl Hung {
    /// Whether the connection has ended, so that only this entry holds the board.
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
    /// Makes new pins count for locations of `epoch` only.
    pub(super) fn open(&self, epoch: Epoch) {
        for hung in self.0.iter().filter(|hung| !hung.over) {
            hung.board.open(epoch);
        }
    }

    /// Closes all boards, so that no new pin can be taken.
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

    /// The processes with a board that is connected or has pins.
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

/// The ranges that were pinned on boards, or being read, at the moment of one call of [`Fence::look`].
#[derive(Debug, Default)]
pub(super) struct Pinned {
    /// For each segment the pinned ranges, lowest first. Overlapping ranges are joined.
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

    /// Whether any byte of `span` is pinned or being read.
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
    /// Adds the board of a new connection.
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
        // Before the first welcome the epoch is 0, and the board is closed.
        board.open(self.epoch());
        self.boards.0.push(Hung {
            peer,
            incarnation,
            board,
            over: false,
        });
        Ok(())
    }

    /// Whether a ticket waits for a pin on a board or for a read. If so, call [`Fence::look_again`] at
    /// intervals, since no message tells of the end of a pin.
    pub(crate) fn waits_for_boards(&self) -> bool {
        !self.on_boards.is_empty()
    }

    /// Settles the tickets that no longer have to wait for pins on boards or for reads. Returns the reads to
    /// abort, for which a ticket has waited too long.
    pub(crate) fn look_again(&mut self) -> Aborts {
        self.boards.sweep();
        let mut aborts = Aborts::new();
        let waiting = std::mem::take(&mut self.on_boards);
        if waiting.is_empty() {
            return aborts;
        }
        let (pinned, now) = (self.look(), Instant::now());
        for ticket in waiting {
            // A ticket that is missing was settled when the master repeated it.
            if let Some(span) = self.waiting.remove(&ticket) {
                self.reading.late_in(span, now, &mut aborts);
                self.settle(ticket, span, &pinned);
            }
        }
        aborts
    }

    /// Returns for each of these processes whether it holds or has pinned anything. The processes have no
    /// connection. Their boards are closed first, so they cannot pin anything after the answer.
    pub(crate) fn still_hold(&mut self, peers: &[PeerKey]) -> Vec<bool> {
        let with_boards = self.boards.peers();
        let holds = |peer: &PeerKey| self.peers.contains_key(peer) || with_boards.contains(peer);
        peers.iter().map(holds).collect()
    }

    /// Forgets the boards of a process that has ended.
    pub(super) fn drop_boards(&mut self, peer: PeerKey) {
        self.boards.drop_peer(peer);
        self.look_again();
    }

    /// Reads all boards, and the table of reads in progress.
    pub(super) fn look(&self) -> Pinned {
        let mut spans = Vec::new();
        self.each_board_pin(|_, span| spans.push(span));
        self.reading.spans(&mut spans);
        Pinned::new(spans, self.spaces.len())
    }

    /// Calls `pin` for every pin on a board that lies in the node's memory.
    pub(super) fn each_board_pin(&self, mut pin: impl FnMut(PeerKey, Span)) {
        for hung in &self.boards.0 {
            hung.board.look(|extent| {
                if let Some(span) = self.place(hung.incarnation, &extent) {
                    pin(hung.peer, span);
                }
            });
        }
    }

    /// The span of a pinned extent, under the segment numbers of the pin's incarnation. `None` for an extent
    /// that does not exist.
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

    /// The bytes that a process has pinned on its boards, with every pin counted.
    pub(super) fn pinned_bytes(&self, peer: PeerKey) -> Length {
        let mut bytes = 0u64;
        self.each_board_pin(|whose, span| {
            if whose == peer {
                bytes = bytes.saturating_add(span.range.length().0);
            }
        });
        Length(bytes)
    }

    /// Adds the pins and boards to a census.
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
