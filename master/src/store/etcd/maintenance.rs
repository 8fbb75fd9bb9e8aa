//! Keeps etcd small. etcd keeps every version of every key until a compaction, and its file does not shrink
//! until a defragmentation.

use super::{EtcdStore, Revision};
use crate::store::StoreError;
use kvpool_etcd::Error;
use kvpool_etcd::maintenance::{Alarm, Status};
use kvpool_types::Epoch;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// The age at which history is compacted. A standby that falls further behind reads the log instead of
/// watching.
const KEEP: Duration = Duration::from_secs(2);
/// A compaction is due after this process has put this many bytes, or after `COMPACT_EVERY`.
const COMPACT_BYTES: u64 = 16 << 20;
const COMPACT_EVERY: Duration = Duration::from_secs(60);
/// The time limit of a compaction or a defragmentation.
const PATIENCE: Duration = Duration::from_secs(60);
/// The interval of rounds (defragmentation, then the alarm) while etcd is full and has no new history to
/// compact. An operator may have raised the quota or made room.
const ROUND_EVERY: Duration = Duration::from_secs(30);

/// The findings and actions of [`EtcdStore::maintain`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Maintained {
    /// The bytes of the largest endpoint's file.
    pub db_size: u64,
    /// The bytes in use of the endpoint that uses most.
    pub in_use: u64,
    /// The active alarms, in words.
    pub alarms: Vec<String>,
    /// The revision before which the history was compacted.
    pub compacted: Option<Revision>,
    /// Whether an endpoint was defragmented.
    pub defragmented: bool,
}

/// The bytes in etcd, and its alarms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The bytes of the largest endpoint's file.
    pub db_size: u64,
    /// The bytes in use of the endpoint that uses most.
    pub in_use: u64,
    /// The active alarms, in words.
    pub alarms: Vec<String>,
}

/// State that is kept between calls of the maintenance.
#[derive(Debug, Default)]
pub(super) struct Upkeep {
    /// The latest observations, oldest first.
    seen: VecDeque<Seen>,
    /// The revision and time of the last compaction.
    compacted: Option<(Instant, Seen)>,
    full: Option<Full>,
}

/// A revision, the time when it was current, and the bytes that this process had put by then.
#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    revision: Revision,
    written: u64,
}

/// A round against a full etcd: each endpoint is defragmented, then the alarm is disarmed. The reported size
/// in use cannot tell whether this is needed. It counts freed space only after later writes, and a full etcd
/// accepts no writes.
#[derive(Debug)]
struct Full {
    /// When the last round began, or when etcd was first found full.
    round: Instant,
    /// The endpoints that are still to be defragmented; `None` between rounds.
    left: Option<Vec<usize>>,
}

impl Upkeep {
    fn see(&mut self, now: Seen) {
        self.seen.push_back(now);
        // Of the observations that are old enough, only the newest is needed.
        while self
            .seen
            .get(1)
            .is_some_and(|seen| now.at.duration_since(seen.at) >= KEEP)
        {
            self.seen.pop_front();
        }
        // Bytes that were put before the first observation count as well.
        let none = Seen {
            at: now.at,
            revision: Revision(0),
            written: 0,
        };
        self.compacted.get_or_insert((now.at, none));
    }

    /// The observation up to which to compact, if it is old enough and enough bytes were put before
    /// it.
    fn due(&self, now: Instant, is_full: bool) -> Option<Seen> {
        let old = *self.seen.front()?;
        let (since, before) = self.compacted?;
        let is_due = is_full
            || old.written - before.written >= COMPACT_BYTES
            || now.duration_since(since) >= COMPACT_EVERY;
        let is_new = old.revision > before.revision;
        (is_due && is_new && now.duration_since(old.at) >= KEEP).then_some(old)
    }

    /// The endpoint of a full etcd that is defragmented next.
    fn full_round(
        &mut self,
        now: Instant,
        has_compacted: bool,
        statuses: &[(usize, Status)],
    ) -> Option<usize> {
        let full = self.full.get_or_insert(Full {
            round: now,
            left: None,
        });
        // The list is empty after the last defragmentation of the round failed.
        let is_over = full.left.as_ref().is_none_or(Vec::is_empty);
        let is_due = is_over && now.duration_since(full.round) >= ROUND_EVERY;
        if has_compacted || is_due {
            let order = leader_last(statuses).into_iter().rev();
            full.left = Some(order.map(|(endpoint, _)| endpoint).collect());
            full.round = now;
        }
        full.left.as_mut()?.pop()
    }

    /// Whether the round ends with the endpoint that was defragmented.
    fn ends_round(&mut self, done: Option<usize>) -> bool {
        let Some(full) = &mut self.full else {
            return false;
        };
        let is_over = done.is_some() && full.left.as_ref().is_some_and(Vec::is_empty);
        if is_over {
            full.left = None;
        }
        is_over
    }
}

impl EtcdStore {
    /// Does the maintenance that is due. It compacts history, defragments one endpoint per call (etcd's
    /// leader last), and disarms the alarm of a full etcd that has space again. It does nothing if
    /// [`EtcdOptions::compact`](super::EtcdOptions::compact) is off. The leader calls this every few seconds.
    /// A candidate that [`StoreError::NoSpace`] keeps from becoming the leader calls it with epoch 0.
    pub async fn maintain(&self, epoch: Epoch) -> Result<Maintained, StoreError> {
        self.check_open()?;
        let mut upkeep = self.upkeep.lock().await;
        if epoch > Epoch(0) {
            self.sweep_now(epoch).await?;
        }
        let alarms = self.client.alarms().await?;
        let is_full = alarms.iter().any(|(_, alarm)| *alarm == Alarm::NoSpace);
        let compacted = self.compact(&mut upkeep, is_full).await?;
        let mut statuses = self.statuses().await?;
        let due = if !self.options.compact {
            None
        } else if is_full {
            upkeep.full_round(Instant::now(), compacted.is_some(), &statuses)
        } else {
            upkeep.full = None;
            self.loose(&statuses)
        };
        if let Some(endpoint) = due {
            tracing::info!(endpoint, is_full, "defragmenting etcd");
            self.client.defragment(endpoint, PATIENCE).await?;
            statuses = self.statuses().await?;
        }
        if upkeep.ends_round(due) {
            for (member, _) in alarms.iter().filter(|(_, alarm)| *alarm == Alarm::NoSpace) {
                self.client.disarm_no_space(*member).await?;
            }
        }
        let largest = |of: fn(&Status) -> u64| statuses.iter().map(|(_, s)| of(s)).max();
        Ok(Maintained {
            db_size: largest(|status| status.db_size).unwrap_or(0),
            in_use: largest(|status| status.db_size_in_use).unwrap_or(0),
            alarms: alarms.iter().map(|(_, alarm)| in_words(*alarm)).collect(),
            compacted,
            defragmented: due.is_some(),
        })
    }

    /// The bytes in etcd, and its active alarms.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when no endpoint answers.
    pub async fn usage(&self) -> Result<Usage, StoreError> {
        self.check_open()?;
        let statuses = self.statuses().await?;
        let alarms = self.client.alarms().await?;
        let largest = |of: fn(&Status) -> u64| statuses.iter().map(|(_, s)| of(s)).max();
        Ok(Usage {
            db_size: largest(|status| status.db_size).unwrap_or(0),
            in_use: largest(|status| status.db_size_in_use).unwrap_or(0),
            alarms: alarms.iter().map(|(_, alarm)| in_words(*alarm)).collect(),
        })
    }

    /// The endpoints that answer, with their status. An error if none answers.
    pub(super) async fn statuses(&self) -> Result<Vec<(usize, Status)>, StoreError> {
        let mut statuses = Vec::new();
        let mut failed = None;
        for endpoint in 0..self.options.endpoints.len() {
            match self.client.status(endpoint).await {
                Ok(status) => statuses.push((endpoint, status)),
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) if statuses.is_empty() => Err(error.into()),
            _ => Ok(statuses),
        }
    }

    async fn compact(
        &self,
        upkeep: &mut Upkeep,
        is_full: bool,
    ) -> Result<Option<Revision>, StoreError> {
        if !self.options.compact {
            return Ok(None);
        }
        let now = Instant::now();
        let written = self.written.load(Ordering::Relaxed);
        let range = self.client.range(self.keys.pointers().limit(1).keys_only());
        upkeep.see(Seen {
            at: now,
            revision: range.await?.revision,
            written,
        });
        let Some(due) = upkeep.due(now, is_full) else {
            return Ok(None);
        };
        // Only a full etcd waits until the compaction has freed its pages, because its files shrink next.
        match self.client.compact(due.revision, is_full, PATIENCE).await {
            Ok(()) => {}
            // Another master, or etcd itself, has compacted already.
            Err(Error::Compacted) => {}
            Err(error) => return Err(error.into()),
        }
        upkeep.compacted = Some((now, due));
        Ok(Some(due.revision))
    }

    /// An endpoint with a large free part in its file.
    fn loose(&self, statuses: &[(usize, Status)]) -> Option<usize> {
        let above = self.options.defragment_above.as_u64();
        leader_last(statuses)
            .into_iter()
            .filter(|(_, status)| {
                let free = status.db_size.saturating_sub(status.db_size_in_use);
                status.db_size > above && free > status.db_size_in_use
            })
            .map(|(endpoint, _)| endpoint)
            .next()
    }
}

/// The endpoints in the order of defragmentation. A defragmentation stops its endpoint, so etcd's leader
/// comes last.
fn leader_last(statuses: &[(usize, Status)]) -> Vec<(usize, &Status)> {
    let (leaders, others): (Vec<_>, Vec<_>) = statuses
        .iter()
        .map(|(endpoint, status)| (*endpoint, status))
        .partition(|(_, status)| status.leader == Some(status.member));
    others.into_iter().chain(leaders).collect()
}

fn in_words(alarm: Alarm) -> String {
    match alarm {
        Alarm::NoSpace => "etcd has used up its space quota",
        Alarm::Corrupt => "etcd's members hold different data",
        Alarm::Unknown => "etcd raised an alarm that is not known here",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_etcd::maintenance::MemberId;

    #[test]
    fn a_round_whose_last_defragmentation_failed_is_followed_by_another() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let statuses = [0, 1].map(|endpoint| {
            let status = Status {
                member: MemberId(endpoint as u64),
                leader: None,
                revision: Revision(1),
                version: String::new(),
                db_size: 0,
                db_size_in_use: 0,
                errors: Vec::new(),
            };
            (endpoint, status)
        });
        let mut upkeep = Upkeep::default();
        let turns = |upkeep: &mut Upkeep, seconds, has_compacted| {
            upkeep.full_round(at(seconds), has_compacted, &statuses)
        };
        assert_eq!(turns(&mut upkeep, 0, true), Some(0));
        assert!(!upkeep.ends_round(Some(0)));
        assert_eq!(turns(&mut upkeep, 5, false), Some(1));
        // Here the defragmentation fails, and the round does not end.
        assert_eq!(turns(&mut upkeep, 29, false), None);
        assert!(!upkeep.ends_round(None));
        assert_eq!(turns(&mut upkeep, 30, false), Some(0));
    }

    #[test]
    fn history_is_kept_for_a_while_and_forgotten_when_enough_has_come() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let seen = |seconds: u64, written| Seen {
            at: at(seconds),
            revision: Revision(100 + i64::try_from(seconds).unwrap()),
            written,
        };
        let mut upkeep = Upkeep::default();
        let due = |upkeep: &Upkeep, seconds, is_full| {
            let due = upkeep.due(at(seconds), is_full);
            due.map(|due| due.revision.0)
        };
        for seconds in (0..=20).step_by(2) {
            upkeep.see(seen(seconds, 0));
        }
        assert_eq!(due(&upkeep, 20, false), None);
        assert_eq!(due(&upkeep, 20, true), Some(118));
        upkeep.compacted = Some((at(20), seen(18, 0)));
        assert_eq!(due(&upkeep, 21, true), None, "nothing new is old enough");
        for seconds in (22..=78).step_by(2) {
            upkeep.see(seen(seconds, 0));
        }
        assert_eq!(due(&upkeep, 78, false), None);
        assert_eq!(due(&upkeep, 80, false), Some(176), "a minute has gone");
        // Many bytes were put, but all of them are recent, and followers may need that history.
        upkeep.see(seen(82, COMPACT_BYTES));
        assert_eq!(due(&upkeep, 79, false), None);
        upkeep.see(seen(88, COMPACT_BYTES));
        upkeep.compacted = Some((at(80), seen(72, 0)));
        assert_eq!(due(&upkeep, 88, false), Some(182));
        assert!(upkeep.seen.len() < 6, "{:?}", upkeep.seen);
    }
}
