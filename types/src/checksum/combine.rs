//! Combines the checksums of two runs of bytes into the checksum of both.
//!
//! Appending zero bytes to a run is a linear map of its CRC: a 64 by 64 matrix over GF(2). The
//! matrices for 1, 2, 4, ... zero bytes are computed once. A combination then costs one product of
//! a matrix and a vector for each set bit of the length: one product for a full chunk.
//!
//! `crc_fast::checksum_combine` makes its matrices at every call. For a chunk of 64 KiB it took 29
//! us, and this module 0.15 us (one core, profile release). A block of 16 MiB has 256 chunks. The
//! tests of `kvpool-transport` compare the two.

use super::{CHUNK, Checksum};
use crate::Length;
use std::sync::OnceLock;

/// The polynomial of CRC-64/NVME, bits reflected as the register holds them.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

/// Column `i` is the image of the vector that has only bit `i` set.
type Matrix = [u64; 64];

/// The checksum of two consecutive runs of bytes. `length` is the length of the second run in bytes.
pub fn combine(first: Checksum, second: Checksum, length: Length) -> Checksum {
    static POWERS: OnceLock<Box<[Matrix; 64]>> = OnceLock::new();
    let powers = POWERS.get_or_init(make_powers);
    // The initial value and the final xor are both all ones, so they cancel out.
    let shifted = powers
        .iter()
        .enumerate()
        .filter(|(bit, _)| length.0 >> bit & 1 == 1)
        .fold(first.0, |crc, (_, matrix)| times(matrix, crc));
    Checksum(shifted ^ second.0)
}

/// Combines the checksums of a block's chunks, in order, into the block's checksum. `length` is the block's
/// length in bytes.
pub fn combine_chunks(length: Length, chunks: &[Checksum]) -> Checksum {
    let mut left = length.0;
    chunks.iter().fold(Checksum(0), |whole, chunk| {
        let size = left.min(CHUNK);
        left -= size;
        combine(whole, *chunk, Length(size))
    })
}

/// The matrices that append `1 << i` zero bytes.
fn make_powers() -> Box<[Matrix; 64]> {
    let mut matrix = one_zero_bit();
    for _ in 0..3 {
        matrix = square(&matrix);
    }
    let mut powers = Box::new([[0; 64]; 64]);
    for power in powers.iter_mut() {
        *power = matrix;
        matrix = square(&matrix);
    }
    powers
}

/// The matrix that appends one zero bit. The register shifts right by one; a bit that is shifted
/// out adds the polynomial.
fn one_zero_bit() -> Matrix {
    let mut matrix = [0; 64];
    for (bit, column) in matrix.iter_mut().enumerate() {
        *column = if bit == 0 { POLYNOMIAL } else { 1 << (bit - 1) };
    }
    matrix
}

fn square(matrix: &Matrix) -> Matrix {
    matrix.map(|column| times(matrix, column))
}

fn times(matrix: &Matrix, vector: u64) -> u64 {
    matrix.iter().enumerate().fold(0, |sum, (bit, column)| {
        sum ^ (column & (vector >> bit & 1).wrapping_neg())
    })
}
