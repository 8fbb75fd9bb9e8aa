//! One call of each operation, over gRPC, in frames and over HTTP.

use super::callers::{Fixture, NAMESPACE};
use base64::Engine;
use kvpool_master::service::rights::Operation;
use kvpool_proto as proto;
use kvpool_types::wire::data::{Failure, Meta};
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op, VERSION};
use kvpool_types::{Code, Epoch};
use prost::Message;
use proto::nodes_client::NodesClient;
use proto::remove_request::What;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use tonic::Status;

/// The stable code of a failed call.
pub(crate) fn code_of(status: &Status) -> Code {
    let code = status.metadata().get(proto::CODE_METADATA);
    let code = code.unwrap_or_else(|| panic!("no code: {status:?}"));
    Code::from_wire(code.to_str().unwrap().parse().unwrap()).unwrap()
}

#[allow(
    clippy::needless_update,
    reason = "some requests have no further fields"
)]
pub(crate) async fn over_grpc(it: &Fixture, operation: Operation, token: &str) -> Result<(), Code> {
    let mut pool = it.client().await;
    let caller = Some(it.caller(NAMESPACE));
    macro_rules! call {
        ($method:ident, $message:ident { $($field:ident: $value:expr),* }) => {{
            let message = proto::$message { caller, $($field: $value,)* ..Default::default() };
            pool.$method(it.request(message, token)).await.map(drop)
        }};
    }
    let remove = |what, force| (Some(what), force);
    let outcome = match operation {
        Operation::Hello => call!(hello, HelloRequest { max_version: 2 }),
        Operation::UseNamespace | Operation::CreateNamespace => {
            let name = NAMESPACE.to_owned();
            if operation == Operation::UseNamespace {
                // The namespace must exist, or using it would create it.
                let root = it.token("root", 60);
                let made = pool
                    .create_namespace(it.request(creation(it, &name), &root))
                    .await;
                made.unwrap();
                let message = proto::CreateNamespaceRequest {
                    caller,
                    ..creation(it, &name)
                };
                pool.create_namespace(it.request(message, token))
                    .await
                    .map(drop)
            } else {
                return create_new(it, token).await;
            }
        }
        Operation::ChangeNamespace => call!(
            change_namespace,
            ChangeNamespaceRequest {
                name: "x".to_owned()
            }
        ),
        Operation::DeleteNamespace => call!(
            delete_namespace,
            DeleteNamespaceRequest {
                name: "x".to_owned()
            }
        ),
        Operation::ListNamespaces => call!(list_namespaces, ListNamespacesRequest {}),
        Operation::ShowNamespace => call!(
            list_namespaces,
            ListNamespacesRequest {
                name: NAMESPACE.to_owned()
            }
        ),
        Operation::Reserve => call!(reserve, ReserveRequest {}),
        Operation::Commit => call!(commit, CommitRequest {}),
        Operation::Revoke => call!(revoke, RevokeRequest {}),
        Operation::Lookup => call!(lookup, LookupRequest {}),
        Operation::Exist => call!(exist, ExistRequest {}),
        Operation::MatchPrefix => call!(match_prefix, MatchPrefixRequest {}),
        Operation::Renew => call!(renew, RenewRequest {}),
        Operation::Release => call!(release, ReleaseRequest {}),
        Operation::Remove | Operation::RemoveForced | Operation::RemoveEverything => {
            let (what, force) = match operation {
                Operation::Remove => remove(What::Pattern("x".to_owned()), false),
                Operation::RemoveForced => remove(What::Pattern("x".to_owned()), true),
                _ => remove(What::Everything(true), false),
            };
            call!(
                remove,
                RemoveRequest {
                    what: what,
                    force: force
                }
            )
        }
        Operation::List => call!(list, ListRequest {}),
        Operation::Describe => call!(describe, DescribeRequest {}),
        Operation::ReportReplicas => call!(report_replicas, ReportReplicasRequest {}),
        Operation::Stats => call!(stats, StatsRequest {}),
        Operation::DetachMedium => call!(
            detach_medium,
            DetachMediumRequest {
                medium_id: vec![9; 16].into()
            }
        ),
        Operation::ChangeReplicas => call!(change_replicas, ChangeReplicasRequest {}),
        Operation::ReplicaTasks => call!(replica_tasks, ReplicaTasksRequest {}),
        Operation::CancelTasks => call!(
            replica_tasks,
            ReplicaTasksRequest {
                cancel: true,
                ids: vec![1]
            }
        ),
        Operation::DrainNode => call!(
            drain_node,
            DrainNodeRequest {
                name: "x".to_owned()
            }
        ),
        Operation::UndrainNode => call!(
            undrain_node,
            UndrainNodeRequest {
                name: "x".to_owned()
            }
        ),
        Operation::Cluster => call!(cluster, ClusterRequest {}),
        Operation::WatchPool => call!(cluster, ClusterRequest { overview: true }),
        Operation::Session => {
            let mut nodes = NodesClient::connect(it.url()).await.unwrap();
            // A registration that is refused for another reason: it has no incarnation.
            let first = proto::NodeMessage {
                body: Some(proto::node_message::Body::Register(
                    proto::Register::default(),
                )),
            };
            let opened = nodes
                .session(it.request(tokio_stream::iter([first]), token))
                .await;
            opened.map(drop)
        }
    };
    outcome.map_err(|status| code_of(&status))
}

fn creation(it: &Fixture, name: &str) -> proto::CreateNamespaceRequest {
    proto::CreateNamespaceRequest {
        caller: Some(it.caller(NAMESPACE)),
        namespace: Some(proto::Namespace {
            name: name.to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// A namespace can be new only once, so its creation is tried in a pool of its own. There the token
/// is of another issuer, unless it is refused everywhere. So only the subject counts.
async fn create_new(it: &Fixture, token: &str) -> Result<(), Code> {
    let fresh = Fixture::start().await;
    let claims = kvpool_auth::peek(token);
    let subject = claims
        .as_ref()
        .and_then(|claims| claims.get("sub")?.as_str());
    let known = over_cluster(it, token).await;
    let token = match (known, subject) {
        (Err(code @ (Code::Unauthenticated | Code::TokenExpired)), _) => {
            // The token is refused for what it is: this pool did not issue it.
            fresh.stop().await;
            return Err(code);
        }
        (_, Some(subject)) => fresh.token(subject, 60),
        (_, None) => String::new(),
    };
    let mut pool = fresh.client().await;
    let created = pool
        .create_namespace(fresh.request(creation(&fresh, NAMESPACE), &token))
        .await;
    fresh.stop().await;
    created.map(drop).map_err(|status| code_of(&status))
}

async fn over_cluster(it: &Fixture, token: &str) -> Result<(), Code> {
    let mut pool = it.client().await;
    let asked = pool
        .cluster(it.request(proto::ClusterRequest::default(), token))
        .await;
    asked.map(drop).map_err(|status| code_of(&status))
}

/// A framed connection.
pub(crate) struct Framed {
    stream: TcpStream,
    caller: proto::Caller,
    request: u64,
}

impl Framed {
    pub(crate) fn open(it: &Fixture, token: &str) -> Result<Self, Code> {
        let stream = TcpStream::connect(it.server.grpc_address()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut connection = Self {
            stream,
            caller: it.caller(NAMESPACE),
            request: 0,
        };
        connection.greet(token)?;
        Ok(connection)
    }

    /// Sends a hello, on a new connection or on an open one.
    pub(crate) fn greet(&mut self, token: &str) -> Result<(), Code> {
        let hello = proto::HelloRequest {
            max_version: 2,
            caller: Some(self.caller.clone()),
            token: token.to_owned(),
            ..Default::default()
        };
        self.send(Op::Greet, &hello)
    }

    /// Makes a call whose arguments are good enough for the check of rights. Their other faults do
    /// not matter.
    pub(crate) fn call(&mut self, operation: Operation) -> Result<(), Code> {
        super::rights_only(self.send_call(operation))
    }

    #[allow(
        clippy::needless_update,
        reason = "some requests have no further fields"
    )]
    fn send_call(&mut self, operation: Operation) -> Result<(), Code> {
        let caller = Some(self.caller.clone());
        macro_rules! call {
            ($op:ident, $message:ident) => {
                self.send(
                    Op::$op,
                    &proto::$message {
                        caller,
                        ..Default::default()
                    },
                )
            };
        }
        match operation {
            Operation::Hello => Ok(()),
            Operation::Reserve => call!(Reserve, ReserveRequest),
            Operation::Commit => call!(Commit, CommitRequest),
            Operation::Lookup => call!(Lookup, LookupRequest),
            Operation::Exist => call!(Exist, ExistRequest),
            Operation::MatchPrefix => call!(MatchPrefix, MatchPrefixRequest),
            Operation::Renew => call!(Renew, RenewRequest),
            Operation::Release => call!(Release, ReleaseRequest),
            other => panic!("{other} is no frame"),
        }
    }

    /// Repeats a call until its rights are `wanted`.
    pub(crate) fn until(&mut self, operation: Operation, wanted: Result<(), Code>) {
        let begun = Instant::now();
        loop {
            let outcome = self.call(operation);
            if outcome == wanted {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(10), "{outcome:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn send(&mut self, op: Op, message: &impl Message) -> Result<(), Code> {
        let meta = message.encode_to_vec();
        self.request += 1;
        let header = Header {
            version: VERSION,
            op,
            request: self.request,
            epoch: Epoch(0),
            meta: u32::try_from(meta.len()).unwrap(),
            payload: 0,
        };
        self.stream.write_all(&header.encode()).unwrap();
        self.stream.write_all(&meta).unwrap();
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head).unwrap();
        let header = Header::decode(&head).unwrap();
        let mut meta = vec![0; header.meta as usize];
        self.stream.read_exact(&mut meta).unwrap();
        match header.op {
            Op::Reply => Ok(()),
            Op::Failure => Err(Failure::decode(&meta).unwrap().code),
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn over_frames(it: &Fixture, operation: Operation, token: &str) -> Result<(), Code> {
    let mut connection = Framed::open(it, token)?;
    connection.call(operation)
}

/// The status of a GET, and the stable code of a refusal.
pub(crate) fn over_http(
    it: &Fixture,
    path: &str,
    scheme: &str,
    token: &str,
) -> (u16, Option<Code>) {
    let value = match scheme {
        "Basic" => base64::engine::general_purpose::STANDARD.encode(format!("me:{token}")),
        _ => token.to_owned(),
    };
    let credentials = match token {
        "" => String::new(),
        _ => format!("Authorization: {scheme} {value}\r\n"),
    };
    let mut stream = TcpStream::connect(it.server.http_address()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{credentials}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    // The stream of events never ends, so the test reads only the head.
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() > 0 {
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let code = head
        .lines()
        .find_map(|line| line.strip_prefix("kvpool-code: "));
    let code = code.and_then(|code| Code::from_wire(code.trim().parse().ok()?));
    (status, code)
}
