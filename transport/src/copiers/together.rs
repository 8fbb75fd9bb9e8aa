//! Copies one long block with several threads.
//!
//! ```text
//! thread with the block ── parts ──► threads without a job
//!        └ copies parts itself, until none is left ── waits for the others' parts ──► checksums of the block
//! ```
//!
//! One thread copies and sums a mebibyte in about the time in which a fast disk reads it.

use super::{Copiers, Job};
use crate::checksum::{BlockSums, Private, combine, copy_with_sum, copy_with_whole_sum};
use crate::memory::{Slice, total_length};
use crate::split::cut;
use kvpool_types::{CHUNK, Checksum, Length};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Instant;

/// The bytes that a thread takes at a time. A multiple of a chunk, so that no chunk has parts of two threads.
const PART: u64 = 512 << 10;
const _: () = assert!(PART.is_multiple_of(CHUNK));

/// The checksums that a copy computes.
pub(crate) trait Summed: Send + Sized + 'static {
    /// Copies a part and sums it. `None` when `deadline` passed before the end.
    fn copy(
        from: &[Slice],
        to: &[Slice],
        private: Private,
        go_on: impl FnMut() -> bool,
    ) -> Option<Self>;

    /// The checksums of this part and of the next one, which has `length` bytes.
    fn followed_by(self, next: Self, length: Length) -> Self;
}

impl Summed for Checksum {
    fn copy(
        from: &[Slice],
        to: &[Slice],
        private: Private,
        go_on: impl FnMut() -> bool,
    ) -> Option<Self> {
        copy_with_whole_sum(from, to, private, go_on)
    }

    fn followed_by(self, next: Self, length: Length) -> Self {
        combine(self, next, length)
    }
}

impl Summed for BlockSums {
    fn copy(
        from: &[Slice],
        to: &[Slice],
        private: Private,
        go_on: impl FnMut() -> bool,
    ) -> Option<Self> {
        copy_with_sum(from, to, private, go_on)
    }

    fn followed_by(mut self, next: Self, length: Length) -> Self {
        self.whole = combine(self.whole, next.whole, length);
        self.chunks.extend(next.chunks);
        self
    }
}

/// A copy of which several threads do parts.
struct Together<S> {
    private: Private,
    deadline: Instant,
    state: Mutex<State<S>>,
    ended: Condvar,
}

struct State<S> {
    /// The parts that no thread has taken, the last one first. They hold the caller's memory, so nothing of it is
    /// held when all parts have ended.
    parts: Vec<Part>,
    /// The checksums of each part. `None` for a part that was not copied.
    sums: Vec<Option<S>>,
    /// The number of parts that have not ended.
    left: usize,
}

struct Part {
    index: usize,
    from: Vec<Slice>,
    to: Vec<Slice>,
}

/// Copies all of `from` to `to` and sums the private side. Threads without a job help with a long block. Returns
/// `None` when `deadline` has passed before the end.
///
/// # Panics
///
/// Panics unless both sides have the same total length and `to` is writable.
pub(crate) fn copy<S: Summed>(
    copiers: &Copiers,
    from: &[Slice],
    to: &[Slice],
    private: Private,
    deadline: Instant,
) -> Option<S> {
    let parts = total_length(from).0.div_ceil(PART);
    let helpers = match parts {
        0 | 1 => 0,
        parts => copiers.idle().min(Length(parts - 1).as_usize()),
    };
    if helpers == 0 {
        return S::copy(from, to, private, || Instant::now() < deadline);
    }
    let copy = Together::<S>::of(from, to, private, deadline);
    copiers.submit((0..helpers).map(|_| -> Job {
        // A helper that comes after the last part holds nothing.
        let copy = Arc::downgrade(&copy);
        Box::new(move || {
            if let Some(copy) = copy.upgrade() {
                copy.work();
            }
        })
    }));
    copy.work();
    let mut sums = copy.wait().into_iter();
    let first: S = sums.next()??;
    let mut left = total_length(from).0 - PART;
    sums.try_fold(first, |whole, next| {
        let length = PART.min(left);
        left -= length;
        Some(whole.followed_by(next?, Length(length)))
    })
}

impl<S: Summed> Together<S> {
    fn of(from: &[Slice], to: &[Slice], private: Private, deadline: Instant) -> Arc<Self> {
        assert_eq!(
            total_length(from),
            total_length(to),
            "invariant: both sides of a copy have one length"
        );
        let sides = cut(from, PART).into_iter().zip(cut(to, PART));
        let mut parts: Vec<Part> = sides
            .enumerate()
            .map(|(index, (from, to))| Part { index, from, to })
            .collect();
        parts.reverse();
        let left = parts.len();
        Arc::new(Self {
            private,
            deadline,
            state: Mutex::new(State {
                parts,
                sums: (0..left).map(|_| None).collect(),
                left,
            }),
            ended: Condvar::new(),
        })
    }

    /// Copies parts until none is left.
    fn work(&self) {
        loop {
            // The lock is released before the copy.
            let Some(part) = self.state.lock().parts.pop() else {
                return;
            };
            let mut end = End {
                copy: self,
                index: part.index,
                sums: None,
            };
            let in_time = || Instant::now() < self.deadline;
            end.sums = S::copy(&part.from, &part.to, self.private, in_time);
            // The memory is released before the end of the part is told.
            drop(part);
        }
    }

    /// Waits until all parts have ended. Returns their checksums, in order.
    fn wait(&self) -> Vec<Option<S>> {
        let mut state = self.state.lock();
        while state.left > 0 {
            self.ended.wait(&mut state);
        }
        std::mem::take(&mut state.sums)
    }
}

/// Tells the end of a part when dropped, also when its copy panics: the thread with the block must not wait for ever.
struct End<'a, S> {
    copy: &'a Together<S>,
    index: usize,
    sums: Option<S>,
}

impl<S> Drop for End<'_, S> {
    fn drop(&mut self) {
        let mut state = self.copy.state.lock();
        if let Some(sums) = state.sums.get_mut(self.index) {
            *sums = self.sums.take();
        }
        state.left -= 1;
        if state.left == 0 {
            self.copy.ended.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::sum_shared;
    use crate::memory::Region;
    use kvpool_types::Offset;
    use std::sync::mpsc;
    use std::time::Duration;

    const KIB: u64 = 1 << 10;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn patterned(length: u64) -> Region {
        let bytes: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        Region::from(bytes)
    }

    /// Scattered memory of `lengths` KiB.
    fn scattered(lengths: &[u64]) -> (Region, Vec<Slice>) {
        let region = Region::allocate(Length(lengths.iter().sum::<u64>() * KIB));
        let mut at = 0;
        let slices = lengths.iter().map(|length| {
            let slice = region.slice(Offset(at * KIB), Length(length * KIB));
            at += length;
            slice.unwrap()
        });
        let slices = slices.collect();
        (region, slices)
    }

    /// Copy threads that all wait for a job.
    fn idle_copiers(threads: usize) -> Copiers {
        let copiers = Copiers::start("kvpool-test-copy", threads).unwrap();
        let limit = soon();
        while copiers.idle() < threads {
            assert!(Instant::now() < limit, "threads do not wait for a job");
            std::thread::sleep(Duration::from_millis(1));
        }
        copiers
    }

    #[test]
    fn a_block_that_several_threads_copy_has_the_sums_of_one_copy() {
        for threads in [1, 3] {
            let copiers = idle_copiers(threads);
            for length in [64, 512, 513, 1024, 5 * 512 + 3] {
                let from = patterned(length * KIB);
                let (to, slices) = scattered(&[1, length - 2, 1]);
                let private = Private::Source;
                let sums: BlockSums =
                    copy(&copiers, &[from.whole()], &slices, private, soon()).unwrap();
                assert_eq!(sums, sum_shared(&from.whole()), "{length} KiB");
                assert_eq!(to.whole().to_vec(), from.whole().to_vec());
                let private = Private::Destination;
                let whole: Checksum =
                    copy(&copiers, &[from.whole()], &slices, private, soon()).unwrap();
                assert_eq!(whole, sums.whole, "{length} KiB");
            }
        }
    }

    /// A helper would otherwise hold the memory of a caller that has been told.
    #[test]
    fn no_memory_is_held_when_a_copy_has_ended_and_its_helper_comes_late() {
        let copiers = idle_copiers(1);
        let hook = Arc::new(());
        let from = patterned(1024 * KIB);
        let to = Region::allocate(from.length());
        let into = [to.whole().with_hook(hook.clone())];
        let (resume, paused) = mpsc::channel::<()>();
        let together =
            Together::<Checksum>::of(&[from.whole()], &into, Private::Destination, soon());
        let late = Arc::clone(&together);
        copiers.submit(std::iter::once(Box::new(move || {
            paused.recv().unwrap();
            late.work();
        }) as Job));
        together.work();
        assert_eq!(together.wait().len(), 2);
        drop(into);
        assert_eq!(Arc::strong_count(&hook), 1);
        resume.send(()).unwrap();
    }

    #[test]
    fn a_copy_that_is_too_late_has_no_sums() {
        let copiers = idle_copiers(2);
        let from = patterned(2048 * KIB);
        let to = Region::allocate(from.length());
        let sums: Option<Checksum> = copy(
            &copiers,
            &[from.whole()],
            &[to.whole()],
            Private::Destination,
            Instant::now(),
        );
        assert_eq!(sums, None);
        assert!(to.whole().to_vec().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_part_whose_copy_panics_ends() {
        let (from, to) = (patterned(1024 * KIB), Region::allocate(Length(1024 * KIB)));
        let together =
            Together::<Checksum>::of(&[from.whole()], &[to.whole()], Private::Destination, soon());
        let part = together.state.lock().parts.pop().unwrap();
        let copy = Arc::clone(&together);
        let helper = std::thread::spawn(move || {
            let _end = End {
                copy: &*copy,
                index: part.index,
                sums: None,
            };
            panic!("as a copy could");
        });
        assert!(helper.join().is_err());
        together.work();
        let sums = together.wait();
        assert_eq!(sums.iter().filter(|sums| sums.is_some()).count(), 1);
    }
}
