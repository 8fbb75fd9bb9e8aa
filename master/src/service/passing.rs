//! Forwarding of calls to the leader, for clients that cannot reach it.

use super::refused::{Refused, refused};
use super::rights::{Operation, pass_on};
use kvpool_daemon::tls::Tls;
use kvpool_proto as proto;
use kvpool_proto::pool_client::PoolClient;
use kvpool_tls::grpc::{GrpcWay, PLAIN_REFUSED};
use kvpool_tls::{ClientTls, TLS_SCHEME};
use kvpool_types::{Code, MediumId};
use parking_lot::Mutex;
use proto::MAX_MESSAGE_BYTES;
use std::time::Duration;
use tonic::metadata::{AsciiMetadataKey, MetadataMap, MetadataValue};
use tonic::transport::Channel;
use tonic::{Request, Status};
use tracing::Span;

/// The most time for connecting to the leader.
const CONNECT: Duration = Duration::from_secs(1);
/// How long a leader may leave a ping unanswered before it counts as unreachable.
const PING: Duration = Duration::from_secs(1);
/// The mark of a forwarded call, which is never forwarded again.
const PASSED: &str = "kvpool-passed";
/// The caller's remaining time.
const TIMEOUT: &str = "grpc-timeout";

/// A request that names its caller.
pub(super) trait Called: Send + 'static {
    fn caller(&self) -> Option<&proto::Caller>;

    /// The operation, which selects a row of the table of rights.
    fn operation(&self) -> Operation;

    /// The request's namespace; empty for the default one.
    fn namespace(&self) -> &str {
        self.caller().map_or("", |caller| &caller.namespace)
    }

    /// The object for an audit line: the namespace, or another object that the request names.
    fn about(&self) -> String {
        self.namespace().to_owned()
    }
}

/// The span of a call that this master answers or forwards. Its parent is the caller's span.
pub(super) fn call_span(name: &'static str, request: &impl Called) -> Span {
    let context = request.caller().map(|caller| &*caller.trace);
    kvpool_trace::below(context.unwrap_or_default(), || {
        kvpool_trace::span!("master call", otel.name = name, otel.kind = "server")
    })
}

macro_rules! called {
    ($($request:ident: $operation:ident $(, $name:ident)?)*) => {
        $(impl Called for proto::$request {
            fn caller(&self) -> Option<&proto::Caller> {
                self.caller.as_ref()
            }

            fn operation(&self) -> Operation {
                Operation::$operation
            }

            $(fn about(&self) -> String {
                self.$name.clone()
            })?
        })*
    };
}

called! {
    HelloRequest: Hello
    ReserveRequest: Reserve
    CommitRequest: Commit
    RevokeRequest: Revoke
    LookupRequest: Lookup
    ExistRequest: Exist
    MatchPrefixRequest: MatchPrefix
    RenewRequest: Renew
    ReleaseRequest: Release
    ListRequest: List
    DescribeRequest: Describe
    ReportReplicasRequest: ReportReplicas
    StatsRequest: Stats
    ChangeReplicasRequest: ChangeReplicas, from
    DrainNodeRequest: DrainNode, name
    UndrainNodeRequest: UndrainNode, name
    ClusterRequest: Cluster
    ChangeNamespaceRequest: ChangeNamespace, name
    DeleteNamespaceRequest: DeleteNamespace, name
}

impl Called for proto::DetachMediumRequest {
    fn caller(&self) -> Option<&proto::Caller> {
        self.caller.as_ref()
    }

    fn operation(&self) -> Operation {
        Operation::DetachMedium
    }

    fn about(&self) -> String {
        MediumId::from_slice(&self.medium_id).map_or_else(String::new, |id| id.to_string())
    }
}

impl Called for proto::CreateNamespaceRequest {
    fn caller(&self) -> Option<&proto::Caller> {
        self.caller.as_ref()
    }

    /// Creating a new namespace also needs [`Operation::CreateNamespace`]. The call itself checks
    /// that.
    fn operation(&self) -> Operation {
        Operation::UseNamespace
    }

    /// The namespace to create, not the caller's own namespace.
    fn namespace(&self) -> &str {
        self.namespace.as_ref().map_or("", |asked| &asked.name)
    }
}

impl Called for proto::ListNamespacesRequest {
    fn caller(&self) -> Option<&proto::Caller> {
        self.caller.as_ref()
    }

    fn operation(&self) -> Operation {
        if self.name.is_empty() {
            Operation::ListNamespaces
        } else {
            Operation::ShowNamespace
        }
    }

    /// The namespace to show, not the caller's own namespace.
    fn namespace(&self) -> &str {
        &self.name
    }
}

impl Called for proto::RemoveRequest {
    fn caller(&self) -> Option<&proto::Caller> {
        self.caller.as_ref()
    }

    fn operation(&self) -> Operation {
        use proto::remove_request::What;
        match self.what {
            Some(What::Everything(_)) => Operation::RemoveEverything,
            Some(What::Namespace(_)) => Operation::RemoveForced,
            _ if self.force => Operation::RemoveForced,
            _ => Operation::Remove,
        }
    }
}

impl Called for proto::ReplicaTasksRequest {
    fn caller(&self) -> Option<&proto::Caller> {
        self.caller.as_ref()
    }

    fn operation(&self) -> Operation {
        if self.cancel {
            Operation::CancelTasks
        } else {
            Operation::ReplicaTasks
        }
    }

    fn about(&self) -> String {
        format!("{} tasks", self.ids.len())
    }
}

/// The connection to the leader, opened on first use.
#[derive(Debug, Default)]
pub(super) struct Passing {
    kept: Mutex<Option<(String, PoolClient<Channel>)>>,
    /// The TLS settings for a leader whose address asks for TLS.
    tls: Option<ClientTls>,
    /// Whether a leader without TLS gets no calls: the callers sent their tokens here encrypted.
    refuses_plain: bool,
}

impl Passing {
    /// Forwards calls with these TLS settings. If TLS is set up at all, no call is forwarded in the
    /// clear.
    pub(super) fn with_tls(tls: Tls) -> Self {
        Self {
            kept: Mutex::default(),
            refuses_plain: tls.server.is_some() || tls.client.is_some(),
            tls: tls.client,
        }
    }

    /// True when the client asks for forwarding and the call was not forwarded yet.
    pub(super) fn is_wanted<M: Called>(request: &Request<M>) -> bool {
        let asks = |caller: &proto::Caller| caller.forward;
        request.get_ref().caller().is_some_and(asks) && !request.metadata().contains_key(PASSED)
    }

    /// The client for the leader at `address`.
    pub(super) fn client(&self, address: &str) -> Result<PoolClient<Channel>, Refused> {
        let mut kept = self.kept.lock();
        if let Some((known, client)) = &*kept
            && known == address
        {
            return Ok(client.clone());
        }
        let bad = |why: String| {
            let why = format!("the leader's address {address:?}: {why}");
            refused(Code::Unreachable, why)
        };
        if self.refuses_plain && !address.starts_with(TLS_SCHEME) {
            return Err(bad(PLAIN_REFUSED.to_owned()));
        }
        let way =
            GrpcWay::to(address, self.tls.as_ref()).map_err(|error| bad(error.to_string()))?;
        let channel = way
            .with(|endpoint| {
                endpoint
                    .connect_timeout(CONNECT)
                    .tcp_nodelay(true)
                    .http2_keep_alive_interval(PING)
                    .keep_alive_timeout(PING)
            })
            .lazy();
        let client = PoolClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        *kept = Some((address.to_owned(), client.clone()));
        Ok(client)
    }

    /// The request to forward to the leader, with the caller's remaining time.
    pub(super) fn readdress<M>(request: Request<M>) -> Request<M> {
        let (from, _, message) = request.into_parts();
        let mut metadata = MetadataMap::new();
        metadata.insert(PASSED, MetadataValue::from_static("1"));
        // Forward the caller's own token, never a token of this master. The leader then judges the
        // caller as in a direct call.
        pass_on(&from, &mut metadata);
        if let Some(timeout) = from.get(TIMEOUT) {
            metadata.insert(AsciiMetadataKey::from_static(TIMEOUT), timeout.clone());
        }
        Request::from_parts(metadata, tonic::Extensions::new(), message)
    }

    /// The status of a forwarded call. The status distinguishes an unreachable leader from a
    /// leader's refusal.
    pub(super) fn outcome(status: Status) -> Status {
        if status.metadata().contains_key(proto::CODE_METADATA) {
            return status;
        }
        Status::from(refused(
            Code::Unreachable,
            format!("the leader cannot be reached from this standby: {status}"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The leader judges the caller, so it must get the caller's token and no other.
    #[test]
    fn a_forwarded_call_carries_its_callers_token_its_time_and_nothing_else() {
        let mut request = Request::new(proto::ExistRequest::default());
        let metadata = request.metadata_mut();
        for (name, value) in [
            ("authorization", "Bearer a.b.c"),
            (TIMEOUT, "500m"),
            ("x-other", "1"),
        ] {
            metadata.insert(name, value.parse().expect("a value"));
        }
        let passed = Passing::readdress(request);
        let get = |name: &str| passed.metadata().get(name)?.to_str().ok();
        assert_eq!(get("authorization"), Some("Bearer a.b.c"));
        assert_eq!(get(TIMEOUT), Some("500m"));
        assert_eq!(passed.metadata().len(), 3);
        assert!(
            !format!("{:?}", passed.metadata()).contains("a.b.c"),
            "it can be logged"
        );
    }
}
