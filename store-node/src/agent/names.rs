//! Resolves the host names of masters.
//!
//! A lookup may take longer than an attempt to connect, as long as a name server is away. A node that
//! reconnects must not depend on it, so the last addresses of each name are kept. A lookup that outlasts an
//! attempt at its master continues, and the next attempt has its answer. A name takes one thread, and another
//! one for each minute in which its lookups hang.

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use kvpool_tls::addresses;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// The longest wait for the addresses of a name that has none yet.
const FIRST_LOOKUP: Duration = Duration::from_secs(5);
/// The longest wait if the last addresses are known.
const NEXT_LOOKUP: Duration = Duration::from_secs(1);
/// A lookup that has taken this long is started again. Its result may be out of date.
const STALE: Duration = Duration::from_secs(60);
/// The most names that are kept, since masters name further masters.
const MOST_NAMES: usize = 64;

/// The result of a lookup.
pub(super) type Found = Result<Vec<SocketAddr>, Arc<io::Error>>;
type Lookup = Box<dyn Fn(String) -> BoxFuture<'static, Found> + Send + Sync>;

/// The resolved names.
pub(super) struct Names {
    lookup: Lookup,
    known: Mutex<HashMap<String, Name>>,
}

#[derive(Default)]
struct Name {
    last: Vec<SocketAddr>,
    /// The lookup in progress, with the time of its start.
    running: Option<(Instant, Shared<BoxFuture<'static, Found>>)>,
}

impl Name {
    fn is_looked_up(&self) -> bool {
        let begun = self.running.as_ref().map(|(begun, _)| begun);
        begun.is_some_and(|begun| begun.elapsed() < STALE)
    }
}

impl Names {
    /// Resolves names with the system's resolver.
    pub(super) fn of_system() -> Self {
        Self::new(|name| {
            let found = async move { addresses::resolve(&name).await.map_err(Arc::new) };
            found.boxed()
        })
    }

    pub(super) fn new(
        lookup: impl Fn(String) -> BoxFuture<'static, Found> + Send + Sync + 'static,
    ) -> Self {
        Self {
            lookup: Box::new(lookup),
            known: Mutex::default(),
        }
    }

    /// The addresses of a `host:port`. If the lookup fails or is slow, this returns the last known addresses.
    pub(super) async fn resolve(&self, name: &str) -> Found {
        let (running, last) = self.begin(name);
        let patience = match last.is_empty() {
            true => FIRST_LOOKUP,
            false => NEXT_LOOKUP,
        };
        let found = match timeout(patience, running).await {
            Ok(found) => self.ended(name, found),
            Err(_) => {
                let patience = humantime::format_duration(patience);
                let why = format!("no answer to the lookup within {patience}");
                Err(Arc::new(io::Error::new(io::ErrorKind::TimedOut, why)))
            }
        };
        match found {
            Err(error) if !last.is_empty() => {
                tracing::debug!(name, %error, "the last known addresses are used");
                Ok(last)
            }
            found => found,
        }
    }

    /// The lookup in progress, or a new lookup; and the last known addresses.
    fn begin(&self, name: &str) -> (Shared<BoxFuture<'static, Found>>, Vec<SocketAddr>) {
        let mut known = self.known.lock();
        if known.len() >= MOST_NAMES && !known.contains_key(name) {
            known.retain(|_, name| name.is_looked_up());
        }
        let entry = known.entry(name.to_owned()).or_default();
        let running = match &entry.running {
            Some((_, running)) if entry.is_looked_up() => running.clone(),
            _ => {
                let running = (self.lookup)(name.to_owned()).shared();
                entry.running = Some((Instant::now(), running.clone()));
                running
            }
        };
        (running, entry.last.clone())
    }

    fn ended(&self, name: &str, found: Found) -> Found {
        if let Some(entry) = self.known.lock().get_mut(name) {
            entry.running = None;
            if let Ok(found) = &found {
                entry.last.clone_from(found);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test]
    async fn a_name_keeps_its_last_addresses_while_its_lookup_hangs() {
        let address = SocketAddr::from(([192, 0, 2, 1], 7070));
        let lookups = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&lookups);
        let names = Names::new(move |_| {
            let number = counted.fetch_add(1, Ordering::Relaxed);
            let found = async move {
                match number {
                    0 => Err(Arc::new(io::Error::other("no such name"))),
                    1 => Ok(vec![address]),
                    2 => Err(Arc::new(io::Error::other("the name server failed"))),
                    _ => std::future::pending().await,
                }
            };
            found.boxed()
        });
        assert!(names.resolve("master:7070").await.is_err());
        let begun = Instant::now();
        for _ in 0..4 {
            let found = names.resolve("master:7070").await;
            assert_eq!(found.unwrap(), [address]);
        }
        assert!(begun.elapsed() < FIRST_LOOKUP, "{:?}", begun.elapsed());
        let lookups = lookups.load(Ordering::Relaxed);
        assert_eq!(lookups, 4, "a lookup that hangs is begun once");
    }
}
