//! The election over a real etcd, and following the leader's log.

use crate::etcd::{Writer, append, claim, group, next_of, open, started};
use async_trait::async_trait;
use bytes::Bytes;
use bytesize::ByteSize;
use kvpool_etcd::testing::{Etcd, Setup};
use kvpool_master::store::conformance::election;
use kvpool_master::store::etcd::{EtcdOptions, EtcdStore, LeaderWatch, LeaseId};
use kvpool_master::store::{
    Campaign, ElectionStore, Leader, LogSeq, MetadataStore, ShardIndex, StoreError,
};
use kvpool_types::Epoch;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

async fn win(store: &EtcdStore, lease: LeaseId, id: &str) -> Epoch {
    match store.campaign(lease, &claim(id)).await.unwrap() {
        Campaign::Won(epoch) => epoch,
        Campaign::Lost(leader) => panic!("{leader:?} leads"),
    }
}

async fn next_leader(watch: &mut LeaderWatch) -> Option<Leader> {
    let told = async {
        loop {
            match watch.next().await {
                Ok(told) => return told,
                Err(StoreError::Unavailable { .. }) => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), told)
        .await
        .expect("no change was told")
}

struct Clusters {
    etcd: Etcd,
    made: AtomicU32,
}

#[async_trait]
impl election::Bench for Clusters {
    async fn fresh(&self) -> Arc<dyn ElectionStore> {
        self.made.fetch_add(1, Ordering::Relaxed);
        self.another().await
    }

    async fn another(&self) -> Arc<dyn ElectionStore> {
        let number = self.made.load(Ordering::Relaxed);
        Arc::new(open(&self.etcd, &number.to_string()).await)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_elects_as_every_store_that_elects_has_to() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "it_elects_as_every_store_that_elects_has_to",
        Etcd::start(directory.path())
    );
    let made = AtomicU32::new(0);
    election::run(&Clusters { etcd, made }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_of_the_leader_goes_on_over_a_restart_of_etcd() {
    let directory = tempfile::tempdir().unwrap();
    let mut etcd = started!(
        "a_watch_of_the_leader_goes_on_over_a_restart_of_etcd",
        Etcd::start(directory.path())
    );
    let store = open(&etcd, "c").await;
    let mut watch = open(&etcd, "c").await.watch_leader().await.unwrap();
    for id in ["a", "b"] {
        assert_eq!(next_leader(&mut watch).await, None);
        let lease = store.grant_lease(LONG).await.unwrap();
        let epoch = win(&store, lease, id).await;
        let leader = next_leader(&mut watch).await.unwrap();
        assert_eq!((leader.claim, leader.epoch), (claim(id), epoch));
        store.revoke_lease(lease).await.unwrap();
        etcd.kill().unwrap();
        etcd.restart().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_answer_is_lost_is_found_again() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_claim_whose_answer_is_lost_is_found_again",
        Etcd::start(directory.path())
    );
    let store = Arc::new(open(&etcd, "c").await);
    let lease = store.grant_lease(LONG).await.unwrap();
    etcd.pause().unwrap();
    let pending = {
        let store = Arc::clone(&store);
        tokio::spawn(async move { store.campaign(lease, &claim("a")).await })
    };
    tokio::time::sleep(Duration::from_millis(1500)).await;
    etcd.resume().unwrap();
    // The pending campaign may have succeeded or not; either way this candidate leads.
    if let Ok(ended) = pending.await.unwrap() {
        assert!(matches!(ended, Campaign::Won(_)), "{ended:?}");
    }
    let epoch = win(&store, lease, "a").await;
    assert_eq!(store.leader().await.unwrap().unwrap().epoch, epoch);
    append(&store, epoch, 1..=1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_is_far_longer_than_asked_for_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["--heartbeat-interval=500", "--election-timeout=5000"];
    let setup = Setup {
        flags: flags.map(Into::into).into(),
        ..Setup::default()
    };
    let etcd = started!(
        "a_lease_that_is_far_longer_than_asked_for_is_refused",
        Etcd::start_with(directory.path(), &setup)
    );
    let store = open(&etcd, "c").await;
    let refused = store.grant_lease(Duration::from_secs(2)).await;
    assert!(
        matches!(refused, Err(StoreError::LeaseTtl { granted, .. }) if granted > Duration::from_secs(6)),
        "{refused:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn following_tells_every_group_over_restarts_of_etcd_and_changes_of_leader() {
    let directory = tempfile::tempdir().unwrap();
    let mut etcd = started!(
        "following_tells_every_group_over_restarts_of_etcd_and_changes_of_leader",
        Etcd::start(directory.path())
    );
    let store = Arc::new(open(&etcd, "c").await);
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    append(&store, epoch, 1..=20).await;
    let standby = open(&etcd, "c").await;
    let mut follow = standby.follow(LogSeq(5)).await.unwrap();
    let mut expected = 6;
    let mut epoch = epoch;
    for round in 0..4 {
        let writer = Writer::start(&store, epoch);
        tokio::time::sleep(Duration::from_millis(200)).await;
        if round % 2 == 0 {
            etcd.kill().unwrap();
            etcd.restart().await.unwrap();
        }
        let last = writer.stop().await;
        while expected <= last {
            assert_eq!(
                next_of(&mut follow).await,
                (LogSeq(expected), group(expected))
            );
            expected += 1;
        }
        epoch = store.begin_epoch(Epoch(0)).await.unwrap();
    }
    let quiet = tokio::time::timeout(Duration::from_millis(300), follow.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    // A follower dropped while it waited has lost nothing.
    append(&store, epoch, expected..=expected).await;
    assert_eq!(
        next_of(&mut follow).await,
        (LogSeq(expected), group(expected))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn following_says_so_when_the_log_was_cut_and_not_when_history_was() {
    let directory = tempfile::tempdir().unwrap();
    let mut etcd = started!(
        "following_says_so_when_the_log_was_cut_and_not_when_history_was",
        Etcd::start(directory.path())
    );
    let store = open(&etcd, "c").await;
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    append(&store, epoch, 1..=40).await;
    let mut follow = store.follow(LogSeq(0)).await.unwrap();
    assert_eq!(next_of(&mut follow).await, (LogSeq(1), group(1)));
    let mut slow = store.follow(LogSeq(40)).await.unwrap();
    // Compaction removes history, and with it the start of any resumed watch.
    append(&store, epoch, 41..=60).await;
    let client = etcd.client().unwrap();
    let now = client.status(0).await.unwrap().revision;
    client.compact(now, true, LONG).await.unwrap();
    etcd.kill().unwrap();
    etcd.restart().await.unwrap();
    for seq in 2..=60 {
        assert_eq!(next_of(&mut follow).await, (LogSeq(seq), group(seq)));
    }
    assert_eq!(next_of(&mut slow).await, (LogSeq(41), group(41)));

    store.truncate_log(epoch, LogSeq(50)).await.unwrap();
    for after in [0, 49, 61] {
        let refused = store.follow(LogSeq(after)).await;
        assert!(
            matches!(refused, Err(StoreError::OutsideLog { .. })),
            "{after}: {refused:?}"
        );
    }
    let mut rest = store.follow(LogSeq(50)).await.unwrap();
    assert_eq!(next_of(&mut rest).await, (LogSeq(51), group(51)));
    // A follower that was away while the log grew and was cut.
    let mut away = store.follow(LogSeq(60)).await.unwrap();
    append(&store, epoch, 61..=80).await;
    store.truncate_log(epoch, LogSeq(80)).await.unwrap();
    let now = client.status(0).await.unwrap().revision;
    client.compact(now, true, LONG).await.unwrap();
    let told = tokio::time::timeout(LONG, away.next()).await.unwrap();
    assert!(
        matches!(told, Err(StoreError::OutsideLog { asked, .. }) if asked == LogSeq(60)),
        "{told:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_of_an_interrupted_snapshot_go_with_the_next_term() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "parts_of_an_interrupted_snapshot_go_with_the_next_term",
        Etcd::start(directory.path())
    );
    let store = open(&etcd, "c").await;
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    append(&store, epoch, 1..=2).await;
    for shard in [1, 7, u32::MAX] {
        let parts = vec![group(1), group(2)];
        store
            .put_snapshot(epoch, ShardIndex(shard), LogSeq(2), parts)
            .await
            .unwrap();
    }
    let client = etcd.client().unwrap();
    for key in [
        "00000000/0000000000000001/0000",
        "00000001/00000000000fffff/0003",
        "00000009/0000000000000001/0000",
        "ffffffff/0000000000000001/0000",
    ] {
        let key = format!("/kvpool/c/part/{key}");
        client.put(key, "left behind", None).await.unwrap();
    }
    let parts = async || {
        let parts = kvpool_etcd::kv::Range::prefix("/kvpool/c/part/").keys_only();
        client.range(parts).await.unwrap().kvs.len()
    };
    assert_eq!(parts().await, 10);
    let epoch = store.begin_epoch(Epoch(0)).await.unwrap();
    store.maintain(epoch).await.unwrap();
    assert_eq!(parts().await, 6);
    for shard in store.snapshots().await.unwrap() {
        let read = store.read_snapshot(shard).await.unwrap().unwrap();
        assert_eq!(read.chunks, [group(1), group(2)]);
    }
    let positions = store.snapshot_positions().await.unwrap();
    assert_eq!(positions[&ShardIndex(7)], (LogSeq(2), 14));
}

#[tokio::test(flavor = "multi_thread")]
async fn history_is_compacted_and_the_file_made_smaller_without_disturbing_a_follower() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "history_is_compacted_and_the_file_made_smaller_without_disturbing_a_follower",
        Etcd::start(directory.path())
    );
    let store = EtcdStore::open(&EtcdOptions {
        defragment_above: ByteSize::mib(4),
        ..EtcdOptions::new(etcd.endpoints(), "c")
    })
    .await
    .unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let mut follow = store.follow(LogSeq(0)).await.unwrap();
    let body = Bytes::from(vec![5u8; 1 << 20]);
    let mut seq = 0;
    let (mut compacted, mut defragmented) = (false, false);
    let mut largest = 0;
    let limit = Instant::now() + LONG;
    while !(compacted && defragmented) {
        assert!(Instant::now() < limit, "it does not get smaller");
        if seq < 20 {
            for _ in 0..5 {
                seq += 1;
                store
                    .append(epoch, LogSeq(seq), body.clone())
                    .await
                    .unwrap();
                assert_eq!(next_of(&mut follow).await.0, LogSeq(seq));
            }
            store.truncate_log(epoch, LogSeq(seq)).await.unwrap();
        } else {
            // Like a leader that has little to do.
            seq += 1;
            store.append(epoch, LogSeq(seq), group(seq)).await.unwrap();
            assert_eq!(next_of(&mut follow).await.0, LogSeq(seq));
        }
        let did = store.maintain(epoch).await.unwrap();
        assert_eq!(did.alarms, Vec::<String>::new());
        largest = largest.max(did.db_size);
        compacted |= did.compacted.is_some();
        defragmented |= did.defragmented;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let size = store.size_on_disk().await.unwrap();
    assert!(size < largest / 4, "from {largest} to {size} bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_others_share_is_neither_compacted_nor_defragmented() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "an_etcd_that_others_share_is_neither_compacted_nor_defragmented",
        Etcd::start(directory.path())
    );
    let options = |compact| EtcdOptions {
        compact,
        defragment_above: ByteSize::mib(4),
        ..EtcdOptions::new(etcd.endpoints(), "c")
    };
    let own = EtcdStore::open(&options(true)).await.unwrap();
    let shared = EtcdStore::open(&options(false)).await.unwrap();
    let epoch = own.begin_epoch(Epoch(1)).await.unwrap();
    let body = Bytes::from(vec![5u8; 1 << 20]);
    for seq in 1..=20 {
        own.append(epoch, LogSeq(seq), body.clone()).await.unwrap();
    }
    own.truncate_log(epoch, LogSeq(20)).await.unwrap();
    let client = etcd.client().unwrap();
    let now = client.status(0).await.unwrap().revision;
    client.compact(now, true, LONG).await.unwrap();
    let limit = Instant::now() + LONG;
    for seq in 21.. {
        assert!(Instant::now() < limit, "there is nothing to defragment");
        // etcd reports the room that a compaction freed after later writes.
        own.append(epoch, LogSeq(seq), group(seq)).await.unwrap();
        let did = shared.maintain(epoch).await.unwrap();
        assert_eq!((did.compacted, did.defragmented), (None, false));
        if own.maintain(epoch).await.unwrap().defragmented {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
