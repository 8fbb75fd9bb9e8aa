//! Tests of the third invariant under random histories. A master, clients and late packets act on a fence,
//! and a simple model checks every result.

use super::*;
use kvpool_transport::shm::board::{BOARD_BYTES, Board, Pin, Pinner};
use kvpool_types::{ClientId, Grant, GrantKey};
use proptest::prelude::*;
use std::collections::{BTreeSet, HashSet};
use std::os::fd::AsFd;

const UNITS: u64 = 12;
const UNIT: u64 = 64;
const KEY: GrantKey = GrantKey([1; 32]);
const SEGMENT: SegmentId = SegmentId(3);

struct NoSocket;

impl Abort for NoSocket {
    fn abort(&self) {}
}

/// One step of a history. A number selects one of the existing objects, modulo their count.
#[derive(Clone, Debug)]
enum Step {
    /// The master grants an extent, even over other extents.
    Grant { at: u64, units: u64 },
    /// A grant of any age is received over TCP.
    Receive(usize),
    /// A process announces a write under a grant of any age.
    Hold { grant: usize, peer: u8 },
    /// A receive ends, complete or not.
    EndReceive { which: usize, whole: bool },
    /// A hold ends, complete or not.
    EndHold { which: usize, whole: bool },
    /// A process pins an extent of an earlier grant.
    Pin { grant: usize, peer: u8 },
    /// A pin is removed.
    Unpin(usize),
    /// A process opens a connection and gets a board.
    Hang(u8),
    /// A connection ends.
    Close(usize),
    /// A process publishes a pin on a board, for an extent of an earlier grant.
    Publish { board: usize, grant: usize },
    /// A process asks whether such a pin counts, and removes it if not.
    Confirm(usize),
    /// A pin on a board is removed.
    Clear(usize),
    /// A process dies.
    Die(u8),
    /// The master fences a grant's extent. It may or may not name the grant.
    Fence { grant: usize, named: bool },
    /// A master begins a term.
    Epoch,
    /// The master drops the incarnation.
    Renew,
}

fn step() -> impl Strategy<Value = Step> {
    let n = 0..64usize;
    prop_oneof![
        6 => (0..UNITS, 1..4u64).prop_map(|(at, units)| Step::Grant { at, units }),
        6 => n.clone().prop_map(Step::Receive),
        6 => (n.clone(), 0..3u8).prop_map(|(grant, peer)| Step::Hold { grant, peer }),
        5 => (n.clone(), prop::bool::weighted(0.8))
            .prop_map(|(which, whole)| Step::EndReceive { which, whole }),
        5 => (n.clone(), prop::bool::weighted(0.8))
            .prop_map(|(which, whole)| Step::EndHold { which, whole }),
        6 => (n.clone(), 0..3u8).prop_map(|(grant, peer)| Step::Pin { grant, peer }),
        4 => n.clone().prop_map(Step::Unpin),
        2 => (0..3u8).prop_map(Step::Hang),
        1 => n.clone().prop_map(Step::Close),
        6 => (n.clone(), n.clone()).prop_map(|(board, grant)| Step::Publish { board, grant }),
        4 => n.clone().prop_map(Step::Confirm),
        3 => n.clone().prop_map(Step::Clear),
        1 => (0..3u8).prop_map(Step::Die),
        6 => (n, any::<bool>()).prop_map(|(grant, named)| Step::Fence { grant, named }),
        1 => Just(Step::Epoch),
        1 => Just(Step::Renew),
    ]
}

/// The board of one connection, as the node and the client see it.
struct Connection {
    peer: u8,
    incarnation: Incarnation,
    open: Option<Arc<Board>>,
    pinner: Arc<Pinner>,
}

/// A pin on a board.
struct Posted {
    peer: u8,
    connection: usize,
    incarnation: Incarnation,
    grant: Grant,
    pin: Pin,
}

/// The model: the extents that are touched, and the grants that are closed.
struct Model {
    fence: Fence,
    epoch: u64,
    grants: Vec<(Incarnation, Grant)>,
    closed: BTreeSet<(u64, u64)>,
    receives: Vec<(Grant, Span)>,
    holds: Vec<(u8, Grant)>,
    pins: Vec<(u8, Extent)>,
    connections: Vec<Connection>,
    posted: Vec<Posted>,
    tickets: Vec<(u64, Extent)>,
    next: u64,
}

fn peer(number: u8) -> PeerKey {
    PeerKey::new(ClientId(number.into()), 1000 + i32::from(number))
}

/// A board that is unknown to every fence. Dead clients write on it.
fn nobodys() -> Arc<Pinner> {
    let (_, fd) = Board::create(Length(0)).unwrap();
    Arc::new(Pinner::map(fd.as_fd(), BOARD_BYTES).unwrap())
}

fn pick<T>(items: &[T], which: usize) -> Option<usize> {
    (!items.is_empty()).then(|| which % items.len())
}

impl Model {
    fn new() -> Self {
        let limits = Limits {
            held_per_client: Length(u64::MAX),
        };
        let size = Length(UNITS * UNIT);
        let mut model = Self {
            fence: Fence::new(Incarnation(1), &[size], limits),
            epoch: 0,
            grants: Vec::new(),
            closed: BTreeSet::new(),
            receives: Vec::new(),
            holds: Vec::new(),
            pins: Vec::new(),
            connections: Vec::new(),
            posted: Vec::new(),
            tickets: Vec::new(),
            next: 0,
        };
        model.enter();
        model
    }

    fn enter(&mut self) {
        self.epoch += 1;
        self.tickets.clear();
        let term = Term {
            epoch: Epoch(self.epoch),
            signer: KEY.signer(),
            segments: vec![SEGMENT],
            ahead_ms: None,
            says_what_is_recorded: false,
        };
        assert!(self.fence.enter(term).is_ok());
    }

    fn touched(&self, extent: &Extent) -> bool {
        let receives = self.receives.iter().map(|(grant, _)| &grant.extent);
        let holds = self.holds.iter().map(|(_, grant)| &grant.extent);
        let pins = self.pins.iter().map(|(_, extent)| extent);
        let posted = self.posted.iter().map(|posted| &posted.grant.extent);
        receives
            .chain(holds)
            .chain(pins)
            .chain(posted)
            .any(|touched| touched.overlaps(extent))
    }

    /// Checks the rules for every admitted write.
    fn check_admitted(&self, incarnation: Incarnation, grant: &Grant) {
        assert_eq!(incarnation, self.fence.incarnation());
        assert_eq!(grant.epoch.0, self.epoch);
        assert!(
            !self.closed.contains(&(grant.epoch.0, grant.id.0)),
            "closed grant {} was admitted",
            grant.id
        );
        assert!(!self.touched(&grant.extent), "{} is touched", grant.extent);
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Grant { at, units } => {
                self.next += 1;
                let extent = Extent {
                    segment: SEGMENT,
                    offset: Offset(at * UNIT),
                    length: Length(units.min(UNITS - at) * UNIT),
                };
                let incarnation = self.fence.incarnation();
                let id = GrantId(self.next);
                let grant = KEY.sign(incarnation, Epoch(self.epoch), id, extent);
                self.grants.push((incarnation, grant));
            }
            Step::Receive(which) => {
                let Some(at) = pick(&self.grants, which) else {
                    return;
                };
                let (incarnation, grant) = self.grants[at];
                let Ok(proven) = self.fence.prove(incarnation, &grant) else {
                    return;
                };
                if let Ok(span) = self.fence.begin_receive(&proven, Arc::new(NoSocket)) {
                    self.check_admitted(incarnation, &grant);
                    self.receives.push((grant, span));
                }
            }
            Step::Hold { grant, peer: who } => {
                let Some(at) = pick(&self.grants, grant) else {
                    return;
                };
                let (incarnation, grant) = self.grants[at];
                let Ok(proven) = self.fence.prove(incarnation, &grant) else {
                    return;
                };
                if self.fence.begin_hold(peer(who), &proven).is_ok() {
                    self.check_admitted(incarnation, &grant);
                    self.holds.push((who, grant));
                }
            }
            Step::EndReceive { which, whole } => {
                if let Some(at) = pick(&self.receives, which) {
                    let (grant, span) = self.receives.swap_remove(at);
                    let sums = whole.then(|| vec![Checksum(grant.id.0)]);
                    let code = self.fence.end_receive(span, sums);
                    self.check_recorded(&grant, code);
                }
            }
            Step::EndHold { which, whole } => {
                if let Some(at) = pick(&self.holds, which) {
                    let (who, grant) = self.holds.swap_remove(at);
                    let sums = whole.then_some(Checksum(grant.id.0)).into_iter().collect();
                    let code = self.fence.end_hold(peer(who), grant.id, sums);
                    if whole {
                        self.check_recorded(&grant, code);
                    }
                }
            }
            Step::Pin { grant, peer: who } => {
                let Some(at) = pick(&self.grants, grant) else {
                    return;
                };
                let (incarnation, Grant { extent, .. }) = self.grants[at];
                let epoch = Epoch(self.epoch);
                if self
                    .fence
                    .pin(peer(who), epoch, incarnation, &extent)
                    .is_ok()
                {
                    let mut writes = self
                        .receives
                        .iter()
                        .map(|(grant, _)| grant)
                        .chain(self.holds.iter().map(|(_, grant)| grant));
                    assert!(!writes.any(|grant| grant.extent.overlaps(&extent)));
                    self.pins.push((who, extent));
                }
            }
            Step::Unpin(which) => {
                if let Some(at) = pick(&self.pins, which) {
                    let (who, extent) = self.pins.swap_remove(at);
                    let incarnation = self.fence.incarnation();
                    let code = self.fence.unpin(peer(who), incarnation, &extent);
                    assert_eq!(code, Code::Ok);
                }
            }
            Step::Hang(who) => {
                let (board, fd) = Board::create(Length(u64::MAX)).unwrap();
                let (board, incarnation) = (Arc::new(board), self.fence.incarnation());
                let hung = self.fence.hang(peer(who), incarnation, board.clone());
                assert!(hung.is_ok());
                self.connections.push(Connection {
                    peer: who,
                    incarnation,
                    open: Some(board),
                    pinner: Arc::new(Pinner::map(fd.as_fd(), BOARD_BYTES).unwrap()),
                });
            }
            Step::Close(which) => {
                if let Some(at) = pick(&self.connections, which) {
                    self.connections[at].open = None;
                }
            }
            Step::Publish { board, grant } => {
                let (Some(connection), Some(grant)) =
                    (pick(&self.connections, board), pick(&self.grants, grant))
                else {
                    return;
                };
                let (incarnation, grant) = self.grants[grant];
                let Connection {
                    peer, pinner, open, ..
                } = &self.connections[connection];
                let Some(pin) = pinner.publish(grant.extent) else {
                    return;
                };
                if open.is_none() {
                    // After this the fence may no longer read the board.
                    assert!(
                        !pin.counts(grant.epoch),
                        "a pin without a connection counts"
                    );
                } else {
                    self.posted.push(Posted {
                        peer: *peer,
                        connection,
                        incarnation,
                        grant,
                        pin,
                    });
                }
            }
            Step::Confirm(which) => {
                if let Some(at) = pick(&self.posted, which) {
                    let counts = self.counts(&self.posted[at]);
                    if !counts {
                        self.posted.swap_remove(at);
                    }
                }
            }
            Step::Clear(which) => {
                if let Some(at) = pick(&self.posted, which) {
                    self.posted.swap_remove(at);
                }
            }
            Step::Die(who) => {
                self.posted.retain(|posted| posted.peer != who);
                for connection in &mut self.connections {
                    if connection.peer == who {
                        connection.open = None;
                        connection.pinner = nobodys();
                    }
                }
                self.holds.retain(|(holder, _)| *holder != who);
                self.pins.retain(|(holder, _)| *holder != who);
                self.fence.peer_gone(peer(who));
            }
            Step::Fence { grant, named } => {
                let Some(at) = pick(&self.grants, grant) else {
                    return;
                };
                let (_, grant) = self.grants[at];
                // The present master fences only extents that it granted itself.
                let own = grant.epoch.0 == self.epoch && named;
                if own {
                    self.closed.insert((grant.epoch.0, grant.id.0));
                }
                self.next += 1;
                let ticket = self.next;
                self.tickets.push((ticket, grant.extent));
                self.fence.fence(&[FenceItem {
                    ticket,
                    grant: own.then_some(grant.id),
                    before: None,
                    extent: grant.extent,
                }]);
            }
            Step::Epoch => self.enter(),
            Step::Renew => {
                let next = Incarnation(self.fence.incarnation().0 + 1);
                self.fence.renew(next);
                self.enter();
            }
        }
    }

    /// Whether a pin counts. It must count in the term of its location while its connection lives, and never
    /// in another term.
    fn counts(&self, posted: &Posted) -> bool {
        let connection = &self.connections[posted.connection];
        let counts = posted.pin.counts(posted.grant.epoch);
        let current = connection.incarnation == self.fence.incarnation()
            && posted.grant.epoch.0 == self.epoch;
        assert!(current || !counts, "a pin of a term that is over counts");
        if current && connection.open.is_some() && connection.incarnation == posted.incarnation {
            assert!(counts, "a pin of this term does not count");
        }
        counts
    }

    /// Checks that a recorded block was not closed during its write.
    fn check_recorded(&self, grant: &Grant, code: Code) {
        if code == Code::Ok {
            assert_eq!(grant.epoch.0, self.epoch);
            assert!(!self.closed.contains(&(grant.epoch.0, grant.id.0)));
        }
    }

    fn check(&mut self) {
        self.fence.look_again();
        for ticket in self.fence.take_fenced() {
            let at = self.tickets.iter().position(|(open, _)| *open == ticket);
            let (_, extent) = self
                .tickets
                .swap_remove(at.expect("a ticket of this term, once"));
            assert!(
                !self.touched(&extent),
                "{ticket} reported while {extent} is touched"
            );
        }
        for (ticket, extent) in &self.tickets {
            assert!(
                self.touched(extent),
                "{ticket} is not reported: {extent} is free"
            );
        }
        let census = self.fence.census();
        assert!(census.floors <= UNITS, "floors are bounded by the segment");
        assert!(census.records <= UNITS);
        assert_eq!(census.receives, self.receives.len() as u64);
        assert_eq!(census.holds, self.holds.len() as u64);
        let pins = self.pins.len() + self.posted.len();
        assert_eq!(census.pins, pins as u64);
        assert_eq!(census.tickets, self.tickets.len() as u64);
        let pinned: HashSet<_> = self.pins.iter().collect();
        let held = pinned
            .iter()
            .map(|(_, extent)| extent.length.0)
            .sum::<u64>()
            + self
                .holds
                .iter()
                .map(|(_, g)| g.extent.length.0)
                .sum::<u64>()
            + self
                .posted
                .iter()
                .map(|posted| posted.grant.extent.length.0)
                .sum::<u64>();
        assert_eq!(census.held, Length(held));
        let named = self.fence.held();
        for posted in &self.posted {
            assert!(
                named.contains(&posted.grant.extent),
                "a registration must name {}",
                posted.grant.extent
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn no_ticket_is_reported_while_its_extent_is_touched_and_no_closed_grant_is_admitted(
        steps in prop::collection::vec(step(), 1..160),
    ) {
        let mut model = Model::new();
        for step in steps {
            model.apply(step);
            model.check();
        }
        // When everything has ended, every ticket is reported.
        for who in 0..3 {
            model.apply(Step::Die(who));
        }
        while !model.receives.is_empty() {
            model.apply(Step::EndReceive { which: 0, whole: false });
        }
        model.check();
        prop_assert!(model.tickets.is_empty());
    }
}

/// The state that refuses closed grants is bounded by the segment, however many grants there were.
#[test]
fn a_million_grants_leave_no_more_behind_than_the_segment_has_blocks() {
    let mut model = Model::new();
    for id in 1..=1_000_000u64 {
        let item = FenceItem {
            ticket: id,
            // Other nodes get most numbers of an epoch, so the numbers here have gaps.
            grant: Some(GrantId(id * 7)),
            before: Some(GrantId(id * 7 + 1)),
            extent: Extent {
                segment: SEGMENT,
                offset: Offset(id % UNITS * UNIT),
                length: Length(UNIT),
            },
        };
        model.fence.fence(&[item]);
    }
    assert!(model.fence.census().floors <= UNITS);
    assert_eq!(model.fence.take_fenced().len(), 1_000_000);
}
