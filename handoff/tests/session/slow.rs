//! A slow network: all bytes flow, and a room takes longer than one write may take.

use crate::ranks::{soon, succeeded};
use kvpool_handoff::plan::{Stages, StateRule, StateShape};
use kvpool_handoff::registration::{RankDescription, StateRegion};
use kvpool_handoff::room::{RoomId, RoomLimits};
use kvpool_handoff::session::{ChunkSizes, HandoffOptions, HandoffSession, RankMemory};
use kvpool_transport::{Region, Slice};
use kvpool_types::Length;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LAYERS: u32 = 2;
const PAGES: u32 = 64;
const PAGE_BYTES: u64 = 128 << 10;
const BYTES_PER_SECOND: f64 = 8e6;

/// A rank with 16 MiB, each layer in memory of its own.
fn rank(listener: TcpListener, address: Option<SocketAddr>) -> (HandoffSession, Vec<Slice>) {
    let bytes = PAGE_BYTES * u64::from(PAGES);
    let memories: Vec<Slice> = (0..LAYERS)
        .map(|_| Region::allocate(Length(bytes)).whole())
        .collect();
    let states = (0..LAYERS)
        .zip(&memories)
        .map(|(layer, memory)| StateRegion {
            name: "mla".to_owned(),
            layer,
            shape: StateShape::whole(StateRule::OneSource, PAGE_BYTES).unwrap(),
            base: memory.as_ptr().addr() as u64,
            pages: PAGES,
        });
    let description = RankDescription {
        address: String::new(),
        tensor: (0, 1),
        pipeline: (0, Stages::new(&[LAYERS]).unwrap()),
        page_tokens: 16,
        hidden_bytes: 0,
        states: states.collect(),
    };
    let options = HandoffOptions {
        address: address.map(|address| address.to_string()),
        limits: RoomLimits {
            stalled: Duration::from_millis(500),
            ..RoomLimits::default()
        },
        chunks: ChunkSizes {
            bytes: 512 << 10,
            bytes_under_way: 1 << 20,
        },
        ..HandoffOptions::default()
    };
    let memory = RankMemory::new(description, memories.clone()).unwrap();
    let session = HandoffSession::start(listener, memory, options).unwrap();
    (session, memories)
}

/// Forwards bytes until the end. With `turn`, all connections together forward at most [`BYTES_PER_SECOND`].
pub(crate) fn pass(mut from: TcpStream, mut to: TcpStream, turn: Option<Arc<Mutex<Instant>>>) {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if let Some(turn) = &turn {
                let mut free = turn.lock().unwrap();
                let begin = (*free).max(Instant::now());
                let takes = Duration::from_secs_f64(count as f64 / BYTES_PER_SECOND);
                *free = begin + takes;
                drop(free);
                std::thread::sleep((begin + takes).saturating_duration_since(Instant::now()));
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        // The other end may have ended first.
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
}

/// The address of a slow path to `target`.
fn slow_way(target: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let turn = Arc::new(Mutex::new(Instant::now()));
    std::thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            let Ok(far) = TcpStream::connect(target) else {
                continue;
            };
            pass(
                near.try_clone().unwrap(),
                far.try_clone().unwrap(),
                Some(turn.clone()),
            );
            pass(far, near, None);
        }
    });
    address
}

#[test]
fn a_room_whose_bytes_flow_arrives_however_long_all_of_them_take() {
    let listener = || TcpListener::bind("127.0.0.1:0").unwrap();
    let (prefill, from) = rank(listener(), None);
    let of_decode = listener();
    let way = slow_way(of_decode.local_addr().unwrap());
    let (decode, to) = rank(of_decode, Some(way));
    for (at, memory) in (1u8..).zip(&from) {
        let bytes: Vec<u8> = (0..memory.length().0)
            .map(|offset| (offset / 4099).to_le_bytes()[0] ^ at)
            .collect();
        memory.write_at(kvpool_types::Offset(0), &bytes);
    }
    let pages: Vec<u32> = (0..PAGES).collect();
    let deadline = Instant::now() + Duration::from_secs(10);
    let addresses = [prefill.address().to_owned()];
    let stages = Stages::new(&[LAYERS]).unwrap();
    let of_room = (0, pages.clone());
    let receiving = decode.receive(
        RoomId(1),
        of_room,
        &addresses,
        (1, &stages),
        false,
        deadline,
    );
    let receiving = receiving.unwrap();
    let sending = prefill.send(RoomId(1), pages, 1, deadline).unwrap();
    let begun = Instant::now();
    sending.produced(0..PAGES, 0..LAYERS).unwrap();
    sending.finish(Vec::new()).unwrap();
    succeeded(&receiving.wait(soon()));
    assert!(
        begun.elapsed() > Duration::from_secs(1),
        "the way is not slow: this test shows nothing"
    );
    succeeded(&sending.wait(soon()));
    for (from, to) in from.iter().zip(&to) {
        assert!(from.to_vec() == to.to_vec(), "the bytes differ");
    }
}
