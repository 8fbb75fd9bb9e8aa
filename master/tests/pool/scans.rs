//! Calls that may have to examine every block.

use kvpool_master::Config;
use kvpool_master::clock::BootClock;
use kvpool_master::membership::{Registration, Reported};
use kvpool_master::metrics::Metrics;
use kvpool_master::pool::{CommitItem, Pool, Removal, ReserveOptions};
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore};
use kvpool_types::ids::NamespaceId;
use kvpool_types::{Checksum, Code, Epoch, HostId, Incarnation, Key, KeyRef, Length, NodeName};
use regex::Regex;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const SPACE: NamespaceId = NamespaceId(0);
const BLOCKS: usize = 5000;
const BYTES: u64 = 64;

/// A pool of one node, filled with blocks.
async fn pool(directory: &Path) -> Arc<Pool> {
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap();
    let pool = Pool::start(
        Config::default(),
        Arc::new(store),
        Arc::new(BootClock),
        Arc::new(Metrics::new().unwrap()),
    );
    let pool = pool.await.unwrap();
    let registration = Registration {
        name: NodeName("n".into()),
        incarnation: Incarnation(7),
        data_address: "127.0.0.1:1".into(),
        shm_path: String::new(),
        host: HostId(1),
        epoch_seen: Epoch(0),
        secret: None,
        epoch_proof: Default::default(),
        segments: vec![(Length(64 << 20), None)],
        held: Vec::new(),
        loaded: Vec::new(),
        can_pull: false,
        can_undrain: false,
        version: String::new(),
        wants_signed_reads: false,
    };
    let node = pool.register(&registration).await.unwrap();
    let (outbox, _unread) = tokio::sync::mpsc::unbounded_channel();
    pool.activate(&node, &registration, outbox);
    pool.heard(&node, Some(Reported::default()));
    let keys: Vec<Key> = (0..BLOCKS)
        .map(|number| Key::parse(&format!("block-{number}")).unwrap())
        .collect();
    let asked: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
    let lengths = vec![Length(BYTES); BLOCKS];
    let granted = pool
        .reserve(SPACE, &asked[..], &lengths, &ReserveOptions::default())
        .await;
    let written = |(key, granted): (&Key, Result<kvpool_master::pool::Granted, Code>)| {
        let granted = granted.unwrap();
        CommitItem {
            key: key.clone(),
            version: granted.version,
            length: Length(BYTES),
            checksum: Checksum(1),
            segments: granted.replicas.iter().map(|r| r.segment).collect(),
            parent: None,
        }
    };
    let items = keys.iter().zip(granted).map(written).collect();
    let codes = pool.commit(SPACE, items).await;
    assert!(codes.iter().all(|code| *code == Code::Ok));
    pool
}

#[tokio::test]
async fn a_full_scan_yields_to_other_tasks() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool(directory.path()).await;
    let turns = Arc::new(AtomicUsize::new(0));
    let taken = Arc::clone(&turns);
    tokio::spawn(async move {
        loop {
            taken.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
        }
    });
    let others_ran = |what: &str| {
        let turns = turns.swap(0, Ordering::Relaxed);
        assert!(turns >= 4, "{what}: {turns}");
    };
    tokio::task::yield_now().await;
    turns.store(0, Ordering::Relaxed);
    let none = Regex::new("^nothing$").unwrap();
    for limit in [1, 10_000] {
        let page = pool.list(SPACE, Some(&none), &[], limit).await.unwrap();
        assert!(page.blocks.is_empty() && page.next.is_empty());
        others_ran("list");
    }
    for nothing in [
        Removal::Pattern(SPACE, none),
        Removal::Namespace(NamespaceId(1)),
    ] {
        let report = pool.remove_all(&nothing, false).await.unwrap();
        assert_eq!((report.removed, report.kept), (0, 0));
        others_ran("remove");
    }
}

#[tokio::test]
async fn a_page_has_no_more_blocks_than_it_may_and_all_pages_have_each_once() {
    let directory = tempfile::tempdir().unwrap();
    let pool = pool(directory.path()).await;
    for (pattern, blocks) in [("", BLOCKS), ("[37]$", BLOCKS / 5)] {
        let pattern = Regex::new(pattern).unwrap();
        let (mut page, mut seen) = (Vec::new(), HashSet::new());
        loop {
            let found = pool.list(SPACE, Some(&pattern), &page, 300).await.unwrap();
            assert!(found.blocks.len() <= 300, "{}", found.blocks.len());
            for block in found.blocks {
                assert!(seen.insert(block.key));
            }
            page = found.next;
            if page.is_empty() {
                break;
            }
        }
        assert_eq!(seen.len(), blocks, "{pattern}");
    }
}
