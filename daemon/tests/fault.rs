//! A panic in any thread ends a daemon, with a line that says which.

use kvpool_daemon::fault;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const CHILD: &str = "KVPOOL_FAULT_CHILD";

/// What a child does that stands for a daemon: a thread of its own panics, and nobody waits for it.
fn panic_elsewhere(what: &str) {
    fault::end_on_panic("kvtest");
    match what {
        "thread" => {
            let spawned = std::thread::Builder::new().name("evictor".into());
            let _thread = spawned.spawn(|| panic!("the queue is {}", "gone"));
        }
        _ => {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let _task = runtime.spawn(async { panic!("a task") });
            std::thread::sleep(Duration::from_secs(60));
        }
    }
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_panic_in_any_thread_ends_a_daemon_and_says_which() {
    if let Ok(what) = std::env::var(CHILD) {
        panic_elsewhere(&what);
    }
    for (what, line) in [
        ("thread", "thread evictor panicked at"),
        ("task", "thread tokio-r"),
    ] {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "a_panic_in_any_thread_ends_a_daemon_and_says_which",
            ])
            .arg("--nocapture")
            .env(CHILD, what)
            .stdout(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(child.status.code(), Some(fault::PANICKED), "{what}");
        let said = String::from_utf8_lossy(&child.stderr).into_owned();
        let last = said.trim_end().lines().last().unwrap_or_default();
        assert!(
            last.starts_with("kvtest: ended by a fault of its own"),
            "{said}"
        );
        assert!(last.contains(line), "{said}");
    }
}

#[test]
fn both_daemons_have_a_panic_end_them_before_anything_else() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for (part, name) in [("master", "kvmaster"), ("store-node", "kvstore-node")] {
        let main = std::fs::read_to_string(root.join(part).join("src/main.rs")).unwrap();
        let body = main.split("fn main() -> ExitCode {").nth(1).unwrap();
        let first = body.trim_start().lines().next().unwrap();
        assert_eq!(first, format!("fault::end_on_panic(\"{name}\");"));
    }
}
