//! A network between a client and a store node that can keep requests back.

use kvpool_types::wire::frame::{HEADER_BYTES, Header, Op};
use parking_lot::{Condvar, Mutex};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

/// Relays connections to one address. While the relay is held, requests wait in it, and answers
/// pass.
pub(crate) struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    target: Option<SocketAddr>,
    is_held: bool,
    /// The first request of each connection that waits.
    waiting: Vec<Op>,
}

impl Relay {
    pub(crate) fn listen() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::<Shared>::default();
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let target = accepting.state.lock().target.unwrap();
                let Ok(far) = TcpStream::connect(target) else {
                    continue;
                };
                let (near_answers, far_answers) =
                    (near.try_clone().unwrap(), far.try_clone().unwrap());
                let shared = Arc::clone(&accepting);
                std::thread::spawn(move || pass(near, far, |bytes| shared.wait(bytes)));
                std::thread::spawn(move || pass(far_answers, near_answers, |_| {}));
            }
        });
        Self { address, shared }
    }

    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn to(&self, target: SocketAddr) {
        self.shared.state.lock().target = Some(target);
    }

    /// Keeps requests back from now on.
    pub(crate) fn hold(&self) {
        self.shared.state.lock().is_held = true;
    }

    /// Passes the waiting requests on.
    pub(crate) fn release(&self) {
        let mut state = self.shared.state.lock();
        state.is_held = false;
        state.waiting.clear();
        self.shared.changed.notify_all();
    }

    /// The first request of each connection that waits here.
    pub(crate) fn waiting(&self) -> Vec<Op> {
        self.shared.state.lock().waiting.clone()
    }
}

impl Shared {
    fn wait(&self, bytes: &[u8]) {
        let mut state = self.state.lock();
        if state.is_held {
            let head = bytes.first_chunk::<HEADER_BYTES>();
            let header = head.and_then(|head| Header::decode(head).ok());
            state.waiting.extend(header.map(|header| header.op));
        }
        while state.is_held {
            self.changed.wait(&mut state);
        }
    }
}

/// Passes bytes on until one end closes. Calls `before` with the bytes that it passes next.
fn pass(mut from: TcpStream, mut to: TcpStream, before: impl Fn(&[u8])) {
    let mut bytes = [0; 16 << 10];
    while let Ok(count) = from.read(&mut bytes)
        && count > 0
    {
        before(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // The other thread of the connection sees its end.
    for end in [&from, &to] {
        let _ended = end.shutdown(Shutdown::Both);
    }
}
