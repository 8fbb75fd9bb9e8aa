//! The machine of a run, and the build.

use serde::Serialize;
use std::fs;

/// The build profile of published figures.
pub(crate) const PUBLISHED: &str = "dist";

/// The machine and the versions, for the comparison of results.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    /// The model of the processor.
    pub(crate) cpu: String,
    /// The number of cores that this process may use.
    pub(crate) cores: usize,
    /// The bytes of the largest cache; zero if unknown.
    pub(crate) last_level_cache: u64,
    /// The bytes of memory.
    pub(crate) memory: u64,
    /// The bytes of available memory at the start.
    pub(crate) memory_available: u64,
    pub(crate) kernel: String,
    /// The version of kvbench, and of the daemons that it starts.
    pub(crate) kvpool: &'static str,
    /// The build profile of kvbench. It starts the daemons in its own directory.
    pub(crate) profile: &'static str,
    /// Whether the build is optimised.
    pub(crate) optimised: bool,
}

impl Machine {
    /// Reads the properties of this machine.
    pub(crate) fn read() -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        let meminfo = read("/proc/meminfo");
        Self {
            cpu: model(&cpuinfo).unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            last_level_cache: largest_cache(),
            memory: kib(&meminfo, "MemTotal"),
            memory_available: kib(&meminfo, "MemAvailable"),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            kvpool: env!("CARGO_PKG_VERSION"),
            profile: env!("KVPOOL_PROFILE"),
            optimised: !cfg!(debug_assertions),
        }
    }

    /// Memory that transfers cycle through on each side, in bytes, so that every block is cold. It is
    /// the size of the largest cache rounded up to 128 MiB, or less if memory is short.
    pub(crate) fn span(&self) -> u64 {
        let wanted = self.last_level_cache.next_multiple_of(SPAN_STEP);
        whole_steps(wanted.min(self.memory_available / 20))
    }
}

/// A span is a multiple of it, in bytes. The largest batch has as many bytes.
pub(crate) const SPAN_STEP: u64 = 128 << 20;

/// The largest span up to `wanted` that fits four times into `capacity` bytes.
pub(crate) fn share_of(capacity: u64, wanted: u64) -> u64 {
    whole_steps(wanted.min(capacity / 4))
}

/// `bytes` rounded down to whole steps, at least one step.
fn whole_steps(bytes: u64) -> u64 {
    (bytes / SPAN_STEP * SPAN_STEP).max(SPAN_STEP)
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn model(cpuinfo: &str) -> Option<&str> {
    cpuinfo.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "model name").then(|| value.trim())
    })
}

fn kib(meminfo: &str, name: &str) -> u64 {
    meminfo
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .unwrap_or_default()
        << 10
}

fn largest_cache() -> u64 {
    (0..8)
        .map(|index| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
            cache_size(read(&path).trim()).unwrap_or_default()
        })
        .max()
        .unwrap_or_default()
}

/// A size as the kernel writes it: `32K`, `260M`.
fn cache_size(text: &str) -> Option<u64> {
    let (digits, shift) = match text.strip_suffix('K') {
        Some(digits) => (digits, 10),
        None => (text.strip_suffix('M')?, 20),
    };
    Some(digits.parse::<u64>().ok()? << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_models_of_the_kernel_are_parsed() {
        assert_eq!(cache_size("266240K"), Some(260 << 20));
        assert_eq!(cache_size("8M"), Some(8 << 20));
        assert_eq!(cache_size(""), None);
        let info = "processor\t: 0\nmodel name\t: A B @ 2 GHz\n";
        assert_eq!(model(info), Some("A B @ 2 GHz"));
        assert_eq!(
            kib("MemTotal:  12 kB\nMemAvailable: 8 kB\n", "MemAvailable"),
            8 << 10
        );
    }

    #[test]
    fn the_span_covers_the_cache_where_memory_allows() {
        let mut machine = Machine {
            last_level_cache: 260 << 20,
            memory_available: 20 << 30,
            ..Machine::read()
        };
        assert_eq!(machine.span(), 384 << 20);
        assert_eq!(share_of(64 << 30, machine.span()), 384 << 20);
        assert_eq!(share_of(1 << 30, machine.span()), 256 << 20);
        assert_eq!(share_of(1 << 20, machine.span()), 128 << 20);
        machine.last_level_cache = 8 << 20;
        assert_eq!(machine.span(), 128 << 20);
        machine.last_level_cache = 260 << 20;
        machine.memory_available = 4 << 30;
        assert_eq!(machine.span(), 128 << 20);
    }
}
