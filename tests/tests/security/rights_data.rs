//! Who may send which request to a store node: each operation of its data port and its Unix socket,
//! with each kind of token.
//!
//! A node judges a token when a connection opens. So an operation has the rights of the hello, and
//! no operation is answered without a hello.

use kvpool_auth::Role;
use kvpool_tests::guard::Tokens;
use kvpool_tests::raw::Port;
use kvpool_tests::{Cluster, Options};
use kvpool_types::wire::data::{Failure, Meta};
use kvpool_types::wire::frame::Op;
use kvpool_types::{ClusterId, Code, Epoch, Token};
use serde_json::json;
use std::io::{Read, Write};

/// The ports that serve an operation after the hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Both,
    Data,
    UnixSocket,
    /// The data port, on a connection with queue pairs.
    Rdma,
}

/// Every request to a store node. Each needs one of the roles in [`MOVERS`], in any namespace.
const ROWS: &[(Op, At)] = &[
    (Op::Hello, At::Both),
    (Op::Read, At::Data),
    (Op::Write, At::Both),
    (Op::Map, At::UnixSocket),
    (Op::WriteBegin, At::UnixSocket),
    (Op::WriteEnd, At::UnixSocket),
    (Op::Pin, At::UnixSocket),
    (Op::Unpin, At::UnixSocket),
    (Op::Sums, At::Both),
    (Op::Ping, At::Both),
    (Op::RdmaOpen, At::Data),
    (Op::RdmaLocate, At::Rdma),
];

/// The roles that may move bytes.
const MOVERS: [Role; 4] = [Role::Reader, Role::Writer, Role::Admin, Role::Node];

/// Numbers below 32 are the requests to a store node (`types/src/wire/frame.rs`).
#[test]
fn every_request_to_a_node_has_a_row() {
    let requests: Vec<Op> = (0..32).filter_map(Op::from_wire).collect();
    let rows: Vec<Op> = ROWS.iter().map(|(op, _)| *op).collect();
    assert_eq!(requests, rows, "add a row to ROWS");
}

/// A kind of token: its name, the token, and the code of its refusal.
type Caller = (String, String, Option<Code>);

fn callers(tokens: &Tokens) -> Vec<Caller> {
    let with = |claims, foreign| tokens.token_with(&claims, foreign).unwrap();
    let good = with(json!({}), false);
    let claims = good.split('.').nth(1).unwrap();
    let unknown = Some(Code::Unauthenticated);
    let past = kvpool_auth::now() - 60;
    let mut callers = vec![
        ("no token".to_owned(), String::new(), unknown),
        ("no JWT".to_owned(), "x".repeat(8 << 10), unknown),
        (
            "expired".to_owned(),
            with(json!({ "exp": past }), false),
            Some(Code::TokenExpired),
        ),
        (
            "another audience".to_owned(),
            with(json!({ "aud": "other" }), false),
            unknown,
        ),
        (
            "another issuer".to_owned(),
            with(json!({ "iss": "https://other.example" }), false),
            unknown,
        ),
        ("another key".to_owned(), with(json!({}), true), unknown),
        // {"alg":"none"} and {"alg":"HS256"}.
        (
            "alg none".to_owned(),
            format!("eyJhbGciOiJub25lIn0.{claims}."),
            unknown,
        ),
        (
            "a shared secret".to_owned(),
            format!("eyJhbGciOiJIUzI1NiJ9.{claims}.AAAA"),
            unknown,
        ),
    ];
    let forbidden = Some(Code::Forbidden);
    let known = Role::ALL.map(|role| {
        let refused = (!MOVERS.contains(&role)).then_some(Code::Forbidden);
        (role.label(), refused)
    });
    // Rights of another namespace are enough for the port: grants and locations decide what a
    // client may touch.
    let others = [("other", None), ("root", None), ("stranger", forbidden)];
    callers.extend(known.into_iter().chain(others).map(|(subject, refused)| {
        let token = tokens.token(subject, 600).unwrap();
        (subject.to_owned(), token, refused)
    }));
    callers
}

/// The outcome of one operation on a new connection.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// The hello was refused.
    Refused(Code),
    /// This port does not serve the operation.
    NotServed,
    /// The operation was answered, or its arguments were judged.
    Served,
}

/// Sends a hello with `token`, and then `op` without arguments.
fn meet<S: Read + Write>(mut port: Port<S>, cluster: ClusterId, op: Op, token: &str) -> Outcome {
    let hello = port.hello_with(cluster, Token::from(token.to_owned()));
    if let Err(failure) = hello.unwrap() {
        assert!(port.is_closed(), "a refused caller may go on");
        return Outcome::Refused(failure.code);
    }
    if op == Op::Hello {
        return Outcome::Served;
    }
    // A malformed request gets such an answer, or ends the connection. In both cases the caller was
    // admitted.
    let Ok((header, meta, _)) = port.ask(op, Epoch(0), &[], &[]) else {
        return Outcome::Served;
    };
    match Failure::decode(&meta) {
        Ok(failure) if header.op == Op::Failure && failure.message.contains("is not served") => {
            Outcome::NotServed
        }
        _ => Outcome::Served,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_of_a_node_and_every_token_meet_as_the_table_says() {
    let tokens = Tokens::new().unwrap();
    let pool = Cluster::start(Options {
        nodes: 1,
        master: tokens.flags(),
        node: tokens.node_flags(),
        ..Options::default()
    })
    .unwrap();
    let address = &pool.nodes[0].listen;
    let socket = pool.node_socket(0);
    let cluster = pool.client().await.unwrap().cluster_id();
    let mut met = 0;
    for (op, at) in ROWS {
        for (name, token, refused) in callers(&tokens) {
            for unix in [false, true] {
                let outcome = if unix {
                    meet(Port::open_unix(&socket).unwrap(), cluster, *op, &token)
                } else {
                    meet(Port::open(address).unwrap(), cluster, *op, &token)
                };
                let served = match at {
                    At::Both => true,
                    At::Data => !unix,
                    At::UnixSocket => unix,
                    At::Rdma => false,
                };
                let wanted = match refused {
                    Some(code) => Outcome::Refused(code),
                    None if served => Outcome::Served,
                    None => Outcome::NotServed,
                };
                let port = if unix {
                    "the Unix socket"
                } else {
                    "the data port"
                };
                assert_eq!(outcome, wanted, "{op:?} with {name} at {port}");
                met += 1;
            }
        }
        // Without a hello no caller gets an answer to the operation.
        if *op != Op::Hello {
            silent(Port::open(address).unwrap(), *op);
            silent(Port::open_unix(&socket).unwrap(), *op);
        }
    }
    let paths = include_str!("../../../daemon/src/probe.rs")
        .split(".route(\"")
        .skip(1);
    let mut paths: Vec<&str> = paths.filter_map(|rest| rest.split('"').next()).collect();
    paths.extend(["/nothing", "/metrics/"]);
    for path in paths {
        for (name, token, refused) in callers(&tokens) {
            let wanted = match (path, refused) {
                ("/health" | "/healthz" | "/readyz", _) => None,
                (_, Some(code)) if code != Code::Forbidden => Some(401),
                _ if ["root", "operator"].contains(&name.as_str()) => None,
                _ => Some(403),
            };
            let status = http(&pool.nodes[0].http, path, &token);
            let refusal = Some(status).filter(|status| matches!(status, 401 | 403));
            assert_eq!(refusal, wanted, "{path} with {name}: {status}");
            met += 1;
        }
    }
    println!("{met} meetings of an operation or path, a port and a token");
}

/// The status of a GET.
fn http(address: &str, path: &str, token: &str) -> u16 {
    let mut stream = kvpool_tests::raw::connect(address).unwrap();
    let line = match token {
        "" => String::new(),
        _ => format!("Authorization: Bearer {token}\r\n"),
    };
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n{line}\r\n").unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    let status = std::str::from_utf8(&head).unwrap().rsplit(' ').next();
    status.unwrap().parse().unwrap()
}

/// An operation before the hello ends the connection.
fn silent<S: Read + Write>(mut port: Port<S>, op: Op) {
    if let Ok((header, _, _)) = port.ask(op, Epoch(0), &[], &[]) {
        assert_eq!(header.op, Op::Failure, "{op:?} is answered before a hello");
    }
    assert!(port.is_closed(), "{op:?} before a hello leaves it open");
}
