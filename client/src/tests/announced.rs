//! Masters that are found through a real etcd, in which they announce themselves.

use super::{assert_soon, block, key};
use crate::testing::{Cluster, Master, Passage, Setup, Wire, connect, options};
use crate::{Client, ConnectError, PutOptions, PutOutcome};
use kvpool_etcd::kv::{Op, Txn};
use kvpool_etcd::testing::Etcd;
use kvpool_types::Code;
use std::time::{Duration, Instant};

async fn announce(etcd: &Etcd, name: &str, url: &str) {
    let put = Op::put(
        format!("/kvpool/pool-1/{name}"),
        format!(r#"{{"address":"{url}"}}"#),
    );
    let client = etcd.client().unwrap();
    client.txn(Txn::new().then(put)).await.unwrap();
}

fn place(etcd: &Etcd) -> String {
    let endpoints = etcd.endpoints().join(",").replace("http://", "");
    format!("etcd://{endpoints}/pool-1")
}

#[tokio::test]
async fn masters_are_found_in_etcd_and_found_again_when_they_are_others() {
    let directory = tempfile::tempdir().unwrap();
    let mut etcd = Etcd::start(directory.path()).await.unwrap();
    let cluster = Cluster::start(Setup::default()).await;
    let a = Master::start(&cluster);
    let to_a = Wire::to(&a).await;
    a.lead().await;
    announce(&etcd, "members/a", &to_a.url).await;
    let client = connect(&a, options(vec![place(&etcd)])).await;
    assert!(client.put(&key("a"), b"x".to_vec()).await.is_ok());

    let b = Master::start(&cluster);
    let to_b = Wire::to(&b).await;
    to_a.set(Passage::Dead);
    announce(&etcd, "members/b", &to_b.url).await;
    a.resign_to("").await;
    b.lead().await;
    let left = Instant::now();
    let options = PutOptions {
        timeout: Some(Duration::from_secs(5)),
        ..PutOptions::default()
    };
    let outcome = client.batch_put(vec![block("b", b"x")], &options).await;
    assert_eq!(outcome, [Ok(PutOutcome::Stored { replicas: 1 })]);
    assert_soon(left, Duration::from_secs(2));

    // After a master is found, etcd is no longer needed.
    etcd.kill().unwrap();
    to_b.set(Passage::Dead);
    to_b.set(Passage::Open);
    assert_eq!(client.is_exist(&[key("b")]).await.unwrap(), [true]);
}

#[tokio::test]
async fn where_nothing_is_announced_connecting_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let mut etcd = Etcd::start(directory.path()).await.unwrap();
    let mut impatient = options(vec![place(&etcd)]);
    impatient.timeouts.connect = Duration::from_millis(1500);
    let error = Client::connect(impatient.clone()).await.unwrap_err();
    assert_eq!(error.code(), Code::Unreachable);
    assert!(error.to_string().contains("announced"), "{error}");
    etcd.kill().unwrap();
    let error = Client::connect(impatient).await.unwrap_err();
    assert!(
        error.to_string().contains("discovery through etcd failed"),
        "{error}"
    );
    let misspelt = options(vec!["etcd://127.0.0.1:1".to_owned()]);
    let error = Client::connect(misspelt).await.unwrap_err();
    assert!(matches!(error, ConnectError::BadAddress { .. }), "{error}");
}
