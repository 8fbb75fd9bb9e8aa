//! The store on a disk that is full, and on one whose power is cut.

use super::*;
use std::process::Command;

/// Runs a command that needs rights; says why not when it fails.
fn run(program: &str, arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> bool {
    let done = Command::new(program).args(arguments).output();
    let ok = done.as_ref().is_ok_and(|done| done.status.success());
    if !ok {
        eprintln!("skipped: {program} does not work here: {done:?}");
    }
    ok
}

/// A directory on which something is mounted.
struct Mount(tempfile::TempDir);

impl Mount {
    /// A filesystem of this size in memory; `None` where none can be mounted.
    fn memory(size: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let size = format!("size={size}");
        let place = directory.path();
        run(
            "mount",
            &[&"-t", &"tmpfs", &"-o", &size, &"kvpool-test", &place],
        )
        .then_some(Self(directory))
    }

    /// A filesystem in a file.
    fn image(image: &Path) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        run("mount", &[&"-o", &"loop", &image, &place]).then_some(Self(directory))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        assert!(run("umount", &[&"-l", &self.0.path()]));
    }
}

/// What the image of a mounted filesystem holds is what was flushed: a copy of it is the disk after the
/// power was cut.
#[tokio::test]
async fn what_was_acknowledged_is_there_after_the_power_is_cut() {
    let files = tempfile::tempdir().unwrap();
    let image = files.path().join("disk");
    let made = std::fs::File::create(&image).unwrap();
    made.set_len(64 << 20).unwrap();
    if !run("mkfs.ext4", &[&"-q", &"-F", &image]) {
        return;
    }
    let Some(disk) = Mount::image(&image) else {
        return;
    };
    let store = EmbeddedStore::open(&options(&disk.path().join("data"))).unwrap();
    store.cluster_id(ClusterId(7)).await.unwrap();
    let epoch = store.begin_epoch(Epoch(3)).await.unwrap();
    let mut seq = 0;
    for cut in 0..6 {
        for _ in 0..9 {
            seq += 1;
            store.append(epoch, LogSeq(seq), group(seq)).await.unwrap();
        }
        let parts = vec![part(seq)];
        store
            .put_snapshot(epoch, ShardIndex(1), LogSeq(seq), parts)
            .await
            .unwrap();
        let through = LogSeq(seq.saturating_sub(20));
        store.truncate_log(epoch, through).await.unwrap();
        let after = files.path().join(format!("after-{cut}"));
        std::fs::copy(&image, &after).unwrap();
        let Some(found) = Mount::image(&after) else {
            return;
        };
        let found = EmbeddedStore::open(&options(&found.path().join("data"))).unwrap();
        let (last, expected) = (LogSeq(seq), through.0 + 1..=seq);
        let span = found.log_span().await.unwrap();
        assert_eq!((span.cut, span.last), (through, last), "cut {cut}");
        let groups = found.read_log(LogSeq(0), u64::MAX).await.unwrap();
        assert_eq!(
            groups,
            expected.map(|n| (LogSeq(n), group(n))).collect::<Vec<_>>()
        );
        // A snapshot is durable when the log is cut behind it.
        if through > LogSeq(0) {
            let snapshot = found.read_snapshot(ShardIndex(1)).await.unwrap().unwrap();
            assert_eq!((snapshot.seq, snapshot.parts), (last, vec![part(seq)]));
        }
        assert_eq!(found.epoch().await.unwrap(), epoch);
        assert_eq!(found.cluster_id(ClusterId(1)).await.unwrap(), ClusterId(7));
    }
}

#[tokio::test]
async fn a_full_disk_refuses_a_group_whole_and_takes_it_once_there_is_room() {
    let Some(disk) = Mount::memory("2m") else {
        return;
    };
    let directory = disk.path().join("data");
    let small = EmbeddedOptions {
        segment: ByteSize::kib(256),
        ..EmbeddedOptions::new(&directory)
    };
    let store = EmbeddedStore::open(&small).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let ballast = disk.path().join("ballast");
    let mut seq = LogSeq(0);
    for round in 0..3 {
        let mut file = std::fs::File::create(&ballast).unwrap();
        while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
        drop(file);
        let full = loop {
            match store.append(epoch, seq.next(), group(seq.next().0)).await {
                Ok(()) => seq = seq.next(),
                Err(error) => break error,
            }
        };
        assert!(matches!(full, StoreError::DirectoryFull { .. }), "{full}");
        let text = full.to_string();
        assert!(
            text.contains(directory.to_str().unwrap()) && text.contains("full"),
            "{text}"
        );
        let more = group(1).len() as u64;
        assert!(store.make_room(more).await.is_err());
        // Neither is a snapshot put, and the one before it stays.
        let parts = vec![Bytes::from(vec![7; 512 << 10])];
        let refused = store.put_snapshot(epoch, ShardIndex(0), seq, parts).await;
        assert!(
            matches!(refused, Err(StoreError::DirectoryFull { .. })),
            "{refused:?}"
        );
        assert_eq!(store.log_span().await.unwrap().last, seq, "round {round}");
        std::fs::remove_file(&ballast).unwrap();
        store.make_room(more).await.unwrap();
        seq = seq.next();
        store.append(epoch, seq, group(seq.0)).await.unwrap();
    }
    drop(store);
    let store = EmbeddedStore::open(&small).unwrap();
    let groups = store.read_log(LogSeq(0), u64::MAX).await.unwrap();
    let expected: Vec<_> = (1..=seq.0).map(|seq| (LogSeq(seq), group(seq))).collect();
    assert_eq!(groups, expected);
}
