//! The effect on users of an outage of the only master, on the embedded store, measured like a
//! fail-over.

use kvpool_tests::outage::{Load, Summary, What};
use kvpool_tests::{Cluster, Options};
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_embedded_master_is_as_long_as_it_was_down_and_loses_nothing() {
    let options = Options {
        nodes: 2,
        segment: "256MiB".into(),
        ..Options::default()
    };
    let mut cluster = Cluster::start(options).unwrap();
    let mut load = Load::default()
        .start(&cluster.client_options())
        .await
        .unwrap();
    let down = Duration::from_secs(1);
    for _ in 0..2 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        load.event("kill -9, down for 1 s");
        cluster.master.kill().unwrap();
        tokio::time::sleep(down).await;
        cluster.restart_master().unwrap();
        load.wait_success(&What::ALL, Instant::now(), Duration::from_secs(30))
            .await
            .unwrap();
    }
    let report = load.end().await.unwrap();
    let mut summary = Summary::default();
    summary.add(&report);
    println!(
        "{summary}{} puts acknowledged, failed {:?}",
        report.acknowledged(),
        report.failures(What::Put)
    );
    for (_, gaps) in report.gaps() {
        assert!(gaps.put >= down && gaps.lookup >= down, "{gaps:?}");
        assert!(gaps.put < Duration::from_secs(15), "{gaps:?}");
    }
    assert_eq!((report.wrong(), report.missed()), (0, 0));
    assert!(report.epochs_gone_back().is_empty());
    let client = cluster.client().await.unwrap();
    assert_eq!(report.lost_and_wrong(&client).await.unwrap(), (0, 0));
}
