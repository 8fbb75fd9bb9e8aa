//! One medium of the node, in each of its states.

use super::health::Health;
use super::{Attachment, SsdConfig};
use kvpool_disk::medium::{Formatted, Medium, MediumRefused, Opened};
use kvpool_disk::{Arena, Engine};
use kvpool_proto as proto;
use kvpool_types::medium::{DATA_START, GRANULE, Generation};
use kvpool_types::{ClusterId, MediumId, SegmentId};
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Zones of a medium that has no need of larger or smaller ones. About one and a half zones hold no copies: the
/// written zone is partly full, and the next one is emptied ahead of need.
/// Of 2^n bytes, a 64th has no room for the header of its last block of 2^m bytes, and takes one block less.
const ZONES: u64 = 62;
/// Zones of a small medium, whose blocks would not fit into smaller ones.
const FEW_ZONES: u64 = 32;
/// The zones of a small medium grow up to here: a block of 1 MiB and its header fit.
const ROOMY_ZONE: u64 = (1 << 20) + GRANULE;
/// The largest zone. The arena of the transfers takes no longer block.
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
    pub(super) front: Arc<Front>,
}

/// What can be known of a disk while somebody works with it.
#[derive(Debug)]
pub(super) struct Front {
    pub(super) health: Arc<Health>,
    /// Set when something was stored since the last flush.
    pub(super) is_dirty: Arc<AtomicBool>,
    shown: Mutex<Shown>,
}

#[derive(Debug)]
struct Shown {
    id: Option<MediumId>,
    attached: Option<(SegmentId, Arc<Medium>)>,
}

impl Front {
    /// The medium's id, if it is formatted.
    pub(super) fn id(&self) -> Option<MediumId> {
        self.shown.lock().id
    }

    /// The attached medium with this segment.
    pub(super) fn attached(&self, segment: SegmentId) -> Option<Arc<Medium>> {
        let shown = self.shown.lock();
        let attached = shown.attached.as_ref();
        let attached = attached.filter(|(own, _)| *own == segment);
        attached.map(|(_, medium)| Arc::clone(medium))
    }
}

/// The disk cannot say yet: a request of before has not ended.
#[derive(Debug)]
pub(super) struct NotYet;

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
    /// The medium was detached, or the disk did not answer in time. What it holds is read when no request is
    /// in flight: until then a superblock may still be written.
    Unread(Option<MediumId>),
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
        let front = Front {
            health: Arc::new(Health::new(&path)),
            is_dirty: Arc::default(),
            shown: Mutex::new(state.shown()),
        };
        Ok(Self {
            front: Arc::new(front),
            path,
            engine,
            arena: Arc::clone(arena),
            reset: config.reset,
            dwpd: config.dwpd,
            namespaces: config.namespaces.clone(),
            state,
            foreign: None,
        })
    }

    /// Requests to the device that have not ended.
    pub(super) fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The medium's id, if it is formatted.
    pub(super) fn id(&self) -> Option<MediumId> {
        self.front.id()
    }

    fn set(&mut self, state: State) {
        *self.front.shown.lock() = state.shown();
        self.state = state;
    }

    /// Whether the medium is in use.
    pub(super) fn attachment(&self) -> Attachment {
        match (&self.state, self.foreign) {
            (State::Failed(reason), _) => Attachment::Refused(reason.clone()),
            (_, Some(theirs)) => {
                Attachment::Refused(format!("the medium belongs to another pool, {theirs}"))
            }
            (State::Attached { .. }, None) => Attachment::Attached,
            (State::Blank | State::Formatted(_) | State::Unread(_), None) => Attachment::Pending,
        }
    }

    /// What the node says of the medium. A blank one is formatted first. `None` for a medium that
    /// cannot be used. Blocks until `until` at most.
    pub(super) fn offer(
        &mut self,
        cluster: ClusterId,
        until: Instant,
    ) -> Result<Option<proto::OfferedMedium>, NotYet> {
        self.foreign = None;
        self.read_again(until)?;
        if let State::Formatted(formatted) = &self.state
            && formatted.superblock().cluster != cluster
        {
            if !self.reset {
                self.foreign = Some(formatted.superblock().cluster);
                tracing::error!(path = %self.path.display(), theirs = %formatted.superblock().cluster, ours = %cluster,
                    "the medium belongs to another pool and is not used; to lose what it holds, add reset to --ssd");
                return Ok(None);
            }
            self.set(State::Blank);
        }
        if matches!(self.state, State::Blank) {
            self.format(cluster, until)?;
        }
        let generation = match &self.state {
            State::Formatted(formatted) => formatted.superblock().generation,
            State::Attached { generation, .. } => *generation,
            State::Blank | State::Unread(_) | State::Failed(_) => return Ok(None),
        };
        let Some(id) = self.id() else {
            return Ok(None);
        };
        let size = self.engine.size() / GRANULE * GRANULE - DATA_START;
        let zone = zone_of(size);
        Ok(Some(proto::OfferedMedium {
            medium_id: bytes::Bytes::copy_from_slice(&id.to_bytes()),
            generation: generation.0,
            size_bytes: size,
            zone_bytes: zone,
            state: self.front.health.state(kvpool_seams::boot_time()).into(),
            budget_bytes_per_day: self.budget(size),
            namespaces: self.namespaces.clone(),
        }))
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

    /// Makes it a new medium of this pool. Blocks until `until` at most.
    pub(super) fn format(&mut self, cluster: ClusterId, until: Instant) -> Result<(), NotYet> {
        self.detach(until);
        if matches!(self.state, State::Unread(_)) && self.in_flight() > 0 {
            return Err(NotYet);
        }
        let (engine, arena) = (Arc::clone(&self.engine), Arc::clone(&self.arena));
        let id = MediumId(kvpool_seams::random());
        match Formatted::format_until(engine, arena, cluster, id, Some(until)) {
            Ok(formatted) => {
                tracing::info!(path = %self.path.display(), medium = %id, "medium formatted");
                self.set(State::Formatted(formatted));
                Ok(())
            }
            Err(error) => self.failed(&error, self.id()),
        }
    }

    /// Attaches the medium in the generation that the master names; true when that is durable. Blocks until
    /// `until` at most.
    pub(super) fn attach(
        &mut self,
        cluster: ClusterId,
        order: &proto::AttachMedium,
        until: Instant,
    ) -> Result<bool, NotYet> {
        let (wanted, segment) = (Generation(order.generation), SegmentId(order.segment_id));
        if let State::Attached {
            generation,
            segment: own,
            ..
        } = &self.state
            && (*generation, *own) == (wanted, segment)
        {
            return Ok(true);
        }
        self.detach(until);
        self.read_again(until)?;
        let id = self.id();
        // Others find the disk by its id meanwhile.
        let before = std::mem::replace(&mut self.state, State::Unread(id));
        let State::Formatted(formatted) = before else {
            let why = "the master attached it before it was formatted";
            self.set(State::Failed(why.into()));
            return Ok(false);
        };
        match formatted.attach_until(cluster, wanted, Some(until)) {
            // The second copy of the superblock did not end in time.
            Ok(_) if self.in_flight() > 0 => {
                self.set(State::Unread(id));
                Err(NotYet)
            }
            Ok(medium) => {
                tracing::info!(path = %self.path.display(), medium = %medium.id(), generation = %wanted,
                    segment = %segment, "medium attached");
                self.set(State::Attached {
                    medium: Arc::new(medium),
                    segment,
                    generation: wanted,
                });
                Ok(true)
            }
            Err(error) => self.failed(&error, id).map(|()| false),
        }
    }

    /// Ends the use of an attached medium. What was stored is flushed. Blocks until `until` at most.
    pub(super) fn detach(&mut self, until: Instant) {
        let State::Attached { medium, .. } = &self.state else {
            return;
        };
        let medium = Arc::clone(medium);
        self.set(State::Unread(Some(medium.id())));
        if let Err(error) = medium.detach(until) {
            tracing::warn!(path = %self.path.display(), %error, "the medium was not detached in order");
        }
    }

    /// Reads the superblock of a medium that is [`State::Unread`].
    fn read_again(&mut self, until: Instant) -> Result<(), NotYet> {
        let State::Unread(id) = self.state else {
            return Ok(());
        };
        if self.in_flight() > 0 {
            return Err(NotYet);
        }
        let (engine, arena) = (Arc::clone(&self.engine), Arc::clone(&self.arena));
        match Formatted::open_until(engine, arena, Some(until)) {
            Ok(Opened::Formatted(formatted)) => self.set(State::Formatted(formatted)),
            Ok(Opened::Blank) => self.set(State::Blank),
            Err(error) => return self.failed(&error, id),
        }
        Ok(())
    }

    /// Makes what was stored durable. Does not wait for it.
    pub(super) fn flush(&self) {
        if let State::Attached { medium, .. } = &self.state
            && self.front.is_dirty.swap(false, Ordering::AcqRel)
        {
            let (path, is_dirty) = (self.path.clone(), Arc::clone(&self.front.is_dirty));
            medium.flush(move |flushed| {
                if let Err(error) = flushed {
                    is_dirty.store(true, Ordering::Release);
                    tracing::error!(path = %path.display(), %error, "the medium was not flushed");
                }
            });
        }
    }

    /// Notes why the disk cannot be used, for good or until it has answered.
    fn failed(&mut self, error: &MediumRefused, id: Option<MediumId>) -> Result<(), NotYet> {
        let path = self.path.display();
        if error.may_pass() || self.in_flight() > 0 {
            tracing::warn!(%path, %error, "the medium is tried again");
            self.set(State::Unread(id));
            return Err(NotYet);
        }
        tracing::error!(%path, %error, "the medium is not used any more");
        self.set(State::Failed(error.to_string()));
        Ok(())
    }
}

/// The bytes of a zone, of a medium with `size` bytes for blocks. A medium that a pool knows keeps its zones.
fn zone_of(size: u64) -> u64 {
    let roomy = (size / FEW_ZONES).min(ROOMY_ZONE);
    let zone = (size / ZONES).max(roomy) / GRANULE * GRANULE;
    zone.clamp(LEAST_ZONE, MOST_ZONE)
}

impl State {
    fn shown(&self) -> Shown {
        let (id, attached) = match self {
            Self::Formatted(formatted) => (Some(formatted.superblock().medium), None),
            Self::Attached {
                medium, segment, ..
            } => (Some(medium.id()), Some((*segment, Arc::clone(medium)))),
            Self::Unread(id) => (*id, None),
            Self::Blank | Self::Failed(_) => (None, None),
        };
        Shown { id, attached }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::Length;
    use kvpool_types::medium::footprint;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_zone_is_a_small_part_of_its_medium_and_takes_a_block_of_a_mebibyte() {
        let block = footprint(Length(MIB)).unwrap().0;
        for (size, zone) in [
            (2 * MIB, MIB),
            (32 * MIB, MIB),
            (40 * MIB, block),
            (62 * MIB, block),
            (124 * MIB, 2 * MIB),
            (10_000 * 8192, 1_318_912),
            (62 << 28, 256 * MIB),
            (1 << 34, 256 * MIB),
            (1 << 40, 256 * MIB),
        ] {
            assert_eq!(zone_of(size), zone, "{size}");
            assert!(size / zone >= 2 && zone.is_multiple_of(GRANULE));
        }
    }

    /// The header of a block takes a granule or more beside bytes that fill a zone.
    #[test]
    fn zones_have_room_for_the_headers_of_large_blocks() {
        for size in [1 << 30, 3 << 29, 1 << 32] {
            let zone = zone_of(size - DATA_START);
            for block in [4, 8, 16] {
                let taken = zone / footprint(Length(block * MIB)).unwrap().0;
                assert_eq!(
                    taken,
                    zone / (block * MIB),
                    "{block} MiB in a zone of {zone}"
                );
            }
        }
    }
}
