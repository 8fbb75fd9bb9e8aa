//! Submissions become groups.

use super::*;

#[tokio::test]
async fn waiting_submissions_form_one_group_and_callbacks_keep_the_logs_order() {
    let (store, journal, _directory) = usual().await;
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
