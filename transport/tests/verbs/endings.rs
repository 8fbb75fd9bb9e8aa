//! However a connection ends: nothing is touched afterwards, nothing hangs, nothing is left.

use crate::ends::{
    Ends, LIMIT, Memory, pair, registrations_fall_to, run, run_one, start, transfer,
};
use kvpool_transport::rdma::{Access, Allows, Fault, RdmaLane, RdmaOptions, Retry, Transfer, Verb};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Fills memory once nothing may touch it. The two sides differ, because late work would carry
/// bytes from one to the other.
const CANARY_HERE: u8 = 0xa1;
const CANARY_THERE: u8 = 0xb2;

/// Long enough for bytes in flight to arrive.
const WHILE: Duration = Duration::from_millis(500);

/// Gives up a silent peer after about half a second.
fn impatient() -> RdmaOptions {
    RdmaOptions {
        retry: Retry {
            count: 6,
            timeout: 14,
        },
        ..RdmaOptions::default()
    }
}

fn all_of(ends: &Ends, here: &Memory, verb: Verb, rounds: u64) -> Vec<Transfer> {
    let pieces = here.slice.length().0 / MIB;
    (0..rounds * pieces)
        .map(|i| {
            let at = i * 7 % pieces * MIB;
            transfer(verb, ends.there.remote(at), vec![here.part(at, MIB)])
        })
        .collect()
}

/// Waits, then checks that the memory is unchanged.
fn assert_untouched(memories: &[(&Memory, u8)]) {
    for (memory, canary) in memories {
        memory.fill_with(*canary);
    }
    std::thread::sleep(WHILE);
    for (memory, canary) in memories {
        let bytes = memory.slice.to_vec();
        assert!(
            bytes.iter().all(|byte| byte == canary),
            "{canary:#x} is gone"
        );
    }
}

#[test]
fn after_an_abort_no_memory_is_touched() {
    // Far more in flight than can end by itself while the abort waits.
    let options = RdmaOptions {
        window: 1 << 30,
        ..RdmaOptions::default()
    };
    let rail = rail!("after_an_abort_no_memory_is_touched", options);
    for verb in [Verb::Read, Verb::Write] {
        for wait in [1, 20] {
            let ends = Ends::connect(&rail, Allows::Writes, 32 * MIB);
            let here = Memory::new(&rail, 32 * MIB, Access::Local);
            here.fill(1);
            ends.there.fill(2);
            let transfers = all_of(&ends, &here, verb, 24);
            let (sender, answer) = mpsc::channel();
            let lane = &ends.lane;
            std::thread::scope(|scope| {
                // On kernels where posting sends, submitting takes as long.
                scope.spawn(move || {
                    lane.submit(transfers, move |outcomes| sender.send(outcomes).unwrap());
                });
                std::thread::sleep(Duration::from_millis(wait));
                let begun = Instant::now();
                lane.abort();
                assert!(
                    begun.elapsed() < Duration::from_secs(10),
                    "{:?}",
                    begun.elapsed()
                );
                assert_untouched(&[(&here, CANARY_HERE), (&ends.there, CANARY_THERE)]);
            });
            let outcomes = answer.recv_timeout(LIMIT).unwrap();
            assert_eq!(outcomes.len(), 24 * 32);
            assert!(
                outcomes.iter().any(Result::is_err),
                "{verb:?} was over before the abort"
            );
            assert!(!ends.lane.is_open());
            assert_eq!(rail.in_flight(), 0);
        }
    }
}

#[test]
fn after_the_serving_queue_pair_is_destroyed_no_memory_is_touched() {
    let rail = rail!(
        "after_the_serving_queue_pair_is_destroyed_no_memory_is_touched",
        impatient()
    );
    let Ends {
        lane,
        serving,
        there,
    } = Ends::connect(&rail, Allows::Writes, 32 * MIB);
    let here = Memory::new(&rail, 32 * MIB, Access::Local);
    here.fill(1);
    let transfers = (0..256)
        .map(|i| {
            let at = i * 7 % 32 * MIB;
            transfer(Verb::Write, there.remote(at), vec![here.part(at, MIB)])
        })
        .collect();
    let (sender, answer) = mpsc::channel();
    // On kernels where posting sends, submitting takes as long as the first window.
    let submitter = std::thread::spawn(move || {
        lane.submit(transfers, move |outcomes| sender.send(outcomes).unwrap());
        lane
    });
    std::thread::sleep(Duration::from_millis(30));
    drop(serving);
    assert_untouched(&[(&there, CANARY_THERE)]);
    let outcomes = answer.recv_timeout(LIMIT).unwrap();
    assert!(outcomes.iter().any(Result::is_err));
    drop(submitter.join().unwrap());
}

#[test]
fn a_vanished_peer_causes_an_error_in_bounded_time() {
    let rail = rail!(
        "a_vanished_peer_causes_an_error_in_bounded_time",
        impatient()
    );
    for verb in [Verb::Read, Verb::Write] {
        let mut ends = Ends::connect(&rail, Allows::Writes, 32 * MIB);
        let here = Memory::new(&rail, 32 * MIB, Access::Local);
        let transfers = all_of(&ends, &here, verb, 8);
        let answer = start(&ends.lane, transfers);
        std::thread::sleep(Duration::from_millis(20));
        let other = pair(&rail, &rail, Allows::Writes).1;
        drop(std::mem::replace(&mut ends.serving, other));
        let begun = Instant::now();
        let outcomes = answer.recv_timeout(LIMIT).unwrap();
        assert!(
            begun.elapsed() < Duration::from_secs(15),
            "{:?}",
            begun.elapsed()
        );
        let faults: Vec<Fault> = outcomes
            .iter()
            .filter_map(|outcome| outcome.as_ref().err())
            .map(|e| e.fault)
            .collect();
        assert!(faults.contains(&Fault::Path), "{verb:?}: {faults:?}");
        assert!(!ends.lane.is_open());
    }
}

#[test]
fn a_failed_queue_pair_ends_all_its_work() {
    let rail = rail!("a_failed_queue_pair_ends_all_its_work", impatient());
    let ends = Ends::connect(&rail, Allows::Writes, 8 * MIB);
    let here = Memory::new(&rail, 8 * MIB, Access::Local);
    ends.serving.fail();
    let write = transfer(Verb::Write, ends.there.remote(0), vec![here.part(0, MIB)]);
    let error = run_one(&ends.lane, write).unwrap_err();
    assert!(
        matches!(error.fault, Fault::Path | Fault::Remote),
        "{error}"
    );
}

#[test]
fn an_unconnected_queue_pair_refuses_work() {
    let rail = rail!("an_unconnected_queue_pair_refuses_work");
    let queue = kvpool_transport::rdma::QueuePair::create(&rail, Allows::Nothing).unwrap();
    let lane = RdmaLane::new(queue);
    let here = Memory::new(&rail, MIB, Access::RemoteReadWrite);
    let remote = here.remote(0);
    let transfers = (0..4)
        .map(|i| transfer(Verb::Write, remote, vec![here.part(i * 2 * 4096, 4096)]))
        .collect();
    let outcomes = run(&lane, transfers);
    assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
    assert!(!lane.is_open());
}

#[test]
fn two_hundred_connections_leave_nothing_behind() {
    let rail = rail!("two_hundred_connections_leave_nothing_behind");
    let before = rail.registrations();
    for round in 0..200 {
        let ends = Ends::connect(&rail, Allows::Writes, MIB);
        let here = Memory::new(&rail, MIB, Access::Local);
        here.fill(round);
        let verb = if round % 2 == 0 {
            Verb::Write
        } else {
            Verb::Read
        };
        let one = transfer(verb, ends.there.remote(0), vec![here.part(0, MIB)]);
        if round % 3 == 0 {
            // Dropped in the middle.
            ends.lane.submit(vec![one], |_| {});
        } else {
            run_one(&ends.lane, one).unwrap();
            assert!(here.slice.to_vec() == ends.there.slice.to_vec());
        }
    }
    assert_eq!(rail.lanes(), 0);
    assert_eq!(rail.in_flight(), 0);
    // The completion thread may release its references a moment later.
    registrations_fall_to(&rail, before);
}

#[test]
fn a_lane_may_be_dropped_at_the_end_of_its_work() {
    let rail = rail!("a_lane_may_be_dropped_at_the_end_of_its_work");
    let Ends {
        lane,
        serving,
        there,
    } = Ends::connect(&rail, Allows::Writes, MIB);
    let here = Memory::new(&rail, MIB, Access::Local);
    let lane = Arc::new(lane);
    let held = lane.clone();
    let (sender, receiver) = mpsc::channel();
    let (ended, has_ended) = mpsc::channel();
    let (dropped, is_dropped) = mpsc::channel::<()>();
    let all = (0..64)
        .map(|i| {
            transfer(
                Verb::Write,
                there.remote(i * 8192),
                vec![here.part(i * 8192, 4096)],
            )
        })
        .collect();
    lane.submit(all, move |outcomes| {
        ended.send(()).unwrap();
        // This thread holds the last reference, and the rail ends with it.
        is_dropped.recv_timeout(LIMIT).unwrap();
        drop(held);
        sender.send(outcomes).unwrap();
    });
    has_ended.recv_timeout(LIMIT).unwrap();
    drop((lane, serving, rail));
    dropped.send(()).unwrap();
    assert_eq!(receiver.recv_timeout(LIMIT).unwrap(), vec![Ok(()); 64]);
    drop((there, here));
}

#[test]
fn a_panicking_callback_harms_no_other() {
    let rail = rail!("a_panicking_callback_harms_no_other");
    let ends = Ends::connect(&rail, Allows::Writes, MIB);
    let here = Memory::new(&rail, MIB, Access::Local);
    let write = transfer(Verb::Write, ends.there.remote(0), vec![here.part(0, MIB)]);
    ends.lane
        .submit(vec![write.clone()], |_| panic!("as this test wants it"));
    assert_eq!(run_one(&ends.lane, write), Ok(()));
}
