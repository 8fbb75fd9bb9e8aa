//! Serves one connection: requests in order, each answered before the next is read.

use super::server::ServerOptions;
use crate::frame::{
    decode_header, encode_head, receive_exact, receive_meta, rest, send, serve_span, skip,
    unimplemented,
};
use crate::handshake::{Admitted, End, answer_sums};
use crate::host::{Abort, Admission, RdmaHost, Refused, WriteGuard};
use crate::inline::WHOLE_BYTES;
use crate::memory::total_length;
use crate::rdma;
use crate::service::Connection;
use crate::socket::{Gather, LargePayload, Scatter, set_timeouts};
use crate::wire::WireRef;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::data::{Failure, Meta, ReadRequest, Statuses, WriteEnd, WriteRequest};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op};
use kvpool_types::wire::rdma::RdmaOpen;
use kvpool_types::{Checksum, Code, Grant, Length, Offset};
use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// The most extents that one call receives into.
const MAX_RUN: usize = 64;
/// The bytes that one call receives for hosts that take them. The host reads them while they are in the cache.
const PIECE: usize = 256 << 10;

/// The state of one connection.
pub(super) struct TcpSession<'a> {
    connection: &'a Arc<Connection>,
    host: &'a dyn RdmaHost,
    options: &'a ServerOptions,
    admitted: &'a Admitted,
    /// The queue pairs and announced writes of an RDMA link, if the connection opened one.
    rdma: RefCell<Option<rdma::RdmaSession>>,
    /// Memory for [`PIECE`] bytes; empty before its first use.
    piece: RefCell<Vec<u8>>,
}

/// An admitted write whose bytes have not arrived.
struct Receive {
    /// The index of its grant in the request.
    item: usize,
    guard: Box<dyn WriteGuard>,
    /// The bytes of the block. A guard may have many thousand parts, so they are not added up for each piece.
    block: usize,
    /// The chunk checksums that follow the bytes, 8 bytes each.
    sums: Vec<u8>,
}

/// Whether the guards take the bytes of a run. A run without writes has no bytes, and needs no memory for a piece.
fn is_taken(run: &[Receive]) -> bool {
    !run.is_empty() && run.iter().all(|receive| receive.guard.takes_bytes())
}

/// The next byte of a run of writes: that of a block, or of the checksums behind it.
#[derive(Default)]
struct RunCursor {
    receive: usize,
    at: usize,
}

impl RunCursor {
    /// Gives the next bytes to the guards, and the checksums among them to the receives.
    fn give(&mut self, run: &mut [Receive], mut bytes: &[u8]) {
        while let Some(receive) = run.get_mut(self.receive)
            && !bytes.is_empty()
        {
            let block = receive.block;
            let (now, rest) = bytes.split_at(block.saturating_sub(self.at).min(bytes.len()));
            if !now.is_empty() {
                receive.guard.take(now);
                self.at += now.len();
            }
            let from = self.at - block.min(self.at);
            let left = receive.sums.get_mut(from..).filter(|_| self.at >= block);
            let left = left.unwrap_or_default();
            let (sums, rest) = rest.split_at(left.len().min(rest.len()));
            for (place, byte) in left.iter_mut().zip(sums) {
                *place = *byte;
            }
            self.at += sums.len();
            if self.at == block + receive.sums.len() {
                (self.receive, self.at) = (self.receive + 1, 0);
            }
            bytes = rest;
        }
    }
}

impl<'a> TcpSession<'a> {
    pub(super) fn new(
        connection: &'a Arc<Connection>,
        host: &'a dyn RdmaHost,
        options: &'a ServerOptions,
        admitted: &'a Admitted,
    ) -> Self {
        Self {
            connection,
            host,
            options,
            admitted,
            rdma: RefCell::default(),
            piece: RefCell::default(),
        }
    }

    /// Serves until the connection ends.
    pub(super) fn run(&self) {
        let Err(end) = self.serve();
        end.carry_out(self.socket(), self.host.epoch());
    }

    fn serve(&self) -> Result<std::convert::Infallible, End> {
        set_timeouts(self.connection.socket(), Some(self.options.stall))?;
        self.admitted.answer(self.socket(), self.host.epoch())?;
        let mut meta = Vec::new();
        loop {
            let mut head = [0; HEADER_BYTES];
            // A connection may be idle between frames as long as its peer exists, but not inside a
            // frame.
            receive_exact(self.socket(), &mut head, |received| {
                received == 0 && !self.connection.is_aborted()
            })?;
            if !self.connection.begin() {
                return Err(End::Over);
            }
            let header = decode_header(&head)?;
            receive_meta(self.socket(), &header, &mut meta)?;
            let begun = Instant::now();
            let span = serve_span(&head, &header, &mut meta, "tcp");
            span.in_scope(|| self.answer(&header, &meta))?;
            self.host.served(header.op, begun.elapsed());
            rest(&mut meta);
            if !self.connection.finish() {
                return Err(End::Over);
            }
        }
    }

    fn answer(&self, header: &Header, meta: &[u8]) -> Result<(), End> {
        let malformed = |error: DecodeError| End::malformed(header.request, &error);
        if header.op == Op::Write {
            let request = WriteRequest::decode(meta).map_err(malformed)?;
            if request.payload_bytes() != Some(header.payload) {
                return Err(malformed(DecodeError::BadValue {
                    what: "payload of a write",
                    value: header.payload,
                }));
            }
            if header.payload <= WHOLE_BYTES {
                return self.write_now(header, &request);
            }
            return self.write(header, &request);
        }
        if header.op == Op::Unknown {
            skip(self.socket(), header.payload)?;
            return self.reply(header, Op::Failure, &unimplemented());
        }
        if header.payload > 0 {
            return Err(malformed(DecodeError::BadValue {
                what: "payload of a request that has none",
                value: header.payload,
            }));
        }
        match header.op {
            Op::Read => {
                let request = ReadRequest::decode(meta).map_err(malformed)?;
                self.read(header, &request)
            }
            Op::Sums => {
                let request = ReadRequest::decode(meta).map_err(malformed)?;
                match answer_sums(self.host, header.epoch, &request) {
                    Ok(reply) => self.reply(header, Op::SumsReply, &reply),
                    Err(failure) => self.reply(header, Op::Failure, &failure),
                }
            }
            Op::RdmaOpen => {
                let request = RdmaOpen::decode(meta).map_err(malformed)?;
                self.open_rdma(header, &request)
            }
            Op::RdmaLocate if self.rdma.borrow().is_some() => {
                let request = ReadRequest::decode(meta).map_err(malformed)?;
                self.reply(header, Op::RdmaLocated, &rdma::located(self.host, &request))
            }
            Op::WriteBegin if self.rdma.borrow().is_some() => {
                let request = WriteRequest::decode(meta).map_err(malformed)?;
                let codes = self
                    .rdma
                    .borrow_mut()
                    .as_mut()
                    .map(|session| session.begin(self.host, self.connection, &request));
                self.reply(header, Op::Statuses, &Statuses(codes.unwrap_or_default()))
            }
            Op::WriteEnd if self.rdma.borrow().is_some() => {
                let request = WriteEnd::decode(meta).map_err(malformed)?;
                let mut session = self.rdma.borrow_mut();
                let codes = session
                    .as_mut()
                    .map(|session| session.end(self.host, request));
                self.reply(header, Op::Statuses, &Statuses(codes.unwrap_or_default()))
            }
            Op::Ping => Ok(self.send_head(header, Op::Pong, |_| {})?),
            other => self.reply(
                header,
                Op::Failure,
                &Failure {
                    code: Code::InvalidArgument,
                    message: format!("{other:?} is not served over TCP"),
                },
            ),
        }
    }

    /// Opens an RDMA link beside this connection. Its queue pairs end with the connection.
    fn open_rdma(&self, header: &Header, request: &RdmaOpen) -> Result<(), End> {
        let opened = match (&self.options.rdma, &self.admitted.memory) {
            (_, Err(refused)) => Err(refused.clone()),
            (Some(_), Ok(())) if self.rdma.borrow().is_some() => Err(Refused {
                code: Code::InvalidArgument,
                message: "the connection has queue pairs already".to_owned(),
            }),
            (Some(serving), Ok(())) => {
                let abort: Arc<dyn Abort> = self.connection.clone();
                rdma::RdmaSession::open(serving, self.host, Arc::downgrade(&abort), request)
            }
            (None, Ok(())) => Err(Refused {
                code: Code::InvalidArgument,
                message: "this node has no RDMA".to_owned(),
            }),
        };
        match opened {
            Ok((session, opened)) => {
                *self.rdma.borrow_mut() = Some(session);
                self.reply(header, Op::RdmaOpened, &opened)
            }
            Err(Refused { code, message }) => {
                self.reply(header, Op::Failure, &Failure { code, message })
            }
        }
    }

    fn read(&self, header: &Header, request: &ReadRequest) -> Result<(), End> {
        let mut codes = Vec::with_capacity(request.items.len());
        let mut slices = Vec::with_capacity(request.items.len());
        let mut payload = 0;
        let abort: Arc<dyn Abort> = self.connection.clone();
        for item in &request.items {
            let admitted = self
                .host
                .admit_read(header.epoch, request.incarnation, item, &abort);
            codes.push(match admitted {
                Ok(slice) if slice.length() == item.length => {
                    payload += item.length.0;
                    slices.push(slice);
                    Code::Ok
                }
                Ok(_) => Code::Internal,
                Err(refused) => {
                    tracing::debug!(%refused, extent = %item.extent, "read refused");
                    refused.code
                }
            });
        }
        let statuses = Statuses(codes);
        let head = match encode_head(
            Op::Statuses,
            header.request,
            self.host.epoch(),
            payload,
            |out| statuses.encode(out),
        ) {
            Ok(head) => head,
            Err(error) => {
                let failure = Failure {
                    code: error.code(),
                    message: error.to_string(),
                };
                return self.reply(header, Op::Failure, &failure);
            }
        };
        let mut gather = Gather::default();
        gather.push_bytes(&head);
        for slice in &slices {
            gather.push_slice(slice);
        }
        gather.send_all(self.socket())?;
        self.host.count(Length(payload), Length(0));
        Ok(())
    }

    /// Receives a whole small write and performs it.
    fn write_now(&self, header: &Header, request: &WriteRequest) -> Result<(), End> {
        let mut payload = vec![0; Length(header.payload).as_usize()];
        let mut scatter = Scatter::default();
        scatter.push_bytes(&mut payload);
        self.fill(scatter)?;
        let codes = self.host.write_now(request, &payload);
        self.host.count(Length(0), Length(header.payload));
        self.reply(header, Op::Statuses, &Statuses(codes))
    }

    fn write(&self, header: &Header, request: &WriteRequest) -> Result<(), End> {
        let mut codes = vec![Code::Internal; request.grants.len()];
        let mut run = Vec::with_capacity(request.grants.len().min(MAX_RUN));
        for (item, grant) in request.grants.iter().enumerate() {
            let abort: Arc<dyn Abort> = self.connection.clone();
            match self.host.admit_write(request.incarnation, grant, abort) {
                Admission::Write(guard) if total_length(guard.parts()) == grant.extent.length => {
                    run.push(Receive {
                        item,
                        guard,
                        block: grant.extent.length.as_usize(),
                        sums: vec![0; sums_bytes(grant)],
                    });
                    if run.len() == MAX_RUN {
                        self.receive(&mut run, &mut codes)?;
                    }
                }
                Admission::Write(_) => self.skip(&mut run, &mut codes, grant)?,
                Admission::Refuse(refused) => {
                    tracing::debug!(%refused, extent = %grant.extent, "write refused");
                    if let Some(code) = codes.get_mut(item) {
                        *code = refused.code;
                    }
                    self.skip(&mut run, &mut codes, grant)?;
                }
            }
        }
        self.receive(&mut run, &mut codes)?;
        self.reply(header, Op::Statuses, &Statuses(codes))
    }

    /// Receives the bytes of several admitted writes: for guards that take them, or directly into the extents.
    fn receive(&self, run: &mut Vec<Receive>, codes: &mut [Code]) -> Result<(), End> {
        let mut run = std::mem::take(run);
        let written: usize = run.iter().map(|receive| receive.block).sum();
        if is_taken(&run) {
            self.give(&mut run)?;
        } else {
            let mut scatter = Scatter::default();
            for receive in &mut run {
                for part in receive.guard.parts() {
                    scatter.push_part(part, Offset(0), part.length());
                }
                scatter.push_bytes(&mut receive.sums);
            }
            self.fill(scatter)?;
        }
        for receive in run {
            let sums = receive
                .sums
                .as_chunks()
                .0
                .iter()
                .map(|sum| Checksum(u64::from_le_bytes(*sum)))
                .collect();
            if let Some(code) = codes.get_mut(receive.item) {
                *code = receive.guard.finish(sums);
            }
        }
        self.host.count(Length(0), Length(written as u64));
        Ok(())
    }

    /// Receives the bytes of admitted writes piece by piece, and gives them to the guards.
    fn give(&self, run: &mut [Receive]) -> Result<(), End> {
        let sizes = run.iter().map(|receive| receive.block + receive.sums.len());
        let mut left: usize = sizes.sum();
        let mut payload = LargePayload::new(self.connection.socket(), left as u64);
        let mut cursor = RunCursor::default();
        let mut piece = self.piece.borrow_mut();
        piece.resize(PIECE, 0);
        while left > 0 {
            if self.connection.is_aborted() {
                return Err(End::Over);
            }
            let mut scatter = Scatter::default();
            let (room, _) = piece.split_at_mut(left.min(PIECE));
            scatter.push_bytes(room);
            let received = scatter.receive(self.socket())?;
            if received == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            payload.received(received as u64);
            left -= received;
            cursor.give(run, piece.split_at(received).0);
        }
        Ok(())
    }

    /// Receives the admitted writes so far, then discards the bytes of a refused write.
    fn skip(&self, run: &mut Vec<Receive>, codes: &mut [Code], grant: &Grant) -> Result<(), End> {
        self.receive(run, codes)?;
        let mut scratch = [0; 64 << 10];
        let mut left = grant.extent.length.as_usize() + sums_bytes(grant);
        while left > 0 {
            let piece = left.min(scratch.len());
            let (room, _) = scratch.split_at_mut(piece);
            let mut scatter = Scatter::default();
            scatter.push_bytes(room);
            self.fill(scatter)?;
            left -= piece;
        }
        Ok(())
    }

    fn fill(&self, mut scatter: Scatter<'_>) -> Result<(), End> {
        let mut payload = LargePayload::new(self.connection.socket(), scatter.left());
        while !scatter.is_full() {
            if self.connection.is_aborted() {
                return Err(End::Over);
            }
            let received = scatter.receive(self.socket())?;
            if received == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            payload.received(received as u64);
        }
        Ok(())
    }

    fn reply(&self, header: &Header, op: Op, meta: &impl Meta) -> Result<(), End> {
        match self.send_head(header, op, |out| meta.encode(out)) {
            // The answer exceeds one frame, which the client must be told.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let failure = Failure {
                    code: Code::Oversized,
                    message: error.to_string(),
                };
                send(
                    self.socket(),
                    Op::Failure,
                    header.request,
                    self.host.epoch(),
                    &failure,
                )?;
                Ok(())
            }
            other => Ok(other?),
        }
    }

    fn send_head(
        &self,
        header: &Header,
        op: Op,
        encode_meta: impl FnOnce(&mut Vec<u8>),
    ) -> io::Result<()> {
        let head = encode_head(op, header.request, self.host.epoch(), 0, encode_meta)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let mut gather = Gather::default();
        gather.push_bytes(&head);
        gather.send_all(self.socket())
    }

    fn socket(&self) -> WireRef<'_> {
        self.connection.wire()
    }
}

fn sums_bytes(grant: &Grant) -> usize {
    Length(grant.extent.length.chunks() * 8).as_usize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Slice;
    use std::sync::mpsc;

    /// Sends each byte on, if it takes bytes.
    struct Taker {
        takes: bool,
        bytes: mpsc::Sender<u8>,
    }

    impl WriteGuard for Taker {
        fn parts(&self) -> &[Slice] {
            unreachable!("a piece reads no list of parts, which may be long")
        }

        fn takes_bytes(&self) -> bool {
            self.takes
        }

        fn take(&mut self, bytes: &[u8]) {
            bytes
                .iter()
                .for_each(|byte| self.bytes.send(*byte).unwrap());
        }

        fn finish(self: Box<Self>, _sums: Vec<Checksum>) -> Code {
            Code::Ok
        }
    }

    /// A write of `block` bytes with room for `sums` bytes of checksums, and the bytes that its guard takes.
    fn receive_of(
        item: usize,
        block: usize,
        sums: usize,
        takes: bool,
    ) -> (Receive, mpsc::Receiver<u8>) {
        let (bytes, taken) = mpsc::channel();
        let receive = Receive {
            item,
            guard: Box::new(Taker { takes, bytes }),
            block,
            sums: vec![0xee; sums],
        };
        (receive, taken)
    }

    /// A connection has memory for a piece only if its guards take bytes. Those of a store node take none.
    #[test]
    fn a_run_is_taken_when_all_its_guards_take_bytes() {
        let run = |takes: &[bool]| -> Vec<Receive> {
            let receives = takes.iter().map(|takes| receive_of(0, 1, 8, *takes).0);
            receives.collect()
        };
        assert!(!is_taken(&run(&[])), "it has no bytes");
        assert!(is_taken(&run(&[true, true])));
        assert!(!is_taken(&run(&[true, false])));
        assert!(!is_taken(&run(&[false])));
    }

    #[test]
    fn pieces_of_any_size_give_each_write_its_bytes_and_its_checksums() {
        let lengths: [(usize, usize); 3] = [(5, 8), (1, 16), (9, 8)];
        let total: usize = lengths.iter().map(|(block, sums)| block + sums).sum();
        let stream: Vec<u8> = (0..total).map(|at| u8::try_from(at).unwrap()).collect();
        for size in 1..=total {
            let mut run = Vec::new();
            let mut taken = Vec::new();
            for (item, (block, sums)) in lengths.into_iter().enumerate() {
                let (receive, bytes) = receive_of(item, block, sums, true);
                run.push(receive);
                taken.push(bytes);
            }
            let mut cursor = RunCursor::default();
            stream
                .chunks(size)
                .for_each(|piece| cursor.give(&mut run, piece));
            let mut rest = &stream[..];
            for (receive, taken) in run.iter().zip(taken) {
                let (bytes, after) = rest.split_at(receive.block);
                assert!(taken.try_iter().eq(bytes.iter().copied()), "{size}");
                let (sums, after) = after.split_at(receive.sums.len());
                assert_eq!(receive.sums, sums, "{size}");
                rest = after;
            }
        }
    }
}
