//! The state of all masters and of etcd, as each master reports it.

use crate::etcd::{open, started};
use crate::support::media::until;
use kvpool_etcd::Error;
use kvpool_etcd::testing::{Etcd, Setup};
use kvpool_master::Config;
use kvpool_master::clock::{BootClock, Clock};
use kvpool_master::leadership::{Candidate, Seat};
use kvpool_master::metrics::Metrics;
use kvpool_master::store::ElectionStore;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Less than the lease of an entry, also on a busy machine.
const SOON: Duration = Duration::from_secs(8);

/// A master over `etcd`. A standby deposes a leader that refuses connections, hence the listener.
async fn start(etcd: &Etcd) -> (Arc<Seat>, Candidate, TcpListener) {
    let config = Config {
        etcd: etcd.endpoints(),
        cluster: "c".into(),
        etcd_compact: false,
        ..Config::default()
    };
    let clock = Arc::new(BootClock) as Arc<dyn Clock>;
    let metrics = Arc::new(Metrics::new().unwrap());
    let seat = Arc::new(Seat::new(config, metrics, Arc::clone(&clock)));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = format!("http://{}", listener.local_addr().unwrap());
    let candidate = Candidate::start(Arc::clone(&seat), clock, here.clone(), here);
    (seat, candidate.await.unwrap(), listener)
}

/// The lease of an entry would list the master for 10 s.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_stops_in_order_is_listed_no_longer() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = started!(
        "a_master_that_stops_in_order_is_listed_no_longer",
        Etcd::start(directory.path())
    );
    let (first, second) = (start(&etcd).await, start(&etcd).await);
    let listed = |seat: &Seat| seat.describe().members.len();
    until("both are listed", || {
        listed(&first.0) == 2 && listed(&second.0) == 2
    })
    .await;
    let stopped = Instant::now();
    first.1.stop().await;
    until("one is listed", || listed(&second.0) == 1).await;
    let took = stopped.elapsed();
    assert!(took < SOON, "{took:?}");
    let stopped = Instant::now();
    second.1.stop().await;
    let store = open(&etcd, "c").await;
    loop {
        let left = store.members().await.unwrap();
        if left.is_empty() {
            break;
        }
        assert!(stopped.elapsed() < SOON, "{left:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// No leader makes room in etcd here, so it stays full.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_etcd_is_reported_and_its_masters_stay_listed() {
    let directory = tempfile::tempdir().unwrap();
    let setup = Setup {
        quota_bytes: Some(16 << 20),
        ..Setup::default()
    };
    let etcd = started!(
        "a_full_etcd_is_reported_and_its_masters_stay_listed",
        Etcd::start_with(directory.path(), &setup)
    );
    let masters = [start(&etcd).await, start(&etcd).await];
    let all = |is_so: fn(&Seat) -> bool| masters.iter().all(|(seat, ..)| is_so(seat));
    let has_both = |seat: &Seat| seat.describe().members.len() == 2;
    until("listed", || all(has_both)).await;
    let client = etcd.client().unwrap();
    for number in 0.. {
        assert!(number < 400, "the quota is never reached");
        let put = client.put(format!("/filled/{number}"), vec![9u8; 900_000], None);
        match put.await {
            Err(Error::NoSpace) => break,
            put => put.unwrap(),
        };
        // etcd checks its file's size every tenth of a second.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let full = Instant::now();
    let has_alarm = |seat: &Seat| seat.metrics.snapshot().get("store_alarms") == Some(&1);
    until("the alarm", || all(has_alarm)).await;
    assert!(
        full.elapsed() < Duration::from_secs(3),
        "{:?}",
        full.elapsed()
    );
    // Longer than the lease of a master's entry.
    tokio::time::sleep(Duration::from_secs(15)).await;
    let listed = open(&etcd, "c").await.members().await.unwrap();
    assert_eq!(listed.len(), 2, "{listed:?}");
    assert!(all(has_alarm) && all(has_both));
    for (_, candidate, _) in &masters {
        candidate.stop().await;
    }
}
