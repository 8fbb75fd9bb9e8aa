//! The HTTP port: probes, metrics, the page, and a read-only JSON view of nodes, segments and counters.

use crate::leadership::Seat;
use crate::membership::UnusedMedium;
use crate::overview::Watch;
use crate::pool::{MediumView, Pool};
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use kvpool_daemon::probe::{self, Health};
use kvpool_proto as proto;
use kvpool_types::{MediumId, NodeName};
use serde_json::{Value, json};
use std::sync::Arc;

struct SeatHealth(Arc<Seat>);

impl Health for SeatHealth {
    fn healthy(&self) -> Result<(), String> {
        self.0.pool().map_or(Ok(()), |pool| pool.healthy())
    }

    fn ready(&self) -> Result<(), String> {
        self.0.ready()
    }

    /// Without this refresh, a monitor would read the role of the last report, up to half a second
    /// old.
    fn refresh_gauges(&self) {
        self.0.refresh_gauges();
    }
}

/// The routes of the HTTP port.
pub fn router(seat: Arc<Seat>, watch: Arc<Watch>) -> Router {
    let health = Arc::new(SeatHealth(Arc::clone(&seat)));
    let registry = seat.metrics.registry().clone();
    let views = Router::new()
        .route("/api/v1/nodes", get(nodes))
        .route("/api/v1/segments", get(segments))
        .route("/api/v1/counters", get(counters))
        .route("/api/v1/cluster", get(cluster))
        .with_state(seat);
    probe::router(registry, health)
        .merge(views)
        .merge(super::page::router(watch))
}

/// The pool that this master leads; otherwise a view that names the leader.
fn led(seat: &Seat) -> Result<Arc<Pool>, (StatusCode, Json<Value>)> {
    seat.pool().map_err(|elsewhere| {
        let told = json!({ "error": elsewhere.reason, "leader": elsewhere.leader });
        (StatusCode::SERVICE_UNAVAILABLE, Json(told))
    })
}

type View = Result<Json<Value>, (StatusCode, Json<Value>)>;

/// The reply of the stats call. The JSON views show the same values.
pub(super) fn stats(pool: &Pool) -> proto::StatsReply {
    let usage = pool.placement.usage();
    // `counters` also reads the segments. A nested read of their lock could deadlock with a waiting
    // writer, so it comes first.
    let counters = pool.counters();
    let segments = pool.placement.segments();
    let nodes = pool
        .members
        .all()
        .iter()
        .map(|node| (node, node.address()))
        .map(|(node, address)| proto::NodeStats {
            name: node.name.0.clone(),
            state: pool.state_label(node).into(),
            incarnation: bytes::Bytes::copy_from_slice(&node.incarnation.to_bytes()),
            data_address: address.data,
            shm_path: address.shm_path,
            heartbeat_age_ms: pool.age_ms(node.last_heard()),
            problems: node.problems(),
            left_blocks: node.left_blocks(),
            version: node.version(),
            media_leave: node.drains() && node.media_leave(),
            segments: node
                .segments()
                .iter()
                .filter_map(|id| {
                    let segment = segments.get(*id)?;
                    let extents = segment.extents();
                    Some(proto::SegmentStats {
                        id: id.0,
                        capacity_bytes: segment.size.0,
                        used_bytes: segment.used(),
                        quarantine_bytes: segment.quarantined(),
                        free_ranges: extents.free_ranges() as u64,
                        largest_free_bytes: extents.largest_free().0,
                    })
                })
                .collect(),
        })
        .collect();
    proto::StatsReply {
        epoch: pool.epoch.0,
        cluster_id: bytes::Bytes::copy_from_slice(&pool.cluster.to_bytes()),
        blocks: pool.blocks(),
        reservations: pool.reservations() as u64,
        capacity_bytes: usage.capacity,
        used_bytes: usage.used,
        quarantine_bytes: usage.quarantined,
        nodes,
        counters,
        uptime_ms: pool.uptime_ms(),
        namespaces: pool.namespace_names(),
        media: media(pool),
        // The caller adds the problems of the master.
        problems: Vec::new(),
    }
}

/// The media of the pool, and the media that nodes have and do not use.
fn media(pool: &Pool) -> Vec<proto::MediumStats> {
    let unused = pool.unused_media().into_iter().map(unused_stats);
    let known = pool.media().into_iter().map(medium_stats);
    known.chain(unused).collect()
}

fn unused_stats((node, unused): (NodeName, UnusedMedium)) -> proto::MediumStats {
    let id = unused.medium.unwrap_or(MediumId(0));
    proto::MediumStats {
        medium_id: bytes::Bytes::copy_from_slice(&id.to_bytes()),
        node: node.0,
        state: "refused".to_owned(),
        path: unused.path,
        reason: unused.reason,
        ..proto::MediumStats::default()
    }
}

fn medium_stats(medium: MediumView) -> proto::MediumStats {
    let MediumView {
        record,
        state,
        unused,
        used,
        copies,
    } = medium;
    let (path, reason) = unused.map_or_else(Default::default, |one| (one.path, one.reason));
    proto::MediumStats {
        medium_id: bytes::Bytes::copy_from_slice(&record.medium.to_bytes()),
        segment: record.id.0,
        node: record.node.0,
        state: state.to_owned(),
        generation: record.generation,
        capacity_bytes: record.size.0,
        used_bytes: used.0,
        copies,
        zone: record.cursor,
        zone_bytes: record.zone.0,
        path,
        reason,
    }
}

fn segment_view(node: &proto::NodeStats, segment: &proto::SegmentStats) -> Value {
    json!({
        "id": segment.id,
        "node": node.name,
        "capacity_bytes": segment.capacity_bytes,
        "used_bytes": segment.used_bytes,
        "quarantine_bytes": segment.quarantine_bytes,
        "free_ranges": segment.free_ranges,
        "largest_free_bytes": segment.largest_free_bytes,
    })
}

async fn nodes(State(seat): State<Arc<Seat>>) -> View {
    let pool = led(&seat)?;
    let views: Vec<Value> = stats(&pool)
        .nodes
        .iter()
        .map(|node| {
            let incarnation = kvpool_types::Incarnation::from_slice(&node.incarnation);
            json!({
                "name": node.name,
                "state": node.state,
                "incarnation": incarnation.unwrap_or_default().to_string(),
                "data_address": node.data_address,
                "version": node.version,
                "heartbeat_age_ms": node.heartbeat_age_ms,
                "segments": node.segments.iter().map(|s| s.id).collect::<Vec<_>>(),
            })
        })
        .collect();
    Ok(Json(Value::Array(views)))
}

async fn segments(State(seat): State<Arc<Seat>>) -> View {
    let pool = led(&seat)?;
    let stats = stats(&pool);
    let views = stats.nodes.iter().flat_map(|node| {
        node.segments
            .iter()
            .map(move |segment| segment_view(node, segment))
    });
    Ok(Json(views.collect()))
}

async fn counters(State(seat): State<Arc<Seat>>) -> View {
    let pool = led(&seat)?;
    let stats = stats(&pool);
    Ok(Json(json!({
        "cluster": pool.cluster.to_string(),
        "epoch": stats.epoch,
        "uptime_ms": stats.uptime_ms,
        "blocks": stats.blocks,
        "reservations": stats.reservations,
        "capacity_bytes": stats.capacity_bytes,
        "used_bytes": stats.used_bytes,
        "quarantine_bytes": stats.quarantine_bytes,
        "namespaces": stats.namespaces,
        "counters": stats.counters,
    })))
}

async fn cluster(State(seat): State<Arc<Seat>>) -> Json<Value> {
    let told = seat.describe();
    let members = told.members.iter().map(|member| {
        json!({
            "address": member.address,
            "http_address": member.http_address,
            "role": member.role,
            "applied": member.applied,
            "heard_nodes": member.heard_nodes,
            "heard_clients": member.heard_clients,
            "version": member.version,
        })
    });
    let snapshots = told.snapshots.iter().map(|snapshot| {
        json!({
            "shard": snapshot.shard,
            "through": snapshot.through,
            "size_bytes": snapshot.size_bytes,
        })
    });
    Json(json!({
        "epoch": told.epoch,
        "leader": told.leader,
        "role": told.role,
        "reason": told.reason,
        "members": members.collect::<Vec<_>>(),
        "log_last": told.log_last,
        "log_cut": told.log_cut,
        "store": told.store,
        "store_bytes": told.store_bytes,
        "store_in_use_bytes": told.store_in_use_bytes,
        "alarms": told.alarms,
        "snapshots": snapshots.collect::<Vec<_>>(),
        "term_left_ms": told.term_left_ms,
    }))
}
