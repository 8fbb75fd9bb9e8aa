//! How fast the disk takes 4 KiB for good.

use crate::bench::window::{Meter, Window};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// The bytes of a write.
const BYTES: usize = 4096;
/// How many of them the file holds.
const PLACES: usize = 1024;

/// A file whose room was written before, on the filesystem that the pools of a run are on.
#[derive(Debug)]
pub(crate) struct Flush {
    file: File,
    next: u64,
}

impl Flush {
    /// Makes the file. It has no name, so it goes with this.
    pub(crate) fn new() -> io::Result<Self> {
        let file = tempfile::tempfile()?;
        file.write_all_at(&vec![0; BYTES * PLACES], 0)?;
        file.sync_all()?;
        Ok(Self { file, next: 0 })
    }

    /// Writes and flushes for as long as the window says.
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
