//! Whether an address that a caller names is memory of this process at all.
//!
//! This process computes checksums as it sends, so an unmapped address would end the process.
//! Registered memory is checked once, other memory at each transfer.

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
    let Some(end) = address.checked_add(length) else {
        return Ok(false);
    };
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut reached = address;
    for line in maps.lines() {
        let Some((from, to, fits)) = parse(line, how) else {
            continue;
        };
        if to <= reached {
            continue;
        }
        // They come in order: what begins later leaves a gap.
        if from > reached || !fits {
            return Ok(false);
        }
        reached = to;
        if reached >= end {
            return Ok(true);
        }
    }
    Ok(reached >= end)
}

/// A line's range, and whether it can be used so.
fn parse(line: &str, how: Use) -> Option<(u64, u64, bool)> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let rights = fields.next()?;
    let path = fields.nth(3).unwrap_or("");
    let fits = rights.starts_with(match how {
        Use::Read => "r",
        Use::ReadWrite => "rw",
    });
    Some((
        u64::from_str_radix(from, 16).ok()?,
        u64::from_str_radix(to, 16).ok()?,
        fits && !path.starts_with("/dev/nvidia"),
    ))
}
