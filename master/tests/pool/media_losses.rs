//! Copies that no longer count, media that are offered by the wrong node, and pins on media.

use crate::support::media::*;
use crate::support::{SPACE, join_as, patient_with_nodes, pool, pool_at, registration};
use kvpool_master::Config;
use kvpool_master::clock::{BootClock, BootInstant, Clock};
use kvpool_master::pool::{MediumView, OfferedMedium, Pool, ReserveOptions};
use kvpool_proto::MediumState;
use kvpool_types::{Code, Key, KeyRef, NodeName};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Pinned blocks on a medium outlast any number of other blocks, even if they fill whole zones of
/// three blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pinned_blocks_on_a_medium_stay_when_they_fill_whole_zones() {
    for (size, zone) in [(32 * MIB, 4 * MIB), (8 * MIB, 256 * KIB)] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, _store) = pool(directory.path(), Config::default()).await;
        let disk = Disk::new(1);
        let node = join(&pool, "n", 1, 8 * MIB, &disk, size, zone).await;
        wait_for_attachment(&disk).await;
        let pins = 0..4 * MIB / BLOCK;
        for number in pins.clone() {
            put(&pool, number, &pinned()).await;
        }
        pool.draining(&node.node, false);
        until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
        pool.drop_node(&node.node);
        drop(node);
        let _node = join(&pool, "n", 2, 8 * MIB, &disk, size, zone).await;
        wait_for_media(&pool, 0..1).await;
        for number in 10_000..10_000 + 48 * MIB / BLOCK {
            put_paced(&pool, number).await;
        }
        let held = present(&pool, pins).await;
        let lost = held.iter().filter(|is_held| !**is_held).count();
        assert_eq!(
            lost,
            0,
            "of {} pinned blocks, zones of {zone} bytes",
            held.len()
        );
    }
}

/// The node may be killed. It has the block again only if the medium has its copy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_copy_of_a_pinned_block_in_memory_stays_while_others_are_written() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 8 * MIB, &disk, 8 * MIB, 256 * KIB).await;
    wait_for_attachment(&disk).await;
    put(&pool, 0, &pinned()).await;
    let pinned_key = key(0);
    let is_copied = || {
        let block = pool.describe(SPACE, &[pinned_key.as_ref()]).remove(0);
        let mut replicas = block.unwrap().replicas.into_iter();
        replicas.any(|replica| replica.segment.is_on_medium())
    };
    let mut number = 1;
    while !is_copied() {
        put_paced(&pool, number).await;
        number += 1;
    }
    // Enough to write the medium several times.
    for number in number..number + 48 * MIB / BLOCK {
        put_paced(&pool, number).await;
        until("the copy is there", &is_copied).await;
    }
    // It was stored again from memory only where the written zone had no room for it.
    let moves = disk.moves.load(Ordering::SeqCst);
    assert!(moves > 0, "it did not move with its zone");
}

/// How many of these blocks have a copy on a medium.
fn copied(pool: &Pool, numbers: std::ops::Range<u64>) -> usize {
    let keys: Vec<Key> = numbers.map(key).collect();
    let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    let blocks = pool.describe(SPACE, &keys[..]).into_iter().flatten();
    let has_copy = blocks.filter(|block| {
        let mut replicas = block.replicas.iter();
        replicas.any(|replica| replica.segment.is_on_medium())
    });
    has_copy.count()
}

/// The node may be killed at any moment. Eviction takes no pinned block, so an early copy costs no write more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_block_gets_its_copy_at_once() {
    for config in [lru(), Config::default()] {
        let directory = tempfile::tempdir().unwrap();
        let (pool, _store) = pool(directory.path(), config).await;
        let disk = Disk::new(1);
        let _node = join(&pool, "n", 1, 8 * MIB, &disk, 8 * MIB, 256 * KIB).await;
        wait_for_attachment(&disk).await;
        put(&pool, 0, &patient()).await;
        put(&pool, 1, &pinned()).await;
        until("the copy is there", || copied(&pool, 1..2) == 1).await;
        assert_eq!(copied(&pool, 0..1), 0, "the other block waits for its turn");
    }
}

/// A zone cannot move whole into another one that is written already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pinned_blocks_in_memory_have_copies_again_after_their_zones_were_emptied() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 8 * MIB, &disk, 8 * MIB, 256 * KIB).await;
    wait_for_attachment(&disk).await;
    // They fill eight zones of three blocks.
    let pins = 0..24;
    for number in pins.clone() {
        put(&pool, number, &pinned()).await;
    }
    until("all have copies", || copied(&pool, pins.clone()) == 24).await;
    // Enough to write the medium several times.
    for number in 1000..1000 + 48 * MIB / BLOCK {
        put_paced(&pool, number).await;
    }
    until("all have copies again", || {
        copied(&pool, pins.clone()) == 24
    })
    .await;
}

/// Other blocks go without a copy when the budget is used up. They may be evicted all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_block_waits_for_the_write_budget() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let per_second = MIB;
    disk.budget.store(per_second * 24 * 3600, Ordering::SeqCst);
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    // This takes two seconds' budget.
    for number in 0..30 {
        put(&pool, number, &pinned()).await;
    }
    until("all have copies", || copied(&pool, 0..30) == 30).await;
}

/// The replica in memory is under suspicion. The same holds for a node that has left: its blocks
/// are listed for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_copy_stays_while_nobody_can_read_its_block_in_memory() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 8 * MIB, &disk, 8 * MIB, 256 * KIB).await;
    wait_for_attachment(&disk).await;
    let version = put(&pool, 0, &pinned()).await;
    let keys = [key(0)];
    let keys: Vec<_> = keys.iter().map(Key::as_ref).collect();
    let places = || {
        let block = pool.describe(SPACE, &keys[..]).remove(0).unwrap();
        block.replicas.into_iter().map(|replica| replica.segment)
    };
    let mut number = 1;
    while !places().any(|segment| segment.is_on_medium()) {
        put_paced(&pool, number).await;
        number += 1;
    }
    let in_memory = places().find(|segment| !segment.is_on_medium()).unwrap();
    let report = (keys[0], version, in_memory, Code::ChecksumMismatch);
    assert_eq!(pool.report(SPACE, &[report]), [Code::Ok]);
    for number in number..number + 48 * MIB / BLOCK {
        put_paced(&pool, number).await;
        assert_eq!(present(&pool, 0..1).await, [true], "at block {number}");
    }
}

/// The node with the memory drains, or was killed without the master noticing yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_copy_stays_while_the_only_memory_with_its_block_leaves() {
    for drains in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let config = patient_with_nodes();
        let (pool, _store) = pool(directory.path(), config).await;
        let disk = Disk::new(1);
        let a = join(&pool, "a", 1, 8 * MIB, &disk, 8 * MIB, 256 * KIB).await;
        wait_for_attachment(&disk).await;
        let (b, session) = join_as(&pool, &registration("b", 2, 8 * MIB), Duration::ZERO).await;
        let both = ReserveOptions {
            hints: kvpool_master::placement::PlacementHints {
                replicas: 2,
                preferred: vec![NodeName("a".into()), NodeName("b".into())],
                host: None,
            },
            ..pinned()
        };
        put(&pool, 0, &both).await;
        // The next incarnation of `a` has the copy on its medium, but not the block in memory.
        pool.draining(&a.node, false);
        until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
        pool.drop_node(&a.node);
        drop(a);
        let _a = join(&pool, "a", 3, 8 * MIB, &disk, 8 * MIB, 256 * KIB).await;
        until("attached again", || disk.known.load(Ordering::SeqCst) == 2).await;
        match drains {
            true => pool.draining(&b, false),
            false => pool.detach(&b, session),
        }
        let alone = ReserveOptions {
            hints: kvpool_master::placement::PlacementHints {
                replicas: 1,
                preferred: vec![NodeName("a".into())],
                host: None,
            },
            ..patient()
        };
        for number in 1..48 * MIB / BLOCK {
            put(&pool, number, &alone).await;
            until("the disk has caught up", || pool.bytes_due() < 8 * BLOCK).await;
        }
        pool.drop_node(&b);
        assert_eq!(present(&pool, 0..1).await, [true], "drains: {drains}");
    }
}

/// An old image at another node is formatted. The true medium is not: its node comes back with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_image_at_another_node_does_not_cost_the_holder_its_medium() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 8 * MIB, &disk, 32 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    put(&pool, 1, &patient()).await;
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    pool.drop_node(&node.node);
    drop(node);
    // The image is of a generation before the attached one.
    let image = Disk::new(1);
    let _other = join(&pool, "other", 3, 8 * MIB, &image, 32 * MIB, 4 * MIB).await;
    until("formatted", || image.resets.load(Ordering::SeqCst) == 1).await;
    let _node = join(&pool, "n", 2, 8 * MIB, &disk, 32 * MIB, 4 * MIB).await;
    wait_for_media(&pool, 1..2).await;
    assert_eq!(disk.resets.load(Ordering::SeqCst), 0);
    assert!(comes_back(&pool, 1).await);
}

/// Blocks in memory whose copies lay on a retired medium get copies on another medium.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_whose_copies_are_lost_get_others() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let (gone, left) = (Disk::new(1), Disk::new(2));
    let a = join(&pool, "a", 1, 16 * MIB, &gone, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&gone).await;
    let b = join(&pool, "b", 2, 16 * MIB, &left, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&left).await;
    // One replica on each node. Either node may make the block's one copy.
    let both = ReserveOptions {
        hints: kvpool_master::placement::PlacementHints {
            replicas: 2,
            preferred: vec![NodeName("a".into()), NodeName("b".into())],
            host: None,
        },
        ..patient()
    };
    let blocks = 12 * MIB / BLOCK;
    for number in 0..blocks {
        put(&pool, number, &both).await;
    }
    until("every block had its turn", || pool.bytes_due() == 0).await;
    let copies = |disk: &Disk| disk.blocks.lock().len();
    assert!(
        copies(&gone) > 10,
        "{} and {}",
        copies(&gone),
        copies(&left)
    );
    pool.drop_node(&a.node);
    drop(a);
    let is_of_a = |medium: &MediumView| medium.record.node.0 == "a";
    let retired = pool.media().into_iter().find(is_of_a).unwrap();
    pool.detach_medium(retired.record.medium, true)
        .await
        .unwrap();
    until("others are made", || copies(&left) as u64 >= blocks).await;
    // The blocks leave the memory of `b`.
    for number in 10_000..10_000 + 32 * MIB / BLOCK {
        put_paced(&pool, number).await;
    }
    let held = present(&pool, 0..blocks).await;
    let lost = held.iter().filter(|is_held| !**is_held).count();
    assert_eq!(lost, 0, "of {} blocks", held.len());
    drop(b);
}

/// A draining node serves the blocks on its medium: presence and reads agree.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_node_serves_the_blocks_on_its_medium() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), lru()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 8 * MIB, &disk, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..24 * MIB / BLOCK {
        put_paced(&pool, number).await;
    }
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    let keys: Vec<Key> = (0..20).map(key).collect();
    let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    let held = pool.exist(SPACE, &keys[..], false).answer;
    let held: Vec<(u64, bool)> = (0..).zip(held).collect();
    let copied: Vec<u64> = held.iter().filter(|one| one.1).map(|one| one.0).collect();
    assert!(copied.len() > 15, "{held:?}");
    for number in copied {
        assert!(comes_back(&pool, number).await, "{number}");
    }
}

/// The machine's clock, some milliseconds ahead.
#[derive(Default)]
struct Ahead(AtomicU64);

impl Clock for Ahead {
    fn now(&self) -> BootInstant {
        BootInstant(BootClock.now().0 + self.0.load(Ordering::SeqCst))
    }
}

/// A node restarts within seconds, and its copies count meanwhile. After half a minute they do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_whose_medium_is_absent_for_long_get_other_copies() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(Ahead::default());
    let config = patient_with_nodes();
    let kept = Arc::clone(&clock) as Arc<dyn Clock>;
    let (pool, _store) = pool_at(directory.path(), config, kept).await;
    let (gone, left) = (Disk::new(1), Disk::new(2));
    let a = join(&pool, "a", 1, 16 * MIB, &gone, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&gone).await;
    let b = join(&pool, "b", 2, 16 * MIB, &left, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&left).await;
    // The medium of `b` takes no copies at first.
    let offer = |state| OfferedMedium {
        state,
        ..left.offer(64 * MIB, 4 * MIB)
    };
    let shut = vec![offer(MediumState::MediumReadOnly)];
    pool.media_offered(&b.node, b.session, shut).await.unwrap();
    let both = ReserveOptions {
        hints: kvpool_master::placement::PlacementHints {
            replicas: 2,
            preferred: vec![NodeName("a".into()), NodeName("b".into())],
            host: None,
        },
        ..patient()
    };
    let blocks = 12 * MIB / BLOCK;
    for number in 0..blocks {
        put(&pool, number, &both).await;
    }
    let copies = |disk: &Disk| disk.blocks.lock().len() as u64;
    // The turn of most blocks has come, and all these blocks have copies there.
    until("`a` copies them", || copies(&gone) > blocks / 10).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let open = vec![offer(MediumState::MediumReady)];
    pool.media_offered(&b.node, b.session, open).await.unwrap();
    until("every block had its turn", || pool.bytes_due() == 0).await;
    let before = copies(&left);
    assert!(before + 10 < blocks, "{before} copies of {blocks} blocks");
    drop(a);
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        clock.0.fetch_add(9000, Ordering::SeqCst);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(copies(&left), before, "after less than half a minute");
    clock.0.fetch_add(5000, Ordering::SeqCst);
    until("others are made", || copies(&left) >= blocks).await;
}

/// The offer names an earlier generation, but that does not prove an old image.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offer_of_an_ended_session_costs_no_medium() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let late = disk.offer(32 * MIB, 4 * MIB);
    let node = join(&pool, "n", 1, 8 * MIB, &disk, 32 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    put(&pool, 1, &patient()).await;
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    let (outbox, _inbox) = tokio::sync::mpsc::unbounded_channel();
    let second = pool.activate(&node.node, &registration("n", 1, 8 * MIB), outbox);
    let now = disk.offer(32 * MIB, 4 * MIB);
    for (session, offer) in [(second, now), (node.session, late)] {
        let offered = pool.media_offered(&node.node, session, vec![offer]);
        offered.await.unwrap();
    }
    assert_eq!(pool.stored_copies().len(), 1, "the medium was dropped");
}

/// The record of a medium is durable before any master allocates its zones, and every later leader
/// would read it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_medium_that_no_master_could_keep_in_memory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 8 * MIB, &disk, 1 << 62, (1 << 30) + 4096).await;
    let many = (2..100).map(|id| Disk::new(id).offer(64 * MIB, 4 * MIB));
    let offered = pool.media_offered(&node.node, node.session, many.collect());
    offered.await.unwrap();
    let media = pool.media();
    assert!(media.iter().all(|medium| medium.record.size.0 == 64 * MIB));
    assert_eq!(media.len(), 64, "more than a node may have");
}
