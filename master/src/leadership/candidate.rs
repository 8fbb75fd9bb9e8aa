//! The start and the end of the task that stands for election.

use super::observer::Observer;
use super::terms::{RETRY, Run, Stand, told};
use super::{Seat, watchdog};
use crate::clock::Clock;
use crate::store::etcd::{TlsOptions, Waits};
use crate::store::{Claim, ElectionStore, EtcdOptions, EtcdStore, JournalOptions, OpenError};
use async_trait::async_trait;
use bytesize::ByteSize;
use kvpool_types::ClusterId;
use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// Why a master cannot stand for election.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CandidateError {
    /// The file with etcd's password cannot be read.
    #[error("etcd_password_file {path}: {source}")]
    Password {
        /// The path of the file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The etcd settings are unusable, or this version cannot read etcd's content.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// The outside world of a candidate: the store and the network. The simulation replaces both.
#[async_trait]
pub trait Surroundings: Debug + Send + Sync {
    /// Opens a separate connection to the store.
    async fn open(&self) -> Result<Arc<dyn ElectionStore>, OpenError>;

    /// Connects to the leader at `address` (`http://host:port`), and returns when the connection
    /// has ended. Fails with [`io::ErrorKind::ConnectionRefused`] if no process listens there.
    async fn meet(&self, address: &str) -> io::Result<()>;
}

/// etcd and the network.
#[derive(Debug)]
struct Etcd {
    options: EtcdOptions,
    waits: Waits,
}

#[async_trait]
impl Surroundings for Etcd {
    async fn open(&self) -> Result<Arc<dyn ElectionStore>, OpenError> {
        let opened = EtcdStore::open_and_tell(&self.options, &self.waits).await?;
        Ok(Arc::new(opened))
    }

    async fn meet(&self, address: &str) -> io::Result<()> {
        watchdog::meet(address).await
    }
}

/// A master that stands for election while it runs.
#[derive(Debug)]
pub struct Candidate {
    stop: watch::Sender<bool>,
    task: tokio::sync::Mutex<Option<JoinHandle<()>>>,
}

impl Candidate {
    /// Starts to stand by, and to lead when no other master does. `address` and `http_address` are
    /// this master's addresses for other machines. Its ports are already bound.
    ///
    /// # Errors
    ///
    /// `CandidateError` when the password file cannot be read, or when etcd refuses the settings.
    /// An unreachable etcd is not an error.
    pub async fn start(
        seat: Arc<Seat>,
        clock: Arc<dyn Clock>,
        address: String,
        http_address: String,
    ) -> Result<Self, CandidateError> {
        let surroundings = Etcd {
            options: etcd_options(&seat)?,
            waits: Waits::default(),
        };
        let opened = match surroundings.open().await {
            Ok(store) => Some(store),
            // etcd may still become reachable. Until then the seat reports the reason for the wait.
            Err(error) if error.is_retryable() => {
                seat.wait(error.to_string());
                None
            }
            Err(error) => return Err(error.into()),
        };
        let claim = Claim {
            id: format!("{:032x}", kvpool_seams::random::<u128>()),
            address,
            http_address,
        };
        let surroundings = Arc::new(surroundings);
        let journal = journal_options();
        Ok(Self::stand(
            seat,
            clock,
            claim,
            surroundings,
            journal,
            opened,
        ))
    }

    /// [`Candidate::start`] with a store and a network that the caller supplies. `opened` is a
    /// store that is already open.
    pub fn stand(
        seat: Arc<Seat>,
        clock: Arc<dyn Clock>,
        claim: Claim,
        surroundings: Arc<dyn Surroundings>,
        journal: JournalOptions,
        opened: Option<Arc<dyn ElectionStore>>,
    ) -> Self {
        let (stop, stopped) = watch::channel(false);
        let begin = Stand {
            seat,
            clock,
            claim,
            surroundings,
            journal,
            stopped,
        };
        let task = tokio::spawn(begin.run(opened));
        Self {
            stop,
            task: tokio::sync::Mutex::new(Some(task)),
        }
    }

    /// Ends the task as the death of the process would: the lease stays until it expires.
    pub fn abort(&self) {
        // If another caller holds the lock, that caller is ending the task.
        if let Ok(mut task) = self.task.try_lock()
            && let Some(task) = task.take()
        {
            task.abort();
        }
    }

    /// Gives up the lead and ends the task. Another master can then lead at once.
    pub async fn stop(&self) {
        self.stop.send_replace(true);
        if let Some(task) = self.task.lock().await.take()
            && task.await.is_err()
        {
            tracing::error!("election task panicked");
        }
    }
}

fn etcd_options(seat: &Seat) -> Result<EtcdOptions, CandidateError> {
    let config = &seat.config;
    let mut options = EtcdOptions::new(config.etcd.clone(), config.cluster.clone());
    if !config.etcd_user.is_empty() {
        let password = match &config.etcd_password_file {
            Some(file) => {
                std::fs::read_to_string(file).map_err(|source| CandidateError::Password {
                    path: file.display().to_string(),
                    source,
                })?
            }
            None => String::new(),
        };
        let password = password.trim_end_matches(['\r', '\n']).to_owned();
        options.user = Some((config.etcd_user.clone(), password));
    }
    options.tls = config.etcd_ca.clone().map(|ca| TlsOptions {
        ca,
        cert: config.etcd_cert.clone(),
        key: config.etcd_key.clone(),
    });
    options.compact = config.etcd_compact;
    Ok(options)
}

/// etcd copies each value to all its members, so the log is kept shorter than on a local disk. An
/// append also takes long enough to run on another thread.
fn journal_options() -> JournalOptions {
    JournalOptions {
        log_bytes: ByteSize::mib(8),
        log_ratio: 1,
        appends_aside: true,
        ..JournalOptions::default()
    }
}

impl Stand {
    async fn run(mut self, store: Option<Arc<dyn ElectionStore>>) {
        let mut stopped = self.stopped.clone();
        let mut run = tokio::select! {
            biased;
            () = told(&mut stopped) => return,
            run = self.open(store) => run,
        };
        run.run().await;
    }

    async fn open(&mut self, mut opened: Option<Arc<dyn ElectionStore>>) -> Run {
        loop {
            let store = match opened.take() {
                Some(store) => Ok(store),
                None => self.surroundings.open().await,
            };
            let reason = match store {
                Ok(store) => match store.cluster_id(ClusterId(kvpool_seams::random())).await {
                    Ok(cluster) => {
                        return Run {
                            observer: Observer::start(Arc::clone(&store)),
                            stand: self.clone(),
                            store,
                            cluster,
                            revoked: None,
                        };
                    }
                    Err(error) => error.to_string(),
                },
                // The open itself has logged this.
                Err(error @ OpenError::Unreachable { .. }) => {
                    self.seat.wait(error.to_string());
                    sleep(RETRY).await;
                    continue;
                }
                Err(error) => error.to_string(),
            };
            tracing::warn!(reason, "metadata store not opened, retrying");
            self.seat.wait(reason);
            sleep(RETRY).await;
        }
    }
}
