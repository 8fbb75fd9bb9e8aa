//! Tries the replicas of one block until one serves. Range gets and views use this.

use crate::cache::{Leased, Located};
use crate::clock::{Backoff, BootTime, Deadline};
use crate::context::ClientContext;
use crate::counters::Counting;
use crate::errors::GetError;
use crate::releases::{Changes, Holding};
use crate::replicas::{Choice, Next, Tried};
use crate::reports::{self, Report};
use kvpool_transport::{TransferError, TransportKind};
use kvpool_types::{Code, Key, Length};
use std::sync::Arc;

/// One block, and the replicas and transports that have failed so far.
pub(crate) struct ReplicaRetry<'a> {
    inner: &'a ClientContext,
    key: &'a Key,
    pub(crate) deadline: Deadline,
    /// The only transport that may be used; `None` for any.
    only: Option<TransportKind>,
    located: Option<Arc<Located>>,
    holding: Holding,
    /// The count of changes when the lease was requested or taken over.
    begun: Changes,
    tried: Tried,
    backoff: Backoff,
    reports: Vec<Report>,
    last: Option<GetError>,
}

/// Failed replicas are also reported if another replica served, or if the operation ended.
impl Drop for ReplicaRetry<'_> {
    fn drop(&mut self) {
        let reports = std::mem::take(&mut self.reports);
        let later = Deadline::after(self.inner.options.timeouts.control);
        reports::send_soon(&self.inner.control, reports, later);
    }
}

/// A replica for one attempt.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) located: Arc<Located>,
    pub(crate) choice: Choice,
    /// The deadline of this attempt.
    pub(crate) limit: Deadline,
}

impl<'a> ReplicaRetry<'a> {
    pub(crate) fn new(
        inner: &'a ClientContext,
        key: &'a Key,
        deadline: Deadline,
        only: Option<TransportKind>,
    ) -> Self {
        Self {
            inner,
            key,
            deadline,
            only,
            located: None,
            holding: inner.hold(),
            begun: Changes::default(),
            tried: Tried::default(),
            backoff: Backoff::default(),
            reports: Vec::new(),
            last: None,
        }
    }

    /// The next replica for an attempt to move `bytes`; `None` when the block is absent.
    pub(crate) async fn next(&mut self, bytes: Length) -> Result<Option<Target>, GetError> {
        loop {
            let Some(located) = self.locate().await? else {
                return Ok(None);
            };
            if let Some(choice) = self.choose(&located) {
                let parts = self.tried.untried(&located).saturating_add(1);
                return Ok(Some(Target {
                    limit: self.deadline.share(parts, bytes),
                    located,
                    choice,
                }));
            }
            if !self.is_reachable(&located) {
                return Err(GetError::NotLocal(
                    "no node of this host serves a replica over shared memory, or shared memory is off".into(),
                ));
            }
            // All replicas have failed. The master gets the reports and is asked again. If it still names
            // these replicas, they are tried once more.
            self.located = None;
            self.tried.renew(located.version, true);
            self.pause().await?;
        }
    }

    /// Records that an attempt at `target` failed over the transports `ways`.
    pub(crate) fn fail(&mut self, target: &Target, ways: &[TransportKind], error: TransferError) {
        let segment = target.choice.replica.extent.segment;
        for way in ways {
            self.tried.fail(segment, *way);
        }
        self.inner.locations.forget(self.key);
        Counting::one(&self.inner.counting.transfer_retries);
        let verdict = Next::after(error.code);
        if verdict == Next::ReportUnreachable {
            self.inner.links.deprioritize(&target.choice.replica.node);
        }
        if error.code == Code::StaleEpoch {
            self.inner.control.hear_of_newer_term();
        }
        if verdict == Next::ReportMismatch {
            Counting::one(&self.inner.counting.checksum_mismatches);
        }
        if verdict == Next::Relocate {
            self.located = None;
        }
        if let Some(code) = verdict.report() {
            self.reports.push(Report {
                key: self.key.clone(),
                version: target.located.version,
                segment,
                code,
            });
        }
        self.last = Some(GetError::Failed {
            code: error.code,
            message: error.message,
        });
    }

    /// Adopts the renewed lease of the target, if there is one.
    pub(crate) fn renewed(&mut self, target: &Target, now: Option<Leased>) {
        if let (Some(before), Some(after)) = (target.located.lease, now) {
            self.holding.renewed(self.key, before, after);
        }
    }

    /// Records that the block was read, so that dropped leases on it are released too.
    pub(crate) fn done(&self) {
        if self.inner.releases.remembers() {
            self.inner.releases.read([self.key.clone()]);
        }
    }

    /// Records that the block is pinned. Its lease stays a moment for the next view of the block.
    pub(crate) fn pinned(&mut self, target: &Target) {
        self.holding.linger(&target.located, self.begun);
    }

    /// Records that the lease ended before the work under it did. The work begins again.
    pub(crate) fn lease_outrun(&mut self) {
        Counting::one(&self.inner.counting.leases_outrun);
        self.inner.locations.forget(self.key);
        self.located = None;
    }

    async fn locate(&mut self) -> Result<Option<Arc<Located>>, GetError> {
        loop {
            if self.deadline.has_passed() {
                return Err(self.late());
            }
            if let Some(located) = &self.located {
                return Ok(Some(Arc::clone(located)));
            }
            let reports = std::mem::take(&mut self.reports);
            reports::send_before_lookup(&self.inner.control, reports, self.deadline).await;
            let epoch = self.inner.control.epoch();
            // A cached location has no lease, so the bytes must be verified.
            let cached = match self.only {
                None => self.inner.locations.get(self.key, epoch, BootTime::now()),
                Some(_) => self.holding.take_lingering(self.key).map(|(found, begun)| {
                    self.begun = begun;
                    found
                }),
            };
            let found = match cached {
                Some(located) => {
                    Counting::one(&self.inner.counting.cache_hits);
                    Ok(Some(located))
                }
                None => {
                    Counting::one(&self.inner.counting.cache_misses);
                    self.ask().await
                }
            };
            match found {
                Ok(Some(located)) if !located.replicas.is_empty() => {
                    self.tried.renew(located.version, false);
                    self.located = Some(Arc::clone(&located));
                    return Ok(Some(located));
                }
                Ok(_) => return Ok(None),
                Err(error) if error.is_retryable() => {
                    self.last.get_or_insert(error);
                    self.pause().await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn ask(&mut self) -> Result<Option<Arc<Located>>, GetError> {
        self.begun = self.inner.releases.changes();
        let located = self.inner.lookup_one(self.key, self.deadline).await?;
        if let Some(located) = &located {
            self.holding.add_located(self.key, located);
        }
        Ok(located)
    }

    fn choose(&self, located: &Located) -> Option<Choice> {
        let Some(only) = self.only else {
            return self.tried.choose(located, &self.inner.links);
        };
        let mut narrowed = located.clone();
        narrowed
            .replicas
            .retain(|replica| self.inner.links.ways(&replica.node).contains(&only));
        let mut choice = self.tried.choose(&narrowed, &self.inner.links)?;
        choice.ways.retain(|way| *way == only);
        (!choice.ways.is_empty()).then_some(choice)
    }

    fn is_reachable(&self, located: &Located) -> bool {
        located.replicas.iter().any(|replica| {
            let ways = self.inner.links.ways(&replica.node);
            self.only
                .map_or(!ways.is_empty(), |only| ways.contains(&only))
        })
    }

    async fn pause(&mut self) -> Result<(), GetError> {
        if self.deadline.pause(self.backoff.next()).await {
            Ok(())
        } else {
            Err(self.late())
        }
    }

    fn late(&mut self) -> GetError {
        self.last.take().unwrap_or_else(|| GetError::Failed {
            code: Code::DeadlineExceeded,
            message: "the get's timeout passed".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::pool;
    use futures::FutureExt;
    use std::time::Duration;

    fn retry<'a>(inner: &'a ClientContext, key: &'a Key) -> ReplicaRetry<'a> {
        let deadline = Deadline::after(Duration::from_secs(20));
        ReplicaRetry::new(inner, key, deadline, Some(TransportKind::Shm))
    }

    async fn locate(retry: &mut ReplicaRetry<'_>) -> Target {
        let located = retry.locate().await.unwrap().unwrap();
        Target {
            choice: Choice {
                replica: located.replicas[0].clone(),
                ways: vec![TransportKind::Shm],
            },
            limit: retry.deadline,
            located,
        }
    }

    /// The two steps of an upsert or a remove after its answer.
    fn change(inner: &ClientContext, key: &Key, meanwhile: impl FnOnce()) {
        inner.locations.purge([key]);
        meanwhile();
        inner.releases.forget([key]);
    }

    /// No await lies between a pin and the check of its lease, so the lease cannot expire in between.
    #[tokio::test]
    async fn a_lease_does_not_linger_beyond_this_clients_own_change() {
        let pool = pool().await;
        let (inner, key) = (&*pool.client.inner, &Key::parse("k").unwrap());
        pool.client.put(key, b"first".to_vec()).await.unwrap();
        let lingers = || inner.hold().take_lingering(key).is_some();

        let mut view = retry(inner, key);
        let target = locate(&mut view).await;
        view.pinned(&target);
        assert!(lingers(), "nothing was changed");

        // The view locates its block before the change, and pins it after.
        let mut view = retry(inner, key);
        let target = locate(&mut view).await;
        change(inner, key, || ());
        view.pinned(&target);
        assert!(!lingers(), "the lease was asked for before the change");

        // The view takes over a lingering lease in the middle of the change.
        let mut before = retry(inner, key);
        let target = locate(&mut before).await;
        before.pinned(&target);
        let mut view = None;
        change(inner, key, || {
            let view = view.insert(retry(inner, key));
            let found = locate(view).now_or_never().unwrap();
            assert_eq!(found.located.lease, target.located.lease);
        });
        view.unwrap().pinned(&target);
        assert!(!lingers(), "the lease was taken over during the change");

        // After the change leases linger again, also leases that were taken over.
        let mut view = retry(inner, key);
        let target = locate(&mut view).await;
        view.pinned(&target);
        let mut next = retry(inner, key);
        let target = locate(&mut next).await;
        next.pinned(&target);
        assert!(lingers(), "the change is over");
    }
}
