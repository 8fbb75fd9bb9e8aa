//! The node's segments as this process has mapped them: read-only on the first read, and a second
//! time, writable, on the first write.

use super::control::{Answer, Control};
use crate::link::TransferError;
use crate::memory::Region;
use kvpool_types::wire::data::{MapReply, MapRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Code, Epoch, Incarnation, SegmentId};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;

type Waiter = Box<dyn FnOnce(Result<Region, TransferError>) + Send>;

enum Mapping {
    Asked(Vec<Waiter>),
    Mapped(Region),
}

/// All mappings of one link.
pub(super) struct Segments {
    control: Arc<Control>,
    incarnation: Incarnation,
    mappings: Arc<Mutex<HashMap<(SegmentId, bool), Mapping>>>,
}

impl Segments {
    pub(super) fn new(control: Arc<Control>, incarnation: Incarnation) -> Self {
        Self {
            control,
            incarnation,
            mappings: Arc::default(),
        }
    }

    /// A segment's memory for reading, if it is mapped.
    pub(super) fn mapped(&self, segment: SegmentId) -> Option<Region> {
        match self.mappings.lock().get(&(segment, false)) {
            Some(Mapping::Mapped(region)) => Some(region.clone()),
            Some(Mapping::Asked(_)) | None => None,
        }
    }

    /// Calls `ready` with a segment's memory: here when it is mapped, else once it is.
    pub(super) fn with(
        &self,
        segment: SegmentId,
        writable: bool,
        ready: impl FnOnce(Result<Region, TransferError>) + Send + 'static,
    ) {
        let name = (segment, writable);
        let mut mappings = self.mappings.lock();
        match mappings.get_mut(&name) {
            Some(Mapping::Mapped(region)) => {
                let region = region.clone();
                drop(mappings);
                ready(Ok(region));
            }
            Some(Mapping::Asked(waiters)) => waiters.push(Box::new(ready)),
            None => {
                mappings.insert(name, Mapping::Asked(vec![Box::new(ready)]));
                drop(mappings);
                let request = MapRequest {
                    incarnation: self.incarnation,
                    segment,
                    writable,
                };
                let mappings = self.mappings.clone();
                self.control
                    .request(Op::Map, Epoch::default(), &request, move |answer| {
                        let mapped = answer.and_then(|answer| map(answer, &request));
                        settle(&mappings, name, &mapped);
                    });
            }
        }
    }
}

fn map(mut answer: Answer, request: &MapRequest) -> Result<Region, TransferError> {
    let reply: MapReply = answer.decode(Op::MapReply)?;
    let fd = answer.fd().ok_or_else(|| TransferError {
        code: Code::Malformed,
        message: format!(
            "the node sent no descriptor for segment {}",
            request.segment
        ),
    })?;
    Region::map(fd.as_fd(), reply.size, request.writable).map_err(|error| TransferError {
        code: Code::Internal,
        message: format!("segment {} cannot be mapped: {error}", request.segment),
    })
}

/// Keeps the mapping, or forgets that it was asked for, and tells all who wait.
fn settle(
    mappings: &Mutex<HashMap<(SegmentId, bool), Mapping>>,
    name: (SegmentId, bool),
    mapped: &Result<Region, TransferError>,
) {
    let before = {
        let mut mappings = mappings.lock();
        match mapped {
            Ok(region) => mappings.insert(name, Mapping::Mapped(region.clone())),
            Err(_) => mappings.remove(&name),
        }
    };
    if let Some(Mapping::Asked(waiters)) = before {
        for waiter in waiters {
            waiter(mapped.clone());
        }
    }
}
