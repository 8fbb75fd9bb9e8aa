//! Resolves the host names of peers. The system's resolver may exceed every deadline, so it runs on threads:
//! one per name, and few at a time.

use crate::link::TransferError;
use crate::outcomes::{deadline_exceeded, invalid, unreachable};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Instant;

/// The most names that are resolved at a time. Each takes a thread until the resolver answers.
const MAX_LOOKUPS: usize = 32;

/// The addresses of a name, or the error of the resolver.
type Found = io::Result<Vec<SocketAddr>>;

/// The resolver. A test replaces it.
type LookUp = dyn Fn(&str) -> Found + Send + Sync;

/// One lookup under way, and the callers that wait for it.
#[derive(Default)]
struct Lookup {
    found: Mutex<Option<Arc<Found>>>,
    answered: Condvar,
}

type Lookups = Mutex<HashMap<String, Arc<Lookup>>>;

/// See the module's documentation.
pub(super) struct Names {
    look_up: Arc<LookUp>,
    under_way: Arc<Lookups>,
}

impl Names {
    /// Resolves names with the system's resolver.
    pub(super) fn new() -> Self {
        Self::with(|name| name.to_socket_addrs().map(Iterator::collect))
    }

    fn with(look_up: impl Fn(&str) -> Found + Send + Sync + 'static) -> Self {
        Self {
            look_up: Arc::new(look_up),
            under_way: Arc::default(),
        }
    }

    /// Resolves "host:port" by `deadline`. Callers with the same name share one lookup.
    pub(super) fn resolve(
        &self,
        target: &str,
        deadline: Instant,
    ) -> Result<Vec<SocketAddr>, TransferError> {
        if let Ok(address) = target.parse() {
            return Ok(vec![address]);
        }
        let lookup = self.lookup(target)?;
        let mut found = lookup.found.lock();
        loop {
            if let Some(found) = &*found {
                return addresses(target, found);
            }
            if lookup.answered.wait_until(&mut found, deadline).timed_out() {
                return Err(deadline_exceeded());
            }
        }
    }

    /// The lookup of a name that is under way, or a new lookup.
    fn lookup(&self, target: &str) -> Result<Arc<Lookup>, TransferError> {
        let mut under_way = self.under_way.lock();
        if let Some(lookup) = under_way.get(target) {
            return Ok(Arc::clone(lookup));
        }
        if under_way.len() >= MAX_LOOKUPS {
            return Err(unreachable(format!(
                "{target} is not looked up: the system has not answered for {MAX_LOOKUPS} other names"
            )));
        }
        let lookup = Arc::new(Lookup::default());
        let (answer, name) = (Arc::clone(&lookup), target.to_owned());
        let (look_up, lookups) = (Arc::clone(&self.look_up), Arc::clone(&self.under_way));
        std::thread::Builder::new()
            .name("kvpool-resolve".to_owned())
            .spawn(move || {
                let found = look_up(&name);
                // A later caller starts a new lookup.
                lookups.lock().remove(&name);
                *answer.found.lock() = Some(Arc::new(found));
                answer.answered.notify_all();
            })
            .map_err(unreachable)?;
        under_way.insert(target.to_owned(), Arc::clone(&lookup));
        Ok(lookup)
    }
}

fn addresses(target: &str, found: &Found) -> Result<Vec<SocketAddr>, TransferError> {
    match found {
        Ok(addresses) => Ok(addresses.clone()),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            Err(invalid(format!("{target:?} is not a host:port")))
        }
        Err(error) => Err(unreachable(format!("{target}: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_types::Code;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    #[test]
    fn a_name_has_one_lookup_at_a_time_and_names_have_a_limit() {
        let (began, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(())));
        let (count, opens) = (Arc::clone(&began), Arc::clone(&gate));
        let address = SocketAddr::from(([127, 0, 0, 1], 7));
        let names = Names::with(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
            drop(opens.lock());
            Ok(vec![address])
        });
        let closed = gate.lock();
        // The deadline of each lookup has passed already.
        let now = Instant::now();
        let code = |name: &str| names.resolve(name, now).unwrap_err().code;
        for _ in 0..5 {
            assert_eq!(code("peer:7"), Code::DeadlineExceeded);
        }
        for other in 1..MAX_LOOKUPS {
            assert_eq!(code(&format!("peer-{other}:7")), Code::DeadlineExceeded);
        }
        assert_eq!(code("one-more:7"), Code::Unreachable);
        drop(closed);
        let later = Instant::now() + Duration::from_secs(60);
        assert_eq!(names.resolve("peer:7", later).unwrap(), [address]);
        while !names.under_way.lock().is_empty() {
            std::thread::yield_now();
        }
        // One for each name, and perhaps one for the caller after the gate had opened.
        let lookups = began.load(Ordering::SeqCst);
        assert!(
            (MAX_LOOKUPS..=MAX_LOOKUPS + 1).contains(&lookups),
            "{lookups}"
        );
        assert_eq!(names.resolve("one-more:7", later).unwrap(), [address]);
    }

    #[test]
    fn a_name_that_is_no_host_and_port_is_invalid() {
        let later = Instant::now() + Duration::from_secs(60);
        let refused = Names::new().resolve("no port", later);
        assert_eq!(refused.unwrap_err().code, Code::InvalidArgument);
    }
}
