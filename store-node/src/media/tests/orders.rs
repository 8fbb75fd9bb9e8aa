//! The orders of transfers: which of them begin at once, and in which order the others are taken.

use super::*;

/// The order of a transfer. A load from the medium with number 9 ends where it begins, since no medium has it.
fn ordered(ticket: u64, from: SegmentId, to: SegmentId) -> proto::Transfer {
    let range = |segment: SegmentId| proto::ExtentRange {
        segment: segment.0,
        offset: 0,
        length: LENGTH,
    };
    proto::Transfer {
        ticket,
        from: Some(range(from)),
        to: Some(range(to)),
        ..proto::Transfer::default()
    }
}

#[test]
fn the_session_begins_at_most_64_loads_of_a_message_and_keeps_their_order() {
    let arena = Arena::new(4 * size()).unwrap();
    let mut media = Media::of(Vec::new(), arena, store());
    let incarnation = media.shared.store.snapshot().incarnation;
    let (answers, mut answered) = unbounded_channel();
    let order = |media: &Media, tickets: std::ops::Range<u64>| {
        let transfers = tickets.map(|ticket| ordered(ticket, on_medium(9), MEMORY));
        let transfers = transfers.collect();
        media.transfer(
            incarnation,
            Epoch(1),
            proto::Transfers { transfers },
            &answers,
        );
    };
    let ticket = |message| match message {
        ToMaster::TransfersDone(done) => done.transfers[0].ticket,
        other => panic!("{other:?} where the end of a load belongs"),
    };
    let mut ended = || {
        let messages = std::iter::from_fn(|| answered.try_recv().ok());
        messages.map(ticket).collect::<Vec<u64>>()
    };
    order(&media, 0..200);
    assert_eq!(ended(), (0..64).collect::<Vec<u64>>());
    order(&media, 200..201);
    assert_eq!(ended(), [0; 0], "it waits behind the others");
    media.start_workers().unwrap();
    let until = soon();
    let mut rest = Vec::new();
    while rest.len() < 137 && Instant::now() < until {
        rest.append(&mut ended());
        std::thread::sleep(Duration::from_millis(1));
    }
    rest.sort_unstable();
    assert_eq!(rest, (64..201).collect::<Vec<u64>>());
    order(&media, 201..202);
    assert_eq!(ended(), [201], "no load waits any more");
}

fn queued(from: SegmentId, to: SegmentId, answers: &Answers) -> Box<TransferOrder> {
    Box::new(TransferOrder {
        transfer: ordered(1, from, to),
        incarnation: Incarnation(1),
        epoch: Epoch(1),
        answers: answers.clone(),
        until: tokio::time::Instant::now(),
    })
}

#[test]
fn stores_that_wait_do_not_delay_loads() {
    let (answers, _answered) = unbounded_channel();
    let mut work = Work::default();
    for _ in 0..100_000 {
        work.add(Job::Transfer(queued(MEMORY, on_medium(1), &answers)));
    }
    let begun = Instant::now();
    for _ in 0..4_000 {
        work.add(Job::Transfer(queued(on_medium(1), MEMORY, &answers)));
        let taken = work.take(Duty::Serve);
        assert!(matches!(taken, Some(Job::Transfer(order)) if order.is_load()));
    }
    let took = begun.elapsed();
    assert!(took < Duration::from_millis(500), "{took:?}");
    assert!(!work.has_waiting_loads());
    let taken = work.take(Duty::Copy);
    assert!(matches!(taken, Some(Job::Transfer(order)) if order.is_store()));
}

#[test]
fn an_offer_waits_for_all_transfers_and_a_load_without_memory_goes_before_others() {
    let (answers, _answered) = unbounded_channel();
    let load = || queued(on_medium(1), MEMORY, &answers);
    let mut work = Work::default();
    work.add(Job::Offer(CLUSTER, answers.clone()));
    work.add(Job::OfferAgain);
    work.add(Job::Transfer(load()));
    work.without_memory.push_back(load());
    work.in_flight = 2;
    // No transfer has ended since the load found no memory.
    let taken = work.take(Duty::Serve);
    assert!(matches!(taken, Some(Job::Transfer(_))), "{taken:?}");
    assert!(work.take(Duty::Serve).is_none());
    work.add(Job::Transfer(load()));
    work.ended += 1;
    let taken = work.take(Duty::Serve);
    assert!(matches!(taken, Some(Job::Again(_))), "{taken:?}");
    let taken = work.take(Duty::Attach);
    assert!(matches!(taken, Some(Job::OfferAgain)), "{taken:?}");
    assert!(work.take(Duty::Attach).is_none());
    work.in_flight = 0;
    let taken = work.take(Duty::Attach);
    assert!(matches!(taken, Some(Job::Offer(..))), "{taken:?}");
}
