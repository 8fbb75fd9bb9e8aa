//! A link's mappings of the node's memory.

use super::*;

/// The bytes in the page table of this process's mappings with the given length and permissions;
/// `None` without such a mapping.
fn resident(length: u64, permissions: &str) -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut found = None;
    let mut ours = false;
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (Some(first), Some(second)) = (words.next(), words.next()) else {
            continue;
        };
        if let Some((start, end)) = first.split_once('-') {
            let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
            ours = end - start == length
                && second == permissions
                && line.contains("kvpool-conformance");
        } else if first == "Rss:" && ours {
            found = Some(found.unwrap_or(0) + (second.parse::<u64>().unwrap() << 10));
        }
    }
    found
}

fn wait_until(what: &str, reached: impl Fn() -> bool) {
    let deadline = soon();
    while !reached() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_pages_of_a_mapping_are_populated_before_they_are_read() {
    // A length that no other test's segment has.
    const SIZE: u64 = 37 << 20;
    let Opened { link, host, .. } = &open(TransportKind::Shm, SIZE);
    let extent = host.stored(&[1; 100]);
    let read = wait(link.read(EPOCH, vec![read_op(extent, &room(100))], soon()));
    assert_eq!(codes(&read), [Code::Ok]);
    wait_until("the mapping for reading is populated", || {
        resident(SIZE, "r--s") == Some(SIZE)
    });
    // The host's own mapping is writable too, and fully populated.
    assert_eq!(resident(SIZE, "rw-s"), Some(SIZE));
    let written = wait(link.write(vec![write_op(host.grant(100), &[1; 100])], soon()));
    assert_eq!(codes(&written), [Code::Ok]);
    wait_until("the mapping for writing is populated", || {
        resident(SIZE, "rw-s") == Some(2 * SIZE)
    });
}

#[test]
fn populating_a_mapping_ends_with_the_link() {
    const SIZE: u64 = 513 << 20;
    let Opened {
        link,
        host,
        _server,
        _directory,
    } = open(TransportKind::Shm, SIZE);
    let server = _server
        .downcast_ref::<kvpool_transport::shm::ServerHandle>()
        .unwrap();
    let extent = host.stored(&[1; 100]);
    // The view keeps the mapping, and nothing keeps the link.
    let view = wait(link.pin(EPOCH, extent, soon())).unwrap();
    drop(link);
    let populated = resident(SIZE, "r--s").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let in_place = resident(SIZE, "r--s").unwrap();
    assert!(
        in_place < SIZE,
        "{populated} bytes were in place when the link went, {in_place} soon after"
    );
    drop(view);
    wait_until("the mapping is gone", || resident(SIZE, "r--s").is_none());
    wait_until("the connection is closed", || server.connections() == 0);
}
