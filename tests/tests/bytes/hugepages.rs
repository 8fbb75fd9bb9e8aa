//! Segments of 2 MiB pages, over every transport. If the host has not reserved enough of them, the
//! node refuses with the reason.

use kvpool_client::{Client, Options as ClientOptions, TransportChoice};
use kvpool_tests::blocks::{Tally, check_all, put_all};
use kvpool_tests::{Cluster, Options};

const SEGMENT: u64 = 32 << 20;
const FREE: &str = "HugePages_Free:";

/// The bytes of 2 MiB pages in `/proc/meminfo` under a name.
fn bytes(of: &str) -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let number = |name: &str| -> u64 {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        let value = line.and_then(|line| line.split_whitespace().next());
        value.map_or(0, |value| value.parse().unwrap())
    };
    match number("Hugepagesize:") {
        2048 => number(of) << 21,
        _ => 0,
    }
}

fn options(segment: u64) -> Options {
    Options {
        segment: segment.to_string(),
        node: vec!["--hugepages".to_owned()],
        ..Options::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_of_hugepages_is_written_and_read_by_shm_and_tcp() {
    let free = bytes(FREE);
    if free < SEGMENT {
        eprintln!(
            "SKIPPED a_segment_of_hugepages_is_written_and_read_by_shm_and_tcp: \
             {free} bytes of 2 MiB pages are set aside and free (vm.nr_hugepages)"
        );
        return;
    }
    let cluster = Cluster::start(options(SEGMENT)).unwrap();
    assert!(bytes(FREE) <= free - SEGMENT, "the segment is made of them");
    let ways = [TransportChoice::Shm, TransportChoice::Tcp];
    for (first, transport) in (0..).step_by(16).zip(ways) {
        let client = Client::connect(ClientOptions {
            masters: vec![cluster.master_url()],
            transport,
            ..ClientOptions::default()
        });
        let client = client.await.unwrap();
        put_all(&client, first..first + 16, 300_000).await.unwrap();
        let all = Tally {
            right: usize::try_from(first + 16).unwrap(),
            ..Tally::default()
        };
        assert_eq!(check_all(&client, 0..first + 16, 300_000).await, all);
    }
}

#[test]
fn hugepages_that_are_not_there_end_the_node_with_the_reason() {
    let too_many = bytes("HugePages_Total:") + SEGMENT;
    let error = Cluster::start(options(too_many)).unwrap_err().to_string();
    assert!(error.contains("vm/nr_hugepages"), "{error}");
}
