//! The gRPC service that clients and operators call.

use super::batch::{Caller, caller, check_lengths, check_term, unpack};
use super::status::status;
use crate::clock::Millis;
use crate::directory::Replica;
use crate::membership::Node;
use crate::placement::{Segments, Wish};
use crate::pool::{CommitItem, Leased, Pool, Removal, ReserveOptions};
use kvpool_proto as proto;
use kvpool_types::{
    ChecksumAlgorithm, Code, Extent, GrantId, Length, NodeName, SegmentId, Version,
};
use regex::Regex;
use std::sync::Arc;
use std::time::Duration;
use tonic::{Request, Response, Status};

/// The `Pool` gRPC service over a pool.
#[derive(Clone, Debug)]
pub struct PoolService {
    pool: Arc<Pool>,
}

impl PoolService {
    /// The service of `pool`.
    pub fn new(pool: Arc<Pool>) -> Self {
        Self { pool }
    }

    fn caller(&self, from: Option<&proto::Caller>) -> Result<Caller, Status> {
        caller(&self.pool, from)
    }

    /// The caller of a question about which blocks are there.
    async fn asker(&self, from: Option<&proto::Caller>) -> Result<Caller, Status> {
        let caller = caller(&self.pool, from)?;
        self.pool.settled().await;
        Ok(caller)
    }

    fn outcomes(&self, codes: &[Code]) -> Response<proto::Outcomes> {
        Response::new(proto::Outcomes {
            epoch: self.pool.epoch.0,
            codes: wire(codes),
        })
    }
}

/// The node table of one reply: each node once, named by its index.
#[derive(Default)]
struct NodeTable {
    nodes: Vec<Arc<Node>>,
}

impl NodeTable {
    fn index(&mut self, segments: &Segments<'_>, replica: &Replica) -> Option<u32> {
        let node = &segments.get(replica.segment)?.node;
        let at = match self.nodes.iter().position(|known| Arc::ptr_eq(known, node)) {
            Some(at) => at,
            None => {
                self.nodes.push(Arc::clone(node));
                self.nodes.len() - 1
            }
        };
        u32::try_from(at).ok()
    }

    fn into_wire(self) -> Vec<proto::NodeAddress> {
        self.nodes
            .iter()
            .map(|node| {
                let address = node.address();
                proto::NodeAddress {
                    name: node.name.0.clone(),
                    incarnation: bytes(&node.incarnation.to_bytes()),
                    data_address: address.data,
                    shm_path: address.shm_path,
                    host_id: bytes(&address.host.to_bytes()),
                }
            })
            .collect()
    }
}

fn bytes(raw: &[u8]) -> ::bytes::Bytes {
    ::bytes::Bytes::copy_from_slice(raw)
}

fn wire(codes: &[Code]) -> Vec<u32> {
    codes.iter().map(|code| code.to_wire().into()).collect()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn lease<T>(leased: &Leased<T>) -> Option<proto::Lease> {
    Some(proto::Lease {
        token: leased.token.0,
        ttl_ms: millis(leased.ttl),
    })
}

fn pattern(text: &str) -> Result<Regex, Status> {
    Regex::new(text).map_err(|error| status(Code::InvalidArgument, error.to_string()))
}

fn optional_ms(ms: u64) -> Option<Duration> {
    (ms > 0).then(|| Duration::from_millis(ms))
}

#[tonic::async_trait]
impl proto::pool_server::Pool for PoolService {
    async fn hello(
        &self,
        request: Request<proto::HelloRequest>,
    ) -> Result<Response<proto::HelloReply>, Status> {
        let request = request.into_inner();
        if request.max_version < proto::MIN_VERSION || request.min_version > proto::VERSION {
            return Err(status(
                Code::VersionMismatch,
                format!(
                    "the caller speaks versions {} to {}, this master {} to {}",
                    request.min_version,
                    request.max_version,
                    proto::MIN_VERSION,
                    proto::VERSION
                ),
            ));
        }
        if let Some(caller) = &request.caller {
            check_term(&self.pool, caller)?;
        }
        Ok(Response::new(proto::HelloReply {
            version: request.max_version.min(proto::VERSION),
            cluster_id: bytes(&self.pool.cluster.to_bytes()),
            epoch: self.pool.epoch.0,
            lease_ttl_ms: millis(self.pool.config.lease_ttl),
            max_block_bytes: self.pool.config.max_block_size.as_u64(),
            max_batch_keys: self.pool.config.max_batch_keys,
            checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u32,
        }))
    }

    async fn create_namespace(
        &self,
        request: Request<proto::CreateNamespaceRequest>,
    ) -> Result<Response<proto::CreateNamespaceReply>, Status> {
        let request = request.into_inner();
        if let Some(caller) = &request.caller {
            check_term(&self.pool, caller)?;
        }
        let asked = request
            .namespace
            .ok_or_else(|| status(Code::Malformed, "the request holds no namespace"))?;
        let namespace = kvpool_types::namespace::Namespace {
            name: asked.name,
            model: asked.model,
            dtype: asked.dtype,
            parallel_rank: asked.parallel_rank,
            salt: asked.salt,
        };
        let namespace = kvpool_types::namespace::Namespace {
            name: namespace.name_or_default().to_owned(),
            ..namespace
        };
        namespace
            .validate()
            .map_err(|error| status(Code::InvalidArgument, error.to_string()))?;
        let name = namespace.name.clone();
        let created = self
            .pool
            .create_namespace(namespace)
            .await
            .map_err(|code| {
                status(
                    code,
                    format!("namespace {name:?} is there with other fields"),
                )
            })?;
        Ok(Response::new(proto::CreateNamespaceReply {
            epoch: self.pool.epoch.0,
            created,
        }))
    }

    async fn reserve(
        &self,
        request: Request<proto::ReserveRequest>,
    ) -> Result<Response<proto::ReserveReply>, Status> {
        let request = request.into_inner();
        let caller = self.asker(request.caller.as_ref()).await?;
        let keys = unpack(&self.pool, &request.keys)?;
        check_lengths("lengths", request.lengths.len(), keys.len())?;
        let lengths: Vec<Length> = request.lengths.iter().map(|l| Length(*l)).collect();
        let preferred = request.preferred_node;
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
        };
        let outcomes = self
            .pool
            .reserve(caller.namespace, &keys, &lengths, &options)
            .await;
        let mut table = NodeTable::default();
        let segments = self.pool.placement.segments();
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
                            Some(proto::GrantedExtent {
                                node: table.index(&segments, replica)?,
                                segment: replica.segment.0,
                                offset: replica.offset.0,
                                mac: bytes(&grant.mac),
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
        Ok(Response::new(proto::ReserveReply {
            epoch: self.pool.epoch.0,
            nodes: table.into_wire(),
            reservations,
            grant_ttl_ms: millis(grant_ttl),
        }))
    }

    async fn commit(
        &self,
        request: Request<proto::CommitRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        let request = request.into_inner();
        let caller = self.caller(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        let parents = unpack(&self.pool, &request.parents)?;
        check_lengths("items", request.items.len(), keys.len())?;
        let named: Vec<_> = keys.iter().chain(&parents).collect();
        let mut items = Vec::with_capacity(keys.len());
        for (key, item) in keys.iter().zip(&request.items) {
            let parent = match (item.parent as usize).checked_sub(1) {
                None => None,
                Some(at) => Some(named.get(at).ok_or_else(|| {
                    status(
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

    async fn revoke(
        &self,
        request: Request<proto::RevokeRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        let request = request.into_inner();
        let caller = self.caller(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        check_lengths("versions", request.versions.len(), keys.len())?;
        let versions: Vec<Version> = request.versions.iter().map(|v| Version(*v)).collect();
        Ok(self.outcomes(&self.pool.revoke(caller.namespace, &keys, &versions)))
    }

    async fn lookup(
        &self,
        request: Request<proto::LookupRequest>,
    ) -> Result<Response<proto::LookupReply>, Status> {
        let request = request.into_inner();
        let caller = self.asker(request.caller.as_ref()).await?;
        let keys = unpack(&self.pool, &request.keys)?;
        let found = self.pool.lookup(caller.namespace, &keys, !request.no_lease);
        let lease = lease(&found);
        let mut table = NodeTable::default();
        let segments = self.pool.placement.segments();
        let locations = found
            .answer
            .into_iter()
            .map(|found| match found {
                Some(found) => proto::Location {
                    code: Code::Ok.to_wire().into(),
                    length: found.length.0,
                    checksum: found.checksum.0,
                    version: found.version.0,
                    replicas: found
                        .replicas
                        .iter()
                        .filter_map(|replica| {
                            Some(proto::ReplicaLocation {
                                node: table.index(&segments, replica)?,
                                segment: replica.segment.0,
                                offset: replica.offset.0,
                            })
                        })
                        .collect(),
                },
                None => proto::Location {
                    code: Code::Missing.to_wire().into(),
                    ..Default::default()
                },
            })
            .collect();
        Ok(Response::new(proto::LookupReply {
            epoch: self.pool.epoch.0,
            nodes: table.into_wire(),
            locations,
            lease,
        }))
    }

    async fn exist(
        &self,
        request: Request<proto::ExistRequest>,
    ) -> Result<Response<proto::ExistReply>, Status> {
        let request = request.into_inner();
        let caller = self.asker(request.caller.as_ref()).await?;
        let keys = unpack(&self.pool, &request.keys)?;
        let found = self.pool.exist(caller.namespace, &keys, !request.no_lease);
        let mut present = vec![0u8; keys.len().div_ceil(8)];
        for (at, _) in found.answer.iter().enumerate().filter(|(_, there)| **there) {
            if let Some(byte) = present.get_mut(at / 8) {
                *byte |= 1 << (at % 8);
            }
        }
        let lease = lease(&found);
        Ok(Response::new(proto::ExistReply {
            epoch: self.pool.epoch.0,
            present: present.into(),
            lease,
        }))
    }

    async fn match_prefix(
        &self,
        request: Request<proto::MatchPrefixRequest>,
    ) -> Result<Response<proto::MatchPrefixReply>, Status> {
        let request = request.into_inner();
        let caller = self.asker(request.caller.as_ref()).await?;
        let chain = unpack(&self.pool, &request.keys)?;
        let matched = self
            .pool
            .match_prefix(caller.namespace, &chain, !request.no_lease);
        Ok(Response::new(proto::MatchPrefixReply {
            epoch: self.pool.epoch.0,
            blocks: u32::try_from(matched.answer).unwrap_or(u32::MAX),
            lease: lease(&matched),
        }))
    }

    async fn renew(
        &self,
        request: Request<proto::RenewRequest>,
    ) -> Result<Response<proto::RenewReply>, Status> {
        let request = request.into_inner();
        let caller = self.caller(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        let renewed = self
            .pool
            .renew(caller.namespace, &keys, Millis(request.token));
        let lease = lease(&renewed);
        Ok(Response::new(proto::RenewReply {
            epoch: self.pool.epoch.0,
            codes: wire(&renewed.answer),
            lease,
        }))
    }

    async fn release(
        &self,
        request: Request<proto::ReleaseRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        let request = request.into_inner();
        let caller = self.caller(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        Ok(self.outcomes(
            &self
                .pool
                .release(caller.namespace, &keys, Millis(request.token)),
        ))
    }

    async fn remove(
        &self,
        request: Request<proto::RemoveRequest>,
    ) -> Result<Response<proto::RemoveReply>, Status> {
        use proto::remove_request::What;
        let request = request.into_inner();
        let caller = self.caller(request.caller.as_ref())?;
        let what = request.what.ok_or_else(|| {
            status(
                Code::InvalidArgument,
                "the request does not say what to remove",
            )
        })?;
        let report = match what {
            What::Keys(packed) => {
                let keys = unpack(&self.pool, &packed)?;
                self.pool
                    .remove(caller.namespace, &keys, request.force)
                    .await
            }
            What::Pattern(text) => {
                let removal = Removal::Pattern(caller.namespace, pattern(&text)?);
                self.pool.remove_all(&removal, request.force).await
            }
            What::Namespace(true) => {
                let removal = Removal::Namespace(caller.namespace);
                self.pool.remove_all(&removal, request.force).await
            }
            What::Everything(true) => {
                self.pool
                    .remove_all(&Removal::Everything, request.force)
                    .await
            }
            What::Namespace(false) | What::Everything(false) => {
                return Err(status(
                    Code::InvalidArgument,
                    "false names nothing to remove",
                ));
            }
        };
        let report =
            report.map_err(|code| status(code, "the removal could not be made durable"))?;
        Ok(Response::new(proto::RemoveReply {
            epoch: self.pool.epoch.0,
            removed: report.removed,
            kept: report.kept,
            codes: wire(&report.codes),
        }))
    }

    async fn list(
        &self,
        request: Request<proto::ListRequest>,
    ) -> Result<Response<proto::ListReply>, Status> {
        let request = request.into_inner();
        let caller = self.caller(request.caller.as_ref())?;
        let wanted = match request.pattern.as_str() {
            "" => None,
            text => Some(pattern(text)?),
        };
        let limit = match request.limit {
            0 => 1000,
            limit => limit.min(10_000) as usize,
        };
        let page = self
            .pool
            .list(caller.namespace, wanted.as_ref(), &request.page, limit)
            .map_err(|error| status(Code::InvalidArgument, error.to_string()))?;
        Ok(Response::new(proto::ListReply {
            epoch: self.pool.epoch.0,
            blocks: page
                .blocks
                .into_iter()
                .map(|block| proto::ListedBlock {
                    key: block.key,
                    length: block.length.0,
                    replicas: u32::try_from(block.replicas).unwrap_or(u32::MAX),
                    leased: block.leased,
                    pinned: block.pinned,
                })
                .collect(),
            next_page: page.next.into(),
        }))
    }

    async fn describe(
        &self,
        request: Request<proto::DescribeRequest>,
    ) -> Result<Response<proto::DescribeReply>, Status> {
        let request = request.into_inner();
        let caller = self.caller(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        let descriptions = self
            .pool
            .describe(caller.namespace, &keys)
            .into_iter()
            .map(|described| match described {
                Some(block) => proto::Description {
                    code: Code::Ok.to_wire().into(),
                    length: block.length.0,
                    checksum: block.checksum.0,
                    version: block.version.0,
                    replicas: block
                        .replicas
                        .into_iter()
                        .map(|replica| proto::DescribedReplica {
                            node: replica.node.0,
                            segment: replica.segment.0,
                            offset: replica.offset.0,
                            state: replica.state.into(),
                        })
                        .collect(),
                    lease_left_ms: millis(block.lease_left),
                    soft_pin_left_ms: millis(block.soft_pin_left),
                    hard_pin: block.hard_pin,
                },
                None => proto::Description {
                    code: Code::Missing.to_wire().into(),
                    ..Default::default()
                },
            })
            .collect();
        Ok(Response::new(proto::DescribeReply {
            epoch: self.pool.epoch.0,
            descriptions,
        }))
    }

    async fn report_replicas(
        &self,
        request: Request<proto::ReportReplicasRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        let request = request.into_inner();
        let caller = self.caller(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        check_lengths("reports", request.reports.len(), keys.len())?;
        let mut reports = Vec::with_capacity(keys.len());
        for (key, report) in keys.iter().zip(&request.reports) {
            let code = u16::try_from(report.code).ok().and_then(Code::from_wire);
            let code = code.ok_or_else(|| {
                status(
                    Code::InvalidArgument,
                    format!("there is no code {}", report.code),
                )
            })?;
            reports.push((
                *key,
                Version(report.version),
                SegmentId(report.segment),
                code,
            ));
        }
        Ok(self.outcomes(&self.pool.report(caller.namespace, &reports)))
    }

    async fn stats(
        &self,
        request: Request<proto::StatsRequest>,
    ) -> Result<Response<proto::StatsReply>, Status> {
        if let Some(caller) = &request.into_inner().caller {
            check_term(&self.pool, caller)?;
        }
        Ok(Response::new(super::http::stats(&self.pool)))
    }
}
