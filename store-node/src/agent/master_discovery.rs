//! Finds a master that accepts the node's registration.
//!
//! The node tries all known masters, each with its own pauses, so that a master that hangs delays no other.
//! The attempts also tell a standby that the node is alive while there is no leader. If a standby names a
//! leader, that master is tried at once. The first welcome ends the discovery and cancels the other attempts.
//! If masters are announced in etcd, the node also asks etcd for them.

use super::backoff::Backoff;
use super::session::{self, End, Failure, Session};
use super::{Context, Phase};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kvpool_etcd::discover::Location;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// After this long without a welcome the node also tries the next master.
const STAGGER: Duration = Duration::from_millis(20);
/// The longest pause before the next attempt at a master while any master answers as a standby. One of the
/// standbys will lead soon.
const STANDING_BY: Duration = Duration::from_millis(250);
/// The longest pause before the next attempt at a master while no standby answers.
pub(super) const GONE: Duration = Duration::from_secs(1);
/// The least time between two attempts at one master, even if another master names it.
const LEAST_WAIT: Duration = Duration::from_millis(20);
/// When a node must register again, how long it tries only the master of its last session.
const ALONE: Duration = Duration::from_millis(500);
/// The time limit for each etcd endpoint to name the masters.
const ETCD_TIMEOUT: Duration = Duration::from_millis(500);
/// The least time between two such questions.
const ETCD_INTERVAL: Duration = Duration::from_secs(1);
/// The most masters that are known beyond the given ones.
const MOST_LEARNED: usize = 16;

/// The masters that are known during one discovery.
#[derive(Debug)]
pub(super) struct MasterDiscovery {
    masters: Vec<Master>,
    most: usize,
    announced: Vec<Location>,
    /// When etcd is next asked for masters.
    etcd_due: Instant,
    /// The last failure of etcd that was logged.
    undiscovered: Option<String>,
}

#[derive(Debug)]
struct Master {
    address: String,
    due: Instant,
    attempted: Option<Instant>,
    /// Whether an attempt at this master is under way.
    asked: bool,
    backoff: Backoff,
    /// Whether its last answer said that it does not lead.
    stands_by: bool,
    /// The last failure that was logged. A repeated failure is logged once, not at every attempt.
    told: Option<String>,
}

/// How the previous session ended, and with which master.
#[derive(Debug)]
pub(super) enum Before<'a> {
    /// There was no previous session.
    Nothing,
    /// The master is gone, or no longer leads.
    Lost(&'a str),
    /// The node must register anew at this master, after a pause.
    Anew(&'a str, Duration),
}

impl MasterDiscovery {
    /// A discovery among the given masters and the master of the previous session, which need not be among
    /// them.
    pub(super) fn new(given: &[String], before: &Before<'_>) -> Self {
        let now = Instant::now();
        let mut discovery = Self {
            masters: Vec::new(),
            most: given.len() + MOST_LEARNED,
            // The settings have already been checked, so a malformed URL does not occur.
            announced: given
                .iter()
                .filter_map(|url| Location::parse(url).ok())
                .collect(),
            etcd_due: now,
            undiscovered: None,
        };
        let (last, wait) = match before {
            Before::Nothing => (None, Duration::ZERO),
            // The lost master is the least likely to answer. A single master also gets a moment to return.
            Before::Lost(master) => (Some(*master), Backoff::default().next(GONE)),
            Before::Anew(master, pause) => (Some(*master), *pause),
        };
        let others = match before {
            Before::Anew(..) => now + ALONE,
            _ => now,
        };
        let direct = given.iter().filter(|url| !Location::is_meant_by(url));
        let others_first = direct.filter(|url| Some(url.as_str()) != last);
        for (address, turn) in others_first.zip(0u32..) {
            discovery.add(address, others + STAGGER * turn);
        }
        if let Some(last) = last {
            discovery.add(last, now + wait);
        }
        discovery
    }

    /// Whether more than one master is known.
    pub(super) const fn is_of_several(&self) -> bool {
        self.masters.len() > 1
    }

    /// Tries the masters until one welcomes the node, and returns that master. A failure that ends the
    /// incarnation or the node also ends the discovery.
    pub(super) async fn run(
        &mut self,
        context: &mut Context,
    ) -> Result<(Session, String), (End, String)> {
        let mut phases = context.phases.clone();
        let mut leaving = std::pin::pin!(phases.wait_for(|phase| *phase == Phase::Leaving));
        let mut attempts = FuturesUnordered::new();
        let mut etcd_answers = FuturesUnordered::new();
        loop {
            let now = Instant::now();
            if self.etcd_due <= now {
                self.etcd_due = now + ETCD_INTERVAL;
                if etcd_answers.is_empty() {
                    let locations = self.announced.clone().into_iter();
                    etcd_answers.extend(
                        locations
                            .map(|location| async move { location.masters(ETCD_TIMEOUT).await }),
                    );
                }
            }
            for master in self.masters.iter_mut().filter(|master| master.is_due(now)) {
                master.asked = true;
                master.attempted = Some(now);
                let introduction = context.introduction();
                let address = master.address.clone();
                let credentials = context.options.credentials.clone();
                let tls = context.options.tls.clone();
                let connect = context.options.connect.clone();
                let names = Arc::clone(&context.names);
                attempts.push(async move {
                    let answer = session::introduce(
                        &address,
                        &credentials,
                        tls.as_ref(),
                        connect.as_ref(),
                        &names,
                        introduction,
                    )
                    .await;
                    (address, answer)
                });
            }
            let idle = self.masters.iter().filter(|master| !master.asked);
            let next = idle.map(|master| master.due);
            let etcd_due = (!self.announced.is_empty()).then_some(self.etcd_due);
            let next = next.chain(etcd_due).min();
            let (address, answer) = tokio::select! {
                biased;
                // An error means that the sender is gone, so the node leaves.
                _ = &mut leaving => return Err((End::Left, String::new())),
                Some(answered) = attempts.next() => answered,
                Some(found) = etcd_answers.next() => {
                    self.discovered(found);
                    continue;
                }
                () = sleep_until(next.unwrap_or(now)), if next.is_some() => continue,
            };
            let entered = answer.and_then(|welcomed| Session::enter(context, &address, welcomed));
            match entered {
                Ok(session) => return Ok((session, address)),
                Err(End::Failed(failure)) => self.failed(&address, &failure),
                Err(end) => return Err((end, address)),
            }
        }
    }

    fn add(&mut self, address: &str, due: Instant) {
        self.masters.push(Master {
            address: address.to_owned(),
            due,
            attempted: None,
            asked: false,
            backoff: Backoff::default(),
            stands_by: false,
            told: None,
        });
    }

    /// Sets the time of the next attempt at a master that failed. If the master named a leader, the leader is
    /// tried at once.
    fn failed(&mut self, address: &str, failure: &Failure) {
        let now = Instant::now();
        let leader = failure.not_leader();
        let any_stands_by = self
            .masters
            .iter()
            .any(|master| master.stands_by && master.address != address);
        if let Some(master) = self.find(address) {
            master.asked = false;
            master.stands_by = leader.is_some();
            let cap = if any_stands_by || master.stands_by {
                STANDING_BY
            } else {
                GONE
            };
            master.due = now + master.backoff.next(cap);
            let text = failure.to_string();
            if master.told.as_ref() != Some(&text) {
                tracing::warn!(
                    master = address,
                    error = text,
                    "cannot open a session with the master, retrying"
                );
                master.told = Some(text);
            }
        }
        if let Some(leader) = leader.filter(|leader| *leader != address) {
            self.names(leader);
        }
    }

    /// Records that `leader` is said to lead, and tries it at once. An empty address means that no leader is
    /// known.
    pub(super) fn names(&mut self, leader: &str) {
        let now = Instant::now();
        let has_room = self.masters.len() < self.most;
        match self.find(leader) {
            _ if leader.is_empty() => {}
            Some(master) => master.hurry(now),
            None if has_room => self.add(leader, now),
            None => {}
        }
    }

    /// Adds announced masters that were not known.
    fn discovered(&mut self, found: Result<Vec<String>, kvpool_etcd::Error>) {
        let problem = match found {
            Ok(addresses) => {
                for address in &addresses {
                    if self.find(address).is_none() {
                        self.names(address);
                    }
                }
                addresses
                    .is_empty()
                    .then(|| "no master is announced".to_owned())
            }
            Err(error) => Some(error.to_string()),
        };
        if problem != self.undiscovered {
            if let Some(error) = &problem {
                tracing::warn!(error, "master discovery through etcd failed, retrying");
            }
            self.undiscovered = problem;
        }
    }

    fn find(&mut self, address: &str) -> Option<&mut Master> {
        let mut masters = self.masters.iter_mut();
        masters.find(|master| master.address == address)
    }
}

impl Master {
    fn is_due(&self, now: Instant) -> bool {
        !self.asked && self.due <= now
    }

    /// Makes the next attempt as early as permitted, because the master is said to lead.
    fn hurry(&mut self, now: Instant) {
        let soonest = self
            .attempted
            .map_or(now, |attempted| attempted + LEAST_WAIT);
        self.due = self.due.min(soonest.max(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(leader: &str) -> Failure {
        Failure::Refused {
            code: Ok(kvpool_types::Code::NotLeader),
            message: "as told".into(),
            leader: leader.into(),
        }
    }

    /// When a master is due, counted from `begun`.
    fn due(discovery: &mut MasterDiscovery, address: &str, begun: Instant) -> Duration {
        let due = discovery.find(address).unwrap().due;
        due.saturating_duration_since(begun)
    }

    /// Whether a master is due `wait` after some moment between `begun` and now.
    fn is_due(
        discovery: &mut MasterDiscovery,
        address: &str,
        wait: Duration,
        begun: Instant,
    ) -> bool {
        (wait..=wait + begun.elapsed()).contains(&due(discovery, address, begun))
    }

    #[test]
    fn the_others_come_first_when_a_master_was_lost() {
        let given = ["a", "b", "c"].map(str::to_owned);
        let begun = Instant::now();
        let mut discovery = MasterDiscovery::new(&given, &Before::Lost("a"));
        assert!(is_due(&mut discovery, "b", Duration::ZERO, begun));
        assert!(is_due(&mut discovery, "c", STAGGER, begun));
        assert!(due(&mut discovery, "a", begun) >= STAGGER);
        let begun = Instant::now();
        let mut discovery = MasterDiscovery::new(&given, &Before::Lost("learned"));
        let soon = Duration::from_millis(100) + begun.elapsed();
        assert!(due(&mut discovery, "learned", begun) <= soon);
    }

    #[test]
    fn where_masters_are_announced_nobody_attempts() {
        let given = ["etcd://a:2379/pool".to_owned(), "b".to_owned()];
        let discovery = MasterDiscovery::new(&given, &Before::Nothing);
        assert_eq!((discovery.masters.len(), discovery.announced.len()), (1, 1));
    }

    #[test]
    fn waits_are_short_while_somebody_stands_by_and_longer_when_nobody_answers() {
        let given = ["a", "b"].map(str::to_owned);
        let begun = Instant::now();
        let mut discovery = MasterDiscovery::new(&given, &Before::Nothing);
        for _ in 0..10 {
            discovery.failed("a", &Failure::Ended);
            discovery.failed("b", &Failure::Ended);
        }
        assert!(due(&mut discovery, "a", begun) >= GONE / 2);
        let begun = Instant::now();
        discovery.failed("b", &refused(""));
        discovery.failed("a", &Failure::Ended);
        for address in ["a", "b"] {
            let wait = due(&mut discovery, address, begun);
            assert!(wait <= STANDING_BY + begun.elapsed(), "{wait:?}");
        }
    }

    #[test]
    fn a_leader_that_is_named_is_due_at_once_but_not_over_and_over() {
        let given = ["a".to_owned()];
        let begun = Instant::now();
        let mut discovery = MasterDiscovery::new(&given, &Before::Nothing);
        discovery.failed("a", &refused("b"));
        assert!(is_due(&mut discovery, "b", Duration::ZERO, begun));
        let begun = Instant::now();
        discovery.find("b").unwrap().attempted = Some(begun);
        discovery.failed("b", &Failure::Ended);
        discovery.failed("a", &refused("b"));
        assert!(is_due(&mut discovery, "b", LEAST_WAIT, begun));
        // Whoever answers cannot make the list grow without bound.
        for n in 0..100 {
            discovery.failed("a", &refused(&format!("x{n}")));
        }
        assert!(discovery.masters.len() <= 1 + MOST_LEARNED);
    }
}
