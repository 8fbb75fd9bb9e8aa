//! Two connected ends, and operations between them.

use kvpool_transport::rdma::{
    Access, Allows, Fabric, QueuePair, Rail, RdmaLane, RdmaOptions, Registration, Remote, Transfer,
    Verb, WorkError,
};
use kvpool_transport::{Region, Slice};
use kvpool_types::{Length, Offset};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Longer than any answer may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The rail that a test runs on. Without one the test prints that it is skipped, and returns.
macro_rules! rail {
    ($name:literal) => {
        rail!($name, kvpool_transport::rdma::RdmaOptions::default())
    };
    ($name:literal, $options:expr) => {
        match crate::ends::open(&$options) {
            Ok(rail) => rail,
            Err(why) => {
                eprintln!("SKIPPED {}: {why}", $name);
                return;
            }
        }
    };
}

/// The first rail of this machine.
pub(crate) fn open(options: &RdmaOptions) -> Result<Arc<Rail>, String> {
    let fabric = Fabric::open(options).map_err(|why| why.to_string())?;
    Ok(fabric.rails()[0].clone())
}

/// One connection, and the memory of the serving end.
pub(crate) struct Ends {
    pub(crate) lane: RdmaLane,
    pub(crate) serving: QueuePair,
    pub(crate) there: Memory,
}

/// Registered memory.
pub(crate) struct Memory {
    pub(crate) registration: Registration,
    pub(crate) slice: Slice,
}

impl Memory {
    pub(crate) fn new(rail: &Arc<Rail>, bytes: u64, access: Access) -> Self {
        let slice = Region::allocate(Length(bytes)).whole();
        let registration = rail.register(&slice, access).unwrap();
        Self {
            registration,
            slice,
        }
    }

    /// The peer's address of a byte.
    pub(crate) fn remote(&self, from: u64) -> Remote {
        Remote {
            address: self.registration.address() + from,
            rkey: self.registration.rkey(),
        }
    }

    pub(crate) fn part(&self, from: u64, length: u64) -> (Registration, Slice) {
        let slice = self.slice.slice(Offset(from), Length(length)).unwrap();
        (self.registration.clone(), slice)
    }

    /// Fills each byte by its position.
    pub(crate) fn fill(&self, seed: u64) {
        let mut state = seed | 1;
        let mut bytes = vec![0; self.slice.length().as_usize()];
        for chunk in bytes.chunks_mut(8) {
            state = state
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            chunk.copy_from_slice(&(state ^ state >> 29).to_le_bytes()[..chunk.len()]);
        }
        self.slice.write_at(Offset(0), &bytes);
    }

    pub(crate) fn fill_with(&self, byte: u8) {
        self.slice
            .write_at(Offset(0), &vec![byte; self.slice.length().as_usize()]);
    }
}

impl Ends {
    /// Connects, with `bytes` of memory at the serving end.
    pub(crate) fn connect(rail: &Arc<Rail>, allows: Allows, bytes: u64) -> Self {
        let access = match allows {
            Allows::Writes => Access::RemoteReadWrite,
            _ => Access::RemoteRead,
        };
        Self::with_access(rail, allows, access, bytes)
    }

    pub(crate) fn with_access(
        rail: &Arc<Rail>,
        allows: Allows,
        access: Access,
        bytes: u64,
    ) -> Self {
        let (asking, serving) = pair(rail, rail, allows);
        Self {
            lane: RdmaLane::new(asking),
            serving,
            there: Memory::new(rail, bytes, access),
        }
    }
}

/// Two connected queue pairs; the second serves.
pub(crate) fn pair(here: &Arc<Rail>, there: &Arc<Rail>, allows: Allows) -> (QueuePair, QueuePair) {
    let asking = QueuePair::create(here, Allows::Nothing).unwrap();
    let serving = QueuePair::create(there, allows).unwrap();
    serving.connect(asking.address()).unwrap();
    asking.connect(serving.address()).unwrap();
    (asking, serving)
}

pub(crate) fn transfer(verb: Verb, remote: Remote, local: Vec<(Registration, Slice)>) -> Transfer {
    Transfer {
        verb,
        remote,
        local,
    }
}

/// Submits and waits for the outcomes.
pub(crate) fn run(lane: &RdmaLane, transfers: Vec<Transfer>) -> Vec<Result<(), WorkError>> {
    start(lane, transfers)
        .recv_timeout(LIMIT)
        .expect("an answer in time")
}

/// Submits; the receiver gets the outcomes.
pub(crate) fn start(
    lane: &RdmaLane,
    transfers: Vec<Transfer>,
) -> mpsc::Receiver<Vec<Result<(), WorkError>>> {
    let (sender, receiver) = mpsc::channel();
    lane.submit(transfers, move |outcomes| {
        let _ = sender.send(outcomes);
    });
    receiver
}

/// Submits one transfer and waits for its outcome.
pub(crate) fn run_one(lane: &RdmaLane, transfer: Transfer) -> Result<(), WorkError> {
    let mut outcomes = run(lane, vec![transfer]);
    assert_eq!(outcomes.len(), 1);
    outcomes.remove(0)
}

/// Waits until at most `count` registrations are alive.
pub(crate) fn registrations_fall_to(rail: &Arc<Rail>, count: usize) {
    let limit = Instant::now() + LIMIT;
    while rail.registrations() > count {
        assert!(Instant::now() < limit, "{} are alive", rail.registrations());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(rail.registrations(), count);
}
