//! Forwarding of calls to the leader, for clients that cannot reach it.

use super::refused::{Refused, refused};
use kvpool_proto as proto;
use kvpool_proto::pool_client::PoolClient;
use kvpool_tls::ClientTls;
use kvpool_tls::grpc::GrpcWay;
use kvpool_types::Code;
use parking_lot::Mutex;
use proto::MAX_MESSAGE_BYTES;
use std::time::Duration;
use tonic::metadata::{AsciiMetadataKey, MetadataMap, MetadataValue};
use tonic::transport::Channel;
use tonic::{Request, Status};
use tracing::Span;

/// The most time for connecting to the leader.
const CONNECT: Duration = Duration::from_secs(1);
/// A leader that does not answer a ping for this long is unreachable from here too.
const PING: Duration = Duration::from_secs(1);
/// The mark of a forwarded call, which is never forwarded again.
const PASSED: &str = "kvpool-passed";
/// The caller's remaining time.
const TIMEOUT: &str = "grpc-timeout";

/// A request that names its caller.
pub(super) trait Called: Send + 'static {
    fn caller(&self) -> Option<&proto::Caller>;
}

/// The span of a call that is answered or passed on here, below the caller's span.
pub(super) fn call_span(name: &'static str, request: &impl Called) -> Span {
    let context = request.caller().map(|caller| &*caller.trace);
    kvpool_trace::below(context.unwrap_or_default(), || {
        kvpool_trace::span!("master call", otel.name = name, otel.kind = "server")
    })
}

macro_rules! called {
    ($($request:ident)*) => {
        $(impl Called for proto::$request {
            fn caller(&self) -> Option<&proto::Caller> {
                self.caller.as_ref()
            }
        })*
    };
}

called! {
    HelloRequest CreateNamespaceRequest ReserveRequest CommitRequest RevokeRequest LookupRequest
    ExistRequest MatchPrefixRequest RenewRequest ReleaseRequest RemoveRequest ListRequest
    DescribeRequest ReportReplicasRequest StatsRequest DetachMediumRequest
    ChangeReplicasRequest ReplicaTasksRequest DrainNodeRequest
    ChangeNamespaceRequest DeleteNamespaceRequest ListNamespacesRequest
}

/// The connection to the leader, opened on first use.
#[derive(Debug, Default)]
pub(super) struct Passing {
    kept: Mutex<Option<(String, PoolClient<Channel>)>>,
    /// For a leader whose address asks for TLS.
    tls: Option<ClientTls>,
}

impl Passing {
    pub(super) fn with_tls(tls: Option<ClientTls>) -> Self {
        Self {
            kept: Mutex::default(),
            tls,
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
        let way = GrpcWay::to(address, self.tls.as_ref()).map_err(|error| {
            refused(
                Code::Unreachable,
                format!("the leader's address {address:?}: {error}"),
            )
        })?;
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

    /// The same request for the leader, with the remaining time.
    pub(super) fn readdress<M>(request: Request<M>) -> Request<M> {
        let (from, _, message) = request.into_parts();
        let mut metadata = MetadataMap::new();
        metadata.insert(PASSED, MetadataValue::from_static("1"));
        if let Some(timeout) = from.get(TIMEOUT) {
            metadata.insert(AsciiMetadataKey::from_static(TIMEOUT), timeout.clone());
        }
        Request::from_parts(metadata, tonic::Extensions::new(), message)
    }

    /// The status of a forwarded call. It tells an unreachable leader from a leader's refusal.
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
