//! The gRPC service for clients and operators.

use super::calls::{Calls, calls_at};
use super::framed::Origin;
use super::passing::{Called, Passing, call_span};
use super::refused::{Refused, refused};
use super::rights::{Allowed, Operation, bearer_of};
use crate::leadership::Seat;
use crate::overview::Watch;
use crate::wait_budget::WaitPermit;
use kvpool_daemon::tls::Tls;
use kvpool_proto as proto;
use kvpool_types::Code;
use prost::Message;
use proto::pool_client::PoolClient;
use std::sync::Arc;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use tracing::Instrument;

/// The `Pool` gRPC service of a master. A leader answers. Another master forwards the calls that
/// ask for it.
#[derive(Debug)]
pub struct PoolService {
    seat: Arc<Seat>,
    watch: Arc<Watch>,
    passing: Passing,
    /// Whether this master forwards calls to the leader.
    passes: bool,
}

impl PoolService {
    /// The service of the master at `seat`.
    pub fn new(seat: Arc<Seat>, watch: Arc<Watch>) -> Self {
        Self {
            seat,
            watch,
            passing: Passing::default(),
            passes: true,
        }
    }

    /// Sets the TLS settings. This service uses them to call a leader whose address asks for TLS.
    #[must_use]
    pub fn calling_with(self, tls: Tls) -> Self {
        Self {
            passing: Passing::with_tls(tls),
            ..self
        }
    }

    /// Forwards no call: a simulated network has no connection between masters.
    #[must_use]
    pub fn without_passing(self) -> Self {
        Self {
            passes: false,
            ..self
        }
    }

    /// The budget for a call that may have to wait.
    fn permit(&self, message: &impl Message) -> Result<WaitPermit, Refused> {
        let permit = self.seat.wait_budget.for_other(message.encoded_len());
        permit.ok_or_else(too_many_wait)
    }

    async fn answer<M: Called, R, Here, There>(
        &self,
        name: &'static str,
        request: Request<M>,
        here: impl FnOnce(Calls, Allowed<M>) -> Here,
        there: impl FnOnce(PoolClient<Channel>, Request<M>) -> There,
    ) -> Result<Response<R>, Status>
    where
        Here: Future<Output = Result<R, Refused>>,
        There: Future<Output = Result<Response<R>, Status>>,
    {
        let (metadata, extensions, message) = request.into_parts();
        let allowed = bearer_of(&self.seat.guard, &metadata)
            .allow(message)
            .inspect_err(|refused| {
                if refused.code != Code::Forbidden {
                    Origin::refused_of(&extensions);
                }
            })?;
        let operation = allowed.operation();
        let audited = operation.is_audited();
        let line = audited.then(|| (allowed.who().clone(), allowed.about()));
        let note = |outcome: Result<(), &Refused>| {
            if let Some((who, about)) = &line {
                who.note(operation, about, outcome);
            }
        };
        Origin::settle_of(&extensions).inspect_err(|refused| note(Err(refused)))?;
        let refused = match calls_at(&self.seat, allowed.caller()) {
            Ok(calls) => {
                let begun = Instant::now();
                let noting = calls.clone();
                let span = call_span(name, &*allowed);
                let reply = here(calls, allowed).instrument(span).await;
                noting.took(name, begun.elapsed());
                note(reply.as_ref().map(|_| ()));
                return Ok(Response::new(reply?));
            }
            Err(refused) => refused,
        };
        let leader = self.seat.known().leader;
        let (message, _) = allowed.open();
        let request = Request::from_parts(metadata, extensions, message);
        if leader.is_empty() || !self.passes || !Passing::is_wanted(&request) {
            return Err(refused.into());
        }
        let leader = self.passing.client(&leader)?;
        let span = call_span("forward", request.get_ref());
        there(leader, Passing::readdress(request))
            .instrument(span)
            .await
            .map_err(Passing::outcome)
    }
}

fn too_many_wait() -> Refused {
    refused(
        Code::TooManyHeld,
        "waiting calls hold the most memory allowed (max_waiting)",
    )
}

/// Answers a call here, or forwards it to the leader.
macro_rules! answer {
    ($self:ident, $request:ident, $call:ident, |$calls:ident, $message:ident| $here:expr) => {
        $self
            .answer(
                stringify!($call),
                $request,
                async move |$calls, $message| $here,
                async move |mut leader, request| leader.$call(request).await,
            )
            .await
    };
}

#[tonic::async_trait]
impl proto::pool_server::Pool for PoolService {
    async fn hello(
        &self,
        request: Request<proto::HelloRequest>,
    ) -> Result<Response<proto::HelloReply>, Status> {
        answer!(self, request, hello, |calls, message| calls.hello(message))
    }

    async fn create_namespace(
        &self,
        request: Request<proto::CreateNamespaceRequest>,
    ) -> Result<Response<proto::CreateNamespaceReply>, Status> {
        answer!(self, request, create_namespace, |calls, message| {
            let _permit = self.permit(&*message)?;
            calls.create_namespace(message).await
        })
    }

    async fn change_namespace(
        &self,
        request: Request<proto::ChangeNamespaceRequest>,
    ) -> Result<Response<proto::NamespaceReply>, Status> {
        answer!(self, request, change_namespace, |calls, message| {
            let _permit = self.permit(&*message)?;
            calls.change_namespace(message).await
        })
    }

    async fn delete_namespace(
        &self,
        request: Request<proto::DeleteNamespaceRequest>,
    ) -> Result<Response<proto::DeleteNamespaceReply>, Status> {
        answer!(self, request, delete_namespace, |calls, message| {
            let _permit = self.permit(&*message)?;
            calls.delete_namespace(message).await
        })
    }

    async fn list_namespaces(
        &self,
        request: Request<proto::ListNamespacesRequest>,
    ) -> Result<Response<proto::ListNamespacesReply>, Status> {
        answer!(self, request, list_namespaces, |calls, message| calls
            .list_namespaces(message))
    }

    async fn reserve(
        &self,
        request: Request<proto::ReserveRequest>,
    ) -> Result<Response<proto::ReserveReply>, Status> {
        answer!(self, request, reserve, |calls, message| {
            let _permit = self.permit(&*message)?;
            calls.nodes_returned().await;
            calls.reserve(message).await
        })
    }

    async fn commit(
        &self,
        request: Request<proto::CommitRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        answer!(self, request, commit, |calls, message| {
            let permit = self.seat.wait_budget.for_commit(message.encoded_len());
            let _permit = permit.ok_or_else(too_many_wait)?;
            calls.commit(message).await
        })
    }

    async fn revoke(
        &self,
        request: Request<proto::RevokeRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        answer!(self, request, revoke, |calls, message| calls
            .revoke(message))
    }

    async fn lookup(
        &self,
        request: Request<proto::LookupRequest>,
    ) -> Result<Response<proto::LookupReply>, Status> {
        answer!(self, request, lookup, |calls, message| {
            calls.nodes_returned().await;
            calls.lookup_restored(message).await
        })
    }

    async fn exist(
        &self,
        request: Request<proto::ExistRequest>,
    ) -> Result<Response<proto::ExistReply>, Status> {
        answer!(self, request, exist, |calls, message| {
            calls.nodes_returned().await;
            calls.exist(message)
        })
    }

    async fn match_prefix(
        &self,
        request: Request<proto::MatchPrefixRequest>,
    ) -> Result<Response<proto::MatchPrefixReply>, Status> {
        answer!(self, request, match_prefix, |calls, message| {
            calls.nodes_returned().await;
            calls.match_prefix(message)
        })
    }

    async fn renew(
        &self,
        request: Request<proto::RenewRequest>,
    ) -> Result<Response<proto::RenewReply>, Status> {
        answer!(self, request, renew, |calls, message| calls.renew(message))
    }

    async fn release(
        &self,
        request: Request<proto::ReleaseRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        answer!(self, request, release, |calls, message| calls
            .release(message))
    }

    async fn remove(
        &self,
        request: Request<proto::RemoveRequest>,
    ) -> Result<Response<proto::RemoveReply>, Status> {
        answer!(self, request, remove, |calls, message| {
            let _permit = self.permit(&*message)?;
            calls.remove(message).await
        })
    }

    async fn list(
        &self,
        request: Request<proto::ListRequest>,
    ) -> Result<Response<proto::ListReply>, Status> {
        answer!(self, request, list, |calls, message| calls
            .list(message)
            .await)
    }

    async fn describe(
        &self,
        request: Request<proto::DescribeRequest>,
    ) -> Result<Response<proto::DescribeReply>, Status> {
        answer!(self, request, describe, |calls, message| calls
            .describe(message))
    }

    async fn report_replicas(
        &self,
        request: Request<proto::ReportReplicasRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        answer!(self, request, report_replicas, |calls, message| calls
            .report_replicas(message))
    }

    async fn stats(
        &self,
        request: Request<proto::StatsRequest>,
    ) -> Result<Response<proto::StatsReply>, Status> {
        answer!(self, request, stats, |calls, message| calls
            .stats(message, self.seat.problems()))
    }

    async fn detach_medium(
        &self,
        request: Request<proto::DetachMediumRequest>,
    ) -> Result<Response<proto::DetachMediumReply>, Status> {
        answer!(self, request, detach_medium, |calls, message| calls
            .detach_medium(message)
            .await)
    }

    async fn change_replicas(
        &self,
        request: Request<proto::ChangeReplicasRequest>,
    ) -> Result<Response<proto::ReplicaTask>, Status> {
        answer!(self, request, change_replicas, |calls, message| {
            let _permit = self.permit(&*message)?;
            calls.nodes_returned().await;
            calls.change_replicas(message).await
        })
    }

    async fn replica_tasks(
        &self,
        request: Request<proto::ReplicaTasksRequest>,
    ) -> Result<Response<proto::ReplicaTasksReply>, Status> {
        answer!(self, request, replica_tasks, |calls, message| calls
            .replica_tasks(message))
    }

    async fn drain_node(
        &self,
        request: Request<proto::DrainNodeRequest>,
    ) -> Result<Response<proto::ReplicaTask>, Status> {
        answer!(self, request, drain_node, |calls, message| {
            calls.nodes_returned().await;
            calls.drain_node(message).await
        })
    }

    async fn undrain_node(
        &self,
        request: Request<proto::UndrainNodeRequest>,
    ) -> Result<Response<proto::UndrainNodeReply>, Status> {
        answer!(self, request, undrain_node, |calls, message| {
            calls.nodes_returned().await;
            calls.undrain_node(message).await
        })
    }

    async fn cluster(
        &self,
        request: Request<proto::ClusterRequest>,
    ) -> Result<Response<proto::ClusterReply>, Status> {
        let (metadata, extensions, message) = request.into_parts();
        let allowed = bearer_of(&self.seat.guard, &metadata).allow(message)?;
        Origin::settle_of(&extensions)?;
        let mut told = self.seat.describe();
        if allowed.overview {
            allowed.who().may(Operation::WatchPool, "")?;
            told.overview = self.watch.json(0).into();
        }
        Ok(Response::new(told))
    }
}
