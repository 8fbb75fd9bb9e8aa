//! The output of kvctl to a terminal, to a program, and to a closed pipe.

use kvpool_client::{Client, TransportChoice};
use kvpool_tests::blocks::{check_all, put_all};
use kvpool_tests::daemon::path_of;
use kvpool_tests::{Cluster, Options};
use rustix::process::Signal;
use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn command(master: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(path_of("kvctl").unwrap());
    command
        .args(arguments)
        .args(["--master", master, "--timeout", "3s"])
        .env_remove("KVPOOL_MASTER")
        .stdin(Stdio::null());
    command
}

fn kvctl(master: &str, arguments: &[&str]) -> Output {
    command(master, arguments).output().unwrap()
}

/// The exit code when the reader has closed standard output, and standard error too if `both`.
fn code_when_closed(master: &str, arguments: &[&str], both: bool) -> Option<i32> {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = command(master, arguments);
    if both {
        command.stderr(writer.try_clone().unwrap());
    }
    command.stdout(writer).status().unwrap().code()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn put(master: &str, key: &str, directory: &std::path::Path) {
    let file = directory.join("block");
    std::fs::write(&file, b"bytes").unwrap();
    let done = kvctl(master, &["put", key, file.to_str().unwrap()]);
    assert!(done.status.success(), "{done:?}");
}

#[test]
fn a_pipe_that_nobody_reads_changes_no_exit_code() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let master = cluster.master_url();
    let directory = tempfile::tempdir().unwrap();
    put(&master, "there", directory.path());
    let nobody = "http://127.0.0.1:1";
    for both in [false, true] {
        let code = |master: &str, arguments: &[&str]| code_when_closed(master, arguments, both);
        for done in [
            &["ls"][..],
            &["status"],
            &["get", "there"],
            &["describe", "there"],
            &["exist", "there"],
        ] {
            assert_eq!(code(&master, done), Some(0), "{done:?}, both: {both}");
        }
        // Standard error also gets a log line, because more blocks exist than are shown.
        assert_eq!(code(&master, &["ls", "--limit", "0"]), Some(0));
        assert_eq!(code(&master, &["get", "missing"]), Some(3));
        assert_eq!(code(&master, &["exist", "missing"]), Some(3));
        assert_eq!(code(nobody, &["status"]), Some(4));
        assert_eq!(code(&master, &["no-such-command"]), Some(2));
        assert_eq!(code(&master, &["--help"]), Some(0));
    }
}

#[test]
fn what_a_key_holds_does_nothing_to_a_terminal() {
    // A colour, a line end that forges a row, the escape of C1, a delete, and a change of text
    // direction.
    let key = "a\u{1b}[31mred\n│ forged │\u{9b}2J\u{7f}\u{202e}txt.exe";
    let cluster = Cluster::start(Options::default()).unwrap();
    let master = cluster.master_url();
    let directory = tempfile::tempdir().unwrap();
    put(&master, key, directory.path());
    for arguments in [&["ls"][..], &["exist", key], &["describe", key]] {
        let output = kvctl(&master, arguments);
        let shown = text(&output.stdout);
        assert_harmless(&shown);
        assert!(shown.contains(r"a\u{1b}[31mred\n│ forged │"), "{shown}");
        let json = [arguments, &["--output", "json"]].concat();
        let shown = text(&kvctl(&master, &json).stdout);
        assert_harmless(&shown);
        let value: Value = serde_json::from_str(&shown).unwrap();
        let found = value.get(0).unwrap_or(&value);
        assert_eq!(found["key"], key, "{shown}");
    }
    let missing = format!("{key} missing");
    for command in ["get", "describe", "exist", "rm"] {
        let output = kvctl(&master, &[command, &missing]);
        assert_eq!(output.status.code(), Some(3), "{command}");
        assert_harmless(&text(&output.stdout));
        assert_harmless(&text(&output.stderr));
    }
}

/// Line ends separate rows. Nothing else moves the cursor, changes a colour or reverses the text.
fn assert_harmless(shown: &str) {
    let harmful =
        |c: &char| (c.is_control() && *c != '\n') || ('\u{202a}'..='\u{202e}').contains(c);
    assert_eq!(shown.chars().find(harmful), None, "{shown:?}");
}

#[test]
fn a_program_is_told_that_a_key_is_missing() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let master = cluster.master_url();
    let directory = tempfile::tempdir().unwrap();
    put(&master, "there", directory.path());
    for command in ["get", "describe"] {
        let output = kvctl(&master, &[command, "missing", "--output", "json"]);
        assert_eq!(output.status.code(), Some(3), "{command}");
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(
            (&told["key"], &told["present"]),
            (&"missing".into(), &false.into())
        );
    }
    let copy = directory.path().join("copy");
    let to = [
        "get",
        "there",
        "--output",
        "json",
        "-o",
        copy.to_str().unwrap(),
    ];
    let told: Value = serde_json::from_slice(&kvctl(&master, &to).stdout).unwrap();
    assert_eq!(told["present"], true);
    assert_eq!(told["length"], 5);
    assert_eq!(std::fs::read(&copy).unwrap(), b"bytes");
    // Without a file, the output is exactly the bytes.
    let bytes = kvctl(&master, &["get", "there", "--output", "json"]);
    assert_eq!(bytes.stdout, b"bytes");
    let described = kvctl(&master, &["describe", "there", "--output", "json"]);
    let described: Value = serde_json::from_slice(&described.stdout).unwrap();
    assert_eq!(described["present"], true);
}

#[test]
fn a_master_is_named_with_or_without_its_scheme_and_a_wrong_name_is_a_wrong_command_line() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let address = cluster.master_url().replace("http://", "");
    let found = kvctl(&address, &["ls"]);
    assert!(found.status.success(), "{found:?}");
    let both = format!("127.0.0.1:1,{address}");
    let found = kvctl(&both, &["ls"]);
    assert!(found.status.success(), "{found:?}");
    for wrong in [
        "https://127.0.0.1:7070",
        "127.0.0.1",
        "http://127.0.0.1",
        "http://127.0.0.1:70700",
        ":7070",
        "a b:7070",
        "",
        "etcd://127.0.0.1:2379",
    ] {
        let refused = kvctl(wrong, &["ls"]);
        assert_eq!(refused.status.code(), Some(2), "{wrong}: {refused:?}");
        let said = text(&refused.stderr);
        assert!(
            said.contains("HOST:PORT") || said.contains("host:port") || said.contains("--tls-ca"),
            "{said}"
        );
    }
}

#[test]
fn a_variable_that_cannot_be_used_fails_only_where_its_flag_is_absent() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let master = cluster.master_url();
    let named = command(&master, &["ls"])
        .env("KVPOOL_MASTER", "zz")
        .env("KVPOOL_TOKEN_FILE", "")
        .env("KVPOOL_TLS_CA", "")
        .output()
        .unwrap();
    assert!(named.status.success(), "{named:?}");
    // An empty namespace would mean the default one, also to `rm --all`.
    let everywhere = |arguments: &[&str]| {
        command(&master, arguments)
            .env("KVPOOL_NAMESPACE", "")
            .output()
            .unwrap()
    };
    let refused = everywhere(&["rm", "--all", "--force"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let said = text(&refused.stderr);
    let expected = "the environment variable KVPOOL_NAMESPACE cannot be used: it is empty";
    assert!(said.contains(expected), "{said}");
    let named = everywhere(&["--namespace", "default", "ls"]);
    assert!(named.status.success(), "{named:?}");
    let refused = Command::new(path_of("kvctl").unwrap())
        .arg("ls")
        .env("KVPOOL_MASTER", "zz")
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let said = text(&refused.stderr);
    let expected = "the environment variable KVPOOL_MASTER cannot be used";
    assert!(
        said.contains(expected) && said.contains("HOST:PORT"),
        "{said}"
    );
}

#[test]
fn the_http_port_says_that_it_is_not_where_the_pool_is_served() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let http = format!("http://{}", cluster.master.http);
    let refused = kvctl(&http, &["status"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let said = text(&refused.stderr);
    assert!(said.contains("HTTP port"), "{said}");
    let address = cluster.master_url().replace("http://", "");
    assert!(
        said.contains(&address),
        "names the port that serves: {said}"
    );
    assert!(!said.contains("version_mismatch"), "{said}");
    // A node's HTTP port is not a master's port either.
    let node = format!("http://{}", cluster.nodes[0].http);
    let said = text(&kvctl(&node, &["status"]).stderr);
    assert!(said.contains("HTTP port"), "{said}");
}

#[test]
fn a_put_into_a_pool_without_nodes_says_so() {
    let cluster = Cluster::start(Options {
        nodes: 0,
        ..Options::default()
    })
    .unwrap();
    let master = cluster.master_url();
    let file = path_of("kvctl").unwrap();
    let refused = kvctl(&master, &["put", "a", file.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    let said = text(&refused.stderr);
    assert!(said.contains("no store node is connected"), "{said}");
    assert!(said.contains("kvstore-node"), "what to do: {said}");
    let status = kvctl(&master, &["status"]);
    let shown = text(&status.stdout);
    assert!(shown.contains("no store node is connected"), "{shown}");
}

#[test]
fn status_shows_rates_and_what_is_wrong_and_all_counters_only_when_asked() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let master = cluster.master_url();
    let directory = tempfile::tempdir().unwrap();
    put(&master, "there", directory.path());
    assert!(kvctl(&master, &["get", "there"]).status.success());
    assert_eq!(kvctl(&master, &["get", "missing"]).status.code(), Some(3));

    let short = text(&kvctl(&master, &["status", "--over", "100ms"]).stdout);
    for part in ["hit rate", "puts", "evicted", "no problems found"] {
        assert!(short.contains(part), "{part} in\n{short}");
    }
    assert!(!short.contains("store_in_use_bytes"), "{short}");
    let all = text(&kvctl(&master, &["status", "--all", "--over", "0s"]).stdout);
    assert!(all.contains("store_in_use_bytes"), "{all}");
    let json = kvctl(&master, &["status", "--output", "json"]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert!(json["counters"]["store_in_use_bytes"].is_u64(), "{json}");
    assert_eq!(json["wrong"], Value::Array(Vec::new()));
    assert!(json["hit_rate_percent"]["lookups"].is_number(), "{json}");
    assert_eq!(json["nodes"][0]["version"], env!("CARGO_PKG_VERSION"));
    assert!(short.contains(env!("CARGO_PKG_VERSION")), "{short}");

    cluster.nodes[0].pause().unwrap();
    cluster
        .wait_for("a node that is avoided", || {
            let states = cluster.node_states()?;
            Ok(states.iter().any(|(_, state)| state == "suspect"))
        })
        .unwrap();
    let shown = text(&kvctl(&master, &["status", "--over", "0s"]).stdout);
    assert!(shown.contains("node-0 is suspect"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_the_faults_of_the_last_minutes_as_reports() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let options = kvpool_client::Options {
        transport: TransportChoice::Tcp,
        ..cluster.client_options()
    };
    let client = Client::connect(options).await.unwrap();
    put_all(&client, 0..4, 4096).await.unwrap();
    cluster.nodes[0].signal(Signal::KILL).unwrap();
    let limit = Instant::now() + Duration::from_secs(20);
    let told = loop {
        // Each failed get reports the replica, until the node is suspect.
        check_all(&client, 0..4, 4096).await;
        let status = kvctl(&cluster.master_url(), &["status", "--over", "0s"]);
        let shown = text(&status.stdout);
        if let Some(told) = shown
            .lines()
            .find(|line| line.starts_with("in the last minutes "))
        {
            break told.to_owned();
        }
        assert!(Instant::now() < limit, "{shown}");
    };
    assert!(told.contains("could not reach"), "{told}");
}
