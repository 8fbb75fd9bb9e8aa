use super::*;
use crate::Region;
use crate::rdma::{Access, Allows, Fabric, Fault, Rail, RdmaOptions, Remote};
use kvpool_types::{Length, Offset};
use std::sync::mpsc;
use std::time::Duration;

fn completion(status: i32, opcode: i32, bytes: u32) -> sys::Wc {
    use sys::Zeroed;
    let mut completion = sys::Wc::zeroed();
    completion.status = status;
    completion.opcode = opcode;
    completion.byte_len = bytes;
    completion
}

fn posted(verb: Verb, length: u32) -> Posted {
    Posted {
        operation: 0,
        work: 0,
        length,
        verb,
    }
}

#[test]
fn a_completion_counts_only_with_its_status_its_kind_and_its_bytes() {
    let read = posted(Verb::Read, 100);
    let write = posted(Verb::Write, 100);
    let (as_read, as_write) = (sys::WC_RDMA_READ, sys::WC_RDMA_WRITE);
    assert_eq!(judge(read, &completion(0, as_read, 100)), Ok(()));
    // The byte count of a write's completion is undefined.
    assert_eq!(judge(write, &completion(0, as_write, 0)), Ok(()));
    for (work, bad) in [
        (read, completion(0, as_read, 99)),
        (read, completion(0, as_read, 0)),
        (read, completion(0, as_write, 100)),
        (write, completion(0, as_read, 100)),
        (read, completion(1, as_read, 100)),
    ] {
        assert_eq!(judge(work, &bad).unwrap_err().fault, Fault::Local);
    }
    let fault = |status| {
        judge(read, &completion(status, as_read, 100))
            .unwrap_err()
            .fault
    };
    assert_eq!(fault(10), Fault::Remote);
    assert_eq!(fault(12), Fault::Path);
    assert_eq!(fault(5), Fault::Flushed);
}

/// A rail for the test. Without a device the test prints that it is skipped.
fn rail(test: &str) -> Option<Arc<Rail>> {
    match Fabric::open(&RdmaOptions::default()) {
        Ok(fabric) => Some(fabric.rails()[0].clone()),
        Err(why) => {
            eprintln!("SKIPPED {test}: {why}");
            None
        }
    }
}

/// Two queue pairs; the second serves.
fn connected(rail: &Arc<Rail>) -> (QueuePair, QueuePair) {
    let asking = QueuePair::create(rail, Allows::Nothing).unwrap();
    let serving = QueuePair::create(rail, Allows::Writes).unwrap();
    serving.connect(asking.address()).unwrap();
    asking.connect(serving.address()).unwrap();
    (asking, serving)
}

#[test]
fn a_partly_accepted_chain_closes_the_lane_and_fails_all_its_work() {
    let Some(rail) = rail("a_partly_accepted_chain_closes_the_lane_and_fails_all_its_work") else {
        return;
    };
    let (asking, _serving) = connected(&rail);
    // The lane assumes more parts in a work request than the device allows.
    let bounds = Bounds {
        slice: 1 << 20,
        scatter: 1000,
    };
    let lane = RdmaLane::bounded(asking, bounds);
    let memory = Region::allocate(Length(1 << 20)).whole();
    let registration = rail.register(&memory, Access::RemoteReadWrite).unwrap();
    let write = |number: u64, parts: u64| Transfer {
        verb: Verb::Write,
        remote: Remote {
            address: registration.address() + number * 65536,
            rkey: registration.rkey(),
        },
        local: (0..parts)
            .map(|part| {
                let from = Offset((1 << 19) + part * 64);
                (
                    registration.clone(),
                    memory.slice(from, Length(32)).unwrap(),
                )
            })
            .collect(),
    };
    let (sender, receiver) = mpsc::channel();
    let all = vec![write(0, 1), write(2, 1), write(4, 500), write(6, 1)];
    lane.submit(all, move |outcomes| sender.send(outcomes).unwrap());
    let outcomes = receiver.recv_timeout(Duration::from_secs(10)).unwrap();
    let faults: Vec<Option<Fault>> = outcomes
        .iter()
        .map(|outcome| outcome.as_ref().err().map(|error| error.fault))
        .collect();
    // The first two have an unknown end, because they were unsignalled.
    let (flushed, local) = (Some(Fault::Flushed), Some(Fault::Local));
    assert_eq!(faults, [flushed, flushed, local, local], "{outcomes:?}");
    assert!(!lane.is_open());
    assert_eq!(rail.in_flight(), 0);
}

#[test]
fn a_device_is_closed_after_its_last_user() {
    for _ in 0..5 {
        let Some(rail) = rail("a_device_is_closed_after_its_last_user") else {
            return;
        };
        let device = Arc::downgrade(&rail.device);
        let (asking, serving) = connected(&rail);
        let memory = Region::allocate(Length(64 << 20)).whole();
        let registration = rail.register(&memory, Access::RemoteReadWrite).unwrap();
        let lane = RdmaLane::new(asking);
        let transfer = Transfer {
            verb: Verb::Read,
            remote: Remote {
                address: registration.address(),
                rkey: registration.rkey(),
            },
            local: vec![(registration.clone(), memory.clone())],
        };
        drop((registration, memory));
        lane.submit(vec![transfer], |_| {});
        drop((lane, serving, rail));
        // The completion thread may hold the device for a moment.
        let limit = Instant::now() + Duration::from_secs(10);
        while device.strong_count() > 0 {
            assert!(Instant::now() < limit, "{} users", device.strong_count());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
