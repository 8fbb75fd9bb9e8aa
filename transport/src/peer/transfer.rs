//! One transfer over the links to a peer: moves what the peer admits, and verifies it.

use super::direct::{self, DirectMemory};
use super::endpoint::Direction;
use super::host::{NEAREST, NEAREST_BYTES};
use super::plan::{Move, PIECE_BYTES, Run, single};
use super::targets::Connected;
use crate::checksum::combine_chunks;
use crate::link::{ReadOp, SumsOp, TransferError, WriteOp};
use crate::memory::{Region, Slice};
use futures::executor::block_on;
use futures::future::{BoxFuture, join_all};
use kvpool_types::{Checksum, Code, Epoch, Extent, GrantId, Length, Offset};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// The longest time to wait for a peer's nearest range, after a refusal.
const ANSWER: Duration = Duration::from_secs(1);
/// How much later the peer's answer counts as lost, and ends the connection.
const LATE_ANSWER: Duration = Duration::from_secs(60);

pub(super) type Outcome = Result<(), TransferError>;
/// The chunk checksums of one range.
pub(super) type Sums = Result<Vec<Checksum>, TransferError>;

/// A transfer and its links.
pub(super) struct PeerTransfer<'a> {
    pub(super) peer: &'a Connected,
    /// The id of the next write's grant.
    pub(super) grants: &'a AtomicU64,
    pub(super) direction: Direction,
    pub(super) deadline: Instant,
}

impl PeerTransfer<'_> {
    /// Performs runs. If a run crosses the border of two exposed ranges, its moves are performed
    /// one by one.
    pub(super) fn run(&self, runs: &[Run], moves: &[Move]) -> Outcome {
        // Keeps the located ranges in the cache until all runs have been moved.
        let _using = self.peer.rdma.as_ref().ok().map(|rdma| rdma.using());
        let admitted = self.admitted(runs);
        let outcomes = match self.direction {
            Direction::Write => self.write(runs, admitted),
            Direction::Read => self.read(runs, admitted),
        };
        let mut apart = Vec::new();
        for (run, outcome) in runs.iter().zip(outcomes) {
            match outcome {
                Err(error) if error.code == Code::OutOfRange && run.moves.len() > 1 => {
                    let of_run = moves.iter().enumerate().skip(run.moves.start);
                    let of_run = of_run.take(run.moves.len());
                    apart.extend(
                        of_run
                            .filter(|(_, each)| each.local.length() > Length(0))
                            .map(|(index, each)| single(index, each)),
                    );
                }
                outcome => outcome.map_err(|error| self.with_ranges(run, error))?,
            }
        }
        if apart.is_empty() {
            return Ok(());
        }
        self.run(&apart, moves)
    }

    /// The error of a run. If the peer refused the run's range, the error names this range and the nearest range that
    /// the peer admits.
    fn with_ranges(&self, run: &Run, error: TransferError) -> TransferError {
        if error.code != Code::OutOfRange {
            return error;
        }
        with_nearest(&run.extent, self.nearest(run.extent.offset), error)
    }

    /// The range that the peer exposes nearest to an address, by its first address and its length. `None` if the peer
    /// does not tell, as a peer of an earlier version, or if the deadline leaves no time to ask.
    fn nearest(&self, address: Offset) -> Option<(u64, u64)> {
        let limit = Instant::now() + ANSWER;
        if self.deadline <= limit {
            return None;
        }
        let extent = Extent {
            segment: NEAREST,
            offset: address,
            length: Length(NEAREST_BYTES),
        };
        // The peer would end the connection of a request whose extent exceeds the address space.
        extent.end()?;
        let answer = Region::allocate(Length(NEAREST_BYTES));
        let question = ReadOp {
            extent,
            from: Offset(0),
            into: vec![answer.whole()],
            right: None,
        };
        // A late exchange ends its connection, and the transfers on it. So this one gets more time than the wait.
        let late = self.deadline.max(limit + LATE_ANSWER);
        let asked = self.peer.tcp.read(Epoch(0), vec![question], late);
        wait_by(asked, limit)?.into_iter().next()?.ok()?;
        let (mut start, mut length) = ([0; 8], [0; 8]);
        answer.whole().read_at(Offset(0), &mut start);
        answer.whole().read_at(Offset(8), &mut length);
        Some((u64::from_le_bytes(start), u64::from_le_bytes(length)))
    }

    /// A write that is signed with the session's key.
    pub(super) fn signed(&self, extent: Extent, from: Vec<Slice>) -> WriteOp {
        let id = GrantId(self.grants.fetch_add(1, Ordering::Relaxed));
        let Connected {
            signer, session, ..
        } = self.peer;
        WriteOp {
            grant: signer.sign(*session, Epoch(0), id, extent),
            from,
        }
    }

    /// Asks the peer to judge whole runs before their first byte is sent. Over TCP only writes in
    /// several pieces need this: a frame judges a run that goes in one.
    fn admitted(&self, runs: &[Run]) -> Vec<Outcome> {
        if let Ok(rdma) = &self.peer.rdma {
            let extents = runs.iter().map(|run| run.extent).collect();
            return block_on(rdma.locate(extents, self.deadline));
        }
        let mut outcomes = vec![Ok(()); runs.len()];
        let cut = (0..runs.len()).filter(|index| runs.get(*index).is_some_and(Run::is_cut));
        let cut: Vec<usize> = match self.direction {
            Direction::Write => cut.collect(),
            Direction::Read => Vec::new(),
        };
        if cut.is_empty() {
            return outcomes;
        }
        let scratch = Region::allocate(Length(cut.len() as u64));
        let asked = cut.iter().enumerate().filter_map(|(at, index)| {
            Some(ReadOp {
                extent: runs.get(*index)?.extent,
                from: Offset(0),
                into: vec![scratch.slice(Offset(at as u64), Length(1))?],
                right: None,
            })
        });
        let reading = self.peer.tcp.read(Epoch(0), asked.collect(), self.deadline);
        for (index, outcome) in cut.into_iter().zip(block_on(reading)) {
            if let Some(known) = outcomes.get_mut(index) {
                *known = outcome.map(drop);
            }
        }
        outcomes
    }

    /// Writes the admitted runs.
    fn write(&self, runs: &[Run], mut outcomes: Vec<Outcome>) -> Vec<Outcome> {
        let mut ops = Vec::with_capacity(runs.len());
        let mut of_run = Vec::with_capacity(runs.len());
        for (index, run) in runs.iter().enumerate() {
            if !matches!(outcomes.get(index), Some(Ok(()))) {
                continue;
            }
            for piece in run.pieces(PIECE_BYTES) {
                ops.push(self.signed(piece.extent, piece.local));
                of_run.push(index);
            }
        }
        let written = block_on(self.peer.data().write(ops, self.deadline));
        for (index, outcome) in of_run.into_iter().zip(written) {
            if let (Some(known @ Ok(())), Err(error)) = (outcomes.get_mut(index), outcome) {
                *known = Err(error);
            }
        }
        outcomes
    }

    /// Reads the admitted runs and compares them with the peer's checksums. If the owner changed
    /// the memory meanwhile, the run is read once more.
    fn read(&self, runs: &[Run], mut outcomes: Vec<Outcome>) -> Vec<Outcome> {
        let is_admitted = |outcome: &Outcome| outcome.is_ok();
        let has_changed = |outcome: &Outcome| matches!(outcome, Err(error) if error.code == Code::ChecksumMismatch);
        self.read_those(runs, &mut outcomes, is_admitted);
        self.read_those(runs, &mut outcomes, has_changed);
        outcomes
    }

    fn read_those(&self, runs: &[Run], outcomes: &mut [Outcome], which: impl Fn(&Outcome) -> bool) {
        let (those, places): (Vec<&Run>, Vec<&mut Outcome>) = runs
            .iter()
            .zip(outcomes)
            .filter(|(_, outcome)| which(outcome))
            .unzip();
        if those.is_empty() {
            return;
        }
        for (place, outcome) in places.into_iter().zip(self.read_checked(&those)) {
            *place = outcome;
        }
    }

    fn read_checked(&self, runs: &[&Run]) -> Vec<Outcome> {
        let link = self.peer.data();
        if let Some(direct) = self.direct(runs) {
            match direct.read(runs, self.sums_of(runs), self.deadline) {
                Ok(outcomes) => return outcomes,
                Err(error) => {
                    tracing::debug!(%error, "a direct read failed: it is repeated over TCP");
                }
            }
        }
        let ops = runs.iter().map(|run| ReadOp {
            extent: run.extent,
            from: Offset(0),
            into: run.local.clone(),
            right: None,
        });
        let reading = link.read(Epoch(0), ops.collect(), self.deadline);
        // A request names parts of runs, which bounds the size of each answer.
        let parts = runs.iter().map(|run| sum_parts(run.extent));
        let parts: Vec<Vec<Extent>> = parts.collect();
        let asked = parts.iter().flatten().copied().map(SumsOp::from).collect();
        let summing = link.sums(Epoch(0), asked, self.deadline);
        let read = block_on(reading);
        let mut sums = block_on(summing).into_iter();
        let mut outcomes = Vec::with_capacity(runs.len());
        for ((run, outcome), parts) in runs.iter().zip(read).zip(parts) {
            let said: Result<Vec<_>, TransferError> = sums.by_ref().take(parts.len()).collect();
            outcomes.push(outcome.and_then(|came| {
                let there = combine_chunks(run.extent.length, &said?.concat());
                if came == there {
                    return Ok(());
                }
                Err(TransferError {
                    code: Code::ChecksumMismatch,
                    message: format!(
                        "{} bytes read at {:#x} differ from the peer's checksums",
                        run.extent.length, run.extent.offset.0
                    ),
                })
            }));
        }
        outcomes
    }

    /// The peer's memory, if these runs are to be copied from it. RDMA goes first.
    fn direct(&self, runs: &[&Run]) -> Option<&DirectMemory> {
        let direct = self.peer.direct.as_deref()?;
        let lengths = || runs.iter().map(|run| run.extent.length.0);
        let least = direct::LEAST.max(direct::LEAST_OF_RUN * runs.len() as u64);
        let fits = lengths().fold(0, u64::saturating_add) >= least
            && lengths().all(|length| length <= direct::MOST_OF_RUN);
        let is_writable = || runs.iter().all(|run| run.is_writable());
        let is_usable = fits && self.peer.rdma.is_err() && is_writable();
        // Asked last: it may admit this read as the only one after a pause.
        (is_usable && direct.may_read(Instant::now())).then_some(direct)
    }

    /// The peer's checksums of whole runs. Several requests at a time keep all connections of the peer busy.
    fn sums_of(&self, runs: &[&Run]) -> Vec<Sums> {
        let mut asked = Vec::new();
        let (mut group, mut bytes): (Vec<SumsOp>, u64) = (Vec::new(), 0);
        let ask = |group| self.peer.tcp.sums(Epoch(0), group, self.deadline);
        for run in runs {
            group.push(run.extent.into());
            bytes += run.extent.length.0;
            if bytes >= PIECE_BYTES {
                asked.push(ask(std::mem::take(&mut group)));
                bytes = 0;
            }
        }
        asked.push(ask(group));
        block_on(join_all(asked)).concat()
    }
}

/// The error of a range that the peer refused, with the peer's nearest range.
fn with_nearest(
    refused: &Extent,
    nearest: Option<(u64, u64)>,
    error: TransferError,
) -> TransferError {
    let (asked, from) = (refused.length.0, refused.offset.0);
    let nearest = match nearest {
        None => String::new(),
        Some((_, 0)) => "; the peer has registered no memory".to_owned(),
        // The peer has registered the range meanwhile, or the refusal had another reason.
        Some((start, length))
            if start <= from && from.saturating_add(asked) <= start.saturating_add(length) =>
        {
            return error;
        }
        Some((start, length)) => {
            format!("; the peer's nearest registered range is {length} bytes at {start:#x}")
        }
    };
    TransferError {
        code: error.code,
        message: format!(
            "{}: {asked} bytes at {from:#x} of the peer's memory{nearest}",
            error.message
        ),
    }
}

/// The outcome of a future, or `None` if it has none by `limit`.
fn wait_by<T>(mut future: BoxFuture<'_, T>, limit: Instant) -> Option<T> {
    struct Caller(Thread);
    impl Wake for Caller {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Caller(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(outcome) = future.as_mut().poll(&mut context) {
            return Some(outcome);
        }
        let left = limit.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        thread::park_timeout(left);
    }
}

fn sum_parts(of: Extent) -> Vec<Extent> {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < of.length.0 {
        let length = PIECE_BYTES.min(of.length.0 - at);
        parts.push(Extent {
            offset: Offset(of.offset.0.saturating_add(at)),
            length: Length(length),
            ..of
        });
        at += length;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::channel::oneshot;
    use futures::future::{FutureExt, pending};
    use kvpool_types::SegmentId;

    #[test]
    fn a_refusal_keeps_its_message_and_names_no_range_that_holds_the_refused_one() {
        let refused = Extent {
            segment: SegmentId(0),
            offset: Offset(0x1000),
            length: Length(16),
        };
        let message = |nearest| {
            let error = TransferError {
                code: Code::OutOfRange,
                message: "refused".to_owned(),
            };
            with_nearest(&refused, nearest, error).message
        };
        let base = "refused: 16 bytes at 0x1000 of the peer's memory";
        assert_eq!(message(None), base);
        let none = format!("{base}; the peer has registered no memory");
        assert_eq!(message(Some((0, 0))), none);
        let short = format!("{base}; the peer's nearest registered range is 15 bytes at 0x1000");
        assert_eq!(message(Some((0x1000, 15))), short);
        assert_eq!(message(Some((0x1000, 16))), "refused");
    }

    #[test]
    fn waiting_for_a_future_ends_with_it_or_at_the_limit() {
        let limit = Instant::now() + Duration::from_millis(50);
        assert_eq!(wait_by(pending::<()>().boxed(), limit), None);
        assert!(Instant::now() >= limit);
        let (tell, told) = oneshot::channel();
        let teller = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            tell.send(7).unwrap();
        });
        let limit = Instant::now() + Duration::from_secs(20);
        assert_eq!(wait_by(told.boxed(), limit), Some(Ok(7)));
        assert!(Instant::now() < limit);
        teller.join().unwrap();
    }
}
