//! The state of all masters of a cluster, and of their store.

use super::{Report, Seat, loading};
use crate::store::etcd::LeaseId;
use crate::store::{Claim, ElectionStore, MetadataStore, StoreError};
use kvpool_proto as proto;
use kvpool_types::ClusterId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// The interval at which masters exchange their states.
const EVERY: Duration = Duration::from_secs(1);
/// The interval for a store that must examine all its snapshots to answer.
const SELDOM: Duration = Duration::from_secs(10);
/// How long the list still names a silent master.
const LISTED: Duration = Duration::from_secs(10);

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The entry of a master in etcd. Later versions may add fields.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Member {
    address: String,
    http_address: String,
    role: String,
    applied: u64,
    heard_nodes: u64,
    heard_clients: u64,
    version: String,
}

impl Member {
    fn into_wire(self) -> proto::MasterMember {
        proto::MasterMember {
            address: self.address,
            http_address: self.http_address,
            role: self.role,
            applied: self.applied,
            heard_nodes: self.heard_nodes,
            heard_clients: self.heard_clients,
            version: self.version,
        }
    }
}

/// Publishes this master's state to the other masters. Reports their states and the store's state
/// to the seat.
///
/// A message in `stops` ends this and deletes the entry of this master. The end of the sender
/// alone, as at a panic, leaves the entry until its lease expires.
pub(super) async fn tell(
    seat: Arc<Seat>,
    store: Arc<dyn ElectionStore>,
    claim: Claim,
    cluster: ClusterId,
    stops: oneshot::Receiver<()>,
) {
    let mut lease = None;
    let is_told = tokio::select! {
        biased;
        stop = stops => stop.is_ok(),
        () = exchange(&seat, &*store, &claim, cluster, &mut lease) => false,
    };
    // etcd refuses a put that arrives after its lease has ended.
    if let Some(held) = lease.filter(|_| is_told)
        && let Err(error) = store.revoke_lease(held).await
    {
        tracing::debug!(%error, "entry of this master not deleted, it will expire");
    }
}

/// Publishes this master's state, and reads the states of all, until dropped.
async fn exchange(
    seat: &Seat,
    store: &dyn ElectionStore,
    claim: &Claim,
    cluster: ClusterId,
    lease: &mut Option<LeaseId>,
) {
    let mut times = interval(EVERY);
    times.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        times.tick().await;
        // A full etcd refuses this master's state, but still reports its own content.
        let published = publish(seat, store, claim, lease).await;
        let read = read_report(store, cluster).await;
        let reported = read.map(|report| seat.set_report(report));
        if let Err(error) = published.and(reported) {
            tracing::debug!(%error, "member list or store status not updated, retrying");
        }
    }
}

/// Publishes this master's state under its lease. A full etcd renews leases but grants none. So
/// only the loss of the lease makes this function drop it.
async fn publish(
    seat: &Seat,
    store: &dyn ElectionStore,
    claim: &Claim,
    lease: &mut Option<LeaseId>,
) -> Result<(), StoreError> {
    let kept = match *lease {
        Some(held) => store.keep_alive(held).await?.map(|_| held),
        None => None,
    };
    *lease = kept;
    let held = match kept {
        Some(held) => held,
        None => store.grant_lease(LISTED).await?,
    };
    *lease = Some(held);
    let (heard_nodes, heard_clients) = heard(seat);
    let own = Member {
        address: claim.address.clone(),
        http_address: claim.http_address.clone(),
        role: seat.role().label().to_owned(),
        applied: seat.position().0,
        heard_nodes,
        heard_clients,
        version: VERSION.to_owned(),
    };
    let told = serde_json::to_vec(&own).map_err(|error| StoreError::Corrupt {
        reason: format!("what this master says of itself: {error}"),
    })?;
    let put = store.put_member(held, &claim.id, told.into()).await;
    if matches!(put, Err(StoreError::LeaseGone)) {
        *lease = None;
    }
    put
}

/// The nodes and clients that this master hears from. A leader counts its connected nodes and
/// clients. Another master counts the nodes and clients that it refused recently.
fn heard(seat: &Seat) -> (u64, u64) {
    let (nodes, clients) = match seat.pool() {
        Ok(pool) if pool.leads() => {
            let nodes = pool.members.all();
            let nodes = nodes.iter().filter(|node| node.is_connected());
            (nodes.count(), pool.writers.count())
        }
        _ => (seat.contacts.nodes(), seat.contacts.clients()),
    };
    (nodes as u64, clients as u64)
}

async fn read_report(store: &dyn ElectionStore, cluster: ClusterId) -> Result<Report, StoreError> {
    let members = store.members().await?.into_iter();
    // A later version wrote an unreadable entry. The list omits it.
    let members = members.filter_map(|(_, told)| serde_json::from_slice::<Member>(&told).ok());
    let members = latest_of_each_address(members.map(Member::into_wire));
    let mut told = describe(store, "etcd").await?;
    told.cluster_id = bytes::Bytes::copy_from_slice(&cluster.to_bytes());
    let usage = store.usage().await?;
    told.store_bytes = usage.db_size;
    told.store_in_use_bytes = usage.in_use;
    told.alarms = usage.alarms;
    Ok(Report {
        at: Some(Instant::now()),
        members,
        store: told,
    })
}

/// The last of the entries with the same address. The entry of an earlier run of a master stays
/// until its lease expires.
fn latest_of_each_address(
    entries: impl Iterator<Item = proto::MasterMember>,
) -> Vec<proto::MasterMember> {
    let mut latest: Vec<proto::MasterMember> = Vec::new();
    for entry in entries {
        if !entry.address.is_empty() {
            latest.retain(|earlier| earlier.address != entry.address);
        }
        latest.push(entry);
    }
    latest.sort_by(|one, other| one.address.cmp(&other.address));
    latest
}

/// Publishes the store's state to the seat of a standalone master, until dropped.
pub async fn report_alone(seat: Arc<Seat>, store: Arc<dyn MetadataStore>, http_address: String) {
    let mut times = interval(EVERY);
    times.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last: Option<(Instant, proto::ClusterReply)> = None;
    loop {
        times.tick().await;
        let told = match last.take().filter(|(at, _)| at.elapsed() < SELDOM) {
            Some(fresh) => Ok(fresh),
            None => match loading::beside(read_alone(Arc::clone(&store))).await {
                Some(read) => read.map(|told| (Instant::now(), told)),
                // The process ends.
                None => return,
            },
        };
        match told {
            Ok((at, told)) => {
                last = Some((at, told.clone()));
                let (heard_nodes, heard_clients) = heard(&seat);
                let own = proto::MasterMember {
                    address: seat.known().leader,
                    http_address: http_address.clone(),
                    heard_nodes,
                    heard_clients,
                    role: seat.role().label().to_owned(),
                    applied: told.log_last,
                    version: VERSION.to_owned(),
                };
                seat.set_report(Report {
                    at: Some(Instant::now()),
                    members: vec![own],
                    store: told,
                });
            }
            Err(StoreError::Closed) => return,
            Err(error) => tracing::debug!(%error, "metadata store status not read"),
        }
    }
}

/// The state of the store of a standalone master. Its calls block their thread while an append to
/// it waits for the disk.
async fn read_alone(store: Arc<dyn MetadataStore>) -> Result<proto::ClusterReply, StoreError> {
    let mut told = describe(&*store, "embedded").await?;
    told.store_bytes = store.size_on_disk().await?;
    told.store_in_use_bytes = told.store_bytes;
    Ok(told)
}

async fn describe(
    store: &dyn MetadataStore,
    kind: &str,
) -> Result<proto::ClusterReply, StoreError> {
    let span = store.log_span().await?;
    let snapshots = store.snapshot_positions().await?;
    let snapshots = snapshots
        .into_iter()
        .map(|(shard, (through, size))| proto::SnapshotStats {
            shard: shard.0,
            through: through.0,
            size_bytes: size,
        });
    Ok(proto::ClusterReply {
        log_last: span.last.0,
        log_cut: span.cut.0,
        snapshots: snapshots.collect(),
        store: kind.to_owned(),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_master_that_runs_again_is_listed_once() {
        let entry = |address: &str, applied| proto::MasterMember {
            address: address.to_owned(),
            applied,
            ..Default::default()
        };
        let entries = [
            entry("http://b:1", 300),
            entry("http://a:1", 500),
            entry("http://b:1", 7),
            entry("", 1),
            entry("", 2),
        ];
        let listed = latest_of_each_address(entries.into_iter());
        let listed: Vec<_> = listed
            .iter()
            .map(|one| (one.address.as_str(), one.applied))
            .collect();
        let expected = [("", 1), ("", 2), ("http://a:1", 500), ("http://b:1", 7)];
        assert_eq!(listed, expected);
    }
}
