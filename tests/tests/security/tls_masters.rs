//! Standby masters and plain data ports in a pool with TLS.

use kvpool_client::{
    Client, Code, PutError, ReplicaBlocks, ReplicaChange, ReplicaTaskState, ReplicaWish,
    TransportChoice,
};
use kvpool_proto::pool_client::PoolClient;
use kvpool_proto::{CODE_METADATA, Caller, StatsRequest};
use kvpool_tests::blocks::{check_all, key, put_all};
use kvpool_tests::guard::{flags, world};
use kvpool_tests::masters::{self, Pool};
use kvpool_tests::{Cluster, Options, trust};
use kvpool_tls::ClientTls;
use kvpool_tls::grpc::GrpcWay;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_over_and_passes_calls_on_with_tls() {
    if !masters::available("a_standby_takes_over_and_passes_calls_on_with_tls") {
        return;
    }
    let own = flags(&world().daemon, &[]);
    let mut pool = Pool::start(masters::Options {
        masters: 2,
        master: own.clone(),
        node: own,
        ..masters::Options::default()
    })
    .unwrap();
    let client = pool.client().await.unwrap();
    put_all(&client, 0..8, 100_000).await.unwrap();
    let leader = pool.wait_settled().unwrap();
    let standby = pool.url(1 - leader.index);

    // For a caller that cannot reach the leader, the standby calls the leader over TLS.
    let tls = ClientTls::open(&trust::trusted()).unwrap();
    let way = GrpcWay::to(&standby, tls.as_ref()).unwrap();
    let mut asked = PoolClient::new(way.connect().await.unwrap());
    let request = |forward| StatsRequest {
        caller: Some(Caller {
            client_id: vec![1; 16].into(),
            host_id: vec![2; 16].into(),
            forward,
            ..Caller::default()
        }),
    };
    let refused = asked.stats(request(false)).await.unwrap_err();
    let refusal = refused.metadata().get(CODE_METADATA).unwrap();
    assert_eq!(
        refusal.to_str().unwrap(),
        Code::NotLeader.to_wire().to_string(),
        "it must not lead: {refused:?}"
    );
    let answered = asked.stats(request(true)).await.unwrap().into_inner();
    assert_eq!(answered.nodes.len(), 2, "the leader alone knows its nodes");

    pool.kill(leader.index).unwrap();
    pool.wait_leader(leader.epoch).unwrap();
    put_all(&client, 8..16, 100_000).await.unwrap();
    assert_eq!(check_all(&client, 0..16, 100_000).await.right, 16);
}

/// A node without TLS that advertises `advertise`.
fn plain_node(advertise: &str) -> Cluster {
    let ca = world().authority.ca.display().to_string();
    let node = ["--tls-ca", &ca, "--advertise", advertise];
    Cluster::start(Options {
        nodes: 1,
        master: flags(&world().daemon, &["--tls-client-auth", "none"]),
        node: node.map(str::to_owned).into(),
        ..Options::default()
    })
    .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_data_port_beyond_loopback_gets_no_hello_where_masters_have_tls() {
    let connect = async |cluster: &Cluster| {
        let mut options = cluster.client_options();
        options.transport = TransportChoice::Tcp;
        options.timeouts.put = Duration::from_secs(3);
        Client::connect(options).await.unwrap()
    };
    // On loopback no token crosses a network.
    let near = plain_node("127.0.0.1");
    put_all(&connect(&near).await, 0..2, 1000).await.unwrap();
    // An address for documentation (RFC 5737), at which no process listens. It must not be called.
    let far = plain_node("203.0.113.7");
    let client = connect(&far).await;
    let begun = Instant::now();
    let refused = client.put(&key(0), vec![0; 1000]).await.unwrap_err();
    let PutError::Failed { code, message } = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(*code, Code::InvalidArgument, "{message}");
    assert!(
        message.contains("203.0.113.7") && message.contains("has no TLS"),
        "{message}"
    );
    assert!(begun.elapsed() < Duration::from_secs(3), "it was called");
}

/// A node presents its token to the nodes that it copies from.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_tls_masters_copies_nothing_from_a_plain_port_beyond_loopback() {
    let ca = world().authority.ca.display().to_string();
    // An address for documentation (RFC 5737), at which no process listens. It must not be called.
    let node = ["--tls-ca", &ca, "--advertise", "203.0.113.7"];
    let cluster = Cluster::start(Options {
        nodes: 2,
        master: flags(&world().daemon, &["--tls-client-auth", "none"]),
        node: node.map(str::to_owned).into(),
        ..Options::default()
    })
    .unwrap();
    let mut options = cluster.client_options();
    options.transport = TransportChoice::Shm;
    let client = Client::connect(options).await.unwrap();
    put_all(&client, 0..1, 1000).await.unwrap();
    let wish = ReplicaWish {
        change: ReplicaChange::Copy,
        blocks: ReplicaBlocks::Keys(vec![key(0)]),
        from: None,
        to: Vec::new(),
        evict: false,
    };
    let begun = client.change_replicas(&wish).await.unwrap();
    let ended = client.wait_replica_task(begun.id, Duration::from_secs(120));
    let ended = ended.await.unwrap().unwrap();
    assert_eq!(ended.state, ReplicaTaskState::Failed, "{ended:?}");
    // Another code would show that the address was called.
    let code = ended.failure.as_ref().map(|(code, _)| *code);
    assert_eq!(code, Some(Code::InvalidArgument), "{ended:?}");
}
