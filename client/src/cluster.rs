//! The masters of a pool and their metadata store, as one of them knows them.

use crate::control::{Said, survey};
use crate::errors::{ConnectError, ControlError};
use crate::options::ClientFiles;
use kvpool_auth::Credentials;
use kvpool_proto::ClusterReply;
use kvpool_types::{ClusterId, Code, Epoch, Length};
use std::time::Duration;

/// What the masters say of themselves and of their store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterStatus {
    /// The latest term that is known.
    pub epoch: Epoch,
    /// Which pool it is; `None` when the master does not know yet.
    pub cluster: Option<ClusterId>,
    /// Where the leader is, `http://host:port`; `None` while nobody leads that is known.
    pub leader: Option<String>,
    /// The master whose word this is: the leader where it answers.
    pub told_by: String,
    /// Which part that master plays: `leader`, `read-only`, `standby` or `starting`.
    pub role: String,
    /// Why it plays it; may be empty.
    pub reason: String,
    /// All masters.
    pub members: Vec<MasterStatus>,
    /// The masters that were asked and did not answer, and why.
    pub unreached: Vec<(String, String)>,
    /// The last group of the log.
    pub log_last: u64,
    /// The groups through this one have been cut.
    pub log_cut: u64,
    /// What keeps the metadata: `embedded` or `etcd`.
    pub store: String,
    /// What it takes on disk, of the etcd member that takes most.
    pub store_size: Length,
    /// Of that, what is not free.
    pub store_in_use: Length,
    /// What is wrong with it, in its own words, such as `NOSPACE`.
    pub alarms: Vec<String>,
    /// The snapshots that stand for what was cut from the log.
    pub snapshots: Vec<SnapshotStatus>,
    /// How long the leader's term lasts if nothing renews it.
    pub term_left: Duration,
}

/// One master, as it last said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MasterStatus {
    /// Where clients and nodes call it, `http://host:port`.
    pub address: String,
    /// Where it serves HTTP, `host:port`.
    pub http_address: String,
    /// `leader`, `read-only`, `standby` or `starting`.
    pub role: String,
    /// The last group of the log that it holds.
    pub applied: u64,
    /// How many groups of the log it has yet to apply.
    pub lag: u64,
    /// How many store nodes have spoken to it lately.
    pub heard_nodes: u64,
    /// How many clients have.
    pub heard_clients: u64,
    /// Its version.
    pub version: String,
}

/// One snapshot of a part of the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotStatus {
    /// The shard; `None` for what belongs to none.
    pub shard: Option<u32>,
    /// The last group of the log that it contains.
    pub through: u64,
    /// How large it is.
    pub size: Length,
}

/// Asks the masters at `masters` (as in [`crate::Options::masters`]) and the leader that they name,
/// each for `timeout` at most, with the token of `credentials`. Addresses that ask for TLS are called with `tls`.
/// One master that answers is enough, whether it leads or not. The leader's own
/// answer comes first, then the answer of the latest term. Must be called on a tokio runtime.
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

/// The JSON of `/v1/overview` of the master whose word [`cluster_status`] would return, and its address. Must be
/// called on a tokio runtime.
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

/// The answer of the master that knows best, its address, and the masters without an answer.
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
        let members = reply.members.into_iter().map(|member| MasterStatus {
            address: member.address,
            http_address: member.http_address,
            role: member.role,
            applied: member.applied,
            lag: log_last.saturating_sub(member.applied),
            heard_nodes: member.heard_nodes,
            heard_clients: member.heard_clients,
            version: member.version,
        });
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
            members: members.collect(),
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
        // Without the leader the standby's word is good enough, and who did not answer is told.
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
