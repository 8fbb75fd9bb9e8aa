//! Drains of nodes, and the copies of blocks to other nodes that they order.

use super::Mechanism;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism {
        invariant: 6,
        what: "the end of a pull wakes a worker that waits with orders in the queue",
        file: "store-node/src/pulls.rs",
        on: "if has_orders {",
        off: "if has_orders && false {",
        package: "kvpool-store-node",
        test: "the_end_of_a_pull_wakes_a_worker_that_waits_with_orders_in_the_queue",
    },
    Mechanism {
        invariant: 5,
        what: "a block that was removed before its node left has not failed",
        file: "master/src/pool/replicas/tasks.rs",
        on: "let is_swept = progress.swept.contains(&version);",
        off: "let is_swept = progress.swept.contains(&version) || progress.has_lost_node;",
        package: "kvpool-master",
        test: "a_block_that_was_removed_before_its_node_left_has_not_failed",
    },
    Mechanism {
        invariant: 8,
        what: "a moved block that waits for one medium lets those for another go first",
        file: "master/src/pool/tiering/evacuate.rs",
        on: "Turn::NotNow | Turn::Later => held += 1,",
        off: "Turn::NotNow | Turn::Later => break,",
        package: "kvpool-master",
        test: "a_moved_block_goes_to_its_medium_while_others_wait_for_the_budget_of_another",
    },
    Mechanism {
        invariant: 8,
        what: "many moved blocks that wait for one medium let those for another go first",
        file: "master/src/pool/tiering/evacuate.rs",
        on: "line.moved.rotate_left(blocks.min(line.moved.len()));",
        off: "line.moved.rotate_left(0);",
        package: "kvpool-master",
        test: "a_moved_block_goes_to_its_medium_while_others_wait_for_the_budget_of_another",
    },
    Mechanism {
        invariant: 5,
        what: "a node that stops waits for no move of a user",
        file: "master/src/pool/replicas.rs",
        on: "of_drains.contains(&task.id) && !task.is_cancelled()",
        off: "Self::is_off(&task.wish, node) && !task.is_cancelled()",
        package: "kvpool-master",
        test: "a_node_that_stops_waits_for_no_move_of_a_user",
    },
    Mechanism {
        invariant: 5,
        what: "the alert of a draining node that stops asks for no other drain",
        file: "master/src/overview/alerts.rs",
        on: "match (node.media.is_empty(), node.stops) {",
        off: "match (node.media.is_empty(), false) {",
        package: "kvpool-master",
        test: "a_draining_node_that_stops_does_not_ask_for_another_drain",
    },
    Mechanism {
        invariant: 5,
        what: "the alert of a draining node does not say that other nodes are full",
        file: "master/src/overview/alerts.rs",
        on: "blocks, and no task moves them. Run",
        off: "blocks that no other node took. Run",
        package: "kvpool-master",
        test: "a_draining_node_whose_blocks_no_task_moves_asks_first_for_a_drain",
    },
];
