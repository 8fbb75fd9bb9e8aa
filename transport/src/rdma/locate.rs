//! Asks a peer for the registrations of its memory.

use super::link::OpenRdmaLink;
use crate::control::ControlAnswer;
use crate::frame::status;
use crate::link::TransferError;
use crate::outcomes::{Batch, unreachable};
use crate::split::pack;
use kvpool_types::wire::data::{ReadItem, ReadRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::wire::rdma::RdmaLocated;
use kvpool_types::{Code, Epoch, Extent};
use std::sync::Arc;

/// The most bytes of the answer for one extent, and of the whole answer.
const PLACES_BYTES: u64 = 1 << 10;
const ANSWER_BYTES: u64 = 1 << 20;

/// An extent, and the index of its item in the batch.
type LocateItem = (usize, Extent);

/// Asks for the extents that the link does not know yet. Each extent is one item of the batch.
pub(super) fn start(open: &Arc<OpenRdmaLink>, batch: &Arc<Batch<()>>, extents: Vec<Extent>) {
    let mut unknown = Vec::new();
    for (item, extent) in extents.into_iter().enumerate() {
        if open.knows(&extent) {
            batch.end(item, Ok(()));
        } else {
            unknown.push((PLACES_BYTES, (item, extent)));
        }
    }
    pack(unknown, ANSWER_BYTES, |_, asked| ask(open, batch, asked));
}

fn ask(open: &Arc<OpenRdmaLink>, batch: &Arc<Batch<()>>, asked: Vec<LocateItem>) {
    let whole = |&(_, extent): &LocateItem| ReadItem::whole(extent);
    let request = ReadRequest {
        incarnation: open.incarnation,
        items: asked.iter().map(whole).collect(),
    };
    // The callback holds the link weakly: the link's control channel holds the callback.
    let (link, batch) = (Arc::downgrade(open), batch.clone());
    let control = &open.control;
    control.request(Op::RdmaLocate, Epoch::default(), &request, move |answer| {
        let outcomes = link
            .upgrade()
            .ok_or_else(|| unreachable("the link has been closed"))
            .and_then(|open| learned(&open, &asked, answer));
        match outcomes {
            Ok(outcomes) => {
                for ((item, _), outcome) in asked.into_iter().zip(outcomes) {
                    batch.end(item, outcome);
                }
            }
            Err(error) => {
                for (item, _) in asked {
                    batch.end(item, Err(error.clone()));
                }
            }
        }
    });
}

/// The outcome for each extent of the request.
fn learned(
    open: &OpenRdmaLink,
    asked: &[LocateItem],
    answer: Result<ControlAnswer, TransferError>,
) -> Result<Vec<Result<(), TransferError>>, TransferError> {
    let RdmaLocated(located) = answer?.decode(Op::RdmaLocated)?;
    if located.len() != asked.len() {
        return Err(status(Code::Malformed));
    }
    let outcomes = asked.iter().zip(located).map(|((_, extent), places)| {
        let places = places.map_err(status)?;
        open.learn(extent, &places)
    });
    Ok(outcomes.collect())
}
