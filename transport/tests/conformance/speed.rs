//! How fast bytes move, beside plain copies and a bare socket. Run by hand:
//! `cargo nextest run -p kvpool-transport --run-ignored only speed --no-capture`.

use super::*;
use std::io::{Read, Write};
use std::net::TcpStream;

const BLOCK: usize = 1 << 20;
const BATCH: usize = 64;
const ROUNDS: usize = 30;

fn report(what: &str, run: impl Fn()) {
    run();
    let begin = Instant::now();
    for _ in 0..ROUNDS {
        run();
    }
    let bytes = (ROUNDS * BATCH * BLOCK) as f64;
    println!(
        "{what:24} {:6.2} GB/s",
        bytes / begin.elapsed().as_secs_f64() / 1e9
    );
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    let source = vec![7u8; BATCH * BLOCK];
    let target = std::cell::RefCell::new(vec![1u8; BATCH * BLOCK]);
    report("memcpy, one thread", || {
        let mut target = target.borrow_mut();
        for (to, from) in target.chunks_mut(BLOCK).zip(source.chunks(BLOCK)) {
            to.copy_from_slice(std::hint::black_box(from));
        }
    });
    report("crc, one thread", || {
        for from in source.chunks(BLOCK) {
            std::hint::black_box(checksum(from));
        }
    });
    bare_tcp();
    for kind in [TransportKind::Shm, TransportKind::Tcp] {
        let Opened { link, host, .. } = &open(kind, 4 << 30);
        let bytes = pattern(BLOCK, 1);
        let from = buffer(&bytes);
        report(&format!("{kind:?} write"), || {
            let write = || WriteOp {
                grant: host.grant(BLOCK as u64),
                from: from.clone(),
            };
            let writes = (0..BATCH).map(|_| write()).collect();
            assert!(wait(link.write(writes, soon())).iter().all(Result::is_ok));
        });
        let extents: Vec<_> = (0..BATCH).map(|_| host.stored(&bytes)).collect();
        let into: Vec<_> = (0..BATCH).map(|_| room(BLOCK)).collect();
        report(&format!("{kind:?} read"), || {
            let reads = extents.iter().zip(&into).map(|(e, i)| read_op(*e, i));
            let read = wait(link.read(EPOCH, reads.collect(), soon()));
            assert!(read.iter().all(Result::is_ok));
        });
    }
}

fn bare_tcp() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let block = vec![5u8; BLOCK];
        while stream.write_all(&block).is_ok() {}
    });
    let stream = std::cell::RefCell::new(TcpStream::connect(address).unwrap());
    let block = std::cell::RefCell::new(vec![0u8; BLOCK]);
    report("bare TCP, one connection", || {
        for _ in 0..BATCH {
            let mut stream = stream.borrow_mut();
            stream.read_exact(&mut block.borrow_mut()).unwrap();
        }
    });
}
