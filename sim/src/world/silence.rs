//! A node is silent for a moment while its disk is attached.

use super::World;
use crate::checks;
use crate::plan::Process;
use kvpool_master::membership::NodeState;
use kvpool_master::pool::{MediumView, Pool};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How long the next leader takes to order the attachment of the disk.
const ORDERED: Duration = Duration::from_secs(8);
/// How long the node takes to answer that it has attached the disk.
const ANSWERED: Duration = Duration::from_millis(8);
/// A node is suspect within this time. It gives up its session later.
const SUSPECT: Duration = Duration::from_millis(950);
/// How long a record takes at most once the store goes on.
const LOGGED: Duration = Duration::from_millis(100);
/// How often the leader is looked at.
const MOMENT: Duration = Duration::from_millis(1);

impl World {
    /// The leader dies. The next one has the disk of a node attached, and is to log the answer. The store is late, and
    /// the leader hears nothing of the node meanwhile. The node is suspect when the disk is in use.
    pub(super) async fn attach_in_silence(self: &Arc<Self>, number: usize) {
        if let Some((leader, _)) = checks::leading(self).first() {
            self.crash(Process::Master(*leader), Duration::ZERO);
        }
        let is_ordered =
            |pool: &Pool| medium_of(pool, number).is_some_and(|one| one.record.is_pending);
        if !self.comes_to_be(ORDERED, is_ordered).await {
            let said = "its disk is not attached late: no leader has ordered the attachment";
            return self.trace.note(Process::Node(number), said);
        }
        // A leader with standbys loses its term where the store stalls, and waits where the store is full.
        match self.plan.electing {
            0 => self.disk.stall(0, SUSPECT),
            _ => self.disk.fill(SUSPECT),
        }
        sleep(ANSWERED).await;
        self.net.stop(Process::Node(number), SUSPECT);
        let name = format!("n{number}");
        let is_suspect = |pool: &Pool| {
            let members = pool.members.all();
            let mut own = members.iter().filter(|one| one.name.0 == name);
            own.any(|one| one.state() == NodeState::Suspect)
        };
        let _in_time = self.comes_to_be(SUSPECT, is_suspect).await;
        self.disk.heal();
        let is_in_use =
            |pool: &Pool| medium_of(pool, number).is_some_and(|one| one.state == "ready");
        let _in_time = self.comes_to_be(LOGGED, is_in_use).await;
        self.net.heal();
    }

    /// Waits until something holds for the leader. False when it does not within this time.
    async fn comes_to_be(&self, wait: Duration, holds: impl Fn(&Pool) -> bool) -> bool {
        let until = Instant::now() + wait;
        while !checks::leading(self).iter().any(|(_, pool)| holds(pool)) {
            if Instant::now() >= until {
                return false;
            }
            sleep(MOMENT).await;
        }
        true
    }
}

/// The disk of a node, as a leader sees it.
fn medium_of(pool: &Pool, number: usize) -> Option<MediumView> {
    let name = format!("n{number}");
    let mut media = pool.media().into_iter();
    media.find(|medium| medium.record.node.0 == name)
}
