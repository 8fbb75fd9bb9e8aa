//! Leases that a caller of the client holds.

use crate::cache::Leased;
use crate::clock::{BootTime, Deadline};
use crate::control::{Call, Control};
use crate::errors::ControlError;
use crate::locate::expect_answers;
use crate::releases::{LeasePart, Releases};
use kvpool_proto::{Lease as WireLease, ReleaseRequest, RenewRequest};
use kvpool_seams::maps::HashSet;
use kvpool_types::{Code, Epoch, Key, Version};
use std::sync::Arc;
use std::time::Duration;

/// A promise of the master not to evict some blocks until a deadline.
///
/// The lease is counted from when the request was sent, so it ends here no later than at the master. A lease
/// that is dropped without [`Lease::release`] ends for each block when this client gets the block. For the
/// other blocks it expires by itself.
#[derive(Debug)]
#[must_use = "release a lease that is no longer needed, instead of letting it expire"]
pub struct Lease {
    releases: Arc<Releases>,
    timeout: Duration,
    parts: Vec<LeasePart>,
    /// The number of keys that left the lease in failed renewals, which no result has reported yet.
    untold: usize,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        if !parts.is_empty() {
            self.releases.drop_lease(parts);
        }
    }
}

/// The result of renewing one part.
#[derive(Debug)]
pub(crate) struct Renewed {
    /// Whether each key of the part is still leased.
    pub(crate) kept: Vec<bool>,
    /// The new lease on the kept keys.
    pub(crate) leased: Leased,
}

/// The lease in a reply of the master of `epoch`, counted from when its request was `sent`.
pub(crate) fn counted(wire: Option<&WireLease>, sent: BootTime, epoch: u64) -> Option<Leased> {
    let wire = wire.filter(|lease| lease.ttl_ms > 0)?;
    let ttl = Duration::from_millis(wire.ttl_ms);
    Some(Leased {
        token: wire.token,
        until: sent.after(ttl),
        ttl,
        epoch: Epoch(epoch),
        newest: Version(wire.newest),
    })
}

impl Lease {
    pub(crate) fn new(releases: Arc<Releases>, timeout: Duration, parts: Vec<LeasePart>) -> Self {
        Self {
            releases,
            timeout,
            parts: parts
                .into_iter()
                .filter(|part| !part.keys.is_empty())
                .collect(),
            untold: 0,
        }
    }

    /// The number of keys in the lease. A key that was named twice counts twice.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.keys.len()).sum()
    }

    /// Whether the lease has no keys.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// The time until the first key of the lease may be evicted.
    pub fn left(&self) -> Duration {
        let now = BootTime::now();
        self.parts
            .iter()
            .map(|part| part.leased.until.left(now))
            .min()
            .unwrap_or_default()
    }

    /// Extends the lease to the master's full lease TTL from now. Keys whose lease had expired leave the
    /// lease. Returns their number, which includes the keys that left in earlier failed renewals.
    ///
    /// # Errors
    ///
    /// [`ControlError`] when the master does not answer within [`crate::Timeouts::control`]. Some keys may be
    /// renewed, and the others keep their deadline. Keys may have left the lease: the next result counts
    /// them.
    ///
    /// # Cancellation
    ///
    /// The master may renew the lease all the same. This client then counts the earlier deadline.
    pub async fn renew(&mut self) -> Result<usize, ControlError> {
        let deadline = Deadline::after(self.timeout);
        let renewed = self.renew_parts(deadline).await;
        self.parts.retain(|part| !part.keys.is_empty());
        renewed.map(|()| std::mem::take(&mut self.untold))
    }

    async fn renew_parts(&mut self, deadline: Deadline) -> Result<(), ControlError> {
        for part in &mut self.parts {
            let before = part.keys.len();
            let of = LeaseOf::Presence(part.versions());
            let renewed = renew(self.releases.control(), part, of, deadline).await?;
            let held = |at: usize| renewed.kept.get(at) == Some(&true);
            part.keys = part.keys.retain(held);
            part.leased = renewed.leased;
            self.untold += before - part.keys.len();
        }
        Ok(())
    }

    /// Moves `keys` into a lease of their own. Keys that are not in this lease are ignored, and a key that
    /// occurs in it twice is moved twice.
    pub fn split_off(&mut self, keys: &[Key]) -> Self {
        let taken: HashSet<&Key> = keys.iter().collect();
        let mut parts = Vec::new();
        for part in &mut self.parts {
            let leave: Vec<bool> = part.keys.iter().map(|key| taken.contains(&key)).collect();
            let leaves = |at: usize| leave.get(at) == Some(&true);
            let stay = part.keys.retain(|at| !leaves(at));
            let keys = std::mem::replace(&mut part.keys, stay).retain(leaves);
            let leased = part.leased;
            parts.push(LeasePart { keys, leased });
        }
        self.parts.retain(|part| !part.keys.is_empty());
        Self::new(Arc::clone(&self.releases), self.timeout, parts)
    }

    /// Releases the lease, so that the blocks may be evicted. The client sends the release only once, since a
    /// repeated one could end another client's lease.
    ///
    /// # Errors
    ///
    /// [`ControlError`] when the master did not answer. The lease then expires by itself, as it does when the
    /// future is dropped.
    pub async fn release(mut self) -> Result<(), ControlError> {
        let deadline = Deadline::after(self.timeout);
        let parts = std::mem::take(&mut self.parts);
        release(self.releases.control(), parts, deadline).await
    }
}

/// The object that a renewal protects, with the latest version of each key's block.
#[derive(Clone, Debug)]
pub(crate) enum LeaseOf {
    /// The presence of the blocks, in whichever extents.
    Presence(Vec<u64>),
    /// The extents that a lookup returned.
    Places(Vec<u64>),
}

/// Renews the lease of one part.
pub(crate) async fn renew(
    control: &Control,
    part: &LeasePart,
    of: LeaseOf,
    deadline: Deadline,
) -> Result<Renewed, ControlError> {
    let sent = BootTime::now();
    let (presence, versions) = match of {
        LeaseOf::Presence(versions) => (true, versions),
        LeaseOf::Places(versions) => (false, versions),
    };
    let request = RenewRequest {
        caller: None,
        keys: part.keys.bytes(),
        token: part.leased.token,
        versions,
        presence,
    };
    // The lease counts from before the first attempt, so a repeated call only makes it shorter here.
    let call = Call::by(deadline).under(part.leased.epoch);
    let reply = control.call(request, call).await?;
    expect_answers(reply.codes.len(), part.keys.len())?;
    let ok = u32::from(Code::Ok.to_wire());
    let leased = counted(reply.lease.as_ref(), sent, reply.epoch);
    Ok(Renewed {
        kept: reply
            .codes
            .iter()
            .map(|code| *code == ok && leased.is_some())
            .collect(),
        leased: leased.unwrap_or(part.leased),
    })
}

/// Releases the unexpired leases of `parts`, each at most once.
pub(crate) async fn release(
    control: &Control,
    parts: Vec<LeasePart>,
    deadline: Deadline,
) -> Result<(), ControlError> {
    let now = BootTime::now();
    let calls = parts
        .into_iter()
        .filter(|part| part.leased.runs(now) && !part.keys.is_empty())
        .map(|part| {
            let request = ReleaseRequest {
                caller: None,
                keys: part.keys.bytes(),
                token: part.leased.token,
                versions: part.versions(),
                tokens: Vec::new(),
            };
            let call = Call::by(deadline).under(part.leased.epoch);
            control.call(request, call.once())
        });
    all_of(calls).await
}

/// Makes all calls, even after one has failed. Returns the first failure.
pub(crate) async fn all_of<T>(
    calls: impl IntoIterator<Item = impl Future<Output = Result<T, ControlError>>>,
) -> Result<(), ControlError> {
    let made = futures::future::join_all(calls).await;
    made.into_iter().try_for_each(|made| made.map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_counted_from_when_the_request_was_sent() {
        let sent = BootTime::now();
        let wire = WireLease {
            token: 7,
            ttl_ms: 100,
            newest: 9,
        };
        let leased = counted(Some(&wire), sent, 1).unwrap();
        assert_eq!(leased.until, sent.after(Duration::from_millis(100)));
        // The lease does not start at the time of a late answer.
        let late = sent.after(Duration::from_millis(99));
        assert_eq!(leased.until.left(late), Duration::from_millis(1));
        assert!(leased.runs(late));
        assert!(!leased.runs(sent.after(Duration::from_millis(100))));
    }

    #[test]
    fn no_time_is_no_lease() {
        let sent = BootTime::now();
        assert_eq!(counted(None, sent, 1), None);
        let none = WireLease {
            token: 7,
            ttl_ms: 0,
            newest: 9,
        };
        assert_eq!(counted(Some(&none), sent, 1), None);
    }
}
