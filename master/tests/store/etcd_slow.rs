//! An etcd whose answers arrive late or slowly.

use crate::etcd::{append, assert_log, group, next_of, open, started};
use bytes::Bytes;
use kvpool_etcd::testing::{Etcd, SlowLink};
use kvpool_master::store::etcd::{EtcdOptions, EtcdStore};
use kvpool_master::store::{LogSeq, MetadataStore, ShardIndex, StoreError};
use kvpool_types::Epoch;
use std::time::Duration;
use tokio::time::timeout;

/// Longer than the limit of a call, 1 s.
const LATE: Duration = Duration::from_millis(1500);
const PATIENCE: Duration = Duration::from_secs(60);

async fn open_over(link: &SlowLink, request_timeout: Duration) -> EtcdStore {
    let options = EtcdOptions {
        request_timeout,
        ..EtcdOptions::new([link.address()], "c")
    };
    EtcdStore::open(&options).await.unwrap()
}

async fn link_to(etcd: &Etcd) -> SlowLink {
    SlowLink::to(&etcd.endpoints()[0]).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_whose_answer_always_comes_late_ends() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "an_append_whose_answer_always_comes_late_ends",
        Etcd::start(directory.path())
    );
    let link = link_to(&etcd).await;
    let store = open_over(&link, Duration::from_secs(1)).await;
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    append(&store, epoch, 1..=1).await;
    link.delay(LATE);
    timeout(PATIENCE, append(&store, epoch, 2..=3))
        .await
        .unwrap();
    assert!(store.stalled().is_none());
    link.delay(Duration::ZERO);
    assert_log(&store, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_follows_an_etcd_whose_answers_come_late() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_standby_follows_an_etcd_whose_answers_come_late",
        Etcd::start(directory.path())
    );
    let link = link_to(&etcd).await;
    let leader = open(&etcd, "c").await;
    let standby = open_over(&link, Duration::from_secs(1)).await;
    let epoch = leader.begin_epoch(Epoch(1)).await.unwrap();
    append(&leader, epoch, 1..=20).await;
    link.delay(LATE);
    let mut follow = standby.follow(LogSeq(0)).await.unwrap();
    let all = async {
        // A read, the opening of a watch and its first group each need several tries.
        for seq in 1..=20 {
            assert_eq!(next_of(&mut follow).await, (LogSeq(seq), group(seq)));
        }
        append(&leader, epoch, 21..=21).await;
        assert_eq!(next_of(&mut follow).await, (LogSeq(21), group(21)));
    };
    timeout(PATIENCE, all).await.unwrap();
}

/// The first read of each kind requests 8 values. They take longer than the longest limit, which is 8 times that of
/// the options.
#[tokio::test(flavor = "multi_thread")]
async fn large_values_are_read_over_a_slow_link() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "large_values_are_read_over_a_slow_link",
        Etcd::start(directory.path())
    );
    let link = link_to(&etcd).await;
    let leader = open(&etcd, "c").await;
    let standby = open_over(&link, Duration::from_millis(200)).await;
    let epoch = leader.begin_epoch(Epoch(1)).await.unwrap();
    let group = |seq: u64| {
        // The last group has 8 pieces.
        let bytes = if seq == 9 { 8 << 20 } else { 1 << 20 };
        Bytes::from(vec![u8::try_from(seq).unwrap(); bytes])
    };
    for seq in 1..=9 {
        let appended = leader.append(epoch, LogSeq(seq), group(seq)).await;
        appended.unwrap();
    }
    let parts = vec![Bytes::from(vec![1; 400_000]); 8];
    let put = leader.put_snapshot(epoch, ShardIndex(0), LogSeq(0), parts.clone());
    put.await.unwrap();
    link.limit(4 << 20);
    let mut follow = standby.follow(LogSeq(0)).await.unwrap();
    for seq in 1..=9 {
        assert_eq!(next_of(&mut follow).await, (LogSeq(seq), group(seq)));
    }
    let snapshot = async {
        loop {
            // What an earlier read left on the connection may delay this one.
            match standby.read_snapshot(ShardIndex(0)).await {
                Err(StoreError::Unavailable { .. }) => {}
                read => return read.unwrap(),
            }
        }
    };
    let snapshot = timeout(PATIENCE, snapshot).await.unwrap();
    assert_eq!(snapshot.unwrap().chunks, parts);
}
