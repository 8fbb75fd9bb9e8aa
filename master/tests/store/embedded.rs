//! The embedded store: the suite of every metadata store, and rules of its own.

use async_trait::async_trait;
use bytes::Bytes;
use bytesize::ByteSize;
use kvpool_master::store::{
    EmbeddedOptions, EmbeddedStore, LogSeq, MetadataStore, OpenError, ShardIndex, conformance,
};
use kvpool_types::Epoch;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

struct Files {
    root: tempfile::TempDir,
    made: AtomicU32,
    last: parking_lot::Mutex<PathBuf>,
}

fn open(directory: impl Into<PathBuf>) -> EmbeddedStore {
    EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap()
}

#[async_trait]
impl conformance::Bench for Files {
    async fn fresh(&self) -> Arc<dyn MetadataStore> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let directory = self.root.path().join(number.to_string());
        *self.last.lock() = directory.clone();
        Arc::new(open(directory))
    }

    async fn reopen(&self, store: Arc<dyn MetadataStore>) -> Arc<dyn MetadataStore> {
        store.close().await.unwrap();
        let directory = self.last.lock().clone();
        Arc::new(open(directory))
    }
}

#[tokio::test]
async fn it_does_what_every_store_has_to_do() {
    let files = Files {
        root: tempfile::tempdir().unwrap(),
        made: AtomicU32::new(0),
        last: parking_lot::Mutex::default(),
    };
    conformance::run(&files).await;
}

#[tokio::test]
async fn a_second_master_is_kept_out_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let first = open(directory.path());
    let second = EmbeddedStore::open(&EmbeddedOptions::new(directory.path()));
    let error = second.unwrap_err();
    assert!(matches!(error, OpenError::InUse { .. }), "{error}");
    assert!(error.is_retryable());
    let text = error.to_string();
    assert!(text.contains("in use by another kvmaster"), "{text}");
    first.close().await.unwrap();
    open(directory.path());
}

#[test]
fn a_file_that_is_no_store_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("metadata.redb");
    for contents in [vec![7u8; 100], vec![0x55; 1 << 20]] {
        std::fs::write(&file, &contents).unwrap();
        let error = EmbeddedStore::open(&EmbeddedOptions::new(directory.path())).unwrap_err();
        assert!(matches!(error, OpenError::Damaged { .. }), "{error}");
        assert!(!error.is_retryable());
        assert_eq!(std::fs::read(&file).unwrap(), contents);
    }
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, b"in the way").unwrap();
    let error = EmbeddedStore::open(&EmbeddedOptions::new(file.join("data"))).unwrap_err();
    assert!(matches!(error, OpenError::Io { .. }), "{error}");
    assert!(error.to_string().contains("file/data"), "{error}");
}

#[tokio::test]
async fn the_file_stays_small_however_often_snapshots_are_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(&EmbeddedOptions {
        cache: ByteSize::mib(1),
        ..EmbeddedOptions::new(directory.path())
    })
    .unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let chunk = Bytes::from(vec![3u8; 256 << 10]);
    let mut sizes = Vec::new();
    for seq in 1..=40 {
        store
            .append(epoch, LogSeq(seq), chunk.clone())
            .await
            .unwrap();
        let chunks = vec![chunk.clone(); 8];
        store
            .put_snapshot(epoch, ShardIndex(0), LogSeq(seq), chunks)
            .await
            .unwrap();
        store.truncate_log(epoch, LogSeq(seq)).await.unwrap();
        sizes.push(store.size_on_disk().await.unwrap());
    }
    let (early, late) = (sizes[9], sizes[39]);
    assert!(
        late <= early + (4 << 20),
        "grew from {early} to {late} bytes: {sizes:?}"
    );
}
