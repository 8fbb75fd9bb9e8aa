//! Direct transfer from prefill to decode.

use super::Mechanism;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism {
        invariant: 1,
        what: "a room succeeds when its bytes were compared after the fence",
        file: "handoff/src/room/receiver.rs",
        on: "out.push(ReceiverAction::Verify(all.collect()));",
        off: "out.push(ReceiverAction::Verify(all.take(0).collect()));",
        package: "kvpool-handoff",
        test: "rooms_over_a_faulty_network_keep_every_rule",
    },
    Mechanism {
        invariant: 3,
        what: "a failed room gives its pages back after the fence",
        file: "handoff/src/room/receiver.rs",
        on: "            _ => self.phase = Phase::Closing(failed),",
        off: "            _ => self.end_failed(now, failed, out),",
        package: "kvpool-handoff",
        test: "rooms_over_a_faulty_network_keep_every_rule",
    },
    Mechanism {
        invariant: 3,
        what: "a sender gives its pages back after its writes have ended",
        file: "handoff/src/room/sender.rs",
        on: "        if self.targets.iter().any(Target::writes) {",
        off: "        if self.targets.is_empty() {",
        package: "kvpool-handoff",
        test: "rooms_over_a_faulty_network_keep_every_rule",
    },
    Mechanism {
        invariant: 3,
        what: "a late offer of a room that has ended revives nothing",
        file: "handoff/src/room/tombstones.rs",
        on: "self.outcome(receiver, tag).is_none() && floor",
        off: "self.capacity < usize::MAX || floor",
        package: "kvpool-handoff",
        test: "an_offer_that_was_aborted_revives_nothing",
    },
    Mechanism {
        invariant: 3,
        what: "a pull gives its pages back after its last read",
        file: "handoff/src/pull/receiver.rs",
        on: "        if self.order.is_busy() {\n            return;",
        off: "        if self.order.is_busy() && self.chunk_pages == 0 {\n            return;",
        package: "kvpool-handoff",
        test: "a_wrong_page_fails_the_pull_and_pages_go_back_after_the_last_read",
    },
    Mechanism {
        invariant: 3,
        what: "a room of peer memory is closed when nothing writes into it",
        file: "transport/src/peer/rooms.rs",
        on: "let is_fenced = fence(&drained, &receives, patience);",
        off: "let is_fenced = Arc::ptr_eq(&drained, &drained) || fence(&drained, &receives, patience);",
        package: "kvpool-transport",
        test: "after_a_room_is_closed_a_stalled_writer_changes_nothing",
    },
];
