//! What kvctl starts does not outlive it, however it ends.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const KVCTL: &str = env!("CARGO_BIN_EXE_kvctl");

fn alive(pid: u32) -> bool {
    // A zombie has ended: only its parent, here an init that may not reap, has not asked yet.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit(") ")
            .next()
            .is_some_and(|rest| !rest.starts_with('Z'))
    })
}

#[test]
fn a_tethered_program_dies_with_a_parent_that_is_killed() {
    let mut parent = Command::new("sh")
        .args(["-c", "\"$0\" tether $$ sleep -- 300 & echo $!; wait", KVCTL])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(parent.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let child: u32 = line.trim().parse().unwrap();
    let comm = format!("/proc/{child}/comm");
    let deadline = Instant::now() + Duration::from_secs(10);
    while std::fs::read_to_string(&comm).unwrap().trim() != "sleep" {
        assert!(Instant::now() < deadline, "it never became the program");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(alive(child));

    // SIGKILL: the parent has no chance to clean up.
    parent.kill().unwrap();
    parent.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while alive(child) {
        assert!(Instant::now() < deadline, "{child} outlived its parent");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_program_whose_parent_is_already_gone_is_not_started() {
    let output = Command::new(KVCTL)
        .args(["tether", "1", "echo", "--", "started"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
}

#[test]
fn arguments_of_the_program_may_be_flags_of_kvctl() {
    let own = std::process::id().to_string();
    let output = Command::new(KVCTL)
        .args([
            "tether",
            &own,
            "echo",
            "--",
            "--master",
            "elsewhere",
            "--output",
        ])
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(printed.trim(), "--master elsewhere --output");
}
