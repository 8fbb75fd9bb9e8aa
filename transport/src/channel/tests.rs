use super::*;
use crate::frame::{encode_head, receive_exact, receive_meta, send};
use kvpool_types::wire::data::{Failure, Statuses};
use kvpool_types::wire::features::Features;
use kvpool_types::wire::frame::{HEADER_BYTES, Header};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// A channel and the plain socket at its other end.
fn pair() -> (Arc<Channel>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (
        Arc::new(
            Channel::from_socket(std::os::fd::OwnedFd::from(ours), Features::default()).unwrap(),
        ),
        theirs,
    )
}

/// Reads one request.
fn request(socket: &UnixStream) -> Header {
    let mut head = [0; HEADER_BYTES];
    receive_exact(socket.as_fd(), &mut head, |_| false).unwrap();
    let header = crate::frame::decode_header(&head).unwrap();
    receive_meta(socket.as_fd(), &header, &mut Vec::new()).unwrap();
    header
}

fn pong(socket: &UnixStream, request: u64) {
    send(
        socket.as_fd(),
        Op::Pong,
        request,
        Epoch(1),
        &Statuses(Vec::new()),
    )
    .unwrap();
}

fn ping(channel: &Arc<Channel>) -> tokio::task::JoinHandle<Result<(), TransferError>> {
    let channel = channel.clone();
    tokio::spawn(async move { channel.ping(Epoch(1)).await })
}

async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

/// The number of voluntary context switches of the calling thread.
fn sleeps() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("voluntary"));
    let (_, count) = line.unwrap().split_once(':').unwrap();
    count.trim().parse().unwrap()
}

/// Waking a sleeping core costs more than the rest of a small request. A Unix socket also becomes
/// writable with every message that its peer takes.
#[tokio::test]
async fn a_waiting_call_is_woken_once() {
    const CALLS: u64 = 100;
    let (channel, socket) = pair();
    let rest = || std::thread::sleep(Duration::from_millis(2));
    let served = std::thread::spawn(move || {
        for _ in 0..CALLS {
            crate::socket::wait_to_receive(socket.as_fd()).unwrap();
            // The caller sleeps when its request is taken, and again until it is answered.
            rest();
            let asked = request(&socket);
            rest();
            pong(&socket, asked.request);
        }
    });
    let before = sleeps();
    for _ in 0..CALLS {
        channel.ping(Epoch(1)).await.unwrap();
    }
    let slept = sleeps() - before;
    served.join().unwrap();
    // On a busy machine an answer may arrive before the caller sleeps.
    assert!(slept < CALLS * 3 / 2, "{slept} sleeps");
}

/// Both directions stall until somebody reads: bytes beyond the socket's buffer wait.
#[tokio::test]
async fn a_frame_larger_than_the_socket_buffer_is_sent_in_parts() {
    let (channel, socket) = pair();
    let payload: Vec<u8> = (0..4_000_000u32).map(|n| n.to_le_bytes()[0]).collect();
    let expected = payload.clone();
    let call = tokio::spawn({
        let channel = channel.clone();
        async move {
            let call = channel.call_with_payload(Op::Write, Epoch(1), &payload, |_| {});
            call.await.map(|reply| reply.op)
        }
    });
    let came = aside(move || {
        let header = request(&socket);
        let mut came = vec![0; expected.len()];
        receive_exact(socket.as_fd(), &mut came, |_| false).unwrap();
        pong(&socket, header.request);
        came == expected
    });
    assert!(came.await, "other bytes came");
    assert_eq!(call.await.unwrap(), Ok(Op::Pong));
}

#[tokio::test]
async fn answers_in_another_order_reach_their_calls() {
    let (channel, socket) = pair();
    let calls: Vec<_> = (0..3)
        .map(|_| {
            let channel = channel.clone();
            tokio::spawn(async move {
                let reply = channel.call(Op::Sums, Epoch(1), |_| {}).await.unwrap();
                (reply.epoch, reply.decode::<Statuses>(Op::Statuses).unwrap())
            })
        })
        .collect();
    aside(move || {
        let asked: Vec<u64> = (0..3).map(|_| request(&socket).request).collect();
        for number in asked.into_iter().rev() {
            let codes = (0..number).map(|_| Code::Missing).collect();
            send(
                socket.as_fd(),
                Op::Statuses,
                number,
                Epoch(number),
                &Statuses(codes),
            )
            .unwrap();
        }
    })
    .await;
    let mut seen = Vec::new();
    for call in calls {
        let (epoch, Statuses(codes)) = call.await.unwrap();
        assert_eq!(epoch.0, codes.len() as u64);
        seen.push(epoch.0);
    }
    seen.sort_unstable();
    assert_eq!(seen, [1, 2, 3]);
}

/// Without the hand-over the second caller would sleep on, because the driver only knows the first.
#[tokio::test]
async fn a_dropped_reader_passes_the_role_on() {
    let (channel, socket) = pair();
    let stays = ping(&channel);
    tokio::task::yield_now().await;
    let leaves = ping(&channel);
    tokio::task::yield_now().await;
    let (first, socket) = aside(move || {
        let first = request(&socket).request;
        request(&socket);
        (first, socket)
    })
    .await;
    leaves.abort();
    leaves.await.unwrap_err();
    pong(&socket, first);
    let answered = tokio::time::timeout(Duration::from_secs(5), stays).await;
    assert_eq!(answered.unwrap().unwrap(), Ok(()));
}

/// The call polled last is answered first; the other answer comes later.
#[tokio::test]
async fn an_answered_reader_passes_the_role_on() {
    let (channel, socket) = pair();
    let slow = ping(&channel);
    tokio::task::yield_now().await;
    let waiting = ping(&channel);
    tokio::task::yield_now().await;
    let (first, second, socket) = aside(move || {
        let first = request(&socket).request;
        (first, request(&socket).request, socket)
    })
    .await;
    pong(&socket, second);
    assert_eq!(waiting.await.unwrap(), Ok(()));
    pong(&socket, first);
    let answered = tokio::time::timeout(Duration::from_secs(5), slow).await;
    assert_eq!(answered.unwrap().unwrap(), Ok(()));
}

#[tokio::test]
async fn a_failure_ends_its_call_alone() {
    let (channel, socket) = pair();
    let failing = ping(&channel);
    tokio::task::yield_now().await;
    let fine = ping(&channel);
    aside(move || {
        let failure = Failure {
            code: Code::Full,
            message: "no room".to_owned(),
        };
        let first = request(&socket).request;
        send(socket.as_fd(), Op::Failure, first, Epoch(1), &failure).unwrap();
        pong(&socket, request(&socket).request);
        socket
    })
    .await;
    let error = failing.await.unwrap().unwrap_err();
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::Full, "no room")
    );
    assert_eq!(fine.await.unwrap(), Ok(()));
    assert!(channel.is_open());
}

#[tokio::test]
async fn a_closed_connection_fails_all_waiting_and_later_calls() {
    let (channel, socket) = pair();
    let calls = [ping(&channel), ping(&channel)];
    tokio::task::yield_now().await;
    drop(socket);
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap_err().code, Code::Unreachable);
    }
    assert!(!channel.is_open());
    let error = channel.ping(Epoch(1)).await.unwrap_err();
    assert_eq!(error.code, Code::Unreachable);
}

#[tokio::test]
async fn a_malformed_frame_ends_the_connection() {
    let (channel, socket) = pair();
    let call = ping(&channel);
    tokio::task::yield_now().await;
    std::io::Write::write_all(&mut &socket, &[0x5a; 100]).unwrap();
    assert_eq!(call.await.unwrap().unwrap_err().code, Code::Malformed);
    assert!(!channel.is_open());
}

#[tokio::test]
async fn an_answer_larger_than_the_buffer_arrives_whole() {
    let (channel, socket) = pair();
    let bytes = 300_000;
    let asking = channel.clone();
    let call = tokio::spawn(async move {
        for fill in 1..4 {
            let reply = asking.call(Op::Exist, Epoch(1), |_| {}).await.unwrap();
            assert_eq!(reply.meta, vec![fill; bytes]);
        }
    });
    aside(move || {
        for fill in 1..4 {
            let number = request(&socket).request;
            let meta = |out: &mut Vec<u8>| out.resize(out.len() + bytes, fill);
            let frame = encode_head(Op::Reply, number, Epoch(1), 0, meta).unwrap();
            std::io::Write::write_all(&mut &socket, &frame).unwrap();
        }
    })
    .await;
    call.await.unwrap();
}

/// A half-written frame would make all that follows unreadable.
#[tokio::test]
async fn a_half_written_request_ends_the_connection() {
    let (channel, _socket) = pair();
    let asking = channel.clone();
    let call = tokio::spawn(async move {
        let meta = |out: &mut Vec<u8>| out.resize(out.len() + (3 << 20), 0);
        asking.call(Op::Exist, Epoch(1), meta).await
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(channel.is_open());
    call.abort();
    call.await.unwrap_err();
    assert!(!channel.is_open());
}

#[tokio::test]
async fn a_polling_call_delivers_all_answers() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let serving = std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        let socket = std::os::fd::OwnedFd::from(socket);
        let mut head = [0; HEADER_BYTES];
        for _ in 0..200 {
            receive_exact(socket.as_fd(), &mut head, |_| false).unwrap();
            let header = crate::frame::decode_header(&head).unwrap();
            let nothing = Statuses(Vec::new());
            send(socket.as_fd(), Op::Pong, header.request, Epoch(1), &nothing).unwrap();
        }
    });
    let channel = Channel::connect(address, Duration::from_millis(5))
        .await
        .unwrap();
    let channel = Arc::new(channel);
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let channel = channel.clone();
            tokio::spawn(async move {
                for _ in 0..50 {
                    channel.ping(Epoch(1)).await.unwrap();
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    serving.join().unwrap();
}
