//! Attaches the media that nodes offer, and ends their use with the nodes' sessions.

use super::super::Pool;
use super::super::nodes::RegisterError;
use super::transfers::Transfer;
use super::{Absence, Emptying, TakesStores, Use};
use crate::membership::{NodeState, StoreNode};
use crate::store::journal::Ack;
use crate::store::record::{self, Record};
use crate::tier::{Holder, Ring};
use kvpool_proto::{self as proto, MediumState, master_message::Body};
use kvpool_types::medium::{Generation, Judgement, judge};
use kvpool_types::{Code, Incarnation, Length, MediumId, NodeName, SegmentId};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::oneshot;

/// A medium that a node offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedMedium {
    /// The medium's id.
    pub medium: MediumId,
    /// The generation in the medium's superblock; 0 if it was never attached.
    pub generation: Generation,
    /// The bytes for extents.
    pub size: Length,
    /// The length of a zone in bytes.
    pub zone: Length,
    /// The medium's present state.
    pub state: MediumState,
    /// The bytes that may be written per day; zero for no limit.
    pub budget: u64,
    /// The names of the namespaces whose blocks the medium takes; empty for all.
    pub namespaces: Vec<String>,
}

/// After this absence a medium's copies no longer count, so blocks in memory get copies elsewhere.
/// A node restarts faster than that. The same holds for a medium that its node offers but cannot
/// attach.
const LONG_ABSENCE: Duration = Duration::from_secs(30);

/// The most media of a node, absent ones included. Each takes a durable record, and memory in every
/// master.
pub const MOST_MEDIA: usize = 64;

/// The delay before an attachment is retried, if the store had no room for its record. A node does
/// not offer a medium again by itself.
const REFUSED_PAUSE: Duration = Duration::from_millis(500);

/// What to do with an offered medium.
enum Answer {
    /// The node must attach the medium under this record.
    Attach(record::Medium),
    /// The node had the medium attached in an earlier session, and no other attachment happened since.
    Continue(SegmentId, Generation),
    /// The node must format the medium. If the pool had a segment for it, the segment is dropped.
    Reset(Option<SegmentId>),
    /// The pool does not accept the medium, for this reason.
    Refuse(String),
}

impl Pool {
    /// Processes a node's media list. A later list of the session takes precedence, so call this in the order
    /// of the lists. While the metadata store is full, the future waits for space.
    ///
    /// # Errors
    ///
    /// [`RegisterError`] when a record of the list was not logged. Later media of the list were not
    /// processed.
    pub fn media_offered(
        self: &Arc<Self>,
        node: &Arc<StoreNode>,
        session: u64,
        offered: Vec<OfferedMedium>,
    ) -> impl Future<Output = Result<(), RegisterError>> + use<> {
        let list = {
            let mut traffic = self.tiering.traffic.lock();
            traffic.last_list += 1;
            let list = traffic.last_list;
            let of = |offer: &OfferedMedium| (node.incarnation, session, offer.medium);
            let offers = offered.iter().map(|offer| (of(offer), list));
            traffic.latest_lists.extend(offers);
            list
        };
        let (pool, node) = (Arc::clone(self), Arc::clone(node));
        async move {
            let answered = pool.list_offered(&node, session, list, offered).await;
            let mut traffic = pool.tiering.traffic.lock();
            traffic.latest_lists.retain(|_, latest| *latest != list);
            answered
        }
    }

    async fn list_offered(
        self: &Arc<Self>,
        node: &Arc<StoreNode>,
        session: u64,
        list: u64,
        offered: Vec<OfferedMedium>,
    ) -> Result<(), RegisterError> {
        for offer in offered {
            while let Err(refused) = self.medium_offered(node, session, list, &offer).await {
                if !self.may_try_again(node, session, refused.code) {
                    return Err(refused);
                }
                tokio::time::sleep(REFUSED_PAUSE).await;
            }
        }
        Ok(())
    }

    /// Whether the store had no space for a record of this session, and may have some later.
    fn may_try_again(&self, node: &StoreNode, session: u64, refused: Code) -> bool {
        let goes_on = self.leads() && !self.is_stopping();
        goes_on && refused == Code::StoreFull && node.session_number() == Some(session)
    }

    async fn medium_offered(
        self: &Arc<Self>,
        node: &Arc<StoreNode>,
        session: u64,
        list: u64,
        offer: &OfferedMedium,
    ) -> Result<(), RegisterError> {
        let _one_at_a_time = self.registration.lock().await;
        // An offer of an earlier session describes an earlier state of the medium. The generation may have
        // grown since.
        if node.session_number() != Some(session) {
            return Ok(());
        }
        // A later list describes the state better, and waits for the same space.
        let of = (node.incarnation, session, offer.medium);
        let latest = self.tiering.traffic.lock().latest_lists.get(&of).copied();
        if latest != Some(list) {
            return Ok(());
        }
        let mut is_lost = false;
        self.in_use(node, session, offer.medium, |used| {
            is_lost = offer.state == MediumState::MediumGone && offer.state != used.state;
        });
        // Before the change of the state: a drain does not wait for a lost medium, and its blocks
        // need another medium.
        let walk = is_lost.then(|| self.drain_again(node)).flatten();
        let is_in_use = self.in_use(node, session, offer.medium, |used| {
            if offer.state == MediumState::MediumGone && used.state != offer.state {
                // The node may have another medium for these blocks.
                self.tiering.has_lost_copies.store(true, Ordering::Release);
                // A look that begins now waits for this lock, and finds the medium gone.
                self.doubt_drained();
            }
            used.set_state(offer.state);
            self.tiering.wake_lookups();
            used.namespaces.clone_from(&offer.namespaces);
        });
        if let Some(walk) = walk {
            let (pool, node) = (Arc::clone(self), Arc::clone(node));
            tokio::spawn(async move { pool.walk_for_drain(&node, walk) });
        }
        if is_in_use {
            self.take_back_what_waited(node);
            return Ok(());
        }
        match self.judge_offer(node, offer).await? {
            Answer::Attach(medium) => {
                let (id, generation) = (medium.id, medium.generation);
                let pool = Arc::clone(self);
                let record = Record::Medium(medium.clone());
                self.log(vec![record], move || pool.set_medium(medium))
                    .await
                    .map_err(|code| {
                        super::super::nodes::refuse(code, "the metadata store failed")
                    })?;
                self.use_medium(node, session, id, offer);
                order_attach(node, offer, id, Generation(generation));
            }
            Answer::Continue(id, generation) => {
                self.use_medium(node, session, id, offer);
                order_attach(node, offer, id, generation);
            }
            Answer::Reset(known) => {
                if let Some(id) = known {
                    self.drop_medium(id);
                }
                tracing::warn!(node = %node.name, medium = %offer.medium, generation = %offer.generation,
                    "medium does not hold what the pool remembers: the node formats it");
                node.send(Body::ResetMedium(proto::ResetMedium {
                    medium_id: bytes::Bytes::copy_from_slice(&offer.medium.to_bytes()),
                }));
            }
            Answer::Refuse(why) => {
                // A node lists a medium again that was refused before.
                let unused = node.unused_media();
                if !unused.iter().any(|one| one.medium == Some(offer.medium)) {
                    tracing::error!(node = %node.name, medium = %offer.medium, size = %offer.size,
                        zone = %offer.zone, "medium refused: {why}");
                }
                node.send(Body::RefuseMedium(proto::RefuseMedium {
                    medium_id: bytes::Bytes::copy_from_slice(&offer.medium.to_bytes()),
                    reason: why,
                }));
            }
        }
        Ok(())
    }

    /// Passes the medium to `note` if it is in use in this session. Returns false otherwise.
    fn in_use(
        &self,
        node: &StoreNode,
        session: u64,
        medium: MediumId,
        note: impl FnOnce(&mut Use),
    ) -> bool {
        let media = self.tier.media();
        let Some(known) = media.iter().find(|known| known.medium == medium) else {
            return false;
        };
        let mut traffic = self.tiering.traffic.lock();
        let used = traffic
            .uses
            .get_mut(&known.id)
            .filter(|used| used.session == session && used.node.incarnation == node.incarnation);
        used.map(note).is_some()
    }

    async fn judge_offer(
        self: &Arc<Self>,
        node: &StoreNode,
        offer: &OfferedMedium,
    ) -> Result<Answer, RegisterError> {
        let media = self.tier.media();
        let Some(known) = media.iter().find(|known| known.medium == offer.medium) else {
            return self.judge_new(node, offer).await;
        };
        if let Some(other) = self.user_elsewhere(known.id, node) {
            return Ok(Answer::Refuse(format!(
                "node {other} has a medium with the same id, and one of the two is a copy. Take one out of `--ssd` \
                 at its node, then restart this node"
            )));
        }
        let Holder {
            node: holder,
            generation,
            is_pending,
        } = known.holder();
        let (attached, pending) = match is_pending {
            true => (
                Generation(generation.saturating_sub(1)),
                Some(Generation(generation)),
            ),
            false => (Generation(generation), None),
        };
        let judgement = judge(Some(offer.generation), attached, pending);
        if judgement == Judgement::New || known.size != offer.size {
            // An old image on another node proves nothing about the medium of the holder, which may
            // return.
            let is_holder = holder == node.name;
            return Ok(Answer::Reset(is_holder.then_some(known.id)));
        }
        if !is_pending && holder == node.name && self.has_been_attached(known.id, node) {
            return Ok(Answer::Continue(known.id, attached));
        }
        Ok(Answer::Attach(record::Medium {
            node: node.name.clone(),
            // A pending attachment is repeated under the same generation.
            generation: pending.unwrap_or(attached.next()).0,
            is_pending: true,
            ..known.record()
        }))
    }

    async fn judge_new(
        self: &Arc<Self>,
        node: &StoreNode,
        offer: &OfferedMedium,
    ) -> Result<Answer, RegisterError> {
        if offer.generation != Generation(0) {
            // The pool's metadata is older than the medium, or was lost.
            return Ok(Answer::Reset(None));
        }
        // Invalid sizes must not enter the log: the record would be durable, and every later leader would
        // read it.
        if Ring::new(offer.size, offer.zone, 0, 0).is_none() {
            return Ok(Answer::Refuse("its zones do not fit its size".into()));
        }
        let media = self.tier.media().into_iter();
        let of_node = media.filter(|medium| medium.holder().node == node.name);
        if of_node.count() >= MOST_MEDIA {
            return Ok(Answer::Refuse(
                "the node has as many media as a node may have, present or absent; \
                 `kvctl ssd detach` forgets one"
                    .into(),
            ));
        }
        let Some(id) = self.give_segment_ids(1).await?.next() else {
            return Ok(Answer::Refuse("no segment id is left".into()));
        };
        Ok(Answer::Attach(record::Medium {
            id: SegmentId::on_medium(id.number()),
            medium: offer.medium,
            node: node.name.clone(),
            generation: 1,
            is_pending: true,
            size: offer.size,
            zone: offer.zone,
            cursor: 0,
        }))
    }

    /// The other connected node that has the medium.
    fn user_elsewhere(&self, id: SegmentId, node: &StoreNode) -> Option<NodeName> {
        let traffic = self.tiering.traffic.lock();
        let used = traffic.uses.get(&id).filter(|used| {
            // A restarted node has the same name as its earlier incarnation, whose session may still seem
            // open.
            used.node.name != node.name && used.node.is_connected()
        });
        used.map(|used| used.node.name.clone())
    }

    /// Whether this incarnation of the node attached the medium in an earlier session of this term.
    fn has_been_attached(&self, id: SegmentId, node: &StoreNode) -> bool {
        let traffic = self.tiering.traffic.lock();
        let used = traffic.uses.get(&id);
        used.is_some_and(|used| used.is_attached && used.node.incarnation == node.incarnation)
    }

    fn set_medium(&self, medium: record::Medium) {
        match self.tier.medium(medium.id) {
            Some(known) => known.set_holder(Holder {
                node: medium.node,
                generation: medium.generation,
                is_pending: medium.is_pending,
            }),
            None => self.tier.set_medium(medium),
        }
    }

    pub(super) fn use_medium(
        self: &Arc<Self>,
        node: &Arc<StoreNode>,
        session: u64,
        id: SegmentId,
        offer: &OfferedMedium,
    ) {
        let used = Use {
            node: Arc::clone(node),
            session,
            state: offer.state,
            refuses_writes: false,
            is_attached: false,
            in_flight: 0,
            busy: HashMap::new(),
            forwards: 0,
            has_unmoved: false,
            lists_again: 0,
            namespaces: offer.namespaces.clone(),
            emptying: Emptying::Logging,
            pause: None,
            is_told_of_long: false,
        };
        if let Some(medium) = self.tier.medium(id) {
            let now = self.now();
            self.tiering
                .admission
                .set_budget(&medium, offer.budget, now);
        }
        self.tiering.traffic.lock().uses.insert(id, used);
        // The medium cannot be read until the node has attached it.
        self.tiering.wake_lookups();
        if offer.state == MediumState::MediumGone {
            self.doubt_drained();
        }
        // The node offers a medium only when none of its transfers touches it. This leader may notice the end
        // of a broken session later than the next session.
        self.end_transfers(|open| {
            let is_now = open.node.incarnation == node.incarnation && open.session == session;
            open.place.medium == id && !is_now
        });
        // Moves of copies in an earlier session, and removals, may be on their way to the log. No zone may be
        // emptied before they are durable.
        let (pool, of) = (Arc::clone(self), Arc::clone(node));
        self.journal()
            .insist(Vec::new(), Ack::Durable, move |durable| {
                if durable.is_ok() {
                    pool.set_emptying(id, &of, session, Emptying::Idle);
                    pool.tiering.wake();
                }
            });
    }

    /// Gives up the open transfers for which `is_over` is true.
    fn end_transfers(&self, is_over: impl Fn(&Transfer) -> bool) {
        let ended: Vec<_> = {
            let mut traffic = self.tiering.traffic.lock();
            let ended = traffic.open.extract_if(|_, transfer| is_over(transfer));
            ended.map(|(_, transfer)| transfer).collect()
        };
        for transfer in ended {
            self.give_up_transfer(transfer);
        }
    }

    /// Processes a node's confirmation of an attachment. The copies on the medium are readable once the
    /// record of the attachment is durable.
    pub async fn medium_attached(
        self: &Arc<Self>,
        node: &Arc<StoreNode>,
        session: u64,
        medium: MediumId,
        generation: Generation,
    ) {
        let media = self.tier.media();
        let Some(known) = media.into_iter().find(|known| known.medium == medium) else {
            return;
        };
        loop {
            let holder = known.holder();
            if holder.generation != generation.0 || holder.node != node.name {
                tracing::warn!(node = %node.name, %medium, %generation, "attachment of another generation confirmed");
                return;
            }
            if !holder.is_pending {
                break;
            }
            let record = record::Medium {
                is_pending: false,
                ..known.record()
            };
            let (pool, attached) = (Arc::clone(self), record.clone());
            let logged = self
                .log(vec![Record::Medium(record)], move || {
                    // The medium may have been detached meanwhile.
                    if pool.tier.medium(attached.id).is_some() {
                        pool.set_medium(attached);
                    }
                })
                .await;
            let Err(code) = logged else { break };
            tracing::warn!(%medium, %code, "attachment not logged");
            if !self.may_try_again(node, session, code) {
                return;
            }
            tokio::time::sleep(REFUSED_PAUSE).await;
        }
        let is_current = self.in_use(node, session, medium, |used| used.is_attached = true);
        if is_current {
            tracing::info!(node = %node.name, %medium, segment = %known.id, %generation, "medium attached");
            self.queue_all_of(std::slice::from_ref(node));
            // Does not check the node's state: a node that was briefly silent still drains.
            if node.drains() {
                let (pool, node) = (Arc::clone(self), Arc::clone(node));
                tokio::spawn(async move {
                    // A block that is committed after the scan of the node's blocks would get no
                    // copy.
                    pool.puts_end_on(&node).await;
                    pool.demote_all_of(&node);
                });
            }
            self.tiering.wake();
        }
    }

    /// Drops media that have been absent for too long.
    pub(super) fn drop_absent_media(self: &Arc<Self>) {
        let now = self.now();
        let is_used = |id| {
            let traffic = self.tiering.traffic.lock();
            let used: Option<&Use> = traffic.uses.get(&id);
            used.is_some_and(|used| used.node.is_connected())
        };
        let is_attached = |id| {
            let traffic = self.tiering.traffic.lock();
            let used: Option<&Use> = traffic.uses.get(&id);
            used.is_some_and(|used| used.is_attached)
        };
        let (mut late, mut has_lost) = (Vec::new(), false);
        {
            let mut absent = self.tiering.absent.lock();
            let media = self.tier.media();
            absent.retain(|id, _| media.iter().any(|medium| medium.id == *id));
            for medium in media {
                let is_here = is_used(medium.id);
                if is_here && is_attached(medium.id) {
                    absent.remove(&medium.id);
                    continue;
                }
                let absence = absent.entry(medium.id).or_insert(Absence {
                    since: now,
                    is_counted: true,
                    is_here,
                });
                if std::mem::replace(&mut absence.is_here, is_here) != is_here {
                    absence.since = now;
                }
                let lasted = now.since(absence.since);
                if absence.is_counted && lasted >= LONG_ABSENCE {
                    absence.is_counted = false;
                    has_lost = true;
                }
                if is_here {
                    continue;
                }
                if lasted >= self.config.ssd_drop_after {
                    late.push(medium);
                }
            }
        }
        if has_lost {
            self.tiering.has_lost_copies.store(true, Ordering::Release);
            self.doubt_drained();
        }
        for medium in late {
            // While a node's offer is processed, the record of its attachment may be on its way to the log. That
            // record would bring the medium back here, and the record of its drop would follow.
            let Ok(_no_offer_meanwhile) = self.registration.try_lock() else {
                break;
            };
            // The drop of earlier media took time, so the node of this medium may have returned.
            if is_used(medium.id) {
                continue;
            }
            tracing::warn!(medium = %medium.medium, node = %medium.holder().node,
                "medium was absent for longer than ssd_drop_after");
            self.drop_medium(medium.id);
        }
    }

    /// Drops a medium and its copies. The receiver is notified when this is durable.
    pub(super) fn drop_medium(
        self: &Arc<Self>,
        id: SegmentId,
    ) -> oneshot::Receiver<Result<(), Code>> {
        let used = self.tiering.traffic.lock().uses.remove(&id);
        let node = used
            .map(|used| used.node.name.to_string())
            .unwrap_or_default();
        let _until_submitted = self.evicting.read();
        let copies = self.tier.drop_medium(id);
        self.tiering.wake_lookups();
        self.tiering.has_lost_copies.store(true, Ordering::Release);
        self.doubt_drained();
        let gone = Record::SegmentGone(record::SegmentGone { id });
        let (done, durable) = oneshot::channel();
        self.journal()
            .insist(vec![gone], Ack::Durable, move |outcome| {
                let _nobody_waits = done.send(outcome.map(drop).map_err(|error| error.code()));
            });
        tracing::warn!(segment = %id, node, copies, "medium dropped");
        durable
    }

    /// Queues blocks in memory again whose copies lie on media that are lost, or absent for long. Only the
    /// demoter calls this. The caller must not hold the lock under which stores are ordered.
    pub(super) fn replace_lost_copies(&self) {
        if !self.tiering.has_lost_copies.swap(false, Ordering::AcqRel) {
            return;
        }
        let nodes: BTreeMap<Incarnation, Arc<StoreNode>> = {
            let traffic = self.tiering.traffic.lock();
            let uses = traffic.uses.values();
            // A slow medium takes the blocks once it has answered.
            let used = uses.filter(|used| used.stores() >= TakesStores::Later);
            used.map(|used| (used.node.incarnation, Arc::clone(&used.node)))
                .collect()
        };
        if nodes.is_empty() {
            // Another medium may be attached soon.
            self.tiering.has_lost_copies.store(true, Ordering::Release);
            return;
        }
        let mut nodes: Vec<_> = nodes.into_values().collect();
        nodes.retain(|node| node.state() != NodeState::Draining);
        self.queue_all_of(&nodes);
    }

    /// Ends the use of a node's media in a session that has ended, and ends the session's transfers.
    pub(in crate::pool) fn media_left(self: &Arc<Self>, node: &StoreNode, session: u64) {
        let of_session =
            |of: &StoreNode, number: u64| of.incarnation == node.incarnation && number == session;
        let mut was_current = false;
        for used in self.tiering.traffic.lock().uses.values_mut() {
            if of_session(&used.node, used.session) {
                was_current = true;
                used.state = MediumState::MediumGone;
                used.in_flight = 0;
                used.busy.clear();
            }
        }
        // No further transfer of the session begins.
        self.end_transfers(|transfer| of_session(&transfer.node, transfer.session));
        // The next attachment finds every block without a copy.
        if was_current {
            self.tiering.demotions.lock().forget(node.incarnation);
        }
        self.tiering.wake_lookups();
    }
}

fn order_attach(node: &StoreNode, offer: &OfferedMedium, id: SegmentId, generation: Generation) {
    node.send(Body::AttachMedium(proto::AttachMedium {
        medium_id: bytes::Bytes::copy_from_slice(&offer.medium.to_bytes()),
        generation: generation.0,
        segment_id: id.0,
    }));
}
