//! Who may call which operation, over every port of a master: the table of rights against real
//! ports.

mod audit;
mod callers;
mod calls;
mod sessions;

use callers::{Caller, Fixture, NAMESPACE};
use kvpool_auth::Roles;
use kvpool_master::service::rights::{Need, Operation, Via};
use kvpool_proto as proto;
use kvpool_types::Code;
use kvpool_types::wire::frame::Op;
use std::time::{Duration, Instant};

/// The table's decision about one operation and one caller.
fn expected(operation: Operation, caller: &Caller) -> Result<(), Code> {
    caller.refused.map_or(Ok(()), Err)?;
    let fits = match operation.need() {
        Need::Known => !(caller.here | caller.elsewhere | caller.pool).is_empty(),
        Need::Namespace(roles) => caller.here.has_any(roles),
        Need::Pool(roles) => caller.pool.has_any(roles),
    };
    if fits { Ok(()) } else { Err(Code::Forbidden) }
}

/// An outcome without reasons that are unrelated to rights.
fn rights_only(outcome: Result<(), Code>) -> Result<(), Code> {
    match outcome {
        Err(code @ (Code::Unauthenticated | Code::TokenExpired | Code::Forbidden)) => Err(code),
        _ => Ok(()),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_and_every_caller_meet_as_the_table_says() {
    let it = Fixture::start().await;
    let callers = it.callers();
    let mut judged = 0;
    for operation in Operation::ALL {
        for caller in &callers {
            let wanted = expected(*operation, caller);
            let outcome = calls::over_grpc(&it, *operation, &caller.token).await;
            let named = format!("{operation} by {} over gRPC", caller.name);
            assert_eq!(rights_only(outcome), wanted, "{named}");
            judged += 1;
            if let Via::GrpcAndFrame(_) = operation.via() {
                let outcome = calls::over_frames(&it, *operation, &caller.token);
                // The hello is judged first, so a caller without a role gets no further.
                let hello = expected(Operation::Hello, caller);
                let named = format!("{operation} by {} in frames", caller.name);
                assert_eq!(rights_only(outcome), hello.and(wanted), "{named}");
                judged += 1;
            }
        }
    }
    println!("{judged} meetings of an operation and a caller");
    it.stop().await;
}

#[test]
fn every_call_of_the_proto_files_has_a_row() {
    let files = [
        include_str!("../../../proto/proto/pool.proto"),
        include_str!("../../../proto/proto/nodes.proto"),
    ];
    let calls = files.iter().flat_map(|file| file.lines());
    let calls: Vec<&str> = calls
        .filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next())
        .collect();
    assert!(calls.len() > 20, "{calls:?}");
    let rows = |call: &&str| {
        let of = Operation::ALL.iter();
        of.filter(
            |row| matches!(row.via(), Via::Grpc(name) | Via::GrpcAndFrame(name) if name == *call),
        )
        .count()
    };
    for call in &calls {
        assert_eq!(
            rows(call),
            1,
            "{call}: add a row to master/src/service/rights/table.rs"
        );
    }
    for row in Operation::ALL {
        let (Via::Grpc(name) | Via::GrpcAndFrame(name) | Via::MoreOf(name)) = row.via();
        assert!(calls.contains(&name), "{row} is of no call");
    }
}

/// Numbers 32 to 63 are the calls to a master (`types/src/wire/frame.rs`).
#[test]
fn every_frame_to_a_master_has_a_row() {
    let frames = (32..64).filter_map(Op::from_wire);
    let mut frames: Vec<&str> = frames.map(Op::name).collect();
    frames.sort_unstable();
    let rows = Operation::ALL.iter();
    let mut rows: Vec<&str> = rows
        .filter(|row| matches!(row.via(), Via::GrpcAndFrame(_)))
        .map(|row| match row {
            Operation::Hello => "greet",
            other => other.label(),
        })
        .collect();
    rows.sort_unstable();
    assert_eq!(frames, rows);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_http_path_is_judged() {
    let it = Fixture::start().await;
    let sources = [
        include_str!("../../src/service/http.rs"),
        include_str!("../../src/service/page.rs"),
        include_str!("../../../daemon/src/probe.rs"),
    ];
    let paths = sources
        .iter()
        .flat_map(|source| source.split(".route(\"").skip(1));
    let mut paths: Vec<&str> = paths.filter_map(|rest| rest.split('"').next()).collect();
    paths.extend(["/nothing", "/metrics/", "/api/v1"]);
    assert!(paths.len() > 10, "{paths:?}");
    for path in paths {
        let is_probe = matches!(path, "/health" | "/healthz" | "/readyz");
        for caller in it.callers() {
            for scheme in ["Bearer", "Basic"] {
                let (status, code) = calls::over_http(&it, path, scheme, &caller.token);
                let named = format!("{path} by {} with {scheme}", caller.name);
                let wanted = match caller.refused {
                    _ if is_probe => None,
                    Some(code) => Some((401, code)),
                    None if caller.pool.has_any(Roles::WATCHERS) => None,
                    None => Some((403, Code::Forbidden)),
                };
                match wanted {
                    Some((number, refusal)) => {
                        assert_eq!((status, code), (number, Some(refusal)), "{named}");
                    }
                    None => assert!(!matches!(status, 401 | 403), "{named}: {status}"),
                }
            }
        }
    }
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_expires_on_an_open_connection_ends_its_calls_until_it_is_renewed() {
    let it = Fixture::start().await;
    // The leeway for clocks is 30 s.
    let short = it.token("reader", -22);
    let mut connection = calls::Framed::open(&it, &short).unwrap();
    connection.call(Operation::Exist).unwrap();
    let begun = Instant::now();
    loop {
        match connection.call(Operation::Exist) {
            Ok(()) => assert!(begun.elapsed() < Duration::from_secs(20), "it never ends"),
            Err(code) => {
                assert_eq!(code, Code::TokenExpired);
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    // A refused renewal changes nothing, and does not end the connection.
    assert_eq!(connection.greet("x.y.z"), Err(Code::Unauthenticated));
    assert_eq!(connection.call(Operation::Exist), Err(Code::TokenExpired));
    connection.greet(&it.token("reader", 60)).unwrap();
    connection.call(Operation::Exist).unwrap();
    // The new token is another caller with other rights.
    connection.greet(&it.token("other", 60)).unwrap();
    assert_eq!(connection.call(Operation::Exist), Err(Code::Forbidden));
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_and_a_role_that_are_taken_away_end_the_calls_of_open_connections() {
    let it = Fixture::start().await;
    let token = it.token("reader", 600);
    let mut connection = calls::Framed::open(&it, &token).unwrap();
    connection.call(Operation::Exist).unwrap();
    it.write_policy("[[rule]]\nsubject = \"reader\"\nroles = [\"reader\"]\nnamespaces = [\"b\"]\n");
    connection.until(Operation::Exist, Err(Code::Forbidden));
    it.write_policy(callers::POLICY);
    connection.until(Operation::Exist, Ok(()));
    it.replace_key();
    connection.until(Operation::Exist, Err(Code::Unauthenticated));
    let over_grpc = calls::over_grpc(&it, Operation::Exist, &token).await;
    assert_eq!(over_grpc, Err(Code::Unauthenticated));
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_sees_its_own_namespaces_and_creates_no_other() {
    let it = Fixture::start().await;
    let mut pool = it.client().await;
    let create = |subject: &str, name: &str| {
        it.request(
            proto::CreateNamespaceRequest {
                caller: Some(it.caller(NAMESPACE)),
                namespace: Some(proto::Namespace {
                    name: name.to_owned(),
                    ..Default::default()
                }),
                ..Default::default()
            },
            &it.token(subject, 60),
        )
    };
    let code = |status: &tonic::Status| calls::code_of(status);
    for (subject, name, wanted) in [
        ("writer", "a", Ok(())),
        // The namespace exists: the reader only uses it.
        ("reader", "a", Ok(())),
        ("reader", "a-new", Err(Code::Forbidden)),
        ("writer", "b", Err(Code::Forbidden)),
        ("writer", "", Err(Code::Forbidden)),
        ("other", "b", Ok(())),
        ("operator", "a", Err(Code::Forbidden)),
    ] {
        let created = pool.create_namespace(create(subject, name)).await;
        let outcome = created.map(drop).map_err(|status| code(&status));
        assert_eq!(outcome, wanted, "{subject} {name}");
    }
    let stats = |subject: &str| {
        let caller = Some(it.caller(NAMESPACE));
        it.request(proto::StatsRequest { caller }, &it.token(subject, 60))
    };
    let tenant = pool.stats(stats("reader")).await.unwrap().into_inner();
    assert_eq!(tenant.namespaces, ["a"]);
    assert!(tenant.counters.is_empty() && tenant.nodes.is_empty());
    let watcher = pool.stats(stats("operator")).await.unwrap().into_inner();
    assert!(watcher.namespaces.len() >= 2 && !watcher.counters.is_empty());
    it.stop().await;
}
