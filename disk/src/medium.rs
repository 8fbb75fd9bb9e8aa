//! The layout of a medium on a disk, and the proof of every block that is read from it.
//!
//! ```text
//! 0          4 KiB      8 KiB          1 MiB (DATA_START)
//! superblock superblock zeros, kept ...| extents: header, data, padding; each whole granules ...
//! ```
//!
//! The master decides the offset of each extent and remembers it. The medium has no directory of its own. A
//! caller names an extent, and the bytes on the disk must prove that they are the expected block. So a lost
//! or torn write costs a miss, and never gives wrong bytes:
//!
//! - [`Superblock`] says to which pool the medium belongs. [`judge()`] says whether the master accepts it.
//! - [`Medium::store`] writes header and data in one request.
//! - [`Medium::load_into_arena`] reads a block into a buffer. [`Arrival::verify`] returns bytes only if two
//!   conditions hold. The header is the expected block's, at this offset of this medium. Every chunk has its
//!   checksum. The checksums of all chunks combine to the block's checksum, which the master names.
//! - [`Medium::load_into`] reads a block straight into the memory where it will lie. [`Landing::verify`] proves
//!   it there.
//! - [`Scan`] reports the extents in a zone.
//!
//! ```text
//! open ─► Blank ──► format ─┐
//!    └──► Formatted ────────┴► attach(cluster, generation) ─► Medium ─► detach
//! ```

mod bad_ranges;
mod copies;
mod erase;
mod error;
mod fields;
mod flights;
mod header;
mod load;
mod scan;
mod store;
mod superblock;
mod suspects;
#[cfg(test)]
mod tests;
mod wanted;

pub use bad_ranges::{BadRanges, MAX_BAD_RANGES};
pub use erase::erase;
pub use error::{DetachError, Invalid, MediumRefused, StoreError, WRONG_KINDS, Wrong};
pub use header::{Header, HeaderWrong, StoreNumber, footprint, header_bytes};
pub use kvpool_types::medium::{DATA_START, Generation, Judgement, judge};
pub use load::{Arrival, Landing, Loaded};
pub use scan::{Found, Scan, Step};
pub use store::{Staged, Stamp};
pub use superblock::{FORMAT, Superblock, Unreadable};
pub use wanted::{Expected, Wanted};

use crate::{Arena, Engine, GRANULE};
use copies::Copies;
use error::WrongCounts;
use flights::Flights;
use kvpool_types::{ClusterId, MediumId};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;
use suspects::Suspects;

/// The content of a device.
#[derive(Debug)]
pub enum Opened {
    /// The whole space for superblocks is zero: this is a new device or file.
    Blank,
    /// A medium of kvpool.
    Formatted(Formatted),
}

/// A medium whose superblock was read or written, and which is not attached yet.
#[derive(Debug)]
pub struct Formatted {
    copies: Copies,
    superblock: Superblock,
}

impl Formatted {
    /// Reads the superblocks of a device. This and all methods of `Formatted` block on the device.
    ///
    /// # Errors
    ///
    /// [`MediumRefused`] when the device is no medium of this release, is too small, or failed.
    pub fn open(engine: Arc<dyn Engine>, arena: Arc<Arena>) -> Result<Opened, MediumRefused> {
        Self::open_until(engine, arena, None)
    }

    /// [`open`](Self::open) that gives up at `until`. The late request continues in the background.
    pub fn open_until(
        engine: Arc<dyn Engine>,
        arena: Arc<Arena>,
        until: Option<Instant>,
    ) -> Result<Opened, MediumRefused> {
        let size = usable(&*engine)?;
        let (copies, found) = Copies::read(engine, arena, until)?;
        let Some(superblock) = copies::newest(found)? else {
            let rest = 2 * GRANULE as u64..DATA_START;
            return match copies.is_zero(rest)? {
                true => Ok(Opened::Blank),
                false => Err(MediumRefused::Foreign),
            };
        };
        if size < superblock.size {
            return Err(MediumRefused::Shrunk {
                device: size,
                medium: superblock.size,
            });
        }
        Ok(Opened::Formatted(Self { copies, superblock }))
    }

    /// Formats the device as a new medium of this cluster, with a new id, whatever the device held
    /// before. Call this only for a blank device, or when the operator asked for it. The bad ranges
    /// of a former medium stay bad.
    ///
    /// # Errors
    ///
    /// [`MediumRefused`] when the device is too small, when the arena has no free buffer, or when
    /// the device failed.
    pub fn format(
        engine: Arc<dyn Engine>,
        arena: Arc<Arena>,
        cluster: ClusterId,
        medium: MediumId,
    ) -> Result<Self, MediumRefused> {
        Self::format_until(engine, arena, cluster, medium, None)
    }

    /// [`format`](Self::format) that gives up at `until`. The late request continues in the background.
    pub fn format_until(
        engine: Arc<dyn Engine>,
        arena: Arc<Arena>,
        cluster: ClusterId,
        medium: MediumId,
        until: Option<Instant>,
    ) -> Result<Self, MediumRefused> {
        let size = usable(&*engine)?;
        let (mut copies, found) = Copies::read(engine, arena, until)?;
        let former = copies::newest(found).ok().flatten();
        let mut superblock = Superblock {
            cluster,
            medium,
            generation: Generation(0),
            clean: true,
            size,
            sequence: 0,
            bad: former.map(|former| former.bad).unwrap_or_default(),
        };
        copies.write_over(&mut superblock, false)?;
        Ok(Self { copies, superblock })
    }

    /// The superblock of the medium.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Attaches the medium in this generation. On return the generation is durable, and the medium is marked
    /// as in use.
    ///
    /// # Errors
    ///
    /// [`MediumRefused::OtherCluster`] for a medium of another cluster. Otherwise the device is too
    /// small or failed.
    pub fn attach(
        self,
        cluster: ClusterId,
        generation: Generation,
    ) -> Result<Medium, MediumRefused> {
        self.attach_until(cluster, generation, None)
    }

    /// [`attach`](Self::attach) that gives up at `until`. The late request continues in the background.
    pub fn attach_until(
        mut self,
        cluster: ClusterId,
        generation: Generation,
        until: Option<Instant>,
    ) -> Result<Medium, MediumRefused> {
        if self.superblock.cluster != cluster {
            return Err(MediumRefused::OtherCluster {
                theirs: self.superblock.cluster,
                ours: cluster,
            });
        }
        self.superblock.generation = generation;
        self.superblock.clean = false;
        self.superblock.size = usable(&*self.copies.engine)?;
        self.copies.until = until;
        self.copies.write(&mut self.superblock)?;
        self.copies.until = None;
        Ok(Medium {
            engine: Arc::clone(&self.copies.engine),
            shared: Arc::new(Shared {
                id: self.superblock.medium,
                size: self.superblock.size,
                engine: Arc::downgrade(&self.copies.engine),
                bad: Mutex::new(self.superblock.bad.clone()),
                suspects: Suspects::default(),
                flights: Arc::default(),
                wrong: WrongCounts::default(),
                flush_failed: AtomicBool::new(false),
            }),
            formatted: Mutex::new(self),
        })
    }

    /// A scan for extents in a range; `None` when the arena has no free buffer.
    pub fn scan(&self, range: Range<u64>) -> Option<Scan> {
        let Copies { engine, arena, .. } = &self.copies;
        Scan::new(Arc::clone(engine), arena, self.superblock.medium, range)
    }
}

/// The bytes of the device in whole granules. An error if the device is too small for a medium.
fn usable(engine: &dyn Engine) -> Result<u64, MediumRefused> {
    let size = engine.size() / GRANULE as u64 * GRANULE as u64;
    (size > DATA_START)
        .then_some(size)
        .ok_or(MediumRefused::TooSmall(engine.size()))
}

/// An attached medium.
#[derive(Debug)]
pub struct Medium {
    engine: Arc<dyn Engine>,
    shared: Arc<Shared>,
    /// Locked during writes of the superblock, never by stores and loads.
    formatted: Mutex<Formatted>,
}

/// The state that the medium shares with stores and loads in flight.
#[derive(Debug)]
struct Shared {
    id: MediumId,
    size: u64,
    /// Not a reference that keeps the engine: requests of the engine hold this state.
    engine: Weak<dyn Engine>,
    bad: Mutex<BadRanges>,
    suspects: Suspects,
    flights: Arc<Flights>,
    wrong: WrongCounts,
    flush_failed: AtomicBool,
}

impl Medium {
    /// The medium's id.
    pub fn id(&self) -> MediumId {
        self.shared.id
    }

    /// The size of the medium in bytes, with the superblocks.
    pub fn size(&self) -> u64 {
        self.shared.size
    }

    /// The bytes for extents. This is the size of the master's segment, whose offset 0 is [`DATA_START`].
    pub fn capacity(&self) -> u64 {
        self.shared.size - DATA_START
    }

    /// The ranges that must not be used. A range is added where a load or store fails that began after an earlier
    /// one had failed there. Another one of its kind, which also began after that, has succeeded.
    /// [`detach`](Self::detach) keeps the ranges.
    pub fn bad_ranges(&self) -> BadRanges {
        self.shared.bad.lock().clone()
    }

    /// The number of failed loads since the attach, by kind.
    pub fn wrong_counts(&self) -> [(&'static str, u64); WRONG_KINDS.len()] {
        self.shared.wrong.read()
    }

    /// Detaches the medium: refuses new stores and loads, waits for those in flight, flushes, and marks the
    /// medium as clean. Blocks until `until` at most.
    ///
    /// After an error a write of a superblock may still be under way. Open the device again only when its
    /// engine has no request in flight.
    pub fn detach(&self, until: Instant) -> Result<(), DetachError> {
        self.shared
            .flights
            .close(until)
            .map_err(DetachError::Busy)?;
        let mut formatted = self.formatted.lock();
        let Formatted { copies, superblock } = &mut *formatted;
        copies.until = Some(until);
        copies
            .flush()
            .inspect_err(|_| self.shared.note_failed_flush())?;
        if self.shared.flush_failed.load(Ordering::Acquire) {
            return Err(DetachError::FlushFailed);
        }
        superblock.bad = self.bad_ranges();
        superblock.clean = true;
        Ok(copies.write(superblock)?)
    }

    /// A scan for extents in a range; `None` when the arena has no free buffer. The scan reports bad sectors,
    /// but does not add them to the bad ranges.
    pub fn scan(&self, range: Range<u64>) -> Option<Scan> {
        self.formatted.lock().scan(range)
    }
}

impl Shared {
    /// The byte range on the medium of an extent at `offset` for a block of `length` bytes. An error if the
    /// extent cannot lie there.
    fn place(&self, offset: u64, length: u64) -> Result<Range<u64>, Invalid> {
        let footprint = footprint(length).ok_or(Invalid::Length(length))?;
        let end = offset.checked_add(footprint);
        let range = offset..end.ok_or(Invalid::Place(offset))?;
        self.check_range(&range).map(|()| range)
    }

    /// Whether a range is whole granules of the medium's data.
    fn check_range(&self, range: &Range<u64>) -> Result<(), Invalid> {
        let aligned = |place: u64| place.is_multiple_of(GRANULE as u64);
        let inside = DATA_START <= range.start && range.start < range.end && range.end <= self.size;
        (inside && aligned(range.start) && aligned(range.end))
            .then_some(())
            .ok_or(Invalid::Place(range.start))
    }

    fn mark_bad(&self, range: Range<u64>) {
        let (start, end) = (range.start, range.end);
        if self.bad.lock().add(range) {
            let medium = self.id;
            tracing::warn!(%medium, start, end, "this range failed and is not used again");
        }
    }

    fn note_failed_flush(&self) {
        self.flush_failed.store(true, Ordering::Release);
    }
}
