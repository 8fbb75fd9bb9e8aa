//! The facts of an overview. Their JSON is an interface: `docs/operations/page.md` lists the fields.

use super::alerts::{self, Alert};
use super::history::Point;
use super::uses::{NamespaceUse, SHOWN};
use crate::leadership::{Role, Seat};
use crate::membership::UnusedMedium;
use crate::pool::{MediumView, Pool};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The usage of one node's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fill {
    /// The number of segments.
    pub segments: u64,
    /// Bytes of the segments.
    pub capacity_bytes: u64,
    /// Bytes of blocks, grants and quarantine.
    pub used_bytes: u64,
    /// Bytes in quarantine.
    pub quarantine_bytes: u64,
}

/// One medium.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MediumFacts {
    /// The id.
    pub id: String,
    /// `ready`, `read_only`, `slow`, `gone`, `attaching`, `absent` or `refused`.
    pub state: &'static str,
    /// Bytes for blocks with their headers.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Copies of blocks.
    pub copies: u64,
}

/// A disk, partition or file that its node does not use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UnusedFacts {
    /// Its path at the node.
    pub path: String,
    /// Why the node does not use it.
    pub reason: String,
    /// The id of its medium; empty when unknown.
    pub id: String,
}

/// One node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NodeFacts {
    /// The name.
    pub name: String,
    /// `live`, `suspect`, `draining`, `drained` or `unreported`. `gone`: dropped within the last minutes, or known by
    /// a medium only.
    pub state: &'static str,
    /// `host:port` of the data port.
    pub data_address: String,
    /// Its version of kvpool; empty when unknown.
    pub version: String,
    /// The time since the last heartbeat. For a gone node, the time since its drop. `None` for a
    /// node that only a medium names.
    pub silent_ms: Option<u64>,
    /// Open data connections, as of the last heartbeat.
    pub connections: u64,
    /// The blocks that a stop of this draining node would lose. `None` while they are not counted.
    pub left_blocks: Option<u64>,
    /// True while the node drains and its media do not come back (`kvctl node drain --ssd`).
    pub media_leave: bool,
    /// True once the node stops, so that nobody can take it back.
    #[serde(skip)]
    pub stops: bool,
    /// The usage of its memory.
    #[serde(flatten)]
    pub fill: Fill,
    /// Its media.
    pub media: Vec<MediumFacts>,
    /// The media that it has and does not use.
    pub unused_media: Vec<UnusedFacts>,
    /// The problems that the node reports about its files of tokens, keys and certificates, one
    /// sentence each.
    pub problems: Vec<String>,
}

/// One master.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MasterFacts {
    /// `http://host:port` of gRPC and frames.
    pub address: String,
    /// `host:port` of HTTP; empty when unknown.
    pub http_address: String,
    /// `leader`, `read-only`, `standby` or `starting`. `gone`: another master leads since this one did.
    pub role: String,
    /// The number of groups of the log that it has not applied.
    pub lag: u64,
    /// Its version.
    pub version: String,
}

/// The state of the pool that this master leads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolFacts {
    /// Blocks in memory.
    pub blocks: u64,
    /// Open puts.
    pub reservations: u64,
    /// Puts that wait for room.
    pub puts_waiting: u64,
    /// Bytes of the segments of live nodes.
    pub capacity_bytes: u64,
    /// Bytes of blocks, grants and quarantine on live nodes.
    pub used_bytes: u64,
    /// Bytes in quarantine on live nodes.
    pub quarantine_bytes: u64,
    /// The high watermark in bytes.
    pub high_watermark_bytes: u64,
    /// The low watermark in bytes: eviction ends there.
    pub low_watermark_bytes: u64,
    /// The age of this term.
    pub uptime_ms: u64,
    /// Why durable writes fail; empty while they succeed.
    pub store_failure: String,
}

/// The pool at one moment, as one master knows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Overview {
    /// The number of the last point of the history.
    pub seq: u64,
    /// The role of the master that answers.
    pub role: &'static str,
    /// The reason for the role; may be empty.
    pub reason: String,
    /// The version of the master that answers.
    pub version: &'static str,
    /// The latest known epoch.
    pub epoch: u64,
    /// The pool's id; empty when unknown.
    pub cluster_id: String,
    /// `http://host:port` of the leader; empty when unknown.
    pub leader: String,
    /// `host:port` of the leader's HTTP port, where the page of the pool is; empty when unknown.
    pub leader_http: String,
    /// The time until the leader's lease expires without a renewal; 0 without a deadline.
    pub term_left_ms: u64,
    /// `embedded` or `etcd`; empty before the first report.
    pub store: String,
    /// Bytes of the metadata store.
    pub store_bytes: u64,
    /// Alarms of the metadata store.
    pub store_alarms: Vec<String>,
    /// The problems of the answering master's files of keys, policy and certificates.
    pub problems: Vec<String>,
    /// The last group of the log.
    pub log_last: u64,
    /// The last group that this master has applied.
    pub log_applied: u64,
    /// All masters.
    pub masters: Vec<MasterFacts>,
    /// The pool; `None` on a master that does not lead.
    pub pool: Option<PoolFacts>,
    /// The nodes, by name; empty on a master that does not lead.
    pub nodes: Vec<NodeFacts>,
    /// The namespaces with the most bytes.
    pub namespaces: Vec<NamespaceUse>,
    /// The number of namespaces that are not listed.
    pub namespaces_left_off: usize,
    /// The age of the counts of namespaces, which is 0; `None` on a master that does not lead.
    pub namespaces_counted_ms_ago: Option<u64>,
    /// The present alerts, the worst first.
    pub alerts: Vec<Alert>,
    /// The number of alerts that are not listed.
    pub alerts_left_off: usize,
    /// The rates of the last minutes, oldest first. An event contains only the points that its
    /// listener lacks.
    pub history: Vec<Point>,
}

/// The facts that a master's seat knows of the masters and the store.
pub(super) fn of_masters(seat: &Seat) -> Overview {
    let told = seat.describe();
    let applied = seat.position().0;
    let role = seat.role();
    // The report of a standalone master's store is seconds old.
    let log_last = told.log_last.max(applied);
    let leads = role == Role::Leader;
    let members = told.members.into_iter().map(|member| {
        // The leader appends the log, so it has no lag.
        let lag = match member.role.as_str() {
            "standby" | "starting" => log_last.saturating_sub(member.applied),
            _ => 0,
        };
        MasterFacts {
            address: member.address,
            http_address: member.http_address,
            role: member.role,
            lag,
            version: member.version,
        }
    });
    let masters: Vec<MasterFacts> = members.collect();
    let leader = masters
        .iter()
        .find(|master| !told.leader.is_empty() && master.address == told.leader);
    Overview {
        role: role.label(),
        reason: if leads { String::new() } else { told.reason },
        version: env!("CARGO_PKG_VERSION"),
        epoch: told.epoch,
        cluster_id: kvpool_types::ClusterId::from_slice(&told.cluster_id)
            .map_or_else(String::new, |id| id.to_string()),
        leader_http: leader.map_or_else(String::new, |leader| leader.http_address.clone()),
        leader: told.leader,
        term_left_ms: told.term_left_ms,
        store: told.store,
        store_bytes: told.store_bytes,
        store_alarms: told.alarms,
        problems: seat.problems(),
        log_last,
        log_applied: applied,
        masters,
        ..Overview::default()
    }
}

/// Adds the pool and its nodes.
pub(super) fn add_pool(overview: &mut Overview, pool: &Pool) {
    let usage = pool.placement.usage();
    overview.pool = Some(PoolFacts {
        blocks: pool.blocks(),
        reservations: pool.reservations() as u64,
        puts_waiting: pool.puts_waiting() as u64,
        capacity_bytes: usage.capacity,
        used_bytes: usage.used,
        quarantine_bytes: usage.quarantined,
        high_watermark_bytes: usage.limit,
        low_watermark_bytes: alerts::low_watermark(&usage, pool.config.eviction_ratio),
        uptime_ms: pool.uptime_ms(),
        store_failure: pool.healthy().err().unwrap_or_default(),
    });
    (overview.namespaces, overview.namespaces_left_off) = pool.largest_namespaces(SHOWN);
    overview.namespaces_counted_ms_ago = Some(0);
    let mut media: BTreeMap<String, Vec<MediumFacts>> = BTreeMap::new();
    for medium in pool.media() {
        let of_node = media.entry(medium.record.node.0.clone()).or_default();
        of_node.push(medium_facts(&medium));
    }
    let nodes = pool.nodes_with_fill().into_iter().map(|(node, fill)| {
        let media = media.remove(&node.name.0).unwrap_or_default();
        NodeFacts {
            name: node.name.0.clone(),
            state: pool.state_label(&node),
            data_address: node.address().data,
            version: node.version(),
            silent_ms: Some(pool.age_ms(node.last_heard())),
            connections: node.reported().connections,
            left_blocks: node.left_blocks(),
            media_leave: node.drains() && node.media_leave(),
            stops: node.stops(),
            fill,
            media,
            unused_media: node.unused_media().into_iter().map(unused_facts).collect(),
            problems: node.problems(),
        }
    });
    overview.nodes = nodes.collect();
    // The remaining media belong to no present node.
    let absent = media.into_iter().map(|(name, media)| NodeFacts {
        name,
        state: "gone",
        media,
        ..NodeFacts::default()
    });
    overview.nodes.extend(absent);
}

fn unused_facts(unused: UnusedMedium) -> UnusedFacts {
    UnusedFacts {
        path: unused.path,
        reason: unused.reason,
        id: unused.medium.map_or_else(String::new, |id| id.to_string()),
    }
}

fn medium_facts(medium: &MediumView) -> MediumFacts {
    MediumFacts {
        id: medium.record.medium.to_string(),
        state: medium.state,
        capacity_bytes: medium.record.size.0,
        used_bytes: medium.used.0,
        copies: medium.copies,
    }
}

/// The pool that this master leads, or whose reads it still serves.
pub(super) fn pool_of(seat: &Seat) -> Option<Arc<Pool>> {
    seat.pool().ok()
}
