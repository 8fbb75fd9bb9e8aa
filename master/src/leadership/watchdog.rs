//! Checks whether a process listens at the leader's address. A killed process closes its sockets at
//! once, seconds before its lease expires.

use super::Surroundings;
use std::io;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// The most time for connecting.
const CONNECT: Duration = Duration::from_secs(1);
/// The delay between attempts after a refusal. A port that is just being opened does not mean a
/// dead leader.
const AGAIN: Duration = Duration::from_millis(40);
/// After this many refusals in a row, the watchdog concludes that no process listens.
const REFUSALS: u32 = 3;
/// The interval of attempts at a leader that neither accepts nor refuses.
const SILENT: Duration = Duration::from_millis(500);

/// Completes when `address` (`http://host:port`) refuses connections. A silent or unreachable
/// leader may be only slow, so its lease decides.
pub(super) async fn refuses(surroundings: &dyn Surroundings, address: &str) {
    let mut refusals = 0;
    while refusals < REFUSALS {
        let mut met = surroundings.meet(address);
        let (ended, is_brief) = tokio::select! {
            biased;
            ended = &mut met => (ended, true),
            () = sleep(SILENT) => (met.await, false),
        };
        match ended {
            Ok(()) => {
                refusals = 0;
                // A proxy before the leader may accept every connection and end each at once.
                if is_brief {
                    sleep(AGAIN).await;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                refusals += 1;
                sleep(AGAIN).await;
            }
            Err(_) => {
                refusals = 0;
                sleep(SILENT).await;
            }
        }
    }
}

/// Connects to `address`, and waits for the end of the connection.
pub(super) async fn meet(address: &str) -> io::Result<()> {
    let address = address
        .split_once("://")
        .map_or(address, |(_, authority)| authority);
    let mut stream = timeout(CONNECT, TcpStream::connect(address)).await??;
    // The leader never sends on this connection, so the read waits for its end.
    let _ended = stream.read(&mut [0; 1]).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{ElectionStore, OpenError};
    use async_trait::async_trait;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::net::TcpListener;

    /// A network without a store.
    #[derive(Debug)]
    struct Network;

    #[async_trait]
    impl Surroundings for Network {
        async fn open(&self) -> Result<Arc<dyn ElectionStore>, OpenError> {
            unreachable!("nobody asks for a store")
        }

        async fn meet(&self, address: &str) -> io::Result<()> {
            meet(address).await
        }
    }

    #[tokio::test]
    async fn a_closed_listener_is_noticed_at_once_and_a_live_one_never() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let serving = tokio::spawn(async move {
            let mut kept = Vec::new();
            loop {
                kept.push(listener.accept().await.unwrap());
            }
        });
        let network = Network;
        let noticed = refuses(&network, &address);
        let mut noticed = std::pin::pin!(noticed);
        assert!(
            timeout(Duration::from_millis(300), noticed.as_mut())
                .await
                .is_err()
        );
        serving.abort();
        assert!(timeout(Duration::from_secs(5), noticed).await.is_ok());
    }

    #[tokio::test]
    async fn whoever_ends_each_connection_at_once_is_met_now_and_then() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let met = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&met);
        tokio::spawn(async move {
            loop {
                drop(listener.accept().await.unwrap());
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        let noticed = timeout(AGAIN * 10, refuses(&Network, &address)).await;
        assert!(noticed.is_err(), "somebody listens there");
        let met = met.load(Ordering::Relaxed);
        assert!((1..=12).contains(&met), "{met} connections");
    }
}
