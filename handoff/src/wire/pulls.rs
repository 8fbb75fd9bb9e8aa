//! Messages of pulls to and from their fields.

use super::fields::{self, Kind};
use super::rooms::{code_number, code_of, micros};
use super::{HandoffDecodeError, HandoffMessage};
use crate::pins::PullId;
use crate::pull::{PullMode, PullReady, ToPullReceiver, ToPullSender};
use kvpool_types::Checksum;
use std::time::Duration;

type Decoded = Result<HandoffMessage, HandoffDecodeError>;

fn id_bytes(pull: PullId) -> Vec<u8> {
    pull.0.to_le_bytes().to_vec()
}

fn id_of(bytes: &[u8]) -> Result<PullId, HandoffDecodeError> {
    let bytes = bytes.try_into();
    let bytes = bytes.map_err(|_| HandoffDecodeError::Field("pull"))?;
    Ok(PullId(u128::from_le_bytes(bytes)))
}

impl From<&ToPullSender> for Kind {
    fn from(message: &ToPullSender) -> Self {
        let end = |pull: PullId| fields::PullEnd {
            pull: id_bytes(pull),
            code: 0,
        };
        match message {
            ToPullSender::Ack { pull, held } => Self::PullAck(fields::PullAck {
                pull: id_bytes(*pull),
                held: held.clone(),
            }),
            ToPullSender::Busy { pull } => Self::PullBusy(end(*pull)),
            ToPullSender::PullDone { pull } => Self::PullDone(end(*pull)),
        }
    }
}

impl From<&ToPullReceiver> for Kind {
    fn from(message: &ToPullReceiver) -> Self {
        match message {
            ToPullReceiver::Ready(ready) => Self::PullReady(fields::Ready {
                pull: id_bytes(ready.pull),
                is_delayed: ready.mode == PullMode::Delayed,
                pages: ready.pages.clone(),
                sums: ready.sums.iter().map(|sum| sum.0).collect(),
                ttl_micros: micros(ready.ttl),
            }),
            ToPullReceiver::Abort { pull, code } => Self::PullAbort(fields::PullEnd {
                pull: id_bytes(*pull),
                code: code_number(*code),
            }),
        }
    }
}

pub(super) fn ready_of(ready: fields::Ready) -> Decoded {
    if ready.sums.len() != ready.pages.len() {
        return Err(HandoffDecodeError::Field("sums"));
    }
    let ready = PullReady {
        pull: id_of(&ready.pull)?,
        mode: match ready.is_delayed {
            true => PullMode::Delayed,
            false => PullMode::Eager,
        },
        pages: ready.pages,
        sums: ready.sums.into_iter().map(Checksum).collect(),
        ttl: Duration::from_micros(ready.ttl_micros),
    };
    Ok(HandoffMessage::ToPullReceiver(ToPullReceiver::Ready(ready)))
}

pub(super) fn abort_of(end: &fields::PullEnd) -> Decoded {
    let (pull, code) = (id_of(&end.pull)?, code_of(end.code));
    let message = ToPullReceiver::Abort { pull, code };
    Ok(HandoffMessage::ToPullReceiver(message))
}

pub(super) fn ack_of(ack: fields::PullAck) -> Decoded {
    let (pull, held) = (id_of(&ack.pull)?, ack.held);
    let message = ToPullSender::Ack { pull, held };
    Ok(HandoffMessage::ToPullSender(message))
}

pub(super) fn busy_of(end: &fields::PullEnd) -> Decoded {
    let pull = id_of(&end.pull)?;
    Ok(HandoffMessage::ToPullSender(ToPullSender::Busy { pull }))
}

pub(super) fn done_of(end: &fields::PullEnd) -> Decoded {
    let pull = id_of(&end.pull)?;
    Ok(HandoffMessage::ToPullSender(ToPullSender::PullDone {
        pull,
    }))
}
