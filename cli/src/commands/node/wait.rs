//! `kvctl node wait`.

use crate::connection::{HIDDEN, call_timeout, control_error, is_hidden, parse_timeout};
use crate::context::Context;
use anyhow::bail;
use kvpool_client::NodeStats;
use kvpool_types::Incarnation;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How often the nodes are looked at.
const POLL: Duration = Duration::from_millis(200);

/// Wait until no store node drains
///
/// A store node that stops needs its master to move or save its blocks. Run this before a master stops that
/// may stop together with store nodes. The command looks for at least --settle, because a node's signal may
/// come later than the master's. It does not wait for drained nodes, which no longer need the master. If a node
/// becomes suspect while it drains, the command waits until the master hears the node again or drops it. If
/// --timeout passes first, the command fails and names the nodes that still drain. It also fails, and names the
/// nodes, if drains that it waited for were cancelled.
#[derive(Debug, clap::Args)]
#[command(arg = call_timeout(), after_help = "\
Example:
  kvctl --master http://127.0.0.1:7070 node wait --settle 3s --timeout 1m")]
pub(super) struct Args {
    /// Succeed when no node was seen draining for this long
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = parse_timeout)]
    settle: Duration,
    /// The longest time to wait; 0s looks once
    #[arg(id = "wait", long = "timeout", value_name = "TIME", default_value = "5m", value_parser = parse_timeout)]
    timeout: Duration,
}

#[derive(Serialize)]
struct Outcome {
    /// The nodes that still drain.
    draining: Vec<String>,
    /// The nodes that drained, and take blocks again without a restart.
    cancelled: Vec<String>,
    seconds: f64,
}

/// The nodes that drain, from look to look. The incarnations tell a restart from a cancelled drain.
#[derive(Default)]
struct Drains(BTreeMap<String, Incarnation>);

impl Drains {
    /// Processes a look at the name, the state and the incarnation of each node.
    fn see<'n>(&mut self, nodes: impl IntoIterator<Item = (&'n str, &'n str, Incarnation)>) {
        let before = std::mem::take(&mut self.0);
        for (name, state, incarnation) in nodes {
            let drains = match state {
                "draining" => true,
                // The drain goes on when the master hears the node again.
                "suspect" | "unreported" => before.get(name) == Some(&incarnation),
                _ => false,
            };
            if drains {
                self.0.insert(name.to_owned(), incarnation);
            }
        }
    }
}

/// Runs it.
pub(super) async fn run(args: &Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let begun = Instant::now();
    let mut quiet_since = begun;
    // A shorter timeout leaves no time for the whole of it.
    let settle = args.settle.min(args.timeout);
    let mut drains = Drains::default();
    let mut seen = BTreeMap::new();
    let (nodes, draining, is_quiet) = loop {
        let stats = client.stats().await.map_err(control_error)?;
        // Without a look at the nodes, none would seem to drain.
        anyhow::ensure!(!is_hidden(&stats), HIDDEN);
        let nodes = stats.nodes.iter();
        drains.see(nodes.map(|node| (node.name.as_str(), node.state.as_str(), node.incarnation)));
        let draining: Vec<_> = drains.0.keys().cloned().collect();
        seen.extend(drains.0.clone());
        let now = Instant::now();
        if !draining.is_empty() {
            quiet_since = now;
        }
        let is_quiet = draining.is_empty() && now >= quiet_since + settle;
        if is_quiet || now >= begun + args.timeout {
            break (stats.nodes, draining, is_quiet);
        }
        tokio::time::sleep(POLL).await;
    };
    let is_back =
        |node: &&NodeStats| node.state == "live" && seen.get(&node.name) == Some(&node.incarnation);
    let back = nodes.iter().filter(is_back);
    let outcome = Outcome {
        draining,
        cancelled: back.map(|node| node.name.clone()).collect(),
        seconds: begun.elapsed().as_secs_f64(),
    };
    context.output.show(&outcome, said)?;
    let (waited, settle) = (
        humantime::format_duration(args.timeout),
        humantime::format_duration(settle),
    );
    match outcome.draining.join(", ") {
        _ if is_quiet && outcome.cancelled.is_empty() => {}
        _ if is_quiet => bail!(
            "the drain was cancelled of these nodes, which take new blocks: {}",
            outcome.cancelled.join(", ")
        ),
        none if none.is_empty() => {
            bail!("no node drains now, but one did less than {settle} ago (--settle)")
        }
        names => bail!("after {waited} these nodes still drain: {names}"),
    }
    Ok(())
}

fn said(outcome: &Outcome) -> String {
    if outcome.draining.is_empty() {
        return format!("no node drains, after {:.1} s", outcome.seconds);
    }
    let names = outcome.draining.join(", ");
    format!("still draining after {:.1} s: {names}", outcome.seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its master still has blocks to move when it hears the node again.
    #[test]
    fn a_draining_node_that_is_silent_is_waited_for() {
        let mut drains = Drains::default();
        let first = Incarnation(1);
        let mut is_waited_for = |state, incarnation| {
            drains.see([("n", state, incarnation), ("other", "live", first)]);
            drains.0.contains_key("n")
        };
        assert!(!is_waited_for("suspect", first), "it did not drain");
        assert!(is_waited_for("draining", first));
        assert!(is_waited_for("suspect", first));
        assert!(is_waited_for("unreported", first), "under the next leader");
        assert!(is_waited_for("draining", first));
        assert!(
            !is_waited_for("suspect", Incarnation(2)),
            "it has restarted"
        );
        assert!(is_waited_for("draining", first));
        assert!(!is_waited_for("drained", first));
        assert!(
            !is_waited_for("suspect", first),
            "it needs its master no more"
        );
        drains.see([]);
        assert!(drains.0.is_empty());
    }
}
