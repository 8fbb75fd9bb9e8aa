//! The store on a full disk, and on a disk whose power is cut.

use super::*;
use std::process::Command;

/// Runs a command that needs privileges, and prints the reason of a failure.
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
    /// A filesystem of this size in memory; `None` where mounting is not possible.
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

/// The image of a mounted filesystem contains the flushed bytes only. So a copy of the image is the
/// disk after a power cut.
#[tokio::test]
async fn acknowledged_groups_survive_a_power_cut() {
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
        let chunks = vec![chunk(seq)];
        store
            .put_snapshot(epoch, ShardIndex(1), LogSeq(seq), chunks)
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
            assert_eq!((snapshot.seq, snapshot.chunks), (last, vec![chunk(seq)]));
        }
        assert_eq!(found.epoch().await.unwrap(), epoch);
        assert_eq!(found.cluster_id(ClusterId(1)).await.unwrap(), ClusterId(7));
    }
}

/// An ext4 filesystem in a file. A copy of the file contains the flushed bytes.
fn ext4(files: &Path) -> Option<(PathBuf, Mount)> {
    let image = files.join("disk");
    let made = std::fs::File::create(&image).unwrap();
    made.set_len(64 << 20).unwrap();
    if !run("mkfs.ext4", &[&"-q", &"-F", &"-b", &"4096", &image]) {
        return None;
    }
    let disk = Mount::image(&image)?;
    Some((image, disk))
}

/// A copy of the disk as a power cut would leave it now.
fn cut_power(image: &Path) -> Option<Mount> {
    let after = image.with_extension("after");
    std::fs::copy(image, &after).unwrap();
    Mount::image(&after)
}

/// A failed flush marks pages of the page cache as clean: no later flush writes them to the disk.
#[tokio::test]
async fn a_start_makes_groups_from_the_page_cache_durable() {
    let files = tempfile::tempdir().unwrap();
    let Some((image, disk)) = ext4(files.path()) else {
        return;
    };
    let data = disk.path().join("data");
    let store = EmbeddedStore::open(&options(&data)).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    for seq in 1..=4 {
        store.append(epoch, LogSeq(seq), group(seq)).await.unwrap();
    }
    drop(store);
    let segment = data.join("log").join(segment::name(1));
    std::fs::File::open(&segment).unwrap().sync_all().unwrap();
    // The disk loses the last frame; the page cache keeps it.
    let held = std::fs::read(&segment).unwrap();
    let block = &held[4096..8192];
    let text = group(4);
    let at = block.windows(text.len()).position(|w| w == &text[..]);
    let frame = at.unwrap() - frame::HEAD;
    let disk_bytes = std::fs::read(&image).unwrap();
    let on_disk = disk_bytes.chunks(4096).position(|held| held == block);
    let zeros = vec![0; 4096 - frame];
    let place = (on_disk.unwrap() * 4096 + frame) as u64;
    let raw = std::fs::File::options().write(true).open(&image).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&raw, &zeros, place).unwrap();
    let read_by = |store: EmbeddedStore| async move {
        let groups = store.read_log(LogSeq(0), u64::MAX).await.unwrap();
        groups.into_iter().map(|(seq, _)| seq.0).collect::<Vec<_>>()
    };
    let store = EmbeddedStore::open(&options(&data)).unwrap();
    assert_eq!(read_by(store).await, [1, 2, 3, 4]);
    let Some(after) = cut_power(&image) else {
        return;
    };
    let store = EmbeddedStore::open(&options(&after.path().join("data"))).unwrap();
    assert_eq!(read_by(store).await, [1, 2, 3, 4]);
}

/// Without the flush of the directory, a power cut gives the file its old name back.
#[tokio::test]
async fn a_power_cut_while_a_spare_becomes_a_segment_leaves_the_log_readable() {
    let files = tempfile::tempdir().unwrap();
    let Some((image, disk)) = ext4(files.path()) else {
        return;
    };
    let data = disk.path().join("data");
    let store = EmbeddedStore::open(&options(&data)).unwrap();
    let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
    let mut seq = LogSeq(0);
    while !data.join("log").join(segment::name(3)).exists() {
        seq = seq.next();
        store.append(epoch, seq, group(seq.0)).await.unwrap();
    }
    // The cut makes segment 1 the spare. A directory in the place of segment 4 stops the rename.
    let blocker = data.join("log").join(segment::name(4));
    std::fs::create_dir(&blocker).unwrap();
    store.truncate_log(epoch, LogSeq(15)).await.unwrap();
    assert!(data.join("log/spare").exists());
    while store
        .append(epoch, seq.next(), group(seq.next().0))
        .await
        .is_ok()
    {
        seq = seq.next();
    }
    let Some(after) = cut_power(&image) else {
        return;
    };
    let data = after.path().join("data");
    let _may_be_there = std::fs::remove_dir(data.join("log").join(segment::name(4)));
    let store = EmbeddedStore::open(&options(&data)).unwrap();
    let groups = store.read_log(LogSeq(15), u64::MAX).await.unwrap();
    let found: Vec<_> = groups.into_iter().map(|(seq, _)| seq.0).collect();
    assert_eq!(found, (16..=seq.0).collect::<Vec<_>>());
}

/// A crash may come between the rename of a segment and the flush of the directory.
#[tokio::test]
async fn a_start_makes_the_names_of_the_segments_durable_before_it_appends() {
    let files = tempfile::tempdir().unwrap();
    let Some((image, disk)) = ext4(files.path()) else {
        return;
    };
    let data = disk.path().join("data");
    drop(EmbeddedStore::open(&options(&data)).unwrap());
    let (log, first) = (data.join("log"), data.join("log").join(segment::name(1)));
    std::fs::rename(&first, log.join("spare")).unwrap();
    files::sync_directory(&log).unwrap();
    std::fs::rename(log.join("spare"), &first).unwrap();
    let store = EmbeddedStore::open(&options(&data)).unwrap();
    store.append(Epoch(0), LogSeq(1), group(1)).await.unwrap();
    let Some(after) = cut_power(&image) else {
        return;
    };
    let store = EmbeddedStore::open(&options(&after.path().join("data"))).unwrap();
    assert_eq!(store.log_span().await.unwrap().last, LogSeq(1));
}

#[tokio::test]
async fn a_term_begins_on_a_full_disk_and_is_there_at_the_next_start() {
    let Some(disk) = Mount::memory("1m") else {
        return;
    };
    let directory = disk.path().join("data");
    let store = EmbeddedStore::open(&options(&directory)).unwrap();
    let first = store.begin_epoch(Epoch(1)).await.unwrap();
    store.append(first, LogSeq(1), group(1)).await.unwrap();
    drop(store);
    let ballast = disk.path().join("ballast");
    let mut file = std::fs::File::create(&ballast).unwrap();
    while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
    for restart in 1..=3 {
        let store = EmbeddedStore::open(&options(&directory)).unwrap();
        assert_eq!(store.read_log(LogSeq(0), u64::MAX).await.unwrap().len(), 1);
        let epoch = store.begin_epoch(Epoch(1)).await.unwrap();
        assert_eq!(epoch, Epoch(first.0 + restart));
    }
    std::fs::remove_file(&ballast).unwrap();
    let store = EmbeddedStore::open(&options(&directory)).unwrap();
    let last = store.begin_epoch(Epoch(1)).await.unwrap();
    assert_eq!(last, Epoch(first.0 + 4));
    let fenced = store.append(first, LogSeq(2), group(2)).await.unwrap_err();
    assert!(matches!(fenced, StoreError::Fenced { .. }), "{fenced}");
    store.append(last, LogSeq(2), group(2)).await.unwrap();
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
        // A snapshot is refused too, and the one before it stays.
        let chunks = vec![Bytes::from(vec![7; 512 << 10])];
        let refused = store.put_snapshot(epoch, ShardIndex(0), seq, chunks).await;
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
