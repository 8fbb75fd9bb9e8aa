//! The guarantees of rooms: one key, some extents, and nothing after the close.

use super::*;
use crate::checksum::checksum;
use crate::frame::receive_by;
use crate::memory::Slice;
use kvpool_types::Checksum;
use kvpool_types::GrantKey;
use std::os::fd::AsFd;

fn part(region: &Region, from: u64, length: u64) -> Slice {
    region.slice(Offset(from), Length(length)).unwrap()
}

fn to(from: &Region, remote: u64) -> Move {
    Move {
        local: from.whole(),
        remote,
    }
}

fn refusal(outcome: Result<Checksum, TransferError>) -> Code {
    outcome.map_or_else(|error| error.code, |_| Code::Ok)
}

#[test]
fn a_room_is_written_in_its_extents_and_gives_the_checksum_of_all_bytes() {
    let (here, there) = (endpoint(), endpoint());
    let memory = Region::allocate(Length(64 * MIB));
    let at = address(&memory);
    let extents = vec![part(&memory, 0, 40 * MIB), part(&memory, 48 * MIB, MIB)];
    let pass = there.open_room(extents).unwrap();
    let (large, small) = (filled(40 * MIB, 1), filled(100, 2));
    let moves = [to(&large, at), to(&small, at + 48 * MIB + 7)];
    let sum = here.write_room(&name(&there), &pass, &moves, soon());
    let mut all = large.whole().to_vec();
    all.extend(small.whole().to_vec());
    assert_eq!(sum, Ok(checksum(&all)));
    assert!(part(&memory, 0, 40 * MIB).to_vec() == large.whole().to_vec());
    assert_eq!(
        part(&memory, 48 * MIB + 7, 100).to_vec(),
        small.whole().to_vec()
    );
    assert_eq!(there.close_room(pass.epoch, Duration::ZERO), Ok(true));
    assert_eq!(there.close_room(pass.epoch, Duration::ZERO), Ok(false));
}

#[test]
fn a_pass_opens_its_own_room_alone() {
    let (here, there) = (endpoint(), endpoint());
    let memory = filled(4 * MIB, 0x55);
    let before = memory.whole().to_vec();
    let at = address(&memory);
    let exposed = exposed(&there, MIB);
    let one = there.open_room(vec![part(&memory, 0, MIB)]).unwrap();
    let two = there.open_room(vec![part(&memory, MIB, MIB)]).unwrap();
    let closed = there.open_room(vec![part(&memory, 2 * MIB, MIB)]).unwrap();
    assert_eq!(there.close_room(closed.epoch, Duration::ZERO), Ok(true));
    let forged = RoomPass {
        key: two.key.clone(),
        ..one.clone()
    };
    let unknown = RoomPass {
        epoch: Epoch(7),
        key: GrantKey([1; 32]),
    };
    // Different code judges small and large writes.
    for length in [4096, MIB] {
        let source = filled(length, 9);
        for (pass, address, wanted) in [
            (&forged, at, Code::GrantRefused),
            (&unknown, at, Code::GrantEnded),
            (&closed, at + 2 * MIB, Code::GrantEnded),
            (&one, at + MIB, Code::OutOfRange),
            (&one, at + MIB - 1, Code::OutOfRange),
            (&one, address(&exposed), Code::OutOfRange),
            (&two, at + 3 * MIB, Code::OutOfRange),
            (&one, u64::MAX - 10, Code::OutOfRange),
        ] {
            let moves = [to(&source, address)];
            let outcome = here.write_room(&name(&there), pass, &moves, soon());
            assert_eq!(refusal(outcome), wanted, "{length} at {address:#x}");
        }
        // The session reaches exposed memory only.
        let moves = whole(&source, at);
        for direction in [Direction::Write, Direction::Read] {
            let refused = here.transfer(&name(&there), direction, &moves, soon());
            assert_eq!(code(refused), Code::OutOfRange);
        }
    }
    assert!(
        memory.whole().to_vec() == before,
        "a refused write changed something"
    );
    assert!(exposed.whole().to_vec() == filled(MIB, 0x55).whole().to_vec());
}

#[test]
fn a_pass_of_an_earlier_session_opens_nothing() {
    let here = endpoint();
    let first = endpoint();
    let at = first.local_addr();
    let memory = Region::allocate(Length(4096));
    let pass = first.open_room(vec![memory.whole()]).unwrap();
    drop(first);
    let options = EndpointOptions {
        name: "second".to_owned(),
        secret: Secret::default(),
        stall: Duration::from_secs(20),
        rdma: None,
    };
    let second = Endpoint::start(TcpListener::bind(at).unwrap(), options).unwrap();
    let _other = second.open_room(vec![memory.whole()]).unwrap();
    let moves = [to(&filled(4096, 1), address(&memory))];
    let outcome = here.write_room(&at.to_string(), &pass, &moves, soon());
    assert_eq!(refusal(outcome), Code::GrantEnded);
    assert!(memory.whole().to_vec() == vec![0; 4096]);
}

#[test]
fn a_room_over_odd_memory_is_refused() {
    let there = endpoint();
    let memory = Region::allocate(Length(8192));
    let open = |of: &[(u64, u64)]| {
        let parts = of
            .iter()
            .map(|(from, length)| part(&memory, *from, *length));
        there.open_room(parts.collect())
    };
    assert_eq!(open(&[]), Err(ExposeError::Unfit));
    assert_eq!(open(&[(0, 10), (20, 0)]), Err(ExposeError::Unfit));
    let overlap = open(&[(0, 100), (200, 100), (99, 2)]);
    assert!(matches!(overlap, Err(ExposeError::Overlap { .. })));
    let overlap = open(&[(100, 100), (0, 101)]);
    assert!(matches!(overlap, Err(ExposeError::Overlap { .. })));
    assert!(open(&[(0, 100), (100, 100)]).is_ok());
}

/// The rounds of the test below.
const ROUNDS: u32 = 1000;
const PAGES: u64 = 256 << 10;

/// A writer that sends half of a write into a room, and stalls.
fn stalled_writer(there: &Endpoint, pass: &RoomPass, session: Incarnation, at: u64) -> TcpStream {
    let secret = Secret::default();
    let mut socket = TcpStream::connect(there.local_addr()).unwrap();
    let head = encode_head(Op::Hello, 0, Epoch(0), 0, |out| hello(&secret).encode(out)).unwrap();
    socket.write_all(&head).unwrap();
    receive_by(socket.as_fd(), soon()).unwrap();
    let grant = pass
        .key
        .sign(session, pass.epoch, GrantId(1), extent(at, PAGES));
    let request = WriteRequest {
        incarnation: session,
        grants: vec![grant],
    };
    let payload = request.payload_bytes().unwrap();
    let head = encode_head(Op::Write, 1, pass.epoch, payload, |out| request.encode(out)).unwrap();
    socket.write_all(&head).unwrap();
    socket.write_all(&vec![0xee; 1 << 17]).unwrap();
    socket
}

#[test]
fn after_a_room_is_closed_a_stalled_writer_changes_nothing() {
    let there = endpoint();
    let (_link, reply) =
        tcp::connect(there.local_addr(), hello(&Secret::default()), soon()).unwrap();
    let pages = Region::allocate(Length(PAGES));
    let at = address(&pages);
    let canary = vec![0x5a; usize::try_from(PAGES).unwrap()];
    for round in 0..ROUNDS {
        pages.whole().write_at(Offset(0), &vec![0; canary.len()]);
        let pass = there.open_room(vec![pages.whole()]).unwrap();
        let mut writer = stalled_writer(&there, &pass, reply.incarnation, at);
        while part(&pages, 0, 1).to_vec() != [0xee] {
            std::thread::yield_now();
        }
        assert_eq!(there.close_room(pass.epoch, Duration::ZERO), Ok(true));
        // The pages are another request's now.
        pages.whole().write_at(Offset(0), &canary);
        let rest = vec![0xee; canary.len()];
        // The connection is gone, or goes while the rest is sent.
        drop(writer.write_all(&rest));
        writer
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        let mut answer = [0; 64];
        while matches!(writer.read(&mut answer), Ok(1..)) {}
        assert!(
            pages.whole().to_vec() == canary,
            "round {round}: a page was written"
        );
    }
}

#[test]
fn closing_a_room_waits_for_a_writer_that_ends_in_time() {
    let there = endpoint();
    let (_link, reply) =
        tcp::connect(there.local_addr(), hello(&Secret::default()), soon()).unwrap();
    let pages = Region::allocate(Length(PAGES));
    let pass = there.open_room(vec![pages.whole()]).unwrap();
    let mut writer = stalled_writer(&there, &pass, reply.incarnation, address(&pages));
    while part(&pages, 0, 1).to_vec() != [0xee] {
        std::thread::yield_now();
    }
    let ends = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        // The rest of the bytes, and chunk checksums that do not match.
        let left = usize::try_from(PAGES).unwrap() - (1 << 17) + 8 * 4;
        writer.write_all(&vec![0xee; left]).unwrap();
        receive_by(writer.as_fd(), soon()).unwrap().0.op
    });
    assert_eq!(
        there.close_room(pass.epoch, Duration::from_secs(10)),
        Ok(true)
    );
    assert_eq!(
        ends.join().unwrap(),
        Op::Statuses,
        "the writer got its answer"
    );
}
