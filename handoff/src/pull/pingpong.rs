//! Two buffers in turn: a chunk is read into one while the other is scattered (row P4).

use std::ops::Range;

/// The state of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Buffer {
    Free,
    Reads(u32),
    Read(u32),
    Scatters(u32),
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Read { chunk: u32, buffer: u8 },
    Scatter { chunk: u32, buffer: u8 },
}

/// The order of reads and scatters over `chunks` chunks. At most one read and one scatter are under
/// way, and chunks are scattered in their order.
#[derive(Clone, Debug)]
pub(super) struct PingPong {
    chunks: u32,
    next_read: u32,
    next_scatter: u32,
    buffers: [Buffer; 2],
}

impl PingPong {
    pub(super) const fn new(chunks: u32) -> Self {
        Self {
            chunks,
            next_read: 0,
            next_scatter: 0,
            buffers: [Buffer::Free; 2],
        }
    }

    pub(super) const fn is_done(&self) -> bool {
        self.next_scatter == self.chunks
    }

    /// Whether a read or a scatter is under way.
    pub(super) fn is_busy(&self) -> bool {
        let busy = |buffer: &Buffer| matches!(buffer, Buffer::Reads(_) | Buffer::Scatters(_));
        self.buffers.iter().any(busy)
    }

    /// The turns that can start now.
    pub(super) fn turns(&mut self) -> Vec<Turn> {
        let mut turns = Vec::new();
        let scatters = |buffer: &Buffer| matches!(buffer, Buffer::Scatters(_));
        if !self.buffers.iter().any(scatters) {
            for (number, buffer) in (0..).zip(&mut self.buffers) {
                if *buffer == Buffer::Read(self.next_scatter) {
                    let chunk = self.next_scatter;
                    *buffer = Buffer::Scatters(chunk);
                    turns.push(Turn::Scatter {
                        chunk,
                        buffer: number,
                    });
                }
            }
        }
        let reads = |buffer: &Buffer| matches!(buffer, Buffer::Reads(_));
        if self.next_read < self.chunks && !self.buffers.iter().any(reads) {
            let free = (0..).zip(&mut self.buffers);
            let free = free
                .into_iter()
                .find(|(_, buffer)| **buffer == Buffer::Free);
            if let Some((number, buffer)) = free {
                let chunk = self.next_read;
                *buffer = Buffer::Reads(chunk);
                self.next_read += 1;
                turns.push(Turn::Read {
                    chunk,
                    buffer: number,
                });
            }
        }
        turns
    }

    /// Notes the end of a read. False when it was not under way.
    pub(super) fn read(&mut self, chunk: u32) -> bool {
        self.change(Buffer::Reads(chunk), Buffer::Read(chunk))
    }

    /// Notes the end of a scatter. False when it was not under way.
    pub(super) fn scattered(&mut self, chunk: u32) -> bool {
        let is = self.change(Buffer::Scatters(chunk), Buffer::Free);
        self.next_scatter += u32::from(is);
        is
    }

    /// Notes that a read or scatter ended without success.
    pub(super) fn ended(&mut self, chunk: u32) {
        let _ = self.change(Buffer::Reads(chunk), Buffer::Free)
            || self.change(Buffer::Scatters(chunk), Buffer::Free);
    }

    fn change(&mut self, from: Buffer, to: Buffer) -> bool {
        let found = self.buffers.iter_mut().find(|buffer| **buffer == from);
        found.is_some_and(|buffer| {
            *buffer = to;
            true
        })
    }
}

/// The pages of chunk `number` among `pages`, with `chunk_pages` pages each.
pub(super) fn chunk_of(number: u32, chunk_pages: u32, pages: usize) -> Range<usize> {
    let size = chunk_pages as usize;
    let begin = (number as usize * size).min(pages);
    begin..(begin + size).min(pages)
}
