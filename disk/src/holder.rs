//! Whether a live process has locked a file, as `/proc` tells it.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The name of the operators' tool. It locks a file for a short time.
const TOOL: &str = "kvctl";
/// The bit of SIGKILL in a set of signals.
const KILL: u64 = 1 << 8;

/// Whether a live process has locked the file for itself, and may keep it for long. False if that is not known: the
/// process may be in another container, or belong to another user.
///
/// A killed process that waits for its disk is not live, although its lock stays.
pub(crate) fn is_live(path: &Path) -> bool {
    let (Ok(locks), Ok(found)) = (fs::read_to_string("/proc/locks"), fs::metadata(path)) else {
        return false;
    };
    let of_file = format!(":{}", found.ino());
    locks.lines().filter_map(exclusive).any(|(process, file)| {
        file.ends_with(&of_file) && runs(process) && has(process, file, &found)
    })
}

/// The process and the file of an exclusive `flock`, from a line of `/proc/locks` or of a descriptor.
fn exclusive(line: &str) -> Option<(u32, &str)> {
    let (_number, lock) = line.split_once(": ")?;
    let fields: Vec<&str> = lock.split_whitespace().collect();
    match fields.as_slice() {
        ["FLOCK", _, "WRITE", process, file, ..] => Some((process.parse().ok()?, *file)),
        _ => None,
    }
}

/// Whether a descriptor of the process is the file that was found, and has the lock. Another process may have the
/// number of a dead one. A file of another filesystem may have the same inode.
fn has(process: u32, file: &str, found: &Metadata) -> bool {
    let of_process = Path::new("/proc").join(process.to_string());
    let Ok(descriptors) = fs::read_dir(of_process.join("fdinfo")) else {
        return false;
    };
    descriptors.flatten().any(|descriptor| {
        let told = fs::read_to_string(descriptor.path()).unwrap_or_default();
        let mut locks = told.lines().filter_map(exclusive);
        let open = of_process.join("fd").join(descriptor.file_name());
        locks.any(|(_, other)| other == file)
            && fs::metadata(open).is_ok_and(|open| is_same(&open, found))
    })
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

fn runs(process: u32) -> bool {
    fs::read_to_string(format!("/proc/{process}/status")).is_ok_and(|status| is_running(&status))
}

/// Whether a process with this status runs on, and is no tool.
fn is_running(status: &str) -> bool {
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name));
        value.map(str::trim)
    };
    let signals = field("SigPnd:").and_then(|set| u64::from_str_radix(set, 16).ok());
    let is_killed = signals.is_none_or(|set| set & KILL != 0);
    // A process that ends gives its memory back first, and closes its files later.
    let has_memory = field("VmSize:").is_some();
    // A process that crashed has its memory until it is dumped.
    let is_dumped = field("CoreDumping:") == Some("1");
    has_memory && !is_killed && !is_dumped && field("Name:") != Some(TOOL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_exclusive_flock_counts() {
        let of = |lock: &str| exclusive(&format!("1: {lock}")).map(|(process, _)| process);
        assert_eq!(
            of("FLOCK  ADVISORY  WRITE 31934 fe:00:5318239 0 EOF"),
            Some(31934)
        );
        let held = exclusive("lock:\t1: FLOCK  ADVISORY  WRITE 7 fe:00:12 0 EOF");
        assert_eq!(held, Some((7, "fe:00:12")));
        for other in [
            "FLOCK  ADVISORY  READ 31934 fe:00:5318239 0 EOF",
            "POSIX  ADVISORY  WRITE 31934 fe:00:5318239 0 EOF",
            "-> FLOCK  ADVISORY  WRITE 31934 fe:00:5318239 0 EOF",
            "OFDLCK ADVISORY  WRITE -1 fe:00:5318239 0 EOF",
            "FLOCK  ADVISORY  WRITE -1 fe:00:5318239 0 EOF",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(exclusive("pos:\t0"), None);
    }

    #[test]
    fn a_process_that_ends_and_a_tool_do_not_run_on() {
        let status = |name: &str, memory: &str, pending: &str| {
            format!("Name:\t{name}\nState:\tS (sleeping)\n{memory}SigPnd:\t{pending}\nShdPnd:\t0\n")
        };
        let (memory, none) = ("VmSize:\t    2920 kB\n", "0000000000000000");
        assert!(is_running(&status("kvstore-node", memory, none)));
        assert!(is_running(&status("python3", memory, none)));
        assert!(is_running(&status(
            "kvstore-node",
            memory,
            "0000000000004000"
        )));
        // It is killed, and waits for its disk; or its memory is gone already.
        assert!(!is_running(&status(
            "kvstore-node",
            memory,
            "0000000000000100"
        )));
        assert!(!is_running(&status("kvstore-node", "", none)));
        assert!(!is_running(&status("kvctl", memory, none)));
        let dumped = |dumps: u8| format!("{memory}CoreDumping:\t{dumps}\n");
        assert!(is_running(&status("kvstore-node", &dumped(0), none)));
        assert!(!is_running(&status("kvstore-node", &dumped(1), none)));
        assert!(!is_running(""));
    }

    #[test]
    fn a_process_knows_its_own_lock() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(!is_live(file.path()));
        let lock = |operation| rustix::fs::flock(file.as_file(), operation).unwrap();
        lock(rustix::fs::FlockOperation::LockShared);
        assert!(!is_live(file.path()));
        lock(rustix::fs::FlockOperation::LockExclusive);
        assert!(is_live(file.path()));
    }

    #[test]
    fn a_lock_on_another_file_does_not_count() {
        let [one, other] = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
        let lock = rustix::fs::FlockOperation::LockExclusive;
        rustix::fs::flock(one.as_file(), lock).unwrap();
        let [one, other] = [one, other].map(|file| (file.as_file().metadata().unwrap(), file));
        let locks = fs::read_to_string("/proc/locks").unwrap();
        let of_one = format!(":{}", one.0.ino());
        let own = |lock: &(u32, &str)| lock.0 == std::process::id() && lock.1.ends_with(&of_one);
        let (process, place) = locks.lines().filter_map(exclusive).find(own).unwrap();
        assert!(has(process, place, &one.0));
        assert!(!has(process, place, &other.0));
    }
}
