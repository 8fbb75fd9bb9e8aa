//! Sends the request of an exchange.

use super::exchange::{Exchange, Work};
use super::lane::TcpConnection;
use crate::checksum::ChunkedSum;
use crate::frame::encode_request;
use crate::link::SumsOp;
use crate::memory::Slice;
use crate::socket::Gather;
use kvpool_types::wire::data::{Meta, ReadItem, ReadRequest, WriteRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Checksum, Grant, Incarnation, Length, Offset};
use parking_lot::Mutex;
use std::io;

/// The bytes that one call sends. They are summed before or after it, while they are in the cache. Enough that the
/// receiver stays busy while bytes are summed.
const PIECE: u64 = 512 << 10;

/// The memory to send by one call.
#[derive(Default)]
struct Outgoing {
    pieces: Vec<SendPiece>,
    bytes: u64,
}

enum SendPiece {
    Bytes(Vec<u8>),
    Memory(Slice),
}

/// Sends the request of `exchange` with the request id `request`.
pub(super) fn send_request(
    wire: &TcpConnection,
    incarnation: Incarnation,
    request: u64,
    exchange: &Exchange,
) -> io::Result<()> {
    let trace = wire.takes_traces().then_some(exchange.trace).flatten();
    let head = |op, payload, meta: &dyn Fn(&mut Vec<u8>)| {
        encode_request((op, request, exchange.epoch), payload, trace, meta)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    };
    match &exchange.work {
        Work::Read { items, .. } => {
            let meta = ReadRequest {
                incarnation,
                items: items.clone(),
            };
            Outgoing::of(head(Op::Read, 0, &|out| meta.encode(out))?).send(wire)
        }
        Work::Sums { ops, .. } => {
            let item = |op: &SumsOp| ReadItem {
                length: Length(0),
                ..ReadItem::whole(op.extent).with(op.right)
            };
            let meta = ReadRequest {
                incarnation,
                items: ops.iter().map(item).collect(),
            };
            Outgoing::of(head(Op::Sums, 0, &|out| meta.encode(out))?).send(wire)
        }
        Work::Write {
            grants, from, sent, ..
        } => {
            let meta = WriteRequest {
                incarnation,
                grants: grants.clone(),
            };
            let head = head(Op::Write, exchange.bytes(), &|out| meta.encode(out))?;
            send_blocks(wire, head, grants, from, sent)
        }
    }
}

/// Sends blocks, each followed by its chunk checksums. One call sends many small blocks or a piece
/// of a large block.
fn send_blocks(
    wire: &TcpConnection,
    head: Vec<u8>,
    grants: &[Grant],
    from: &[Vec<Slice>],
    sent: &Mutex<Vec<Checksum>>,
) -> io::Result<()> {
    let mut outgoing = Outgoing::of(head);
    for (grant, slices) in grants.iter().zip(from) {
        let mut sum = ChunkedSum::for_length(grant.extent.length);
        match grant.extent.length.0 > PIECE {
            true => outgoing.send_large(wire, slices, &mut sum)?,
            false => outgoing.send_small(wire, slices, &mut sum)?,
        }
        let sums = sum.finish();
        // Recorded before the block's last byte is sent, because the answer may arrive at once.
        sent.lock().push(sums.whole);
        let bytes: Vec<u8> = sums
            .chunks
            .iter()
            .flat_map(|sum| sum.0.to_le_bytes())
            .collect();
        let length = bytes.len() as u64;
        outgoing.push(SendPiece::Bytes(bytes), length);
        outgoing.send_if_full(wire)?;
    }
    outgoing.send(wire)
}

impl Outgoing {
    fn of(head: Vec<u8>) -> Self {
        Self {
            pieces: vec![SendPiece::Bytes(head)],
            bytes: 0,
        }
    }

    fn push(&mut self, piece: SendPiece, bytes: u64) {
        self.pieces.push(piece);
        self.bytes += bytes;
    }

    /// Adds a small block, summed before it is sent. The next block's bytes go with its checksums.
    fn send_small(
        &mut self,
        wire: &TcpConnection,
        slices: &[Slice],
        sum: &mut ChunkedSum,
    ) -> io::Result<()> {
        for slice in slices {
            let mut at = 0;
            while at < slice.length().0 {
                let length = (slice.length().0 - at).min(PIECE - self.bytes);
                let piece = part(slice, at, length);
                sum.update_private(&piece, Offset(0), Length(length));
                self.push(SendPiece::Memory(piece), length);
                at += length;
                self.send_if_full(wire)?;
            }
        }
        Ok(())
    }

    /// Sends a large block. Each piece is summed when it was sent: the kernel has read it, so it is in the cache.
    fn send_large(
        &mut self,
        wire: &TcpConnection,
        slices: &[Slice],
        sum: &mut ChunkedSum,
    ) -> io::Result<()> {
        // The memory before `first` is of small blocks, which are summed.
        let (mut first, mut bytes) = (self.pieces.len(), 0);
        for slice in slices {
            let mut at = 0;
            while at < slice.length().0 {
                let length = (slice.length().0 - at).min(PIECE - bytes);
                self.pieces.push(SendPiece::Memory(part(slice, at, length)));
                at += length;
                bytes += length;
                if bytes == PIECE {
                    self.send_and_sum(wire, first, sum)?;
                    (first, bytes) = (0, 0);
                }
            }
        }
        if bytes > 0 {
            self.send_and_sum(wire, first, sum)?;
        }
        Ok(())
    }

    /// Sends everything, and then sums the memory from the piece `first` on.
    fn send_and_sum(
        &mut self,
        wire: &TcpConnection,
        first: usize,
        sum: &mut ChunkedSum,
    ) -> io::Result<()> {
        let sent = std::mem::take(self);
        sent.send(wire)?;
        for piece in sent.pieces.iter().skip(first) {
            if let SendPiece::Memory(slice) = piece {
                sum.update_private(slice, Offset(0), slice.length());
            }
        }
        Ok(())
    }

    fn send_if_full(&mut self, wire: &TcpConnection) -> io::Result<()> {
        if self.bytes >= PIECE {
            std::mem::take(self).send(wire)?;
        }
        Ok(())
    }

    fn send(&self, wire: &TcpConnection) -> io::Result<()> {
        if wire.is_dead() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let mut gather = Gather::default();
        for piece in &self.pieces {
            match piece {
                SendPiece::Bytes(bytes) => gather.push_bytes(bytes),
                SendPiece::Memory(slice) => gather.push_slice(slice),
            }
        }
        gather.send_all(wire.socket())
    }
}

fn part(slice: &Slice, at: u64, length: u64) -> Slice {
    slice
        .slice(Offset(at), Length(length))
        .expect("invariant: the piece ends where the slice does at the latest")
}
