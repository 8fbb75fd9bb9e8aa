//! The checker rejects no legal history, and finds seeded violations.

use super::simulate::{World, draws, excuses, history};
use super::*;
use proptest::prelude::*;

const PLAIN: World = World {
    clients: 5,
    stale: Duration::ZERO,
    forgets: false,
    loses: None,
    hides: None,
    deposes: None,
    repeats: false,
};

fn ms(number: u64) -> Duration {
    Duration::from_millis(number)
}

fn during(start: u64, end: u64, what: What) -> Operation {
    Operation {
        key: 7,
        start: ms(start),
        end: ms(end),
        remembers: true,
        what,
    }
}

fn put(start: u64, end: u64, value: u64) -> Operation {
    during(start, end, What::Put(value, Wrote::Stored))
}

fn upsert(start: u64, end: u64, value: u64) -> Operation {
    during(start, end, What::Upsert(value, Wrote::Stored))
}

fn remove(start: u64, end: u64) -> Operation {
    during(start, end, What::Remove(Removed::Done))
}

fn hit(start: u64, end: u64, value: u64) -> Operation {
    during(start, end, What::Get(Found::Value(value)))
}

fn miss(start: u64, end: u64) -> Operation {
    during(start, end, What::Get(Found::Nothing))
}

fn exist(start: u64, end: u64, present: bool) -> Operation {
    during(start, end, What::Exist(present))
}

fn stale(number: u64) -> Rules {
    Rules {
        stale: ms(number),
        ..Rules::default()
    }
}

fn kinds(history: &[Operation], rules: &Rules) -> Vec<Kind> {
    let violations = check(history, rules).into_iter();
    violations.map(|violation| violation.kind).collect()
}

fn is_legal(history: &[Operation], rules: &Rules) {
    assert_eq!(check(history, rules), []);
}

fn breaks(history: &[Operation], kind: Kind) {
    assert_eq!(kinds(history, &Rules::default()), [kind]);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3000, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn no_legal_history_is_accused(
        draws in draws(5),
        stale in 0..80u64,
        forgets: bool,
        loses in prop::option::of(0..900u64),
        hides in prop::option::of(0..900u64),
        deposes in prop::option::of(0..900u64),
        repeats: bool,
    ) {
        let world = World {
            stale: ms(stale),
            forgets,
            loses: loses.map(ms),
            hides: hides.map(ms),
            deposes: deposes.map(ms),
            repeats,
            ..PLAIN
        };
        let rules = Rules { stale: ms(stale), repeats, excuses: excuses(&world) };
        let history = history(&draws, &world);
        prop_assert_eq!(check(&history, &rules), vec![], "{:#?}", history);
    }

    /// If no operations overlap, everything is certain.
    #[test]
    fn every_changed_answer_of_a_lone_client_is_found(draws in draws(1), at: prop::sample::Index) {
        let mut history = history(&draws, &World { clients: 1, ..PLAIN });
        prop_assert_eq!(check(&history, &Rules::default()), vec![]);
        let reads: Vec<usize> = (0..history.len())
            .filter(|&at| matches!(history[at].what, What::Get(_) | What::Exist(_)))
            .collect();
        if !reads.is_empty() {
            let at = *at.get(&reads);
            let key = history[at].key;
            let value = history[..at].iter().find_map(|earlier| match earlier.what {
                What::Put(value, Wrote::Stored) if earlier.key == key => Some(value),
                _ => None,
            });
            let changed = match history[at].what {
                What::Exist(present) => What::Exist(!present),
                What::Get(Found::Nothing) => What::Get(Found::Value(value.unwrap_or(9999))),
                _ => What::Get(Found::Nothing),
            };
            history[at].what = changed;
            let found = check(&history, &Rules::default());
            prop_assert!(
                found.iter().any(|violation| violation.operation == history[at]),
                "{:?} of {:#?}: {:?}", history[at], history, found
            );
        }
    }
}

#[test]
fn an_acknowledged_put_that_is_missed_is_lost() {
    breaks(&[put(1, 2, 0), miss(3, 4)], Kind::Lost);
    breaks(&[put(1, 2, 0), exist(3, 4, false)], Kind::Lost);
    breaks(&[put(1, 2, 0), put(3, 4, 1)], Kind::Lost);
    let present = during(5, 6, What::Put(1, Wrote::Present));
    breaks(
        &[put(1, 2, 0), remove(3, 4), present, miss(7, 8)],
        Kind::Lost,
    );
    // A remove that may have come later explains the miss. An earlier remove does not.
    is_legal(&[put(1, 5, 0), remove(2, 4), miss(6, 7)], &Rules::default());
    breaks(&[remove(1, 2), put(3, 4, 0), miss(6, 7)], Kind::Lost);
    let unknown = during(1, 2, What::Remove(Removed::Unknown));
    is_legal(&[unknown, put(3, 4, 0), miss(6, 7)], &Rules::default());
    let refused = during(1, 3, What::Remove(Removed::Refused));
    is_legal(&[refused, put(1, 2, 0), miss(6, 7)], &Rules::default());
    breaks(&[refused, put(4, 5, 0), miss(6, 7)], Kind::Lost);
}

#[test]
fn a_value_that_gave_way_is_stale() {
    let history = [put(1, 2, 0), upsert(3, 6, 1), hit(7, 8, 0)];
    breaks(&history, Kind::Stale);
    // While the upsert runs, either value may be read. A lease allows the old value a little
    // longer.
    is_legal(
        &[put(1, 2, 0), upsert(3, 6, 1), hit(4, 5, 1), hit(4, 6, 0)],
        &Rules::default(),
    );
    is_legal(&history, &stale(2));
    // Once the new value was read, the old value is past, although the upsert has not ended.
    breaks(
        &[put(1, 2, 0), upsert(3, 60, 1), hit(4, 5, 1), hit(7, 8, 0)],
        Kind::Stale,
    );
    let unknown = during(3, 4, What::Upsert(1, Wrote::Unknown));
    is_legal(&[put(1, 2, 0), unknown, hit(20, 21, 0)], &Rules::default());
    breaks(
        &[put(1, 2, 0), unknown, hit(20, 21, 1), hit(22, 23, 0)],
        Kind::Stale,
    );
}

#[test]
fn a_value_that_was_removed_does_not_come_back() {
    breaks(
        &[put(1, 2, 0), remove(3, 4), hit(5, 6, 0)],
        Kind::Resurrected,
    );
    breaks(
        &[put(1, 2, 0), remove(3, 4), exist(5, 6, true)],
        Kind::Phantom,
    );
    is_legal(
        &[put(1, 2, 0), remove(3, 6), miss(4, 5), miss(7, 8)],
        &Rules::default(),
    );
    // Within one lease of the remove, a client with a cached location may still see the value.
    let seen = [put(1, 2, 0), remove(3, 4), hit(5, 6, 0)];
    is_legal(&seen, &stale(1));
    let asked = seen.map(|operation| Operation {
        remembers: false,
        ..operation
    });
    assert_eq!(kinds(&asked, &stale(1)), [Kind::Resurrected]);
    let deposed = Rules {
        excuses: vec![Excuse::Deposed(ms(6), ms(9))],
        ..stale(1)
    };
    is_legal(&asked, &deposed);
    // A miss also proves that the value is gone.
    let unknown = during(3, 4, What::Remove(Removed::Unknown));
    breaks(
        &[put(1, 2, 0), unknown, miss(5, 6), hit(7, 8, 0)],
        Kind::Resurrected,
    );
}

#[test]
fn a_value_that_nobody_put_is_found_out() {
    breaks(&[put(1, 2, 0), hit(3, 4, 5)], Kind::NeverWritten);
    let failed = during(1, 2, What::Put(5, Wrote::Not));
    breaks(&[failed, hit(3, 4, 5)], Kind::NeverWritten);
    let early = check(&[hit(1, 2, 5), put(3, 4, 5)], &Rules::default());
    assert_eq!(early[0].kind, Kind::NeverWritten);
    breaks(&[exist(1, 2, true)], Kind::Phantom);
}

#[test]
fn a_put_that_was_done_twice_is_found_unless_it_is_allowed() {
    let twice = [
        upsert(1, 20, 0),
        hit(2, 3, 0),
        upsert(4, 5, 1),
        hit(6, 7, 0),
    ];
    breaks(&twice, Kind::Stale);
    let repeats = Rules {
        repeats: true,
        ..Rules::default()
    };
    is_legal(&twice, &repeats);
    // But not after its client had the answer.
    let late = [upsert(1, 5, 0), hit(2, 3, 0), upsert(6, 7, 1), hit(8, 9, 0)];
    assert_eq!(kinds(&late, &repeats), [Kind::Stale]);
}

#[test]
fn a_removal_that_was_undone_is_found() {
    let unanswered = during(3, 20, What::Remove(Removed::Unknown));
    let missing = during(7, 8, What::Remove(Removed::Missing));
    breaks(
        &[put(1, 2, 0), unanswered, miss(5, 6), hit(30, 31, 0)],
        Kind::Resurrected,
    );
    breaks(
        &[put(1, 2, 0), unanswered, missing, hit(30, 31, 0)],
        Kind::Resurrected,
    );
}

#[test]
fn torn_bytes_are_no_value() {
    let torn = during(3, 4, What::Get(Found::Torn));
    breaks(&[put(1, 2, 0), torn], Kind::Torn);
    let whole = encode(7, 3);
    assert_eq!(decode(7, &whole), Found::Value(3));
    assert_eq!(decode(8, &whole), Found::Torn);
    for other in [encode(7, 4), encode(7, 3 + 17)] {
        // Two values that begin and end alike in the middle of a block.
        let half = whole.len() / 2;
        let mut mixed = whole.clone();
        mixed.truncate(half);
        mixed.extend(other.iter().skip(half));
        assert_eq!(decode(7, &mixed), Found::Torn);
    }
    assert_eq!(decode(7, &whole[..whole.len() - 1]), Found::Torn);
    assert_eq!(decode(7, &[]), Found::Torn);
}

#[test]
fn an_excuse_explains_a_miss_where_it_says_so_and_nowhere_else() {
    let history = [put(1, 2, 0), miss(10, 11), hit(20, 21, 0)];
    let with = |excuse| Rules {
        excuses: vec![excuse],
        ..Rules::default()
    };
    is_legal(&history, &with(Excuse::Hidden(ms(5), ms(12))));
    let late = Excuse::Hidden(ms(12), ms(15));
    assert_eq!(
        kinds(&history, &with(late)),
        [Kind::Lost, Kind::Resurrected]
    );
    // A lost value does not come back.
    let lost = with(Excuse::Lost(ms(5), ms(12)));
    assert_eq!(kinds(&history, &lost), [Kind::Resurrected]);
    is_legal(&history[..2], &lost);
    let before = with(Excuse::Lost(ms(0), ms(0)));
    assert_eq!(kinds(&history[..2], &before), [Kind::Lost]);
}
