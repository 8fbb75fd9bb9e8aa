//! The memory and processor time of processes, from /proc.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::time::Duration;

/// The resident memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resident {
    /// Heap and stacks.
    pub(crate) anonymous: u64,
    /// The program and libraries.
    pub(crate) files: u64,
    /// Memory shared with other processes, such as segments.
    pub(crate) shared: u64,
}

/// The processor time of each thread of a process at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Threads {
    process: u32,
    /// In nanoseconds, by thread.
    times: HashMap<OsString, u64>,
}

impl Threads {
    /// Reads the user and system time of the threads of `process`.
    pub(crate) fn of(process: u32) -> Self {
        let threads = fs::read_dir(format!("/proc/{process}/task"));
        let times = threads
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|thread| {
                let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
                let nanos = text.split_whitespace().next()?.parse().ok()?;
                Some((thread.file_name(), nanos))
            });
        Self {
            process,
            times: times.collect(),
        }
    }

    /// The processor time since then, without threads that have ended.
    pub(crate) fn since(&self) -> Duration {
        let now = Self::of(self.process);
        let more = now.times.iter().map(|(thread, now)| {
            let before = self.times.get(thread).copied().unwrap_or_default();
            now.saturating_sub(before)
        });
        Duration::from_nanos(more.sum())
    }
}

/// The processor time of this process, threads that have ended included.
pub(crate) fn own_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or_default(),
        u32::try_from(time.tv_nsec).unwrap_or_default(),
    )
}

/// The memory of a process; `None` if it has ended, also before its parent has noticed.
pub(crate) fn resident(process: u32) -> Option<Resident> {
    let text = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    Some(parse_status(&text)).filter(|resident| resident.anonymous > 0)
}

fn parse_status(text: &str) -> Resident {
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
            .unwrap_or_default()
            << 10
    };
    Resident {
        anonymous: field("RssAnon"),
        files: field("RssFile"),
        shared: field("RssShmem"),
    }
}

/// The number of TCP connections of `process` to `port`.
pub(crate) fn connections(process: u32, port: u16) -> usize {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/fd")) else {
        return 0;
    };
    let sockets: HashSet<String> = entries
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .filter_map(|link| {
            let link = link.to_string_lossy();
            let inode = link.strip_prefix("socket:[")?.strip_suffix(']')?;
            Some(inode.to_owned())
        })
        .collect();
    let table = fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap_or_default();
    parse_peers(&table, port)
        .filter(|inode| sockets.contains(*inode))
        .count()
}

/// The inodes of established connections to `port`, from `/proc/net/tcp`.
fn parse_peers(table: &str, port: u16) -> impl Iterator<Item = &str> {
    let suffix = format!(":{port:04X}");
    table.lines().skip(1).filter_map(move |line| {
        let mut fields = line.split_whitespace().skip(2);
        let far = fields.next()?;
        let established = fields.next()? == "01";
        (far.ends_with(&suffix) && established).then(|| fields.nth(5))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_file_and_shared_memory_are_separate() {
        let text = "VmRSS:\t 70 kB\nRssAnon:\t      40 kB\nRssFile:\t 20 kB\nRssShmem:\t 10 kB\n";
        let resident = parse_status(text);
        assert_eq!(resident.anonymous, 40 << 10);
        assert_eq!(resident.files, 20 << 10);
        assert_eq!(resident.shared, 10 << 10);
    }

    #[test]
    fn connections_are_counted_by_far_end_and_owner() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let own = std::process::id();
        assert_eq!(connections(own, port), 0, "listening is no connection");
        let near: Vec<_> = (0..3)
            .map(|_| std::net::TcpStream::connect(("127.0.0.1", port)).unwrap())
            .collect();
        assert_eq!(connections(own, port), 3);
        assert_eq!(connections(1, port), 0, "another process has none");
        drop(near);
    }

    #[test]
    fn time_is_counted_by_thread_and_for_the_whole_process() {
        let own = std::process::id();
        let (threads, process) = (Threads::of(own), own_cpu());
        let begin = std::time::Instant::now();
        let target = Duration::from_millis(5);
        while threads.since() < target || own_cpu() < process + target {
            assert!(begin.elapsed() < Duration::from_secs(10));
        }
        assert!(resident(own).unwrap().anonymous > 0);
        assert_eq!(Threads::of(u32::MAX).since(), Duration::ZERO, "nobody");
    }

    #[test]
    fn a_process_that_has_ended_has_no_memory_that_could_meet_a_goal() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let begin = std::time::Instant::now();
        let status = format!("/proc/{}/status", child.id());
        while !fs::read_to_string(&status).unwrap().contains("(zombie)") {
            assert!(begin.elapsed() < Duration::from_secs(10));
        }
        assert_eq!(resident(child.id()), None);
        child.wait().unwrap();
        assert_eq!(resident(child.id()), None);
    }

    #[test]
    fn a_thread_that_has_ended_counts_for_the_whole_process() {
        let before = own_cpu();
        let spin = || {
            let begin = std::time::Instant::now();
            while begin.elapsed() < Duration::from_millis(20) {
                std::hint::spin_loop();
            }
        };
        std::thread::spawn(spin).join().unwrap();
        assert!(own_cpu() > before);
    }
}
