//! The store in etcd, over real etcd processes. The tests run the suite of every metadata store,
//! fencing, the election, and following. They also kill, pause and fill etcd.

use crate::etcd::{Writer, append, claim, group, open, started};
use async_trait::async_trait;
use bytes::Bytes;
use bytesize::ByteSize;
use kvpool_etcd::testing::{Etcd, EtcdCluster, Setup};
use kvpool_master::store::etcd::{EtcdOptions, EtcdStore};
use kvpool_master::store::record::VersionsGranted;
use kvpool_master::store::{
    Ack, Campaign, ElectionStore, Journal, JournalError, JournalOptions, LogSeq, MetadataStore,
    OpenError, Record, RecoveryError, ShardIndex, SnapshotSource, StoreError, Target, conformance,
    recover,
};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Epoch, Key, Version};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

struct Clusters {
    etcd: Etcd,
    made: AtomicU32,
}

#[async_trait]
impl conformance::Bench for Clusters {
    async fn fresh(&self) -> Arc<dyn MetadataStore> {
        let number = self.made.fetch_add(1, Ordering::Relaxed) + 1;
        Arc::new(open(&self.etcd, &number.to_string()).await)
    }

    async fn reopen(&self, store: Arc<dyn MetadataStore>) -> Arc<dyn MetadataStore> {
        store.close().await.unwrap();
        let number = self.made.load(Ordering::Relaxed);
        Arc::new(open(&self.etcd, &number.to_string()).await)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_does_what_every_store_has_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "it_does_what_every_store_has_to_do",
        Etcd::start(directory.path())
    );
    let made = AtomicU32::new(0);
    conformance::run(&Clusters { etcd, made }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_cannot_be_opened_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_store_that_cannot_be_opened_says_why",
        Etcd::start(directory.path())
    );
    let options = EtcdOptions {
        connect_timeout: Duration::from_millis(300),
        ..EtcdOptions::new(etcd.endpoints(), "c")
    };
    let error = EtcdStore::open(&EtcdOptions {
        cluster: "a/b".into(),
        ..options.clone()
    })
    .await
    .unwrap_err();
    assert!(matches!(error, OpenError::Refused { .. }), "{error}");
    let error = EtcdStore::open(&EtcdOptions {
        endpoints: vec!["127.0.0.1:1".into()],
        ..options.clone()
    })
    .await
    .unwrap_err();
    assert!(error.is_retryable(), "{error}");
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    let client = etcd.client().unwrap();
    client.put("/kvpool/c/format", "2", None).await.unwrap();
    let error = EtcdStore::open(&options).await.unwrap_err();
    assert!(
        matches!(error, OpenError::Format { found: 2, .. }),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deposed_leader_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_deposed_leader_changes_nothing",
        Etcd::start(directory.path())
    );
    let (old, new) = (open(&etcd, "c").await, open(&etcd, "c").await);
    let ttl = Duration::from_secs(30);
    let (old_lease, new_lease) = (
        old.grant_lease(ttl).await.unwrap(),
        new.grant_lease(ttl).await.unwrap(),
    );
    let Campaign::Won(first) = old.campaign(old_lease, &claim("old")).await.unwrap() else {
        panic!("nobody else was there");
    };
    append(&old, first, 1..=3).await;
    let Campaign::Lost(leader) = new.campaign(new_lease, &claim("new")).await.unwrap() else {
        panic!("two lead");
    };
    assert_eq!((leader.claim, leader.epoch), (claim("old"), first));
    old.revoke_lease(old_lease).await.unwrap();
    // No master leads: neither the old leader nor any other has a term to write in.
    let refused = old.append(first, LogSeq(4), group(4)).await;
    assert!(
        matches!(refused, Err(StoreError::Fenced { .. })),
        "{refused:?}"
    );
    let refused = new.append(Epoch(0), LogSeq(4), group(4)).await;
    assert!(
        matches!(refused, Err(StoreError::Fenced { .. })),
        "{refused:?}"
    );
    let Campaign::Won(second) = new.campaign(new_lease, &claim("new")).await.unwrap() else {
        panic!("the old leader is gone");
    };
    assert!(second > first);
    for refused in [
        old.append(first, LogSeq(4), group(4)).await,
        old.append(first, LogSeq(4), crate::etcd::large_group(4))
            .await,
        old.truncate_log(first, LogSeq(2)).await,
        old.put_snapshot(first, ShardIndex(0), LogSeq(3), vec![group(1)])
            .await,
    ] {
        assert!(
            matches!(
                refused,
                Err(StoreError::Fenced { asked, current }) if (asked, current) == (first, second)
            ),
            "{refused:?}"
        );
    }
    append(&new, second, 4..=4).await;
    assert_eq!(
        new.read_log(LogSeq(0), u64::MAX).await.unwrap(),
        (1..=4)
            .map(|seq| (LogSeq(seq), group(seq)))
            .collect::<Vec<_>>()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_larger_than_a_request_is_kept_whole() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_group_larger_than_a_request_is_kept_whole",
        Etcd::start(directory.path())
    );
    let store = open(&etcd, "c").await;
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    append(&store, epoch, 1..=1).await;
    for seq in 2..=4 {
        let large = crate::etcd::large_group(seq);
        store
            .append(epoch, LogSeq(seq), large.clone())
            .await
            .unwrap();
    }
    append(&store, epoch, 5..=5).await;
    let mut follow = store.follow(LogSeq(0)).await.unwrap();
    let read = store.read_log(LogSeq(0), u64::MAX).await.unwrap();
    assert_eq!(read.len(), 5);
    for (seq, found) in read {
        let expected = match seq.0 {
            2..=4 => crate::etcd::large_group(seq.0),
            n => group(n),
        };
        assert_eq!(found, expected, "group {seq}");
        assert_eq!(follow.next().await.unwrap(), (seq, expected));
    }
    store.truncate_log(epoch, LogSeq(3)).await.unwrap();
    let left = store.read_log(LogSeq(0), u64::MAX).await.unwrap();
    assert_eq!(
        left.iter().map(|(seq, _)| seq.0).collect::<Vec<_>>(),
        [4, 5]
    );
    let pieces = etcd.client().unwrap();
    let pieces = pieces
        .range(kvpool_etcd::kv::Range::prefix("/kvpool/c/piece/").keys_only())
        .await
        .unwrap();
    assert_eq!(pieces.kvs.len(), 3, "those of group 4 alone are left");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_whose_answer_is_lost_is_applied_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut etcd = started!(
        "an_append_whose_answer_is_lost_is_applied_once",
        Etcd::start(directory.path())
    );
    let store = Arc::new(open(&etcd, "c").await);
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let writer = Writer::start(&store, epoch);
    // etcd is stopped amid a stream of appends. It may have applied an append without an answer, or
    // may find one whose sender gave up and sent it again.
    for round in 0..4 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        if round % 2 == 0 {
            etcd.pause().unwrap();
            tokio::time::sleep(Duration::from_millis(2300)).await;
            assert!(store.stalled().is_some(), "a stall is told");
            etcd.resume().unwrap();
        } else {
            etcd.kill().unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
            etcd.restart().await.unwrap();
        }
    }
    let last = writer.stop().await;
    assert!(store.stalled().is_none());
    crate::etcd::assert_log(&store, last).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_term_answers_at_once_and_is_not_written_in_later() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "an_abandoned_term_answers_at_once_and_is_not_written_in_later",
        Etcd::start(directory.path())
    );
    let store = Arc::new(open(&etcd, "c").await);
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    append(&store, epoch, 1..=1).await;
    etcd.pause().unwrap();
    let pending = {
        let store = Arc::clone(&store);
        tokio::spawn(async move { store.append(epoch, LogSeq(2), group(2)).await })
    };
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(!pending.is_finished(), "the outcome is not known yet");
    store.abandon(epoch);
    let begun = Instant::now();
    let outcome = pending.await.unwrap();
    assert!(
        matches!(outcome, Err(StoreError::Unavailable { .. })),
        "{outcome:?}"
    );
    let later = store.append(epoch, LogSeq(2), group(2)).await;
    assert!(
        matches!(later, Err(StoreError::Unavailable { .. })),
        "{later:?}"
    );
    // A call that waited for etcd's answer would take 1 s.
    assert!(begun.elapsed() < Duration::from_secs(1));
    etcd.resume().unwrap();
    let next = store.begin_epoch(Epoch(0)).await.unwrap();
    let last = store.log_span().await.unwrap().last;
    append(&store, next, last.0 + 1..=last.0 + 1).await;
    crate::etcd::assert_log(&store, last.0 + 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_group_is_lost_or_doubled_when_the_leader_of_etcd_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let mut cluster = started!(
        "no_group_is_lost_or_doubled_when_the_leader_of_etcd_is_killed",
        EtcdCluster::start(directory.path(), 3)
    );
    let store = EtcdStore::open(&EtcdOptions::new(cluster.endpoints(), "c"))
        .await
        .unwrap();
    let store = Arc::new(store);
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let mut follow = store.follow(LogSeq(0)).await.unwrap();
    let writer = Writer::start(&store, epoch);
    let mut longest = Duration::ZERO;
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let leader = cluster.leader().await.unwrap();
        cluster.member(leader).kill().unwrap();
        let begun = Instant::now();
        let limit = begun + Duration::from_secs(20);
        let mut before = None;
        loop {
            match store.log_span().await {
                Ok(span) if *before.get_or_insert(span.last) < span.last => break,
                Ok(_) | Err(StoreError::Unavailable { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            assert!(Instant::now() < limit, "appends do not go on");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        longest = longest.max(begun.elapsed());
        tokio::time::sleep(Duration::from_millis(500)).await;
        cluster.member(leader).restart().await.unwrap();
    }
    let last = writer.stop().await;
    println!("{last} groups; the longest pause was {longest:?}");
    crate::etcd::assert_log(&store, last).await;
    for seq in 1..=last {
        assert_eq!(
            crate::etcd::next_of(&mut follow).await,
            (LogSeq(seq), group(seq))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_and_a_password_are_used() {
    let directory = tempfile::tempdir().unwrap();
    let setup = Setup {
        tls: true,
        password: Some("sesame".into()),
        ..Setup::default()
    };
    let etcd = started!(
        "certificates_and_a_password_are_used",
        Etcd::start_with(directory.path(), &setup)
    );
    let given = etcd.options();
    let options = EtcdOptions {
        user: given.user,
        tls: given.tls,
        ..EtcdOptions::new(given.endpoints, "c")
    };
    let store = EtcdStore::open(&options).await.unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    append(&store, epoch, 1..=3).await;
    store.maintain(epoch).await.unwrap();
    crate::etcd::assert_log(&store, 3).await;
    let wrong = EtcdOptions {
        user: Some(("root".into(), "open".into())),
        ..options
    };
    assert!(!format!("{wrong:?}").contains("\"open\""), "{wrong:?}");
    let begun = Instant::now();
    let error = EtcdStore::open(&wrong).await.unwrap_err();
    assert!(matches!(error, OpenError::Refused { .. }), "{error}");
    assert!(
        begun.elapsed() < Duration::from_secs(3),
        "it was not tried on"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_a_full_etcd_refuses_waits_no_longer() {
    let directory = tempfile::tempdir().unwrap();
    let setup = Setup {
        quota_bytes: Some(16 << 20),
        ..Setup::default()
    };
    let etcd = started!(
        "a_write_that_a_full_etcd_refuses_waits_no_longer",
        Etcd::start_with(directory.path(), &setup)
    );
    let store = open(&etcd, "c").await;
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    append(&store, epoch, 1..=1).await;
    let mut refused = Ok(());
    for _ in 0..400 {
        let part = Bytes::from(vec![9u8; 900_000]);
        let put = store.put_snapshot(epoch, ShardIndex(0), LogSeq(1), vec![part]);
        refused = put.await;
        if refused.is_err() {
            break;
        }
        // etcd checks its file's size every tenth of a second.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(matches!(refused, Err(StoreError::NoSpace)), "{refused:?}");
    assert_eq!(store.stalled(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_etcd_stalls_appends_until_maintenance_made_room() {
    let directory = tempfile::tempdir().unwrap();
    let setup = Setup {
        quota_bytes: Some(16 << 20),
        ..Setup::default()
    };
    let etcd = started!(
        "a_full_etcd_stalls_appends_until_maintenance_made_room",
        Etcd::start_with(directory.path(), &setup)
    );
    let store = Arc::new(open(&etcd, "c").await);
    let lease = store.grant_lease(Duration::from_secs(60)).await.unwrap();
    let Campaign::Won(epoch) = store.campaign(lease, &claim("a")).await.unwrap() else {
        panic!("nobody else was there");
    };
    let body = Bytes::from(vec![9u8; 900_000]);
    let writer = {
        let (store, body) = (Arc::clone(&store), body.clone());
        tokio::spawn(async move {
            for seq in 1..=30 {
                store.append(epoch, LogSeq(seq), body.clone()).await?;
                // etcd checks its file's size every tenth of a second.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok::<_, StoreError>(())
        })
    };
    let limit = Instant::now() + Duration::from_secs(100);
    let mut was_full = false;
    while !writer.is_finished() {
        assert!(Instant::now() < limit, "{:?}", store.stalled());
        tokio::time::sleep(Duration::from_secs(1)).await;
        if !store.stalled().is_some_and(|stalled| stalled.no_space) {
            continue;
        }
        let last = store.log_span().await.unwrap().last;
        if !was_full {
            was_full = true;
            assert!(store.is_full(), "an append waits");
            // Other writes report that, and change nothing.
            let refused = store
                .put_snapshot(epoch, ShardIndex(0), last, vec![group(1)])
                .await;
            assert!(matches!(refused, Err(StoreError::NoSpace)), "{refused:?}");
            assert!(refused.is_err_and(|error| error.is_retryable()));
            let refused = store.grant_lease(Duration::from_secs(60)).await;
            assert!(matches!(refused, Err(StoreError::NoSpace)), "{refused:?}");
            assert!(store.keep_alive(lease).await.unwrap().is_some());
        }
        // The log may still be cut where snapshots allow it, but not its last group. etcd may have
        // applied that group before it reported itself full, so the writer must still find it.
        let before_last = LogSeq(last.0.saturating_sub(1));
        store.truncate_log(epoch, before_last).await.unwrap();
        let did = store.maintain(epoch).await.unwrap();
        println!("{did:?}");
    }
    writer.await.unwrap().unwrap();
    assert!(was_full, "the quota was never reached");
    assert!(!store.is_full());
    assert!(store.stalled().is_none());
    let last = store.log_span().await.unwrap().last;
    assert_eq!(last, LogSeq(30));
    store
        .put_snapshot(epoch, ShardIndex(0), last, vec![group(1)])
        .await
        .unwrap();
}

/// A directory that knows one value.
#[derive(Default)]
struct Granted(AtomicU32);

impl SnapshotSource for Granted {
    fn shards(&self) -> u32 {
        2
    }

    fn capture(&self, _: ShardIndex) -> Vec<Record> {
        Vec::new()
    }

    fn capture_system(&self) -> Vec<Record> {
        vec![granted(self.0.load(Ordering::SeqCst))]
    }
}

fn granted(until: u32) -> Record {
    let until = Version(until.into());
    Record::VersionsGranted(VersionsGranted { until })
}

/// The last record that was read.
#[derive(Default)]
struct Last(Option<Record>);

impl Target for Last {
    fn shard_of(&self, _: NamespaceId, _: &Key) -> ShardIndex {
        ShardIndex(0)
    }
    fn forget(&mut self, _: ShardIndex) {}
    fn snapshot(&mut self, _: ShardIndex, record: Record) {
        self.0 = Some(record);
    }
    fn logged(&mut self, _: LogSeq, record: Record) -> Result<(), RecoveryError> {
        self.0 = Some(record);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journal_writes_to_it_from_threads_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let mut etcd = started!(
        "a_journal_writes_to_it_from_threads_of_its_own",
        Etcd::start(directory.path())
    );
    let store: Arc<dyn MetadataStore> = Arc::new(open(&etcd, "c").await);
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let mut nothing = Last::default();
    let empty = recover(&*store, 2, &mut nothing).await;
    assert_eq!(nothing.0, None, "it is new");
    let source = Arc::new(Granted::default());
    let options = JournalOptions {
        log_bytes: ByteSize::b(200),
        log_ratio: 0,
        ..JournalOptions::default()
    };
    let journal = Journal::start(
        Arc::clone(&store),
        epoch,
        &empty.unwrap().state,
        Arc::clone(&source) as Arc<dyn SnapshotSource>,
        options,
    )
    .unwrap();
    for until in 1..=300 {
        if until == 150 {
            etcd.kill().unwrap();
            etcd.restart().await.unwrap();
        }
        let (sender, durable) = tokio::sync::oneshot::channel();
        let source = Arc::clone(&source);
        let applied = move |outcome: Result<LogSeq, JournalError>| {
            source.0.store(until, Ordering::SeqCst);
            let _waits = sender.send(outcome);
        };
        let submitted = journal.submit(vec![granted(until)], Ack::Durable, applied);
        submitted.await.unwrap();
        durable.await.unwrap().unwrap();
    }
    journal.close().await;
    let span = store.log_span().await.unwrap();
    assert_eq!(span.last, LogSeq(300));
    assert!(span.cut > LogSeq(100), "{span:?}");
    let mut found = Last::default();
    recover(&*store, 2, &mut found).await.unwrap();
    assert_eq!(found.0, Some(granted(300)));
}
