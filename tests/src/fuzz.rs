//! A fuzz runner: a committed corpus, and mutations of it that follow only from a seed.
//!
//! A finding is a number and the bytes in hexadecimal. To keep it, put the bytes into a file of the
//! corpus: from then on every run begins with them.

use anyhow::Context;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

/// The longest input that is made, in bytes.
const MOST: usize = 8 << 10;

/// The number of mutations of a test: `KVPOOL_FUZZ`, or `usually`.
pub fn cases(usually: u64) -> u64 {
    let told = std::env::var("KVPOOL_FUZZ").ok();
    told.and_then(|told| told.parse().ok()).unwrap_or(usually)
}

/// The seed of the random choices: `KVPOOL_FUZZ_SEED`, or a constant.
pub fn seed() -> u64 {
    let told = std::env::var("KVPOOL_FUZZ_SEED").ok();
    told.and_then(|told| told.parse().ok()).unwrap_or(17)
}

/// Inputs for one decoder.
#[derive(Debug)]
pub struct Corpus {
    inputs: Vec<Vec<u8>>,
    random: StdRng,
}

impl Corpus {
    /// The inputs in the files of `tests/fuzz/name`, one in each line in hexadecimal, and `more`
    /// inputs of the test.
    pub fn load(name: &str, more: Vec<Vec<u8>>) -> anyhow::Result<Self> {
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz");
        let path = directory.join(format!("{name}.hex"));
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        let lines = text.lines().map(str::trim);
        let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        let mut inputs = lines
            .map(|line| from_hex(line).with_context(|| format!("{}: {line}", path.display())))
            .collect::<anyhow::Result<Vec<_>>>()?;
        inputs.extend(more);
        anyhow::ensure!(!inputs.is_empty(), "{} holds no input", path.display());
        Ok(Self {
            inputs,
            random: StdRng::seed_from_u64(seed()),
        })
    }

    /// The unchanged inputs.
    pub fn inputs(&self) -> &[Vec<u8>] {
        &self.inputs
    }

    /// One input, changed in one to four places.
    pub fn mutate(&mut self) -> Vec<u8> {
        let Self { inputs, random } = self;
        let pick = |random: &mut StdRng| inputs.choose(random).cloned().unwrap_or_default();
        let mut bytes = pick(random);
        for _ in 0..random.random_range(1..=4) {
            change(&mut bytes, random, &pick);
        }
        bytes.truncate(MOST);
        bytes
    }

    /// Passes every input, then `count` mutations, to `check`. If `check` fails or panics, this
    /// fails with the bytes.
    pub fn run(
        &mut self,
        name: &str,
        count: u64,
        check: impl Fn(&[u8]) -> Result<(), String>,
    ) -> anyhow::Result<()> {
        let kept = self.inputs.clone();
        for (number, bytes) in kept.iter().enumerate() {
            judge(&check, bytes)
                .map_err(|why| found(name, &format!("input {number}"), bytes, &why))?;
        }
        for number in 0..count {
            let bytes = self.mutate();
            judge(&check, &bytes)
                .map_err(|why| found(name, &format!("mutation {number}"), &bytes, &why))?;
        }
        Ok(())
    }
}

fn judge(check: &impl Fn(&[u8]) -> Result<(), String>, bytes: &[u8]) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(|| check(bytes))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panicked: {}", text.unwrap_or("without words")))
    })
}

fn found(name: &str, which: &str, bytes: &[u8], why: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "{name}, {which} (KVPOOL_FUZZ_SEED={}): {why}\n{}",
        seed(),
        to_hex(bytes)
    )
}

/// Numbers at the limits of integer types.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 40,
    i64::MAX as u64,
    u64::MAX,
];

fn change(bytes: &mut Vec<u8>, random: &mut StdRng, pick: &impl Fn(&mut StdRng) -> Vec<u8>) {
    let at = random.random_range(0..=bytes.len());
    let rest = bytes.len() - at;
    match random.random_range(0..8) {
        0 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << random.random_range(0..8);
            }
        }
        1 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = random.random();
            }
        }
        2 => bytes.truncate(at),
        3 => {
            let end = at + random.random_range(0..=rest.min(16));
            bytes.drain(at..end);
        }
        4 => {
            let count = random.random_range(1..=16);
            let fresh: Vec<u8> = (0..count).map(|_| random.random()).collect();
            bytes.splice(at..at, fresh);
        }
        5 => {
            let end = at + random.random_range(0..=rest.min(64));
            let again = bytes.get(at..end).unwrap_or_default().to_vec();
            bytes.splice(at..at, again);
        }
        6 => {
            let edge = EDGES
                .choose(random)
                .copied()
                .unwrap_or_default()
                .to_le_bytes();
            let wide = [1, 2, 4, 8].choose(random).copied().unwrap_or(1).min(rest);
            for (to, from) in bytes.iter_mut().skip(at).zip(edge).take(wide) {
                *to = from;
            }
        }
        _ => {
            let other = pick(random);
            let from = random.random_range(0..=other.len());
            bytes.truncate(at);
            bytes.extend(other.get(from..).unwrap_or_default());
        }
    }
}

/// Bytes as text.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

fn from_hex(text: &str) -> anyhow::Result<Vec<u8>> {
    let digits: Vec<u8> = text.bytes().collect();
    let pairs = digits.chunks(2).map(|pair| {
        let pair = std::str::from_utf8(pair)?;
        Ok(u8::from_str_radix(pair, 16)?)
    });
    pairs.collect()
}
