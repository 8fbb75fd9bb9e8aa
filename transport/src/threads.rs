//! Starts threads. A test can make that fail, as it does where a process may have no more of them.

use std::io;

/// Starts a thread that nobody joins.
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
        /// How many more threads this one may start.
        static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// Lets `work` start `most` threads and no more.
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
