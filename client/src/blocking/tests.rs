use super::{CancelCheck, Client, Runtimes};
use crate::testing::{Mode, Nodes, Setup, connect, leader, options};
use crate::{GetBlock, GetOptions, GetOutcome, PutBlock, PutOptions, Region};
use kvpool_types::{Code, Key, Length};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
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
        // Another call of the same client: within its runtime this would panic.
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

/// As a name resolver does whose servers are gone.
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
