//! Puts: reserve, write, commit.
//!
//! ```text
//!            ┌───────────── again, until the deadline ─────────────┐
//!  blocks ─► Reserve ─► Reserved ══ write each replica ══► Written ─► Commit ─► visible
//!               │           └─ dropped: revoked               └─ dropped: revoked
//!               └─ exists: nothing to do
//! ```
//!
//! A batch is one state machine whose steps run concurrently. If the node of one block hangs, or another
//! client is writing the block's key, the other blocks are not delayed. A block is committed in the same call
//! as its parent or after it, so that the master can link the two.

mod machine;
mod requests;
mod stages;

use crate::api::{PutBlock, PutOptions, PutOutcome};
use crate::clock::Deadline;
use crate::context::ClientContext;
use crate::counters::Counting;
use crate::distinct::Distinct;
use crate::errors::PutError;
use crate::latencies::Measured;
use crate::message_limits::{MessageLimits, cost};
use futures::StreamExt;
use kvpool_seams::maps::HashMap;
use kvpool_transport::memory::total_length;
use kvpool_types::{Code, Key, Length};
use tokio::time::Instant;
use tracing::Instrument;

/// The least number of blocks in a part of a batch that is split only for concurrency. Each part costs a
/// message.
const LEAST_SHARE: usize = 256;

/// Puts every block of a batch; one outcome per block, in order.
pub(crate) async fn put(
    inner: &ClientContext,
    blocks: Vec<PutBlock>,
    options: &PutOptions,
) -> Vec<Result<PutOutcome, PutError>> {
    let began = Instant::now();
    let timeout = options.timeout.unwrap_or(inner.options.timeouts.put);
    let deadline = Deadline::after(timeout);
    let distinct = Distinct::of(blocks.iter().map(|block| &block.key));
    let mut outcomes: Vec<Option<Result<PutOutcome, PutError>>> = vec![None; distinct.firsts.len()];
    let mut to_put = Vec::with_capacity(outcomes.len());
    let mut limit = inner.control.limits().max_block;
    if blocks.iter().any(|block| is_over(block, limit)) {
        // A restarted master may have another limit. The future is boxed, because this is rare and larger
        // than the state of other puts.
        limit = Box::pin(inner.control.limits_now(deadline)).await.max_block;
    }
    // Of several blocks with one key, a put keeps the first and an upsert keeps the last.
    let mut put_at = distinct.firsts;
    // The earlier blocks of an upsert that could not be put, by their place.
    let mut refused: HashMap<usize, PutError> = HashMap::default();
    if options.upsert {
        for (at, slot) in distinct.of_item.iter().enumerate() {
            if let Some(last) = put_at.get_mut(*slot) {
                *last = at;
            }
        }
    }
    for (at, (block, slot)) in blocks.into_iter().zip(&distinct.of_item).enumerate() {
        let slot = *slot;
        if put_at.get(slot) != Some(&at) {
            if options.upsert
                && let Err(error) = validate(&block, limit)
            {
                refused.insert(at, error);
            }
            continue;
        }
        match validate(&block, limit) {
            Ok(()) => to_put.push((slot, block)),
            Err(error) => set(&mut outcomes, slot, Err(error)),
        }
    }
    let span = kvpool_trace::span!("put", blocks = to_put.len(), client = %inner.control.client());
    let put = put_distinct(inner, to_put, options, deadline).instrument(span);
    for (slot, outcome) in put.await {
        set(&mut outcomes, slot, outcome);
    }
    let latencies = &inner.counting.latencies;
    latencies.observe(Measured::Put, began.elapsed());
    distinct
        .of_item
        .iter()
        .enumerate()
        .map(|(at, slot)| {
            let outcome = outcomes
                .get(*slot)
                .cloned()
                .flatten()
                .unwrap_or_else(|| Err(unanswered()));
            // The block that was put has this outcome. To a put the later blocks of its key were present. To an
            // upsert every block of the key has the outcome of the last one, unless it could not be put itself.
            let was_put = put_at.get(*slot) == Some(&at);
            let outcome = match refused.remove(&at) {
                Some(error) => Err(error),
                None if was_put || options.upsert => outcome,
                None => outcome.map(|_| PutOutcome::Present),
            };
            count(&inner.counting, &outcome, was_put);
            outcome
        })
        .collect()
}

/// Puts blocks with distinct keys, in messages within the limits.
async fn put_distinct(
    inner: &ClientContext,
    blocks: Vec<(usize, PutBlock)>,
    options: &PutOptions,
    deadline: Deadline,
) -> Vec<(usize, Result<PutOutcome, PutError>)> {
    let limits = inner.message_limits();
    let mut concurrency = inner.options.batch_concurrency.max(1);
    // More parts than the message limits require let the master, the nodes and the client work on different
    // parts at a time.
    let share = blocks.len().div_ceil(concurrency).max(LEAST_SHARE);
    let finer = MessageLimits {
        keys: limits.keys.min(share),
        ..limits
    };
    let mut runs = split(finer, &blocks);
    if crosses(&runs, &blocks) {
        runs = split(limits, &blocks);
        if crosses(&runs, &blocks) {
            concurrency = 1;
        }
    }
    let mut blocks = blocks.into_iter();
    let batches: Vec<Vec<(usize, PutBlock)>> = runs
        .iter()
        .map(|run| blocks.by_ref().take(run.len()).collect())
        .collect();
    futures::stream::iter(batches.into_iter().enumerate())
        .map(|(number, batch)| async move {
            let (slots, batch): (Vec<usize>, Vec<PutBlock>) = batch.into_iter().unzip();
            let outcomes = machine::PutBatch::new(inner, number, batch, options, deadline)
                .run()
                .await;
            slots.into_iter().zip(outcomes).collect::<Vec<_>>()
        })
        .buffer_unordered(concurrency)
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .flatten()
        .collect()
}

fn split(limits: MessageLimits, blocks: &[(usize, PutBlock)]) -> Vec<std::ops::Range<usize>> {
    limits.split(
        blocks
            .iter()
            .map(|(_, block)| cost(block.key.as_ref()) + cost_of_parent(block)),
    )
}

fn cost_of_parent(block: &PutBlock) -> usize {
    let parent = block.parent.as_ref();
    parent.map_or(0, |parent| cost(parent.as_ref()))
}

/// [`order_matters`] for the runs of a batch.
fn crosses(runs: &[std::ops::Range<usize>], blocks: &[(usize, PutBlock)]) -> bool {
    runs.len() > 1
        && order_matters(runs.iter().enumerate().flat_map(|(number, run)| {
            let run = blocks.get(run.clone()).unwrap_or_default();
            run.iter()
                .map(move |(_, block)| (number, &block.key, block.parent.as_ref()))
        }))
}

/// Whether some block and its parent, or two blocks of one key, are in different parts of a batch. An item of
/// `blocks` is a block's part number, its key, and its parent. Such parts must be put one after the other. The
/// master links a block to its parent only if the parent is committed first. Of upserts of one key, the last one
/// to be committed stays.
pub fn order_matters<'k>(
    mut blocks: impl Iterator<Item = (usize, &'k Key, Option<&'k Key>)> + Clone,
) -> bool {
    let mut part_of: HashMap<&Key, usize> = HashMap::default();
    for (part, key, _) in blocks.clone() {
        let other = part_of.insert(key, part);
        if other.is_some_and(|other| other != part) {
            return true;
        }
    }
    blocks.any(|(part, _, parent)| {
        let other = parent.and_then(|parent| part_of.get(parent));
        other.is_some_and(|other| *other != part)
    })
}

fn is_over(block: &PutBlock, limit: Length) -> bool {
    total_length(&block.buffers) > limit
}

fn validate(block: &PutBlock, limit: Length) -> Result<(), PutError> {
    let length = total_length(&block.buffers);
    if length == Length(0) {
        Err(PutError::Empty)
    } else if length > limit {
        Err(PutError::TooLarge { length, limit })
    } else {
        Ok(())
    }
}

fn set(
    outcomes: &mut [Option<Result<PutOutcome, PutError>>],
    slot: usize,
    outcome: Result<PutOutcome, PutError>,
) {
    if let Some(place) = outcomes.get_mut(slot) {
        *place = Some(outcome);
    }
}

fn unanswered() -> PutError {
    PutError::Failed {
        code: Code::Internal,
        message: "internal fault: the put has no outcome".to_owned(),
    }
}

/// Counts the outcome of one block. `moved`: its bytes were to be moved, and not those of another block of its key.
fn count(counting: &Counting, outcome: &Result<PutOutcome, PutError>, moved: bool) {
    Counting::one(match outcome {
        Ok(PutOutcome::Stored { .. }) if moved => &counting.puts_stored,
        Ok(_) => &counting.puts_present,
        Err(_) => &counting.put_errors,
    });
}
