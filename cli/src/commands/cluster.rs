//! `kvctl cluster`.

use crate::context::Context;
use crate::masters;
use crate::output;
use kvpool_client::ClusterStatus;
use serde::Serialize;
use std::time::Duration;

/// Show the masters (leader and standbys), their progress, and the metadata store
///
/// Any master answers: a standby too, and also while the pool has no leader. `lag` is the number of log
/// groups that a standby must still apply before it can lead. A group is the records of one write to the log.
/// The role `gone`: another master leads since this one did, or this one does not answer.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl cluster
  kvctl --master http://10.0.0.1:7070,http://10.0.0.2:7070 cluster
  kvctl --master etcd://10.0.0.1:2379/prod cluster --output json | jq -r .leader")]
pub(crate) struct Args {}

/// Timeout for one master: a silent master must not delay the others for long.
const TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Serialize)]
struct Cluster {
    epoch: u64,
    cluster_id: Option<String>,
    leader: Option<String>,
    term_left_seconds: f64,
    told_by: String,
    role: String,
    reason: String,
    members: Vec<Member>,
    unreached: Vec<Unreached>,
    log_last: u64,
    log_cut: u64,
    store: String,
    store_bytes: u64,
    store_in_use_bytes: u64,
    alarms: Vec<String>,
    snapshots: Snapshots,
}

#[derive(Serialize)]
struct Member {
    address: String,
    http_address: String,
    role: String,
    applied: u64,
    lag: u64,
    heard_nodes: u64,
    heard_clients: u64,
    version: String,
}

#[derive(Serialize)]
struct Unreached {
    address: String,
    reason: String,
}

#[derive(Serialize)]
struct Snapshots {
    count: usize,
    oldest_through: Option<u64>,
    bytes: u64,
}

impl From<ClusterStatus> for Cluster {
    fn from(status: ClusterStatus) -> Self {
        let members = status.members.into_iter().map(|member| Member {
            address: member.address,
            http_address: member.http_address,
            role: member.role,
            applied: member.applied,
            lag: member.lag,
            heard_nodes: member.heard_nodes,
            heard_clients: member.heard_clients,
            version: member.version,
        });
        let unreached = status.unreached.into_iter();
        let unreached = unreached.map(|(address, reason)| Unreached { address, reason });
        let snapshots = &status.snapshots;
        Self {
            epoch: status.epoch.0,
            cluster_id: status.cluster.map(|cluster| cluster.to_string()),
            leader: status.leader,
            term_left_seconds: status.term_left.as_secs_f64(),
            told_by: status.told_by,
            role: status.role,
            reason: status.reason,
            members: members.collect(),
            unreached: unreached.collect(),
            log_last: status.log_last,
            log_cut: status.log_cut,
            store: status.store,
            store_bytes: status.store_size.0,
            store_in_use_bytes: status.store_in_use.0,
            alarms: status.alarms,
            snapshots: Snapshots {
                count: snapshots.len(),
                oldest_through: snapshots.iter().map(|snapshot| snapshot.through).min(),
                bytes: snapshots.iter().map(|snapshot| snapshot.size.0).sum(),
            },
        }
    }
}

/// Runs it.
pub(crate) async fn run(_args: Args, context: &Context) -> anyhow::Result<()> {
    let connection = &context.connection;
    let timeout = connection.timeout.min(TIMEOUT);
    let cluster = Cluster::from(masters::status(connection, timeout).await?);
    context.output.show(&cluster, tables)
}

fn tables(cluster: &Cluster) -> String {
    let mut facts = output::facts();
    facts.add_row(["leader", &leader(cluster)]);
    facts.add_row(["epoch", &cluster.epoch.to_string()]);
    if cluster.term_left_seconds > 0.0 {
        let left = format!("{:.1} s", cluster.term_left_seconds);
        facts.add_row(["term left", &left]);
    }
    let told = match cluster.reason.as_str() {
        "" => format!("{} ({})", cluster.told_by, cluster.role),
        reason => format!("{} ({}: {reason})", cluster.told_by, cluster.role),
    };
    facts.add_row(["told by", &told]);
    if let Some(id) = &cluster.cluster_id {
        facts.add_row(["cluster", id]);
    }
    let log = format!(
        "{} groups of records, {} cut",
        output::count(cluster.log_last),
        output::count(cluster.log_cut)
    );
    facts.add_row(["log", &log]);
    let store = format!(
        "{}, {} with {} in use",
        cluster.store,
        output::bytes(cluster.store_bytes),
        output::bytes(cluster.store_in_use_bytes)
    );
    facts.add_row(["store", &store]);
    let alarms = match cluster.alarms.as_slice() {
        [] => "none".to_owned(),
        alarms => alarms.join(", "),
    };
    facts.add_row(["alarms", &alarms]);
    facts.add_row(["snapshots", &snapshots(&cluster.snapshots)]);

    let mut members = output::table([
        "master", "role", "applied", "lag", "nodes", "clients", "http", "version",
    ]);
    for member in &cluster.members {
        members.add_row([
            member.address.clone(),
            member.role.clone(),
            output::count(member.applied),
            output::count(member.lag),
            output::count(member.heard_nodes),
            output::count(member.heard_clients),
            member.http_address.clone(),
            member.version.clone(),
        ]);
    }
    output::align_right(&mut members, 2..6);
    let mut text = format!("{facts}\n{members}");
    for unreached in &cluster.unreached {
        let Unreached { address, reason } = unreached;
        text.push_str(&format!("\n{address} does not answer: {reason}"));
    }
    text
}

fn leader(cluster: &Cluster) -> String {
    let leader = cluster.leader.clone();
    leader.unwrap_or_else(|| "none: the pool has no leader".to_owned())
}

fn snapshots(snapshots: &Snapshots) -> String {
    match snapshots.oldest_through {
        None => "none".to_owned(),
        Some(oldest) => format!(
            "{}, {} in all, the oldest through group {}",
            output::count(snapshots.count as u64),
            output::bytes(snapshots.bytes),
            output::count(oldest)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_client::{MasterStatus, SnapshotStatus};
    use kvpool_types::{Epoch, Length};

    fn status(leader: Option<&str>) -> ClusterStatus {
        let member = |address: &str, role: &str, applied| MasterStatus {
            address: address.to_owned(),
            http_address: String::new(),
            role: role.to_owned(),
            applied,
            lag: 1500 - applied,
            heard_nodes: 3,
            heard_clients: 12,
            version: "0.1.0".to_owned(),
        };
        let snapshot = |through| SnapshotStatus {
            shard: Some(1),
            through,
            size: Length(1 << 20),
        };
        ClusterStatus {
            epoch: Epoch(7),
            cluster: None,
            leader: leader.map(str::to_owned),
            told_by: "http://b:1".to_owned(),
            role: "standby".to_owned(),
            reason: String::new(),
            members: vec![
                member("http://a:1", "leader", 1500),
                member("http://b:1", "standby", 300),
            ],
            unreached: vec![("http://c:1".to_owned(), "refused".to_owned())],
            log_last: 1500,
            log_cut: 200,
            store: "etcd".to_owned(),
            store_size: Length(3 << 20),
            store_in_use: Length(1 << 20),
            alarms: vec!["NOSPACE".to_owned()],
            snapshots: vec![snapshot(250), snapshot(200)],
            term_left: Duration::from_millis(2400),
        }
    }

    #[test]
    fn the_table_says_who_leads_how_far_the_others_are_and_what_is_wrong() {
        let text = tables(&status(Some("http://a:1")).into());
        for part in [
            "http://a:1",
            "1,200",
            "NOSPACE",
            "2.4 s",
            "2, 2.0 MiB in all, the oldest through group 200",
            "http://c:1 does not answer: refused",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        let text = tables(&status(None).into());
        assert!(text.contains("the pool has no leader"), "{text}");
    }

    #[test]
    fn json_shows_a_pool_without_a_leader() {
        let value = serde_json::to_value(Cluster::from(status(None))).unwrap();
        assert!(value["leader"].is_null());
        assert_eq!(value["members"][1]["lag"], 1200);
        assert_eq!(value["snapshots"]["oldest_through"], 200);
    }
}
