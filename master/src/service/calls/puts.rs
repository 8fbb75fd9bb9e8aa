//! From the wish to put blocks to their being visible.

use super::{Calls, NodeTable, millis, optional_ms};
use crate::placement::Wish;
use crate::pool::{CommitItem, ReserveOptions};
use crate::service::batch::{check_leads, check_lengths, unpack};
use crate::service::refused::{Refused, refused};
use ::bytes::BytesMut;
use kvpool_proto as proto;
use kvpool_types::grant::MAC_BYTES;
use kvpool_types::{Code, Extent, GrantId, Length, NodeName, SegmentId, Version};
use std::time::Duration;

impl Calls {
    pub(in crate::service) async fn reserve(
        &self,
        request: proto::ReserveRequest,
    ) -> Result<proto::ReserveReply, Refused> {
        let caller = self.writer(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        check_lengths("lengths", request.lengths.len(), keys.len())?;
        let lengths: Vec<Length> = request.lengths.iter().map(|l| Length(*l)).collect();
        let preferred = request.preferred_node;
        let mut instead_of = request.instead_of;
        instead_of.sort_unstable();
        let options = ReserveOptions {
            wish: Wish {
                replicas: request.replicas as usize,
                preferred: (!preferred.is_empty()).then_some(NodeName(preferred)),
                host: caller.host.filter(|_| request.prefer_same_host),
            },
            upsert: request.upsert,
            timeout: Duration::from_millis(request.timeout_ms),
            grant_ttl: Duration::from_millis(request.grant_ttl_ms),
            soft_pin: optional_ms(request.soft_pin_ttl_ms),
            hard_pin: request.hard_pin,
            request: request.request,
            instead_of,
        };
        let outcomes = self
            .pool
            .reserve(caller.namespace, &keys, &lengths, &options)
            .await;
        // The term may have run out while this waited for room. What was granted ends by itself.
        check_leads(&self.pool)?;
        let mut table = NodeTable::default();
        let segments = self.pool.placement.segments();
        // All proofs of a reply share one allocation.
        let mut proofs = BytesMut::with_capacity(keys.len() * MAC_BYTES);
        let reservations = outcomes
            .into_iter()
            .zip(&lengths)
            .map(|(outcome, length)| match outcome {
                Ok(granted) => proto::Reservation {
                    code: Code::Ok.to_wire().into(),
                    version: granted.version.0,
                    extents: granted
                        .replicas
                        .iter()
                        .filter_map(|replica| {
                            let node = &segments.get(replica.segment)?.node;
                            let extent = Extent {
                                segment: replica.segment,
                                offset: replica.offset,
                                length: *length,
                            };
                            let id = GrantId(granted.version.0);
                            let grant =
                                node.signer
                                    .sign(node.incarnation, self.pool.epoch, id, extent);
                            let node = table.index(&segments, replica)?;
                            proofs.extend_from_slice(&grant.mac);
                            Some(proto::GrantedExtent {
                                node,
                                segment: replica.segment.0,
                                offset: replica.offset.0,
                                mac: proofs.split().freeze(),
                            })
                        })
                        .collect(),
                },
                Err(code) => proto::Reservation {
                    code: code.to_wire().into(),
                    ..Default::default()
                },
            })
            .collect();
        let grant_ttl = self.pool.grant_ttl(options.grant_ttl);
        Ok(proto::ReserveReply {
            epoch: self.pool.epoch.0,
            nodes: table.into_wire(),
            reservations,
            grant_ttl_ms: millis(grant_ttl),
        })
    }

    pub(in crate::service) async fn commit(
        &self,
        request: proto::CommitRequest,
    ) -> Result<proto::Outcomes, Refused> {
        let caller = self.writer(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        let parents = unpack(&self.pool, &request.parents)?;
        check_lengths("items", request.items.len(), keys.len())?;
        let named = |at: usize| {
            keys.get(at)
                .or_else(|| parents.get(at.checked_sub(keys.len())?))
        };
        let mut items = Vec::with_capacity(keys.len());
        for (key, item) in keys.iter().zip(&request.items) {
            let parent = match (item.parent as usize).checked_sub(1) {
                None => None,
                Some(at) => Some(named(at).ok_or_else(|| {
                    refused(
                        Code::InvalidArgument,
                        format!("there is no parent {}", item.parent),
                    )
                })?),
            };
            items.push(CommitItem {
                key: key.to_key(),
                version: Version(item.version),
                length: Length(item.length),
                checksum: kvpool_types::Checksum(item.checksum),
                segments: item.segments.iter().map(|id| SegmentId(*id)).collect(),
                parent: parent.map(|key| key.to_key()),
            });
        }
        let codes = self.pool.commit(caller.namespace, items).await;
        Ok(self.outcomes(&codes))
    }

    pub(in crate::service) fn revoke(
        &self,
        request: proto::RevokeRequest,
    ) -> Result<proto::Outcomes, Refused> {
        let caller = self.writer(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        check_lengths("versions", request.versions.len(), keys.len())?;
        let versions: Vec<Version> = request.versions.iter().map(|v| Version(*v)).collect();
        Ok(self.outcomes(&self.pool.revoke(caller.namespace, &keys, &versions)))
    }
}
