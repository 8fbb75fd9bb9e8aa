//! Leases that the caller holds.

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

/// A promise of the master not to evict some blocks for a while.
///
/// It is counted from when the request was sent, so it ends here no later than at the master.
/// Dropped without [`Lease::release`] it ends for each block as this client gets it, and for the others
/// runs out by itself.
#[derive(Debug)]
#[must_use = "release a lease that is no longer needed, instead of letting it expire"]
pub struct Lease {
    releases: Arc<Releases>,
    timeout: Duration,
    parts: Vec<LeasePart>,
    /// The keys that left the lease in renewals that failed afterwards.
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

/// What came of renewing one part.
#[derive(Debug)]
pub(crate) struct Renewed {
    /// Whether each of its keys is leased still.
    pub(crate) kept: Vec<bool>,
    /// The lease on those.
    pub(crate) leased: Leased,
}

/// The lease that a reply of `epoch`'s master carries, counted from when its request was `sent`.
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

    /// How many keys it covers. A key that was named twice counts twice.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.keys.len()).sum()
    }

    /// Whether it covers nothing.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// How long all of it still runs: zero once the first of its keys may be evicted.
    pub fn left(&self) -> Duration {
        let now = BootTime::now();
        self.parts
            .iter()
            .map(|part| part.leased.until.left(now))
            .min()
            .unwrap_or_default()
    }

    /// Extends the lease to the master's full lease TTL from now. Keys whose lease had run out leave the
    /// lease; the answer is their number, with those of earlier renewals that failed.
    ///
    /// # Errors
    ///
    /// [`ControlError`] when the master cannot be asked by [`crate::Timeouts::control`]. The lease is then as
    /// long as before, or part of its keys is renewed. Keys may have left it: the next answer counts them.
    ///
    /// # Cancellation
    ///
    /// The master may renew the lease all the same. The lease counts the shorter time.
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

    /// Takes keys out of the lease: the lease of those that were in it, each as often as it was.
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

    /// Ends the lease, so that the blocks may be evicted again. The client asks once: a repeated release
    /// could end another client's lease.
    ///
    /// # Errors
    ///
    /// [`ControlError`] when the master did not answer. The lease then runs out by itself, as it does when the
    /// future is dropped.
    pub async fn release(mut self) -> Result<(), ControlError> {
        let deadline = Deadline::after(self.timeout);
        let parts = std::mem::take(&mut self.parts);
        release(self.releases.control(), parts, deadline).await
    }
}

/// What a lease is renewed for, with the latest version of each key's block.
#[derive(Clone, Debug)]
pub(crate) enum LeaseOf {
    /// The blocks, wherever they lie.
    Presence(Vec<u64>),
    /// The places that a lookup gave.
    Places(Vec<u64>),
}

/// Renews one part.
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
    // Counted from before the first attempt, so a repetition only makes the lease shorter here.
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

/// Ends what still runs of `parts`, each at most once.
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

/// Makes all calls, whatever becomes of one of them. Returns the first failure.
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
        // However late the answer comes, it does not begin to run then.
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
