//! `docs/operations/metrics.md` and the daemons name the same metrics.

use kvpool_tests::{Cluster, Daemon, Options};
use std::collections::BTreeSet;
use std::io::{Read, Write};

const DOCUMENT: &str = include_str!("../../../docs/operations/metrics.md");

/// The names in the first column of the table under the heading with `prefix`. The names include
/// the prefix.
fn documented(prefix: &str) -> BTreeSet<String> {
    let heading = format!("(`{prefix}`)");
    let section = DOCUMENT.split("\n### ").find(|section| {
        let title = section.lines().next();
        title.is_some_and(|title| title.contains(&heading))
    });
    let rows = section
        .unwrap()
        .lines()
        .filter(|line| line.starts_with("| `"));
    rows.flat_map(|row| row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2))
        .map(|name| format!("{prefix}{name}"))
        .collect()
}

fn exported(daemon: &Daemon) -> BTreeSet<String> {
    let mut socket = std::net::TcpStream::connect(&daemon.http).unwrap();
    let request = "GET /metrics HTTP/1.1\r\nHost: kvpool\r\nConnection: close\r\n\r\n";
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    let kinds = answer
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "));
    kinds
        .map(|kind| kind.split(' ').next().unwrap().to_owned())
        .collect()
}

#[test]
fn every_metric_has_its_row_and_every_row_its_metric() {
    let cluster = Cluster::start(Options::default()).unwrap();
    // It has a value for each known node.
    let counts = || {
        let page = cluster.master.http_get("/metrics")?;
        Ok(page.contains("kvpool_master_node_left_blocks{node=\"node-0\"} 0\n"))
    };
    cluster.wait_for("the node's value", counts).unwrap();
    assert_eq!(exported(&cluster.master), documented("kvpool_master_"));
    assert_eq!(exported(&cluster.nodes[0]), documented("kvpool_node_"));
}

#[test]
fn a_master_that_is_ready_says_at_once_that_it_leads() {
    for _ in 0..5 {
        let cluster = Cluster::start(Options::default()).unwrap();
        let is_ready = || Ok(cluster.master.http_get("/readyz").is_ok());
        cluster
            .wait_for("the master's readiness", is_ready)
            .unwrap();
        assert_eq!(cluster.master.metric("kvpool_master_leads").unwrap(), 1.0);
    }
}
