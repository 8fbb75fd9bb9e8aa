//! Renews the leases of blocks during a long read.

use crate::cache::{Leased, Located};
use crate::clock::{BootTime, Deadline};
use crate::control::Control;
use crate::lease::{LeaseOf, renew};
use crate::packed::Packed;
use crate::releases::LeasePart;
use kvpool_seams::maps::HashMap;
use kvpool_types::Key;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// The leases of the blocks of one read.
#[derive(Debug)]
pub(crate) struct Renewal<'a> {
    control: &'a Control,
    keys: Vec<Key>,
    /// The version of each block that is read. A lease on a later version belongs to another reader.
    versions: Vec<u64>,
    leases: Mutex<Vec<Option<Held>>>,
}

/// The lease of one block.
#[derive(Clone, Copy, Debug)]
struct Held {
    lease: Leased,
    /// Whether the master has refused to renew the lease, which then expires.
    ends: bool,
}

impl Held {
    const fn new(lease: Leased) -> Self {
        Self { lease, ends: false }
    }

    /// Whether the lease is to be renewed when it is due.
    fn goes_on(&self, now: BootTime) -> bool {
        !self.ends && self.lease.runs(now)
    }
}

impl<'a> Renewal<'a> {
    pub(crate) fn new<'b>(
        control: &'a Control,
        blocks: impl IntoIterator<Item = (&'b Key, &'b Arc<Located>)>,
    ) -> Self {
        let (keys, (versions, leases)) = blocks
            .into_iter()
            .map(|(key, located)| {
                let lease = located.lease.map(Held::new);
                (key.clone(), (located.version.0, lease))
            })
            .unzip();
        Self {
            control,
            keys,
            versions,
            leases: Mutex::new(leases),
        }
    }

    /// Awaits `work`. Meanwhile it renews each lease when half of the lease has passed.
    pub(crate) async fn during<F: Future>(&self, work: F, deadline: Deadline) -> F::Output {
        tokio::select! {
            biased;
            output = work => output,
            never = self.keep(deadline) => match never {},
        }
    }

    /// The present lease of each block; `None` for a block that had none.
    pub(crate) fn leases(&self) -> Vec<Option<Leased>> {
        let leases = self.leases.lock();
        leases
            .iter()
            .map(|held| Some(held.as_ref()?.lease))
            .collect()
    }

    async fn keep(&self, deadline: Deadline) -> std::convert::Infallible {
        loop {
            match self.next_due(BootTime::now()) {
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
            if !self.renew_due(deadline).await {
                std::future::pending::<()>().await;
            }
        }
    }

    /// The time until the first lease is half over; `None` when no lease is to be renewed.
    fn next_due(&self, now: BootTime) -> Option<Duration> {
        self.leases
            .lock()
            .iter()
            .flatten()
            .filter(|held| held.goes_on(now))
            .map(|held| half_left(&held.lease, now))
            .min()
    }

    /// Renews the leases that are half over. A lease that the master does not renew expires, and its block is
    /// read again under a new lease. Returns false when the call failed, so that all these leases expire.
    async fn renew_due(&self, deadline: Deadline) -> bool {
        let now = BootTime::now();
        let mut due: HashMap<u64, Vec<usize>> = HashMap::default();
        let mut leased: HashMap<u64, Leased> = HashMap::default();
        for (at, held) in self.leases.lock().iter().enumerate() {
            if let Some(held) = held
                && held.goes_on(now)
                && half_left(&held.lease, now).is_zero()
            {
                due.entry(held.lease.token).or_default().push(at);
                leased.insert(held.lease.token, held.lease);
            }
        }
        for (token, places) in due {
            let Some(lease) = leased.get(&token) else {
                continue;
            };
            // A key that occurs twice in the read is leased once.
            let mut of_key: HashMap<&Key, usize> = HashMap::default();
            let (mut distinct, mut versions) = (Vec::new(), Vec::new());
            for at in &places {
                if let (Some(key), Some(version)) = (self.keys.get(*at), self.versions.get(*at)) {
                    of_key.entry(key).or_insert_with(|| {
                        distinct.push(key);
                        versions.push(*version);
                        distinct.len() - 1
                    });
                }
            }
            let part = LeasePart {
                keys: Packed::of(distinct),
                leased: *lease,
            };
            let Ok(renewed) = renew(self.control, &part, LeaseOf::Places(versions), deadline).await
            else {
                return false;
            };
            let mut leases = self.leases.lock();
            for at in places {
                let kept = self
                    .keys
                    .get(at)
                    .and_then(|key| renewed.kept.get(*of_key.get(key)?));
                if let Some(Some(held)) = leases.get_mut(at) {
                    match kept {
                        Some(true) => held.lease = renewed.leased,
                        _ => held.ends = true,
                    }
                }
            }
        }
        true
    }
}

/// The time until half of the lease has passed.
fn half_left(lease: &Leased, now: BootTime) -> Duration {
    lease.until.left(now).saturating_sub(lease.ttl / 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::{Epoch, Version};

    #[test]
    fn a_lease_is_due_when_half_of_it_has_passed() {
        let now = BootTime::now();
        let lease = Leased {
            token: 1,
            until: now.after(Duration::from_secs(10)),
            ttl: Duration::from_secs(10),
            epoch: Epoch(1),
            newest: Version(1),
        };
        let at = |secs| now.after(Duration::from_secs(secs));
        assert_eq!(half_left(&lease, now), Duration::from_secs(5));
        assert_eq!(half_left(&lease, at(5)), Duration::ZERO);
        assert_eq!(half_left(&lease, at(20)), Duration::ZERO);
    }
}
