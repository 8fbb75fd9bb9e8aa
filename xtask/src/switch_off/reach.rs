//! What the simulation of a pool cannot notice, and why: parts that it replaces or leaves out (ADR 0052), and
//! mechanisms that save work only.

use super::Mechanism;

const FILES: &str = "files and devices are replaced";
const SOCKETS: &str = "sockets, frames and shared memory are replaced";
const IDENTITY: &str = "no certificates and no tokens are simulated";
const HAND_OFF: &str = "the hand-off has a simulation of its own, in handoff/tests";
const STORES: &str = "the metadata store is replaced";
const COST: &str = "it saves work or time: without it nothing becomes wrong";
const SIZE: &str = "no history is that large or that long";

/// By the beginning of the mechanism's file.
const BY_FILE: &[(&str, &str)] = &[
    ("disk/src/file.rs", FILES),
    ("handoff/", HAND_OFF),
    ("transport/src/gpu", "no GPU is simulated"),
    ("transport/src/peer/", HAND_OFF),
    ("transport/src/service/", SOCKETS),
    ("transport/src/shm/", SOCKETS),
    ("transport/src/socket.rs", SOCKETS),
    ("transport/src/wire.rs", SOCKETS),
    ("types/src/wire/frame.rs", SOCKETS),
    ("store-node/src/fence/boards.rs", SOCKETS),
    ("tls/", IDENTITY),
    ("daemon/", IDENTITY),
    ("cli/", IDENTITY),
    ("master/src/service/rights", IDENTITY),
    ("master/src/service/nodes.rs", IDENTITY),
    ("master/src/service/passing.rs", IDENTITY),
    ("client/src/dialer.rs", IDENTITY),
    ("master/src/store/embedded/", STORES),
    ("master/src/store/etcd/", STORES),
    ("seams/", "time is replaced"),
    (
        "master/src/store/record/decode.rs",
        "all processes have one version",
    ),
    ("master/src/tenant", "no rates are simulated"),
    ("master/src/directory/orders.rs", COST),
    ("master/src/pool/put_queue.rs", COST),
];

/// By the mechanism's test.
const BY_TEST: &[(&str, &str)] = &[
    ("an_idle_pool_writes_nothing_to_a_small_medium", COST),
    ("a_drain_ends_when_the_medium_is_full", COST),
    ("a_node_refuses_a_medium_and_its_copy_together", FILES),
    ("a_stopped_", SOCKETS),
    (
        "only_the_oldest_blocks_leave_while_the_room_of_others_is_fenced",
        COST,
    ),
    ("the_blocks_of_a_dead_node_are_met_once_and_not_again", COST),
    (
        "a_pool_filled_to_three_times_its_size_fails_no_put_and_tears_no_read",
        COST,
    ),
    ("a_source_sends_no_more_than_its_bandwidth", COST),
    (
        "blocks_whose_writes_failed_are_put_again_at_once_however_many_they_are",
        COST,
    ),
    (
        "a_batch_that_was_granted_a_part_asks_for_the_rest_without_a_pause",
        COST,
    ),
    (
        "a_gets_lease_ends_with_the_get_and_its_location_stays_known",
        COST,
    ),
    (
        "a_client_of_a_known_namespace_connects_while_others_are_changed_and_deleted",
        COST,
    ),
    (
        "a_stripe_that_is_looked_at_often_leaves_one_candidate",
        COST,
    ),
    ("only_a_namespace_with_blocks_is_put_in_order", COST),
    (
        "the_puts_of_a_client_end_with_its_last_connection_and_no_others",
        SOCKETS,
    ),
    (
        "a_batch_goes_on_when_any_other_writer_of_its_keys_ends",
        COST,
    ),
    ("blocks_get_copies_beside_blocks_that_cannot_leave", COST),
    ("a_chain_that_is_longer_than_memory_is_copied_whole", COST),
    ("a_block_comes_back_to_memory_that_is_full", COST),
    (
        "a_batch_over_the_clients_cap_on_a_node_is_written_in_turns_under_the_same_grants",
        SIZE,
    ),
    (
        "a_standby_takes_no_more_memory_however_long_it_follows",
        SIZE,
    ),
    (
        "a_block_whose_replicas_change_is_counted_all_the_while",
        "in one thread nobody looks while it happens",
    ),
];

/// Why the simulation cannot notice that the mechanism is off; `None` where it could.
pub(super) fn out_of_reach(mechanism: &Mechanism) -> Option<&'static str> {
    let by_file = BY_FILE
        .iter()
        .find(|(file, _)| mechanism.file.starts_with(file));
    let by_test = BY_TEST
        .iter()
        .find(|(test, _)| mechanism.test.starts_with(test));
    by_file.or(by_test).map(|(_, reason)| *reason)
}

#[cfg(test)]
mod tests {
    use super::super::MECHANISMS;
    use super::*;

    #[test]
    fn every_reason_is_one_of_a_mechanism() {
        let all = || MECHANISMS.into_iter().flatten();
        for (file, _) in BY_FILE {
            assert!(all().any(|one| one.file.starts_with(file)), "{file}");
        }
        for (test, _) in BY_TEST {
            assert!(all().any(|one| one.test.starts_with(test)), "{test}");
        }
    }
}
