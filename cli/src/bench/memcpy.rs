//! How fast this machine copies blocks that no cache holds.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// How far apart the same bytes are touched again: more than last-level caches hold.
const SPAN: usize = 256 << 20;

/// Memory to copy from and to, touched.
#[derive(Debug)]
pub(crate) struct Copies {
    source: Vec<u8>,
    target: Vec<u8>,
    block: usize,
    at: usize,
}

impl Copies {
    /// Room for blocks of `block` bytes.
    pub(crate) fn new(block: usize) -> Self {
        Self {
            source: vec![0x5a; SPAN],
            // Not zeroes: those would be pages that are not there until they are written.
            target: vec![0xa5; SPAN],
            block,
            at: 0,
        }
    }

    /// Copies `blocks` blocks, each cold, and returns the time.
    pub(crate) fn run(&mut self, blocks: usize) -> Duration {
        let begin = Instant::now();
        for _ in 0..blocks {
            if self.at + self.block > SPAN {
                self.at = 0;
            }
            let range = self.at..self.at + self.block;
            let (Some(source), Some(target)) =
                (self.source.get(range.clone()), self.target.get_mut(range))
            else {
                break;
            };
            target.copy_from_slice(black_box(source));
            black_box(&target);
            self.at += self.block;
        }
        begin.elapsed()
    }
}
