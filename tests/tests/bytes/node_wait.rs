//! `kvctl node wait` with tokens. A test's token applies to its whole process, so the file has one
//! test.

use kvpool_tests::daemon::path_of;
use kvpool_tests::guard::Tokens;
use kvpool_tests::{Cluster, Options};
use std::process::Command;

/// Without the right to see the nodes, no node would seem to drain.
#[test]
fn a_wait_for_drains_fails_with_a_token_that_does_not_show_the_nodes() {
    let tokens = Tokens::new().unwrap();
    let options = Options {
        master: tokens.flags(),
        node: tokens.node_flags(),
        ..Options::default()
    };
    let cluster = Cluster::start(options).unwrap();
    let wait = |subject: &str| {
        tokens.write(subject, 3600).unwrap();
        let file = tokens.file(subject).display().to_string();
        let wait = ["node", "wait", "--settle", "0s", "--timeout", "1s"];
        let mut kvctl = Command::new(path_of("kvctl").unwrap());
        kvctl.args(wait).args(["--token-file", &file]);
        kvctl.args(["--master", &cluster.master_url()]);
        kvctl.output().unwrap()
    };
    let hidden = wait("writer");
    assert_eq!(hidden.status.code(), Some(1), "{hidden:?}");
    let why = String::from_utf8_lossy(&hidden.stderr).into_owned();
    assert!(why.contains("does not show the pool's nodes"), "{why}");
    let file = tokens.file("writer").display().to_string();
    let mut kvctl = Command::new(path_of("kvctl").unwrap());
    kvctl.args(["status", "--over", "0s", "--token-file", &file]);
    let status = kvctl.args(["--master", &cluster.master_url()]).output();
    let told = String::from_utf8_lossy(&status.unwrap().stdout).into_owned();
    assert!(told.contains("its own namespaces alone"), "{told}");
    let seen = wait("operator");
    let text = String::from_utf8_lossy(&seen.stdout).into_owned();
    assert!(
        seen.status.success() && text.contains("no node drains"),
        "{seen:?}"
    );
    // A script that stops a master after the wait must see that a node still drains.
    let run = |subject: &str, arguments: &[&str]| {
        let file = tokens.file(subject).display().to_string();
        let mut kvctl = Command::new(path_of("kvctl").unwrap());
        kvctl.args(arguments).args(["--token-file", &file]);
        kvctl.args(["--master", &cluster.master_url()]);
        kvctl.output().unwrap()
    };
    let block = cluster.directory().join("block");
    std::fs::write(&block, [7u8; 4096]).unwrap();
    let put = run("writer", &["put", "block", &block.display().to_string()]);
    assert!(put.status.success(), "{put:?}");
    let drain = ["node", "drain", "node-0", "--timeout", "1s"];
    let refused = run("root", &drain);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        why.contains("the last node that takes blocks") && why.contains("--force"),
        "{why}"
    );
    let seen = wait("operator");
    assert!(seen.status.success(), "nothing was changed: {seen:?}");
    // The block stays, as the command reports.
    let forced = run("root", &[&drain[..], &["--force"]].concat());
    assert_eq!(forced.status.code(), Some(1), "{forced:?}");
    let text = String::from_utf8_lossy(&forced.stdout).into_owned();
    assert!(
        text.contains("shows the node as drained once no such block is left"),
        "{text}"
    );
    let accepted = run("root", &[&drain[..], &["--allow-loss"]].concat());
    assert!(accepted.status.success(), "{accepted:?}");
    let text = String::from_utf8_lossy(&accepted.stdout).into_owned();
    assert!(text.contains("1 blocks are on this node only"), "{text}");
    let over = wait("operator");
    assert_eq!(over.status.code(), Some(1), "{over:?}");
    let why = String::from_utf8_lossy(&over.stderr).into_owned();
    assert!(
        why.contains("still drain") && why.contains("node-0"),
        "{why}"
    );
    let removed = run("writer", &["rm", "block"]);
    assert!(removed.status.success(), "{removed:?}");
    cluster
        .wait_for("node-0 is drained", || {
            Ok(cluster.node_states()? == [("node-0".to_owned(), "drained".to_owned())])
        })
        .unwrap();
    let quiet = wait("operator");
    assert!(quiet.status.success(), "{quiet:?}");
    let status = run("operator", &["status", "--over", "0s"]);
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(text.contains("node node-0 is drained"), "{text}");
    assert!(text.contains("Keep its disks"), "{text}");
}
