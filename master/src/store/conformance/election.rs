//! The rules of an [`ElectionStore`] that can be tested without faults.

use super::{append, expect, group};
use crate::store::etcd::LeaseId;
use crate::store::{Campaign, Claim, ElectionStore, Groups, Leader, Leaders, LogSeq, StoreError};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_types::Epoch;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// A lease that outlives every check.
const LONG: Duration = Duration::from_secs(60);
/// A lease whose end a check waits for.
const SHORT: Duration = Duration::from_secs(1);
/// The longest time until a watch reports a change of the leader or of the log.
const TOLD: Duration = Duration::from_secs(20);
/// The longest time from the last renewal of a short lease to its end.
const GONE: Duration = Duration::from_secs(4);

/// The source of the stores under test.
#[async_trait]
pub trait Bench: Send + Sync {
    /// A connection to a new, empty store.
    async fn fresh(&self) -> Arc<dyn ElectionStore>;

    /// Another connection to the latest store, like that of another master.
    async fn another(&self) -> Arc<dyn ElectionStore>;
}

/// Runs every check.
///
/// # Panics
///
/// When the store breaks a rule.
pub async fn run(bench: &dyn Bench) {
    of_some_candidates_one_wins(bench).await;
    a_candidate_is_a_lease_and_a_name(bench).await;
    a_lease_that_is_not_renewed_ends_with_its_keys(bench).await;
    a_lease_that_is_renewed_goes_on(bench).await;
    a_term_ends_with_its_lease(bench).await;
    a_leader_that_learns_a_higher_epoch_begins_a_term_above_it(bench).await;
    a_leader_that_was_replaced_deposes_nobody(bench).await;
    an_abandoned_term_writes_nothing_more(bench).await;
    the_log_is_followed_over_changes_of_leader(bench).await;
    a_follower_of_a_cut_log_is_told_so(bench).await;
}

fn claim(id: &str) -> Claim {
    Claim {
        id: id.to_owned(),
        address: format!("http://{id}:7400"),
        http_address: format!("{id}:7401"),
    }
}

async fn lease(store: &dyn ElectionStore) -> LeaseId {
    expect(store.grant_lease(LONG).await)
}

async fn win(store: &dyn ElectionStore, lease: LeaseId, id: &str) -> Epoch {
    match expect(store.campaign(lease, &claim(id)).await) {
        Campaign::Won(epoch) => epoch,
        Campaign::Lost(leader) => panic!("{leader:?} leads"),
    }
}

async fn assert_fenced(store: &dyn ElectionStore, epoch: Epoch, seq: u64) {
    let refused = store.append(epoch, LogSeq(seq), group(seq)).await;
    assert!(
        matches!(refused, Err(StoreError::Fenced { asked, .. }) if asked == epoch),
        "{refused:?}"
    );
}

async fn next_leader(leaders: &mut dyn Leaders) -> Option<Leader> {
    let told = timeout(TOLD, leaders.next()).await;
    expect(told.expect("no change of the leader is told"))
}

async fn next_group(groups: &mut dyn Groups) -> (LogSeq, Bytes) {
    let told = timeout(TOLD, groups.next()).await;
    expect(told.expect("no group is told"))
}

async fn of_some_candidates_one_wins(bench: &dyn Bench) {
    let first = bench.fresh().await;
    assert_eq!(expect(first.leader().await), None);
    let mut last = Epoch(0);
    for round in 0..3 {
        let candidates = (0..8).map(|number| async move {
            let store = bench.another().await;
            let lease = lease(&*store).await;
            let claim = claim(&format!("{round}-{number}"));
            let ended = expect(store.campaign(lease, &claim).await);
            (store, lease, claim, ended)
        });
        let ended = futures::future::join_all(candidates).await;
        let won = ended.iter().filter_map(|(store, lease, claim, ended)| {
            let Campaign::Won(epoch) = ended else {
                return None;
            };
            let (claim, epoch, lease) = (claim.clone(), *epoch, *lease);
            let leader = Leader {
                claim,
                epoch,
                lease,
            };
            Some((store, leader))
        });
        let won: Vec<_> = won.collect();
        let [(store, leader)] = &won[..] else {
            panic!("{} have won", won.len());
        };
        assert!(leader.epoch > last, "{leader:?} after {last}");
        last = leader.epoch;
        assert_eq!(expect(first.leader().await).as_ref(), Some(leader));
        assert_eq!(expect(first.epoch().await), last);
        for (_, _, _, ended) in &ended {
            let is_right = match ended {
                Campaign::Won(epoch) => *epoch == last,
                Campaign::Lost(to) => to == leader,
            };
            assert!(is_right, "{leader:?} leads, and not so: {ended:?}");
        }
        // Revoking a lease that is gone is not an error.
        expect(store.revoke_lease(leader.lease).await);
        expect(store.revoke_lease(leader.lease).await);
        assert_eq!(expect(first.leader().await), None);
        assert_eq!(expect(first.epoch().await), last, "the latest term's");
    }
}

async fn a_candidate_is_a_lease_and_a_name(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let its = lease(&*store).await;
    let epoch = win(&*store, its, "a").await;
    assert_eq!(win(&*store, its, "a").await, epoch, "one term, not two");
    for (lease, id) in [(its, "b"), (lease(&*store).await, "a")] {
        let lost = expect(store.campaign(lease, &claim(id)).await);
        let is_right = matches!(&lost, Campaign::Lost(to) if to.epoch == epoch);
        assert!(is_right, "{lost:?}");
    }
}

async fn a_lease_that_is_not_renewed_ends_with_its_keys(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let other = bench.another().await;
    let mut leaders = expect(other.leaders().await);
    assert_eq!(next_leader(&mut *leaders).await, None);
    let lease = expect(store.grant_lease(SHORT).await);
    expect(store.put_member(lease, "a", "{}".into()).await);
    let epoch = win(&*store, lease, "a").await;
    let leader = next_leader(&mut *leaders).await.expect("nobody leads");
    assert_eq!((leader.claim, leader.epoch), (claim("a"), epoch));
    assert_eq!(expect(other.members().await), [("a".into(), "{}".into())]);
    let renewed = Instant::now();
    assert_eq!(expect(store.keep_alive(lease).await), Some(SHORT));
    assert_eq!(next_leader(&mut *leaders).await, None);
    let took = renewed.elapsed();
    assert!(took > SHORT * 9 / 10 && took < GONE, "{took:?}");
    assert_eq!(expect(store.keep_alive(lease).await), None);
    assert_eq!(expect(other.members().await), []);
    assert_fenced(&*store, epoch, 1).await;
    let refused = [
        store.campaign(lease, &claim("a")).await.map(|_| ()),
        store.put_member(lease, "a", "{}".into()).await,
    ];
    for refused in refused {
        assert!(matches!(refused, Err(StoreError::LeaseGone)), "{refused:?}");
    }
}

async fn a_lease_that_is_renewed_goes_on(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let lease = expect(store.grant_lease(SHORT).await);
    let epoch = win(&*store, lease, "a").await;
    for seq in 1..=6 {
        sleep(SHORT / 3).await;
        assert_eq!(expect(store.keep_alive(lease).await), Some(SHORT));
        append(&*store, epoch, seq..=seq).await;
    }
}

async fn a_term_ends_with_its_lease(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let other = bench.another().await;
    let first = lease(&*store).await;
    let old = win(&*store, first, "a").await;
    append(&*store, old, 1..=1).await;
    expect(store.revoke_lease(first).await);
    assert_fenced(&*store, old, 2).await;
    let second = lease(&*other).await;
    let new = win(&*other, second, "b").await;
    assert!(new > old);
    assert_fenced(&*store, old, 2).await;
    append(&*other, new, 2..=2).await;
}

async fn a_leader_that_learns_a_higher_epoch_begins_a_term_above_it(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let its = lease(&*store).await;
    let first = win(&*store, its, "a").await;
    let high = Epoch(1_000_000);
    let second = expect(store.begin_epoch(high).await);
    assert!(second >= high, "{second}");
    let leader = expect(store.leader().await).expect("nobody leads");
    let found = (leader.claim, leader.lease, leader.epoch);
    assert_eq!(found, (claim("a"), its, second));
    assert_fenced(&*store, first, 1).await;
    append(&*store, second, 1..=1).await;
    // The epochs of later terms are above it too.
    expect(store.revoke_lease(its).await);
    let its = lease(&*store).await;
    assert!(win(&*store, its, "a").await > second);
}

async fn a_leader_that_was_replaced_deposes_nobody(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let other = bench.another().await;
    let first = lease(&*store).await;
    win(&*store, first, "a").await;
    expect(store.revoke_lease(first).await);
    let second = lease(&*other).await;
    let epoch = win(&*other, second, "b").await;
    // A node proved the new term to it.
    let refused = store.begin_epoch(epoch).await;
    assert!(
        matches!(refused, Err(StoreError::Fenced { current, .. }) if current == epoch),
        "{refused:?}"
    );
    let leader = expect(other.leader().await).expect("nobody leads");
    assert_eq!((leader.claim, leader.epoch), (claim("b"), epoch));
    append(&*other, epoch, 1..=1).await;
}

async fn an_abandoned_term_writes_nothing_more(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let its = lease(&*store).await;
    let epoch = win(&*store, its, "a").await;
    append(&*store, epoch, 1..=1).await;
    store.abandon(epoch);
    let refused = store.append(epoch, LogSeq(2), group(2)).await;
    assert!(
        matches!(refused, Err(StoreError::Unavailable { .. })),
        "{refused:?}"
    );
    expect(store.revoke_lease(its).await);
    let its = lease(&*store).await;
    let next = win(&*store, its, "a").await;
    append(&*store, next, 2..=2).await;
}

async fn the_log_is_followed_over_changes_of_leader(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let standby = bench.another().await;
    let mut epoch = expect(store.begin_epoch(Epoch(1)).await);
    append(&*store, epoch, 1..=5).await;
    let mut groups = expect(standby.groups(LogSeq(3)).await);
    let mut expected = 4;
    for last in [5, 40, 41] {
        append(&*store, epoch, expected.max(6)..=last).await;
        for seq in expected..=last {
            let told = next_group(&mut *groups).await;
            assert_eq!(told, (LogSeq(seq), group(seq)));
        }
        expected = last + 1;
        epoch = expect(store.begin_epoch(Epoch(0)).await);
    }
    let quiet = timeout(SHORT / 5, groups.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    // Dropping the future while it waits must lose no group.
    append(&*store, epoch, expected..=expected).await;
    let told = next_group(&mut *groups).await;
    assert_eq!(told, (LogSeq(expected), group(expected)));
}

async fn a_follower_of_a_cut_log_is_told_so(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let epoch = expect(store.begin_epoch(Epoch(1)).await);
    append(&*store, epoch, 1..=60).await;
    expect(store.truncate_log(epoch, LogSeq(50)).await);
    for after in [0, 49, 61] {
        let refused = match store.groups(LogSeq(after)).await {
            Ok(mut groups) => groups.next().await.map(|(seq, _)| seq),
            Err(error) => Err(error),
        };
        assert!(
            matches!(refused, Err(StoreError::OutsideLog { asked, .. }) if asked == LogSeq(after)),
            "{after}: {refused:?}"
        );
    }
    let mut rest = expect(store.groups(LogSeq(50)).await);
    assert_eq!(next_group(&mut *rest).await, (LogSeq(51), group(51)));
}
