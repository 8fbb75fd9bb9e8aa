//! A relay of TCP connections that can be closed: it then refuses new connections and ends open
//! ones. The server behind it notices nothing else. The relay can also hold requests back.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// A relay, in the network namespace of the thread that made it. Dropping it closes it.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    way: Way,
    holds: watch::Sender<bool>,
    runtime: Option<Runtime>,
    accepting: Option<JoinHandle<()>>,
}

/// The state that the connections of a relay share.
#[derive(Clone, Debug)]
struct Way {
    target: Arc<Mutex<String>>,
    holds: watch::Receiver<bool>,
    /// The number of bytes that are held back.
    held: Arc<AtomicUsize>,
}

impl Relay {
    /// Listens on `address`; port 0 means any free port. Connections end at once until
    /// [`Relay::to`] sets their target.
    pub fn listen(address: &str) -> anyhow::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let listener = std::net::TcpListener::bind(address)?;
        let (holds, is_held) = watch::channel(false);
        let mut relay = Self {
            address: listener.local_addr()?,
            way: Way {
                target: Arc::default(),
                holds: is_held,
                held: Arc::default(),
            },
            holds,
            runtime: Some(runtime),
            accepting: None,
        };
        relay.accept(listener)?;
        Ok(relay)
    }

    /// The address of the relay, open or closed.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends later connections to `target`, `host:port`.
    pub fn to(&self, target: &str) {
        let own = &self.way.target;
        target.clone_into(&mut own.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Holds requests back from now on. Answers pass.
    pub fn hold(&self) {
        self.holds.send_replace(true);
    }

    /// Lets the held requests pass.
    pub fn release(&self) {
        self.holds.send_replace(false);
    }

    /// The bytes of requests that are held back.
    pub fn held(&self) -> usize {
        self.way.held.load(Ordering::Relaxed)
    }

    /// Refuses connections from now on, and ends the open ones before it returns.
    pub fn close(&mut self) {
        let Some((runtime, accepting)) = self.runtime.as_ref().zip(self.accepting.take()) else {
            return;
        };
        accepting.abort();
        // The caller may be on a runtime's thread itself, where waiting for another is not allowed.
        let (gone, is_gone) = std::sync::mpsc::channel();
        runtime.spawn(async move {
            let _cancelled = accepting.await;
            let _waits = gone.send(());
        });
        let _ended_otherwise = is_gone.recv();
    }

    /// Listens on the same address again.
    pub fn open(&mut self) -> anyhow::Result<()> {
        if self.accepting.is_none() {
            self.accept(std::net::TcpListener::bind(self.address)?)?;
        }
        Ok(())
    }

    fn accept(&mut self, listener: std::net::TcpListener) -> anyhow::Result<()> {
        listener.set_nonblocking(true)?;
        let way = self.way.clone();
        if let Some(runtime) = &self.runtime {
            let _there = runtime.enter();
            let listener = TcpListener::from_std(listener)?;
            self.accepting = Some(runtime.spawn(accept(listener, way)));
        }
        Ok(())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Relays until it is aborted, which ends the connections with it.
async fn accept(listener: TcpListener, way: Way) {
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((near, _)) = accepted else { continue };
                open.spawn(relay(near, way.clone()));
            }
            Some(_) = open.join_next() => {}
        }
    }
}

async fn relay(near: TcpStream, way: Way) {
    let target = way
        .target
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    let Ok(far) = TcpStream::connect(target).await else {
        return;
    };
    // Relaying must not make small messages wait for each other's acknowledgement.
    if near.set_nodelay(true).and(far.set_nodelay(true)).is_err() {
        return;
    }
    let (mut requests, mut to_near) = near.into_split();
    let (mut answers, mut to_far) = far.into_split();
    let Way {
        mut holds, held, ..
    } = way;
    let there = async {
        let mut bytes = vec![0; 64 << 10];
        loop {
            let count = requests.read(&mut bytes).await?;
            if count == 0 {
                return to_far.shutdown().await;
            }
            held.fetch_add(count, Ordering::Relaxed);
            // An error means that the relay was dropped.
            drop(holds.wait_for(|holds| !holds).await);
            held.fetch_sub(count, Ordering::Relaxed);
            to_far.write_all(&bytes[..count]).await?;
        }
    };
    let back = async {
        tokio::io::copy(&mut answers, &mut to_near).await?;
        to_near.shutdown().await
    };
    let _either_end_left = tokio::try_join!(there, back);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener as Listener, TcpStream as Stream};

    /// A server that returns what it receives.
    fn echo() -> SocketAddr {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
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

    fn says_back(stream: &mut Stream) -> bool {
        let mut answer = [0; 4];
        stream.write_all(b"ping").is_ok() && stream.read_exact(&mut answer).is_ok()
    }

    #[test]
    fn a_closed_relay_refuses_and_ends_what_is_open_and_an_opened_one_serves_again() {
        let mut relay = Relay::listen("127.0.0.1:0").unwrap();
        relay.to(&echo().to_string());
        let mut before = Stream::connect(relay.address()).unwrap();
        assert!(says_back(&mut before));
        for _ in 0..3 {
            relay.close();
            let refused = Stream::connect(relay.address()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
            assert!(!says_back(&mut before));
            relay.open().unwrap();
            before = Stream::connect(relay.address()).unwrap();
            assert!(says_back(&mut before));
        }
    }

    #[test]
    fn a_relay_that_holds_passes_nothing_on_until_it_is_released() {
        let relay = Relay::listen("127.0.0.1:0").unwrap();
        relay.to(&echo().to_string());
        let mut stream = Stream::connect(relay.address()).unwrap();
        assert!(says_back(&mut stream));
        relay.hold();
        stream.write_all(b"held").unwrap();
        while relay.held() < 4 {
            std::thread::yield_now();
        }
        stream.set_nonblocking(true).unwrap();
        let mut answer = [0; 4];
        let silent = stream.read_exact(&mut answer).unwrap_err();
        assert_eq!(silent.kind(), ErrorKind::WouldBlock);
        stream.set_nonblocking(false).unwrap();
        relay.release();
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"held");
        assert!(says_back(&mut stream));
        assert_eq!(relay.held(), 0);
    }
}
