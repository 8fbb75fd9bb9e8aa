//! `kvctl node wait`.

use crate::connection::{HIDDEN, control_error, is_hidden};
use crate::context::Context;
use anyhow::bail;
use serde::Serialize;
use std::time::{Duration, Instant};

/// How often the nodes are looked at.
const POLL: Duration = Duration::from_millis(200);

/// Wait until no store node drains
///
/// A store node that stops needs its master to move or save its blocks. Run this before a master stops that
/// may stop together with store nodes. The command looks for --settle first, because a node's signal may
/// come later than the master's. It does not wait for drained nodes, which need the master no more. When
/// --timeout has passed first, it fails and names the nodes that drain still.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  kvctl --master http://127.0.0.1:7070 node wait --settle 3s --timeout 1m")]
pub(super) struct Args {
    /// How long no node must have been seen draining
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = humantime::parse_duration)]
    settle: Duration,
    /// The longest time to wait
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

#[derive(Serialize)]
struct Outcome {
    /// The nodes that drain still.
    draining: Vec<String>,
    seconds: f64,
}

/// Runs it.
pub(super) async fn run(args: &Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let begun = Instant::now();
    let mut quiet_since = begun;
    // A shorter timeout leaves no time for the whole of it.
    let settle = args.settle.min(args.timeout);
    let (draining, is_quiet) = loop {
        let stats = client.stats().await.map_err(control_error)?;
        // Without a look at the nodes, none would seem to drain.
        anyhow::ensure!(!is_hidden(&stats), HIDDEN);
        let draining: Vec<_> = stats
            .nodes
            .into_iter()
            .filter(|node| node.state == "draining")
            .map(|node| node.name)
            .collect();
        let now = Instant::now();
        if !draining.is_empty() {
            quiet_since = now;
        }
        let is_quiet = draining.is_empty() && now >= quiet_since + settle;
        if is_quiet || now >= begun + args.timeout {
            break (draining, is_quiet);
        }
        tokio::time::sleep(POLL).await;
    };
    let outcome = Outcome {
        draining,
        seconds: begun.elapsed().as_secs_f64(),
    };
    context.output.show(&outcome, said)?;
    let (waited, settle) = (
        humantime::format_duration(args.timeout),
        humantime::format_duration(settle),
    );
    match outcome.draining.join(", ") {
        _ if is_quiet => {}
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
