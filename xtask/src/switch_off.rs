//! Proof that the tests of the invariants can fail: each mechanism is switched off in a copy of the
//! tree, and the test that names it must notice.

use crate::cargo::{DAEMONS, cargo, root, target_dir};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// One mechanism: the text that is it, and what stands there when it is off.
struct Mechanism {
    invariant: u8,
    what: &'static str,
    file: &'static str,
    on: &'static str,
    off: &'static str,
    /// The package and name of the test that must fail.
    package: &'static str,
    test: &'static str,
}

const MECHANISMS: &[Mechanism] = &[
    Mechanism {
        invariant: 11,
        what: "a call takes the roles of its row",
        file: "master/src/service/rights.rs",
        on: "if fits {",
        off: "if fits || namespace.len() < usize::MAX {",
        package: "kvpool-master",
        test: "every_operation_and_every_caller_meet_as_the_table_says",
    },
    Mechanism {
        invariant: 11,
        what: "a token that expires ends the calls of an open connection",
        file: "master/src/service/rights/bearer.rs",
        on: "if identity.has_expired() {",
        off: "if identity.has_expired() && identity.expires() == 0 {",
        package: "kvpool-master",
        test: "a_token_that_expires_on_an_open_connection_ends_its_calls_until_it_is_renewed",
    },
    Mechanism {
        invariant: 11,
        what: "changed keys and policies judge open connections again",
        file: "master/src/service/rights/bearer.rs",
        on: "is_fresh.then(|| judged.outcome.clone())",
        off: "(is_fresh || judged.generation < u64::MAX).then(|| judged.outcome.clone())",
        package: "kvpool-master",
        test: "a_key_and_a_role_that_are_taken_away_end_the_calls_of_open_connections",
    },
    Mechanism {
        invariant: 11,
        what: "the HTTP port judges paths",
        file: "daemon/src/http_guard.rs",
        on: "if identity.pool_roles().has_any(Roles::WATCHERS) {",
        off: "if !identity.subject().is_empty() {",
        package: "kvpool-master",
        test: "every_http_path_is_judged",
    },
    Mechanism {
        invariant: 11,
        what: "a port beyond loopback needs a guard, or --insecure",
        file: "daemon/src/bind.rs",
        on: "(false, false) => return Err(Exposed { what, addr }),",
        off: "(false, false) => drop(what),",
        package: "kvpool-daemon",
        test: "what_is_open_to_others_needs_a_guard_or_the_word_insecure",
    },
    Mechanism {
        invariant: 11,
        what: "changed certificates are read again",
        file: "tls/src/reload.rs",
        on: "if stamps != state.stamps {",
        off: "if stamps.is_empty() {",
        package: "kvpool-tls",
        test: "changed_files_count_and_broken_ones_do_not",
    },
    Mechanism {
        invariant: 11,
        what: "a master takes nodes with a certificate only",
        file: "master/src/service/nodes.rs",
        on: "if self.needs_certificate && ",
        off: "if self.needs_certificate && false && ",
        package: "kvpool-tests",
        test: "a_store_node_without_a_certificate_is_not_welcome",
    },
    Mechanism {
        invariant: 11,
        what: "older versions of TLS are spoken only where they are asked for",
        file: "tls/src/server.rs",
        on: ".with_protocol_versions(files.min_version.spoken())",
        off: ".with_protocol_versions(Version::Tls12.spoken())",
        package: "kvpool-tests",
        test: "ports_speak_tls_1_3_and_older_versions_only_where_they_are_asked_for",
    },
    Mechanism {
        invariant: 11,
        what: "the data port asks for certificates where everybody needs one",
        file: "tls/src/server.rs",
        on: "data: build(asked, needed, &[ALPN_FRAMES])?,",
        off: "data: build(asked, false, &[ALPN_FRAMES])?,",
        package: "kvpool-tests",
        test: "absent_expired_and_foreign_certificates_are_refused",
    },
    Mechanism {
        invariant: 5,
        what: "an old image at another node leaves the holder its medium",
        file: "master/src/pool/tiering/attach.rs",
        on: "Answer::Reset(is_holder.then_some(known.id))",
        off: "Answer::Reset((is_holder || true).then_some(known.id))",
        package: "kvpool-master",
        test: "an_old_image_at_another_node_does_not_cost_the_holder_its_medium",
    },
    Mechanism {
        invariant: 8,
        what: "eviction for others leaves a guaranteed share",
        file: "master/src/directory/evict_tenants.rs",
        on: "    share.is_some_and(|share| accounts.of(id).get(Item::Resident) < share.saturating_add(bytes))",
        off: "    share.is_some_and(|share| accounts.of(id).get(Item::Resident) < bytes && share > 0)",
        package: "kvpool-master",
        test: "eviction_for_others_never_takes_a_namespace_below_its_guaranteed_share",
    },
    Mechanism {
        invariant: 8,
        what: "blocks above a soft quota leave first",
        file: "master/src/directory/evict_tenants.rs",
        on: "Some((account, tenant)) => (!is_above_soft(account, tenant), tenant.priority()),",
        off: "Some((account, tenant)) => (is_above_soft(account, tenant) || true, tenant.priority()),",
        package: "kvpool-master",
        test: "blocks_over_a_soft_quota_leave_first_and_then_the_lowest_priority",
    },
    Mechanism {
        invariant: 8,
        what: "blocks that were there before the first settings move to the tenant's order",
        file: "master/src/directory/evict_tenants.rs",
        on: "stripe.correct_order(slot, &self.common);",
        off: "let _stays = slot;",
        package: "kvpool-master",
        test: "settings_hold_for_blocks_that_were_there_before_them",
    },
    Mechanism {
        invariant: 9,
        what: "a put does not pass a hard quota",
        file: "master/src/pool/reserve.rs",
        on: "if let Some(code) = broken_quota(account, tenant, bytes) {",
        off: "if let Some(code) = broken_quota(account, tenant, bytes).filter(|_| false) {",
        package: "kvpool-master",
        test: "a_hard_quota_is_never_passed_and_its_puts_evict_their_own_blocks_only",
    },
    Mechanism {
        invariant: 9,
        what: "a deleted namespace gets no block",
        file: "master/src/pool/tenancy.rs",
        on: "        account.close(true);\n",
        off: "        account.close(false);\n",
        package: "kvpool-master",
        test: "a_namespace_is_changed_shown_and_deleted_and_stays_so_after_a_restart",
    },
    Mechanism {
        invariant: 5,
        what: "the charge of an extent ends with its quarantine",
        file: "master/src/placement.rs",
        on: "            extents.discharge(index);\n",
        off: "",
        package: "kvpool-master",
        test: "the_sums_over_namespaces_are_what_the_pool_holds_also_after_a_restart",
    },
    Mechanism {
        invariant: 9,
        what: "a namespace at its rate is refused",
        file: "master/src/tenant/bucket.rs",
        on: "(next <= full(now)).then_some(next)",
        off: "Some(next)",
        package: "kvpool-master",
        test: "a_namespace_at_its_rate_is_refused_with_a_hint_and_no_other_is",
    },
    Mechanism {
        invariant: 8,
        what: "a copy that was dropped is written again only if its block was used",
        file: "master/src/pool/tiering/demoter.rs",
        on: ".filter(|block| block.view().tick() > sealed)",
        off: ".filter(|_| sealed < Tick(u64::MAX))",
        package: "kvpool-master",
        test: "an_idle_pool_writes_nothing_to_a_small_medium",
    },
    Mechanism {
        invariant: 8,
        what: "a drain ends when its medium holds what was used last",
        file: "master/src/pool/tiering/demoter.rs",
        on: "is_full = drains.is_some_and(|since| medium.oldest_sealed() >= since);",
        off: "is_full = drains.is_some_and(|_| false);",
        package: "kvpool-master",
        test: "a_drain_ends_when_the_medium_is_full",
    },
    Mechanism {
        invariant: 8,
        what: "turns follow what eviction reaches",
        file: "master/src/pool/tiering/demoter.rs",
        on: "self.reach = Some(reach);",
        off: "self.reach = None;",
        package: "kvpool-master",
        test: "blocks_get_copies_beside_blocks_that_cannot_leave",
    },
    Mechanism {
        invariant: 8,
        what: "with policy prefix every block has its turn at once",
        file: "master/src/pool/tiering/demoter.rs",
        on: "            Policy::Prefix => 0,",
        off: "            Policy::Prefix => share(memory, WITHOUT_COPY),",
        package: "kvpool-master",
        test: "a_chain_that_is_longer_than_memory_is_copied_whole",
    },
    Mechanism {
        invariant: 5,
        what: "a copy keeps the pin of its block",
        file: "master/src/pool/tiering/transfers.rs",
        on: "hard_pin: block.is_hard_pinned(),",
        off: "hard_pin: false,",
        package: "kvpool-master",
        test: "a_pin_comes_back_with_its_block",
    },
    Mechanism {
        invariant: 1,
        what: "a node takes a device for itself alone",
        file: "disk/src/file.rs",
        on: "Ok(FileType::BlockDevice) => flags |= OFlags::EXCL,",
        off: "Ok(FileType::BlockDevice) => {}",
        package: "kvpool-disk",
        test: "a_device_that_the_system_uses_is_refused_and_kept_from_it",
    },
    Mechanism {
        invariant: 5,
        what: "a node refuses a medium beside its copy",
        file: "store-node/src/media.rs",
        on: "            refuse_twin(&disks, &disk)?;\n",
        off: "            let _unused = refuse_twin(&disks, &disk);\n",
        package: "kvpool-tests",
        test: "a_node_refuses_a_medium_and_its_copy_together",
    },
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
        invariant: 5,
        what: "a standby adds the replicas that the log adds",
        file: "master/src/standby/apply.rs",
        on: "            Record::ReplicaAdded(added) => self.add_replica(&added),",
        off: "            Record::ReplicaAdded(_) => {}",
        package: "kvpool-master",
        test: "following_the_log_and_loading_it_come_to_the_same",
    },
    Mechanism {
        invariant: 3,
        what: "a new life waits for the last writes of the life before",
        file: "disk/src/file.rs",
        on: "        lock(&fd, path, options.patience)?;",
        off: "        let _unused = lock;",
        package: "kvpool-tests",
        test: "a_new_life_waits_for_the_last_write_of_the_life_before",
    },
    Mechanism {
        invariant: 8,
        what: "a block that comes back makes its room in a full memory",
        file: "master/src/pool/evictor.rs",
        on: "for wanted in self.take_wanted_room() {",
        off: "for wanted in Vec::<WantedRoom>::new() {",
        package: "kvpool-master",
        test: "a_block_comes_back_to_memory_that_is_full",
    },
    Mechanism {
        invariant: 4,
        what: "a new leader writes behind the copies that it knows",
        file: "master/src/tier/medium.rs",
        on: "        self.continue_behind_blocks();\n        self.sealed",
        off: "        self.sealed",
        package: "kvpool-master",
        test: "a_term_continues_behind_the_copies_that_are_there",
    },
    Mechanism {
        invariant: 3,
        what: "a zone is written again only when no transfer touches it",
        file: "master/src/pool/tiering/zones.rs",
        on: "Emptying::Draining if !used.busy.contains_key(&medium.next_zone()) => {",
        off: "Emptying::Draining => {",
        package: "kvpool-master",
        test: "a_zone_is_not_written_while_a_load_reads_it",
    },
    Mechanism {
        invariant: 2,
        what: "no copy is recorded while its removal is on its way to the log",
        file: "master/src/pool/tiering.rs",
        on: "if leaving.contains(&(namespace, key.clone())) {",
        off: "if false && leaving.contains(&(namespace, key.clone())) {",
        package: "kvpool-master",
        test: "a_block_whose_removal_is_not_logged_yet_does_not_come_back",
    },
    Mechanism {
        invariant: 2,
        what: "a put of a key ends the stores of its earlier block",
        file: "master/src/pool/tiering/demoter.rs",
        on: "traffic.stores.key_changed(put.namespace, put.key);",
        off: "",
        package: "kvpool-master",
        test: "a_block_that_is_evicted_while_it_is_copied_keeps_its_copy",
    },
    Mechanism {
        invariant: 2,
        what: "a remove that finds nothing ends the stores of the key",
        file: "master/src/pool/remove.rs",
        on: "self.end_stores_of_evicted(Some((namespace, &mut missing().map(|(_, (key, _))| *key))));",
        off: "",
        package: "kvpool-master",
        test: "a_block_that_is_evicted_while_it_is_copied_keeps_its_copy",
    },
    Mechanism {
        invariant: 8,
        what: "a block that is evicted while it is copied keeps its copy",
        file: "master/src/pool/tiering/transfers.rs",
        on: "Meanwhile::Evicted => true,",
        off: "Meanwhile::Evicted => false,",
        package: "kvpool-master",
        test: "a_block_that_is_evicted_while_it_is_copied_keeps_its_copy",
    },
    Mechanism {
        invariant: 2,
        what: "a removal ends the stores of its key",
        file: "master/src/pool/tiering.rs",
        on: "traffic.stores.key_changed(namespace, &key);",
        off: "",
        package: "kvpool-master",
        test: "a_second_copy_that_ends_after_the_removal_brings_nothing_back",
    },
    Mechanism {
        invariant: 8,
        what: "a put waits for room that is being fenced, and evicts no neighbours for it",
        file: "master/src/pool/evictor.rs",
        on: "if (is_full || comes) && ",
        off: "if is_full && ",
        package: "kvpool-master",
        test: "only_the_oldest_blocks_leave_while_the_room_of_others_is_fenced",
    },
    Mechanism {
        invariant: 8,
        what: "a copy that was used since its zone was written moves on",
        file: "master/src/pool/tiering/zones.rs",
        on: "is_pinned || block.tick() > sealed || block.is_leased",
        off: "is_pinned || block.is_leased",
        package: "kvpool-master",
        test: "copies_that_are_used_stay_when_their_zone_is_written_again",
    },
    Mechanism {
        invariant: 8,
        what: "a stopping node copies the blocks that were used last first",
        file: "master/src/pool/tiering/demoter.rs",
        on: "found.sort_by_key(|(tick, _)| std::cmp::Reverse(*tick));",
        off: "found.sort_by_key(|(tick, _)| *tick);",
        package: "kvpool-master",
        test: "a_draining_node_is_told_when_its_memory_is_copied",
    },
    Mechanism {
        invariant: 8,
        what: "a medium that stays away is forgotten",
        file: "master/src/pool/tiering/attach.rs",
        on: "if now.since(since) >= self.config.ssd_drop_after {",
        off: "if false && now.since(since) >= self.config.ssd_drop_after {",
        package: "kvpool-master",
        test: "a_medium_that_stays_away_is_dropped",
    },
    Mechanism {
        invariant: 8,
        what: "writes to a medium stay within its budget",
        file: "master/src/pool/tiering/admission.rs",
        on: "        left >= 0.5 ||",
        off: "        true || left >= 0.5 ||",
        package: "kvpool-master",
        test: "writes_stay_within_their_budget",
    },
    Mechanism {
        invariant: 1,
        what: "each chunk that is read from a medium is compared with its checksum",
        file: "disk/src/medium/wanted.rs",
        on: "if checksum(bytes) != *sum {",
        off: "if checksum(bytes) != *sum && false {",
        package: "kvpool-disk",
        test: "ten_thousand_corruptions_of_extents_are_refused_by_kind",
    },
    Mechanism {
        invariant: 8,
        what: "a put is not woken to take the range of the put before it",
        file: "master/src/pool/put_queue.rs",
        on: "                    0 => demand.largest,",
        off: "                    _ if true => demand.largest,",
        package: "kvpool-master",
        test: "a_put_is_not_woken_to_take_the_range_of_the_put_before_it",
    },
    Mechanism {
        invariant: 8,
        what: "a put takes the place of its own grant whose write failed",
        file: "client/src/put/machine.rs",
        on: "item.granted_by = request.into_iter().collect();",
        off: "item.granted_by.clear();",
        package: "kvpool-client",
        test: "blocks_whose_writes_failed_are_put_again_at_once_however_many_they_are",
    },
    Mechanism {
        invariant: 8,
        what: "writes over the client's cap on a node take turns",
        file: "client/src/put/machine.rs",
        on: "error.code == Code::TooManyHeld && !is_over",
        off: "error.code == Code::TooManyHeld && !is_over && false",
        package: "kvpool-client",
        test: "a_batch_over_the_clients_cap_on_a_node_is_written_in_turns_under_the_same_grants",
    },
    Mechanism {
        invariant: 3,
        what: "a lease on a lost block ends none on the block put after it",
        file: "master/src/pool/read.rs",
        on: "*code = if block.version() <= newest {",
        off: "*code = if block.version() <= newest || true {",
        package: "kvpool-master",
        test: "a_lease_on_a_lost_block_does_not_end_one_on_the_block_put_after_it",
    },
    Mechanism {
        invariant: 8,
        what: "a get gives its lease back",
        file: "client/src/releases.rs",
        on: "let held = self.take();\n        self.releases.end(held);",
        off: "drop(self.take());",
        package: "kvpool-client",
        test: "a_gets_lease_ends_with_the_get_and_its_location_stays_known",
    },
    Mechanism {
        invariant: 5,
        what: "the puts of a client that is gone end",
        file: "master/src/pool/caretaker.rs",
        on: "self.end_puts_of_gone(now);",
        off: "let _ = Self::end_puts_of_gone;",
        package: "kvpool-master",
        test: "the_puts_of_a_client_end_with_its_last_connection_and_no_others",
    },
    Mechanism {
        invariant: 1,
        what: "a reader compares checksums",
        file: "client/src/get/judge.rs",
        on: "let right = checksum == located.checksum;",
        off: "let right = checksum == located.checksum || true;",
        package: "kvpool-tests",
        test: "a_flipped_byte_is_never_served_and_its_copy_is_dropped",
    },
    Mechanism {
        invariant: 2,
        what: "a block becomes visible at its commit, not at its reservation",
        file: "master/src/pool/reserve.rs",
        on: "reservations.insert(namespace, key, pending);",
        off: "self.directory.publish(vec![crate::directory::NewBlock { namespace, key: key.to_key(), \
              version, length: *length, checksum: kvpool_types::Checksum(0), \
              replicas: replicas.clone(), parent: None, soft_pin_until: None, hard_pin: false, \
              tick: self.directory.ticks(1).of(0) }]); reservations.insert(namespace, key, pending);",
        package: "kvpool-tests",
        test: "a_block_is_visible_after_its_commit_and_not_before",
    },
    Mechanism {
        invariant: 10,
        what: "over the bound the oldest caller makes room",
        file: "transport/src/service/acceptor.rs",
        on: "while self.callers.len() >= MOST_CALLERS {",
        off: "while false && self.callers.len() >= MOST_CALLERS {",
        package: "kvpool-transport",
        test: "callers_before_hello_take_no_slot_and_no_thread",
    },
    Mechanism {
        invariant: 10,
        what: "a first frame is judged by its header, before room is made for it",
        file: "transport/src/service/acceptor.rs",
        on: "} else if u64::from(header.meta) > MAX_HELLO_BYTES {",
        off: "} else if false && u64::from(header.meta) > MAX_HELLO_BYTES {",
        package: "kvpool-transport",
        test: "a_hello_has_a_bounded_size_and_a_bounded_time",
    },
    Mechanism {
        invariant: 10,
        what: "a term ends by a proof alone",
        file: "master/src/pool/registration.rs",
        on: "if prover.verify(name, seen, &registration.epoch_proof) {",
        off: "if true || prover.verify(name, seen, &registration.epoch_proof) {",
        package: "kvpool-master",
        test: "a_later_epoch_without_proof_ends_no_term",
    },
    Mechanism {
        invariant: 10,
        what: "a life with a secret is believed by its secret alone",
        file: "master/src/pool/registration.rs",
        on: "None if life.has_secret() => Err(refuse(",
        off: "None if false && life.has_secret() => Err(refuse(",
        package: "kvpool-master",
        test: "a_second_session_of_an_incarnation_needs_its_secret",
    },
    Mechanism {
        invariant: 3,
        what: "a node fences nothing that a process holds or views",
        file: "store-node/src/fence.rs",
        on: ".and_then(|space| space.touches.overlapping_mut(span.range).next());",
        off: ".and_then(|space| space.touches.overlapping_mut(span.range).next().filter(|_| false));",
        package: "kvpool-tests",
        test: "a_stopped_",
    },
    Mechanism {
        invariant: 3,
        what: "a node fences nothing that a view has pinned on a board",
        file: "store-node/src/fence.rs",
        on: "None if pinned.touches(span) => {",
        off: "None if pinned.touches(span) && false => {",
        package: "kvpool-tests",
        test: "a_stopped_view_holder_still_sees_its_block",
    },
    Mechanism {
        invariant: 3,
        what: "a pin on a board counts in its own epoch alone",
        file: "transport/src/shm/board/client.rs",
        on: "pin.counts(epoch).then_some(pin)",
        off: "(pin.counts(epoch) || true).then_some(pin)",
        package: "kvpool-transport",
        test: "a_pin_that_counts_is_seen_by_the_read_after_the_change",
    },
    Mechanism {
        invariant: 3,
        what: "an extent is free only once its node has fenced it",
        file: "master/src/placement/quarantine.rs",
        on: "message.push(fence_item(number, &run));",
        off: "for item in &run { item.segment.free_quarantined([(item.index, item.stuck)].into_iter()); } \
              if run.len() < usize::MAX { continue; } message.push(fence_item(number, &run));",
        package: "kvpool-master",
        test: "an_ended_grant_commits_nothing_and_its_room_waits_for_the_node",
    },
    Mechanism {
        invariant: 3,
        what: "the end of a grant aborts the receive under it",
        file: "store-node/src/fence.rs",
        on: "close(touch, &mut aborts);",
        off: "close(touch, &mut Vec::new());",
        package: "kvpool-tests",
        test: "a_stalled_tcp_writer_is_cut_off_when_its_grant_ends",
    },
    Mechanism {
        invariant: 4,
        what: "a node refuses grants of another epoch",
        file: "store-node/src/fence/admit.rs",
        on: "if self.term.is_none() || epoch != self.epoch() {",
        off: "if self.term.is_none() {",
        package: "kvpool-tests",
        test: "a_write_is_refused_unless_every_part_of_its_grant_is_right",
    },
    Mechanism {
        invariant: 4,
        what: "a node checks the proof of a grant",
        file: "store-node/src/fence/admit.rs",
        on: ".is_some_and(|term| term.signer.verify(incarnation, grant));",
        off: ".is_some_and(|term| term.signer.verify(incarnation, grant) || true);",
        package: "kvpool-tests",
        test: "a_write_is_refused_unless_every_part_of_its_grant_is_right",
    },
    Mechanism {
        invariant: 4,
        what: "a master refuses whoever knows a later term",
        file: "master/src/service/request.rs",
        on: "if caller.epoch > pool.epoch.0 {",
        off: "if caller.epoch > pool.epoch.0 && caller.epoch == 0 {",
        package: "kvpool-tests",
        test: "a_master_refuses_whoever_knows_a_later_term_or_another_pool",
    },
    Mechanism {
        invariant: 4,
        what: "a leader past its deadline changes nothing",
        file: "master/src/term.rs",
        on: "now.0 < self.deadline.load(Ordering::Acquire)",
        off: "now.0 < self.deadline.load(Ordering::Acquire).saturating_mul(2)",
        package: "kvpool-master",
        test: "past_its_deadline_a_leader_answers_without_leases_and_changes_nothing",
    },
    Mechanism {
        invariant: 4,
        what: "etcd refuses what a deposed leader writes",
        file: "master/src/store/etcd/write.rs",
        on: ".when(Compare::created(self.keys.leader(), term.created))",
        off: ".when(Compare::absent(format!(\"no key of {term:?}\")))",
        package: "kvpool-master",
        test: "a_deposed_leader_changes_nothing",
    },
    Mechanism {
        invariant: 3,
        what: "what the last leader freed stays shut for a whole lease",
        file: "master/src/standby/recently_freed.rs",
        on: "let is_over = now.since(left.since) >= lease_ttl;",
        off: "let is_over = now.since(left.since) <= lease_ttl;",
        package: "kvpool-master",
        test: "freed_extents_stay_closed_for_a_lease_ttl_unless_the_leader_grants_them",
    },
    Mechanism {
        invariant: 5,
        what: "segment ids are set aside for good",
        file: "master/src/pool/snapshot.rs",
        on: "            pool.segment_ids.record(),\n",
        off: "",
        package: "kvpool-master",
        test: "a_segment_id_is_never_given_twice",
    },
    Mechanism {
        invariant: 5,
        what: "a standby forgets what the log no longer holds",
        file: "master/src/standby/apply.rs",
        on: "self.state.runs.forget(cut);",
        off: "",
        package: "kvpool-master",
        test: "a_standby_takes_no_more_memory_however_long_it_follows",
    },
    Mechanism {
        invariant: 5,
        what: "a record that must not be skipped is not",
        file: "master/src/store/record/decode.rs",
        on: "None if tag & REQUIRED == 0 => Ok(None),",
        off: "None if tag & REQUIRED == 0 || kind > 0 => Ok(None),",
        package: "kvpool-master",
        test: "a_record_of_an_unknown_kind_that_must_not_be_skipped_names_the_version_to_run",
    },
    Mechanism {
        invariant: 5,
        what: "an append is on stable storage when it returns",
        file: "master/src/store/embedded/segment.rs",
        on: ".and_then(|()| self.file.sync_data());",
        off: ";",
        package: "kvpool-master",
        test: "acknowledged_groups_survive_a_power_cut",
    },
    Mechanism {
        invariant: 5,
        what: "a pool whose metadata is missing or changed does not become a new one",
        file: "master/src/store/embedded/data_directory.rs",
        on: "if self.holds_something()? {",
        off: "if false {",
        package: "kvpool-master",
        test: "a_file_that_is_missing_empty_or_cut_is_refused_with_its_name_and_the_flag",
    },
    Mechanism {
        invariant: 5,
        what: "without room in the log, what has happened already is kept for it",
        file: "master/src/store/journal/worker.rs",
        on: "if entry.has_happened || entry.callback.is_none() {",
        off: "if entry.callback.is_none() {",
        package: "kvpool-master",
        test: "a_full_store_refuses_unanswered_records_and_keeps_past_events",
    },
    Mechanism {
        invariant: 6,
        what: "silence makes a node suspect and does not drop it",
        file: "master/src/membership/table.rs",
        on: "if silent >= drop_after {",
        off: "if silent >= suspect_after.min(drop_after) {",
        package: "kvpool-tests",
        test: "a_node_that_hangs_is_avoided_and_comes_back_without_loss",
    },
    Mechanism {
        invariant: 7,
        what: "time is measured on a clock that nobody can set",
        file: "master/src/clock.rs",
        on: "rustix::time::ClockId::Boottime",
        off: "rustix::time::ClockId::Realtime",
        package: "kvpool-tests",
        test: "no_part_of_the_pool_asks_the_wall_clock",
    },
    Mechanism {
        invariant: 7,
        what: "a lapsed token releases nobody's lease",
        file: "master/src/directory/block.rs",
        on: "let (token, now) = (self.common.relative(token), self.common.relative(now));",
        off: "let (token, now) = (self.common.relative(token).max(self.common.relative(now) + 1), \
              self.common.relative(now));",
        package: "kvpool-master",
        test: "a_release_ends_a_lease_only_for_its_own_holder",
    },
    Mechanism {
        invariant: 8,
        what: "eviction passes over leased blocks",
        file: "master/src/directory/evict.rs",
        on: "if entry.is_leased(self.common.relative(now)) {",
        off: "if entry.is_leased(self.common.relative(now)) && false {",
        package: "kvpool-tests",
        test: "leased_and_pinned_blocks_stay_and_a_full_pool_says_so",
    },
    Mechanism {
        invariant: 8,
        what: "what lies on a node that takes no blocks is met once",
        file: "master/src/directory/stripe.rs",
        on: "self.queues.set_aside(&mut self.entries, slot, group);",
        off: "self.queues.park(&mut self.entries, slot, u64::from(group).min(0));",
        package: "kvpool-master",
        test: "the_blocks_of_a_dead_node_are_met_once_and_not_again",
    },
    Mechanism {
        invariant: 8,
        what: "a block with children waits in no queue",
        file: "master/src/pool/commit.rs",
        on: "parent: item.parent,",
        off: "parent: None,",
        package: "kvpool-tests",
        test: "a_block_is_never_evicted_before_its_descendants",
    },
    Mechanism {
        invariant: 8,
        what: "a round stops at its goal",
        file: "master/src/pool/evictor.rs",
        on: "let want = (goal - freed).min(STEP_BYTES);",
        off: "let want = (2 * goal - freed).min(STEP_BYTES).max(goal + (32 << 20));",
        package: "kvpool-tests",
        test: "a_pool_filled_to_three_times_its_size_fails_no_put_and_tears_no_read",
    },
    Mechanism {
        invariant: 9,
        what: "a reservation has a length",
        file: "master/src/pool/reserve.rs",
        on: "if length.0 == 0 {",
        off: "if length.0 == u64::MAX {",
        package: "kvpool-tests",
        test: "the_master_checks_what_no_client_of_ours_would_send",
    },
    Mechanism {
        invariant: 9,
        what: "a frame's parts are held against their limits",
        file: "types/src/wire/frame.rs",
        on: "if size > limit {",
        off: "if size > limit && size == 0 {",
        package: "kvpool-tests",
        test: "the_data_port_answers_bad_frames_and_serves_others",
    },
    Mechanism {
        invariant: 8,
        what: "a put as large as the pool is served in parts",
        file: "master/src/pool/put_queue.rs",
        on: "self.bytes.min(most.max(one))",
        off: "self.bytes.max(most.min(one))",
        package: "kvpool-master",
        test: "a_batch_as_large_as_the_pool_does_not_empty_it",
    },
    Mechanism {
        invariant: 8,
        what: "a batch goes on at the end of any other writer",
        file: "master/src/pool/reserve.rs",
        on: "if open.writers.len() < WATCHED {",
        off: "if open.writers.len() < WATCHED.min(1) {",
        package: "kvpool-master",
        test: "a_batch_goes_on_when_any_other_writer_of_its_keys_ends",
    },
    Mechanism {
        invariant: 8,
        what: "what was refused beside grants is asked for at once",
        file: "client/src/put/machine.rs",
        on: "Code::Full | Code::InProgress => waits.push(at),",
        off: "Code::Full | Code::InProgress => again.push(at),",
        package: "kvpool-client",
        test: "a_batch_that_was_granted_a_part_asks_for_the_rest_without_a_pause",
    },
    Mechanism {
        invariant: 5,
        what: "a start writes the end of the log again",
        file: "master/src/store/embedded/survey.rs",
        on: "        if flushes {",
        off: "        if flushes && number == 0 {",
        package: "kvpool-master",
        test: "every_start_writes_the_end_of_the_log_again",
    },
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

/// Switches the mechanisms off one by one; true when every test noticed. `only` names an invariant.
/// Which mechanisms are switched off.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only those of the invariant with this number [default: all]
    invariant: Option<u8>,
    /// Only those whose file or test has this text in its name
    #[arg(long, value_name = "TEXT")]
    of: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<bool> {
    let place = target_dir()?.join("switch-off");
    let tree = place.join("tree");
    copy_tree(&tree)?;
    let mut unnoticed = 0;
    let chosen = MECHANISMS
        .iter()
        .filter(|m| args.invariant.is_none_or(|only| only == m.invariant))
        .filter(|m| {
            let is_named = |text: &String| m.file.contains(text) || m.test.contains(text);
            args.of.as_ref().is_none_or(is_named)
        });
    for mechanism in chosen {
        let Mechanism {
            invariant,
            what,
            test,
            ..
        } = mechanism;
        let verdict = match try_one(mechanism, &tree, &place.join("build"))? {
            Verdict::Noticed => "noticed",
            Verdict::Unnoticed => {
                unnoticed += 1;
                "NOT NOTICED"
            }
            Verdict::Broken => {
                unnoticed += 1;
                "DOES NOT BUILD"
            }
        };
        println!("invariant {invariant}, without \"{what}\": {verdict} by {test}");
    }
    Ok(unnoticed == 0)
}

enum Verdict {
    Noticed,
    Unnoticed,
    Broken,
}

fn try_one(mechanism: &Mechanism, tree: &Path, build: &Path) -> Result<Verdict> {
    let file = tree.join(mechanism.file);
    let text = std::fs::read_to_string(&file)?;
    if !text.contains(mechanism.on) {
        bail!("{} no longer contains `{}`", mechanism.file, mechanism.on);
    }
    std::fs::write(&file, text.replace(mechanism.on, mechanism.off))?;
    let built = ["--quiet", "build"]
        .iter()
        .chain(&DAEMONS)
        .copied()
        .collect::<Vec<_>>();
    let builds = quietly(in_copy(&built, tree, build))?
        && quietly(in_copy(
            &["--quiet", "test", "--no-run", "-p", mechanism.package],
            tree,
            build,
        ))?;
    let outcome = if builds {
        let test = [
            "--quiet",
            "test",
            "-p",
            mechanism.package,
            "--tests",
            "--",
            mechanism.test,
        ];
        if quietly(in_copy(&test, tree, build))? {
            Verdict::Unnoticed
        } else {
            Verdict::Noticed
        }
    } else {
        Verdict::Broken
    };
    std::fs::write(&file, text)?;
    Ok(outcome)
}

fn in_copy(args: &[&str], tree: &Path, build: &Path) -> Command {
    let mut command = cargo(args);
    command.current_dir(tree).env("CARGO_TARGET_DIR", build);
    command
}

fn quietly(mut command: Command) -> Result<bool> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    Ok(output.status.success())
}

/// Copies every file that git knows, as it is in the working tree.
fn copy_tree(tree: &Path) -> Result<()> {
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root())
        .output()?;
    let files = String::from_utf8(listed.stdout).context("a file name is not UTF-8")?;
    for file in files.split('\0').filter(|file| !file.is_empty()) {
        let from = root().join(file);
        let to: PathBuf = tree.join(file);
        if !from.is_file() {
            continue;
        }
        let bytes = std::fs::read(&from)?;
        // What is the same keeps its time, so that it is not built again.
        if std::fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        if let Some(directory) = to.parent() {
            std::fs::create_dir_all(directory)?;
        }
        std::fs::write(&to, bytes)?;
    }
    Ok(())
}
