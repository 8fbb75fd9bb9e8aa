//! Faults that only RDMA can have: in keys, in queue pairs, and in memory touched unobserved.
//! Without a device these tests print that they are skipped.

use super::intruder::{Connection, Intruder, port, queue_pairs};
use super::*;
use crate::link::TransportKind;
use crate::rdma::{self, Fabric, Fault};
use kvpool_types::wire::rdma::RdmaOpen;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

/// The port that a test runs on. Without one the test prints that it is skipped, and returns.
macro_rules! device {
    ($name:literal) => {
        match port() {
            Ok(port) => port,
            Err(why) => {
                eprintln!("SKIPPED {}: {why}", $name);
                return;
            }
        }
    };
}

/// Long enough for bytes in flight to arrive.
const WHILE: Duration = Duration::from_millis(300);

fn endpoint_over(rdma: Option<RdmaOptions>) -> Endpoint {
    let options = EndpointOptions {
        name: "test".to_owned(),
        secret: Secret::default(),
        stall: Duration::from_secs(20),
        rdma,
        reads_directly: true,
        letters: None,
    };
    Endpoint::start(TcpListener::bind("127.0.0.1:0").unwrap(), options).unwrap()
}

fn over_rdma() -> Endpoint {
    endpoint_over(Some(RdmaOptions::default()))
}

fn on_devices(names: &[&str]) -> RdmaOptions {
    RdmaOptions {
        devices: names.iter().map(|name| (*name).to_owned()).collect(),
        ..RdmaOptions::default()
    }
}

fn kind(here: &Endpoint, there: &str) -> TransportKind {
    here.route(there, soon()).unwrap().kind
}

fn same(region: &Region, bytes: &[u8]) -> bool {
    region.whole().to_vec() == bytes
}

fn refill(region: &Region, byte: u8) -> Vec<u8> {
    let bytes = vec![byte; region.whole().length().as_usize()];
    region.whole().write_at(Offset(0), &bytes);
    bytes
}

/// Both directions through an endpoint, with a check of the bytes.
fn round_trip(here: &Endpoint, there: &str, target: &Region, seed: u8) {
    let length = target.whole().length().0;
    let source = filled(length, seed);
    let moves = whole(&source, address(target));
    assert_eq!(
        here.transfer(there, Direction::Write, &moves, soon()),
        Ok(())
    );
    assert!(same(target, &source.whole().to_vec()));
    let back = Region::allocate(Length(length));
    let moves = whole(&back, address(target));
    assert_eq!(
        here.transfer(there, Direction::Read, &moves, soon()),
        Ok(())
    );
    assert!(same(&back, &source.whole().to_vec()));
}

/// Needs no device: an unavailable device is reported and does not stop the bytes.
#[test]
fn without_a_device_the_reason_is_given_and_bytes_go_over_tcp() {
    let here = endpoint_over(Some(on_devices(&["no-such-device"])));
    let why = here.ports().unwrap_err().to_owned();
    assert!(why.contains("RDMA") || why.contains("libibverbs"), "{why}");
    let there = endpoint_over(None);
    let target = exposed(&there, MIB);
    for round in 0..3 {
        round_trip(&here, &name(&there), &target, round);
    }
    let route = here.route(&name(&there), soon()).unwrap();
    assert_eq!(route.kind, TransportKind::Tcp);
    assert_eq!(route.why.as_deref(), Some(why.as_str()));
    // A route is reported once, and again only when it changes.
    assert_eq!(here.route_changes(), [(name(&there), route)]);
    round_trip(&here, &name(&there), &target, 4);
    assert_eq!(here.route_changes(), []);
}

/// Needs no device either.
#[test]
fn without_rdma_nothing_is_located_and_no_queue_pairs_are_given() {
    let there = endpoint_over(None);
    let target = exposed(&there, 4096);
    let connection = Connection::open(&there);
    let at = extent(address(&target), 4096);
    let refused = connection.locate(connection.session, at);
    assert_eq!(refused.unwrap_err(), Code::InvalidArgument);
    let refused = connection.offer(connection.session, &[]).unwrap_err();
    assert_eq!(refused.code, Code::InvalidArgument, "{refused}");
}

#[test]
fn the_route_is_rdma_only_if_both_ends_have_it() {
    let _device = device!("the_route_is_rdma_only_if_both_ends_have_it");
    for (here, there, want) in [
        (true, true, TransportKind::Rdma),
        (true, false, TransportKind::Tcp),
        (false, true, TransportKind::Tcp),
    ] {
        let end = |has| endpoint_over(Some(RdmaOptions::default()).filter(|_| has));
        let (here, there) = (end(here), end(there));
        let target = exposed(&there, MIB);
        round_trip(&here, &name(&there), &target, 1);
        let route = here.route(&name(&there), soon()).unwrap();
        assert_eq!(route.kind, want, "{:?}", route.why);
        assert_eq!(route.why.is_none(), want == TransportKind::Rdma);
    }
}

#[test]
fn a_key_grants_access_to_its_range_only() {
    let port = device!("a_key_grants_access_to_its_range_only");
    let there = over_rdma();
    let all = filled(12 << 10, 0x55);
    let middle = all.slice(Offset(4 << 10), Length(4 << 10)).unwrap();
    there.expose(middle).unwrap();
    let elsewhere = filled(4096, 0x66);
    let (from, to) = (address(&all) + 4096, address(&all) + 8192);
    let before = all.whole().to_vec();
    let place = Intruder::connect(&there, &port)
        .place(extent(from + 7, 1))
        .unwrap();
    assert_eq!((place.address, place.length), (from, Length(4096)));
    for (remote, length) in [
        (from - 1, 2),
        (to - 1, 2),
        (from - 4096, 16),
        (to, 16),
        (from, 4097),
        (address(&elsewhere), 16),
        (0, 16),
    ] {
        for way in [rdma::Verb::Read, rdma::Verb::Write] {
            // After a refusal a queue pair is unusable.
            let intruder = Intruder::connect(&there, &port);
            let local = filled(length, 0xff);
            let sent = local.whole().to_vec();
            let refused = intruder.run(way, remote, place.rkey, &local).unwrap_err();
            assert_eq!(
                refused.fault,
                Fault::Remote,
                "{way:?} {remote:#x}: {refused}"
            );
            assert!(same(&local, &sent), "{way:?} {remote:#x} brought something");
            assert_eq!(
                intruder.place(extent(remote, length)).unwrap_err(),
                Code::OutOfRange
            );
        }
    }
    assert!(same(&all, &before), "the memory was touched");
    let inside = Region::allocate(Length(4096));
    let intruder = Intruder::connect(&there, &port);
    let read = intruder.run(rdma::Verb::Read, from, place.rkey, &inside);
    assert!(read.is_ok() && same(&inside, &before[4096..8192]));
}

/// As when the process is a store node too, with its segment registered for its clients.
#[test]
fn keys_of_other_registered_memory_grant_no_access() {
    let port = device!("keys_of_other_registered_memory_grant_no_access");
    let there = over_rdma();
    let _target = exposed(&there, 4096);
    let segment = filled(MIB, 0x11);
    let before = segment.whole().to_vec();
    let fabric = Fabric::shared(&RdmaOptions::default()).unwrap();
    let exposure = fabric.expose(&segment.whole()).unwrap();
    let place = exposure.registrations(MEMORY).next().unwrap();
    for way in [rdma::Verb::Read, rdma::Verb::Write] {
        let intruder = Intruder::connect(&there, &port);
        let local = filled(4096, 0xff);
        let refused = intruder.run(way, place.address, place.rkey, &local);
        assert_eq!(refused.unwrap_err().fault, Fault::Remote);
        assert!(same(&local, &filled(4096, 0xff).whole().to_vec()));
    }
    assert!(same(&segment, &before));
}

#[test]
fn a_key_is_void_when_withdraw_has_returned() {
    let port = device!("a_key_is_void_when_withdraw_has_returned");
    let there = over_rdma();
    let target = exposed(&there, MIB);
    for way in [rdma::Verb::Read, rdma::Verb::Write] {
        let intruder = Intruder::connect(&there, &port);
        let place = intruder.place(extent(address(&target), MIB)).unwrap();
        let local = filled(MIB, 0xff);
        assert_eq!(intruder.run(way, place.address, place.rkey, &local), Ok(()));
        let withdrawn = there.withdraw(address(&target), Duration::from_secs(5));
        assert_eq!(withdrawn, Ok(true));
        let canary = refill(&target, 0xca);
        let refused = intruder.run(way, place.address, place.rkey, &filled(MIB, 0xff));
        assert_eq!(refused.unwrap_err().fault, Fault::Remote);
        assert!(same(&target, &canary));
        let told = intruder.place(extent(address(&target), MIB));
        assert_eq!(told.unwrap_err(), Code::OutOfRange);
        there.expose(target.whole()).unwrap();
    }
}

/// A writer that is stopped in the middle, and resumes when the memory has a new owner.
#[test]
fn withdraw_ends_the_queue_pairs_of_an_unfinished_announced_write() {
    let port = device!("withdraw_ends_the_queue_pairs_of_an_unfinished_announced_write");
    let there = over_rdma();
    let target = exposed(&there, MIB);
    let other = exposed(&there, MIB);
    let intruder = Intruder::connect(&there, &port);
    let at = extent(address(&target), MIB);
    let place = intruder.place(at).unwrap();
    let of_other = intruder.place(extent(address(&other), MIB)).unwrap();
    assert_eq!(intruder.announce(at), Code::Ok);
    let timeout = Duration::from_millis(300);
    let begun = Instant::now();
    assert_eq!(there.withdraw(address(&target), timeout), Ok(true));
    assert!(begun.elapsed() >= timeout && begun.elapsed() < Duration::from_secs(3));
    let canary = refill(&target, 0xca);
    // A fenced writer reaches not even memory that is still registered.
    let untouched = other.whole().to_vec();
    for place in [place, of_other] {
        let late = intruder.run(
            rdma::Verb::Write,
            place.address,
            place.rkey,
            &filled(MIB, 0xff),
        );
        assert!(late.is_err());
    }
    assert!(same(&target, &canary) && same(&other, &untouched));
}

#[test]
fn transfers_in_progress_fail_when_their_range_is_withdrawn() {
    let _device = device!("transfers_in_progress_fail_when_their_range_is_withdrawn");
    for way in [Direction::Read, Direction::Write] {
        let (here, there) = (over_rdma(), over_rdma());
        let target = exposed(&there, 64 * MIB);
        let local = filled(64 * MIB, 0x0f);
        let to = name(&there);
        std::thread::scope(|scope| {
            let moving = scope.spawn(|| {
                let moves = whole(&local, address(&target));
                here.transfer(&to, way, &moves, soon())
            });
            std::thread::sleep(Duration::from_millis(40));
            let withdrawn = there.withdraw(address(&target), Duration::from_millis(10));
            assert_eq!(withdrawn, Ok(true));
            // From here on the memory has a new owner, and nothing may read it.
            let canary = refill(&target, 0xca);
            let outcome = moving.join().unwrap();
            if outcome.is_ok() {
                eprintln!("the {way:?} was over before the range was withdrawn");
            } else {
                assert_eq!(code(outcome), Code::OutOfRange, "{way:?}");
            }
            let settled = refill(&local, 0x0a);
            std::thread::sleep(WHILE);
            assert!(same(&target, &canary), "{way:?} wrote after the withdrawal");
            assert!(
                same(&local, &settled),
                "{way:?} touched memory after its end"
            );
        });
    }
}

#[test]
fn memory_registered_again_is_reached_over_rdma_again() {
    let _device = device!("memory_registered_again_is_reached_over_rdma_again");
    let (here, there) = (over_rdma(), over_rdma());
    let to = name(&there);
    let target = exposed(&there, MIB);
    for round in 0..3 {
        round_trip(&here, &to, &target, round);
        let withdrawn = there.withdraw(address(&target), Duration::from_secs(5));
        assert_eq!(withdrawn, Ok(true));
        there.expose(target.whole()).unwrap();
        let back = Region::allocate(Length(MIB));
        let moves = whole(&back, address(&target));
        assert_eq!(here.transfer(&to, Direction::Read, &moves, soon()), Ok(()));
        assert!(same(&back, &target.whole().to_vec()));
        assert_eq!(kind(&here, &to), TransportKind::Rdma);
    }
}

#[test]
fn queue_pairs_require_the_token() {
    let port = device!("queue_pairs_require_the_token");
    let there = endpoint_over(Some(RdmaOptions::default()));
    let target = exposed(&there, 4096);
    let connection = Connection::open(&there);
    let wrong = Incarnation(1);
    let refused = connection.offer(wrong, &queue_pairs(&port)).unwrap_err();
    assert_eq!(refused.code, Code::WrongIncarnation);
    // Nothing is told on a connection without queue pairs, or to a request that names another
    // session.
    let at = extent(address(&target), 4096);
    let refused = connection.locate(connection.session, at);
    assert_eq!(refused.unwrap_err(), Code::InvalidArgument);
    let intruder = Intruder::connect(&there, &port);
    let refused = intruder.connection.locate(wrong, at);
    assert_eq!(refused.unwrap_err(), Code::WrongIncarnation);
}

#[test]
fn queue_pairs_require_the_secret() {
    let port = device!("queue_pairs_require_the_secret");
    let options = EndpointOptions {
        name: "test".to_owned(),
        secret: Secret::new("right"),
        stall: Duration::from_secs(20),
        rdma: Some(RdmaOptions::default()),
        reads_directly: true,
        letters: None,
    };
    let there = Endpoint::start(TcpListener::bind("127.0.0.1:0").unwrap(), options).unwrap();
    for secret in ["", "wrong"] {
        let refused = Connection::with_hello(&there, &hello(&Secret::new(secret)));
        assert_eq!(refused.err().unwrap().code, Code::GrantRefused);
    }
    // A caller that does not even say hello.
    let queues = queue_pairs(&port);
    let request = RdmaOpen {
        incarnation: Incarnation(0),
        offers: Vec::new(),
    };
    let head = encode_head(Op::RdmaOpen, 1, Epoch(0), 0, |out| request.encode(out)).unwrap();
    let mut socket = TcpStream::connect(there.local_addr()).unwrap();
    socket.write_all(&head).unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    let header: [u8; frame::HEADER_BYTES] = answer[..frame::HEADER_BYTES].try_into().unwrap();
    assert_eq!(frame::Header::decode(&header).unwrap().op, Op::Failure);
    let friend = hello(&Secret::new("right"));
    let connection = Connection::with_hello(&there, &friend).unwrap();
    assert!(connection.offer(connection.session, &queues).is_ok());
}

#[test]
fn queue_pairs_end_with_the_session_and_with_their_connection() {
    let port = device!("queue_pairs_end_with_the_session_and_with_their_connection");
    for ends_session in [true, false] {
        let there = over_rdma();
        let target = exposed(&there, MIB);
        let intruder = Intruder::connect(&there, &port);
        let place = intruder.place(extent(address(&target), MIB)).unwrap();
        let (write, source) = (rdma::Verb::Write, filled(4096, 0xff));
        assert_eq!(
            intruder.run(write, place.address, place.rkey, &source),
            Ok(())
        );
        let canary = refill(&target, 0xca);
        let survivor = if ends_session {
            drop(there);
            None
        } else {
            intruder.connection.shut();
            std::thread::sleep(WHILE);
            Some(there)
        };
        let late = intruder.run(write, place.address, place.rkey, &source);
        assert!(late.is_err(), "session: {ends_session}");
        assert!(same(&target, &canary));
        drop(survivor);
    }
}

#[test]
fn withdrawn_memory_does_not_stay_registered() {
    let _device = device!("withdrawn_memory_does_not_stay_registered");
    let fabric = Fabric::open(&RdmaOptions::default()).unwrap();
    let memory = filled(MIB, 1);
    let alive = || -> Vec<usize> { fabric.rails().iter().map(|it| it.registrations()).collect() };
    let before = alive();
    let exposure = fabric.expose(&memory.whole()).unwrap();
    assert_ne!(alive(), before);
    exposure.end().unwrap();
    assert_eq!(alive(), before);
}

/// Two devices that cannot reach each other: queue pairs are agreed on, but no byte passes.
#[test]
fn tcp_takes_over_when_rdma_transfers_nothing() {
    let _device = device!("tcp_takes_over_when_rdma_transfers_nothing");
    let (first, second) = (on_devices(&["rxe0"]), on_devices(&["rxe1"]));
    let impatient = RdmaOptions {
        retry: rdma::Retry {
            count: 2,
            timeout: 14,
        },
        ..first
    };
    let (here, there) = (endpoint_over(Some(impatient)), endpoint_over(Some(second)));
    for end in [&here, &there] {
        if let Err(why) = end.ports() {
            eprintln!("SKIPPED tcp_takes_over_when_rdma_transfers_nothing: {why}");
            return;
        }
    }
    let to = name(&there);
    assert_eq!(kind(&here, &to), TransportKind::Rdma);
    let target = exposed(&there, MIB);
    round_trip(&here, &to, &target, 1);
    let route = here.route(&to, soon()).unwrap();
    assert_eq!(route.kind, TransportKind::Tcp);
    let why = route.why.unwrap();
    // Either the failed transfer is named, or the probe of the link that was opened after it.
    let is_told =
        why.contains("RDMA failed") || why.contains("no pair of RDMA ports transfers data");
    assert!(is_told, "{why}");
}

/// A process with exposed memory, killed when this is dropped.
struct Process {
    child: Child,
    target: String,
    address: u64,
}

const LENGTH: u64 = 64 * MIB;
const IS_PEER: &str = "KVPOOL_TEST_IS_PEER";

impl Process {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peer::tests::rdma::a_process_with_memory"])
            .args(["--ignored", "--nocapture"])
            .env(IS_PEER, "1")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map(Result::unwrap);
        let line = lines.find_map(|line| line.split_once("PEER ").map(|(_, it)| it.to_owned()));
        let line = line.unwrap();
        let (target, at) = line.split_once(' ').unwrap();
        Self {
            child,
            target: target.to_owned(),
            address: at.parse().unwrap(),
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let process = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(process, signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
#[ignore = "is the other process of other tests"]
fn a_process_with_memory() {
    if std::env::var_os(IS_PEER).is_none() {
        return;
    }
    let endpoint = over_rdma();
    let memory = exposed(&endpoint, LENGTH);
    println!("PEER {} {}", name(&endpoint), address(&memory));
    std::thread::sleep(Duration::from_secs(120));
}

#[test]
fn a_transfer_with_a_killed_or_stopped_peer_ends_by_its_deadline() {
    let _device = device!("a_transfer_with_a_killed_or_stopped_peer_ends_by_its_deadline");
    use rustix::process::Signal;
    for way in [Direction::Read, Direction::Write] {
        for (signal, codes) in [
            (Signal::KILL, [Code::Unreachable, Code::DeadlineExceeded]),
            (Signal::STOP, [Code::DeadlineExceeded; 2]),
        ] {
            let there = Process::start();
            let here = over_rdma();
            let local = filled(LENGTH, 1);
            let moves = whole(&local, there.address);
            assert_eq!(here.transfer(&there.target, way, &moves, soon()), Ok(()));
            assert_eq!(kind(&here, &there.target), TransportKind::Rdma);
            std::thread::scope(|scope| {
                let moving = scope.spawn(|| {
                    let deadline = Instant::now() + Duration::from_secs(4);
                    loop {
                        let outcome = here.transfer(&there.target, way, &moves, deadline);
                        if outcome.is_err() {
                            return (outcome, Instant::now().saturating_duration_since(deadline));
                        }
                    }
                });
                std::thread::sleep(Duration::from_millis(100));
                there.signal(signal);
                let (outcome, late) = moving.join().unwrap();
                let code = code(outcome);
                assert!(codes.contains(&code), "{way:?} {signal:?}: {code}");
                assert!(
                    late < Duration::from_secs(1),
                    "{way:?} {signal:?}: {late:?}"
                );
            });
            // Ended transfers touch nothing, also when the peer resumes.
            let settled = refill(&local, 0x0a);
            if signal == Signal::STOP {
                there.signal(Signal::CONT);
            }
            std::thread::sleep(WHILE);
            assert!(same(&local, &settled), "{way:?} {signal:?}");
        }
    }
}

/// Unregistered buffers are registered for their transfer, and stay intact.
#[test]
fn unregistered_buffers_are_registered_for_their_transfer() {
    let _device = device!("unregistered_buffers_are_registered_for_their_transfer");
    let (here, there) = (over_rdma(), Arc::new(over_rdma()));
    let target = exposed(&there, 8 * MIB);
    for round in 0..40 {
        round_trip(&here, &name(&there), &target, round);
    }
    assert_eq!(kind(&here, &name(&there)), TransportKind::Rdma);
}
