//! Leases that the caller holds.

use crate::cache::Leased;
use crate::clock::{BootTime, Deadline};
use crate::control::{Call, Control};
use crate::errors::ControlError;
use kvpool_proto::{Lease as WireLease, ReleaseRequest, RenewRequest};
use kvpool_types::wire::keys::pack;
use kvpool_types::{Code, Key};
use std::sync::Arc;
use std::time::Duration;

/// A promise of the master not to evict some blocks for a while.
///
/// It is counted from when the request was sent, so it ends here no later than at the master.
/// Dropped without [`Lease::release`] it runs out by itself.
#[derive(Debug)]
#[must_use = "a lease that nobody needs is better released than left to run out"]
pub struct Lease {
    control: Arc<Control>,
    timeout: Duration,
    parts: Vec<Part>,
}

/// What one reply leased.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) keys: Vec<Key>,
    pub(crate) leased: Leased,
}

/// The lease that a reply carries, counted from when its request was `sent`.
pub(crate) fn counted(wire: Option<&WireLease>, sent: BootTime) -> Option<Leased> {
    let wire = wire.filter(|lease| lease.ttl_ms > 0)?;
    let ttl = Duration::from_millis(wire.ttl_ms);
    Some(Leased {
        token: wire.token,
        until: sent.after(ttl),
        ttl,
    })
}

impl Lease {
    pub(crate) fn new(control: Arc<Control>, timeout: Duration, parts: Vec<Part>) -> Self {
        Self {
            control,
            timeout,
            parts: parts
                .into_iter()
                .filter(|part| !part.keys.is_empty())
                .collect(),
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

    /// Extends the lease by the master's full time. Keys whose lease had run out fall out of it;
    /// how many is the answer.
    pub async fn renew(&mut self) -> Result<usize, ControlError> {
        let deadline = Deadline::after(self.timeout);
        let before = self.len();
        for part in &mut self.parts {
            *part = renew(&self.control, part, deadline).await?;
        }
        self.parts.retain(|part| !part.keys.is_empty());
        Ok(before - self.len())
    }

    /// Ends the lease, so that the blocks may be evicted again. It is asked for once and not again,
    /// since a release that is repeated could end another's lease; when the call fails the lease
    /// runs out by itself.
    pub async fn release(self) -> Result<(), ControlError> {
        let deadline = Deadline::after(self.timeout);
        release(&self.control, self.parts, deadline).await
    }
}

/// Renews one part: what is left of it, under its new deadline.
pub(crate) async fn renew(
    control: &Control,
    part: &Part,
    deadline: Deadline,
) -> Result<Part, ControlError> {
    let sent = BootTime::now();
    let request = RenewRequest {
        caller: None,
        keys: pack(&part.keys).into(),
        token: part.leased.token,
    };
    // Counted from before the first attempt, so a repetition only makes the lease shorter here.
    let reply = control.call(request, Call::by(deadline)).await?;
    let kept = part
        .keys
        .iter()
        .zip(&reply.codes)
        .filter(|(_, code)| **code == u32::from(Code::Ok.to_wire()))
        .map(|(key, _)| key.clone());
    Ok(match counted(reply.lease.as_ref(), sent) {
        Some(leased) => Part {
            keys: kept.collect(),
            leased,
        },
        None => Part {
            keys: Vec::new(),
            leased: part.leased,
        },
    })
}

/// Ends what still runs of `parts`, each at most once.
pub(crate) async fn release(
    control: &Control,
    parts: Vec<Part>,
    deadline: Deadline,
) -> Result<(), ControlError> {
    let now = BootTime::now();
    let calls = parts
        .into_iter()
        .filter(|part| part.leased.runs(now) && !part.keys.is_empty())
        .map(|part| {
            let request = ReleaseRequest {
                caller: None,
                keys: pack(&part.keys).into(),
                token: part.leased.token,
            };
            control.call(request, Call::by(deadline).once())
        });
    futures::future::try_join_all(calls).await.map(|_| ())
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
        };
        let leased = counted(Some(&wire), sent).unwrap();
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
        assert_eq!(counted(None, sent), None);
        let none = WireLease {
            token: 7,
            ttl_ms: 0,
        };
        assert_eq!(counted(Some(&none), sent), None);
    }
}
