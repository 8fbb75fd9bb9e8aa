//! Blocks move between memory and media.

use crate::support::media::*;
use crate::support::{SPACE, commit, pool, reserve, reserve_with};
use futures::FutureExt;
use kvpool_master::Config;
use kvpool_master::pool::{DescribedReplica, Granted, Pool, Removal, ReserveOptions};
use kvpool_master::store::record::{self, Record};
use kvpool_master::store::{LogSeq, MetadataStore};
use kvpool_types::medium::footprint;
use kvpool_types::{Code, Key, KeyRef, Length, Version};
use rand::Rng;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_leave_memory_and_come_back_on_use() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 32 * MIB, &disk, 1024 * MIB, 64 * MIB).await;
    // Five times the memory.
    let blocks = 5 * 32 * MIB / BLOCK;
    for number in 0..blocks {
        put_paced(&pool, number).await;
    }
    let counters = pool.counters();
    assert!(counters["blocks_evicted_total"] > blocks / 2);
    let is_held = present(&pool, 0..blocks).await;
    let held = is_held.iter().filter(|is_held| **is_held).count() as u64;
    assert!(held >= blocks * 99 / 100, "{held} of {blocks} are held");
    let whole = |first: &usize| is_held[*first..*first + 32].iter().all(|is_held| *is_held);
    let first = (0..100).find(whole).unwrap() as u64;
    let chain: Vec<Key> = (first..first + 32).map(key).collect();
    let chain: Vec<KeyRef<'_>> = chain.iter().map(Key::as_ref).collect();
    assert_eq!(pool.match_prefix(SPACE, &chain[..], true).answer, 32);
    let mut back = 0;
    for number in (0..blocks).step_by(7) {
        back += u64::from(comes_back(&pool, number).await);
    }
    assert!(back >= blocks / 7 * 99 / 100, "{back}");
    assert_eq!(disk.wrong.load(Ordering::SeqCst), 0);
    assert!(disk.loads.load(Ordering::SeqCst) > blocks / 10);
    // A put of a block that lies on the medium is not needed.
    let again = reserve(&pool, &key(first), BLOCK).await;
    assert_eq!(again.unwrap_err(), Code::Exists);
}

/// The block may be back before the record is written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_record_of_an_eviction_names_the_places_that_the_block_left() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    for number in 0..2 * 16 * MIB / BLOCK {
        put_paced(&pool, number).await;
    }
    for number in 0..8 {
        comes_back(&pool, number).await;
    }
    let last = store.log_span().await.unwrap().last;
    let (mut places, mut evicted) = (BTreeMap::new(), 0);
    let mut at = LogSeq(0);
    while at < last {
        let groups = store.read_log(at, 1 << 20).await.unwrap();
        assert!(!groups.is_empty(), "nothing was cut");
        for (seq, group) in groups {
            at = seq;
            for record in record::decode(&group).unwrap().records {
                match record {
                    Record::Commit(commit) if !commit.replicas[0].0.is_on_medium() => {
                        places.insert(commit.version, commit.replicas);
                    }
                    Record::Remove(gone) => {
                        evicted += 1;
                        assert_eq!(Some(&gone.places), places.get(&gone.version));
                    }
                    _ => {}
                }
            }
        }
    }
    assert!(evicted > 4, "{evicted} blocks were evicted");
}

/// The reserve is smaller than a block, so each loaded block needs its own eviction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_comes_back_to_memory_that_is_full() {
    for eviction_ratio in [0.05, 0.0] {
        let directory = tempfile::tempdir().unwrap();
        let config = Config {
            eviction_ratio,
            ..Config::default()
        };
        let (pool, _store) = pool(directory.path(), config).await;
        let disk = Disk::new(1);
        let _node = join(&pool, "n", 1, 8 * BLOCK, &disk, 64 * MIB, 4 * MIB).await;
        wait_for_attachment(&disk).await;
        for number in 0..40 {
            put_paced(&pool, number).await;
        }
        let held = present(&pool, 0..40).await;
        let held = (0..40).zip(held).filter(|(_, is_held)| *is_held);
        let held: Vec<u64> = held.map(|(number, _)| number).collect();
        assert!(held.len() > 30, "{held:?}");
        let asked = Instant::now();
        for number in &held {
            let is_back = comes_back(&pool, *number).await;
            assert!(is_back, "{number} at ratio {eviction_ratio}");
        }
        println!("{} blocks in {:?}", held.len(), asked.elapsed());
        let evicted = pool.counters()["blocks_evicted_total"];
        assert!(evicted <= 40 + held.len() as u64, "{evicted} were evicted");
        // A batch that is larger than memory ends as well, with some of its blocks.
        let keys: Vec<Key> = held.iter().map(|number| key(*number)).collect();
        let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
        let (asked, before) = (Instant::now(), disk.loads.load(Ordering::SeqCst));
        let restored = pool.restore(SPACE, &keys[..], Duration::MAX).await;
        assert!(!restored.left.is_empty(), "all of them are in memory");
        let loads = disk.loads.load(Ordering::SeqCst) - before;
        assert!(loads <= 2 * keys.len() as u64, "{loads}");
        assert!(
            asked.elapsed() < Duration::from_secs(4),
            "{:?}",
            asked.elapsed()
        );
        let found = pool.lookup(SPACE, &keys[..], false).answer;
        assert!(found.iter().flatten().count() >= 4);
        assert_eq!(disk.wrong.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_see_blocks_that_are_on_media_only() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 32 * BLOCK, &disk, 64 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    for number in 0..100 {
        put_paced(&pool, number).await;
    }
    let (mut listed, mut page) = (Vec::new(), Vec::new());
    loop {
        let next = pool.list(SPACE, None, &page, 7).await.unwrap();
        assert!(next.blocks.len() <= 7);
        listed.extend(next.blocks.into_iter().map(|block| block.key));
        page = next.next;
        if page.is_empty() {
            break;
        }
    }
    let held = present(&pool, 0..100).await;
    let held: Vec<u64> = (0..100)
        .zip(held)
        .filter_map(|(number, is_held)| is_held.then_some(number))
        .collect();
    let mut expected: Vec<String> = held.iter().map(|number| key(*number).to_string()).collect();
    assert!(expected.len() > 80, "{}", expected.len());
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected, "each block once");
    let (mut on_media_only, mut on_both) = (0, 0);
    for number in held {
        let key = key(number);
        let described = pool.describe(SPACE, &[key.as_ref()][..]).remove(0).unwrap();
        assert_eq!(described.length, Length(BLOCK));
        let is_on_medium = |replica: &DescribedReplica| replica.segment.is_on_medium();
        let copies: Vec<_> = described
            .replicas
            .iter()
            .filter(|r| is_on_medium(r))
            .collect();
        assert!(
            copies
                .iter()
                .all(|copy| copy.state == "ready" && copy.node.0 == "n")
        );
        match (copies.len(), described.replicas.len()) {
            (1, 1) => on_media_only += 1,
            (1, 2) => on_both += 1,
            (0, 1) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(
        on_media_only > 40 && on_both > 0,
        "{on_media_only} {on_both}"
    );
    assert!(pool.list(SPACE, None, b"m1", 7).await.is_err());
}

/// The medium is a sixth of the bytes that are put, so every zone is written several times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_range_of_a_medium_is_written_while_a_copy_needs_it() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 32 * MIB, 2 * MIB).await;
    let blocks = 200 * MIB / BLOCK;
    for number in 0..blocks {
        put_paced(&pool, number).await;
        if number > 400 && number.is_multiple_of(5) {
            // Blocks of all ages, including blocks about to be dropped.
            let age = rand::rng().random_range(0..800).min(number);
            comes_back(&pool, number - age).await;
        }
    }
    assert!(pool.counters()["copies_dropped_total"] > blocks / 4);
    let mut back = 0;
    for number in blocks - 600..blocks {
        back += u64::from(comes_back(&pool, number).await);
    }
    assert_eq!(
        disk.wrong.load(Ordering::SeqCst),
        0,
        "a load met another block"
    );
    // Memory holds 240, and the medium about 450 if no block is evicted before its turn.
    assert!(back > 300, "{back}");
}

/// A copy that is recorded after its block was evicted counts, unless the key was put or removed
/// meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_that_is_evicted_while_it_is_copied_keeps_its_copy() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), lru()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_attachment(&disk).await;
    let copied = |numbers: std::ops::Range<u64>| {
        let (pool, disk) = (Arc::clone(&pool), Arc::clone(&disk));
        async move {
            disk.is_stalled.store(true, Ordering::SeqCst);
            let mut versions = Vec::new();
            for number in numbers.clone() {
                versions.push((number, put(&pool, number, &patient()).await));
            }
            let ordered = disk.ordered.lock().clone();
            versions.retain(|(_, version)| ordered.contains(&version.0));
            let is_there = present(&pool, numbers.clone()).await;
            let is_there: HashMap<u64, bool> = numbers.zip(is_there).collect();
            versions.retain(|(number, _)| !is_there[number]);
            versions
        }
    };
    let settled = |pool: Arc<Pool>| {
        disk.is_stalled.store(false, Ordering::SeqCst);
        async move {
            let in_flight = || pool.counters()["blocks_stored_total"];
            let mut before = u64::MAX;
            while in_flight() != before {
                before = in_flight();
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    };
    let evicted = copied(0..400).await;
    assert!(evicted.len() > 60, "{}", evicted.len());
    let [(removed, _), (removed_later, _), (replaced, first)] = evicted[..3] else {
        unreachable!("there are more");
    };
    for (number, codes) in [
        (removed, vec![Code::Missing]),
        (removed_later, vec![Code::Ok]),
    ] {
        if codes == [Code::Ok] {
            put(&pool, number, &patient()).await;
        }
        let key = key(number);
        let report = pool.remove(SPACE, &[key.as_ref()], true).await.unwrap();
        assert_eq!(report.codes, codes);
    }
    let second = put(&pool, replaced, &patient()).await;
    assert!(second > first);
    settled(Arc::clone(&pool)).await;
    for number in [removed, removed_later] {
        assert!(!comes_back(&pool, number).await, "{number} was removed");
    }
    assert!(comes_back(&pool, replaced).await);
    let key = key(replaced);
    let found = pool.lookup(SPACE, &[key.as_ref()][..], false).answer;
    assert_eq!(found[0].as_ref().unwrap().version, second);
    let mut back = 0;
    for (number, _) in &evicted[3..] {
        back += u64::from(comes_back(&pool, *number).await);
    }
    assert!(
        back >= evicted.len() as u64 - 10,
        "{back} of {}",
        evicted.len()
    );

    let evicted = copied(1000..1400).await;
    assert!(evicted.len() > 30, "{}", evicted.len());
    pool.remove_all(&Removal::Everything, true).await.unwrap();
    settled(Arc::clone(&pool)).await;
    for range in [0..400, 1000..1400] {
        let left = present(&pool, range).await;
        assert!(
            left.iter().all(|is_held| !is_held),
            "all blocks were removed"
        );
    }
    assert_eq!(disk.wrong.load(Ordering::SeqCst), 0);
}

/// A block is copied by two nodes. It is removed after the first copy, while the second is on its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_copy_that_ends_after_the_removal_brings_nothing_back() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let (fast, slow) = (Disk::new(1), Disk::new(2));
    let _nodes = [
        join(&pool, "a", 1, 16 * MIB, &fast, 512 * MIB, 32 * MIB).await,
        join(&pool, "b", 2, 16 * MIB, &slow, 512 * MIB, 32 * MIB).await,
    ];
    wait_for_attachment(&fast).await;
    wait_for_attachment(&slow).await;
    slow.is_stalled.store(true, Ordering::SeqCst);
    fast.is_stalled.store(true, Ordering::SeqCst);
    let mut twice = patient();
    twice.hints.replicas = 2;
    let mut versions = Vec::new();
    for number in 0..400 {
        versions.push((number, put(&pool, number, &twice).await));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The first copies end after the evictions.
    fast.is_stalled.store(false, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let under_way = slow.ordered.lock().clone();
    let is_there = present(&pool, 0..400).await;
    let is_there: HashMap<u64, bool> = (0..400).zip(is_there).collect();
    let in_memory = |number: u64| {
        let key = key(number);
        let found = pool.lookup(SPACE, &[key.as_ref()][..], false).answer;
        found.into_iter().next().flatten().is_some()
    };
    versions.retain(|(number, version)| is_there[number] && under_way.contains(&version.0));
    let copied = versions.iter().map(|(number, _)| *number);
    let copied: Vec<u64> = copied.filter(|n| !in_memory(*n)).take(20).collect();
    assert_eq!(copied.len(), 20, "evicted, copied once, and copied again");
    for number in &copied {
        let key = key(*number);
        let report = pool.remove(SPACE, &[key.as_ref()], true).await.unwrap();
        assert_eq!(report.codes, [Code::Ok], "{number} has its first copy");
    }
    slow.is_stalled.store(false, Ordering::SeqCst);
    let last = *under_way.iter().max().unwrap();
    until("the second copies end", || {
        let held = slow.blocks.lock();
        held.values().any(|(_, version, _)| *version == last)
    })
    .await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    for number in copied {
        assert!(!comes_back(&pool, number).await, "{number} was removed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_and_replaced_blocks_never_return() {
    let directory = tempfile::tempdir().unwrap();
    let (first, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&first, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    let blocks = 64 * MIB / BLOCK;
    let mut gone = Vec::new();
    let mut replaced: HashMap<u64, u64> = HashMap::new();
    for number in 0..blocks {
        put_paced(&first, number).await;
        // The block to remove is in memory, on its way to the medium, or has been on it for long.
        let other = rand::rng().random_range(0..=number);
        if number.is_multiple_of(3) && !gone.contains(&other) {
            let key = key(other);
            let report = first.remove(SPACE, &[key.as_ref()], true).await.unwrap();
            // A block that eviction took before it was copied is missing.
            let removed = (report.removed, report.codes[0]);
            assert!(
                matches!(removed, (1, Code::Ok) | (0, Code::Missing)),
                "{removed:?}"
            );
            gone.push(other);
        } else if number.is_multiple_of(5) && !gone.contains(&other) {
            let upsert = ReserveOptions {
                upsert: true,
                ..patient()
            };
            let version = put(&first, other, &upsert).await;
            replaced.insert(other, version.0);
        }
    }
    let check = |pool: Arc<Pool>| {
        let (gone, replaced) = (gone.clone(), replaced.clone());
        async move {
            for number in gone {
                assert!(!comes_back(&pool, number).await, "{number} was removed");
            }
            let mut found = 0;
            for (number, version) in replaced {
                let key = key(number);
                let keys = [key.as_ref()];
                let restored = pool.restore(SPACE, &keys[..], Duration::MAX).await;
                let answer = pool.lookup(SPACE, &keys[..], false).answer;
                pool.end_restored(SPACE, &restored);
                if let Some(Some(block)) = answer.into_iter().next() {
                    assert!(block.version.0 >= version, "{number} is as it was before");
                    found += 1;
                }
            }
            found
        }
    };
    let found = check(Arc::clone(&first)).await;
    assert!(found > 0);
    // Node and master restart, and the node brings its medium back.
    first.drop_node(&node.node);
    drop(node);
    first.stop().await;
    drop((first, _store));
    let (second, _store) = pool(directory.path(), Config::default()).await;
    let _node = join(&second, "n", 2, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_media(&second, 0..blocks).await;
    assert_eq!(disk.generation.load(Ordering::SeqCst), 2);
    let found = check(Arc::clone(&second)).await;
    assert!(found > 0, "the medium's blocks are there after the restart");
    assert_eq!(disk.wrong.load(Ordering::SeqCst), 0);
    let report = second.remove_all(&Removal::Everything, true).await.unwrap();
    assert!(report.removed > 0);
    let left = present(&second, 0..blocks).await;
    assert!(
        left.iter().all(|is_held| !is_held),
        "nothing is left on the medium"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_stalls_delays_no_put_and_a_session_that_ends_leaks_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    let blocks = 64 * MIB / BLOCK;
    for number in 0..blocks / 2 {
        put_paced(&pool, number).await;
    }
    // A block that has left memory, and has a copy.
    let held = present(&pool, 0..100).await;
    let copied = held.iter().position(|is_held| *is_held).unwrap() as u64;
    disk.is_stalled.store(true, Ordering::SeqCst);
    let mut slowest = Duration::ZERO;
    for number in blocks / 2..blocks {
        let began = Instant::now();
        put(&pool, number, &patient()).await;
        slowest = slowest.max(began.elapsed());
    }
    assert!(slowest < Duration::from_secs(1), "a put took {slowest:?}");
    // A reader of a block on the stalled disk waits, and its extent is reserved meanwhile.
    let asking = {
        let pool = Arc::clone(&pool);
        tokio::spawn(async move { comes_back(&pool, copied).await })
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(node);
    let came = tokio::time::timeout(Duration::from_secs(10), asking).await;
    assert!(
        !came
            .expect("the reader's wait ends with the session")
            .unwrap()
    );
    disk.is_stalled.store(false, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_media(&pool, copied..copied + 1).await;
    until("quarantine ends", || {
        pool.placement.usage().quarantined == 0
    })
    .await;
    let mut back = 0;
    for number in 0..100 {
        back += u64::from(comes_back(&pool, number).await);
    }
    // A few were evicted before their turn came: this memory holds 0.1 s of puts.
    assert!(back > 50, "{back}");
    assert_eq!(disk.wrong.load(Ordering::SeqCst), 0);
}

/// Blocks that are used while they lie only on the medium outlive many other blocks of their age.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_that_are_used_stay_when_their_zone_is_written_again() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 32 * MIB, &disk, 128 * MIB, 4 * MIB).await;
    let (used, blocks) = (64, 800 * MIB / BLOCK);
    for number in 0..blocks {
        put_paced(&pool, number).await;
        // Each of them is read once in 1024 puts: memory holds 512 blocks, the medium about 1900.
        if number >= 1024 && number.is_multiple_of(16) {
            comes_back(&pool, number / 16 % used).await;
        }
    }
    let count = |held: Vec<bool>| held.into_iter().filter(|is_held| *is_held).count() as u64;
    let kept = count(present(&pool, 0..used).await);
    let others = count(present(&pool, used..blocks / 2).await);
    assert!(
        kept > used * 6 / 10,
        "{kept} of {used} that were used are there"
    );
    assert!(others < blocks / 100, "{others} of the others are there");
    let counters = pool.counters();
    let (moved, stored) = (
        counters["copies_forwarded_total"],
        counters["blocks_stored_total"],
    );
    assert!(moved > used && moved < stored / 3, "{moved} of {stored}");
    assert_eq!(disk.wrong.load(Ordering::SeqCst), 0);
}

/// Writes stay within the budget, and the budget serves chains and blocks that are put again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_stay_within_their_budget() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let per_second = 4 * MIB;
    disk.budget.store(per_second * 24 * 3600, Ordering::SeqCst);
    let began = Instant::now();
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 4 * MIB).await;
    wait_for_attachment(&disk).await;
    let mut number = 0;
    // On a slow machine four seconds are too few rounds for the keys that come again.
    while began.elapsed() < Duration::from_secs(4) || number < 6 * 1200 {
        put(&pool, number, &patient()).await;
        // A few keys are put again and again, and memory loses them in between.
        if number.is_multiple_of(4) {
            let again = ReserveOptions {
                upsert: false,
                ..patient()
            };
            let granted = reserve_with(&pool, &key(1_000_000 + number % 1200), BLOCK, &again).await;
            if let Ok(granted) = granted {
                commit(&pool, &key(1_000_000 + number % 1200), BLOCK, granted).await;
            }
        }
        number += 1;
    }
    let spent = began.elapsed().as_secs_f64();
    let written = disk.stores.load(Ordering::SeqCst) * footprint(Length(BLOCK)).unwrap().0;
    let allowed = spent * per_second as f64;
    assert!(written as f64 <= allowed * 1.01, "{written} of {allowed}");
    assert!(written as f64 >= allowed * 0.5, "{written} of {allowed}");
    assert!(pool.counters()["copies_refused_total"] > 100);
    let mut again = 0;
    for number in (0..1200).step_by(4) {
        again += usize::from(present(&pool, 1_000_000 + number..1_000_001 + number).await[0]);
    }
    assert!(again > 190, "{again} of 300 keys that came again are there");
}

/// A node that stops first copies its most recently used blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_node_is_told_when_its_memory_is_copied() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_attachment(&disk).await;
    let mut versions = Vec::new();
    for number in 0..100 {
        versions.push(put(&pool, number, &patient()).await.0);
    }
    let hot: Vec<Key> = (10..20).map(key).collect();
    let hot: Vec<KeyRef<'_>> = hot.iter().map(Key::as_ref).collect();
    pool.lookup(SPACE, &hot[..], true);
    assert_eq!(disk.stores.load(Ordering::SeqCst), 0, "nothing is due yet");
    pool.draining(&node.node, false);
    until("told", || disk.is_demoted.load(Ordering::SeqCst)).await;
    assert_eq!(disk.stores.load(Ordering::SeqCst), 100);
    let mut first = disk.ordered.lock()[..10].to_vec();
    first.sort_unstable();
    assert_eq!(
        first,
        versions[10..20],
        "the blocks that were used last go first"
    );
    // The next incarnation has all of them.
    pool.drop_node(&node.node);
    drop(node);
    let _node = join(&pool, "n", 2, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    wait_for_media(&pool, 0..100).await;
    for number in 0..100 {
        assert!(comes_back(&pool, number).await, "{number}");
    }
}

/// A reader that asks for presence finds the blocks in memory a little later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_for_presence_begins_the_loads() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 512 * MIB, 32 * MIB).await;
    for number in 0..64 * MIB / BLOCK {
        put_paced(&pool, number).await;
    }
    // The free room of this small memory always takes six blocks, and sometimes seven.
    let keys: Vec<Key> = (0..6).map(key).collect();
    let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    let on_media = pool.exist(SPACE, &keys[..], false).answer;
    let on_media = on_media.iter().filter(|is_held| **is_held).count();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(disk.loads.load(Ordering::SeqCst), 0, "no lease, no load");
    let asked = pool.exist(SPACE, &keys[..], true).answer;
    assert_eq!(asked.iter().filter(|is_held| **is_held).count(), on_media);
    let in_memory = || {
        let found = pool.lookup(SPACE, &keys[..], false).answer;
        found.iter().flatten().count()
    };
    assert!(on_media > 4);
    until("in memory", || in_memory() == on_media).await;
}

/// Loads that hang keep their zone: it is written again only when they have ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_zone_is_not_written_while_a_load_reads_it() {
    let directory = tempfile::tempdir().unwrap();
    let (pool, _store) = pool(directory.path(), Config::default()).await;
    let disk = Disk::new(1);
    let _node = join(&pool, "n", 1, 16 * MIB, &disk, 32 * MIB, 2 * MIB).await;
    let blocks = 40 * MIB / BLOCK;
    for number in 0..blocks {
        put_paced(&pool, number).await;
    }
    let is_there = present(&pool, 0..blocks).await;
    let oldest = is_there.iter().position(|is_there| *is_there).unwrap() as u64;
    disk.loads_stall.store(true, Ordering::SeqCst);
    let mut readers = Vec::new();
    // These blocks are neither in memory nor among the oldest copies, which may leave now.
    for number in oldest + 30..oldest + 70 {
        let pool = Arc::clone(&pool);
        readers.push(tokio::spawn(async move { comes_back(&pool, number).await }));
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    // Enough to write the whole medium twice.
    let before = disk.stores.load(Ordering::SeqCst);
    for number in blocks..blocks + 2 * 32 * MIB / BLOCK {
        put(&pool, number, &patient()).await;
        if number.is_multiple_of(16) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    assert!(disk.stores.load(Ordering::SeqCst) > before);
    disk.loads_stall.store(false, Ordering::SeqCst);
    for reader in readers {
        reader.await.unwrap();
    }
    assert!(
        disk.loads.load(Ordering::SeqCst) > 0,
        "none of them was loaded"
    );
    assert_eq!(
        disk.wrong.load(Ordering::SeqCst),
        0,
        "a zone was written under a load"
    );
}

/// The high watermark is below the length of the block, and the segment is not. Then the node has more memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_fits_in_no_memory_of_its_node_is_a_miss_at_once_until_it_fits() {
    let cold = Cold::block(Config::default()).await;
    let (pool, disk) = (&cold.pool, &cold.disk);
    let node = comes_again_with(pool, disk, cold.node, BLOCK).await;
    let is_attached = || disk.known.load(Ordering::SeqCst) == 3;
    until("attached by its third process", is_attached).await;
    let granted = reserve_with(pool, &key(2), KIB, &patient()).await;
    let done = commit(pool, &key(2), KIB, granted.unwrap()).await;
    assert_eq!(done, [Code::Ok]);
    let keys = [key(2), key(1)];
    let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    assert_eq!(pool.exist(SPACE, &keys[..], true).answer, [true, false]);
    assert_eq!(pool.match_prefix(SPACE, &keys[..], true).answer, 1);
    let asked = Instant::now();
    let restored = pool.restore(SPACE, &keys[..], Duration::MAX).await;
    assert!(asked.elapsed() < Duration::from_secs(2), "no wait for room");
    assert!(restored.left.is_empty(), "{restored:?}");
    assert_eq!(restored.unreadable, [1]);
    pool.end_restored(SPACE, &restored);
    assert_eq!(disk.loads.load(Ordering::SeqCst), 0);
    assert_eq!(pool.counters()["blocks_evicted_total"], 0);
    let _node = comes_again(pool, disk, node).await;
    assert!(comes_back(pool, 1).await, "its memory takes the block");
}

/// The version of the block of key 1 in memory.
fn version_in_memory(pool: &Pool) -> Option<Version> {
    let keys = [key(1)];
    let keys: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    let found = pool.lookup(SPACE, &keys[..], false).answer;
    found.first()?.as_ref().map(|found| found.version)
}

/// Reserves room for another version of the block of key 1.
async fn begin_to_replace(pool: &Arc<Pool>) -> Granted {
    let upsert = ReserveOptions {
        upsert: true,
        ..patient()
    };
    reserve_with(pool, &key(1), BLOCK, &upsert).await.unwrap()
}

/// The writer stalls. Its put replaces the block when it commits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_on_a_medium_is_read_while_its_replacement_is_written() {
    let cold = Cold::block(Config::default()).await;
    let pool = &cold.pool;
    let granted = begin_to_replace(pool).await;
    let version = granted.version;
    assert!(comes_back(pool, 1).await);
    assert!(version_in_memory(pool).unwrap() < version);
    assert_eq!(cold.disk.loads.load(Ordering::SeqCst), 1);
    assert_eq!(commit(pool, &key(1), BLOCK, granted).await, [Code::Ok]);
    assert_eq!(version_in_memory(pool), Some(version));
}

/// A load of the earlier version would be recorded behind the commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_waits_for_the_commit_of_a_replacement_and_loads_nothing_in_vain() {
    let cold = Cold::block(Config::default()).await;
    let pool = &cold.pool;
    let granted = begin_to_replace(pool).await;
    let version = granted.version;
    let gate = cold.store.gate.lock().await;
    let mut committing = Box::pin(commit(pool, &key(1), BLOCK, granted));
    assert!((&mut committing).now_or_never().is_none(), "it is logged");
    let reader = {
        let pool = Arc::clone(pool);
        tokio::spawn(async move { comes_back(&pool, 1).await })
    };
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!reader.is_finished(), "it waits for the commit");
    drop(gate);
    assert_eq!(committing.await, [Code::Ok]);
    assert!(reader.await.unwrap());
    assert_eq!(version_in_memory(pool), Some(version));
    assert_eq!(cold.disk.loads.load(Ordering::SeqCst), 0);
}
