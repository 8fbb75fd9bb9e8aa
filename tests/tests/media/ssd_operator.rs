//! An operator sees the media of a pool, and retires one.

use kvpool_tests::blocks::put_all;
use kvpool_tests::daemon::path_of;
use kvpool_tests::{Cluster, Daemon, Options};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const BLOCK: usize = 1 << 20;

fn kvctl(master: &str, arguments: &[&str]) -> Output {
    Command::new(path_of("kvctl").unwrap())
        .args(arguments)
        .args(["--master", master, "--timeout", "5s"])
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The media in `kvctl status --output json`, and its problems.
fn media(cluster: &Cluster) -> anyhow::Result<(Vec<Value>, String)> {
    let output = kvctl(&cluster.master_url(), &["status", "--output", "json"]);
    anyhow::ensure!(output.status.success(), "{output:?}");
    let status: Value = serde_json::from_slice(&output.stdout)?;
    let media = status["media"].as_array().cloned().unwrap_or_default();
    Ok((media, status["wrong"].to_string()))
}

fn wait_for_state(cluster: &Cluster, state: &str, copies: u64) -> Value {
    let mut found = Value::Null;
    let what = format!("a medium that is {state}");
    let is_there = || {
        found = media(cluster)?.0.into_iter().next().unwrap_or_default();
        Ok(found["state"] == state && found["copies"].as_u64() >= Some(copies))
    };
    cluster.wait_for(&what, is_there).unwrap();
    found
}

fn pool_with_disk(file: &Path) -> Cluster {
    let options = Options {
        segment: "16MiB".into(),
        node: vec![
            "--ssd".into(),
            format!("path={},size=256MiB", file.display()),
        ],
        ..Options::default()
    };
    Cluster::start(options).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_sees_a_medium_and_retires_it_once_its_node_is_gone() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = disk.path().join("ssd");
    let mut cluster = pool_with_disk(&file);
    let master = cluster.master_url();
    wait_for_state(&cluster, "ready", 0);
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..12, BLOCK).await.unwrap();
    let medium = wait_for_state(&cluster, "ready", 1);
    assert!(
        medium["used_bytes"].as_u64() >= Some(BLOCK as u64),
        "{medium}"
    );
    assert_eq!(medium["generation"], 1);
    let id = medium["id"].as_str().unwrap();
    assert!(!media(&cluster).unwrap().1.contains(id));
    let table = text(&kvctl(&master, &["status"]).stdout);
    assert!(table.contains(id) && table.contains("ready"), "{table}");
    cluster
        .wait_for("the gauge of copies", || {
            Ok(cluster.counters()?["counters"]["media_copies"].as_u64() >= Some(1))
        })
        .unwrap();

    // The node still has the medium.
    let refused = kvctl(&master, &["ssd", "detach", id, "--yes"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused.stderr).contains("is connected"),
        "{refused:?}"
    );
    let path = file.display().to_string();
    let found = kvctl(&master, &["ssd", "inspect", &path, "--output", "json"]);
    let found: Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!(found["in_use"], true);
    assert_eq!(found["medium"]["id"], id);
    let refused = kvctl(&master, &["ssd", "verify", &path]);
    assert!(text(&refused.stderr).contains("in use"), "{refused:?}");

    cluster.nodes[0].kill().unwrap();
    wait_for_state(&cluster, "absent", 1);
    let (_, wrong) = media(&cluster).unwrap();
    assert!(wrong.contains(id) && wrong.contains("is absent"), "{wrong}");
    let doctor = text(&kvctl(&master, &["doctor"]).stdout);
    assert!(
        doctor.contains(&format!("kvctl ssd detach {id}")),
        "{doctor}"
    );
    let verified = kvctl(&master, &["ssd", "verify", &path, "--output", "json"]);
    let verified: Value = serde_json::from_slice(&verified.stdout).unwrap();
    assert!(verified["intact_extents"].as_u64() >= Some(1), "{verified}");

    let refused = kvctl(&master, &["ssd", "detach", &"0".repeat(32)]);
    assert!(
        text(&refused.stderr).contains("has no medium"),
        "{refused:?}"
    );
    let refused = kvctl(&master, &["ssd", "detach", id]);
    assert!(text(&refused.stderr).contains("--yes"), "{refused:?}");
    let done = kvctl(&master, &["ssd", "detach", id, "--yes"]);
    assert!(done.status.success(), "{done:?}");
    assert!(media(&cluster).unwrap().0.is_empty());

    // The pool has forgotten the medium for good. A node that brings it back must format it.
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    cluster.restart_node(0).unwrap();
    let fresh = wait_for_state(&cluster, "ready", 0);
    assert_ne!(fresh["id"], id);
    assert_eq!(fresh["copies"], 0);
}

/// Stops a node that has no block. It waits for no medium, and does not claim that blocks are lost.
fn stops_at_once(node: &mut Daemon) {
    let begun = Instant::now();
    assert!(node.terminate().unwrap().success());
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(8), "{took:?}");
    let log = node.log_text();
    assert!(!log.contains("without a copy are lost"), "{log}");
}

/// kvmaster starts with an empty data directory, so it leads another pool.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_sees_that_a_node_does_not_use_a_medium_of_another_pool() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = disk.path().join("ssd");
    let path = file.display().to_string();
    let mut cluster = pool_with_disk(&file);
    let own = wait_for_state(&cluster, "ready", 0);
    cluster.master.kill().unwrap();
    std::fs::remove_dir_all(cluster.data_dir()).unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(1).unwrap();

    let refused = wait_for_state(&cluster, "refused", 0);
    assert_eq!(refused["id"], own["id"]);
    assert_eq!(refused["path"], path.as_str());
    let problem = format!("node node-0 does not use {path}: it belongs to pool ");
    let (_, wrong) = media(&cluster).unwrap();
    assert!(wrong.contains(&problem), "{wrong}");
    let master = cluster.master_url();
    let status = text(&kvctl(&master, &["status"]).stdout);
    assert!(status.contains("refused"), "{status}");
    assert!(status.contains(&problem), "{status}");
    assert!(!status.contains("no problems found"), "{status}");
    let doctor = text(&kvctl(&master, &["doctor"]).stdout);
    assert!(doctor.contains(&problem), "{doctor}");
    assert!(!doctor.contains("No problems found"), "{doctor}");
    let gauge = "kvpool_master_media{state=\"refused\"} 1\n";
    let is_counted = || Ok(cluster.master.http_get("/metrics")?.contains(gauge));
    cluster.wait_for("the gauge", is_counted).unwrap();

    stops_at_once(&mut cluster.nodes[0]);
    let is_gone = || Ok(media(&cluster)?.0.is_empty());
    cluster
        .wait_for("the node has taken its report along", is_gone)
        .unwrap();
}

/// The disk was copied while its node was stopped. A second node starts with the copy.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_sees_that_a_node_does_not_use_a_copy_of_a_medium() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (file, copy) = (disk.path().join("ssd"), disk.path().join("copy"));
    let mut cluster = pool_with_disk(&file);
    wait_for_state(&cluster, "ready", 0);
    assert!(cluster.nodes[0].terminate().unwrap().success());
    std::fs::copy(&file, &copy).unwrap();
    cluster.restart_node(0).unwrap();
    cluster.wait_live(1).unwrap();
    wait_for_state(&cluster, "ready", 0);

    let ssd = format!("path={}", copy.display());
    let flags = Cluster::flags_of_node(&cluster.master_url(), "twin", &["--ssd", &ssd]);
    let mut twin = Daemon::start("kvstore-node", disk.path(), "twin", &flags).unwrap();
    let problem = format!(
        "node twin does not use {}: node node-0 has a medium with the same id",
        copy.display()
    );
    let is_told = || {
        let (media, wrong) = media(&cluster)?;
        let is_refused = |one: &Value| one["node"] == "twin" && one["state"] == "refused";
        Ok(media.iter().any(is_refused) && wrong.contains(&problem))
    };
    cluster.wait_for("the copy is refused", is_told).unwrap();
    let log = twin.log_text();
    let named = log.matches("the master refuses the medium").count();
    assert_eq!(named, 1, "{log}");
    stops_at_once(&mut twin);
    assert_eq!(wait_for_state(&cluster, "ready", 0)["node"], "node-0");
}
