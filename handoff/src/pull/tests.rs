//! Rows P3, P4, P6, P8 and P10, and random orders of events.

use super::*;
use crate::Moment;
use crate::pins::{PinOptions, PinOutcome};
use crate::room::PollState;
use kvpool_types::Incarnation;
use proptest::prelude::*;

const D: Incarnation = Incarnation(9);

fn at(seconds: u64) -> Moment {
    Moment(Duration::from_secs(seconds))
}

fn ready(mode: PullMode, pages: u32) -> PullReady {
    PullReady {
        pull: PullId(1),
        mode,
        pages: (100..100 + pages).collect(),
        sums: (0..pages).map(|page| Checksum(page.into())).collect(),
        ttl: Duration::from_secs(360),
    }
}

fn options(chunk_pages: u32) -> PullOptions {
    PullOptions {
        chunk_pages,
        ..PullOptions::default()
    }
}

fn begin(mode: PullMode, pages: u32, held: &[u32]) -> (PullReceiver, Vec<PullStep>) {
    let mut out = Vec::new();
    let ready = ready(mode, pages);
    let pull = PullReceiver::begin(at(0), &ready, held, options(2), &mut out).unwrap();
    (pull, out)
}

fn step(pull: &mut PullReceiver, event: PullEvent) -> Vec<PullStep> {
    let mut out = Vec::new();
    pull.handle(at(1), event, &mut out);
    out
}

fn done() -> PullStep {
    PullStep::Send(ToPullSender::PullDone { pull: PullId(1) })
}

fn read(chunk: u32, pages: &[u32], buffer: Option<u8>) -> PullStep {
    let pages = pages.to_vec();
    PullStep::Read {
        chunk,
        pages,
        buffer,
    }
}

#[test]
fn p3_an_eager_pull_acks_what_it_holds_reads_the_rest_and_says_done() {
    let (mut pull, out) = begin(PullMode::Eager, 4, &[0]);
    let (id, held) = (PullId(1), vec![0]);
    let ack = PullStep::Send(ToPullSender::Ack { pull: id, held });
    assert_eq!(out, [ack, PullStep::Allocate(3)]);
    let first = step(&mut pull, PullEvent::Allocated(true));
    assert_eq!(first, [read(0, &[1, 2], None)]);
    assert_eq!(pull.poll(), PollState::Transferring);
    assert_eq!(
        step(&mut pull, PullEvent::Read(0, Ok(()))),
        [read(1, &[3], None)]
    );
    assert_eq!(step(&mut pull, PullEvent::Read(1, Ok(()))), [done()]);
    assert_eq!(pull.poll(), PollState::Success);
    assert!(step(&mut pull, PullEvent::Read(1, Ok(()))).is_empty());
    assert!(step(&mut pull, PullEvent::Abort(Code::Draining)).is_empty());
}

#[test]
fn p4_a_proxy_holds_no_page_and_a_chunk_is_read_while_the_last_is_scattered() {
    let (mut pull, _) = begin(PullMode::Delayed, 6, &[]);
    assert_eq!(pull.allocated(), 0);
    assert_eq!(step(&mut pull, PullEvent::Use), [PullStep::Allocate(4)]);
    let zero = step(&mut pull, PullEvent::Allocated(true));
    assert_eq!(zero, [read(0, &[0, 1], Some(0))]);
    let scatter = |chunk, buffer| PullStep::Scatter { chunk, buffer };
    let one = step(&mut pull, PullEvent::Read(0, Ok(())));
    assert_eq!(one, [scatter(0, 0), read(1, &[2, 3], Some(1))]);
    assert!(
        step(&mut pull, PullEvent::Read(1, Ok(()))).is_empty(),
        "one scatter at a time"
    );
    let two = step(&mut pull, PullEvent::Scattered(0));
    assert_eq!(two, [scatter(1, 1), read(2, &[4, 5], Some(0))]);
    assert!(step(&mut pull, PullEvent::Scattered(1)).is_empty());
    assert_eq!(step(&mut pull, PullEvent::Read(2, Ok(()))), [scatter(2, 0)]);
    let last = step(&mut pull, PullEvent::Scattered(2));
    assert_eq!(
        last,
        [PullStep::ReleasePages, done()],
        "done follows the last scatter"
    );
    assert_eq!(pull.allocated(), 0);
}

#[test]
fn p10_a_failed_allocation_is_reported_and_leaves_nothing() {
    let (mut pull, _) = begin(PullMode::Eager, 4, &[]);
    let busy = PullStep::Send(ToPullSender::Busy { pull: PullId(1) });
    assert_eq!(step(&mut pull, PullEvent::Allocated(false)), [busy]);
    assert_eq!((pull.allocated(), pull.failure()), (0, Some(Code::Full)));
}

#[test]
fn a_wrong_page_fails_the_pull_and_pages_go_back_after_the_last_read() {
    let (mut pull, _) = begin(PullMode::Delayed, 6, &[]);
    step(&mut pull, PullEvent::Use);
    step(&mut pull, PullEvent::Allocated(true));
    step(&mut pull, PullEvent::Read(0, Ok(())));
    let wrong = PullEvent::Read(1, Err(Code::ChecksumMismatch));
    assert_eq!(step(&mut pull, wrong), [PullStep::CancelReads]);
    assert_eq!(pull.poll(), PollState::Failed);
    let ended = step(&mut pull, PullEvent::Scattered(0));
    assert_eq!(ended, [PullStep::ReleasePages, done()]);
}

#[test]
fn an_unused_proxy_ends_before_its_pages_do() {
    let (mut pull, _) = begin(PullMode::Delayed, 6, &[]);
    assert_eq!(pull.next_wake(), Some(at(355)));
    let mut out = Vec::new();
    pull.handle(at(355), PullEvent::Tick, &mut out);
    assert_eq!(out, [done()]);
    assert_eq!(pull.failure(), Some(Code::DeadlineExceeded));
}

#[test]
fn a_pull_whose_pages_are_all_held_reads_nothing() {
    let (pull, out) = begin(PullMode::Eager, 2, &[0, 1]);
    assert_eq!((out, pull.poll()), (vec![done()], PollState::Success));
}

fn release(of: &[PullAction]) -> Vec<u32> {
    let pages = of.iter().filter_map(|action| match action {
        PullAction::Release { pages, .. } => Some(pages.clone()),
        PullAction::Send { .. } => None,
    });
    pages.flatten().collect()
}

#[test]
fn p3_prefill_frees_what_is_held_at_once_and_the_rest_with_done() {
    let mut desk = PullDesk::new(100, PinOptions::default());
    let mut out = Vec::new();
    let offered = desk.offer(at(0), D, ready(PullMode::Eager, 5), &mut out);
    assert_eq!(offered, Ok(PinOutcome::Pinned));
    assert_eq!((out.len(), desk.pins().pinned()), (1, 5));
    let pull = PullId(1);
    let held = vec![0, 1, 1, 77];
    out.clear();
    desk.take(at(1), D, ToPullSender::Ack { pull, held }, &mut out);
    assert_eq!((release(&out), desk.pins().pinned()), (vec![0, 1], 3));
    out.clear();
    desk.take(
        at(1),
        Incarnation(8),
        ToPullSender::PullDone { pull },
        &mut out,
    );
    assert!(out.is_empty(), "another process cannot end the pull");
    desk.take(at(1), D, ToPullSender::PullDone { pull }, &mut out);
    assert_eq!((release(&out), desk.pins().pinned()), (vec![2, 3, 4], 0));
    out.clear();
    desk.take(at(1), D, ToPullSender::PullDone { pull }, &mut out);
    assert!(out.is_empty(), "a repeated done frees nothing");
}

#[test]
fn p6_busy_frees_the_pages_and_opens_the_breaker() {
    let mut desk = PullDesk::new(100, PinOptions::default());
    let (mut out, pull) = (Vec::new(), PullId(1));
    desk.offer(at(0), D, ready(PullMode::Eager, 3), &mut out)
        .unwrap();
    desk.take(at(1), D, ToPullSender::Busy { pull }, &mut out);
    assert_eq!(release(&out), [0, 1, 2]);
    let offer =
        |desk: &mut PullDesk, now| desk.offer(now, D, ready(PullMode::Eager, 3), &mut Vec::new());
    assert_eq!(offer(&mut desk, at(2)), Ok(PinOutcome::BackOff(at(3))));
    assert_eq!(offer(&mut desk, at(3)), Ok(PinOutcome::Pinned));
}

#[test]
fn p7_a_pull_without_done_is_swept_and_its_receiver_told() {
    let mut desk = PullDesk::new(100, PinOptions::default());
    let mut out = Vec::new();
    desk.offer(at(0), D, ready(PullMode::Eager, 3), &mut out)
        .unwrap();
    out.clear();
    desk.sweep(at(359), &mut out);
    assert!(out.is_empty());
    desk.sweep(at(360), &mut out);
    let (pull, code) = (PullId(1), Code::DeadlineExceeded);
    let message = ToPullReceiver::Abort { pull, code };
    assert_eq!(out.first(), Some(&PullAction::Send { to: D, message }));
    assert_eq!((release(&out), desk.pins().pinned()), (vec![0, 1, 2], 0));
}

#[test]
fn a_notice_that_makes_no_sense_is_refused() {
    let mut odd = ready(PullMode::Eager, 3);
    odd.sums.pop();
    let refused = PullReceiver::begin(at(0), &odd, &[], options(2), &mut Vec::new());
    assert_eq!(refused.err(), Some(Code::Malformed));
    let mut desk = PullDesk::new(100, PinOptions::default());
    assert_eq!(
        desk.offer(at(0), D, odd, &mut Vec::new()),
        Err(Code::InvalidArgument)
    );
    assert_eq!(desk.pins().pinned(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever the order of events, done is said exactly once, after every read and scatter, and
    /// allocated pages are given back exactly once or stay with a success.
    #[test]
    fn done_is_said_exactly_once(
        delayed in any::<bool>(), pages in 1u32..9, held in 0u32..9, fails in 0usize..40,
        order in prop::collection::vec(any::<prop::sample::Index>(), 60),
    ) {
        let mode = if delayed { PullMode::Delayed } else { PullMode::Eager };
        let held: Vec<u32> = (0..held.min(pages)).collect();
        let (mut pull, mut pending) = begin(mode, pages, &held);
        let (mut dones, mut releases, mut allocations, mut under_way) = (0, 0, 0, 0);
        let mut read_pages = Vec::new();
        let mut used = false;
        for (number, pick) in order.into_iter().enumerate() {
            if pending.is_empty() {
                if !used && delayed {
                    used = true;
                    pending = step(&mut pull, PullEvent::Use);
                } else {
                    break;
                }
            }
            if pending.is_empty() {
                continue;
            }
            let outcome = if number == fails { Err(Code::Unreachable) } else { Ok(()) };
            let event = match pending.remove(pick.index(pending.len())) {
                PullStep::Send(ToPullSender::PullDone { .. }) => {
                    dones += 1;
                    prop_assert_eq!(under_way, 0, "done while pages are touched");
                    continue;
                }
                PullStep::Send(_) | PullStep::CancelReads => continue,
                PullStep::ReleasePages => {
                    releases += 1;
                    continue;
                }
                PullStep::Allocate(_) => {
                    allocations += u32::from(outcome.is_ok());
                    PullEvent::Allocated(outcome.is_ok())
                }
                PullStep::Read { chunk, pages, .. } => {
                    if outcome.is_ok() {
                        read_pages.extend(pages);
                    }
                    PullEvent::Read(chunk, outcome)
                }
                PullStep::Scatter { chunk, .. } => PullEvent::Scattered(chunk),
            };
            pending.extend(step(&mut pull, event));
            let moves = |step: &&PullStep| {
                matches!(step, PullStep::Read { .. } | PullStep::Scatter { .. })
            };
            under_way = pending.iter().filter(moves).count();
        }
        prop_assert!(pull.is_over() && pending.is_empty());
        let was_busy = pull.failure() == Some(Code::Full);
        prop_assert_eq!(dones, u32::from(!was_busy));
        let keeps = pull.poll() == PollState::Success && !delayed;
        prop_assert_eq!(releases, if keeps { 0 } else { allocations });
        if pull.poll() == PollState::Success {
            let wanted: Vec<u32> = (0..pages).filter(|page| !held.contains(page)).collect();
            prop_assert_eq!(read_pages, wanted);
        }
    }
}
