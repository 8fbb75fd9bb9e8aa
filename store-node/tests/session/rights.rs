//! A node whose callers need tokens, and reads with locations that no longer count.

use crate::support::{
    CLOCK_MS, KEY, Master, SEGMENT, config, deadline, extent, grant, hello, pattern, ready, write,
};
use kvpool_auth::issue::{NewToken, SigningKey, publish};
use kvpool_store_node::{Config, Node};
use kvpool_transport::{Link, ReadOp, Region, tcp};
use kvpool_types::{Code, Epoch, Incarnation, Offset, ReadRight, Version};
use std::sync::Arc;

/// Longer than the test takes, on the master's clock.
const LATER: u64 = CLOCK_MS + 600_000;
const POLICY: &str = "[[rule]]\nsubject = \"c\"\nroles = [\"reader\"]\nnamespaces = [\"*\"]\n";

/// The configuration of a node that asks for tokens, and a token that it takes.
fn with_tokens(directory: &tempfile::TempDir, master: &Master) -> (Config, String) {
    let path = |name: &str| directory.path().join(name);
    let key = SigningKey::generate().unwrap();
    publish(&key, &path("jwks.json")).unwrap();
    std::fs::write(path("policy.toml"), POLICY).unwrap();
    let token = NewToken {
        subject: "c",
        issuer: "tests",
        audience: "kvpool",
        begins: kvpool_auth::now() - 60,
        expires: kvpool_auth::now() + 600,
    };
    let config = Config {
        auth_jwks: Some(path("jwks.json")),
        auth_issuer: "tests".to_owned(),
        auth_policy: Some(path("policy.toml")),
        ..config(vec![master.url()], directory)
    };
    (config, key.sign(&token).unwrap())
}

/// The code of a read of the whole extent, and whether a byte arrived.
async fn read(
    link: &Arc<dyn Link>,
    extent: kvpool_types::Extent,
    right: Option<ReadRight>,
) -> (Code, Vec<u8>) {
    let memory = Region::allocate(extent.length).whole();
    let op = ReadOp {
        extent,
        from: Offset(0),
        into: vec![memory.clone()],
        right,
    };
    let mut outcomes = link.read(Epoch(1), vec![op], deadline()).await;
    let outcome = outcomes.remove(0);
    (
        outcome.map_or_else(|error| error.code, |_| Code::Ok),
        memory.to_vec(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_location_past_its_deadline_or_of_an_earlier_version_gets_no_byte() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (config, token) = with_tokens(&directory, &master);
    let node = Node::start(config).await.unwrap();
    let mut session = master.session().await;
    assert!(session.register.wants_signed_reads);
    session.welcome(1, SEGMENT);
    ready(&node).await;
    let life: Incarnation = session.incarnation();
    let (address, mut hello) = (node.data_address(), hello(life));
    hello.token = token.into();
    let connect = move || tcp::connect(address, hello, deadline());
    let (link, _) = tokio::task::spawn_blocking(connect).await.unwrap().unwrap();

    let place = extent(4096, 10_000);
    let first = grant(life, 1, 5, place);
    write(&link, first).await.unwrap();
    let signer = KEY.signer().for_reads(life, Epoch(1));
    let right = |version, until| Some(signer.sign(place, Version(version), until));
    let nothing = vec![0; 10_000];
    let late = read(&link, place, right(5, CLOCK_MS - 1)).await;
    assert_eq!(late, (Code::LocationExpired, nothing.clone()));
    let unsigned = read(&link, place, None).await;
    assert_eq!(unsigned, (Code::LocationRefused, nothing.clone()));
    let there = read(&link, place, right(5, LATER)).await;
    assert_eq!(there, (Code::Ok, pattern(&first)));

    // The extent is granted again, for a block of the same length.
    session.fence(70, &first);
    assert!(matches!(
        session.word().await,
        kvpool_proto::node_message::Body::Fenced(_)
    ));
    let second = grant(life, 1, 6, place);
    write(&link, second).await.unwrap();
    let gone = read(&link, place, right(5, LATER)).await;
    assert_eq!(gone, (Code::Missing, nothing));
    let there = read(&link, place, right(6, LATER)).await;
    assert_eq!(there, (Code::Ok, pattern(&second)));
}
