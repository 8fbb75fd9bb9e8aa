//! The fields of a master's overview that `kvctl top` shows. A master of another version may lack or add some.

use serde::Deserialize;

/// An overview.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Facts {
    pub(super) told_by: String,
    pub(super) role: String,
    pub(super) reason: String,
    pub(super) epoch: u64,
    pub(super) cluster_id: String,
    pub(super) leader: String,
    pub(super) store: String,
    pub(super) log_last: u64,
    pub(super) masters: Vec<Master>,
    pub(super) pool: Option<Pool>,
    pub(super) nodes: Vec<Node>,
    pub(super) namespaces: Vec<Namespace>,
    pub(super) alerts: Vec<Alert>,
    pub(super) alerts_left_off: u64,
    pub(super) history: Vec<Point>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Master {
    pub(super) address: String,
    pub(super) role: String,
    pub(super) lag: u64,
    pub(super) version: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pool {
    pub(super) blocks: u64,
    pub(super) reservations: u64,
    pub(super) puts_waiting: u64,
    pub(super) capacity_bytes: u64,
    pub(super) used_bytes: u64,
    pub(super) quarantine_bytes: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) state: String,
    pub(super) data_address: String,
    pub(super) version: String,
    pub(super) silent_ms: Option<u64>,
    pub(super) capacity_bytes: u64,
    pub(super) used_bytes: u64,
    pub(super) media: Vec<Medium>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Medium {
    pub(super) state: String,
    pub(super) capacity_bytes: u64,
    pub(super) used_bytes: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Namespace {
    pub(super) name: String,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    pub(super) copies: u64,
    pub(super) copy_bytes: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Alert {
    pub(super) severity: String,
    pub(super) message: String,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Point {
    pub(super) lookups: f64,
    pub(super) found: f64,
    pub(super) prefix_asked: f64,
    pub(super) prefix_matched: f64,
    pub(super) puts: f64,
    pub(super) evictions: f64,
    pub(super) demotions: f64,
    pub(super) loads: f64,
    pub(super) put_waits: f64,
}
