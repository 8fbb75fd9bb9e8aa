//! The ranges of this process's memory that peers may touch.

use crate::host::Abort;
use crate::memory::Slice;
use crate::rdma::Exposure;
use kvpool_types::wire::rdma::Registered;
use kvpool_types::{Extent, Length, Offset};
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a receive whose connection was ended gets to notice.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// Why a range is not exposed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExposeError {
    /// It shares bytes with one that is.
    #[error("{length} bytes at {address:#x} overlap memory that is exposed already, at {other:#x}")]
    Overlap {
        /// Where it would begin.
        address: u64,
        /// Its length in bytes.
        length: u64,
        /// Where the other one begins.
        other: u64,
    },
    /// It holds no bytes, or only such as cannot be written.
    #[error("memory that is exposed has at least one byte and can be written")]
    Unfit,
    /// The RDMA ports of this host do not take it, for one because so much memory may not be locked.
    #[error("{0}")]
    NoPort(String),
}

/// A range has been withdrawn, but a transfer still touches it, or an RDMA port would still let a peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a transfer still touches the memory at {0:#x}; it must not be freed")]
pub struct StillTouched(pub u64);

/// Memory by its address.
#[derive(Default)]
pub(super) struct Exposed(Mutex<Ranges>);

#[derive(Default)]
struct Ranges {
    by_start: BTreeMap<u64, Range>,
    /// How many there have been.
    count: u64,
}

struct Range {
    /// Its hook tells when neither the table nor a transfer has a part of it any more.
    whole: Slice,
    drained: Arc<DrainLatch>,
    receives: Arc<ActiveReceives>,
    /// What lets peers' devices touch it.
    exposure: Option<Exposure>,
    /// Its place in the order of exposing.
    number: u64,
}

/// The receives into one range.
#[derive(Default)]
pub(super) struct ActiveReceives(Mutex<ReceiveTable>);

#[derive(Default)]
struct ReceiveTable {
    /// How many there have been.
    count: u64,
    under_way: HashMap<u64, Arc<dyn Abort>>,
}

/// Keeps a receive on the list of those that a withdrawal ends.
pub(super) struct ReceiveGuard {
    receives: Arc<ActiveReceives>,
    number: u64,
}

impl Drop for ReceiveGuard {
    fn drop(&mut self) {
        let gone = self.receives.0.lock().under_way.remove(&self.number);
        drop(gone);
    }
}

impl ActiveReceives {
    pub(super) fn enter(self: &Arc<Self>, abort: Arc<dyn Abort>) -> ReceiveGuard {
        let mut list = self.0.lock();
        list.count += 1;
        let number = list.count;
        list.under_way.insert(number, abort);
        ReceiveGuard {
            receives: Arc::clone(self),
            number,
        }
    }

    fn abort(&self) {
        let all: Vec<_> = self.0.lock().under_way.values().cloned().collect();
        for abort in all {
            abort.abort();
        }
    }
}

/// Counted by every part that is out.
struct DrainToken(Arc<DrainLatch>);

#[derive(Default)]
struct DrainLatch {
    is: Mutex<bool>,
    changed: Condvar,
}

impl Drop for DrainToken {
    fn drop(&mut self) {
        *self.0.is.lock() = true;
        self.0.changed.notify_all();
    }
}

impl DrainLatch {
    fn wait_until(&self, deadline: Instant) -> bool {
        let mut is = self.is.lock();
        while !*is {
            if self.changed.wait_until(&mut is, deadline).timed_out() {
                break;
            }
        }
        *is
    }
}

impl Exposed {
    /// Lets peers touch a range: over TCP, and through the ports that it is registered with.
    pub(super) fn insert(
        &self,
        memory: Slice,
        exposure: Option<Exposure>,
    ) -> Result<(), ExposeError> {
        let (address, length) = (memory.as_ptr().addr() as u64, memory.length().0);
        if length == 0 || !memory.is_writable() {
            return Err(ExposeError::Unfit);
        }
        let mut ranges = self.0.lock();
        let before = ranges.by_start.range(..address + length).next_back();
        if let Some((start, other)) = before
            && start + other.whole.length().0 > address
        {
            return Err(ExposeError::Overlap {
                address,
                length,
                other: *start,
            });
        }
        let drained = Arc::<DrainLatch>::default();
        let number = ranges.count;
        ranges.count += 1;
        let range = Range {
            whole: memory.with_hook(Arc::new(DrainToken(Arc::clone(&drained)))),
            drained,
            receives: Arc::default(),
            exposure,
            number,
        };
        ranges.by_start.insert(address, range);
        Ok(())
    }

    /// Lets no new transfer touch the range that begins at `address`, and waits for those that do: for
    /// `patience`, after which receives into it are ended. Then no port lets a peer touch it any more,
    /// whose reads nobody hears of otherwise. False when there is none.
    pub(super) fn remove(&self, address: u64, timeout: Duration) -> Result<bool, StillTouched> {
        let Some(range) = self.0.lock().by_start.remove(&address) else {
            return Ok(false);
        };
        let Range {
            whole,
            drained,
            receives,
            exposure,
            ..
        } = range;
        drop(whole);
        let mut is_drained = drained.wait_until(Instant::now() + timeout);
        if !is_drained {
            receives.abort();
            is_drained = drained.wait_until(Instant::now() + ABORT_GRACE);
        }
        let ended = exposure.map_or(Ok(()), Exposure::end);
        if let Err(error) = &ended {
            tracing::error!(%error, "memory at {address:#x} could not be deregistered");
        }
        if is_drained && ended.is_ok() {
            return Ok(true);
        }
        Err(StillTouched(address))
    }

    /// Where the ports find the range that an extent lies in; `None` when it does not lie in one.
    pub(super) fn places(&self, of: &Extent) -> Option<Vec<Registered>> {
        let ranges = self.0.lock();
        let (start, range) = ranges.by_start.range(..=of.offset.0).next_back()?;
        range.whole.slice(Offset(of.offset.0 - start), of.length)?;
        let places = range.exposure.iter().flat_map(|it| it.places(of.segment));
        Some(places.collect())
    }

    /// Where every range begins.
    pub(super) fn starts(&self) -> Vec<u64> {
        self.0.lock().by_start.keys().copied().collect()
    }

    /// A part of an exposed range, and who else writes into that; `None` when it does not lie in one.
    pub(super) fn part(
        &self,
        address: u64,
        length: Length,
    ) -> Option<(Slice, Arc<ActiveReceives>)> {
        let ranges = self.0.lock();
        let (start, range) = ranges.by_start.range(..=address).next_back()?;
        let part = range.whole.slice(Offset(address - start), length)?;
        Some((part, Arc::clone(&range.receives)))
    }

    /// Where the range begins that was exposed before all others that still are.
    pub(super) fn first(&self) -> Option<u64> {
        let ranges = self.0.lock();
        let first = ranges.by_start.iter().min_by_key(|(_, range)| range.number);
        first.map(|(start, _)| *start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Region;

    fn region() -> (Region, u64) {
        let region = Region::allocate(Length(8192));
        let address = region.whole().as_ptr().addr() as u64;
        (region, address)
    }

    #[test]
    fn a_part_lies_wholly_inside_one_range() {
        let (region, at) = region();
        let exposed = Exposed::default();
        let middle = region.slice(Offset(1024), Length(1024)).unwrap();
        exposed.insert(middle, None).unwrap();
        for (from, length, inside) in [
            (1024, 1024, true),
            (1024, 1, true),
            (2047, 1, true),
            (1023, 1, false),
            (1023, 2, false),
            (2048, 1, false),
            (2047, 2, false),
            (1024, 1025, false),
            (1024, u64::MAX, false),
        ] {
            let part = exposed.part(at + from, Length(length));
            assert_eq!(part.is_some(), inside, "{length} from {from}");
        }
        assert!(exposed.part(u64::MAX, Length(1)).is_none());
        assert!(exposed.part(0, Length(1)).is_none());
    }

    #[test]
    fn ranges_do_not_overlap() {
        let (region, at) = region();
        let exposed = Exposed::default();
        let part = |from, length| region.slice(Offset(from), Length(length)).unwrap();
        exposed.insert(part(1024, 1024), None).unwrap();
        for (from, length) in [(1024, 1024), (0, 1025), (2047, 10), (1100, 10), (0, 8192)] {
            let refused = exposed.insert(part(from, length), None);
            let other = at + 1024;
            assert!(matches!(refused, Err(ExposeError::Overlap { other: o, .. }) if o == other));
        }
        exposed.insert(part(0, 1024), None).unwrap();
        exposed.insert(part(2048, 10), None).unwrap();
        assert_eq!(exposed.insert(part(4096, 0), None), Err(ExposeError::Unfit));
        assert_eq!(exposed.first(), Some(at + 1024));
    }

    #[test]
    fn withdrawing_waits_for_every_part() {
        let (region, at) = region();
        let exposed = Exposed::default();
        exposed.insert(region.whole(), None).unwrap();
        let (part, _) = exposed.part(at, Length(16)).unwrap();
        let ended = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            let ended = Instant::now();
            drop(part);
            ended
        });
        assert_eq!(exposed.remove(at, Duration::from_secs(10)), Ok(true));
        assert!(Instant::now() >= ended.join().unwrap());
        assert!(exposed.part(at, Length(16)).is_none());
        assert_eq!(exposed.remove(at, Duration::from_secs(10)), Ok(false));
    }
}
