//! The speed of groups into etcd. Not run by default: it prints numbers, and asserts none.
//!
//! `cargo test --release -p kvpool-master --test store etcd_speed -- --ignored --nocapture`

use crate::etcd::{open, started};
use bytes::Bytes;
use kvpool_etcd::testing::{Etcd, EtcdCluster};
use kvpool_master::store::etcd::{EtcdOptions, EtcdStore};
use kvpool_master::store::{LogSeq, MetadataStore};
use kvpool_types::Epoch;
use std::time::{Duration, Instant};

/// The bytes of a commit of a block with one replica.
const RECORD: usize = 55;

async fn measure(store: &EtcdStore, what: &str, records: usize, groups: usize) {
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let group = Bytes::from(vec![7u8; records * RECORD]);
    let mut seq = store.log_span().await.unwrap().last;
    let mut times: Vec<Duration> = Vec::new();
    let begun = Instant::now();
    for _ in 0..groups {
        seq = LogSeq(seq.0 + 1);
        let sent = Instant::now();
        store.append(epoch, seq, group.clone()).await.unwrap();
        times.push(sent.elapsed());
    }
    let whole = begun.elapsed().as_secs_f64();
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    println!(
        "{what}, {records} records a group: p50 {:.2?} p99 {:.2?} max {:.2?}, \
         {:.0} groups/s, {:.0} records/s, {:.1} MB/s",
        at(50),
        at(99),
        at(100),
        groups as f64 / whole,
        (groups * records) as f64 / whole,
        (groups * group.len()) as f64 / whole / 1e6,
    );
    store.truncate_log(epoch, seq).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "prints numbers"]
async fn appends_to_one_etcd_and_to_three() {
    let directory = tempfile::tempdir().unwrap();
    let one = started!(
        "appends_to_one_etcd_and_to_three",
        Etcd::start(directory.path())
    );
    let store = open(&one, "c").await;
    measure(&store, "one etcd", 1, 2000).await;
    measure(&store, "one etcd", 4096, 200).await;
    drop(one);
    let directory = tempfile::tempdir().unwrap();
    let three = EtcdCluster::start(directory.path(), 3).await.unwrap();
    let store = EtcdStore::open(&EtcdOptions::new(three.endpoints(), "c"))
        .await
        .unwrap();
    measure(&store, "three", 1, 2000).await;
    measure(&store, "three", 4096, 200).await;
}
