//! Whether this machine can run guests, and the packages that it lacks.

use crate::packages::{Packages, may_install};
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The files that the scripts use, each with its Debian package. An installation of qemu-system-x86
/// may replace a qemu-utils of another version.
const NEEDED: [(&str, &str); 16] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("dash", "dash"),
    ("cpio", "cpio"),
    ("depmod", "kmod"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("strip", "binutils"),
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("rdma", "iproute2"),
    ("dmsetup", "dmsetup"),
    ("ibv_rc_pingpong", "ibverbs-utils"),
    ("ib_write_bw", "perftest"),
    ("libibverbs/librxe-rdmav*.so", "ibverbs-providers"),
    ("librdmacm.so.1", "librdmacm1"),
];

/// Two guests of the largest case, with room to spare, in KiB.
const MEMORY: u64 = 5 << 20;
/// An unpacked package of a kernel, and the images made from it, in KiB.
const DISK: u64 = 2 << 20;

/// Installs the missing packages if that was requested and is possible without a prompt. Otherwise
/// prints them.
pub(super) fn provide(packages: Packages) -> Result<()> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        bail!("the guests need an x86_64 Linux host");
    }
    let missing = missing();
    if missing.is_empty() || (packages.install(&missing)? && self::missing().is_empty()) {
        return Ok(());
    }
    bail!(
        "Debian packages are missing (--install adds them): {}",
        missing.join(" ")
    )
}

/// Reports whether this machine can run the guests. Changes nothing.
pub(super) fn probe(place: &Path, packages: Packages) -> Result<bool> {
    let mut able = true;
    let mut say = |good: bool, what: String| {
        able &= good;
        println!("{}  {what}", if good { "yes" } else { "NO " });
    };
    let kind = format!("{} {}", std::env::consts::ARCH, std::env::consts::OS);
    say(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        format!("the machine: {kind}"),
    );
    let missing = missing();
    say(
        missing.is_empty() || (packages == Packages::Add && may_install()),
        match (missing.is_empty(), may_install()) {
            (true, _) => "packages: all installed".to_owned(),
            (false, true) => format!("packages that --install adds: {}", missing.join(" ")),
            (false, false) => format!("packages that root must install: {}", missing.join(" ")),
        },
    );
    let memory = available_memory();
    say(
        memory >= MEMORY,
        format!("memory: {} of {} MiB", memory >> 10, MEMORY >> 10),
    );
    let disk = free_disk(place);
    say(
        disk >= DISK,
        format!("disk: {} of {} MiB", disk >> 10, DISK >> 10),
    );
    for series in ["6.1", "6.12"] {
        let made = place.join(series).join("package").is_file();
        let text = match (made, in_lists(series)) {
            (true, _) => "made already",
            (false, true) => "in apt's lists",
            (false, false) => "not in apt's lists: other suites would be searched",
        };
        say(true, format!("kernel {series}: {text}"));
    }
    println!(
        "{}",
        if able {
            "the guests can run here"
        } else {
            "the guests cannot run here"
        }
    );
    Ok(able)
}

/// The missing packages.
fn missing() -> Vec<&'static str> {
    let absent = NEEDED.iter().filter(|(file, _)| !is_there(file));
    let mut packages: Vec<_> = absent.map(|(_, package)| *package).collect();
    packages.dedup();
    packages
}

/// Whether a program is in the usual places, root's among them, or a library in Debian's.
fn is_there(file: &str) -> bool {
    if file.contains(".so") {
        return libraries()
            .iter()
            .any(|directory| has_library(directory, file));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    places
        .map(|place| place.join(file))
        .any(|path| path.is_file())
}

/// The directories of libraries, one for each architecture.
fn libraries() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/usr/lib")
        .into_iter()
        .flatten()
        .flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect()
}

/// Whether a library is in a directory or one below it; a star in its name stands for anything.
fn has_library(directory: &Path, file: &str) -> bool {
    let path = directory.join(file);
    let Some((before, after)) = file.rsplit_once('*') else {
        return path.is_file();
    };
    let (Some(place), Some(before)) = (path.parent(), before.rsplit('/').next()) else {
        return false;
    };
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.any(|name| name.starts_with(before) && name.ends_with(after))
}

/// In KiB; 0 when the kernel does not tell.
fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    first_number(line.unwrap_or_default())
}

/// The free space for the guests' files, in KiB.
fn free_disk(place: &Path) -> u64 {
    // This command may still have to make the directory itself.
    let existing = place.ancestors().find(|path| path.is_dir());
    let mut df = Command::new("df");
    df.args(["-k", "--output=avail"]).args(existing);
    let output = df.output().map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&output).into_owned();
    first_number(text.lines().last().unwrap_or_default())
}

/// Whether the machine's own lists have a kernel of that series.
fn in_lists(series: &str) -> bool {
    let mut lists = Command::new("apt-cache");
    lists.args(["pkgnames", &format!("linux-image-{series}.")]);
    lists.output().is_ok_and(|output| !output.stdout.is_empty())
}

fn first_number(text: &str) -> u64 {
    let mut words = text.split_whitespace();
    words.find_map(|word| word.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_libraries_are_found_where_they_are() {
        assert!(is_there("sh"));
        assert!(!is_there("no-such-program"));
        assert!(is_there("libc.so.6"));
        assert!(!is_there("libibverbs/libnone-rdmav*.so"));
    }

    #[test]
    fn memory_is_read_from_the_kernel() {
        assert!(available_memory() > 0);
        assert_eq!(first_number("   12 kB"), 12);
        assert_eq!(first_number(""), 0);
    }
}
