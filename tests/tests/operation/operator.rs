//! The commands of operators, and the exit codes that scripts use.

use kvpool_tests::blocks::put_all;
use kvpool_tests::daemon::path_of;
use kvpool_tests::{Cluster, Options};
use kvpool_types::{Code, NamespaceSettings, Setting};
use rustix::process::{Pid, Signal, kill_process};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

fn kvctl(master: &str, arguments: &[&str]) -> Output {
    Command::new(path_of("kvctl").unwrap())
        .args(arguments)
        .args(["--master", master, "--timeout", "2s"])
        .output()
        .unwrap()
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn a_file_goes_into_the_pool_and_comes_back() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let master = cluster.master_url();
    let directory = tempfile::tempdir().unwrap();
    let (file, copy) = (directory.path().join("in"), directory.path().join("out"));
    let bytes: Vec<u8> = (0..200_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(&file, &bytes).unwrap();
    let (file, copy) = (file.display().to_string(), copy.display().to_string());

    stdout(&kvctl(&master, &["put", "a/greeting", &file]));
    let listed: serde_json::Value =
        serde_json::from_str(&stdout(&kvctl(&master, &["ls", "--output", "json"]))).unwrap();
    assert!(listed.to_string().contains("a/greeting"), "{listed}");
    stdout(&kvctl(&master, &["describe", "a/greeting"]));
    stdout(&kvctl(&master, &["status"]));
    stdout(&kvctl(&master, &["get", "a/greeting", "-o", &copy]));
    assert_eq!(std::fs::read(&copy).unwrap(), bytes);
    stdout(&kvctl(&master, &["rm", "a/greeting", "--force"]));
    assert_eq!(
        code(&kvctl(&master, &["get", "a/greeting", "-o", &copy])),
        Some(3)
    );
}

#[test]
fn exit_codes_tell_what_happened() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let master = cluster.master_url();
    assert_eq!(code(&kvctl(&master, &["exist", "nothing"])), Some(3));
    assert_eq!(code(&kvctl(&master, &["no-such-command"])), Some(2));
    let nobody = kvctl("http://127.0.0.1:1", &["status"]);
    assert_eq!(code(&nobody), Some(4), "{nobody:?}");
    let text = String::from_utf8_lossy(&nobody.stderr).into_owned();
    assert!(text.contains("127.0.0.1:1"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn arguments_that_say_nothing_or_contradict_each_other_are_refused() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let master = cluster.master_url();
    let refused = |arguments: &[&str]| {
        let output = kvctl(&master, arguments);
        assert_eq!(code(&output), Some(2), "{arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let none = refused(&["put", "a", "Cargo.toml", "--replicas", "0"]);
    assert!(none.contains("--replicas"), "{none}");
    for size in ["99999EiB", "0.1B"] {
        let refused = refused(&["namespace", "create", "sized", "--memory-hard", size]);
        assert!(refused.contains(&format!("{size:?} is ")), "{refused}");
    }
    let unnamed = refused(&["namespace", "create", ""]);
    assert!(unnamed.contains("the name is empty"), "{unnamed}");
    // The master reads an empty name as any node.
    let unnamed = refused(&["replica", "move", "a", "--from", ""]);
    assert!(unnamed.contains("--from"), "{unnamed}");

    stdout(&kvctl(&master, &["namespace", "create", "team-a"]));
    let change = ["namespace", "change", "team-a", "--priority", "3"];
    let both = refused(&[&change[..], &["--clear", "priority"]].concat());
    let expected = "priority is set and cleared at once";
    assert!(both.contains(expected), "{both}");
    // Other clients get the same refusal from the master.
    let client = cluster.client().await.unwrap();
    let set = NamespaceSettings::default().with(Setting::Priority, 3);
    let clear = [Setting::Priority];
    let both = client.change_namespace("team-a", &set, &clear).await;
    let both = both.unwrap_err();
    assert_eq!(both.code, Code::InvalidArgument);
    assert!(both.to_string().contains(expected), "{both}");
    let kept = client.namespace("team-a").await.unwrap();
    assert_eq!(kept.settings, NamespaceSettings::default());
}

#[test]
fn guaranteed_shares_beyond_the_pool_are_told_wherever_an_operator_looks() {
    let options = Options {
        segment: "8MiB".into(),
        ..Options::default()
    };
    let cluster = Cluster::start(options).unwrap();
    let master = cluster.master_url();
    let warns = |output: &Output| {
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(
            text.contains("the guaranteed shares of namespaces are"),
            "{text}"
        );
    };
    let create = ["namespace", "create", "large"];
    let created = kvctl(&master, &[&create[..], &["--guaranteed", "1GiB"]].concat());
    stdout(&created);
    warns(&created);
    let change = ["namespace", "change", "large"];
    let changed = kvctl(&master, &[&change[..], &["--guaranteed", "2GiB"]].concat());
    stdout(&changed);
    warns(&changed);
    warns(&kvctl(&master, &["status"]));
    warns(&kvctl(&master, &["doctor"]));

    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("in");
    std::fs::write(&file, vec![1u8; 1 << 20]).unwrap();
    let file = file.display().to_string();
    let mut puts = (0..64).map(|number| {
        let key = format!("block-{number}");
        kvctl(&master, &["put", &key, &file, "--namespace", "large"])
    });
    let refused = puts.find(|put| !put.status.success());
    warns(&refused.expect("the pool is full of a share"));
    let fits = kvctl(&master, &[&change[..], &["--guaranteed", "1MiB"]].concat());
    assert!(!stdout(&fits).contains("warning"), "{fits:?}");
}

fn drain(master: &str, node: &str, time: &str) -> Output {
    Command::new(path_of("kvctl").unwrap())
        .args(["node", "drain", node, "--timeout", time])
        .args(["--master", master, "--output", "json"])
        .output()
        .unwrap()
}

/// A script that stops the node after the command must not lose blocks.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_whose_time_is_over_fails_while_blocks_are_left() {
    let options = Options::default().master(&["--suspect-after", "30s"]);
    let mut cluster = Cluster::start(options).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..8, 1 << 20).await.unwrap();
    cluster.add_node().unwrap();
    cluster.wait_live(2).unwrap();
    // The only node that could take the blocks is stopped.
    cluster.nodes[1].pause().unwrap();
    let late = drain(&cluster.master_url(), "node-0", "1s");
    // The time is shorter than a call.
    let short = drain(&cluster.master_url(), "node-0", "3ms");
    assert_eq!(code(&short), Some(1), "{short:?}");
    let told: serde_json::Value = serde_json::from_slice(&short.stdout).unwrap();
    assert_eq!(
        (&told["moved"], &told["state"]),
        (&0.into(), &"draining".into())
    );
    cluster.nodes[1].signal(Signal::CONT).unwrap();
    assert_eq!(code(&late), Some(1), "{late:?}");
    let told: serde_json::Value = serde_json::from_slice(&late.stdout).unwrap();
    assert_eq!((&told["moved"], &told["left"]), (&0.into(), &8.into()));
    let why = String::from_utf8_lossy(&late.stderr).into_owned();
    let expected = "8 blocks would be lost with node node-0";
    assert!(why.contains(expected), "{why}");

    let whole = drain(&cluster.master_url(), "node-0", "1m");
    let told: serde_json::Value = serde_json::from_str(&stdout(&whole)).unwrap();
    assert_eq!(told["left"], 0, "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_is_not_waited_for_goes_on() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..8, 1 << 20).await.unwrap();
    cluster.add_node().unwrap();
    cluster.wait_live(2).unwrap();
    let begun = drain(&cluster.master_url(), "node-0", "0s");
    let told: serde_json::Value = serde_json::from_slice(&begun.stdout).unwrap();
    assert_eq!(told["node"], "node-0", "{begun:?}");
    let drained = ("node-0".to_owned(), "drained".to_owned());
    cluster
        .wait_for("node-0 is drained", || {
            Ok(cluster.node_states()?.contains(&drained))
        })
        .unwrap();
}

/// The time is over before the task gives up a block.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_whose_blocks_no_node_takes_names_this_reason() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..2, 1 << 20).await.unwrap();
    let forced = Command::new(path_of("kvctl").unwrap())
        .args(["node", "drain", "node-0", "--force", "--timeout", "1s"])
        .args(["--master", &cluster.master_url()])
        .output()
        .unwrap();
    assert_eq!(code(&forced), Some(1), "{forced:?}");
    let text = String::from_utf8_lossy(&forced.stdout).into_owned();
    assert!(text.contains("no other node takes replicas now"), "{text}");
}

/// Whoever takes the message for a cancelled drain looks for the operator who cancelled it.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_whose_node_restarts_says_so() {
    let options = Options::default().master(&["--suspect-after", "30s"]);
    let mut cluster = Cluster::start(options).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..8, 1 << 20).await.unwrap();
    cluster.add_node().unwrap();
    cluster.wait_live(2).unwrap();
    // The only node that could take the blocks answers nothing.
    cluster.nodes[1].pause().unwrap();
    let drains = begin_drain(&cluster, "1m");
    wait_for_state(&cluster, "draining");
    // The command has seen the incarnation that drains.
    tokio::time::sleep(Duration::from_secs(1)).await;
    cluster.nodes[0].kill().unwrap();
    cluster.restart_node(0).unwrap();
    let ended = drains.wait_with_output().unwrap();
    cluster.nodes[1].signal(Signal::CONT).unwrap();
    assert_eq!(code(&ended), Some(1), "{ended:?}");
    let why = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(why.contains("node node-0 has restarted"), "{why}");
}

/// The blocks move slowly, so that the silence falls into the drain.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_outlasts_a_short_silence_of_its_node() {
    let flags = ["--suspect-after", "2s", "--drop-after", "5m"];
    let slow = ["--replica-bandwidth", "1MiB"];
    let options = Options::default().master(&[&flags[..], &slow].concat());
    let mut cluster = Cluster::start(options).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..8, 1 << 20).await.unwrap();
    cluster.add_node().unwrap();
    cluster.wait_live(2).unwrap();
    let drains = begin_drain(&cluster, "3m");
    wait_for_state(&cluster, "draining");
    tokio::time::sleep(Duration::from_secs(1)).await;
    cluster.nodes[0].pause().unwrap();
    wait_for_state(&cluster, "suspect");
    tokio::time::sleep(Duration::from_secs(3)).await;
    cluster.nodes[0].resume().unwrap();
    let ended = drains.wait_with_output().unwrap();
    assert_eq!(code(&ended), Some(0), "{ended:?}");
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(told.contains("node node-0 is suspect"), "{told}");
    assert!(told.contains("hears node node-0 again"), "{told}");
}

/// The next leader learns from the node alone that it drains.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_goes_on_under_a_leader_that_has_to_hear_the_node_first() {
    let options = Options::default().master(&["--suspect-after", "30s"]);
    let mut cluster = Cluster::start(options).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..8, 1 << 20).await.unwrap();
    cluster.add_node().unwrap();
    cluster.wait_live(2).unwrap();
    // The only node that could take the blocks answers nothing.
    cluster.nodes[1].pause().unwrap();
    let drains = begin_drain(&cluster, "1m");
    wait_for_state(&cluster, "draining");
    tokio::time::sleep(Duration::from_secs(1)).await;
    cluster.nodes[0].pause().unwrap();
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    cluster.nodes[0].resume().unwrap();
    cluster.nodes[1].resume().unwrap();
    let ended = drains.wait_with_output().unwrap();
    assert_eq!(code(&ended), Some(0), "{ended:?}");
}

/// Begins to drain node 0.
fn begin_drain(cluster: &Cluster, time: &str) -> Child {
    Command::new(path_of("kvctl").unwrap())
        .args(["node", "drain", "node-0", "--timeout", time])
        .args(["--master", &cluster.master_url()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until node 0 has this state.
fn wait_for_state(cluster: &Cluster, wanted: &str) {
    let wanted = ("node-0".to_owned(), wanted.to_owned());
    cluster
        .wait_for("node-0 changes its state", || {
            Ok(cluster.node_states()?.contains(&wanted))
        })
        .unwrap();
}

/// The operator learns at once that the drain cannot begin, and the drain is not forgotten.
#[test]
fn a_drain_of_a_node_that_is_not_heard_says_so_and_begins_when_it_is_back() {
    let options = Options::default().master(&["--suspect-after", "2s", "--drop-after", "5m"]);
    let mut cluster = Cluster::start(options).unwrap();
    cluster.add_node().unwrap();
    cluster.wait_live(2).unwrap();
    let state = |cluster: &Cluster, wanted: &str| {
        let wanted = ("node-1".to_owned(), wanted.to_owned());
        cluster
            .wait_for("node-1 changes its state", || {
                Ok(cluster.node_states()?.contains(&wanted))
            })
            .unwrap();
    };
    cluster.nodes[1].pause().unwrap();
    state(&cluster, "suspect");
    let refused = drain(&cluster.master_url(), "node-1", "1m");
    assert_eq!(code(&refused), Some(1), "{refused:?}");
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        why.contains("node node-1 is suspect: the master does not hear it"),
        "{why}"
    );
    cluster.nodes[1].resume().unwrap();
    state(&cluster, "drained");
}

/// The drain does not return in another term, and a command that waits for it learns that it was
/// cancelled.
#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_is_cancelled_ends_for_whoever_waits_for_it_and_for_good() {
    let options = Options::default().master(&["--suspect-after", "30s"]);
    let mut cluster = Cluster::start(options).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..8, 1 << 20).await.unwrap();
    cluster.add_node().unwrap();
    cluster.wait_live(2).unwrap();
    // The only node that could take the blocks is stopped.
    cluster.nodes[1].pause().unwrap();
    let started = |arguments: &[&str]| {
        Command::new(path_of("kvctl").unwrap())
            .args(arguments)
            .args(["--master", &cluster.master_url()])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let drains = started(&["node", "drain", "node-0", "--timeout", "1m"]);
    let state = |wanted: &str| {
        let wanted = ("node-0".to_owned(), wanted.to_owned());
        cluster
            .wait_for("node-0 changes its state", || {
                Ok(cluster.node_states()?.contains(&wanted))
            })
            .unwrap();
    };
    state("draining");
    let waits = started(&["node", "wait", "--settle", "1s", "--timeout", "1m"]);
    // By now the wait has seen the node drain.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let master = cluster.master_url();
    let undrain = ["node", "undrain", "node-0", "--output", "json"];
    let told = stdout(&kvctl(&master, &undrain));
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["drained"], true, "{told}");
    state("live");
    for ended in [drains, waits] {
        let ended = ended.wait_with_output().unwrap();
        assert_eq!(code(&ended), Some(1), "{ended:?}");
        let why = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(
            why.contains("drain") && why.contains("was cancelled"),
            "{why}"
        );
        let text = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert!(!text.contains("can be stopped"), "{text}");
    }
    cluster.nodes[1].signal(Signal::CONT).unwrap();
    cluster.master.kill().unwrap();
    cluster.restart_master().unwrap();
    cluster.wait_live(2).unwrap();
    // The node reports in its session whether it drains, a moment after it is live.
    tokio::time::sleep(Duration::from_secs(1)).await;
    cluster.wait_live(2).unwrap();
    let master = cluster.master_url();
    let again = stdout(&kvctl(&master, &["node", "undrain", "node-0"]));
    assert!(again.contains("does not drain"), "{again}");
    let client = cluster.client().await.unwrap();
    put_all(&client, 8..12, 1 << 20).await.unwrap();

    // A drained node can be taken back too. The command succeeds only when the node is drained.
    let whole = stdout(&drain(&master, "node-0", "1m"));
    let told: serde_json::Value = serde_json::from_str(&whole).unwrap();
    assert_eq!(
        (&told["state"], &told["left"]),
        (&"drained".into(), &0.into())
    );
    assert_eq!(told["on_ssd"], 0, "{told}");
    let drained = ("node-0".to_owned(), "drained".to_owned());
    assert!(cluster.node_states().unwrap().contains(&drained));
    let told = stdout(&kvctl(&master, &["node", "undrain", "node-0"]));
    assert!(told.contains("takes new blocks again"), "{told}");
    cluster.wait_live(2).unwrap();
    let unknown = kvctl(&master, &["node", "undrain", "node-9"]);
    assert_ne!(code(&unknown), Some(0), "{unknown:?}");
}

#[test]
fn a_kvmaster_that_still_waits_for_etcd_ends_when_it_is_told_to() {
    // Accepts connections and sends nothing. At its start kvmaster waits 10 s for an answer.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let etcd = format!("http://{}", silent.local_addr().unwrap());
    let mut master = Command::new(path_of("kvmaster").unwrap())
        .args(["--etcd", &etcd])
        .args(["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let _asked = silent.accept().unwrap();
    let status = terminated(&mut master);
    assert!(status.success(), "{status}");
}

/// Asks a process to end, and returns its exit status.
fn terminated(process: &mut Child) -> ExitStatus {
    let since = Instant::now();
    kill_process(Pid::from_child(process), Signal::TERM).unwrap();
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        if since.elapsed() > Duration::from_secs(5) {
            process.kill().unwrap();
            process.wait().unwrap();
            panic!("no end within 5 s of SIGTERM");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_sighup_ends_no_daemon_and_is_logged() {
    let mut cluster = Cluster::start(Options::default()).unwrap();
    cluster.master.signal(Signal::HUP).unwrap();
    cluster.nodes[0].signal(Signal::HUP).unwrap();
    let logged = || {
        let daemons = [&cluster.master, &cluster.nodes[0]];
        Ok(daemons.iter().all(|it| it.log_text().contains("SIGHUP: ")))
    };
    cluster.wait_for("both daemons log it", logged).unwrap();
    cluster.wait_live(1).unwrap();
    let status = cluster.nodes[0].terminate().unwrap();
    assert!(status.success(), "{status}");
    let status = cluster.master.terminate().unwrap();
    assert!(status.success(), "{status}");
}

/// The terminal of a daemon may close, and the program that reads its log may end.
#[test]
fn a_daemon_whose_log_cannot_be_written_serves_on_and_stops_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let ready = path("ready");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut master = Command::new(path_of("kvmaster").unwrap())
        .args(["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"])
        .args(["--data-dir", &path("data"), "--ready-file", &ready])
        .env("RUST_LOG", "info")
        .stderr(writer)
        .spawn()
        .unwrap();
    let since = Instant::now();
    while std::fs::metadata(&ready).is_err() {
        let ended = master.try_wait().unwrap();
        assert_eq!(ended, None, "it ended before it served");
        if since.elapsed() > Duration::from_secs(30) {
            master.kill().unwrap();
            master.wait().unwrap();
            panic!("it does not serve");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = terminated(&mut master);
    assert!(status.success(), "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn kvctl_cluster_shows_what_the_leader_hears() {
    let cluster = Cluster::start(Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    put_all(&client, 0..1, 4096).await.unwrap();
    cluster
        .wait_for("the leader shows its node and its client", || {
            let shown = stdout(&kvctl(
                &cluster.master_url(),
                &["cluster", "--output", "json"],
            ));
            let shown: serde_json::Value = serde_json::from_str(&shown)?;
            let leader = &shown["members"][0];
            Ok(leader["heard_nodes"] == 1 && leader["heard_clients"] == 1)
        })
        .unwrap();
    let shown = stdout(&kvctl(
        &cluster.master_url(),
        &["cluster", "--output", "json"],
    ));
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let http = shown["members"][0]["http_address"].as_str().unwrap();
    assert!(http.parse::<std::net::SocketAddr>().is_ok(), "{http}");
}
