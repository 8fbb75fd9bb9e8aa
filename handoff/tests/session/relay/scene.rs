//! Two sessions behind a relay, and the rules that hold after each hand-off.

use super::frames::Port;
use super::{Attack, Relay};
use crate::ranks::{Group, PAGES, Rank};
use kvpool_handoff::plan::PageLayout;
use kvpool_handoff::room::{PollState, RoomId, RoomLimits};
use kvpool_handoff::session::{HandoffOptions, Receiving, Sending, TransferState};
use kvpool_transport::peer::{PeerWatchOptions, Secret};
use kvpool_types::Code;
use std::time::{Duration, Instant};

/// The value of every page of decode before a hand-off.
const BEFORE: u8 = 0xa5;
/// The value of a room's pages after their release, when they belong to another request.
const AFTER: u8 = 0x3c;
/// How long after a deadline a busy machine may take to report the end, and to end the writes.
const SLACK: Duration = Duration::from_secs(3);
/// A room that stays open during the attacks.
const OTHER_ROOM: RoomId = RoomId(1 << 40);
const OTHER_PAGES: [u32; 3] = [0, 2, 38];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Mode {
    Push,
    Pull,
}

impl Mode {
    pub(crate) const BOTH: [Self; 2] = [Self::Push, Self::Pull];
}

/// The size of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// Each write arrives whole before its first byte is placed.
    Small,
    /// Bytes arrive in the pages themselves, before the comparison.
    Large,
}

impl Size {
    pub(crate) const BOTH: [Self; 2] = [Self::Small, Self::Large];

    pub(crate) const fn layers(self) -> u32 {
        match self {
            Self::Small => 2,
            Self::Large => 4,
        }
    }

    pub(crate) const fn pages(self) -> u32 {
        match self {
            Self::Small => 3,
            Self::Large => 18,
        }
    }

    fn group(self) -> Group {
        Group::of(1, &[self.layers()], PageLayout::TokenMajor)
    }
}

/// Runs cases at the same time, because each of them mostly waits.
pub(crate) fn each<T: Send>(cases: impl IntoIterator<Item = T>, run: impl Fn(T) + Sync) {
    let run = &run;
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(move || run(case));
        }
    });
}

pub(crate) fn modes_and_sizes() -> impl Iterator<Item = (Mode, Size)> {
    let sizes = |mode| Size::BOTH.map(|size| (mode, size));
    Mode::BOTH.into_iter().flat_map(sizes)
}

/// The outcome of one request at both ends.
#[derive(Clone, Debug)]
pub(crate) struct Ends {
    pub(crate) decode: TransferState,
    pub(crate) prefill: TransferState,
}

fn outcome(state: &TransferState) -> Result<(), Code> {
    match state.poll {
        PollState::Success => Ok(()),
        _ => Err(state.failure.expect("a failure has a name")),
    }
}

impl Ends {
    pub(crate) fn outcomes(&self) -> (Result<(), Code>, Result<(), Code>) {
        (outcome(&self.decode), outcome(&self.prefill))
    }

    pub(crate) fn assert_success(&self) {
        assert_eq!(self.outcomes(), (Ok(()), Ok(())));
    }

    pub(crate) fn assert_failed_with(&self, code: Code) {
        assert_eq!(self.outcomes(), (Err(code), Err(code)));
    }
}

/// One request at both ends.
pub(crate) struct Request {
    receiving: Receiving,
    sending: Sending,
    deadline: Instant,
    held: u32,
    pages: Vec<u32>,
}

impl Request {
    pub(crate) fn new(
        receiving: Receiving,
        sending: Sending,
        (held, pages): (u32, &[u32]),
        patience: Duration,
    ) -> Self {
        Self {
            receiving,
            sending,
            deadline: Instant::now() + patience,
            held,
            pages: pages.to_vec(),
        }
    }
}

pub(crate) struct Scene {
    pub(crate) prefill: Rank,
    pub(crate) decode: Rank,
    pub(crate) relay: Relay,
    pub(crate) size: Size,
    other: Option<Receiving>,
    /// The pages of requests.
    asked: Vec<u32>,
    /// The pages that belonged to another request after their release.
    given_back: Vec<u32>,
}

/// The settings of tests that do not wait for a random attack.
pub(crate) fn patient() -> HandoffOptions {
    HandoffOptions {
        secret: Secret::new("of the group"),
        limits: RoomLimits {
            retry: Duration::from_millis(100),
            ..RoomLimits::default()
        },
        ..HandoffOptions::default()
    }
}

/// The same settings with short times, for hundreds of requests.
pub(crate) fn hasty() -> HandoffOptions {
    HandoffOptions {
        limits: RoomLimits {
            bootstrapping: Duration::from_millis(1000),
            waiting: Duration::from_millis(1000),
            stalled: Duration::from_millis(500),
            closing: Duration::from_millis(400),
            retry: Duration::from_millis(60),
            grace: Duration::from_millis(300),
        },
        watch: PeerWatchOptions {
            interval: Duration::from_millis(150),
            misses: 3,
        },
        stall: Duration::from_millis(250),
        ..patient()
    }
}

impl Scene {
    pub(crate) fn start(
        size: Size,
        options: &HandoffOptions,
        attack: impl Attack + 'static,
    ) -> Self {
        let relay = Relay::start(attack);
        let rank = |port| {
            let options = HandoffOptions {
                address: Some(relay.address(port).to_string()),
                ..options.clone()
            };
            let rank = Rank::start_at("127.0.0.1:0", &size.group(), (0, 0), options);
            relay.aim(port, rank.session.local_addr());
            rank
        };
        let (prefill, decode) = (rank(Port::Prefill), rank(Port::Decode));
        decode.set(&(0..PAGES).collect::<Vec<_>>(), BEFORE);
        Self {
            prefill,
            decode,
            relay,
            size,
            other: None,
            asked: Vec::new(),
            given_back: Vec::new(),
        }
    }

    fn receive(
        &self,
        room: RoomId,
        (held, pages): (u32, &[u32]),
        aux: bool,
        deadline: Instant,
    ) -> Receiving {
        let layers = self.size.group().layers();
        let (from, of_room) = ([self.prefill.address()], (held, pages.to_vec()));
        let prefill = (1, &layers);
        let session = &self.decode.session;
        let receiving = session.receive(room, of_room, &from, prefill, aux, deadline);
        receiving.unwrap()
    }

    /// Opens a room of other pages that no sender serves.
    pub(crate) fn with_another_room(mut self) -> Self {
        let deadline = Instant::now() + Duration::from_secs(60);
        self.other = Some(self.receive(OTHER_ROOM, (0, &OTHER_PAGES), false, deadline));
        self
    }

    /// Pages of decode, each between two pages outside the request.
    pub(crate) fn pages(&self) -> Vec<u32> {
        (0..self.size.pages()).map(|page| 2 * page + 1).collect()
    }

    /// Opens decode's end of a request. Decode holds the request's first pages already.
    pub(crate) fn ask(
        &mut self,
        (mode, room): (Mode, u64),
        (held, pages): (u32, &[u32]),
        patience: Duration,
    ) -> Receiving {
        let deadline = Instant::now() + patience;
        self.asked.extend(pages);
        self.given_back.retain(|page| !pages.contains(page));
        let aux = mode == Mode::Push;
        self.receive(RoomId(room), (held, pages), aux, deadline)
    }

    /// Opens prefill's end, and names all pages as computed.
    pub(crate) fn compute(
        &self,
        (mode, room): (Mode, u64),
        pages: u32,
        patience: Duration,
    ) -> Sending {
        let own: Vec<u32> = (20..20 + pages).collect();
        self.prefill.fill(&own);
        let deadline = Instant::now() + patience;
        let session = &self.prefill.session;
        if mode == Mode::Pull {
            return session.offer(RoomId(room), own, 1, deadline).unwrap();
        }
        let sending = session.send(RoomId(room), own, 1, deadline).unwrap();
        // The last page goes in a chunk of its own.
        for chunk in [0..pages - 1, pages - 1..pages] {
            sending.produced(chunk, sending.layers()).unwrap();
        }
        sending.finish(b"metadata".to_vec()).unwrap();
        sending
    }

    /// Opens both ends of a request.
    pub(crate) fn request(
        &mut self,
        of: (Mode, u64),
        (held, pages): (u32, &[u32]),
        patience: Duration,
    ) -> Request {
        let count = held + u32::try_from(pages.len()).unwrap();
        let (receiving, sending) = match of.1 % 2 {
            0 => {
                let receiving = self.ask(of, (held, pages), patience);
                (receiving, self.compute(of, count, patience))
            }
            _ => {
                let sending = self.compute(of, count, patience);
                (self.ask(of, (held, pages), patience), sending)
            }
        };
        Request::new(receiving, sending, (held, pages), patience)
    }

    /// Waits for both ends, and checks every rule that does not depend on the attack. Returns false when decode
    /// has succeeded with wrong bytes.
    pub(crate) fn ends(&mut self, request: Request) -> (Ends, bool) {
        let until = request.deadline + SLACK;
        let decode = request.receiving.wait(until);
        let prefill = request.sending.wait(until);
        for (state, end) in [(&decode, "decode"), (&prefill, "prefill")] {
            let has_ended = matches!(state.poll, PollState::Success | PollState::Failed);
            assert!(
                has_ended && state.is_released,
                "{end} has not ended: {state:?}"
            );
        }
        let is_right = match decode.poll {
            PollState::Success => self.decode.check(request.held, &request.pages).is_ok(),
            _ => true,
        };
        if let Some(aux) = &decode.aux {
            assert!(aux.starts_with(b"metadata"));
        }
        if prefill.poll == PollState::Success {
            assert_eq!(decode.poll, PollState::Success, "prefill alone succeeded");
        }
        self.decode.set(&request.pages, AFTER);
        self.given_back.extend(request.pages);
        self.assert_others_untouched();
        (Ends { decode, prefill }, is_right)
    }

    /// Runs one request from its start to its end.
    pub(crate) fn hand_off(&mut self, mode: Mode, room: u64, patience: Duration) -> Ends {
        let pages = self.pages();
        let request = self.request((mode, room), (0, &pages), patience);
        let (ends, is_right) = self.ends(request);
        assert!(is_right, "decode succeeded with wrong bytes");
        ends
    }

    /// Whether the pages that are in no open request have their earlier bytes.
    fn assert_others_untouched(&self) {
        for state in self.decode.image() {
            let length = state.len() / PAGES as usize;
            for (page, bytes) in (0..PAGES).zip(state.chunks(length)) {
                let has = |pages: &[u32]| pages.contains(&page);
                let wanted = match (has(&self.given_back), has(&self.asked)) {
                    (true, _) => AFTER,
                    (false, true) => continue,
                    (false, false) => BEFORE,
                };
                let is_whole = bytes.iter().all(|byte| *byte == wanted);
                assert!(is_whole, "page {page} was written");
            }
        }
        assert!(self.decode.guards_are_whole(), "memory beside the pages");
    }

    /// Ends the sessions. Checks that no byte has changed since the pages were given back, and that no pin is
    /// left.
    pub(crate) fn close(mut self) {
        if let Some(other) = self.other.take() {
            other.abort();
            let state = other.wait(Instant::now() + SLACK);
            assert!(state.is_released, "{state:?}");
        }
        assert!(!self.relay.is_broken(), "the attack has a fault");
        assert_eq!(self.prefill.session.pinned(), 0);
        std::thread::scope(|scope| {
            for rank in [&self.prefill, &self.decode] {
                scope.spawn(|| assert!(rank.session.close(), "something may touch the pages"));
            }
        });
        self.assert_others_untouched();
    }
}
