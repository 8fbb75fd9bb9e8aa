//! The randomness that the standard library takes by itself: the keys of its hash maps.
//!
//! A map's order follows from these keys, so a simulation must own them too. The standard library asks the C
//! library's `getrandom` for them, once a thread. This module is that function for the simulator's programs. On a
//! thread of the simulator it answers from a generator; on any other it asks the kernel.

// UNSAFETY: a function of the C library is replaced, and fills memory of its caller.
#![expect(unsafe_code, reason = "the module's documentation")]

use std::cell::Cell;
use std::ffi::{c_uint, c_void};

thread_local! {
    /// The state of the generator, on a thread of the simulator.
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Makes the maps of this thread follow from `seed`. It works on a thread that has made no map yet.
pub(crate) fn seed_thread(seed: u64) {
    STATE.set(Some(seed));
}

/// The next value of splitmix64 (Steele, Lea and Flood, 2014).
pub(crate) fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// As in `getrandom(2)`.
///
/// # Safety
///
/// `buffer` must be valid for writes of `length` bytes.
#[expect(unreachable_pub, reason = "the linker reaches it")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(buffer: *mut c_void, length: usize, flags: c_uint) -> isize {
    let Some(mut state) = STATE.get() else {
        // SAFETY: the caller's promise is the one that the system call asks for.
        return unsafe { from_kernel(buffer, length, flags) };
    };
    for at in 0..length {
        let [byte, ..] = splitmix(&mut state).to_le_bytes();
        // SAFETY: `at` is below `length`, which the caller vouches for.
        unsafe { buffer.cast::<u8>().wrapping_add(at).write(byte) };
    }
    STATE.set(Some(state));
    isize::try_from(length).unwrap_or(isize::MAX)
}

/// # Safety
///
/// As [`getrandom`].
unsafe fn from_kernel(buffer: *mut c_void, length: usize, flags: c_uint) -> isize {
    // SAFETY: the arguments are those of the system call, and valid by the caller's promise.
    let given = unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) };
    isize::try_from(given).unwrap_or(-1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{BuildHasher, RandomState};

    fn hash_on_thread_of(seed: u64) -> u64 {
        let hash = move || {
            seed_thread(seed);
            RandomState::new().hash_one("a key")
        };
        std::thread::spawn(hash).join().unwrap()
    }

    #[test]
    fn the_keys_of_maps_follow_from_the_seed_of_the_thread() {
        assert_eq!(hash_on_thread_of(7), hash_on_thread_of(7));
        assert_ne!(hash_on_thread_of(7), hash_on_thread_of(8));
    }

    #[test]
    fn other_threads_keep_the_kernels_randomness() {
        let hash = || std::thread::spawn(|| RandomState::new().hash_one("a key"));
        assert_ne!(hash().join().unwrap(), hash().join().unwrap());
    }
}
