//! Pushes of 256 MiB beside bare TCP with as many streams, alternated in one run. Both ends are in this
//! process, so that both share the processor alike.
//!
//!     cargo bench -p kvpool-handoff --bench push [-- ROUNDS]
//!
//! - `tcp`: threads that write 256 MiB of memory, and threads that read them into other 256 MiB: the limit
//! - `tcp hot`: the same with one MiB, written and read again and again: it stays in the processor's caches
//! - `push`: one rank to one rank, all layers at once; the bytes are compared
//! - `pull`: an offer of all pages, from decode's request on
//! - `slices`: two ranks to one, token-major: rows of 2 KiB
//! - `layerwise`: each layer is sent when it is computed, and a layer computes as long as it transfers.
//!   The ratio is the share of the transfer that the computing hides.
//!
//! It prints the medians over the rounds.

use kvpool_handoff::plan::{PageLayout, Stages, StateShape};
use kvpool_handoff::registration::{RankDescription, StateRegion};
use kvpool_handoff::room::{PollState, RoomId};
use kvpool_handoff::session::{HandoffOptions, HandoffSession, RankMemory, Receiving, Sending};
use kvpool_transport::Region;
use kvpool_types::Length;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const LAYERS: u32 = 16;
const PAGES: u32 = 256;
const TOKENS: u32 = 16;
const HEADS: u32 = 32;
const HEAD_BYTES: u32 = 128;
const TOTAL: u64 = 256 * MIB;
/// As many as a link of the data port has.
const STREAMS: u64 = 2;
const WAIT: Duration = Duration::from_secs(60);

fn rank(rank: u32, ranks: u32) -> HandoffSession {
    let shape = StateShape::of_heads(PageLayout::TokenMajor, TOKENS, HEADS, HEAD_BYTES);
    let shape = shape.expect("a shape that fits");
    let page = shape.page_bytes(ranks).expect("heads that divide");
    let (mut states, mut memories) = (Vec::new(), Vec::new());
    for layer in 0..LAYERS {
        let memory = Region::allocate(Length(page * u64::from(PAGES))).whole();
        // Touches every page of memory, so that no round pays for its first use.
        memory.write_at(
            kvpool_types::Offset(0),
            &vec![1; memory.length().as_usize()],
        );
        states.push(StateRegion {
            name: "k".to_owned(),
            layer,
            shape,
            base: 0,
            pages: PAGES,
        });
        memories.push(memory);
    }
    let description = RankDescription {
        address: String::new(),
        tensor: (rank, ranks),
        pipeline: (0, stages()),
        page_tokens: TOKENS,
        hidden_bytes: 0,
        states,
    };
    let memory = RankMemory::new(description, memories).expect("memory that fits");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    HandoffSession::start(listener, memory, HandoffOptions::default()).expect("a session")
}

fn stages() -> Stages {
    Stages::new(&[LAYERS]).expect("one stage")
}

/// Writes the bytes of `source` over bare TCP into `target`, both as often as [`TOTAL`] needs.
fn tcp(source: &[u8], target: &mut [u8]) -> Duration {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    let streams = usize::try_from(STREAMS).expect("few streams");
    let times = usize::try_from(TOTAL).expect("a size of memory") / source.len();
    let each = source.len() / streams;
    let sources = source.chunks_exact(each);
    let parts = sources.zip(target.chunks_exact_mut(each));
    let pairs: Vec<_> = parts
        .map(|part| {
            let here = TcpStream::connect(address).expect("a connection");
            (here, listener.accept().expect("a connection").0, part)
        })
        .collect();
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for (mut here, mut there, (source, target)) in pairs {
            scope.spawn(move || {
                for _ in 0..times {
                    here.write_all(source).expect("a write");
                }
            });
            scope.spawn(move || {
                for _ in 0..times {
                    there.read_exact(target).expect("a read");
                }
            });
        }
    });
    begin.elapsed()
}

struct Group {
    prefill: Vec<HandoffSession>,
    decode: HandoffSession,
    next: u64,
}

impl Group {
    fn start(ranks: u32) -> Self {
        Self {
            prefill: (0..ranks).map(|each| rank(each, ranks)).collect(),
            decode: rank(0, 1),
            next: 1,
        }
    }

    fn open(&mut self) -> (Vec<Sending>, Receiving) {
        let room = RoomId(self.next);
        self.next += 1;
        let pages: Vec<u32> = (0..PAGES).collect();
        let until = Instant::now() + WAIT;
        let send = |rank: &HandoffSession| rank.send(room, pages.clone(), 1, until);
        let sending = self
            .prefill
            .iter()
            .map(|rank| send(rank).expect("a free room"));
        let sending: Vec<Sending> = sending.collect();
        let addresses: Vec<String> = self
            .prefill
            .iter()
            .map(|rank| rank.address().to_owned())
            .collect();
        let ranks = u32::try_from(addresses.len()).expect("few ranks");
        let prefill = (ranks, &stages());
        let receiving =
            self.decode
                .receive(room, (0, pages.clone()), &addresses, prefill, false, until);
        let receiving = receiving.expect("a plan");
        while receiving.state().poll != PollState::WaitingForInput {
            std::thread::yield_now();
        }
        (sending, receiving)
    }

    fn whole(&mut self) -> Duration {
        let (sending, receiving) = self.open();
        let begin = Instant::now();
        for each in &sending {
            each.produced(0..PAGES, 0..LAYERS).expect("an open room");
            each.finish(Vec::new()).expect("an open room");
        }
        let state = receiving.wait(begin + WAIT);
        assert_eq!(state.poll, PollState::Success, "{:?}", state.failure);
        begin.elapsed()
    }

    /// The time from decode's request to the end, when all pages are offered.
    fn pull(&mut self) -> Duration {
        let room = RoomId(self.next);
        self.next += 1;
        let pages: Vec<u32> = (0..PAGES).collect();
        let until = Instant::now() + WAIT;
        let offer = |rank: &HandoffSession| rank.offer(room, pages.clone(), 1, until);
        let offered = self
            .prefill
            .iter()
            .map(|rank| offer(rank).expect("a free room"));
        let offered: Vec<Sending> = offered.collect();
        let addresses: Vec<String> = self
            .prefill
            .iter()
            .map(|rank| rank.address().to_owned())
            .collect();
        let ranks = u32::try_from(addresses.len()).expect("few ranks");
        let of_room = (0, pages.clone());
        let prefill = (ranks, &stages());
        let begin = Instant::now();
        let receiving = self
            .decode
            .receive(room, of_room, &addresses, prefill, false, until);
        let state = receiving.expect("a plan").wait(begin + WAIT);
        assert_eq!(state.poll, PollState::Success, "{:?}", state.failure);
        let took = begin.elapsed();
        drop(offered);
        took
    }

    /// The time from the first layer to the end, when each layer takes `compute`.
    fn by_layer(&mut self, compute: Duration) -> Duration {
        let (sending, receiving) = self.open();
        let begin = Instant::now();
        for layer in 0..LAYERS {
            std::thread::sleep(compute);
            for each in &sending {
                each.produced(0..PAGES, layer..layer + 1)
                    .expect("an open room");
            }
        }
        for each in &sending {
            each.finish(Vec::new()).expect("an open room");
        }
        let state = receiving.wait(begin + WAIT);
        assert_eq!(state.poll, PollState::Success, "{:?}", state.failure);
        begin.elapsed()
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    let rounds = std::env::args()
        .find_map(|text| text.parse().ok())
        .unwrap_or(9);
    let (mut one, mut two) = (Group::start(1), Group::start(2));
    // Connects, and warms the memory.
    one.whole();
    two.whole();
    let total = usize::try_from(TOTAL).expect("a size of memory");
    let hot = usize::try_from(MIB).expect("a size of memory");
    let (source, mut target) = (vec![1; total], vec![2; total]);
    let rate = |took: Duration| TOTAL as f64 / 1e6 / took.as_secs_f64();
    let (mut tcps, mut pushes, mut slices) = (Vec::new(), Vec::new(), Vec::new());
    let (mut of_tcp, mut of_push, mut hidden) = (Vec::new(), Vec::new(), Vec::new());
    let (mut hots, mut of_hot) = (Vec::new(), Vec::new());
    let (mut pulls, mut pull_of_tcp) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (limit, push) = (tcp(&source, &mut target), one.whole());
        let hottest = tcp(&source[..hot], &mut target[..hot]);
        let sliced = two.whole();
        let pulled = one.pull();
        let compute = push / LAYERS;
        let layerwise = one.by_layer(compute);
        let exposed = layerwise.saturating_sub(compute * LAYERS).as_secs_f64();
        tcps.push(rate(limit));
        pushes.push(rate(push));
        slices.push(rate(sliced));
        of_tcp.push(rate(push) / rate(limit));
        pulls.push(rate(pulled));
        pull_of_tcp.push(rate(pulled) / rate(limit));
        hots.push(rate(hottest));
        of_hot.push(rate(push) / rate(hottest));
        of_push.push(rate(sliced) / rate(push));
        hidden.push(1.0 - exposed / push.as_secs_f64());
    }
    println!("{rounds} rounds of 256 MiB over {STREAMS} streams; medians");
    println!("tcp        {:>7.0} MB/s", median(&mut tcps));
    println!("tcp hot    {:>7.0} MB/s", median(&mut hots));
    println!(
        "push       {:>7.0} MB/s  {:.2} of tcp, {:.2} of tcp hot",
        median(&mut pushes),
        median(&mut of_tcp),
        median(&mut of_hot)
    );
    println!(
        "pull       {:>7.0} MB/s  {:.2} of tcp",
        median(&mut pulls),
        median(&mut pull_of_tcp)
    );
    println!(
        "slices     {:>7.0} MB/s  {:.2} of push",
        median(&mut slices),
        median(&mut of_push)
    );
    println!(
        "layerwise  {:.2} of the transfer is hidden",
        median(&mut hidden)
    );
}
