//! Time, randomness and threads come through seams, so that the simulation owns them (ADR 0052).
//!
//! The check reads the crates that the simulation runs. Tests in them, and what runs beside the simulated code, such
//! as ports and disks, use the machine: `xtask/ratchet.txt` counts how often, and the counts may only fall.

use super::ratchet::Check;
use super::text::{Files, Finding, Line};

/// The crates that the simulation runs.
const SIMULATED: [&str; 3] = ["master/src/", "client/src/", "store-node/src/"];
/// What asks the machine, and what to use instead.
const MACHINE: [(&str, &str); 13] = [
    ("rand::random", "kvpool_seams::random"),
    ("rand::rng", "kvpool_seams::random"),
    ("clock_gettime", "kvpool_seams::boot_time"),
    ("SystemTime::now", "a time that the caller gives"),
    ("spawn_blocking", "kvpool_seams::blocking"),
    (
        "thread::spawn",
        "a step that kvpool_master::workers repeats",
    ),
    (
        "thread::Builder",
        "a step that kvpool_master::workers repeats",
    ),
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
    let mut is_test = false;
    let mut selects: Option<Line<'_>> = None;
    for line in files.lines() {
        let finding = line.finding("");
        if finding.file != of_file {
            of_file.clone_from(&finding.file);
            is_test = !is_simulated(&of_file);
            selects = None;
        }
        is_test |= line.text.trim() == "#[cfg(test)]";
        let text = line.text.trim_start();
        if is_test || text.starts_with("//") {
            continue;
        }
        if let Some(select) = selects.take()
            && !text.starts_with("biased;")
        {
            findings
                .push(select.finding("`select!` polls in random order: begin it with `biased;`"));
        }
        if text.contains("std::time::") && text.contains("Instant") {
            findings
                .push(line.finding("a monotonic time of the machine: use tokio::time::Instant"));
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
    is_rust
        && !of_tests
        && SIMULATED
            .iter()
            .any(|directory| file.starts_with(directory))
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
                    #[cfg(test)]\nmod tests {\n    rand::random();\n}\n";
        assert_eq!(found("master/src/pool.rs", text), [1, 3]);
        assert!(found("master/src/pool/tests.rs", text).is_empty());
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
