//! Reserve, commit and revoke.

use super::encoding::{Items, Signing};
use super::{Calls, millis, optional_ms};
use crate::placement::PlacementHints;
use crate::pool::ReserveOptions;
use crate::service::refused::{Refused, refused};
use crate::service::request::{
    admit, check_leads, check_lengths, check_preferred, check_room, unpack,
};
use crate::service::rights::Allowed;
use kvpool_proto as proto;
use kvpool_types::ids::NamespaceId;
use kvpool_types::wire::keys::KeyBatch;
use kvpool_types::{Code, Length, NodeName, Version};
use std::time::Duration;

impl Calls {
    pub(in crate::service) async fn reserve(
        &self,
        request: Allowed<proto::ReserveRequest>,
    ) -> Result<proto::ReserveReply, Refused> {
        let reply = self.reserve_or_refuse(request).await;
        self.count_if_refused(&reply);
        reply
    }

    /// Counts a put that was refused as a whole.
    fn count_if_refused<T>(&self, reply: &Result<T, Refused>) {
        let code = reply.as_ref().err().map(|refused| refused.code);
        self.pool.metrics.puts_refused(code.into_iter());
    }

    /// Checks that a put of these keys could be made durable now, before its bytes move.
    fn check_room(&self, namespace: NamespaceId, keys: &KeyBatch<'_>) -> Result<(), Refused> {
        check_room(&self.pool).inspect_err(|refused| {
            let codes = std::iter::repeat_n(refused.code, keys.len());
            self.pool.put_answered(namespace, keys, codes);
        })
    }

    async fn reserve_or_refuse(
        &self,
        request: Allowed<proto::ReserveRequest>,
    ) -> Result<proto::ReserveReply, Refused> {
        let caller = self.writer(request.caller.as_ref())?;
        admit(&self.pool, &caller, true)?;
        let (request, _) = request.open();
        let keys = unpack(&self.pool, &request.keys)?;
        self.pool.put_asks(caller.namespace, &keys);
        self.check_room(caller.namespace, &keys)?;
        check_lengths("lengths", request.lengths.len(), keys.len())?;
        let lengths: Vec<Length> = request.lengths.iter().map(|l| Length(*l)).collect();
        check_preferred(&request.preferred_nodes)?;
        let mut instead_of = request.instead_of;
        instead_of.sort_unstable();
        let options = ReserveOptions {
            hints: PlacementHints {
                replicas: request.replicas as usize,
                preferred: request.preferred_nodes.into_iter().map(NodeName).collect(),
                host: caller.host.filter(|_| request.prefer_same_host),
            },
            upsert: request.upsert,
            timeout: Duration::from_millis(request.timeout_ms),
            grant_ttl: Duration::from_millis(request.grant_ttl_ms),
            soft_pin: optional_ms(request.soft_pin_ttl_ms),
            hard_pin: request.hard_pin,
            request: request.request,
            instead_of,
            writer: self.writer,
        };
        let outcomes = self
            .pool
            .reserve(caller.namespace, &keys, &lengths, &options)
            .await;
        self.pool.moved(caller.namespace, || {
            let granted = outcomes.iter().zip(&lengths);
            let bytes = granted.filter_map(|(outcome, length)| {
                let replicas = outcome.as_ref().ok()?.replicas.len() as u64;
                Some(length.0.saturating_mul(replicas))
            });
            bytes.fold(0, u64::saturating_add)
        });
        // The term may have expired during the wait for room. The new grants then expire by
        // themselves.
        check_leads(&self.pool)?;
        // A put may have waited for evictions whose records cannot be appended.
        if outcomes.iter().all(Result::is_err) {
            self.check_room(caller.namespace, &keys)?;
        }
        let codes = outcomes
            .iter()
            .map(|one| one.as_ref().map_or_else(|code| *code, |_| Code::Ok));
        self.pool.put_answered(caller.namespace, &keys, codes);
        let codes = outcomes.iter().filter_map(|one| one.as_ref().err());
        self.pool.metrics.puts_refused(codes.copied());
        let has = |code: Code| outcomes.iter().any(|one| one.as_ref().err() == Some(&code));
        let longest_block = match has(Code::TooLarge) {
            true => self.pool.longest_block(),
            false => 0,
        };
        let of_quotas = [Code::OverQuota, Code::MemoryQuota, Code::BlocksQuota];
        let (quota, quota_limit) = of_quotas
            .into_iter()
            .find(|code| has(*code))
            .and_then(|code| self.pool.refusing_quota(caller.namespace, code))
            .map_or((0, 0), |(quota, limit)| (quota.to_wire(), limit));
        let grant_ttl_ms = millis(self.pool.grant_ttl(options.grant_ttl));
        let epoch = self.pool.epoch;
        let mut signing = Signing::new(epoch, self.pool.placement.segments());
        let columns = request
            .columns
            .then(|| signing.columns(&outcomes, &lengths));
        let columns = columns.flatten();
        let reservations = match columns {
            Some(_) => Vec::new(),
            None => signing.each(&outcomes, &lengths),
        };
        Ok(proto::ReserveReply {
            epoch: epoch.0,
            nodes: signing.into_nodes(),
            reservations,
            grant_ttl_ms,
            columns,
            longest_block,
            quota,
            quota_limit,
        })
    }

    pub(in crate::service) async fn commit(
        &self,
        request: Allowed<proto::CommitRequest>,
    ) -> Result<proto::Outcomes, Refused> {
        let reply = self.commit_or_refuse(request).await;
        self.count_if_refused(&reply);
        reply
    }

    async fn commit_or_refuse(
        &self,
        request: Allowed<proto::CommitRequest>,
    ) -> Result<proto::Outcomes, Refused> {
        let caller = self.writer(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        let parents = unpack(&self.pool, &request.parents)?;
        let wire = Items::read(&request, keys.len())?;
        let named = |at: usize| {
            keys.get(at)
                .or_else(|| parents.get(at.checked_sub(keys.len())?))
        };
        let mut items = Vec::with_capacity(keys.len());
        for (at, key) in keys.iter().enumerate() {
            let (mut item, parent) = wire.get(at, key.to_key());
            if let Some(at) = (parent as usize).checked_sub(1) {
                let parent = named(at).ok_or_else(|| {
                    refused(
                        Code::InvalidArgument,
                        format!("parent number {parent} is out of range"),
                    )
                })?;
                item.parent = Some(parent.to_key());
            }
            items.push(item);
        }
        let codes = self.pool.commit(caller.namespace, items).await;
        self.pool.metrics.puts_refused(codes.iter().copied());
        let answered = codes.iter().copied();
        self.pool.put_answered(caller.namespace, &keys, answered);
        Ok(self.outcomes(&codes))
    }

    pub(in crate::service) fn revoke(
        &self,
        request: Allowed<proto::RevokeRequest>,
    ) -> Result<proto::Outcomes, Refused> {
        let caller = self.writer(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        check_lengths("versions", request.versions.len(), keys.len())?;
        let versions: Vec<Version> = request.versions.iter().map(|v| Version(*v)).collect();
        Ok(self.outcomes(&self.pool.revoke(caller.namespace, &keys, &versions)))
    }
}
