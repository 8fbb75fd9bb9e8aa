//! The content of a frame, and changed frames.

use kvpool_handoff::room::{ToReceiver, ToSender};
use kvpool_handoff::wire::HandoffMessage;
use kvpool_transport::checksum::checksum;
use kvpool_types::wire::data::{Meta, Statuses, WriteRequest};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op};
use kvpool_types::{CHUNK, Code, Epoch, SegmentId};

/// The segment that takes letters.
const LETTERS: SegmentId = SegmentId(3);
/// The bytes of a letter before the address of its sender, and after its body.
const LETTER_HEAD: usize = 16 + 16 + 8 + 2;
const LETTER_CODE: usize = 32;

/// The session that a port belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Port {
    Prefill,
    Decode,
}

/// A direction: requests to a port, or the answers from the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Way {
    pub(crate) port: Port,
    pub(crate) is_answer: bool,
}

impl Way {
    pub(crate) const ALL: [Self; 4] = [
        Self::new(Port::Decode, false),
        Self::new(Port::Decode, true),
        Self::new(Port::Prefill, false),
        Self::new(Port::Prefill, true),
    ];

    pub(crate) const fn new(port: Port, is_answer: bool) -> Self {
        Self { port, is_answer }
    }
}

/// One frame on its way.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) way: Way,
    /// The number of its connection.
    pub(crate) connection: u64,
    pub(crate) bytes: Vec<u8>,
}

impl Frame {
    pub(crate) fn header(&self) -> Header {
        Header::decode(self.bytes.first_chunk().unwrap()).unwrap()
    }

    pub(crate) fn payload_at(&self) -> usize {
        HEADER_BYTES + self.header().meta as usize
    }

    pub(crate) fn payload(&mut self) -> &mut [u8] {
        let at = self.payload_at();
        &mut self.bytes[at..]
    }

    pub(crate) fn is_write(&self) -> bool {
        self.header().op == Op::Write
    }

    /// The number of the request on its connection. The answer repeats it.
    pub(crate) fn request(&self) -> (u64, u64) {
        (self.connection, self.header().request)
    }

    /// Whether the frame is a write, into any memory.
    pub(crate) fn write(&self) -> Option<WriteRequest> {
        let meta = &self.bytes[HEADER_BYTES..self.payload_at()];
        self.is_write().then(|| WriteRequest::decode(meta).unwrap())
    }

    /// The room into which a write goes.
    pub(crate) fn room(&self) -> Option<Epoch> {
        let epoch = self.write()?.grants.first()?.epoch;
        (epoch != Epoch(0)).then_some(epoch)
    }

    fn body(&self) -> Option<std::ops::Range<usize>> {
        let write = self.write()?;
        let extent = write.grants.first()?.extent;
        if extent.segment != LETTERS || self.room().is_some() {
            return None;
        }
        let at = self.payload_at();
        let length = self.bytes[at + LETTER_HEAD - 2..].first_chunk().unwrap();
        let begin = at + LETTER_HEAD + usize::from(u16::from_le_bytes(*length));
        let end = at + usize::try_from(extent.length.0).unwrap() - LETTER_CODE;
        Some(begin..end)
    }

    /// The name of the message of a letter.
    pub(crate) fn message(&self) -> Option<&'static str> {
        let message = HandoffMessage::decode(&self.bytes[self.body()?]);
        Some(name(&message.unwrap()))
    }

    /// The codes of an answer to a write.
    pub(crate) fn codes(&self) -> Option<Vec<Code>> {
        let is_answer = self.header().op == Op::Statuses;
        let meta = &self.bytes[HEADER_BYTES..self.payload_at()];
        is_answer.then(|| Statuses::decode(meta).unwrap().0)
    }

    /// The same letter with one bit of its body changed, and right checksums.
    pub(crate) fn with_changed_body(mut self) -> Self {
        let body = self.body().unwrap();
        self.bytes[body.start + body.len() / 2] ^= 1;
        self.with_right_sums()
    }

    /// The same write with right checksums.
    pub(crate) fn with_right_sums(mut self) -> Self {
        let lengths: Vec<usize> = {
            let grants = self.write().unwrap().grants;
            let length = |length: u64| usize::try_from(length).unwrap();
            grants.iter().map(|it| length(it.extent.length.0)).collect()
        };
        let mut rest = self.payload();
        for length in lengths {
            let chunk = usize::try_from(CHUNK).unwrap();
            let (bytes, after) = rest.split_at_mut(length);
            let (sums, after) = after.split_at_mut(bytes.chunks(chunk).len() * 8);
            for (bytes, sum) in bytes.chunks(chunk).zip(sums.chunks_mut(8)) {
                sum.copy_from_slice(&checksum(bytes).0.to_le_bytes());
            }
            rest = after;
        }
        self
    }

    /// The same write with two blocks exchanged: the first two blocks of equal length.
    pub(crate) fn with_permuted_blocks(mut self) -> Self {
        let mut write = self.write().unwrap();
        let length = |at: usize| write.grants[at].extent.length;
        let second = (1..write.grants.len()).find(|at| length(*at) == length(0));
        write.grants.swap(0, second.unwrap());
        let mut meta = Vec::new();
        write.encode(&mut meta);
        let at = self.payload_at();
        self.bytes[HEADER_BYTES..at].copy_from_slice(&meta);
        self
    }

    /// An answer that all blocks of this write are in place.
    pub(crate) fn forged_answer(&self) -> Vec<u8> {
        let mut meta = Vec::new();
        let count = self.write().unwrap().grants.len();
        Statuses(vec![Code::Ok; count]).encode(&mut meta);
        let header = Header {
            op: Op::Statuses,
            epoch: Epoch(0),
            meta: u32::try_from(meta.len()).unwrap(),
            payload: 0,
            ..self.header()
        };
        let mut bytes = header.encode().to_vec();
        bytes.extend(meta);
        bytes
    }
}

/// The name of a message, for tests that wait for the message.
const fn name(message: &HandoffMessage) -> &'static str {
    match message {
        HandoffMessage::Register(_) => "register",
        HandoffMessage::ToSender(ToSender::Offer(_)) => "offer",
        HandoffMessage::ToSender(ToSender::Complete { .. }) => "complete",
        HandoffMessage::ToReceiver(ToReceiver::Accept { .. }) => "accept",
        HandoffMessage::ToReceiver(ToReceiver::Chunk { .. }) => "chunk",
        HandoffMessage::ToReceiver(ToReceiver::Done { .. }) => "done",
        _ => "other",
    }
}
