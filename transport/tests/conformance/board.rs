//! Pins without a round trip.

// UNSAFETY: forks, as programs that use a link do.
#![allow(unsafe_code, reason = "a child made by fork cannot be had otherwise")]

use super::*;
use kvpool_transport::shm::{Server, ServerOptions, connect};

/// The first pin of a link with a board. Waits for the board and for the mapping.
fn first_pin(link: &dyn Link, extent: Extent) -> Slice {
    drop(wait(link.pin(EPOCH, extent, soon())).unwrap());
    link.pin_now(EPOCH, extent)
        .expect("answers come in order, and the board's was before the pin's")
}

#[test]
fn a_pin_on_the_board_is_the_memory_itself_and_lasts_as_long_as_the_view() {
    let Opened { link, host, .. } = &open(TransportKind::Shm, 1 << 20);
    let extent = host.stored(b"in place");
    let view = first_pin(&**link, extent);
    assert_eq!(host.on_boards(), [extent]);
    assert_eq!(view.to_vec(), b"in place");
    host.slice(&extent).write_at(Offset(0), b"IN");
    assert_eq!(view.to_vec(), b"IN place");
    assert!(!view.is_writable());
    let part = view.slice(Offset(3), Length(5)).unwrap();
    drop(view);
    assert_eq!(host.on_boards(), [extent], "a part keeps the pin");
    assert_eq!(part.to_vec(), b"place");
    drop(part);
    assert_eq!(host.on_boards(), []);
    assert!(host.wait_for(|held| held.pins == 0), "nobody was asked");
}

#[test]
fn a_pin_that_the_board_refuses_takes_a_round_trip() {
    let Opened { link, host, .. } = &open(TransportKind::Shm, 1 << 20);
    let extent = host.stored(&[1; 4096]);
    assert!(link.pin_now(EPOCH, extent).is_none(), "it is not mapped");
    let view = first_pin(&**link, extent);
    let outside = Extent {
        offset: Offset(1 << 20),
        ..extent
    };
    let elsewhere = Extent {
        segment: kvpool_types::SegmentId(99),
        ..extent
    };
    for (epoch, extent) in [
        (EPOCH, outside),
        (EPOCH, elsewhere),
        (Epoch(4), extent),
        (Epoch(6), extent),
    ] {
        assert!(link.pin_now(epoch, extent).is_none());
    }
    assert_eq!(host.on_boards(), [extent]);

    host.set_epoch(Epoch(6));
    assert!(link.pin_now(EPOCH, extent).is_none());
    let next = link.pin_now(Epoch(6), extent).unwrap();
    assert_eq!(host.on_boards(), [extent; 2]);
    host.set_incarnation(Incarnation(78));
    assert!(link.pin_now(Epoch(6), extent).is_none());
    assert_eq!(host.on_boards(), [extent; 2], "what was pinned stays");
    drop((view, next));
    assert_eq!(host.on_boards(), []);
}

#[test]
fn a_node_without_boards_is_asked_for_each_pin() {
    let host = TestHost::new(Length(1 << 20));
    host.without_boards();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.sock");
    let _server = Server::start(&path, host.clone(), ServerOptions::default()).unwrap();
    let link = connect(&path, host.hello(), soon()).unwrap().0;
    let extent = host.stored(b"in place");
    for _ in 0..2 {
        assert!(link.pin_now(EPOCH, extent).is_none());
        let view = wait(link.pin(EPOCH, extent, soon())).unwrap();
        assert_eq!(view.to_vec(), b"in place");
    }
    assert!(link.is_open());
}

#[test]
fn a_board_outlives_its_link_with_its_pins() {
    let host = TestHost::new(Length(1 << 20));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.sock");
    let _server = Server::start(&path, host.clone(), ServerOptions::default()).unwrap();
    let extent = host.stored(b"in place");
    let link = connect(&path, host.hello(), soon()).unwrap().0;
    let view = first_pin(&*link, extent);
    assert_eq!(host.boards(), (1, 0));
    drop(link);
    let deadline = soon();
    while host.boards() != (1, 1) {
        assert!(Instant::now() < deadline, "the node sees the link's end");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(view.to_vec(), b"in place");
    assert_eq!(host.on_boards(), [extent]);
    drop(view);
    assert_eq!(host.on_boards(), []);
}

#[test]
fn pins_of_many_threads_are_each_seen_and_each_go() {
    let Opened { link, host, .. } = &open(TransportKind::Shm, 1 << 20);
    let extents: Vec<_> = (0..8).map(|_| host.stored(&[1; 4096])).collect();
    drop(first_pin(&**link, extents[0]));
    std::thread::scope(|scope| {
        for extent in &extents {
            scope.spawn(move || {
                for _ in 0..5_000 {
                    let view = link.pin_now(EPOCH, *extent).unwrap();
                    assert!(host.on_boards().contains(extent));
                    drop(view);
                }
            });
        }
    });
    assert_eq!(host.on_boards(), []);
}

#[test]
fn a_child_made_by_fork_touches_neither_mapping_nor_board() {
    let Opened { link, host, .. } = &open(TransportKind::Shm, 1 << 20);
    let extent = host.stored(&[1; 4096]);
    let view = first_pin(&**link, extent);
    let read = [read_op(extent, &room(10))];
    assert!(link.read_now(EPOCH, &read, soon()).is_some());
    let deadline = soon();
    // SAFETY: the child takes no lock of the threads that it has lost, except the allocator's,
    // which fork leaves free.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = link.read_now(EPOCH, &read, deadline).is_none()
            && link.pin_now(EPOCH, extent).is_none();
        drop(view);
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child that was just made; the status goes to a local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "{status:#x}"
    );
    assert_eq!(host.on_boards(), [extent], "the parent's view stays pinned");
    drop(view);
    assert_eq!(host.on_boards(), []);
}
