//! The media as operators see them, and their removal from the pool.

use super::super::Pool;
use super::Use;
use crate::membership::UnusedMedium;
use crate::store::record;
use kvpool_proto::MediumState;
use kvpool_types::{Code, Length, MediumId, NodeName};
use std::sync::Arc;

/// The states of a medium, as `kvctl status` and the gauge `media` name them.
pub const MEDIUM_STATES: [&str; 7] = [
    "ready",
    "read_only",
    "slow",
    "gone",
    "attaching",
    "absent",
    "refused",
];

/// The state of one medium at one moment.
#[derive(Clone, Debug)]
pub struct MediumView {
    /// The medium's record in the log.
    pub record: record::Medium,
    /// One of [`MEDIUM_STATES`]. `absent`: no connected node has the medium. `attaching`: the node has not
    /// confirmed the attachment yet. `refused`: the node of the last attachment has the medium and does not use it.
    pub state: &'static str,
    /// What the node says of a refused medium.
    pub unused: Option<UnusedMedium>,
    /// The bytes of copies and of stores in progress, with headers.
    pub used: Length,
    /// The number of copies.
    pub copies: u64,
}

/// The outcome of detaching a medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detached {
    /// The pool has forgotten the medium and this number of copies.
    Done(u64),
    /// The pool has no such medium.
    Unknown,
    /// The connected node with this name has the medium.
    Connected(String),
    /// The medium has this number of copies, and the operator did not consent to lose them.
    HasCopies(u64),
}

impl Pool {
    /// The bytes whose store is due or in progress.
    pub fn bytes_due(&self) -> u64 {
        let demotions = self.tiering.demotions.lock();
        let due = demotions.nodes.values().map(|line| match line.drains {
            Some(_) => line.pinned_bytes + line.bytes,
            None => line.pinned_bytes + line.bytes.saturating_sub(line.kept),
        });
        let due: u64 = due.sum();
        drop(demotions);
        let traffic = self.tiering.traffic.lock();
        let in_flight: u64 = traffic.uses.values().map(|used| used.in_flight).sum();
        due + in_flight
    }

    /// Every medium of the pool, by the id of its segment.
    pub fn media(&self) -> Vec<MediumView> {
        if self.tier.is_empty() {
            return Vec::new();
        }
        let unused = self.reported_unused();
        let media = self.tier.media();
        let traffic = self.tiering.traffic.lock();
        let view = |medium: &Arc<crate::tier::Medium>| {
            let record = medium.record();
            let state = traffic.uses.get(&medium.id).map_or("absent", state_of);
            let why = unused
                .iter()
                .find(|(node, one)| one.medium == Some(record.medium) && *node == record.node);
            // The report may be older than the attachment.
            let why = why.filter(|_| matches!(state, "attaching" | "absent"));
            MediumView {
                state: why.map_or(state, |_| "refused"),
                unused: why.map(|(_, one)| one.clone()),
                used: medium.used(),
                copies: medium.copies(),
                record,
            }
        };
        media.iter().map(view).collect()
    }

    /// The media that connected nodes have and do not use, beside those of [`Pool::media`].
    pub fn unused_media(&self) -> Vec<(NodeName, UnusedMedium)> {
        let mut unused = self.reported_unused();
        if unused.is_empty() {
            return unused;
        }
        let media = self.tier.media();
        unused.retain(|(node, one)| {
            let is_it = |medium: &Arc<crate::tier::Medium>| {
                one.medium == Some(medium.medium) && medium.holder().node == *node
            };
            !media.iter().any(is_it)
        });
        unused
    }

    fn reported_unused(&self) -> Vec<(NodeName, UnusedMedium)> {
        let nodes = self.members.all().into_iter();
        let unused = nodes.flat_map(|node| {
            let media = node.unused_media().into_iter();
            media.map(move |one| (node.name.clone(), one))
        });
        unused.collect()
    }

    /// Forgets a medium that no connected node has, and its copies. Returns after this is durable. If a node
    /// brings the medium back, the node must format it.
    ///
    /// # Errors
    ///
    /// The code with which the log refused the record, or [`Code::StoreFailed`].
    pub async fn detach_medium(
        self: &Arc<Self>,
        id: MediumId,
        with_copies: bool,
    ) -> Result<Detached, Code> {
        let _no_offer_meanwhile = self.registration.lock().await;
        let mut media = self.tier.media().into_iter();
        let Some(medium) = media.find(|medium| medium.medium == id) else {
            return Ok(Detached::Unknown);
        };
        {
            let traffic = self.tiering.traffic.lock();
            let used = traffic.uses.get(&medium.id);
            if let Some(used) = used.filter(|used| used.node.is_connected()) {
                return Ok(Detached::Connected(used.node.name.0.clone()));
            }
        }
        let copies = medium.copies();
        if copies > 0 && !with_copies {
            return Ok(Detached::HasCopies(copies));
        }
        tracing::warn!(medium = %id, node = %medium.holder().node, copies, "medium retired by an operator");
        let logged = self.drop_medium(medium.id);
        logged.await.unwrap_or(Err(Code::StoreFailed))?;
        Ok(Detached::Done(copies))
    }
}

fn state_of(used: &Use) -> &'static str {
    if !used.node.is_connected() {
        return "absent";
    }
    if !used.is_attached {
        return "attaching";
    }
    match used.state {
        MediumState::MediumReady => "ready",
        MediumState::MediumReadOnly => "read_only",
        MediumState::MediumSlow => "slow",
        MediumState::MediumGone => "gone",
    }
}
