//! An etcd that answers late.

use crate::etcd::{append, group, next_of, started};
use kvpool_etcd::testing::Etcd;
use kvpool_master::store::etcd::{EtcdOptions, EtcdStore};
use kvpool_master::store::{LogSeq, MetadataStore};
use kvpool_types::Epoch;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

/// Longer than the limit of a call, 1 s.
const LATE: Duration = Duration::from_millis(1500);
const PATIENCE: Duration = Duration::from_secs(60);

/// An address in front of etcd. Each byte of etcd's answers arrives later by the delay.
struct Late {
    address: String,
    delay_ms: Arc<AtomicU64>,
}

impl Late {
    async fn start(etcd: &Etcd) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let endpoint = etcd.endpoints().into_iter().next().unwrap();
        let behind = endpoint.trim_start_matches("http://").to_owned();
        let delay_ms = Arc::new(AtomicU64::new(0));
        let delay = Arc::clone(&delay_ms);
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = TcpStream::connect(&behind).await.unwrap();
                tokio::spawn(pass(client, server, Arc::clone(&delay)));
            }
        });
        Self { address, delay_ms }
    }

    fn set(&self, delay: Duration) {
        let delay = u64::try_from(delay.as_millis()).unwrap();
        self.delay_ms.store(delay, Ordering::SeqCst);
    }

    async fn open(&self) -> EtcdStore {
        let options = EtcdOptions::new([self.address.clone()], "c");
        EtcdStore::open(&options).await.unwrap()
    }
}

/// Passes bytes on until one side closes. A failure means that the other side has left.
async fn pass(client: TcpStream, server: TcpStream, delay_ms: Arc<AtomicU64>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (sender, mut late) = mpsc::unbounded_channel();
    let requests = async { copy(&mut from_client, &mut to_server).await.map(drop) };
    let answers = async {
        loop {
            let mut bytes = vec![0; 64 << 10];
            let count = from_server.read(&mut bytes).await?;
            bytes.truncate(count);
            let delay = Duration::from_millis(delay_ms.load(Ordering::SeqCst));
            if count == 0 || sender.send((Instant::now() + delay, bytes)).is_err() {
                return Ok(());
            }
        }
    };
    let arrivals = async {
        while let Some((due, bytes)) = late.recv().await {
            sleep_until(due).await;
            to_client.write_all(&bytes).await?;
        }
        Ok::<_, std::io::Error>(())
    };
    let _left = tokio::try_join!(requests, answers, arrivals);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_whose_answer_always_comes_late_ends() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "an_append_whose_answer_always_comes_late_ends",
        Etcd::start(directory.path())
    );
    let late = Late::start(&etcd).await;
    let store = late.open().await;
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    append(&store, epoch, 1..=1).await;
    late.set(LATE);
    timeout(PATIENCE, append(&store, epoch, 2..=3))
        .await
        .unwrap();
    assert!(store.stalled().is_none());
    late.set(Duration::ZERO);
    crate::etcd::assert_log(&store, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_follows_an_etcd_whose_answers_come_late() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_standby_follows_an_etcd_whose_answers_come_late",
        Etcd::start(directory.path())
    );
    let late = Late::start(&etcd).await;
    let leader = crate::etcd::open(&etcd, "c").await;
    let standby = late.open().await;
    let epoch = leader.begin_epoch(Epoch(1)).await.unwrap();
    append(&leader, epoch, 1..=20).await;
    late.set(LATE);
    let mut follow = standby.follow(LogSeq(0)).await.unwrap();
    let all = async {
        // A read, the opening of a watch and its first group each need several tries.
        for seq in 1..=20 {
            assert_eq!(next_of(&mut follow).await, (LogSeq(seq), group(seq)));
        }
        append(&leader, epoch, 21..=21).await;
        assert_eq!(next_of(&mut follow).await, (LogSeq(21), group(21)));
    };
    timeout(PATIENCE, all).await.unwrap();
}
