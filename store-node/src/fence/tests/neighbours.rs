//! Neighbouring extents that the master fences as one range, under the highest of their grants.

use super::*;

const UNIT: u64 = 64;

fn unit(at: u64) -> Extent {
    extent(at * UNIT, UNIT)
}

#[test]
fn a_range_is_fenced_when_nothing_touches_any_part_of_it() {
    let mut fence = fence();
    for at in [0, 2] {
        assert_eq!(write(&mut fence, &grant(at + 1, unit(at))), Code::Ok);
    }
    let held = grant(2, unit(1));
    assert_eq!(hold(&mut fence, ALICE, &held), Code::Ok);
    assert_eq!(write(&mut fence, &grant(4, unit(3))), Code::Ok);
    let waits = close(&mut fence, 9, 3, extent(0, 3 * UNIT));
    assert!(waits.is_empty(), "one of them is being written");
    assert_eq!(read(&fence, unit(0)), Code::Missing);
    assert_eq!(read(&fence, unit(2)), Code::Missing);
    assert_eq!(
        read(&fence, unit(3)),
        Code::Ok,
        "it is no part of the range"
    );
    assert_eq!(fence.end_hold(ALICE, held.id, sums()), Code::GrantEnded);
    assert_eq!(fence.take_fenced(), [9]);
}

#[test]
fn every_grant_of_a_range_is_closed_and_every_later_one_is_good() {
    let mut fence = fence();
    // The extents are in no order: the highest grant is not the last one's. The second extent was never
    // written.
    let grants = [7, 9, 8].map(GrantId);
    for (at, id) in (0..).zip(grants).filter(|(at, _)| *at != 1) {
        assert_eq!(write(&mut fence, &grant(id.0, unit(at))), Code::Ok);
    }
    assert_eq!(close(&mut fence, 1, 9, extent(0, 3 * UNIT)), [1]);
    assert_eq!(fence.census().floors, 1, "one range, however many grants");
    for (at, id) in (0..).zip(grants) {
        let late = grant(id.0, unit(at));
        assert_eq!(write(&mut fence, &late), Code::GrantEnded, "{late:?}");
    }
    for (at, id) in [(1, 10), (2, 12), (0, 11)] {
        assert_eq!(write(&mut fence, &grant(id, unit(at))), Code::Ok);
        assert_eq!(read(&fence, unit(at)), Code::Ok);
    }
    assert_eq!(
        fence.census().floors,
        0,
        "what is written refuses by itself"
    );
}
