//! The guarantees of shared memory alone.

// UNSAFETY: maps memory and shuts sockets down by hand, like a faulty client.
#![allow(unsafe_code, reason = "does what no safe client can")]

use super::*;
use crate::host::CLIENT;
use kvpool_transport::shm::{Server, ServerHandle, ServerOptions, connect};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const SOCKET: &str = "KVPOOL_TEST_SOCKET";
const HOLD: &str = "KVPOOL_TEST_HOLD";
const NUMBER: &str = "KVPOOL_TEST_NUMBER";

fn serve(path: &Path, host: &Arc<TestHost>) -> ServerHandle {
    Server::start(path, host.clone(), ServerOptions::default()).unwrap()
}

#[test]
fn a_pinned_view_is_the_memory_itself() {
    let Opened { link, host, .. } = &open(TransportKind::Shm, 1 << 20);
    let extent = host.stored(b"in place");
    let view = wait(link.pin(EPOCH, extent, soon())).unwrap();
    assert!(host.wait_for(|held| held.pins == 1));
    assert_eq!(view.to_vec(), b"in place");
    // It is no copy: a change of the segment shows.
    host.slice(&extent).write_at(Offset(0), b"IN");
    assert_eq!(view.to_vec(), b"IN place");
    assert!(!view.is_writable());
    let part = view.slice(Offset(3), Length(5)).unwrap();
    drop(view);
    std::thread::sleep(Duration::from_millis(50));
    assert!(host.wait_for(|held| held.pins == 1), "a part keeps the pin");
    assert_eq!(part.to_vec(), b"place");
    drop(part);
    assert!(host.wait_for(|held| held.pins == 0));
}

#[test]
fn a_view_outlives_its_link() {
    let host = TestHost::new(Length(1 << 20));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.sock");
    let _server = serve(&path, &host);
    let extent = host.stored(b"in place");
    let link = connect(&path, host.hello(), soon()).unwrap().0;
    let view = wait(link.pin(EPOCH, extent, soon())).unwrap();
    drop(link);
    std::thread::sleep(Duration::from_millis(50));
    assert!(host.wait_for(|held| held.pins == 1));
    assert_eq!(view.to_vec(), b"in place");
    drop(view);
    assert!(host.wait_for(|held| held.pins == 0));
}

#[test]
fn a_late_pin_is_removed() {
    let Opened { link, host, .. } = &open(TransportKind::Shm, 1 << 20);
    let extent = host.stored(b"in place");
    drop(link.pin(EPOCH, extent, soon()));
    // The link answers in order, so the pin has been answered too.
    let _sums = wait(link.sums(EPOCH, vec![extent.into()], soon()));
    assert!(host.wait_for(|held| held.pins == 0));
    let outside = Extent {
        offset: Offset(1 << 30),
        ..extent
    };
    let refused = wait(link.pin(EPOCH, outside, soon()));
    assert_eq!(refused.unwrap_err().code, Code::OutOfRange);
}

#[test]
fn a_read_only_mapping_cannot_be_made_writable() {
    use kvpool_transport::host::ShmHost;
    let host = TestHost::new(Length(1 << 20));
    let (fd, length) = host.map(Incarnation(77), SEGMENT, false).unwrap();
    let refused = Region::map(std::os::fd::AsFd::as_fd(&fd), length, true);
    assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EACCES));
    // SAFETY: no address is asked for, so the kernel maps over no memory in use.
    let start = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            length.as_usize(),
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::SHARED,
            &fd,
            0,
        )
    }
    .unwrap();
    let writable = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
    // SAFETY: the range is the mapping that was just made, and nothing refers to it.
    let changed = unsafe { rustix::mm::mprotect(start, length.as_usize(), writable) };
    assert_eq!(changed, Err(rustix::io::Errno::ACCESS));
    // SAFETY: as above.
    unsafe { rustix::mm::munmap(start, length.as_usize()) }.unwrap();
}

#[test]
fn the_socket_of_a_dead_server_is_replaced_and_of_a_live_one_is_not() {
    use std::os::unix::fs::PermissionsExt;
    let host = TestHost::new(Length(4096));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = serve(&path, &host);
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = Server::start(&path, host.clone(), ServerOptions::default());
    assert_eq!(second.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    drop(server);
    assert!(!path.exists());
    std::fs::write(&path, "a file of somebody's").unwrap();
    let third = Server::start(&path, host.clone(), ServerOptions::default());
    assert_eq!(third.unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
    assert!(path.exists());
}

#[test]
fn a_link_to_an_ended_node_is_not_open() {
    let host = TestHost::new(Length(1 << 20));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.sock");
    let server = serve(&path, &host);
    let link = connect(&path, host.hello(), soon()).unwrap().0;
    assert!(link.is_open());
    drop(server);
    let deadline = soon();
    while link.is_open() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let grant = host.grant(100);
    let written = wait(link.write(vec![write_op(grant, &[1; 100])], soon()));
    assert_eq!(codes(&written), [Code::Unreachable]);
}

/// Runs in a separate process: holds a view, then waits to be killed.
#[test]
#[ignore = "the process that another test starts and kills"]
fn holder() {
    let Ok(path) = std::env::var(SOCKET) else {
        return;
    };
    let number: u64 = std::env::var(NUMBER).unwrap().parse().unwrap();
    let hello = kvpool_types::wire::data::Hello {
        client: kvpool_types::ClientId(CLIENT.0 + u128::from(number)),
        ..TestHost::new(Length(4096)).hello()
    };
    let link = connect(Path::new(&path), hello, soon()).unwrap().0;
    let extent = Extent {
        segment: SEGMENT,
        offset: Offset(number * 4096),
        length: Length(4096),
    };
    // Not on the common runtime, whose sockets must not be shut down.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let view = runtime.block_on(link.pin(EPOCH, extent, soon())).unwrap();
    if std::env::var(HOLD).unwrap() == "closed" {
        // The socket closes but the mapping stays: the process may still read it.
        let view = std::mem::ManuallyDrop::new(view);
        shut_sockets_down();
        assert_eq!(view.length(), Length(4096));
        loop {
            std::thread::park();
        }
    }
    loop {
        std::thread::park();
    }
}

/// Shuts down every socket of this process, as a fault might.
fn shut_sockets_down() {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    for entry in links.flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target.to_string_lossy().starts_with("socket:") {
            let fd: i32 = entry.file_name().to_string_lossy().parse().unwrap();
            // SAFETY: the descriptor was open just now, and only this test opens and closes any.
            let socket = unsafe { BorrowedFd::borrow_raw(fd) };
            rustix::net::shutdown(socket, rustix::net::Shutdown::Both).unwrap();
        }
    }
}

fn start_holder(path: &Path, hold: &str) -> Child {
    start_holder_of(path, hold, 0)
}

/// Starts a client for each number, which holds the page of that number.
fn start_holder_of(path: &Path, hold: &str, number: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "shm::holder", "--ignored"])
        .env(SOCKET, path)
        .env(HOLD, hold)
        .env(NUMBER, number.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn a_dead_process_frees_its_holdings_and_a_closed_connection_does_not() {
    let host = TestHost::new(Length(1 << 20));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.sock");
    let server = serve(&path, &host);
    let _extent = host.stored(&[1; 4096]);
    for hold in ["open", "closed"] {
        let mut holder = start_holder(&path, hold);
        assert!(host.wait_for(|held| held.pins == 1));
        if hold == "closed" {
            let deadline = soon();
            while server.connections() > 0 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(server.connections(), 0);
            std::thread::sleep(Duration::from_millis(200));
        }
        let gone_before = usize::from(hold == "closed");
        assert!(
            host.wait_for(|held| held.pins == 1 && held.gone == gone_before),
            "{hold}: the view is held while the process lives"
        );
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert!(host.wait_for(|held| held.pins == 0 && held.gone == gone_before + 1));
    }
    assert_eq!(host.hello().client, CLIENT);
}

#[test]
fn a_stopped_process_keeps_its_holdings() {
    let host = TestHost::new(Length(1 << 20));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.sock");
    let _server = serve(&path, &host);
    let _extent = host.stored(&[1; 4096]);
    let mut holder = start_holder(&path, "open");
    assert!(host.wait_for(|held| held.pins == 1));
    let pid = rustix::process::Pid::from_child(&holder);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(host.wait_for(|held| held.pins == 1 && held.gone == 0));
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(host.wait_for(|held| held.pins == 0 && held.gone == 1));
}

/// A node in its own pid namespace, which cannot see outside process ids. For each line of its
/// input it prints whether that many extents became pinned and that many processes exited.
#[test]
#[ignore = "the process that another test starts"]
fn node_that_cannot_see_its_clients() {
    let Ok(path) = std::env::var(SOCKET) else {
        return;
    };
    let host = TestHost::new(Length(1 << 20));
    let _server = serve(Path::new(&path), &host);
    let _extents = [host.stored(&[1; 4096]), host.stored(&[2; 4096])];
    eprintln!("serving");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (pins, gone) = line.split_once(' ').unwrap();
        let (pins, gone): (usize, usize) = (pins.parse().unwrap(), gone.parse().unwrap());
        let reached = host.wait_for(|held| held.pins == pins && held.gone == gone);
        eprintln!("{reached}");
    }
}

/// Why no node can get its own pid namespace here, if none can.
fn no_namespaces() -> Option<String> {
    let tried = Command::new("unshare").args(["-p", "-f", "true"]).output();
    match tried {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(error.to_string()),
    }
}

/// Whether the kernel gives a pidfd for an invisible peer: since Linux 6.5.
fn tells_of_unseen_peers() -> bool {
    let peer_pidfd = 77;
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let (mut pidfd, mut length) = (-1i32, 4u32);
    // SAFETY: the kernel writes at most the four bytes that are given.
    let known = unsafe {
        libc::getsockopt(
            std::os::fd::AsRawFd::as_raw_fd(&socket),
            libc::SOL_SOCKET,
            peer_pidfd,
            (&raw mut pidfd).cast(),
            &raw mut length,
        )
    };
    if known != 0 {
        return false;
    }
    // SAFETY: the kernel has just created this descriptor and nothing else owns it.
    drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(pidfd) });
    true
}

/// A process that ends with the test, also when the test fails.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _killed = self.0.kill();
        let _ended = self.0.wait();
    }
}

#[test]
fn a_client_in_another_container_keeps_its_view_when_its_neighbour_dies() {
    use std::io::{BufRead, BufReader, Write};
    if let Some(reason) = no_namespaces() {
        eprintln!(
            "SKIPPED a_client_in_another_container_keeps_its_view_when_its_neighbour_dies: {reason}"
        );
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.sock");
    // It ends when its input closes.
    let node = Command::new("unshare")
        .args(["-p", "-f"])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "shm::node_that_cannot_see_its_clients",
            "--ignored",
        ])
        .arg("--nocapture")
        .env(SOCKET, &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut node = Ends(node.unwrap());
    let mut said = BufReader::new(node.0.stderr.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "serving");
    let mut input = node.0.stdin.take().unwrap();
    if !tells_of_unseen_peers() {
        let hello = TestHost::new(Length(4096)).hello();
        let refused = connect(&path, hello, soon());
        assert!(refused.is_err(), "who it is cannot be known");
        return;
    }
    let mut comes_to = |pins: usize, gone: usize| {
        writeln!(input, "{pins} {gone}").unwrap();
        said.next().unwrap().unwrap() == "true"
    };
    let first = Ends(start_holder_of(&path, "open", 0));
    assert!(comes_to(1, 0));
    let second = Ends(start_holder_of(&path, "open", 1));
    assert!(comes_to(2, 0));
    drop(first);
    assert!(comes_to(1, 1));
    std::thread::sleep(Duration::from_millis(200));
    assert!(comes_to(1, 1), "the other one still looks at its view");
    // The second client's holdings do not wait for another client either.
    let third = Ends(start_holder_of(&path, "open", 0));
    assert!(comes_to(2, 1));
    drop(second);
    assert!(comes_to(1, 2));
    drop(third);
    assert!(comes_to(0, 3));
}
