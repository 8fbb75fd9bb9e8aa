//! One master of a pool: the real service behind a layer that counts calls and injects the faults of a script.

use super::Cluster;
use super::frames;
use futures::future::BoxFuture;
use kvpool_master::leadership::{Report, Role, Seat};
use kvpool_master::metrics::Metrics;
use kvpool_master::overview::Watch;
use kvpool_master::pool::{self, Described, ReserveOptions};
use kvpool_master::service::PoolService;
use kvpool_master::store::LogSeq;
use kvpool_proto::pool_server::{Pool, PoolServer};
use kvpool_proto::*;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Epoch, Key, Length};
use parking_lot::Mutex;
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

/// The fault of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The master carries out the call after this time.
    Late(Duration),
    /// The master carries out the call, and the answer is lost.
    AnswerLost,
    /// The master carries out the call, and never answers.
    AnswerHangs,
    /// The master has a version that does not know the call.
    Unknown,
    /// The master refuses the caller's token.
    TokenRefused,
}

type Change = Box<dyn FnMut(&mut dyn Any) + Send>;

#[derive(Default)]
struct Script {
    calls: HashMap<&'static str, usize>,
    next: HashMap<&'static str, VecDeque<Option<Fault>>>,
    always: HashMap<&'static str, Fault>,
    requests: HashMap<&'static str, Change>,
    answers: HashMap<&'static str, Change>,
}

/// One master of a pool in a test.
pub(crate) struct Master {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) seat: Arc<Seat>,
    service: PoolService,
    own_url: String,
    /// The master's address, as clients learn it.
    url: Mutex<String>,
    script: Mutex<Script>,
}

impl Master {
    /// A standby that knows of no leader, served in gRPC and in frames on a port of its own.
    pub(crate) fn start(cluster: &Arc<Cluster>) -> Arc<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let own_url = format!("http://{}", listener.local_addr().unwrap());
        let metrics = Arc::new(Metrics::new().unwrap());
        let seat = Seat::new(cluster.setup.config.clone(), metrics, cluster.clock());
        let seat = Arc::new(seat);
        let watch = Arc::new(Watch::new(Arc::clone(&seat)));
        let master = Arc::new(Self {
            cluster: Arc::clone(cluster),
            service: PoolService::new(Arc::clone(&seat), watch),
            seat,
            url: Mutex::new(own_url.clone()),
            own_url,
            script: Mutex::default(),
        });
        master.stand_by("", Epoch(0));
        master.name_members(&[]);
        serve(
            Arc::clone(&master),
            TcpListener::from_std(listener).unwrap(),
        );
        master
    }

    /// This master's address, as clients learn it.
    pub(crate) fn url(&self) -> String {
        self.url.lock().clone()
    }

    /// The address on which the master listens.
    pub(crate) fn own_url(&self) -> &str {
        &self.own_url
    }

    pub(super) fn set_url(&self, url: &str) {
        url.clone_into(&mut self.url.lock());
    }

    /// Begins a new term, in which this master leads.
    pub(crate) async fn lead(&self) {
        let pool = self.cluster.begin_term().await;
        self.seat.lead(pool, &self.url());
    }

    /// Ends this master's term, if it leads, and makes it a standby. Names `leader` to clients; empty for no
    /// leader.
    pub(crate) async fn resign_to(&self, leader: &str) {
        if let Some(pool) = self.seat.step_down("") {
            pool.retire().await;
        }
        self.stand_by(leader, self.cluster.epoch().await);
    }

    fn stand_by(&self, leader: &str, epoch: Epoch) {
        self.seat.follow(LogSeq(0));
        self.seat.learn(leader, epoch);
    }

    /// Sets the masters that this one names to clients.
    pub(crate) fn name_members(&self, addresses: &[String]) {
        let members = addresses.iter().map(|address| MasterMember {
            address: address.clone(),
            ..MasterMember::default()
        });
        self.seat.set_report(Report {
            members: members.collect(),
            store: ClusterReply {
                cluster_id: self.cluster.setup.id.to_bytes().to_vec().into(),
                ..ClusterReply::default()
            },
            ..Report::default()
        });
    }

    /// The pool of this leader.
    pub(crate) fn pool(&self) -> Arc<pool::Pool> {
        self.seat.pool().unwrap()
    }

    /// The pool's description of a block.
    pub(crate) fn described(&self, name: &str) -> Option<Described> {
        let keys = [Key::parse(name).unwrap()];
        self.pool()
            .describe(NamespaceId(0), &[keys[0].as_ref()][..])
            .remove(0)
    }

    /// The names of the nodes that hold a block's replicas.
    pub(crate) fn replicas(&self, name: &str) -> Vec<String> {
        let block = self.described(name).unwrap();
        block.replicas.into_iter().map(|r| r.node.0).collect()
    }

    /// Lets another client begin to write `name` and never end.
    pub(crate) async fn hold(&self, name: &str) {
        let key = Key::parse(name).unwrap();
        let (keys, lengths) = ([key.as_ref()], [Length(1)]);
        let pool = self.pool();
        let options = ReserveOptions::default();
        let granted = pool.reserve(NamespaceId(0), &keys[..], &lengths, &options);
        granted.await.remove(0).unwrap();
    }

    /// How often a method was called here. "refused" counts calls that this master refused as a standby.
    /// "passed on" counts calls that it forwarded to the leader.
    pub(crate) fn calls(&self, method: &'static str) -> usize {
        self.script.lock().calls.get(method).copied().unwrap_or(0)
    }

    /// Sets the faults of the next calls of a method.
    pub(crate) fn next<F: Into<Option<Fault>>>(
        &self,
        method: &'static str,
        faults: impl IntoIterator<Item = F>,
    ) {
        let faults = faults.into_iter().map(Into::into);
        let mut script = self.script.lock();
        script.next.entry(method).or_default().extend(faults);
    }

    /// Drops the faults of the next calls of a method.
    pub(crate) fn forget_next(&self, method: &'static str) {
        self.script.lock().next.remove(method);
    }

    /// Sets the fault of every call of a method; `None` for no fault.
    pub(crate) fn always(&self, method: &'static str, fault: impl Into<Option<Fault>>) {
        let always = &mut self.script.lock().always;
        match fault.into() {
            Some(fault) => always.insert(method, fault),
            None => always.remove(method),
        };
    }

    /// Passes each request of a method to `change` before the master gets it.
    pub(crate) fn on_request<M: 'static>(
        &self,
        method: &'static str,
        mut change: impl FnMut(&mut M) + Send + 'static,
    ) {
        let change: Change = Box::new(move |message| change(message.downcast_mut().unwrap()));
        self.script.lock().requests.insert(method, change);
    }

    /// Passes each answer of a method to `change` before the client gets it.
    pub(crate) fn on_answer<M: 'static>(
        &self,
        method: &'static str,
        mut change: impl FnMut(&mut M) + Send + 'static,
    ) {
        let change: Change = Box::new(move |message| change(message.downcast_mut().unwrap()));
        self.script.lock().answers.insert(method, change);
    }

    fn count(&self, method: &'static str) {
        *self.script.lock().calls.entry(method).or_default() += 1;
    }

    /// Counts a call, changes its request, and returns its fault.
    fn meet<M: 'static>(&self, method: &'static str, request: &mut M) -> Option<Fault> {
        let mut script = self.script.lock();
        *script.calls.entry(method).or_default() += 1;
        if let Some(change) = script.requests.get_mut(method) {
            change(request);
        }
        let next = script.next.get_mut(method).and_then(VecDeque::pop_front);
        next.unwrap_or_else(|| script.always.get(method).copied())
    }

    async fn through<'s, M: 'static, R: 'static>(
        &'s self,
        method: &'static str,
        mut request: Request<M>,
        call: impl FnOnce(Request<M>) -> BoxFuture<'s, Result<Response<R>, Status>>,
    ) -> Result<Response<R>, Status> {
        let fault = self.meet(method, request.get_mut());
        match fault {
            Some(Fault::Late(pause)) => tokio::time::sleep(pause).await,
            Some(Fault::Unknown) => return Err(Status::unimplemented("no such call")),
            Some(Fault::TokenRefused) => return Err(Status::unauthenticated("an unknown token")),
            Some(Fault::AnswerLost | Fault::AnswerHangs) | None => {}
        }
        let mut answer = call(request).await;
        if method != "cluster" && matches!(self.seat.role(), Role::Standby | Role::Starting) {
            let passed_on = answer.is_ok();
            self.count(if passed_on { "passed on" } else { "refused" });
        }
        if let (Ok(answer), Some(change)) =
            (&mut answer, self.script.lock().answers.get_mut(method))
        {
            change(answer.get_mut());
        }
        match fault {
            Some(Fault::AnswerLost) => Err(Status::unavailable("the answer is lost")),
            Some(Fault::AnswerHangs) => std::future::pending().await,
            _ => answer,
        }
    }
}

/// The calls of clients, each with the faults of the script.
macro_rules! calls {
    ($($method:ident($request:ty) -> $reply:ty;)*) => {
        #[tonic::async_trait]
        impl Pool for Master {
            $(async fn $method(
                &self,
                request: Request<$request>,
            ) -> Result<Response<$reply>, Status> {
                let call = |request| self.service.$method(request);
                self.through(stringify!($method), request, call).await
            })*
        }
    };
}

calls! {
    hello(HelloRequest) -> HelloReply;
    create_namespace(CreateNamespaceRequest) -> CreateNamespaceReply;
    reserve(ReserveRequest) -> ReserveReply;
    commit(CommitRequest) -> Outcomes;
    revoke(RevokeRequest) -> Outcomes;
    lookup(LookupRequest) -> LookupReply;
    exist(ExistRequest) -> ExistReply;
    match_prefix(MatchPrefixRequest) -> MatchPrefixReply;
    renew(RenewRequest) -> RenewReply;
    release(ReleaseRequest) -> Outcomes;
    remove(RemoveRequest) -> RemoveReply;
    list(ListRequest) -> ListReply;
    describe(DescribeRequest) -> DescribeReply;
    report_replicas(ReportReplicasRequest) -> Outcomes;
    stats(StatsRequest) -> StatsReply;
    change_namespace(ChangeNamespaceRequest) -> NamespaceReply;
    delete_namespace(DeleteNamespaceRequest) -> DeleteNamespaceReply;
    list_namespaces(ListNamespacesRequest) -> ListNamespacesReply;
    detach_medium(DetachMediumRequest) -> DetachMediumReply;
    change_replicas(ChangeReplicasRequest) -> ReplicaTask;
    replica_tasks(ReplicaTasksRequest) -> ReplicaTasksReply;
    drain_node(DrainNodeRequest) -> ReplicaTask;
    undrain_node(UndrainNodeRequest) -> UndrainNodeReply;
    cluster(ClusterRequest) -> ClusterReply;
}

/// Serves gRPC and frames on one port, as a kvmaster does.
fn serve(master: Arc<Master>, listener: TcpListener) {
    let (grpc, mut connections) = mpsc::channel::<std::io::Result<_>>(16);
    let incoming = futures::stream::poll_fn(move |context| connections.poll_recv(context));
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(PoolServer::from_arc(Arc::clone(&master)))
            .serve_with_incoming(incoming),
    );
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (master, grpc) = (Arc::clone(&master), grpc.clone());
            tokio::spawn(async move {
                let mut first = [0; 4];
                if stream.peek(&mut first).await.is_err() {
                    return;
                }
                if &first == b"KVP1" {
                    // It ends when the client ends it.
                    let _ = frames::serve(master, stream).await;
                } else {
                    let _ = grpc.send(Ok(stream)).await;
                }
            });
        }
    });
}
