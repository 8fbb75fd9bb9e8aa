//! The store refuses or reports any change on the disk. It loses no acknowledged group silently.

mod disks;
mod faults;

use super::*;
use kvpool_types::Epoch;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const GROUPS: u64 = 60;
const CUT: LogSeq = LogSeq(20);

fn options(directory: &Path) -> EmbeddedOptions {
    EmbeddedOptions {
        segment: ByteSize::kib(16),
        ..EmbeddedOptions::new(directory)
    }
}

fn group(seq: u64) -> Bytes {
    Bytes::from(format!("group {seq} ").repeat(100))
}

fn chunk(number: u64) -> Bytes {
    Bytes::from(format!("chunk {number} ").repeat(50))
}

/// Makes a store with some segments and two snapshots. `closes` says whether its master stops
/// cleanly.
async fn filled(directory: &Path, closes: bool) {
    let store = EmbeddedStore::open(&options(directory)).unwrap();
    store.cluster_id(ClusterId(7)).await.unwrap();
    let epoch = store.begin_epoch(Epoch(3)).await.unwrap();
    for seq in 1..=GROUPS {
        store.append(epoch, LogSeq(seq), group(seq)).await.unwrap();
        store.tidy_after_append();
        if LogSeq(seq) == CUT {
            for shard in [ShardIndex(0), ShardIndex::SYSTEM] {
                let chunks = vec![chunk(1), chunk(2)];
                store.put_snapshot(epoch, shard, CUT, chunks).await.unwrap();
            }
            store.truncate_log(epoch, CUT).await.unwrap();
        }
    }
    if closes {
        store.close().await.unwrap();
    }
}

/// Everything in the store, or the reason that it does not open or is unreadable.
async fn contents(directory: &Path) -> Result<(), String> {
    let store = EmbeddedStore::open(&options(directory)).map_err(|error| error.to_string())?;
    let told = |error: StoreError| error.to_string();
    let span = store.log_span().await.map_err(told)?;
    let groups = store.read_log(LogSeq(0), u64::MAX).await.map_err(told)?;
    let mut snapshots = Vec::new();
    for shard in [ShardIndex(0), ShardIndex::SYSTEM] {
        snapshots.push(store.read_snapshot(shard).await.map_err(told)?);
    }
    let expected: Vec<_> = (CUT.0 + 1..=GROUPS)
        .map(|seq| (LogSeq(seq), group(seq)))
        .collect();
    assert_eq!((span.cut, span.last), (CUT, LogSeq(GROUPS)));
    assert_eq!(groups, expected);
    for snapshot in snapshots {
        let Some(snapshot) = snapshot else {
            return Err("a snapshot is missing".to_owned());
        };
        assert_eq!(snapshot.seq, CUT);
        assert_eq!(snapshot.chunks, [chunk(1), chunk(2)]);
    }
    assert_eq!(store.cluster_id(ClusterId(8)).await.unwrap(), ClusterId(7));
    assert_eq!(store.epoch().await.unwrap(), Epoch(3));
    Ok(())
}

/// The relevant files of a store, by their paths in its directory.
fn files_of(directory: &Path) -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from(identity::NAME)];
    for part in ["log", "snapshots"] {
        for entry in std::fs::read_dir(directory.join(part)).unwrap() {
            let name = entry.unwrap().file_name();
            if name != "spare" {
                files.push(Path::new(part).join(name));
            }
        }
    }
    files.sort();
    assert!(files.len() > 6, "{files:?}");
    files
}

/// Copies a store and changes one file of the copy.
fn changed(from: &Path, file: &Path, change: impl FnOnce(&Path)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for part in ["log", "snapshots"] {
        std::fs::create_dir(copy.path().join(part)).unwrap();
    }
    for file in files_of(from) {
        std::fs::copy(from.join(&file), copy.path().join(&file)).unwrap();
    }
    change(&copy.path().join(file));
    copy
}

#[tokio::test]
async fn a_file_that_is_missing_empty_or_cut_is_refused_with_its_name_and_the_flag() {
    for closes in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        filled(directory.path(), closes).await;
        contents(directory.path()).await.unwrap();
        for file in files_of(directory.path()) {
            let empty = |path: &Path| std::fs::write(path, b"").unwrap();
            let cut = |path: &Path| {
                let file = std::fs::File::options().write(true).open(path).unwrap();
                let length = file.metadata().unwrap().len();
                file.set_len(length - 9).unwrap();
            };
            let remove = |path: &Path| std::fs::remove_file(path).unwrap();
            type Change<'a> = (&'a str, &'a dyn Fn(&Path));
            let changes: [Change<'_>; 3] = [("empty", &empty), ("cut", &cut), ("removed", &remove)];
            for (what, change) in changes {
                let copy = changed(directory.path(), &file, change);
                let error = contents(copy.path()).await.unwrap_err();
                let is_snapshot = file.starts_with("snapshots");
                if is_snapshot && what == "removed" {
                    // The remaining log does not reach back: recovery names the missing groups.
                    continue;
                }
                let name = file.file_name().unwrap().to_str().unwrap();
                assert!(error.contains(name), "{what} {}: {error}", file.display());
                assert!(error.contains("--accept-empty-store"), "{what}: {error}");
            }
        }
    }
}

#[tokio::test]
async fn a_byte_that_was_flipped_is_refused_or_changes_nothing() {
    for closes in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        filled(directory.path(), closes).await;
        let (mut refused, mut harmless) = (0, 0);
        for file in files_of(directory.path()) {
            let length = std::fs::metadata(directory.path().join(&file))
                .unwrap()
                .len();
            // The steps are not multiples of any structure in the files.
            let steps = (0..length).step_by(if length > 4096 { 251 } else { 13 });
            for at in steps
                .chain([0, 4096, 4196, length - 1])
                .filter(|at| *at < length)
            {
                let copy = changed(directory.path(), &file, |path| {
                    let mut bytes = std::fs::read(path).unwrap();
                    bytes[usize::try_from(at).unwrap()] ^= 0x10;
                    std::fs::write(path, bytes).unwrap();
                });
                // `contents` panics on any data that was not written.
                match contents(copy.path()).await {
                    Ok(()) => harmless += 1,
                    Err(error) => {
                        refused += 1;
                        let name = file.file_name().unwrap().to_str().unwrap();
                        assert!(error.contains(name), "{}: {error}", file.display());
                    }
                }
            }
        }
        assert!(refused > 100 && harmless > 0, "{refused} {harmless}");
    }
}

#[tokio::test]
async fn a_file_of_another_store_is_refused() {
    let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    filled(own.path(), true).await;
    filled(other.path(), true).await;
    for file in files_of(own.path()) {
        let foreign = other.path().join(&file);
        let copy = changed(own.path(), &file, |path| {
            std::fs::copy(&foreign, path).unwrap();
        });
        let error = contents(copy.path()).await.unwrap_err();
        assert!(error.contains("of store"), "{}: {error}", file.display());
        assert!(error.contains("--accept-empty-store"), "{error}");
    }
}

#[tokio::test]
async fn a_store_that_is_set_aside_is_kept_and_a_new_one_begins() {
    let directory = tempfile::tempdir().unwrap();
    filled(directory.path(), true).await;
    std::fs::remove_file(directory.path().join(identity::NAME)).unwrap();
    let refused = EmbeddedStore::open(&options(directory.path())).unwrap_err();
    assert!(refused.is_damage(), "{refused}");
    let aside = set_aside(directory.path()).unwrap();
    assert!(aside.join("log").is_dir() && aside.join("snapshots").is_dir());
    let store = EmbeddedStore::open(&options(directory.path())).unwrap();
    assert_eq!(store.log_span().await.unwrap(), LogSpan::default());
    assert_eq!(store.cluster_id(ClusterId(9)).await.unwrap(), ClusterId(9));
}

#[test]
fn a_new_directory_is_for_its_user_alone() {
    let above = tempfile::tempdir().unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let root = above.path().join("new/data");
    drop(EmbeddedStore::open(&options(&root)).unwrap());
    assert_eq!(mode(&root), 0o700);
    // An existing directory keeps its permissions.
    std::fs::set_permissions(&root, Permissions::from_mode(0o750)).unwrap();
    drop(EmbeddedStore::open(&options(&root)).unwrap());
    assert_eq!(mode(&root), 0o750);
}

#[tokio::test]
async fn a_start_that_was_cut_short_is_begun_again() {
    let directory = tempfile::tempdir().unwrap();
    drop(EmbeddedStore::open(&options(directory.path())).unwrap());
    std::fs::remove_file(directory.path().join(identity::NAME)).unwrap();
    std::fs::write(directory.path().join("log/0000000000000002.partial"), b"").unwrap();
    drop(EmbeddedStore::open(&options(directory.path())).unwrap());
}

#[tokio::test]
async fn a_store_whose_files_were_moved_reports_it_and_keeps_its_lock() {
    for file in [identity::NAME, "log", ""] {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("data");
        let store = EmbeddedStore::open(&options(&directory)).unwrap();
        store.begin_epoch(Epoch(1)).await.unwrap();
        store.check().unwrap();
        std::fs::rename(directory.join(file), parent.path().join("elsewhere")).unwrap();
        let error = store.check().unwrap_err();
        assert!(matches!(error, StoreError::Moved { .. }), "{error}");
        assert!(error.to_string().contains("moved or replaced"), "{error}");
        if !file.is_empty() {
            // The lock is on the directory, so a missing file does not matter.
            let second = EmbeddedStore::open(&options(&directory)).unwrap_err();
            assert!(matches!(second, OpenError::InUse { .. }), "{second}");
        }
    }
}

#[tokio::test]
async fn an_incomplete_append_is_discarded_and_its_room_reused() {
    let directory = tempfile::tempdir().unwrap();
    filled(directory.path(), false).await;
    // The remains of a crash during the next append: its head, and part of its body.
    let last = files_of(directory.path());
    let last = last.iter().rfind(|file| file.starts_with("log")).unwrap();
    let path = directory.path().join(last);
    let read = segment::read(&path).unwrap();
    let mut active = segment::Active::resume(path, read.header, read.end).unwrap();
    let seq = LogSeq(GROUPS + 1);
    let appended = active.append(frame::Kind::Group, seq, Epoch(3), &group(1));
    appended.unwrap().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&active.file, &[0; 64], read.end + 200).unwrap();
    contents(directory.path()).await.unwrap();
    let store = EmbeddedStore::open(&options(directory.path())).unwrap();
    store.append(Epoch(3), seq, group(99)).await.unwrap();
    drop(store);
    let store = EmbeddedStore::open(&options(directory.path())).unwrap();
    let read = store.read_log(LogSeq(GROUPS), u64::MAX).await.unwrap();
    assert_eq!(read, [(seq, group(99))]);
}

/// A store of a master of format 1.
fn of_format_1(directory: &Path) {
    use redb::TableDefinition;
    const META: TableDefinition<'_, &str, u128> = TableDefinition::new("meta");
    const LOG: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("log");
    const SNAPSHOT: TableDefinition<'_, u32, (u64, u64)> = TableDefinition::new("snapshot");
    const PART: TableDefinition<'_, (u64, u32), &[u8]> = TableDefinition::new("part");
    let database = redb::Database::create(directory.join(redb_import::FILE_NAME)).unwrap();
    let t = database.begin_write().unwrap();
    {
        let mut meta = t.open_table(META).unwrap();
        for (name, value) in [
            ("format", 1),
            ("cluster", 7),
            ("epoch", 3),
            ("last", GROUPS.into()),
            ("cut", CUT.0.into()),
        ] {
            meta.insert(name, value).unwrap();
        }
        let mut log = t.open_table(LOG).unwrap();
        for seq in CUT.0 + 1..=GROUPS {
            log.insert(seq, group(seq).as_ref()).unwrap();
        }
        let (mut snapshot, mut chunks) =
            (t.open_table(SNAPSHOT).unwrap(), t.open_table(PART).unwrap());
        for (generation, shard) in [(4, ShardIndex(0)), (5, ShardIndex::SYSTEM)] {
            snapshot.insert(shard.0, (CUT.0, generation)).unwrap();
            chunks.insert((generation, 0), chunk(1).as_ref()).unwrap();
            chunks.insert((generation, 1), chunk(2).as_ref()).unwrap();
        }
    }
    t.commit().unwrap();
}

#[tokio::test]
async fn a_store_of_format_1_is_migrated_and_closed_to_old_versions() {
    let directory = tempfile::tempdir().unwrap();
    of_format_1(directory.path());
    contents(directory.path()).await.unwrap();
    contents(directory.path()).await.unwrap();
    let old = directory.path().join(redb_import::FILE_NAME);
    assert!(redb::Database::create(&old).is_err());
    // The state after a crash before the identity was written.
    std::fs::remove_file(&old).unwrap();
    of_format_1(directory.path());
    std::fs::remove_file(directory.path().join(identity::NAME)).unwrap();
    contents(directory.path()).await.unwrap();
    // The files may have been a current store that lost its identity.
    let aside = directory.path().join("set-aside-1");
    assert!(std::fs::read_dir(aside.join("log")).unwrap().count() > 1);
    assert!(std::fs::read_dir(aside.join("snapshots")).unwrap().count() > 1);
    // An old file beside the current store is neither read nor lost.
    std::fs::write(&old, b"anything").unwrap();
    contents(directory.path()).await.unwrap();
    assert_eq!(
        std::fs::read(old.with_extension("unused")).unwrap(),
        b"anything"
    );
}

#[tokio::test]
async fn snapshot_positions_are_known_without_reading_snapshots() {
    let directory = tempfile::tempdir().unwrap();
    filled(directory.path(), true).await;
    let store = EmbeddedStore::open(&options(directory.path())).unwrap();
    std::fs::remove_dir_all(directory.path().join("snapshots")).unwrap();
    let positions = store.snapshot_positions().await.unwrap();
    let bytes = (chunk(1).len() + chunk(2).len()) as u64;
    assert_eq!(positions.len(), 2);
    assert_eq!(positions[&ShardIndex(0)], (CUT, bytes));
}

#[tokio::test]
async fn a_snapshot_beyond_the_end_of_the_log_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    filled(directory.path(), true).await;
    let older = tempfile::tempdir().unwrap();
    let from = directory.path().join("log");
    let log = older.path().join("log");
    std::fs::create_dir(&log).unwrap();
    for entry in std::fs::read_dir(&from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, log.join(path.file_name().unwrap())).unwrap();
    }
    let store = EmbeddedStore::open(&options(directory.path())).unwrap();
    let (epoch, seq) = (Epoch(3), LogSeq(GROUPS + 1));
    store.append(epoch, seq, group(seq.0)).await.unwrap();
    let chunks = vec![chunk(3)];
    let put = store.put_snapshot(epoch, ShardIndex(0), seq, chunks);
    put.await.unwrap();
    store.close().await.unwrap();
    // A log from a backup, beside the current snapshots.
    std::fs::remove_dir_all(&from).unwrap();
    std::fs::rename(&log, &from).unwrap();
    let error = contents(directory.path()).await.unwrap_err();
    assert!(error.contains("the log is older"), "{error}");
    assert!(error.contains("--accept-empty-store"), "{error}");
}

#[tokio::test]
async fn a_directory_of_the_log_that_is_missing_is_told_as_damage() {
    let directory = tempfile::tempdir().unwrap();
    filled(directory.path(), true).await;
    std::fs::remove_dir_all(directory.path().join("log")).unwrap();
    let error = EmbeddedStore::open(&options(directory.path())).unwrap_err();
    assert!(matches!(error, OpenError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("log is missing"), "{error}");
}

#[tokio::test]
async fn appends_go_on_when_the_spare_file_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    filled(directory.path(), false).await;
    let store = EmbeddedStore::open(&options(directory.path())).unwrap();
    store.truncate_log(Epoch(3), LogSeq(GROUPS)).await.unwrap();
    let spare = directory.path().join("log").join(log::SPARE);
    std::fs::remove_file(&spare).expect("the cut left a spare file");
    for seq in GROUPS + 1..=3 * GROUPS {
        let appended = store.append(Epoch(3), LogSeq(seq), group(seq));
        appended.await.unwrap();
    }
}

#[tokio::test]
async fn every_start_writes_the_end_of_the_log_again() {
    let directory = tempfile::tempdir().unwrap();
    filled(directory.path(), false).await;
    let mut segments = files_of(directory.path());
    segments.retain(|path| path.starts_with("log"));
    let times = |paths: &[PathBuf]| -> Vec<_> {
        let path = paths.iter().map(|path| directory.path().join(path));
        path.map(|path| std::fs::metadata(path).unwrap().modified().unwrap())
            .collect()
    };
    let before = times(&segments);
    tokio::time::sleep(std::time::Duration::from_millis(30)).await;
    contents(directory.path()).await.unwrap();
    let after = times(&segments);
    let written: Vec<bool> = before.iter().zip(&after).map(|(a, b)| a != b).collect();
    let [.., last_but_one, last] = written[..] else {
        panic!("{segments:?}");
    };
    assert!(last && last_but_one, "{written:?}");
}
