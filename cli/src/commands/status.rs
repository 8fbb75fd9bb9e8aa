//! `kvctl status`.

use crate::cli::Context;
use crate::connection::control_error;
use crate::output;
use crate::stats::percent;
use kvpool_client::PoolStats;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Show the pool: its nodes, their segments, what is used, and the master's counters
///
/// `used` counts blocks, puts in progress and quarantine: bytes that are freed but may still be
/// touched by somebody, and are granted again once their node has fenced them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl status
  kvctl status --output json | jq .used_bytes")]
pub(crate) struct Args {}

#[derive(Serialize)]
struct Status {
    epoch: u64,
    uptime_seconds: f64,
    blocks: u64,
    reservations: u64,
    capacity_bytes: u64,
    used_bytes: u64,
    quarantine_bytes: u64,
    namespaces: Vec<String>,
    nodes: Vec<Node>,
    counters: BTreeMap<String, u64>,
}

#[derive(Serialize)]
struct Node {
    name: String,
    state: String,
    incarnation: String,
    data_address: String,
    heartbeat_age_seconds: f64,
    segments: Vec<Segment>,
}

#[derive(Serialize)]
struct Segment {
    id: u32,
    capacity_bytes: u64,
    used_bytes: u64,
    quarantine_bytes: u64,
    free_ranges: u64,
    largest_free_bytes: u64,
}

impl From<PoolStats> for Status {
    fn from(stats: PoolStats) -> Self {
        let nodes = stats.nodes.into_iter().map(|node| Node {
            name: node.name,
            state: node.state,
            incarnation: node.incarnation.to_string(),
            data_address: node.data_address,
            heartbeat_age_seconds: node.heartbeat_age.as_secs_f64(),
            segments: node
                .segments
                .into_iter()
                .map(|segment| Segment {
                    id: segment.id.0,
                    capacity_bytes: segment.capacity.0,
                    used_bytes: segment.used.0,
                    quarantine_bytes: segment.quarantine.0,
                    free_ranges: segment.free_ranges,
                    largest_free_bytes: segment.largest_free.0,
                })
                .collect(),
        });
        Self {
            epoch: stats.epoch.0,
            uptime_seconds: stats.uptime.as_secs_f64(),
            blocks: stats.blocks,
            reservations: stats.reservations,
            capacity_bytes: stats.capacity.0,
            used_bytes: stats.used.0,
            quarantine_bytes: stats.quarantine.0,
            namespaces: stats.namespaces,
            nodes: nodes.collect(),
            counters: stats.counters,
        }
    }
}

/// Runs it.
pub(crate) async fn run(_args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let status = Status::from(client.stats().await.map_err(control_error)?);
    context.output.show(&status, tables)
}

fn tables(status: &Status) -> String {
    let used = |used: u64, capacity: u64| {
        format!(
            "{} of {} ({:.0} %)",
            output::bytes(used),
            output::bytes(capacity),
            percent(used, capacity)
        )
    };
    let mut pool = output::facts();
    pool.add_row(["epoch", &status.epoch.to_string()]);
    let up = Duration::from_secs_f64(status.uptime_seconds.round());
    pool.add_row(["up", &humantime::format_duration(up).to_string()]);
    pool.add_row(["blocks", &output::count(status.blocks)]);
    pool.add_row(["puts in progress", &output::count(status.reservations)]);
    pool.add_row(["used", &used(status.used_bytes, status.capacity_bytes)]);
    pool.add_row(["quarantine", &output::bytes(status.quarantine_bytes)]);
    pool.add_row(["namespaces", &status.namespaces.join(", ")]);

    let mut nodes = output::table([
        "node",
        "state",
        "address",
        "heard",
        "segment",
        "used",
        "free in",
        "largest free",
    ]);
    for node in &status.nodes {
        for segment in &node.segments {
            nodes.add_row([
                node.name.clone(),
                node.state.clone(),
                node.data_address.clone(),
                format!("{:.1} s ago", node.heartbeat_age_seconds),
                segment.id.to_string(),
                used(segment.used_bytes, segment.capacity_bytes),
                format!("{} ranges", segment.free_ranges),
                output::bytes(segment.largest_free_bytes),
            ]);
        }
    }

    let mut counters = output::table(["counter", "value"]);
    for (name, value) in &status.counters {
        counters.add_row([name.clone(), output::count(*value)]);
    }
    output::align_right(&mut counters, 1..2);
    format!("{pool}\n{nodes}\n{counters}")
}
