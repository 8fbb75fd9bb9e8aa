//! The only master, on the embedded store, behind a network that is cut. Operations end at their
//! deadlines, and everything continues when the cut heals.

use kvpool_client::{Client, Options as ClientOptions};
use kvpool_tests::Daemon;
use kvpool_tests::masters::POOL;
use kvpool_tests::net::Net;
use kvpool_tests::outage::{Load, Summary, What};
use std::time::{Duration, Instant};

const MASTER: &str = "master-0";

async fn cut_and_heal(net: &Net) {
    let directory = tempfile::tempdir().unwrap();
    let at = |flags: &[&str]| {
        flags
            .iter()
            .map(|flag| (*flag).to_owned())
            .collect::<Vec<_>>()
    };
    let data = directory.path().join("data").display().to_string();
    let listen = format!("{}:0", net.address(MASTER));
    let flags = at(&[
        "--listen",
        &listen,
        "--http-listen",
        &listen,
        "--insecure",
        "--data-dir",
        &data,
    ]);
    let there = directory.path().to_owned();
    let master = net.run(MASTER, move |_| {
        Daemon::start("kvmaster", &there, "master", &flags).unwrap()
    });
    let url = format!("http://{}", master.listen);
    let (listen, socket) = (
        format!("{}:0", net.address(POOL)),
        directory.path().join("node.sock").display().to_string(),
    );
    let flags = at(&[
        "--master",
        &url,
        "--listen",
        &listen,
        "--http-listen",
        &listen,
        "--insecure",
        "--segment",
        "64MiB",
        "--shm-path",
        &socket,
    ]);
    let _node = Daemon::start("kvstore-node", directory.path(), "node", &flags).unwrap();

    let options = ClientOptions {
        masters: vec![url],
        ..ClientOptions::default()
    };
    let mut load = Load::default().start(&options).await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let down = Duration::from_secs(3);
    load.event("the master cut off for 3 s");
    net.cut(MASTER, POOL).unwrap();
    tokio::time::sleep(down).await;
    net.heal(MASTER, POOL).unwrap();
    let healed = Instant::now();
    load.wait_success(&What::ALL, healed, Duration::from_secs(30))
        .await
        .unwrap();
    let report = load.end().await.unwrap();
    let mut summary = Summary::default();
    summary.add(&report);
    println!("{summary}failed puts {:?}", report.failures(What::Put));
    let worst = summary.worst("the master cut off for 3 s");
    assert!(worst.put >= down && worst.lookup >= down, "{worst:?}");
    assert_eq!((report.wrong(), report.missed()), (0, 0));
    let client = Client::connect(options).await.unwrap();
    assert_eq!(report.lost_and_wrong(&client).await.unwrap(), (0, 0));
}

#[test]
fn a_cut_off_master_is_back_when_the_cut_heals() {
    let test = "a_cut_off_master_is_back_when_the_cut_heals";
    let Some(net) = Net::or_skip(test, &[POOL, MASTER]) else {
        return;
    };
    net.inside(POOL, || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(cut_and_heal(&net));
    });
}
