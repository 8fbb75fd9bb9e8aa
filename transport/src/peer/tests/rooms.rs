//! The guarantees of rooms: one key, some extents, and nothing after the close.

use super::*;
use crate::checksum::checksum;
use crate::frame::receive_by;
use crate::memory::Slice;
use crate::peer::rooms::view_extent;
use kvpool_types::Checksum;
use kvpool_types::GrantKey;
use std::os::fd::AsFd;

fn part(region: &Region, from: u64, length: u64) -> Slice {
    region.slice(Offset(from), Length(length)).unwrap()
}

fn view(memory: Slice) -> RoomView {
    RoomView::new(vec![memory.into()]).unwrap()
}

fn to(view: u32, offset: u64, from: &Region) -> RoomPart {
    RoomPart {
        view,
        offset,
        from: vec![from.whole()],
    }
}

fn write(
    from: &Endpoint,
    to: &Endpoint,
    pass: &RoomPass,
    parts: &[RoomPart],
) -> Result<Checksum, TransferError> {
    let link = from.link(&name(to), soon())?;
    block_on(link.write_room(pass, parts, soon()))
}

fn refusal(outcome: Result<Checksum, TransferError>) -> Code {
    outcome.map_or_else(|error| error.code, |_| Code::Ok)
}

fn close(endpoint: &Endpoint, pass: &RoomPass) -> Option<ClosedRoom> {
    endpoint.close_room(pass.epoch, Duration::ZERO).unwrap()
}

#[test]
fn a_room_is_written_in_its_views_and_gives_the_checksum_of_all_bytes() {
    let (here, there) = (endpoint(), endpoint());
    let memory = Region::allocate(Length(64 * MIB));
    let views = vec![
        view(part(&memory, 0, 40 * MIB)),
        view(part(&memory, 48 * MIB, MIB)),
    ];
    let pass = there.open_room(views).unwrap();
    let (large, small) = (filled(40 * MIB, 1), filled(100, 2));
    let sum = write(&here, &there, &pass, &[to(0, 0, &large), to(1, 7, &small)]);
    let mut all = large.whole().to_vec();
    all.extend(small.whole().to_vec());
    assert_eq!(sum, Ok(checksum(&all)));
    assert!(part(&memory, 0, 40 * MIB).to_vec() == large.whole().to_vec());
    assert_eq!(
        part(&memory, 48 * MIB + 7, 100).to_vec(),
        small.whole().to_vec()
    );
    let closed = close(&there, &pass).unwrap();
    let whole = closed.sum(0, Offset(0), Length(40 * MIB));
    assert_eq!(whole, Some(checksum(&large.whole().to_vec())));
    assert_eq!(
        closed.sum(1, Offset(7), Length(100)),
        Some(checksum(&small.whole().to_vec()))
    );
    // A range that was not written whole is read.
    let of_zeros = closed.sum(1, Offset(0), Length(7));
    assert_eq!(of_zeros, Some(checksum(&[0; 7])));
    assert_eq!(closed.sum(1, Offset(0), Length(MIB + 1)), None);
    assert_eq!(closed.sum(2, Offset(0), Length(1)), None);
    assert!(close(&there, &pass).is_none());
}

#[test]
fn rows_of_a_view_are_one_run_of_bytes() {
    let (here, there) = (endpoint(), endpoint());
    // Rows of 3 bytes every 10 bytes, then of 1,000 bytes every 5,000 bytes.
    let memory = Region::allocate(Length(4 * MIB));
    let rows = |from, stride, count, length| RoomRows {
        memory: part(&memory, from, stride * (count - 1) + length),
        stride,
        count,
        length,
    };
    let (narrow, wide) = (rows(5, 10, 7, 3), rows(MIB, 5000, 300, 1000));
    let pass = there
        .open_room(vec![RoomView::new(vec![narrow, wide]).unwrap()])
        .unwrap();
    let of_view = 7 * 3 + 300 * 1000;
    // Small and large writes, whose borders are in the middle of rows.
    let writes = [(0, 4), (4, 18), (22, 278_999), (279_021, of_view - 279_021)];
    for (value, (from, length)) in (1..).zip(writes) {
        let source = filled(length, value);
        let sum = write(&here, &there, &pass, &[to(0, from, &source)]);
        assert_eq!(sum, Ok(checksum(&source.whole().to_vec())));
    }
    let mut wanted = Vec::new();
    for (value, (_, length)) in (1..).zip(writes) {
        wanted.extend(filled(length, value).whole().to_vec());
    }
    let closed = close(&there, &pass).unwrap();
    let known = closed.sum(0, Offset(0), Length(of_view));
    assert_eq!(known, Some(checksum(&wanted)));
    let mut image = vec![0; usize::try_from(4 * MIB).unwrap()];
    let places = (0..7u64).map(|row| (5 + row * 10, 3));
    let places = places.chain((0..300).map(|row| (MIB + row * 5000, 1000)));
    let mut rest = wanted.as_slice();
    for (place, length) in places {
        let (bytes, after) = rest.split_at(length);
        let place = usize::try_from(place).unwrap();
        image[place..place + length].copy_from_slice(bytes);
        rest = after;
    }
    assert!(memory.whole().to_vec() == image, "a byte lies elsewhere");
}

/// A row ends neither where a received piece does nor at a line of the cache. Large writes bypass the caches.
#[test]
fn large_writes_fill_rows_of_any_length() {
    let (here, there) = (endpoint(), endpoint());
    for (length, stride, count) in [(100, 100, 4000), (3001, 4096, 700), (700_001, 700_003, 3)] {
        let memory = Region::allocate(Length(stride * count));
        memory
            .whole()
            .write_at(Offset(0), &vec![0xee; Length(stride * count).as_usize()]);
        let rows = RoomRows {
            memory: memory.whole(),
            stride,
            count,
            length,
        };
        let pass = there
            .open_room(vec![RoomView::new(vec![rows]).unwrap()])
            .unwrap();
        let source = filled(length * count, 7);
        let sum = write(&here, &there, &pass, &[to(0, 0, &source)]);
        let all = source.whole().to_vec();
        assert_eq!(sum, Ok(checksum(&all)), "rows of {length}");
        let closed = close(&there, &pass).unwrap();
        let known = closed.sum(0, Offset(0), Length(length * count));
        assert_eq!(known, Some(checksum(&all)), "rows of {length}");
        let found = memory.whole().to_vec();
        let rows = found.chunks(Length(stride).as_usize());
        for (row, right) in rows.zip(all.chunks(Length(length).as_usize())) {
            let (bytes, gap) = row.split_at(right.len());
            assert!(bytes == right, "rows of {length}");
            assert!(gap.iter().all(|byte| *byte == 0xee), "rows of {length}");
        }
    }
}

#[test]
fn a_pass_opens_its_own_room_alone() {
    let (here, there) = (endpoint(), endpoint());
    let memory = filled(4 * MIB, 0x55);
    let before = memory.whole().to_vec();
    let at = address(&memory);
    let exposed = exposed(&there, MIB);
    let open = |from| {
        there
            .open_room(vec![view(part(&memory, from, MIB))])
            .unwrap()
    };
    let (one, two, closed) = (open(0), open(MIB), open(2 * MIB));
    assert!(close(&there, &closed).is_some());
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
        for (pass, view, offset, wanted) in [
            (&forged, 0, 0, Code::GrantRefused),
            (&unknown, 0, 0, Code::GrantEnded),
            (&closed, 0, 0, Code::GrantEnded),
            (&one, 0, MIB, Code::OutOfRange),
            (&one, 0, MIB - 1, Code::OutOfRange),
            (&one, 1, 0, Code::OutOfRange),
            (&one, u32::MAX - 16, 0, Code::OutOfRange),
            (&one, u32::MAX, 0, Code::InvalidArgument),
            (&one, 0, u64::MAX - 10, Code::InvalidArgument),
        ] {
            let outcome = write(&here, &there, pass, &[to(view, offset, &source)]);
            assert_eq!(
                refusal(outcome),
                wanted,
                "{length} at {offset:#x} of {view}"
            );
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
    let pass = first.open_room(vec![view(memory.whole())]).unwrap();
    drop(first);
    let options = EndpointOptions {
        name: "second".to_owned(),
        secret: Secret::default(),
        stall: Duration::from_secs(20),
        rdma: None,
        reads_directly: true,
        letters: None,
    };
    let second = Endpoint::start(TcpListener::bind(at).unwrap(), options).unwrap();
    let _other = second.open_room(vec![view(memory.whole())]).unwrap();
    let outcome = write(&here, &second, &pass, &[to(0, 0, &filled(4096, 1))]);
    assert_eq!(refusal(outcome), Code::GrantEnded);
    assert!(memory.whole().to_vec() == vec![0; 4096]);
}

#[test]
fn odd_views_are_refused() {
    let there = endpoint();
    let memory = Region::allocate(Length(8192));
    let rows = |stride, count, length| {
        RoomView::new(vec![RoomRows {
            memory: memory.whole(),
            stride,
            count,
            length,
        }])
    };
    assert_eq!(there.open_room(Vec::new()), Err(ExposeError::Unfit));
    assert!(RoomView::new(Vec::new()).is_err());
    for (stride, count, length) in [
        (10, 0, 10),
        (10, 1, 0),
        (9, 2, 10),
        (8192, 1, 8193),
        (4096, 3, 1),
        (u64::MAX, 2, 1),
        (1, u64::MAX, 1),
    ] {
        assert!(
            rows(stride, count, length).is_err(),
            "{stride} {count} {length}"
        );
    }
    assert!(rows(4096, 2, 4096).is_ok());
}

/// The rounds of the test below.
const ROUNDS: u32 = 1000;
const PAGES: u64 = 256 << 10;

/// A writer that sends half of a write into a room, and stalls.
fn stalled_writer(there: &Endpoint, pass: &RoomPass, session: Incarnation) -> TcpStream {
    let secret = Secret::default();
    let mut socket = TcpStream::connect(there.local_addr()).unwrap();
    let head = encode_head(Op::Hello, 0, Epoch(0), 0, |out| hello(&secret).encode(out)).unwrap();
    socket.write_all(&head).unwrap();
    receive_by(socket.as_fd(), soon()).unwrap();
    let extent = view_extent(0, Offset(0), Length(PAGES)).unwrap();
    let grant = pass.key.sign(session, pass.epoch, GrantId(1), extent);
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
    let canary = vec![0x5a; usize::try_from(PAGES).unwrap()];
    for round in 0..ROUNDS {
        pages.whole().write_at(Offset(0), &vec![0; canary.len()]);
        let pass = there.open_room(vec![view(pages.whole())]).unwrap();
        let mut writer = stalled_writer(&there, &pass, reply.incarnation);
        while part(&pages, 0, 1).to_vec() != [0xee] {
            std::thread::yield_now();
        }
        assert!(close(&there, &pass).is_some());
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
    let pass = there.open_room(vec![view(pages.whole())]).unwrap();
    let mut writer = stalled_writer(&there, &pass, reply.incarnation);
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
    let closed = there.close_room(pass.epoch, Duration::from_secs(10));
    assert!(closed.unwrap().is_some());
    assert_eq!(
        ends.join().unwrap(),
        Op::Statuses,
        "the writer got its answer"
    );
}
