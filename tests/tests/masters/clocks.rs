//! Invariant 7: clocks may jump. Leases and grants are measured on a clock that cannot be set, and no
//! code reads the wall clock. `master/tests/pool/leases.rs` and the client's own tests check the consequences
//! on simulated clocks.

use std::path::{Path, PathBuf};

/// Names through which code would read the wall clock.
const WALL_CLOCK: [&str; 5] = [
    "SystemTime",
    "CLOCK_REALTIME",
    "ClockId::Realtime",
    "UNIX_EPOCH",
    "chrono::",
];

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn no_part_of_the_pool_asks_the_wall_clock() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    for part in [
        "types",
        "seams",
        "transport",
        "master",
        "store-node",
        "client",
    ] {
        sources(&root.join(part).join("src"), &mut files);
    }
    assert!(
        files.len() > 50,
        "the sources were not found under {}",
        root.display()
    );
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for word in WALL_CLOCK {
            assert!(!text.contains(word), "{} mentions {word}", file.display());
        }
    }
}
