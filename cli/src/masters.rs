//! The masters of a pool, as any of them describes them.

use crate::connection::{Connection, connect_error};
use kvpool_client::{ClusterStatus, cluster_status};
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
    fn only_a_leader_past_its_term_is_read_only() {
        for role in ["leader", "standby", "starting"] {
            assert_eq!(read_only(&status(role)), None, "{role}");
        }
        let text = read_only(&status("read-only")).unwrap();
        assert!(text.contains("http://b:1 is read-only"), "{text}");
    }
}
