//! The requests of the pool service, under one trait, so that one loop makes every call.

use futures::future::BoxFuture;
use kvpool_proto::pool_client::PoolClient;
use kvpool_proto::{
    Caller, CommitRequest, CreateNamespaceReply, CreateNamespaceRequest, DescribeReply,
    DescribeRequest, ExistReply, ExistRequest, HelloReply, HelloRequest, ListReply, ListRequest,
    LookupReply, LookupRequest, MIN_VERSION, MatchPrefixReply, MatchPrefixRequest, Outcomes,
    ReleaseRequest, RemoveReply, RemoveRequest, RenewReply, RenewRequest, ReportReplicasRequest,
    ReserveReply, ReserveRequest, RevokeRequest, StatsReply, StatsRequest, VERSION,
};
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// A request of the pool service.
pub(crate) trait Message: Clone + Send + Sync + 'static {
    /// What answers it.
    type Reply: Send + 'static;
    /// The method's name, for errors.
    const NAME: &'static str;
    /// Says who calls.
    fn set_caller(&mut self, caller: Caller);
    /// The epoch of the master that gave `reply`.
    fn epoch_of(reply: &Self::Reply) -> u64;
    /// Sends it.
    fn send(
        pool: PoolClient<Channel>,
        request: Request<Self>,
    ) -> BoxFuture<'static, Result<Response<Self::Reply>, Status>>;
}

macro_rules! messages {
    ($($request:ident => $reply:ident, $method:ident, $name:literal;)*) => {$(
        impl Message for $request {
            type Reply = $reply;
            const NAME: &'static str = $name;

            fn set_caller(&mut self, caller: Caller) {
                self.caller = Some(caller);
            }

            fn epoch_of(reply: &$reply) -> u64 {
                reply.epoch
            }

            fn send(
                mut pool: PoolClient<Channel>,
                request: Request<Self>,
            ) -> BoxFuture<'static, Result<Response<$reply>, Status>> {
                Box::pin(async move { pool.$method(request).await })
            }
        }
    )*};
}

messages! {
    CreateNamespaceRequest => CreateNamespaceReply, create_namespace, "CreateNamespace";
    ReserveRequest => ReserveReply, reserve, "Reserve";
    CommitRequest => Outcomes, commit, "Commit";
    RevokeRequest => Outcomes, revoke, "Revoke";
    LookupRequest => LookupReply, lookup, "Lookup";
    ExistRequest => ExistReply, exist, "Exist";
    MatchPrefixRequest => MatchPrefixReply, match_prefix, "MatchPrefix";
    RenewRequest => RenewReply, renew, "Renew";
    ReleaseRequest => Outcomes, release, "Release";
    RemoveRequest => RemoveReply, remove, "Remove";
    ListRequest => ListReply, list, "List";
    DescribeRequest => DescribeReply, describe, "Describe";
    ReportReplicasRequest => Outcomes, report_replicas, "ReportReplicas";
    StatsRequest => StatsReply, stats, "Stats";
}

impl Message for HelloRequest {
    type Reply = HelloReply;
    const NAME: &'static str = "Hello";

    fn set_caller(&mut self, caller: Caller) {
        self.min_version = MIN_VERSION;
        self.max_version = VERSION;
        self.caller = Some(caller);
    }

    fn epoch_of(reply: &HelloReply) -> u64 {
        reply.epoch
    }

    fn send(
        mut pool: PoolClient<Channel>,
        request: Request<Self>,
    ) -> BoxFuture<'static, Result<Response<HelloReply>, Status>> {
        Box::pin(async move { pool.hello(request).await })
    }
}
