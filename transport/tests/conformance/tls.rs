//! Every case of TCP once more, with TLS.

use kvpool_tls::testing::{Authority, Life, Pair};
use kvpool_tls::{ClientAuth, ClientFiles, ClientTls, ServerFiles, ServerTls, Version};
use kvpool_transport::tcp::{ConnectOptions, connect_with};
use kvpool_transport::{DataTls, Link, TransferError};
use kvpool_types::wire::data::{Hello, HelloReply};
use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tempfile::TempDir;

thread_local! {
    static IS_ON: Cell<bool> = const { Cell::new(false) };
    // Each test has a thread. The end of the thread drops the directory; a static of the process is never dropped.
    static WORLD: World = World::new();
}

/// Runs a case whose servers and links of TCP speak TLS.
pub(crate) fn over(case: impl FnOnce()) {
    IS_ON.set(true);
    case();
    IS_ON.set(false);
}

struct World {
    _directory: TempDir,
    authority: Authority,
    pair: Pair,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new(directory.path(), "authority");
        let pair = authority.sign("pair", Life::Valid);
        Self {
            _directory: directory,
            authority,
            pair,
        }
    }

    fn server(&self) -> ServerFiles {
        ServerFiles {
            cert: self.pair.cert.clone(),
            key: self.pair.key.clone(),
            client_ca: Some(self.authority.ca.clone()),
            client_auth: ClientAuth::All,
            min_version: Version::Tls13,
        }
    }

    fn client(&self) -> ClientFiles {
        self.authority.client(Some(&self.pair))
    }
}

/// The server's side, if it is on.
pub(crate) fn server() -> Option<ServerTls> {
    let files = IS_ON.get().then(|| WORLD.with(World::server))?;
    Some(ServerTls::open(files).unwrap())
}

/// The client's side, if it is on.
pub(crate) fn client(address: SocketAddr) -> Option<DataTls> {
    let files = IS_ON.get().then(|| WORLD.with(World::client))?;
    let tls = ClientTls::open(&files).unwrap();
    let address = format!("tls://{address}");
    DataTls::of(&address, tls.as_ref()).unwrap().1
}

/// Opens a link, with TLS if it is on.
pub(crate) fn connect(
    address: SocketAddr,
    hello: Hello,
    deadline: Instant,
) -> Result<(Arc<dyn Link>, HelloReply), TransferError> {
    let options = ConnectOptions {
        tls: client(address),
        ..ConnectOptions::default()
    };
    connect_with(address, hello, deadline, &options)
}

#[test]
fn a_plain_link_to_a_tls_port_fails_and_so_does_the_reverse() {
    use super::{TestHost, soon, tcp};
    use kvpool_types::{Code, Length};
    let host = TestHost::new(Length(1 << 20));
    let plain = tcp::serve(&host, Default::default());
    over(|| {
        let refused = connect(plain.local_addr(), host.hello(), soon());
        assert_eq!(refused.err().unwrap().code, Code::Unreachable);
    });
    let mut guarded = None;
    over(|| guarded = Some(tcp::serve(&host, Default::default())));
    let address = guarded.as_ref().unwrap().local_addr();
    let refused = connect(address, host.hello(), soon());
    assert!(refused.is_err());
    over(|| drop(connect(address, host.hello(), soon()).unwrap()));
}
