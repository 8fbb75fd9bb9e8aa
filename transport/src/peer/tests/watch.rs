//! A peer that dies is known at once, a stopped one after three pings.

use super::*;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

const IS_PEER: &str = "KVPOOL_TEST_IS_PEER";

/// Another process that serves as a peer.
struct PeerProcess {
    child: Child,
    target: String,
}

impl PeerProcess {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peer::tests::watch::a_process_that_is_watched"])
            .args(["--ignored", "--nocapture"])
            .env(IS_PEER, "1")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map(Result::unwrap);
        let target = lines.find_map(|line| line.split_once("PEER ").map(|(_, it)| it.to_owned()));
        Self {
            child,
            target: target.unwrap(),
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
#[ignore = "is the other process of other tests"]
fn a_process_that_is_watched() {
    if std::env::var_os(IS_PEER).is_none() {
        return;
    }
    let endpoint = endpoint();
    println!("PEER {}", name(&endpoint));
    std::thread::sleep(Duration::from_secs(120));
}

/// The loss of a peer after a signal, and the time that it took.
fn loss_after(signal: Signal) -> (PeerLoss, Duration) {
    let (here, there) = (endpoint(), PeerProcess::start());
    let (sender, lost) = mpsc::channel();
    let on_loss = move |loss| sender.send(loss).unwrap();
    let watch = here.watch(&there.target, PeerWatchOptions::default(), soon(), on_loss);
    let watch = watch.unwrap();
    // A peer that lives is not lost.
    let early = lost.recv_timeout(Duration::from_millis(2500));
    assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
    assert!(watch.is_alive());
    let begun = Instant::now();
    there.signal(signal);
    let loss = lost.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(!watch.is_alive());
    (loss, begun.elapsed())
}

#[test]
fn a_killed_peer_is_lost_within_a_second() {
    let (loss, took) = loss_after(Signal::KILL);
    assert_eq!(loss, PeerLoss::Closed);
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_stopped_peer_is_lost_after_three_pings() {
    let (loss, took) = loss_after(Signal::STOP);
    assert_eq!(loss, PeerLoss::Silent);
    let (least, most) = (Duration::from_secs(2), Duration::from_secs(5));
    assert!(took > least && took < most, "{took:?}");
}

#[test]
fn a_dropped_watch_gives_no_notice_and_an_absent_peer_an_error() {
    let (here, there) = (endpoint(), endpoint());
    let (sender, lost) = mpsc::channel();
    let on_loss = move |loss| sender.send(loss).unwrap();
    let watch = here.watch(&name(&there), PeerWatchOptions::default(), soon(), on_loss);
    let watch = watch.unwrap();
    drop(watch);
    drop(there);
    // The thread drops its end of the channel without a message.
    let none = lost.recv_timeout(Duration::from_secs(10));
    assert_eq!(none, Err(mpsc::RecvTimeoutError::Disconnected));
    let absent = endpoint();
    let target = name(&absent);
    drop(absent);
    let refused = here.watch(&target, PeerWatchOptions::default(), soon(), |_| {});
    assert_eq!(
        refused.err().map(|error| error.code),
        Some(Code::Unreachable)
    );
}
