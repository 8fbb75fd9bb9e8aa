//! The master's data directory: full and free again under load, damaged, and moved away.

use kvpool_client::{Client, PutBlock, PutOptions, Remove, RemoveError};
use kvpool_tests::blocks::{check_all, key, put_all, source};
use kvpool_tests::daemon::path_of;
use kvpool_tests::{Cluster, Options};
use kvpool_types::Code;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const LENGTH: usize = 64;
const BATCH: u64 = 256;

/// A filesystem of a fixed size; `None` if this process may not mount one.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount(size: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "kvpool-test"])
            .arg(directory.path())
            .output();
        match mounted {
            Ok(mounted) if mounted.status.success() => Some(Self(directory)),
            other => {
                eprintln!("skipped: no filesystem can be mounted here: {other:?}");
                None
            }
        }
    }

    fn data(&self) -> PathBuf {
        self.0.path().join("data")
    }

    fn ballast(&self) -> PathBuf {
        self.0.path().join("ballast")
    }

    /// Fills the remaining room.
    fn fill(&self) {
        let mut file = std::fs::File::create(self.ballast()).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmount = Command::new("umount").arg("-l").arg(self.0.path()).status();
        assert!(unmount.is_ok_and(|status| status.success()));
    }
}

/// Puts one batch after the other, and counts up to which number all are stored.
fn write_for_ever(
    client: Client,
    stored: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let mut next = 0;
        while !stop.load(Ordering::Acquire) {
            if put_all(&client, next..next + BATCH, LENGTH).await.is_ok() {
                next += BATCH;
                stored.store(next, Ordering::Release);
            }
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn puts_fail_with_the_reason_while_the_data_directory_is_full_and_then_go_on() {
    let Some(disk) = SmallDisk::mount("32m") else {
        return;
    };
    let options = Options {
        segment: "2GiB".into(),
        data_dir: Some(disk.data()),
        ..Options::default()
    };
    let mut cluster = Cluster::start(options).unwrap();
    let client = cluster.client().await.unwrap();
    let (stored, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
    let writer = write_for_ever(client.clone(), Arc::clone(&stored), Arc::clone(&stop));
    // Numbers that the writer does not use.
    let mut other = 1 << 40;
    for round in 0..2 {
        let before = stored.load(Ordering::Acquire);
        disk.fill();
        let options = PutOptions {
            timeout: Some(Duration::from_secs(2)),
            ..PutOptions::default()
        };
        let limit = Instant::now() + Duration::from_secs(90);
        let error = loop {
            assert!(Instant::now() < limit, "the log never ran out of room");
            let puts =
                (other..other + BATCH).map(|n| PutBlock::new(key(n), source(&key(n), LENGTH)));
            let outcomes = client.batch_put(puts.collect(), &options).await;
            other += BATCH;
            if let Some(error) = outcomes.into_iter().find_map(Result::err) {
                break error;
            }
        };
        println!("round {round}: a put fails with: {error}");
        let text = error.to_string();
        assert_eq!(error.code(), Code::StoreFull, "{text}");
        assert!(text.contains(disk.data().to_str().unwrap()), "{text}");
        assert!(
            text.contains("is full") && text.contains("free room"),
            "{text}"
        );
        assert!(!text.contains("was lost"), "{text}");
        // The probes report it. A restart would not help, so health does not fail.
        let ready = cluster.master.http_get("/readyz").unwrap_err().to_string();
        println!("round {round}: /readyz: {ready}");
        assert!(ready.contains("is full"), "{ready}");
        cluster.master.http_get("/healthz").unwrap();
        let refused = client
            .remove(Remove::Keys(vec![key(before)]), true)
            .await
            .unwrap_err();
        assert!(
            matches!(&refused, RemoveError::Failed(error) if error.code == Code::StoreFull),
            "{refused}"
        );
        let alarms = || cluster.master.metric("kvpool_master_store_alarms").unwrap();
        assert_eq!(alarms(), 1.0);
        for (command, code) in [("status", 0), ("doctor", 4)] {
            let output = Command::new(path_of("kvctl").unwrap())
                .args([command, "--output", "json"])
                .args(["--master", &cluster.master_url()])
                .output()
                .unwrap();
            assert_eq!(output.status.code(), Some(code), "{output:?}");
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(
                said.contains("the metadata store raises an alarm"),
                "{said}"
            );
            assert!(said.contains(disk.data().to_str().unwrap()), "{said}");
        }
        let held = stored.load(Ordering::Acquire);
        assert!(held > before, "round {round}");
        let tally = check_all(&client, held.saturating_sub(500)..held, LENGTH).await;
        assert_eq!(tally.right as u64, held.min(500), "{tally:?}");
        let freed = Instant::now();
        std::fs::remove_file(disk.ballast()).unwrap();
        while stored.load(Ordering::Acquire) == held {
            assert!(
                freed.elapsed() < Duration::from_secs(5),
                "puts do not go on"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        println!(
            "round {round}: puts go on {:?} after there was room",
            freed.elapsed()
        );
        cluster.master.http_get("/readyz").unwrap();
        assert_eq!(alarms(), 0.0);
    }
    cluster.master.kill().unwrap();
    let held = stored.load(Ordering::Acquire);
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
    let keys: Vec<_> = (0..held).map(key).collect();
    let present = client.is_exist(&keys).await.unwrap();
    let lost = present.iter().filter(|present| !**present).count();
    assert_eq!(lost, 0, "of {held} acknowledged blocks");
    stop.store(true, Ordering::Release);
    writer.await.unwrap();
}

/// The newest segment of the log.
fn newest_segment(data: &Path) -> PathBuf {
    let entries = std::fs::read_dir(data.join("log")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|e| e == "log"))
        .max()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_store_is_refused_by_name_until_the_flag_accepts_an_empty_pool() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    for batch in 0..5 {
        put_all(&client, batch * 8..batch * 8 + 8, LENGTH)
            .await
            .unwrap();
    }
    cluster.master.kill().unwrap();
    let segment = newest_segment(&cluster.data_dir());
    let mut bytes = std::fs::read(&segment).unwrap();
    bytes[4196] ^= 1;
    std::fs::write(&segment, &bytes).unwrap();
    let refused = cluster.restart_master().unwrap_err().to_string();
    println!("a flipped byte: {refused}");
    assert!(
        refused.contains(segment.file_name().unwrap().to_str().unwrap()),
        "{refused}"
    );
    assert!(refused.contains("--accept-empty-store"), "{refused}");
    assert_eq!(
        std::fs::read(&segment).unwrap(),
        bytes,
        "it was left as it was"
    );
    cluster.add_master_flags(&["--accept-empty-store"]);
    cluster.restart_master().unwrap();
    assert!(cluster.master.log_text().contains("set-aside-1"));
    assert!(cluster.data_dir().join("set-aside-1/log").is_dir());
    cluster.wait_live(1).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..8, LENGTH).await.unwrap();
    assert_eq!(check_all(&client, 0..8, LENGTH).await.right, 8);
    // The flag has no effect on an intact store.
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
    assert_eq!(check_all(&client, 0..8, LENGTH).await.right, 8);
    assert!(!cluster.data_dir().join("set-aside-2").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_whose_data_directory_is_moved_away_ends_and_says_so() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    let data = cluster.data_dir();
    let elsewhere = cluster.directory().join("elsewhere");
    std::fs::rename(&data, &elsewhere).unwrap();
    let status = cluster.master.wait_for_end().unwrap();
    assert_eq!(status.code(), Some(1));
    let log = cluster.master.log_text();
    let last = log.trim_end().lines().last().unwrap().to_owned();
    println!("{last}");
    assert!(
        last.contains(data.to_str().unwrap()) && last.contains("moved or replaced"),
        "{last}"
    );
    std::fs::rename(&elsewhere, &data).unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_restarts_on_a_full_data_directory_serves_gets() {
    let Some(disk) = SmallDisk::mount("32m") else {
        return;
    };
    let options = Options {
        segment: "256MiB".into(),
        data_dir: Some(disk.data()),
        ..Options::default()
    };
    let mut cluster = Cluster::start(options).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..BATCH, LENGTH).await.unwrap();
    disk.fill();
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
    let client = cluster.client().await.unwrap();
    let tally = check_all(&client, 0..BATCH, LENGTH).await;
    assert_eq!(tally.right as u64, BATCH, "{tally:?}");
    std::fs::remove_file(disk.ballast()).unwrap();
    put_all(&client, BATCH..2 * BATCH, LENGTH).await.unwrap();
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();
    let client = cluster.client().await.unwrap();
    let tally = check_all(&client, 0..2 * BATCH, LENGTH).await;
    assert_eq!(tally.right as u64, 2 * BATCH, "{tally:?}");
}
