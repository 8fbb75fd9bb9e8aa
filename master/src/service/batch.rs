//! Reading what every request carries: its caller and its keys.

use super::refused::{Refused, refused};
use crate::pool::Pool;
use kvpool_proto as proto;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys;
use kvpool_types::{ClusterId, Code, HostId, KeyRef};

/// Who calls, checked.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// The namespace that keys are of.
    pub(super) namespace: NamespaceId,
    /// The caller's machine, if it says.
    pub(super) host: Option<HostId>,
}

/// Checks a caller: right pool, no later term, known namespace.
pub(super) fn caller(pool: &Pool, caller: Option<&proto::Caller>) -> Result<Caller, Refused> {
    let caller = caller.ok_or_else(|| refused(Code::Malformed, "the request names no caller"))?;
    check_term(pool, caller)?;
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
    })
}

/// Checks that the caller means this pool and knows no later term.
pub(super) fn check_term(pool: &Pool, caller: &proto::Caller) -> Result<(), Refused> {
    if !caller.cluster_id.is_empty() {
        let theirs = ClusterId::from_slice(&caller.cluster_id)
            .ok_or_else(|| refused(Code::Malformed, "a cluster id has 16 bytes"))?;
        if theirs != pool.cluster {
            return Err(refused(
                Code::WrongCluster,
                format!(
                    "this is cluster {}, the caller means {theirs}",
                    pool.cluster
                ),
            ));
        }
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

/// Reads packed keys, at most as many as the pool takes in one request.
pub(super) fn unpack<'a>(pool: &Pool, packed: &'a [u8]) -> Result<Vec<KeyRef<'a>>, Refused> {
    let most = pool.config.max_batch_keys as usize;
    let mut batch = Vec::new();
    for key in keys::unpack(packed) {
        if batch.len() == most {
            return Err(refused(
                Code::Oversized,
                format!("more than {most} keys in one request: split it"),
            ));
        }
        batch.push(key.map_err(|error| refused(Code::InvalidArgument, error.to_string()))?);
    }
    Ok(batch)
}

/// Checks that a request's parallel lists are as long as its keys.
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
