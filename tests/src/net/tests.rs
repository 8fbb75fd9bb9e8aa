//! Whether cuts cut, heals heal, and no namespace is left behind.

use super::*;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(400);

/// A server at `party` that returns what it receives.
fn echo(net: &Net, party: &str) -> SocketAddr {
    let listener = {
        let address = net.address(party);
        net.run(party, move |_| TcpListener::bind((address, 0)).unwrap())
    };
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut other = stream.try_clone().unwrap();
                std::io::copy(&mut stream, &mut other)
            });
        }
    });
    address
}

fn dial(net: &Net, party: &str, address: SocketAddr) -> std::io::Result<TcpStream> {
    net.run(party, move |_| {
        TcpStream::connect_timeout(&address, SHORT)
            .inspect(|stream| stream.set_read_timeout(Some(SHORT)).unwrap())
    })
}

fn says_back(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"ping")?;
    stream.read_exact(&mut [0; 4])
}

#[test]
fn a_cut_swallows_what_goes_between_two_parties_and_nothing_else() {
    let parties = ["etcd", "master-0", "master-1"];
    let Some(net) = Net::or_skip(
        "a_cut_swallows_what_goes_between_two_parties_and_nothing_else",
        &parties,
    ) else {
        return;
    };
    let server = echo(&net, "etcd");
    let mut cut_off = dial(&net, "master-0", server).unwrap();
    let mut bystander = dial(&net, "master-1", server).unwrap();
    says_back(&mut cut_off).unwrap();

    net.cut("master-0", "etcd").unwrap();
    // The open connection is silent, not reset. A new connection is not refused either.
    let silent = says_back(&mut cut_off).unwrap_err();
    assert_eq!(silent.kind(), ErrorKind::WouldBlock, "{silent}");
    let late = dial(&net, "master-0", server).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::TimedOut, "{late}");
    // Other pairs of parties continue, also those with one of the cut parties.
    says_back(&mut bystander).unwrap();
    let neighbour = echo(&net, "master-0");
    says_back(&mut dial(&net, "master-1", neighbour).unwrap()).unwrap();

    net.heal("master-0", "etcd").unwrap();
    says_back(&mut dial(&net, "master-0", server).unwrap()).unwrap();
    // TCP sends the lost packets again, so the old connection lives.
    cut_off
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    cut_off.read_exact(&mut [0; 4]).unwrap();
}

#[test]
fn threads_and_processes_that_start_at_a_party_are_there() {
    let test = "threads_and_processes_that_start_at_a_party_are_there";
    let Some(net) = Net::or_skip(test, &["pool"]) else {
        return;
    };
    let address = net.address("pool").to_string();
    let (listed, bound) = net.inside("pool", || {
        let listed = Command::new("ip").arg("addr").output().unwrap().stdout;
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let bound = runtime.block_on(async {
            let there = (net.address("pool"), 0);
            tokio::spawn(tokio::net::TcpListener::bind(there))
                .await
                .unwrap()
        });
        (String::from_utf8(listed).unwrap(), bound.map(drop))
    });
    assert!(listed.contains(&address), "{listed}");
    bound.unwrap();
    let here = Command::new("ip").arg("addr").output().unwrap().stdout;
    assert!(
        !String::from_utf8(here).unwrap().contains(&address),
        "the test's own thread was moved"
    );
}

#[test]
fn names_that_a_killed_test_left_are_swept() {
    let test = "names_that_a_killed_test_left_are_swept";
    if Net::or_skip(test, &["etcd"]).is_none() {
        return;
    }
    // No process has this number: the kernel's limit is 2^22.
    let left = format!("{PREFIX}99999999-0");
    let _from_an_earlier_run = ip(&format!("netns add {left}"));
    let _net = Net::new(&["etcd"]).unwrap();
    assert!(!Path::new(NAMES).join(left).exists());
}
