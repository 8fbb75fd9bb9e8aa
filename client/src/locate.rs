//! Lookups: asking the master where blocks lie.

use crate::cache::{KnownNode, Leased, Located, LocatedReplica, Locations};
use crate::clock::{BootTime, Deadline};
use crate::control::{Call, Control};
use crate::errors::ControlError;
use crate::lease::counted;
use crate::message_limits::MessageLimits;
use futures::StreamExt;
use kvpool_proto::{Location, LookupReply, LookupRequest, NodeAddress};
use kvpool_types::wire::keys::pack;
use kvpool_types::{
    Checksum, Code, Epoch, Extent, HostId, Incarnation, Key, Length, NodeName, Offset, ReadRight,
    SegmentId, Version,
};
use std::sync::Arc;

/// The location of one key; `None` when the key is absent.
pub(crate) type Found = Result<Option<Arc<Located>>, ControlError>;

/// The options of a lookup.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    /// The limits of one message.
    pub(crate) limits: MessageLimits,
    /// The most messages in flight at a time.
    pub(crate) concurrency: usize,
    /// Whether the answers go into the location cache.
    pub(crate) keep: bool,
    /// The time by which the lookup must have returned.
    pub(crate) deadline: Deadline,
}

/// Asks the master for the locations of `keys`, which are distinct: one answer per key, in order. The caller
/// gets the leases of the blocks that are found.
pub(crate) async fn lookup(
    control: &Control,
    locations: &Locations,
    keys: &[Key],
    how: How,
) -> Result<Vec<Found>, ControlError> {
    let runs = how.limits.split_keys(keys);
    let calls = runs.into_iter().map(|run| {
        let keys = keys.get(run).unwrap_or_default();
        let asked = async move {
            let begun = locations.begin();
            let sent = BootTime::now();
            let request = LookupRequest {
                caller: None,
                keys: pack(keys).into(),
                no_lease: false,
            };
            let reply = control.call(request, Call::by(how.deadline)).await?;
            let leased = counted(reply.lease.as_ref(), sent, reply.epoch);
            let found = read_reply(&reply, keys.len(), leased)?;
            if how.keep {
                for (key, found) in keys.iter().zip(&found) {
                    if let Ok(Some(located)) = found {
                        locations.insert(begun, key, located);
                    }
                }
            }
            Ok::<_, ControlError>(found)
        };
        // The caller holds the leases from other messages even if this message fails.
        async move { (keys.len(), asked.await) }
    });
    let replies: Vec<_> = futures::stream::iter(calls)
        .buffered(how.concurrency.max(1))
        .collect()
        .await;
    if replies.iter().all(|(_, found)| found.is_err())
        && let Some((_, Err(error))) = replies.first()
    {
        return Err(error.clone());
    }
    let of_keys = |(count, found): (usize, Result<Vec<Found>, ControlError>)| {
        found.unwrap_or_else(|error| vec![Err(error); count])
    };
    Ok(replies.into_iter().flat_map(of_keys).collect())
}

/// The store nodes that a reply names.
pub(crate) fn read_nodes(nodes: &[NodeAddress]) -> Result<Vec<Arc<KnownNode>>, ControlError> {
    nodes
        .iter()
        .map(|node| {
            let incarnation = Incarnation::from_slice(&node.incarnation);
            let host = HostId::from_slice(&node.host_id);
            match (incarnation, host) {
                (Some(incarnation), Some(host)) => Ok(Arc::new(KnownNode {
                    name: NodeName(node.name.clone()),
                    incarnation,
                    data_address: node.data_address.clone(),
                    shm_path: node.shm_path.clone(),
                    host,
                })),
                _ => Err(malformed(format!("node {:?} has an invalid id", node.name))),
            }
        })
        .collect()
}

/// The node at `index` of the nodes in a reply.
pub(crate) fn node_at(
    nodes: &[Arc<KnownNode>],
    index: u32,
) -> Result<Arc<KnownNode>, ControlError> {
    usize::try_from(index)
        .ok()
        .and_then(|index| nodes.get(index))
        .map(Arc::clone)
        .ok_or_else(|| malformed(format!("node {index} of {}", nodes.len())))
}

/// The code that `raw` in a reply stands for.
pub(crate) fn code_of(raw: u32) -> Code {
    Code::from_peer(raw)
}

/// The answer for a block that lies on an SSD and was not loaded into memory in time.
fn later() -> ControlError {
    ControlError::new(
        Code::Full,
        "the block lies on an SSD, and did not come back in time: memory has no room, or the disk is slow",
    )
}

/// Whether the block exists on an SSD and was not loaded into memory in time.
pub(crate) fn is_later(error: &ControlError) -> bool {
    error.code == Code::Full
}

/// The error of a reply that cannot be decoded.
pub(crate) fn malformed(what: impl std::fmt::Display) -> ControlError {
    ControlError::new(
        Code::Malformed,
        format!("malformed reply from the master: {what}"),
    )
}

/// Fails unless a reply has one answer per key.
pub(crate) fn expect_answers(got: usize, asked: usize) -> Result<(), ControlError> {
    if got == asked {
        Ok(())
    } else {
        Err(malformed(format!("{got} answers for {asked} keys")))
    }
}

fn read_reply(
    reply: &LookupReply,
    asked: usize,
    leased: Option<Leased>,
) -> Result<Vec<Found>, ControlError> {
    expect_answers(reply.locations.len(), asked)?;
    let nodes = read_nodes(&reply.nodes)?;
    Ok(reply
        .locations
        .iter()
        .map(|location| match code_of(location.code) {
            Code::Ok => read_location(location, &nodes, reply, leased).map(Some),
            Code::Missing if location.later => Err(later()),
            Code::Missing => Ok(None),
            other => Err(ControlError::new(
                other,
                "the master refused to look up the key",
            )),
        })
        .collect())
}

fn read_location(
    location: &Location,
    nodes: &[Arc<KnownNode>],
    reply: &LookupReply,
    leased: Option<Leased>,
) -> Result<Arc<Located>, ControlError> {
    let (length, version) = (Length(location.length), Version(location.version));
    let right = |proof: &[u8]| {
        Some(ReadRight {
            version,
            deadline_ms: reply.read_deadline_ms,
            mac: proof.try_into().ok()?,
        })
    };
    let replicas = location
        .replicas
        .iter()
        .map(|replica| {
            Ok(LocatedReplica {
                node: node_at(nodes, replica.node)?,
                extent: Extent {
                    segment: SegmentId(replica.segment),
                    offset: Offset(replica.offset),
                    length,
                },
                right: right(&replica.read_proof),
            })
        })
        .collect::<Result<Vec<_>, ControlError>>()?;
    Ok(Arc::new(Located {
        epoch: Epoch(reply.epoch),
        version,
        checksum: Checksum(location.checksum),
        length,
        replicas,
        lease: leased,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_proto::ReplicaLocation;

    fn node() -> NodeAddress {
        NodeAddress {
            name: "n".to_owned(),
            incarnation: Incarnation(3).to_bytes().to_vec().into(),
            data_address: "10.0.0.1:1".to_owned(),
            shm_path: String::new(),
            host_id: HostId(4).to_bytes().to_vec().into(),
        }
    }

    fn reply(replica_node: u32) -> LookupReply {
        LookupReply {
            epoch: 2,
            nodes: vec![node()],
            locations: vec![Location {
                later: false,
                code: 0,
                length: 10,
                checksum: 11,
                version: 12,
                replicas: vec![ReplicaLocation {
                    node: replica_node,
                    segment: 5,
                    offset: 6,
                    read_proof: vec![7; 16].into(),
                }],
            }],
            lease: None,
            read_deadline_ms: 8,
        }
    }

    #[test]
    fn a_location_is_read_with_its_node() {
        let located = read_reply(&reply(0), 1, None).unwrap();
        let located = located[0].clone().unwrap().unwrap();
        assert_eq!(located.replicas[0].node.incarnation, Incarnation(3));
        assert_eq!(located.replicas[0].extent.to_string(), "5@6+10");
        assert_eq!(located.version, Version(12));
        let right = ReadRight {
            version: Version(12),
            deadline_ms: 8,
            mac: [7; 16],
        };
        assert_eq!(located.replicas[0].right, Some(right));
    }

    #[test]
    fn a_reply_that_contradicts_itself_is_refused() {
        let found = read_reply(&reply(1), 1, None).unwrap();
        assert_eq!(found[0].as_ref().unwrap_err().code, Code::Malformed);
        assert_eq!(
            read_reply(&reply(0), 2, None).unwrap_err().code,
            Code::Malformed
        );
        let mut bad = reply(0);
        bad.nodes[0].incarnation = vec![1; 15].into();
        assert_eq!(read_reply(&bad, 1, None).unwrap_err().code, Code::Malformed);
    }

    #[test]
    fn an_unknown_code_is_no_miss() {
        let mut odd = reply(0);
        odd.locations[0].code = 60_000;
        let found = read_reply(&odd, 1, None).unwrap();
        assert_eq!(found[0].as_ref().unwrap_err().code, Code::Internal);
    }
}
