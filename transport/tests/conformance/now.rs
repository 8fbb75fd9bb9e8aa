//! Operations that a link performs on the calling thread, and those it refuses to.

use super::*;

/// Maps the segment by reading a byte of it.
fn map(link: &dyn Link, extent: Extent) {
    let read = wait(link.read(EPOCH, vec![read_op(extent, &room(1))], soon()));
    assert_eq!(codes(&read), [Code::Ok]);
}

#[test]
fn an_inline_read_has_the_outcomes_of_a_read() {
    let Opened { link, host, .. } = &open(TransportKind::Shm, 16 << 20);
    let bytes = pattern(100_000, 1);
    let extent = host.stored(&bytes);
    let ops = |pieces: &[usize]| {
        let past_segment = Extent {
            offset: Offset((16 << 20) - 10),
            ..extent
        };
        let ranged = |from, length| ReadOp {
            extent,
            from: Offset(from),
            into: parts(length, pieces),
            right: None,
        };
        vec![
            ranged(0, 4096),
            ranged(99_999, 1),
            ranged(99_999, 2),
            ranged(u64::MAX, 2),
            ranged(65_000, 20_000),
            read_op(past_segment, &room(11)),
            read_op(extent, &[]),
            ranged(1, 30_000),
        ]
    };
    let mapped = ops(&[4096]);
    assert!(
        link.read_now(EPOCH, &mapped, soon()).is_none(),
        "a segment that is not mapped is left to an ordinary read"
    );
    map(&**link, extent);
    for pieces in [&[4096][..], &[1, 999, 7], &[64 << 10]] {
        let (now, later) = (ops(pieces), ops(pieces));
        let at_once = link.read_now(EPOCH, &now, soon()).unwrap();
        assert_eq!(at_once, wait(link.read(EPOCH, later.clone(), soon())));
        assert_eq!(
            codes(&at_once),
            [
                Code::Ok,
                Code::Ok,
                Code::OutOfRange,
                Code::OutOfRange,
                Code::Ok,
                Code::OutOfRange,
                Code::InvalidArgument,
                Code::Ok
            ]
        );
        assert_eq!(at_once[0], Ok(checksum(&bytes[..4096])));
        for (now, later) in now.iter().zip(&later) {
            assert!(gathered(&now.into) == gathered(&later.into));
        }
        assert!(gathered(&now[7].into) == bytes[1..30_001]);
    }
}

#[test]
fn large_late_or_unmapped_reads_are_not_inline() {
    let Opened { link, host, .. } = &open(TransportKind::Shm, 16 << 20);
    let extent = host.stored(&pattern(100_000, 1));
    map(&**link, extent);
    let now = |ops: &[ReadOp]| link.read_now(EPOCH, ops, soon());
    assert!(now(&[read_op(extent, &room(64 << 10))]).is_some());
    assert!(now(&[read_op(extent, &room((64 << 10) + 1))]).is_none());
    let half = read_op(extent, &room(32 << 10));
    assert!(now(&[half.clone(), half.clone()]).is_some());
    assert!(now(&[half.clone(), half, read_op(extent, &room(1))]).is_none());
    let elsewhere = Extent {
        segment: kvpool_types::SegmentId(99),
        ..extent
    };
    assert!(now(&[read_op(elsewhere, &room(1))]).is_none());
    let into = room(1000);
    let late = link.read_now(EPOCH, &[read_op(extent, &into)], Instant::now());
    assert!(late.is_none());
    assert_eq!(gathered(&into), [0; 1000], "nothing is written too late");
    assert_eq!(now(&[]), Some(vec![]));
}

#[test]
fn a_failed_link_and_a_tcp_link_have_no_inline_reads() {
    let Opened {
        link,
        host,
        _server,
        _directory,
    } = open(TransportKind::Shm, 16 << 20);
    let extent = host.stored(&pattern(1000, 1));
    map(&*link, extent);
    drop(_server);
    let deadline = soon();
    while link.is_open() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let read = link.read_now(EPOCH, &[read_op(extent, &room(10))], soon());
    assert!(read.is_none());

    let Opened { link, host, .. } = &open(TransportKind::Tcp, 16 << 20);
    let extent = host.stored(&pattern(1000, 1));
    map(&**link, extent);
    let read = link.read_now(EPOCH, &[read_op(extent, &room(10))], soon());
    assert!(read.is_none());
}
