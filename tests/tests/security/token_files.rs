//! What operators see of files of tokens and keys that can no longer be used.

use kvpool_tests::daemon::path_of;
use kvpool_tests::guard::Tokens;
use kvpool_tests::{Cluster, Options};
use std::process::Command;

#[test]
fn a_token_file_and_keys_that_cannot_be_used_are_told() {
    let tokens = Tokens::new().unwrap();
    let cluster = Cluster::start(Options {
        nodes: 1,
        master: tokens.flags(),
        node: tokens.node_flags(),
        ..Options::default()
    })
    .unwrap();
    let root = tokens.file("root").display().to_string();
    let master = cluster.master_url();
    let kvctl = |command: &str| {
        let output = Command::new(path_of("kvctl").unwrap())
            .args([command, "--master", &master, "--token-file", &root])
            .args(["--output", "json"])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let node = &cluster.nodes[0];
    let failed = || {
        let metrics = [
            (&cluster.master, "kvpool_master_auth_files_failed"),
            (node, "kvpool_node_auth_files_failed"),
            (node, "kvpool_node_token_file_failed"),
        ];
        metrics.map(|(daemon, name)| daemon.metric(name).unwrap() > 0.0)
    };
    let expires = node.metric("kvpool_node_token_expires_timestamp_seconds");
    let left = expires.unwrap() - kvpool_auth::now() as f64;
    assert!((3000.0..=3600.0).contains(&left), "{left} s");
    assert_eq!(failed(), [false; 3]);
    let says = ["the leader says: ", "node node-0 says: "];
    let status = kvctl("status");
    assert!(says.iter().all(|said| !status.contains(said)), "{status}");

    std::fs::write(tokens.file("node"), "\n").unwrap();
    std::fs::write(tokens.jwks(), "{").unwrap();
    cluster
        .wait_for("the metrics", || Ok(failed() == [true; 3]))
        .unwrap();
    let wanted = [
        "the leader says: the JWKS or the policy cannot be used",
        "node node-0 says: the JWKS or the policy cannot be used",
        "node node-0 says: the token file",
        "the token before stays: it is empty",
    ];
    for command in ["status", "doctor"] {
        cluster
            .wait_for(command, || {
                let told = kvctl(command);
                Ok(wanted.iter().all(|part| told.contains(part)))
            })
            .unwrap();
    }
}
