//! Reads from a peer on the same host: the kernel copies from the peer's memory to ours (`process_vm_readv`).
//!
//! A peer names its process over its connection, which has said hello: [`Card`]. The card names 16 random bytes in the
//! peer's memory, the mark. Every copy reads the mark together with the data. So a process that got the peer's process
//! id is not taken for the peer.
//!
//! The kernel permits the copy if this process may trace the other one. That is usual for two processes of one user in
//! one container. Other bytes go over TCP.
//!
//! A peer may lie, and name another process that this process may trace. So bytes are copied to a buffer first, and
//! delivered if they match checksums that the peer gave before. The checksums also show that the whole range is
//! exposed, and that the owner did not change it during the read.

// UNSAFETY: process_vm_readv has no safe binding.
#![allow(unsafe_code, reason = "copies from another process's memory")]

use super::plan::{Run, RunPiece};
use super::transfer::{Outcome, Sums};
use crate::checksum::checksum;
use crate::link::TransferError;
use crate::machine::host_id;
use crate::memory::{Region, streaming};
use crate::outcomes::deadline_exceeded;
use kvpool_types::{CHUNK, Checksum, Code, HostId, Length, Offset};
use parking_lot::Mutex;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, available_parallelism};
use std::time::{Duration, Instant};

/// Reads of fewer bytes go over TCP. They would spend most of their time on the questions to the peer.
pub(super) const LEAST: u64 = 1 << 20;
/// The least bytes of a run, on average. Each run is copied apart.
pub(super) const LEAST_OF_RUN: u64 = 64 << 10;
/// The length of a card in bytes.
pub(super) const CARD_BYTES: u64 = 48;
/// The most bytes of a run. The checksums of a whole run come in one answer.
pub(super) const MOST_OF_RUN: u64 = 1 << 30;
/// The bytes that a thread takes at a time. A multiple of a chunk.
const PART: u64 = 4 << 20;
/// The bytes that one call copies. They are summed and delivered while they are in the cache. A multiple of a chunk.
const STEP: u64 = 256 << 10;
/// The most threads of one read.
const MAX_THREADS: usize = 4;
/// The failures in a row after which the memory is not read for a [`PAUSE`].
const MAX_FAILURES: u32 = 3;
/// How long the memory is not read then. The kernel may have lacked memory, or the failed reads were of ranges that it
/// cannot copy. After a pause one read tries again. Each such try doubles the pause, until a copy is good.
const PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

type Mark = [u8; 16];

/// What a peer must know to read from this process.
pub(super) struct Card {
    host: HostId,
    pub(super) mark: Region,
}

impl Card {
    /// The card of this process, with a new mark.
    pub(super) fn new() -> io::Result<Self> {
        let mark: Mark = rand::random();
        Ok(Self {
            host: host_id()?,
            mark: Region::from(mark.to_vec()),
        })
    }

    /// The card's bytes: the host, the process id, the mark's address, the mark.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mark = self.mark.whole();
        let mut bytes = self.host.0.to_le_bytes().to_vec();
        bytes.extend(u64::from(std::process::id()).to_le_bytes());
        bytes.extend((mark.as_ptr().addr() as u64).to_le_bytes());
        bytes.extend(mark.to_vec());
        bytes
    }
}

/// The memory of a process on this host, as its card says.
#[derive(Debug)]
pub(super) struct DirectMemory {
    process: libc::pid_t,
    /// The mark, and its address in the process.
    mark: Mark,
    at: u64,
    failures: Mutex<Failures>,
}

/// The failures of a peer's memory since its last good copy.
#[derive(Debug, Default)]
struct Failures {
    in_a_row: u32,
    /// The last pause, and its end.
    pause: Duration,
    paused_until: Option<Instant>,
    /// Whether a pause was logged, since the connection was opened.
    is_logged: bool,
}

/// A part of a run that one thread copies.
struct Part {
    run: usize,
    piece: RunPiece,
    /// The peer's checksums of its chunks.
    sums: Vec<Checksum>,
}

impl DirectMemory {
    /// The memory behind a peer's card. Fails where this process cannot read it.
    pub(super) fn open(card: &[u8]) -> io::Result<Self> {
        let short = || io::Error::other("the peer's card is too short");
        let (host, rest) = card.split_first_chunk().ok_or_else(short)?;
        let (process, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let (at, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let mark = rest.first_chunk().ok_or_else(short)?;
        if host_id()? != HostId(u128::from_le_bytes(*host)) {
            return Err(io::Error::other("the peer is on another host"));
        }
        let process = libc::pid_t::try_from(u64::from_le_bytes(*process)).ok();
        let process = process.filter(|id| *id > 0);
        let memory = Self {
            process: process.ok_or_else(|| io::Error::other("the peer has no process id"))?,
            mark: *mark,
            at: u64::from_le_bytes(*at),
            failures: Mutex::default(),
        };
        memory.copy(0, &mut [])?;
        Ok(memory)
    }

    /// Whether the last reads did not all fail.
    pub(super) fn works(&self) -> bool {
        self.failures.lock().in_a_row < MAX_FAILURES
    }

    /// Whether a read may copy at `now`: the last reads did not all fail, or it is the first one after a pause.
    pub(super) fn may_read(&self, now: Instant) -> bool {
        let mut failures = self.failures.lock();
        if failures.in_a_row < MAX_FAILURES {
            return true;
        }
        if failures.paused_until.is_some_and(|until| now < until) {
            return false;
        }
        // Other reads wait for the outcome of this one.
        failures.pause = (failures.pause * 2).min(LONGEST_PAUSE);
        failures.paused_until = Some(now + failures.pause);
        true
    }

    /// Copies the runs whose checksums the peer gave, `said`. All of them were made before the first copy. So a change
    /// of the memory during the read is noticed, wherever it is. After an error, some of the bytes may be in place.
    /// No part is begun after `deadline`.
    pub(super) fn read(
        &self,
        runs: &[&Run],
        said: Vec<Sums>,
        deadline: Instant,
    ) -> io::Result<Vec<Outcome>> {
        let mut outcomes: Vec<Outcome> = Vec::with_capacity(runs.len());
        let mut parts = Vec::new();
        let nothing = || Err(deadline_exceeded());
        for (index, run) in runs.iter().enumerate() {
            match said.get(index).cloned().unwrap_or_else(nothing) {
                Err(error) => outcomes.push(Err(error)),
                Ok(sums) => {
                    outcomes.push(Ok(()));
                    let mut sums = sums.into_iter();
                    for piece in run.pieces(PART) {
                        let chunks = Length(piece.extent.length.chunks()).as_usize();
                        let sums = sums.by_ref().take(chunks).collect();
                        parts.push(Part {
                            run: index,
                            piece,
                            sums,
                        });
                    }
                }
            }
        }
        for (run, outcome) in self.read_parts(&parts, deadline)? {
            if let (Some(known @ Ok(())), Err(error)) = (outcomes.get_mut(run), outcome) {
                *known = Err(error);
            }
        }
        Ok(outcomes)
    }

    /// The outcome of each part, with the index of its run.
    fn read_parts(&self, parts: &[Part], deadline: Instant) -> io::Result<Vec<(usize, Outcome)>> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut buffer = vec![0; Length(STEP).as_usize()];
            let mut ended = Vec::new();
            while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                if Instant::now() >= deadline {
                    ended.push((part.run, Err(deadline_exceeded())));
                    continue;
                }
                let read = self.read_part(part, &mut buffer);
                // No later write to these places is overtaken.
                streaming::fence();
                match read {
                    Ok(outcome) => ended.push((part.run, outcome)),
                    Err(error) => {
                        // The other threads end too.
                        next.fetch_add(parts.len(), Ordering::Relaxed);
                        return Err(error);
                    }
                }
            }
            Ok(ended)
        };
        let cores = available_parallelism().map_or(1, usize::from);
        let threads = cores.min(MAX_THREADS).min(parts.len());
        let ended: io::Result<Vec<(usize, Outcome)>> = thread::scope(|scope| {
            let start = |_| {
                let builder = thread::Builder::new().name("kvpool-direct".to_owned());
                // Without a further thread, the others do its share.
                builder.spawn_scoped(scope, work).ok()
            };
            let others: Vec<_> = (1..threads).filter_map(start).collect();
            let mut ended = work()?;
            for other in others {
                let share = other.join();
                ended.extend(share.unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))?);
            }
            Ok(ended)
        });
        self.note(&ended);
        ended
    }

    /// Counts failures in a row.
    fn note(&self, ended: &io::Result<Vec<(usize, Outcome)>>) {
        match ended {
            Ok(ended) if ended.iter().any(|(_, outcome)| outcome.is_ok()) => {
                self.failures.lock().in_a_row = 0;
            }
            Ok(_) => {}
            Err(error) => {
                let mut failures = self.failures.lock();
                failures.in_a_row = failures.in_a_row.saturating_add(1);
                if failures.in_a_row != MAX_FAILURES {
                    return;
                }
                failures.pause = PAUSE;
                failures.paused_until = Some(Instant::now() + PAUSE);
                // Ranges that can be copied may alternate with others, and would end each pause.
                if !std::mem::replace(&mut failures.is_logged, true) {
                    let process = self.process;
                    tracing::warn!(
                        %error, process, pause = ?PAUSE,
                        "a peer's memory cannot be read: reads go over TCP until a copy after the pause is good"
                    );
                }
            }
        }
    }

    /// Copies a part to the buffer step by step, and delivers the steps whose chunks have the peer's checksums.
    fn read_part(&self, part: &Part, buffer: &mut [u8]) -> io::Result<Outcome> {
        let mut said = part.sums.iter();
        for step in part.steps() {
            let (bytes, _) = buffer.split_at_mut(step.extent.length.as_usize());
            self.copy(step.extent.offset.0, bytes)?;
            for chunk in bytes.chunks(Length(CHUNK).as_usize()) {
                if said.next() != Some(&checksum(chunk)) {
                    return Ok(Err(TransferError {
                        code: Code::ChecksumMismatch,
                        message: format!(
                            "{} bytes copied at {:#x} differ from the peer's checksums",
                            step.extent.length, step.extent.offset.0
                        ),
                    }));
                }
            }
            let mut rest = &*bytes;
            for slice in &step.local {
                let (bytes, after) = rest.split_at(slice.length().as_usize());
                slice.stream_at(Offset(0), bytes);
                rest = after;
            }
        }
        Ok(Ok(()))
    }

    /// Copies the mark and the bytes at `from` in one call, and checks that the mark is the peer's.
    fn copy(&self, from: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut mark = Mark::default();
        let vector = |start: *mut u8, length: usize| libc::iovec {
            iov_base: start.cast(),
            iov_len: length,
        };
        let into = [
            vector(mark.as_mut_ptr(), mark.len()),
            vector(bytes.as_mut_ptr(), bytes.len()),
        ];
        let from = [
            vector(of_peer(self.at), mark.len()),
            vector(of_peer(from), bytes.len()),
        ];
        // SAFETY: `into` names `mark` and `bytes`, which are borrowed uniquely. `from` names memory of the other
        // process, which the kernel checks. Both lists have two entries and live during the call.
        let copied =
            unsafe { libc::process_vm_readv(self.process, into.as_ptr(), 2, from.as_ptr(), 2, 0) };
        match usize::try_from(copied) {
            Err(_) => Err(io::Error::last_os_error()),
            Ok(_) if mark != self.mark => Err(io::Error::other(
                "another process has the peer's process id",
            )),
            // The rest cannot be read.
            Ok(copied) if copied < mark.len() + bytes.len() => {
                Err(io::Error::from_raw_os_error(libc::EFAULT))
            }
            Ok(_) => Ok(()),
        }
    }
}

impl Part {
    fn steps(&self) -> Vec<RunPiece> {
        let of_part = Run {
            extent: self.piece.extent,
            local: self.piece.local.clone(),
            moves: 0..0,
        };
        of_part.pieces(STEP)
    }
}

/// An address of the peer, which is never followed here.
fn of_peer(address: u64) -> *mut u8 {
    std::ptr::without_provenance_mut(Length(address).as_usize())
}

/// Whether this machine lets a process copy from itself. Otherwise prints that `test` is skipped.
#[cfg(test)]
pub(super) fn works_here(test: &str) -> bool {
    let opened = Card::new().and_then(|card| DirectMemory::open(&card.bytes()).map(drop));
    if let Err(error) = &opened {
        eprintln!("SKIPPED {test}: process_vm_readv does not work here: {error}");
    }
    opened.is_ok()
}

#[cfg(test)]
mod tests {
    use super::super::plan::{Move, single};
    use super::*;
    use crate::checksum::sum_shared;
    use kvpool_types::Extent;

    const MIB: u64 = 1 << 20;

    /// This process's card, which holds the mark, and the memory behind it.
    fn memory_here(test: &str) -> Option<(Card, DirectMemory)> {
        let card = Card::new().unwrap();
        works_here(test).then(|| {
            let memory = DirectMemory::open(&card.bytes()).unwrap();
            (card, memory)
        })
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn run(into: &Region, remote: u64) -> Run {
        let local = into.whole();
        single(0, &Move { local, remote })
    }

    fn at(region: &Region) -> u64 {
        region.whole().as_ptr().addr() as u64
    }

    /// The checksums that the owner of `source` gives.
    fn sums_of(source: &Region, runs: &[&Run]) -> Vec<Sums> {
        let sums = |run: &&Run| {
            let from = Offset(run.extent.offset.0 - at(source));
            let part = source.slice(from, run.extent.length).unwrap();
            Ok(sum_shared(&part).chunks)
        };
        runs.iter().map(sums).collect()
    }

    fn patterned(length: u64) -> Region {
        let bytes: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        Region::from(bytes)
    }

    fn codes(outcomes: Vec<Outcome>) -> Vec<Code> {
        let code = |outcome: Outcome| outcome.map_or_else(|error| error.code, |()| Code::Ok);
        outcomes.into_iter().map(code).collect()
    }

    #[test]
    fn copies_have_the_bytes_of_their_runs() {
        let Some((_card, memory)) = memory_here("copies_have_the_bytes_of_their_runs") else {
            return;
        };
        let source = patterned(9 * MIB + 5);
        let lengths = [1, CHUNK + 1, STEP - 1, STEP, 9 * MIB + 5];
        let into = lengths.map(|length| Region::allocate(Length(length)));
        let mut runs = into.each_ref().map(|into| run(into, at(&source)));
        // Local memory in several slices.
        let cuts = [0, 7, 300_000, 300_001, 9 * MIB + 5];
        let last = &into[4];
        runs[4].local = cuts
            .windows(2)
            .map(|cut| last.slice(Offset(cut[0]), Length(cut[1] - cut[0])).unwrap())
            .collect();
        let runs: Vec<&Run> = runs.iter().collect();
        let outcomes = memory.read(&runs, sums_of(&source, &runs), soon()).unwrap();
        assert_eq!(codes(outcomes), [Code::Ok; 5]);
        let bytes = source.whole().to_vec();
        for copy in &into {
            let copy = copy.whole().to_vec();
            assert!(copy == bytes[..copy.len()]);
        }
    }

    /// A peer that names another process, or memory that its owner changes.
    #[test]
    fn bytes_without_the_peers_checksums_are_not_delivered() {
        let Some((_card, memory)) =
            memory_here("bytes_without_the_peers_checksums_are_not_delivered")
        else {
            return;
        };
        let source = patterned(10 * MIB);
        let into = [MIB, 9 * MIB].map(|length| Region::allocate(Length(length)));
        let runs = [run(&into[0], at(&source)), run(&into[1], at(&source) + MIB)];
        let runs: Vec<&Run> = runs.iter().collect();
        let good = sums_of(&source, &runs);
        let other = Region::allocate(Length(10 * MIB));
        let of_other: Vec<Run> = runs
            .iter()
            .map(|run| Run {
                extent: Extent {
                    offset: Offset(run.extent.offset.0 - at(&source) + at(&other)),
                    ..run.extent
                },
                ..(*run).clone()
            })
            .collect();
        let of_other: Vec<&Run> = of_other.iter().collect();
        let mismatch = [Code::ChecksumMismatch; 2];
        for said in [
            sums_of(&other, &of_other),
            vec![Ok(Vec::new()), Ok(Vec::new())],
        ] {
            let outcomes = memory.read(&runs, said, soon()).unwrap();
            assert_eq!(codes(outcomes), mismatch);
        }
        let refused = || Err(deadline_exceeded());
        let outcomes = memory.read(&runs, vec![refused()], soon()).unwrap();
        assert_eq!(codes(outcomes), [Code::DeadlineExceeded; 2]);
        for into in &into {
            assert!(into.whole().to_vec().iter().all(|byte| *byte == 0));
        }
        // One byte of the last part changes after the checksums were made.
        source.whole().write_at(Offset(10 * MIB - 1), &[0xff]);
        let outcomes = memory.read(&runs, good, soon()).unwrap();
        assert_eq!(codes(outcomes), [Code::Ok, Code::ChecksumMismatch]);
        assert!(memory.works());
    }

    #[test]
    fn memory_that_cannot_be_read_three_times_is_read_again_after_a_pause() {
        let Some((card, memory)) =
            memory_here("memory_that_cannot_be_read_three_times_is_read_again_after_a_pause")
        else {
            return;
        };
        let (source, into) = (patterned(MIB), Region::allocate(Length(MIB)));
        let good = run(&into, at(&source));
        let sums = || sums_of(&source, &[&good]);
        let bad = run(&into, 4096);
        for _ in 0..2 {
            let error = memory.read(&[&bad], sums(), soon()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        }
        let late = memory.read(&[&good], sums(), Instant::now()).unwrap();
        assert_eq!(codes(late), [Code::DeadlineExceeded]);
        let outcomes = memory.read(&[&good], sums(), soon()).unwrap();
        assert_eq!(codes(outcomes), [Code::Ok]);
        // As in a process that got the peer's process id.
        let change_mark = || {
            let changed = [card.bytes()[35] ^ 1];
            card.mark.whole().write_at(Offset(3), &changed);
        };
        change_mark();
        for left in (0..MAX_FAILURES).rev() {
            assert!(memory.read(&[&good], sums(), soon()).is_err());
            assert_eq!(memory.works(), left > 0);
        }
        let mut until = memory.failures.lock().paused_until.unwrap();
        for next in [20, 40, 60, 60] {
            let before = until.checked_sub(Duration::from_millis(1)).unwrap();
            assert!(!memory.may_read(before));
            assert!(memory.may_read(until), "never again");
            assert!(!memory.may_read(until), "two reads try at once");
            assert!(memory.read(&[&good], sums(), soon()).is_err());
            until += Duration::from_secs(next);
            assert_eq!(memory.failures.lock().paused_until, Some(until));
        }
        change_mark();
        let outcomes = memory.read(&[&good], sums(), soon()).unwrap();
        assert_eq!(codes(outcomes), [Code::Ok]);
        assert!((0..2).all(|_| memory.may_read(Instant::now())));
        change_mark();
        for _ in 0..MAX_FAILURES {
            assert!(memory.read(&[&good], sums(), soon()).is_err());
        }
        assert_eq!(memory.failures.lock().pause, PAUSE);
    }

    #[test]
    fn a_wrong_card_opens_nothing() {
        let card = Card::new().unwrap();
        let good = card.bytes();
        assert_eq!(good.len() as u64, CARD_BYTES);
        // The host, the address and the mark.
        for changed in [0, 24, 32, 47] {
            let mut bad = good.clone();
            bad[changed] ^= 1;
            assert!(DirectMemory::open(&bad).is_err(), "byte {changed}");
        }
        for process in [0, u64::from(u32::MAX)] {
            let mut bad = good.clone();
            bad[16..24].copy_from_slice(&process.to_le_bytes());
            assert!(DirectMemory::open(&bad).is_err(), "process {process}");
        }
        for length in 0..good.len() {
            assert!(
                DirectMemory::open(&good[..length]).is_err(),
                "{length} bytes"
            );
        }
    }
}
