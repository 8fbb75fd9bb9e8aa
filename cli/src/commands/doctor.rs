//! `kvctl doctor`.

use crate::context::Context;
use crate::doctor::{Report, findings};

/// Check this host and the pool: RDMA, limits, masters, and the transports to each node
///
/// For each node the command opens every transport, sends a ping and closes it. It tries shared memory
/// if the node is on this host, RDMA if both ends have it, and TCP. It writes nothing into the pool. The
/// master tells it the path of each node's shared-memory socket.
///
/// Exits with code 4 if the pool named by --master (or KVPOOL_MASTER) does not answer or has no live node. It
/// also does so if the leader is read-only, or if the metadata store raises an alarm. The same code tells that a
/// live node cannot be reached by the transports that --transport allows. A token that may not use the data port
/// is only a note.
/// Exits with code 1 if --transport rdma is set and this host has no RDMA, or if --master names masters of
/// several pools. All other findings are notes, also that no pool answers when none was named.
///
/// A token file or a TLS file that cannot be used is no finding: the command fails at once, as others do.
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
