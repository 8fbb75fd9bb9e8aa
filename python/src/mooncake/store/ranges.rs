//! Reads of parts of blocks, many at once.

use super::codes;
use super::pool::as_count;
use crate::loan::{deadline, left};
use kvpool_client::blocking::Client;
use kvpool_client::{GetError, GetOptions, GetOutcome};
use kvpool_transport::Slice;
use kvpool_transport::memory::total_length;
use kvpool_types::{Code, Key, Length, Offset, Version};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The number of reads in progress at a time. Each read mostly waits for the network.
const AT_ONCE: usize = 4;
/// How often the fragments of a block are read when puts replace the block.
const ATTEMPTS: usize = 4;

/// One fragment to read, or the code of an invalid one.
pub(super) type Fragment = Result<(Key, u64, Slice), i64>;

/// Fragments that are contiguous in one block.
struct Run {
    key: Key,
    from: u64,
    buffers: Vec<Slice>,
    places: Vec<usize>,
}

/// The lowest and the highest version of a block that its runs were read from.
type Versions = Option<(Version, Version)>;

/// The outcome of one run.
#[derive(Default)]
struct Outcome {
    versions: Versions,
    /// The indices of the fragments that failed, with their codes.
    failed: Vec<(usize, i64)>,
    /// The reason of the first failure; `None` for a miss.
    reason: Option<String>,
}

/// The reason for which a range was not read.
struct Unread {
    code: i64,
    /// `None` for a miss.
    reason: Option<String>,
    /// Whether the fragments of the range may be valid when each is read alone.
    try_alone: bool,
}

/// Reads fragments. Returns a length or a code for each, and the reason of the first failure. One read takes
/// adjacent fragments of the list that are contiguous in a block.
///
/// All fragments of one key come from one version of its block. If a put replaces the block meanwhile, they are
/// read again. All reads together take no longer than the timeout of one get.
pub(super) fn read(client: &Client, fragments: Vec<Fragment>) -> (Vec<i64>, Option<String>) {
    let deadline = deadline(client.timeouts().get);
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
    let mut failed = Vec::new();
    let mut reason = None;
    for _ in 0..ATTEMPTS {
        let outcomes = in_parallel(&runs, |run| read_run(client, run, deadline));
        let mixed = mixed(&runs, &outcomes);
        let mut again = Vec::new();
        for ((run, outcome), is_mixed) in runs.into_iter().zip(outcomes).zip(mixed) {
            match is_mixed {
                true => again.push(run),
                false => {
                    failed.extend(outcome.failed);
                    reason = reason.or(outcome.reason);
                }
            }
        }
        runs = again;
        if runs.is_empty() {
            break;
        }
    }
    if let Some(run) = runs.first() {
        reason
            .get_or_insert_with(|| format!("puts replaced the block {} during the read", run.key));
    }
    let replaced = runs.iter().flat_map(|run| &run.places);
    failed.extend(replaced.map(|place| (*place, codes::TRANSFER)));
    for (place, code) in failed {
        if let Some(answer) = answers.get_mut(place) {
            *answer = code;
        }
    }
    (answers, reason)
}

/// For each run, whether the runs of its key have different versions.
fn mixed(runs: &[Run], outcomes: &[Outcome]) -> Vec<bool> {
    let mut versions: HashMap<&Key, Versions> = HashMap::new();
    for (run, outcome) in runs.iter().zip(outcomes) {
        let of_key = versions.entry(&run.key).or_default();
        *of_key = widest(*of_key, outcome.versions);
    }
    let is_mixed = |run: &Run| {
        let of_key = versions.get(&run.key).copied().flatten();
        of_key.is_some_and(|(lowest, highest)| lowest < highest)
    };
    runs.iter().map(is_mixed).collect()
}

fn widest(one: Versions, other: Versions) -> Versions {
    match (one, other) {
        (Some((a, b)), Some((c, d))) => Some((a.min(c), b.max(d))),
        (one, other) => one.or(other),
    }
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

/// Reads one run.
fn read_run(client: &Client, run: &Run, deadline: Instant) -> Outcome {
    let mut outcome = Outcome::default();
    match read_range(client, &run.key, run.from, run.buffers.clone(), deadline) {
        Ok(version) => outcome.versions = version.map(|version| (version, version)),
        Err(unread) if !unread.try_alone => {
            let failed = run.places.iter().map(|place| (*place, unread.code));
            outcome.failed = failed.collect();
            outcome.reason = unread.reason;
        }
        // The first fragments of a run beyond the end of the block may be valid. So may fragments whose memory
        // overlaps.
        Err(_) => {
            let mut from = run.from;
            for (place, slice) in run.places.iter().zip(&run.buffers) {
                match read_range(client, &run.key, from, vec![slice.clone()], deadline) {
                    Ok(version) => {
                        let version = version.map(|version| (version, version));
                        outcome.versions = widest(outcome.versions, version);
                    }
                    Err(unread) => {
                        outcome.failed.push((*place, unread.code));
                        outcome.reason = outcome.reason.or(unread.reason);
                    }
                }
                from = from.saturating_add(slice.length().0);
            }
        }
    }
    outcome
}

/// Reads one range. Returns the version of its block, or `None` for an empty range.
fn read_range(
    client: &Client,
    key: &Key,
    from: u64,
    buffers: Vec<Slice>,
    deadline: Instant,
) -> Result<Option<Version>, Unread> {
    if total_length(&buffers) == Length(0) {
        return Ok(None);
    }
    let left = left(deadline);
    if left.is_zero() {
        return Err(Unread {
            code: codes::of(Code::DeadlineExceeded, codes::TRANSFER),
            reason: Some("the timeout of the get passed before this range was read".to_owned()),
            try_alone: false,
        });
    }
    let options = GetOptions {
        timeout: Some(left),
        ..GetOptions::default()
    };
    match client.get_range(key, Offset(from), buffers, &options) {
        Ok(GetOutcome::Hit { version, .. }) => Ok(Some(version)),
        Ok(GetOutcome::Miss) => Err(Unread {
            code: codes::NOT_FOUND,
            reason: None,
            try_alone: false,
        }),
        Err(error) => Err(Unread {
            code: codes::of_get(&error),
            reason: Some(error.to_string()),
            try_alone: matches!(error, GetError::OutsideBlock { .. })
                || error.code() == Code::InvalidArgument,
        }),
    }
}

/// Reads all runs, a few at a time. Returns the outcome of each. If the system has no further thread, this
/// thread reads all.
fn in_parallel(runs: &[Run], work: impl Fn(&Run) -> Outcome + Sync) -> Vec<Outcome> {
    if let [only] = runs {
        return vec![work(only)];
    }
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(run) = runs.get(at) else { return done };
            done.push((at, work(run)));
        }
    };
    let mut outcomes: Vec<Outcome> = runs.iter().map(|_| Outcome::default()).collect();
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..AT_ONCE.min(runs.len()))
            .filter_map(|_| std::thread::Builder::new().spawn_scoped(scope, take).ok())
            .collect();
        let mut done = take();
        for other in others {
            let its = other.join();
            done.extend(its.expect("invariant: reading a range does not panic"));
        }
        for (at, outcome) in done {
            if let Some(place) = outcomes.get_mut(at) {
                *place = outcome;
            }
        }
    });
    outcomes
}
