//! Replicas that are copied, moved and dropped.

use super::Mechanism;

pub(super) const MECHANISMS: &[Mechanism] = &[
    Mechanism {
        invariant: 1,
        what: "a node records a pulled block only with the checksum of its commit",
        file: "store-node/src/pulls.rs",
        on: "if sums.whole != Checksum(order.checksum) {",
        off: "if sums.whole != sums.whole {",
        package: "kvpool-tests",
        test: "a_source_with_wrong_bytes_gives_no_replica",
    },
    Mechanism {
        invariant: 2,
        what: "a replica is added only in the version that was copied",
        file: "master/src/directory/remove.rs",
        on: "let copied = found.filter(|slot| stripe.entries.rest(*slot).version == version);",
        off: "let copied = found;",
        package: "kvpool-master",
        test: "a_version_that_is_logged_before_the_replica_does_not_get_it",
    },
    Mechanism {
        invariant: 3,
        what: "the extent of a moved replica waits for the leases on the block",
        file: "master/src/pool/replicas/pulls.rs",
        on: "not_before: dropped.lease_until.max(self.lease_floor_of(version)),",
        off: "not_before: self.lease_floor_of(version),",
        package: "kvpool-master",
        test: "a_moved_replica_stays_shut_while_a_reader_has_a_lease",
    },
    Mechanism {
        invariant: 5,
        what: "a replica is dropped only where another one can be read",
        file: "master/src/pool/replicas/mover.rs",
        on: "        if others == 0 {",
        off: "        if others > usize::MAX - 1 {",
        package: "kvpool-tests",
        test: "a_replica_stays_while_no_other_one_can_be_read",
    },
    Mechanism {
        invariant: 5,
        what: "two pulls never bring a block to one node, or drop one replica twice",
        file: "master/src/pool/replicas/mover.rs",
        on: "pulls.takes(target, length) && !pulls.changes(work.block, target, dropped)",
        off: "pulls.takes(target, length) | pulls.changes(work.block, target, dropped)",
        package: "kvpool-master",
        test: "two_tasks_never_bring_a_block_to_one_node_or_drop_one_replica_twice",
    },
    Mechanism {
        invariant: 6,
        what: "a source sends no more than the bandwidth of replicas",
        file: "master/src/pool/term_start.rs",
        on: "replicas::Replicas::new(config.replica_bandwidth.0, workers)",
        off: "replicas::Replicas::new(config.replica_bandwidth.0 & 0, workers)",
        package: "kvpool-master",
        test: "a_source_sends_no_more_than_its_bandwidth",
    },
    Mechanism {
        invariant: 7,
        what: "a drain waits for the puts that are under way on its node",
        file: "master/src/pool/nodes.rs",
        on: "while self.reservations.lock().has_on(&segments) {",
        off: "while self.reservations.lock().has_on(&segments) && false {",
        package: "kvpool-master",
        test: "a_put_that_is_under_way_when_its_node_drains_moves_with_it",
    },
];
