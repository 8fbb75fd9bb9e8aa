//! Caches the absence of a library until the process loads another library.

// UNSAFETY: asks the dynamic linker how many libraries it has loaded.
#![allow(unsafe_code, reason = "the dynamic linker has a C interface")]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// A library that was absent at the last search. A search makes the linker read the system's folders, map a
/// file and unmap it. This interrupts threads on other cores, which is too costly for every call.
#[derive(Debug)]
pub(super) struct Absent(AtomicU64);

impl Absent {
    /// The state before the first search.
    pub(super) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Whether the library is still absent. Calls `is_there` only if the process has loaded libraries since
    /// the last search.
    pub(super) fn is_so(&self, is_there: impl FnOnce() -> bool) -> bool {
        // The count is taken before the search, so a library that is loaded meanwhile causes another search.
        let loads = loads();
        if self.0.load(Ordering::Acquire) == loads {
            return true;
        }
        if is_there() {
            return false;
        }
        self.0.store(loads, Ordering::Release);
        true
    }
}

/// The number of libraries that the process has ever loaded, with the program itself.
fn loads() -> u64 {
    unsafe extern "C" fn first(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        loads: *mut c_void,
    ) -> c_int {
        // SAFETY: the linker passes a valid description of one library.
        let adds = unsafe { (*info).dlpi_adds };
        // SAFETY: the linker passes on the pointer that it was given below.
        unsafe { loads.cast::<u64>().write(adds) };
        1
    }
    let mut loads = 0_u64;
    // SAFETY: `first` runs before this returns, with a pointer to a number that it may write.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut loads).cast()) };
    loads
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    /// The C library includes this library, and no program needs it.
    const LIBRARY: &CStr = c"libBrokenLocale.so.1";

    fn open(flags: c_int) -> bool {
        // SAFETY: the library has no initialisers.
        !unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | flags) }.is_null()
    }

    #[test]
    fn a_library_is_looked_for_again_only_when_something_was_loaded() {
        let absent = Absent::new();
        let mut looks = 0;
        for _ in 0..1000 {
            let is_there = || {
                looks += 1;
                open(libc::RTLD_NOLOAD)
            };
            assert!(absent.is_so(is_there));
        }
        // Other tests of the process may load libraries meanwhile, but not as many.
        assert!((1..100).contains(&looks), "{looks} looks");
        assert!(open(0), "{LIBRARY:?} comes with the C library");
        assert!(!absent.is_so(|| open(libc::RTLD_NOLOAD)));
    }
}
