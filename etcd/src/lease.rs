//! Leases of etcd: their keys are deleted when no client renews them.

use crate::client::{Client, Repeat};
use crate::error::Error;
use crate::generated;
use std::fmt;
use std::time::Duration;
use tonic::{Response, Status};

/// The number that etcd knows a lease by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub i64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// A lease that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Which lease.
    pub id: LeaseId,
    /// How long it lives if it is not renewed. etcd has a least time of its own, one and a half times its
    /// election timeout.
    pub ttl: Duration,
}

impl Client {
    /// Asks for a lease. `ttl` is rounded up to whole seconds. A lease whose grant was not answered in time expires
    /// by itself.
    pub async fn lease_grant(&self, ttl: Duration) -> Result<Granted, Error> {
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        let message = generated::LeaseGrantRequest {
            ttl: i64::try_from(seconds.max(1)).unwrap_or(i64::MAX),
            id: 0,
        };
        let answer = self
            .call(Repeat::Every, |link| {
                let request = link.request(message);
                async move { link.lease().lease_grant(request).await }
            })
            .await?
            .into_inner();
        if !answer.error.is_empty() {
            return Err(Error::Other {
                reason: answer.error,
            });
        }
        Ok(Granted {
            id: LeaseId(answer.id),
            ttl: Duration::from_secs(answer.ttl.unsigned_abs()),
        })
    }

    /// Renews a lease once. Returns its TTL, counted from the answer of etcd, or `None` if the
    /// lease has ended.
    pub async fn lease_keep_alive(&self, lease: LeaseId) -> Result<Option<Duration>, Error> {
        let renewed = self
            .call(Repeat::Every, |link| {
                let message = generated::LeaseKeepAliveRequest { id: lease.0 };
                let request = link.request(tokio_stream::once(message));
                async move {
                    let answers = link.lease().lease_keep_alive(request).await?;
                    let answer = answers.into_inner().message().await?;
                    answer.ok_or_else(|| {
                        Status::unavailable("etcd closed the stream without a response")
                    })
                }
            })
            .await;
        match renewed {
            Ok(answer) => Ok(u64::try_from(answer.ttl)
                .ok()
                .filter(|ttl| *ttl > 0)
                .map(Duration::from_secs)),
            Err(Error::LeaseNotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Ends a lease, and deletes its keys. A lease that has ended is [`Error::LeaseNotFound`], also if an earlier
    /// attempt of this call ended it.
    pub async fn lease_revoke(&self, lease: LeaseId) -> Result<(), Error> {
        self.call(Repeat::Every, |link| {
            let request = link.request(generated::LeaseRevokeRequest { id: lease.0 });
            async move { link.lease().lease_revoke(request).await }
        })
        .await?;
        Ok(())
    }

    /// The time until the lease ends without a renewal, or `None` if it has ended.
    pub async fn lease_time_to_live(&self, lease: LeaseId) -> Result<Option<Duration>, Error> {
        let answer = self
            .call(Repeat::Every, |link| {
                let request = link.request(generated::LeaseTimeToLiveRequest { id: lease.0 });
                async move {
                    let answer = link.lease().lease_time_to_live(request).await;
                    answer.map(Response::into_inner)
                }
            })
            .await;
        match answer {
            Ok(answer) => Ok(u64::try_from(answer.ttl).ok().map(Duration::from_secs)),
            Err(Error::LeaseNotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
