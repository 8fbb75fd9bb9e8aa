//! The addresses that a master advertises.

use kvpool_master::{Config, Server};
use kvpool_proto::ClusterRequest;
use kvpool_proto::pool_client::PoolClient;
use tempfile::TempDir;

async fn start(
    listen: &str,
    advertise: Option<&str>,
    directory: &TempDir,
) -> anyhow::Result<Server> {
    let config = Config {
        listen: listen.to_owned(),
        http_listen: "127.0.0.1:0".to_owned(),
        advertise: advertise.map(str::to_owned),
        data_dir: directory.path().join("data"),
        insecure: true,
        ..Config::default()
    };
    Server::start(config).await
}

#[tokio::test]
async fn a_bad_advertised_address_is_reported_before_anything_is_created() {
    for advertise in ["0.0.0.0", "10.0.0.1:port", "a b", "10.0.0.1:0"] {
        let directory = tempfile::tempdir().unwrap();
        let refused = start("127.0.0.1:0", Some(advertise), &directory).await;
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("--advertise"), "{advertise}: {text}");
        assert!(!directory.path().join("data").exists(), "{advertise}");
    }
}

#[tokio::test]
async fn a_standalone_master_advertises_its_given_address_or_its_own_or_none() {
    for (listen, advertise, told) in [
        ("127.0.0.1:0", None, "http://127.0.0.1:PORT"),
        ("0.0.0.0:0", None, ""),
        ("0.0.0.0:0", Some("10.0.0.1"), "http://10.0.0.1:PORT"),
        ("0.0.0.0:0", Some("host.example:7"), "http://host.example:7"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let server = start(listen, advertise, &directory).await.unwrap();
        let port = server.grpc_address().port();
        let mut client = PoolClient::connect(format!("http://127.0.0.1:{port}"))
            .await
            .unwrap();
        let reply = client.cluster(ClusterRequest::default()).await.unwrap();
        let reply = reply.into_inner();
        assert_eq!(reply.role, "leader");
        assert_eq!(reply.leader, told.replace("PORT", &port.to_string()));
        drop(client);
        server.stop().await;
    }
}
