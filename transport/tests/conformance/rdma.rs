//! The guarantees of RDMA alone. Without a device, these tests and the suite over RDMA print that
//! they are skipped.

use super::*;
use kvpool_transport::rdma::{Fabric, RdmaOptions, Serving, Unavailable};
use kvpool_transport::tcp::{Server, ServerHandle, ServerOptions};
use std::sync::OnceLock;

/// The ports of this host.
pub(crate) fn fabric() -> Result<Arc<Fabric>, Unavailable> {
    static FABRIC: OnceLock<Result<Arc<Fabric>, Unavailable>> = OnceLock::new();
    FABRIC
        .get_or_init(|| Fabric::open(&RdmaOptions::default()))
        .clone()
}

/// A fabric for one test, so that cooldowns of other tests' pairs do not affect it.
pub(crate) fn own_fabric() -> Arc<Fabric> {
    Fabric::open(&RdmaOptions::default()).unwrap()
}

/// Whether there is RDMA. If not, prints that `test` is skipped.
pub(crate) fn is_here(test: &str) -> bool {
    let fabric = fabric();
    if let Err(reason) = &fabric {
        eprintln!("SKIPPED {test}: {reason}");
    }
    fabric.is_ok()
}

pub(crate) fn serve(host: &Arc<TestHost>) -> ServerHandle {
    let options = ServerOptions {
        rdma: Some(Arc::new(Serving::new(fabric().unwrap()))),
        ..ServerOptions::default()
    };
    tcp::serve(host, options)
}

/// Waits until a link has noticed that its node ended it.
pub(crate) fn wait_closed(link: &dyn Link) {
    let deadline = soon();
    while link.is_open() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!link.is_open());
}

/// A link, its host, and the server.
fn pair(segment: u64) -> (Arc<dyn Link>, Arc<TestHost>, ServerHandle) {
    let host = TestHost::new(Length(segment));
    let server = serve(&host);
    let (address, hello) = (server.local_addr(), host.hello());
    let opened = kvpool_transport::rdma::connect(&own_fabric(), address, hello, soon());
    (opened.unwrap().0, host, server)
}

#[test]
fn a_node_without_rdma_refuses_to_open_it() {
    if !is_here("a_node_without_rdma_refuses_to_open_it") {
        return;
    }
    let host = TestHost::new(Length(1 << 20));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start(listener, host.clone(), ServerOptions::default()).unwrap();
    let (address, hello) = (server.local_addr(), host.hello());
    let refused = kvpool_transport::rdma::connect(&fabric().unwrap(), address, hello, soon());
    let error = refused.unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument, "{error}");
    assert!(error.message.contains("no RDMA"), "{error}");
}

/// The writer continues after its grant was fenced, like a writer that was stopped in between.
#[test]
fn a_writer_whose_grant_was_fenced_cannot_touch_the_extent() {
    if !is_here("a_writer_whose_grant_was_fenced_cannot_touch_the_extent") {
        return;
    }
    let (link, host, _server) = pair(64 << 20);
    let bytes = pattern(32 << 20, 1);
    let grant = host.grant(32 << 20);
    let writing = link.write(vec![write_op(grant, &bytes)], soon());
    let writing = std::thread::spawn(move || wait(writing));
    assert!(host.wait_for(|held| held.receiving == 1));
    assert!(host.fence(grant.id, Duration::from_secs(5)), "it is fenced");
    // From here on the extent may have a new owner.
    let extent = host.slice(&grant.extent);
    let others = pattern(32 << 20, 2);
    extent.write_at(Offset(0), &others);
    let written = writing.join().unwrap();
    assert_eq!(codes(&written), [Code::Unreachable], "{written:?}");
    std::thread::sleep(Duration::from_millis(300));
    assert!(extent.to_vec() == others, "the extent was touched");
    assert!(!link.is_open());
    assert!(!host.is_written(grant.id));
}

/// The same for a writer that dies: it leaves nothing at the node.
#[test]
fn a_link_dropped_during_a_write_leaves_nothing_behind() {
    if !is_here("a_link_dropped_during_a_write_leaves_nothing_behind") {
        return;
    }
    let fabric = fabric().unwrap();
    let (link, host, server) = pair(64 << 20);
    let bytes = pattern(32 << 20, 1);
    let grant = host.grant(32 << 20);
    let deadline = Instant::now() + Duration::from_millis(60);
    let written = wait(link.write(vec![write_op(grant, &bytes)], deadline));
    assert!(Instant::now() < deadline + Duration::from_secs(1));
    if written[0].is_err() {
        assert_eq!(codes(&written), [Code::DeadlineExceeded]);
    }
    drop(link);
    assert!(host.wait_for(|held| held.receiving == 0));
    let ended = Instant::now() + Duration::from_secs(5);
    while server.connections() > 0 && Instant::now() < ended {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.connections(), 0);
    for rail in fabric.rails() {
        assert_eq!(rail.in_flight(), 0, "{}", rail.name());
    }
}

/// The node ends while a read is in flight.
#[test]
fn a_read_from_an_ending_node_fails() {
    if !is_here("a_read_from_an_ending_node_fails") {
        return;
    }
    let (link, host, server) = pair(64 << 20);
    let extent = host.stored(&pattern(32 << 20, 1));
    let into = room(32 << 20);
    let reading = link.read(EPOCH, vec![read_op(extent, &into)], soon());
    let reading = std::thread::spawn(move || wait(reading));
    std::thread::sleep(Duration::from_millis(10));
    let gone = Instant::now();
    drop(server);
    let read = reading.join().unwrap();
    assert!(
        gone.elapsed() < Duration::from_secs(3),
        "{:?}",
        gone.elapsed()
    );
    if read[0].is_ok() {
        eprintln!("the read was over before the node went");
    } else {
        assert_eq!(codes(&read), [Code::Unreachable], "{read:?}");
    }
    // Ended transfers touch nothing.
    into[0].write_at(Offset(0), &[7; 4096]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(into[0].to_vec()[..4096] == [7; 4096]);
    assert!(!link.is_open());
}

/// Registered memory is not registered again, however often and in whatever pieces it is used.
#[test]
fn a_registered_buffer_stays_registered_once() {
    if !is_here("a_registered_buffer_stays_registered_once") {
        return;
    }
    let (link, host, _server) = pair(16 << 20);
    let rail = fabric().unwrap().rails()[0].clone();
    let bytes = pattern(4 << 20, 1);
    let extent = host.stored(&bytes);
    let region = Region::allocate(Length(8 << 20));
    let registered = fabric().unwrap().register_buffer(&region.whole()).unwrap();
    let part = region.slice(Offset(1 << 20), Length(3 << 20)).unwrap();
    let again = fabric().unwrap().register_buffer(&part).unwrap();
    // Other tests' registrations come and go, so the test compares its own keys.
    let keys = || [0, 3 << 20].map(|from| rail.cached(&at(&region, from)).unwrap().lkey());
    let before = keys();
    assert_eq!(before[0], before[1], "one registration");
    for from in [0, 1 << 20, 4 << 20] {
        let into = vec![at(&region, from)];
        let read = wait(link.read(EPOCH, vec![read_op(extent, &into)], soon()));
        assert_eq!(read, [Ok(checksum(&bytes))]);
        assert!(gathered(&into) == bytes);
    }
    drop(again);
    assert_eq!(keys(), before);
    drop(registered);
}

fn at(region: &Region, from: u64) -> Slice {
    region.slice(Offset(from), Length(4 << 20)).unwrap()
}

/// The deadline of the opening does not bound the link's life.
#[test]
fn an_idle_link_stays_open() {
    if !is_here("an_idle_link_stays_open") {
        return;
    }
    let host = TestHost::new(Length(1 << 20));
    let server = serve(&host);
    let bytes = pattern(100_000, 1);
    let extent = host.stored(&bytes);
    let deadline = Instant::now() + Duration::from_secs(2);
    let (address, hello) = (server.local_addr(), host.hello());
    let opened = kvpool_transport::rdma::connect(&own_fabric(), address, hello, deadline);
    let link = opened.unwrap().0;
    std::thread::sleep(Duration::from_millis(2500));
    assert!(link.is_open());
    let into = room(100_000);
    let read = wait(link.read(EPOCH, vec![read_op(extent, &into)], soon()));
    assert_eq!(read, [Ok(checksum(&bytes))]);
}

/// Dropped links leave no registration, queue pair or work request.
#[test]
fn two_hundred_links_leave_nothing_behind() {
    if !is_here("two_hundred_links_leave_nothing_behind") {
        return;
    }
    let host = TestHost::new(Length(1 << 20));
    let server = serve(&host);
    let fabric = own_fabric();
    let bytes = pattern(100_000, 1);
    let extent = host.stored(&bytes);
    let counts = || -> Vec<(usize, usize)> {
        let of_rail = |rail: &Arc<kvpool_transport::rdma::Rail>| (rail.lanes(), rail.in_flight());
        fabric.rails().iter().map(of_rail).collect()
    };
    for _ in 0..200 {
        let (address, hello) = (server.local_addr(), host.hello());
        let opened = kvpool_transport::rdma::connect(&fabric, address, hello, soon());
        let link = opened.unwrap().0;
        let into = room(100_000);
        let read = wait(link.read(EPOCH, vec![read_op(extent, &into)], soon()));
        assert_eq!(read, [Ok(checksum(&bytes))]);
    }
    let deadline = soon();
    let is_clear = || server.connections() == 0 && counts().iter().all(|c| *c == (0, 0));
    while !is_clear() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(
        is_clear(),
        "{} connections, {:?}",
        server.connections(),
        counts()
    );
    for rail in fabric.rails() {
        rail.forget_cached();
    }
}

/// A client with its own device, so that its counters belong to the test.
fn alone(host: &Arc<TestHost>, server: &ServerHandle, lanes: u8) -> (Arc<Fabric>, Arc<dyn Link>) {
    let options = RdmaOptions {
        lanes,
        ..RdmaOptions::default()
    };
    let fabric = Fabric::open(&options).unwrap();
    let (address, hello) = (server.local_addr(), host.hello());
    let opened = kvpool_transport::rdma::connect(&fabric, address, hello, soon());
    (fabric, opened.unwrap().0)
}

#[test]
fn a_link_has_the_configured_number_of_lanes() {
    if !is_here("a_link_has_the_configured_number_of_lanes") {
        return;
    }
    let host = TestHost::new(Length(16 << 20));
    let server = serve(&host);
    for lanes in [1, 3] {
        let (fabric, link) = alone(&host, &server, lanes);
        for rail in fabric.rails() {
            assert_eq!(rail.lanes(), 2 * usize::from(lanes), "{}", rail.name());
        }
        let bytes = pattern(5 << 20, u64::from(lanes));
        let grant = host.grant(5 << 20);
        let written = wait(link.write(vec![write_op(grant, &bytes)], soon()));
        assert_eq!(written, [Ok(checksum(&bytes))]);
        let into = room(5 << 20);
        let read = wait(link.read(EPOCH, vec![read_op(grant.extent, &into)], soon()));
        assert_eq!(read, [Ok(checksum(&bytes))]);
        assert!(gathered(&into) == bytes);
    }
}

/// The number of pieces does not matter.
#[test]
fn the_memory_of_a_large_block_is_registered_as_one() {
    if !is_here("the_memory_of_a_large_block_is_registered_as_one") {
        return;
    }
    let host = TestHost::new(Length(32 << 20));
    let server = serve(&host);
    let bytes = pattern(16 << 20, 1);
    let extent = host.stored(&bytes);
    let (fabric, link) = alone(&host, &server, 2);
    let registrations = || {
        fabric
            .rails()
            .iter()
            .map(|r| r.registrations())
            .sum::<usize>()
    };
    // The probes of the ports have registered some bytes.
    let before = registrations();
    let into = vec![Region::allocate(Length(16 << 20)).whole()];
    let read = wait(link.read(EPOCH, vec![read_op(extent, &into)], soon()));
    assert_eq!(read, [Ok(checksum(&bytes))]);
    // One registration for each port that the pieces used.
    assert!(
        registrations() <= before + fabric.rails().len(),
        "{before} and then {}",
        registrations()
    );
}
