//! Threads that send large payloads inside one machine, each on a core of its own.

use super::cores::Leave;
use super::one_machine::ends_on_one_machine;
use parking_lot::Mutex;
use rustix::thread::sched_getcpu;
use std::os::fd::BorrowedFd;

/// The cores of threads that send now, one entry each.
#[derive(Debug, Default)]
struct Senders(Mutex<Vec<usize>>);

/// Those of this process.
static SENDERS: Senders = Senders(Mutex::new(Vec::new()));

/// Keeps the thread that sends apart from others that do, until it is dropped.
///
/// A receiver inside the machine goes where its sender is. Two senders on one core would have all four
/// ends there, waiting for each other, and another core idle; it takes the scheduler milliseconds to
/// notice, which is as long as a batch lasts.
#[derive(Debug)]
pub(crate) struct Apart<'a> {
    senders: &'a Senders,
    leave: Leave,
    /// Its entry among the senders.
    on: usize,
}

impl Apart<'static> {
    /// Begins to keep apart; `None` where the receiver is not on this machine.
    pub(crate) fn begin(socket: BorrowedFd<'_>) -> Option<Self> {
        if ends_on_one_machine(socket) {
            SENDERS.join()
        } else {
            None
        }
    }
}

impl Senders {
    fn join(&self) -> Option<Apart<'_>> {
        let mut apart = Apart {
            senders: self,
            leave: Leave::take()?,
            on: sched_getcpu(),
        };
        self.0.lock().push(apart.on);
        apart.keep();
        Some(apart)
    }
}

impl Apart<'_> {
    /// Goes to a core where nobody sends, when somebody does on this one and there is one that the
    /// thread may run on.
    pub(crate) fn keep(&mut self) {
        let here = sched_getcpu();
        let mut senders = self.senders.0.lock();
        enter(&mut senders, &mut self.on, here);
        if senders.iter().filter(|core| **core == here).count() < 2 {
            return;
        }
        let Some(core) = self.leave.first(|core| !senders.contains(&core)) else {
            return;
        };
        // The others see that it is taken before the move, which takes a while.
        enter(&mut senders, &mut self.on, core);
        drop(senders);
        self.leave.go_to(core);
    }
}

/// Changes an entry from the core that it names.
fn enter(senders: &mut [usize], on: &mut usize, core: usize) {
    if let Some(entry) = senders.iter_mut().find(|entry| *entry == on) {
        *entry = core;
    }
    *on = core;
}

impl Drop for Apart<'_> {
    fn drop(&mut self) {
        let mut senders = self.senders.0.lock();
        if let Some(at) = senders.iter().position(|core| *core == self.on) {
            senders.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Mutex, Senders, sched_getcpu};
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    fn allowed() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU)
            .filter(|core| set.is_set(*core))
            .collect()
    }

    /// Has the thread run on `core`, free to go elsewhere.
    fn go_to(core: usize) {
        let allowed = sched_getaffinity(None).unwrap();
        let mut one = CpuSet::new();
        one.set(core);
        sched_setaffinity(None, &one).unwrap();
        sched_setaffinity(None, &allowed).unwrap();
    }

    #[test]
    fn a_sender_goes_where_nobody_sends_and_comes_back() {
        let before = allowed();
        let [first, .., last] = *before else {
            return; // There is nowhere to go.
        };
        let taken: Vec<usize> = before
            .iter()
            .copied()
            .filter(|core| *core != last)
            .collect();
        let senders = Senders(Mutex::new(taken.clone()));
        go_to(first);
        let mut apart = senders.join().unwrap();
        assert_eq!(sched_getcpu(), last);
        assert_eq!(apart.on, last);
        // Nobody else is there: it stays.
        apart.keep();
        assert_eq!(sched_getcpu(), last);
        assert_eq!(senders.0.lock().len(), before.len());
        drop(apart);
        assert_eq!(
            allowed(),
            before,
            "the thread may run where it might before"
        );
        assert_eq!(*senders.0.lock(), taken);
    }

    #[test]
    fn a_sender_stays_where_every_core_is_taken() {
        let before = allowed();
        let senders = Senders(Mutex::new(before.clone()));
        let apart = senders.join().unwrap();
        assert_eq!(allowed(), before, "it is not bound");
        drop(apart);
        assert_eq!(senders.0.lock().len(), before.len());
    }

    #[test]
    fn a_sender_stays_within_the_cores_that_it_may_use() {
        let before = sched_getaffinity(None).unwrap();
        let [first, ..] = *allowed() else {
            return;
        };
        let mut one = CpuSet::new();
        one.set(first);
        sched_setaffinity(None, &one).unwrap();
        let senders = Senders(Mutex::new(vec![first]));
        let apart = senders.join().unwrap();
        assert_eq!(allowed(), [first]);
        drop(apart);
        assert_eq!(allowed(), [first]);
        sched_setaffinity(None, &before).unwrap();
    }
}
