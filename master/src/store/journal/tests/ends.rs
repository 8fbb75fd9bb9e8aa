//! Lost answers, deposed leaders, faults and the end of a journal.

use super::*;

#[tokio::test]
async fn after_a_lost_answer_nothing_is_acknowledged_or_appended() {
    let (store, journal, _directory) = usual().await;
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
    let (store, journal, _directory) = usual().await;
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
    let (store, journal, _directory) = usual().await;
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
    let (store, journal, _directory) = usual().await;
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
    let (store, journal, _directory) = usual().await;
    journal.submit_now(vec![gone(1)], Ack::Durable, |_| ());
    journal.close().await;
    let recovered = recover(&*store, 1, &mut Nothing { is_there: true })
        .await
        .unwrap();
    let epoch = store.begin_epoch(Epoch(0)).await.unwrap();
    let store: Arc<dyn MetadataStore> = store;
    let options = JournalOptions::default();
    let journal = Journal::start(
        store,
        epoch,
        &recovered.state,
        Arc::new(Nothing { is_there: true }),
        options,
    )
    .unwrap();
    assert_eq!(journal.flush().await.unwrap(), LogSeq(1));
    journal.submit_now(vec![gone(2)], Ack::Durable, |_| ());
    assert_eq!(journal.flush().await.unwrap(), LogSeq(2));
}
