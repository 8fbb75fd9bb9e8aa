//! Copies of blocks that no cache holds.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// The source and the target of copies; all pages are touched.
#[derive(Debug)]
pub(crate) struct Copies {
    source: Vec<u8>,
    target: Vec<u8>,
    /// The start of the next copy in each thread's part.
    at: usize,
}

/// The layout of the copied blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Shape {
    /// The bytes of a block.
    pub(crate) block: u64,
    /// The number of pieces of a block.
    pub(crate) pieces: u64,
    /// The number of scattered blocks that lie side by side, layer by layer.
    pub(crate) group: u64,
}

impl Copies {
    /// Allocates `span` bytes on each side.
    pub(crate) fn new(span: u64) -> Self {
        let span = usize::try_from(span).unwrap_or(usize::MAX);
        Self {
            source: vec![0x5a; span],
            // Not zeroes: the kernel would map zero pages only at the first write.
            target: vec![0xa5; span],
            at: 0,
        }
    }

    /// The source.
    pub(crate) fn source(&self) -> &[u8] {
        &self.source
    }

    /// Copies about `bytes` of cold blocks with `threads`. Returns the bytes and the time; `None` if the
    /// memory has no room for one group of blocks for each thread.
    pub(crate) fn run(
        &mut self,
        shape: Shape,
        threads: usize,
        bytes: u64,
    ) -> Option<(u64, Duration)> {
        let step = usize::try_from(shape.block * shape.group).ok()?;
        let piece = usize::try_from(shape.block / shape.pieces.max(1)).ok()?;
        let part = self.source.len() / threads.max(1) / step.max(1) * step;
        if step == 0 || piece == 0 || part == 0 {
            return None;
        }
        let steps = usize::try_from(bytes).ok()?.div_ceil(step * threads).max(1);
        let from = self.at % part / step * step;
        let parts = self
            .source
            .chunks_exact(part)
            .zip(self.target.chunks_exact_mut(part))
            .take(threads);
        let begin = Instant::now();
        if threads == 1 {
            parts.for_each(|(source, target)| walk(source, target, from, steps, shape, piece));
        } else {
            std::thread::scope(|scope| {
                for (source, target) in parts {
                    scope.spawn(move || walk(source, target, from, steps, shape, piece));
                }
            });
        }
        let took = begin.elapsed();
        self.at = from + steps * step;
        Some(((steps * step * threads) as u64, took))
    }
}

/// Copies `steps` groups of blocks from `from` on; after the end it continues at the start.
fn walk(source: &[u8], target: &mut [u8], from: usize, steps: usize, shape: Shape, piece: usize) {
    let group = usize::try_from(shape.group).unwrap_or(1);
    let step = group * piece * usize::try_from(shape.pieces).unwrap_or(1);
    let groups = source.chunks_exact(step).zip(0..).cycle();
    for (source, number) in groups.skip(from / step).take(steps) {
        let at = number * step;
        let Some(target) = target.get_mut(at..at + step) else {
            return;
        };
        copy_group(black_box(source), target, group, piece);
        black_box(&*target);
    }
}

/// Copies contiguous blocks of `source` into the layout of a model's cache in `target`: each layer has one
/// piece of every block.
fn copy_group(source: &[u8], target: &mut [u8], group: usize, piece: usize) {
    let block = source.len() / group;
    for (number, block) in source.chunks_exact(block).enumerate() {
        let layers = target.chunks_exact_mut(group * piece);
        for (from, layer) in block.chunks_exact(piece).zip(layers) {
            if let Some(to) = layer.get_mut(number * piece..(number + 1) * piece) {
                to.copy_from_slice(from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_blocks_lie_layer_by_layer() {
        // Two blocks of three pieces of one byte.
        let mut target = [0; 6];
        copy_group(b"abcxyz", &mut target, 2, 1);
        assert_eq!(&target, b"axbycz");
        copy_group(b"abcxyz", &mut target, 1, 6);
        assert_eq!(&target, b"abcxyz");
    }

    #[test]
    fn a_run_walks_through_all_of_the_memory() {
        let mut copies = Copies::new(64 << 10);
        let shape = Shape {
            block: 4 << 10,
            pieces: 4,
            group: 2,
        };
        let (bytes, _) = copies.run(shape, 1, 20 << 10).unwrap();
        assert_eq!(bytes, 24 << 10, "whole groups");
        assert_eq!(
            copies.target.iter().filter(|b| **b == 0x5a).count(),
            24 << 10
        );
        let (bytes, _) = copies.run(shape, 2, 64 << 10).unwrap();
        assert_eq!(bytes, 64 << 10);
        assert!(copies.target.iter().all(|byte| *byte == 0x5a));
        assert!(copies.run(shape, 16, 1).is_none(), "a part holds no group");
    }
}
