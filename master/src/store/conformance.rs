//! The rules of a [`MetadataStore`] as one suite. The tests of each implementation run it.
//!
//! A check panics when the store breaks a rule, so only tests may call it. The suite is part of the
//! library so that the tests of every implementation reach it. [`election`] has the rules of a
//! store that elects a leader.

pub mod election;

use super::{LogSeq, LogSpan, MetadataStore, ShardIndex, Snapshot, StoreError};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_types::{ClusterId, Epoch};
use std::sync::Arc;

/// The source of the stores under test.
#[async_trait]
pub trait Bench: Send + Sync {
    /// A new, empty store.
    async fn fresh(&self) -> Arc<dyn MetadataStore>;

    /// The same store after a restart of its process. `store` is closed.
    async fn reopen(&self, store: Arc<dyn MetadataStore>) -> Arc<dyn MetadataStore>;
}

/// Runs every check.
///
/// # Panics
///
/// When the store breaks a rule.
pub async fn run(bench: &dyn Bench) {
    a_new_store_is_empty(bench).await;
    the_cluster_id_is_made_once(bench).await;
    epochs_only_grow(bench).await;
    groups_are_read_back_in_order(bench).await;
    a_gap_is_refused(bench).await;
    only_the_current_epoch_writes(bench).await;
    a_snapshot_replaces_the_last_one_whole(bench).await;
    a_snapshot_lies_inside_the_log(bench).await;
    the_log_is_cut_and_goes_on(bench).await;
    a_closed_store_says_so(bench).await;
}

fn group(seq: u64) -> Bytes {
    Bytes::from(format!("group {seq}").repeat(1 + usize::try_from(seq % 7).unwrap_or(0)))
}

async fn with_log(bench: &dyn Bench, through: u64) -> (Arc<dyn MetadataStore>, Epoch) {
    let store = bench.fresh().await;
    let epoch = expect(store.begin_epoch(Epoch(1)).await);
    append(&*store, epoch, 1..=through).await;
    (store, epoch)
}

async fn append(store: &dyn MetadataStore, epoch: Epoch, seqs: impl Iterator<Item = u64>) {
    for seq in seqs {
        expect(store.append(epoch, LogSeq(seq), group(seq)).await);
    }
}

fn expect<T>(answer: Result<T, StoreError>) -> T {
    answer.unwrap_or_else(|error| panic!("the store refused: {error}"))
}

async fn a_new_store_is_empty(bench: &dyn Bench) {
    let store = bench.fresh().await;
    assert_eq!(expect(store.epoch().await), Epoch(0));
    assert_eq!(expect(store.log_span().await), LogSpan::default());
    assert_eq!(expect(store.read_log(LogSeq(0), 1 << 20).await), []);
    assert_eq!(expect(store.snapshots().await), []);
    assert_eq!(expect(store.read_snapshot(ShardIndex(0)).await), None);
}

async fn the_cluster_id_is_made_once(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let id = ClusterId(u128::MAX - 5);
    assert_eq!(expect(store.cluster_id(id).await), id);
    assert_eq!(expect(store.cluster_id(ClusterId(2)).await), id);
    let store = bench.reopen(store).await;
    assert_eq!(expect(store.cluster_id(ClusterId(3)).await), id);
}

async fn epochs_only_grow(bench: &dyn Bench) {
    let store = bench.fresh().await;
    let mut latest = Epoch(0);
    // The store chooses how far its epoch is above `at_least`.
    for ahead in [0, 40, 0, 100_000, 0] {
        let at_least = Epoch(latest.0 + ahead);
        let epoch = expect(store.begin_epoch(at_least).await);
        assert!(
            epoch > latest && epoch >= at_least,
            "{epoch} after {latest}"
        );
        latest = epoch;
    }
    let low = expect(store.begin_epoch(Epoch(7)).await);
    assert!(low > latest, "{low} after {latest}");
    let store = bench.reopen(store).await;
    assert_eq!(expect(store.epoch().await), low);
    assert!(expect(store.begin_epoch(Epoch(0)).await) > low);
}

async fn groups_are_read_back_in_order(bench: &dyn Bench) {
    let (store, _) = with_log(bench, 300).await;
    let store = bench.reopen(store).await;
    assert_eq!(expect(store.log_span().await).last, LogSeq(300));
    // The positions cross the width of a byte, so an order by text or by low byte would show.
    let all: Vec<_> = (1..=300).map(|seq| (LogSeq(seq), group(seq))).collect();
    assert_eq!(expect(store.read_log(LogSeq(0), u64::MAX).await), all);
    assert_eq!(expect(store.read_log(LogSeq(300), u64::MAX).await), []);
    // At least one group, then no more than asked for.
    let one = expect(store.read_log(LogSeq(254), 1).await);
    assert_eq!(one, [(LogSeq(255), group(255))]);
    let limit = (group(256).len() + group(257).len()) as u64;
    let two = expect(store.read_log(LogSeq(255), limit).await);
    assert_eq!(two, [(LogSeq(256), group(256)), (LogSeq(257), group(257))]);
}

async fn a_gap_is_refused(bench: &dyn Bench) {
    let (store, epoch) = with_log(bench, 2).await;
    for asked in [0, 1, 2, 4, u64::MAX] {
        let asked = LogSeq(asked);
        let refused = store.append(epoch, asked, group(9)).await;
        let last = LogSeq(2);
        assert!(
            matches!(refused, Err(StoreError::Gap { asked: a, last: l }) if (a, l) == (asked, last)),
            "{refused:?}"
        );
    }
    assert_eq!(expect(store.read_log(LogSeq(0), u64::MAX).await).len(), 2);
    append(&*store, epoch, 3..=3).await;
}

async fn only_the_current_epoch_writes(bench: &dyn Bench) {
    let (store, old) = with_log(bench, 3).await;
    let new = expect(store.begin_epoch(Epoch(0)).await);
    let shard = ShardIndex(1);
    // The epochs of the deposed leader, and of a master that was never elected.
    for asked in [old, Epoch(0), Epoch(new.0 + 1)] {
        let refused = [
            store.append(asked, LogSeq(4), group(4)).await,
            store
                .put_snapshot(asked, shard, LogSeq(3), vec![group(1)])
                .await,
            store.truncate_log(asked, LogSeq(1)).await,
        ];
        for refused in refused {
            assert!(
                matches!(
                    refused,
                    Err(StoreError::Fenced { asked: a, current }) if (a, current) == (asked, new)
                ),
                "{refused:?}"
            );
        }
    }
    assert_eq!(expect(store.read_snapshot(shard).await), None);
    let span = LogSpan {
        cut: LogSeq(0),
        last: LogSeq(3),
    };
    assert_eq!(expect(store.log_span().await), span);
    append(&*store, new, 4..=4).await;
}

async fn a_snapshot_replaces_the_last_one_whole(bench: &dyn Bench) {
    let (store, epoch) = with_log(bench, 9).await;
    let large: Vec<Bytes> = (0..30u8).map(|n| Bytes::from(vec![n; 100_000])).collect();
    let small = vec![Bytes::from_static(b"only"), Bytes::new()];
    let snapshot = |seq, chunks: &[Bytes]| Snapshot {
        seq: LogSeq(seq),
        chunks: chunks.to_vec(),
    };
    for shard in [ShardIndex::SYSTEM, ShardIndex(300), ShardIndex(2)] {
        expect(
            store
                .put_snapshot(epoch, shard, LogSeq(4), large.clone())
                .await,
        );
    }
    let shards = [ShardIndex(2), ShardIndex(300), ShardIndex::SYSTEM];
    assert_eq!(expect(store.snapshots().await), shards);
    expect(
        store
            .put_snapshot(epoch, ShardIndex(2), LogSeq(7), small.clone())
            .await,
    );
    expect(
        store
            .put_snapshot(epoch, ShardIndex(300), LogSeq(9), Vec::new())
            .await,
    );
    let store = bench.reopen(store).await;
    let read = async |shard| expect(store.read_snapshot(shard).await);
    assert_eq!(read(ShardIndex(2)).await, Some(snapshot(7, &small)));
    assert_eq!(read(ShardIndex(300)).await, Some(snapshot(9, &[])));
    assert_eq!(read(ShardIndex::SYSTEM).await, Some(snapshot(4, &large)));
    assert_eq!(read(ShardIndex(3)).await, None);
}

async fn a_snapshot_lies_inside_the_log(bench: &dyn Bench) {
    let (store, epoch) = with_log(bench, 5).await;
    expect(
        store
            .put_snapshot(epoch, ShardIndex(0), LogSeq(5), vec![group(5)])
            .await,
    );
    expect(store.truncate_log(epoch, LogSeq(3)).await);
    for asked in [2, 6] {
        let refused = store
            .put_snapshot(epoch, ShardIndex(0), LogSeq(asked), vec![group(asked)])
            .await;
        assert!(
            matches!(refused, Err(StoreError::OutsideLog { .. })),
            "{refused:?}"
        );
    }
    let kept = expect(store.read_snapshot(ShardIndex(0)).await);
    assert_eq!(kept.map(|kept| kept.seq), Some(LogSeq(5)));
}

async fn the_log_is_cut_and_goes_on(bench: &dyn Bench) {
    let (store, epoch) = with_log(bench, 400).await;
    let beyond = store.truncate_log(epoch, LogSeq(401)).await;
    assert!(
        matches!(beyond, Err(StoreError::OutsideLog { .. })),
        "{beyond:?}"
    );
    for through in [350, 350, 20] {
        expect(store.truncate_log(epoch, LogSeq(through)).await);
        let left = expect(store.read_log(LogSeq(0), u64::MAX).await);
        assert_eq!(left.first().map(|(seq, _)| *seq), Some(LogSeq(351)));
        assert_eq!(left.len(), 50);
    }
    // An empty log still knows its last position.
    expect(store.truncate_log(epoch, LogSeq(400)).await);
    let store = bench.reopen(store).await;
    let span = LogSpan {
        cut: LogSeq(400),
        last: LogSeq(400),
    };
    assert_eq!(expect(store.log_span().await), span);
    let epoch = expect(store.begin_epoch(Epoch(0)).await);
    append(&*store, epoch, 401..=401).await;
    assert_eq!(
        expect(store.read_log(LogSeq(0), u64::MAX).await),
        [(LogSeq(401), group(401))]
    );
}

async fn a_closed_store_says_so(bench: &dyn Bench) {
    let (store, epoch) = with_log(bench, 1).await;
    expect(store.close().await);
    expect(store.close().await);
    let refused = store.append(epoch, LogSeq(2), group(2)).await;
    assert!(matches!(refused, Err(StoreError::Closed)), "{refused:?}");
    let refused = store.read_log(LogSeq(0), 1).await;
    assert!(matches!(refused, Err(StoreError::Closed)), "{refused:?}");
}
