//! `kvctl status`.

mod media;
mod problems;
mod rates;

use crate::connection::{HIDDEN, control_error, is_hidden, no_node};
use crate::context::Context;
use crate::masters;
use crate::output::{self, Format};
use crate::stats::percent;
use kvpool_client::PoolStats;
use kvpool_types::Causes;
use rates::{HitRate, Rates};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Show the pool: nodes, segments, used memory, rates, and problems
///
/// Hit rates count from the start of the master. Other rates are measured over the time --over; the
/// command takes that long. A silent master delays the command by some seconds. Lost blocks, corrupt replicas
/// and failed reads of clients are problems for some minutes.
///
/// `used` is the sum of blocks, puts in progress and quarantine. Quarantined bytes are freed but may
/// still be read or written; they are reused once their node has fenced them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl status
  kvctl status --all --over 10s
  kvctl status --output json | jq .used_bytes")]
pub(crate) struct Args {
    /// Show every counter of the master too
    #[arg(long)]
    all: bool,
    /// Time over which rates are measured; 0s for no rates [default: 1s; with --output json 0s]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    over: Option<Duration>,
}

/// The hint for a token that does not show the pool.
const SHOWN: &str = "this token shows its own namespaces alone: try `kvctl --namespace NAME ls` and \
                     `describe`; zeros here say nothing of the pool";

/// Timeout for one master: a silent master must not delay the others for long.
const TIMEOUT: Duration = Duration::from_secs(2);

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
    media: Vec<media::Medium>,
    hit_rate_percent: HitRate,
    /// `None` if no time was given to measure them.
    rates: Option<Rates>,
    /// The problems, one sentence each.
    wrong: Vec<String>,
    counters: BTreeMap<String, u64>,
}

#[derive(Serialize)]
struct Node {
    name: String,
    state: String,
    incarnation: String,
    data_address: String,
    heartbeat_age_seconds: f64,
    /// The blocks that a stop of the draining node would lose, if the master has counted them.
    left_blocks: Option<u64>,
    /// The node's version of kvpool; empty if it does not tell it.
    version: String,
    /// Whether the node drains and its media do not come back.
    media_leave: bool,
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
            left_blocks: node.left_blocks,
            version: node.version,
            media_leave: node.media_leave,
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
            media: stats.media.into_iter().map(Into::into).collect(),
            hit_rate_percent: HitRate::of(&stats.counters),
            rates: None,
            wrong: Vec::new(),
            counters: stats.counters,
        }
    }
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let over = args.over.unwrap_or(match context.output {
        Format::Table => Duration::from_secs(1),
        Format::Json => Duration::ZERO,
    });
    let mut stats = client.stats().await.map_err(control_error)?;
    let mut rates = None;
    let timeout = context.connection.timeout.min(TIMEOUT);
    let told = Box::pin(masters::status(&context.connection, timeout));
    let faults = Box::pin(masters::faults(&context.connection, timeout));
    let (told, faults, ()) = tokio::join!(told, faults, tokio::time::sleep(over));
    if !over.is_zero() {
        let later = client.stats().await.map_err(control_error)?;
        rates = Rates::between(&stats, &later);
        stats = later;
    }
    let mut wrong = problems::of(&stats);
    let alarms = told.as_ref().map_or(&[][..], |told| told.alarms.as_slice());
    wrong.extend(problems::of_store(&stats, alarms));
    match faults {
        Ok(faults) => wrong.extend(faults),
        // Whoever may not see the pool may not see its faults, and a master that says nothing is told below.
        Err(_) if is_hidden(&stats) || told.is_err() => {}
        Err(error) => wrong.push(format!(
            "no master says which faults there were in the last minutes: {}",
            Causes(error.as_ref())
        )),
    }
    if is_hidden(&stats) {
        wrong.insert(0, HIDDEN.to_owned());
        wrong.insert(1, SHOWN.to_owned());
    } else if !stats.nodes.iter().any(|node| node.state == "live") {
        wrong.insert(0, no_node(&context.connection, &stats.nodes));
    }
    // Nodes leave a read-only leader, so this is the cause of the other problems.
    match told {
        Ok(told) => {
            wrong.extend(masters::problems(&told));
            if let Some(why) = masters::read_only(&told) {
                wrong.insert(0, why);
            }
        }
        Err(error) => wrong.push(format!(
            "no master says whether the leader takes puts: {}",
            Causes(error.as_ref())
        )),
    }
    let status = Status {
        rates,
        wrong,
        ..Status::from(stats)
    };
    context
        .output
        .show(&status, |status| tables(status, args.all))
}

fn used(used: u64, capacity: u64) -> String {
    format!(
        "{} of {} ({:.0} %)",
        output::bytes(used),
        output::bytes(capacity),
        percent(used, capacity)
    )
}

/// The use of the memory that takes blocks. If no node takes blocks, of all memory: it still serves its blocks.
fn used_memory(status: &Status) -> String {
    let segments = || status.nodes.iter().flat_map(|node| &node.segments);
    let capacity: u64 = segments().map(|segment| segment.capacity_bytes).sum();
    if status.capacity_bytes > 0 || capacity == 0 {
        return used(status.used_bytes, status.capacity_bytes);
    }
    let held = segments().map(|segment| segment.used_bytes).sum();
    format!("{}; no node takes blocks", used(held, capacity))
}

fn tables(status: &Status, all: bool) -> String {
    let mut pool = output::facts();
    pool.add_row(["epoch", &status.epoch.to_string()]);
    let up = Duration::from_secs_f64(status.uptime_seconds.round());
    pool.add_row(["up", &humantime::format_duration(up).to_string()]);
    pool.add_row(["blocks", &output::count(status.blocks)]);
    pool.add_row(["puts in progress", &output::count(status.reservations)]);
    pool.add_row(["used", &used_memory(status)]);
    pool.add_row(["quarantine", &output::bytes(status.quarantine_bytes)]);
    pool.add_row(["namespaces", &status.namespaces.join(", ")]);
    pool.add_row(["hit rate", &status.hit_rate_percent.text()]);
    for (name, rate) in status.rates.iter().flat_map(Rates::rows) {
        pool.add_row([name, &rate]);
    }

    let mut nodes = output::table([
        "node",
        "state",
        "address",
        "heard",
        "segment",
        "used",
        "free in",
        "largest free",
        "version",
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
                output::count(segment.free_ranges),
                output::bytes(segment.largest_free_bytes),
                output::version(&node.version).to_owned(),
            ]);
        }
    }

    let mut text = format!("{pool}\n{nodes}");
    if !status.media.is_empty() {
        text.push_str(&format!("\n{}", media::table(&status.media)));
    }
    if all {
        let mut counters = output::table(["counter", "value"]);
        for (name, value) in &status.counters {
            counters.add_row([name.clone(), output::count(*value)]);
        }
        output::align_right(&mut counters, 1..2);
        text.push_str(&format!("\n{counters}"));
    }
    match status.wrong.as_slice() {
        [] => text.push_str("\nno problems found"),
        // Names come from nodes: a line end in a name must not begin a line here.
        wrong => text.extend(
            wrong
                .iter()
                .map(|what| format!("\n{}", output::one_line(what))),
        ),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::{Epoch, Length};

    /// A pool without nodes and with these counters.
    pub(super) fn stats(counters: &[(&str, u64)]) -> PoolStats {
        let counters = counters.iter();
        PoolStats {
            epoch: Epoch(3),
            uptime: Duration::from_secs(60),
            blocks: 0,
            reservations: 0,
            capacity: Length(0),
            used: Length(0),
            quarantine: Length(0),
            namespaces: Vec::new(),
            nodes: Vec::new(),
            media: Vec::new(),
            problems: Vec::new(),
            counters: counters
                .map(|(name, value)| ((*name).to_owned(), *value))
                .collect(),
        }
    }

    fn node(state: &str) -> Node {
        let segment = |id| Segment {
            id,
            capacity_bytes: 1 << 30,
            used_bytes: 1 << 29,
            quarantine_bytes: 0,
            free_ranges: 1,
            largest_free_bytes: 1 << 29,
        };
        Node {
            name: "n".to_owned(),
            state: state.to_owned(),
            incarnation: String::new(),
            data_address: String::new(),
            heartbeat_age_seconds: 0.0,
            left_blocks: None,
            version: "0.1.0".to_owned(),
            media_leave: false,
            segments: vec![segment(1), segment(2)],
        }
    }

    #[test]
    fn the_memory_of_nodes_that_drain_is_shown_while_no_node_takes_blocks() {
        let mut status = Status::from(stats(&[]));
        assert_eq!(used_memory(&status), "0 B of 0 B (0 %)");
        status.nodes = vec![node("draining"), node("drained")];
        let expected = "2.0 GiB of 4.0 GiB (50 %); no node takes blocks";
        assert_eq!(used_memory(&status), expected);
        // A node that takes blocks is all that counts.
        status.nodes.push(node("live"));
        (status.used_bytes, status.capacity_bytes) = (1 << 30, 2 << 30);
        assert_eq!(used_memory(&status), "1.0 GiB of 2.0 GiB (50 %)");
    }

    /// Nodes of two versions run side by side during an upgrade.
    #[test]
    fn each_node_is_shown_with_its_version() {
        let mut status = Status::from(stats(&[]));
        let old = Node {
            name: "m".to_owned(),
            version: String::new(),
            ..node("live")
        };
        status.nodes = vec![node("live"), old];
        let text = tables(&status, false);
        let cells = |line: &str| line.trim_matches(['│', ' ']).to_owned();
        let rows: Vec<String> = text.lines().map(cells).collect();
        for (name, version) in [("n ", " 0.1.0"), ("m ", " unknown")] {
            let row = rows.iter().find(|row| row.starts_with(name)).unwrap();
            assert!(row.ends_with(version), "{text}");
        }
    }

    /// An operator of an empty pool sees all that there is.
    #[test]
    fn a_pool_without_nodes_is_not_taken_for_a_hidden_one() {
        let mut seen = stats(&[("puts_total", 0)]);
        seen.nodes.clear();
        seen.capacity = kvpool_types::Length(0);
        assert!(!is_hidden(&seen));
        seen.counters.clear();
        assert!(is_hidden(&seen));
    }
}
