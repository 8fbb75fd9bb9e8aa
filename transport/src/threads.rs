//! Starts threads. A test can make a start fail, as it does when the process has reached its limit of
//! threads.

use std::io;

/// Starts a thread that is never joined.
pub(crate) fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    #[cfg(test)]
    testing::take_turn()?;
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .map(drop)
}

#[cfg(test)]
pub(crate) mod testing {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        /// The number of threads that this test thread may still start.
        static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// Lets `work` start at most `most` threads.
    pub(crate) fn at_most<T>(most: usize, work: impl FnOnce() -> T) -> T {
        LEFT.set(most);
        let done = work();
        LEFT.set(usize::MAX);
        done
    }

    pub(super) fn take_turn() -> io::Result<()> {
        let left = LEFT.get().checked_sub(1);
        LEFT.set(left.ok_or(io::ErrorKind::WouldBlock)?);
        Ok(())
    }
}
