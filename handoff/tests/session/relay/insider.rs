//! A process that knows the secret and breaks the protocol, in the place of prefill or of decode.

use super::scene::patient;
use crate::child::group;
use crate::faults::{reaches, receive};
use crate::ranks::{PAGES, Rank, soon, succeeded};
use kvpool_handoff::room::{
    ChunkBody, DeskOptions, PageRectangle, PollState, RoomChunk, RoomGeneration, RoomId, RoomKey,
    RoomOffer, RoomRoot, RoomTag, ToReceiver, ToSender,
};
use kvpool_handoff::session::{HandoffOptions, PinLimits, Receiving, Sending, TransferState};
use kvpool_handoff::wire::HandoffMessage;
use kvpool_transport::peer::{
    Endpoint, EndpointOptions, Letter, LetterBox, LetterOptions, PeerLink, RoomPart, RoomPass,
    RoomView,
};
use kvpool_transport::{Region, TransferError};
use kvpool_types::{Checksum, Code, Epoch, GrantKey, Length, Offset};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

const ROOM: RoomId = RoomId(1);
const BEFORE: u8 = 0x5a;
/// The views of a rank's share: k, v and mla of two layers.
const VIEWS: u32 = 6;

struct Inbox(Sender<HandoffMessage>);

impl LetterBox for Inbox {
    fn take(&self, letter: Letter) -> Code {
        drop(self.0.send(HandoffMessage::decode(&letter.body).unwrap()));
        Code::Ok
    }
}

/// An endpoint of the group without a machine behind it.
struct Insider {
    endpoint: Endpoint,
    address: String,
    inbox: Receiver<HandoffMessage>,
}

impl Insider {
    fn start() -> Self {
        Self::at(None)
    }

    /// An insider that reports another address than its own.
    fn at(address: Option<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap().to_string();
        let address = address.unwrap_or(own);
        let (letters, inbox) = channel();
        let options = EndpointOptions {
            name: "insider".to_owned(),
            secret: patient().secret,
            stall: Duration::from_secs(5),
            rdma: None,
            reads_directly: false,
            letters: Some(LetterOptions {
                address: Some(address.clone()),
                letter_box: Arc::new(Inbox(letters)),
            }),
        };
        Self {
            endpoint: Endpoint::start(listener, options).unwrap(),
            address,
            inbox,
        }
    }

    fn link(&self, to: &Rank) -> PeerLink {
        self.endpoint.link(&to.address(), soon()).unwrap()
    }

    fn post(&self, to: &Rank, message: &HandoffMessage) -> Code {
        let posting = self.link(to).post(&message.encode(), soon());
        let outcome = futures::executor::block_on(posting);
        outcome.map_or_else(|error| error.code, |()| Code::Ok)
    }

    /// Sends a message that its receiver accepts.
    fn says(&self, to: &Rank, message: &HandoffMessage) {
        assert_eq!(self.post(to, message), Code::Ok);
    }

    /// The first message that fits.
    fn hears<T>(&self, fits: impl Fn(HandoffMessage) -> Option<T>) -> T {
        let until = soon();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let message = self.inbox.recv_timeout(left);
            if let Some(found) = fits(message.unwrap()) {
                return found;
            }
        }
    }

    fn write(&self, to: &Rank, pass: &RoomPass, parts: &[RoomPart]) -> Result<Checksum, Code> {
        let writing = self.link(to).write_room(pass, parts, soon());
        let outcome: Result<_, TransferError> = futures::executor::block_on(writing);
        outcome.map_err(|error| error.code)
    }
}

fn failed_with(state: &TransferState, code: Code) {
    assert_eq!((state.poll, state.failure), (PollState::Failed, Some(code)));
    assert!(state.is_released);
}

/// A decode session whose sender is an insider.
struct Decode {
    rank: Rank,
    insider: Insider,
}

impl Decode {
    fn start() -> Self {
        let rank = Rank::start_with(&group(), 0, 0, patient());
        rank.set(&(0..PAGES).collect::<Vec<_>>(), BEFORE);
        Self {
            rank,
            insider: Insider::start(),
        }
    }

    fn receive(&self, room: RoomId, pages: &[u32]) -> (Receiving, RoomOffer) {
        let layers = group().layers();
        let (from, of_room) = ([self.insider.address.clone()], (0, pages.to_vec()));
        let session = &self.rank.session;
        let receiving = session.receive(room, of_room, &from, (1, &layers), false, soon());
        let offer = self.insider.hears(|message| match message {
            HandoffMessage::ToSender(ToSender::Offer(offer)) if offer.tag.room == room => {
                Some(offer)
            }
            _ => None,
        });
        (receiving.unwrap(), offer)
    }

    fn says(&self, message: ToReceiver) {
        let message = HandoffMessage::ToReceiver(message);
        self.insider.says(&self.rank, &message);
    }

    /// Writes one page into all views of a room, at the place of page `at`.
    fn page(&self, pass: &RoomPass, bytes: u8, at: u32) -> Result<Checksum, Code> {
        let view = |view: u32| {
            let length = page_bytes(view);
            RoomPart {
                view,
                offset: u64::from(at) * length.0,
                from: vec![filled(length, bytes)],
            }
        };
        let parts: Vec<RoomPart> = (0..VIEWS).map(view).collect();
        self.insider.write(&self.rank, pass, &parts)
    }

    fn assert_pages(&self, pages: &[u32], wanted: u8) {
        for state in self.rank.image() {
            let length = state.len() / PAGES as usize;
            for page in pages {
                let from = *page as usize * length;
                let bytes = &state[from..from + length];
                assert!(bytes.iter().all(|byte| *byte == wanted), "page {page}");
            }
        }
        assert!(self.rank.guards_are_whole());
    }
}

fn page_bytes(view: u32) -> Length {
    Length(if view % 3 == 2 { 640 } else { 4096 })
}

fn filled(length: Length, value: u8) -> kvpool_transport::Slice {
    Region::from(vec![value; length.as_usize()]).whole()
}

fn pass(offer: &RoomOffer) -> RoomPass {
    RoomPass {
        epoch: Epoch(offer.epoch),
        key: GrantKey(offer.key.0),
    }
}

fn chunk(id: u32, pages: std::ops::Range<u32>, checksum: Checksum) -> RoomChunk {
    let layers = 0..2;
    RoomChunk {
        id,
        body: ChunkBody::Pages(PageRectangle { pages, layers }),
        checksum,
    }
}

#[test]
fn a_wrong_room_key_writes_nothing() {
    let decode = Decode::start();
    let (one, of_one) = decode.receive(ROOM, &[1, 3]);
    let (two, of_two) = decode.receive(RoomId(2), &[5, 7]);
    let (right, other) = (pass(&of_one), pass(&of_two));
    let mut changed = right.clone();
    changed.key.0[31] ^= 1;
    let of_other = |key: &RoomPass, epoch: &RoomPass| RoomPass {
        epoch: epoch.epoch,
        key: key.key.clone(),
    };
    let refused = |pass: &RoomPass, wanted| assert_eq!(decode.page(pass, 9, 0), Err(wanted));
    refused(&changed, Code::GrantRefused);
    refused(&of_other(&other, &right), Code::GrantRefused);
    refused(&of_other(&right, &other), Code::GrantRefused);
    let mut unknown = right.clone();
    unknown.epoch.0 ^= 1;
    refused(&unknown, Code::GrantEnded);
    // A page of the other room is outside this room.
    assert_eq!(decode.page(&right, 9, 2), Err(Code::OutOfRange));
    decode.assert_pages(&(0..PAGES).collect::<Vec<_>>(), BEFORE);
    one.abort();
    failed_with(&one.wait(soon()), Code::Draining);
    refused(&right, Code::GrantEnded);
    two.abort();
    failed_with(&two.wait(soon()), Code::Draining);
    decode.assert_pages(&(0..PAGES).collect::<Vec<_>>(), BEFORE);
}

/// The announcements of a sender. Their bytes are right, and their places are exchanged.
fn ends_with(chunks: &[RoomChunk], write: impl Fn(&Decode, &RoomPass), wanted: Code) {
    let decode = Decode::start();
    let (receiving, offer) = decode.receive(ROOM, &[1, 3, 5]);
    let tag = offer.tag;
    write(&decode, &pass(&offer));
    for chunk in chunks.iter().cloned() {
        decode.says(ToReceiver::Chunk { tag, chunk });
    }
    let count = u32::try_from(chunks.len()).unwrap();
    let root = RoomRoot::of(tag, chunks.iter());
    decode.says(ToReceiver::Done {
        tag,
        chunks: count,
        root,
    });
    failed_with(&receiving.wait(soon()), wanted);
    let others: Vec<u32> = (0..PAGES)
        .filter(|page| ![1, 3, 5].contains(page))
        .collect();
    decode.assert_pages(&others, BEFORE);
}

/// The checksum of a page with one value, as a sender announces it.
fn sum_of_page(value: u8) -> Checksum {
    let bytes: usize = (0..VIEWS).map(|view| page_bytes(view).as_usize()).sum();
    kvpool_transport::checksum::checksum(&vec![value; bytes])
}

#[test]
fn a_permuted_page_list_fails_the_room() {
    let announced: Vec<RoomChunk> = (0..3)
        .map(|page| {
            chunk(
                page,
                page..page + 1,
                sum_of_page(u8::try_from(page).unwrap()),
            )
        })
        .collect();
    let write = |places: [u32; 3]| {
        move |decode: &Decode, pass: &RoomPass| {
            for (value, at) in (0..).zip(places) {
                decode.page(pass, value, at).unwrap();
            }
        }
    };
    for places in [[1, 0, 2], [2, 0, 1], [0, 2, 1]] {
        ends_with(&announced, write(places), Code::ChecksumMismatch);
    }
    // The bytes are in their right places, and their announcements name each other's pages.
    let mut crossed = announced.clone();
    let first = crossed[0].body.clone();
    crossed[0].body = crossed[1].body.clone();
    crossed[1].body = first;
    ends_with(&crossed, write([0, 1, 2]), Code::ChecksumMismatch);
    // In the right order the announcements are accepted.
    let decode = Decode::start();
    let (receiving, offer) = decode.receive(ROOM, &[1, 3, 5]);
    write([0, 1, 2])(&decode, &pass(&offer));
    let tag = offer.tag;
    for chunk in announced.iter().cloned() {
        decode.says(ToReceiver::Chunk { tag, chunk });
    }
    let root = RoomRoot::of(tag, announced.iter());
    decode.says(ToReceiver::Done {
        tag,
        chunks: 3,
        root,
    });
    assert_eq!(receiving.wait(soon()).poll, PollState::Success);
}

#[test]
fn pages_that_are_not_of_the_room_fail_it() {
    let sum = sum_of_page(1);
    let nothing = |_: &Decode, _: &RoomPass| {};
    for list in [
        // Outside the request.
        vec![chunk(0, 2..4, sum)],
        vec![chunk(0, 7..8, sum)],
        vec![chunk(0, 0..u32::MAX, sum)],
        // Twice.
        vec![chunk(0, 0..2, sum), chunk(1, 1..3, sum)],
        // Too few.
        vec![chunk(0, 0..2, sum)],
    ] {
        ends_with(&list, nothing, Code::Malformed);
    }
    let mut repeated = vec![chunk(0, 0..1, sum), chunk(0, 1..2, sum)];
    ends_with(&repeated, nothing, Code::Malformed);
    // A slot of metadata that the receiver did not ask for.
    repeated[0].body = ChunkBody::Aux;
    ends_with(&repeated, nothing, Code::Malformed);
    // A list without pages makes no valid message.
    let decode = Decode::start();
    let (receiving, offer) = decode.receive(ROOM, &[1, 3, 5]);
    let empty = HandoffMessage::ToReceiver(ToReceiver::Chunk {
        tag: offer.tag,
        chunk: chunk(0, 1..1, sum),
    });
    let refused = decode.insider.post(&decode.rank, &empty);
    assert_eq!(refused, Code::Malformed);
    assert_eq!(receiving.state().poll, PollState::Bootstrapping);
}

#[test]
fn messages_of_a_stale_generation_move_nothing() {
    let decode = Decode::start();
    let (first, of_first) = decode.receive(ROOM, &[1]);
    first.abort();
    failed_with(&first.wait(soon()), Code::Draining);
    let (second, of_second) = decode.receive(ROOM, &[1]);
    assert!(of_second.tag.generation > of_first.tag.generation);
    let (stale, sum) = (of_first.tag, sum_of_page(BEFORE));
    assert_eq!(decode.page(&pass(&of_first), 9, 0), Err(Code::GrantEnded));
    let list = [chunk(0, 0..1, sum)];
    let root = RoomRoot::of(stale, list.iter());
    let [only] = list;
    for message in [
        ToReceiver::Accept { tag: stale },
        ToReceiver::Chunk {
            tag: stale,
            chunk: only,
        },
        ToReceiver::Done {
            tag: stale,
            chunks: 1,
            root,
        },
    ] {
        decode.says(message);
        // The insider learns the reason each time.
        let code = decode.insider.hears(|message| match message {
            HandoffMessage::ToSender(ToSender::Abort { tag, code }) if tag == stale => Some(code),
            _ => None,
        });
        assert_eq!(code, Code::Draining);
    }
    let code = Code::Internal;
    decode.says(ToReceiver::Refuse { tag: stale, code });
    decode.says(ToReceiver::Abort { tag: stale, code });
    decode.insider.hears(|message| {
        let aborted = HandoffMessage::ToSender(ToSender::Aborted { tag: stale });
        (message == aborted).then_some(())
    });
    assert_eq!(second.state().poll, PollState::Bootstrapping);
    // Nothing is known of a later generation.
    let tag = RoomTag {
        generation: RoomGeneration(of_second.tag.generation.0 + 1),
        ..stale
    };
    decode.says(ToReceiver::Done {
        tag,
        chunks: 1,
        root,
    });
    let code = decode.insider.hears(|message| match message {
        HandoffMessage::ToSender(ToSender::Abort { tag: of, code }) if of == tag => Some(code),
        _ => None,
    });
    assert_eq!(code, Code::GrantEnded);
    assert_eq!(second.state().poll, PollState::Bootstrapping);
    decode.assert_pages(&(0..PAGES).collect::<Vec<_>>(), BEFORE);
}

/// A prefill session whose receiver is an insider.
struct Prefill {
    rank: Rank,
    insider: Insider,
    pages: Region,
    pass: RoomPass,
}

impl Prefill {
    fn start() -> Self {
        Self::start_with(patient())
    }

    fn start_with(options: HandoffOptions) -> Self {
        let rank = Rank::start_with(&group(), 0, 0, options);
        let insider = Insider::start();
        let pages = Region::from(vec![BEFORE; 1 << 16]);
        let (mut at, mut views) = (0, Vec::new());
        for view in 0..VIEWS {
            let memory = pages.slice(Offset(at), page_bytes(view)).unwrap();
            at += page_bytes(view).0;
            views.push(RoomView::new(vec![memory.into()]).unwrap());
        }
        let pass = insider.endpoint.open_room(views).unwrap();
        let mut own = rank.session.memory().description().clone();
        own.address = insider.address.clone();
        insider.says(&rank, &HandoffMessage::Register(own));
        Self {
            rank,
            insider,
            pages,
            pass,
        }
    }

    fn send(&self) -> Sending {
        self.rank.fill(&[4]);
        let session = &self.rank.session;
        let sending = session.send(ROOM, vec![4], 1, soon()).unwrap();
        sending.produced(0..1, 0..2).unwrap();
        sending.finish(Vec::new()).unwrap();
        sending
    }

    fn offer(&self, generation: u64, change: impl Fn(&mut RoomOffer)) -> RoomTag {
        let tag = RoomTag {
            room: ROOM,
            generation: RoomGeneration(generation),
        };
        let mut offer = RoomOffer {
            tag,
            receiver: 0,
            epoch: self.pass.epoch.0,
            key: RoomKey(self.pass.key.0),
            held: 0,
            pages: 1,
            view: 0,
            wants_aux: false,
            time_left: Duration::from_secs(60),
        };
        change(&mut offer);
        let offer = HandoffMessage::ToSender(ToSender::Offer(offer));
        self.insider.says(&self.rank, &offer);
        tag
    }

    fn is_refused(&self, tag: RoomTag) -> Code {
        self.insider.hears(|message| match message {
            HandoffMessage::ToReceiver(ToReceiver::Refuse { tag: of, code }) if of == tag => {
                Some(code)
            }
            _ => None,
        })
    }

    fn has_no_pin(&self) {
        assert_eq!(self.rank.session.pinned(), 0);
    }

    fn has_written(&self) -> bool {
        let pages = self.pages.whole().to_vec();
        pages.iter().any(|byte| *byte != BEFORE)
    }
}

/// The change that an insider makes in an offer.
type Change = fn(&mut RoomOffer);

#[test]
fn an_offer_with_a_wrong_key_or_other_pages_fails_prefill() {
    let cases: [(Change, Code); 7] = [
        (|offer| offer.key.0[0] ^= 1, Code::GrantRefused),
        (|offer| offer.epoch ^= 1, Code::GrantEnded),
        // Views that the room does not have.
        (|offer| offer.view = VIEWS, Code::OutOfRange),
        (|offer| offer.view = u32::MAX - 100, Code::OutOfRange),
        // Other pages than the pages of the request.
        (|offer| offer.pages = 2, Code::OutOfRange),
        (|offer| offer.held = 1, Code::OutOfRange),
        (|offer| offer.held = u32::MAX, Code::OutOfRange),
    ];
    for (change, wanted) in cases {
        let prefill = Prefill::start();
        let sending = prefill.send();
        prefill.offer(1, change);
        failed_with(&sending.wait(soon()), wanted);
        prefill.has_no_pin();
        assert!(!prefill.has_written());
    }
}

/// The process at that address has a room with the same number and attempt. It would take a refusal for its
/// own.
#[test]
fn an_answer_reaches_no_other_process_at_the_address_that_its_asker_said() {
    let [prefill, decode] = [0, 1].map(|_| Rank::start_with(&group(), 0, 0, patient()));
    let sending = prefill.session.send(ROOM, vec![4], 1, soon()).unwrap();
    let receiving = receive(&decode, ROOM.0, 1, &prefill.address());
    reaches(&receiving, PollState::WaitingForInput);
    let insider = Insider::at(Some(decode.address()));
    let mut own = prefill.session.memory().description().clone();
    own.address = decode.address();
    insider.says(&prefill, &HandoffMessage::Register(own));
    // The attempts of a session count from 1.
    let tag = RoomTag {
        room: ROOM,
        generation: RoomGeneration(1),
    };
    let offer = RoomOffer {
        tag,
        receiver: 0,
        epoch: 7,
        key: RoomKey([1; 32]),
        held: 0,
        pages: 1,
        view: 0,
        wants_aux: false,
        time_left: Duration::from_secs(60),
    };
    let code = Code::Draining;
    // The place is taken, so prefill answers the offer with Refuse and the abort with Aborted.
    for message in [ToSender::Offer(offer), ToSender::Abort { tag, code }] {
        insider.says(&prefill, &HandoffMessage::ToSender(message));
    }
    prefill.fill(&[4]);
    sending.produced(0..1, 0..2).unwrap();
    sending.finish(Vec::new()).unwrap();
    succeeded(&receiving.wait(soon()));
    succeeded(&sending.wait(soon()));
    decode.check(0, &[0]).unwrap();
}

/// Otherwise the abort of the attempt would not count, and prefill would wait for its process.
#[test]
fn an_attempt_that_is_held_back_is_told_to_ask_while_prefill_remembers_it() {
    let pins = PinLimits {
        back_off: Duration::from_secs(600),
        ..PinLimits::default()
    };
    let prefill = Prefill::start_with(HandoffOptions { pins, ..patient() });
    let tag = RoomTag {
        room: RoomId(9),
        generation: RoomGeneration(1),
    };
    let code = Code::Full;
    let decline = HandoffMessage::ToSender(ToSender::Decline { tag, code });
    prefill.insider.says(&prefill.rank, &decline);
    let asked = prefill.offer(2, |_| {});
    let retry_after = prefill.insider.hears(|message| match message {
        HandoffMessage::ToReceiver(ToReceiver::Busy { tag, retry_after }) if tag == asked => {
            Some(retry_after)
        }
        _ => None,
    });
    assert!(
        retry_after < DeskOptions::default().early_ttl,
        "{retry_after:?}"
    );
}

/// A caller that learns of the end may send the same request again at once.
#[test]
fn the_number_of_a_room_is_free_when_its_sender_knows_of_a_failure() {
    let prefill = Prefill::start();
    for generation in 1..50 {
        let sending = prefill.send();
        prefill.offer(generation, |offer| offer.key.0[0] ^= 1);
        failed_with(&sending.wait(soon()), Code::GrantRefused);
    }
    prefill.has_no_pin();
}

#[test]
fn an_offer_of_a_stale_generation_is_refused() {
    let prefill = Prefill::start();
    let sending = prefill.send();
    let tag = prefill.offer(5, |offer| offer.key.0[0] ^= 1);
    failed_with(&sending.wait(soon()), Code::GrantRefused);
    let aborted = HandoffMessage::ToSender(ToSender::Aborted { tag });
    prefill.insider.says(&prefill.rank, &aborted);
    // The same attempt and an earlier one are refused, although the request is sent again.
    let again = prefill.send();
    assert_eq!(
        prefill.is_refused(prefill.offer(5, |_| {})),
        Code::GrantRefused
    );
    let early = prefill.offer(4, |_| {});
    assert_eq!(prefill.is_refused(early), Code::StaleEpoch);
    let until = Instant::now() + Duration::from_millis(100);
    assert_eq!(again.wait(until).poll, PollState::Bootstrapping);
    again.abort();
    failed_with(&again.wait(soon()), Code::Draining);
    prefill.has_no_pin();
}
