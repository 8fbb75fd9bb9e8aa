//! A store without room.

use super::*;

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

/// The rest is small, and the remaining space of the disk may take it.
#[tokio::test]
async fn a_journal_that_ends_asks_a_store_without_room_once_more() {
    let setup = setup(JournalOptions::default()).await;
    let (store, journal) = (&setup.store, &setup.journal);
    store.full.store(true, Ordering::SeqCst);
    store.promises_none.store(true, Ordering::SeqCst);
    journal.insist(vec![gone(1)], Ack::Durable, |_| {});
    while journal.has_room().is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    store.full.store(false, Ordering::SeqCst);
    journal.close().await;
    assert_eq!(logged(store).await, [gone(1)]);
}
