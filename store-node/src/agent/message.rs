//! Converts between the messages of a session and the node's own types.

use super::Options;
use crate::clock;
use crate::fence::{FenceItem, Term};
use crate::serve::{Identity, Snapshot};
use bytes::Bytes;
use kvpool_proto as proto;
use kvpool_types::{
    ChecksumAlgorithm, ClusterId, Epoch, Extent, GrantId, GrantKey, Length, Offset, SegmentId,
};
use std::time::Duration;

/// A decoded welcome.
pub(super) struct Welcome {
    pub(super) cluster: ClusterId,
    pub(super) term: Term,
    pub(super) heartbeat_interval: Duration,
    /// The proof that this term existed; empty from masters that give none.
    pub(super) proof: Bytes,
}

/// The highest epoch that the node was welcomed to, and the proof of that term.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) epoch: Epoch,
    pub(super) proof: Bytes,
}

/// Why a message of the master is malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("protocol version {0} is not supported by this node")]
    Version(u32),
    #[error("the cluster id is not 16 bytes long")]
    Cluster,
    #[error("the grant key is not 32 bytes long")]
    Key,
    #[error("the heartbeat interval is 0 ms")]
    Interval,
    #[error("a message without an extent")]
    Extent,
}

pub(super) fn register(
    identity: &Identity,
    options: &Options,
    snapshot: &Snapshot,
    loaded: &[Extent],
    seen: &Seen,
) -> proto::Register {
    let cluster = snapshot.cluster.map(ClusterId::to_bytes);
    let segments = snapshot
        .segments
        .iter()
        .map(|(size, id)| proto::OfferedSegment {
            size_bytes: size.0,
            id: id.map_or(0, |id| id.0),
        });
    proto::Register {
        min_version: proto::MIN_VERSION,
        max_version: proto::VERSION,
        cluster_id: cluster.map_or_else(Bytes::new, |id| Bytes::copy_from_slice(&id)),
        name: identity.name.0.clone(),
        incarnation: Bytes::copy_from_slice(&snapshot.incarnation.to_bytes()),
        data_address: options.data_address.clone(),
        shm_path: options.shm_path.clone(),
        host_id: Bytes::copy_from_slice(&identity.host.to_bytes()),
        epoch_seen: seen.epoch.0,
        segments: segments.collect(),
        held: snapshot.held.iter().map(range).collect(),
        checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u32,
        life_secret: Bytes::copy_from_slice(&snapshot.secret.to_bytes()),
        epoch_proof: seen.proof.clone(),
        can_pull: true,
        can_undrain: true,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        wants_signed_reads: snapshot.wants_rights,
        loaded: loaded.iter().map(range).collect(),
    }
}

pub(super) fn welcome(message: &proto::Welcome) -> Result<Welcome, Malformed> {
    if !(proto::MIN_VERSION..=proto::VERSION).contains(&message.version) {
        return Err(Malformed::Version(message.version));
    }
    if message.heartbeat_interval_ms == 0 {
        return Err(Malformed::Interval);
    }
    let key = message.grant_key.as_ref().try_into();
    Ok(Welcome {
        cluster: ClusterId::from_slice(&message.cluster_id).ok_or(Malformed::Cluster)?,
        term: Term {
            epoch: Epoch(message.epoch),
            signer: GrantKey(key.map_err(|_| Malformed::Key)?).signer(),
            segments: message.segment_ids.iter().copied().map(SegmentId).collect(),
            ahead_ms: clock::ahead_ms(message.clock_ms),
            says_what_is_recorded: grant(message.loads_recorded_below).is_some(),
        },
        heartbeat_interval: Duration::from_millis(message.heartbeat_interval_ms),
        proof: message.epoch_proof.clone(),
    })
}

pub(super) fn fence_item(item: &proto::FenceItem) -> Result<FenceItem, Malformed> {
    Ok(FenceItem {
        ticket: item.ticket,
        grant: grant(item.grant),
        before: grant(item.before),
        extent: extent(item.extent.as_ref())?,
    })
}

/// A grant id; `None` for 0.
pub(super) fn grant(number: u64) -> Option<GrantId> {
    (number != 0).then_some(GrantId(number))
}

pub(super) fn extent(range: Option<&proto::ExtentRange>) -> Result<Extent, Malformed> {
    let range = range.ok_or(Malformed::Extent)?;
    Ok(Extent {
        segment: SegmentId(range.segment),
        offset: Offset(range.offset),
        length: Length(range.length),
    })
}

fn range(extent: &Extent) -> proto::ExtentRange {
    proto::ExtentRange {
        segment: extent.segment.0,
        offset: extent.offset.0,
        length: extent.length.0,
    }
}
