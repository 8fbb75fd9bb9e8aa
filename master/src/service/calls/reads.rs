//! Reads of metadata, and the leases that they grant.

use super::signing::ReadSigning;
use super::{Calls, bytes, millis, wire};
use crate::clock::BootInstant;
use crate::pool::{Holder, LeaseOf, Leased};
use crate::service::refused::{Refused, refused};
use crate::service::request::{Caller, admit, check_lengths, check_term, unpack};
use crate::service::rights::Allowed;
use kvpool_proto as proto;
use kvpool_types::wire::features::Features;
use kvpool_types::{ChecksumAlgorithm, Code, Version};

impl Calls {
    pub(in crate::service) fn hello(
        &self,
        request: Allowed<proto::HelloRequest>,
    ) -> Result<proto::HelloReply, Refused> {
        if request.max_version < proto::MIN_VERSION || request.min_version > proto::VERSION {
            return Err(refused(
                Code::VersionMismatch,
                format!(
                    "the caller supports protocol versions {} to {}, this master {} to {}",
                    request.min_version,
                    request.max_version,
                    proto::MIN_VERSION,
                    proto::VERSION
                ),
            ));
        }
        let shared = Features(request.features).shared();
        shared.map_err(|error| refused(error.code(), error.to_string()))?;
        if let Some(caller) = &request.caller {
            check_term(&self.pool, caller)?;
        }
        Ok(proto::HelloReply {
            version: request.max_version.min(proto::VERSION),
            cluster_id: bytes(&self.pool.cluster.to_bytes()),
            epoch: self.pool.epoch.0,
            lease_ttl_ms: millis(self.pool.config.lease_ttl),
            max_block_bytes: self.pool.config.max_block_size.as_u64(),
            max_batch_keys: self.pool.config.max_batch_keys,
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u32,
            features: Features::OURS.0,
        })
    }

    pub(in crate::service) fn lookup(
        &self,
        request: Allowed<proto::LookupRequest>,
    ) -> Result<proto::LookupReply, Refused> {
        let caller = self.caller(request.caller.as_ref())?;
        admit(&self.pool, &caller, true)?;
        self.locate(&caller, &request)
    }

    fn locate(
        &self,
        caller: &Caller,
        request: &proto::LookupRequest,
    ) -> Result<proto::LookupReply, Refused> {
        let keys = unpack(&self.pool, &request.keys)?;
        let found = self.pool.lookup(caller.namespace, &keys, !request.no_lease);
        self.pool.moved(caller.namespace, || {
            let lengths = found.answer.iter().flatten().map(|found| found.length.0);
            lengths.fold(0, u64::saturating_add)
        });
        let lease = self.lease(&found);
        let segments = self.pool.placement.segments();
        let mut signing = ReadSigning::new(&self.pool, &segments);
        let locations = found
            .answer
            .into_iter()
            .map(|found| match found {
                Some(found) => proto::Location {
                    code: Code::Ok.to_wire().into(),
                    later: false,
                    length: found.length.0,
                    checksum: found.checksum.0,
                    version: found.version.0,
                    replicas: found
                        .replicas
                        .iter()
                        .filter_map(|replica| signing.locate(&found, replica))
                        .collect(),
                },
                None => proto::Location {
                    code: Code::Missing.to_wire().into(),
                    ..Default::default()
                },
            })
            .collect();
        Ok(proto::LookupReply {
            epoch: self.pool.epoch.0,
            read_deadline_ms: signing.deadline_ms(),
            nodes: signing.into_nodes(),
            locations,
            lease,
        })
    }

    /// [`Calls::lookup`] in a pool with media. Blocks that lie only on media are loaded first.
    pub(in crate::service) async fn lookup_restored(
        &self,
        request: Allowed<proto::LookupRequest>,
    ) -> Result<proto::LookupReply, Refused> {
        let caller = self.caller(request.caller.as_ref())?;
        admit(&self.pool, &caller, true)?;
        let restored = {
            let keys = unpack(&self.pool, &request.keys)?;
            self.pool
                .restore(caller.namespace, &keys, caller.patience)
                .await
        };
        let reply = self.locate(&caller, &request);
        self.pool.end_restored(caller.namespace, &restored);
        let mut reply = reply?;
        for index in restored.left {
            if let Some(location) = reply.locations.get_mut(index) {
                location.later = location.code == u32::from(Code::Missing.to_wire());
            }
        }
        Ok(reply)
    }

    pub(in crate::service) fn exist(
        &self,
        request: Allowed<proto::ExistRequest>,
    ) -> Result<proto::ExistReply, Refused> {
        let caller = self.caller(request.caller.as_ref())?;
        admit(&self.pool, &caller, false)?;
        let keys = unpack(&self.pool, &request.keys)?;
        let found = self
            .pool
            .exist_bits(caller.namespace, &keys, !request.no_lease);
        let lease = self.lease(&found);
        Ok(proto::ExistReply {
            epoch: self.pool.epoch.0,
            present: found.answer.into_bytes().into(),
            lease,
        })
    }

    pub(in crate::service) fn match_prefix(
        &self,
        request: Allowed<proto::MatchPrefixRequest>,
    ) -> Result<proto::MatchPrefixReply, Refused> {
        let caller = self.caller(request.caller.as_ref())?;
        admit(&self.pool, &caller, false)?;
        let chain = unpack(&self.pool, &request.keys)?;
        let matched = self
            .pool
            .match_prefix(caller.namespace, &chain, !request.no_lease);
        Ok(proto::MatchPrefixReply {
            epoch: self.pool.epoch.0,
            blocks: u32::try_from(matched.answer).unwrap_or(u32::MAX),
            lease: self.lease(&matched),
        })
    }

    pub(in crate::service) fn renew(
        &self,
        request: Allowed<proto::RenewRequest>,
    ) -> Result<proto::RenewReply, Refused> {
        let caller = self.writer(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        let newest = newest(&request.versions, keys.len())?;
        let token = BootInstant(request.token);
        if self.is_of_earlier_term(request.caller.as_ref()) {
            let reply = proto::RenewReply {
                epoch: self.pool.epoch.0,
                codes: wire(&vec![Code::LeaseEnded; keys.len()]),
                lease: None,
            };
            return Ok(reply);
        }
        let of = match request.presence {
            true => LeaseOf::Presence,
            false => LeaseOf::Places,
        };
        let holder = |at| Holder {
            token,
            newest: newest(at),
        };
        let renewed = self.pool.renew(caller.namespace, &keys, of, holder);
        let lease = self.lease(&renewed);
        Ok(proto::RenewReply {
            epoch: self.pool.epoch.0,
            codes: wire(&renewed.answer),
            lease,
        })
    }

    pub(in crate::service) fn release(
        &self,
        request: Allowed<proto::ReleaseRequest>,
    ) -> Result<proto::Outcomes, Refused> {
        let caller = self.caller(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        let newest = newest(&request.versions, keys.len())?;
        let tokens = &request.tokens;
        if !tokens.is_empty() {
            check_lengths("tokens", tokens.len(), keys.len())?;
        }
        if self.is_of_earlier_term(request.caller.as_ref()) {
            return Ok(self.outcomes(&vec![Code::LeaseEnded; keys.len()]));
        }
        let codes = self.pool.release(caller.namespace, &keys, |at| Holder {
            token: BootInstant(tokens.get(at).copied().unwrap_or(request.token)),
            newest: newest(at),
        });
        Ok(self.outcomes(&codes))
    }

    /// Whether the latest term that the caller knows is an earlier one. Its lease tokens are then
    /// of that term, and perhaps of another machine's clock. In this term such tokens could end
    /// other holders' leases or match them.
    fn is_of_earlier_term(&self, caller: Option<&proto::Caller>) -> bool {
        let known = caller.map_or(0, |caller| caller.epoch);
        known != 0 && known < self.pool.epoch.0
    }

    fn lease<T>(&self, leased: &Leased<T>) -> Option<proto::Lease> {
        Some(proto::Lease {
            token: leased.token.0,
            ttl_ms: millis(leased.ttl),
            newest: leased.newest.0,
        })
    }
}

/// The latest version that each key's block can have. A key without a version in the request has no
/// bound.
fn newest(versions: &[u64], keys: usize) -> Result<impl Fn(usize) -> Version, Refused> {
    if !versions.is_empty() {
        check_lengths("versions", versions.len(), keys)?;
    }
    Ok(move |at| match versions.get(at) {
        Some(0) | None => Version(u64::MAX),
        Some(version) => Version(*version),
    })
}
