//! `kvbench` over real daemons: with pools of its own, and with an existing pool.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const KVBENCH: &str = env!("CARGO_BIN_EXE_kvbench");

fn kvbench(arguments: &[&str]) -> Value {
    json_of(Path::new(KVBENCH), arguments)
}

fn kvctl(arguments: &[&str]) -> Value {
    json_of(&beside("kvctl"), arguments)
}

/// The path of another program of the pool, in the directory of kvbench.
fn beside(program: &str) -> PathBuf {
    PathBuf::from(KVBENCH).with_file_name(program)
}

fn json_of(program: &Path, arguments: &[&str]) -> Value {
    let output = Command::new(program)
        .args(arguments)
        .args(["--output", "json"])
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}; build all first", program.display()));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "{arguments:?}: {}\n{text}{log}",
        output.status
    );
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn row<'a>(report: &'a Value, case: &str) -> &'a Value {
    let rows = report["cases"].as_array().unwrap();
    let row = rows.iter().find(|row| row["case"] == case);
    row.unwrap_or_else(|| panic!("no {case} in {report}"))
}

fn median(row: &Value, figure: &str) -> f64 {
    row[figure]["median"]
        .as_f64()
        .unwrap_or_else(|| panic!("no {figure} in {row}"))
}

fn samples(row: &Value, of: &str) -> Vec<f64> {
    let samples = row["samples"][of].as_array();
    let samples = samples.unwrap_or_else(|| panic!("no {of} in {row}"));
    samples.iter().filter_map(Value::as_f64).collect()
}

#[test]
fn a_quick_run_measures_checks_and_compares() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("results.json");
    let report = kvbench(&[
        "--quick",
        "--pairs",
        "2",
        "--only",
        "shm/get/4KiB,tcp/get/32x64x16KiB,shm/put-fresh,match_prefix/64",
        "--json",
        file.to_str().unwrap(),
    ]);
    assert_eq!(report["cases"].as_array().unwrap().len(), 4);
    assert_eq!(report["pairs"], 2);
    assert_eq!(report["foreign_pool"], false);
    for (case, limit) in [
        ("shm/get/4KiB", "ping-pong"),
        ("tcp/get/32x64x16KiB", "bare TCP"),
        ("shm/put-fresh/16x1MiB", "shm/put/16x1MiB"),
        ("match_prefix/64", "exist/64"),
    ] {
        let row = row(&report, case);
        assert!(row["limit"].as_str().unwrap().starts_with(limit), "{row}");
        // On a busy machine two pairs may differ by orders of magnitude. So the two ratios are computed anew.
        let (results, limits) = (samples(row, "results"), samples(row, "limits"));
        assert_eq!((results.len(), limits.len()), (2, 2), "{row}");
        let ratio = (results[0] / limits[0] + results[1] / limits[1]) / 2.0;
        assert!(
            (median(row, "ratio") - ratio).abs() <= ratio / 1_000.0,
            "the ratio is that of result and limit: {row}"
        );
    }
    let moved = row(&report, "tcp/get/32x64x16KiB");
    assert!(moved["cpu"]["client"].as_f64().unwrap() > 0.0, "{moved}");
    assert!(moved["cpu"]["node"].as_f64().unwrap() > 0.0, "{moved}");
    let (goals, met) = (&report["goals"], &report["goals_met"]);
    assert_eq!(goals, 3, "single matches are for information");
    assert_eq!(met, 0, "two pairs meet no goal");
    assert_eq!(report["fewest_pairs"], 3);
    let written: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(written["cases"], report["cases"]);
}

#[test]
fn a_full_pool_is_measured_beside_one_with_room_and_in_the_scenarios() {
    let report = kvbench(&[
        "--quick",
        "--pairs",
        "1",
        "--span",
        "64MiB",
        "--only",
        "full/put,full/crowd,full/node-loss",
    ]);
    for shape in ["32x1MiB", "128x256KiB"] {
        let put = row(&report, &format!("full/put/{shape}"));
        assert_eq!(put["limit"], format!("shm/put/{shape}"));
        assert!(median(put, "ratio") > 0.0);
        let beside = row(&report, &format!("full/put-beside-gets/{shape}"));
        assert_eq!(
            beside["limit"],
            format!("with-room/put-beside-gets/{shape}")
        );
        assert!(median(beside, "ratio") > 0.0);
    }
    for tail in ["full/put-tail/4KiB", "full/put-tail/1MiB"] {
        assert!(median(row(&report, tail), "result") >= 1.0, "{report}");
    }
    for waited in ["full/crowd-wait", "full/node-loss"] {
        assert!(median(row(&report, waited), "result") > 0.0, "{report}");
    }
    assert!(median(row(&report, "full/crowd-evicted"), "result") >= 0.0);
    assert_eq!(report["goals"], 9, "each of these cases has one");
}

#[test]
fn a_report_names_the_build_profile() {
    let report = kvbench(&["--quick", "--pairs", "1", "--only", "machine/first-touch"]);
    assert_eq!(
        report["machine"]["profile"],
        if cfg!(debug_assertions) {
            "dev"
        } else {
            "release"
        }
    );
}

/// A daemon that dies with the test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(program: &str, directory: &Path, arguments: &[&str]) -> (Daemon, String) {
    let path = beside(program);
    let ready = directory.join(format!("{program}.ready"));
    let child = Command::new(&path)
        .args(["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"])
        .args(arguments)
        .arg("--ready-file")
        .arg(&ready)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}; build all first", path.display()));
    let daemon = Daemon(child);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let told = std::fs::read(&ready).ok();
        let told = told.and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        if let Some(listen) = told.as_ref().and_then(|told| told["listen"].as_str()) {
            return (daemon, listen.to_owned());
        }
        assert!(Instant::now() < deadline, "{program} does not serve");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn rdma_cases_are_measured_with_rdma_and_left_out_with_one_reason_without_it() {
    let report = kvbench(&[
        "--quick",
        "--pairs",
        "1",
        "--span",
        "32MiB",
        "--only",
        "rdma/get/32x1MiB,rdma/put/32x64x16KiB,shm/get/4KiB",
    ]);
    assert_eq!(report["span_bytes"], 32 << 20);
    let doctor = kvctl(&["doctor"]);
    let reason = doctor["host"]["rdma"]["reason"].as_str();
    let left_out = report["left_out"].as_array().unwrap();
    match reason {
        None => {
            assert!(left_out.is_empty(), "{report}");
            for case in ["rdma/get/32x1MiB", "rdma/put/32x64x16KiB"] {
                assert!(median(row(&report, case), "result") > 0.0);
            }
        }
        Some(reason) => {
            assert_eq!(report["cases"].as_array().unwrap().len(), 1, "{report}");
            assert_eq!(left_out.len(), 1, "{report}");
            assert_eq!(left_out[0]["cases"].as_array().unwrap().len(), 2);
            assert!(left_out[0]["reason"].as_str().unwrap().contains(reason));
        }
    }
}

/// A pool with one node of 64 MiB that was there before kvbench.
struct Existing {
    master: String,
    _daemons: [Daemon; 2],
    _directory: tempfile::TempDir,
}

impl Existing {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        let (data, socket) = (path("master"), path("node.sock"));
        let (leader, listen) = start("kvmaster", directory.path(), &["--data-dir", &data]);
        let master = format!("http://{listen}");
        let node = [
            "--master",
            &master,
            "--segment",
            "64MiB",
            "--shm-path",
            &socket,
        ];
        let (node, _) = start("kvstore-node", directory.path(), &node);
        let pool = Self {
            master,
            _daemons: [leader, node],
            _directory: directory,
        };
        // A node serves before it registers.
        pool.wait_for("nodes", |nodes| nodes[0]["state"] == "live");
        pool
    }

    fn wait_for(&self, fact: &str, is_so: impl Fn(&Value) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let status = kvctl(&["--master", &self.master, "status"]);
            if is_so(&status[fact]) {
                return;
            }
            assert!(Instant::now() < deadline, "{fact}: {status}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A client process, as a run of kvbench starts it.
struct Agent {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _process: Daemon,
}

impl Agent {
    fn start() -> Self {
        let mut child = Command::new(KVBENCH)
            .args(["agent", "seed"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut agent = Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            _process: Daemon(child),
        };
        agent.answer();
        agent
    }

    fn call(&mut self, command: &Value) -> Value {
        writeln!(self.input, "{command}").unwrap();
        self.answer()
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let reply: Value = serde_json::from_str(&line).unwrap();
        assert!(!reply["done"].is_null(), "{reply}");
        reply["done"].clone()
    }
}

#[test]
fn each_timed_put_has_gets_beside_it_also_a_single_one() {
    let pool = Existing::start();
    let mut agent = Agent::start();
    agent.call(&json!({"memory": {"span": 4 << 20, "source": true}}));
    for name in ["writer", "reader"] {
        agent.call(&json!({"connect": {
            "name": name,
            "master": pool.master,
            "access": {},
            "way": "shm",
            "remembers": false,
            "spin": {"secs": 0, "nanos": 0},
        }}));
    }
    let mut work = json!({
        "client": "writer",
        "set": {
            "tag": "t",
            "block": 64 << 10,
            "pieces": 1,
            "group": 1,
            "chained": false,
            "slots": 64,
            "live": {"first": 0, "end": 0},
        },
        "window": {"at_least": {"secs": 3600, "nanos": 0}, "calls": 1},
        "watch": [],
        "begin_ns": 0,
    });
    for (reader, put) in [(json!("reader"), 8), (Value::Null, 4)] {
        work["work"] = json!({"put": {"batch": 4, "evicts": false, "reader": reader}});
        let done = agent.call(&json!({ "work": work }))["measured"].clone();
        assert_eq!(done["measured"]["calls"], 1, "{done}");
        assert_eq!(done["measured"]["units"], 4 * (64 << 10), "{done}");
        let end = work["set"]["live"]["end"].as_u64().unwrap() + put;
        assert_eq!(done["live"]["end"], end, "{done}");
        work["set"]["live"] = done["live"].clone();
    }
}

#[test]
fn an_existing_pool_is_measured_and_left_empty() {
    let pool = Existing::start();
    let report = kvbench(&[
        "--master",
        &pool.master,
        "--quick",
        "--pairs",
        "2",
        "--only",
        "shm/put/4KiB,memory/node",
    ]);
    assert_eq!(report["foreign_pool"], true);
    assert_eq!(
        report["cases"].as_array().unwrap().len(),
        1,
        "another's processes are not looked into"
    );
    assert!(median(row(&report, "shm/put/4KiB"), "result") > 0.0);
    let status = kvctl(&["--master", &pool.master, "status"]);
    assert_eq!(status["blocks"], 0, "{status}");
}

/// The ids of the processes that `parent` has started.
fn children(parent: u32) -> Vec<String> {
    let is_child = format!("PPid:\t{parent}");
    let mut children = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        // Not every entry is a process, and a process may end meanwhile.
        let status = std::fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        if status.lines().any(|line| line == is_child) {
            children.push(entry.file_name().into_string().unwrap());
        }
    }
    children
}

#[test]
fn a_run_that_fails_leaves_an_existing_pool_empty() {
    let pool = Existing::start();
    let run = Command::new(KVBENCH)
        .args(["--master", &pool.master, "--quick", "--pairs", "1000"])
        .args(["--only", "shm/put/4KiB"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut run = Daemon(run);
    pool.wait_for("blocks", |blocks| {
        blocks.as_u64().is_some_and(|some| some > 0)
    });
    let agents = children(run.0.id());
    assert!(agents.len() >= 3, "two limits and a client: {agents:?}");
    let killed = Command::new("kill").arg("-9").args(&agents).status();
    assert!(killed.unwrap().success());
    assert!(!run.0.wait().unwrap().success(), "a client has ended");
    // What the killed client was putting goes with its session.
    pool.wait_for("blocks", |blocks| *blocks == 0);
}
