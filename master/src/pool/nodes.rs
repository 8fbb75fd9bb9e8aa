//! Registration, heartbeats and departure of store nodes.

use super::Pool;
use super::sweep::Sweep;
use crate::clock::BootInstant;
use crate::membership::{
    Address, DrainReport, NodeState, Outbox, Registration, Reported, StoreNode,
};
use crate::placement::Segment;
use crate::placement::quarantine::Freed;
use crate::store::journal::Ack;
use crate::store::record::{self, Record};
use kvpool_types::{Code, GrantKey, Length};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

/// How long a drain waits for the open puts on its node. A put takes milliseconds once it has its
/// grants. A longer put ends here, and its client puts the block on another node.
const PUTS_END: Duration = Duration::from_secs(2);
const PUTS_POLL: Duration = Duration::from_millis(2);

/// The refusal of a registration.
#[derive(Debug, thiserror::Error)]
#[error("{code}: {message}")]
pub struct RegisterError {
    /// The stable code.
    pub code: Code,
    /// The reason, for people.
    pub message: String,
}

pub(super) fn refuse(code: Code, message: impl Into<String>) -> RegisterError {
    RegisterError {
        code,
        message: message.into(),
    }
}

impl Pool {
    /// Registers a node: a known incarnation with its blocks, or a new incarnation with empty
    /// segments in place of the last one. Answers when the registration is durable. The caller must
    /// send the result to the node before [`Pool::activate`] opens its session.
    pub async fn register(
        self: &Arc<Self>,
        registration: &Registration,
    ) -> Result<Arc<StoreNode>, RegisterError> {
        let _one_at_a_time = self.registration.lock().await;
        self.check_registration(registration)?;
        let known = self.members.get(&registration.name);
        match known {
            Some(node) if node.incarnation == registration.incarnation => {
                self.check_life(&node, registration)?;
                self.check_segments(&node, registration)?;
                Ok(node)
            }
            Some(node) if node.is_connected() && node.state() != NodeState::Suspect => Err(refuse(
                Code::InProgress,
                format!(
                    "the node name {} is in use by the live incarnation {}",
                    node.name, node.incarnation
                ),
            )),
            Some(node) if node.state() == NodeState::Unreported && !self.have_nodes_returned() => {
                Err(refuse(
                    Code::InProgress,
                    format!(
                        "the node name {} is reserved for incarnation {}, which may still return in this term; \
                         the node registers again by itself",
                        node.name, node.incarnation
                    ),
                ))
            }
            _ if registration.segments.iter().any(|(_, id)| id.is_some()) => Err(refuse(
                Code::IncarnationDropped,
                format!(
                    "incarnation {} was dropped: no node has the segments that it names",
                    registration.incarnation
                ),
            )),
            before => {
                if let Some(before) = before {
                    self.drop_node(&before);
                }
                self.welcome_new(registration).await
            }
        }
    }

    fn check_segments(
        &self,
        node: &StoreNode,
        registration: &Registration,
    ) -> Result<(), RegisterError> {
        let segments = self.placement.segments();
        let known: Vec<Length> = node
            .segments()
            .iter()
            .filter_map(|id| Some(segments.get(*id)?.size))
            .collect();
        let offered: Vec<Length> = registration
            .segments
            .iter()
            .map(|(size, _)| *size)
            .collect();
        if known == offered {
            Ok(())
        } else {
            Err(refuse(
                Code::InvalidArgument,
                "the incarnation's segments have changed",
            ))
        }
    }

    async fn welcome_new(
        self: &Arc<Self>,
        registration: &Registration,
    ) -> Result<Arc<StoreNode>, RegisterError> {
        let Registration {
            name,
            incarnation,
            segments,
            ..
        } = registration;
        let key = GrantKey(kvpool_seams::random());
        let node = Arc::new(StoreNode::new(name.clone(), *incarnation, key, self.now()));
        let mut records = Vec::with_capacity(segments.len());
        let mut added = Vec::with_capacity(segments.len());
        let count = u32::try_from(segments.len()).unwrap_or(u32::MAX);
        let ids = self.give_segment_ids(count).await?;
        for ((index, (size, _)), id) in (0u32..).zip(segments).zip(ids) {
            records.push(Record::Segment(record::Segment {
                id,
                node: name.clone(),
                incarnation: *incarnation,
                index,
                size: *size,
            }));
            added.push((id, *size));
        }
        let (pool, welcomed) = (Arc::clone(self), Arc::clone(&node));
        self.log(records, move || {
            for (id, size) in added {
                welcomed.add_segment(id);
                let high = pool.config.eviction_high_watermark_ratio;
                let segment = Segment::new(id, Arc::clone(&welcomed), size, high);
                let accounts = pool.directory.accounts();
                pool.placement.insert(Arc::new(segment.charging(accounts)));
            }
            pool.members.insert(welcomed);
        })
        .await
        .map_err(|code| refuse(code, "the metadata store failed"))?;
        tracing::info!(node = %name, %incarnation, segments = segments.len(), "new node");
        Ok(node)
    }

    /// Makes records durable and then calls `apply` on the journal's thread. So a snapshot at a
    /// position after these records contains their effect.
    pub(super) async fn log(
        &self,
        records: Vec<Record>,
        apply: impl FnOnce() + Send + 'static,
    ) -> Result<(), Code> {
        let (done, durable) = oneshot::channel();
        let submitted = self
            .journal()
            .submit(records, Ack::Durable, move |outcome| {
                let logged = outcome.map(|_| apply()).map_err(|error| error.code());
                let _caller_left = done.send(logged);
            })
            .await;
        let logged = durable.await.unwrap_or(Err(Code::StoreFailed));
        submitted.map_err(|error| error.code()).and(logged)
    }

    /// Opens a node's session. The node's first heartbeat shows that it has processed the welcome.
    /// From then on its blocks are readable and it takes new blocks. A range that the node cannot
    /// fence stays in quarantine until it can.
    pub fn activate(
        self: &Arc<Self>,
        node: &Arc<StoreNode>,
        registration: &Registration,
        outbox: Outbox,
    ) -> u64 {
        self.shut_told(node, registration);
        let address = Address {
            data: registration.data_address.clone(),
            shm_path: registration.shm_path.clone(),
            host: registration.host,
        };
        node.set_can_pull(registration.can_pull);
        node.set_can_undrain(registration.can_undrain);
        node.set_version(&registration.version);
        node.set_wants_signed_reads(registration.wants_signed_reads);
        self.end_own_silence();
        let session = node.attach(address, outbox, self.now());
        if node.drains() {
            // Its media are attached anew, perhaps without their copies.
            self.doubt_drained();
        }
        if node.state() == NodeState::Gone {
            node.end_session(self.now());
        }
        self.quarantine.repeat(node);
        // An order may have been lost with an earlier session. A later leader learns of a drain only
        // from the node, so the node must have the order.
        node.repeat_orders();
        tracing::info!(node = %node.name, incarnation = %node.incarnation, "node registered");
        session
    }

    /// Puts into quarantine the free parts of the ranges that a registering node reports.
    ///
    /// A loaded range may belong to a block that an earlier term loaded from a medium, and whose
    /// record that term lost. A reader may have a lease on it. A held range belongs to a put of an
    /// earlier term, whose writer may still write. A neighbour that left earlier may be in
    /// quarantine already, with a part of the range.
    fn shut_told(&self, node: &StoreNode, registration: &Registration) {
        // A node may report only its own segments.
        let own = node.segments();
        let leases_over = self.started.after(self.config.lease_ttl);
        let segments = self.placement.segments();
        let mut freed = Vec::new();
        let loaded = registration.loaded.iter().map(|at| (at, leases_over));
        let held = registration.held.iter().map(|at| (at, BootInstant(0)));
        let told = loaded.chain(held);
        for (at, not_before) in told.filter(|(at, _)| own.contains(&at.segment)) {
            let Some(segment) = segments.get(at.segment) else {
                continue;
            };
            for (index, extent) in segment.quarantine_free_in(at.offset, at.length) {
                freed.push(Freed {
                    segment: Arc::clone(segment),
                    index,
                    extent,
                    grant: None,
                    before: self.next_grant(),
                    not_before,
                    since: self.now(),
                    stuck: false,
                });
            }
        }
        drop(segments);
        self.free(freed);
    }

    /// Records a heartbeat.
    pub fn heard(&self, node: &StoreNode, reported: Option<Reported>) {
        self.end_own_silence();
        if node.heard(self.now(), reported) {
            self.check_nodes_returned();
            self.changed.notify_waiters();
            self.wake_waiting_puts();
        }
    }

    /// Frees the extents that a node has fenced.
    pub fn fenced(&self, node: &StoreNode, tickets: &[u64]) {
        let bytes = self.quarantine.fenced(node, tickets);
        if bytes > 0 {
            self.wake_waiting_puts();
        }
    }

    /// Processes a node's re-verification of a replica.
    pub fn heard_verified(self: &Arc<Self>, node: &StoreNode, ticket: u64, matches: bool) {
        if let Some(suspected) = self.quarantine.verified(node, ticket) {
            self.verified(suspected, matches);
        }
    }

    /// Stops placing blocks on a node that shuts down. Its blocks are stored on its media. Without
    /// media they move to other nodes, if the node waits for that. A task that takes the node out
    /// of service ends first.
    pub fn draining(self: &Arc<Self>, node: &Arc<StoreNode>, moves: bool) {
        self.says_it_drains(
            node,
            DrainReport {
                session: None,
                moves,
                number: 0,
            },
        );
    }

    /// Records that a node has processed an operator's drain. Ignored if the drain was cancelled
    /// and the node has not confirmed the cancellation yet, or if the node has a later session.
    pub fn out_of_service(self: &Arc<Self>, node: &Arc<StoreNode>, session: u64, moves: bool) {
        self.says_it_drains(
            node,
            DrainReport {
                session: Some(session),
                moves,
                number: 0,
            },
        );
    }

    /// Processes the word of a node out of service that its media do not come back.
    pub fn media_leave(&self, node: &StoreNode, session: u64) {
        if node.says_media_leave(session) {
            self.replace_copies_that_leave();
        }
        self.doubt_drained();
    }

    /// Processes a node's report that it drains: [`Pool::draining`] or [`Pool::out_of_service`], with the number of
    /// the report.
    pub fn says_it_drains(self: &Arc<Self>, node: &Arc<StoreNode>, report: DrainReport) {
        let move_blocks = report.moves;
        let drains = node.says_it_drains(report);
        if drains {
            self.doubt_drained();
        }
        // The node has processed the welcome, as before a heartbeat. Only a node that was heard has
        // its blocks read and copied.
        self.heard(node, Some(node.reported()));
        if !drains {
            return;
        }
        let is_moved = self.save_after_task_off(node);
        tracing::info!(node = %node.name, move_blocks = move_blocks || is_moved, "node is draining");
        if is_moved {
            return;
        }
        let (pool, node) = (Arc::clone(self), Arc::clone(node));
        tokio::spawn(async move {
            pool.puts_end_on(&node).await;
            if move_blocks && !pool.stores_on_media_of(&node) {
                pool.move_all_of(&node).await;
            } else {
                pool.demote_all_of(&node);
            }
        });
    }

    /// Waits until the puts and pulls that write to a node have ended. The node gets no others. A
    /// block that is committed after the scan of the node's blocks would be left behind, so puts
    /// that take too long are ended.
    pub(in crate::pool) async fn puts_end_on(&self, node: &StoreNode) {
        let segments = node.segments();
        let until = Instant::now() + PUTS_END;
        let is_written =
            || self.replicas.has_target(node) || self.reservations.lock().has_on(&segments);
        // If the drain is cancelled, the puts go on.
        while node.drains() && is_written() {
            if Instant::now() >= until {
                // Commits that are already submitted to the log stay, and end soon.
                let ended = self.reservations.lock().take_on(&segments);
                if !ended.is_empty() {
                    let puts = ended.len();
                    tracing::warn!(node = %node.name, puts, "puts on a draining node were too slow and end");
                    self.end_reservations(ended);
                }
                if Instant::now() >= until + PUTS_END || self.is_stopping() {
                    return;
                }
            }
            sleep(PUTS_POLL).await;
        }
    }

    /// Ends a session. From then on the node's silence decides its state.
    pub fn detach(self: &Arc<Self>, node: &StoreNode, session: u64) {
        node.detach(session, self.now());
        self.media_left(node, session);
        self.doubt_drained();
        self.replicas.wake();
    }

    /// Drops an incarnation and its blocks for good. After this call no lookup returns these
    /// blocks. They leave the directory a little later.
    pub fn drop_node(self: &Arc<Self>, node: &Arc<StoreNode>) {
        node.set_state(NodeState::Gone);
        node.end_session(self.now());
        self.doubt_drained();
        // The node's media cannot be read any more.
        self.tiering.wake_lookups();
        // Before a block leaves.
        self.end_moves_off(node);
        self.members.drop_incarnation(&node.name, node.incarnation);
        let segments = node.segments();
        let mut records: Vec<Record> = segments
            .iter()
            .map(|id| Record::SegmentGone(record::SegmentGone { id: *id }))
            .collect();
        records.push(Record::IncarnationDropped(record::IncarnationDropped {
            node: node.name.clone(),
            incarnation: node.incarnation,
        }));
        // The record is logged before a block leaves the directory. The node's memory is already
        // lost, so no call waits for durability.
        let until_submitted = self.evicting.read();
        let gone: Vec<Arc<Segment>> = segments
            .iter()
            .filter_map(|id| self.placement.remove(*id))
            .collect();
        self.journal().insist(records, Ack::Durable, |_| {});
        drop(until_submitted);
        // Every put with a grant on the node ends. Its replicas on other nodes are freed as usual.
        let ended = self.reservations.lock().take_on(&segments);
        self.end_reservations(ended);
        // The node will never re-verify the replicas that clients reported there.
        self.hidden
            .write()
            .retain(|(segment, ..)| !segments.contains(segment));
        let sweep = Sweep::new(Arc::clone(node), gone);
        self.sweeps.lock().push_back(sweep);
        self.quarantine.forget(node);
        self.changed.notify_waiters();
        // The sweep logs a warning if blocks are lost.
        if node.departure.has_taken_leave() {
            tracing::info!(node = %node.name, incarnation = %node.incarnation, "node has left");
        } else {
            tracing::warn!(node = %node.name, incarnation = %node.incarnation, "node dropped");
        }
    }

    /// Drops a node that says goodbye: it shuts down in order.
    pub fn said_goodbye(self: &Arc<Self>, node: &Arc<StoreNode>) {
        node.departure.take_leave();
        self.drop_node(node);
    }
}
