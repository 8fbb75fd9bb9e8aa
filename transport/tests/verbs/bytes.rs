//! All bytes arrive as they were sent, wherever they lie.

use crate::ends::{Ends, Memory, pair, registrations_fall_to, run, run_one, transfer};
use kvpool_transport::Region;
use kvpool_transport::rdma::{Access, Allows, RdmaLane, RdmaOptions, Verb};
use kvpool_types::{Length, Offset};

const MIB: u64 = 1 << 20;
const SIZES: [u64; 10] = [
    1,
    7,
    4096,
    4097,
    65_535,
    256 << 10,
    MIB + 3,
    4 * MIB,
    8 * MIB + 1,
    20 * MIB,
];

#[test]
fn reads_and_writes_of_every_size_move_every_byte() {
    // The device's limit of a work request's length: the longest transfers are still divided.
    for slice in [4 << 20, u32::MAX, 64 << 10] {
        let options = RdmaOptions {
            slice,
            ..RdmaOptions::default()
        };
        let rail = rail!("reads_and_writes_of_every_size_move_every_byte", options);
        let ends = Ends::connect(&rail, Allows::Writes, 20 * MIB);
        let here = Memory::new(&rail, 20 * MIB, Access::Local);
        for (round, size) in SIZES.into_iter().enumerate() {
            here.fill(round as u64);
            let to = ends.there.remote(0);
            let written = transfer(Verb::Write, to, vec![here.part(0, size)]);
            run_one(&ends.lane, written).unwrap();
            let sent = here.part(0, size).1.to_vec();
            assert!(
                ends.there.part(0, size).1.to_vec() == sent,
                "write of {size}"
            );
            here.fill_with(0);
            let read = transfer(Verb::Read, to, vec![here.part(0, size)]);
            run_one(&ends.lane, read).unwrap();
            assert!(here.part(0, size).1.to_vec() == sent, "read of {size}");
        }
        assert!(ends.lane.is_open());
    }
}

#[test]
fn scattered_memory_is_gathered_in_order_however_many_parts() {
    let rail = rail!("scattered_memory_is_gathered_in_order_however_many_parts");
    let ends = Ends::connect(&rail, Allows::Writes, MIB);
    // Far more parts than a work request takes, of odd lengths, in separate memory, with gaps.
    let parts: Vec<(Memory, u64)> = (0..75)
        .map(|i| {
            let length = 1 + i * 97 % 9000;
            let memory = Memory::new(&rail, length + 10, Access::Local);
            memory.fill(i);
            (memory, length)
        })
        .collect();
    let local = || {
        parts
            .iter()
            .map(|(memory, length)| memory.part(5, *length))
            .collect::<Vec<_>>()
    };
    let all = || -> Vec<u8> {
        local()
            .iter()
            .flat_map(|(_, slice)| slice.to_vec())
            .collect()
    };
    let sent = all();
    run_one(
        &ends.lane,
        transfer(Verb::Write, ends.there.remote(3), local()),
    )
    .unwrap();
    let length = sent.len() as u64;
    assert!(ends.there.part(3, length).1.to_vec() == sent);
    for (memory, _) in &parts {
        memory.fill_with(0xee);
    }
    run_one(
        &ends.lane,
        transfer(Verb::Read, ends.there.remote(3), local()),
    )
    .unwrap();
    assert!(all() == sent);
    for (memory, length) in &parts {
        // The bytes around each part are unchanged.
        assert_eq!(memory.part(0, 5).1.to_vec(), [0xee; 5]);
        assert_eq!(memory.part(5 + length, 5).1.to_vec(), [0xee; 5]);
    }
}

#[test]
fn many_transfers_in_one_submission_each_get_their_bytes() {
    let rail = rail!("many_transfers_in_one_submission_each_get_their_bytes");
    let ends = Ends::connect(&rail, Allows::Writes, 32 * MIB);
    let here = Memory::new(&rail, 32 * MIB, Access::Local);
    let size = 256 << 10;
    for verb in [Verb::Write, Verb::Read] {
        let (from, to) = match verb {
            Verb::Write => (&here, &ends.there),
            Verb::Read => (&ends.there, &here),
        };
        from.fill(verb as u64 + 5);
        to.fill_with(0);
        // Once in an order in which nothing is adjacent, and once in order.
        for step in [37, 1] {
            let transfers = (0..128)
                .map(|i| {
                    let at = i * step % 128 * size;
                    transfer(verb, ends.there.remote(at), vec![here.part(at, size)])
                })
                .collect();
            let outcomes = run(&ends.lane, transfers);
            assert_eq!(outcomes, vec![Ok(()); 128]);
            assert!(
                from.slice.to_vec() == to.slice.to_vec(),
                "{verb:?} in steps of {step}"
            );
        }
    }
    assert_eq!(rail.in_flight(), 0);
}

#[test]
fn ends_of_different_packet_sizes_agree() {
    let small = RdmaOptions {
        mtu: Some(1024),
        ..RdmaOptions::default()
    };
    let here = rail!("ends_of_different_packet_sizes_agree");
    let there = rail!("ends_of_different_packet_sizes_agree", small);
    for (asking, serving) in [(&here, &there), (&there, &here)] {
        let (queue, server) = pair(asking, serving, Allows::Writes);
        assert!(server.address().mtu == 1024 || queue.address().mtu == 1024);
        let lane = RdmaLane::new(queue);
        let source = Memory::new(asking, MIB, Access::Local);
        let target = Memory::new(serving, MIB, Access::RemoteReadWrite);
        source.fill(9);
        let write = transfer(Verb::Write, target.remote(0), vec![source.part(0, MIB)]);
        run_one(&lane, write).unwrap();
        assert!(source.slice.to_vec() == target.slice.to_vec());
    }
}

#[test]
fn nothing_to_move_succeeds_at_once() {
    let rail = rail!("nothing_to_move_succeeds_at_once");
    let ends = Ends::connect(&rail, Allows::Reads, 4096);
    assert_eq!(run(&ends.lane, Vec::new()), []);
    let nothing = transfer(Verb::Read, ends.there.remote(0), Vec::new());
    assert_eq!(run_one(&ends.lane, nothing), Ok(()));
}

#[test]
fn cached_registrations_are_found_again_and_never_for_other_memory() {
    let rail = rail!("cached_registrations_are_found_again_and_never_for_other_memory");
    let ends = Ends::connect(&rail, Allows::Writes, 32 * MIB);
    let before = rail.registrations();
    let mut addresses = Vec::new();
    let mut reused = 0;
    for round in 0..20_u8 {
        // Freed and allocated again, usually at the same address but with other pages.
        let region = Region::allocate(Length(32 * MIB));
        let slice = region.whole();
        slice.write_at(Offset(0), &vec![round + 1; 32 << 20]);
        let registration = rail.cached(&slice).unwrap();
        reused += u32::from(addresses.contains(&registration.address()));
        addresses.push(registration.address());
        let again = rail
            .cached(&slice.slice(Offset(5 * MIB), Length(MIB)).unwrap())
            .unwrap();
        assert_eq!(again.lkey(), registration.lkey());
        // Dropped regions leave the cache, here or by the sweep each second.
        registrations_fall_to(&rail, before + 1);
        let write = transfer(
            Verb::Write,
            ends.there.remote(0),
            vec![(registration, slice)],
        );
        run_one(&ends.lane, write).unwrap();
        let arrived = ends.there.slice.to_vec();
        assert!(
            arrived.iter().all(|byte| *byte == round + 1),
            "round {round}"
        );
    }
    assert!(reused > 0, "no address came twice");
    // The sweep also drops the last entry of an idle cache.
    registrations_fall_to(&rail, before);
}

#[test]
fn registering_again_or_overlapping_is_harmless() {
    let rail = rail!("registering_again_or_overlapping_is_harmless");
    let ends = Ends::connect(&rail, Allows::Writes, MIB);
    let before = rail.registrations();
    let slice = Region::allocate(Length(MIB)).whole();
    let part = slice.slice(Offset(MIB / 4), Length(MIB / 2)).unwrap();
    let first = rail.register(&slice, Access::Local).unwrap();
    let second = rail.register(&slice, Access::Local).unwrap();
    let third = rail.register(&part, Access::RemoteRead).unwrap();
    let cached = rail.cached(&part).unwrap();
    assert_eq!(rail.registrations(), before + 4);
    drop((first, third));
    let write = transfer(
        Verb::Write,
        ends.there.remote(0),
        vec![(second, slice.clone())],
    );
    assert_eq!(run_one(&ends.lane, write), Ok(()));
    drop(slice);
    let write = transfer(Verb::Write, ends.there.remote(0), vec![(cached, part)]);
    assert_eq!(run_one(&ends.lane, write), Ok(()));
    rail.forget_cached();
    assert_eq!(rail.registrations(), before);
}
