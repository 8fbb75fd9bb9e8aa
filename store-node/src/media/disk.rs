//! One medium of the node, in each of its states.

use super::health::Health;
use super::{Attachment, SsdConfig};
use kvpool_disk::medium::{Formatted, Medium, MediumRefused, Opened};
use kvpool_disk::{Arena, Engine};
use kvpool_proto as proto;
use kvpool_types::medium::{DATA_START, GRANULE, Generation};
use kvpool_types::{ClusterId, MediumId, SegmentId};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Zones of a medium that has no need of larger or smaller ones. What was used last survives the
/// emptying of a zone, so small zones keep better what is worth keeping.
const ZONES: u64 = 32;
/// The largest zone.
const MOST_ZONE: u64 = 256 << 20;
/// The smallest zone: a medium with less than two of them is of no use.
const LEAST_ZONE: u64 = 1 << 20;
/// How long the transfers of a medium may take to end before it is attached anew.
pub(super) const SETTLE: Duration = Duration::from_secs(10);

/// A device or file, and what is known of it.
#[derive(Debug)]
pub(super) struct Disk {
    path: PathBuf,
    engine: Arc<dyn Engine>,
    arena: Arc<Arena>,
    reset: bool,
    /// Drive writes per day; `None` for no limit.
    dwpd: Option<f64>,
    namespaces: Vec<String>,
    state: State,
    /// The pool of the medium, when it is not the one that the node was welcomed to.
    foreign: Option<ClusterId>,
    pub(super) health: Arc<Health>,
    /// Set when something was stored since the last flush.
    pub(super) is_dirty: Arc<AtomicBool>,
}

#[derive(Debug)]
enum State {
    /// Nothing is on it, or nothing that may stay.
    Blank,
    Formatted(Formatted),
    Attached {
        medium: Arc<Medium>,
        segment: SegmentId,
        generation: Generation,
    },
    /// It cannot be used until the node starts anew, for this reason.
    Failed(String),
}

impl Disk {
    /// Reads what a device holds. Bytes that are not a medium's are refused, unless the setting says
    /// that they may be lost.
    pub(super) fn read(
        config: &SsdConfig,
        path: PathBuf,
        engine: Arc<dyn Engine>,
        arena: &Arc<Arena>,
    ) -> Result<Self, MediumRefused> {
        let state = match Formatted::open(Arc::clone(&engine), Arc::clone(arena)) {
            Ok(Opened::Blank) => State::Blank,
            Ok(Opened::Formatted(formatted)) => State::Formatted(formatted),
            Err(
                refused @ (MediumRefused::Foreign
                | MediumRefused::Damaged
                | MediumRefused::Shrunk { .. }),
            ) if config.reset => {
                tracing::warn!(path = %path.display(), %refused, "the medium is formatted anew");
                State::Blank
            }
            Err(refused) => return Err(refused),
        };
        Ok(Self {
            health: Arc::new(Health::new(&path)),
            path,
            engine,
            arena: Arc::clone(arena),
            reset: config.reset,
            dwpd: config.dwpd,
            namespaces: config.namespaces.clone(),
            state,
            foreign: None,
            is_dirty: Arc::default(),
        })
    }

    /// Requests to the device that have not ended.
    #[cfg(feature = "simulation")]
    pub(super) fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The medium's id, if it is formatted.
    pub(super) fn id(&self) -> Option<MediumId> {
        match &self.state {
            State::Formatted(formatted) => Some(formatted.superblock().medium),
            State::Attached { medium, .. } => Some(medium.id()),
            State::Blank | State::Failed(_) => None,
        }
    }

    pub(super) const fn is_attached(&self) -> bool {
        matches!(self.state, State::Attached { .. })
    }

    /// Whether the medium is in use.
    pub(super) fn attachment(&self) -> Attachment {
        match (&self.state, self.foreign) {
            (State::Failed(reason), _) => Attachment::Refused(reason.clone()),
            (_, Some(theirs)) => {
                Attachment::Refused(format!("the medium belongs to another pool, {theirs}"))
            }
            (State::Attached { .. }, None) => Attachment::Attached,
            (State::Blank | State::Formatted(_), None) => Attachment::Pending,
        }
    }

    /// The attached medium with this segment.
    pub(super) fn attached(&self, segment: SegmentId) -> Option<Arc<Medium>> {
        match &self.state {
            State::Attached {
                medium,
                segment: own,
                ..
            } if *own == segment => Some(Arc::clone(medium)),
            _ => None,
        }
    }

    /// What the node says of the medium. A blank one is formatted first. `None` for a medium that
    /// cannot be used.
    pub(super) fn offer(&mut self, cluster: ClusterId) -> Option<proto::OfferedMedium> {
        self.foreign = None;
        if let State::Formatted(formatted) = &self.state
            && formatted.superblock().cluster != cluster
        {
            if !self.reset {
                self.foreign = Some(formatted.superblock().cluster);
                tracing::error!(path = %self.path.display(), theirs = %formatted.superblock().cluster, ours = %cluster,
                    "the medium belongs to another pool and is not used; to lose what it holds, add reset to --ssd");
                return None;
            }
            self.state = State::Blank;
        }
        if matches!(self.state, State::Blank) {
            self.format(cluster);
        }
        let generation = match &self.state {
            State::Formatted(formatted) => formatted.superblock().generation,
            State::Attached { generation, .. } => *generation,
            State::Blank | State::Failed(_) => return None,
        };
        let size = self.engine.size() / GRANULE * GRANULE - DATA_START;
        let zone = (size / ZONES / GRANULE * GRANULE).clamp(LEAST_ZONE, MOST_ZONE);
        Some(proto::OfferedMedium {
            medium_id: bytes::Bytes::copy_from_slice(&self.id()?.to_bytes()),
            generation: generation.0,
            size_bytes: size,
            zone_bytes: zone,
            state: self.health.state(kvpool_seams::boot_time()).into(),
            budget_bytes_per_day: self.budget(size),
            namespaces: self.namespaces.clone(),
        })
    }

    /// The bytes that may be written in a day; zero for no limit.
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a budget need not be exact, and a setting is checked to be positive"
    )]
    fn budget(&self, size: u64) -> u64 {
        self.dwpd
            .map_or(0, |dwpd| (size as f64 * dwpd).max(1.0) as u64)
    }

    /// Makes it a new medium of this pool.
    pub(super) fn format(&mut self, cluster: ClusterId) {
        self.detach(kvpool_seams::end_of_wait(SETTLE));
        let (engine, arena) = (Arc::clone(&self.engine), Arc::clone(&self.arena));
        let id = MediumId(kvpool_seams::random());
        self.state = match Formatted::format(engine, arena, cluster, id) {
            Ok(formatted) => {
                tracing::info!(path = %self.path.display(), medium = %id, "medium formatted");
                State::Formatted(formatted)
            }
            Err(error) => self.failed(&error),
        };
    }

    /// Attaches the medium in the generation that the master names; true when that is durable.
    pub(super) fn attach(&mut self, cluster: ClusterId, order: &proto::AttachMedium) -> bool {
        let (wanted, segment) = (Generation(order.generation), SegmentId(order.segment_id));
        if let State::Attached {
            generation,
            segment: own,
            ..
        } = &self.state
            && (*generation, *own) == (wanted, segment)
        {
            return true;
        }
        self.detach(kvpool_seams::end_of_wait(SETTLE));
        let failed = State::Failed("the master attached it before it was formatted".into());
        let State::Formatted(formatted) = std::mem::replace(&mut self.state, failed) else {
            return false;
        };
        match formatted.attach(cluster, wanted) {
            Ok(medium) => {
                tracing::info!(path = %self.path.display(), medium = %medium.id(), generation = %wanted,
                    segment = %segment, "medium attached");
                self.state = State::Attached {
                    medium: Arc::new(medium),
                    segment,
                    generation: wanted,
                };
                true
            }
            Err(error) => {
                self.state = self.failed(&error);
                false
            }
        }
    }

    /// Ends the use of an attached medium, and reads its superblock again.
    pub(super) fn detach(&mut self, until: Instant) {
        let State::Attached { medium, .. } = &self.state else {
            return;
        };
        if let Err(error) = medium.detach(until) {
            tracing::warn!(path = %self.path.display(), %error, "the medium was not detached in order");
        }
        let opened = Formatted::open(Arc::clone(&self.engine), Arc::clone(&self.arena));
        self.state = match opened {
            Ok(Opened::Formatted(formatted)) => State::Formatted(formatted),
            Ok(Opened::Blank) => State::Blank,
            Err(error) => self.failed(&error),
        };
    }

    /// Makes what was stored durable. Does not wait for it.
    pub(super) fn flush(&self) {
        if let State::Attached { medium, .. } = &self.state
            && self.is_dirty.swap(false, Ordering::AcqRel)
        {
            let (path, is_dirty) = (self.path.clone(), Arc::clone(&self.is_dirty));
            medium.flush(move |flushed| {
                if let Err(error) = flushed {
                    is_dirty.store(true, Ordering::Release);
                    tracing::error!(path = %path.display(), %error, "the medium was not flushed");
                }
            });
        }
    }

    fn failed(&self, error: &MediumRefused) -> State {
        tracing::error!(path = %self.path.display(), %error, "the medium is not used any more");
        State::Failed(error.to_string())
    }
}
