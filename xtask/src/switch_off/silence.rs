//! What the silence of nodes means when it may be the master's own.

use super::Mechanism;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism {
        invariant: 6,
        what: "the nodes of a master that was cut off get time to return",
        file: "master/src/pool/silence.rs",
        on: "nodes.iter().filter(excuse).count()",
        off: "nodes.iter().filter(|_| false).filter(excuse).count()",
        package: "kvpool-master",
        test: "the_nodes_of_a_master_that_was_cut_off_get_time_to_return_once",
    },
    Mechanism {
        invariant: 6,
        what: "a node gets time to return once until it is heard",
        file: "master/src/membership.rs",
        on: "session.silence = Silence::Excused;",
        off: "",
        package: "kvpool-master",
        test: "the_nodes_of_a_master_that_was_cut_off_get_time_to_return_once",
    },
    Mechanism {
        invariant: 6,
        what: "a node that was silent before its master was cut off gets no time to return",
        file: "master/src/membership.rs",
        on: "since.since(session.last_heard) < suspect_after",
        off: "since >= session.last_heard",
        package: "kvpool-master",
        test: "a_node_that_was_lost_before_its_master_was_cut_off_stays_suspect",
    },
    Mechanism {
        invariant: 6,
        what: "a node whose session ended before its silence gets no time to return",
        file: "master/src/membership.rs",
        on: "has_changed && session.outbox.is_some() &&",
        off: "has_changed &&",
        package: "kvpool-master",
        test: "a_node_that_was_lost_before_its_master_was_cut_off_stays_suspect",
    },
    Mechanism {
        invariant: 6,
        what: "a node has time for a new session from the end of its last one",
        file: "master/src/membership.rs",
        on: "now.since(session.broken.max(session.last_heard))",
        off: "silent",
        package: "kvpool-master",
        test: "a_node_gets_time_for_a_new_session_from_the_end_of_its_last_one",
    },
    Mechanism {
        invariant: 6,
        what: "a master that hears nobody drops no node",
        file: "master/src/pool/caretaker.rs",
        on: "self.hears_nobody() && members.count() > 1",
        off: "false",
        package: "kvpool-master",
        test: "a_master_that_hears_nobody_drops_no_node",
    },
];
