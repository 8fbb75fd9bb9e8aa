//! A node with a disk, which the test controls: it answers orders late and out of order. The disk
//! knows the content of each byte, so a range that is used twice is found.

use super::{Gated, SPACE, commit, pool, registration, reserve_with};
use kvpool_master::Config;
use kvpool_master::directory::Policy;
use kvpool_master::membership::{Reported, StoreNode};
use kvpool_master::pool::{OfferedMedium, Pool, ReserveOptions};
use kvpool_proto::master_message::Body;
use kvpool_proto::{self as proto, MediumState};
use kvpool_types::medium::{Generation, footprint};
use kvpool_types::{Code, Key, KeyRef, Length, MediumId, SegmentId, Version};
use parking_lot::Mutex;
use rand::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const BLOCK: u64 = 64 * KIB;

/// A disk that remembers which block each range holds.
#[derive(Default)]
pub(crate) struct Disk {
    pub(crate) generation: AtomicU64,
    /// The generation of the last attachment that the master knows of.
    pub(crate) known: AtomicU64,
    pub(crate) medium: AtomicU64,
    /// Version and checksum by offset, with the end of the range.
    pub(crate) blocks: Mutex<BTreeMap<u64, (u64, u64, u64)>>,
    /// Loads that found another block.
    pub(crate) wrong: AtomicU64,
    pub(crate) loads: AtomicU64,
    pub(crate) stores: AtomicU64,
    /// Set when the master has reported that every block has its copy.
    pub(crate) is_demoted: AtomicBool,
    /// The number of blocks without a copy at that time.
    pub(crate) left: AtomicU64,
    /// The versions of stores from memory, in the order of the orders.
    pub(crate) ordered: Mutex<Vec<u64>>,
    pub(crate) budget: AtomicU64,
    /// While set, orders are not answered.
    pub(crate) is_stalled: AtomicBool,
    /// While set, loads are not answered.
    pub(crate) loads_stall: AtomicBool,
    /// The orders to move a copy from one zone to another.
    pub(crate) moves: AtomicU64,
    /// While set, orders to move a copy are not answered.
    pub(crate) moves_stall: AtomicBool,
    /// While set, nothing is written.
    pub(crate) refuses: AtomicBool,
    /// While set, the node says of a store that failed that the disk takes no writes.
    pub(crate) takes_no_writes: AtomicBool,
    /// How many stores fail from now on.
    pub(crate) refuses_next: AtomicU64,
    /// How often the master asked for a new format.
    pub(crate) resets: AtomicU64,
    /// While set, the node says at once that it has pulled the blocks of other nodes.
    pub(crate) pulls: AtomicBool,
}

impl Disk {
    pub(crate) fn new(medium: u64) -> Arc<Self> {
        let disk = Self::default();
        disk.medium.store(medium, Ordering::SeqCst);
        Arc::new(disk)
    }

    pub(crate) fn offer(&self, size: u64, zone: u64) -> OfferedMedium {
        OfferedMedium {
            medium: MediumId(self.medium.load(Ordering::SeqCst).into()),
            generation: Generation(self.generation.load(Ordering::SeqCst)),
            size: Length(size),
            zone: Length(zone),
            state: MediumState::MediumReady,
            budget: self.budget.load(Ordering::SeqCst),
            namespaces: Vec::new(),
        }
    }

    pub(crate) fn serve(&self, order: &proto::Transfer) -> Code {
        let (from, to) = (order.from.unwrap(), order.to.unwrap());
        let mut blocks = self.blocks.lock();
        let held = blocks
            .get(&from.offset)
            .map(|(_, version, checksum)| (*version, *checksum));
        let is_right = held == Some((order.version, order.checksum));
        if SegmentId(from.segment).is_on_medium() && !is_right {
            self.wrong.fetch_add(1, Ordering::SeqCst);
            return Code::ChecksumMismatch;
        }
        if SegmentId(to.segment).is_on_medium() {
            let one_less = |left: u64| left.checked_sub(1);
            let (set, fetch) = (Ordering::SeqCst, Ordering::SeqCst);
            let is_refused = self.refuses_next.fetch_update(set, fetch, one_less).is_ok();
            if is_refused || self.refuses.load(Ordering::SeqCst) {
                return Code::Internal;
            }
            let end = to.offset + footprint(Length(to.length)).unwrap().0;
            blocks.retain(|start, (other, ..)| end <= *start || *other <= to.offset);
            blocks.insert(to.offset, (end, order.version, order.checksum));
            self.stores.fetch_add(1, Ordering::SeqCst);
            return Code::Ok;
        }
        self.loads.fetch_add(1, Ordering::SeqCst);
        Code::Ok
    }
}

/// A node with one segment of memory and one medium. It ends its session when dropped.
pub(crate) struct Node {
    pub(crate) pool: Arc<Pool>,
    pub(crate) node: Arc<StoreNode>,
    pub(crate) session: u64,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.pool.detach(&self.node, self.session);
    }
}

pub(crate) async fn join(
    pool: &Arc<Pool>,
    name: &str,
    life: u128,
    bytes: u64,
    disk: &Arc<Disk>,
    size: u64,
    zone: u64,
) -> Node {
    let registration = registration(name, life, bytes);
    let node = pool.register(&registration).await.unwrap();
    let (outbox, mut inbox) = tokio::sync::mpsc::unbounded_channel();
    let session = pool.activate(&node, &registration, outbox);
    pool.heard(&node, Some(Reported::default()));
    let (serving, of, disk_of) = (Arc::clone(pool), Arc::clone(&node), Arc::clone(disk));
    tokio::spawn(async move {
        let mut beats = tokio::time::interval(Duration::from_millis(500));
        loop {
            let message = tokio::select! {
                message = inbox.recv() => message,
                _ = beats.tick() => {
                    serving.heard(&of, Some(Reported::default()));
                    continue;
                }
            };
            let Some(Ok(message)) = message else { break };
            let (pool, node, disk) = (Arc::clone(&serving), Arc::clone(&of), Arc::clone(&disk_of));
            match message.body {
                Some(Body::Fence(fence)) => {
                    let tickets: Vec<u64> = fence.items.iter().map(|item| item.ticket).collect();
                    pool.fenced(&node, &tickets);
                }
                Some(Body::AttachMedium(attach)) => {
                    disk.generation.store(attach.generation, Ordering::SeqCst);
                    let medium = MediumId::from_slice(&attach.medium_id).unwrap();
                    let generation = Generation(attach.generation);
                    tokio::spawn(async move {
                        pool.medium_attached(&node, session, medium, generation)
                            .await;
                        disk.known.store(generation.0, Ordering::SeqCst);
                    });
                }
                Some(Body::ResetMedium(_)) => {
                    disk.resets.fetch_add(1, Ordering::SeqCst);
                    disk.blocks.lock().clear();
                    disk.generation.store(0, Ordering::SeqCst);
                    disk.medium.fetch_add(1000, Ordering::SeqCst);
                    let offer = disk.offer(size, zone);
                    tokio::spawn(async move {
                        pool.media_offered(&node, session, vec![offer])
                            .await
                            .unwrap();
                    });
                }
                Some(Body::Pulls(orders)) if disk.pulls.load(Ordering::SeqCst) => {
                    let done = orders.pulls.iter().map(|pull| (pull.ticket, Code::Ok));
                    pool.pulled(&node, &done.collect::<Vec<_>>());
                }
                Some(Body::Undrain(order)) => pool.undrained(&node, order.number),
                Some(Body::Demoted(demoted)) => {
                    disk.left.store(demoted.left, Ordering::SeqCst);
                    disk.is_demoted.store(true, Ordering::SeqCst);
                }
                Some(Body::Transfers(orders)) => {
                    for order in orders.transfers {
                        let is_load = !SegmentId(order.to.unwrap().segment).is_on_medium();
                        let is_store = !SegmentId(order.from.unwrap().segment).is_on_medium();
                        let is_move = !is_load && !is_store;
                        if is_store {
                            disk.ordered.lock().push(order.version);
                        }
                        if is_move {
                            disk.moves.fetch_add(1, Ordering::SeqCst);
                        }
                        let (pool, node, disk) =
                            (Arc::clone(&pool), Arc::clone(&node), Arc::clone(&disk));
                        let late = rand::rng().random_range(0..3000);
                        tokio::spawn(async move {
                            tokio::time::sleep(Duration::from_micros(late)).await;
                            while disk.is_stalled.load(Ordering::SeqCst)
                                || is_load && disk.loads_stall.load(Ordering::SeqCst)
                                || is_move && disk.moves_stall.load(Ordering::SeqCst)
                            {
                                tokio::time::sleep(Duration::from_millis(1)).await;
                            }
                            let code = disk.serve(&order);
                            if code != Code::Ok && disk.takes_no_writes.load(Ordering::SeqCst) {
                                pool.writes_refused(&node, [order.ticket]);
                            }
                            pool.transfers_done(&node, &[(order.ticket, code)]);
                        });
                    }
                }
                _ => {}
            }
        }
    });
    let offered = vec![disk.offer(size, zone)];
    pool.media_offered(&node, session, offered).await.unwrap();
    Node {
        pool: Arc::clone(pool),
        node,
        session,
    }
}

pub(crate) fn key(number: u64) -> Key {
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&number.to_le_bytes());
    Key::from_digest(digest)
}

pub(crate) async fn put(pool: &Arc<Pool>, number: u64, options: &ReserveOptions) -> Version {
    let key = key(number);
    let granted = reserve_with(pool, &key, BLOCK, options).await.unwrap();
    let version = granted.version;
    assert_eq!(commit(pool, &key, BLOCK, granted).await, [Code::Ok]);
    version
}

pub(crate) fn patient() -> ReserveOptions {
    ReserveOptions {
        timeout: Duration::from_secs(10),
        ..ReserveOptions::default()
    }
}

/// [`ReserveOptions`] for a hard-pinned block.
pub(crate) fn pinned() -> ReserveOptions {
    ReserveOptions {
        hard_pin: true,
        ..patient()
    }
}

/// Puts a block, and waits for the disk if it lags: a busy machine must not cost copies.
pub(crate) async fn put_paced(pool: &Arc<Pool>, number: u64) {
    put(pool, number, &patient()).await;
    for _ in 0..100 {
        if pool.bytes_due() < 8 * BLOCK {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

pub(crate) async fn present(pool: &Arc<Pool>, numbers: std::ops::Range<u64>) -> Vec<bool> {
    let keys: Vec<Key> = numbers.map(key).collect();
    let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    pool.exist(SPACE, &keys[..], false).answer
}

/// True if the block is loaded and read from memory.
pub(crate) async fn comes_back(pool: &Arc<Pool>, number: u64) -> bool {
    let key = key(number);
    let keys = [key.as_ref()];
    let restored = pool.restore(SPACE, &keys[..], Duration::MAX).await;
    let found = pool.lookup(SPACE, &keys[..], false).answer;
    pool.end_restored(SPACE, &restored);
    let Some(found) = found.into_iter().next().flatten() else {
        return false;
    };
    assert!(found.replicas.iter().all(|r| !r.segment.is_on_medium()));
    true
}

/// Waits until the master knows that the medium is attached.
pub(crate) async fn wait_for_attachment(disk: &Disk) {
    until("attached", || disk.known.load(Ordering::SeqCst) == 1).await;
}

/// Waits until a copy of one of these blocks can be read.
pub(crate) async fn wait_for_media(pool: &Arc<Pool>, numbers: std::ops::Range<u64>) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !present(pool, numbers.clone()).await.contains(&true) {
        assert!(Instant::now() < deadline, "the medium is not attached");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Settings with which blocks are copied late, oldest first.
pub(crate) fn lru() -> Config {
    Config {
        eviction_policy: Policy::Lru,
        ..Config::default()
    }
}

/// The node ends with its blocks on its medium, and starts again. Its copies can be read.
pub(crate) async fn comes_again(pool: &Arc<Pool>, disk: &Arc<Disk>, node: Node) -> Node {
    let node = comes_again_with(pool, disk, node, 8 * MIB).await;
    wait_for_media(pool, 1..2).await;
    node
}

/// The node ends with its blocks on its medium, and starts again with this much memory.
pub(crate) async fn comes_again_with(
    pool: &Arc<Pool>,
    disk: &Arc<Disk>,
    node: Node,
    bytes: u64,
) -> Node {
    disk.is_demoted.store(false, Ordering::SeqCst);
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    pool.drop_node(&node.node);
    let life = node.node.incarnation.0 + 1;
    drop(node);
    until("swept", || pool.blocks() == 0).await;
    join(pool, "n", life, bytes, disk, 32 * MIB, 4 * MIB).await
}

/// A pool whose only block, of key 1, lies only on a medium, on a node in its second incarnation.
pub(crate) struct Cold {
    pub(crate) pool: Arc<Pool>,
    pub(crate) store: Arc<Gated>,
    pub(crate) disk: Arc<Disk>,
    pub(crate) node: Node,
    _directory: tempfile::TempDir,
}

impl Cold {
    pub(crate) async fn block(config: Config) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (pool, store) = pool(directory.path(), config).await;
        let disk = Disk::new(1);
        let node = join(&pool, "n", 1, 8 * MIB, &disk, 32 * MIB, 4 * MIB).await;
        wait_for_attachment(&disk).await;
        put(&pool, 1, &patient()).await;
        let node = comes_again(&pool, &disk, node).await;
        Self {
            pool,
            store,
            disk,
            node,
            _directory: directory,
        }
    }
}
