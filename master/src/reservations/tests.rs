use super::*;
use crate::placement::ExtentIndex;
use kvpool_types::Offset;
use proptest::prelude::*;
use std::collections::BTreeMap;

const NS: NamespaceId = NamespaceId(1);
const SIZE: Length = Length(7);

fn key(n: u8) -> Key {
    Key::parse(&format!("key {n}")).unwrap()
}

fn pending(n: u8, version: u64, expires: u64) -> Pending {
    let replica = Replica {
        segment: SegmentId(u32::from(n) % 3),
        extent: ExtentIndex(0),
        offset: Offset(0),
    };
    Pending {
        expires: BootInstant(expires),
        ..Pending::granted(Version(version), SIZE, [replica].into_iter().collect())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Insert(Vec<(u8, u64)>),
    Commit(u8),
    Finish(u8),
    Revoke(u8),
    Expire(u64),
    Drop(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => proptest::collection::vec((0..20u8, 1..40u64), 1..6).prop_map(Step::Insert),
        3 => (0..20u8).prop_map(Step::Commit),
        3 => (0..20u8).prop_map(Step::Finish),
        2 => (0..20u8).prop_map(Step::Revoke),
        2 => (0..20u64).prop_map(Step::Expire),
        1 => (0..3u32).prop_map(Step::Drop),
    ]
}

/// A put in the model: its version, its end, and its slot if it is committing.
type Known = (u64, u64, Option<PutId>);

fn versions(ended: &[Pending]) -> Vec<u64> {
    let mut versions: Vec<u64> = ended.iter().map(|p| p.version.0).collect();
    versions.sort_unstable();
    versions
}

proptest! {
    /// Compared with a map of all puts by key.
    #[test]
    fn puts_end_once_and_only_by_what_may_end_them(steps in proptest::collection::vec(step(), 1..80)) {
        let reservations = Reservations::default();
        let mut model: BTreeMap<u8, Known> = BTreeMap::new();
        let (mut version, mut now) = (0, 0);
        for step in steps {
            match step {
                Step::Insert(batch) => {
                    let mut locked = reservations.lock();
                    for (n, ttl) in batch {
                        prop_assert_eq!(locked.is_pending(NS, key(n).as_ref()), model.contains_key(&n));
                        prop_assert!(!locked.is_pending(NamespaceId(2), key(n).as_ref()));
                        if model.contains_key(&n) {
                            continue;
                        }
                        version += 1;
                        locked.insert(NS, key(n).as_ref(), pending(n, version, now + ttl));
                        model.insert(n, (version, now + ttl, None));
                    }
                }
                Step::Commit(n) => {
                    let mut locked = reservations.lock();
                    let at = BootInstant(now);
                    let mut begin = |version| {
                        locked.begin_commit(NS, key(n).as_ref(), Version(version), SIZE, &[], at)
                    };
                    prop_assert_eq!(begin(u64::MAX).unwrap_err(), Code::GrantEnded);
                    match model.get_mut(&n) {
                        None => prop_assert_eq!(begin(1).unwrap_err(), Code::GrantEnded),
                        Some((version, _, Some(_))) => {
                            prop_assert_eq!(begin(*version).unwrap_err(), Code::InProgress);
                        }
                        Some((version, expires, committing)) => {
                            let begun = begin(*version).map(|(put, _)| put);
                            prop_assert_eq!(begun.is_ok(), now < *expires);
                            *committing = begun.ok();
                        }
                    }
                }
                Step::Finish(n) => {
                    if let Some((version, _, Some(put))) = model.get(&n).copied() {
                        let mut locked = reservations.lock();
                        prop_assert!(locked.finish(put, Version(version + 1)).is_none());
                        prop_assert!(locked.finish(put, Version(version)).is_some());
                        prop_assert!(locked.finish(put, Version(version)).is_none());
                        model.remove(&n);
                    }
                }
                Step::Revoke(n) => {
                    let version = model.get(&n).map_or(1, |known| known.0);
                    let ended = reservations.lock().revoke(NS, key(n).as_ref(), Version(version));
                    let may = model.get(&n).is_some_and(|known| known.2.is_none());
                    prop_assert_eq!(ended.map(|p| p.version.0), may.then_some(version));
                    if may {
                        model.remove(&n);
                    }
                }
                Step::Expire(time) => {
                    now += time;
                    let ended = versions(&reservations.take_expired(BootInstant(now)));
                    let over = model.extract_if(.., |_, known| known.1 <= now && known.2.is_none());
                    let mut expected: Vec<u64> = over.map(|(_, known)| known.0).collect();
                    expected.sort_unstable();
                    prop_assert_eq!(ended, expected);
                }
                Step::Drop(segment) => {
                    let ended = versions(&reservations.lock().take_on(&[SegmentId(segment)]));
                    let over = model.extract_if(.., |n, known| {
                        u32::from(*n) % 3 == segment && known.2.is_none()
                    });
                    let mut expected: Vec<u64> = over.map(|(_, known)| known.0).collect();
                    expected.sort_unstable();
                    prop_assert_eq!(ended, expected);
                }
            }
            prop_assert_eq!(reservations.len(), model.len());
            let inner = reservations.inner.lock();
            let left: usize = inner.expiry_batches.values().map(|batch| batch.left).sum();
            drop(inner);
            prop_assert_eq!(left, model.len());
        }
    }
}

#[test]
fn a_put_whose_grant_was_lost_ends_by_its_request_id() {
    let reservations = Reservations::default();
    let mut locked = reservations.lock();
    for (n, request) in [(1, 70), (2, 0), (3, 70)] {
        let pending = Pending {
            request,
            ..pending(n, u64::from(n), 9)
        };
        locked.insert(NS, key(n).as_ref(), pending);
    }
    let mut lost = |n: u8, requests: &[u64]| {
        let ended = locked.take_back(NS, key(n).as_ref(), requests);
        ended.map(|pending| pending.version.0)
    };
    assert_eq!(lost(1, &[]), None);
    assert_eq!(lost(1, &[69, 71]), None);
    assert_eq!(lost(1, &[69, 70]), Some(1));
    assert_eq!(lost(1, &[70]), None);
    // A put without a request id belongs to no request.
    assert_eq!(lost(2, &[0]), None);
    let begun = locked.begin_commit(NS, key(3).as_ref(), Version(3), SIZE, &[], BootInstant(0));
    assert!(begun.is_ok());
    assert!(locked.take_back(NS, key(3).as_ref(), &[70]).is_none());
}

#[test]
fn a_put_counts_a_block_that_comes_back_as_one_that_its_key_had() {
    let reservations = Reservations::default();
    let mut locked = reservations.lock();
    for (n, comes_back) in [(1, false), (2, true)] {
        let name = key(n);
        let name = name.as_ref();
        let (before, own) = (Version(6), Version(7));
        assert!(locked.note_return(NS, name, before), "no put is open");
        locked.insert(NS, name, pending(n, own.0, 9));
        if comes_back {
            assert!(locked.note_return(NS, name, before));
        }
        assert!(locked.end_of_commit(NS, name, before).is_none());
        let begun = locked.begin_commit(NS, name, own, SIZE, &[], BootInstant(0));
        assert_eq!(begun.unwrap().1.had_block, comes_back);
        assert!(!locked.note_return(NS, name, before), "it is committing");
        assert!(locked.end_of_commit(NS, name, before).is_some());
        assert!(locked.note_return(NS, name, own), "its own block");
        assert!(locked.end_of_commit(NS, name, own).is_none());
    }
}
