//! Missing files and files that cannot be removed: the effect on a start and on an open store.

use super::*;
use crate::clock::BootClock;
use crate::config::Config;
use crate::leadership::{Seat, report_alone};
use crate::metrics::Metrics;
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tokio::sync::oneshot;

const BIG: usize = 3000;

/// A store in its first epoch.
async fn begun(directory: &Path) -> (EmbeddedStore, Epoch) {
    let store = EmbeddedStore::open(&options(directory)).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    (store, epoch)
}

/// Appends groups until one of `BIG` bytes does not fit into segment 1. Returns the last position.
async fn nearly_full(store: &EmbeddedStore, epoch: Epoch, log: &Path) -> LogSeq {
    let mut seq = LogSeq(0);
    while !log.join(segment::name(2)).exists() {
        seq = seq.next();
        store.append(epoch, seq, group(seq.0)).await.unwrap();
        store.make_room(BIG as u64).await.unwrap();
    }
    seq
}

#[tokio::test]
async fn a_segment_that_cannot_be_removed_is_not_forgotten() {
    let directory = tempfile::tempdir().unwrap();
    let (store, epoch) = begun(directory.path()).await;
    let log = directory.path().join("log");
    let last = nearly_full(&store, epoch, &log).await;
    let (ahead, kept) = (log.join(segment::name(2)), directory.path().join("kept"));
    std::fs::rename(&ahead, &kept).unwrap();
    std::fs::create_dir(&ahead).unwrap();
    let small = Bytes::from_static(b"small");
    let refused = store.append(epoch, last.next(), small.clone()).await;
    assert!(refused.is_err());
    std::fs::remove_dir(&ahead).unwrap();
    std::fs::rename(&kept, &ahead).unwrap();
    store.append(epoch, last.next(), small).await.unwrap();
    assert!(!ahead.exists());
    drop(store);
    let store = EmbeddedStore::open(&options(directory.path())).unwrap();
    assert_eq!(store.log_span().await.unwrap().last, last.next());
}

#[tokio::test]
async fn a_start_after_a_cut_keeps_the_segment_that_says_where_the_cut_is() {
    let directory = tempfile::tempdir().unwrap();
    let (store, epoch) = begun(directory.path()).await;
    let log = directory.path().join("log");
    // Segment 2 is made before the cut, so its head does not record it.
    let last = nearly_full(&store, epoch, &log).await;
    store.truncate_log(epoch, last).await.unwrap();
    let big = Bytes::from(vec![1; BIG]);
    store.append(epoch, last.next(), big.clone()).await.unwrap();
    drop(store);
    for start in 1..=3 {
        let store = EmbeddedStore::open(&options(directory.path())).unwrap();
        let span = store.log_span().await.unwrap();
        assert_eq!((span.cut, span.last), (last, last.next()), "start {start}");
        let groups = store.read_log(last, u64::MAX).await.unwrap();
        assert_eq!(groups, [(last.next(), big.clone())], "start {start}");
    }
}

/// The next term with the same epoch could write beside an earlier one.
#[tokio::test]
async fn a_term_that_only_a_cut_segment_records_is_not_given_again() {
    let directory = tempfile::tempdir().unwrap();
    let (store, epoch) = begun(directory.path()).await;
    let mut last = LogSeq(0);
    let fits = || store.with(|open| Ok(open.log.active().fits(frame::Kind::Group, BIG as u64)));
    while fits().unwrap() {
        last = last.next();
        store.append(epoch, last, group(last.0)).await.unwrap();
    }
    // As on a full disk, where the identity file cannot be written.
    let full = Epoch(epoch.0 + 1);
    let begun = store.with(|open| {
        open.log.begin_epoch(full)?;
        open.identity.epoch = full;
        Ok(())
    });
    begun.unwrap();
    store.truncate_log(full, last).await.unwrap();
    // The head of the next segment records the cut, and no term.
    store.make_room(BIG as u64).await.unwrap();
    drop(store);
    for start in 1..=3 {
        let store = EmbeddedStore::open(&options(directory.path())).unwrap();
        assert_eq!(store.epoch().await.unwrap(), full, "start {start}");
    }
    let store = EmbeddedStore::open(&options(directory.path())).unwrap();
    let next = store.begin_epoch(Epoch(1)).await.unwrap();
    assert_eq!(next, Epoch(full.0 + 1));
    let big = Bytes::from(vec![1; BIG]);
    store.append(next, last.next(), big.clone()).await.unwrap();
    let groups = store.read_log(last, u64::MAX).await.unwrap();
    assert_eq!(groups, [(last.next(), big)]);
}

#[tokio::test]
async fn a_spare_that_is_missing_or_short_is_replaced_by_a_new_segment() {
    let directory = tempfile::tempdir().unwrap();
    let (store, epoch) = begun(directory.path()).await;
    let log = directory.path().join("log");
    let mut seq = LogSeq(0);
    while !log.join(segment::name(3)).exists() {
        seq = seq.next();
        store.append(epoch, seq, group(seq.0)).await.unwrap();
    }
    store.truncate_log(epoch, LogSeq(15)).await.unwrap();
    std::fs::remove_file(log.join("spare")).unwrap();
    while !log.join(segment::name(4)).exists() {
        seq = seq.next();
        store.append(epoch, seq, group(seq.0)).await.unwrap();
    }
    // A spare of another size is useless too.
    store.truncate_log(epoch, seq).await.unwrap();
    std::fs::write(log.join("spare"), b"short").unwrap();
    while !log.join(segment::name(5)).exists() {
        seq = seq.next();
        store.append(epoch, seq, group(seq.0)).await.unwrap();
    }
    drop(store);
    let store = EmbeddedStore::open(&options(directory.path())).unwrap();
    assert_eq!(store.log_span().await.unwrap().last, seq);
}

/// The user may enter the parent directory but not list it.
#[tokio::test]
async fn a_directory_whose_parent_cannot_be_listed_is_opened() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    use std::os::unix::fs::PermissionsExt as _;
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("data");
    let mode = std::fs::Permissions::from_mode(0o300);
    std::fs::set_permissions(parent.path(), mode).unwrap();
    // Drops the capabilities of this thread only. It then has the rights of a user without
    // privileges.
    let before = capabilities(None).unwrap();
    let mut fewer = before;
    fewer.effective -= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
    set_capabilities(None, fewer).unwrap();
    assert!(std::fs::File::open(parent.path()).is_err());
    let made = EmbeddedStore::open(&options(&directory)).map(drop);
    let opened = EmbeddedStore::open(&options(&directory)).map(drop);
    set_capabilities(None, before).unwrap();
    let mode = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(parent.path(), mode).unwrap();
    made.unwrap();
    opened.unwrap();
}

/// With one core, heartbeats run on the same thread as the report of the store's state.
#[tokio::test]
async fn a_disk_that_hangs_blocks_no_thread_of_the_runtime() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = begun(directory.path()).await;
    let store = Arc::new(store);
    let (answers, answered) = mpsc::channel();
    let (hangs, is_hanging) = oneshot::channel();
    let of_disk = Arc::clone(&store);
    let disk = std::thread::spawn(move || {
        let _append = of_disk.open.lock();
        hangs.send(()).unwrap();
        // Without this end, the test would hang instead of fail.
        answered.recv_timeout(Duration::from_secs(5)).is_ok()
    });
    is_hanging.await.unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let seat = Seat::new(Config::default(), metrics, Arc::new(BootClock));
    let seat = Arc::new(seat);
    let report = report_alone(Arc::clone(&seat), store, String::new());
    let reporting = tokio::spawn(report);
    tokio::time::sleep(Duration::from_millis(50)).await;
    // The send fails if the disk has answered by itself.
    let _late = answers.send(());
    assert!(disk.join().unwrap(), "the report held the runtime's thread");
    let reported = async {
        while seat.describe().store.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let reported = tokio::time::timeout(Duration::from_secs(30), reported).await;
    assert_eq!(
        reported,
        Ok(()),
        "the disk answers, and nothing is reported"
    );
    reporting.abort();
}
