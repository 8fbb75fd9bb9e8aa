//! Helpers that the tests of the medium share: blocks, and calls that wait for their completions.

use crate::medium::copies::perform;
use crate::medium::fields::checksum;
use crate::medium::{
    Expected, Formatted, Medium, Opened, Staged, Stamp, StoreError, StoreNumber, Wanted, Wrong,
    footprint,
};
use crate::{Arena, Engine, GRANULE, Op};
use kvpool_transport::memory::Region;
use kvpool_types::checksum::CHUNK;
use kvpool_types::{ClusterId, Length, Version};
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

pub(super) const CLUSTER: ClusterId = ClusterId(0xc1);
pub(super) const STEP: u64 = GRANULE as u64;

/// One block and the extent that it was stored in.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) stamp: Stamp,
    pub(super) bytes: Arc<Vec<u8>>,
}

impl Block {
    /// A block whose bytes depend on its version and store.
    pub(super) fn new(offset: u64, number: u64, version: u64, length: usize) -> Self {
        let mut bytes = vec![0; length];
        StdRng::seed_from_u64(version.rotate_left(32) ^ number).fill_bytes(&mut bytes);
        Self {
            stamp: Stamp {
                offset,
                number: StoreNumber(number),
                version: Version(version),
                checksum: checksum(&bytes),
            },
            bytes: Arc::new(bytes),
        }
    }

    pub(super) fn length(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The bytes of the medium that the extent takes.
    pub(super) fn range(&self) -> Range<u64> {
        self.stamp.offset..self.stamp.offset + footprint(self.length()).unwrap()
    }

    pub(super) fn expected(&self) -> Expected {
        Expected {
            number: Some(self.stamp.number),
            version: self.stamp.version,
            length: self.length(),
            checksum: self.stamp.checksum,
        }
    }
}

/// Submits a store.
pub(super) fn submit(
    medium: &Medium,
    arena: &Arc<Arena>,
    block: &Block,
) -> Receiver<Result<(), StoreError>> {
    let mut staged = Staged::take(arena, block.length(), None).unwrap().unwrap();
    staged.data().copy_from_slice(&block.bytes);
    let (sender, receiver) = channel();
    medium.store(staged, block.stamp, move |outcome| {
        sender.send(outcome).unwrap();
    });
    receiver
}

pub(super) fn store(medium: &Medium, arena: &Arc<Arena>, block: &Block) -> Result<(), StoreError> {
    submit(medium, arena, block).recv().unwrap()
}

pub(super) fn flush(medium: &Medium) -> Result<(), StoreError> {
    let (sender, receiver) = channel();
    medium.flush(move |outcome| sender.send(outcome).unwrap());
    receiver.recv().unwrap()
}

pub(super) fn load(medium: &Medium, arena: &Arc<Arena>, wanted: Wanted) -> Result<Vec<u8>, Wrong> {
    let buffer = wanted.take(arena, None).unwrap();
    let (sender, receiver) = channel();
    medium.load_into_arena(wanted, buffer, move |arrival| {
        sender
            .send(arrival.verify().map(|loaded| loaded.to_vec()))
            .unwrap();
    });
    receiver.recv().unwrap()
}

/// Loads a block straight into memory; `None` if it cannot be loaded so.
fn load_into(
    medium: &Medium,
    arena: &Arc<Arena>,
    wanted: &Wanted,
    length: u64,
) -> Option<Result<Vec<u8>, Wrong>> {
    let memory = Region::allocate(Length(length)).whole();
    if !wanted.fits(&memory) {
        return None;
    }
    let header = wanted.take_header(arena, false).unwrap();
    let (sender, receiver) = channel();
    let bytes = memory.clone();
    medium.load_into(wanted.clone(), header, memory, move |landing| {
        sender.send(landing.verify()).unwrap();
    });
    let verified = receiver.recv().unwrap();
    Some(verified.map(|chunks| {
        let sums = bytes.to_vec();
        let sums = sums.chunks(Length(CHUNK).as_usize()).map(checksum);
        assert_eq!(chunks, sums.collect::<Vec<_>>());
        bytes.to_vec()
    }))
}

/// Loads a block, and panics on wrong bytes, which must never happen.
pub(super) fn load_block(medium: &Medium, arena: &Arc<Arena>, block: &Block) -> Result<(), Wrong> {
    let wanted = Wanted::new(block.stamp.offset, block.expected()).unwrap();
    let in_place = load_into(medium, arena, &wanted, block.length());
    let loaded = load(medium, arena, wanted);
    if let Some(in_place) = in_place {
        // Both ways refuse the same damage, and by the same kind.
        let kinds = [&loaded, &in_place].map(|outcome| outcome.as_ref().err().map(Wrong::kind));
        assert_eq!(kinds[0], kinds[1], "{:?}", block.stamp);
        if let Ok(bytes) = in_place {
            assert!(bytes == **block.bytes, "WRONG BYTES of {:?}", block.stamp);
        }
    }
    let bytes = loaded?;
    assert!(bytes == **block.bytes, "WRONG BYTES of {:?}", block.stamp);
    Ok(())
}

pub(super) fn opened(engine: &Arc<dyn Engine>, arena: &Arc<Arena>) -> Formatted {
    match Formatted::open(Arc::clone(engine), Arc::clone(arena)) {
        Ok(Opened::Formatted(formatted)) => formatted,
        other => panic!("not a medium: {other:?}"),
    }
}

/// Bytes of the device, in whole granules.
pub(super) fn peek(engine: &Arc<dyn Engine>, arena: &Arc<Arena>, range: Range<u64>) -> Vec<u8> {
    let buffer = arena.take(usize::try_from(range.end - range.start).unwrap());
    let (buffer, result) = perform(&**engine, Op::Read(buffer.unwrap()), range.start, None);
    result.unwrap();
    buffer.unwrap().to_vec()
}

/// Writes whole granules past the medium, as a fault would.
pub(super) fn poke(engine: &Arc<dyn Engine>, arena: &Arc<Arena>, offset: u64, bytes: &[u8]) {
    let mut buffer = arena.take(bytes.len()).unwrap();
    buffer.copy_from_slice(bytes);
    perform(&**engine, Op::Write(buffer), offset, None)
        .1
        .unwrap();
}
