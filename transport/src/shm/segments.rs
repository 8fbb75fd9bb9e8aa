//! The node's segments as this process maps them: read-only at the first read, and a second time, writable,
//! at the first write.

use crate::control::{Control, ControlAnswer};
use crate::link::TransferError;
use crate::memory::{Populate, Region, populate_step};
use kvpool_types::wire::data::{MapReply, MapRequest};
use kvpool_types::wire::frame::Op;
use kvpool_types::{Code, Epoch, Incarnation, SegmentId};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

type MappingWaiter = Box<dyn FnOnce(Result<Region, TransferError>) + Send>;

enum Mapping {
    Asked(Vec<MappingWaiter>),
    Mapped(Region),
}

type Mappings = Mutex<HashMap<(SegmentId, bool), Mapping>>;

/// All mappings of one link.
pub(super) struct Segments {
    control: Arc<Control>,
    incarnation: Incarnation,
    mappings: Arc<Mappings>,
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

    /// Calls `ready` with a segment's memory: now if it is mapped, otherwise once it is.
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
                let control = Arc::downgrade(&self.control);
                self.control
                    .request(Op::Map, Epoch::default(), &request, move |answer| {
                        let mapped = answer.and_then(|answer| map(answer, &request));
                        if let Ok(region) = &mapped {
                            populate(region, Arc::downgrade(&mappings), control);
                        }
                        resolve_mapping(&mappings, name, &mapped);
                    });
            }
        }
    }
}

fn map(mut answer: ControlAnswer, request: &MapRequest) -> Result<Region, TransferError> {
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
        message: format!("mapping segment {} failed: {error}", request.segment),
    })
}

/// Starts a thread that fills the page table of a new mapping. The thread ends with the mapping or
/// the link, and keeps neither alive.
fn populate(region: &Region, mappings: Weak<Mappings>, control: Weak<Control>) {
    let mut populate = Populate::of(region);
    let wanted = move || {
        mappings.strong_count() > 0 && control.upgrade().is_some_and(|control| control.is_open())
    };
    let spawned = std::thread::Builder::new()
        .name("kvpool-shm-fill".to_owned())
        .spawn(move || while wanted() && populate_step(&mut populate) {});
    if let Err(error) = spawned {
        tracing::debug!(%error, "starting the populating thread failed: first uses take page faults");
    }
}

/// Stores the mapping, or removes the failed request, and tells all waiters.
fn resolve_mapping(
    mappings: &Mappings,
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
