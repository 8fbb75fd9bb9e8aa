//! Operations share a lane, and an idle rail costs nothing.

use crate::ends::{Ends, LIMIT, Memory, run, start, transfer};
use kvpool_transport::rdma::{Access, Allows, RdmaLane, Verb};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

#[test]
fn a_small_submission_does_not_wait_for_a_huge_one() {
    let rail = rail!("a_small_submission_does_not_wait_for_a_huge_one");
    let ends = Ends::connect(&rail, Allows::Writes, 64 * MIB);
    let here = Memory::new(&rail, 64 * MIB, Access::Local);
    for verb in [Verb::Write, Verb::Read] {
        let (sender, receiver) = mpsc::channel();
        let begun = Instant::now();
        let submit = |name: &'static str, transfers| {
            let sender = sender.clone();
            ends.lane.submit(transfers, move |outcomes| {
                assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
                sender.send((name, begun.elapsed())).unwrap();
            });
        };
        // The same memory again and again: 512 MiB in pieces that are not adjacent.
        let huge = (0..512)
            .map(|i| {
                let at = i * 37 % 64 * MIB;
                transfer(verb, ends.there.remote(at), vec![here.part(at, MIB)])
            })
            .collect();
        submit("huge", huge);
        let after = begun.elapsed();
        let small = vec![transfer(
            verb,
            ends.there.remote(0),
            vec![here.part(0, 4096)],
        )];
        submit("small", small);
        let (first, small) = receiver.recv_timeout(LIMIT).unwrap();
        let (_, huge) = receiver.recv_timeout(LIMIT).unwrap();
        assert_eq!(first, "small");
        let (small, huge) = (small.saturating_sub(after), huge.saturating_sub(after));
        assert!(small * 4 < huge, "{verb:?}: small {small:?}, huge {huge:?}");
    }
}

#[test]
fn many_threads_share_one_lane() {
    let rail = rail!("many_threads_share_one_lane");
    let ends = Ends::connect(&rail, Allows::Writes, 8 * MIB);
    let (lane, there): (Arc<RdmaLane>, _) = (Arc::new(ends.lane), Arc::new(ends.there));
    let threads: Vec<_> = (0..8)
        .map(|number| {
            let (lane, there, rail) = (lane.clone(), there.clone(), rail.clone());
            std::thread::spawn(move || {
                let here = Memory::new(&rail, MIB, Access::Local);
                for round in 0..20 {
                    let (length, at) = (MIB / 16, number * MIB);
                    here.fill(number * 1000 + round);
                    let sent = here.slice.to_vec();
                    for verb in [Verb::Write, Verb::Read] {
                        let transfers = (0..16)
                            .map(|i| {
                                let from = i * 5 % 16 * length;
                                let local = vec![here.part(from, length)];
                                transfer(verb, there.remote(at + from), local)
                            })
                            .collect();
                        assert_eq!(run(&lane, transfers), vec![Ok(()); 16]);
                        assert!(there.part(at, MIB).1.to_vec() == sent);
                        if verb == Verb::Write {
                            here.fill_with(0);
                        } else {
                            assert!(here.slice.to_vec() == sent);
                        }
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(rail.in_flight(), 0);
}

#[test]
fn a_completion_callback_may_submit() {
    let rail = rail!("a_completion_callback_may_submit");
    let ends = Ends::connect(&rail, Allows::Writes, MIB);
    let here = Arc::new(Memory::new(&rail, MIB, Access::Local));
    let (lane, there) = (Arc::new(ends.lane), Arc::new(ends.there));
    let (sender, receiver) = mpsc::channel();
    fn next(
        left: u32,
        lane: Arc<RdmaLane>,
        here: Arc<Memory>,
        there: Arc<Memory>,
        end: mpsc::Sender<()>,
    ) {
        let again = transfer(Verb::Write, there.remote(0), vec![here.part(0, 4096)]);
        let me = lane.clone();
        lane.submit(vec![again], move |outcomes| {
            assert_eq!(outcomes, [Ok(())]);
            if left == 0 {
                end.send(()).unwrap();
            } else {
                next(left - 1, me, here, there, end);
            }
        });
    }
    next(100, lane, here, there, sender);
    receiver.recv_timeout(LIMIT).unwrap();
}

#[test]
fn an_idle_rail_uses_no_processor() {
    let rail = rail!("an_idle_rail_uses_no_processor");
    let ends = Ends::connect(&rail, Allows::Writes, MIB);
    let here = Memory::new(&rail, MIB, Access::Local);
    let write = transfer(Verb::Write, ends.there.remote(0), vec![here.part(0, MIB)]);
    start(&ends.lane, vec![write]).recv_timeout(LIMIT).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    // Other tests have such threads too, so the idlest thread counts.
    let before = processor_ticks();
    std::thread::sleep(Duration::from_secs(2));
    let after = processor_ticks();
    let least = before
        .iter()
        .filter_map(|(thread, ticks)| {
            let (_, later) = after.iter().find(|(other, _)| other == thread)?;
            Some(later - ticks)
        })
        .min();
    // A tick is 10 ms: a spinning thread has about two hundred.
    assert!(least.unwrap() <= 5, "{least:?}");
}

/// The processor time of this process's completion threads.
fn processor_ticks() -> Vec<(u32, u64)> {
    let mut ticks = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap();
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else {
            continue;
        };
        let (head, tail) = stat.rsplit_once(") ").unwrap();
        if !head.ends_with("(kvpool-rdma") {
            continue;
        }
        let fields: Vec<&str> = tail.split(' ').collect();
        let used = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        ticks.push((head.split(' ').next().unwrap().parse().unwrap(), used));
    }
    ticks
}
