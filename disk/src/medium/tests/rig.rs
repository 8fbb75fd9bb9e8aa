//! Helpers that the tests of the medium share: blocks, and calls that wait for their completions.

use crate::medium::copies::perform;
use crate::medium::fields::checksum;
use crate::medium::{
    Expected, Formatted, Medium, Opened, Order, Staged, Stamp, StoreError, Wanted, Wrong, footprint,
};
use crate::{Arena, Engine, GRANULE, Op};
use kvpool_types::{ClusterId, Version};
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
    /// A block whose bytes depend on its version and order.
    pub(super) fn new(offset: u64, order: u64, version: u64, length: usize) -> Self {
        let mut bytes = vec![0; length];
        StdRng::seed_from_u64(version.rotate_left(32) ^ order).fill_bytes(&mut bytes);
        Self {
            stamp: Stamp {
                offset,
                order: Order(order),
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
            order: Some(self.stamp.order),
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
    let room = wanted.take(arena, None).unwrap();
    let (sender, receiver) = channel();
    medium.load(wanted, room, move |arrival| {
        sender
            .send(arrival.verify().map(|loaded| loaded.to_vec()))
            .unwrap();
    });
    receiver.recv().unwrap()
}

/// Loads a block, and panics on wrong bytes, which must never happen.
pub(super) fn load_block(
    medium: &Medium,
    arena: &Arc<Arena>,
    block: &Block,
    range: Range<u64>,
) -> Result<(), Wrong> {
    let wanted = Wanted::part(block.stamp.offset, block.expected(), range.clone()).unwrap();
    let bytes = load(medium, arena, wanted)?;
    let range = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
    assert!(
        bytes == block.bytes[range],
        "WRONG BYTES of {:?}",
        block.stamp
    );
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
