//! Frames on a blocking socket.

use kvpool_types::wire::DecodeError;
use kvpool_types::wire::data::{Failure, Meta};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, MAX_META_BYTES, Op, VERSION};
use kvpool_types::{Epoch, Length};
use std::io::{self, Read};

use crate::service::refused::Refused;

/// The room that a connection starts with.
const ROOM: usize = 16 << 10;
/// The room that a larger request makes is kept for the next one up to this.
const KEPT_ROOM: usize = 256 << 10;

/// Why no request came.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The other side closed between two requests.
    #[error("it was closed")]
    Closed,
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// What came is no request.
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

/// Requests as they come in. One read often brings a whole one, and with pipelining several.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    buffer: Vec<u8>,
    /// The part of `buffer` that holds bytes.
    start: usize,
    end: usize,
}

impl Incoming {
    /// The next request that is here already: its header and its meta.
    pub(super) fn next(&mut self) -> Result<Option<(Header, bytes::Bytes)>, DecodeError> {
        let Some(header) = self.header()? else {
            return Ok(None);
        };
        if header.payload > 0 {
            return Err(DecodeError::BadValue {
                what: "payload of a call",
                value: header.payload,
            });
        }
        let meta_at = self.start + HEADER_BYTES;
        let total = meta_at + meta_bytes(&header);
        if self.end < total {
            return Ok(None);
        }
        let meta = self.buffer.get(meta_at..total).unwrap_or_default();
        let meta = bytes::Bytes::copy_from_slice(meta);
        self.start = total;
        Ok(Some((header, meta)))
    }

    /// Reads once; how many bytes came.
    pub(super) fn fill(&mut self, from: &mut impl Read) -> io::Result<usize> {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
            self.buffer.truncate(KEPT_ROOM);
            self.buffer.shrink_to(KEPT_ROOM);
        }
        let begun = self.header().ok().flatten();
        let wanted = HEADER_BYTES + begun.as_ref().map_or(0, meta_bytes);
        if self.buffer.len() - self.start < wanted {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let size = self.buffer.len().max(wanted).max(ROOM);
            self.buffer.resize(size, 0);
        }
        let count = from.read(self.buffer.get_mut(self.end..).unwrap_or_default())?;
        self.end += count;
        Ok(count)
    }

    /// Whether a request has begun to come in and is not whole.
    pub(super) fn has_begun(&self) -> bool {
        self.start < self.end
    }

    fn header(&self) -> Result<Option<Header>, DecodeError> {
        let bytes = self.buffer.get(self.start..self.end).unwrap_or_default();
        match bytes.split_first_chunk() {
            Some((head, _)) => Header::decode(head).map(Some),
            None => Ok(None),
        }
    }
}

fn meta_bytes(header: &Header) -> usize {
    Length(header.meta.into()).as_usize()
}

/// The frame that answers `request`. An answer that no frame can hold becomes a failure.
pub(super) fn answer(
    op: Op,
    request: u64,
    epoch: Epoch,
    encode_meta: impl FnOnce(&mut Vec<u8>),
) -> Vec<u8> {
    let mut out = vec![0; HEADER_BYTES];
    encode_meta(&mut out);
    let bytes = (out.len() - HEADER_BYTES) as u64;
    let Some(meta) = u32::try_from(bytes)
        .ok()
        .filter(|_| bytes <= MAX_META_BYTES)
    else {
        let message = format!("an answer of {bytes} bytes is over the limit: ask for less at once");
        return failure(
            request,
            epoch,
            &Refused {
                code: kvpool_types::Code::Oversized,
                message,
            },
        );
    };
    let header = Header {
        version: VERSION,
        op,
        request,
        epoch,
        meta,
        payload: 0,
    };
    if let Some(head) = out.first_chunk_mut() {
        *head = header.encode();
    }
    out
}

/// The frame that says that `request` failed; number 0 stands for the whole connection.
pub(super) fn failure(request: u64, epoch: Epoch, refused: &Refused) -> Vec<u8> {
    let failure = Failure {
        code: refused.code,
        message: refused.message.clone(),
    };
    answer(Op::Failure, request, epoch, |out| failure.encode(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Brings a few bytes at a time.
    struct Trickle<'a>(&'a [u8], usize);

    impl Read for Trickle<'_> {
        fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
            let count = self.1.min(room.len()).min(self.0.len());
            let (now, later) = self.0.split_at(count);
            room[..count].copy_from_slice(now);
            self.0 = later;
            Ok(count)
        }
    }

    fn request(number: u8, meta: usize) -> Vec<u8> {
        answer(Op::Exist, number.into(), Epoch(3), |out| {
            out.resize(out.len() + meta, number);
        })
    }

    #[test]
    fn requests_come_whole_however_they_are_cut() {
        let sizes = [0, 1, 40, 5000, ROOM, 3 * ROOM, 7];
        let sent: Vec<u8> = (1..)
            .zip(sizes)
            .flat_map(|(n, size)| request(n, size))
            .collect();
        for step in [1, 39, 40, 41, 1000, ROOM, usize::MAX] {
            let mut from = Trickle(&sent, step);
            let mut incoming = Incoming::default();
            let mut seen = Vec::new();
            while seen.len() < sizes.len() {
                match incoming.next().unwrap() {
                    Some((header, meta)) => {
                        let number = u8::try_from(header.request).unwrap();
                        assert_eq!(meta, vec![number; meta.len()]);
                        seen.push((number, meta.len()));
                    }
                    None => assert!(incoming.fill(&mut from).unwrap() > 0, "step {step}"),
                }
            }
            let expected: Vec<_> = (1..).zip(sizes).collect();
            assert_eq!(seen, expected, "step {step}");
            assert!(!incoming.has_begun());
        }
    }

    #[test]
    fn a_payload_and_a_meta_over_the_limit_are_refused_by_their_header() {
        let refused = |change: fn(&mut [u8])| {
            let mut frame = request(1, 0);
            change(&mut frame);
            let mut incoming = Incoming::default();
            incoming.fill(&mut frame.as_slice()).unwrap();
            incoming.next().unwrap_err()
        };
        assert!(matches!(
            refused(|frame| frame[32] = 1),
            DecodeError::BadValue { value: 1, .. }
        ));
        assert!(matches!(
            refused(|frame| frame[24..28].fill(0xff)),
            DecodeError::Oversized { .. }
        ));
    }

    #[test]
    fn an_answer_that_no_frame_can_hold_is_a_failure() {
        let huge = |out: &mut Vec<u8>| out.resize(out.len() + (5 << 20), 0);
        let frame = answer(Op::Reply, 9, Epoch(3), huge);
        let header = Header::decode(frame.first_chunk().unwrap()).unwrap();
        assert_eq!((header.op, header.request), (Op::Failure, 9));
        let failure = Failure::decode(&frame[HEADER_BYTES..]).unwrap();
        assert_eq!(failure.code, kvpool_types::Code::Oversized);
    }
}
