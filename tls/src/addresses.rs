//! Connects to one of a name's addresses in the order of happy eyeballs (RFC 8305): address families alternate. The
//! next attempt begins when the last attempt has failed or is slow. The first connection that succeeds is used.
//!
//! An attempt includes the greeting, not only the TCP connection. At one of the addresses of a name another program
//! may listen, for example with `localhost` in two families. The greeting then fails, and the next address is tried.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// After this time without an answer the next address is tried as well.
const STAGGER: Duration = Duration::from_millis(250);
/// The most addresses of a name that are tried.
const MOST: usize = 8;

/// The addresses of `host_and_port`, in the order of the attempts. Never empty.
///
/// # Errors
///
/// The name is unknown, or has no address.
pub async fn resolve(host_and_port: &str) -> io::Result<Vec<SocketAddr>> {
    let found = tokio::net::lookup_host(host_and_port).await?;
    let found = interleave(found);
    if found.is_empty() {
        return Err(io::Error::other("it names no host"));
    }
    Ok(found)
}

/// Alternates the two families, and begins with the family of the first address.
fn interleave(found: impl IntoIterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut families: [VecDeque<SocketAddr>; 2] = Default::default();
    let mut first_is_v4 = None;
    for address in found {
        let is_first = address.is_ipv4() == *first_is_v4.get_or_insert(address.is_ipv4());
        let [first, second] = &mut families;
        let family = if is_first { first } else { second };
        if !family.contains(&address) {
            family.push_back(address);
        }
    }
    let [mut first, mut second] = families;
    let mut order = Vec::new();
    while order.len() < MOST {
        let before = order.len();
        order.extend(first.pop_front());
        order.extend(second.pop_front());
        if order.len() == before {
            break;
        }
    }
    order
}

/// Tries `addresses` and returns the result of the first attempt that succeeds. If all attempts fail, the error is
/// that of the attempt that ended last.
///
/// Returns `None` where there is no address.
pub async fn first_of<T, E, A>(
    addresses: Vec<SocketAddr>,
    attempt: impl Fn(SocketAddr) -> A,
) -> Option<Result<T, E>>
where
    A: Future<Output = Result<T, E>>,
{
    let mut waiting = VecDeque::from(addresses);
    let mut attempts = FuturesUnordered::new();
    let mut failed = None;
    loop {
        match waiting.pop_front() {
            Some(address) => attempts.push(attempt(address)),
            None if attempts.is_empty() => return failed.map(Err),
            None => {}
        }
        let next_at = Instant::now() + STAGGER;
        loop {
            tokio::select! {
                biased;
                Some(ended) = attempts.next() => match ended {
                    Ok(opened) => return Some(Ok(opened)),
                    Err(error) => failed = Some(error),
                },
                () = sleep_until(next_at), if !waiting.is_empty() => break,
            }
            // A failed attempt starts the next one at once.
            if attempts.is_empty() || !waiting.is_empty() {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(text: &str) -> Vec<SocketAddr> {
        text.split_whitespace()
            .map(|address| address.parse().unwrap())
            .collect()
    }

    #[test]
    fn families_take_turns() {
        let found = addresses("[::1]:7 [::2]:7 [::1]:7 1.1.1.1:7 2.2.2.2:7 3.3.3.3:7");
        let order = addresses("[::1]:7 1.1.1.1:7 [::2]:7 2.2.2.2:7 3.3.3.3:7");
        assert_eq!(interleave(found), order);
        let many = (1..100).map(|port| SocketAddr::from(([1, 1, 1, 1], port)));
        assert_eq!(interleave(many).len(), MOST);
    }

    /// The behaviour of each address: the time until it answers, and whether it succeeds.
    async fn race(outcomes: &[(u64, bool)]) -> (Result<u16, u16>, Duration) {
        let began = Instant::now();
        let ports = 0..u16::try_from(outcomes.len()).unwrap();
        let addresses = ports.map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let ended = first_of(addresses.collect(), |address| {
            let (millis, is_well) = outcomes[usize::from(address.port())];
            async move {
                tokio::time::sleep(Duration::from_millis(millis)).await;
                let port = address.port();
                if is_well { Ok(port) } else { Err(port) }
            }
        });
        (ended.await.unwrap(), began.elapsed())
    }

    /// A late address answers after a minute, which no attempt waits for.
    #[tokio::test]
    async fn the_first_that_answers_well_is_taken() {
        const NEVER: u64 = 60_000;
        let soon = Duration::from_secs(20);
        // A failed attempt starts the next one at once, and a silent one does not delay it beyond
        // the stagger.
        for (outcomes, winner) in [
            (&[(1, false), (1, true)][..], Ok(1)),
            (&[(NEVER, true), (1, true)], Ok(1)),
            (&[(NEVER, true), (1, false), (1, true)], Ok(2)),
            (&[(1, true), (1, true)], Ok(0)),
            (&[(1, false), (9, false)], Err(1)),
        ] {
            let (ended, took) = race(outcomes).await;
            assert_eq!(ended, winner);
            assert!(took < soon, "{took:?}");
        }
        let nobody = first_of(Vec::new(), async |_| Ok::<(), ()>(())).await;
        assert!(nobody.is_none());
    }
}
