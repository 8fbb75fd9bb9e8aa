//! The report of `kvctl doctor` about a healthy pool, about a pool with a dead node, and without a
//! pool.

use kvpool_tests::daemon::path_of;
use kvpool_tests::guard::Tokens;
use kvpool_tests::{Cluster, Daemon, Options};
use rustix::process::Signal;
use serde_json::Value;
use std::process::{Command, Output};

fn doctor(arguments: &[&str]) -> Output {
    Command::new(path_of("kvctl").unwrap())
        .arg("doctor")
        .args(["--timeout", "2s"])
        .args(arguments)
        .env_remove("KVPOOL_MASTER")
        .output()
        .unwrap()
}

/// The exit code and the report, which is printed whatever the exit code is.
fn report(master: &str, arguments: &[&str]) -> (Option<i32>, Value) {
    let json = ["--master", master, "--output", "json"];
    let output = doctor(&[&json, arguments].concat());
    let report = serde_json::from_slice(&output.stdout);
    let report = report.unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output.status.code(), report)
}

/// Whether the transport to a node works, and the report about it.
fn way<'a>(report: &'a Value, node: &str, transport: &str) -> (bool, &'a str) {
    let named = |list: &'a Value, key: &str, name: &str| {
        let list = list.as_array().unwrap().iter();
        let mut list = list.filter(move |item| item[key] == name);
        list.next().unwrap_or_else(|| panic!("no {name}: {report}"))
    };
    let node = named(&report["pool"]["nodes"], "name", node);
    let way = named(&node["ways"], "transport", transport);
    let works = way["works"].as_bool().unwrap();
    (works, way["reason"].as_str().unwrap())
}

fn findings(report: &Value) -> String {
    report["findings"].to_string()
}

#[test]
fn a_healthy_pool_is_reached_by_every_way_that_there_is_and_the_others_say_why_not() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let master = cluster.master_url();
    let (code, told) = report(&master, &[]);
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(told["pool"]["leader"], master.as_str());
    let (works, reason) = way(&told, "node-0", "shm");
    let socket = cluster.node_socket(0).display().to_string();
    assert!(works && reason.contains(&socket), "{reason}");
    let (works, reason) = way(&told, "node-0", "tcp");
    assert!(works, "{reason}");
    let node = &told["pool"]["nodes"][0];
    let tcp = node["ways"].as_array().unwrap().last().unwrap();
    assert!(tcp["round_trip_micros"].as_f64().unwrap() > 0.0, "{tcp}");
    assert_eq!(
        (&node["way"], &node["same_host"]),
        (&"shm".into(), &true.into())
    );
    // RDMA works, or host and node name the same reason for its absence.
    let (works, said) = way(&told, "node-0", "rdma");
    match told["host"]["rdma"]["reason"].as_str() {
        Some(reason) => {
            assert!(!works && said.contains(reason), "{said}");
            let (code, told) = report(&master, &["--transport", "rdma"]);
            assert_eq!(code, Some(1), "{told}");
            assert!(findings(&told).contains(reason), "{told}");
            let text = doctor(&["--master", &master]).stdout;
            let text = String::from_utf8(text).unwrap();
            assert!(text.contains(reason) && text.contains("taken"), "{text}");
        }
        None => assert!(works, "{said}"),
    }
}

#[test]
fn a_node_that_serves_no_shared_memory_is_reached_otherwise() {
    let options = Options {
        node: vec!["--no-rdma".to_owned()],
        ..Options::default()
    };
    let cluster = Cluster::start(options).unwrap();
    std::fs::rename(
        cluster.node_socket(0),
        cluster.directory().join("elsewhere.sock"),
    )
    .unwrap();
    let (code, told) = report(&cluster.master_url(), &[]);
    assert_eq!(code, Some(0), "{told}");
    let (works, reason) = way(&told, "node-0", "shm");
    assert!(!works && reason.contains("node-0.sock"), "{reason}");
    assert!(!way(&told, "node-0", "rdma").0, "the node has it off");
    assert_eq!(told["pool"]["nodes"][0]["way"], "tcp");
    let (code, told) = report(&cluster.master_url(), &["--transport", "shm"]);
    assert_eq!(code, Some(4), "only shared memory was asked for: {told}");
}

#[test]
fn a_dead_node_is_named_with_what_each_way_says() {
    let options = Options {
        nodes: 2,
        ..Options::default()
    };
    let cluster = Cluster::start(options).unwrap();
    cluster.nodes[1].signal(Signal::KILL).unwrap();
    let (code, told) = report(&cluster.master_url(), &[]);
    assert!(way(&told, "node-0", "tcp").0, "{told}");
    for transport in ["shm", "rdma", "tcp"] {
        let (works, reason) = way(&told, "node-1", transport);
        assert!(!works && !reason.is_empty(), "{told}");
    }
    let text = findings(&told);
    assert!(text.contains("node node-1 cannot be reached"), "{text}");
    assert!(!text.contains("node node-0"), "{text}");
    // The master still shows the node as live for a while.
    let nodes = told["pool"]["nodes"].as_array().unwrap();
    let dead = nodes.iter().find(|node| node["name"] == "node-1").unwrap();
    let expected = if dead["state"] == "live" { 4 } else { 0 };
    assert_eq!(code, Some(expected), "{told}");
}

#[test]
fn a_pool_that_is_not_there_is_a_finding_and_an_exit_code_when_it_was_named() {
    let nobody = "http://127.0.0.1:1";
    let (code, told) = report(nobody, &[]);
    assert_eq!(code, Some(4), "{told}");
    assert!(findings(&told).contains("127.0.0.1:1"), "{told}");
    assert!(told["host"]["cores"].as_u64().unwrap() > 0, "{told}");
    let text = doctor(&["--master", nobody]);
    let table = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(
        table.contains("this host") && table.contains("fails: "),
        "{table}"
    );
}

/// A node without the token flags serves its blocks to any caller, and only this report names it.
#[test]
fn a_node_that_takes_callers_without_a_token_is_named() {
    let tokens = Tokens::new().unwrap();
    let cluster = Cluster::start(Options {
        nodes: 1,
        master: tokens.flags(),
        node: tokens.node_flags(),
        ..Options::default()
    })
    .unwrap();
    let own = tokens.file("node").display().to_string();
    let (master, root) = (
        cluster.master_url(),
        tokens.file("root").display().to_string(),
    );
    let open = Cluster::flags_of_node(&master, "open-node", &["--token-file", &own]);
    let open = Daemon::start("kvstore-node", cluster.directory(), "open-node", &open).unwrap();
    let (code, told) = report(&master, &["--token-file", &root]);
    assert_eq!(code, Some(0), "{told}");
    let found = findings(&told);
    assert!(
        found.contains("node open-node takes callers without a token"),
        "{found}"
    );
    assert!(
        !found.contains("node-0") && !found.contains("the pool takes"),
        "{found}"
    );
    drop(open);
}

/// The role that `kvctl doctor` itself recommends.
#[test]
fn an_operator_is_told_that_its_token_opens_no_data_port() {
    let tokens = Tokens::new().unwrap();
    tokens.write("operator", 3600).unwrap();
    let cluster = Cluster::start(Options {
        nodes: 1,
        master: tokens.flags(),
        node: tokens.node_flags(),
        ..Options::default()
    })
    .unwrap();
    let operator = tokens.file("operator").display().to_string();
    let (code, told) = report(&cluster.master_url(), &["--token-file", &operator]);
    assert_eq!(code, Some(0), "{told}");
    let found = findings(&told);
    let expected = "this token may not use the data port of node node-0";
    assert!(found.contains(expected), "{found}");
    assert!(!found.contains("cannot be reached"), "{found}");
}

#[test]
fn masters_of_two_pools_are_named_with_the_pool_of_each() {
    let (a, b) = (
        Cluster::start(Options::default()).unwrap(),
        Cluster::start(Options::default()).unwrap(),
    );
    let (a, b) = (a.master_url(), b.master_url());
    let (code, told) = report(&format!("{a},{b}"), &[]);
    assert_eq!(code, Some(1), "{told}");
    let found = findings(&told);
    assert!(
        found.contains("the named masters are of several pools"),
        "{found}"
    );
    for master in [&a, &b] {
        assert!(found.contains(&format!("{master} is of ")), "{found}");
    }
    let (code, told) = report(&format!("{a},{a}"), &[]);
    assert_eq!(code, Some(0), "{told}");
}

/// Without tokens the pool would also answer these commands without the files.
#[test]
fn a_named_file_that_cannot_be_used_fails_every_command_that_asks_a_master() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let missing = cluster.directory().join("missing").display().to_string();
    let empty = cluster.directory().join("empty").display().to_string();
    std::fs::write(&empty, "\n").unwrap();
    let commands: [&[&str]; 4] = [&["doctor"], &["top", "--once"], &["cluster"], &["status"]];
    for command in commands {
        let fails = |flag: &str, file: &str, code: i32| {
            let output = Command::new(path_of("kvctl").unwrap())
                .args(command)
                .args(["--master", &cluster.master_url(), flag, file])
                .output()
                .unwrap();
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(code), "{command:?}: {output:?}");
            assert_eq!(why.matches(file).count(), 1, "{command:?}: {why}");
        };
        fails("--token-file", &missing, 1);
        fails("--token-file", &empty, 1);
        fails("--tls-ca", &missing, 2);
    }
}
