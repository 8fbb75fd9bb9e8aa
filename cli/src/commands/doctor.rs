//! `kvctl doctor`.

use crate::cli::Context;
use crate::doctor::{Report, findings};

/// Look whether this host and the pool are fit: RDMA, limits, masters, and the ways to each node
///
/// Every way to every node is opened, asked something and closed again: shared memory where the node
/// is on this host, RDMA where both ends have it, TCP. Nothing is written into the pool. A node's socket
/// for shared memory is found by its name, NAME.sock; one that is called otherwise is not found.
///
/// Fails only when something that was asked for cannot work: with exit code 4 when the pool that
/// --master (or KVPOOL_MASTER) names does not answer, and when a pool has no live node, or one that
/// cannot be reached by the ways that --transport allows; with 1 when --transport rdma is set on a host
/// that has no RDMA. Everything else is a note, also that no pool is there when none was named.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl doctor
  kvctl --master http://10.0.0.1:7070 doctor
  kvctl --master http://10.0.0.1:7070 doctor --transport rdma
  kvctl doctor --output json | jq '.findings[].text'")]
pub(crate) struct Args {}

/// Runs it.
pub(crate) async fn run(_args: Args, context: &Context) -> anyhow::Result<()> {
    let report = Report::make(&context.connection).await?;
    context.output.show(&report, Report::tables)?;
    findings::verdict(&report.findings)
}
