//! A node, its fence tickets, and views that it was never asked for.

use crate::support::{
    self, INTERVAL, Master, PATIENCE, SEGMENT, Session, deadline, extent, grant, pattern, ready,
    shm_link, welcomed, write,
};
use kvpool_proto::node_message::Body;
use kvpool_transport::{Link, Slice, shm};
use kvpool_types::{Code, Epoch, Extent, Grant, Incarnation};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SOCKET: &str = "KVPOOL_TEST_SOCKET";

/// A block in place, and a view of it that the node knows of by its board alone.
async fn viewed(link: &Arc<dyn Link>, session: &Session) -> (Grant, Slice) {
    let block = grant(session.incarnation(), 1, 5, extent(0, 100_000));
    write(link, block).await.unwrap();
    let view = pin_now(link, block.extent).await;
    (block, view)
}

/// Answers come in order, so after a pin by request the board and the mapping exist.
async fn pin_now(link: &Arc<dyn Link>, extent: Extent) -> Slice {
    let asked = link.pin(Epoch(1), extent, deadline()).await.unwrap();
    let view = link.pin_now(Epoch(1), extent).unwrap();
    drop(asked);
    // The end of the asked pin is on its way before this answer.
    let sums = link.sums(Epoch(1), vec![extent.into()], deadline()).await;
    assert!(sums.iter().all(Result::is_ok));
    view
}

/// The tickets that the session's next word reports, and how long that took.
async fn fenced(session: &mut Session) -> (Vec<u64>, Duration) {
    let begin = Instant::now();
    match session.word().await {
        Body::Fenced(fenced) => (fenced.tickets, begin.elapsed()),
        other => panic!("{other:?} where tickets belong"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_on_a_board_keeps_its_extent_from_being_fenced() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    let link = shm_link(&node, session.incarnation()).await.unwrap();
    let (block, view) = viewed(&link, &session).await;
    session.fence(70, &block);
    session.silence(INTERVAL * 6).await;
    assert!(view.to_vec() == pattern(&block), "the view is whole");
    let again = grant(session.incarnation(), 1, 9, block.extent);
    assert_eq!(write(&link, again).await, Err(Code::InProgress));
    drop(view);
    let (tickets, took) = fenced(&mut session).await;
    assert_eq!(tickets, [70]);
    assert!(took < Duration::from_millis(500), "{took:?}");
    assert!(write(&link, again).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_closed_frees_no_view() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    let link = shm_link(&node, session.incarnation()).await.unwrap();
    let (block, view) = viewed(&link, &session).await;
    drop(link);
    // Another connection has the node tidy up after the first.
    let other = shm_link(&node, session.incarnation()).await.unwrap();
    session.fence(70, &block);
    session.silence(INTERVAL * 6).await;
    assert!(view.to_vec() == pattern(&block), "the view is whole");
    drop(view);
    assert_eq!(fenced(&mut session).await.0, [70]);
    drop(other);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_term_refuses_pins_and_is_told_of_those_there_are() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, epoch) = Master::start().await;
    let (node, session) = welcomed(&mut master, &directory).await;
    let link = shm_link(&node, session.incarnation()).await.unwrap();
    let (block, view) = viewed(&link, &session).await;
    session.cut();
    let mut session = master.session().await;
    let held: Vec<_> = session
        .register
        .held
        .iter()
        .map(|held| (held.segment, held.offset, held.length))
        .collect();
    assert_eq!(held, [(SEGMENT.0, 0, 100_000)]);
    epoch.store(2, std::sync::atomic::Ordering::Relaxed);
    session.welcome(2, SEGMENT);
    ready(&node).await;
    let since = Instant::now();
    while let Some(late) = link.pin_now(Epoch(1), block.extent) {
        drop(late);
        assert!(since.elapsed() < PATIENCE, "the board is of the new epoch");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let refused = link.pin(Epoch(1), block.extent, deadline()).await;
    assert_eq!(refused.unwrap_err().code, Code::StaleEpoch);
    let second = link.pin_now(Epoch(2), block.extent).unwrap();
    session.fence(71, &block);
    session.silence(INTERVAL * 2).await;
    drop(view);
    session.silence(INTERVAL * 2).await;
    drop(second);
    assert_eq!(fenced(&mut session).await.0, [71]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_closes_boards_and_waits_for_what_is_pinned() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, session) = welcomed(&mut master, &directory).await;
    let link = shm_link(&node, session.incarnation()).await.unwrap();
    let (block, view) = viewed(&link, &session).await;
    let drain = tokio::spawn(node.drain());
    let since = Instant::now();
    while let Some(late) = link.pin_now(Epoch(1), block.extent) {
        drop(late);
        assert!(since.elapsed() < PATIENCE, "the board is closed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!drain.is_finished());
    drop(view);
    assert!(drain.await.unwrap(), "nothing was cut off");
}

/// Runs in a separate process: takes a view through the board, reports it, and waits to be killed.
#[test]
#[ignore = "the process that another test starts and kills"]
fn holder() {
    let Ok(path) = std::env::var(SOCKET) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let path = Path::new(&path);
    let hello = support::hello(Incarnation(0));
    let link = shm::connect(path, hello, deadline()).unwrap().0;
    let view = runtime.block_on(pin_now(&link, extent(0, 100_000)));
    std::fs::write(path.with_extension("pinned"), b"").unwrap();
    loop {
        std::thread::park();
        assert_eq!(view.length(), extent(0, 100_000).length);
    }
}

fn start_holder(path: &Path) -> Child {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "boards::holder", "--ignored"])
        .env(SOCKET, path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let since = Instant::now();
    while !path.with_extension("pinned").exists() {
        assert!(since.elapsed() < PATIENCE, "the process takes its view");
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_process_keeps_what_it_pinned_and_a_dead_one_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let (mut master, _) = Master::start().await;
    let (node, mut session) = welcomed(&mut master, &directory).await;
    let link = shm_link(&node, session.incarnation()).await.unwrap();
    let block = grant(session.incarnation(), 1, 5, extent(0, 100_000));
    write(&link, block).await.unwrap();
    let path = node.shm_path().unwrap().to_owned();
    let mut holder = tokio::task::spawn_blocking(move || start_holder(&path))
        .await
        .unwrap();
    kill_process(Pid::from_child(&holder), Signal::STOP).unwrap();
    session.fence(70, &block);
    session.silence(INTERVAL * 6).await;
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert_eq!(fenced(&mut session).await.0, [70]);
}
