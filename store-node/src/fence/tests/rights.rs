//! Read rights: which reads need one, and which right is valid.

use super::*;
use kvpool_types::ReadRight;

/// The clock of this node.
fn now() -> u64 {
    5_000
}

/// A fence that requires rights, and whose master's clock shows 8 s.
fn asking() -> Fence {
    let mut fence = unwelcomed();
    fence.demand_rights();
    let term = Term {
        ahead_ms: Some(3_000),
        ..term(EPOCH.0)
    };
    fence.enter(term).unwrap();
    fence
}

fn right(extent: Extent, version: u64, deadline_ms: u64) -> ReadRight {
    let signer = KEY.signer().for_reads(INCARNATION, EPOCH);
    signer.sign(extent, Version(version), deadline_ms)
}

/// Writes a block of `version`.
fn put(fence: &mut Fence, version: u64, block: Extent) {
    assert_eq!(write(fence, &grant(version, block)), Code::Ok);
}

fn proven(fence: &Fence, item: ReadItem) -> Code {
    code(fence.prove_read(EPOCH, INCARNATION, &item, now))
}

#[test]
fn a_location_ends_on_the_masters_clock() {
    let mut fence = asking();
    let block = extent(0, 64);
    put(&mut fence, 7, block);
    let until = |deadline| ReadItem::whole(block).with(Some(right(block, 7, deadline)));
    assert_eq!(proven(&fence, until(8_000)), Code::Ok);
    assert_eq!(proven(&fence, until(7_999)), Code::LocationExpired);
    // The answer to a heartbeat says that the master's clock is further ahead than in the welcome.
    fence.hear_clock(4_000);
    assert_eq!(proven(&fence, until(8_000)), Code::LocationExpired);
    assert_eq!(proven(&fence, until(9_000)), Code::Ok);
}

#[test]
fn a_location_of_another_version_reads_nothing() {
    let mut fence = asking();
    let block = extent(0, 64);
    put(&mut fence, 7, block);
    let of = |version| ReadItem::whole(block).with(Some(right(block, version, 9_000)));
    assert_eq!(proven(&fence, of(7)), Code::Ok);
    assert_eq!(proven(&fence, of(6)), Code::Missing);
    // A copy has the version of its block, not the number of its own grant.
    fence.is_copy_of(&block, GrantId(7), Version(3));
    assert_eq!(proven(&fence, of(7)), Code::Missing);
    assert_eq!(proven(&fence, of(3)), Code::Ok);
    // If another grant has written the extent meanwhile, it is no copy.
    fence.is_copy_of(&block, GrantId(6), Version(4));
    assert_eq!(proven(&fence, of(3)), Code::Ok);
}

#[test]
fn a_location_counts_in_its_own_term_and_life_only() {
    let mut fence = asking();
    let block = extent(0, 64);
    put(&mut fence, 7, block);
    let item = ReadItem::whole(block).with(Some(right(block, 7, 9_000)));
    let next = Term {
        ahead_ms: Some(0),
        ..term(EPOCH.0 + 1)
    };
    fence.enter(next).unwrap();
    assert_eq!(proven(&fence, item), Code::StaleEpoch);
    let later = fence.prove_read(fence.epoch(), INCARNATION, &item, now);
    assert_eq!(code(later), Code::LocationRefused);
    fence.renew(Incarnation(78));
    assert_eq!(proven(&fence, item), Code::WrongIncarnation);
}

/// The tickets that waited for the read ended with their term. The next leader may grant the extent again.
#[test]
fn a_read_ends_with_its_term_and_keeps_its_extent_until_then() {
    let mut fence = asking();
    let block = extent(64, 64);
    put(&mut fence, 7, block);
    let connection = Arc::new(Aborted::default());
    let abort: Arc<dyn Abort> = Arc::clone(&connection) as _;
    let reading = fence.begin_read(fence.locate(&block).unwrap(), &abort);
    let next = Term {
        ahead_ms: Some(0),
        ..term(EPOCH.0 + 1)
    };
    let aborts = fence.enter(next).unwrap();
    aborts.iter().for_each(|abort| abort.abort());
    assert_eq!(connection.0.load(Ordering::Relaxed), 1);
    let later = |id, extent| KEY.sign(INCARNATION, Epoch(EPOCH.0 + 1), GrantId(id), extent);
    for (id, overlapping) in [(1 << 50, block), (1 << 51, extent(0, 128))] {
        let refused = write(&mut fence, &later(id, overlapping));
        assert_eq!(refused, Code::InProgress, "{overlapping}");
    }
    assert_eq!(
        write(&mut fence, &later(1 << 52, extent(128, 64))),
        Code::Ok
    );
    assert_eq!(write(&mut fence, &later(1 << 53, extent(0, 64))), Code::Ok);
    drop(reading);
    assert_eq!(write(&mut fence, &later(1 << 54, block)), Code::Ok);
}

#[test]
fn nothing_is_asked_without_tokens_or_under_a_master_that_signs_nothing() {
    let block = extent(0, 64);
    let mut open = fence();
    put(&mut open, 7, block);
    assert_eq!(proven(&open, ReadItem::whole(block)), Code::Ok);
    let mut early = unwelcomed();
    early.demand_rights();
    early.enter(term(EPOCH.0)).unwrap();
    assert_eq!(proven(&early, ReadItem::whole(block)), Code::Ok);
}
