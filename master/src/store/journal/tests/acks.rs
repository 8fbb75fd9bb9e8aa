//! Which submissions are answered from memory, and which after the append.

use super::*;

#[tokio::test]
async fn memory_acks_come_at_once_but_never_before_a_durable_one_in_front() {
    let (store, journal, _directory) = usual().await;
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

/// A submitter answers itself if nothing is before its submission. The log and the answers must
/// keep one order.
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

/// The callback takes the locks that its submitter held.
#[tokio::test]
async fn records_submitted_under_a_lock_are_answered_behind_it_and_in_order() {
    let Setup { store, journal, .. } = &setup(JournalOptions::default()).await;
    let (seen, lock) = (Seen::default(), Arc::new(Mutex::new(())));
    let here = Arc::new(AtomicU64::new(0));
    let submit = |id: u32| {
        let (free, held) = (Arc::clone(&lock), Arc::clone(&lock));
        let (note, here) = (note(&seen, id), Arc::clone(&here));
        journal.submit_under(|submitter| {
            let _held = held.lock();
            submitter.submit_now(vec![gone(id)], move |outcome| {
                assert!(free.try_lock().is_some(), "its submitter holds the lock");
                if std::thread::current().name() != Some("kvm-journal") {
                    here.fetch_add(1, Ordering::SeqCst);
                }
                note(outcome);
            });
        });
    };
    submit(0);
    assert_eq!(seen.lock().len(), 1, "nothing was before it");
    assert_eq!(here.load(Ordering::SeqCst), 1, "another thread was woken");
    let shut = store.gate.lock().await;
    journal.submit_now(vec![gone(1)], Ack::Durable, note(&seen, 1));
    in_append(store, 1).await;
    submit(2);
    assert_eq!(
        seen.lock().len(),
        1,
        "2 waits for 1, which waits for the disk"
    );
    drop(shut);
    journal.flush().await.unwrap();
    let order: Vec<u32> = seen.lock().iter().map(|(id, _)| *id).collect();
    assert_eq!(order, [0, 1, 2]);
    assert_eq!(logged(store).await, [gone(0), gone(1), gone(2)]);
}

/// The end may run on a thread of a runtime, where no runtime may be dropped.
#[tokio::test]
async fn a_submitter_that_uses_the_journal_after_its_end_ends_no_runtime() {
    let Setup { journal, .. } = &setup(JournalOptions::default()).await;
    let used = journal.shared.worker.upgrade().unwrap();
    journal.close().await;
    assert!(journal.shared.worker.upgrade().is_some(), "it is used");
    drop(used);
    assert!(journal.shared.worker.upgrade().is_none());
}

/// Their callbacks may run within the call, under the locks of the submitter.
#[tokio::test]
async fn records_submitted_under_a_lock_are_refused_without_room_and_after_the_end() {
    let Setup { store, journal, .. } = &setup(JournalOptions::default()).await;
    let seen = Seen::default();
    let submit = |id: u32| {
        let note = note(&seen, id);
        journal.submit_under(|submitter| submitter.submit_now(vec![gone(id)], note));
    };
    store.full.store(true, Ordering::SeqCst);
    journal.insist(vec![gone(0)], Ack::Durable, note(&seen, 0));
    let limit = Instant::now() + Duration::from_secs(10);
    while journal.has_room().is_ok() {
        assert!(Instant::now() < limit, "the append was not tried");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    submit(1);
    answered(&seen, 1).await;
    let refused = seen.lock().pop();
    let Some((1, Err(error))) = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(error.code(), Code::StoreFull);
    assert!(!error.is_outcome_unknown());
    store.full.store(false, Ordering::SeqCst);
    answered(&seen, 1).await;
    journal.close().await;
    submit(2);
    let last = seen.lock().pop();
    assert!(
        matches!(last, Some((2, Err(JournalError::Abandoned)))),
        "{last:?}"
    );
    assert_eq!(logged(store).await, [gone(0)]);
}
