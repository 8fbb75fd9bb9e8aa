//! Gets: locate, read, verify.
//!
//! ```text
//!            ┌────────── the next replica, or located again ──────────┐
//!  keys ─► cache or Lookup ─► read from one node ─► lease still runs? ─► checksum right? ─► hit
//!                 └─ absent: miss
//! ```
//!
//! A batch is one state machine whose steps run concurrently. All reads from one node form one step. A node
//! that hangs delays only its own blocks.

mod judge;
mod machine;
mod renewal;

use crate::api::{GetBlock, GetOptions, GetOutcome};
use crate::clock::Deadline;
use crate::context::ClientContext;
use crate::counters::Counting;
use crate::errors::GetError;
use crate::latencies::Measured;
pub(crate) use renewal::Renewal;
use tokio::time::Instant;
use tracing::Instrument;

/// Gets every block of a batch; one outcome per block, in order.
pub(crate) async fn get(
    inner: &ClientContext,
    gets: Vec<GetBlock>,
    options: &GetOptions,
) -> Vec<Result<GetOutcome, GetError>> {
    let began = Instant::now();
    let timeout = options.timeout.unwrap_or(inner.options.timeouts.get);
    let deadline = Deadline::after(timeout);
    let span = kvpool_trace::span!("get", blocks = gets.len(), client = %inner.control.client());
    let outcomes = machine::GetBatch::new(inner, gets, options.release, deadline)
        .run()
        .instrument(span)
        .await;
    let latencies = &inner.counting.latencies;
    latencies.observe(Measured::Get, began.elapsed());
    for outcome in &outcomes {
        count(&inner.counting, outcome);
    }
    outcomes
}

/// Counts the outcome of one get.
pub(crate) fn count(counting: &Counting, outcome: &Result<GetOutcome, GetError>) {
    Counting::one(match outcome {
        Ok(GetOutcome::Hit { .. }) => &counting.hits,
        Ok(GetOutcome::Miss) => &counting.misses,
        Err(_) => &counting.get_errors,
    });
}
