use super::*;
use kvpool_types::ids::NamespaceId;
use kvpool_types::{GrantKey, Incarnation, Length, NodeName, Offset, SegmentId};
use proto::master_message::Body;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

const NOW: BootInstant = BootInstant(1000);
const KIB: u64 = 1 << 10;

/// A node with one segment, and the messages that the master sent to it.
struct Told {
    quarantine: Quarantine,
    segment: Arc<Segment>,
    inbox: UnboundedReceiver<Result<proto::MasterMessage, tonic::Status>>,
}

impl Told {
    fn new() -> Self {
        let name = NodeName("n".to_owned());
        let node = StoreNode::new(name, Incarnation(1), GrantKey([1; 32]), NOW);
        let (outbox, inbox) = unbounded_channel();
        node.attach(Default::default(), outbox, NOW);
        let size = Length(1024 * KIB);
        Self {
            quarantine: Quarantine::default(),
            segment: Arc::new(Segment::new(SegmentId(1), Arc::new(node), size, 1.0)),
            inbox,
        }
    }

    /// A block written under `grant`, in quarantine.
    fn freed(&self, offset: u64, length: u64, grant: Option<u64>) -> Freed {
        let (offset, length) = (Offset(offset), Length(length));
        let index = self
            .segment
            .allocate_at(offset, length, NamespaceId(0))
            .unwrap();
        self.segment.quarantine([index]);
        Freed {
            segment: Arc::clone(&self.segment),
            index,
            extent: Extent {
                segment: self.segment.id,
                offset,
                length,
            },
            grant: grant.map(GrantId),
            before: GrantId(100),
            not_before: BootInstant(0),
            since: NOW,
            stuck: false,
        }
    }

    /// The fences that the master has requested: ticket, grant, offset, length.
    fn asked(&mut self) -> Vec<(u64, u64, u64, u64)> {
        let mut asked = Vec::new();
        while let Ok(message) = self.inbox.try_recv() {
            let Some(Body::Fence(fence)) = message.unwrap().body else {
                panic!("only fences are asked for here");
            };
            asked.extend(fence.items.iter().map(|item| {
                let extent = item.extent.as_ref().unwrap();
                (item.ticket, item.grant, extent.offset, extent.length)
            }));
        }
        asked
    }
}

#[test]
fn neighbours_are_fenced_together_under_their_highest_grant() {
    let mut told = Told::new();
    // In no order, and with a gap: 4 KiB and 8 KiB touch, 24 KiB is alone.
    let freed = [(8, 7), (24, 9), (4, 8)]
        .map(|(kib, grant)| told.freed(kib * KIB, 4 * KIB, Some(grant)))
        .to_vec();
    told.quarantine.take(freed, NOW);
    let asked = told.asked();
    assert_eq!(
        asked,
        [(1, 8, 4 * KIB, 8 * KIB), (2, 9, 24 * KIB, 4 * KIB),]
    );
    let node = Arc::clone(&told.segment.node);
    assert_eq!(told.quarantine.fenced(&node, &[1]), 8 * KIB);
    assert_eq!(told.segment.used(), 4 * KIB);
    assert_eq!(
        told.quarantine.fenced(&node, &[1]),
        0,
        "a ticket counts once"
    );
    assert_eq!(told.quarantine.fenced(&node, &[2]), 4 * KIB);
    assert_eq!(told.segment.used() + told.segment.quarantined(), 0);
}

/// The node may answer over an old session after the new session has repeated the request.
#[test]
fn a_fence_says_the_same_each_time_which_grants_come_after_it() {
    let mut told = Told::new();
    let freed = [(0, 20), (4, 10)].map(|(kib, before)| Freed {
        before: GrantId(before),
        ..told.freed(kib * KIB, 4 * KIB, Some(7))
    });
    told.quarantine.take(freed.to_vec(), NOW);
    told.quarantine.repeat(&told.segment.node);
    let mut before = Vec::new();
    while let Ok(message) = told.inbox.try_recv() {
        let Some(Body::Fence(fence)) = message.unwrap().body else {
            panic!("only fences are asked for here");
        };
        before.extend(fence.items.iter().map(|item| (item.ticket, item.before)));
    }
    assert_eq!(before, [(1, 20), (1, 20)]);
}

#[test]
fn only_adjacent_extents_are_fenced_together() {
    let mut told = Told::new();
    let freed = vec![
        // The rest of its last cache line belongs to no extent.
        told.freed(0, 100, Some(1)),
        told.freed(128, 64, Some(2)),
        // An extent of an earlier term, whose grants are already closed.
        told.freed(192, 64, None),
        told.freed(256, 64, None),
    ];
    told.quarantine.take(freed, NOW);
    let asked: Vec<_> = told
        .asked()
        .into_iter()
        .map(|item| (item.1, item.2, item.3))
        .collect();
    assert_eq!(asked, [(1, 0, 100), (2, 128, 64), (0, 192, 128)]);
}

#[test]
fn a_run_is_short_so_that_one_view_holds_back_little() {
    let mut told = Told::new();
    let freed = (0..40).map(|at| told.freed(at * 4 * KIB, 4 * KIB, Some(at + 1)));
    let freed = freed
        .chain([told.freed(160 * KIB, 128 * KIB, Some(41))])
        .collect();
    told.quarantine.take(freed, NOW);
    let lengths: Vec<_> = told.asked().into_iter().map(|item| item.3 / KIB).collect();
    assert_eq!(lengths, [64, 64, 32, 128]);
}

#[test]
fn a_run_that_takes_long_is_stuck_whole_and_freed_whole() {
    let told = Told::new();
    let freed = (0..3)
        .map(|at| told.freed(at * KIB, KIB, Some(at + 1)))
        .collect();
    told.quarantine.take(freed, NOW);
    let node = Arc::clone(&told.segment.node);
    assert_eq!(
        told.segment.used_after_quarantine(),
        0,
        "they are as good as free"
    );
    told.quarantine.mark_stuck(&node, NOW.after(STUCK_AFTER));
    assert_eq!(told.segment.used_after_quarantine(), 3 * KIB);
    assert_eq!(told.quarantine.fenced(&node, &[1]), 3 * KIB);
    assert_eq!(
        told.segment.used_after_quarantine() + told.segment.used(),
        0
    );
}

/// While the log was slow, eviction counted these extents as free. If they were stuck at once, a
/// full pool would evict as much again.
#[test]
fn an_extent_whose_removal_took_long_to_log_is_not_stuck_at_once() {
    let told = Told::new();
    let node = Arc::clone(&told.segment.node);
    let logged = NOW.after(STUCK_AFTER * 3);
    told.quarantine
        .take(vec![told.freed(0, 4 * KIB, Some(1))], logged);
    told.quarantine.mark_stuck(&node, logged);
    assert_eq!(told.segment.used_after_quarantine(), 0);
    told.quarantine.mark_stuck(&node, logged.after(STUCK_AFTER));
    assert_eq!(
        told.segment.used_after_quarantine(),
        4 * KIB,
        "the node takes long"
    );
}

#[test]
fn only_stuck_extents_under_leases_count_as_future_room() {
    let told = Told::new();
    let leased = |offset: u64, after: u64| Freed {
        not_before: NOW.after(Duration::from_millis(after)),
        ..told.freed(offset * KIB, 4 * KIB, Some(offset))
    };
    // The first lease ends so soon that the segment already counts its extent as free.
    let freed = vec![leased(4, 50), leased(8, 400), leased(16, 900)];
    told.quarantine.take(freed, NOW);
    let coming = |after| {
        let until = NOW.after(Duration::from_millis(after));
        told.quarantine.coming(until, |_| true)
    };
    assert_eq!(told.segment.used_after_quarantine(), 8 * KIB);
    assert_eq!(
        [300, 500, 5000].map(coming),
        [0, 4 * KIB, 8 * KIB],
        "by the end of the leases"
    );
    let away = told.quarantine.coming(BootInstant(u64::MAX), |_| false);
    assert_eq!(away, 0, "its node takes no blocks");
    told.quarantine
        .tick(NOW.after(Duration::from_millis(500)), |_| {});
    assert_eq!(coming(5000), 4 * KIB);
}

#[test]
fn a_gone_node_is_asked_for_no_fence_and_keeps_no_ticket() {
    let mut told = Told::new();
    let node = Arc::clone(&told.segment.node);
    let leased = Freed {
        not_before: NOW.after(Duration::from_millis(400)),
        ..told.freed(0, 4 * KIB, Some(1))
    };
    told.quarantine.take(vec![leased], NOW);
    let later = told.freed(8 * KIB, 4 * KIB, Some(2));
    node.set_state(NodeState::Gone);
    told.quarantine.take(vec![later], NOW);
    told.quarantine
        .tick(NOW.after(Duration::from_millis(500)), |_| {});
    assert_eq!(told.asked(), []);
    let tickets = told.quarantine.tickets(&node);
    assert!(tickets.is_none_or(|tickets| tickets.open.lock().is_empty()));
}

/// A ticket would stay in memory for ever.
#[test]
fn a_gone_node_is_not_asked_to_verify() {
    let told = Told::new();
    let node = Arc::clone(&told.segment.node);
    let suspected = Suspected {
        namespace: kvpool_types::ids::NamespaceId(0),
        key: kvpool_types::Key::parse("k").unwrap(),
        version: kvpool_types::Version(1),
        extent: told.freed(0, 4 * KIB, Some(1)).extent,
        checksum: kvpool_types::Checksum(1),
    };
    node.set_state(NodeState::Gone);
    assert!(!told.quarantine.verify(&node, suspected));
    assert!(told.quarantine.by_node.read().is_empty());
}

/// A snapshot may be written before the records of a removal. The next leader must still learn of
/// the leases.
#[test]
fn extents_on_their_way_to_the_log_are_listed_while_leases_on_them_run() {
    let quarantine = Quarantine::default();
    let extent = |offset| Extent {
        segment: SegmentId(1),
        offset: Offset(offset),
        length: Length(100),
    };
    let until = BootInstant(50);
    let number = quarantine.leaves(vec![(extent(0), until), (extent(4096), BootInstant(70))]);
    assert_eq!(
        quarantine.leased(BootInstant(40)),
        [extent(0), extent(4096)]
    );
    assert_eq!(quarantine.leased(until), [extent(4096)]);
    quarantine.has_left(number);
    assert!(quarantine.leased(BootInstant(40)).is_empty());
    assert_eq!(quarantine.leaves(Vec::new()), None);
}
