//! Maintenance of etcd: compaction, defragmentation, alarms and status.

use crate::client::{Client, Repeat};
use crate::error::Error;
use crate::generated::{self, alarm_request::Action};
use crate::kv::Revision;
use std::time::Duration;
use tonic::Response;

/// How one endpoint is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The member behind the endpoint.
    pub member: MemberId,
    /// The member that leads etcd, as this one knows. `None` without a leader.
    pub leader: Option<MemberId>,
    /// The revision of the member's store.
    pub revision: Revision,
    /// The version of the server.
    pub version: String,
    /// The bytes of its file. The quota is for these.
    pub db_size: u64,
    /// The bytes in use: the size after a defragmentation.
    pub db_size_in_use: u64,
    /// The problems that the member reports.
    pub errors: Vec<String>,
}

/// The number that etcd knows a member by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// The reason of an alarm of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alarm {
    /// Its file has reached the quota. While any member says so, nothing can be put.
    NoSpace,
    /// Its data differs from that of the others.
    Corrupt,
    /// A reason that this version does not know.
    Unknown,
}

/// A member of the etcd cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its number.
    pub id: MemberId,
    /// Its name.
    pub name: String,
    /// Where it serves clients.
    pub client_urls: Vec<String>,
}

impl Client {
    /// How an endpoint is, counted from 0 in the order of [`Client::endpoints`].
    pub async fn status(&self, endpoint: usize) -> Result<Status, Error> {
        let answer = self
            .call_at(endpoint, self.request_timeout(), |link| {
                let request = link.request(generated::StatusRequest {});
                async move { link.maintenance().status(request).await }
            })
            .await?
            .into_inner();
        let header = answer.header.unwrap_or_default();
        Ok(Status {
            member: MemberId(header.member_id),
            leader: (answer.leader != 0).then_some(MemberId(answer.leader)),
            revision: Revision(header.revision),
            version: answer.version,
            db_size: answer.db_size.unsigned_abs(),
            db_size_in_use: answer.db_size_in_use.unsigned_abs(),
            errors: answer.errors,
        })
    }

    /// Defragments the file of an endpoint: it shrinks to the bytes in use. The endpoint answers no
    /// other call meanwhile.
    pub async fn defragment(&self, endpoint: usize, limit: Duration) -> Result<(), Error> {
        self.call_at(endpoint, limit, |link| {
            let request = link.request(generated::DefragmentRequest {});
            async move { link.maintenance().defragment(request).await }
        })
        .await?;
        Ok(())
    }

    /// The active alarms, each with its member.
    pub async fn alarms(&self) -> Result<Vec<(MemberId, Alarm)>, Error> {
        let message = generated::AlarmRequest::default();
        let answer = self
            .call(Repeat::Every, |link| {
                let request = link.request(message);
                async move { link.maintenance().alarm(request).await }
            })
            .await?;
        let known = |alarm: generated::AlarmMember| {
            let member = MemberId(alarm.member_id);
            match alarm.alarm() {
                generated::AlarmType::Nospace => (member, Alarm::NoSpace),
                generated::AlarmType::Corrupt => (member, Alarm::Corrupt),
                generated::AlarmType::None => (member, Alarm::Unknown),
            }
        };
        Ok(answer.into_inner().alarms.into_iter().map(known).collect())
    }

    /// Takes back a member's alarm that there is no space. It is raised again when that is so.
    pub async fn disarm_no_space(&self, member: MemberId) -> Result<(), Error> {
        let message = generated::AlarmRequest {
            action: Action::Deactivate.into(),
            member_id: member.0,
            alarm: generated::AlarmType::Nospace.into(),
        };
        self.call(Repeat::Every, |link| {
            let request = link.request(message);
            async move { link.maintenance().alarm(request).await }
        })
        .await?;
        Ok(())
    }

    /// Forgets the history before a revision. With `physical` it answers when the space is free, which
    /// may take long.
    pub async fn compact(
        &self,
        revision: Revision,
        physical: bool,
        limit: Duration,
    ) -> Result<(), Error> {
        let message = generated::CompactionRequest {
            revision: revision.0,
            physical,
        };
        self.call_within(Repeat::Every, limit, |link| {
            let request = link.request(message);
            async move { link.kv().compact(request).await }
        })
        .await?;
        Ok(())
    }

    /// The members of the etcd cluster.
    pub async fn members(&self) -> Result<Vec<Member>, Error> {
        let answer = self
            .call(Repeat::Every, |link| {
                let request = link.request(generated::MemberListRequest {});
                async move {
                    let answer = link.cluster().member_list(request).await;
                    answer.map(Response::into_inner)
                }
            })
            .await?;
        let member = |member: generated::Member| Member {
            id: MemberId(member.id),
            name: member.name,
            client_urls: member.client_urls,
        };
        Ok(answer.members.into_iter().map(member).collect())
    }
}
