//! The overview over HTTP, its events, and `kvctl top`, over real daemons.

use kvpool_tests::daemon::path_of;
use kvpool_tests::raw::connect;
use kvpool_tests::{Cluster, Options};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How far the overview may be behind the master's own view.
const BEHIND: Duration = Duration::from_secs(2);

fn overview(cluster: &Cluster) -> Value {
    let json = cluster.master.http_get("/v1/overview").unwrap();
    serde_json::from_str(&json).unwrap()
}

fn node<'v>(overview: &'v Value, name: &str) -> Option<&'v Value> {
    let nodes = overview["nodes"].as_array().unwrap();
    nodes.iter().find(|node| node["name"] == name)
}

fn has_alert(overview: &Value, kind: &str, object: &str) -> bool {
    let alerts = overview["alerts"].as_array().unwrap();
    alerts
        .iter()
        .any(|alert| alert["kind"] == kind && alert["object"] == object)
}

/// Waits until the overview is right, at most [`BEHIND`].
fn soon(cluster: &Cluster, what: &str, is_right: impl Fn(&Value) -> bool) {
    let limit = Instant::now() + BEHIND;
    loop {
        let seen = overview(cluster);
        if is_right(&seen) {
            return;
        }
        assert!(Instant::now() < limit, "{what}: {seen:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn wait_state(cluster: &Cluster, name: &str, state: Option<&str>) {
    let is_known = || {
        let states = cluster.node_states()?;
        let found = states.iter().find(|(other, _)| other == name);
        Ok(found.map(|(_, state)| state.as_str()) == state)
    };
    let what = format!("the master knows {name} as {state:?}");
    cluster.wait_for(&what, is_known).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_overview_follows_a_node_that_joins_fills_hangs_and_dies() {
    let options = Options {
        nodes: 0,
        ..Options::default()
    };
    let options = options.master(&["--suspect-after", "2s", "--drop-after", "6s"]);
    let mut cluster = Cluster::start(options).unwrap();
    assert!(has_alert(&overview(&cluster), "no_live_node", ""));
    cluster.add_node().unwrap();
    cluster.add_node().unwrap();
    cluster.wait_live(2).unwrap();
    soon(&cluster, "both nodes are live", |seen| {
        let is_live = |name| node(seen, name).is_some_and(|node| node["state"] == "live");
        is_live("node-0") && is_live("node-1") && seen["alerts"] == serde_json::json!([])
    });

    let client = cluster.client().await.unwrap();
    for n in 0..16u64 {
        let key = kvpool_tests::blocks::key(n);
        client.put(&key, vec![7; 1 << 20]).await.unwrap();
        assert!(client.get(&key).await.unwrap().is_some());
    }
    soon(&cluster, "the fill, the namespace and the rates", |seen| {
        let used = |name| node(seen, name).unwrap()["used_bytes"].as_u64().unwrap();
        let space = &seen["namespaces"][0];
        let history = seen["history"].as_array().unwrap();
        let puts: f64 = history
            .iter()
            .filter_map(|point| point["puts"].as_f64())
            .sum();
        used("node-0") + used("node-1") >= 16 << 20
            && seen["pool"]["blocks"] == 16
            && (&space["name"], &space["blocks"]) == (&"default".into(), &16.into())
            && puts >= 15.0
    });

    cluster.nodes[0].pause().unwrap();
    wait_state(&cluster, "node-0", Some("suspect"));
    soon(&cluster, "node-0 is suspect", |seen| {
        let silent = node(seen, "node-0").unwrap();
        silent["state"] == "suspect"
            && silent["silent_ms"].as_u64() >= Some(1900)
            && has_alert(seen, "node_suspect", "node-0")
    });
    cluster.nodes[0].resume().unwrap();
    wait_state(&cluster, "node-0", Some("live"));
    soon(&cluster, "node-0 is back", |seen| {
        !has_alert(seen, "node_suspect", "node-0")
    });

    cluster.nodes[1].kill().unwrap();
    wait_state(&cluster, "node-1", None);
    soon(&cluster, "node-1 is gone", |seen| {
        let is_gone = node(seen, "node-1").is_some_and(|node| node["state"] == "gone");
        is_gone && has_alert(seen, "node_gone", "node-1")
    });
    drop(client);
}

fn one_more_sample(cluster: &Cluster) {
    let before = overview(cluster)["seq"].as_u64().unwrap();
    soon(cluster, "one more sample", |seen| {
        seen["seq"].as_u64() > Some(before)
    });
}

/// A node that an operator stops in order is no problem, unless blocks were lost with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_in_order_is_gone_only_if_blocks_were_lost_with_it() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let key = kvpool_tests::blocks::key(1);
    client.put(&key, vec![7; 1 << 20]).await.unwrap();
    cluster.add_node().unwrap();
    cluster.wait_live(2).unwrap();
    one_more_sample(&cluster);
    one_more_sample(&cluster);
    cluster.nodes[1].terminate().unwrap();
    wait_state(&cluster, "node-1", None);
    one_more_sample(&cluster);
    one_more_sample(&cluster);
    let seen = overview(&cluster);
    assert!(node(&seen, "node-1").is_none(), "{seen:#}");
    assert!(!has_alert(&seen, "node_gone", "node-1"), "{seen:#}");
    cluster.nodes[0].terminate().unwrap();
    wait_state(&cluster, "node-0", None);
    soon(&cluster, "a block was lost with node-0", |seen| {
        has_alert(seen, "node_gone", "node-0")
    });
}

#[test]
fn events_come_once_a_second_and_go_on_where_a_listener_was() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let listen = |last: &str| {
        let mut stream = connect(&cluster.master.http).unwrap();
        let head = format!("GET /v1/events HTTP/1.1\r\nHost: a\r\n{last}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let lines = BufReader::new(stream).lines().map(Result::unwrap);
        lines.filter_map(|line| {
            let json = line.strip_prefix("data: ")?.to_owned();
            serde_json::from_str::<Value>(&json).ok()
        })
    };
    let begun = Instant::now();
    let mut events = listen("");
    let seen: Vec<Value> = events.by_ref().take(4).collect();
    assert!(
        begun.elapsed() > Duration::from_secs(2),
        "{:?}",
        begun.elapsed()
    );
    let numbers: Vec<u64> = seen
        .iter()
        .map(|event| event["seq"].as_u64().unwrap())
        .collect();
    assert!(numbers.is_sorted(), "{numbers:?}");
    for event in &seen[1..] {
        assert_eq!(
            event["history"].as_array().unwrap().len(),
            1,
            "only what is new"
        );
    }
    drop(events);
    let last = numbers[2];
    let again = listen(&format!("Last-Event-ID: {last}\r\n"))
        .next()
        .unwrap();
    let history = again["history"].as_array().unwrap();
    assert_eq!(history[0]["seq"].as_u64(), Some(last + 1));
}

#[test]
fn listeners_that_do_not_read_are_bounded_and_the_master_goes_on() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    let listen = || {
        let mut stream = connect(&cluster.master.http).unwrap();
        let head = b"GET /v1/events HTTP/1.1\r\nHost: a\r\n\r\n";
        stream.write_all(head).unwrap();
        stream
    };
    let mut status = String::new();
    let silent: Vec<_> = (0..64).map(|_| listen()).collect();
    // The listeners are admitted in the order of their requests, but not at once.
    std::thread::sleep(Duration::from_millis(500));
    BufReader::new(listen()).read_line(&mut status).unwrap();
    assert!(status.starts_with("HTTP/1.1 503"), "{status}");
    assert_eq!(overview(&cluster)["role"], "leader");
    let begun = Instant::now();
    assert!(cluster.master.terminate().unwrap().success());
    assert!(
        begun.elapsed() < Duration::from_secs(3),
        "listeners delay no stop"
    );
    drop(silent);
}

fn top(cluster: &Cluster, arguments: &[&str]) -> Output {
    let mut command = Command::new(path_of("kvctl").unwrap());
    command.args(["--master", &cluster.master_url(), "top"]);
    command.args(arguments).stdin(Stdio::null());
    command.output().unwrap()
}

#[test]
fn kvctl_top_shows_the_same_facts_to_programs_and_pipes() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let done = top(&cluster, &["--once", "--output", "json"]);
    let told: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(told["nodes"][0]["name"], "node-0");
    assert_eq!(told["told_by"], cluster.master_url());
    let done = top(&cluster, &["--once"]);
    let text = String::from_utf8(done.stdout).unwrap();
    assert!(
        text.contains("node-0") && text.contains("no alert"),
        "{text}"
    );
    assert!(!text.contains('\u{1b}'), "a pipe is no terminal");
    let mut live = Command::new(path_of("kvctl").unwrap());
    live.args(["--master", &cluster.master_url(), "top", "--output", "json"]);
    let mut live = live
        .stdout(Stdio::piped())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(live.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        let line = lines.next().unwrap().unwrap();
        assert!(serde_json::from_str::<Value>(&line).is_ok(), "{line}");
    }
    drop(lines);
    assert!(live.wait().unwrap().success(), "a closed pipe ends it");
}
