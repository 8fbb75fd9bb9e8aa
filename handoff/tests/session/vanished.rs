//! A peer whose host is gone: its connections have ended, and nothing answers at its address.

use crate::child::{Process, group};
use crate::faults::{reaches, receive};
use crate::ranks::{PAGES, Rank, soon, succeeded};
use crate::slow::pass;
use kvpool_handoff::room::PollState;
use kvpool_handoff::session::HandoffOptions;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The threads of a session that may block, by the part of their name that the kernel keeps.
const WAITING_THREADS: &str = "kvpool-handoff-";
/// The number of writes to one peer that may start at a time.
const STARTS: usize = 8;

/// A path to a process, until the process vanishes.
#[derive(Default)]
struct Way {
    target: OnceLock<SocketAddr>,
    is_gone: AtomicBool,
    ends: Mutex<Vec<TcpStream>>,
}

impl Way {
    /// The path, and the address where it begins.
    fn open() -> (Arc<Self>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let way = Arc::<Self>::default();
        let of_thread = Arc::clone(&way);
        std::thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                of_thread.connected(near);
            }
        });
        (way, address)
    }

    fn connected(&self, near: TcpStream) {
        let mut ends = self.ends.lock().unwrap();
        if !self.is_gone.load(Ordering::SeqCst) {
            let far = TcpStream::connect(self.target.get().unwrap()).unwrap();
            let copy = |stream: &TcpStream| stream.try_clone().unwrap();
            pass(copy(&near), copy(&far), None);
            pass(copy(&far), copy(&near), None);
            ends.push(far);
        }
        // A connection without an answer stays open.
        ends.push(near);
    }

    fn vanish(&self) {
        self.is_gone.store(true, Ordering::SeqCst);
        for end in self.ends.lock().unwrap().drain(..) {
            // The other end may have ended first.
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

#[test]
fn few_writes_start_at_once_to_a_decode_that_vanished_and_others_go_on() {
    let (way, address) = Way::open();
    let options = HandoffOptions {
        address: Some(address.to_string()),
        ..HandoffOptions::default()
    };
    let lost = Rank::start_at("127.0.0.1:0", &group(), (0, 0), options);
    way.target.set(lost.session.local_addr()).unwrap();
    let mut prefill = Process::start();
    let receiving = receive(&lost, 1, PAGES, &prefill.address);
    prefill.tell(&format!("send 1 {PAGES}"));
    reaches(&receiving, PollState::WaitingForInput);
    way.vanish();
    // The writes then find no open link. The room itself lives on for the grace period of a broken link.
    std::thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    prefill.tell(&format!("produce_each 0 {PAGES}"));

    let other = Rank::start(&group(), 0, 0);
    let arriving = receive(&other, 2, 4, &prefill.address);
    prefill.tell("send 2 4");
    prefill.tell("produce 0 4");
    prefill.tell("finish");
    succeeded(&arriving.wait(soon()));
    other.check(0, &[0, 1, 2, 3]).unwrap();

    // A thread stays for a while after its work. Each peer has one thread more to connect, and `other` has its
    // writes.
    let threads = prefill.threads(WAITING_THREADS);
    assert!((STARTS..=2 * STARTS).contains(&threads), "{threads}");
    while prefill.tell("pinned") != "0" {
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(10), "pages are pinned");
        std::thread::sleep(Duration::from_millis(20));
    }
}
