//! What a put asks of the master, and how its answer is read.

use crate::api::PutOptions;
use crate::cache::Node;
use crate::errors::ControlError;
use crate::locate::{malformed, node_at};
use kvpool_proto::{Reservation, ReserveRequest};
use kvpool_types::{Epoch, Extent, Grant, GrantId, Length, Offset, SegmentId};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;

/// How long the master may wait for room on behalf of several keys: while it waits, those that were
/// granted already wait too.
const SHARED_WAIT: Duration = Duration::from_millis(500);

/// How long the master may wait for room when `left` is left; some of it is kept for the writing.
pub(super) fn wait_for_room(left: Duration, many: bool) -> Duration {
    if many {
        (left / 4).min(SHARED_WAIT)
    } else {
        left * 3 / 4
    }
}

/// Asks for reservations.
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
        preferred_node: options.preferred_node.clone().unwrap_or_default(),
        prefer_same_host: options.prefer_same_host,
        timeout_ms: millis(wait),
        grant_ttl_ms: millis(left),
        soft_pin_ttl_ms: options.soft_pin.map_or(0, millis),
        hard_pin: options.hard_pin,
        request: rand::random(),
        instead_of,
    }
}

/// The grants that a reservation holds, each with its node's place in the reply.
pub(super) fn read_reservation(
    reservation: &Reservation,
    nodes: &[Arc<Node>],
    epoch: Epoch,
    length: Length,
) -> Result<SmallVec<[(u32, Grant); 1]>, ControlError> {
    if reservation.extents.is_empty() {
        return Err(malformed("a reservation without an extent"));
    }
    reservation
        .extents
        .iter()
        .map(|granted| {
            let mac = granted
                .mac
                .as_ref()
                .try_into()
                .map_err(|_| malformed(format!("a proof of {} bytes", granted.mac.len())))?;
            let grant = Grant {
                extent: Extent {
                    segment: SegmentId(granted.segment),
                    offset: Offset(granted.offset),
                    length,
                },
                epoch,
                id: GrantId(reservation.version),
                mac,
            };
            node_at(nodes, granted.node)?;
            Ok((granted.node, grant))
        })
        .collect()
}

/// A time in whole milliseconds, rounded up, so that a short one is not taken for none.
fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_time_is_not_taken_for_none() {
        assert_eq!(millis(Duration::ZERO), 0);
        assert_eq!(millis(Duration::from_nanos(1)), 1);
        assert_eq!(millis(Duration::from_millis(7)), 7);
        assert_eq!(millis(Duration::MAX), u64::MAX);
    }

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
