//! A client whose addresses all use TLS never continues unencrypted, even if a master names a plain
//! address. Its token would be readable on the network.

use kvpool_client::{
    Client, ClientFiles, Code, ConnectError, Options as ClientOptions, cluster_status,
};
use kvpool_proto::pool_client::PoolClient;
use kvpool_proto::{CODE_METADATA, Caller, StatsRequest};
use kvpool_tests::masters::{self, Pool};
use kvpool_tests::{Cluster, Daemon};
use kvpool_tls::ClientTls;
use kvpool_tls::grpc::GrpcWay;
use kvpool_tls::testing::{Authority, Life};
use std::time::{Duration, Instant};

/// The text in each refusal.
const SAID: &str = "has no TLS";

/// A pool whose leader and node are plain, and a standby with TLS.
struct Mixed {
    pool: Pool,
    leader: String,
    standby: Daemon,
    /// The standby's URL.
    url: String,
    files: ClientFiles,
}

impl Mixed {
    fn start() -> Self {
        let pool = Pool::start(masters::Options {
            masters: 1,
            nodes: 1,
            ..masters::Options::default()
        })
        .unwrap();
        let leader = pool.url(0);
        assert!(leader.starts_with("http://"), "{leader}");
        let authority = Authority::new(pool.directory(), "authority");
        let pair = authority.sign("standby", Life::Valid);
        let path = |path: &std::path::Path| path.display().to_string();
        let etcd = pool.store.endpoints().join(",");
        let flags = [
            "--etcd",
            &etcd,
            "--cluster",
            "test",
            "--listen",
            "127.0.0.1:0",
            "--http-listen",
            "127.0.0.1:0",
            "--tls-cert",
            &path(&pair.cert),
            "--tls-key",
            &path(&pair.key),
            "--tls-ca",
            &path(&authority.ca),
            "--tls-client-auth",
            "none",
        ]
        .map(str::to_owned);
        let standby = Daemon::start("kvmaster", pool.directory(), "tls-standby", &flags).unwrap();
        Self {
            leader,
            url: format!("https://{}", standby.listen),
            standby,
            files: authority.client(Some(&pair)),
            pool,
        }
    }

    /// Sends the standby a call that only the leader answers, and asks it to forward the call if
    /// `forward`.
    async fn ask_standby(&self, forward: bool) -> tonic::Status {
        let tls = ClientTls::open(&self.files).unwrap();
        let way = GrpcWay::to(&self.url, tls.as_ref()).unwrap();
        let mut pool = PoolClient::new(way.connect().await.unwrap());
        let caller = Caller {
            client_id: vec![1; 16].into(),
            host_id: vec![2; 16].into(),
            forward,
            ..Caller::default()
        };
        let request = StatsRequest {
            caller: Some(caller),
        };
        pool.stats(request).await.unwrap_err()
    }
}

fn code(status: &tonic::Status) -> Option<Code> {
    let code = status.metadata().get(CODE_METADATA)?.to_str().ok()?;
    Code::from_wire(code.parse().ok()?)
}

/// A pool whose standby knows the leader.
async fn mixed() -> Mixed {
    let mixed = tokio::task::spawn_blocking(Mixed::start).await.unwrap();
    let limit = Instant::now() + Duration::from_secs(30);
    loop {
        let refused = mixed.ask_standby(false).await;
        if code(&refused) == Some(Code::NotLeader) && refused.message().contains(&mixed.leader) {
            return mixed;
        }
        assert!(Instant::now() < limit, "{refused:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_with_tls_forwards_nothing_to_a_plain_leader() {
    if !masters::available("a_standby_with_tls_forwards_nothing_to_a_plain_leader") {
        return;
    }
    let mixed = mixed().await;
    let refused = mixed.ask_standby(true).await;
    assert_eq!(code(&refused), Some(Code::Unreachable), "{refused:?}");
    for part in [SAID, &mixed.leader] {
        assert!(refused.message().contains(part), "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_follows_a_standby_with_tls_to_a_plain_leader() {
    if !masters::available("nobody_follows_a_standby_with_tls_to_a_plain_leader") {
        return;
    }
    let mixed = mixed().await;
    let mut options = ClientOptions {
        masters: vec![mixed.url.clone()],
        tls: mixed.files.clone(),
        ..ClientOptions::default()
    };
    options.timeouts.connect = Duration::from_secs(3);
    match Client::connect(options.clone()).await {
        Err(ConnectError::Refused { source, .. }) => {
            assert_eq!(source.code, Code::InvalidArgument, "{source}");
            for part in [SAID, &mixed.leader] {
                assert!(source.message.contains(part), "{source}");
            }
        }
        other => panic!("{other:?}"),
    }
    let token = kvpool_auth::Credentials::default();
    let status = cluster_status(
        &options.masters,
        &options.tls,
        Duration::from_secs(3),
        &token,
    );
    let status = status.await.unwrap();
    assert_eq!(status.told_by, mixed.url);
    let unreached = status
        .unreached
        .iter()
        .find(|(who, _)| *who == mixed.leader);
    assert!(unreached.unwrap().1.contains(SAID), "{unreached:?}");

    // A client whose options name a plain master accepts plain connections.
    options.masters.push(mixed.leader.clone());
    Client::connect(options.clone()).await.unwrap();

    // A store node.
    let flags = |master: &str| {
        let ca = options.tls.ca.as_ref().unwrap().display().to_string();
        Cluster::flags_of_node(master, "late", &["--tls-ca", &ca])
    };
    let directory = mixed.pool.directory();
    let late = Daemon::spawn("kvstore-node", directory, "late", &flags(&mixed.url)).unwrap();
    let limit = Instant::now() + Duration::from_secs(30);
    while !late.log_text().contains(SAID) {
        assert!(Instant::now() < limit, "{}", late.log_text());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(
        !late.log_text().contains("registered"),
        "{}",
        late.log_text()
    );
    drop(late);
    assert!(!mixed.standby.log_text().contains("panicked"));
}
