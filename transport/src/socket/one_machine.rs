//! Connections whose two ends are on one machine: what goes over them never leaves its memory, and
//! best never leaves a core's cache.

use super::cores::Leave;
use rustix::net::{SocketAddrAny, sockopt};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

/// The less is on its way, the more of it is still in the sender's cache when it is received. The
/// kernel doubles what it is asked for.
const BUFFER: usize = 96 << 10;

/// The one congestion control that every kernel has and every process may choose. There is no network
/// to be gentle to: one that paces, as BBR does, only makes the receiver wait.
const UNPACED: &str = "reno";

/// Sets up a connected socket for the way inside one machine, when both its ends are on this one.
pub(crate) fn suit_one_machine(socket: BorrowedFd<'_>) {
    if !ends_on_one_machine(socket) {
        return;
    }
    let shrunk = sockopt::set_socket_recv_buffer_size(socket, BUFFER)
        .and_then(|()| sockopt::set_socket_send_buffer_size(socket, BUFFER));
    if let Err(error) = shrunk {
        tracing::debug!(%error, "the buffers keep their size");
    }
    if let Err(error) = sockopt::set_tcp_congestion(socket, UNPACED) {
        tracing::debug!(%error, "the congestion control stays what it is");
    }
}

pub(super) fn ends_on_one_machine(socket: BorrowedFd<'_>) -> bool {
    let ip = |end: Option<SocketAddrAny>| -> Option<IpAddr> {
        Some(SocketAddr::try_from(end?).ok()?.ip())
    };
    let here = ip(rustix::net::getsockname(socket).ok());
    let there = ip(rustix::net::getpeername(socket).ok().flatten());
    match (here, there) {
        (Some(here), Some(there)) => here == there || there.is_loopback(),
        _ => false,
    }
}

/// Keeps the thread that receives on the core of the thread that sends, until it is dropped.
///
/// Inside one machine the bytes of a packet are copied in by the sender and out by the receiver. On
/// one core the second copy reads what the first has left in the cache, and each end runs while the
/// other waits; on two, every packet moves between caches and wakes the other core. The sender stays
/// free to move, and is followed.
pub(super) struct Following<'a> {
    socket: BorrowedFd<'a>,
    leave: Leave,
    on: Option<usize>,
}

impl<'a> Following<'a> {
    /// Begins to follow; `None` where the sender is not on this machine.
    pub(super) fn begin(socket: BorrowedFd<'a>) -> Option<Self> {
        if !ends_on_one_machine(socket) {
            return None;
        }
        let mut following = Self {
            socket,
            leave: Leave::take()?,
            on: None,
        };
        following.follow();
        Some(following)
    }

    /// Goes to where the last packet came from, if this thread may run there.
    pub(super) fn follow(&mut self) {
        let Ok(core) = sockopt::socket_incoming_cpu(self.socket) else {
            return;
        };
        let core = core as usize;
        if self.on != Some(core) && self.leave.covers(core) && self.leave.go_to(core) {
            self.on = Some(core);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BUFFER, Following, UNPACED, suit_one_machine};
    use rustix::net::sockopt;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    fn cores(set: &CpuSet) -> Vec<usize> {
        (0..CpuSet::MAX_CPU)
            .filter(|core| set.is_set(*core))
            .collect()
    }

    fn only(core: usize) -> CpuSet {
        let mut set = CpuSet::new();
        set.set(core);
        set
    }

    /// Sends a byte from `core`, and takes it at the other end.
    fn send_from(core: usize, from: &mut TcpStream, to: &mut TcpStream) {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                sched_setaffinity(None, &only(core)).unwrap();
                from.write_all(&[1]).unwrap();
            });
        });
        to.read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn a_receiver_is_where_its_sender_is_and_goes_back() {
        let allowed = sched_getaffinity(None).unwrap();
        let (mut sender, mut receiver) = pair();
        let socket = receiver.try_clone().unwrap();
        let mut following = Following::begin(socket.as_fd()).unwrap();
        for core in cores(&allowed) {
            send_from(core, &mut sender, &mut receiver);
            following.follow();
            assert_eq!(cores(&sched_getaffinity(None).unwrap()), [core]);
        }
        drop(following);
        assert_eq!(
            cores(&sched_getaffinity(None).unwrap()),
            cores(&allowed),
            "the thread may run where it might before"
        );
    }

    #[test]
    fn a_receiver_stays_within_the_cores_that_it_may_use() {
        let allowed = cores(&sched_getaffinity(None).unwrap());
        let (mut sender, mut receiver) = pair();
        let [first, .., last] = *allowed else {
            return; // A sender on one core has nowhere to go.
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let socket = receiver.try_clone().unwrap();
                send_from(last, &mut sender, &mut receiver);
                sched_setaffinity(None, &only(first)).unwrap();
                let mut following = Following::begin(socket.as_fd()).unwrap();
                following.follow();
                assert_eq!(cores(&sched_getaffinity(None).unwrap()), [first]);
            });
        });
    }

    #[test]
    fn connections_within_a_machine_are_short_and_not_paced() {
        let (one, _other) = pair();
        suit_one_machine(one.as_fd());
        assert_eq!(sockopt::tcp_congestion(one.as_fd()).unwrap(), UNPACED);
        let doubled = sockopt::socket_send_buffer_size(one.as_fd()).unwrap();
        assert_eq!(doubled, 2 * BUFFER);
    }
}
