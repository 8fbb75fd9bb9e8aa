use super::{CancelCheck, Client, Runtimes};
use crate::testing::{Mode, Nodes, Setup, connect, leader, options};
use crate::{GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions, Region};
use kvpool_transport::channel::Channel;
use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op, VERSION};
use kvpool_types::{Code, Epoch, Key, Length};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

fn key(name: &str) -> Key {
    Key::parse(name).unwrap()
}

/// A blocking client of a pool that has a block.
fn client_of_one_block(cancel: Option<Arc<dyn CancelCheck>>) -> (Nodes, Client) {
    let runtimes = Runtimes::start(cancel).unwrap();
    let (nodes, client) = runtimes.background.block_on(async {
        let master = leader(Setup::default()).await;
        let mut options = options(vec![master.url()]);
        options.timeouts.get = Duration::from_secs(600);
        let client = connect(&master, options).await;
        (master.cluster.nodes.clone(), client)
    });
    let client = Client {
        client,
        runtimes: Arc::new(runtimes),
    };
    let block = PutBlock::new(key("a"), Region::from(b"right bytes".to_vec()).whole());
    let outcomes = client.batch_put(vec![block], &PutOptions::default());
    assert!(matches!(outcomes.as_slice(), [Ok(_)]), "{outcomes:?}");
    (nodes, client)
}

#[test]
fn a_get_makes_its_room_outside_the_runtime_that_other_calls_wait_in() {
    let (_nodes, client) = client_of_one_block(None);
    let mut room = None;
    let found = client.get_placed(&key("a"), None, |length| {
        // Another call of the same client. Within the client's runtime this call would panic.
        assert_eq!(client.is_exist(&[key("a")]), Ok(vec![true]));
        Some(room.insert(Region::allocate(length)).whole())
    });
    assert!(matches!(found, Ok(GetOutcome::Hit { .. })), "{found:?}");
    assert_eq!(room.unwrap().whole().to_vec(), b"right bytes");
    let missed = client.get_placed(&key("none"), None, |_| None);
    assert_eq!(missed, Ok(GetOutcome::Miss));
    let refused = client.get_placed(&key("a"), None, |_| None).unwrap_err();
    assert_eq!(refused.code(), Code::Internal);
}

/// Cancels the call when it is asked for the second time.
#[derive(Debug, Default)]
struct CancelsOnSecond(AtomicUsize);

impl CancelCheck for CancelsOnSecond {
    fn applies_here(&self) -> bool {
        true
    }

    fn is_cancelled(&self) -> bool {
        assert!(
            tokio::runtime::Handle::try_current().is_err(),
            "asked within the runtime"
        );
        self.0.fetch_add(1, Ordering::Relaxed) > 0
    }
}

#[test]
fn a_call_that_is_given_up_ends_long_before_its_deadline() {
    let (nodes, client) = client_of_one_block(Some(Arc::new(CancelsOnSecond::default())));
    nodes.set(1, Mode::Hangs);
    nodes.set(2, Mode::Hangs);
    let room = Region::allocate(Length(11));
    let get = || GetBlock::new(key("a"), room.whole());
    let begun = Instant::now();
    let outcomes = client.batch_get(vec![get(), get()], &GetOptions::default());
    let codes: Vec<Code> = outcomes
        .into_iter()
        .map(|outcome| outcome.unwrap_err().code())
        .collect();
    assert_eq!(codes, [Code::DeadlineExceeded; 2]);
    assert!(begun.elapsed() < Duration::from_secs(60));
}

/// A name resolver without reachable servers blocks in this way.
#[test]
fn the_end_of_a_client_waits_for_no_blocking_work() {
    for on_callers in [true, false] {
        let runtimes = Runtimes::start(None).unwrap();
        let (answers, resolver) = mpsc::channel::<()>();
        let (says, running) = mpsc::channel();
        let resolve = move || {
            says.send(()).unwrap();
            let _ = resolver.recv();
        };
        let runtime = match on_callers {
            true => &runtimes.callers,
            false => &runtimes.background,
        };
        runtime.spawn_blocking(resolve);
        running.recv().unwrap();
        let (says, ended) = mpsc::channel();
        let ending = std::thread::spawn(move || {
            drop(runtimes);
            says.send(()).unwrap();
        });
        let ended = ended.recv_timeout(Duration::from_secs(5));
        drop(answers);
        ending.join().unwrap();
        assert!(ended.is_ok(), "the resolver of callers: {on_callers}");
    }
}

/// Applies to one thread only. Reports when it is asked for the second time, and answers two
/// seconds later.
#[derive(Debug)]
struct SlowOnSecond {
    thread: ThreadId,
    asked: AtomicUsize,
    says: mpsc::Sender<()>,
}

impl CancelCheck for SlowOnSecond {
    fn applies_here(&self) -> bool {
        std::thread::current().id() == self.thread
    }

    fn is_cancelled(&self) -> bool {
        if self.asked.fetch_add(1, Ordering::Relaxed) == 1 {
            self.says.send(()).unwrap();
            std::thread::sleep(Duration::from_secs(2));
        }
        false
    }
}

/// Reads a ping, and returns its number.
fn ping(socket: &mut TcpStream) -> u64 {
    let mut head = [0; HEADER_BYTES];
    socket.read_exact(&mut head).unwrap();
    let header = Header::decode(&head).unwrap();
    assert_eq!((header.op, header.meta), (Op::Ping, 0));
    header.request
}

fn pong(socket: &mut TcpStream, request: u64) {
    let header = Header {
        version: VERSION,
        op: Op::Pong,
        request,
        epoch: Epoch(1),
        meta: 0,
        payload: 0,
    };
    socket.write_all(&header.encode()).unwrap();
}

/// Signal handlers run while the client asks whether the main thread's call is cancelled.
#[test]
fn a_call_gets_its_answer_while_another_one_is_asked_about() {
    let (says, asked) = mpsc::channel();
    let cancel = SlowOnSecond {
        thread: std::thread::current().id(),
        asked: AtomicUsize::new(0),
        says,
    };
    let runtimes = Runtimes::start(Some(Arc::new(cancel))).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let channel = runtimes.to_the_end(Channel::connect(address, Duration::ZERO));
    let channel = channel.unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let answered = runtimes.run(channel.ping(Epoch(1)));
            (answered, Instant::now())
        });
        let serving = scope.spawn(move || {
            // The other thread waits when its ping is here, and soon drives the runtime.
            let first = ping(&mut peer);
            let second = ping(&mut peer);
            asked.recv().unwrap();
            std::thread::sleep(Duration::from_millis(100));
            let answered = Instant::now();
            pong(&mut peer, first);
            let (outcome, got) = other.join().unwrap();
            pong(&mut peer, second);
            (outcome, got.duration_since(answered))
        });
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(runtimes.run(channel.ping(Epoch(1))), Some(Ok(())));
        let (outcome, took) = serving.join().unwrap();
        assert_eq!(outcome, Some(Ok(())));
        assert!(took < Duration::from_secs(1), "{took:?}");
    });
}
