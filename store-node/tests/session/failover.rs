//! Several masters: the node finds the leader, and the standbys hear that the node is alive.

use crate::support::{
    Master, SEGMENT, extent, grant, node, read, ready, stands_by, tcp_link, write,
};
use kvpool_etcd::testing::Etcd;
use kvpool_types::Code;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;

/// This address accepts connections and never answers.
async fn silent() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (listener, url)
}

/// No process listens on a port that was just closed.
async fn gone() -> String {
    silent().await.1
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_goes_at_once_where_a_standby_sends_it() {
    let directory = tempfile::tempdir().unwrap();
    let (standby, _) = Master::start().await;
    let (mut leader, _) = Master::start().await;
    let given = vec![standby.url()];
    let refusals = stands_by(standby, leader.url());
    let node = node(given, &directory).await;
    let session = leader.session().await;
    // Before the node asks the standby again.
    assert!(refusals.lock().unwrap().len() <= 1);
    session.welcome(1, SEGMENT);
    ready(&node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_ends_with_a_leaders_name_is_followed_by_one_there() {
    let directory = tempfile::tempdir().unwrap();
    let (mut first, epoch) = Master::start().await;
    let (mut second, next) = Master::start().await;
    let node = node(vec![first.url()], &directory).await;
    let session = first.session().await;
    session.welcome(1, SEGMENT);
    ready(&node).await;
    let incarnation = session.incarnation();
    let link = tcp_link(&node, incarnation).await.unwrap();
    let block = grant(incarnation, 1, 5, extent(0, 100_000));
    write(&link, block).await.unwrap();

    next.store(2, Ordering::Relaxed);
    session.refuse_naming(Code::NotLeader, &second.url());
    // It knows of the second by that name alone.
    let session = second.session().await;
    assert_eq!(session.incarnation(), incarnation);
    session.welcome(2, SEGMENT);
    ready(&node).await;
    // The node kept its blocks, and ignores the term before.
    let link = tcp_link(&node, incarnation).await.unwrap();
    assert_eq!(read(&link, 2, &block).await, Ok(()));
    assert_eq!(read(&link, 1, &block).await, Err(Code::StaleEpoch));
    drop(epoch);
}

#[tokio::test(flavor = "multi_thread")]
async fn standbys_are_knocked_at_twice_a_second_while_nobody_leads() {
    let directory = tempfile::tempdir().unwrap();
    let (first, _) = Master::start().await;
    let (second, _) = Master::start().await;
    let (_held, hung) = silent().await;
    let given = vec![first.url(), hung, gone().await, second.url()];
    let heard = [
        stands_by(first, String::new()),
        stands_by(second, String::new()),
    ];
    let _node = node(given, &directory).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    for heard in heard {
        let times = heard.lock().unwrap().clone();
        let gaps: Vec<Duration> = times.windows(2).map(|two| two[1] - two[0]).collect();
        let worst = gaps.iter().max().unwrap();
        assert!(*worst <= Duration::from_millis(500), "{worst:?}");
        assert!((8..40).contains(&times.len()), "{}", times.len());
    }
}

/// The standby names a leader that the node cannot reach. The node keeps calling both.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_out_of_reach_keeps_no_standby_from_hearing_the_node() {
    let directory = tempfile::tempdir().unwrap();
    for leader in [silent().await, (silent().await.0, gone().await)] {
        let (standby, _) = Master::start().await;
        let given = vec![leader.1.clone(), standby.url()];
        let heard = stands_by(standby, leader.1);
        let node = node(given, &directory).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let times = heard.lock().unwrap().clone();
        assert!((6..40).contains(&times.len()), "{}", times.len());
        let worst = times.windows(2).map(|two| two[1] - two[0]).max().unwrap();
        assert!(worst <= Duration::from_millis(500), "{worst:?}");
        drop(node);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_hangs_delays_the_first_welcome_of_another_hardly() {
    let directory = tempfile::tempdir().unwrap();
    let (_held, hung) = silent().await;
    let (mut leader, _) = Master::start().await;
    let begun = Instant::now();
    let node = node(vec![hung, leader.url()], &directory).await;
    leader.session().await.welcome(1, SEGMENT);
    ready(&node).await;
    assert!(
        begun.elapsed() < Duration::from_millis(500),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_hangs_is_left_after_its_silence_for_one_that_stands_ready() {
    let directory = tempfile::tempdir().unwrap();
    let (mut first, _) = Master::start().await;
    let (mut second, _) = Master::start().await;
    let node = node(vec![first.url(), second.url()], &directory).await;
    let session = first.session().await;
    session.welcome(1, SEGMENT);
    ready(&node).await;
    first.answers.store(false, Ordering::Relaxed);
    second.forget();
    let hung = Instant::now();
    second.session().await.welcome(2, SEGMENT);
    // A silence of at least a second ends a session, whatever the interval. Waiting for an attempt
    // at the hanging master would take five seconds more.
    let took = hung.elapsed();
    assert!(
        took > Duration::from_millis(900) && took < Duration::from_secs(4),
        "{took:?}"
    );
    drop(node);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_finds_masters_that_etcd_announces_before_and_after_it_starts() {
    let directory = tempfile::tempdir().unwrap();
    let etcd = Etcd::start(directory.path()).await.unwrap();
    let announced = etcd.endpoints().join(",").replace("http://", "");
    let place = format!("etcd://{announced}/pool-1");
    let client = etcd.client().unwrap();
    let announce = async |name: &str, url: String| {
        let key = format!("/kvpool/pool-1/members/{name}");
        let value = format!(r#"{{"address":"{url}"}}"#);
        client.put(key, value, None).await.unwrap();
    };
    let (mut first, _) = Master::start().await;
    let (mut second, _) = Master::start().await;
    let node = node(vec![place], &directory).await;
    announce("a", first.url()).await;
    let session = first.session().await;
    session.welcome(1, SEGMENT);
    ready(&node).await;
    announce("b", second.url()).await;
    drop(first);
    session.cut();
    let lost = Instant::now();
    second.session().await.welcome(2, SEGMENT);
    assert!(
        lost.elapsed() < Duration::from_secs(1),
        "{:?}",
        lost.elapsed()
    );
}
