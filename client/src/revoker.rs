//! Revokes reservations that no put uses, because the write failed or the caller has left.

use crate::clock::Deadline;
use crate::control::{Call, Control};
use kvpool_proto::RevokeRequest;
use kvpool_types::wire::keys::pack;
use kvpool_types::{Epoch, Key, Version};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// The most reservations that wait to be revoked. Further reservations expire by themselves.
const QUEUE: usize = 4096;
/// The most reservations that one call revokes.
const REVOKED_AT_ONCE: usize = 512;
/// The time limit of one call.
const REVOKE_TIMEOUT: Duration = Duration::from_secs(3);

/// The identity of a reservation at the master that gave it.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) key: Key,
    pub(crate) version: Version,
    pub(crate) epoch: Epoch,
}

/// Revokes reservations, many in one call, on a task of its own. The task ends when the last clone is dropped
/// and the queue is empty.
#[derive(Clone, Debug)]
pub(crate) struct Revoker(mpsc::Sender<Ticket>);

impl Revoker {
    /// Starts the task that revokes.
    pub(crate) fn start(control: &Arc<Control>) -> Self {
        let (sender, mut queue) = mpsc::channel(QUEUE);
        let revoking = Arc::clone(control);
        control.spawn(async move {
            let mut tickets = Vec::new();
            while queue.recv_many(&mut tickets, REVOKED_AT_ONCE).await > 0 {
                revoke(&revoking, std::mem::take(&mut tickets)).await;
            }
        });
        Self(sender)
    }

    /// Revokes one reservation. If the queue is full, the reservation expires by itself, like a
    /// dead client's reservation.
    pub(crate) fn give_back(&self, ticket: Ticket) {
        let _ = self.0.try_send(ticket);
    }
}

async fn revoke(control: &Control, tickets: Vec<Ticket>) {
    let mut by_epoch: BTreeMap<Epoch, Vec<Ticket>> = BTreeMap::new();
    for ticket in tickets {
        by_epoch.entry(ticket.epoch).or_default().push(ticket);
    }
    let most = control.limits().max_batch_keys.clamp(1, REVOKED_AT_ONCE);
    let mut calls = Vec::new();
    for (epoch, tickets) in &by_epoch {
        calls.extend(tickets.chunks(most).map(|tickets| (*epoch, tickets)));
    }
    for (epoch, tickets) in calls {
        let request = RevokeRequest {
            caller: None,
            keys: pack(tickets.iter().map(|ticket| &ticket.key)).into(),
            versions: tickets.iter().map(|ticket| ticket.version.0).collect(),
        };
        let call = Call::by(Deadline::after(REVOKE_TIMEOUT))
            .under(epoch)
            .aside();
        if let Err(error) = control.call(request, call).await {
            tracing::debug!(%error, count = tickets.len(), "reservations not revoked, they expire by themselves");
        }
    }
}
