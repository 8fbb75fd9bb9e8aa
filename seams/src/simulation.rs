//! The simulation's side of the seams. It holds on the thread that entered it, until the guard is dropped.

use rand::RngCore;
use std::cell::RefCell;
use std::time::Duration;

/// What takes the machine's place.
pub struct Machine {
    /// The time since boot.
    pub now: Box<dyn Fn() -> Duration>,
    /// The source of all randomness.
    pub generator: Box<dyn RngCore>,
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machine").finish_non_exhaustive()
    }
}

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

/// Ends the simulation on this thread when it is dropped.
#[derive(Debug)]
#[must_use]
pub struct Entered(());

/// Lets `machine` take the machine's place on this thread.
pub fn enter(machine: Machine) -> Entered {
    MACHINE.with_borrow_mut(|current| *current = Some(machine));
    Entered(())
}

impl Drop for Entered {
    fn drop(&mut self) {
        // Its parts may use the seams as they are dropped.
        let machine = MACHINE.with_borrow_mut(Option::take);
        drop(machine);
    }
}

/// Whether a simulation runs on this thread.
pub(crate) fn is_entered() -> bool {
    MACHINE.with_borrow(Option::is_some)
}

/// The simulated time; `None` outside of a simulation.
pub(crate) fn now() -> Option<Duration> {
    MACHINE.with_borrow(|machine| machine.as_ref().map(|machine| (machine.now)()))
}

/// A value from the simulation's generator; `None` outside of a simulation.
pub(crate) fn draw<T>(draw: impl FnOnce(&mut dyn RngCore) -> T) -> Option<T> {
    MACHINE.with_borrow_mut(|machine| {
        let machine = machine.as_mut()?;
        Some(draw(&mut *machine.generator))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    fn machine(seed: u64) -> Machine {
        Machine {
            now: Box::new(|| Duration::from_secs(9)),
            generator: Box::new(StdRng::seed_from_u64(seed)),
        }
    }

    #[test]
    fn a_simulation_owns_time_and_randomness_of_its_thread_only() {
        let entered = enter(machine(4));
        let first: u64 = crate::random();
        assert_eq!(crate::boot_time(), Duration::from_secs(9));
        let elsewhere = std::thread::spawn(is_entered).join();
        assert!(matches!(elsewhere, Ok(false)));
        drop(entered);
        assert!(!is_entered());
        assert!(crate::thread("a", || ()).is_ok());
        let _again = enter(machine(4));
        assert_eq!(crate::random::<u64>(), first);
    }

    #[test]
    fn a_simulation_has_one_thread_which_waits_for_nothing() {
        let _entered = enter(machine(4));
        assert!(crate::thread("a", || ()).is_err());
        let limit = Duration::from_secs(60);
        assert!(crate::end_of_wait(limit) < std::time::Instant::now() + limit);
    }
}
