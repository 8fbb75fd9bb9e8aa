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
    let mut masters = Vec::new();
    for _ in 0..2 {
        let config = Config {
            etcd: etcd.endpoints(),
            cluster: "c".into(),
            etcd_compact: false,
            ..Config::default()
        };
        let clock = Arc::new(BootClock) as Arc<dyn Clock>;
        let metrics = Arc::new(Metrics::new().unwrap());
        let seat = Arc::new(Seat::new(config, metrics, Arc::clone(&clock)));
        // A standby deposes a leader that refuses connections.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = format!("http://{}", listener.local_addr().unwrap());
        let candidate = Candidate::start(Arc::clone(&seat), clock, here.clone(), here);
        masters.push((seat, candidate.await.unwrap(), listener));
    }
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
