//! The fenced transaction of every write in a term, and its repetition until the outcome is known.

use super::keys::{corrupt, from_decimal};
use super::{BACKOFF, EtcdStore};
use crate::store::{Stalled, StoreError};
use kvpool_etcd::Error;
use kvpool_etcd::kv::{Compare, KeyValue, Op, Outcome, Range, Revision, Txn};
use kvpool_types::Epoch;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::time::Instant;

/// A term in the form that transactions compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Term {
    pub(super) epoch: Epoch,
    /// The revision at which the leader's key was created.
    pub(super) created: Revision,
}

/// Which writes must end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stop {
    /// This epoch and all earlier ones are abandoned.
    abandoned: Epoch,
    pub(super) closed: bool,
}

/// Why writes wait.
#[derive(Clone, Debug)]
pub(super) struct Stall {
    since: Instant,
    error: Error,
}

impl Stall {
    pub(super) fn describe(&self) -> Stalled {
        Stalled {
            waited: self.since.elapsed(),
            no_space: self.error == Error::NoSpace,
            reason: self.error.to_string(),
        }
    }
}

/// A write that waits until etcd has space, counted until it is dropped.
struct SpaceWait<'a>(&'a AtomicUsize);

impl<'a> SpaceWait<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for SpaceWait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// How a write behaves while etcd has no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WhenFull {
    Wait,
    Fail,
}

/// The outcome of a write.
#[derive(Debug)]
pub(super) enum Written {
    Done,
    /// The term continues, but another comparison of the transaction failed.
    Refused(Answer),
    /// The term is over; the value is the latest epoch.
    Deposed(Epoch, Answer),
}

/// The values that the other branch of a refused write read.
#[derive(Debug)]
pub(super) struct Answer {
    outcome: Outcome,
    /// Whether an earlier attempt at the same transaction got no answer, and may have been applied.
    pub(super) uncertain: bool,
}

impl Answer {
    /// The value that a step of the caller read; the steps count from 0.
    pub(super) fn get(&self, step: usize) -> Option<&KeyValue> {
        self.outcome.get(OWN_STEPS + step)
    }
}

/// The number of steps at the start of the other branch of [`EtcdStore::fenced`].
const OWN_STEPS: usize = 3;

impl EtcdStore {
    /// Ends a term for this process. Pending and later writes of this term and of earlier terms get
    /// [`StoreError::Unavailable`]. A request in flight may still take effect until another term
    /// begins.
    pub fn abandon(&self, epoch: Epoch) {
        self.stop
            .send_modify(|stop| stop.abandoned = stop.abandoned.max(epoch));
    }

    pub(super) fn check_open(&self) -> Result<(), StoreError> {
        if self.stop.borrow().closed {
            Err(StoreError::Closed)
        } else {
            Ok(())
        }
    }

    /// The term with this epoch. The term may be over: the transaction finds that out.
    pub(super) async fn term(&self, epoch: Epoch) -> Result<Term, StoreError> {
        self.check_open()?;
        let standing = self.standing.lock().as_ref().map(|standing| standing.term);
        if let Some(term) = standing.filter(|term| term.epoch == epoch) {
            return Ok(term);
        }
        let read = Txn::new()
            .then(Op::get(Range::key(self.keys.term())))
            .then(Op::get(Range::key(self.keys.epoch_floor())));
        let read = self.client.txn_repeatable(read).await?;
        let created = epoch
            .0
            .checked_sub(floor(read.get(1))?)
            .and_then(|created| i64::try_from(created).ok())
            .filter(|created| *created > 0);
        match created {
            Some(created) => Ok(Term {
                epoch,
                created: Revision(created),
            }),
            // No term can have had this epoch.
            None => Err(StoreError::Fenced {
                asked: epoch,
                current: latest_epoch(read.get(0), read.get(1))?,
            }),
        }
    }

    /// An unfinished transaction that has an effect only while the term continues.
    pub(super) fn fenced(&self, term: Term) -> Txn {
        Txn::new()
            .when(Compare::created(self.keys.leader(), term.created))
            .otherwise(Op::get(Range::key(self.keys.leader())))
            .otherwise(Op::get(Range::key(self.keys.term())))
            .otherwise(Op::get(Range::key(self.keys.epoch_floor())))
    }

    /// Repeats an idempotent transaction of [`EtcdStore::fenced`] until its outcome is known or the term is
    /// abandoned. `bytes` is the size of its puts.
    pub(super) async fn write(
        &self,
        term: Term,
        txn: Txn,
        bytes: u64,
        when_full: WhenFull,
    ) -> Result<Written, StoreError> {
        let mut stop = self.stop.subscribe();
        let mut uncertain = false;
        let mut pause = BACKOFF.0;
        let mut waits_for_space = None;
        let mut has_stalled = false;
        // Another error ends the write, so nothing waits any more.
        let goes_on = |error: &Error| match error {
            Error::TooLarge { .. } => false,
            Error::NoSpace => when_full == WhenFull::Wait,
            _ => true,
        };
        loop {
            let tried = async {
                let client = self.patience.lock().of(&self.client);
                let begun = Instant::now();
                let outcome = client.txn(txn.clone()).await;
                match &outcome {
                    Err(Error::Unavailable { .. }) => self.patience.lock().failed(begun.elapsed()),
                    _ => self.patience.lock().answered(begun.elapsed()),
                }
                if let Err(error) = &outcome
                    && goes_on(error)
                {
                    has_stalled = true;
                    self.stalled(error);
                    if *error == Error::NoSpace {
                        waits_for_space.get_or_insert_with(|| SpaceWait::begin(&self.space_waits));
                    }
                    tokio::time::sleep(pause).await;
                }
                outcome
            };
            let outcome = tokio::select! {
                biased;
                stopped = stop.wait_for(|stop| stop.closed || stop.abandoned >= term.epoch) => {
                    *self.stall.lock() = None;
                    let closed = stopped.is_ok_and(|stop| stop.closed);
                    return Err(if closed && !uncertain {
                        StoreError::Closed
                    } else {
                        StoreError::Unavailable { reason: "the term was abandoned".into() }
                    });
                }
                outcome = tried => outcome,
            };
            pause = (pause * 2).min(BACKOFF.1);
            if has_stalled && outcome.as_ref().is_err_and(|error| !goes_on(error)) {
                *self.stall.lock() = None;
            }
            match outcome {
                Ok(outcome) => {
                    *self.stall.lock() = None;
                    return self.judge(term, outcome, uncertain, bytes);
                }
                Err(Error::TooLarge { .. }) => return Err(StoreError::TooLarge { size: bytes }),
                Err(Error::NoSpace) if when_full == WhenFull::Fail => {
                    return Err(StoreError::NoSpace);
                }
                // etcd checks its quota again after it has applied a transaction. So it may answer "no space" to
                // a transaction that it has applied.
                Err(Error::Unavailable { .. } | Error::NoSpace) => uncertain = true,
                // etcd refused the transaction without effect. Its users are being changed, or it is damaged, or its
                // settings do not fit. The stall tells the reason until an operator has mended it.
                Err(_) => {}
            }
        }
    }

    fn judge(
        &self,
        term: Term,
        outcome: Outcome,
        uncertain: bool,
        bytes: u64,
    ) -> Result<Written, StoreError> {
        if outcome.succeeded {
            self.written.fetch_add(bytes, Ordering::Relaxed);
            return Ok(Written::Done);
        }
        let goes_on = outcome
            .get(0)
            .is_some_and(|leader| leader.created == term.created);
        let latest = latest_epoch(outcome.get(1), outcome.get(2))?;
        let answer = Answer { outcome, uncertain };
        Ok(if goes_on {
            Written::Refused(answer)
        } else {
            Written::Deposed(latest, answer)
        })
    }

    fn stalled(&self, error: &Error) {
        let mut stall = self.stall.lock();
        let is_other = |stall: &Stall| !error.is_retryable() && stall.error != *error;
        if stall.as_ref().is_none_or(is_other) {
            tracing::warn!(%error, "etcd does not take a write; trying again");
        }
        let since = stall
            .as_ref()
            .map_or_else(Instant::now, |stall| stall.since);
        *stall = Some(Stall {
            since,
            error: error.clone(),
        });
    }
}

/// The outcome of a write that compares only the term.
pub(super) fn settled(asked: Epoch, written: Written) -> Result<(), StoreError> {
    match written {
        Written::Done => Ok(()),
        Written::Deposed(current, _) => Err(StoreError::Fenced { asked, current }),
        Written::Refused(_) => Err(corrupt("the leader's key", "is and is not as expected")),
    }
}

/// The number that is added to a revision to get an epoch.
pub(super) fn floor(epoch_floor: Option<&KeyValue>) -> Result<u64, StoreError> {
    epoch_floor.map_or(Ok(0), |floor| from_decimal("the epoch floor", &floor.value))
}

/// The epoch of a term whose leader's key was created at a revision.
pub(super) fn epoch_of(floor: u64, created: Revision) -> Epoch {
    Epoch(floor.saturating_add(created.0.unsigned_abs()))
}

/// The epoch of the latest term; 0 before the first.
pub(super) fn latest_epoch(
    term: Option<&KeyValue>,
    epoch_floor: Option<&KeyValue>,
) -> Result<Epoch, StoreError> {
    let floor = floor(epoch_floor)?;
    Ok(term.map_or(Epoch(0), |term| epoch_of(floor, term.modified)))
}
