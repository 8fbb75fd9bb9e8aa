//! A store that takes no writes, as its master reports it.

use crate::support::pool;
use kvpool_master::Config;
use kvpool_master::clock::BootClock;
use kvpool_master::leadership::{Report, Seat};
use kvpool_master::metrics::Metrics;
use kvpool_master::store::Stalled;
use kvpool_proto::ClusterReply;
use std::sync::Arc;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_store_is_an_alarm_and_its_leader_is_not_ready() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), Config::default()).await;
    let metrics = Arc::new(Metrics::new().unwrap());
    let seat = Seat::new(Config::default(), metrics, Arc::new(BootClock));
    seat.lead(pool, "http://a:1");
    assert_eq!(seat.ready(), Ok(()));
    assert_eq!(seat.describe().alarms, Vec::<String>::new());
    let stalled = |no_space| Stalled {
        waited: Duration::from_secs(7),
        no_space,
        reason: "no answer within 8s".into(),
    };
    let told = stalled(false).to_string();
    *store.stalled.lock() = Some(stalled(false));
    assert_eq!(seat.describe().alarms, [told.as_str()]);
    assert_eq!(seat.ready(), Err(told));
    // etcd's own alarm says that it is full.
    seat.set_report(Report {
        store: ClusterReply {
            alarms: vec!["full".into()],
            ..ClusterReply::default()
        },
        ..Report::default()
    });
    *store.stalled.lock() = Some(stalled(true));
    assert_eq!(seat.describe().alarms, ["full"]);
    assert!(seat.ready().is_err());
    *store.stalled.lock() = None;
    assert_eq!(seat.ready(), Ok(()));
}
