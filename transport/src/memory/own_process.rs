//! Tells the process that created a value from its forked children. A child inherits every value, but neither
//! the threads nor the mappings of segments.

use super::populate::advise;
use super::{Owner, Region, Slice};
use kvpool_types::Offset;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::io;
use std::ptr::NonNull;

const PAGE: usize = 4096;
const HERE: u8 = 1;

/// A byte that the kernel zeroes in every forked child. Reading it takes a nanosecond; asking for
/// the process id takes a system call.
#[derive(Debug)]
pub(crate) struct OwnProcess(Slice);

impl OwnProcess {
    /// Marks this process. Fails as `mmap` and `madvise` do.
    pub(crate) fn mark() -> io::Result<Self> {
        // SAFETY: no address is asked for, so the kernel maps over no memory in use.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("the kernel mapped the null page"))?;
        let region = Region::new(start, PAGE, true, Owner::Mapping);
        advise(&region, 0, region.length().0, Advice::LinuxWipeOnFork)?;
        let mark = region.whole();
        mark.write_at(Offset(0), &[HERE]);
        Ok(Self(mark))
    }

    /// Whether the caller runs in the marked process.
    pub(crate) fn is_current(&self) -> bool {
        let mut mark = [0];
        self.0.read_at(Offset(0), &mut mark);
        mark == [HERE]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_is_another_process() {
        let mark = OwnProcess::mark().unwrap();
        assert!(mark.is_current());
        // SAFETY: the child does nothing but read a byte and end at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(mark.is_current());
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made; the status goes to a local.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(waited, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
        assert!(mark.is_current());
    }
}
