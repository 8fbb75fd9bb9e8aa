//! The requests of a put, and the decoding of their replies.

use crate::api::PutOptions;
use crate::cache::KnownNode;
use crate::clock::millis;
use crate::errors::ControlError;
use crate::locate::{expect_answers, malformed, node_at};
use kvpool_proto::{Reservation, ReservationColumns, ReserveReply, ReserveRequest};
use kvpool_types::grant::MAC_BYTES;
use kvpool_types::{
    Code, Epoch, Extent, Grant, GrantId, Length, Offset, SegmentId, Setting, Version,
};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;
use std::time::Duration;

/// How long the master may wait for room for several keys. Keys that are granted already wait as long.
const SHARED_WAIT: Duration = Duration::from_millis(500);

/// How long the master may wait for room when `left` is left. The rest is kept for the writes.
pub(super) fn wait_for_room(left: Duration, many: bool) -> Duration {
    if many {
        (left / 4).min(SHARED_WAIT)
    } else {
        left * 3 / 4
    }
}

/// Builds a request for reservations.
pub(super) fn reserve_request(
    keys: Vec<u8>,
    lengths: Vec<u64>,
    options: &PutOptions,
    wait: Duration,
    left: Duration,
    instead_of: Vec<u64>,
) -> ReserveRequest {
    ReserveRequest {
        caller: None,
        keys: keys.into(),
        lengths,
        replicas: options.replicas,
        upsert: options.upsert,
        preferred_nodes: options.preferred_nodes.clone(),
        prefer_same_host: options.prefer_same_host,
        timeout_ms: millis(wait),
        grant_ttl_ms: millis(left),
        soft_pin_ttl_ms: options.soft_pin.map_or(0, millis),
        hard_pin: options.hard_pin,
        request: kvpool_seams::random(),
        instead_of,
        columns: true,
    }
}

/// The limits that a reply gives for the blocks that the pool never takes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bounds {
    longest: u64,
    /// The number of the setting that refuses a block; 0 for none.
    quota: u32,
    quota_limit: u64,
}

impl Bounds {
    /// Reads the limits from a reply. The reply of an older master has none.
    pub(super) const fn of(reply: &ReserveReply) -> Self {
        Self {
            longest: reply.longest_block,
            quota: reply.quota,
            quota_limit: reply.quota_limit,
        }
    }

    /// The error text for a block that is too large.
    pub(super) fn too_large(&self, length: Length) -> String {
        let most = match self.longest {
            0 => String::new(),
            longest => format!(", which takes blocks of {longest} bytes at most"),
        };
        format!(
            "the block of {} bytes fits into no segment of the pool{most}; \
             start a store node with a larger --segment",
            length.0
        )
    }

    /// The error text for a block that waited in vain for room within a hard quota.
    pub(super) fn at_quota(&self, code: Code) -> String {
        // A reply names one setting, which may be that of another block.
        let limit = match (code, Setting::from_wire(self.quota)) {
            (Code::MemoryQuota, Some(quota @ Setting::MemoryHard)) => {
                format!("{quota}, which is {} bytes", self.quota_limit)
            }
            (Code::BlocksQuota, Some(quota @ Setting::BlocksHard)) => {
                format!("{quota}, which is {} blocks", self.quota_limit)
            }
            _ => "a hard quota".to_owned(),
        };
        format!(
            "the namespace is at {limit}, and its own blocks could not leave within the put's timeout: raise the \
             quota, or shorten the leases and pins of its blocks"
        )
    }

    /// The error text for a block that exceeds a hard quota.
    pub(super) fn over_quota(&self, length: Length) -> String {
        match Setting::from_wire(self.quota) {
            Some(quota @ Setting::BlocksHard) => format!(
                "the namespace takes no block: its {quota} is {}; raise it",
                self.quota_limit
            ),
            Some(quota) => format!(
                "the block of {} bytes, with all its replicas, exceeds {quota} of its namespace, which is {} bytes; \
                 raise it, or put a shorter block",
                length.0, self.quota_limit
            ),
            None => format!(
                "the block of {} bytes exceeds a hard quota of its namespace",
                length.0
            ),
        }
    }
}

/// The reservations in a reply, in either form.
#[derive(Debug)]
pub(super) enum Reservations {
    Each(Vec<Reservation>),
    Columns(ReservationColumns),
}

/// The grants of one key, each with the index of its node in the reply.
pub(super) type Granted = SmallVec<[(u32, Grant); 1]>;

impl Reservations {
    /// Takes the reservations out of a reply, and checks that there are `asked` of them.
    pub(super) fn take(reply: &mut ReserveReply, asked: usize) -> Result<Self, ControlError> {
        let Some(columns) = reply.columns.take() else {
            expect_answers(reply.reservations.len(), asked)?;
            return Ok(Self::Each(std::mem::take(&mut reply.reservations)));
        };
        for length in [
            columns.codes.len(),
            columns.versions.len(),
            columns.nodes.len(),
            columns.segments.len(),
            columns.offsets.len(),
        ] {
            expect_answers(length, asked)?;
        }
        if columns.macs.len() != asked * MAC_BYTES {
            return Err(malformed(format!(
                "grant proofs of {} bytes in total",
                columns.macs.len()
            )));
        }
        Ok(Self::Columns(columns))
    }

    /// The code of a key's reservation.
    pub(super) fn code(&self, at: usize) -> u32 {
        match self {
            Self::Each(each) => each.get(at).map_or(0, |reservation| reservation.code),
            Self::Columns(columns) => of(&columns.codes, at),
        }
    }

    /// The grants of one key, and the version that they are for.
    pub(super) fn granted(
        &self,
        at: usize,
        nodes: &[Arc<KnownNode>],
        epoch: Epoch,
        length: Length,
    ) -> Result<(Version, Granted), ControlError> {
        let grant = |version, node, segment, offset, mac: &[u8]| {
            let mac = mac
                .try_into()
                .map_err(|_| malformed(format!("a grant proof of {} bytes", mac.len())))?;
            let extent = Extent {
                segment: SegmentId(segment),
                offset: Offset(offset),
                length,
            };
            let id = GrantId(version);
            node_at(nodes, node)?;
            Ok((
                node,
                Grant {
                    extent,
                    epoch,
                    id,
                    mac,
                },
            ))
        };
        match self {
            Self::Each(each) => {
                let reservation = each.get(at).filter(|r| !r.extents.is_empty());
                let Reservation {
                    version, extents, ..
                } = reservation.ok_or_else(|| malformed("a reservation without an extent"))?;
                let granted = extents
                    .iter()
                    .map(|e| grant(*version, e.node, e.segment, e.offset, &e.mac))
                    .collect::<Result<Granted, ControlError>>()?;
                Ok((Version(*version), granted))
            }
            Self::Columns(columns) => {
                let version = of(&columns.versions, at);
                let (macs, _) = columns.macs.as_chunks::<MAC_BYTES>();
                let granted = grant(
                    version,
                    of(&columns.nodes, at),
                    of(&columns.segments, at),
                    of(&columns.offsets, at),
                    macs.get(at).map_or(&[], |mac| mac.as_slice()),
                )?;
                Ok((Version(version), smallvec![granted]))
            }
        }
    }
}

/// The item at `at` of a column; the default if the column is shorter.
fn of<T: Copy + Default>(column: &[T], at: usize) -> T {
    column.get(at).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_for_room_leaves_time_to_write() {
        for left in [Duration::from_millis(10), Duration::from_secs(10)] {
            assert!(wait_for_room(left, false) < left);
            assert!(wait_for_room(left, true) < wait_for_room(left, false));
        }
        let long = Duration::from_secs(60);
        assert_eq!(wait_for_room(long, true), SHARED_WAIT);
    }
}
