mod orders;
mod unused;

use super::disk::Disk;
use super::*;
use crate::config::Isolation;
use crate::fence::{FenceItem, Limits, Term};
use crate::metrics::Metrics;
use crate::segment::Dram;
use crate::serve::Identity;
use kvpool_disk::medium::{Formatted, Opened, Staged, Stamp, StoreNumber, footprint};
use kvpool_disk::{Engine, Fault, Faulty, GRANULE, Memory};
use kvpool_transport::checksum::checksum;
use kvpool_types::medium::DATA_START;
use kvpool_types::{
    Checksum, Code, Epoch, Extent, GrantId, GrantKey, HostId, Length, NodeName, Offset, SegmentId,
    Version,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

const CLUSTER: ClusterId = ClusterId(0xc1);
const KEY: GrantKey = GrantKey([7; 32]);
const MEMORY: SegmentId = SegmentId(31);
const LENGTH: u64 = 1 << 20;
/// Longer than the transfers take on a busy machine, and shorter than the longest wait for arena memory.
const SOON: Duration = Duration::from_millis(900);

fn on_medium(number: u32) -> SegmentId {
    SegmentId(SegmentId::ON_MEDIUM | number)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Waits until something holds, at most 20 s.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = soon();
    while !holds() {
        assert!(Instant::now() < limit, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn size() -> usize {
    usize::try_from(footprint(LENGTH).unwrap()).unwrap()
}

fn store() -> Store {
    let segment = Dram::allocate(Length(16 * LENGTH), false, "media").unwrap();
    let store = Store::new(
        Identity {
            name: NodeName("node-t".into()),
            host: HostId(1),
        },
        vec![Box::new(segment)],
        Limits {
            held_per_client: Length(16 * LENGTH),
        },
        Metrics::new().unwrap(),
        Isolation::default(),
    );
    enter(&store, 1);
    store
}

fn enter(store: &Store, epoch: u64) {
    let term = Term {
        epoch: Epoch(epoch),
        signer: KEY.signer(),
        segments: vec![MEMORY],
        ahead_ms: None,
        says_what_is_recorded: false,
    };
    store.enter(CLUSTER, term).unwrap();
}

fn order(disk: &Disk, number: u32) -> proto::AttachMedium {
    proto::AttachMedium {
        medium_id: disk.id().unwrap().to_bytes().to_vec().into(),
        generation: 1,
        segment_id: on_medium(number).0,
    }
}

/// A formatted disk of 64 MiB that the test can damage.
fn disk(number: u32, arena: &Arc<Arena>) -> (Disk, Arc<Faulty>) {
    let engine = Arc::new(Faulty::new(Arc::new(Memory::new(64 << 20))));
    let path = PathBuf::from(format!("ssd{number}"));
    let config = SsdConfig {
        path: path.clone(),
        in_directory: false,
        size: None,
        reset: false,
        dwpd: None,
        namespaces: Vec::new(),
    };
    let mut disk =
        Disk::read(&config, path, Arc::clone(&engine) as Arc<dyn Engine>, arena).unwrap();
    disk.offer(CLUSTER, soon()).unwrap().unwrap();
    (disk, engine)
}

/// A node with one medium that is read slowly, and memory for four transfers.
struct Rig {
    media: Media,
    engine: Arc<Faulty>,
    incarnation: Incarnation,
    blocks: Vec<(Extent, Checksum)>,
    answers: Answers,
    answered: UnboundedReceiver<ToMaster>,
    /// Whether the ends of transfers are to say that the disk takes no writes.
    takes_no_writes: bool,
}

impl Rig {
    fn with(blocks: u64) -> Self {
        Self::beside(blocks, |_| Vec::new())
    }

    /// The same node with other disks.
    fn beside(blocks: u64, others: impl FnOnce(&Arc<Arena>) -> Vec<Disk>) -> Self {
        let arena = Arena::new(4 * size()).unwrap();
        let mut disks = others(&arena);
        let (mut disk, engine) = disk(1, &arena);
        let order = order(&disk, 1);
        assert!(disk.attach(CLUSTER, &order, soon()).unwrap());
        let medium = disk.front.attached(on_medium(1)).unwrap();
        let blocks = (0..blocks).map(|number| {
            let mut staged = Staged::take(&arena, LENGTH, None).unwrap().unwrap();
            staged.data().fill(u8::try_from(number).unwrap());
            let checksum = checksum(staged.data());
            let extent = Extent {
                segment: on_medium(1),
                offset: Offset(number * footprint(LENGTH).unwrap()),
                length: Length(LENGTH),
            };
            let stamp = Stamp {
                offset: extent.offset.0 + DATA_START,
                number: StoreNumber(number + 1),
                version: Version(number + 1),
                checksum,
            };
            medium.store(staged, stamp, |stored| stored.unwrap());
            (extent, checksum)
        });
        let blocks = blocks.collect();
        engine.on_reads(
            0..u64::MAX,
            u64::MAX,
            Fault::Delay(Duration::from_millis(5)),
        );
        let store = store();
        let incarnation = store.snapshot().incarnation;
        disks.push(disk);
        let mut media = Media::of(disks, arena, store);
        media.start_workers().unwrap();
        let (answers, answered) = unbounded_channel();
        Self {
            media,
            engine,
            incarnation,
            blocks,
            answers,
            answered,
            takes_no_writes: false,
        }
    }

    /// Transfers every block in one message to the extent that `to` returns. Returns when all transfers have
    /// ended.
    fn transfer_all(&mut self, expected: Code, to: impl Fn(u64) -> Extent) -> Duration {
        let transfers = self
            .blocks
            .iter()
            .zip(1..)
            .map(|((from, checksum), number)| {
                let to = to(number);
                let grant = KEY.sign(self.incarnation, Epoch(1), GrantId(number), to);
                let range = |extent: &Extent| proto::ExtentRange {
                    segment: extent.segment.0,
                    offset: extent.offset.0,
                    length: extent.length.0,
                };
                proto::Transfer {
                    ticket: number,
                    from: Some(range(from)),
                    to: Some(range(&to)),
                    version: number,
                    checksum: checksum.0,
                    grant: grant.mac.to_vec().into(),
                    grant_id: number,
                }
            });
        let orders = proto::Transfers {
            transfers: transfers.collect(),
        };
        let begun = Instant::now();
        self.media
            .transfer(self.incarnation, Epoch(1), orders, &self.answers);
        for _ in &self.blocks {
            let Some(ToMaster::TransfersDone(done)) = self.answered.blocking_recv() else {
                panic!("the end of a transfer");
            };
            assert_eq!(Code::from_peer(done.transfers[0].code), expected);
            assert_eq!(done.transfers[0].takes_no_writes, self.takes_no_writes);
        }
        begun.elapsed()
    }

    /// The ranges of the medium that are not used again.
    fn bad_ranges(&self) -> Vec<std::ops::Range<u64>> {
        let medium = self.media.shared.fronts[0].attached(on_medium(1));
        medium.unwrap().bad_ranges().as_slice().to_vec()
    }

    /// The value of a counter of the node.
    fn counted(&self, name: &str) -> f64 {
        let families = self.media.shared.store.metrics().registry().gather();
        let name = format!("kvpool_node_{name}_total");
        let family = families.iter().find(|family| family.name() == name);
        family.unwrap().get_metric()[0].get_counter().get_value()
    }
}

#[test]
fn loads_that_wait_for_room_get_it_from_those_that_have_arrived() {
    let mut rig = Rig::with(12);
    // The disk cannot write straight into these extents.
    let took = rig.transfer_all(Code::Ok, |number| Extent {
        segment: MEMORY,
        offset: Offset((number - 1) * LENGTH + 64),
        length: Length(LENGTH),
    });
    assert!(took < SOON, "{took:?}");
    assert_eq!(rig.counted("media_loaded_bytes"), (12 * LENGTH) as f64);
    assert_eq!(rig.counted("media_loaded_in_place_bytes"), 0.0);
}

fn in_memory(number: u64) -> Extent {
    Extent {
        segment: MEMORY,
        offset: Offset((number - 1) * LENGTH),
        length: Length(LENGTH),
    }
}

#[test]
fn a_load_in_place_needs_arena_memory_for_its_header_only() {
    let mut rig = Rig::with(12);
    let arena = Arc::clone(&rig.media.shared.arena);
    let _held = arena.take(arena.size() - 12 * GRANULE).unwrap();
    let took = rig.transfer_all(Code::Ok, in_memory);
    assert!(took < SOON, "{took:?}");
    assert_eq!(rig.counted("media_loaded_bytes"), (12 * LENGTH) as f64);
    assert_eq!(
        rig.counted("media_loaded_in_place_bytes"),
        (12 * LENGTH) as f64
    );
    for (number, (_, checksum)) in (1..).zip(&rig.blocks) {
        let store = &rig.media.shared.store;
        assert!(store.verify(&in_memory(number), *checksum));
    }
}

/// Until the disk has answered, it may write to the memory.
#[test]
fn an_extent_is_fenced_only_when_the_disk_has_written_it() {
    let mut rig = Rig::with(1);
    let late = Duration::from_millis(400);
    rig.engine.mend();
    rig.engine.on_reads(0..u64::MAX, 1, Fault::Delay(late));
    let store = rig.media.shared.store.clone();
    let fencing = std::thread::spawn(move || {
        while store.census().loads == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let begun = Instant::now();
        store.fence(&[FenceItem {
            ticket: 9,
            grant: Some(GrantId(1)),
            before: None,
            extent: in_memory(1),
        }]);
        while store.take_fenced().is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        (begun.elapsed(), store.written(&in_memory(1)).is_ok())
    });
    rig.transfer_all(Code::GrantEnded, in_memory);
    let (took, is_readable) = fencing.join().unwrap();
    assert!(took > late / 2, "fenced after {took:?}");
    assert!(!is_readable);
}

/// A ring that the kernel refuses keeps the memory of its requests, whose transfers have ended.
#[test]
fn an_extent_that_the_kernel_may_still_write_is_never_fenced() {
    let mut rig = Rig::with(1);
    rig.engine.mend();
    rig.engine.on_reads(0..u64::MAX, 1, Fault::Kept);
    rig.transfer_all(Code::Unreachable, in_memory);
    let store = rig.media.shared.store.clone();
    let fence = |ticket| {
        store.fence(&[FenceItem {
            ticket,
            grant: None,
            before: None,
            extent: in_memory(1),
        }]);
        store.take_fenced()
    };
    assert!(fence(1).is_empty());
    // The next leader hears of it too, and so does the next pool.
    assert_eq!(store.snapshot().held, [in_memory(1)]);
    enter(&store, 2);
    assert_eq!(store.snapshot().held, [in_memory(1)]);
    assert!(fence(2).is_empty());
    assert_eq!(store.census().loads, 1);
}

/// A new leader grants no extent that a disk still writes.
#[test]
fn a_load_is_held_in_the_next_term_until_the_disk_has_answered() {
    let mut rig = Rig::with(1);
    rig.engine.mend();
    let late = Fault::Delay(Duration::from_millis(400));
    rig.engine.on_reads(0..u64::MAX, 1, late);
    let store = rig.media.shared.store.clone();
    let entering = std::thread::spawn(move || {
        while store.census().loads == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        enter(&store, 2);
        let held = store.snapshot().held;
        while store.census().loads > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        (held, store.snapshot().held)
    });
    rig.transfer_all(Code::GrantEnded, in_memory);
    let (before, after) = entering.join().unwrap();
    assert_eq!((before, after), (vec![in_memory(1)], vec![]));
}

#[test]
fn a_block_that_is_wrong_on_the_disk_is_never_readable_and_its_extent_can_be_used() {
    let mut rig = Rig::with(1);
    let store = rig.media.shared.store.clone();
    // A bit in the header, in the first chunk and in the last one.
    for bit in [80 * 8, 8 * 4096, 8 * (4096 + LENGTH) - 1] {
        rig.engine.mend();
        rig.engine.on_reads(0..u64::MAX, 1, Fault::Flip(bit));
        rig.transfer_all(Code::ChecksumMismatch, in_memory);
        assert!(store.written(&in_memory(1)).is_err());
        assert_eq!(store.census().loads, 0);
    }
    rig.transfer_all(Code::Ok, in_memory);
    assert!(store.verify(&in_memory(1), rig.blocks[0].1));
}

#[test]
fn blocks_that_move_on_a_medium_keep_their_room() {
    let mut rig = Rig::with(12);
    let took = rig.transfer_all(Code::Ok, |number| Extent {
        segment: on_medium(1),
        offset: Offset((number + 12) * footprint(LENGTH).unwrap()),
        length: Length(LENGTH),
    });
    assert!(took < SOON, "{took:?}");
}

#[test]
fn a_load_that_finds_no_room_ends() {
    let mut rig = Rig::with(1);
    let to = |_| Extent {
        segment: MEMORY,
        offset: Offset(0),
        length: Length(LENGTH),
    };
    let held = rig.media.shared.arena.take(4 * size()).unwrap();
    let took = rig.transfer_all(Code::Full, to);
    assert!(
        MEMORY_WAIT <= took && took < MEMORY_WAIT + 4 * TEND,
        "{took:?}"
    );
    drop(held);
    rig.transfer_all(Code::Ok, to);
}

#[test]
fn a_load_that_is_refused_is_not_verified_and_its_failed_read_is_still_told() {
    const EIO: i32 = 5;
    // The disk cannot write straight into this extent.
    let to = |_| Extent {
        segment: MEMORY,
        offset: Offset(64),
        length: Length(LENGTH),
    };
    let mut rig = Rig::with(1);
    rig.engine.mend();
    // The term of the grants is over.
    enter(&rig.media.shared.store, 2);
    let last = Fault::Flip(8 * (4096 + LENGTH) - 1);
    rig.engine.on_reads(0..u64::MAX, 1, last);
    rig.transfer_all(Code::StaleEpoch, to);
    rig.engine.on_reads(0..u64::MAX, 1, Fault::Errno(EIO));
    rig.transfer_all(Code::Unreachable, to);
}

/// On a wrong checksum the master drops the copy for good.
#[test]
fn a_device_that_is_gone_has_all_its_blocks_when_it_is_back() {
    const EIO: i32 = 5;
    const ENODEV: i32 = 19;
    // All requests fail, the path is lost, or the file was cut.
    for fault in [Fault::Errno(EIO), Fault::Errno(ENODEV), Fault::Short(0)] {
        let mut rig = Rig::with(3);
        rig.engine.mend();
        rig.engine.on_all(fault);
        for _ in 0..3 {
            rig.transfer_all(Code::Unreachable, in_memory);
        }
        let gone = proto::MediumState::MediumGone;
        assert_eq!(rig.media.shared.states(), [gone]);
        rig.engine.mend();
        assert!(rig.bad_ranges().is_empty());
        rig.transfer_all(Code::Ok, in_memory);
    }
}

#[test]
fn a_bad_sector_costs_its_copy_at_the_second_get_and_the_medium_stays_in_use() {
    const EIO: i32 = 5;
    let mut rig = Rig::with(1);
    rig.engine.mend();
    let sector = DATA_START + 8192..DATA_START + 8704;
    rig.engine.on_reads(sector, u64::MAX, Fault::Errno(EIO));
    rig.transfer_all(Code::Unreachable, in_memory);
    assert!(rig.bad_ranges().is_empty());
    rig.transfer_all(Code::ChecksumMismatch, in_memory);
    let whole = DATA_START..DATA_START + footprint(LENGTH).unwrap();
    assert_eq!(rig.bad_ranges(), [whole]);
    let ready = proto::MediumState::MediumReady;
    assert_eq!(rig.media.shared.states(), [ready]);
}

/// The master hears of the state of a medium later than of the ends of its stores.
#[test]
fn a_store_that_a_disk_without_room_refuses_says_that_it_takes_no_writes() {
    const EIO: i32 = 5;
    const ENOSPC: i32 = 28;
    const EROFS: i32 = 30;
    for (error, takes_no_writes) in [(EIO, false), (ENOSPC, true), (EROFS, true)] {
        let mut rig = Rig::with(2);
        rig.takes_no_writes = takes_no_writes;
        rig.engine
            .on_writes(0..u64::MAX, u64::MAX, Fault::Errno(error));
        rig.transfer_all(Code::Unreachable, |number| Extent {
            segment: on_medium(1),
            offset: Offset((number + 12) * footprint(LENGTH).unwrap()),
            length: Length(LENGTH),
        });
        rig.engine.mend();
    }
}

#[test]
fn a_disk_that_hangs_keeps_no_other_from_its_attachment() {
    let arena = Arena::new(4 * size()).unwrap();
    let ((first, engine), (second, _)) = (disk(1, &arena), disk(2, &arena));
    let orders = [order(&first, 1), order(&second, 2)];
    let mut media = Media::of(vec![first, second], arena, store());
    media.start_workers().unwrap();
    let hangs = Duration::from_secs(3);
    engine.on_writes(0..u64::MAX, 1, Fault::Delay(hangs));
    let (answers, mut answered) = unbounded_channel();
    let begun = Instant::now();
    for order in &orders {
        media.attach(CLUSTER, order.clone(), answers.clone());
    }
    let mut attached = || match answered.blocking_recv() {
        Some(ToMaster::MediumAttached(attached)) => attached.medium_id,
        other => panic!("{other:?} where an attachment belongs"),
    };
    assert_eq!(attached(), orders[1].medium_id);
    assert!(begun.elapsed() < hangs / 2, "{:?}", begun.elapsed());
    assert_eq!(attached(), orders[0].medium_id);
}

#[test]
fn disks_that_hang_in_their_attachment_keep_no_load_from_its_end() {
    let mut orders = Vec::new();
    let mut rig = Rig::beside(2, |arena| {
        let hang = |number| {
            let (disk, engine) = disk(number, arena);
            engine.on_writes(0..u64::MAX, 1, Fault::Delay(Duration::from_secs(4)));
            orders.push(order(&disk, number));
            disk
        };
        [2, 3].map(hang).into()
    });
    let (answers, _attached) = unbounded_channel();
    for order in orders {
        rig.media.attach(CLUSTER, order, answers.clone());
    }
    let disks = &rig.media.shared.disks;
    while disks.iter().filter(|disk| disk.is_locked()).count() < 2 {
        std::thread::sleep(Duration::from_millis(10));
    }
    // A load that runs beside another one ends on a worker.
    let to = |number: u64| Extent {
        segment: MEMORY,
        offset: Offset((number - 1) * LENGTH),
        length: Length(LENGTH),
    };
    let took = rig.transfer_all(Code::Ok, to);
    assert!(took < SOON, "{took:?}");
    let arena = Arc::clone(&rig.media.shared.arena);
    let _held: Vec<_> = std::iter::from_fn(|| arena.take(kvpool_disk::GRANULE)).collect();
    let took = rig.transfer_all(Code::Full, to);
    assert!(took < MEMORY_WAIT + 4 * TEND, "{took:?}");
}

#[test]
fn a_disk_that_answers_late_is_attached_when_it_has_answered() {
    let arena = Arena::new(4 * size()).unwrap();
    let (mut disk, engine) = disk(1, &arena);
    let order = order(&disk, 1);
    engine.on_writes(0..u64::MAX, 1, Fault::Delay(Duration::from_millis(300)));
    let begun = Instant::now();
    let until = begun + Duration::from_millis(50);
    assert!(disk.attach(CLUSTER, &order, until).is_err());
    assert!(disk.attach(CLUSTER, &order, soon()).is_err());
    assert!(disk.offer(CLUSTER, soon()).is_err());
    assert!(begun.elapsed() < Duration::from_millis(250), "nobody waits");
    while disk.in_flight() > 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(disk.offer(CLUSTER, soon()).unwrap().is_some());
    assert!(disk.attach(CLUSTER, &order, soon()).unwrap());
}

#[test]
fn a_medium_is_given_up_when_its_disk_has_failed_for_good_or_belongs_to_another_pool() {
    let arena = Arena::new(4 * size()).unwrap();
    let (mut late, engine) = disk(1, &arena);
    let mut order = order(&late, 1);
    assert!(late.attach(CLUSTER, &order, soon()).unwrap());
    engine.on_writes(0..u64::MAX, 1, Fault::Delay(Duration::from_secs(2)));
    order.generation = 2;
    let until = Instant::now() + Duration::from_millis(50);
    assert!(late.attach(CLUSTER, &order, until).is_err());
    let (mut foreign, _engine) = disk(2, &arena);
    let offer = foreign.offer(ClusterId(0xc2), soon()).unwrap();
    assert!(offer.is_none());
    let media = |disks| Media::of(disks, Arc::clone(&arena), store());
    assert!(!media(vec![foreign]).may_be_attached());
    assert!(media(vec![late]).may_be_attached());
}

/// A master that lost its data directory leads another pool.
#[test]
fn an_attached_medium_is_not_touched_for_another_pool_and_returns_to_its_own() {
    const OTHER: ClusterId = ClusterId(0xc2);
    let arena = Arena::new(4 * size()).unwrap();
    let (mut disk, engine) = disk(1, &arena);
    let mut order = order(&disk, 1);
    assert!(disk.attach(CLUSTER, &order, soon()).unwrap());
    disk.format(OTHER, soon()).unwrap();
    assert!(disk.front.attached(on_medium(1)).is_some());
    assert!(disk.offer(OTHER, soon()).unwrap().is_none());
    assert!(disk.front.attached(on_medium(1)).is_none());
    assert!(matches!(disk.attachment(), Attachment::Refused(_)));
    disk.format(OTHER, soon()).unwrap();

    let device = Arc::clone(&engine) as Arc<dyn Engine>;
    let Opened::Formatted(found) = Formatted::open(device, Arc::clone(&arena)).unwrap() else {
        panic!("no medium is left");
    };
    let superblock = found.superblock();
    assert_eq!(
        (superblock.cluster, superblock.generation.0),
        (CLUSTER, order.generation)
    );
    assert_eq!(
        Some(superblock.medium),
        MediumId::from_slice(&order.medium_id)
    );

    let offer = disk.offer(CLUSTER, soon()).unwrap().unwrap();
    assert_eq!(offer.generation, order.generation);
    assert_eq!(offer.medium_id, order.medium_id);
    order.generation += 1;
    assert!(disk.attach(CLUSTER, &order, soon()).unwrap());
    assert_eq!(disk.attachment(), Attachment::Attached);
}

#[test]
fn an_offer_to_an_earlier_session_detaches_no_medium_of_a_later_one() {
    let arena = Arena::new(4 * size()).unwrap();
    let ((mut first, engine), (second, _)) = (disk(1, &arena), disk(2, &arena));
    let orders = [order(&first, 1), order(&second, 2)];
    assert!(first.attach(CLUSTER, &orders[0], soon()).unwrap());
    let mut media = Media::of(vec![first, second], arena, store());
    media.start_workers().unwrap();
    // The offer to another pool detaches the first medium, and waits for its disk.
    engine.on_writes(0..u64::MAX, 1, Fault::Delay(Duration::from_secs(2)));
    let (to_other, _answered) = unbounded_channel();
    media.begin(ClusterId(0xc2), to_other);
    let fronts = &media.shared.fronts;
    wait_until("the first medium is detached", || {
        fronts[0].attached(on_medium(1)).is_none()
    });
    let (answers, mut answered) = unbounded_channel();
    media.begin(CLUSTER, answers.clone());
    media.attach(CLUSTER, orders[1].clone(), answers);
    wait_until("the second medium is attached", || {
        matches!(answered.try_recv(), Ok(ToMaster::MediumAttached(_)))
    });
    // The first disk answers, and the earlier offer comes to the second.
    wait_until("the first disk is free", || {
        !media.shared.disks[0].is_locked()
    });
    std::thread::sleep(Duration::from_millis(200));
    assert!(fronts[1].attached(on_medium(2)).is_some());
}

#[test]
fn the_end_of_media_does_not_wait_for_a_disk_that_hangs() {
    let arena = Arena::new(4 * size()).unwrap();
    let (mut disk, engine) = disk(1, &arena);
    let order = order(&disk, 1);
    assert!(disk.attach(CLUSTER, &order, soon()).unwrap());
    let media = Media::of(vec![disk], arena, store());
    engine.on_all(Fault::Delay(Duration::from_secs(10)));
    let begun = Instant::now();
    assert!(!media.detach(begun + Duration::from_millis(200)));
    assert!(
        begun.elapsed() < Duration::from_secs(2),
        "{:?}",
        begun.elapsed()
    );
}
