//! Reassembles frames from received bytes, which arrive in pieces of any size.

use super::DecodeError;
use super::frame::{HEADER_BYTES, Header};
use crate::Length;
use std::ops::Range;

/// The initial size of the buffer, in bytes.
const ROOM: usize = 16 << 10;
/// The most bytes of the buffer that are kept after a large frame.
const KEPT_ROOM: usize = 256 << 10;

/// Received bytes that form frames. One read of the socket often brings several small frames.
#[derive(Debug)]
pub struct Incoming {
    max_payload: u64,
    buffer: Vec<u8>,
    /// The range of `buffer` that holds bytes.
    start: usize,
    end: usize,
}

/// One complete frame.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// The header.
    pub header: Header,
    /// The meta part.
    pub meta: &'a [u8],
    /// The payload.
    pub payload: &'a [u8],
}

impl Incoming {
    /// Accepts frames with payloads of at most `max_payload` bytes.
    pub const fn new(max_payload: u64) -> Self {
        Self {
            max_payload,
            buffer: Vec::new(),
            start: 0,
            end: 0,
        }
    }

    /// Free space of the buffer to read into; never empty. It takes at least the rest of the current frame.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
            self.buffer.truncate(KEPT_ROOM);
            self.buffer.shrink_to(KEPT_ROOM);
        }
        // A header that is refused reserves no space. `next_frame` reports its error.
        let begun = self.header().ok().flatten();
        let wanted = begun.map_or(HEADER_BYTES, |header| total(&header));
        if self.buffer.len() - self.start < wanted {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let size = self.buffer.len().max(wanted).max(ROOM);
            self.buffer.resize(size, 0);
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }

    /// Records that `count` bytes were read into the space of [`Self::room`].
    pub fn filled(&mut self, count: usize) {
        self.end = self.end.saturating_add(count).min(self.buffer.len());
    }

    /// Takes the next frame, if it is complete.
    ///
    /// # Errors
    ///
    /// See [`DecodeError`].
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, DecodeError> {
        let Some(header) = self.header()? else {
            return Ok(None);
        };
        let end = self.start + total(&header);
        if self.end < end {
            return Ok(None);
        }
        let meta_at = self.start + HEADER_BYTES;
        let payload_at = meta_at + Length(header.meta.into()).as_usize();
        self.start = end;
        let part = |range: Range<usize>| self.buffer.get(range).unwrap_or_default();
        Ok(Some(Frame {
            header,
            meta: part(meta_at..payload_at),
            payload: part(payload_at..end),
        }))
    }

    /// Whether a part of a frame has arrived.
    pub const fn has_begun(&self) -> bool {
        self.start < self.end
    }

    /// The header of the current frame, if it is complete.
    fn header(&self) -> Result<Option<Header>, DecodeError> {
        let bytes = self.buffer.get(self.start..self.end).unwrap_or_default();
        let Some((head, _)) = bytes.split_first_chunk() else {
            return Ok(None);
        };
        let header = Header::decode(head)?;
        if header.payload > self.max_payload {
            return Err(DecodeError::BadValue {
                what: "payload",
                value: header.payload,
            });
        }
        Ok(Some(header))
    }
}

fn total(header: &Header) -> usize {
    HEADER_BYTES + Length(u64::from(header.meta).saturating_add(header.payload)).as_usize()
}

#[cfg(test)]
mod tests {
    use super::super::frame::{Op, VERSION};
    use super::*;
    use crate::Epoch;

    fn frame(number: u8, meta: usize, payload: usize) -> Vec<u8> {
        let header = Header {
            version: VERSION,
            op: Op::Exist,
            request: number.into(),
            epoch: Epoch(3),
            meta: u32::try_from(meta).unwrap(),
            payload: payload as u64,
        };
        let mut bytes = header.encode().to_vec();
        bytes.resize(bytes.len() + meta, number);
        bytes.resize(bytes.len() + payload, 0xff - number);
        bytes
    }

    #[test]
    fn frames_are_reassembled_from_any_pieces() {
        let sizes = [
            (0, 0),
            (1, 2),
            (40, 0),
            (5000, 9),
            (ROOM, 1),
            (3 * ROOM, KEPT_ROOM),
            (7, 7),
        ];
        let sent: Vec<u8> = (1..)
            .zip(sizes)
            .flat_map(|(number, (meta, payload))| frame(number, meta, payload))
            .collect();
        for step in [1, 39, 40, 41, 1000, ROOM, usize::MAX] {
            let mut left = sent.as_slice();
            let mut incoming = Incoming::new(1 << 20);
            let mut seen = Vec::new();
            while seen.len() < sizes.len() {
                if let Some(Frame {
                    header,
                    meta,
                    payload,
                }) = incoming.next_frame().unwrap()
                {
                    let number = u8::try_from(header.request).unwrap();
                    assert_eq!(meta, vec![number; meta.len()]);
                    assert_eq!(payload, vec![0xff - number; payload.len()]);
                    assert_eq!(usize::from(number), seen.len() + 1);
                    seen.push((meta.len(), payload.len()));
                    continue;
                }
                let room = incoming.room();
                let count = step.min(room.len()).min(left.len());
                assert!(count > 0, "step {step}");
                let (now, later) = left.split_at(count);
                room[..count].copy_from_slice(now);
                incoming.filled(count);
                left = later;
            }
            assert_eq!(seen, sizes, "step {step}");
            assert!(!incoming.has_begun());
        }
    }

    #[test]
    fn a_malformed_frame_is_refused_by_its_header() {
        let refused = |change: fn(&mut [u8])| {
            let mut bytes = frame(1, 0, 0);
            change(&mut bytes);
            let mut incoming = Incoming::new(0);
            incoming.room()[..bytes.len()].copy_from_slice(&bytes);
            incoming.filled(bytes.len());
            // No room is made for a frame that will be refused.
            assert!(incoming.room().len() < ROOM);
            incoming.next_frame().map(|_| ()).unwrap_err()
        };
        assert!(matches!(
            refused(|bytes| bytes[0] = 0),
            DecodeError::BadMagic(_)
        ));
        assert!(matches!(
            refused(|bytes| bytes[32] = 1),
            DecodeError::BadValue { value: 1, .. }
        ));
        assert!(matches!(
            refused(|bytes| bytes[24..28].fill(0xff)),
            DecodeError::Oversized { .. }
        ));
    }
}
