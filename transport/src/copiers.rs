//! Threads that copy and checksum callers' memory, so that no runtime thread has to. Also divides a batch
//! into jobs.

use kvpool_types::{Length, SegmentId};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Jobs of small blocks hold at least this many bytes: a job costs a lock, and perhaps waking a
/// thread.
const GROUP_BYTES: u64 = 1 << 20;

/// The unit of work of one thread.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// A few threads that share one queue. Dropping it lets them finish the queue, then end.
pub(crate) struct Copiers(Arc<CopierShared>);

#[derive(Default)]
struct CopierShared {
    state: Mutex<CopierState>,
    changed: Condvar,
}

#[derive(Default)]
struct CopierState {
    jobs: VecDeque<Job>,
    closing: bool,
}

impl Copiers {
    /// Starts `threads` threads, all named `name`.
    pub(crate) fn start(name: &str, threads: usize) -> io::Result<Self> {
        let copiers = Self(Arc::default());
        for _ in 0..threads {
            let shared = copiers.0.clone();
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || {
                    while let Some(job) = shared.next() {
                        job();
                    }
                })?;
        }
        Ok(copiers)
    }

    /// Queues jobs under one lock.
    pub(crate) fn submit(&self, jobs: impl ExactSizeIterator<Item = Job>) {
        let several = jobs.len() > 1;
        self.0.state.lock().jobs.extend(jobs);
        if several {
            self.0.changed.notify_all();
        } else {
            self.0.changed.notify_one();
        }
    }
}

impl Drop for Copiers {
    fn drop(&mut self) {
        self.0.state.lock().closing = true;
        self.0.changed.notify_all();
    }
}

impl CopierShared {
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closing {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

/// Groups the items of a batch by segment, because each segment is a mapping of its own. A node has
/// few segments, so the search is linear.
pub(crate) fn by_segment<T>(
    items: Vec<T>,
    segment_of: impl Fn(&T) -> SegmentId,
) -> Vec<(SegmentId, Vec<T>)> {
    let mut sorted: Vec<(SegmentId, Vec<T>)> = Vec::new();
    for item in items {
        let segment = segment_of(&item);
        match sorted.iter_mut().find(|(known, _)| *known == segment) {
            Some((_, items)) => items.push(item),
            None => sorted.push((segment, vec![item])),
        }
    }
    sorted
}

/// Divides a batch into jobs: neighbours share a job until it is large enough.
pub(crate) fn grouped<T>(items: Vec<T>, length_of: impl Fn(&T) -> Length) -> Vec<Vec<T>> {
    let mut groups = Vec::new();
    let mut open = Vec::new();
    let mut bytes = 0;
    for item in items {
        bytes += length_of(&item).0;
        open.push(item);
        if bytes >= GROUP_BYTES {
            groups.push(std::mem::take(&mut open));
            bytes = 0;
        }
    }
    if !open.is_empty() {
        groups.push(open);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_neighbours_share_a_job_and_large_blocks_do_not() {
        let kib = |sizes: &[u64]| sizes.iter().map(|size| size << 10).collect::<Vec<u64>>();
        let sizes = kib(&[1024, 4096, 256, 256, 256, 256, 16, 2048, 16]);
        let groups = grouped(sizes, |size| Length(*size));
        assert_eq!(
            groups,
            [
                kib(&[1024]),
                kib(&[4096]),
                kib(&[256; 4]),
                kib(&[16, 2048]),
                kib(&[16])
            ]
        );
        assert!(grouped(Vec::<u64>::new(), |size| Length(*size)).is_empty());
    }

    #[test]
    fn a_batch_is_sorted_by_segment_in_its_own_order() {
        let items = vec![(2, 'a'), (1, 'b'), (2, 'c')];
        let sorted = by_segment(items, |(segment, _)| SegmentId(*segment));
        assert_eq!(
            sorted,
            [
                (SegmentId(2), vec![(2, 'a'), (2, 'c')]),
                (SegmentId(1), vec![(1, 'b')])
            ]
        );
    }
}
