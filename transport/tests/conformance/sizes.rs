//! How long single calls over TCP take, for every size, on fresh and on warm connections.
//!
//! A stall of the network stack costs the same number of milliseconds at certain sizes only, and
//! only while a connection is young. Batches on warm connections never meet it.

use super::*;
use kvpool_transport::tcp::connect;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;

/// The least delay that a network timer adds: the shortest retransmission timeout is 200 ms.
const STALL: Duration = Duration::from_millis(150);

/// Put or get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Put,
    Get,
}

const VERBS: [Verb; 2] = [Verb::Put, Verb::Get];

/// A block of one size: its offset in the segment, and the caller's memory.
struct Block {
    extent: Extent,
    memory: Vec<Slice>,
}

impl Block {
    fn new(host: &TestHost, size: usize) -> Self {
        Self {
            extent: host.stored(&pattern(size, 1)),
            memory: buffer(&pattern(size, 2)),
        }
    }

    /// The duration of one call.
    fn call(&self, link: &dyn Link, host: &TestHost, verb: Verb) -> Duration {
        let grant = host.grant_of(self.extent);
        let begin = Instant::now();
        let outcome = match verb {
            Verb::Put => wait(link.write(
                vec![WriteOp {
                    grant,
                    from: self.memory.clone(),
                }],
                soon(),
            )),
            Verb::Get => wait(link.read(EPOCH, vec![read_op(self.extent, &self.memory)], soon())),
        };
        let took = begin.elapsed();
        assert!(outcome[0].is_ok(), "{outcome:?}");
        took
    }
}

/// A link as a client has it, with a channel for small batches.
fn client(host: &TestHost, address: SocketAddr) -> Arc<dyn Link> {
    let _runtime = runtime().enter();
    connect(address, host.hello(), soon()).unwrap().0
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Clients run one after the other, each with one put or one get of a few full loopback segments.
/// Where the receive buffer shrinks, the last segment is lost. One call in ten may stall, because
/// machines that run many tests stop that long too.
#[test]
fn a_fresh_connection_moves_what_its_peer_advertised_without_a_stall() {
    let host = TestHost::new(Length(64 << 20));
    let server = tcp::serve(&host, Default::default());
    for verb in VERBS {
        let mut times = Vec::new();
        for size in (190..270).step_by(2) {
            let block = Block::new(&host, size * 1000);
            let link = client(&host, server.local_addr());
            times.push(block.call(&*link, &host, verb));
        }
        let usual = median(times.clone());
        let stalls = times.iter().filter(|time| **time >= usual + STALL).count();
        assert!(
            stalls * 10 <= times.len(),
            "{stalls} of {} calls ({verb:?}) took {STALL:?} more than the median of {usual:?}: \
             {times:?}",
            times.len()
        );
    }
}

/// The baseline of the sweep: plain sockets that move as many bytes the same way.
struct Bare(SocketAddr);

impl Bare {
    fn serve() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                std::thread::spawn(move || Self::answer(socket?));
            }
        });
        Self(address)
    }

    /// A request is its verb and its size. A put brings the bytes; a get is answered with them.
    fn answer(socket: TcpStream) -> std::io::Result<()> {
        /// Memory of ended connections, so that a fresh connection touches no new page.
        static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
        let spare = SPARE.lock().unwrap().pop();
        let mut bytes = spare.unwrap_or_else(|| vec![1; 16 << 20]);
        let ended = Self::serve_one(socket, &mut bytes);
        SPARE.lock().unwrap().push(bytes);
        ended
    }

    fn serve_one(mut socket: TcpStream, bytes: &mut [u8]) -> std::io::Result<()> {
        socket.set_nodelay(true)?;
        loop {
            let mut request = [0; 9];
            socket.read_exact(&mut request)?;
            let size = u64::from_le_bytes(request[1..].try_into().unwrap());
            let part = &mut bytes[..Length(size).as_usize()];
            if request[0] == 0 {
                socket.read_exact(part)?;
                socket.write_all(&[1])?;
            } else {
                socket.write_all(part)?;
            }
        }
    }

    fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.0).unwrap();
        socket.set_nodelay(true).unwrap();
        socket
    }

    fn call(socket: &mut TcpStream, memory: &mut [u8], verb: Verb) -> Duration {
        let mut request = [u8::from(verb == Verb::Get); 9];
        request[1..].copy_from_slice(&(memory.len() as u64).to_le_bytes());
        let begin = Instant::now();
        socket.write_all(&request).unwrap();
        match verb {
            Verb::Put => {
                socket.write_all(memory).unwrap();
                socket.read_exact(&mut [0]).unwrap();
            }
            Verb::Get => socket.read_exact(memory).unwrap(),
        }
        begin.elapsed()
    }
}

/// The times of one kind of call, by size.
#[derive(Default)]
struct Times(Vec<Vec<Duration>>);

impl Times {
    /// The calls of a size that took over three times the median of the neighbouring sizes.
    fn over(&self, at: usize) -> Vec<Duration> {
        let near = self.0[at.saturating_sub(1)..(at + 2).min(self.0.len())].iter();
        let limit = near.map(|times| median(times.clone())).max().unwrap() * 3;
        let times = self.0[at].iter().copied();
        times.filter(|time| *time > limit).collect()
    }
}

/// 60 rounds of each size from a byte to 16 MiB. Every stall of the network stack shows, and so
/// does other load of the machine. The plain sockets take turns with the pool's links and tell the
/// two apart. Run by hand: `cargo nextest run --release -p kvpool-transport --run-ignored only
/// sizes --no-capture`.
#[test]
#[ignore = "a measurement"]
fn no_size_stalls_on_fresh_connections_or_on_warm_ones() {
    const ROUNDS: usize = 60;
    let mut sizes: Vec<usize> = (0..25).map(|power| 1 << power).collect();
    sizes.extend((13..24).map(|power| 3 << power >> 1));
    sizes.extend((150_000..=300_000).step_by(10_000));
    sizes.extend([(64 << 10) + 1, (128 << 10) + 1]);
    sizes.sort_unstable();
    sizes.dedup();
    let host = TestHost::new(Length(256 << 20));
    let server = tcp::serve(&host, Default::default());
    let blocks: Vec<Block> = sizes.iter().map(|size| Block::new(&host, *size)).collect();
    let bare = Bare::serve();
    let mut memory = pattern(16 << 20, 3);
    for fresh in [true, false] {
        for verb in VERBS {
            let (mut ours, mut plain) = (Times::default(), Times::default());
            ours.0.resize(sizes.len(), Vec::new());
            plain.0.resize(sizes.len(), Vec::new());
            let warm = (client(&host, server.local_addr()), bare.connect());
            let (warm_link, mut warm_socket) = warm;
            for _ in 0..ROUNDS {
                for (at, block) in blocks.iter().enumerate() {
                    let link = if fresh {
                        client(&host, server.local_addr())
                    } else {
                        Arc::clone(&warm_link)
                    };
                    ours.0[at].push(block.call(&*link, &host, verb));
                    drop(link);
                    let memory = &mut memory[..sizes[at]];
                    let socket = &mut warm_socket;
                    plain.0[at].push(if fresh {
                        Bare::call(&mut bare.connect(), memory, verb)
                    } else {
                        Bare::call(socket, memory, verb)
                    });
                }
            }
            report(&sizes, &ours, &plain, verb, fresh);
        }
    }
}

fn report(sizes: &[usize], ours: &Times, plain: &Times, verb: Verb, fresh: bool) {
    let age = if fresh { "fresh" } else { "warm" };
    let mut over = [0, 0];
    let mut stalls = Vec::new();
    for (at, size) in sizes.iter().enumerate() {
        let (late, bare_late) = (ours.over(at), plain.over(at));
        over[0] += late.len();
        over[1] += bare_late.len();
        println!(
            "{verb:?} {age:5} {size:9} bytes: median {:>9.1?}, longest {:>9.1?}, over {:2}; bare \
             {:>9.1?}, {:>9.1?}, {:2}",
            median(ours.0[at].clone()),
            ours.0[at].iter().max().unwrap(),
            late.len(),
            median(plain.0[at].clone()),
            plain.0[at].iter().max().unwrap(),
            bare_late.len()
        );
        let usual = median(ours.0[at].clone());
        let stalled = ours.0[at].iter().filter(|time| **time >= usual + STALL);
        if stalled.count() > 1 {
            stalls.push(*size);
        }
    }
    let calls: usize = ours.0.iter().map(Vec::len).sum();
    println!(
        "{verb:?} {age}: {} of {calls} calls over 3 times the median of their neighbours, {} of the \
         bare pair's",
        over[0], over[1]
    );
    assert!(
        stalls.is_empty(),
        "{verb:?} {age}: more than one call of these sizes stalled: {stalls:?}"
    );
}
