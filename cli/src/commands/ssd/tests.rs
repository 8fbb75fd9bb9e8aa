use super::format::format;
use super::inspect::inspect;
use super::target::{InUse, Target};
use super::verify::{Verification, verify};
use crate::exit;
use kvpool_disk::medium::{
    DATA_START, Formatted, Generation, Staged, Stamp, StoreNumber, footprint,
};
use kvpool_transport::checksum::checksum;
use kvpool_types::{ClusterId, MediumId, Version};
use std::fs::{File, Permissions, read, write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: u64 = 16 << 20;
const BLOCK: u64 = 300_000;
const ID: MediumId = MediumId(0xd15c);

/// A file with a medium that holds `blocks` blocks, and the places of these.
fn medium(directory: &Path, blocks: u64, is_clean: bool) -> (PathBuf, Vec<u64>) {
    let path = directory.join("ssd");
    let target = Target::open(&path, Some(SIZE)).unwrap();
    let (engine, arena) = (Arc::clone(&target.engine), Arc::clone(&target.arena));
    let formatted = Formatted::format(engine, arena, ClusterId(0xc1), ID).unwrap();
    let medium = formatted.attach(ClusterId(0xc1), Generation(3)).unwrap();
    let mut offset = DATA_START;
    let mut places = Vec::new();
    for number in 0..blocks {
        let mut staged = Staged::take(&target.arena, BLOCK, None).unwrap().unwrap();
        staged.data().fill(u8::try_from(number).unwrap() + 1);
        let stamp = Stamp {
            offset,
            number: StoreNumber(number),
            version: Version(number + 1),
            checksum: checksum(staged.data()),
        };
        let (sender, stored) = std::sync::mpsc::channel();
        medium.store(staged, stamp, move |outcome| sender.send(outcome).unwrap());
        stored.recv().unwrap().unwrap();
        places.push(offset);
        offset += footprint(BLOCK).unwrap();
    }
    if is_clean {
        let soon = Instant::now() + Duration::from_secs(10);
        medium.detach(soon).unwrap();
    }
    drop(medium);
    drop(target);
    unlocked(&path);
    (path, places)
}

/// Waits until the engine's own threads have let go of the file.
fn unlocked(path: &Path) {
    for _ in 0..200 {
        match Target::open(path, None) {
            Err(error) if error.is::<InUse>() => std::thread::sleep(Duration::from_millis(10)),
            opened => return drop(opened.unwrap()),
        }
    }
    panic!("{} stays locked", path.display());
}

async fn verified(path: &Path) -> Verification {
    let found = verify(path).await.unwrap();
    unlocked(path);
    found
}

#[test]
fn inspect_says_what_a_path_holds() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _) = medium(directory.path(), 1, true);
    let found = inspect(&path).unwrap();
    assert_eq!((found.content, found.in_use), ("medium", false));
    let superblock = found.medium.unwrap();
    assert_eq!(superblock.id, ID.to_string());
    assert_eq!((superblock.generation, superblock.clean), (3, true));

    let blank = directory.path().join("blank");
    write(&blank, vec![0; 2 << 20]).unwrap();
    assert_eq!(inspect(&blank).unwrap().content, "blank");
    let foreign = directory.path().join("foreign");
    let mut bytes = vec![0; 2 << 20];
    bytes[0x438..0x43a].copy_from_slice(b"\x53\xef");
    write(&foreign, bytes).unwrap();
    let found = inspect(&foreign).unwrap();
    assert_eq!(found.content, "foreign");
    assert!(found.note.contains("ext4"), "{}", found.note);
}

#[tokio::test]
async fn a_medium_in_use_is_named_and_never_written() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _) = medium(directory.path(), 1, false);
    let _node = Target::open(&path, None).unwrap();
    let found = inspect(&path).unwrap();
    assert_eq!((found.content, found.in_use), ("medium", true));
    assert!(!found.medium.unwrap().clean);
    let before = read(&path).unwrap();
    assert!(verify(&path).await.unwrap_err().is::<InUse>());
    let refused = format(&path, None, true).unwrap_err();
    assert!(refused.is::<InUse>(), "{refused:#}");
    assert!(refused.to_string().contains("stop it first"));
    assert!(read(&path).unwrap() == before);
}

/// A block device over a file, for as long as the value lives.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path) -> Option<Self> {
        let made = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output()
            .ok()?;
        let path = String::from_utf8(made.stdout).ok()?;
        made.status.success().then(|| Self(path.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detach = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
        assert!(detach.unwrap().success());
    }
}

/// Tries again while the device is in use, for some seconds. udev reads a device that was open for writes, and locks
/// it meanwhile.
fn patiently<T>(attempt: impl Fn() -> anyhow::Result<T>) -> T {
    let limit = Instant::now() + Duration::from_secs(10);
    loop {
        match attempt() {
            Err(error) if error.is::<InUse>() && Instant::now() < limit => {
                std::thread::sleep(Duration::from_millis(10));
            }
            done => return done.unwrap(),
        }
    }
}

#[tokio::test]
async fn a_device_in_use_is_shown_and_only_a_free_one_is_formatted() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _) = medium(directory.path(), 1, false);
    let Some(device) = Loop::over(&path) else {
        let test = "a_device_in_use_is_shown_and_only_a_free_one_is_formatted";
        eprintln!("SKIPPED {test}: no loop device can be made here");
        return;
    };
    let node = patiently(|| Target::open(&device.0, None));
    let found = inspect(&device.0).unwrap();
    assert_eq!((found.content, found.in_use), ("medium", true));
    assert_eq!(found.medium.unwrap().id, ID.to_string());
    assert!(verify(&device.0).await.unwrap_err().is::<InUse>());
    let refused = format(&device.0, None, true).unwrap_err();
    assert!(refused.is::<InUse>(), "{refused:#}");
    assert!(refused.to_string().contains("kvstore-node"), "{refused:#}");
    assert_eq!(inspect(&device.0).unwrap().content, "medium");
    drop(node);
    let content_when_free = || {
        let found = patiently(|| match inspect(&device.0)? {
            found if found.in_use => Err(InUse::Device(device.0.clone()).into()),
            found => Ok(found),
        });
        found.content
    };
    assert_eq!(content_when_free(), "medium");
    assert!(patiently(|| format(&device.0, None, true)).erased);
    assert_eq!(content_when_free(), "blank");
    drop(patiently(|| Target::open(&device.0, None)));
}

#[tokio::test]
async fn a_medium_is_looked_at_without_a_right_to_write() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _) = medium(directory.path(), 1, true);
    std::fs::set_permissions(&path, Permissions::from_mode(0o400)).unwrap();
    // A superuser may write all files. To read beside another reader, any user must open for reads alone.
    let _reader = Target::open_to_read(&path).unwrap();
    let found = inspect(&path).unwrap();
    assert_eq!((found.content, found.in_use), ("medium", false));
    assert_eq!(verify(&path).await.unwrap().intact_extents, 1);
}

#[tokio::test]
async fn verify_finds_every_damaged_extent_and_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let (path, places) = medium(directory.path(), 20, true);
    let found = verified(&path).await;
    assert_eq!((found.intact_extents, found.damaged_places), (20, 0));
    assert_eq!(found.intact_bytes, 20 * BLOCK);

    let file = File::options().write(true).open(&path).unwrap();
    // A header, and the data of eleven others.
    file.write_all_at(b"!", places[1] + 20).unwrap();
    for place in &places[5..16] {
        file.write_all_at(b"!", place + 8192).unwrap();
    }
    drop(file);
    let found = verified(&path).await;
    assert_eq!((found.intact_extents, found.damaged_places), (8, 12));
    assert_eq!(found.damaged["header_crc"].first_offsets, [places[1]]);
    let chunks = &found.damaged["chunk"];
    assert_eq!(chunks.places, 11);
    assert_eq!(chunks.first_offsets, places[5..15], "the first ten");
}

#[tokio::test]
async fn format_asks_before_it_loses_anything() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _) = medium(directory.path(), 2, true);
    let before = read(&path).unwrap();
    let refused = format(&path, None, false).unwrap_err().to_string();
    assert!(
        refused.contains(&ID.to_string()) && refused.contains("--yes"),
        "{refused}"
    );
    assert!(read(&path).unwrap() == before);
    unlocked(&path);

    let done = format(&path, Some(2 * SIZE), true).unwrap();
    assert!(
        done.erased && done.held.contains("generation 3"),
        "{done:?}"
    );
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 * SIZE);
    unlocked(&path);
    assert_eq!(inspect(&path).unwrap().content, "blank");
    unlocked(&path);
    // Blank: no consent is needed.
    assert!(!format(&path, None, false).unwrap().erased);
    unlocked(&path);

    // Extents of the former medium are no damage of the next one.
    let target = Target::open(&path, None).unwrap();
    let (engine, arena) = (Arc::clone(&target.engine), Arc::clone(&target.arena));
    drop(Formatted::format(engine, arena, ClusterId(0xc1), MediumId(2)).unwrap());
    drop(target);
    unlocked(&path);
    let found = verified(&path).await;
    assert_eq!((found.former_extents, found.damaged_places), (2, 0));
    assert_eq!(found.intact_extents, 0);
}

#[test]
fn format_makes_a_file_of_a_given_size_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new");
    let refused = format(&path, None, true).unwrap_err();
    assert!(refused.is::<exit::Usage>(), "{refused:#}");
    assert!(!path.exists());
    assert!(!format(&path, Some(SIZE), false).unwrap().erased);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE);
    unlocked(&path);
    let refused = format(&path, Some(SIZE / 2), true).unwrap_err();
    assert!(refused.is::<exit::Usage>(), "{refused:#}");
    let other = directory.path().join("other");
    let refused = format(&other, Some(4095), true).unwrap_err();
    assert!(refused.is::<exit::Usage>(), "{refused:#}");
    assert!(!other.exists());
    // A size is rounded down to granules.
    let done = format(&other, Some(SIZE + 4095), false).unwrap();
    assert_eq!(done.size_bytes, SIZE);
    assert_eq!(std::fs::metadata(&other).unwrap().len(), SIZE);
}
