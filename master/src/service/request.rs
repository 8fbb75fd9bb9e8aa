//! The common fields of every request: its caller and its keys.

use super::refused::{Refused, refused};
use crate::pool::Pool;
use kvpool_proto as proto;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::{BatchError, KeyBatch};
use kvpool_types::{ClusterId, Code, HostId};
use std::time::Duration;

/// The most nodes that a put may prefer. It equals the most replicas that a put may ask for.
const MOST_PREFERRED: usize = 64;

/// A checked caller.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// The namespace of the keys.
    pub(super) namespace: NamespaceId,
    /// The caller's machine, if known.
    pub(super) host: Option<HostId>,
    /// How long the answer may take.
    pub(super) patience: Duration,
}

/// Checks a caller: right pool, no later term, known namespace.
pub(super) fn caller(pool: &Pool, caller: Option<&proto::Caller>) -> Result<Caller, Refused> {
    let caller = caller.ok_or_else(|| refused(Code::Malformed, "the request names no caller"))?;
    check_term(pool, caller)?;
    if !caller.forward {
        pool.heard_client();
    }
    let namespace = pool.namespace(&caller.namespace).map_err(|code| {
        refused(
            code,
            format!(
                "namespace {:?} is unknown: create it first",
                caller.namespace
            ),
        )
    })?;
    Ok(Caller {
        namespace,
        host: HostId::from_slice(&caller.host_id),
        patience: patience(caller.wait_ms),
    })
}

/// How long the master may work for a caller that waits for `wait_ms`. The rest of that time is for
/// the answer's transfer.
fn patience(wait_ms: u64) -> Duration {
    match wait_ms {
        // A client of an earlier version.
        0 => Duration::MAX,
        stated => Duration::from_millis(stated) * 3 / 4,
    }
}

/// Counts a call against the rates of its namespace.
pub(super) fn admit(pool: &Pool, caller: &Caller, moves_bytes: bool) -> Result<(), Refused> {
    pool.admit(caller.namespace, moves_bytes)
        .map_err(|(code, wait)| {
            pool.metrics.call_limited();
            let what = match code {
                Code::ByteRate => "bytes_per_second",
                _ => "requests_per_second",
            };
            let millis = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX) + 1;
            let reason = format!("the namespace is at its {what}: try again in {millis} ms");
            refused(code, reason)
        })
}

/// Checks that this master may change anything now.
pub(super) fn check_leads(pool: &Pool) -> Result<(), Refused> {
    if pool.leads() {
        return Ok(());
    }
    // Only masters with etcd have a deadline.
    let millis = u64::try_from(pool.overdue().as_millis()).unwrap_or(u64::MAX);
    let overdue = std::time::Duration::from_millis(millis);
    Err(refused(
        Code::NotLeader,
        format!(
            "read-only: the leader lease of epoch {} expired {} ago, and etcd has not renewed it",
            pool.epoch,
            humantime::format_duration(overdue)
        ),
    ))
}

/// Checks that a put could be made durable now, before its bytes move.
pub(super) fn check_room(pool: &Pool) -> Result<(), Refused> {
    pool.has_room().map_err(|error| match error.code() {
        Code::StoreFull => refused(Code::StoreFull, error.told()),
        code => refused(code, error.to_string()),
    })
}

/// Checks that the caller names this pool and knows no later term.
pub(super) fn check_term(pool: &Pool, caller: &proto::Caller) -> Result<(), Refused> {
    if !caller.cluster_id.is_empty() {
        let theirs = ClusterId::from_slice(&caller.cluster_id)
            .ok_or_else(|| refused(Code::Malformed, "a cluster id has 16 bytes"))?;
        if theirs != pool.cluster {
            return Err(refused(
                Code::WrongCluster,
                format!(
                    "this is cluster {}, and the caller joined cluster {theirs}: the pool was replaced, or the \
                     address leads elsewhere now; the caller must connect anew",
                    pool.cluster
                ),
            ));
        }
    }
    if pool.term.is_over() {
        return Err(refused(
            Code::NotLeader,
            format!("epoch {} is over", pool.epoch),
        ));
    }
    if caller.epoch > pool.epoch.0 {
        return Err(refused(
            Code::NotLeader,
            format!(
                "epoch {} is over: the caller knows {}",
                pool.epoch, caller.epoch
            ),
        ));
    }
    Ok(())
}

/// Reads packed keys, at most `max_batch_keys`.
pub(super) fn unpack<'a>(pool: &Pool, packed: &'a [u8]) -> Result<KeyBatch<'a>, Refused> {
    let most = pool.config.max_batch_keys as usize;
    KeyBatch::unpack(packed, most).map_err(|error| match error {
        BatchError::TooMany { .. } => refused(
            Code::Oversized,
            format!("more than {most} keys in one request: split it"),
        ),
        other => refused(Code::InvalidArgument, other.to_string()),
    })
}

/// Checks that a put names at most [`MOST_PREFERRED`] preferred nodes.
pub(super) fn check_preferred(nodes: &[String]) -> Result<(), Refused> {
    if nodes.len() <= MOST_PREFERRED {
        return Ok(());
    }
    Err(refused(
        Code::InvalidArgument,
        format!("{} preferred nodes: at most {MOST_PREFERRED}", nodes.len()),
    ))
}

/// Checks that a request's parallel lists have one element for each key.
pub(super) fn check_lengths(what: &str, found: usize, keys: usize) -> Result<(), Refused> {
    if found == keys {
        Ok(())
    } else {
        Err(refused(
            Code::InvalidArgument,
            format!("{found} {what} for {keys} keys"),
        ))
    }
}
