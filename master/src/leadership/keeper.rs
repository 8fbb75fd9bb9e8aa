//! The thread that renews the leader's lease. The thread has a runtime and a connection of its own,
//! so the load of the master never delays a renewal.

use super::Surroundings;
use crate::clock::Clock;
use crate::store::etcd::LeaseId;
use crate::term::Term;
use crate::workers::Workers;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// The number of renewals in one TTL.
const RENEWALS: u32 = 6;
/// The delay before a failed renewal is repeated.
const RETRY: Duration = Duration::from_millis(100);

/// How long a master may act on a lease of `ttl`. The clocks of two machines drift apart by at most
/// a tenth of it.
pub(super) fn usable(ttl: Duration) -> Duration {
    ttl * 9 / 10
}

/// The running thread. Dropping it ends the renewals, and the lease then expires.
#[derive(Debug)]
pub(super) struct Keeper {
    lost: watch::Receiver<bool>,
    _stop: oneshot::Sender<()>,
}

impl Keeper {
    /// Starts to renew `lease`, and `term` with it.
    pub(super) fn start(
        surroundings: Arc<dyn Surroundings>,
        lease: LeaseId,
        ttl: Duration,
        term: Arc<Term>,
        clock: Arc<dyn Clock>,
        workers: Workers,
    ) -> io::Result<Self> {
        let (told, lost) = watch::channel(false);
        let (stop, stopped) = oneshot::channel::<()>();
        let keeping = async move {
            tokio::select! {
                biased;
                _ = stopped => {}
                () = keep(&*surroundings, lease, ttl, &term, &*clock) => {
                    // The send fails when no task waits for the loss any more.
                    let _asked = told.send(true);
                }
            }
        };
        match workers {
            Workers::Threads => {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()?;
                kvpool_seams::thread("kvm-lease", move || runtime.block_on(keeping))?;
            }
            Workers::Tasks => drop(tokio::spawn(keeping)),
        }
        Ok(Self { lost, _stop: stop })
    }

    /// Completes when the store no longer knows the lease.
    pub(super) async fn lost(&self) {
        // An error means that the thread has ended, so no thread renews the lease.
        let mut lost = self.lost.clone();
        let _lost = lost.wait_for(|lost| *lost).await;
    }
}

/// Renews the lease until it is gone.
async fn keep(
    surroundings: &dyn Surroundings,
    lease: LeaseId,
    ttl: Duration,
    term: &Term,
    clock: &dyn Clock,
) {
    let store = loop {
        match surroundings.open().await {
            Ok(store) => break store,
            Err(error) => {
                tracing::warn!(%error, "leader lease: renewal connection failed, retrying");
                tokio::time::sleep(RETRY).await;
            }
        }
    };
    loop {
        // The store starts the TTL when it processes the request, which is not before this instant.
        let sent = clock.now();
        let pause = match store.keep_alive(lease).await {
            Ok(Some(granted)) => {
                term.renew(sent.after(usable(granted.min(ttl))));
                ttl / RENEWALS
            }
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "leader lease: renewal failed, retrying");
                RETRY
            }
        };
        tokio::time::sleep(pause).await;
    }
}
