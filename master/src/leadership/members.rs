//! What the masters of a cluster know of each other, and of their store.

use super::{Report, Seat};
use crate::store::etcd::{Claim, EtcdStore, LeaseId};
use crate::store::{MetadataStore, StoreError};
use kvpool_proto as proto;
use kvpool_types::ClusterId;
use prost::Message;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::{MissedTickBehavior, interval};

/// How often it is told and asked.
const EVERY: Duration = Duration::from_secs(1);
/// How often a store is asked that looks at all of its snapshots for the answer.
const SELDOM: Duration = Duration::from_secs(10);
/// How long a master that says nothing more is still listed.
const LISTED: Duration = Duration::from_secs(10);

/// Tells the other masters of this one, and the seat of them and of the store, until it is dropped.
pub(super) async fn tell(seat: Arc<Seat>, store: Arc<EtcdStore>, claim: Claim, cluster: ClusterId) {
    let mut lease = None;
    let mut times = interval(EVERY);
    times.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        times.tick().await;
        if let Err(error) = tell_once(&seat, &store, &claim, cluster, &mut lease).await {
            tracing::debug!(%error, "the other masters were not told of this one");
            lease = None;
        }
    }
}

async fn tell_once(
    seat: &Seat,
    store: &EtcdStore,
    claim: &Claim,
    cluster: ClusterId,
    lease: &mut Option<LeaseId>,
) -> Result<(), StoreError> {
    let kept = match *lease {
        Some(held) => store.keep_alive(held).await?.map(|_| held),
        None => None,
    };
    let held = match kept {
        Some(held) => held,
        None => store.grant_lease(LISTED).await?,
    };
    *lease = Some(held);
    let own = proto::MasterMember {
        address: claim.address.clone(),
        http_address: claim.http_address.clone(),
        role: seat.role().label().to_owned(),
        applied: seat.position().0,
        heard_nodes: seat.heard.nodes() as u64,
        heard_clients: seat.heard.clients() as u64,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    store
        .put_member(held, &claim.id, own.encode_to_vec().into())
        .await?;
    let members = store.members().await?.into_iter();
    let members = members.filter_map(|(_, member)| proto::MasterMember::decode(member).ok());
    let mut told = describe(store, "etcd").await?;
    told.cluster_id = bytes::Bytes::copy_from_slice(&cluster.to_bytes());
    let usage = store.usage().await?;
    told.store_bytes = usage.db_size;
    told.store_in_use_bytes = usage.in_use;
    told.alarms = usage.alarms;
    seat.set_report(Report {
        at: Some(Instant::now()),
        members: members.collect(),
        store: told,
    });
    Ok(())
}

/// Tells the seat of the store of a master that is the only one, until it is dropped.
pub async fn report_alone(seat: Arc<Seat>, store: Arc<dyn MetadataStore>) {
    let mut times = interval(SELDOM);
    times.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        times.tick().await;
        let known = seat.known();
        let told = async {
            let mut told = describe(&*store, "embedded").await?;
            told.store_bytes = store.size_on_disk().await?;
            told.store_in_use_bytes = told.store_bytes;
            Ok::<_, StoreError>(told)
        };
        match told.await {
            Ok(told) => {
                let own = proto::MasterMember {
                    address: known.leader,
                    role: seat.role().label().to_owned(),
                    applied: told.log_last,
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    ..Default::default()
                };
                seat.set_report(Report {
                    at: Some(Instant::now()),
                    members: vec![own],
                    store: told,
                });
            }
            Err(StoreError::Closed) => return,
            Err(error) => tracing::debug!(%error, "the store did not say how it is"),
        }
    }
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
