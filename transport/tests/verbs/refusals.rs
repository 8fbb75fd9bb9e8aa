//! Forbidden transfers do not happen, and the error names the side at fault.

use crate::ends::{Ends, LIMIT, Memory, run, run_one, transfer};
use kvpool_transport::Region;
use kvpool_transport::memory::{create_segment, read_only_fd};
use kvpool_transport::rdma::{
    Access, Allows, Fabric, Fault, RdmaOptions, Remote, Transfer, Unavailable, Verb, WorkError,
};
use kvpool_types::{Length, Offset};
use std::os::fd::AsFd;
use std::time::Instant;

const SIZE: u64 = 64 << 10;

/// The result of a forbidden transfer: an error, the lane closed, the peer's memory untouched.
fn refused(ends: &Ends, forbidden: Transfer) -> WorkError {
    let before = ends.there.slice.to_vec();
    let started = Instant::now();
    let error = run_one(&ends.lane, forbidden).unwrap_err();
    assert!(
        started.elapsed() < LIMIT / 10,
        "took {:?}",
        started.elapsed()
    );
    assert!(!ends.lane.is_open());
    assert!(ends.there.slice.to_vec() == before);
    error
}

#[test]
fn a_wrong_key_is_the_peers_refusal() {
    let rail = rail!("a_wrong_key_is_the_peers_refusal");
    for verb in [Verb::Read, Verb::Write] {
        let ends = Ends::connect(&rail, Allows::Writes, SIZE);
        let here = Memory::new(&rail, SIZE, Access::Local);
        here.fill(1);
        let mut remote = ends.there.remote(0);
        remote.rkey ^= 0x5a;
        let error = refused(&ends, transfer(verb, remote, vec![here.part(0, SIZE)]));
        assert_eq!(
            (error.fault, error.status),
            (Fault::Remote, "REM_ACCESS_ERR"),
            "{verb:?}"
        );
    }
}

#[test]
fn an_address_out_of_bounds_is_the_peers_refusal() {
    let rail = rail!("an_address_out_of_bounds_is_the_peers_refusal");
    for verb in [Verb::Read, Verb::Write] {
        for from in [-1_i64, 1, 1 << 30] {
            let ends = Ends::connect(&rail, Allows::Writes, SIZE);
            let here = Memory::new(&rail, SIZE, Access::Local);
            here.fill(1);
            let remote = Remote {
                address: ends.there.registration.address().wrapping_add_signed(from),
                rkey: ends.there.registration.rkey(),
            };
            let error = refused(&ends, transfer(verb, remote, vec![here.part(0, SIZE)]));
            assert_eq!(error.fault, Fault::Remote, "{verb:?} from {from}: {error}");
        }
    }
}

#[test]
fn a_revoked_registration_is_the_peers_refusal() {
    let rail = rail!("a_revoked_registration_is_the_peers_refusal");
    for verb in [Verb::Read, Verb::Write] {
        let ends = Ends::connect(&rail, Allows::Writes, SIZE);
        let here = Memory::new(&rail, SIZE, Access::Local);
        let revoked = rail
            .register(&ends.there.slice, Access::RemoteReadWrite)
            .unwrap();
        let remote = Remote {
            address: revoked.address(),
            rkey: revoked.rkey(),
        };
        let good = transfer(verb, remote, vec![here.part(0, SIZE)]);
        assert_eq!(run_one(&ends.lane, good.clone()), Ok(()));
        here.fill(1);
        drop(revoked);
        assert_eq!(refused(&ends, good).fault, Fault::Remote, "{verb:?}");
    }
}

#[test]
fn a_queue_pair_that_allows_reads_refuses_a_write() {
    let rail = rail!("a_queue_pair_that_allows_reads_refuses_a_write");
    // The memory is writable, but not through this queue pair.
    let ends = Ends::with_access(&rail, Allows::Reads, Access::RemoteReadWrite, SIZE);
    let here = Memory::new(&rail, SIZE, Access::Local);
    here.fill(1);
    let read = transfer(Verb::Read, ends.there.remote(0), vec![here.part(0, SIZE)]);
    assert_eq!(run_one(&ends.lane, read), Ok(()));
    here.fill(2);
    let error = refused(
        &ends,
        transfer(Verb::Write, ends.there.remote(0), vec![here.part(0, SIZE)]),
    );
    assert_eq!(error.fault, Fault::Remote);
}

#[test]
fn memory_registered_for_reading_refuses_a_write() {
    let rail = rail!("memory_registered_for_reading_refuses_a_write");
    let ends = Ends::with_access(&rail, Allows::Writes, Access::RemoteRead, SIZE);
    let here = Memory::new(&rail, SIZE, Access::Local);
    here.fill(1);
    let write = transfer(Verb::Write, ends.there.remote(0), vec![here.part(0, SIZE)]);
    assert_eq!(refused(&ends, write).fault, Fault::Remote);
}

#[test]
fn one_refusal_ends_all_later_work() {
    let rail = rail!("one_refusal_ends_all_later_work");
    let ends = Ends::connect(&rail, Allows::Writes, 100 * SIZE);
    let here = Memory::new(&rail, SIZE, Access::Local);
    let transfers = (0..100)
        .map(|i| {
            let mut remote = ends.there.remote((99 - i) * SIZE);
            remote.rkey ^= if i == 50 { 0x5a } else { 0 };
            transfer(Verb::Write, remote, vec![here.part(0, SIZE)])
        })
        .collect();
    let outcomes = run(&ends.lane, transfers);
    let fault = |i: usize| outcomes[i].as_ref().err().map(|error| error.fault);
    assert_eq!(fault(50), Some(Fault::Remote));
    assert!(
        (51..100).all(|i| fault(i) == Some(Fault::Flushed)),
        "{outcomes:?}"
    );
    // The earlier requests may or may not be confirmed, but none failed by itself.
    assert!((0..50).all(|i| matches!(fault(i), None | Some(Fault::Flushed))));
    assert!(!ends.lane.is_open());
    let after = transfer(Verb::Write, ends.there.remote(0), vec![here.part(0, SIZE)]);
    assert_eq!(
        run_one(&ends.lane, after).unwrap_err().fault,
        Fault::Flushed
    );
    assert_eq!(rail.in_flight(), 0);
}

#[test]
fn an_invalid_transfer_is_refused_alone_and_the_lane_stays_open() {
    let rail = rail!("an_invalid_transfer_is_refused_alone_and_the_lane_stays_open");
    let ends = Ends::connect(&rail, Allows::Writes, SIZE);
    let here = Memory::new(&rail, SIZE, Access::Local);
    let other = Region::allocate(Length(SIZE)).whole();
    let remote = ends.there.remote(0);
    let uncovered = transfer(
        Verb::Write,
        remote,
        vec![(here.registration.clone(), other)],
    );
    let mut past_the_end = transfer(Verb::Write, remote, vec![here.part(0, SIZE)]);
    past_the_end.remote.address = u64::MAX - 5;
    let elsewhere = rail!("an_invalid_transfer_is_refused_alone_and_the_lane_stays_open");
    let foreign = Memory::new(&elsewhere, SIZE, Access::Local);
    let of_another_rail = transfer(Verb::Write, remote, vec![foreign.part(0, SIZE)]);
    let good = transfer(Verb::Write, remote, vec![here.part(0, SIZE)]);
    let all = vec![uncovered, past_the_end, of_another_rail, good];
    let faults: Vec<Option<Fault>> = run(&ends.lane, all)
        .iter()
        .map(|outcome| outcome.as_ref().err().map(|error| error.fault))
        .collect();
    let invalid = Some(Fault::Invalid);
    assert_eq!(faults, [invalid, invalid, invalid, None]);
    assert!(ends.lane.is_open());
}

#[test]
fn memory_of_no_bytes_is_not_registered() {
    let rail = rail!("memory_of_no_bytes_is_not_registered");
    let nothing = Region::allocate(Length(0)).whole();
    assert!(rail.register(&nothing, Access::Local).is_err());
}

#[test]
fn a_descriptor_that_is_no_dmabuf_is_refused() {
    let rail = rail!("a_descriptor_that_is_no_dmabuf_is_refused");
    let file = tempfile::tempfile().unwrap();
    let before = rail.registrations();
    let registered = rail.register_dmabuf(file.as_fd(), 0, 4096, 0, Access::RemoteReadWrite);
    assert!(registered.is_err());
    assert_eq!(rail.registrations(), before);
}

#[test]
fn read_only_memory_is_a_source_and_no_destination() {
    let rail = rail!("read_only_memory_is_a_source_and_no_destination");
    let ends = Ends::connect(&rail, Allows::Writes, SIZE);
    let (fd, writable) = create_segment(Length(SIZE), false, "verbs").unwrap();
    writable.whole().write_at(Offset(0), &[7; 64 << 10]);
    let only_read = Region::map(read_only_fd(&fd).unwrap().as_fd(), Length(SIZE), false);
    let slice = only_read.unwrap().whole();
    assert!(rail.register(&slice, Access::RemoteReadWrite).is_err());
    let registration = match rail.cached(&slice) {
        Ok(registration) => registration,
        // Before Linux 6.3 the memory cannot be registered at all.
        Err(error) => return assert_eq!(error.kind(), std::io::ErrorKind::Unsupported, "{error}"),
    };
    let local = vec![(registration, slice)];
    let read = transfer(Verb::Read, ends.there.remote(0), local.clone());
    assert_eq!(run_one(&ends.lane, read).unwrap_err().fault, Fault::Invalid);
    let write = transfer(Verb::Write, ends.there.remote(0), local);
    assert_eq!(run_one(&ends.lane, write), Ok(()));
    assert_eq!(ends.there.slice.to_vec(), [7; 64 << 10]);
}

#[test]
fn an_absent_device_is_named_in_the_error() {
    let rail = rail!("an_absent_device_is_named_in_the_error");
    let port_99 = format!("{}:99", rail.name().split(':').next().unwrap());
    for name in ["nosuch0", &port_99] {
        let options = RdmaOptions {
            devices: vec![name.to_owned()],
            ..RdmaOptions::default()
        };
        let error = Fabric::open(&options).unwrap_err();
        assert!(matches!(error, Unavailable::Device { .. }), "{error}");
    }
}
