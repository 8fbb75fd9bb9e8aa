//! Checks whether an address of a caller is memory of this process.
//!
//! This process computes checksums as it sends, so an unmapped address would end the process.
//! Registered memory is checked once, other memory at each transfer.
//!
//! The check must not touch the memory. A page fault can wait for a disk, or for a thread that waits for the
//! interpreter's lock. So `process_vm_readv` and `MADV_POPULATE_WRITE` cannot be used. Linux 6.11 and later
//! return the mapping at one address. On earlier kernels a call reads all maps of the process once.
//!
//! Two faults stay unnoticed: memory that is unmapped after the check, and a page past the end of its mapped
//! file.

// UNSAFETY: asks the kernel for the mapping at an address, by an ioctl that rustix has no function for.
#![allow(unsafe_code, reason = "an ioctl of the process's maps")]

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use std::cell::OnceCell;
use std::fs::File;
use std::io;

const MAPS: &str = "/proc/self/maps";

/// The access that a transfer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Read only.
    Read,
    /// Read and write.
    ReadWrite,
}

/// Whether the processor can access all of a range in this way. A GPU's driver maps parts of the GPU's memory,
/// but the processor cannot touch them.
pub(crate) fn is_mapped(address: u64, length: u64, how: Use) -> io::Result<bool> {
    let Some(end) = address.checked_add(length) else {
        return Ok(false);
    };
    let maps = std::fs::read_to_string(MAPS)?;
    let mut reached = address;
    for mapping in maps.lines().filter_map(Mapping::parse) {
        if mapping.to <= reached {
            continue;
        }
        // The mappings are in the order of their addresses, so a later start leaves a gap.
        if mapping.from > reached || !mapping.allows(how) || mapping.is_of_gpu {
            return Ok(false);
        }
        reached = mapping.to;
        if reached >= end {
            return Ok(true);
        }
    }
    Ok(reached >= end)
}

/// Checks host memory for one call.
///
/// The caller has asked the GPU driver before. That driver may map pinned host memory through a file of its
/// own. So this check ignores the file of a mapping.
#[derive(Default)]
pub(crate) struct Lookup {
    file: OnceCell<Option<File>>,
    /// All mappings, read if the kernel cannot return a single one; the inner `None` if they cannot be read.
    maps: OnceCell<Option<Vec<Mapping>>>,
}

impl Lookup {
    /// Whether the processor can access all of a range in this way. Without `/proc` the answer is unknown, and
    /// every range is allowed.
    pub(crate) fn allows(&self, address: usize, length: u64, how: Use) -> bool {
        let mut reached = address as u64;
        let Some(end) = reached.checked_add(length) else {
            return false;
        };
        while reached < end {
            match self.mapped_until(reached, how) {
                Some(next) if next > reached => reached = next,
                _ => return false,
            }
        }
        true
    }

    /// The end of the mapping that holds `address`; `None` if no mapping allows this use.
    fn mapped_until(&self, address: u64, how: Use) -> Option<u64> {
        let file = self.file.get_or_init(|| File::open(MAPS).ok());
        if let Some(file) = file {
            match MappingQuery::ask(file, address, how) {
                Ok(end) => return Some(end),
                Err(Errno::NOENT) => return None,
                // A kernel before 6.11.
                Err(_) => {}
            }
        }
        let maps = self.maps.get_or_init(|| {
            let maps = std::fs::read_to_string(MAPS).ok()?;
            Some(maps.lines().filter_map(Mapping::parse).collect())
        });
        let Some(maps) = maps else {
            return Some(u64::MAX);
        };
        let at = maps.partition_point(|mapping| mapping.to <= address);
        let found = maps.get(at).filter(|mapping| mapping.from <= address);
        found
            .filter(|mapping| mapping.allows(how))
            .map(|mapping| mapping.to)
    }
}

/// The ioctl that takes a [`MappingQuery`].
const PROCMAP_QUERY: Opcode = opcode::read_write::<MappingQuery>(b'f', 17);

/// `struct procmap_query` of Linux.
#[repr(C)]
#[derive(Default)]
struct MappingQuery {
    size: u64,
    flags: u64,
    address: u64,
    _start: u64,
    end: u64,
    /// Rights, page size, offset, inode, device, and the buffers for names. This module does not ask for names.
    _others: [u64; 8],
}

impl MappingQuery {
    /// Asks only for a readable mapping.
    const READABLE: u64 = 1;
    /// Asks only for a writable mapping.
    const WRITABLE: u64 = 2;

    /// The end of the mapping that holds `address`. [`Errno::NOENT`] if no mapping allows this use.
    fn ask(maps: &File, address: u64, how: Use) -> Result<u64, Errno> {
        let mut query = Self {
            size: size_of::<Self>() as u64,
            flags: match how {
                Use::Read => Self::READABLE,
                Use::ReadWrite => Self::READABLE | Self::WRITABLE,
            },
            address,
            ..Self::default()
        };
        // SAFETY: `PROCMAP_QUERY` is the code for this structure.
        let updater = unsafe { Updater::<PROCMAP_QUERY, Self>::new(&mut query) };
        // SAFETY: the structure holds its own size. Without buffers for names the kernel writes only to the
        // structure. Another kind of file refuses the code.
        let asked = unsafe { ioctl(maps, updater) };
        asked.map(|()| query.end)
    }
}

/// A line of the maps file.
struct Mapping {
    from: u64,
    to: u64,
    is_readable: bool,
    is_writable: bool,
    is_of_gpu: bool,
}

impl Mapping {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        let rights = fields.next()?;
        let path = fields.nth(3).unwrap_or("");
        Some(Self {
            from: u64::from_str_radix(from, 16).ok()?,
            to: u64::from_str_radix(to, 16).ok()?,
            is_readable: rights.starts_with('r'),
            is_writable: rights.starts_with("rw"),
            is_of_gpu: path.starts_with("/dev/nvidia"),
        })
    }

    fn allows(&self, how: Use) -> bool {
        match how {
            Use::Read => self.is_readable,
            Use::ReadWrite => self.is_writable,
        }
    }
}
