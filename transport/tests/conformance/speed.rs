//! Transfer speeds beside plain copies and a bare socket. Run by hand: `cargo nextest run --release
//! -p kvpool-transport --run-ignored only speed --no-capture`.
//!
//! Every batch uses blocks that were not touched during the last gigabyte. Batches alternate with
//! plain copies of other such blocks by one thread, so that both see the same machine.

use super::*;
use std::io::Read;
use std::net::TcpStream;

const SEGMENT_BYTES: u64 = 1 << 30;
const ROUNDS: usize = 21;

/// The blocks of a batch.
#[derive(Clone, Copy)]
struct Shape {
    blocks: usize,
    pieces: usize,
    piece: usize,
}

const SHAPES: [Shape; 5] = [
    Shape::new(32, 1, 1 << 20),
    Shape::new(128, 1, 256 << 10),
    Shape::new(16, 1, 8 << 20),
    Shape::new(32, 64, 16 << 10),
    Shape::new(1, 1, 64 << 10),
];

impl Shape {
    const fn new(blocks: usize, pieces: usize, piece: usize) -> Self {
        Self {
            blocks,
            pieces,
            piece,
        }
    }

    fn block(&self) -> usize {
        self.pieces * self.piece
    }

    fn bytes(&self) -> usize {
        self.blocks * self.block()
    }

    /// The callers' memory of one batch. The pieces of a block lie apart, like the layers of a
    /// cache.
    fn buffers(&self) -> Vec<Vec<Slice>> {
        let region = Region::from(pattern(self.bytes(), 1));
        let piece = |block: usize, piece: usize| {
            let at = (piece * self.blocks + block) * self.piece;
            region
                .slice(Offset(at as u64), Length(self.piece as u64))
                .unwrap()
        };
        let block = |number| (0..self.pieces).map(|p| piece(number, p)).collect();
        (0..self.blocks).map(block).collect()
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} x {} x {} KiB",
            self.blocks,
            self.pieces,
            self.piece >> 10
        )
    }
}

/// Batches of extents, each cold again at its turn.
struct Rotation<'a> {
    extents: &'a [Extent],
    next: usize,
}

impl Rotation<'_> {
    fn batch(&mut self, blocks: usize) -> Vec<Extent> {
        let batch = self.extents.iter().cycle().skip(self.next).take(blocks);
        self.next = (self.next + blocks) % self.extents.len();
        batch.copied().collect()
    }
}

fn seconds(run: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    run();
    begin.elapsed().as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn report(what: &str, shape: Shape, copies: Vec<f64>, transfers: Vec<f64>) {
    let (copy, transfer) = (median(copies), median(transfers));
    let speed = |time: f64| shape.bytes() as f64 / time / 1e9;
    println!(
        "{:24} {what:10} {:6.2} GB/s, plain copy {:6.2} GB/s, ratio {:.2}",
        shape.to_string(),
        speed(transfer),
        speed(copy),
        copy / transfer
    );
}

fn reads(link: &dyn Link, host: &TestHost, extents: &[Extent], shape: Shape) {
    let into = shape.buffers();
    let mut plain = vec![1u8; shape.bytes()];
    let mut rotation = Rotation { extents, next: 0 };
    let (mut copies, mut transfers) = (Vec::new(), Vec::new());
    let runtime = runtime();
    for _ in 0..ROUNDS {
        let batch = rotation.batch(shape.blocks);
        copies.push(seconds(|| {
            for (extent, target) in batch.iter().zip(plain.chunks_mut(shape.block())) {
                let source = host.slice(extent);
                for (at, target) in (0..).zip(target.chunks_mut(shape.piece)) {
                    source.read_at(Offset(at * shape.piece as u64), target);
                }
            }
        }));
        let batch = rotation.batch(shape.blocks);
        transfers.push(seconds(|| {
            let reads = batch.iter().zip(&into).map(|(e, i)| read_op(*e, i));
            let read = runtime.block_on(link.read(EPOCH, reads.collect(), soon()));
            assert!(read.iter().all(Result::is_ok));
        }));
    }
    report(&format!("{:?} read", link.kind()), shape, copies, transfers);
}

fn writes(link: &dyn Link, host: &TestHost, extents: &[Extent], shape: Shape) {
    let from = shape.buffers();
    let plain = vec![1u8; shape.bytes()];
    let mut rotation = Rotation { extents, next: 0 };
    let (mut copies, mut transfers) = (Vec::new(), Vec::new());
    let runtime = runtime();
    for _ in 0..ROUNDS {
        let batch = rotation.batch(shape.blocks);
        copies.push(seconds(|| {
            for (extent, source) in batch.iter().zip(plain.chunks(shape.block())) {
                let target = host.slice(extent);
                for (at, source) in (0..).zip(source.chunks(shape.piece)) {
                    target.write_at(Offset(at * shape.piece as u64), source);
                }
            }
        }));
        let batch = rotation.batch(shape.blocks);
        let grants: Vec<_> = batch.iter().map(|extent| host.grant_of(*extent)).collect();
        transfers.push(seconds(|| {
            let write = |(grant, from): (&Grant, &Vec<Slice>)| WriteOp {
                grant: *grant,
                from: from.clone(),
            };
            let writes = grants.iter().zip(&from).map(write).collect();
            let written = runtime.block_on(link.write(writes, soon()));
            assert!(written.iter().all(Result::is_ok));
        }));
    }
    let what = format!("{:?} write", link.kind());
    report(&what, shape, copies, transfers);
}

/// Maps the segment both ways, and waits until the link has filled its page tables.
fn warm_up(link: &dyn Link, host: &TestHost) {
    let grant = host.grant(4096);
    let written = wait(link.write(vec![write_op(grant, &[1; 4096])], soon()));
    let read = wait(link.read(EPOCH, vec![read_op(grant.extent, &room(4096))], soon()));
    assert!(written[0].is_ok() && read[0].is_ok());
    std::thread::sleep(Duration::from_secs(2));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    let bytes = pattern(1 << 20, 1);
    let begin = Instant::now();
    for _ in 0..1000 {
        std::hint::black_box(checksum(std::hint::black_box(&bytes)));
    }
    let speed = 1000.0 * bytes.len() as f64 / begin.elapsed().as_secs_f64() / 1e9;
    println!("checksum of what is in the cache {speed:.2} GB/s");
    bare_tcp();
    for kind in [TransportKind::Shm, TransportKind::Tcp] {
        let Opened { link, host, .. } = &open(kind, SEGMENT_BYTES);
        warm_up(&**link, host);
        for shape in SHAPES {
            let block = shape.block() as u64;
            let extent = |at| Extent {
                segment: SEGMENT,
                offset: Offset(at * block),
                length: Length(block),
            };
            let extents: Vec<_> = (0..SEGMENT_BYTES / block).map(extent).collect();
            writes(&**link, host, &extents, shape);
            reads(&**link, host, &extents, shape);
        }
        if kind == TransportKind::Shm {
            small_reads(&**link, host);
            pins(&**link, host);
        }
    }
}

/// The cost of a read on the calling thread beyond the copy and its checksum.
fn small_reads(link: &dyn Link, host: &TestHost) {
    const TIMES: usize = 200_000;
    for size in [4 << 10, 64 << 10] {
        let extent = host.stored(&pattern(size, 1));
        let into = room(size);
        let ops = [read_op(extent, &into)];
        let mut plain = vec![0u8; size];
        let source = host.slice(&extent);
        let (mut copies, mut reads) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            copies.push(seconds(|| {
                for _ in 0..TIMES / ROUNDS {
                    source.read_at(Offset(0), &mut plain);
                    std::hint::black_box(checksum(&plain));
                }
            }));
            reads.push(seconds(|| {
                for _ in 0..TIMES / ROUNDS {
                    let read = link.read_now(EPOCH, &ops, soon());
                    assert!(read.is_some_and(|read| read[0].is_ok()));
                }
            }));
        }
        let each = |times| median(times) / (TIMES / ROUNDS) as f64 * 1e9;
        println!(
            "read_now of {} KiB: {:.0} ns, copy and checksum alone {:.0} ns",
            size >> 10,
            each(reads),
            each(copies)
        );
    }
}

/// The cost of taking and dropping a view, by the board and by messages.
fn pins(link: &dyn Link, host: &TestHost) {
    const TIMES: usize = 200_000;
    let extent = host.stored(&[1; 4096]);
    let runtime = runtime();
    let asked = seconds(|| {
        for _ in 0..TIMES / 100 {
            drop(runtime.block_on(link.pin(EPOCH, extent, soon())).unwrap());
        }
    });
    let at_once = (0..ROUNDS).map(|_| {
        seconds(|| {
            for _ in 0..TIMES / ROUNDS {
                drop(link.pin_now(EPOCH, extent).unwrap());
            }
        })
    });
    println!(
        "pin_now and drop: {:.0} ns, by messages {:.0} ns",
        median(at_once.collect()) / (TIMES / ROUNDS) as f64 * 1e9,
        asked / (TIMES / 100) as f64 * 1e9
    );
}

fn bare_tcp() {
    use std::io::Write;
    const BLOCK: usize = 1 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let block = vec![5u8; BLOCK];
        while stream.write_all(&block).is_ok() {}
    });
    let mut stream = TcpStream::connect(address).unwrap();
    let mut block = vec![0u8; BLOCK];
    let time = seconds(|| {
        for _ in 0..1000 {
            stream.read_exact(&mut block).unwrap();
        }
    });
    println!(
        "bare TCP, one connection {:.2} GB/s",
        1000.0 * BLOCK as f64 / time / 1e9
    );
}
