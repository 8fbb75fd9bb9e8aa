//! The thread that renews the leader's lease. It has a runtime and a connection of its own, so that
//! nothing the master does makes it late.

use crate::clock::Clock;
use crate::store::etcd::{EtcdOptions, EtcdStore, LeaseId};
use crate::term::Term;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// How many times a lease is renewed in its time.
const RENEWALS: u32 = 6;
/// How soon a renewal that failed is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// For how long a master may act on a lease of `ttl`: clocks that run apart take no more than a tenth.
pub(super) fn usable(ttl: Duration) -> Duration {
    ttl * 9 / 10
}

/// The running thread. Dropping it lets the lease run out.
#[derive(Debug)]
pub(super) struct Keeper {
    lost: watch::Receiver<bool>,
    _stop: oneshot::Sender<()>,
}

impl Keeper {
    /// Starts to renew `lease`, and `term` with it.
    pub(super) fn start(
        options: EtcdOptions,
        lease: LeaseId,
        ttl: Duration,
        term: Arc<Term>,
        clock: Arc<dyn Clock>,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (told, lost) = watch::channel(false);
        let (stop, stopped) = oneshot::channel::<()>();
        std::thread::Builder::new()
            .name("kvm-lease".into())
            .spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        () = keep(&options, lease, ttl, &term, &*clock) => {
                            // Nobody asks any more when this fails.
                            let _asked = told.send(true);
                        }
                        _ = stopped => {}
                    }
                });
            })?;
        Ok(Self { lost, _stop: stop })
    }

    /// Ends when etcd no longer knows the lease.
    pub(super) async fn lost(&self) {
        // An error means that the thread has ended, and nobody renews the lease.
        let mut lost = self.lost.clone();
        let _lost = lost.wait_for(|lost| *lost).await;
    }
}

/// Renews until the lease is gone.
async fn keep(
    options: &EtcdOptions,
    lease: LeaseId,
    ttl: Duration,
    term: &Term,
    clock: &dyn Clock,
) {
    let store = loop {
        match EtcdStore::open(options).await {
            Ok(store) => break store,
            Err(error) => {
                tracing::warn!(%error, "leader lease: renewal connection failed, retrying");
                tokio::time::sleep(RETRY).await;
            }
        }
    };
    loop {
        // The lease runs from when etcd took the request, which is not before this.
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
