//! Rows P4 and P7: prefill's pages are given back once, at `Done` or at the deadline.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A sender, and the transport that performs its actions.
struct Prefill {
    room: RoomSender,
    now: Moment,
    under_way: BTreeSet<u32>,
    ends_writes: bool,
    releases: u32,
}

impl Prefill {
    fn open(deadline: Moment) -> Self {
        let plan = RoomSenderPlan {
            deadline,
            ..sender_plan()
        };
        Self {
            room: RoomSender::open(at(0), plan),
            now: at(1),
            under_way: BTreeSet::new(),
            ends_writes: false,
            releases: 0,
        }
    }

    /// Gives the room an event, and returns the messages of the room.
    fn happens(&mut self, event: SenderEvent) -> Vec<ToReceiver> {
        let (mut out, mut said) = (Vec::new(), Vec::new());
        self.room.handle(self.now, event, &mut out);
        for action in out {
            match action {
                SenderAction::Send { message, .. } => said.push(message),
                SenderAction::Write { id, .. } => assert!(self.under_way.insert(id)),
                SenderAction::CancelWrites => self.ends_writes = true,
                SenderAction::ReleasePages => {
                    assert!(self.under_way.is_empty(), "a write reads the pages");
                    self.releases += 1;
                }
            }
        }
        if self.under_way.is_empty() && std::mem::take(&mut self.ends_writes) {
            said.extend(self.happens(SenderEvent::WritesEnded));
        }
        said
    }

    fn hears(&mut self, message: ToSender) -> Vec<ToReceiver> {
        self.happens(SenderEvent::Message {
            from: 0,
            session: D,
            message,
        })
    }

    /// The oldest write under way ends.
    fn ends(&mut self, outcome: Result<Checksum, Code>) -> Vec<ToReceiver> {
        match self.under_way.pop_first() {
            Some(id) => self.happens(SenderEvent::Written { to: 0, id, outcome }),
            None => Vec::new(),
        }
    }

    /// A sender whose bytes are all in place, after its `Done`.
    fn with_all_in_place(deadline: Moment) -> Self {
        let mut prefill = Self::open(deadline);
        prefill.hears(ToSender::Offer(offer()));
        prefill.happens(SenderEvent::Produced(rectangle()));
        prefill.happens(SenderEvent::ProducedAll);
        let said = prefill.ends(Ok(Checksum(1)));
        assert!(matches!(said.last(), Some(ToReceiver::Done { .. })));
        assert_eq!(prefill.releases, 0);
        prefill
    }
}

#[test]
fn p4_done_gives_the_pages_back_once_however_often_it_is_said() {
    let mut prefill = Prefill::with_all_in_place(at(60_000));
    for _ in 0..3 {
        prefill.hears(ToSender::Complete { tag: TAG });
    }
    let code = Code::Draining;
    prefill.hears(ToSender::Abort { tag: TAG, code });
    prefill.happens(SenderEvent::PeerLost { from: 0 });
    assert_eq!(prefill.room.poll(), PollState::Success);
    assert_eq!(prefill.releases, 1);
}

#[test]
fn p7_a_receiver_that_never_says_done_is_told_at_the_deadline_and_the_pages_are_free() {
    let mut prefill = Prefill::with_all_in_place(at(20_000));
    prefill.now = at(19_999);
    prefill.happens(SenderEvent::Tick);
    assert_eq!(prefill.releases, 0);
    prefill.now = at(20_000);
    let said = prefill.happens(SenderEvent::Tick);
    let code = Code::DeadlineExceeded;
    assert!(said.contains(&ToReceiver::Abort { tag: TAG, code }));
    assert_eq!(prefill.releases, 1);
    prefill.hears(ToSender::Complete { tag: TAG });
    assert_eq!(prefill.releases, 1, "a late done frees nothing");
    assert_eq!(prefill.room.failure(), Some(code));
}

proptest! {
    /// The rule holds for every order of events and every repetition.
    #[test]
    fn p4_the_pages_are_given_back_exactly_once_after_the_last_write(
        steps in prop::collection::vec((0u8..12, 1u64..9000), 1..60),
    ) {
        let mut prefill = Prefill::open(at(60_000));
        let mut page = 0;
        for (step, pause) in steps {
            let code = Code::Unreachable;
            match step {
                0 => drop(prefill.hears(ToSender::Offer(offer()))),
                1 if page < 4 => {
                    let (pages, layers) = (page..page + 1, 0..2);
                    page += 1;
                    let rectangle = PageRectangle { pages, layers };
                    prefill.happens(SenderEvent::Produced(rectangle));
                }
                2 if page == 4 => drop(prefill.happens(SenderEvent::ProducedAll)),
                3 | 4 => drop(prefill.ends(Ok(Checksum(1)))),
                5 => drop(prefill.ends(Err(code))),
                6 | 7 => drop(prefill.hears(ToSender::Complete { tag: TAG })),
                8 if pause < 900 => drop(prefill.hears(ToSender::Abort { tag: TAG, code })),
                9 if pause < 900 => drop(prefill.happens(SenderEvent::PeerLost { from: 0 })),
                10 => drop(prefill.happens(SenderEvent::LinkBroken { from: 0 })),
                _ => {
                    prefill.now = prefill.now + Duration::from_millis(pause);
                    prefill.happens(SenderEvent::Tick);
                }
            }
            prop_assert!(prefill.releases <= 1);
        }
        prefill.happens(SenderEvent::Abort { code: Code::Draining });
        while !prefill.under_way.is_empty() {
            prefill.ends(Err(Code::Unreachable));
        }
        prop_assert_eq!(prefill.releases, 1);
        prop_assert!(!prefill.room.holds_pages());
    }
}
