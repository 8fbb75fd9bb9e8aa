//! The main use of a pool, as users run it: `kvctl demo` and `kvctl replay`. The hit rate of a
//! trace is compared with a model of plain LRU.

use kvpool_tests::daemon::path_of;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

fn kvctl(arguments: &[&str]) -> Value {
    let output = Command::new(path_of("kvctl").unwrap())
        .args(arguments)
        .args(["--output", "json"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "{arguments:?}: {}\n{text}{log}",
        output.status
    );
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in {report}"))
}

#[test]
fn the_demo_shares_blocks_and_finds_none_wrong() {
    for transport in ["shm", "tcp"] {
        let report = kvctl(&[
            "demo",
            "--requests",
            "60",
            "--block-size",
            "16KiB",
            "--transport",
            transport,
        ]);
        assert_eq!(number(&report, "requests"), 60);
        assert_eq!(number(&report, "wrong_blocks"), 0);
        assert_eq!(number(&report, "decode_misses"), 0);
        assert!(number(&report, "blocks_hit") > 0, "{report}");
        assert_eq!(
            number(&report, "blocks_decoded"),
            number(&report, "blocks_asked")
        );
    }
}

/// The hit rate of plain LRU in percent: leading blocks found, of all blocks asked for. A request
/// uses its last block first.
fn lru_hit_rate(requests: &[Vec<u64>], capacity: usize) -> f64 {
    let (mut tick_of, mut by_tick) = (HashMap::new(), BTreeMap::new());
    let (mut tick, mut hits, mut asked) = (0u64, 0u32, 0u32);
    for request in requests {
        asked += u32::try_from(request.len()).unwrap();
        let found = request
            .iter()
            .take_while(|block| tick_of.contains_key(*block))
            .count();
        hits += u32::try_from(found).unwrap();
        for block in request.iter().rev() {
            tick += 1;
            if let Some(before) = tick_of.insert(*block, tick) {
                by_tick.remove(&before);
            }
            by_tick.insert(tick, *block);
            if tick_of.len() > capacity {
                let (_, oldest) = by_tick.pop_first().unwrap();
                tick_of.remove(&oldest);
            }
        }
    }
    f64::from(hits) / f64::from(asked) * 100.0
}

fn hold_against_model(trace: &Path, requests: &[Vec<u64>], capacity: usize) {
    let count = requests.len().to_string();
    let blocks = capacity.to_string();
    let report = kvctl(&[
        "replay",
        "--trace",
        &trace.display().to_string(),
        "--policy",
        "lru",
        "--capacity-blocks",
        &blocks,
        "--limit",
        &count,
    ]);
    assert_eq!(number(&report, "wrong_blocks"), 0);
    let (got, expected) = (
        report["hit_rate"].as_f64().unwrap(),
        lru_hit_rate(requests, capacity),
    );
    assert!(
        (got - expected).abs() < 0.5,
        "{got} % at {capacity} blocks, the model says {expected} %"
    );
    println!("{got:.2} % at {capacity} blocks, the model {expected:.2} %");
}

#[test]
fn a_made_trace_hits_as_plain_lru_does() {
    // Conversations of several turns, which continue after others. Each turn extends the last one.
    let mut requests: Vec<Vec<u64>> = Vec::new();
    let mut state = 7u64;
    let mut turns = vec![0u64; 40];
    for _ in 0..400 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let talk = usize::try_from(state >> 33).unwrap() % turns.len();
        turns[talk] = (turns[talk] + 3) % 60 + 3;
        let blocks = (0..turns[talk]).map(|at| talk as u64 * 1000 + at);
        requests.push(
            [0, 1]
                .into_iter()
                .map(|shared| 1_000_000 + shared)
                .chain(blocks)
                .collect(),
        );
    }
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("made.jsonl");
    let mut text = String::new();
    for (at, request) in requests.iter().enumerate() {
        let length = request.len() * 512;
        writeln!(
            text,
            r#"{{"timestamp": {at}, "input_length": {length}, "output_length": 1, "hash_ids": {request:?}}}"#
        )
        .unwrap();
    }
    std::fs::write(&trace, text).unwrap();
    for capacity in [150, 600] {
        hold_against_model(&trace, &requests, capacity);
    }
}

/// The public conversation trace, if its file is present.
fn public_trace() -> Option<PathBuf> {
    let named = std::env::var_os("KVPOOL_TRACE").map(PathBuf::from);
    let beside =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces/conversation_trace.jsonl");
    named
        .into_iter()
        .chain([beside])
        .find(|path| path.is_file())
}

#[test]
fn the_public_trace_hits_as_plain_lru_does() {
    let Some(trace) = public_trace() else {
        eprintln!(
            "SKIPPED the_public_trace_hits_as_plain_lru_does: no trace (name one in KVPOOL_TRACE)"
        );
        return;
    };
    let text = std::fs::read_to_string(&trace).unwrap();
    let requests: Vec<Vec<u64>> = text
        .lines()
        .take(1500)
        .map(|line| {
            let request: Value = serde_json::from_str(line).unwrap();
            request["hash_ids"]
                .as_array()
                .unwrap()
                .iter()
                .filter_map(Value::as_u64)
                .collect()
        })
        .collect();
    hold_against_model(&trace, &requests, 3000);
}
