//! Snapshots beside the log.

use super::*;

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

/// Snapshots are due after a few groups.
fn short_log() -> JournalOptions {
    JournalOptions {
        log_bytes: ByteSize::b(400),
        log_ratio: 0,
        ..JournalOptions::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_holds_the_log_through_its_position_though_memory_acks_run_ahead() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap());
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let source = Arc::new(Counted(AtomicU64::new(0)));
    let journal = Journal::start(
        Arc::clone(&store) as Arc<dyn MetadataStore>,
        epoch,
        &LogState::default(),
        Arc::clone(&source) as Arc<dyn SnapshotSource>,
        short_log(),
    )
    .unwrap();
    let mut checked = 0;
    for id in 0..100_000 {
        // On a busy machine snapshots come late, and few can be compared.
        if id >= 3000 && checked > 3 {
            break;
        }
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

/// The pool was dropped while its first records were on their way.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_that_is_gone_is_no_snapshot() {
    for is_there in [true, false] {
        let Setup {
            _directory,
            store,
            journal,
            ..
        } = setup_of(short_log(), Nothing { is_there }).await;
        for id in 0..200 {
            let logged = journal.submit(vec![gone(id)], Ack::Durable, |_| {});
            logged.await.unwrap();
            journal.flush().await.unwrap();
        }
        journal.close().await;
        let has_snapshots = !store.snapshots().await.unwrap().is_empty();
        let is_cut = store.log_span().await.unwrap().cut > LogSeq(0);
        assert_eq!((has_snapshots, is_cut), (is_there, is_there));
    }
}
