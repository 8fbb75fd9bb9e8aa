//! The frames of answers.

use kvpool_types::Epoch;
use kvpool_types::wire::DecodeError;
use kvpool_types::wire::data::{Failure, Meta};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, MAX_META_BYTES, Op, VERSION};
use std::io;

use crate::service::refused::Refused;

/// Why no request was read.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The peer closed the connection between two requests.
    #[error("it was closed")]
    Closed,
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The bytes are not a valid request.
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

/// The frame that answers `request`. If the answer is too long for a frame, the frame reports a
/// failure.
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
        let message =
            format!("the answer of {bytes} bytes exceeds the limit: ask for less at once");
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

/// The frame that reports the failure of `request`. Request number 0 stands for the whole
/// connection.
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
