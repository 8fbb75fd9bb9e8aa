//! The guarantees of every transport: one suite, run over each.

mod board;
mod host;
mod mapping;
mod now;
mod rdma;
mod shm;
mod sizes;
mod speed;
mod tcp;
mod tls;

use host::{SEGMENT, TestHost};
use kvpool_transport::checksum::{checksum, combine_chunks};
use kvpool_transport::{Link, ReadOp, Region, Slice, TransferError, TransportKind, WriteOp};
use kvpool_types::{Checksum, Code, Epoch, Extent, Grant, Incarnation, Length, Offset};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

const EPOCH: Epoch = Epoch(5);
const SIZES: [usize; 6] = [1, 4095, 64 << 10, (64 << 10) + 1, 1 << 20, 16 << 20];

/// A link to a host, and its server.
struct Opened {
    link: Arc<dyn Link>,
    host: Arc<TestHost>,
    _server: Box<dyn std::any::Any>,
    _directory: tempfile::TempDir,
}

fn open(kind: TransportKind, segment: u64) -> Opened {
    let host = TestHost::new(Length(segment));
    let directory = tempfile::tempdir().unwrap();
    let (link, server): (Arc<dyn Link>, Box<dyn std::any::Any>) = match kind {
        TransportKind::Tcp => {
            let server = tcp::serve(&host, Default::default());
            let hello = host.hello();
            let connected = tls::connect(server.local_addr(), hello, soon());
            (connected.unwrap().0, Box::new(server))
        }
        TransportKind::Rdma => {
            let server = rdma::serve(&host);
            let (fabric, address) = (rdma::own_fabric(), server.local_addr());
            let connected = kvpool_transport::rdma::connect(&fabric, address, host.hello(), soon());
            (connected.unwrap().0, Box::new(server))
        }
        TransportKind::Shm => {
            let path = directory.path().join("node.sock");
            let options = Default::default();
            let server =
                kvpool_transport::shm::Server::start(&path, host.clone(), options).unwrap();
            let connected = kvpool_transport::shm::connect(&path, host.hello(), soon());
            (connected.unwrap().0, Box::new(server))
        }
    };
    assert_eq!(link.kind(), kind);
    Opened {
        link,
        host,
        _server: server,
        _directory: directory,
    }
}

/// A deadline that no test should reach.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// The runtime that awaits all futures. A link opened inside it has a channel for small batches;
/// other links have none.
fn runtime() -> &'static tokio::runtime::Runtime {
    static RUNTIME: std::sync::OnceLock<tokio::runtime::Runtime> = std::sync::OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    })
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    runtime().block_on(future)
}

/// Bytes without repeated pieces, different for each seed.
fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = (seed << 1 | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(length);
    out
}

fn chunk_sums(bytes: &[u8]) -> Vec<Checksum> {
    bytes.chunks(64 << 10).map(checksum).collect()
}

fn buffer(bytes: &[u8]) -> Vec<Slice> {
    vec![Region::from(bytes.to_vec()).whole()]
}

fn room(length: usize) -> Vec<Slice> {
    vec![Region::allocate(Length(length as u64)).whole()]
}

/// Memory of the given length, in parts of the given lengths, repeated.
fn parts(length: usize, cuts: &[usize]) -> Vec<Slice> {
    let region = Region::allocate(Length(length as u64));
    let mut at = 0;
    let mut slices = Vec::new();
    for cut in cuts.iter().cycle() {
        if at == length {
            break;
        }
        let size = (*cut).min(length - at);
        slices.push(
            region
                .slice(Offset(at as u64), Length(size as u64))
                .unwrap(),
        );
        at += size;
    }
    slices
}

fn fill(slices: &[Slice], bytes: &[u8]) {
    let mut at = 0;
    for slice in slices {
        let size = slice.length().as_usize();
        slice.write_at(Offset(0), &bytes[at..at + size]);
        at += size;
    }
    assert_eq!(at, bytes.len());
}

fn gathered(slices: &[Slice]) -> Vec<u8> {
    slices.iter().flat_map(Slice::to_vec).collect()
}

fn write_op(grant: Grant, bytes: &[u8]) -> WriteOp {
    WriteOp {
        grant,
        from: buffer(bytes),
    }
}

fn read_op(extent: Extent, into: &[Slice]) -> ReadOp {
    ReadOp {
        extent,
        from: Offset(0),
        into: into.to_vec(),
        right: None,
    }
}

fn codes<T>(outcomes: &[Result<T, TransferError>]) -> Vec<Code> {
    outcomes
        .iter()
        .map(|outcome| outcome.as_ref().err().map_or(Code::Ok, |e| e.code))
        .collect()
}

fn round_trip_of_all_sizes(kind: TransportKind) {
    let Opened { link, host, .. } = &open(kind, 64 << 20);
    for (seed, size) in (0..).zip(SIZES) {
        let bytes = pattern(size, seed);
        let grant = host.grant(size as u64);
        let written = wait(link.write(vec![write_op(grant, &bytes)], soon()));
        assert_eq!(written, [Ok(checksum(&bytes))], "{size}");
        assert_eq!(host.slice(&grant.extent).to_vec(), bytes);
        let into = room(size);
        let read = wait(link.read(EPOCH, vec![read_op(grant.extent, &into)], soon()));
        assert_eq!(read, [Ok(checksum(&bytes))], "{size}");
        assert_eq!(gathered(&into), bytes);
        let sums = wait(link.sums(EPOCH, vec![grant.extent.into()], soon()));
        assert_eq!(sums, [Ok(chunk_sums(&bytes))], "{size}");
        let whole = combine_chunks(Length(size as u64), sums[0].as_ref().unwrap());
        assert_eq!(whole, checksum(&bytes));
    }
}

fn round_trip_of_scattered_memory(kind: TransportKind) {
    let Opened { link, host, .. } = &open(kind, 64 << 20);
    let cuts: [(usize, &[usize], &[usize]); 3] = [
        (1 << 20, &[16 << 10], &[16 << 10]),
        (1_000_003, &[1, 65_535, 7, 100_000], &[4097, 3]),
        (9 << 20, &[300_001], &[5 << 20, 1]),
    ];
    for (seed, (size, from_cuts, into_cuts)) in (0..).zip(cuts) {
        let bytes = pattern(size, seed);
        let grant = host.grant(size as u64);
        let from = parts(size, from_cuts);
        fill(&from, &bytes);
        let written = wait(link.write(vec![WriteOp { grant, from }], soon()));
        assert_eq!(written, [Ok(checksum(&bytes))]);
        let into = parts(size, into_cuts);
        let read = wait(link.read(EPOCH, vec![read_op(grant.extent, &into)], soon()));
        assert_eq!(read, [Ok(checksum(&bytes))]);
        assert_eq!(gathered(&into), bytes);
    }
}

fn a_batch_of_128(kind: TransportKind) {
    let Opened { link, host, .. } = &open(kind, 64 << 20);
    let blocks: Vec<_> = (0..128u64)
        .map(|seed| pattern(Length(1 + (seed * 2_999) % 200_000).as_usize(), seed))
        .collect();
    let grants: Vec<_> = blocks.iter().map(|b| host.grant(b.len() as u64)).collect();
    let expected: Vec<_> = blocks.iter().map(|b| Ok(checksum(b))).collect();
    let writes = grants.iter().zip(&blocks).map(|(g, b)| write_op(*g, b));
    assert_eq!(wait(link.write(writes.collect(), soon())), expected);
    let into: Vec<_> = blocks.iter().map(|b| room(b.len())).collect();
    let reads = grants.iter().zip(&into).map(|(g, i)| read_op(g.extent, i));
    assert_eq!(wait(link.read(EPOCH, reads.collect(), soon())), expected);
    for (into, block) in into.iter().zip(&blocks) {
        assert!(gathered(into) == *block);
    }
    let asked = grants.iter().map(|grant| grant.extent.into());
    let sums = wait(link.sums(EPOCH, asked.collect(), soon()));
    for (sums, block) in sums.iter().zip(&blocks) {
        assert_eq!(sums.as_ref().unwrap(), &chunk_sums(block));
    }
    assert_eq!(wait(link.read(EPOCH, Vec::new(), soon())), []);
}

/// Over TCP one call sends small blocks, and the first piece of the large block behind them.
fn a_batch_of_small_and_large_blocks(kind: TransportKind) {
    let Opened { link, host, .. } = &open(kind, 16 << 20);
    let sizes = [100, 70_000, 700_001, 7, 600_000, 530_000, 3];
    let mut writes = Vec::new();
    let mut blocks = Vec::new();
    for (seed, size) in (0..).zip(sizes) {
        let bytes = pattern(size, seed);
        let grant = host.grant(size as u64);
        let from = parts(size, &[300_001, 5]);
        fill(&from, &bytes);
        writes.push(WriteOp { grant, from });
        blocks.push((grant.extent, bytes));
    }
    let written = wait(link.write(writes, soon()));
    let asked = blocks.iter().map(|(extent, _)| (*extent).into());
    let sums = wait(link.sums(EPOCH, asked.collect(), soon()));
    for ((written, sums), (extent, bytes)) in written.iter().zip(&sums).zip(&blocks) {
        assert_eq!(written.as_ref().unwrap(), &checksum(bytes), "{extent}");
        assert_eq!(sums.as_ref().unwrap(), &chunk_sums(bytes), "{extent}");
        assert!(host.slice(extent).to_vec() == *bytes, "{extent}");
    }
    assert_eq!((written.len(), sums.len()), (sizes.len(), sizes.len()));
}

fn a_range_of_an_extent(kind: TransportKind) {
    let Opened { link, host, .. } = &open(kind, 16 << 20);
    let bytes = pattern(10 << 20, 1);
    let extent = host.stored(&bytes);
    for (from, length) in [
        (0, 1),
        (65_535, 2),
        (4_000_000, 6_000_000),
        ((10 << 20) - 1, 1),
    ] {
        let into = room(length);
        let read = ReadOp {
            extent,
            from: Offset(from as u64),
            into: into.clone(),
            right: None,
        };
        let expected = &bytes[from..from + length];
        assert_eq!(
            wait(link.read(EPOCH, vec![read], soon())),
            [Ok(checksum(expected))]
        );
        assert!(gathered(&into) == expected);
    }
}

fn bad_reads_fail_alone(kind: TransportKind) {
    let Opened { link, host, .. } = &open(kind, 16 << 20);
    let bytes = pattern(100_000, 1);
    let extent = host.stored(&bytes);
    let good = room(100_000);
    let past_extent = ReadOp {
        from: Offset(1),
        ..read_op(extent, &room(100_000))
    };
    let past_segment = Extent {
        offset: Offset(16 << 20),
        ..extent
    };
    let other_segment = Extent {
        segment: kvpool_types::SegmentId(99),
        ..extent
    };
    let reads = vec![
        past_extent,
        read_op(extent, &good),
        read_op(past_segment, &room(100_000)),
        read_op(extent, &[]),
        read_op(other_segment, &room(100_000)),
        read_op(extent, &room(100_000)),
    ];
    let read = wait(link.read(EPOCH, reads, soon()));
    assert_eq!(
        codes(&read),
        [
            Code::OutOfRange,
            Code::Ok,
            Code::OutOfRange,
            Code::InvalidArgument,
            Code::OutOfRange,
            Code::Ok
        ]
    );
    assert!(gathered(&good) == bytes);
    assert!(link.is_open());
}

fn bad_writes_fail_alone(kind: TransportKind) {
    let Opened { link, host, .. } = &open(kind, 16 << 20);
    let bytes = pattern(70_000, 1);
    let forged = Grant {
        mac: [0; 16],
        ..host.grant(70_000)
    };
    let moved = {
        let grant = host.grant(70_000);
        let extent = Extent {
            offset: Offset(grant.extent.offset.0 + 4096),
            ..grant.extent
        };
        Grant { extent, ..grant }
    };
    let fenced = host.grant(70_000);
    assert!(host.fence(fenced.id, Duration::ZERO));
    let (twice, first, last) = (host.grant(70_000), host.grant(70_000), host.grant(70_000));
    assert_eq!(
        wait(link.write(vec![write_op(twice, &bytes)], soon())),
        [Ok(checksum(&bytes))]
    );
    let other = pattern(70_000, 2);
    // All blocks differ, so a write to the wrong extent shows.
    let writes = [first, forged, moved, fenced, twice, last]
        .into_iter()
        .zip(2..)
        .map(|(grant, seed)| write_op(grant, &pattern(70_000, seed)));
    let mut writes: Vec<_> = writes.collect();
    writes.push(write_op(host.grant(70_001), &other));
    let written = wait(link.write(writes, soon()));
    assert_eq!(
        codes(&written),
        [
            Code::Ok,
            Code::GrantRefused,
            Code::GrantRefused,
            Code::GrantEnded,
            Code::AlreadyWritten,
            Code::Ok,
            Code::InvalidArgument
        ]
    );
    assert!(host.slice(&first.extent).to_vec() == other);
    assert!(host.slice(&last.extent).to_vec() == pattern(70_000, 7));
    assert_eq!(host.slice(&twice.extent).to_vec(), bytes);
    for refused in [forged, moved, fenced] {
        assert_eq!(host.slice(&refused.extent).to_vec(), vec![0; 70_000]);
    }
}

fn another_epoch_or_incarnation_is_refused(kind: TransportKind) {
    let Opened { link, host, .. } = &open(kind, 16 << 20);
    let bytes = pattern(1000, 1);
    let (grant, later) = (host.grant(1000), host.grant(1000));
    let extent = host.stored(&bytes);
    host.set_epoch(Epoch(6));
    let written = wait(link.write(vec![write_op(grant, &bytes)], soon()));
    assert_eq!(codes(&written), [Code::StaleEpoch]);
    let sums = wait(link.sums(EPOCH, vec![extent.into()], soon()));
    assert_eq!(codes(&sums), [Code::StaleEpoch]);
    if kind == TransportKind::Tcp {
        // A read through a mapping asks nobody.
        let read = wait(link.read(EPOCH, vec![read_op(extent, &room(1000))], soon()));
        assert_eq!(codes(&read), [Code::StaleEpoch]);
    }
    if kind == TransportKind::Shm {
        let pinned = wait(link.pin(EPOCH, extent, soon()));
        assert_eq!(pinned.unwrap_err().code, Code::StaleEpoch);
    }
    host.set_incarnation(Incarnation(78));
    if kind == TransportKind::Rdma {
        // The queue pairs end with the incarnation, and the link with them.
        rdma::wait_closed(&**link);
        let read = wait(link.read(Epoch(6), vec![read_op(extent, &room(1000))], soon()));
        assert_eq!(codes(&read), [Code::Unreachable]);
        return;
    }
    let read = wait(link.read(Epoch(6), vec![read_op(extent, &room(1000))], soon()));
    assert_eq!(codes(&read), [Code::WrongIncarnation]);
    let written = wait(link.write(vec![write_op(later, &bytes)], soon()));
    assert_eq!(codes(&written), [Code::WrongIncarnation]);
    let sums = wait(link.sums(Epoch(6), vec![extent.into()], soon()));
    assert_eq!(codes(&sums), [Code::WrongIncarnation]);
}

fn a_mismatched_hello_is_refused(kind: TransportKind) {
    let host = TestHost::new(Length(4096));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.sock");
    let tcp = match kind {
        TransportKind::Rdma => rdma::serve(&host),
        _ => tcp::serve(&host, Default::default()),
    };
    let _shm =
        kvpool_transport::shm::Server::start(&path, host.clone(), Default::default()).unwrap();
    let connect = |hello| match kind {
        TransportKind::Tcp => tls::connect(tcp.local_addr(), hello, soon()),
        TransportKind::Shm => kvpool_transport::shm::connect(&path, hello, soon()),
        TransportKind::Rdma => {
            let fabric = rdma::own_fabric();
            kvpool_transport::rdma::connect(&fabric, tcp.local_addr(), hello, soon())
        }
    };
    let mut hello = host.hello();
    hello.cluster = kvpool_types::ClusterId(1);
    assert_eq!(connect(hello).unwrap_err().code, Code::WrongCluster);
    let mut hello = host.hello();
    hello.incarnation = Incarnation(1);
    assert_eq!(connect(hello).unwrap_err().code, Code::WrongIncarnation);
    let (_link, reply) = connect(host.hello()).unwrap();
    assert_eq!(reply.incarnation, Incarnation(77));
}

fn a_write_to_a_stopped_node_ends_at_its_deadline(kind: TransportKind) {
    let Opened { link, host, .. } = &open(kind, 16 << 20);
    let bytes = pattern(3 << 20, 1);
    let grants = [host.grant(3 << 20), host.grant(3 << 20)];
    host.block(true);
    let begin = Instant::now();
    let deadline = begin + Duration::from_millis(200);
    let writes = grants.map(|grant| write_op(grant, &bytes)).to_vec();
    let written = wait(link.write(writes, deadline));
    let took = begin.elapsed();
    assert_eq!(codes(&written), [Code::DeadlineExceeded; 2]);
    assert!(
        took >= Duration::from_millis(200) && took < Duration::from_millis(600),
        "{took:?}"
    );
    host.block(false);
    // Whatever else arrives, the node is never told that the write is complete, and holds nothing.
    assert!(host.wait_for(|held| held.receiving + held.shm_writes == 0));
    std::thread::sleep(Duration::from_millis(100));
    assert!(host.wait_for(|held| held.receiving + held.shm_writes == 0));
    if kind == TransportKind::Shm {
        assert!(!host.is_written(grants[0].id) && !host.is_written(grants[1].id));
    }
    let extent = host.stored(&bytes);
    let into = room(3 << 20);
    let read = wait(link.read(EPOCH, vec![read_op(extent, &into)], soon()));
    assert_eq!(
        read,
        [Ok(checksum(&bytes))],
        "the link goes on after a deadline"
    );
}

fn eight_threads_at_once(kind: TransportKind) {
    let opened = open(kind, 128 << 20);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (link, host) = (&opened.link, &opened.host);
            scope.spawn(move || {
                for round in 0..20u64 {
                    let size = 1 + (thread * 7_919 + round * 10_007) % 300_000;
                    let blocks: Vec<_> = (0..3)
                        .map(|i| {
                            pattern(Length(size + i).as_usize(), thread << 20 | round << 4 | i)
                        })
                        .collect();
                    let grants: Vec<_> =
                        blocks.iter().map(|b| host.grant(b.len() as u64)).collect();
                    let writes = grants.iter().zip(&blocks).map(|(g, b)| write_op(*g, b));
                    let expected: Vec<_> = blocks.iter().map(|b| Ok(checksum(b))).collect();
                    assert_eq!(wait(link.write(writes.collect(), soon())), expected);
                    let into: Vec<_> = blocks.iter().map(|b| room(b.len())).collect();
                    let reads = grants.iter().zip(&into).map(|(g, i)| read_op(g.extent, i));
                    assert_eq!(wait(link.read(EPOCH, reads.collect(), soon())), expected);
                    for (into, block) in into.iter().zip(&blocks) {
                        assert!(gathered(into) == *block);
                    }
                }
            });
        }
    });
}

fn a_dropped_future_leaves_the_transfer_alone(kind: TransportKind) {
    let Opened { link, host, .. } = &open(kind, 64 << 20);
    let bytes = pattern(8 << 20, 1);
    let grant = host.grant(8 << 20);
    drop(link.write(vec![write_op(grant, &bytes)], soon()));
    let deadline = soon();
    while !host.is_written(grant.id) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(host.is_written(grant.id));
    assert!(host.slice(&grant.extent).to_vec() == bytes);
}

macro_rules! conformance {
    ($($name:ident,)*) => {
        mod over_tcp {
            use super::TransportKind;
            $(#[test] fn $name() { super::$name(TransportKind::Tcp); })*
        }
        mod over_tls {
            use super::{TransportKind, tls};
            $(#[test] fn $name() { tls::over(|| super::$name(TransportKind::Tcp)); })*
        }
        mod over_tls_on_a_runtime {
            use super::{TransportKind, tls};
            $(#[test] fn $name() {
                let _entered = super::runtime().enter();
                tls::over(|| super::$name(TransportKind::Tcp));
            })*
        }
        mod over_shm {
            use super::TransportKind;
            $(#[test] fn $name() { super::$name(TransportKind::Shm); })*
        }
        mod over_rdma {
            use super::{TransportKind, rdma};
            $(#[test] fn $name() {
                if rdma::is_here(concat!("over_rdma::", stringify!($name))) {
                    super::$name(TransportKind::Rdma);
                }
            })*
        }
        mod over_rdma_on_a_runtime {
            use super::{TransportKind, rdma};
            $(#[test] fn $name() {
                if rdma::is_here(concat!("over_rdma_on_a_runtime::", stringify!($name))) {
                    let _entered = super::runtime().enter();
                    super::$name(TransportKind::Rdma);
                }
            })*
        }
        mod over_shm_on_a_runtime {
            use super::TransportKind;
            $(#[test] fn $name() {
                let _entered = super::runtime().enter();
                super::$name(TransportKind::Shm);
            })*
        }
        mod over_tcp_on_a_runtime {
            use super::TransportKind;
            $(#[test] fn $name() {
                let _entered = super::runtime().enter();
                super::$name(TransportKind::Tcp);
            })*
        }
    };
}

conformance! {
    round_trip_of_all_sizes,
    round_trip_of_scattered_memory,
    a_batch_of_128,
    a_batch_of_small_and_large_blocks,
    a_range_of_an_extent,
    bad_reads_fail_alone,
    bad_writes_fail_alone,
    another_epoch_or_incarnation_is_refused,
    a_mismatched_hello_is_refused,
    a_write_to_a_stopped_node_ends_at_its_deadline,
    eight_threads_at_once,
    a_dropped_future_leaves_the_transfer_alone,
}
