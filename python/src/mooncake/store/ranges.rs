//! Reads of parts of blocks, many at once.

use super::codes;
use super::pool::as_count;
use kvpool_client::blocking::Client;
use kvpool_client::{GetError, GetOptions, GetOutcome};
use kvpool_transport::Slice;
use kvpool_transport::memory::total_length;
use kvpool_types::{Key, Length, Offset};
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many reads are under way at once. Each waits for the wire most of its time.
const AT_ONCE: usize = 4;

/// One fragment to read, or the code of what is wrong with it.
pub(super) type Fragment = Result<(Key, u64, Slice), i64>;

/// Fragments of one block that follow each other there.
struct Run {
    key: Key,
    from: u64,
    buffers: Vec<Slice>,
    places: Vec<usize>,
}

/// Reads fragments: the length of each, or a code. Neighbours in the list that follow each other in a
/// block are read in one go.
pub(super) fn read(client: &Client, fragments: Vec<Fragment>) -> Vec<i64> {
    let mut answers: Vec<i64> = Vec::with_capacity(fragments.len());
    let mut runs: Vec<Run> = Vec::new();
    for (at, fragment) in fragments.into_iter().enumerate() {
        match fragment {
            Err(code) => answers.push(code),
            Ok((key, from, slice)) => {
                answers.push(as_count(slice.length()));
                append(&mut runs, key, from, slice, at);
            }
        }
    }
    let failed = in_parallel(&runs, |run| read_run(client, run));
    for (place, code) in failed {
        if let Some(answer) = answers.get_mut(place) {
            *answer = code;
        }
    }
    answers
}

fn append(runs: &mut Vec<Run>, key: Key, from: u64, slice: Slice, place: usize) {
    if let Some(last) = runs.last_mut()
        && last.key == key
        && last.from.checked_add(total_length(&last.buffers).0) == Some(from)
    {
        last.buffers.push(slice);
        last.places.push(place);
        return;
    }
    runs.push(Run {
        key,
        from,
        buffers: vec![slice],
        places: vec![place],
    });
}

/// Reads one run: the places that failed, with codes.
fn read_run(client: &Client, run: &Run) -> Vec<(usize, i64)> {
    let whole = read_range(client, &run.key, run.from, run.buffers.clone());
    let code = match whole {
        Ok(()) => return Vec::new(),
        Err((code, false)) => code,
        // Of a run that reaches over the block's end the first fragments may be fine.
        Err((_, true)) => {
            let mut from = run.from;
            let mut failed = Vec::new();
            for (place, slice) in run.places.iter().zip(&run.buffers) {
                if let Err((code, _)) = read_range(client, &run.key, from, vec![slice.clone()]) {
                    failed.push((*place, code));
                }
                from = from.saturating_add(slice.length().0);
            }
            return failed;
        }
    };
    run.places.iter().map(|place| (*place, code)).collect()
}

/// Reads one range. An error says whether the range was outside the block.
fn read_range(
    client: &Client,
    key: &Key,
    from: u64,
    buffers: Vec<Slice>,
) -> Result<(), (i64, bool)> {
    if total_length(&buffers) == Length(0) {
        return Ok(());
    }
    match client.get_range(key, Offset(from), buffers, &GetOptions::default()) {
        Ok(GetOutcome::Hit { .. }) => Ok(()),
        Ok(GetOutcome::Miss) => Err((codes::NOT_FOUND, false)),
        Err(error @ GetError::OutsideBlock { .. }) => Err((codes::of_get(&error), true)),
        Err(error) => Err((codes::of_get(&error), false)),
    }
}

/// Does all of `runs`, some at a time, and collects what failed.
fn in_parallel(runs: &[Run], work: impl Fn(&Run) -> Vec<(usize, i64)> + Sync) -> Vec<(usize, i64)> {
    if let [only] = runs {
        return work(only);
    }
    let next = AtomicUsize::new(0);
    let take = || {
        let mut failed = Vec::new();
        while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
            failed.extend(work(run));
        }
        failed
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..AT_ONCE.min(runs.len()))
            .map(|_| scope.spawn(take))
            .collect();
        let mut failed = take();
        for other in others {
            failed.extend(
                other
                    .join()
                    .expect("invariant: reading a range does not panic"),
            );
        }
        failed
    })
}
