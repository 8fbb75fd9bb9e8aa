//! The requests of the pool service, under one trait, so that one loop makes every call.

use futures::future::BoxFuture;
use kvpool_proto::pool_client::PoolClient;
use kvpool_proto::{
    Caller, ChangeNamespaceRequest, ChangeReplicasRequest, ClusterReply, ClusterRequest,
    CommitRequest, CreateNamespaceReply, CreateNamespaceRequest, DeleteNamespaceReply,
    DeleteNamespaceRequest, DescribeReply, DescribeRequest, DetachMediumReply, DetachMediumRequest,
    DrainNodeRequest, ExistReply, ExistRequest, HelloReply, HelloRequest, ListNamespacesReply,
    ListNamespacesRequest, ListReply, ListRequest, LookupReply, LookupRequest, MIN_VERSION,
    MatchPrefixReply, MatchPrefixRequest, NamespaceReply, Outcomes, ReleaseRequest, RemoveReply,
    RemoveRequest, RenewReply, RenewRequest, ReplicaTask, ReplicaTasksReply, ReplicaTasksRequest,
    ReportReplicasRequest, ReserveReply, ReserveRequest, RevokeRequest, StatsReply, StatsRequest,
    UndrainNodeReply, UndrainNodeRequest, VERSION,
};
use kvpool_types::wire::features::Features;
use kvpool_types::wire::frame::Op;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// A request of the pool service.
pub(crate) trait Message: prost::Message + Clone + 'static {
    /// The reply to this request.
    type Reply: prost::Message + Default + 'static;
    /// The method's name, for errors.
    const NAME: &'static str;
    /// The frame operation of the request; `None` if it goes over gRPC only.
    const OP: Option<Op>;
    /// Whether the sender itself adopts the pool's limits from the reply.
    const SETTLES: bool = false;
    /// Sets the caller's identity.
    fn set_caller(&mut self, caller: Caller);
    /// The epoch of the master that gave `reply`.
    fn epoch_of(reply: &Self::Reply) -> u64;
    /// Sends the request over gRPC.
    fn send(
        pool: PoolClient<Channel>,
        request: Request<Self>,
    ) -> BoxFuture<'static, Result<Response<Self::Reply>, Status>>;
}

macro_rules! messages {
    ($($request:ident => $reply:ident, $method:ident, $name:literal, $op:expr;)*) => {$(
        impl Message for $request {
            type Reply = $reply;
            const NAME: &'static str = $name;
            const OP: Option<Op> = $op;

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
    CreateNamespaceRequest => CreateNamespaceReply, create_namespace, "CreateNamespace", None;
    ReserveRequest => ReserveReply, reserve, "Reserve", Some(Op::Reserve);
    CommitRequest => Outcomes, commit, "Commit", Some(Op::Commit);
    RevokeRequest => Outcomes, revoke, "Revoke", None;
    LookupRequest => LookupReply, lookup, "Lookup", Some(Op::Lookup);
    ExistRequest => ExistReply, exist, "Exist", Some(Op::Exist);
    MatchPrefixRequest => MatchPrefixReply, match_prefix, "MatchPrefix", Some(Op::MatchPrefix);
    RenewRequest => RenewReply, renew, "Renew", Some(Op::Renew);
    ReleaseRequest => Outcomes, release, "Release", Some(Op::Release);
    RemoveRequest => RemoveReply, remove, "Remove", None;
    ListRequest => ListReply, list, "List", None;
    DescribeRequest => DescribeReply, describe, "Describe", None;
    ReportReplicasRequest => Outcomes, report_replicas, "ReportReplicas", None;
    StatsRequest => StatsReply, stats, "Stats", None;
    ChangeNamespaceRequest => NamespaceReply, change_namespace, "ChangeNamespace", None;
    DeleteNamespaceRequest => DeleteNamespaceReply, delete_namespace, "DeleteNamespace", None;
    ListNamespacesRequest => ListNamespacesReply, list_namespaces, "ListNamespaces", None;
    DetachMediumRequest => DetachMediumReply, detach_medium, "DetachMedium", None;
    ChangeReplicasRequest => ReplicaTask, change_replicas, "ChangeReplicas", None;
    ReplicaTasksRequest => ReplicaTasksReply, replica_tasks, "ReplicaTasks", None;
    DrainNodeRequest => ReplicaTask, drain_node, "DrainNode", None;
    UndrainNodeRequest => UndrainNodeReply, undrain_node, "UndrainNode", None;
    ClusterRequest => ClusterReply, cluster, "Cluster", None;
}

impl Message for HelloRequest {
    type Reply = HelloReply;
    const NAME: &'static str = "Hello";
    const OP: Option<Op> = None;
    const SETTLES: bool = true;

    fn set_caller(&mut self, caller: Caller) {
        self.min_version = MIN_VERSION;
        self.max_version = VERSION;
        self.features = Features::OURS.0;
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
