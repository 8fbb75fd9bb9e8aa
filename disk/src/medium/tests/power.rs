//! Power cuts: whatever a cut leaves on the disk, no load gives wrong bytes, and every flushed store is
//! found.

use super::rig::{self, Block, CLUSTER};
use crate::medium::{DATA_START, Formatted, Generation, Medium, Opened, Superblock};
use crate::{Arena, Engine, Event, GRANULE, Memory};
use kvpool_types::MediumId;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;
use std::time::{Duration, Instant};

const HISTORIES: u64 = 125;
const CUTS: usize = 100;
/// There are three zones, so that ranges are soon written again.
const ZONE: u64 = 128 << 10;
const ZONES: u64 = 3;
const SIZE: u64 = DATA_START + ZONES * ZONE;

/// A store, with the positions of the log between which it happened.
struct Stored {
    block: Block,
    medium: MediumId,
    began: usize,
    /// The end of the first flush after the store succeeded.
    durable: Option<usize>,
}

/// A superblock, with the positions of the log between which it was written.
struct Written {
    began: usize,
    ended: usize,
    superblock: Superblock,
}

/// One history on one device, and the content that it must have left.
struct History {
    random: StdRng,
    memory: Arc<Memory>,
    engine: Arc<dyn Engine>,
    arena: Arc<Arena>,
    stores: Vec<Stored>,
    superblocks: Vec<Written>,
    /// The offset of the next extent, in bytes from `DATA_START`.
    next: u64,
    generation: Generation,
}

impl History {
    fn new(seed: u64, arena: &Arc<Arena>) -> Self {
        let memory = Arc::new(Memory::new(usize::try_from(SIZE).unwrap()));
        Self {
            random: StdRng::seed_from_u64(seed),
            engine: Arc::clone(&memory) as Arc<dyn Engine>,
            memory,
            arena: Arc::clone(arena),
            stores: vec![],
            superblocks: vec![],
            next: 0,
            generation: Generation(0),
        }
    }

    fn position(&self) -> usize {
        self.memory.log_len()
    }

    fn note_superblock(&mut self, began: usize) {
        let superblock = rig::opened(&self.engine, &self.arena).superblock().clone();
        let ended = self.position();
        self.superblocks.push(Written {
            began,
            ended,
            superblock,
        });
    }

    fn format(&mut self) {
        let began = self.position();
        let id = MediumId(self.random.random());
        let (engine, arena) = (Arc::clone(&self.engine), Arc::clone(&self.arena));
        Formatted::format(engine, arena, CLUSTER, id).unwrap();
        self.generation = Generation(0);
        self.note_superblock(began);
    }

    fn attach(&mut self) -> Medium {
        let began = self.position();
        self.generation = self.generation.next();
        let medium = rig::opened(&self.engine, &self.arena).attach(CLUSTER, self.generation);
        self.note_superblock(began);
        medium.unwrap()
    }

    /// Runs one process of a node: stores and flushes, and often a detach.
    fn live(&mut self) {
        let medium = self.attach();
        for _ in 0..self.random.random_range(0..8) {
            let first = self.stores.len();
            let answers: Vec<_> = (0..self.random.random_range(1..4))
                .map(|_| self.store(&medium))
                .collect();
            for answer in answers {
                answer.recv().unwrap().unwrap();
            }
            if self.random.random_bool(0.4) {
                rig::flush(&medium).unwrap();
                self.all_durable();
            }
            assert!(self.stores.len() > first);
        }
        if self.random.random_bool(0.5) {
            let began = self.position();
            medium
                .detach(Instant::now() + Duration::from_secs(60))
                .unwrap();
            self.all_durable();
            self.note_superblock(began);
        }
    }

    fn store(
        &mut self,
        medium: &Medium,
    ) -> std::sync::mpsc::Receiver<Result<(), crate::medium::StoreError>> {
        let longest = if self.random.random_bool(0.3) {
            100 << 10
        } else {
            12 << 10
        };
        let length = self.random.random_range(1..longest);
        let number = self.stores.len() as u64 + 1;
        let mut block = Block::new(0, number, 1000 + number, length);
        let footprint = block.range().end;
        if self.next / ZONE != (self.next + footprint - 1) / ZONE {
            self.next = self.next.next_multiple_of(ZONE) % (ZONES * ZONE);
        }
        block.stamp.offset = DATA_START + self.next;
        self.next = (self.next + footprint) % (ZONES * ZONE);
        let began = self.position();
        let answer = rig::submit(medium, &self.arena, &block);
        self.stores.push(Stored {
            block,
            medium: medium.id(),
            began,
            durable: None,
        });
        answer
    }

    fn all_durable(&mut self) {
        let now = self.position();
        for stored in &mut self.stores {
            stored.durable.get_or_insert(now);
        }
    }

    /// The bytes after a power cut behind `cut` entries of the log.
    fn image(&mut self, log: &[Event], cut: usize) -> Vec<u8> {
        let mut image = vec![0; usize::try_from(SIZE).unwrap()];
        let safe = log[..cut]
            .iter()
            .rposition(|event| matches!(event, Event::Flush))
            .unwrap_or(0);
        // Chooses which unflushed bytes reach the disk, and in which pieces.
        let (kept, torn) = match self.random.random_range(0..6) {
            0 => (1.0, false),
            1 => (0.0, false),
            2 => (0.5, false),
            3 => (0.5, true),
            4 => (0.95, true),
            _ => (self.random.random(), true),
        };
        for (at, event) in log[..cut].iter().enumerate() {
            let Event::Write(offset, bytes) = event else {
                continue;
            };
            let whole = at < safe || self.random.random_bool(kept);
            let start = usize::try_from(*offset).unwrap();
            for (n, granule) in bytes.chunks(GRANULE).enumerate() {
                let reaches = if torn && at >= safe {
                    self.random.random_bool(kept)
                } else {
                    whole
                };
                if reaches {
                    let from = start + n * GRANULE;
                    image[from..from + granule.len()].copy_from_slice(granule);
                }
            }
        }
        image
    }
}

#[derive(Debug, Default)]
struct Tally {
    states: usize,
    blank: usize,
    found: usize,
    lost: usize,
    must: usize,
}

#[test]
fn no_power_cut_gives_wrong_bytes_or_loses_what_was_flushed() {
    let arena = Arena::new(4 << 20).unwrap();
    let mut tally = Tally::default();
    for seed in 0..HISTORIES {
        let mut history = History::new(seed, &arena);
        history.format();
        for _ in 0..history.random.random_range(1..5) {
            history.live();
            if history.random.random_bool(0.1) {
                history.format();
            }
        }
        let log = history.memory.log();
        for _ in 0..CUTS {
            let cut = history.random.random_range(0..=log.len());
            let image = history.image(&log, cut);
            check(&history, cut, image, &mut tally);
            tally.states += 1;
        }
    }
    println!("{tally:?}");
    assert!(tally.states >= 10_000);
    assert!(tally.must > 10_000 && tally.lost > 1000 && tally.blank > 0);
}

/// Opens the device after the cut, and loads every block of the history.
fn check(history: &History, cut: usize, image: Vec<u8>, tally: &mut Tally) {
    let engine: Arc<dyn Engine> = Arc::new(Memory::from_image(image));
    let formatted = match Formatted::open(Arc::clone(&engine), Arc::clone(&history.arena)) {
        Ok(Opened::Formatted(formatted)) => formatted,
        Ok(Opened::Blank) => {
            assert!(cut < history.superblocks[0].ended, "a superblock was lost");
            tally.blank += 1;
            return;
        }
        Err(refused) => panic!("no superblock is readable: {refused}"),
    };
    let superblock = formatted.superblock().clone();
    let last = history
        .superblocks
        .iter()
        .rposition(|written| written.ended <= cut);
    let possible = history.superblocks[last.unwrap_or(0)..].iter();
    assert!(
        possible
            .clone()
            .any(|written| written.superblock == superblock && written.began < cut),
        "the superblock is neither the last one nor the one being written"
    );
    let medium = formatted
        .attach(CLUSTER, superblock.generation.next())
        .unwrap();
    for (at, stored) in history.stores.iter().enumerate() {
        let block = &stored.block;
        let outcome = rig::load_block(&medium, &history.arena, block);
        let overwritten = history.stores[at + 1..].iter().any(|later| {
            let (a, b) = (later.block.range(), block.range());
            later.began < cut && a.start < b.end && b.start < a.end
        });
        let flushed = stored.durable.is_some_and(|durable| durable <= cut)
            || superblock.clean && stored.began < cut;
        let must = flushed && !overwritten && stored.medium == superblock.medium;
        match outcome {
            Ok(()) => {
                assert!(stored.began < cut, "a block was found before it was stored");
                assert!(
                    stored.medium == superblock.medium,
                    "a block of a former medium was found"
                );
                tally.found += 1;
            }
            Err(wrong) if must => panic!("{:?} was flushed and is lost: {wrong}", block.stamp),
            Err(_) => tally.lost += 1,
        }
        tally.must += usize::from(must);
    }
}
