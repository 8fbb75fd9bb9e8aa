//! The journal's promises, over the real store with injected faults.

use super::worker::LINGER;
use super::*;
use crate::store::record::{self, SegmentGone};
use crate::store::{
    EmbeddedOptions, EmbeddedStore, LogSpan, RecoveryError, Snapshot, Target, recover,
};
use async_trait::async_trait;
use bytes::Bytes;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{ClusterId, Key, SegmentId};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The embedded store with faults that the test injects.
struct Faulty {
    store: EmbeddedStore,
    /// The test holds this lock to block appends.
    gate: tokio::sync::Mutex<()>,
    /// Appends fail as if the answer were lost.
    lose: AtomicBool,
    /// The disk is full.
    full: AtomicBool,
    appends: AtomicU64,
}

impl Faulty {
    fn check_room(&self) -> Result<(), StoreError> {
        if self.full.load(Ordering::SeqCst) {
            return Err(StoreError::DirectoryFull {
                directory: "/data".into(),
            });
        }
        Ok(())
    }
}

#[async_trait]
impl MetadataStore for Faulty {
    async fn cluster_id(&self, fresh: ClusterId) -> Result<ClusterId, StoreError> {
        self.store.cluster_id(fresh).await
    }
    async fn epoch(&self) -> Result<Epoch, StoreError> {
        self.store.epoch().await
    }
    async fn begin_epoch(&self, at_least: Epoch) -> Result<Epoch, StoreError> {
        self.store.begin_epoch(at_least).await
    }
    async fn append(&self, epoch: Epoch, seq: LogSeq, group: Bytes) -> Result<(), StoreError> {
        self.appends.fetch_add(1, Ordering::SeqCst);
        let _open = self.gate.lock().await;
        if self.lose.load(Ordering::SeqCst) {
            return Err(StoreError::Unavailable {
                reason: "the answer was lost".into(),
            });
        }
        self.check_room()?;
        self.store.append(epoch, seq, group).await
    }
    async fn make_room(&self, bytes: u64) -> Result<(), StoreError> {
        self.check_room()?;
        self.store.make_room(bytes).await
    }
    async fn log_span(&self) -> Result<LogSpan, StoreError> {
        self.store.log_span().await
    }
    async fn read_log(
        &self,
        after: LogSeq,
        limit_bytes: u64,
    ) -> Result<Vec<(LogSeq, Bytes)>, StoreError> {
        self.store.read_log(after, limit_bytes).await
    }
    async fn put_snapshot(
        &self,
        epoch: Epoch,
        shard: ShardIndex,
        seq: LogSeq,
        chunks: Vec<Bytes>,
    ) -> Result<(), StoreError> {
        self.store.put_snapshot(epoch, shard, seq, chunks).await
    }
    async fn read_snapshot(&self, shard: ShardIndex) -> Result<Option<Snapshot>, StoreError> {
        self.store.read_snapshot(shard).await
    }
    async fn snapshots(&self) -> Result<Vec<ShardIndex>, StoreError> {
        self.store.snapshots().await
    }

    async fn snapshot_positions(&self) -> Result<crate::store::SnapshotPositions, StoreError> {
        self.store.snapshot_positions().await
    }
    async fn truncate_log(&self, epoch: Epoch, through: LogSeq) -> Result<(), StoreError> {
        self.store.truncate_log(epoch, through).await
    }
    async fn size_on_disk(&self) -> Result<u64, StoreError> {
        self.store.size_on_disk().await
    }
    async fn close(&self) -> Result<(), StoreError> {
        self.store.close().await
    }
}

struct Nothing;

impl SnapshotSource for Nothing {
    fn shards(&self) -> u32 {
        1
    }
    fn capture(&self, _: ShardIndex) -> Vec<Record> {
        Vec::new()
    }
    fn capture_system(&self) -> Vec<Record> {
        Vec::new()
    }
}

struct Setup {
    _directory: tempfile::TempDir,
    store: Arc<Faulty>,
    journal: Journal,
    epoch: Epoch,
}

async fn setup(options: JournalOptions) -> Setup {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(Faulty {
        store: EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap(),
        gate: tokio::sync::Mutex::new(()),
        lose: AtomicBool::new(false),
        full: AtomicBool::new(false),
        appends: AtomicU64::new(0),
    });
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let journal = Journal::start(
        Arc::clone(&store) as Arc<dyn MetadataStore>,
        epoch,
        &LogState::default(),
        Arc::new(Nothing),
        options,
    )
    .unwrap();
    Setup {
        _directory: directory,
        store,
        journal,
        epoch,
    }
}

fn gone(id: u32) -> Record {
    Record::SegmentGone(SegmentGone { id: SegmentId(id) })
}

async fn logged(store: &Faulty) -> Vec<Record> {
    let groups = store.read_log(LogSeq(0), u64::MAX).await.unwrap();
    groups
        .iter()
        .flat_map(|(_, group)| record::decode(group).unwrap().records)
        .collect()
}

type Seen = Arc<Mutex<Vec<(u32, Result<LogSeq, JournalError>)>>>;

fn note(seen: &Seen, id: u32) -> impl FnOnce(Result<LogSeq, JournalError>) + Send + 'static {
    let seen = Arc::clone(seen);
    move |outcome| seen.lock().push((id, outcome))
}

/// Waits until the journal is inside an append.
async fn in_append(store: &Faulty, count: u64) {
    while store.appends.load(Ordering::SeqCst) < count {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn waiting_submissions_form_one_group_and_callbacks_keep_the_logs_order() {
    let Setup {
        store,
        journal,
        _directory,
        ..
    } = setup(JournalOptions::default()).await;
    let seen = Seen::default();
    let shut = store.gate.lock().await;
    journal.submit_now(vec![gone(0)], Ack::Durable, note(&seen, 0));
    in_append(&store, 1).await;
    for id in 1..1000 {
        journal
            .submit(vec![gone(id)], Ack::Durable, note(&seen, id))
            .await
            .unwrap();
    }
    assert!(
        seen.lock().is_empty(),
        "nothing is acknowledged before it is durable"
    );
    drop(shut);
    assert_eq!(journal.flush().await.unwrap(), LogSeq(2));
    let seen = std::mem::take(&mut *seen.lock());
    let order: Vec<u32> = seen.iter().map(|(id, _)| *id).collect();
    assert_eq!(order, (0..1000).collect::<Vec<_>>());
    for (id, outcome) in &seen {
        assert_eq!(
            *outcome.as_ref().unwrap(),
            LogSeq(if *id == 0 { 1 } else { 2 })
        );
    }
    assert_eq!(
        logged(&store).await,
        (0..1000).map(gone).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn a_group_is_bounded_and_a_submission_is_never_split() {
    let Setup {
        store,
        journal,
        _directory,
        ..
    } = setup(JournalOptions {
        group_records: 10,
        ..JournalOptions::default()
    })
    .await;
    let shut = store.gate.lock().await;
    journal.submit_now(vec![gone(0)], Ack::Durable, |_| ());
    in_append(&store, 1).await;
    for start in (1..=36).step_by(4) {
        journal.submit_now((start..start + 4).map(gone).collect(), Ack::Durable, |_| ());
    }
    drop(shut);
    journal.flush().await.unwrap();
    let groups = store.read_log(LogSeq(0), u64::MAX).await.unwrap();
    let sizes: Vec<usize> = groups
        .iter()
        .map(|(_, g)| record::decode(g).unwrap().records.len())
        .collect();
    assert_eq!(sizes, [1, 12, 12, 12]);
}

#[tokio::test]
async fn memory_acks_come_at_once_but_never_before_a_durable_one_in_front() {
    let Setup {
        store,
        journal,
        _directory,
        ..
    } = setup(JournalOptions::default()).await;
    let seen = Seen::default();
    let shut = store.gate.lock().await;
    journal.submit_now(vec![gone(0)], Ack::Memory, note(&seen, 0));
    in_append(&store, 1).await;
    assert_eq!(
        seen.lock().len(),
        1,
        "answered while its append is still under way"
    );
    journal.submit_now(vec![gone(1)], Ack::Durable, note(&seen, 1));
    journal.submit_now(vec![gone(2)], Ack::Memory, note(&seen, 2));
    drop(shut);
    journal.flush().await.unwrap();
    let order: Vec<u32> = seen.lock().iter().map(|(id, _)| *id).collect();
    assert_eq!(order, [0, 1, 2]);
    assert_eq!(logged(&store).await, [gone(0), gone(1), gone(2)]);
}

/// Waits until `count` submissions are answered.
async fn answered(seen: &Seen, count: usize) {
    let limit = Instant::now() + Duration::from_secs(10);
    while seen.lock().len() < count {
        assert!(Instant::now() < limit, "a submission is not answered");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_past_event_that_waits_for_the_disk_holds_up_no_memory_ack_behind_it() {
    let setup = setup(JournalOptions::default()).await;
    let (store, journal) = (&setup.store, &setup.journal);
    let seen = Seen::default();
    let shut = store.gate.lock().await;
    journal.insist(vec![gone(0)], Ack::Durable, note(&seen, 0));
    in_append(store, 1).await;
    let submit = async |id, ack| {
        let submitted = journal.submit(vec![gone(id)], ack, note(&seen, id));
        submitted.await.unwrap();
    };
    submit(1, Ack::Memory).await;
    answered(&seen, 1).await;
    journal.insist(vec![gone(2)], Ack::Durable, note(&seen, 2));
    submit(3, Ack::Memory).await;
    answered(&seen, 2).await;
    submit(4, Ack::Durable).await;
    submit(5, Ack::Memory).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(
        seen.lock().len(),
        2,
        "5 waits for 4, which waits for the disk"
    );
    drop(shut);
    journal.flush().await.unwrap();
    let order: Vec<u32> = seen.lock().iter().map(|(id, _)| *id).collect();
    assert_eq!(order, [1, 3, 0, 2, 4, 5]);
    let all: Vec<Record> = (0..6).map(gone).collect();
    assert_eq!(logged(store).await, all);
}

#[tokio::test]
async fn a_memory_ack_that_came_before_a_past_event_in_time_stays_behind_it_in_the_log() {
    let setup = setup(JournalOptions::default()).await;
    let (store, journal) = (&setup.store, &setup.journal);
    let seen = Seen::default();
    let shut = store.gate.lock().await;
    journal.insist(vec![gone(0)], Ack::Durable, note(&seen, 0));
    in_append(store, 1).await;
    let submitted = journal.submit(vec![gone(1)], Ack::Memory, note(&seen, 1));
    submitted.await.unwrap();
    answered(&seen, 1).await;
    store.full.store(true, Ordering::SeqCst);
    drop(shut);
    let limit = Instant::now() + Duration::from_secs(10);
    while journal.has_room().is_ok() {
        assert!(Instant::now() < limit, "the append was not tried");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    store.full.store(false, Ordering::SeqCst);
    answered(&seen, 2).await;
    assert!(seen.lock().iter().all(|(_, outcome)| outcome.is_ok()));
    journal.close().await;
    assert_eq!(logged(store).await, [gone(0), gone(1)]);
}

#[tokio::test]
async fn memory_acks_do_not_wait_for_the_append_of_others_and_the_queue_stays_bounded() {
    let options = JournalOptions {
        queue_bytes: ByteSize::b(10 * size_of::<Record>() as u64),
        ..JournalOptions::default()
    };
    let Setup {
        store,
        journal,
        _directory,
        ..
    } = setup(options).await;
    let seen = Seen::default();
    let shut = store.gate.lock().await;
    for id in 0..10 {
        let submitted = journal.submit(vec![gone(id)], Ack::Memory, note(&seen, id));
        submitted.await.unwrap();
    }
    in_append(&store, 1).await;
    while seen.lock().len() < 10 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let eleventh = journal.submit(vec![gone(10)], Ack::Memory, note(&seen, 10));
    let mut eleventh = std::pin::pin!(eleventh);
    let early = tokio::time::timeout(Duration::from_millis(100), &mut eleventh).await;
    assert!(early.is_err(), "nothing is durable, so the queue is full");
    drop(shut);
    eleventh.await.unwrap();
    journal.flush().await.unwrap();
    let order: Vec<u32> = seen.lock().iter().map(|(id, _)| *id).collect();
    let all: Vec<u32> = (0..11).collect();
    assert_eq!(order, all);
    let records: Vec<Record> = all.into_iter().map(gone).collect();
    assert_eq!(logged(&store).await, records);
    let seqs: Vec<LogSeq> = seen
        .lock()
        .iter()
        .map(|(_, seq)| *seq.as_ref().unwrap())
        .collect();
    for (id, seq) in (0..).zip(&seqs) {
        let before = store.read_log(LogSeq(seq.0 - 1), 1).await.unwrap();
        let group = crate::store::record::decode(&before[0].1).unwrap();
        assert!(
            group.records.contains(&gone(id)),
            "{id} lies where it was told"
        );
    }
}

/// The applied state: all numbers below this one.
struct Counted(AtomicU64);

impl SnapshotSource for Counted {
    fn shards(&self) -> u32 {
        1
    }
    fn capture(&self, _: ShardIndex) -> Vec<Record> {
        let applied = u32::try_from(self.0.load(Ordering::SeqCst)).unwrap();
        (0..applied).map(gone).collect()
    }
    fn capture_system(&self) -> Vec<Record> {
        Vec::new()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_holds_the_log_through_its_position_though_memory_acks_run_ahead() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap());
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let source = Arc::new(Counted(AtomicU64::new(0)));
    let options = JournalOptions {
        log_bytes: ByteSize::b(400),
        log_ratio: 0,
        ..JournalOptions::default()
    };
    let journal = Journal::start(
        Arc::clone(&store) as Arc<dyn MetadataStore>,
        epoch,
        &LogState::default(),
        Arc::clone(&source) as Arc<dyn SnapshotSource>,
        options,
    )
    .unwrap();
    let mut checked = 0;
    for id in 0..3000 {
        let source = Arc::clone(&source);
        let ack = if id % 500 == 7 {
            Ack::Durable
        } else {
            Ack::Memory
        };
        let apply = move |outcome: Result<LogSeq, JournalError>| {
            outcome.unwrap();
            source.0.store(u64::from(id) + 1, Ordering::SeqCst);
        };
        journal.submit(vec![gone(id)], ack, apply).await.unwrap();
        if id % 100 != 99 {
            continue;
        }
        journal.flush().await.unwrap();
        let Some(snapshot) = store.read_snapshot(ShardIndex(0)).await.unwrap() else {
            continue;
        };
        let held: usize = snapshot
            .chunks
            .iter()
            .map(|chunk| record::decode(chunk).unwrap().records.len())
            .sum();
        let behind = store.read_log(snapshot.seq, 1).await.unwrap();
        // A later snapshot may have replaced this one, and the log may be cut behind it.
        let latest = store.read_snapshot(ShardIndex(0)).await.unwrap();
        if let Some((_, group)) = behind.first()
            && latest.is_some_and(|latest| latest.seq == snapshot.seq)
        {
            let next = record::decode(group).unwrap().records[0].clone();
            assert_eq!(next, gone(u32::try_from(held).unwrap()));
            checked += 1;
        }
    }
    assert!(checked > 3, "{checked} snapshots were looked at");
    journal.close().await;
}

#[tokio::test]
async fn after_a_lost_answer_nothing_is_acknowledged_or_appended() {
    let Setup {
        store,
        journal,
        _directory,
        ..
    } = setup(JournalOptions::default()).await;
    let seen = Seen::default();
    journal.flush().await.unwrap();
    journal.healthy().unwrap();
    store.lose.store(true, Ordering::SeqCst);
    let shut = store.gate.lock().await;
    journal.submit_now(vec![gone(0)], Ack::Durable, note(&seen, 0));
    in_append(&store, 1).await;
    journal.submit_now(vec![gone(1)], Ack::Durable, note(&seen, 1));
    journal.submit_now(vec![gone(2)], Ack::Memory, note(&seen, 2));
    drop(shut);
    let error = journal.flush().await.unwrap_err();
    assert!(
        error.is_retryable() && !error.is_outcome_unknown(),
        "{error}"
    );
    // The store works again, but no record may follow one that may be missing.
    store.lose.store(false, Ordering::SeqCst);
    assert!(
        journal
            .submit(vec![gone(3)], Ack::Durable, note(&seen, 3))
            .await
            .is_err()
    );
    journal.submit_now(vec![gone(4)], Ack::Memory, note(&seen, 4));
    assert!(journal.healthy().unwrap_err().is_outcome_unknown());
    journal.close().await;
    let seen = std::mem::take(&mut *seen.lock());
    let failed: Vec<(u32, bool)> = seen
        .iter()
        .map(|(id, outcome)| (*id, outcome.as_ref().unwrap_err().is_outcome_unknown()))
        .collect();
    assert_eq!(
        failed,
        [(0, true), (1, false), (2, false), (3, false), (4, false)]
    );
    assert_eq!(store.appends.load(Ordering::SeqCst), 1);
    assert_eq!(logged(&store).await, []);
}

/// Records that no caller waits for reach the store soon, but not in an append each.
#[tokio::test]
async fn memory_acks_are_appended_together_and_soon() {
    let Setup { store, journal, .. } = &setup(JournalOptions::default()).await;
    let seen = Seen::default();
    let begun = Instant::now();
    for id in 0..20 {
        journal.submit_now(vec![gone(id)], Ack::Memory, note(&seen, id));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    while logged(store).await.len() < 20 {
        assert!(begun.elapsed() < Duration::from_secs(60), "they were left");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let most = begun.elapsed().as_millis() / LINGER.as_millis() + 1;
    let appends = store.appends.load(Ordering::SeqCst);
    assert!(appends as u128 <= most, "{appends} appends, not {most}");
    assert_eq!(seen.lock().len(), 20);
}

/// A submitter answers itself when nothing is before it, and the log and the answers keep one
/// order.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn memory_acks_on_many_threads_keep_the_logs_order() {
    let Setup { store, journal, .. } = &setup(JournalOptions::default()).await;
    let answered = Arc::new(Mutex::new(Vec::new()));
    let here = Arc::new(AtomicU64::new(0));
    let submitters: Vec<_> = (0..4u32)
        .map(|submitter| {
            let (journal, answered) = (journal.clone(), Arc::clone(&answered));
            let here = Arc::clone(&here);
            tokio::spawn(async move {
                for number in 0..500 {
                    let id = submitter * 1000 + number;
                    let ack = if number % 50 == 49 {
                        Ack::Durable
                    } else {
                        Ack::Memory
                    };
                    let (answered, here) = (Arc::clone(&answered), Arc::clone(&here));
                    let answer = move |outcome: Result<LogSeq, JournalError>| {
                        outcome.unwrap();
                        answered.lock().push(gone(id));
                        if std::thread::current().name() != Some("kvm-journal") {
                            here.fetch_add(1, Ordering::SeqCst);
                        }
                    };
                    journal.submit(vec![gone(id)], ack, answer).await.unwrap();
                }
            })
        })
        .collect();
    for submitter in submitters {
        submitter.await.unwrap();
    }
    journal.flush().await.unwrap();
    let logged = logged(store).await;
    assert_eq!(*answered.lock(), logged);
    // The records of one submitter keep their order: none overtakes a queued one.
    for submitter in 0..4u32 {
        let sent: Vec<Record> = (0..500)
            .map(|number| gone(submitter * 1000 + number))
            .collect();
        let own: Vec<Record> = logged
            .iter()
            .filter(|r| sent.contains(r))
            .cloned()
            .collect();
        assert_eq!(own, sent);
    }
    assert!(
        here.load(Ordering::SeqCst) > 0,
        "all were answered by the journal"
    );
}

#[tokio::test]
async fn a_deposed_leader_is_told_so() {
    let Setup {
        store,
        journal,
        epoch,
        _directory,
    } = setup(JournalOptions::default()).await;
    store.begin_epoch(Epoch(epoch.0 + 1)).await.unwrap();
    let seen = Seen::default();
    journal.submit_now(vec![gone(0)], Ack::Durable, note(&seen, 0));
    assert_eq!(journal.flush().await.unwrap_err().code(), Code::NotLeader);
    let outcome = seen.lock().pop().unwrap().1;
    let error = outcome.unwrap_err();
    assert_eq!(error.code(), Code::NotLeader);
    assert!(!error.is_outcome_unknown());
}

#[tokio::test]
async fn submit_waits_for_room_and_gives_up_cleanly() {
    let Setup {
        store,
        journal,
        _directory,
        ..
    } = setup(JournalOptions {
        queue_bytes: ByteSize::b(size_of::<Record>() as u64),
        ..JournalOptions::default()
    })
    .await;
    let seen = Seen::default();
    let shut = store.gate.lock().await;
    journal
        .submit(vec![gone(0)], Ack::Durable, note(&seen, 0))
        .await
        .unwrap();
    in_append(&store, 1).await;
    let waiting = journal.submit(vec![gone(1)], Ack::Durable, note(&seen, 1));
    tokio::time::timeout(Duration::from_millis(50), waiting)
        .await
        .unwrap_err();
    {
        let mut seen = seen.lock();
        let (id, outcome) = seen.pop().unwrap();
        assert_eq!(id, 1);
        assert!(
            matches!(outcome, Err(JournalError::Abandoned)),
            "{outcome:?}"
        );
    }
    // A submission that cannot wait is taken in any case.
    journal.submit_now(vec![gone(2)], Ack::Durable, note(&seen, 2));
    drop(shut);
    journal
        .submit(vec![gone(3)], Ack::Durable, note(&seen, 3))
        .await
        .unwrap();
    journal.flush().await.unwrap();
    assert_eq!(logged(&store).await, [gone(0), gone(2), gone(3)]);
}

#[tokio::test]
async fn close_writes_what_is_queued_and_refuses_what_comes_later() {
    let Setup {
        store,
        journal,
        _directory,
        ..
    } = setup(JournalOptions::default()).await;
    let seen = Seen::default();
    for id in 0..100 {
        journal.submit_now(vec![gone(id)], Ack::Durable, note(&seen, id));
    }
    journal.close().await;
    assert!(seen.lock().iter().all(|(_, outcome)| outcome.is_ok()));
    assert_eq!(logged(&store).await.len(), 100);
    journal.submit_now(vec![gone(100)], Ack::Durable, note(&seen, 100));
    let last = seen.lock().pop().unwrap();
    assert!(
        matches!(last, (100, Err(JournalError::Abandoned))),
        "{last:?}"
    );
    assert!(journal.flush().await.is_err());
    journal.close().await;
}

#[tokio::test]
async fn dropping_the_last_handle_writes_what_is_queued() {
    let Setup {
        store,
        journal,
        _directory,
        ..
    } = setup(JournalOptions::default()).await;
    let (done, durable) = oneshot::channel();
    journal.submit_now(vec![gone(7)], Ack::Durable, |outcome| {
        let _waiting = done.send(outcome.is_ok());
    });
    drop(journal);
    assert!(durable.await.unwrap());
    assert_eq!(logged(&store).await, [gone(7)]);
}

#[tokio::test]
async fn a_fault_in_a_callback_ends_the_journal_and_nobody_waits_for_it() {
    let Setup {
        store,
        journal,
        _directory,
        ..
    } = setup(JournalOptions::default()).await;
    let seen = Seen::default();
    let shut = store.gate.lock().await;
    journal.submit_now(vec![gone(0)], Ack::Durable, |_| panic!("a fault"));
    journal.submit_now(vec![gone(1)], Ack::Durable, note(&seen, 1));
    drop(shut);
    assert!(journal.flush().await.is_err());
    journal.close().await;
    assert!(matches!(journal.healthy(), Err(JournalError::Died)));
    let (_, outcome) = seen.lock().pop().unwrap();
    assert!(outcome.is_err());
    assert!(
        journal
            .submit(vec![gone(2)], Ack::Durable, |_| ())
            .await
            .is_err()
    );
}

impl Target for Nothing {
    fn shard_of(&self, _: NamespaceId, _: &Key) -> ShardIndex {
        ShardIndex(0)
    }
    fn forget(&mut self, _: ShardIndex) {}
    fn snapshot(&mut self, _: ShardIndex, _: Record) {}
    fn logged(&mut self, _: LogSeq, _: Record) -> Result<(), RecoveryError> {
        Ok(())
    }
}

#[tokio::test]
async fn a_journal_goes_on_where_the_log_ended() {
    let Setup {
        store,
        journal,
        _directory,
        ..
    } = setup(JournalOptions::default()).await;
    journal.submit_now(vec![gone(1)], Ack::Durable, |_| ());
    journal.close().await;
    let recovered = recover(&*store, 1, &mut Nothing).await.unwrap();
    let epoch = store.begin_epoch(Epoch(0)).await.unwrap();
    let store: Arc<dyn MetadataStore> = store;
    let options = JournalOptions::default();
    let journal =
        Journal::start(store, epoch, &recovered.state, Arc::new(Nothing), options).unwrap();
    assert_eq!(journal.flush().await.unwrap(), LogSeq(1));
    journal.submit_now(vec![gone(2)], Ack::Durable, |_| ());
    assert_eq!(journal.flush().await.unwrap(), LogSeq(2));
}

#[tokio::test]
async fn a_full_store_refuses_unanswered_records_and_keeps_past_events() {
    let setup = setup(JournalOptions::default()).await;
    let (store, journal) = (&setup.store, &setup.journal);
    store.full.store(true, Ordering::SeqCst);
    let (done, kept) = oneshot::channel();
    journal.insist(vec![gone(1)], Ack::Durable, |outcome| {
        let _left = done.send(outcome);
    });
    let submit = async |id, ack| {
        let (done, outcome) = oneshot::channel();
        let told = |durable| {
            let _left = done.send(durable);
        };
        let _told = journal.submit(vec![gone(id)], ack, told).await;
        outcome.await.unwrap()
    };
    for (id, ack) in [(2, Ack::Durable), (3, Ack::Durable), (4, Ack::Memory)] {
        let refused = submit(id, ack).await.unwrap_err();
        assert_eq!(refused.code(), Code::StoreFull, "{refused}");
        assert!(!refused.is_outcome_unknown());
        assert!(
            refused
                .told()
                .starts_with("the data directory /data is full"),
            "{refused}"
        );
    }
    // The journal continues, and reports that it takes nothing now.
    journal.healthy().unwrap();
    assert_eq!(journal.has_room().unwrap_err().code(), Code::StoreFull);
    assert_eq!(logged(store).await, []);
    store.full.store(false, Ordering::SeqCst);
    let first = tokio::time::timeout(Duration::from_secs(5), kept).await;
    assert_eq!(first.unwrap().unwrap().unwrap(), LogSeq(1));
    journal.has_room().unwrap();
    assert_eq!(submit(5, Ack::Durable).await.unwrap(), LogSeq(2));
    assert_eq!(logged(store).await, [gone(1), gone(5)]);
}

#[tokio::test]
async fn records_answered_from_memory_are_kept_until_there_is_room() {
    let setup = setup(JournalOptions::default()).await;
    let (store, journal) = (&setup.store, &setup.journal);
    store.full.store(true, Ordering::SeqCst);
    for id in 1..=3 {
        let (done, outcome) = oneshot::channel();
        let told = |durable| {
            let _left = done.send(durable);
        };
        journal
            .submit(vec![gone(id)], Ack::Memory, told)
            .await
            .unwrap();
        outcome.await.unwrap().unwrap();
    }
    let limit = Instant::now() + Duration::from_secs(10);
    while journal.has_room().is_ok() {
        assert!(Instant::now() < limit, "the append was not tried");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    store.full.store(false, Ordering::SeqCst);
    while journal.has_room().is_err() {
        assert!(Instant::now() < limit, "room was not noticed");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    journal.close().await;
    assert_eq!(logged(store).await, [gone(1), gone(2), gone(3)]);
}

#[test]
fn on_a_lent_thread_a_durable_submission_is_appended_there_and_never_out_of_turn() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let setup = runtime.block_on(setup(JournalOptions::default()));
    let (store, journal) = (&setup.store, &setup.journal);
    let submit = |id| {
        let (done, outcome) = std::sync::mpsc::channel();
        let told = move |durable| {
            let name = std::thread::current().name().map(str::to_owned);
            let _left = done.send((durable, name));
        };
        let mut submitting = std::pin::pin!(journal.submit(vec![gone(id)], Ack::Durable, told));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let polled = lend_thread(|| submitting.as_mut().poll(&mut context));
        assert!(polled.is_ready());
        outcome
    };
    let own = std::thread::current().name().map(str::to_owned);
    let (durable, thread) = submit(1).try_recv().unwrap();
    assert_eq!((durable.unwrap(), thread), (LogSeq(1), own));
    assert_eq!(runtime.block_on(logged(store)), [gone(1)]);
    // Behind another submission it waits for its turn.
    let gate = runtime.block_on(store.gate.lock());
    journal.submit_now(vec![gone(2)], Ack::Durable, |_| {});
    let limit = Instant::now() + Duration::from_secs(10);
    while store.appends.load(Ordering::SeqCst) < 2 {
        assert!(Instant::now() < limit, "the append is not begun");
        std::thread::sleep(Duration::from_millis(1));
    }
    let third = submit(3);
    assert!(third.try_recv().is_err());
    drop(gate);
    let (durable, thread) = third.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(durable.unwrap(), LogSeq(3));
    assert_eq!(thread.as_deref(), Some("kvm-journal"));
    assert_eq!(runtime.block_on(logged(store)), [gone(1), gone(2), gone(3)]);
}
