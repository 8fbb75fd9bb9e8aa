//! The gRPC service that clients and operators call.

use super::calls::Calls;
use crate::pool::Pool;
use kvpool_proto as proto;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// The `Pool` gRPC service over a pool.
#[derive(Clone, Debug)]
pub struct PoolService {
    calls: Calls,
}

impl PoolService {
    /// The service of `pool`.
    pub fn new(pool: Arc<Pool>) -> Self {
        Self {
            calls: Calls::new(pool),
        }
    }
}

#[tonic::async_trait]
impl proto::pool_server::Pool for PoolService {
    async fn hello(
        &self,
        request: Request<proto::HelloRequest>,
    ) -> Result<Response<proto::HelloReply>, Status> {
        Ok(Response::new(self.calls.hello(request.into_inner())?))
    }

    async fn create_namespace(
        &self,
        request: Request<proto::CreateNamespaceRequest>,
    ) -> Result<Response<proto::CreateNamespaceReply>, Status> {
        Ok(Response::new(
            self.calls.create_namespace(request.into_inner()).await?,
        ))
    }

    async fn reserve(
        &self,
        request: Request<proto::ReserveRequest>,
    ) -> Result<Response<proto::ReserveReply>, Status> {
        self.calls.settled().await;
        Ok(Response::new(
            self.calls.reserve(request.into_inner()).await?,
        ))
    }

    async fn commit(
        &self,
        request: Request<proto::CommitRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        Ok(Response::new(
            self.calls.commit(request.into_inner()).await?,
        ))
    }

    async fn revoke(
        &self,
        request: Request<proto::RevokeRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        Ok(Response::new(self.calls.revoke(request.into_inner())?))
    }

    async fn lookup(
        &self,
        request: Request<proto::LookupRequest>,
    ) -> Result<Response<proto::LookupReply>, Status> {
        self.calls.settled().await;
        Ok(Response::new(self.calls.lookup(request.into_inner())?))
    }

    async fn exist(
        &self,
        request: Request<proto::ExistRequest>,
    ) -> Result<Response<proto::ExistReply>, Status> {
        self.calls.settled().await;
        Ok(Response::new(self.calls.exist(request.into_inner())?))
    }

    async fn match_prefix(
        &self,
        request: Request<proto::MatchPrefixRequest>,
    ) -> Result<Response<proto::MatchPrefixReply>, Status> {
        self.calls.settled().await;
        Ok(Response::new(
            self.calls.match_prefix(request.into_inner())?,
        ))
    }

    async fn renew(
        &self,
        request: Request<proto::RenewRequest>,
    ) -> Result<Response<proto::RenewReply>, Status> {
        Ok(Response::new(self.calls.renew(request.into_inner())?))
    }

    async fn release(
        &self,
        request: Request<proto::ReleaseRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        Ok(Response::new(self.calls.release(request.into_inner())?))
    }

    async fn remove(
        &self,
        request: Request<proto::RemoveRequest>,
    ) -> Result<Response<proto::RemoveReply>, Status> {
        Ok(Response::new(
            self.calls.remove(request.into_inner()).await?,
        ))
    }

    async fn list(
        &self,
        request: Request<proto::ListRequest>,
    ) -> Result<Response<proto::ListReply>, Status> {
        Ok(Response::new(self.calls.list(request.into_inner())?))
    }

    async fn describe(
        &self,
        request: Request<proto::DescribeRequest>,
    ) -> Result<Response<proto::DescribeReply>, Status> {
        Ok(Response::new(self.calls.describe(request.into_inner())?))
    }

    async fn report_replicas(
        &self,
        request: Request<proto::ReportReplicasRequest>,
    ) -> Result<Response<proto::Outcomes>, Status> {
        Ok(Response::new(
            self.calls.report_replicas(request.into_inner())?,
        ))
    }

    async fn stats(
        &self,
        request: Request<proto::StatsRequest>,
    ) -> Result<Response<proto::StatsReply>, Status> {
        Ok(Response::new(self.calls.stats(request.into_inner())?))
    }

    async fn cluster(
        &self,
        _: Request<proto::ClusterRequest>,
    ) -> Result<Response<proto::ClusterReply>, Status> {
        Ok(Response::new(self.calls.cluster()))
    }
}
