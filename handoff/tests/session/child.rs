//! A rank in a process of its own. The test binary runs itself again as such a process.

use crate::ranks::{Group, Rank};
use kvpool_handoff::plan::PageLayout;
use kvpool_handoff::room::RoomId;
use kvpool_handoff::session::Sending;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const ROLE: &str = "KVPOOL_HANDOFF_CHILD";

pub(crate) fn group() -> Group {
    Group::of(1, &[2], PageLayout::TokenMajor)
}

/// A rank in another process. Dropping it kills the process.
pub(crate) struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pub(crate) address: String,
}

impl Process {
    pub(crate) fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "child::rank_of_another_process",
                "--ignored",
                "--nocapture",
            ])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut process = Self {
            child,
            input,
            output,
            address: String::new(),
        };
        process.address = process.answer("address");
        process
    }

    fn answer(&mut self, key: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.output.read_line(&mut line).unwrap();
            assert!(read > 0, "the process ended");
            // The test harness prints lines of its own before and beside the answer.
            if let Some(at) = line.find(&format!("{key}=")) {
                return line[at + key.len() + 1..].trim().to_owned();
            }
        }
    }

    /// Sends a command and waits for its answer.
    pub(crate) fn tell(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.answer("done")
    }

    /// The number of the process's threads with this name. The kernel keeps 15 bytes of a name.
    pub(crate) fn threads(&self, name: &str) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        // A thread may end meanwhile.
        let name_of = |task: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
        };
        let names = tasks.filter_map(name_of);
        names.filter(|found| found.trim_end() == name).count()
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have been killed already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Not a test: the program of a child. Commands: `send ROOM PAGES`, `produce FROM TO`, `produce_each FROM TO`
/// (a chunk for each page), `finish`, `receive ROOM PAGES ADDRESS`, `pinned`, `poll`.
#[test]
#[ignore = "what a child of other tests runs"]
fn rank_of_another_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let rank = Rank::start(&group(), 0, 0);
    println!("address={}", rank.address());
    let mut sending: Option<Sending> = None;
    // Dropping a handle would abort its request.
    let (mut earlier, mut earlier_receiving) = (Vec::new(), Vec::new());
    let mut receiving = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words[index].parse::<u32>().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        match words[0] {
            "send" => {
                earlier.extend(sending.take());
                let pages: Vec<u32> = (0..number(2)).collect();
                rank.fill(&pages);
                let room = RoomId(number(1).into());
                sending = Some(rank.session.send(room, pages, 1, deadline).unwrap());
            }
            "produce" => {
                let sending = sending.as_ref().unwrap();
                sending.produced(number(1)..number(2), 0..2).unwrap();
            }
            "produce_each" => {
                let sending = sending.as_ref().unwrap();
                for page in number(1)..number(2) {
                    sending.produced(page..page + 1, 0..2).unwrap();
                }
            }
            "finish" => sending.as_ref().unwrap().finish(Vec::new()).unwrap(),
            "receive" => {
                let room = RoomId(number(1).into());
                let pages = (0, (0..number(2)).collect());
                let (layers, from) = (group().layers(), [words[3].to_owned()]);
                let call = rank
                    .session
                    .receive(room, pages, &from, (1, &layers), false, deadline);
                earlier_receiving.extend(receiving.replace(call.unwrap()));
            }
            "poll" => {
                let poll = match (&sending, &receiving) {
                    (Some(sending), _) => sending.state().poll,
                    (_, Some(receiving)) => receiving.state().poll,
                    _ => panic!("nothing is open"),
                };
                println!("done={}", poll.number());
                continue;
            }
            "pinned" => {
                println!("done={}", rank.session.pinned());
                continue;
            }
            other => panic!("an unknown command: {other}"),
        }
        println!("done=ok");
    }
}
