//! Time, randomness and threads come through seams, so that the simulation owns them (ADR 0052).
//!
//! The check reads the crates that the simulation runs. Tests in these crates may call the machine. So may the files
//! that the simulation replaces (`REPLACED`).

use super::ratchet::Check;
use super::text::{Files, Finding, Line};

/// The crates that the simulation runs.
const SIMULATED: [&str; 3] = ["master/src/", "client/src/", "store-node/src/"];
/// Prefixes of the files that the simulation replaces.
const REPLACED: [&str; 10] = [
    // The daemons as programs: their settings, ports and signals.
    "master/src/main.rs",
    "master/src/server.rs",
    "store-node/src/main.rs",
    "store-node/src/node.rs",
    // Connections: of frames, of gRPC, and of the data port.
    "master/src/service/framed",
    "client/src/control/framed",
    "client/src/dialer.rs",
    // Stores and devices.
    "master/src/store/embedded",
    "master/src/store/etcd",
    "client/src/gpu/",
];
/// Calls of the machine, each with the seam to use instead.
const MACHINE: [(&str, &str); 14] = [
    ("rand::random", "kvpool_seams::random"),
    ("rand::rng", "kvpool_seams::random"),
    ("clock_gettime", "kvpool_seams::boot_time"),
    ("SystemTime::now", "a time that the caller gives"),
    ("spawn_blocking", "kvpool_seams::blocking"),
    ("available_parallelism", "kvpool_seams::cores"),
    ("thread::spawn", "kvpool_seams::thread"),
    ("thread::Builder", "kvpool_seams::thread"),
    ("thread::sleep", "tokio::time::sleep"),
    ("hashbrown::HashMap", "kvpool_seams::maps::HashMap"),
    ("hashbrown::HashSet", "kvpool_seams::maps::HashSet"),
    ("HashMap<*const", "a key that is no address"),
    ("HashSet<*const", "a key that is no address"),
    ("DefaultHashBuilder", "kvpool_seams::maps::MapHasher"),
];

pub(super) const CHECK: Check = Check {
    name: "seams",
    find,
};

fn find(files: &Files) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut of_file = String::new();
    let mut is_replaced = false;
    // The indentation of a test item, while the loop reads its lines.
    let mut of_tests = None;
    let mut has_machines_instant = false;
    let mut selects: Option<Line<'_>> = None;
    for line in files.lines() {
        let finding = line.finding("");
        if finding.file != of_file {
            of_file.clone_from(&finding.file);
            is_replaced = !is_simulated(&of_file);
            of_tests = None;
            has_machines_instant = false;
            selects = None;
        }
        let text = line.text.trim();
        let indent = line.text.len() - line.text.trim_start().len();
        if text == "#[cfg(test)]" {
            of_tests = Some(indent);
        } else if of_tests == Some(indent) && text.ends_with([';', '}', ',']) {
            // The item's last line, or its only one.
            of_tests = None;
            continue;
        }
        if is_replaced || of_tests.is_some() || text.starts_with("//") {
            continue;
        }
        if let Some(select) = selects.take()
            && !text.starts_with("biased;")
        {
            findings
                .push(select.finding("`select!` polls in random order: begin it with `biased;`"));
        }
        has_machines_instant |= text.starts_with("use std::time::") && text.contains("Instant");
        let is_simulated_now = !has_machines_instant || text.contains("tokio::time::Instant::now");
        if text.contains("std::time::Instant::now")
            || text.contains("Instant::now") && !is_simulated_now
            || text.contains(".elapsed()") && has_machines_instant
        {
            findings.push(line.finding(
                "a monotonic time of the machine: use tokio::time::Instant or kvpool_seams::end_of_wait",
            ));
        }
        for (machine, instead) in MACHINE {
            if text.contains(machine) {
                findings.push(line.finding(format!("`{machine}` asks the machine: use {instead}")));
            }
        }
        if text.contains("select! {") {
            selects = Some(line);
        }
    }
    findings
}

fn is_simulated(file: &str) -> bool {
    let is_rust = file.ends_with(".rs");
    let of_tests =
        file.contains("/tests/") || file.contains("/testing/") || file.ends_with("/tests.rs");
    let begins = |with: &&str| file.starts_with(*with);
    is_rust && !of_tests && SIMULATED.iter().any(begins) && !REPLACED.iter().any(begins)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, text: &str) -> Vec<usize> {
        let found = find(&Files::of(&[(file, text)]));
        found.into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn code_that_asks_the_machine_is_found_and_its_tests_are_not() {
        let text = "use std::time::{Duration, Instant};\n// rand::random\nlet id = rand::random();\n\
                    let now = Instant::now();\nlet now = tokio::time::Instant::now();\n\
                    #[cfg(test)]\nmod tests {\n    rand::random();\n}\n";
        assert_eq!(found("master/src/pool.rs", text), [3, 4]);
        let passed = "use std::time::Instant;\nlet took = begun.elapsed();\n";
        assert_eq!(found("master/src/pool.rs", passed), [2]);
        let virtual_time = "use tokio::time::Instant;\nlet now = Instant::now();\n";
        assert!(found("master/src/pool.rs", virtual_time).is_empty());
        assert!(found("master/src/service/framed/stream.rs", text).is_empty());
        assert!(found("master/src/pool/tests.rs", text).is_empty());
        let test_method = "#[cfg(test)]\nfn a(\n    b: C,\n) {\n    rand::random()\n}\nlet id = rand::random();\n";
        assert_eq!(found("master/src/pool.rs", test_method), [7]);
        let test_file = "#[cfg(test)]\nmod tests;\nlet id = rand::random();\n";
        assert_eq!(found("master/src/pool.rs", test_file), [3]);
        assert!(found("cli/src/main.rs", text).is_empty());
    }

    #[test]
    fn a_select_in_random_order_is_found() {
        let fair = "tokio::select! {\n    a = b => {}\n}\n";
        let biased = "tokio::select! {\n    biased;\n    a = b => {}\n}\n";
        assert_eq!(found("client/src/get.rs", fair), [1]);
        assert!(found("client/src/get.rs", biased).is_empty());
    }
}
