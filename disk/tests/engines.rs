//! The rules of every engine: on a file, in the page cache, in memory, and behind an engine without
//! faults.

use kvpool_disk::{
    Arena, Buffer, Choice, Completion, Engine, EngineKind, Fault, Faulty, GRANULE, IoError, Memory,
    Op, OpenError, Options, Request, check, check_directory, open,
};
use kvpool_transport::memory::Region;
use kvpool_types::{Length, Offset};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const SIZE: u64 = 8 << 20;
const WAIT: Duration = Duration::from_secs(60);

fn arena() -> Arc<Arena> {
    Arena::new(8 << 20).unwrap()
}

/// A directory on a filesystem with direct I/O, as the build's own is.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn options(engine: Choice) -> Options {
    Options {
        size: Some(SIZE),
        engine,
        ..Options::default()
    }
}

/// Runs a check on every engine.
fn each(check: impl Fn(&str, Arc<dyn Engine>, &Arc<Arena>)) {
    let arena = arena();
    let disk = on_disk();
    let file = disk.path().join("file");
    match open(&file, &options(Choice::Uring), &arena) {
        Ok(engine) => check("io_uring", engine, &arena),
        Err(error) => println!("skipped: io_uring cannot be used here: {error}"),
    }
    let threads = open(&file, &options(Choice::Threads), &arena).unwrap();
    check("threads", threads, &arena);
    for choice in [Choice::Auto, Choice::Threads] {
        let buffered = Options {
            buffered: true,
            ..options(choice)
        };
        check(
            "the page cache",
            open(&file, &buffered, &arena).unwrap(),
            &arena,
        );
    }
    let memory = Arc::new(Memory::new(usize::try_from(SIZE).unwrap()));
    check("memory", memory.clone(), &arena);
    check("no faults", Arc::new(Faulty::new(memory)), &arena);
}

/// Does one request and waits for its end.
fn run(engine: &dyn Engine, op: Op, offset: u64) -> Completion {
    let (done, ended) = mpsc::channel();
    let done = Box::new(move |completion| done.send(completion).unwrap());
    engine.submit(Request { op, offset, done });
    ended.recv_timeout(WAIT).expect("every request ends")
}

fn filled(arena: &Arc<Arena>, bytes: usize, seed: u64) -> Buffer {
    let mut buffer = arena.take_within(bytes, Instant::now() + WAIT).unwrap();
    StdRng::seed_from_u64(seed).fill(&mut buffer[..]);
    buffer
}

#[test]
fn what_was_written_is_read_at_every_size_and_place() {
    each(|name, engine, arena| {
        assert_eq!(engine.size(), SIZE, "{name}");
        for (seed, granules) in [1, 2, 3, 16, 17, 64, 256, 1024].into_iter().enumerate() {
            let bytes = granules * GRANULE;
            let last = SIZE - bytes as u64;
            for offset in [0, GRANULE as u64, last / 2 / 4096 * 4096, last] {
                let written = run(
                    &*engine,
                    Op::Write(filled(arena, bytes, seed as u64)),
                    offset,
                );
                written.result.unwrap();
                let wanted = written.buffer.expect("the buffer comes back").to_vec();
                let read = run(&*engine, Op::Read(arena.take(bytes).unwrap()), offset);
                read.result.unwrap();
                assert!(
                    read.buffer.unwrap()[..] == wanted[..],
                    "{name}: {bytes} at {offset}"
                );
            }
        }
        run(&*engine, Op::Flush, 0).result.unwrap();
        assert_eq!(engine.in_flight(), 0, "{name}");
    });
}

#[test]
fn a_read_fills_a_buffer_and_then_memory_of_others() {
    each(|name, engine, arena| {
        for (seed, (first, rest)) in [(1, 1), (1, 16), (2, 255), (1, 1024)]
            .into_iter()
            .enumerate()
        {
            let bytes = (first + rest) * GRANULE;
            for offset in [0, GRANULE as u64, SIZE - bytes as u64] {
                let written = filled(arena, bytes, seed as u64);
                let written = run(&*engine, Op::Write(written), offset);
                let wanted = written.buffer.unwrap().to_vec();
                // Bytes before and after the memory stay as they are.
                let around = Region::allocate(Length((rest as u64 + 2) * GRANULE as u64)).whole();
                around.write_at(Offset(0), &vec![7; around.length().as_usize()]);
                let memory = around.slice(Offset(GRANULE as u64), Length((rest * GRANULE) as u64));
                let buffer = arena.take(first * GRANULE).unwrap();
                let read = run(&*engine, Op::ReadInto(buffer, memory.unwrap()), offset);
                read.result.unwrap();
                let (buffer, memory) = (read.buffer.unwrap(), read.memory.unwrap());
                let (head, tail) = wanted.split_at(first * GRANULE);
                assert!(buffer[..] == *head, "{name}: {bytes} at {offset}");
                assert!(memory.to_vec() == tail, "{name}: {bytes} at {offset}");
                let edges = around.to_vec();
                let (begin, end) = (&edges[..GRANULE], &edges[edges.len() - GRANULE..]);
                assert!(begin.iter().chain(end).all(|byte| *byte == 7), "{name}");
            }
        }
        assert_eq!(arena.free(), arena.size(), "{name}: every buffer came back");
    });
}

/// Sixty-four at a time, of random sizes: none gets the bytes or the end of another.
#[test]
fn requests_in_progress_together_do_not_disturb_each_other() {
    each(|name, engine, arena| {
        let mut draws = StdRng::seed_from_u64(7);
        let mut content: BTreeMap<u64, u64> = BTreeMap::new();
        let (done, ended) = mpsc::channel::<(u64, u64, bool, Completion)>();
        let slot = 32 * GRANULE as u64;
        let submit = |op, place: u64, seed, is_read| {
            let done = done.clone();
            engine.submit(Request {
                op,
                offset: place * slot,
                done: Box::new(move |end| done.send((place, seed, is_read, end)).unwrap()),
            });
        };
        let places: Vec<u64> = (0..SIZE / slot).collect();
        let mut busy: Vec<u64> = Vec::new();
        for step in 0..3000u64 {
            while busy.len() >= 60 {
                let (place, seed, is_read, end) = ended.recv_timeout(WAIT).expect(name);
                settle(name, place, seed, is_read, end, arena);
                busy.retain(|other| *other != place);
            }
            let free: Vec<u64> = places
                .iter()
                .copied()
                .filter(|place| !busy.contains(place))
                .collect();
            let place = *free.choose(&mut draws).unwrap();
            let granules = 1 + usize::try_from(place % 16).unwrap();
            busy.push(place);
            match content.get(&place) {
                Some(seed) if draws.random() => {
                    let buffer = arena
                        .take_within(granules * GRANULE, Instant::now() + WAIT)
                        .unwrap();
                    submit(Op::Read(buffer), place, *seed, true);
                }
                _ => {
                    content.insert(place, step);
                    submit(
                        Op::Write(filled(arena, granules * GRANULE, step)),
                        place,
                        step,
                        false,
                    );
                }
            }
        }
        for _ in busy {
            let (place, seed, is_read, end) = ended.recv_timeout(WAIT).expect(name);
            settle(name, place, seed, is_read, end, arena);
        }
        assert_eq!(arena.free(), arena.size(), "{name}: every buffer came back");
    });
}

fn settle(name: &str, place: u64, seed: u64, is_read: bool, end: Completion, arena: &Arc<Arena>) {
    end.result.unwrap();
    let buffer = end.buffer.unwrap();
    if is_read {
        let wanted = filled(arena, buffer.len(), seed);
        assert!(buffer[..] == wanted[..], "{name}: place {place}");
    }
}

#[test]
fn a_range_outside_and_one_that_is_not_aligned_are_refused() {
    each(|name, engine, arena| {
        for (offset, bytes) in [
            (SIZE, 1),
            (SIZE - 4096, 2),
            (u64::MAX - 4095, 1),
            (SIZE * 2, 1),
        ] {
            let buffer = || arena.take(bytes * GRANULE).unwrap();
            for op in [Op::Read(buffer()), Op::Write(buffer())] {
                let end = run(&*engine, op, offset);
                assert!(
                    matches!(end.result, Err(IoError::OutOfRange)),
                    "{name}: {end:?}"
                );
                assert!(end.buffer.is_some());
            }
        }
        let end = run(&*engine, Op::Read(arena.take(GRANULE).unwrap()), 512);
        assert!(
            matches!(end.result, Err(IoError::Unaligned)),
            "{name}: {end:?}"
        );
        let memory = Region::allocate(Length(2 * GRANULE as u64)).whole();
        let apart = memory.slice(Offset(512), Length(GRANULE as u64)).unwrap();
        let buffer = || arena.take(GRANULE).unwrap();
        let end = run(&*engine, Op::ReadInto(buffer(), apart), 0);
        assert!(
            matches!(end.result, Err(IoError::Unaligned)),
            "{name}: {end:?}"
        );
        let end = run(&*engine, Op::ReadInto(buffer(), memory), SIZE - 4096);
        assert!(
            matches!(end.result, Err(IoError::OutOfRange)),
            "{name}: {end:?}"
        );
        assert!(end.memory.is_some());
    });
}

#[test]
fn the_end_of_an_engine_waits_for_all_requests() {
    each(|name, engine, arena| {
        let ended = Arc::new(AtomicUsize::new(0));
        for place in 0..200u64 {
            let ended = Arc::clone(&ended);
            let buffer = arena
                .take_within(4 * GRANULE, Instant::now() + WAIT)
                .unwrap();
            engine.submit(Request {
                op: Op::Write(buffer),
                offset: place % 100 * 4 * 4096,
                done: Box::new(move |end| {
                    end.result.unwrap();
                    ended.fetch_add(1, Ordering::SeqCst);
                }),
            });
        }
        let is_shared = name == "memory";
        drop(engine);
        assert!(is_shared || ended.load(Ordering::SeqCst) == 200, "{name}");
    });
}

/// A file that another process cut has less than the engine believes.
#[test]
fn a_file_that_was_cut_gives_an_error_and_no_bytes() {
    let (arena, disk) = (arena(), on_disk());
    let file = disk.path().join("file");
    for choice in [Choice::Auto, Choice::Threads] {
        let engine = open(&file, &options(choice), &arena).unwrap();
        std::fs::File::options()
            .write(true)
            .open(&file)
            .unwrap()
            .set_len(SIZE / 2)
            .unwrap();
        let end = run(
            &*engine,
            Op::Read(arena.take(2 * GRANULE).unwrap()),
            SIZE / 2 - 4096,
        );
        let Err(IoError::Short { wanted, done }) = end.result else {
            panic!("{end:?}");
        };
        assert_eq!((wanted, done), (2 * 4096, 4096));
        // The file ends in the memory, in the buffer, and before both.
        for (before, done) in [(3, 3), (2, 2), (1, 1), (0, 0)] {
            let memory = Region::allocate(Length(4 * 4096)).whole();
            let op = Op::ReadInto(arena.take(2 * GRANULE).unwrap(), memory);
            let end = run(&*engine, op, SIZE / 2 - before * 4096);
            let Err(IoError::Short { wanted, done: got }) = end.result else {
                panic!("{end:?}");
            };
            assert_eq!((wanted, got), (6 * 4096, done * 4096));
        }
        drop(engine);
        std::fs::remove_file(&file).unwrap();
    }
}

#[test]
fn a_second_opener_and_impossible_sizes_are_refused_by_name() {
    let (arena, disk) = (arena(), on_disk());
    let file = disk.path().join("file");
    let first = open(&file, &options(Choice::Auto), &arena).unwrap();
    let second = open(&file, &options(Choice::Auto), &arena);
    assert!(
        matches!(second, Err(OpenError::Busy { .. })),
        "{:?}",
        second.err()
    );
    // Another process is refused too.
    let script = r#"flock --nonblock --exclusive "$0" true"#;
    let other = std::process::Command::new("sh")
        .args(["-c", script])
        .arg(&file)
        .status();
    assert!(!other.unwrap().success());
    drop(first);
    let size = |size| Options {
        size,
        ..options(Choice::Auto)
    };
    for (path, wanted) in [
        (&file, Some(SIZE / 2)),
        (&file, Some(SIZE + 1)),
        (&file, Some(0)),
    ] {
        let refused = open(path, &size(wanted), &arena);
        assert!(
            matches!(refused, Err(OpenError::Size { .. })),
            "{:?}",
            refused.err()
        );
    }
    let missing = open(&disk.path().join("none"), &size(None), &arena);
    assert!(matches!(missing, Err(OpenError::Missing { .. })));
    let folder = open(disk.path(), &size(None), &arena);
    assert!(matches!(folder, Err(OpenError::Directory { .. })));
    let nowhere = open(&disk.path().join("none/file"), &size(Some(SIZE)), &arena);
    assert!(
        matches!(&nowhere, Err(OpenError::NoDirectory { path }) if *path == disk.path().join("none")),
        "{:?}",
        nowhere.err()
    );
    let null = open(Path::new("/dev/null"), &size(None), &arena);
    assert!(matches!(null, Err(OpenError::Kind { .. })));
    // As it is, and larger.
    let engine = open(&file, &size(None), &arena).unwrap();
    assert_eq!(engine.size(), SIZE);
    drop(engine);
    assert_eq!(
        open(&file, &size(Some(2 * SIZE)), &arena).unwrap().size(),
        2 * SIZE
    );
}

#[test]
fn a_reader_cannot_write_and_has_other_readers_beside_it() {
    let (arena, disk) = (arena(), on_disk());
    let file = disk.path().join("file");
    drop(open(&file, &options(Choice::Threads), &arena).unwrap());
    let to_read = Options {
        size: None,
        read_only: true,
        ..options(Choice::Threads)
    };
    let reader = open(&file, &to_read, &arena).unwrap();
    let other = open(&file, &to_read, &arena).unwrap();
    assert_eq!((reader.size(), other.size()), (SIZE, SIZE));
    let read = run(&*reader, Op::Read(arena.take(GRANULE).unwrap()), 0);
    read.result.unwrap();
    let written = run(&*reader, Op::Write(filled(&arena, GRANULE, 1)), 0);
    assert!(written.result.is_err());
    drop(other);
    let writer = open(&file, &options(Choice::Threads), &arena);
    assert!(
        matches!(writer, Err(OpenError::Busy { .. })),
        "{:?}",
        writer.err()
    );
    drop(reader);
    let _writer = open(&file, &options(Choice::Threads), &arena).unwrap();
    let reader = open(&file, &to_read, &arena);
    assert!(
        matches!(reader, Err(OpenError::Busy { .. })),
        "{:?}",
        reader.err()
    );
}

/// Such a file was made by another program, for instance with 100 GB.
#[test]
fn a_file_with_a_part_of_a_granule_at_its_end_keeps_it() {
    let (arena, disk) = (arena(), on_disk());
    let file = disk.path().join("file");
    std::fs::write(&file, vec![0; usize::try_from(SIZE).unwrap() + 100]).unwrap();
    for size in [Some(SIZE), None] {
        let wanted = Options {
            size,
            ..options(Choice::Threads)
        };
        assert_eq!(open(&file, &wanted, &arena).unwrap().size(), SIZE);
        assert_eq!(std::fs::metadata(&file).unwrap().len(), SIZE + 100);
    }
}

#[test]
fn a_file_takes_all_its_room_when_it_is_made() {
    use std::os::unix::fs::MetadataExt;
    let (arena, disk) = (arena(), on_disk());
    let file = disk.path().join("file");
    let _engine = open(&file, &options(Choice::Auto), &arena).unwrap();
    assert!(std::fs::metadata(&file).unwrap().blocks() * 512 >= SIZE);
    let much = Options {
        size: Some(1 << 50),
        ..options(Choice::Auto)
    };
    let file = disk.path().join("much");
    let refused = open(&file, &much, &arena);
    assert!(
        matches!(refused, Err(OpenError::Size { .. })),
        "{:?}",
        refused.err()
    );
    assert!(!file.exists(), "an empty file stays");
}

#[test]
fn a_check_finds_what_an_open_refuses_and_makes_no_file() {
    let disk = on_disk();
    let file = disk.path().join("file");
    let fault = |path: &Path, size| match check(path, size) {
        Ok(()) => "none",
        Err(OpenError::Missing { .. }) => "missing",
        Err(OpenError::NoDirectory { .. }) => "no directory",
        Err(OpenError::Directory { .. }) => "a directory",
        Err(OpenError::Size { .. }) => "size",
        Err(_) => "another",
    };
    assert_eq!(fault(&file, None), "missing");
    assert_eq!(fault(&file, Some(SIZE)), "none");
    assert_eq!(fault(&file, Some(SIZE + 1)), "size");
    assert_eq!(fault(&file, Some(1 << 50)), "size");
    assert_eq!(fault(disk.path(), Some(SIZE)), "a directory");
    let nowhere = disk.path().join("none/file");
    assert_eq!(fault(&nowhere, Some(SIZE)), "no directory");
    // A link may lead to a filesystem with more room.
    let link = disk.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert_eq!(fault(&link, Some(1 << 50)), "none");
    assert!(!file.exists());
    assert!(check_directory(disk.path()).is_ok());
    let nowhere = check_directory(&disk.path().join("none"));
    assert!(matches!(nowhere, Err(OpenError::NoDirectory { .. })));
}

/// The processor time of all threads of this process.
fn used() -> Duration {
    let mut sum = 0;
    for thread in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let stat = std::fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
        let first = stat.split_whitespace().next().unwrap_or("0");
        sum += first.parse::<u64>().unwrap_or(0);
    }
    Duration::from_nanos(sum)
}

/// nextest gives each test a process of its own.
#[test]
fn an_idle_engine_costs_no_processor_time() {
    let (arena, disk) = (arena(), on_disk());
    let engine = open(&disk.path().join("file"), &options(Choice::Auto), &arena).unwrap();
    run(&*engine, Op::Flush, 0).result.unwrap();
    let before = used();
    std::thread::sleep(Duration::from_secs(1));
    let spent = used() - before;
    assert!(spent < Duration::from_millis(10), "{spent:?} of a second");
}

#[test]
fn where_io_uring_is_blocked_threads_serve() {
    use seccompiler::{SeccompAction, SeccompFilter};
    // A filter applies to the thread that sets it, and to the threads that this thread starts.
    let blocked = std::thread::spawn(|| {
        let calls = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter];
        let filter = SeccompFilter::new(
            calls.into_iter().map(|call| (call, Vec::new())).collect(),
            SeccompAction::Allow,
            SeccompAction::Errno(libc::EPERM as u32),
            std::env::consts::ARCH.try_into().unwrap(),
        )
        .unwrap();
        let filter: seccompiler::BpfProgram = filter.try_into().unwrap();
        seccompiler::apply_filter(&filter).unwrap();
        let (arena, disk) = (arena(), on_disk());
        let file = disk.path().join("file");
        let refused = open(&file, &options(Choice::Uring), &arena);
        assert!(
            matches!(&refused, Err(OpenError::System { source, .. }) if source.raw_os_error() == Some(libc::EPERM)),
            "{:?}",
            refused.err()
        );
        let engine = open(&file, &options(Choice::Auto), &arena).unwrap();
        assert_eq!(engine.kind(), EngineKind::Threads);
        let written = run(&*engine, Op::Write(filled(&arena, GRANULE, 1)), 0);
        let wanted = written.buffer.unwrap().to_vec();
        let read = run(&*engine, Op::Read(arena.take(GRANULE).unwrap()), 0);
        assert!(read.buffer.unwrap()[..] == wanted[..]);
    });
    blocked.join().unwrap();
}

/// The rest of [`with_little_locked_memory_the_ring_serves_without_registered_buffers`], as a user
/// who may lock 64 KiB.
#[test]
#[ignore = "run by another test, as another user"]
fn the_ring_of_a_user_who_may_lock_little() {
    let folder = PathBuf::from(std::env::var_os("KVPOOL_DISK_FOLDER").unwrap());
    let arena = arena();
    let engine = open(&folder.join("file"), &options(Choice::Auto), &arena).unwrap();
    let written = run(&*engine, Op::Write(filled(&arena, 1 << 20, 1)), 4096);
    let wanted = written.buffer.unwrap().to_vec();
    let read = run(&*engine, Op::Read(arena.take(1 << 20).unwrap()), 4096);
    read.result.unwrap();
    assert!(read.buffer.unwrap()[..] == wanted[..]);
}

#[test]
fn with_little_locked_memory_the_ring_serves_without_registered_buffers() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let open_to_all = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(folder.path(), open_to_all.clone()).unwrap();
    // The other user may not be allowed into the build's folder.
    let test = folder.path().join("test");
    std::fs::copy(std::env::current_exe().unwrap(), &test).unwrap();
    std::fs::set_permissions(&test, open_to_all).unwrap();
    let run = std::process::Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .args(["prlimit", "--memlock=65536"])
        .arg(&test)
        .args([
            "--ignored",
            "--exact",
            "the_ring_of_a_user_who_may_lock_little",
        ])
        .env("KVPOOL_DISK_FOLDER", folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    if text.contains("setpriv:") || String::from_utf8_lossy(&run.stderr).contains("setpriv:") {
        println!("skipped: this user cannot become another one");
        return;
    }
    assert!(run.status.success() && text.contains("1 passed"), "{run:?}");
}

#[test]
fn faults_are_what_they_are_called() {
    let arena = arena();
    let memory = Arc::new(Memory::new(usize::try_from(SIZE).unwrap()));
    let engine = Faulty::new(memory);
    let read = |at: u64| run(&engine, Op::Read(arena.take(GRANULE).unwrap()), at);
    let write = |at: u64| run(&engine, Op::Write(filled(&arena, GRANULE, at)), at);
    engine.on_reads(4096..8192, 1, Fault::Errno(libc::EIO));
    read(0).result.unwrap();
    assert!(matches!(read(4096).result, Err(IoError::Medium(_))));
    read(4096).result.unwrap();
    for (errno, is_it) in [
        (
            libc::ENOSPC,
            (|e| matches!(e, IoError::NoSpace)) as fn(&IoError) -> bool,
        ),
        (libc::EROFS, |e| matches!(e, IoError::ReadOnly)),
        (libc::ENODEV, |e| matches!(e, IoError::Gone(_))),
        (libc::ENXIO, |e| matches!(e, IoError::Gone(_))),
        (libc::EINVAL, |e| matches!(e, IoError::System(_))),
    ] {
        engine.on_writes(0..SIZE, 1, Fault::Errno(errno));
        let error = write(0).result.unwrap_err();
        assert!(is_it(&error), "{error:?}");
    }
    engine.on_reads(0..SIZE, 1, Fault::Short(512));
    assert!(matches!(
        read(0).result,
        Err(IoError::Short { done: 512, .. })
    ));
    write(8192).result.unwrap();
    let right = read(8192).buffer.unwrap().to_vec();
    engine.on_reads(0..SIZE, 1, Fault::Flip(9));
    let mut wrong = read(8192).buffer.unwrap().to_vec();
    wrong[1] ^= 2;
    assert!(wrong == right);
    engine.on_writes(0..SIZE, 1, Fault::Lost);
    write(0).result.unwrap();
    let began = Instant::now();
    engine.on_reads(0..SIZE, 1, Fault::Delay(Duration::from_millis(50)));
    read(0).result.unwrap();
    assert!(began.elapsed() >= Duration::from_millis(50));
    engine.on_all(Fault::Errno(libc::ENODEV));
    assert!(matches!(
        run(&engine, Op::Flush, 0).result,
        Err(IoError::Gone(_))
    ));
    engine.mend();
    run(&engine, Op::Flush, 0).result.unwrap();
}

/// A block device over a file, for as long as the value lives.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path) -> Option<Self> {
        let made = std::process::Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output()
            .ok()?;
        let path = String::from_utf8(made.stdout).ok()?;
        made.status.success().then(|| Self(path.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let ended = std::process::Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
        assert!(ended.unwrap().success());
    }
}

#[test]
fn a_device_that_the_system_uses_is_refused_and_kept_from_it() {
    use rustix::fs::{Mode, OFlags};
    let disk = on_disk();
    let file = disk.path().join("file");
    std::fs::write(&file, vec![0; usize::try_from(SIZE).unwrap()]).unwrap();
    let Some(device) = Loop::over(&file) else {
        println!("skipped: no loop device can be made here (it needs root and losetup)");
        return;
    };
    let arena = arena();
    let whole = |patience| Options {
        patience,
        ..Options::default()
    };
    // A mount and mkfs take a device so.
    let take = || rustix::fs::open(&device.0, OFlags::RDWR | OFlags::EXCL, Mode::empty());
    let taken = take().unwrap();
    let refused = open(&device.0, &whole(Duration::ZERO), &arena);
    assert!(
        matches!(refused, Err(OpenError::DeviceBusy { .. })),
        "{:?}",
        refused.err()
    );
    // A short use by another process is waited for.
    let freed = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(taken);
    });
    let engine = open(&device.0, &whole(WAIT), &arena).unwrap();
    freed.join().unwrap();
    assert_eq!(engine.size(), SIZE);
    assert_eq!(take().unwrap_err(), rustix::io::Errno::BUSY);
    drop(engine);
    take().unwrap();
}
