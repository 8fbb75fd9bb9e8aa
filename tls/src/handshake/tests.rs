use super::steps::{Next, Side, Steps};
use crate::session::Agreed;
use crate::testing::{Authority, Life};
use crate::{ClientAuth, ClientTls, Port, ServerFiles, ServerTls, Version};
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use tempfile::TempDir;

type Client = Steps<UnbufferedClientConnection>;
type Server = Steps<UnbufferedServerConnection>;

/// Two ends that trust each other.
pub(crate) struct World {
    client: ClientTls,
    server: ServerTls,
    _directory: TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new(directory.path(), "authority");
        let pair = authority.sign("server", Life::Valid);
        let server = ServerTls::open(ServerFiles {
            cert: pair.cert,
            key: pair.key,
            client_ca: Some(authority.ca.clone()),
            client_auth: ClientAuth::All,
            min_version: Version::Tls12,
        });
        let pair = authority.sign("client", Life::Valid);
        let client = ClientTls::open(&authority.client(Some(&pair))).unwrap();
        Self {
            client: client.unwrap(),
            server: server.unwrap(),
            _directory: directory,
        }
    }

    fn begin(&self) -> (Client, Server) {
        let name = self.client.name_of("localhost:1").unwrap();
        let client = UnbufferedClientConnection::new(self.client.frames(), name).unwrap();
        let server = self.server.config(Port::Data);
        let server = UnbufferedServerConnection::new(server).unwrap();
        (Steps::new(client), Steps::new(server))
    }

    /// What a whole handshake agrees on: the client's end, and the server's.
    pub(crate) fn agree(&self) -> (Agreed, Agreed) {
        let (mut client, mut server) = self.begin();
        while !(step(&mut client, &mut server) & step(&mut server, &mut client)) {}
        (client.finish().unwrap(), server.finish().unwrap())
    }
}

/// Advances one end, and passes its output to the other end. Returns true when the end is complete.
fn step<A: Side, B: Side>(this: &mut Steps<A>, other: &mut Steps<B>) -> bool {
    let next = this.advance().unwrap();
    other.arrived.append(&mut this.to_send);
    next == Next::Finish
}

#[test]
fn what_arrives_behind_a_handshake_is_kept() {
    let world = World::new();
    let (mut client, mut server) = world.begin();
    while !step(&mut client, &mut server) {
        step(&mut server, &mut client);
    }
    let mut agreed = client.finish().unwrap();
    // A new key comes before each record.
    agreed.records_of_key = 1;
    let whole = crate::Session::agreed(agreed).unwrap();
    let mut sent = Vec::new();
    for bytes in [&b"frame"[..], &[7; 3000]] {
        let put = |bytes: &[u8]| {
            sent.extend_from_slice(bytes);
            Ok(bytes.len())
        };
        whole.send(bytes, put).unwrap();
    }
    // The second record arrives in two parts.
    let (now, later) = sent.split_at(sent.len() - 1000);
    server.arrived.extend_from_slice(now);
    while server.advance().unwrap() != Next::Finish {
        server.to_send.clear();
    }
    let session = crate::Session::of_caller(server.finish().unwrap()).unwrap();
    assert!(session.has_received(), "a whole record that is not opened");
    let mut room = [0; 5];
    let none = |_: &mut [u8]| panic!("it asks for what it has");
    assert_eq!(session.receive(&mut room, none).unwrap(), 5);
    assert_eq!(&room, b"frame");
    let mut room = [0; 4000];
    let rest = |room: &mut [u8]| {
        room[..later.len()].copy_from_slice(later);
        Ok(later.len())
    };
    assert_eq!(session.receive(&mut room, rest).unwrap(), 3000);
    assert!(room[..3000].iter().all(|&byte| byte == 7));
}

/// The next pseudo-random number.
fn after(number: u64) -> u64 {
    let number = number ^ (number << 13);
    let number = number ^ (number >> 7);
    number ^ (number << 17)
}

/// rustls panics on some misuse of its handshakes, and the thread of all callers must not.
#[test]
fn mutated_handshakes_end_in_an_error_or_an_agreement() {
    let world = World::new();
    let mut seed = 0x9E37_79B9_7F4A_7C15_u64;
    let (mut refused, mut agreed, mut told) = (0, 0, 0);
    for _ in 0..3000 {
        let (mut client, mut server) = world.begin();
        let mut ended = [false; 2];
        for _flight in 0..8 {
            for (end, ended) in ended.iter_mut().enumerate() {
                if *ended {
                    continue;
                }
                let (result, to_send) = if end == 0 {
                    (client.advance(), &mut client.to_send)
                } else {
                    (server.advance(), &mut server.to_send)
                };
                let mut said = std::mem::take(to_send);
                match result {
                    Ok(Next::Finish) => *ended = true,
                    Ok(_) => {}
                    Err(_) => {
                        *ended = true;
                        refused += 1;
                        told += usize::from(!said.is_empty());
                    }
                }
                mutate(&mut said, &mut seed);
                let other = if end == 0 {
                    &mut server.arrived
                } else {
                    &mut client.arrived
                };
                other.append(&mut said);
            }
        }
        agreed += usize::from(client.finish().is_ok() && server.finish().is_ok());
    }
    assert!(refused > 500 && agreed > 500, "{refused} {agreed}");
    // The end that gets the alert does not answer.
    assert!(told * 2 > refused, "{told} of {refused} said why");
}

/// Changes, drops, repeats or adds some bytes, or none.
fn mutate(said: &mut Vec<u8>, seed: &mut u64) {
    *seed = after(*seed);
    let Ok(length) = u64::try_from(said.len()) else {
        return;
    };
    if length == 0 || !seed.is_multiple_of(3) {
        return;
    }
    let at = usize::try_from((*seed >> 16) % length).unwrap();
    let byte = (*seed >> 8).to_le_bytes()[0];
    match (*seed >> 40) % 5 {
        0 => said[at] ^= byte | 1,
        1 => said.truncate(at),
        2 => said.extend_from_within(at..),
        3 => said.insert(at, byte),
        _ => {
            said.remove(at);
        }
    }
}
