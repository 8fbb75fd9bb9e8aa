//! Reads through a relay that damages bytes which go over TCP.

use super::super::direct::works_here;
use super::*;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A read of one frame.
const LENGTH: u64 = MIB;
/// The position of the damaged byte in each MiB of a connection's answers. It lies in the bytes of a read.
const DAMAGED: u64 = 300_000;

fn reading(reads_directly: bool) -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = EndpointOptions {
        name: "test".to_owned(),
        secret: Secret::default(),
        stall: Duration::from_secs(20),
        rdma: None,
        reads_directly,
        letters: None,
    };
    Endpoint::start(listener, options).unwrap()
}

/// Starts a relay to `there`. It flips a byte of the answers, `times` times in all.
fn relay(there: &Endpoint, times: &Arc<AtomicUsize>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (server, times) = (there.local_addr(), times.clone());
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let near = near.unwrap();
            let far = TcpStream::connect(server).unwrap();
            let (mut asks, mut asked) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ended = std::io::copy(&mut asks, &mut asked);
                let _ended = asked.shutdown(Shutdown::Both);
            });
            let times = times.clone();
            std::thread::spawn(move || answers(far, near, &times));
        }
    });
    address
}

fn answers(mut far: TcpStream, mut near: TcpStream, times: &AtomicUsize) {
    let mut bytes = vec![0; 64 << 10];
    let mut at = 0_u64;
    while let Ok(count @ 1..) = far.read(&mut bytes) {
        let came = &mut bytes[..count];
        let place = (DAMAGED + LENGTH - at % LENGTH) % LENGTH;
        let damaged = came.get_mut(Length(place).as_usize());
        let less = |left: usize| left.checked_sub(1);
        if let Some(byte) = damaged
            && times
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
                .is_ok()
        {
            *byte ^= 1;
        }
        at += count as u64;
        if near.write_all(came).is_err() {
            break;
        }
    }
    let _ended = near.shutdown(Shutdown::Both);
}

#[test]
fn damaged_bytes_are_read_once_more_and_then_refused() {
    for (times, expected) in [(0, Code::Ok), (1, Code::Ok), (2, Code::ChecksumMismatch)] {
        let (here, there) = (reading(false), reading(false));
        let source = exposed(&there, LENGTH);
        let back = Region::allocate(Length(LENGTH));
        let left = Arc::new(AtomicUsize::new(times));
        let target = relay(&there, &left);
        let moves = whole(&back, address(&source));
        let read = here.transfer(&target, Direction::Read, &moves, soon());
        assert_eq!(code(read), expected, "{times} times");
        if expected == Code::Ok {
            assert!(back.whole().to_vec() == source.whole().to_vec());
        }
        assert_eq!(
            left.load(Ordering::SeqCst),
            0,
            "a read passed without a damaged byte"
        );
    }
}

#[test]
fn large_reads_are_copied_from_the_process_of_a_peer_on_this_host() {
    if !works_here("large_reads_are_copied_from_the_process_of_a_peer_on_this_host") {
        return;
    }
    // The relay would damage bytes that go over TCP.
    let read = |reader: bool, owner: bool, length: u64| {
        let (here, there) = (reading(reader), reading(owner));
        let source = exposed(&there, length);
        let back = Region::allocate(Length(length));
        let left = Arc::new(AtomicUsize::new(1));
        let target = relay(&there, &left);
        let moves = whole(&back, address(&source));
        let outcome = here.transfer(&target, Direction::Read, &moves, soon());
        assert_eq!(outcome, Ok(()));
        assert!(back.whole().to_vec() == source.whole().to_vec());
        let says = here.route(&target, soon()).unwrap().reads_directly;
        assert_eq!(says, reader && owner);
        left.load(Ordering::SeqCst) == 1
    };
    assert!(read(true, true, LENGTH));
    assert!(read(true, true, 20 * MIB + 5));
    assert!(!read(true, true, LENGTH - 1), "a small read goes over TCP");
    assert!(!read(true, false, LENGTH), "the owner does not permit it");
    assert!(!read(false, true, LENGTH), "the reader does not want it");
}

#[test]
fn a_process_that_is_not_the_peer_is_not_read() {
    if !works_here("a_process_that_is_not_the_peer_is_not_read") {
        return;
    }
    let (here, there) = (reading(true), reading(true));
    let source = exposed(&there, LENGTH);
    let back = Region::allocate(Length(LENGTH));
    let left = Arc::new(AtomicUsize::new(1));
    let target = relay(&there, &left);
    let read = || {
        let moves = whole(&back, address(&source));
        code(here.transfer(&target, Direction::Read, &moves, soon()))
    };
    assert_eq!(read(), Code::Ok);
    assert_eq!(left.load(Ordering::SeqCst), 1, "the read was not a copy");
    // As in a process that got the peer's process id.
    let mark = there.host.card.as_ref().unwrap().mark.whole();
    mark.write_at(Offset(0), &[0; 16]);
    back.whole()
        .write_at(Offset(0), &vec![0; Length(LENGTH).as_usize()]);
    assert_eq!(read(), Code::Ok);
    assert_eq!(
        left.load(Ordering::SeqCst),
        0,
        "the read did not go over TCP"
    );
    assert!(back.whole().to_vec() == source.whole().to_vec());
}

#[test]
fn a_direct_read_of_unexposed_memory_copies_no_byte() {
    let (here, there) = (reading(true), reading(true));
    let secret = filled(16 * MIB, 0x33);
    // The first parts of the read are exposed.
    let part = secret.slice(Offset(0), Length(9 * MIB)).unwrap();
    there.expose(part).unwrap();
    let back = Region::allocate(Length(16 * MIB));
    let moves = whole(&back, address(&secret));
    let refused = here.transfer(&name(&there), Direction::Read, &moves, soon());
    assert_eq!(code(refused), Code::OutOfRange);
    assert!(back.whole().to_vec().iter().all(|byte| *byte == 0));
}
