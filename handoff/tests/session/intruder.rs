//! Processes that are no peers: a session accepts nothing from them.

use crate::child::group;
use crate::faults::exchange;
use crate::ranks::{PAGES, Rank, soon};
use kvpool_handoff::room::{
    PollState, RoomGeneration, RoomId, RoomKey, RoomOffer, RoomTag, ToSender,
};
use kvpool_handoff::session::HandoffOptions;
use kvpool_handoff::wire::HandoffMessage;
use kvpool_transport::peer::{
    Endpoint, EndpointOptions, Letter, LetterBox, LetterOptions, RoomPart, RoomPass, Secret,
};
use kvpool_transport::{Region, TransferError};
use kvpool_types::{Code, Epoch, GrantKey, Length};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Deaf;

impl LetterBox for Deaf {
    fn take(&self, _letter: Letter) -> Code {
        Code::Ok
    }
}

fn stranger(secret: &str) -> Endpoint {
    let options = EndpointOptions {
        name: "stranger".to_owned(),
        secret: Secret::new(secret),
        stall: Duration::from_secs(5),
        rdma: None,
        reads_directly: false,
        letters: Some(LetterOptions {
            address: None,
            letter_box: Arc::new(Deaf),
        }),
    };
    Endpoint::start(TcpListener::bind("127.0.0.1:0").unwrap(), options).unwrap()
}

fn with_secret(secret: &str) -> Rank {
    let options = HandoffOptions {
        secret: Secret::new(secret),
        ..HandoffOptions::default()
    };
    Rank::start_with(&group(), 0, 0, options)
}

fn code<T>(outcome: Result<T, TransferError>) -> Code {
    outcome.map_or_else(|error| error.code, |_| Code::Ok)
}

#[test]
fn nothing_of_a_process_without_the_secret_is_accepted() {
    let rank = with_secret("s");
    let other = stranger("t");
    assert_eq!(
        code(other.link(&rank.address(), soon())),
        Code::GrantRefused
    );
    let none = stranger("");
    assert_eq!(code(none.link(&rank.address(), soon())), Code::GrantRefused);
}

#[test]
fn letters_that_are_no_messages_are_refused_by_name() {
    let rank = with_secret("s");
    let peer = stranger("s");
    let link = peer.link(&rank.address(), soon()).unwrap();
    let post = |body: &[u8]| code(futures::executor::block_on(link.post(body, soon())));
    for bytes in [&b"no message"[..], &[0xff; 100], &[]] {
        assert_eq!(post(bytes), Code::Malformed);
    }
    // A member of the group that has not registered: its offer is refused, and the room waits on.
    let sending = rank.session.send(RoomId(1), vec![0], 1, soon()).unwrap();
    let offer = HandoffMessage::ToSender(ToSender::Offer(RoomOffer {
        tag: RoomTag {
            room: RoomId(1),
            generation: RoomGeneration(1),
        },
        receiver: 0,
        epoch: 7,
        key: RoomKey([1; 32]),
        held: 0,
        pages: 1,
        view: 0,
        wants_aux: false,
        time_left: Duration::from_secs(60),
    }));
    assert_eq!(post(&offer.encode()), Code::Ok);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(sending.state().poll, PollState::Bootstrapping);
}

/// A member of the group guesses the numbers of rooms: no page changes.
#[test]
fn a_member_without_the_key_of_a_room_writes_nothing() {
    let (prefill, decode) = (with_secret("s"), with_secret("s"));
    let all: Vec<u32> = (0..PAGES).collect();
    decode.set(&all, 0x5a);
    let before = decode.image();
    let layers = group().layers();
    let from = [prefill.address()];
    let pages = (0, all.clone());
    let receiving = decode
        .session
        .receive(RoomId(1), pages, &from, (1, &layers), false, soon());
    let receiving = receiving.unwrap();
    let peer = stranger("s");
    let link = peer.link(&decode.address(), soon()).unwrap();
    let bytes = Region::allocate(Length(1 << 16)).whole();
    for epoch in [0, 1, 7, u64::MAX >> 1] {
        for view in [0, 1, 5] {
            let pass = RoomPass {
                epoch: Epoch(epoch),
                key: GrantKey([7; 32]),
            };
            let part = RoomPart {
                view,
                offset: 0,
                from: vec![bytes.clone()],
            };
            let outcome = futures::executor::block_on(link.write_room(&pass, &[part], soon()));
            let refused = code(outcome);
            assert!(
                matches!(
                    refused,
                    Code::GrantEnded | Code::GrantRefused | Code::OutOfRange
                ),
                "{refused:?}"
            );
        }
    }
    assert!(decode.image() == before, "a page was written");
    let until = Instant::now() + Duration::from_millis(50);
    assert_ne!(receiving.wait(until).poll, PollState::Failed);
}

/// Decode registers once on a connection. Prefill that forgot it would refuse each of its requests.
#[test]
fn a_registration_that_is_too_large_makes_prefill_forget_nobody() {
    let with_idle = |millis| {
        let options = HandoffOptions {
            secret: Secret::new("s"),
            idle: Duration::from_millis(millis),
            ..HandoffOptions::default()
        };
        Rank::start_with(&group(), 0, 0, options)
    };
    let (prefill, decode) = (with_idle(50), with_idle(60_000));
    exchange(&prefill, &decode, 1);
    // Prefill closes its connection to decode meanwhile, and decode keeps its own.
    std::thread::sleep(Duration::from_millis(300));
    let mut large = decode.session.memory().description().clone();
    large.states[0].name = "n".repeat(5 << 20);
    let register = HandoffMessage::Register(large).encode();
    let peer = stranger("s");
    let link = peer.link(&prefill.address(), soon()).unwrap();
    let posted = futures::executor::block_on(link.post(&register, soon()));
    assert_eq!(code(posted), Code::Ok);
    exchange(&prefill, &decode, 2);
}
