//! Durable writes of 4 KiB to the disk.

use crate::window::{Meter, Window};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// The length of a write, in bytes.
const BYTES: usize = 4096;
/// The number of writes that the file holds.
const PLACES: usize = 1024;

/// A file with all its blocks allocated, on the filesystem of the pools' metadata.
#[derive(Debug)]
pub(crate) struct Flush {
    file: File,
    next: u64,
}

impl Flush {
    /// Creates the file without a name, so it is deleted with this value.
    pub(crate) fn new() -> io::Result<Self> {
        let file = tempfile::tempfile()?;
        file.write_all_at(&vec![0; BYTES * PLACES], 0)?;
        file.sync_all()?;
        Ok(Self { file, next: 0 })
    }

    /// Writes and flushes for one window.
    pub(crate) fn run(&mut self, window: Window) -> io::Result<Meter> {
        let mut meter = Meter::default();
        let bytes = [1; BYTES];
        while !meter.fills(window) {
            let begin = Instant::now();
            let place = (self.next % PLACES as u64) * BYTES as u64;
            self.file.write_all_at(&bytes, place)?;
            self.file.sync_data()?;
            meter.add(begin.elapsed(), BYTES as u64);
            self.next += 1;
        }
        Ok(meter)
    }
}
