//! Rare calls: namespaces, removals, listings, reports, counters.

use super::tenancy::read_settings;
use super::{Calls, millis, wire};
use crate::pool::{Detached, NamespaceRefused, Removal};
use crate::service::refused::{Refused, refused};
use crate::service::request::{check_lengths, check_term, unpack};
use crate::service::rights::{Allowed, Operation};
use kvpool_proto as proto;
use kvpool_types::{Code, MediumId, NamespaceSettings, SegmentId, Version};
use regex::{Regex, RegexBuilder};

impl Calls {
    pub(in crate::service) async fn create_namespace(
        &self,
        request: Allowed<proto::CreateNamespaceRequest>,
    ) -> Result<proto::CreateNamespaceReply, Refused> {
        if let Some(caller) = &request.caller {
            check_term(&self.pool, caller)?;
        }
        let (request, who) = request.open();
        let asked = request
            .namespace
            .ok_or_else(|| refused(Code::Malformed, "the request has no namespace"))?;
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
            .map_err(|error| refused(Code::InvalidArgument, error.to_string()))?;
        let name = namespace.name.clone();
        let is_new = self.pool.namespace(&name).is_err();
        let settings = read_settings(&request.settings)?;
        let has_settings = settings != NamespaceSettings::default();
        for (operation, is_asked) in [
            (Operation::CreateNamespace, is_new),
            (Operation::ChangeNamespace, has_settings),
        ] {
            if is_asked && let Err(refused) = who.may(operation, &name) {
                who.note(operation, &name, Err(&refused));
                return Err(refused);
            }
        }
        let created = self
            .pool
            .create_namespace(namespace, settings)
            .await
            .map_err(|error| {
                let code = match error {
                    NamespaceRefused::Code(code) => code,
                    NamespaceRefused::Settings(error) => {
                        return refused(Code::InvalidArgument, error.to_string());
                    }
                };
                let why = match code {
                    Code::NotLeader => "cannot be created now: this master is read-only",
                    Code::StoreFailed => "could not be made durable",
                    Code::TooManyHeld => "exceeds max_namespaces, the limit of this pool",
                    Code::InProgress => "is being deleted",
                    _ => "exists with other fields",
                };
                refused(code, format!("namespace {name:?} {why}"))
            });
        if is_new {
            let outcome = created.as_ref().map(|_| ());
            who.note(Operation::CreateNamespace, &name, outcome);
        }
        let created = created?;
        Ok(proto::CreateNamespaceReply {
            epoch: self.pool.epoch.0,
            created,
        })
    }

    pub(in crate::service) async fn remove(
        &self,
        request: Allowed<proto::RemoveRequest>,
    ) -> Result<proto::RemoveReply, Refused> {
        use proto::remove_request::What;
        let caller = self.writer(request.caller.as_ref())?;
        let (request, _) = request.open();
        let what = request.what.ok_or_else(|| {
            refused(
                Code::InvalidArgument,
                "the request does not say what to remove",
            )
        })?;
        let report = match what {
            What::Keys(packed) => {
                let keys = unpack(&self.pool, &packed)?;
                let keys: Vec<_> = keys.iter().collect();
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
                return Err(refused(
                    Code::InvalidArgument,
                    "false names nothing to remove",
                ));
            }
        };
        let report =
            report.map_err(|code| refused(code, "the removal could not be made durable"))?;
        Ok(proto::RemoveReply {
            epoch: self.pool.epoch.0,
            removed: report.removed,
            kept: report.kept,
            codes: wire(&report.codes),
        })
    }

    pub(in crate::service) async fn list(
        &self,
        request: Allowed<proto::ListRequest>,
    ) -> Result<proto::ListReply, Refused> {
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
            .await
            .map_err(|error| refused(Code::InvalidArgument, error.to_string()))?;
        Ok(proto::ListReply {
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
        })
    }

    pub(in crate::service) fn describe(
        &self,
        request: Allowed<proto::DescribeRequest>,
    ) -> Result<proto::DescribeReply, Refused> {
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
        Ok(proto::DescribeReply {
            epoch: self.pool.epoch.0,
            descriptions,
        })
    }

    pub(in crate::service) fn report_replicas(
        &self,
        request: Allowed<proto::ReportReplicasRequest>,
    ) -> Result<proto::Outcomes, Refused> {
        let caller = self.writer(request.caller.as_ref())?;
        let keys = unpack(&self.pool, &request.keys)?;
        check_lengths("reports", request.reports.len(), keys.len())?;
        let mut reports = Vec::with_capacity(keys.len());
        for (key, report) in keys.iter().zip(&request.reports) {
            let code = u16::try_from(report.code).ok().and_then(Code::from_wire);
            let code = code.ok_or_else(|| {
                refused(
                    Code::InvalidArgument,
                    format!("unknown code {}", report.code),
                )
            })?;
            reports.push((
                key,
                Version(report.version),
                SegmentId(report.segment),
                code,
            ));
        }
        Ok(self.outcomes(&self.pool.report(caller.namespace, &reports)))
    }

    pub(in crate::service) async fn detach_medium(
        &self,
        request: Allowed<proto::DetachMediumRequest>,
    ) -> Result<proto::DetachMediumReply, Refused> {
        self.writer(request.caller.as_ref())?;
        let id = MediumId::from_slice(&request.medium_id)
            .ok_or_else(|| refused(Code::Malformed, "a medium id has 16 bytes"))?;
        let detached = self.pool.detach_medium(id, request.with_copies).await;
        let detached = detached
            .map_err(|code| refused(code, "that the medium is gone could not be made durable"))?;
        let mut reply = proto::DetachMediumReply {
            epoch: self.pool.epoch.0,
            ..Default::default()
        };
        let outcome = match detached {
            Detached::Done(copies) => {
                reply.copies = copies;
                proto::DetachOutcome::DetachDone
            }
            Detached::Unknown => proto::DetachOutcome::DetachUnknown,
            Detached::Connected(node) => {
                reply.node = node;
                proto::DetachOutcome::DetachConnected
            }
            Detached::HasCopies(copies) => {
                reply.copies = copies;
                proto::DetachOutcome::DetachHasCopies
            }
        };
        reply.set_outcome(outcome);
        Ok(reply)
    }

    /// `problems` lists the problems of this master's files of keys, policy and certificates.
    pub(in crate::service) fn stats(
        &self,
        request: Allowed<proto::StatsRequest>,
        problems: Vec<String>,
    ) -> Result<proto::StatsReply, Refused> {
        if let Some(caller) = &request.caller {
            check_term(&self.pool, caller)?;
        }
        let stats = crate::service::http::stats(&self.pool);
        let who = request.who();
        if who.watches_pool() {
            return Ok(proto::StatsReply { problems, ..stats });
        }
        // A tenant sees the state of its pool and its own namespaces only.
        let namespaces = stats.namespaces.into_iter();
        Ok(proto::StatsReply {
            epoch: stats.epoch,
            cluster_id: stats.cluster_id,
            uptime_ms: stats.uptime_ms,
            namespaces: namespaces.filter(|name| who.sees(name)).collect(),
            ..Default::default()
        })
    }
}

/// The longest pattern, in bytes. The bound is on the text, because a short text can compile to
/// much: `\pL` has four bytes and about 700 ranges of characters.
const LONGEST_PATTERN: usize = 1024;
/// The largest memory of a compiled pattern, in bytes.
const LARGEST_PATTERN: usize = 1 << 20;

pub(super) fn pattern(text: &str) -> Result<Regex, Refused> {
    if text.len() > LONGEST_PATTERN {
        let why = format!(
            "the pattern has {} bytes, and {LONGEST_PATTERN} are allowed",
            text.len()
        );
        return Err(refused(Code::InvalidArgument, why));
    }
    let mut builder = RegexBuilder::new(text);
    let built = builder
        .size_limit(LARGEST_PATTERN)
        .dfa_size_limit(LARGEST_PATTERN)
        .build();
    built.map_err(|error| refused(Code::InvalidArgument, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_bounded_in_length_and_in_what_it_takes() {
        let code = |text: &str| pattern(text).map_or_else(|refused| refused.code, |_| Code::Ok);
        assert_eq!(code("^model-7/.*[37]$"), Code::Ok);
        assert_eq!(code(&"a".repeat(LONGEST_PATTERN)), Code::Ok);
        assert_eq!(
            code(&"a".repeat(LONGEST_PATTERN + 1)),
            Code::InvalidArgument
        );
        assert_eq!(code("(\\pL{100}){100}"), Code::InvalidArgument);
        assert_eq!(code("("), Code::InvalidArgument);
    }
}
