//! The seams between kvpool and the machine: the time since boot, randomness, the order of maps, the number of cores,
//! threads, and work on other threads.
//!
//! The daemons and the client take these from here only. So a simulation can take the machine's place (ADR 0052):
//! the feature `simulation` adds the module of that name. Without the feature, each function is a plain call of the
//! machine, and costs no more.
//!
//! Timers and intervals come from `tokio::time`, which a simulation pauses.

#![forbid(unsafe_code)]

pub mod maps;
#[cfg(feature = "simulation")]
pub mod simulation;

use rand::distr::uniform::{SampleRange, SampleUniform};
use rand::distr::{Distribution, StandardUniform};
use std::io;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time since the machine's boot (`CLOCK_BOOTTIME`). It counts while the machine sleeps, and nobody can set it.
pub fn boot_time() -> Duration {
    #[cfg(feature = "simulation")]
    if let Some(now) = simulation::now() {
        return now;
    }
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // The clock begins at zero and only grows, so neither part is negative.
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// A random value that nobody can guess.
pub fn random<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    #[cfg(feature = "simulation")]
    if let Some(value) = simulation::draw(|generator| StandardUniform.sample(generator)) {
        return value;
    }
    rand::random()
}

/// A random value in `range`, which must not be empty.
pub fn random_range<T: SampleUniform>(range: impl SampleRange<T> + Clone) -> T {
    #[cfg(feature = "simulation")]
    if let Some(value) =
        simulation::draw(|generator| range.clone().sample_single(generator).ok()).flatten()
    {
        return value;
    }
    rand::random_range(range)
}

/// The end of a wait of at most `limit` that blocks its thread. In a simulation it is the present: while the only
/// thread waits, nothing else happens.
pub fn end_of_wait(limit: Duration) -> Instant {
    #[cfg(feature = "simulation")]
    if simulation::is_entered() {
        return Instant::now();
    }
    Instant::now() + limit
}

/// The number of the machine's cores that this process may use, if it can be told. In a simulation the seed chooses
/// it anew for each caller, so histories do not depend on the machine that runs them.
pub fn cores() -> Option<usize> {
    #[cfg(feature = "simulation")]
    if let Some(cores) = simulation::draw(|generator| 1 << (generator.next_u32() % 6)) {
        return Some(cores);
    }
    std::thread::available_parallelism().ok().map(usize::from)
}

/// Starts a thread with this name. A simulation has one thread only, and refuses.
pub fn thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    #[cfg(feature = "simulation")]
    if simulation::is_entered() {
        return Err(io::Error::other(format!(
            "the simulation has no thread for {name}"
        )));
    }
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
}

/// Why [`blocking`] has no result: the work panicked, or the runtime shuts down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished;

/// Runs `work`, which may block, on a thread beside the runtime's.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Unfinished> {
    #[cfg(feature = "simulation")]
    if simulation::is_entered() {
        return Ok(work());
    }
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| Unfinished)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_boot_clock_does_not_go_back() {
        let first = boot_time();
        assert!(first > Duration::ZERO);
        assert!(boot_time() >= first);
    }

    #[test]
    fn random_values_differ_and_stay_in_their_range() {
        assert_ne!(random::<u128>(), random::<u128>());
        assert!((0.5..=1.0).contains(&random_range(0.5..=1.0)));
    }

    #[tokio::test]
    async fn work_that_panics_is_unfinished() {
        assert_eq!(blocking(|| 7).await, Ok(7));
        let panics = blocking(|| -> u8 { panic!("a fault in the work") });
        assert_eq!(panics.await, Err(Unfinished));
    }
}
