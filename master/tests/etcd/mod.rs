//! Helpers of the tests over a real etcd.

#![allow(dead_code, reason = "each test file uses a part of it")]

use bytes::Bytes;
use kvpool_etcd::testing::Etcd;
use kvpool_master::store::etcd::{EtcdOptions, EtcdStore, LogWatch};
use kvpool_master::store::{Claim, LogSeq, MetadataStore, StoreError};
use kvpool_types::Epoch;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A started etcd. Without an etcd binary the test prints that it is skipped, and returns.
macro_rules! started {
    ($name:literal, $start:expr) => {
        match $start.await {
            Ok(started) => started,
            Err(error @ kvpool_etcd::testing::StartError::NotInstalled) => {
                eprintln!("SKIPPED {}: {error}", $name);
                return;
            }
            Err(error) => panic!("{error}"),
        }
    };
}
pub(crate) use started;

pub(crate) async fn open(etcd: &Etcd, cluster: &str) -> EtcdStore {
    EtcdStore::open(&EtcdOptions::new(etcd.endpoints(), cluster))
        .await
        .unwrap()
}

pub(crate) fn group(seq: u64) -> Bytes {
    Bytes::from(format!("group {seq}"))
}

/// A group larger than two requests. Its bytes follow from its number.
pub(crate) fn large_group(seq: u64) -> Bytes {
    let bytes = (0..2_500_000u64).map(|n| (n.wrapping_mul(seq + 7) >> 8).to_le_bytes()[0]);
    bytes.collect::<Vec<_>>().into()
}

pub(crate) fn claim(id: &str) -> Claim {
    Claim {
        id: id.into(),
        address: format!("http://{id}:7400"),
        http_address: format!("{id}:7401"),
    }
}

pub(crate) async fn append(
    store: &EtcdStore,
    epoch: Epoch,
    seqs: impl Iterator<Item = u64> + Send,
) {
    for seq in seqs {
        store.append(epoch, LogSeq(seq), group(seq)).await.unwrap();
    }
}

/// Appends one group after another until told to stop.
pub(crate) struct Writer {
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<u64>,
}

impl Writer {
    pub(crate) fn start(store: &Arc<EtcdStore>, epoch: Epoch) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (store, stopped) = (Arc::clone(store), Arc::clone(&stop));
        let task = tokio::spawn(async move {
            let mut seq = store.log_span().await.unwrap().last.0;
            while !stopped.load(Ordering::SeqCst) {
                seq += 1;
                append(&store, epoch, seq..=seq).await;
            }
            seq
        });
        Self { stop, task }
    }

    /// The last acknowledged position.
    pub(crate) async fn stop(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        tokio::time::timeout(Duration::from_secs(60), self.task)
            .await
            .expect("appends do not go on")
            .unwrap()
    }
}

/// The log holds the groups through `last`, each once.
pub(crate) async fn assert_log(store: &EtcdStore, last: u64) {
    let mut expected = 1;
    while expected <= last {
        let read = store.read_log(LogSeq(expected - 1), 1 << 20).await.unwrap();
        assert!(!read.is_empty(), "group {expected} is missing");
        for found in read {
            assert_eq!(found, (LogSeq(expected), group(expected)));
            expected += 1;
        }
    }
    assert_eq!(expected, last + 1);
    assert_eq!(store.log_span().await.unwrap().last, LogSeq(last));
}

/// The next group, across outages of etcd.
pub(crate) async fn next_of(follow: &mut LogWatch) -> (LogSeq, Bytes) {
    let told = async {
        loop {
            match follow.next().await {
                Ok(told) => return told,
                Err(StoreError::Unavailable { .. }) => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), told)
        .await
        .expect("no group was told")
}
