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

/// The number of zones of a medium of ordinary size. About one and a half zones hold no copies: the written
/// zone is partly full, and the next one is emptied in advance.
///
/// The number is not 64. The 64th part of 2^n bytes would have no space for the header of its last block of 2^m
/// bytes, so it would take one block fewer.
const ZONES: u64 = 62;
/// The number of zones of a small medium. Its blocks would not fit into smaller zones.
const FEW_ZONES: u64 = 32;
/// The largest zone of a small medium, in bytes. A block of 1 MiB fits with its header.
const ROOMY_ZONE: u64 = (1 << 20) + GRANULE;
/// The largest zone in bytes. The last MiB is for headers: a block of 1 MiB or more has at most a granule of
/// header for each MiB. So 256 MiB of blocks fit with their headers.
const MOST_ZONE: u64 = 257 << 20;
/// The smallest zone in bytes. A medium with less than two such zones is not used.
const LEAST_ZONE: u64 = 1 << 20;
/// The most characters of the reason in a report of an unused medium.
const LONGEST_REASON: usize = 300;
/// How long to wait for the transfers of a medium before it is attached again.
pub(super) const SETTLE: Duration = Duration::from_secs(10);

/// A device or file, and its state.
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
    /// The pool of the medium, as its superblock said last.
    owner: Option<ClusterId>,
    /// The pool of the medium and the pool of the present master, if they differ.
    foreign: Option<(ClusterId, ClusterId)>,
    /// The last id of the medium. A medium that failed keeps it.
    last_id: Option<MediumId>,
    pub(super) front: Arc<Front>,
}

/// The part of a disk's state that can be read while another thread works with the disk.
#[derive(Debug)]
pub(super) struct Front {
    pub(super) health: Arc<Health>,
    /// Whether anything was stored since the last flush.
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

/// The disk cannot answer yet, because an earlier request has not ended.
#[derive(Debug)]
pub(super) struct NotYet;

#[derive(Debug)]
enum State {
    /// The device is empty, or its content may be overwritten.
    Blank,
    Formatted(Formatted),
    Attached {
        medium: Arc<Medium>,
        segment: SegmentId,
        generation: Generation,
    },
    /// The medium was detached, or the disk did not answer in time. Its superblock is read again
    /// once no request is in flight, since a write of the superblock may still be in progress.
    Unread(Option<MediumId>),
    /// The medium cannot be used until the node restarts, for this reason.
    Failed(String),
}

impl Disk {
    /// Reads the superblock of a device. Bytes that are not a medium's are refused, unless the settings
    /// permit to overwrite them.
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
        let shown = state.shown();
        let last_id = shown.id;
        let front = Front {
            health: Arc::new(Health::new(&path)),
            is_dirty: Arc::default(),
            shown: Mutex::new(shown),
        };
        Ok(Self {
            front: Arc::new(front),
            last_id,
            path,
            engine,
            arena: Arc::clone(arena),
            reset: config.reset,
            dwpd: config.dwpd,
            namespaces: config.namespaces.clone(),
            owner: match &state {
                State::Formatted(formatted) => Some(formatted.superblock().cluster),
                _ => None,
            },
            state,
            foreign: None,
        })
    }

    /// The number of requests to the device that have not ended.
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
        let shown = state.shown();
        self.last_id = shown.id.or(self.last_id);
        *self.front.shown.lock() = shown;
        match &state {
            State::Blank => (self.owner, self.last_id) = (None, None),
            State::Formatted(formatted) => self.owner = Some(formatted.superblock().cluster),
            State::Attached { .. } | State::Unread(_) | State::Failed(_) => {}
        }
        self.state = state;
    }

    /// The state of the medium's attachment.
    pub(super) fn attachment(&self) -> Attachment {
        match (&self.state, self.foreign) {
            (State::Failed(reason), _) => {
                Attachment::Refused(format!("{reason}. It is not used until the node restarts"))
            }
            (_, Some((theirs, ours))) => Attachment::Refused(format!(
                "it belongs to pool {theirs}, this is pool {ours}. Start the right master, or restart the node with \
                 `reset` to lose what it holds"
            )),
            (State::Attached { .. }, None) => Attachment::Attached,
            (State::Blank | State::Formatted(_) | State::Unread(_), None) => Attachment::Pending,
        }
    }

    /// The report of this medium to the master; `None` if the node can use the medium.
    pub(super) fn unused(&self) -> Option<proto::UnusedMedium> {
        match self.attachment() {
            Attachment::Refused(reason) => Some(unused(&self.path, &reason, self.last_id)),
            Attachment::Pending | Attachment::Attached => None,
        }
    }

    /// Whether the medium is of another pool than `cluster`, and must stay as it is.
    fn is_kept_for_another(&self, cluster: ClusterId) -> bool {
        let is_anothers = self.owner.is_some_and(|owner| owner != cluster);
        !self.reset && (is_anothers || self.foreign.is_some())
    }

    /// The node's offer of the medium to the master. A blank medium is formatted first. A medium that is attached for
    /// another pool is detached. `None` for a medium that cannot be used. Blocks until `until` at most.
    pub(super) fn offer(
        &mut self,
        cluster: ClusterId,
        until: Instant,
    ) -> Result<Option<proto::OfferedMedium>, NotYet> {
        let before = self.foreign.take();
        if self.owner != Some(cluster) {
            self.detach(until);
        }
        self.read_again(until)?;
        if let State::Formatted(formatted) = &self.state
            && formatted.superblock().cluster != cluster
        {
            if !self.reset {
                let theirs = formatted.superblock().cluster;
                self.foreign = Some((theirs, cluster));
                if self.foreign != before {
                    tracing::error!(path = %self.path.display(), %theirs, ours = %cluster,
                        "the medium belongs to another pool and is not used; `reset` in --ssd loses what it holds");
                }
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

    /// The bytes that may be written per day; zero for no limit.
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

    /// Formats the device as a new medium of this pool, unless it has a medium of another one that must stay. Blocks
    /// until `until` at most.
    pub(super) fn format(&mut self, cluster: ClusterId, until: Instant) -> Result<(), NotYet> {
        if self.is_kept_for_another(cluster) {
            tracing::error!(path = %self.path.display(), ours = %cluster,
                "the medium belongs to another pool and is not formatted");
            return Ok(());
        }
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

    /// Attaches the medium in the generation that the master names. Returns true when the generation is
    /// durable. Blocks until `until` at most.
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
        // Meanwhile other threads find the disk by this id.
        let before = std::mem::replace(&mut self.state, State::Unread(id));
        let State::Formatted(formatted) = before else {
            let why = "the master attached it before it was formatted";
            self.set(State::Failed(why.into()));
            return Ok(false);
        };
        match formatted.attach_until(cluster, wanted, Some(until)) {
            // The write of the second superblock did not end in time.
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

    /// Detaches the medium, after a flush of its stores. Blocks until `until` at most.
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

    /// Begins a flush of the stores, without waiting for it.
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

    /// Records the reason why the disk cannot be used: for good, or until its requests have ended.
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

/// The report of a medium that the node does not use, to the master.
pub(super) fn unused(path: &Path, reason: &str, medium: Option<MediumId>) -> proto::UnusedMedium {
    proto::UnusedMedium {
        path: path.display().to_string(),
        reason: reason.chars().take(LONGEST_REASON).collect(),
        medium_id: medium.map_or_else(bytes::Bytes::new, |id| {
            bytes::Bytes::copy_from_slice(&id.to_bytes())
        }),
    }
}

/// The size of a zone in bytes, for a medium with `size` bytes for blocks. A medium that a pool knows keeps its
/// zones.
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
            (1 << 34, 257 * MIB),
            (1 << 40, 257 * MIB),
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

    /// Blocks of a KV cache often have 2^n bytes, and fill large media.
    #[test]
    fn a_zone_of_a_large_medium_takes_256_mib_of_blocks() {
        for size in [1 << 34, 100_000_000_000, 1 << 40] {
            let zone = zone_of(size - DATA_START);
            for block in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
                let taken = zone / footprint(Length(block * MIB)).unwrap().0;
                assert_eq!(taken, 256 / block, "blocks of {block} MiB of {size} bytes");
            }
        }
    }

    /// A transfer of the longest block that a zone takes would wait for memory for ever.
    #[test]
    fn the_arena_takes_every_block_that_a_zone_takes() {
        assert!(u64::try_from(super::super::opening::ARENA).unwrap() >= MOST_ZONE);
    }
}
