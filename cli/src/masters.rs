//! The masters of a pool, as any of them describes them.

use crate::connection::{Connection, connect_error};
use crate::output;
use futures::future::join_all;
use kvpool_client::{ClusterStatus, cluster_overview, cluster_status};
use kvpool_types::ClusterId;
use serde::Deserialize;
use std::time::Duration;

/// Asks the masters. `timeout` is for one master.
pub(crate) async fn status(
    connection: &Connection,
    timeout: Duration,
) -> anyhow::Result<ClusterStatus> {
    let (tls, credentials) = (connection.tls(), connection.credentials()?);
    let status = cluster_status(&connection.masters(), &tls, timeout, &credentials).await;
    Ok(with_addresses(status.map_err(connect_error)?))
}

/// The pool of each named master that tells it, by the master's address. `timeout` is for one master.
pub(crate) async fn pools(
    connection: &Connection,
    timeout: Duration,
) -> anyhow::Result<Vec<(String, ClusterId)>> {
    let (tls, credentials) = (connection.tls(), connection.credentials()?);
    let (tls, credentials) = (&tls, &credentials);
    let asks = connection.masters().into_iter().map(|address| async move {
        let one = std::slice::from_ref(&address);
        let status = cluster_status(one, tls, timeout, credentials).await;
        let pool = status.ok()?.cluster?;
        Some((address, pool))
    });
    Ok(join_all(asks).await.into_iter().flatten().collect())
}

/// The faults of the last minutes, one sentence each, as the page of the masters shows them. `timeout` is for one
/// master.
pub(crate) async fn faults(
    connection: &Connection,
    timeout: Duration,
) -> anyhow::Result<Vec<String>> {
    let (tls, credentials) = (connection.tls(), connection.credentials()?);
    let overview = cluster_overview(&connection.masters(), &tls, timeout, &credentials).await;
    let (_, json) = overview.map_err(connect_error)?;
    Ok(faults_in(&json)?)
}

fn faults_in(overview: &[u8]) -> serde_json::Result<Vec<String>> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Overview {
        alerts: Vec<Alert>,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Alert {
        kind: String,
        message: String,
    }
    let Overview { alerts } = serde_json::from_slice(overview)?;
    let faults = alerts.into_iter().filter(|alert| alert.kind == "fault");
    // Problems begin in lower case.
    let told = faults.map(|Alert { message, .. }| {
        let rest = message.strip_prefix("In ");
        let lower = rest.map(|rest| format!("in {rest}"));
        lower.unwrap_or(message)
    });
    Ok(told.collect())
}

/// An alarm of the metadata store, as a problem.
pub(crate) fn alarm(alarm: &str) -> String {
    format!("the metadata store raises an alarm, and puts fail or wait while it lasts: {alarm}")
}

/// Why the pool accepts no changes although it has a leader. `None` if it accepts them, or has no leader.
pub(crate) fn read_only(status: &ClusterStatus) -> Option<String> {
    (status.role == "read-only").then(|| {
        format!(
            "the leader at {} is read-only, because its lease in etcd was not renewed in time: gets go on, and puts \
             wait. Check etcd and the network to it",
            status.told_by
        )
    })
}

/// The lag, in groups of the log, above which a take-over takes long. `kvctl top` warns above the same number.
const MUCH_LAG: u64 = 1000;

/// The problems of the masters, one or two sentences each: those that `kvctl top` and the page show as alerts.
pub(crate) fn problems(status: &ClusterStatus) -> Vec<String> {
    let stands_by = |role: &str| role == "standby";
    let mut problems = Vec::new();
    let has_standby =
        stands_by(&status.role) || status.members.iter().any(|one| stands_by(&one.role));
    if status.store == "etcd" && !has_standby {
        problems.push(
            "no master stands by: if the leader ends, puts and gets fail. Start a second kvmaster with the same etcd"
                .to_owned(),
        );
    }
    let waits = |role: &str| stands_by(role) || role == "starting";
    let late = status.members.iter();
    let late = late.filter(|one| waits(&one.role) && one.lag > MUCH_LAG);
    problems.extend(late.map(|one| {
        format!(
            "standby {} lacks {} groups of the log: a take-over would take long. Check its host and etcd",
            one.address,
            output::count(one.lag)
        )
    }));
    problems
}

/// A leader without a configured address has the address at which it answered.
fn with_addresses(mut status: ClusterStatus) -> ClusterStatus {
    if status.role == "leader" {
        status.leader.get_or_insert_with(|| status.told_by.clone());
        let own = status.members.iter_mut();
        for member in own.filter(|member| member.address.is_empty()) {
            member.address.clone_from(&status.told_by);
        }
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_client::MasterStatus;
    use kvpool_types::{Epoch, Length};

    fn status(role: &str) -> ClusterStatus {
        ClusterStatus {
            epoch: Epoch(7),
            cluster: None,
            leader: None,
            told_by: "http://b:1".to_owned(),
            role: role.to_owned(),
            reason: String::new(),
            members: vec![MasterStatus {
                address: String::new(),
                http_address: String::new(),
                role: role.to_owned(),
                applied: 0,
                lag: 0,
                heard_nodes: 0,
                heard_clients: 0,
                version: String::new(),
            }],
            unreached: Vec::new(),
            log_last: 0,
            log_cut: 0,
            store: "embedded".to_owned(),
            store_size: Length(0),
            store_in_use: Length(0),
            alarms: Vec::new(),
            snapshots: Vec::new(),
            term_left: Duration::ZERO,
        }
    }

    #[test]
    fn a_leader_without_a_configured_address_has_the_address_at_which_it_answered() {
        let leader = with_addresses(status("leader"));
        assert_eq!(leader.leader.as_deref(), Some("http://b:1"));
        assert_eq!(leader.members[0].address, "http://b:1");
        assert_eq!(with_addresses(status("standby")).leader, None);
    }

    #[test]
    fn a_pool_over_etcd_without_a_standby_has_a_problem() {
        let mut told = status("leader");
        assert_eq!(problems(&told), Vec::<String>::new(), "one master is all");
        told.store = "etcd".to_owned();
        let found = problems(&told);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("no master stands by"), "{found:?}");
        let mut standby = told.members[0].clone();
        standby.role = "standby".to_owned();
        told.members.push(standby);
        assert_eq!(problems(&told), Vec::<String>::new());
        told.members[1].lag = MUCH_LAG + 1;
        let found = problems(&told);
        assert!(found[0].contains("lacks 1,001 groups"), "{found:?}");
    }

    #[test]
    fn only_the_faults_of_an_overview_are_faults() {
        let overview = serde_json::json!({
            "role": "leader",
            "alerts": [
                { "severity": "warning", "kind": "node_suspect", "message": "Node n is silent" },
                { "severity": "warning", "kind": "fault", "message": "In the last minutes 3 reports" },
                { "kind": "fault", "message": "Another form" },
            ],
        });
        let faults = faults_in(overview.to_string().as_bytes()).unwrap();
        assert_eq!(faults, ["in the last minutes 3 reports", "Another form"]);
        assert_eq!(faults_in(b"{}").unwrap(), Vec::<String>::new());
        assert!(faults_in(b"").is_err());
    }

    #[test]
    fn only_a_leader_past_its_term_is_read_only() {
        for role in ["leader", "standby", "starting"] {
            assert_eq!(read_only(&status(role)), None, "{role}");
        }
        let text = read_only(&status("read-only")).unwrap();
        assert!(text.contains("http://b:1 is read-only"), "{text}");
    }
}
