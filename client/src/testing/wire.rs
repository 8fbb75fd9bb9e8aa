//! The connection to a master, which a test may cut. The client sees the same as when a process is killed,
//! stopped, or cut off.

use super::Master;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The state of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passage {
    Open,
    /// Connections are accepted, but carry no bytes any more, as with a stopped process or a cut.
    Silent,
    /// Connections end, and new ones are refused, as with a dead process.
    Dead,
}

/// The connection to a master, which a test may cut.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) url: String,
    passage: watch::Sender<Passage>,
}

impl Wire {
    /// A connection to `master`. Clients are told to use it.
    pub(crate) async fn to(master: &Master) -> Self {
        let to = master.own_url().strip_prefix("http://").unwrap();
        let to = to.parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = listener.local_addr().unwrap();
        let (passage, watched) = watch::channel(Passage::Open);
        tokio::spawn(listen(listener, own, to, watched));
        let url = format!("http://{own}");
        master.set_url(&url);
        Self { url, passage }
    }

    pub(crate) fn set(&self, passage: Passage) {
        self.passage.send_replace(passage);
    }
}

async fn listen(
    listener: TcpListener,
    own: SocketAddr,
    to: SocketAddr,
    mut passage: watch::Receiver<Passage>,
) {
    let mut listener = Some(listener);
    loop {
        let now = *passage.borrow_and_update();
        if now == Passage::Dead {
            listener = None;
        } else if listener.is_none() {
            listener = TcpListener::bind(own).await.ok();
        }
        let accept = async {
            match &listener {
                Some(listener) => listener.accept().await.unwrap().0,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = passage.changed() => if changed.is_err() { return },
            taken = accept => {
                tokio::spawn(join(taken, to, passage.clone()));
            }
        }
    }
}

async fn join(taken: TcpStream, to: SocketAddr, passage: watch::Receiver<Passage>) {
    let Ok(other) = TcpStream::connect(to).await else {
        return;
    };
    let (from_client, to_client) = taken.into_split();
    let (from_master, to_master) = other.into_split();
    tokio::select! {
        () = pump(from_client, to_master, passage.clone()) => {}
        () = pump(from_master, to_client, passage) => {}
    }
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut passage: watch::Receiver<Passage>,
) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let now = *passage.borrow_and_update();
        match now {
            Passage::Dead => return,
            Passage::Silent => {
                if passage.changed().await.is_err() {
                    return;
                }
                continue;
            }
            Passage::Open => {}
        }
        let count = tokio::select! {
            biased;
            changed = passage.changed() => if changed.is_err() { return } else { continue },
            read = from.read(&mut bytes) => read.unwrap_or(0),
        };
        if count == 0 || to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}
