use super::super::Pool;
use crate::clock::BootClock;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::store::{EmbeddedOptions, EmbeddedStore};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The evictor orders stores too. It must not wait for a walk over all blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ordering_stores_walks_over_no_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let clock = Arc::new(BootClock);
    let pool = Pool::start(Config::default(), Arc::new(store), clock, metrics);
    let pool = pool.await.unwrap();
    let has_lost = &pool.tiering.has_lost_copies;
    has_lost.store(true, Ordering::Release);
    // Without media the demoter's own thread does nothing.
    pool.tend_media();
    assert!(
        has_lost.load(Ordering::Acquire),
        "the walk is left to the demoter"
    );
    let stores_are_ordered = pool.tiering.tending.lock();
    pool.replace_lost_copies();
    assert!(!has_lost.load(Ordering::Acquire));
    drop(stores_are_ordered);
    pool.retire().await;
}
