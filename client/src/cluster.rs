//! The state of a pool's masters and of their metadata store, as one master reports it.

use crate::control::{Said, survey};
use crate::errors::{ConnectError, ControlError};
use crate::options::ClientFiles;
use kvpool_auth::Credentials;
use kvpool_proto::ClusterReply;
use kvpool_types::{ClusterId, Code, Epoch, Length};
use std::time::Duration;

/// The report of one master on all masters and on the metadata store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterStatus {
    /// The latest term that is known.
    pub epoch: Epoch,
    /// The pool's id; `None` when the master does not know it yet.
    pub cluster: Option<ClusterId>,
    /// The leader's address, `http://host:port`; `None` while no leader is known.
    pub leader: Option<String>,
    /// The address of the master that gave this report: the leader if it answers.
    pub told_by: String,
    /// The role of the reporting master: `leader`, `read-only`, `standby` or `starting`.
    pub role: String,
    /// The reason for this role; may be empty.
    pub reason: String,
    /// All masters.
    pub members: Vec<MasterStatus>,
    /// The masters that did not answer, each with the reason.
    pub unreached: Vec<(String, String)>,
    /// The last group of the log.
    pub log_last: u64,
    /// The last group that was cut from the log: all groups through this number are gone.
    pub log_cut: u64,
    /// The metadata store: `embedded` or `etcd`.
    pub store: String,
    /// The store's size on disk. For etcd, the size at the member that takes most.
    pub store_size: Length,
    /// The part of `store_size` that is in use.
    pub store_in_use: Length,
    /// The store's own alarms, such as `NOSPACE`.
    pub alarms: Vec<String>,
    /// The snapshots that replace the cut part of the log.
    pub snapshots: Vec<SnapshotStatus>,
    /// How long the leader's term lasts if nothing renews it.
    pub term_left: Duration,
}

/// One master, as it last described itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MasterStatus {
    /// The master's address for clients and nodes, `http://host:port`.
    pub address: String,
    /// The address of the master's HTTP port, `host:port`.
    pub http_address: String,
    /// The master's role: `leader`, `read-only`, `standby` or `starting`. `gone`: another master leads since
    /// this one did, or this one does not answer.
    pub role: String,
    /// The last group of the log that the master holds.
    pub applied: u64,
    /// The number of groups that the master has yet to apply.
    pub lag: u64,
    /// The number of store nodes that called the master recently.
    pub heard_nodes: u64,
    /// The number of clients that called the master recently.
    pub heard_clients: u64,
    /// The master's version.
    pub version: String,
}

/// One snapshot of a part of the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotStatus {
    /// The shard; `None` for metadata that belongs to no shard.
    pub shard: Option<u32>,
    /// The last group of the log that the snapshot contains.
    pub through: u64,
    /// The snapshot's size in bytes.
    pub size: Length,
}

/// Asks the masters at `masters` (as in [`crate::Options::masters`]) and the leader that they name for their
/// status. Each may take `timeout` at most. The call presents the token of `credentials`, and uses `tls` for
/// addresses that require TLS. One answer is enough, also from a master that does not lead. The answer of the
/// latest term is preferred, and in one term the leader's. Must be called on a tokio runtime.
///
/// # Errors
///
/// [`ConnectError`] when an address is malformed, or when no master answers in time.
///
/// # Cancellation
///
/// Dropping the future changes nothing in the pool.
pub async fn cluster_status(
    masters: &[String],
    tls: &ClientFiles,
    timeout: Duration,
    credentials: &Credentials,
) -> Result<ClusterStatus, ConnectError> {
    let said = survey(masters, tls, false, timeout, credentials).await?;
    choose(said).map_err(|source| ConnectError::Refused {
        masters: masters.join(", "),
        source,
    })
}

/// Fetches the JSON of `/v1/overview` and the address of the master that gave it. The master is the one whose
/// report [`cluster_status`] would return. Must be called on a tokio runtime.
///
/// # Errors
///
/// [`ConnectError`] when an address is malformed, when no master answers in time, or when the master that answers is
/// of a version without overviews.
///
/// # Cancellation
///
/// Dropping the future changes nothing in the pool.
pub async fn cluster_overview(
    masters: &[String],
    tls: &ClientFiles,
    timeout: Duration,
    credentials: &Credentials,
) -> Result<(String, Vec<u8>), ConnectError> {
    let said = survey(masters, tls, true, timeout, credentials).await?;
    let refused = |source| ConnectError::Refused {
        masters: masters.join(", "),
        source,
    };
    let (told_by, reply, _) = best(said).map_err(refused)?;
    if reply.overview.is_empty() {
        let why = format!("the master at {told_by} has no overview: upgrade it");
        return Err(refused(ControlError::new(Code::VersionMismatch, why)));
    }
    Ok((told_by, reply.overview.to_vec()))
}

fn choose(said: Vec<Said>) -> Result<ClusterStatus, ControlError> {
    let (told_by, reply, unreached) = best(said)?;
    Ok(ClusterStatus::read(told_by, reply, unreached))
}

/// The preferred answer, its master's address, and the masters that did not answer.
type Best = (String, ClusterReply, Vec<(String, String)>);

fn best(said: Vec<Said>) -> Result<Best, ControlError> {
    let mut unreached = Vec::new();
    let mut last = ControlError::new(Code::Unreachable, "no kvmaster is known");
    let mut best: Option<(String, ClusterReply)> = None;
    let rank = |reply: &ClusterReply| {
        let part = match reply.role.as_str() {
            "leader" => 2,
            "read-only" => 1,
            _ => 0,
        };
        (reply.epoch, part)
    };
    for (address, answer) in said {
        match answer {
            Ok(reply) => {
                let is_better = best
                    .as_ref()
                    .is_none_or(|(_, other)| rank(&reply) > rank(other));
                if is_better {
                    best = Some((address, reply));
                }
            }
            Err(error) => {
                unreached.push((address, error.message.clone()));
                last = error;
            }
        }
    }
    let (told_by, reply) = best.ok_or(last)?;
    Ok((told_by, reply, unreached))
}

impl ClusterStatus {
    fn read(told_by: String, reply: ClusterReply, unreached: Vec<(String, String)>) -> Self {
        let log_last = reply.log_last;
        // A leader that only this client cannot reach still leads.
        let is_gone = |address: &str| {
            let is_unreached = unreached.iter().any(|(asked, _)| asked == address);
            is_unreached && address != reply.leader
        };
        let members = reply.members.into_iter().map(|member| MasterStatus {
            role: match is_gone(&member.address) {
                true => "gone".to_owned(),
                false => member.role,
            },
            address: member.address,
            http_address: member.http_address,
            applied: member.applied,
            lag: log_last.saturating_sub(member.applied),
            heard_nodes: member.heard_nodes,
            heard_clients: member.heard_clients,
            version: member.version,
        });
        let members = members.collect();
        let snapshots = reply.snapshots.into_iter().map(|snapshot| SnapshotStatus {
            shard: (snapshot.shard != u32::MAX).then_some(snapshot.shard),
            through: snapshot.through,
            size: Length(snapshot.size_bytes),
        });
        Self {
            epoch: Epoch(reply.epoch),
            cluster: ClusterId::from_slice(&reply.cluster_id),
            leader: Some(reply.leader)
                .filter(|leader| !leader.is_empty())
                .or_else(|| (reply.role == "leader").then(|| told_by.clone())),
            told_by,
            role: reply.role,
            reason: reply.reason,
            members,
            unreached,
            log_last,
            log_cut: reply.log_cut,
            store: reply.store,
            store_size: Length(reply.store_bytes),
            store_in_use: Length(reply.store_in_use_bytes),
            alarms: reply.alarms,
            snapshots: snapshots.collect(),
            term_left: Duration::from_millis(reply.term_left_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Cluster, Master, Passage, Setup, Wire};

    #[tokio::test]
    async fn any_master_leads_to_the_word_of_the_leader() {
        let cluster = Cluster::start(Setup::default()).await;
        let (a, b) = (Master::start(&cluster), Master::start(&cluster));
        let (to_a, to_b) = (Wire::to(&a).await, Wire::to(&b).await);
        a.lead().await;
        b.resign_to(&to_a.url).await;
        let timeout = Duration::from_millis(500);
        let from_standby = std::slice::from_ref(&to_b.url);
        let status = cluster_status(
            from_standby,
            &ClientFiles::default(),
            timeout,
            &Credentials::default(),
        )
        .await
        .unwrap();
        assert_eq!(
            (status.role.as_str(), &status.told_by),
            ("leader", &to_a.url)
        );
        assert_eq!(status.leader.as_ref(), Some(&to_a.url));
        assert!(status.unreached.is_empty());
        // Without the leader, the standby's report is used. The report names the master that did not answer.
        to_a.set(Passage::Silent);
        let status = cluster_status(
            from_standby,
            &ClientFiles::default(),
            timeout,
            &Credentials::default(),
        )
        .await
        .unwrap();
        assert_eq!(
            (status.role.as_str(), &status.told_by),
            ("standby", &to_b.url)
        );
        assert_eq!(status.unreached[0].0, to_a.url);
        b.resign_to("").await;
        let status = cluster_status(
            from_standby,
            &ClientFiles::default(),
            timeout,
            &Credentials::default(),
        )
        .await
        .unwrap();
        assert_eq!(status.leader, None);
        to_b.set(Passage::Dead);
        let error = cluster_status(
            from_standby,
            &ClientFiles::default(),
            timeout,
            &Credentials::default(),
        )
        .await
        .unwrap_err();
        assert_eq!(error.code(), Code::Unreachable);
    }

    #[test]
    fn a_listed_master_that_does_not_answer_is_gone_unless_it_leads() {
        let member = |address: &str, role: &str| kvpool_proto::MasterMember {
            address: address.to_owned(),
            role: role.to_owned(),
            ..kvpool_proto::MasterMember::default()
        };
        let reply = ClusterReply {
            leader: "http://a:1".to_owned(),
            role: "standby".to_owned(),
            members: vec![
                member("http://a:1", "leader"),
                member("http://b:1", "standby"),
                member("http://c:1", "standby"),
            ],
            ..ClusterReply::default()
        };
        let silent = || Err(ControlError::new(Code::Unreachable, "refused"));
        let said = vec![
            ("http://a:1".to_owned(), silent()),
            ("http://b:1".to_owned(), Ok(reply)),
            ("http://c:1".to_owned(), silent()),
        ];
        let members = choose(said).unwrap().members;
        let roles: Vec<_> = members.iter().map(|member| member.role.as_str()).collect();
        assert_eq!(roles, ["leader", "standby", "gone"]);
    }

    #[test]
    fn a_master_lags_by_what_it_has_not_applied() {
        let member = kvpool_proto::MasterMember {
            applied: 90,
            ..kvpool_proto::MasterMember::default()
        };
        let whole = kvpool_proto::SnapshotStats {
            shard: u32::MAX,
            through: 80,
            size_bytes: 7,
        };
        let reply = ClusterReply {
            log_last: 100,
            members: vec![member],
            snapshots: vec![whole],
            ..ClusterReply::default()
        };
        let status = choose(vec![("http://a:1".to_owned(), Ok(reply))]).unwrap();
        assert_eq!(status.members[0].lag, 10);
        assert_eq!(status.snapshots[0].shard, None);
        assert_eq!(status.cluster, None);
    }
}
