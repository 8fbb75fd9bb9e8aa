//! The task behind the overview. It takes samples, records dropped nodes, and updates the
//! listeners.

use super::alerts::{self, Recent};
use super::facts::{self, NodeFacts, Overview};
use super::history::History;
use super::listeners::Listeners;
use crate::leadership::Seat;
use crate::membership::StoreNode;
use crate::metrics::Totals;
use crate::metrics::namespaces::MOST;
use crate::pool::Pool;
use bytes::Bytes;
use kvpool_types::Epoch;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio::time::{MissedTickBehavior, interval};

/// The interval of samples and snapshots.
const EVERY: Duration = Duration::from_secs(1);
/// How long a dropped node stays in the list, and a fault among the alerts: the length of the
/// history.
const REMEMBERED: Duration = Duration::from_secs(300);
/// The most dropped nodes in the list.
const MOST_GONE: usize = 64;
/// The length of a window of faults. Present counters are compared with those at the start of a
/// window.
const FAULT_WINDOW: Duration = Duration::from_secs(10);
/// Puts count as waiting if a put waited within this many points.
const RECENT_POINTS: usize = 3;

/// Nodes by name.
type Nodes = BTreeMap<String, Arc<StoreNode>>;

#[derive(Debug, Default)]
struct State {
    history: History,
    /// The term of the samples. `seen` has the nodes of its last sample, `gone` the nodes that left
    /// since.
    epoch: Epoch,
    seen: Nodes,
    gone: VecDeque<(Arc<StoreNode>, Instant)>,
    /// The totals at the start of each window of faults.
    faults: VecDeque<(Instant, Totals)>,
}

/// The history and the facts behind the page and `kvctl top`.
pub struct Watch {
    seat: Arc<Seat>,
    state: Mutex<State>,
    /// The listeners of `/v1/events`.
    pub listeners: Listeners,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

impl Watch {
    /// A watch over the master at `seat`. Nothing is sampled before [`Watch::run`].
    pub fn new(seat: Arc<Seat>) -> Self {
        Self {
            seat,
            state: Mutex::default(),
            listeners: Listeners::default(),
        }
    }

    /// The pool at this moment, with the points of the history after `seq`.
    pub fn overview(&self, seq: u64) -> Overview {
        let pool = facts::pool_of(&self.seat);
        let mut overview = facts::of_masters(&self.seat);
        if let Some(pool) = &pool {
            facts::add_pool(&mut overview, pool);
        }
        let now = Instant::now();
        let state = self.state.lock();
        if pool.is_some() {
            let gone = state.dropped().filter(|(left, _)| {
                let is_back = |node: &NodeFacts| node.name == left.name.0;
                !overview.nodes.iter().any(is_back)
            });
            let gone = gone.map(|(node, at)| gone_node(&node.name.0, now, *at));
            let gone: Vec<NodeFacts> = gone.collect();
            overview.nodes.extend(gone);
        }
        overview.seq = state.history.last();
        overview.history = state.history.after(seq);
        let recent = Recent {
            puts_waited: state.history.puts_waited(RECENT_POINTS),
            faults: faults_since(state.faults.front(), &state.history.totals()),
        };
        drop(state);
        alerts::judge(&mut overview, &recent);
        overview
    }

    /// [`Watch::overview`] as JSON.
    pub fn json(&self, seq: u64) -> Vec<u8> {
        let overview = self.overview(seq);
        serde_json::to_vec(&overview).expect("invariant: an overview has string keys only")
    }

    /// One event of `/v1/events`. Its id is the number of the last point, which a browser names when it comes back.
    pub fn event(&self, seq: u64) -> Bytes {
        let overview = self.overview(seq);
        let mut event = format!("id: {}\nretry: 250\ndata: ", overview.seq).into_bytes();
        // JSON has no line end outside strings, and escapes line ends in strings.
        serde_json::to_writer(&mut event, &overview)
            .expect("invariant: an overview has string keys only");
        event.extend_from_slice(b"\n\n");
        event.into()
    }

    /// Samples once a second and tells the listeners, until `stopped`. Then every stream ends.
    pub async fn run(self: Arc<Self>, stopped: impl Future<Output = ()>) {
        let sampling = async {
            let mut times = interval(EVERY);
            times.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                times.tick().await;
                self.tick().await;
            }
        };
        tokio::select! {
            biased;
            () = stopped => {}
            () = sampling => {}
        }
        self.listeners.close();
    }

    async fn tick(self: &Arc<Self>) {
        let pool = facts::pool_of(&self.seat);
        let epoch = pool.as_ref().map_or(Epoch::default(), |pool| pool.epoch);
        let last = self.sample(pool.as_deref(), epoch, Instant::now());
        if self.listeners.is_empty() {
            return;
        }
        // With 1,000 nodes this takes a millisecond, so it runs on a thread that no call of a
        // client uses.
        let watch = Arc::clone(self);
        let published = kvpool_seams::blocking(move || {
            let event = watch.event(last.saturating_sub(1));
            watch.listeners.publish(&event);
        });
        if published.await.is_err() {
            tracing::debug!("no snapshot was published");
        }
    }

    fn sample(&self, pool: Option<&Pool>, epoch: Epoch, now: Instant) -> u64 {
        let totals = self.seat.metrics.totals();
        let used = pool.map_or(0, |pool| pool.placement.usage().used);
        if let Some(pool) = pool {
            let (largest, _) = pool.largest_namespaces(MOST);
            self.seat.metrics.watch_namespaces(&largest);
        }
        let present = pool.map(|pool| {
            let nodes = pool.members.all().into_iter();
            nodes.map(|node| (node.name.0.clone(), node)).collect()
        });
        let mut state = self.state.lock();
        state.history.sample(now, totals, used);
        state.note_nodes(epoch, present.unwrap_or_default(), now);
        state.note_faults(totals, now);
        state.history.last()
    }
}

impl State {
    /// Records the nodes that left since the last sample.
    fn note_nodes(&mut self, epoch: Epoch, present: Nodes, now: Instant) {
        let before = std::mem::replace(&mut self.seen, present);
        if std::mem::replace(&mut self.epoch, epoch) != epoch {
            self.gone.clear();
            return;
        }
        for (name, node) in before {
            if !self.seen.contains_key(&name) {
                self.gone.retain(|(other, _)| other.name != node.name);
                self.gone.push_back((node, now));
            }
        }
        let seen = &self.seen;
        self.gone.retain(|(node, at)| {
            !seen.contains_key(&node.name.0) && now.saturating_duration_since(*at) < REMEMBERED
        });
        while self.gone.len() > MOST_GONE {
            let is_orderly = |(node, _): &(Arc<StoreNode>, Instant)| node.departure.is_orderly();
            let first = self.gone.iter().position(is_orderly).unwrap_or(0);
            self.gone.remove(first);
        }
    }

    /// The nodes that left, except nodes that stopped in order and with which no block was lost.
    /// The sweep counts lost blocks after the node has left, so the nodes are examined at each
    /// call.
    fn dropped(&self) -> impl Iterator<Item = &(Arc<StoreNode>, Instant)> {
        let gone = self.gone.iter();
        gone.filter(|(node, _)| !node.departure.is_orderly())
    }

    fn note_faults(&mut self, totals: Totals, now: Instant) {
        let is_due = |(at, _): &(Instant, Totals)| now.duration_since(*at) >= FAULT_WINDOW;
        if self.faults.back().is_none_or(is_due) {
            self.faults.push_back((now, totals));
        }
        while let Some((at, _)) = self.faults.front()
            && now.saturating_duration_since(*at) > REMEMBERED
        {
            self.faults.pop_front();
        }
    }
}

fn faults_since(start: Option<&(Instant, Totals)>, totals: &Totals) -> Totals {
    let Some((_, start)) = start else {
        return Totals::default();
    };
    Totals {
        blocks_lost: totals.blocks_lost.saturating_sub(start.blocks_lost),
        checksum_reports: totals
            .checksum_reports
            .saturating_sub(start.checksum_reports),
        unreachable_reports: totals
            .unreachable_reports
            .saturating_sub(start.unreachable_reports),
        replicas_corrupt: totals
            .replicas_corrupt
            .saturating_sub(start.replicas_corrupt),
        ..Totals::default()
    }
}

fn gone_node(name: &str, now: Instant, at: Instant) -> NodeFacts {
    NodeFacts {
        name: name.to_owned(),
        state: "gone",
        silent_ms: Some(millis(now, at)),
        ..NodeFacts::default()
    }
}

fn millis(now: Instant, then: Instant) -> u64 {
    let since = now.saturating_duration_since(then);
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::BootInstant;
    use kvpool_types::{GrantKey, Incarnation, NodeName};

    fn node(name: &str) -> Arc<StoreNode> {
        let (name, key) = (NodeName(name.into()), GrantKey([1; 32]));
        Arc::new(StoreNode::new(name, Incarnation(1), key, BootInstant(0)))
    }

    fn present(nodes: &[&Arc<StoreNode>]) -> Nodes {
        let named = nodes.iter().copied();
        named
            .map(|node| (node.name.0.clone(), Arc::clone(node)))
            .collect()
    }

    fn dropped(state: &State) -> Vec<&str> {
        let names = state.dropped().map(|(node, _)| node.name.0.as_str());
        names.collect()
    }

    #[test]
    fn a_dropped_node_is_remembered_for_minutes_and_one_that_left_in_order_is_not() {
        let mut state = State::default();
        let start = Instant::now();
        let epoch = Epoch(3);
        let [dies, leaves, loses, stays] = ["dies", "leaves", "loses", "stays"].map(node);
        let all = present(&[&dies, &leaves, &loses, &stays]);
        state.note_nodes(epoch, all, start);
        leaves.departure.take_leave();
        loses.departure.take_leave();
        state.note_nodes(epoch, present(&[&stays]), start);
        assert_eq!(dropped(&state), ["dies"]);
        // The sweep finds the lost blocks later.
        loses.departure.add_lost(2);
        assert_eq!(dropped(&state), ["dies", "loses"]);
        state.note_nodes(epoch, present(&[&stays]), start + REMEMBERED);
        assert!(state.gone.is_empty());
    }

    #[test]
    fn nodes_that_left_in_order_take_no_place_of_dropped_ones() {
        let mut state = State::default();
        let now = Instant::now();
        let dies = node("a");
        let mut all = present(&[&dies]);
        for number in 0..MOST_GONE {
            let leaves = node(&format!("b-{number}"));
            leaves.departure.take_leave();
            all.insert(leaves.name.0.clone(), leaves);
        }
        state.note_nodes(Epoch(1), all, now);
        state.note_nodes(Epoch(1), Nodes::new(), now);
        assert_eq!((state.gone.len(), dropped(&state)), (MOST_GONE, vec!["a"]));
    }

    #[test]
    fn a_node_that_comes_back_is_not_gone_and_neither_are_those_of_another_term() {
        let mut state = State::default();
        let now = Instant::now();
        let (a, b) = (node("a"), node("b"));
        state.note_nodes(Epoch(1), present(&[&a, &b]), now);
        state.note_nodes(Epoch(1), Nodes::new(), now);
        assert_eq!(state.gone.len(), 2);
        state.note_nodes(Epoch(1), present(&[&a]), now);
        assert_eq!(state.gone.len(), 1);
        state.note_nodes(Epoch(2), Nodes::new(), now);
        assert!(state.gone.is_empty());
    }

    #[test]
    fn faults_are_recent_for_the_remembered_time() {
        let mut state = State::default();
        let start = Instant::now();
        let lost = |blocks_lost| Totals {
            blocks_lost,
            ..Totals::default()
        };
        state.note_faults(lost(5), start);
        let since = |state: &State, now| faults_since(state.faults.front(), &now).blocks_lost;
        assert_eq!(since(&state, lost(7)), 2);
        for second in 0..400 {
            state.note_faults(lost(7), start + Duration::from_secs(second));
        }
        assert_eq!(since(&state, lost(7)), 0);
        assert!(state.faults.len() <= 32);
    }
}
