//! Serves one control connection: requests in order, each answered before the next is read.

use super::board::{BOARD_BYTES, Board};
use super::fds::send_with_fd;
use crate::frame::{
    decode_header, encode_head, receive_exact, receive_meta, rest, send, serve_span, skip,
    unimplemented,
};
use crate::handshake::{End, answer_sums};
use crate::host::{Peer, Refused, ShmHost};
use crate::inline::WHOLE_BYTES;
use crate::service::Connection;
use crate::socket::wait_to_receive;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::data::{
    Failure, MapReply, MapRequest, Meta, PinRequest, ReadRequest, Statuses, WriteEnd, WriteRequest,
};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, Op};
use kvpool_types::{Code, Length};
use std::cell::OnceCell;
use std::convert::Infallible;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// The state of one connection.
pub(super) struct ShmSession<'a> {
    connection: &'a Arc<Connection>,
    host: &'a dyn ShmHost,
    peer: &'a Peer,
    /// Kept so that the host can tell whether the connection lives.
    board: OnceCell<Arc<Board>>,
}

impl<'a> ShmSession<'a> {
    pub(super) fn new(
        connection: &'a Arc<Connection>,
        host: &'a dyn ShmHost,
        peer: &'a Peer,
    ) -> Self {
        Self {
            connection,
            host,
            peer,
            board: OnceCell::new(),
        }
    }

    /// Serves until the connection ends.
    pub(super) fn serve(&self) -> Result<Infallible, End> {
        let socket = self.connection.socket();
        let mut meta = Vec::new();
        loop {
            let mut head = [0; HEADER_BYTES];
            wait_to_receive(socket)?;
            receive_exact(socket, &mut head, |received| {
                received == 0 && !self.connection.is_aborted()
            })?;
            // Requests left in the socket by a dead process are not performed.
            if !self.connection.begin() || self.connection.is_aborted() {
                return Err(End::Over);
            }
            let header = decode_header(&head)?;
            let most = match header.op {
                Op::Write => WHOLE_BYTES,
                Op::Unknown => MAX_PAYLOAD_BYTES,
                _ => 0,
            };
            if header.payload > most {
                let error = DecodeError::BadValue {
                    what: "payload on a Unix socket",
                    value: header.payload,
                };
                return Err(End::malformed(header.request, &error));
            }
            receive_meta(socket, &header, &mut meta)?;
            let begun = Instant::now();
            let span = serve_span(&head, &header, &mut meta, "shm");
            span.in_scope(|| self.answer(&header, &meta))?;
            self.host.served(header.op, begun.elapsed());
            rest(&mut meta);
            if !self.connection.finish() {
                return Err(End::Over);
            }
        }
    }

    fn answer(&self, header: &Header, meta: &[u8]) -> Result<(), End> {
        match header.op {
            Op::Write => self.write(header, &decode(header, meta)?),
            Op::Map => self.map(header, &decode(header, meta)?),
            Op::WriteBegin => {
                let request: WriteRequest = decode(header, meta)?;
                let WriteRequest {
                    incarnation,
                    grants,
                } = &request;
                let begun = self.host.begin_shm_writes(self.peer, *incarnation, grants);
                self.reply(header, Op::Statuses, &Statuses(begun))
            }
            Op::WriteEnd => {
                let request: WriteEnd = decode(header, meta)?;
                let ended = self.host.end_shm_writes(self.peer, request.items);
                self.reply(header, Op::Statuses, &Statuses(ended))
            }
            Op::Pin => {
                let request: PinRequest = decode(header, meta)?;
                let pin = |extent| {
                    self.host
                        .pin(self.peer, header.epoch, request.incarnation, extent)
                };
                self.statuses(header, request.extents.iter().map(pin))
            }
            Op::Unpin => {
                let request: PinRequest = decode(header, meta)?;
                let unpin = |extent| self.host.unpin(self.peer, request.incarnation, extent);
                self.statuses(header, request.extents.iter().map(unpin))
            }
            Op::Sums => {
                let request: ReadRequest = decode(header, meta)?;
                match answer_sums(self.host, header.epoch, &request) {
                    Ok(reply) => self.reply(header, Op::SumsReply, &reply),
                    Err(failure) => self.reply(header, Op::Failure, &failure),
                }
            }
            Op::Ping => self.reply(header, Op::Pong, &Nothing),
            Op::Unknown => {
                skip(self.connection.socket(), header.payload)?;
                self.reply(header, Op::Failure, &unimplemented())
            }
            other => self.fail(
                header,
                Refused {
                    code: Code::InvalidArgument,
                    message: format!("{other:?} is not served over a Unix socket"),
                },
            ),
        }
    }

    /// Handles a small batch whose bytes come with the request, without announcement and end.
    fn write(&self, header: &Header, request: &WriteRequest) -> Result<(), End> {
        if request.payload_bytes() != Some(header.payload) {
            let error = DecodeError::BadValue {
                what: "payload of a write",
                value: header.payload,
            };
            return Err(End::malformed(header.request, &error));
        }
        let mut payload = vec![0; Length(header.payload).as_usize()];
        let socket = self.connection.socket();
        receive_exact(socket, &mut payload, |_| !self.connection.is_aborted())?;
        let codes = self.host.write_now(request, &payload);
        self.host.count(Length(0), Length(header.payload));
        self.reply(header, Op::Statuses, &Statuses(codes))
    }

    fn map(&self, header: &Header, request: &MapRequest) -> Result<(), End> {
        let mapped = if request.segment == MapRequest::BOARD {
            self.board(request)
        } else {
            self.host
                .map(request.incarnation, request.segment, request.writable)
        };
        match mapped {
            Ok((fd, size)) => {
                let reply = MapReply { size };
                let epoch = self.host.epoch();
                let frame = encode_head(Op::MapReply, header.request, epoch, 0, |out| {
                    reply.encode(out);
                })
                .map_err(|error| End::malformed(header.request, &error))?;
                Ok(send_with_fd(self.connection.socket(), &frame, fd.as_fd())?)
            }
            Err(refused) => self.fail(header, refused),
        }
    }

    /// One board a connection, so that a client cannot make a node create many.
    fn board(&self, request: &MapRequest) -> Result<(OwnedFd, Length), Refused> {
        if self.board.get().is_some() || !request.writable {
            return Err(Refused {
                code: Code::InvalidArgument,
                message: "a connection has one pin board, which must be mapped writable".to_owned(),
            });
        }
        let (board, fd) = self.host.board(self.peer, request.incarnation)?;
        self.board.get_or_init(|| board);
        Ok((fd, BOARD_BYTES))
    }

    fn statuses(&self, header: &Header, codes: impl Iterator<Item = Code>) -> Result<(), End> {
        self.reply(header, Op::Statuses, &Statuses(codes.collect()))
    }

    fn fail(&self, header: &Header, refused: Refused) -> Result<(), End> {
        let failure = Failure {
            code: refused.code,
            message: refused.message,
        };
        self.reply(header, Op::Failure, &failure)
    }

    fn reply(&self, header: &Header, op: Op, meta: &impl Meta) -> Result<(), End> {
        Ok(send(
            self.connection.socket(),
            op,
            header.request,
            self.host.epoch(),
            meta,
        )?)
    }
}

fn decode<M: Meta>(header: &Header, meta: &[u8]) -> Result<M, End> {
    M::decode(meta).map_err(|error| End::malformed(header.request, &error))
}

/// The empty meta of a frame.
struct Nothing;

impl Meta for Nothing {
    fn encode(&self, _: &mut Vec<u8>) {}

    fn decode(_: &[u8]) -> Result<Self, DecodeError> {
        Ok(Self)
    }
}
