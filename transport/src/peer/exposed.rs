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

/// How long an aborted receive may take to end.
const ABORT_GRACE: Duration = Duration::from_secs(2);

/// Why a range cannot be exposed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExposeError {
    /// The range overlaps an exposed range.
    #[error("{length} bytes at {address:#x} overlap memory that is exposed already, at {other:#x}")]
    Overlap {
        /// The first address of the new range.
        address: u64,
        /// The new range's length in bytes.
        length: u64,
        /// The first address of the exposed range.
        other: u64,
    },
    /// The range is empty or read-only.
    #[error("exposed memory must be writable and not empty")]
    Unfit,
    /// The RDMA ports refuse the range, for example because the process may not lock so much
    /// memory.
    #[error("{0}")]
    NoPort(String),
}

/// The range is withdrawn, but a transfer or an RDMA port may still touch it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a transfer still touches the memory at {0:#x}; it must not be freed")]
pub struct StillTouched(pub u64);

/// The exposed ranges, by address.
#[derive(Default)]
pub(super) struct Exposed(Mutex<Ranges>);

#[derive(Default)]
struct Ranges {
    by_start: BTreeMap<u64, Range>,
    /// The number of ranges exposed so far.
    count: u64,
}

struct Range {
    /// Its hook trips the latch when neither the table nor a transfer holds a part of the range.
    whole: Slice,
    drained: Arc<DrainLatch>,
    receives: Arc<ActiveReceives>,
    /// The registrations with the RDMA ports.
    exposure: Option<Exposure>,
    /// The position of the range in the order of exposing.
    number: u64,
}

/// The receives in progress into one range.
#[derive(Default)]
pub(super) struct ActiveReceives(Mutex<ReceiveTable>);

#[derive(Default)]
struct ReceiveTable {
    /// The number of receives so far.
    count: u64,
    under_way: HashMap<u64, Arc<dyn Abort>>,
}

/// Keeps a receive in the table of receives that a withdrawal aborts.
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

    pub(super) fn abort(&self) {
        let all: Vec<_> = self.0.lock().under_way.values().cloned().collect();
        for abort in all {
            abort.abort();
        }
    }
}

/// Every lent part holds one. The drop of the last one trips the latch.
pub(super) struct DrainToken(pub(super) Arc<DrainLatch>);

#[derive(Default)]
pub(super) struct DrainLatch {
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
    pub(super) fn wait_until(&self, deadline: Instant) -> bool {
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
    /// Exposes a range over TCP and through the ports that it is registered with.
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

    /// Withdraws the range that begins at `address`. It admits no new transfer, and waits until the present
    /// ones end. After `timeout` it aborts receives into the range. Finally it deregisters the range from the
    /// ports, whose reads this process cannot observe. Returns false when no range begins there.
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
            tracing::error!(%error, "deregistering the memory at {address:#x} failed");
        }
        if is_drained && ended.is_ok() {
            return Ok(true);
        }
        Err(StillTouched(address))
    }

    /// The registrations of the range around an extent; `None` when the extent does not lie in one
    /// range.
    pub(super) fn registrations(&self, of: &Extent) -> Option<Vec<Registered>> {
        let ranges = self.0.lock();
        let (start, range) = ranges.by_start.range(..=of.offset.0).next_back()?;
        range.whole.slice(Offset(of.offset.0 - start), of.length)?;
        let places = range
            .exposure
            .iter()
            .flat_map(|it| it.registrations(of.segment));
        Some(places.collect())
    }

    /// The first address of every range.
    pub(super) fn starts(&self) -> Vec<u64> {
        self.0.lock().by_start.keys().copied().collect()
    }

    /// A part of an exposed range, and the range's receives; `None` when the part does not lie in
    /// one range.
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

    /// The exposed range nearest to an address, by its first address and its length in bytes; `None` when
    /// nothing is exposed.
    pub(super) fn nearest(&self, address: u64) -> Option<(u64, u64)> {
        let ranges = self.0.lock();
        let below = ranges.by_start.range(..=address).next_back();
        let above = ranges.by_start.range(address..).next();
        let distance = |(start, length): &(u64, u64)| {
            let before = start.saturating_sub(address);
            before.max(address.saturating_sub(start + length))
        };
        let both = [below, above].into_iter().flatten();
        both.map(|(start, range)| (*start, range.whole.length().0))
            .min_by_key(distance)
    }

    /// The first address of the oldest exposed range.
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
    fn the_nearest_range_lies_around_an_address_or_next_to_it() {
        let (region, at) = region();
        let exposed = Exposed::default();
        assert_eq!(exposed.nearest(at), None);
        let (low, high) = ((at + 1000, 1000), (at + 4000, 500));
        for (start, length) in [low, high] {
            let part = region.slice(Offset(start - at), Length(length)).unwrap();
            exposed.insert(part, None).unwrap();
        }
        for (from, nearest) in [
            (0, low),
            (1000, low),
            (1999, low),
            (2900, low),
            (3100, high),
            (4000, high),
            (8000, high),
        ] {
            assert_eq!(exposed.nearest(at + from), Some(nearest), "from {from}");
        }
        assert_eq!(exposed.nearest(0), Some(low));
        assert_eq!(exposed.nearest(u64::MAX), Some(high));
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
