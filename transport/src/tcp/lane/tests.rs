use super::super::exchange::{Exchange, ExchangeOutcomes, Work};
use super::super::link::ConnectOptions;
use super::{TcpLane, open_socket};
use crate::outcomes::Batch;
use crate::socket::wait_until_ready;
use crate::threads;
use crate::wire::Wire;
use kvpool_types::wire::data::Hello;
use kvpool_types::{Checksum, ChecksumAlgorithm, ClientId, ClusterId, Epoch, Incarnation, Token};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType};
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn hello() -> Hello {
    Hello {
        min_version: 1,
        max_version: 1,
        cluster: ClusterId(1),
        client: ClientId(1),
        incarnation: Incarnation(1),
        checksum_algorithm: ChecksumAlgorithm::Crc64Nvme as u8,
        token: Token::default(),
    }
}

/// A lane over one end of a socket, and the other end, which says nothing.
pub(in super::super) fn lane_to_a_silent_peer() -> (Arc<TcpLane>, UnixStream) {
    let (lane, peer) = start_lane_to_a_silent_peer();
    (lane.unwrap(), peer)
}

fn start_lane_to_a_silent_peer() -> (io::Result<Arc<TcpLane>>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let socket = Wire::from(OwnedFd::from(ours));
    let address = "127.0.0.1:1".parse().unwrap();
    let lane = TcpLane::start(address, hello(), ConnectOptions::default(), Some(socket));
    (lane, theirs)
}

/// A scan of the timer that saw it in neither would wait for no deadline.
#[test]
fn an_exchange_is_always_in_the_queue_or_on_a_connection() {
    let (lane, _peer) = lane_to_a_silent_peer();
    let wire = lane.state.lock().wire.clone().unwrap();
    // The sender stops where it assigns the exchange to the connection.
    let pending = wire.pending.lock();
    let (batch, _outcomes) = Batch::<Checksum>::new(1);
    let work = Work::Read {
        items: Vec::new(),
        into: Vec::new(),
        outcomes: ExchangeOutcomes::new(batch, vec![0]),
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    lane.submit(Exchange::new(
        Epoch(1),
        deadline,
        work,
        lane.load().clone(),
        0,
    ));
    let limit = Instant::now() + Duration::from_secs(20);
    let mut locked = 0;
    while locked < 20 {
        assert!(Instant::now() < limit, "the sender took no exchange");
        match lane.state.try_lock() {
            Some(state) => assert!(!state.queue.is_empty(), "the exchange is in no table"),
            // The sender holds it, so that no scan gets by.
            None => locked += 1,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(pending);
    while !lane.state.lock().queue.is_empty() {
        std::thread::yield_now();
    }
    assert_eq!(lane.expire(Instant::now()), Some(deadline));
    lane.close(crate::outcomes::unreachable("the test is over"));
}

#[test]
fn a_lane_that_cannot_start_its_sender_ends_its_receiver() {
    let (lane, mut peer) = threads::testing::at_most(1, start_lane_to_a_silent_peer);
    assert!(lane.is_err());
    peer.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    // The receiving thread holds the socket.
    assert_eq!(peer.read(&mut [0]).unwrap(), 0, "the socket is open");
}

#[test]
fn connecting_to_a_listener_without_room_ends_at_the_deadline() {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    rustix::net::bind(&socket, &any).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let listener = TcpListener::from(socket);
    let address = listener.local_addr().unwrap();
    // It fills the queue, so that the system does not answer the next caller.
    let patience = Duration::from_secs(20);
    let _first = TcpStream::connect_timeout(&address, patience).unwrap();
    // The connection may enter the queue a moment later than the caller sees it.
    wait_until_ready(listener.as_fd(), PollFlags::IN, Instant::now() + patience).unwrap();
    let deadline = Instant::now() + Duration::from_millis(300);
    let outcome = open_socket(address, deadline).map(drop);
    let ended = Instant::now();
    assert_eq!(outcome, Err(Errno::TIMEDOUT));
    assert!(ended >= deadline, "it ended early");
    assert!(ended - deadline < Duration::from_secs(1));
}
