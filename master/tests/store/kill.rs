//! Invariant 5 at its root: an acknowledged group is present after kill -9.
//!
//! The test runs its own binary again as a child. The child appends groups through the embedded
//! store, puts snapshots and cuts the log. It prints each position after its acknowledgement. The
//! test kills it at random times and looks for everything that it printed. `KVPOOL_STORE_KILLS`
//! sets the number of kills (default 20).

use bytes::Bytes;
use kvpool_master::store::{EmbeddedOptions, EmbeddedStore, LogSeq, MetadataStore, ShardIndex};
use kvpool_types::Epoch;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const CHILD: &str = "KVPOOL_STORE_KILL_CHILD";
const KILLS: &str = "KVPOOL_STORE_KILLS";
const SHARDS: u32 = 4;

/// The bytes of a group or a chunk follow from its number.
fn body(number: u64, length: usize) -> Bytes {
    let mut bytes = vec![0; length];
    StdRng::seed_from_u64(number).fill(&mut bytes[..]);
    bytes.into()
}

fn group(seq: LogSeq) -> Bytes {
    let length = match seq.0 {
        n if n % 50 == 0 => 300_000,
        n if n % 7 == 0 => 10_000,
        n => 40 + (n % 300) as usize,
    };
    body(seq.0, length)
}

/// More than one step of the store, so that a kill may fall between two steps of a snapshot.
fn chunks(shard: ShardIndex, seq: LogSeq) -> Vec<Bytes> {
    (0..10)
        .map(|n| body(seq.0 << 16 | u64::from(shard.0) << 8 | n, 150_000))
        .collect()
}

fn open(directory: &Path) -> EmbeddedStore {
    EmbeddedStore::open(&EmbeddedOptions::new(directory)).unwrap()
}

async fn snapshot_positions(store: &EmbeddedStore) -> Vec<LogSeq> {
    let mut positions = Vec::new();
    for shard in (0..SHARDS).map(ShardIndex) {
        let snapshot = store.read_snapshot(shard).await.unwrap();
        positions.push(snapshot.map_or(LogSeq(0), |snapshot| snapshot.seq));
    }
    positions
}

/// The work of the child until it is killed.
async fn append_for_ever(directory: &Path) {
    let store = open(directory);
    let mut out = std::io::stdout();
    let mut say = |what: &str, number: u64| {
        out.write_all(format!("\n@{what} {number}\n").as_bytes())
            .unwrap();
        out.flush().unwrap();
    };
    let epoch = store.begin_epoch(Epoch(0)).await.unwrap();
    say("epoch", epoch.0);
    let mut positions = snapshot_positions(&store).await;
    let mut seq = store.log_span().await.unwrap().last;
    loop {
        seq = seq.next();
        store.append(epoch, seq, group(seq)).await.unwrap();
        say("group", seq.0);
        if seq.0.is_multiple_of(23) {
            let oldest = (0..SHARDS)
                .min_by_key(|shard| positions[*shard as usize])
                .unwrap();
            let shard = ShardIndex(oldest);
            store
                .put_snapshot(epoch, shard, seq, chunks(shard, seq))
                .await
                .unwrap();
            positions[oldest as usize] = seq;
            say("snapshot", seq.0);
            let cut = *positions.iter().min().unwrap();
            store.truncate_log(epoch, cut).await.unwrap();
            say("cut", cut.0);
        }
    }
}

/// The largest number printed for each word, from whole lines only.
fn said(output: &str, what: &str) -> u64 {
    let lines = output
        .split_inclusive('\n')
        .filter_map(|line| line.strip_suffix('\n'));
    let numbers = lines.filter_map(|line| {
        line.strip_prefix('@')?
            .strip_prefix(what)?
            .trim()
            .parse()
            .ok()
    });
    numbers.max().unwrap_or(0)
}

#[tokio::test]
async fn an_acknowledged_group_survives_kill_9() {
    if let Some(directory) = std::env::var_os(CHILD) {
        append_for_ever(Path::new(&directory)).await;
    }
    let kills: u32 = std::env::var(KILLS).map_or(20, |kills| kills.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let mut random = StdRng::seed_from_u64(5);
    let (mut acknowledged, mut snapshotted, mut cut, mut epoch) = (0, 0, 0, 0);
    let mut checked = 0;
    for kill in 0..kills {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "kill::an_acknowledged_group_survives_kill_9",
                "--nocapture",
            ])
            .env(CHILD, directory.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut output = String::new();
            stdout.read_to_string(&mut output).unwrap();
            output
        });
        let longest = if kill % 10 == 9 { 600 } else { 120 };
        std::thread::sleep(Duration::from_millis(random.random_range(5..longest)));
        child.kill().unwrap();
        child.wait().unwrap();
        let output = reader.join().unwrap();
        acknowledged = acknowledged.max(said(&output, "group "));
        snapshotted = snapshotted.max(said(&output, "snapshot "));
        cut = cut.max(said(&output, "cut "));
        epoch = epoch.max(said(&output, "epoch "));

        let store = open(directory.path());
        assert!(
            store.epoch().await.unwrap() >= Epoch(epoch),
            "kill {kill}: an epoch is lost"
        );
        let span = store.log_span().await.unwrap();
        assert!(
            span.last >= LogSeq(acknowledged),
            "kill {kill}: {acknowledged} was acknowledged, the log ends at {}",
            span.last
        );
        assert!(
            span.cut >= LogSeq(cut),
            "kill {kill}: cut at {}, said {cut}",
            span.cut
        );
        let groups = store.read_log(LogSeq(0), u64::MAX).await.unwrap();
        let mut expected = span.cut;
        for (seq, bytes) in &groups {
            expected = expected.next();
            assert_eq!(*seq, expected, "kill {kill}: the log has a gap");
            assert_eq!(*bytes, group(*seq), "kill {kill}: group {seq} is damaged");
        }
        assert_eq!(expected, span.last, "kill {kill}: the log ends early");
        let positions = snapshot_positions(&store).await;
        for (shard, position) in (0..SHARDS).map(ShardIndex).zip(&positions) {
            assert!(
                *position >= span.cut,
                "kill {kill}: the cut is ahead of {shard}"
            );
            if *position > LogSeq(0) {
                let held = store.read_snapshot(shard).await.unwrap().unwrap();
                assert_eq!(
                    held.chunks,
                    chunks(shard, *position),
                    "kill {kill}: {shard}"
                );
            }
        }
        assert!(
            positions.iter().max() >= Some(&LogSeq(snapshotted)),
            "kill {kill}"
        );
        checked += groups.len();
        let size = store.size_on_disk().await.unwrap();
        assert!(
            size < 64 << 20,
            "kill {kill}: the file has grown to {size} bytes"
        );
        store.close().await.unwrap();
    }
    // A run without any of these events proves nothing.
    assert!(
        checked > 0 && snapshotted > 0 && cut > 0,
        "{checked} {snapshotted} {cut}"
    );
    eprintln!("{kills} kills, {acknowledged} groups acknowledged, {checked} compared");
}
