//! The start and the end of the task that stands for election.

use super::Seat;
use super::observer::Observer;
use super::terms::{RETRY, Run, Stand, told};
use crate::clock::Clock;
use crate::store::etcd::{Claim, EtcdOptions, EtcdStore, TlsOptions};
use crate::store::{MetadataStore, OpenError};
use kvpool_types::ClusterId;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// The reason that a master cannot stand for election.
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

/// A master that stands for election while it runs.
#[derive(Debug)]
pub struct Candidate {
    stop: watch::Sender<bool>,
    task: tokio::sync::Mutex<Option<JoinHandle<()>>>,
}

impl Candidate {
    /// Starts to stand by, and to lead when no other master does. `address` and `http_address` are
    /// this master's addresses for other machines. Its ports are already bound.
    pub async fn start(
        seat: Arc<Seat>,
        clock: Arc<dyn Clock>,
        address: String,
        http_address: String,
    ) -> Result<Self, CandidateError> {
        let options = etcd_options(&seat)?;
        let claim = Claim {
            id: format!("{:032x}", kvpool_seams::random::<u128>()),
            address,
            http_address,
        };
        let (stop, stopped) = watch::channel(false);
        let store = match EtcdStore::open(&options).await {
            Ok(store) => Some(store),
            // etcd may still come. Until then the seat reports what the master waits for.
            Err(error) if error.is_retryable() => {
                tracing::warn!(%error, "etcd not available, retrying");
                seat.wait(error.to_string());
                None
            }
            Err(error) => return Err(error.into()),
        };
        let begin = Stand {
            seat,
            clock,
            options,
            claim,
            stopped,
        };
        let task = tokio::spawn(begin.run(store));
        Ok(Self {
            stop,
            task: tokio::sync::Mutex::new(Some(task)),
        })
    }

    /// Gives up the lead, so that another master can take it at once, and ends the task.
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

impl Stand {
    async fn run(mut self, store: Option<EtcdStore>) {
        let mut stopped = self.stopped.clone();
        let mut run = tokio::select! {
            run = self.open(store) => run,
            () = told(&mut stopped) => return,
        };
        run.run().await;
    }

    async fn open(&mut self, mut opened: Option<EtcdStore>) -> Run {
        loop {
            let store = match opened.take() {
                Some(store) => Ok(store),
                None => EtcdStore::open(&self.options).await,
            };
            let reason = match store {
                Ok(store) => match store.cluster_id(ClusterId(kvpool_seams::random())).await {
                    Ok(cluster) => {
                        let store = Arc::new(store);
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
                Err(error) => error.to_string(),
            };
            tracing::warn!(reason, "metadata store not opened, retrying");
            self.seat.wait(reason);
            sleep(RETRY).await;
        }
    }
}
