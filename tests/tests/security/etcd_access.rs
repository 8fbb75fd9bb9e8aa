//! An etcd that requires certificates and a password gets both from kvmaster's flags. A kvmaster
//! without them ends with the reason.

use kvpool_client::{Client, Options};
use kvpool_etcd::testing::{Etcd, Setup};
use kvpool_tests::Daemon;
use kvpool_tests::blocks::{Tally, check_all, put_all};
use kvpool_tests::daemon::path_of;
use kvpool_tests::masters;
use std::path::Path;
use std::process::Command;

const BLOCKS: u64 = 64;

/// An etcd that requires certificates and root's password. Also the flags of a kvmaster whose
/// password file holds `password`, as an editor leaves it.
async fn closed_etcd(directory: &Path, password: &str) -> (Etcd, Vec<String>) {
    let setup = Setup {
        tls: true,
        password: Some("open sesame".into()),
        ..Setup::default()
    };
    let etcd = Etcd::start_with(directory, &setup).await.unwrap();
    let file = directory.join("password");
    std::fs::write(&file, format!("{password}\n")).unwrap();
    let flags = flags(&etcd, &file);
    (etcd, flags)
}

fn flags(etcd: &Etcd, password: &Path) -> Vec<String> {
    let options = etcd.options();
    let tls = options.tls.unwrap();
    let path = |path: &Path| path.display().to_string();
    [
        ("--etcd", etcd.endpoints().join(",")),
        ("--etcd-user", options.user.unwrap().0),
        ("--etcd-password-file", path(password)),
        ("--etcd-ca", path(&tls.ca)),
        ("--etcd-cert", path(&tls.cert.unwrap())),
        ("--etcd-key", path(&tls.key.unwrap())),
        ("--listen", "127.0.0.1:0".to_owned()),
        ("--http-listen", "127.0.0.1:0".to_owned()),
    ]
    .into_iter()
    .flat_map(|(flag, value)| [flag.to_owned(), value])
    .collect()
}

/// The flags without one of them.
fn without(flags: &[String], flag: &str) -> Vec<String> {
    let at = flags.iter().position(|other| other == flag).unwrap();
    [&flags[..at], &flags[at + 2..]].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_and_a_password_come_from_flags() {
    if !masters::available("certificates_and_a_password_come_from_flags") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (_etcd, mut flags) = closed_etcd(directory.path(), "open sesame").await;
    let mut master = Daemon::start("kvmaster", directory.path(), "kvmaster", &flags).unwrap();
    let url = format!("http://{}", master.listen);
    let socket = directory.path().join("node.sock");
    let node: Vec<String> = [
        ["--master", &url],
        ["--listen", "127.0.0.1:0"],
        ["--http-listen", "127.0.0.1:0"],
        ["--segment", "64MiB"],
        ["--shm-path", &socket.display().to_string()],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .collect();
    let _node = Daemon::start("kvstore-node", directory.path(), "node", &node).unwrap();
    let options = Options {
        masters: vec![url],
        ..Options::default()
    };
    let client = Client::connect(options).await.unwrap();
    put_all(&client, 0..BLOCKS, 4096).await.unwrap();
    // The acknowledged blocks are in that etcd: another kvmaster in place of the first one has
    // them.
    master.kill().unwrap();
    let listen = flags.iter().position(|flag| flag == "--listen").unwrap();
    flags[listen + 1].clone_from(&master.listen);
    let _master = Daemon::start("kvmaster", directory.path(), "kvmaster", &flags).unwrap();
    let all = Tally {
        right: usize::try_from(BLOCKS).unwrap(),
        ..Tally::default()
    };
    assert_eq!(check_all(&client, 0..BLOCKS, 4096).await, all);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_etcd_refuses_ends_kvmaster_with_the_reason() {
    if !masters::available("what_etcd_refuses_ends_kvmaster_with_the_reason") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (_etcd, all) = closed_etcd(directory.path(), "abracadabra").await;
    let no_user = without(&without(&all, "--etcd-user"), "--etcd-password-file");
    for (flags, reason) in [
        (all.clone(), "invalid user ID or password"),
        (no_user, "permission denied"),
        (without(&all, "--etcd-key"), "given without etcd_key"),
        (
            without(&all, "--etcd-ca"),
            "required to verify etcd's certificate",
        ),
        (without(&all, "--etcd-user"), "requires etcd_user"),
    ] {
        let ended = Daemon::start("kvmaster", directory.path(), "kvmaster", &flags).unwrap_err();
        let said = ended.to_string();
        assert!(said.contains("ended with exit status: 1"), "{said}");
        assert!(said.contains(reason), "{said}");
        assert!(!said.contains("abracadabra"), "{said}");
    }
}

/// `--print-config` would show it to whoever reads the output.
#[test]
fn a_password_in_the_url_of_etcd_is_refused_and_never_printed() {
    let printed = Command::new(path_of("kvmaster").unwrap())
        .args(["--etcd", "http://root:abracadabra@127.0.0.1:2379"])
        .arg("--print-config")
        .output()
        .unwrap();
    assert_eq!(printed.status.code(), Some(1), "{printed:?}");
    let text = [&printed.stdout[..], &printed.stderr[..]].concat();
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.contains("invalid value for `etcd` in the command line"),
        "{text}"
    );
    assert!(text.contains("--etcd-password-file"), "{text}");
    assert!(!text.contains("abracadabra"), "{text}");
}
