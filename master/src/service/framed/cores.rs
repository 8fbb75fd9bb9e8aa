//! Threads that are given large batches, kept on different cores.
//!
//! A client sends the messages of a large batch over several connections, so that as many threads
//! work on them at a time. The scheduler wakes each of them where it ran last. Two that were on one
//! core stay there, the second waiting for the first while another core is idle: before the load of
//! the cores is balanced the batch is over, and the next one finds both where they were.

use parking_lot::Mutex;
use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};
use std::time::{Duration, Instant};

/// For so long after a large message a thread is taken for one that will soon have another.
const BUSY: Duration = Duration::from_millis(10);

/// The thread that had a large message last on each core.
#[derive(Debug, Default)]
pub(super) struct Cores(Mutex<Vec<Option<Seen>>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    thread: Pid,
    at: Instant,
}

impl Cores {
    /// Called by a thread that is about to work on a large message. Where another thread had one on
    /// this core just now, it goes to a core where none had. It is not bound to either.
    pub(super) fn part(&self) {
        let Ok(allowed) = sched_getaffinity(None) else {
            return;
        };
        let seen = Seen {
            thread: gettid(),
            at: Instant::now(),
        };
        let may = |core| core < CpuSet::MAX_CPU && allowed.is_set(core);
        let Some(core) = choose(&mut self.0.lock(), sched_getcpu(), seen, may) else {
            return;
        };
        let mut one = CpuSet::new();
        one.set(core);
        let moved = sched_setaffinity(None, &one).and_then(|()| sched_setaffinity(None, &allowed));
        if let Err(error) = moved {
            tracing::debug!(%error, core, "a thread could not choose its core");
        }
    }
}

/// The core that a thread is to go to from the one where it is; `None` when it is to stay.
fn choose(
    cores: &mut Vec<Option<Seen>>,
    here: usize,
    seen: Seen,
    may: impl Fn(usize) -> bool,
) -> Option<usize> {
    let is_free = |core: &usize| {
        let last = cores.get(*core).copied().flatten();
        last.is_none_or(|last| {
            last.thread == seen.thread || seen.at.saturating_duration_since(last.at) >= BUSY
        })
    };
    // Those behind this one first: low numbers have more to do for others.
    let others = (here + 1..CpuSet::MAX_CPU).chain(0..here);
    let core = std::iter::once(here)
        .chain(others.filter(|core| may(*core)))
        .find(is_free)?;
    if cores.len() <= core {
        cores.resize(core + 1, None);
    }
    if let Some(last) = cores.get_mut(core) {
        *last = Some(seen);
    }
    (core != here).then_some(core)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(thread: i32, at: Instant) -> Seen {
        Seen {
            thread: Pid::from_raw(thread).unwrap(),
            at,
        }
    }

    #[test]
    fn a_thread_leaves_a_core_where_another_had_a_large_message_just_now() {
        let (mut cores, now) = (Vec::new(), Instant::now());
        let four = |core| core < 4;
        assert_eq!(choose(&mut cores, 1, seen(1, now), four), None);
        // Itself it does not mind.
        assert_eq!(choose(&mut cores, 1, seen(1, now), four), None);
        assert_eq!(choose(&mut cores, 1, seen(2, now), four), Some(2));
        assert_eq!(choose(&mut cores, 2, seen(2, now), four), None);
        assert_eq!(choose(&mut cores, 2, seen(3, now), four), Some(3));
        assert_eq!(choose(&mut cores, 3, seen(4, now), four), Some(0));
        // Every core is taken: it is no better elsewhere.
        assert_eq!(choose(&mut cores, 3, seen(5, now), four), None);
        assert_eq!(cores.get(3).copied().flatten(), Some(seen(3, now)));
        // Those who were there have had nothing for a while.
        let later = now + BUSY;
        assert_eq!(choose(&mut cores, 1, seen(5, later), four), None);
        assert_eq!(choose(&mut cores, 1, seen(6, later), four), Some(2));
    }

    #[test]
    fn a_thread_goes_only_where_it_may_and_is_not_bound_there() {
        let now = Instant::now();
        let mut cores = vec![Some(seen(1, now)); 3];
        assert_eq!(choose(&mut cores, 1, seen(2, now), |core| core < 3), None);
        assert_eq!(
            choose(&mut cores, 1, seen(2, now), |core| core < 4),
            Some(3)
        );

        let allowed = sched_getaffinity(None).unwrap();
        let count = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
        if count.count() < 2 {
            return; // There is nowhere to go.
        }
        // Another is said to have been on whichever core this thread is on; it may be moved in between.
        for _ in 0..1000 {
            let cores = Cores::default();
            let here = sched_getcpu();
            *cores.0.lock() = vec![None; here];
            cores.0.lock().push(Some(seen(i32::MAX, Instant::now())));
            cores.part();
            assert_eq!(sched_getaffinity(None).unwrap(), allowed);
            let entry = |core: usize| cores.0.lock().get(core).copied().flatten();
            let chosen = (0..CpuSet::MAX_CPU)
                .find(|core| entry(*core).is_some_and(|seen| seen.thread == gettid()));
            assert!(
                chosen.is_some_and(|core| core != here),
                "{chosen:?}, not {here}"
            );
            if sched_getcpu() != here {
                return;
            }
        }
        panic!("the thread never moved");
    }
}
