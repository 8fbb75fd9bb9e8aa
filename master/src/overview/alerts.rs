//! The present alerts, by rules on the facts of an overview.

use super::facts::{MediumFacts, NodeFacts, Overview, PoolFacts, UnusedFacts};
use crate::metrics::Totals;
use crate::placement::{Usage, share};
use serde::Serialize;

/// The most alerts listed.
const MOST: usize = 100;
/// The lag, in groups of the log, above which a standby takes long to take over. The alert
/// `KvpoolStandbyLag` and the documents name the same number, and a test compares them.
const MUCH_LAG: u64 = 1000;
/// The share of the pool, in percent, above which quarantine counts as stuck.
const MUCH_QUARANTINE: u64 = 10;

/// The severity of an alert, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Puts or gets fail.
    Critical,
    /// Blocks are unreachable, or the next failure will hurt.
    Warning,
    /// An operator asked for the state, or it ends by itself.
    Notice,
}

/// The rule of an alert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AlertKind {
    /// No master leads.
    NoLeader,
    /// The leader's term has lapsed.
    ReadOnly,
    /// The store takes no writes.
    StoreFailed,
    /// The store raises an alarm.
    StoreAlarm,
    /// The pool has no live node.
    NoLiveNode,
    /// A node is silent.
    NodeSuspect,
    /// A node was dropped with its blocks.
    NodeGone,
    /// A node of the last term has not come back.
    NodeUnreported,
    /// A node shuts down.
    NodeDraining,
    /// Nothing is left to move off a node that drains.
    NodeDrained,
    /// A medium is not in full use.
    Medium,
    /// Puts wait for room in a full pool.
    PutsWait,
    /// Much of the pool is in quarantine.
    Quarantine,
    /// A standby is far behind.
    StandbyLag,
    /// No master stands by.
    NoStandby,
    /// A daemon cannot use a file of tokens, keys or certificates, or its token ends soon.
    Files,
    /// A counter of faults rose within the last minutes.
    Fault,
}

/// A present problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Alert {
    /// The severity.
    pub severity: Severity,
    /// The rule.
    pub kind: AlertKind,
    /// The node, medium or master; empty for the pool.
    pub object: String,
    /// What happened, and what to do.
    pub message: String,
    /// The metric with the same fact; empty for none.
    pub metric: &'static str,
}

impl Alert {
    fn new(severity: Severity, kind: AlertKind, object: &str, message: String) -> Self {
        Self {
            severity,
            kind,
            object: object.to_owned(),
            message,
            metric: "",
        }
    }

    const fn metric(mut self, name: &'static str) -> Self {
        self.metric = name;
        self
    }
}

/// The low watermark in bytes: the high watermark less the reserve.
pub(super) fn low_watermark(usage: &Usage, eviction_ratio: f64) -> u64 {
    let reserve = share(usage.capacity, eviction_ratio);
    usage.limit.saturating_sub(reserve)
}

/// The recent events that the rules need beside the facts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Recent {
    /// A put had to wait within the last seconds.
    pub(super) puts_waited: bool,
    /// How much each counter of faults rose during the last minutes.
    pub(super) faults: Totals,
}

/// Sets the alerts of an overview.
pub(super) fn judge(overview: &mut Overview, recent: &Recent) {
    let mut alerts = Vec::new();
    masters(overview, &mut alerts);
    if let Some(pool) = &overview.pool {
        filled(pool, recent.puts_waited, &mut alerts);
        alerts.extend(no_live_node(&overview.nodes));
    }
    for node in &overview.nodes {
        alerts.extend(silent(node));
        let media = node.media.iter();
        alerts.extend(media.filter_map(|medium| unfit(medium, &node.name)));
        let unused = node.unused_media.iter();
        alerts.extend(unused.map(|medium| not_used(medium, &node.name)));
    }
    alerts.extend(unusable_files(overview));
    faults(&recent.faults, &mut alerts);
    alerts.sort_by_key(|alert| (alert.severity, alert.kind));
    overview.alerts_left_off = alerts.len().saturating_sub(MOST);
    alerts.truncate(MOST);
    overview.alerts = alerts;
}

fn masters(overview: &Overview, alerts: &mut Vec<Alert>) {
    let mut add = |severity, kind, object: &str, message: String, metric| {
        alerts.push(Alert::new(severity, kind, object, message).metric(metric));
    };
    const LEADS: &str = "kvpool_master_leads";
    if overview.role == "read-only" {
        let message = "The leader lease was not renewed in time: this master answers reads and refuses \
                       puts. Check etcd and the network to it";
        add(
            Severity::Critical,
            AlertKind::ReadOnly,
            "",
            message.to_owned(),
            LEADS,
        );
    } else if overview.role != "leader" && overview.leader.is_empty() {
        let message =
            "No master leads: puts fail until one does. Run `kvctl cluster` and check etcd";
        add(
            Severity::Critical,
            AlertKind::NoLeader,
            "",
            message.to_owned(),
            LEADS,
        );
    }
    for alarm in &overview.store_alarms {
        let message = format!(
            "The metadata store raises an alarm: {alarm}. Puts wait or fail while it lasts. Mend the store"
        );
        let metric = "kvpool_master_store_alarms";
        add(
            Severity::Critical,
            AlertKind::StoreAlarm,
            "",
            message,
            metric,
        );
    }
    for master in overview.masters.iter().filter(|one| one.lag > MUCH_LAG) {
        let message = format!(
            "Standby {} lacks {} groups of the log: a take-over would take long. Check its host and etcd",
            master.address, master.lag
        );
        let metric = "kvpool_master_log_applied";
        let kind = AlertKind::StandbyLag;
        add(Severity::Warning, kind, &master.address, message, metric);
    }
    let stands_by = |role: &str| role == "standby";
    let has_standby =
        stands_by(overview.role) || overview.masters.iter().any(|one| stands_by(&one.role));
    if overview.store == "etcd" && !has_standby {
        let message = "No master stands by: if the leader ends, puts and gets fail. Start a second kvmaster \
                       with the same etcd";
        add(
            Severity::Warning,
            AlertKind::NoStandby,
            "",
            message.to_owned(),
            "",
        );
    }
}

fn filled(pool: &PoolFacts, puts_waited: bool, alerts: &mut Vec<Alert>) {
    let percent = |part: u64| {
        let hundredfold = u128::from(part) * 100;
        u64::try_from(hundredfold / u128::from(pool.capacity_bytes.max(1))).unwrap_or(u64::MAX)
    };
    if !pool.store_failure.is_empty() {
        let message = format!(
            "Durable writes fail: {}. Puts fail until the master restarts on a store that works",
            pool.store_failure
        );
        alerts.push(Alert::new(
            Severity::Critical,
            AlertKind::StoreFailed,
            "",
            message,
        ));
    }
    if (pool.puts_waiting > 0 || puts_waited) && pool.used_bytes >= pool.low_watermark_bytes {
        let message = format!(
            "Puts wait for room, {} now: {} % of the memory is used. Add store nodes, or let readers hold \
             leases and pins for less time",
            pool.puts_waiting,
            percent(pool.used_bytes)
        );
        let alert = Alert::new(Severity::Warning, AlertKind::PutsWait, "", message);
        alerts.push(alert.metric("kvpool_master_put_waits_total"));
    }
    let quarantined = percent(pool.quarantine_bytes);
    if quarantined > MUCH_QUARANTINE {
        let message = format!(
            "{quarantined} % of the memory is in quarantine: readers hold it, or a node does not answer. \
             Look for suspect nodes and for processes that hold views"
        );
        let alert = Alert::new(Severity::Warning, AlertKind::Quarantine, "", message);
        alerts.push(alert.metric("kvpool_master_quarantine_bytes"));
    }
}

fn no_live_node(nodes: &[NodeFacts]) -> Option<Alert> {
    if nodes.iter().any(|node| node.state == "live") {
        return None;
    }
    let start = "with `kvstore-node --master ADDRESS --segment SIZE`";
    let drains = |node: &&NodeFacts| matches!(node.state, "draining" | "drained");
    let served = "No store node takes blocks: puts fail. Gets of blocks on draining nodes succeed";
    let mut draining = nodes.iter().filter(drains).peekable();
    let has_draining = draining.peek().is_some();
    // The drain of a node that stops cannot be ended.
    let message = match draining.find(|node| !node.stops) {
        Some(node) => format!(
            "{served}. Take a node back with `kvctl node undrain {}`, or start one {start}",
            node.name
        ),
        None if has_draining => format!("{served}. Start one {start}"),
        None => format!("The pool has no live store node: puts and gets fail. Start one {start}"),
    };
    let kind = AlertKind::NoLiveNode;
    Some(Alert::new(Severity::Critical, kind, "", message))
}

fn silent(node: &NodeFacts) -> Option<Alert> {
    let name = &node.name;
    let seconds = node.silent_ms.unwrap_or_default() / 1000;
    let (severity, kind, message) = match node.state {
        "suspect" => (
            Severity::Warning,
            AlertKind::NodeSuspect,
            format!(
                "Node {name} has been silent for {seconds} s: its blocks are misses until it is heard again. \
                 Check its process, its host and the network"
            ),
        ),
        "unreported" => (
            Severity::Warning,
            AlertKind::NodeUnreported,
            format!(
                "Node {name} has not come back to this term: its blocks are misses. Check that it runs and \
                 reaches this master"
            ),
        ),
        "draining" => {
            let (severity, rest) = draining(node);
            let message = format!("Node {name} drains: it takes no new blocks. {rest}");
            (severity, AlertKind::NodeDraining, message)
        }
        "drained" => {
            let rest = drained(node);
            let message = format!("Node {name} is drained: a stop loses no block. {rest}");
            (Severity::Notice, AlertKind::NodeDrained, message)
        }
        "gone" if node.silent_ms.is_some() => (
            Severity::Warning,
            AlertKind::NodeGone,
            format!(
                "Node {name} was dropped {seconds} s ago and its blocks left memory. Start it again, or add \
                 another node"
            ),
        ),
        _ => return None,
    };
    Some(Alert::new(severity, kind, name, message))
}

/// The operator's next step for a drained node. A node that stops cannot be taken back.
fn drained(node: &NodeFacts) -> &'static str {
    match (node.media.is_empty(), node.media_leave, node.stops) {
        (true, _, false) => "Stop it, or take it back with `kvctl node undrain`",
        (true, _, true) => "It stops now: start it again to take it back",
        (false, false, false) => "Keep its disks: it was drained without --ssd",
        (false, false, true) => "It stops now. Keep its disks: it was drained without --ssd",
        (false, true, false) => {
            "Its SSDs are not needed either: stop it, and run `kvctl ssd detach` for each of them"
        }
        (false, true, true) => {
            "Its SSDs are not needed either: once it has stopped, run `kvctl ssd detach` for each of them"
        }
    }
}

/// The severity of a node that is not drained yet, and the operator's next step.
fn draining(node: &NodeFacts) -> (Severity, String) {
    if node.media_leave && !node.media.is_empty() {
        return emptying(node);
    }
    // The blocks are not counted while they move.
    let Some(left) = node.left_blocks.filter(|left| *left > 0) else {
        let rest = "No action is needed while its blocks move";
        return (Severity::Notice, rest.to_owned());
    };
    let name = &node.name;
    match (node.media.is_empty(), node.stops) {
        (false, false) => {
            let rest = format!(
                "A stop now would lose {left} blocks. The node copies blocks to its SSD: if this number stays, add a \
                 store node and repeat the drain"
            );
            (Severity::Notice, rest)
        }
        (true, false) => {
            // The task may have ended with an earlier leader, so the other nodes need not be full.
            let rest = format!(
                "A stop would lose {left} blocks, and no task moves them. Run `kvctl node drain {name}` again. If \
                 blocks stay, add a store node, or make room on the others"
            );
            (Severity::Warning, rest)
        }
        // Nothing more moves off a node that is gone in a moment.
        (false, true) => {
            let rest = format!(
                "It stops, and copies blocks to its SSD first: {left} blocks have no other place yet. No action is \
                 needed while this number falls"
            );
            (Severity::Notice, rest)
        }
        (true, true) => {
            let rest = format!(
                "It stops now, and {left} blocks without another place leave with it. Before the next stop, run \
                 `kvctl node drain {name}`: the command fails while a stop would lose blocks"
            );
            (Severity::Warning, rest)
        }
    }
}

/// As [`draining`], for a node whose media do not come back.
fn emptying(node: &NodeFacts) -> (Severity, String) {
    let copies: u64 = node.media.iter().map(|medium| medium.copies).sum();
    let held = format!("Its SSDs do not come back, and hold {copies} copies now");
    let left = node.left_blocks.filter(|left| *left > 0);
    if node.stops {
        return stops_early(node, &held, left);
    }
    match left {
        // The blocks are not counted while they move.
        None => {
            let rest = format!(
                "{held}. No action is needed while its blocks move. Keep it running with its SSDs until it is drained"
            );
            (Severity::Notice, rest)
        }
        Some(left) => {
            let rest = format!(
                "{held}. Without the node and its SSDs {left} blocks would be lost. If no `kvctl node drain {0} --ssd` \
                 runs, add a store node or make room on the others, and run it again",
                node.name
            );
            (Severity::Warning, rest)
        }
    }
}

/// As [`emptying`], for a node that stops. The stop does not wait until its media are empty.
fn stops_early(node: &NodeFacts, held: &str, left: Option<u64>) -> (Severity, String) {
    let (severity, only) = match left {
        None => (Severity::Notice, String::new()),
        Some(left) => {
            let only = format!(" {left} blocks are only on the node and its SSDs.");
            (Severity::Warning, only)
        }
    };
    let rest = format!(
        "{held}. It stops now.{only} Keep its SSDs, start it again with them, and run `kvctl node drain {} --ssd` \
         again",
        node.name
    );
    (severity, rest)
}

/// The alert of a medium that its node does not use.
fn not_used(medium: &UnusedFacts, node: &str) -> Alert {
    let UnusedFacts { path, reason, .. } = medium;
    let message = format!("Node {node} does not use {path}: {reason}");
    let alert = Alert::new(Severity::Warning, AlertKind::Medium, path, message);
    alert.metric("kvpool_master_media")
}

fn unfit(medium: &MediumFacts, node: &str) -> Option<Alert> {
    let (id, copies) = (&medium.id, medium.copies);
    let (severity, rest) = match medium.state {
        // Its node says why it is refused: see `not_used`.
        "ready" | "refused" => return None,
        "read_only" => (
            Severity::Warning,
            "takes no writes: its blocks are read, and none is added. Check the free room and the kernel \
             log of its host"
                .to_owned(),
        ),
        "slow" => (
            Severity::Warning,
            format!(
                "is too slow: its {copies} copies are misses until it is fast again. \
                 Check the disk and what else uses it"
            ),
        ),
        "gone" => (
            Severity::Warning,
            format!(
                "has failed: its {copies} copies are misses. Replace the disk and restart the node, then run \
                 `kvctl ssd detach {id}`"
            ),
        ),
        "attaching" => (
            Severity::Notice,
            "is not attached yet: its copies are misses. If this stays, read the node's log".to_owned(),
        ),
        _ => (
            Severity::Warning,
            format!(
                "is absent: its {copies} copies are misses. Start node {node} again with this disk. Only if \
                 the disk will never come back: `kvctl ssd detach {id} --yes` forgets the copies"
            ),
        ),
    };
    let message = format!("Medium {id} of node {node} {rest}");
    let alert = Alert::new(severity, AlertKind::Medium, id, message);
    Some(alert.metric("kvpool_master_media"))
}

/// The problems that daemons report about their files of tokens, keys and certificates.
fn unusable_files(overview: &Overview) -> impl Iterator<Item = Alert> {
    let alert =
        |object: &str, message| Alert::new(Severity::Warning, AlertKind::Files, object, message);
    let own = overview.problems.iter();
    let own = own.map(move |said| alert("", format!("This master says: {said}")));
    let of_nodes = overview.nodes.iter().flat_map(move |node| {
        let said = node.problems.iter();
        said.map(move |said| alert(&node.name, format!("Node {} says: {said}", node.name)))
    });
    own.chain(of_nodes)
}

fn faults(recent: &Totals, alerts: &mut Vec<Alert>) {
    let rules = [
        (
            recent.replicas_corrupt,
            "kvpool_master_replicas_corrupt_total",
            "replica was corrupt on its own node",
            "replicas were corrupt on their own node",
            "The memory or an SSD of a host may be faulty: check it, and run `kvctl ssd verify`",
        ),
        (
            recent.checksum_reports,
            "kvpool_master_checksum_reports_total",
            "report of a client named a replica with a wrong checksum",
            "reports of clients named replicas with a wrong checksum",
            "Check the memory of the hosts",
        ),
        (
            recent.unreachable_reports,
            "kvpool_master_unreachable_reports_total",
            "report of a client named a replica that it could not reach",
            "reports of clients named replicas that they could not reach",
            "Run `kvctl doctor` on the client's host",
        ),
        (
            recent.blocks_lost,
            "kvpool_master_blocks_lost_total",
            "block was lost with the node of its last replica",
            "blocks were lost with the node of their last replica",
            "Workers compute them again",
        ),
    ];
    for (count, metric, one, many, advice) in rules {
        let meaning = match count {
            0 => continue,
            1 => one,
            _ => many,
        };
        let message = format!("In the last minutes {count} {meaning}. {advice}");
        let alert = Alert::new(Severity::Warning, AlertKind::Fault, "", message);
        alerts.push(alert.metric(metric));
    }
}

#[cfg(test)]
mod tests;
