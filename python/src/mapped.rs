//! Whether an address that a caller names is memory of this process at all.
//!
//! This process computes checksums as it sends, so an unmapped address would end the process.
//! Registered memory is checked once, other memory at each transfer.
//!
//! The memory maps of the process are exact, and a process with many mappings takes long to read them. So they are
//! read for a registration. A call probes the first and the last page of its memory. A page that is unmapped between
//! these two, or after the check, is not noticed.

// UNSAFETY: asks the kernel to fault a page in, by its address.
#![allow(unsafe_code, reason = "a page is probed by its address")]

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use std::io;

/// What is to be done with the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// It is only read.
    Read,
    /// It is read and written.
    ReadWrite,
}

/// Whether the processor can use all of a range in this way. Memory of a GPU is mapped in part by its
/// driver, but the processor cannot touch it.
pub(crate) fn is_mapped(address: u64, length: u64, how: Use) -> io::Result<bool> {
    is_covered(address, length, |rights, path| {
        allows(rights, how) && !path.starts_with("/dev/nvidia")
    })
}

/// [`is_mapped`] for memory that the driver of the GPUs says is the host's. That driver may map pinned memory of the
/// host through a file of its own.
pub(crate) fn is_host_mapped(address: u64, length: u64, how: Use) -> io::Result<bool> {
    is_covered(address, length, |rights, _path| allows(rights, how))
}

/// Whether the processor can use the first and the last page of memory of the host in this way.
///
/// `MADV_POPULATE_READ` and `MADV_POPULATE_WRITE` of Linux 5.14 fault a page in as an access would, and change no
/// byte. `process_vm_writev` would have to write a byte, which another thread may change meanwhile.
pub(crate) fn has_usable_ends(address: usize, length: u64, how: Use) -> bool {
    if length == 0 {
        return true;
    }
    let last = usize::try_from(length - 1)
        .ok()
        .and_then(|length| address.checked_add(length));
    let Some(last) = last else { return false };
    let page = rustix::param::page_size();
    let (first, last) = (address & !(page - 1), last & !(page - 1));
    is_usable_page(first, page, how) && (last == first || is_usable_page(last, page, how))
}

fn is_usable_page(start: usize, page: usize, how: Use) -> bool {
    let advice = match how {
        Use::Read => Advice::LinuxPopulateRead,
        Use::ReadWrite => Advice::LinuxPopulateWrite,
    };
    // SAFETY: this advice changes no byte of any memory, and fails where there is none.
    let populated = unsafe { madvise(std::ptr::without_provenance_mut(start), page, advice) };
    match populated {
        Ok(()) => true,
        // An access would end the process: the page is past the end of its file, or the machine has lost it.
        Err(Errno::FAULT | Errno::HWPOISON) => false,
        // An older kernel, and a device's memory, know no such advice. Of what is not mapped the maps know too.
        Err(_) => is_host_mapped(start as u64, page as u64, how).unwrap_or(false),
    }
}

/// Whether mapped ranges that `fits` takes, by their rights and their path, cover a range.
fn is_covered(address: u64, length: u64, fits: impl Fn(&str, &str) -> bool) -> io::Result<bool> {
    let Some(end) = address.checked_add(length) else {
        return Ok(false);
    };
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut reached = address;
    for line in maps.lines() {
        let Some((from, to, rights, path)) = parse(line) else {
            continue;
        };
        if to <= reached {
            continue;
        }
        // They come in order: what begins later leaves a gap.
        if from > reached || !fits(rights, path) {
            return Ok(false);
        }
        reached = to;
        if reached >= end {
            return Ok(true);
        }
    }
    Ok(reached >= end)
}

/// Whether rights as the maps write them, such as `rw-p`, allow this use.
fn allows(rights: &str, how: Use) -> bool {
    rights.starts_with(match how {
        Use::Read => "r",
        Use::ReadWrite => "rw",
    })
}

/// A line's range, its rights and its path.
fn parse(line: &str) -> Option<(u64, u64, &str, &str)> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let rights = fields.next()?;
    let path = fields.nth(3).unwrap_or("");
    Some((
        u64::from_str_radix(from, 16).ok()?,
        u64::from_str_radix(to, 16).ok()?,
        rights,
        path,
    ))
}
