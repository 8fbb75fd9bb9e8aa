//! `kvctl bench` over real daemons: the load, what it leaves behind, and the options that it refuses. Its hand-offs.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const KVCTL: &str = env!("CARGO_BIN_EXE_kvctl");

/// A load that ends soon.
const SHORT: [&str; 10] = [
    "--duration",
    "600ms",
    "--block-size",
    "64KiB",
    "--batch",
    "4",
    "--threads",
    "2",
    "--working-set",
    "8MiB",
];

fn kvctl(arguments: &[&str]) -> Output {
    Command::new(KVCTL)
        .args(arguments)
        .env_remove("KVPOOL_MASTER")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let arguments = [arguments, &["--output", "json"]].concat();
    let output = kvctl(&arguments);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {log}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What `kvctl bench` says on standard error when it refuses its options.
fn refusal(arguments: &[&str]) -> String {
    let output = kvctl(&[&["bench"], arguments].concat());
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    said
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
    let path = PathBuf::from(KVCTL).with_file_name(program);
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
            return (daemon, format!("http://{listen}"));
        }
        assert!(Instant::now() < deadline, "{program} does not serve");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A pool with one node of 64 MiB that was there before the load.
struct Existing {
    master: String,
    _daemons: [Daemon; 2],
    _directory: tempfile::TempDir,
}

impl Existing {
    fn start() -> Self {
        let pool = Self::launch(tempfile::tempdir().unwrap(), &[], &[]);
        pool.wait_for_node(&[]);
        pool
    }

    /// A pool that asks for tokens, with those of a team and of an operator.
    fn with_tokens() -> (Self, [String; 2]) {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        let auth = path("auth");
        for (subject, role, namespaces) in [
            ("node", "node", None),
            ("team", "writer", Some("team")),
            ("operator", "operator", None),
        ] {
            let mut create = vec![
                "token",
                "create",
                "--dir",
                &auth,
                "--subject",
                subject,
                "--role",
                role,
            ];
            create.extend(namespaces.iter().flat_map(|name| ["--in", *name]));
            let made = kvctl(&create);
            assert!(
                made.status.success(),
                "{}",
                String::from_utf8_lossy(&made.stderr)
            );
        }
        let (jwks, policy) = (path("auth/jwks.json"), path("auth/policy.toml"));
        let asks = [
            "--auth-jwks",
            &jwks,
            "--auth-policy",
            &policy,
            "--auth-issuer",
            "kvctl",
        ];
        let [node, team, operator] =
            ["node", "team", "operator"].map(|name| path(&format!("auth/{name}.token")));
        let pool = Self::launch(directory, &asks, &["--token-file", &node]);
        pool.wait_for_node(&["--token-file", &operator]);
        (pool, [team, operator])
    }

    fn launch(directory: tempfile::TempDir, flags: &[&str], of_node: &[&str]) -> Self {
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        let (data, socket) = (path("master"), path("node.sock"));
        let leader = [&["--data-dir", &data], flags].concat();
        let (leader, master) = start("kvmaster", directory.path(), &leader);
        let node = ["--master", &master, "--segment", "64MiB", "--shm-path"];
        let node = [&node[..], &[&socket], flags, of_node].concat();
        let (node, _) = start("kvstore-node", directory.path(), &node);
        Self {
            master,
            _daemons: [leader, node],
            _directory: directory,
        }
    }

    /// A node serves before it registers.
    fn wait_for_node(&self, flags: &[&str]) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let status = [&["--master", &self.master, "status"], flags].concat();
        while json(&status)["nodes"][0]["state"] != "live" {
            assert!(Instant::now() < deadline, "the node does not register");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn bench(&self, arguments: &[&str]) -> Value {
        let pool = ["--master", &self.master, "bench"];
        json(&[&pool, &SHORT[..], arguments].concat())
    }

    fn blocks(&self) -> Value {
        json(&["--master", &self.master, "status"])["blocks"].clone()
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

/// The rates and percentiles of one kind of call are there and fit each other.
fn check(report: &Value, call: &str) {
    let summary = &report[call];
    let calls = number(&summary["calls"]);
    assert!(calls > 0.0, "{report}");
    assert!(number(&summary["calls_per_s"]) > 0.0, "{report}");
    let bytes = number(&summary["blocks"]) * f64::from(64 << 10);
    assert_eq!(number(&summary["bytes"]), bytes, "{report}");
    let seconds = number(&report["seconds"]);
    let rate = number(&summary["gb_per_s"]) * seconds * 1e9;
    assert!((rate / bytes - 1.0).abs() < 1e-6, "{report}");
    let latency = &summary["latency_us"];
    let ordered = ["p50", "p90", "p99", "p999", "max"].map(|name| number(&latency[name]));
    assert!(ordered[0] > 0.0 && ordered.is_sorted(), "{report}");
    assert_eq!(summary["failed"], serde_json::json!({}), "{report}");
}

#[test]
fn an_existing_pool_is_loaded_verified_and_left_empty() {
    let pool = Existing::start();
    let put = pool.bench(&["--operation", "put"]);
    check(&put, "put");
    assert!(put["get"].is_null());
    assert_eq!(pool.blocks(), 0, "{put}");

    let get = pool.bench(&[
        "--operation",
        "get",
        "--verify-every",
        "1",
        "--hit-share",
        "0.5",
    ]);
    check(&get, "get");
    assert!(get["put"].is_null());
    let (hits, absent) = (number(&get["get"]["blocks"]), number(&get["get"]["absent"]));
    let share = hits / (hits + absent);
    assert!((0.3..0.7).contains(&share), "{get}");
    assert_eq!(get["verified_blocks"], get["get"]["blocks"], "{get}");
    assert_eq!(get["wrong_blocks"], 0);
    assert_eq!(pool.blocks(), 0, "{get}");

    let mixed = pool.bench(&["--verify-every", "4", "--put-share", "0.3"]);
    check(&mixed, "put");
    check(&mixed, "get");
    assert!(number(&mixed["verified_blocks"]) > 0.0, "{mixed}");
    assert_eq!(pool.blocks(), 0, "{mixed}");
}

#[test]
fn without_a_master_the_load_runs_on_a_pool_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("results.json");
    let arguments = [
        "bench",
        "--pool-size",
        "64MiB",
        "--json",
        file.to_str().unwrap(),
    ];
    let output = kvctl(&[&arguments[..], &SHORT].concat());
    let (table, log) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{log}");
    for column in ["p50", "p99.9", "blocks/s", "put", "get"] {
        assert!(table.contains(column), "{column} in\n{table}");
    }
    let written: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    check(&written, "put");
    check(&written, "get");
}

#[test]
fn hand_offs_are_measured_beside_bare_tcp() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("results.json");
    let arguments = ["bench", "handoff", "--size", "4MiB", "--rounds", "1"];
    let to_file = ["--streams", "3", "--json", file.to_str().unwrap()];
    let output = kvctl(&[&arguments[..], &to_file].concat());
    let (table, log) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{log}");
    let written: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let printed = json(&arguments);
    for (report, streams) in [(&written, 3), (&printed, 2)] {
        assert_eq!(report["bytes"], 4 << 20, "{report}");
        assert_eq!(report["rounds"], 1, "{report}");
        assert_eq!(report["streams"], streams, "{report}");
        let cases = report["cases"].as_object().unwrap();
        let names = ["tcp", "tcp_hot", "push", "pull", "slices", "layerwise"];
        assert_eq!(cases.len(), names.len(), "{report}");
        for name in names {
            // The first word of a line is the border.
            let first = |line: &str| line.split_whitespace().nth(1) == Some(name);
            assert!(table.lines().any(first), "{name} in\n{table}");
            let figures = &cases[name];
            for figure in ["gb_per_s", "of_tcp", "of_tcp_hot", "of_push"] {
                let value = number(&figures[figure]);
                assert!(value.is_finite() && value > 0.0, "{name}: {report}");
            }
            // One round: a ratio is that of the two rates.
            let rate = |name: &str| number(&cases[name]["gb_per_s"]);
            let ratio = rate(name) / rate("tcp");
            let error = number(&figures["of_tcp"]) / ratio - 1.0;
            assert!(error.abs() < 1e-6, "{name}: {report}");
        }
        assert!(number(&report["hidden"]) <= 1.0, "{report}");
    }
}

#[test]
fn options_of_hand_offs_and_of_loads_do_not_mix() {
    for (bad, part) in [
        (&["handoff", "--size", "0"][..], "--size must be whole MiB"),
        (
            &["handoff", "--size", "1500KiB"],
            "--size must be whole MiB",
        ),
        (&["handoff", "--size", "17GiB"], "--size must be whole MiB"),
        (&["handoff", "--rounds", "0"], "--rounds"),
        (&["handoff", "--streams", "65"], "--streams"),
        (&["handoff", "--batch", "3"], "--batch"),
        (&["--batch", "3", "handoff"], "handoff"),
        (&["--rounds", "3"], "--rounds"),
    ] {
        let said = refusal(bad);
        assert!(said.contains(part), "{bad:?}: {said}");
    }
}

#[test]
fn options_of_the_regression_bench_are_refused_with_the_name_of_kvbench() {
    for former in [
        &["--only", "tcp/"][..],
        &["--only", "shm/,tcp/", "--pairs", "21"],
        &["--list"],
        &["--pairs", "5"],
        &["--quick"],
        &["--span=32MiB"],
        &["--large", "--json", "results.json"],
        &["--node-loss", "9s"],
    ] {
        let said = refusal(former);
        assert!(said.contains("kvbench"), "{former:?}: {said}");
        let flag = former[0].split('=').next().unwrap();
        assert!(said.contains(flag), "{former:?}: {said}");
    }
}

#[test]
fn bad_options_are_refused_before_anything_starts() {
    for (bad, part) in [
        (&["--batch", "0"][..], "--batch"),
        (&["--threads", "0"], "--threads"),
        (&["--threads", "257"], "--threads"),
        (
            &["--block-size", "0"],
            "--block-size must be at least 1 byte",
        ),
        (&["--duration", "0s"], "longer than zero"),
        (&["--duration", "soon"], "--duration"),
        (&["--hit-share", "1.5"], "from 0 to 1"),
        (&["--hit-share", "NaN"], "from 0 to 1"),
        (&["--put-share=-0.1"], "from 0 to 1"),
        (
            &["--operation", "get", "--put-share", "0.5"],
            "--operation mixed",
        ),
        (
            &["--operation", "put", "--hit-share", "0.5"],
            "--operation get or mixed",
        ),
        (&["--verify-every", "0"], "--verify-every"),
        (
            &["--master", "http://127.0.0.1:1", "--pool-size", "1GiB"],
            "--pool-size",
        ),
        (&["--operation", "scan"], "--operation"),
    ] {
        let said = refusal(bad);
        assert!(said.contains(part), "{bad:?}: {said}");
    }
}

#[test]
fn a_working_set_that_does_not_fit_the_pool_or_the_calls_is_refused() {
    let pool = Existing::start();
    for (bad, part) in [
        (
            &["--working-set", "48MiB"][..],
            "more than half of the pool",
        ),
        (&["--working-set", "1MiB"], "is too small"),
        (&["--block-size", "8MiB"], "is too small"),
    ] {
        let said = refusal(&[&["--master", &pool.master], bad].concat());
        assert!(said.contains(part), "{bad:?}: {said}");
    }
    assert_eq!(pool.blocks(), 0);
}

#[test]
fn a_caller_that_does_not_see_the_pools_size_can_load_its_namespace() {
    let (pool, [team, operator]) = Existing::with_tokens();
    let report = pool.bench(&["--token-file", &team, "--namespace", "team"]);
    check(&report, "put");
    check(&report, "get");
    assert_eq!(report["wrong_blocks"], 0, "{report}");
    let said = refusal(&[
        "--master",
        &pool.master,
        "--token-file",
        &team,
        "--namespace",
        "team",
    ]);
    assert!(said.contains("--working-set"), "{said}");
    // It may not force removals, and waits for its leases instead.
    let left = json(&[
        "--master",
        &pool.master,
        "--token-file",
        &operator,
        "status",
    ])["blocks"]
        .clone();
    assert_eq!(left, 0);
}
