//! The guarantees of an endpoint, over real connections.

mod intruder;
mod letters;
mod rdma;
mod reads;
mod rooms;
mod watch;

use super::host::CLUSTER;
use super::*;
use crate::frame::encode_head;
use crate::link::{ReadOp, TransferError, WriteOp};
use crate::memory::Region;
use crate::rdma::RdmaOptions;
use crate::tcp;
use futures::executor::block_on;
use kvpool_types::wire::data::{Hello, Meta, WriteRequest};
use kvpool_types::wire::frame::{self, Op};
use kvpool_types::{
    ChecksumAlgorithm, ClientId, Code, Epoch, Extent, GrantId, Incarnation, Length, Offset,
};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn endpoint_with(secret: &str) -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = EndpointOptions {
        name: "test".to_owned(),
        secret: Secret::new(secret),
        stall: Duration::from_secs(20),
        rdma: ports(),
        reads_directly: true,
        letters: None,
    };
    Endpoint::start(listener, options).unwrap()
}

/// Set where there is a device: then all transfers here go over RDMA.
const OVER_RDMA: &str = "KVPOOL_TEST_PEERS_OVER_RDMA";

fn ports() -> Option<RdmaOptions> {
    std::env::var_os(OVER_RDMA).map(|_| RdmaOptions::default())
}

fn endpoint() -> Endpoint {
    endpoint_with("")
}

fn name(endpoint: &Endpoint) -> String {
    endpoint.local_addr().to_string()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn address(region: &Region) -> u64 {
    region.whole().as_ptr().addr() as u64
}

/// Memory with a pattern that depends on `seed`.
fn filled(length: u64, seed: u8) -> Region {
    let bytes: Vec<u8> = (0..length)
        .map(|at| (at % 251) as u8 ^ ((at / 4096) & 0x7f) as u8 ^ seed)
        .collect();
    Region::from(bytes)
}

fn exposed(endpoint: &Endpoint, length: u64) -> Region {
    let region = filled(length, 0x55);
    endpoint.expose(region.whole()).unwrap();
    region
}

fn whole(local: &Region, remote: u64) -> Vec<Move> {
    vec![Move {
        local: local.whole(),
        remote,
    }]
}

fn code(outcome: Result<(), TransferError>) -> Code {
    outcome.map_or_else(|error| error.code, |()| Code::Ok)
}

fn hello(secret: &Secret) -> Hello {
    Hello {
        min_version: frame::MIN_VERSION,
        max_version: frame::VERSION,
        cluster: CLUSTER,
        client: ClientId(7),
        incarnation: Incarnation(0),
        checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
        token: secret.proof(ClientId(7)).into(),
    }
}

fn extent(remote: u64, length: u64) -> Extent {
    Extent {
        segment: MEMORY,
        offset: Offset(remote),
        length: Length(length),
    }
}

#[test]
fn transfers_of_any_size_work_in_both_directions() {
    let (here, there) = (endpoint(), endpoint());
    let target = exposed(&there, 40 * MIB);
    for length in [1, 7, 65_536, 65_537, 300_000, 16 * MIB, 40 * MIB] {
        let source = filled(length, 0xa0);
        let moves = whole(&source, address(&target));
        assert_eq!(
            here.transfer(&name(&there), Direction::Write, &moves, soon()),
            Ok(())
        );
        let written = target.slice(Offset(0), Length(length)).unwrap();
        assert!(
            written.to_vec() == source.whole().to_vec(),
            "{length} bytes"
        );
        let back = Region::allocate(Length(length));
        let moves = whole(&back, address(&target));
        assert_eq!(
            here.transfer(&name(&there), Direction::Read, &moves, soon()),
            Ok(())
        );
        assert!(
            back.whole().to_vec() == source.whole().to_vec(),
            "{length} bytes"
        );
    }
}

#[test]
fn adjacent_ranges_exposed_separately_are_written_in_one_call() {
    let (here, there) = (endpoint(), endpoint());
    let region = Region::allocate(Length(8192));
    for from in [0, 4096] {
        there
            .expose(region.slice(Offset(from), Length(4096)).unwrap())
            .unwrap();
    }
    let source = filled(8192, 1);
    let moves: Vec<Move> = [0, 4096]
        .map(|from| Move {
            local: source.slice(Offset(from), Length(4096)).unwrap(),
            remote: address(&region) + from,
        })
        .into();
    assert_eq!(
        here.transfer(&name(&there), Direction::Write, &moves, soon()),
        Ok(())
    );
    assert!(region.whole().to_vec() == source.whole().to_vec());
    // As one range it lies in neither exposed range.
    let whole = whole(&source, address(&region));
    let refused = here.transfer(&name(&there), Direction::Write, &whole, soon());
    assert_eq!(code(refused), Code::OutOfRange);
}

#[test]
fn unexposed_memory_is_neither_written_nor_read() {
    let (here, there) = (endpoint(), endpoint());
    // Large enough for several pieces: not even the first piece may arrive.
    let all = filled(48 * MIB, 0x55);
    let middle = all.slice(Offset(4 * MIB), Length(36 * MIB)).unwrap();
    there.expose(middle).unwrap();
    let before = all.whole().to_vec();
    let at = address(&all);
    for (remote, length) in [
        (at, 16),
        (at + 4 * MIB - 1, 2),
        (at + 40 * MIB - 1, 2),
        (at + 4 * MIB, 36 * MIB + 1),
        (at + 8 * MIB, 40 * MIB),
        (at + 8 * MIB, 33 * MIB),
        (0, 4096),
        (u64::MAX - 10, 4096),
    ] {
        let local = filled(length, 0xff);
        let moves = whole(&local, remote);
        for direction in [Direction::Write, Direction::Read] {
            let refused = here.transfer(&name(&there), direction, &moves, soon());
            assert_eq!(
                code(refused),
                Code::OutOfRange,
                "{direction:?} {length} at {remote:#x}"
            );
        }
    }
    assert!(
        all.whole().to_vec() == before,
        "a refused write changed something"
    );
}

#[test]
fn a_refusal_names_the_range_and_the_nearest_exposed_range() {
    let (here, there) = (endpoint(), endpoint());
    let all = filled(40 * MIB, 0x55);
    let at = address(&all);
    let refused = |remote, length| {
        let moves = whole(&filled(length, 0xff), remote);
        [Direction::Write, Direction::Read].map(|direction| {
            let refused = here.transfer(&name(&there), direction, &moves, soon());
            refused.unwrap_err().message
        })
    };
    for message in refused(at, 16) {
        assert!(
            message.contains(&format!("16 bytes at {at:#x}")),
            "{message}"
        );
        assert!(message.contains("registered no memory"), "{message}");
    }
    let start = at + 4096;
    there
        .expose(all.slice(Offset(4096), Length(20 * MIB)).unwrap())
        .unwrap();
    // Small ranges, one that goes in several pieces, and one that cannot be asked about.
    for (remote, length, asks) in [
        (at, 16, true),
        (start + 20 * MIB - 8, 16, true),
        (start + 1, 20 * MIB, true),
        (u64::MAX - 12, 8, false),
    ] {
        for message in refused(remote, length) {
            let asked = format!("{length} bytes at {remote:#x}");
            let nearest = format!("{} bytes at {start:#x}", 20 * MIB);
            assert!(message.contains(&asked), "{message}");
            assert_eq!(message.contains(&nearest), asks, "{message}");
        }
    }
}

#[test]
fn withdrawn_memory_is_not_touched() {
    let (here, there) = (endpoint(), endpoint());
    let target = exposed(&there, MIB);
    let source = filled(MIB, 9);
    let moves = whole(&source, address(&target));
    assert_eq!(
        here.transfer(&name(&there), Direction::Write, &moves, soon()),
        Ok(())
    );
    assert_eq!(
        there.withdraw(address(&target), Duration::from_secs(5)),
        Ok(true)
    );
    let other = filled(MIB, 10);
    let moves = whole(&other, address(&target));
    let refused = here.transfer(&name(&there), Direction::Write, &moves, soon());
    assert_eq!(code(refused), Code::OutOfRange);
    assert!(target.whole().to_vec() == source.whole().to_vec());
}

#[test]
fn a_withdrawal_ends_a_stalled_receive() {
    let there = endpoint();
    let target = exposed(&there, 4 * MIB);
    let secret = Secret::default();
    // A separate hello to learn the session, then half of a write.
    let (_link, reply) = tcp::connect(there.local_addr(), hello(&secret), soon()).unwrap();
    let mut socket = TcpStream::connect(there.local_addr()).unwrap();
    let head = encode_head(Op::Hello, 0, Epoch(0), 0, |out| hello(&secret).encode(out)).unwrap();
    socket.write_all(&head).unwrap();
    let grant = secret.grant_key(reply.incarnation).sign(
        reply.incarnation,
        Epoch(0),
        GrantId(1),
        extent(address(&target), 4 * MIB),
    );
    let request = WriteRequest {
        incarnation: reply.incarnation,
        grants: vec![grant],
    };
    let payload = request.payload_bytes().unwrap();
    let head = encode_head(Op::Write, 1, Epoch(0), payload, |out| request.encode(out)).unwrap();
    socket.write_all(&head).unwrap();
    socket.write_all(&vec![0xee; 1 << 20]).unwrap();
    let arrived = || target.slice(Offset(0), Length(1)).unwrap().to_vec() == [0xee];
    while !arrived() {
        std::thread::yield_now();
    }
    let timeout = Duration::from_millis(300);
    let begun = Instant::now();
    assert_eq!(there.withdraw(address(&target), timeout), Ok(true));
    assert!(begun.elapsed() >= timeout && begun.elapsed() < Duration::from_secs(2));
}

#[test]
fn without_the_secret_nothing_is_revealed_and_nothing_moves() {
    let there = endpoint_with("right");
    let target = exposed(&there, 4096);
    let before = target.whole().to_vec();
    let source = filled(4096, 3);
    for secret in ["wrong", ""] {
        let here = endpoint_with(secret);
        for direction in [Direction::Write, Direction::Read] {
            let moves = whole(&source, address(&target));
            let refused = here.transfer(&name(&there), direction, &moves, soon());
            assert_eq!(code(refused), Code::GrantRefused);
        }
        assert!(here.tell(&name(&there), b"hello", soon()).is_err());
        assert!(here.first_exposed(&name(&there), soon()).is_err());
    }
    assert!(target.whole().to_vec() == before);
    assert!(there.messages().is_empty());
    let friend = endpoint_with("right");
    let moves = whole(&source, address(&target));
    assert_eq!(
        friend.transfer(&name(&there), Direction::Write, &moves, soon()),
        Ok(())
    );
}

#[test]
fn a_request_needs_the_token_and_the_signature_of_the_session() {
    let there = endpoint_with("right");
    let target = exposed(&there, MIB);
    let before = target.whole().to_vec();
    let secret = Secret::new("right");
    let (link, reply) = tcp::connect(there.local_addr(), hello(&secret), soon()).unwrap();
    // Different code judges small and large writes.
    for length in [4096, MIB] {
        let extent = extent(address(&target), length);
        let source = filled(length, 3);
        let keys = [
            Secret::default().grant_key(reply.incarnation),
            Secret::new("wrong").grant_key(reply.incarnation),
            secret.grant_key(Incarnation(1)),
        ];
        for key in keys {
            let grant = key.sign(reply.incarnation, Epoch(0), GrantId(1), extent);
            let op = WriteOp {
                grant,
                from: vec![source.whole()],
            };
            let outcomes = block_on(link.write(vec![op], soon()));
            let refused = outcomes.first().unwrap().as_ref().unwrap_err();
            assert_eq!(refused.code, Code::GrantRefused);
        }
    }
    assert!(target.whole().to_vec() == before);
    // A hello that names another session is refused.
    let stale = Hello {
        incarnation: Incarnation(1),
        ..hello(&secret)
    };
    let refused = tcp::connect(there.local_addr(), stale, soon()).unwrap_err();
    assert_eq!(refused.code, Code::WrongIncarnation);
    assert!(!refused.message.contains(&reply.incarnation.to_string()));
    let read = ReadOp {
        extent: extent(address(&target), 16),
        from: Offset(0),
        into: vec![Region::allocate(Length(16)).whole()],
        right: None,
    };
    assert!(block_on(link.read(Epoch(0), vec![read], soon()))[0].is_ok());
}

#[test]
fn a_peer_that_never_answers_costs_no_more_than_the_deadline() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = endpoint();
    let begun = Instant::now();
    let deadline = begun + Duration::from_millis(500);
    let target = silent.local_addr().unwrap().to_string();
    let moves = whole(&filled(16, 0), 4096);
    let late = here.transfer(&target, Direction::Write, &moves, deadline);
    assert_eq!(code(late), Code::DeadlineExceeded);
    assert!(begun.elapsed() < Duration::from_secs(2));
}

#[test]
fn an_absent_peer_is_reported_and_a_returned_peer_is_found() {
    let here = endpoint();
    let source = filled(4096, 1);
    let first = endpoint();
    let at = first.local_addr();
    let target = exposed(&first, 4096);
    let moves = whole(&source, address(&target));
    assert_eq!(
        here.transfer(&at.to_string(), Direction::Write, &moves, soon()),
        Ok(())
    );
    drop(first);
    let gone = here.transfer(&at.to_string(), Direction::Write, &moves, soon());
    assert_eq!(code(gone), Code::Unreachable);
    let options = EndpointOptions {
        name: "second".to_owned(),
        secret: Secret::default(),
        stall: Duration::from_secs(20),
        rdma: ports(),
        reads_directly: true,
        letters: None,
    };
    let second = Endpoint::start(TcpListener::bind(at).unwrap(), options).unwrap();
    second.expose(target.whole()).unwrap();
    assert_eq!(
        here.transfer(&at.to_string(), Direction::Write, &moves, soon()),
        Ok(())
    );
}

#[test]
fn messages_arrive_in_order_and_within_the_limit() {
    let (here, there) = (endpoint(), endpoint());
    for number in 0..10u8 {
        here.tell(&name(&there), &[number; 100], soon()).unwrap();
    }
    let told: Vec<u8> = there.messages().iter().map(|message| message[0]).collect();
    assert_eq!(told, (0..10).collect::<Vec<u8>>());
    assert!(there.messages().is_empty());
    for wrong in [0, (64 << 10) + 1] {
        let refused = here.tell(&name(&there), &vec![0; wrong], soon());
        assert_eq!(code(refused), Code::InvalidArgument);
    }
}

#[test]
fn the_first_exposed_address_is_reported() {
    let (here, there) = (endpoint(), endpoint());
    assert_eq!(here.first_exposed(&name(&there), soon()), Ok(None));
    let first = exposed(&there, 64);
    let _second = exposed(&there, 64);
    let told = here.first_exposed(&name(&there), soon());
    assert_eq!(told, Ok(Some(address(&first))));
}

#[test]
fn bad_targets_are_refused() {
    let here = endpoint();
    let moves = whole(&filled(16, 0), 4096);
    for target in [
        "",
        "nonsense",
        "127.0.0.1",
        "127.0.0.1:notaport",
        "127.0.0.1:99999",
    ] {
        let refused = here.transfer(target, Direction::Write, &moves, soon());
        assert_eq!(code(refused), Code::InvalidArgument, "{target:?}");
    }
}
