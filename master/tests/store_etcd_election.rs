//! The election over a real etcd, and following the leader's log.

mod etcd;

use bytes::Bytes;
use bytesize::ByteSize;
use etcd::{Writer, append, claim, group, next_of, open, started};
use kvpool_etcd::testing::{Etcd, Setup};
use kvpool_master::store::etcd::{EtcdOptions, EtcdStore, LeaderWatch, LeaseId};
use kvpool_master::store::{
    Campaign, ElectionStore, Leader, LogSeq, MetadataStore, ShardIndex, StoreError,
};
use kvpool_types::Epoch;
use std::sync::Arc;
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

#[tokio::test(flavor = "multi_thread")]
async fn of_eight_candidates_one_wins() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "of_eight_candidates_one_wins",
        Etcd::start(directory.path())
    );
    let mut last = Epoch(0);
    for round in 0..5 {
        let candidates = (0..8).map(|number| {
            let etcd = &etcd;
            async move {
                let store = open(etcd, "c").await;
                let lease = store.grant_lease(LONG).await.unwrap();
                let claim = claim(&format!("{round}-{number}"));
                let ended = store.campaign(lease, &claim).await.unwrap();
                (store, lease, claim, ended)
            }
        });
        let ended = futures::future::join_all(candidates).await;
        let won: Vec<_> = ended
            .iter()
            .filter_map(|(store, lease, claim, ended)| match ended {
                Campaign::Won(epoch) => Some((store, *lease, claim, *epoch)),
                Campaign::Lost(_) => None,
            })
            .collect();
        let [(store, lease, claim, epoch)] = won[..] else {
            panic!("{} won", won.len());
        };
        assert!(epoch > last, "{epoch} after {last}");
        last = epoch;
        let leader = Leader {
            claim: claim.clone(),
            epoch,
            lease,
        };
        assert_eq!(store.leader().await.unwrap(), Some(leader.clone()));
        assert_eq!(store.epoch().await.unwrap(), epoch);
        for (_, _, _, ended) in &ended {
            assert!(
                matches!(ended, Campaign::Won(_)) || *ended == Campaign::Lost(leader.clone()),
                "{ended:?}"
            );
        }
        store.revoke_lease(lease).await.unwrap();
        store.revoke_lease(lease).await.unwrap();
        assert_eq!(store.leader().await.unwrap(), None);
        assert_eq!(store.epoch().await.unwrap(), epoch, "the latest term's");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_without_renewal_is_deposed_and_all_watchers_learn_it() {
    let directory = tempfile::tempdir().unwrap();
    let mut etcd = started!(
        "a_leader_without_renewal_is_deposed_and_all_watchers_learn_it",
        Etcd::start(directory.path())
    );
    let store = open(&etcd, "c").await;
    let other = open(&etcd, "c").await;
    let mut watch = other.watch_leader().await.unwrap();
    assert_eq!(next_leader(&mut watch).await, None);
    let ttl = Duration::from_secs(1);
    let lease = store.grant_lease(ttl).await.unwrap();
    store
        .put_member(lease, "a", Bytes::from_static(b"{}"))
        .await
        .unwrap();
    let epoch = win(&store, lease, "a").await;
    let leader = next_leader(&mut watch).await.unwrap();
    assert_eq!((leader.claim, leader.epoch), (claim("a"), epoch));
    assert_eq!(other.members().await.unwrap(), [("a".into(), "{}".into())]);
    assert_eq!(store.keep_alive(lease).await.unwrap(), Some(ttl));
    let begun = Instant::now();
    assert_eq!(next_leader(&mut watch).await, None);
    let waited = begun.elapsed();
    assert!(
        waited > Duration::from_millis(900) && waited < Duration::from_secs(4),
        "{waited:?}"
    );
    assert_eq!(store.keep_alive(lease).await.unwrap(), None);
    assert_eq!(other.members().await.unwrap(), []);
    let gone = store.campaign(lease, &claim("a")).await;
    assert!(matches!(gone, Err(StoreError::LeaseGone)), "{gone:?}");
    // The watch continues after a restart of etcd.
    etcd.kill().unwrap();
    etcd.restart().await.unwrap();
    let lease = store.grant_lease(LONG).await.unwrap();
    let epoch = win(&store, lease, "b").await;
    let leader = next_leader(&mut watch).await.unwrap();
    assert_eq!((leader.claim, leader.epoch), (claim("b"), epoch));
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
    assert_eq!(win(&store, lease, "a").await, epoch, "one term, not two");
    assert_eq!(store.leader().await.unwrap().unwrap().epoch, epoch);
    append(&store, epoch, 1..=1).await;
    // Neither the lease alone nor the name alone is enough.
    let other = store.campaign(lease, &claim("b")).await.unwrap();
    assert!(matches!(other, Campaign::Lost(_)), "{other:?}");
    let lease = store.grant_lease(LONG).await.unwrap();
    let other = store.campaign(lease, &claim("a")).await.unwrap();
    assert!(matches!(other, Campaign::Lost(_)), "{other:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_learns_a_higher_epoch_begins_a_term_above_it() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_leader_that_learns_a_higher_epoch_begins_a_term_above_it",
        Etcd::start(directory.path())
    );
    let store = open(&etcd, "c").await;
    let lease = store.grant_lease(LONG).await.unwrap();
    let first = win(&store, lease, "a").await;
    let high = Epoch(1_000_000);
    let second = store.begin_epoch(high).await.unwrap();
    assert!(second >= high);
    let leader = store.leader().await.unwrap().unwrap();
    assert_eq!(
        (leader.claim, leader.lease, leader.epoch),
        (claim("a"), lease, second)
    );
    let refused = store.append(first, LogSeq(1), group(1)).await;
    assert!(
        matches!(refused, Err(StoreError::Fenced { .. })),
        "{refused:?}"
    );
    append(&store, second, 1..=1).await;
    // Later terms are above it too.
    store.revoke_lease(lease).await.unwrap();
    let lease = store.grant_lease(LONG).await.unwrap();
    assert!(win(&store, lease, "a").await > second);
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
