//! The node's side of its session with a master.
//!
//! The session runs on a thread with a runtime of its own. However busy the data port is, heartbeats are sent
//! on time and fences are received. Slow work, such as verifying a block again, goes to other threads.
//!
//! ```text
//!            ┌────────────────────────── broken, silent, ended ───────────────────────┐
//!            ▼                                                                        │
//!  hunt: Register here and there ► Welcome: enter the term ► heartbeats, fences, ... ─┤
//!            ▲            │ IncarnationDropped: a new life                            │
//!            └────────────┘                                      Draining ► Goodbye ► end
//! ```

mod backoff;
mod master_discovery;
mod message;
mod names;
mod session;
mod verifications;

use crate::media::Media;
use crate::pulls::Pulls;
use crate::serve::Store;
use backoff::Backoff;
use kvpool_auth::Credentials;
use kvpool_tls::ClientTls;
use master_discovery::{Before, GONE, MasterDiscovery};
use message::Seen;
use names::Names;
use parking_lot::Mutex;
pub(crate) use session::Connect;
use session::{End, Introduction};
#[cfg(feature = "simulation")]
pub(crate) use session::{Inbox, Outgoing};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use tokio::sync::{Semaphore, watch};

/// The nice value of the agent's thread, if the system permits it.
const NICE: i32 = -10;
/// The most blocks that are verified at a time. More would slow down the data port.
const VERIFIERS: usize = 2;
/// The most names that are resolved at a time. A lookup that hangs keeps its thread.
const LOOKUPS: usize = 128;

/// The parameters of the agent.
pub(crate) struct Options {
    /// The masters as `http://host:port`, or the etcd locations that announce them; at least one.
    pub(crate) masters: Vec<String>,
    /// The node's token.
    pub(crate) credentials: Credentials,
    /// The TLS settings for masters whose address requires TLS.
    pub(crate) tls: Option<ClientTls>,
    /// The address at which clients reach the data port.
    pub(crate) data_address: String,
    /// The path of the Unix socket; empty for none.
    pub(crate) shm_path: String,
    /// The media, if the node has any.
    pub(crate) media: Option<Arc<Media>>,
    /// Copies blocks from other nodes into this one.
    pub(crate) pulls: Pulls,
    /// Whether a node that stops waits until its blocks are elsewhere.
    pub(crate) moves_blocks: bool,
    /// Returns the number of open data connections.
    pub(crate) connections: Box<dyn Fn() -> usize + Send>,
    /// Returns the faults of the token, key and policy files, one sentence each.
    pub(crate) problems: Box<dyn Fn() -> Vec<String> + Send>,
    /// Opens sessions in a simulation; `None` uses gRPC.
    pub(crate) connect: Option<Connect>,
}

/// What the node wants of its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Serving,
    /// An operator takes the node out of service, and may take it back.
    Draining,
    /// The node stops. A node that was out of service says again that it drains, and gets a new answer.
    Stopping,
    Leaving,
}

/// The running agent. The drop ends the session without a message, as a crash would.
#[derive(Debug)]
pub(crate) struct Agent {
    phase: watch::Sender<Phase>,
    connected: Arc<AtomicBool>,
    saved: Arc<Mutex<Option<u64>>>,
    thread: Option<JoinHandle<()>>,
}

impl Agent {
    /// Starts the thread.
    pub(crate) fn start(store: Store, options: Options) -> io::Result<Self> {
        let (mut agent, context) = Self::of(store, options);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .thread_name("kvnode-verify")
            .max_blocking_threads(VERIFIERS + LOOKUPS)
            .enable_all()
            .build()?;
        let thread = kvpool_seams::thread("kvnode-agent", move || {
            run_sooner();
            runtime.block_on(context.run());
            // The end must not wait for a verification that is still reading.
            runtime.shutdown_background();
        })?;
        agent.thread = Some(thread);
        Ok(agent)
    }

    /// An agent whose session the caller runs, in the returned context.
    fn of(store: Store, options: Options) -> (Self, Context) {
        let (phase, phases) = watch::channel(Phase::Serving);
        let connected = Arc::new(AtomicBool::new(false));
        let saved = Arc::new(Mutex::new(None));
        let context = Context {
            store,
            options,
            phases,
            phase: phase.clone(),
            media_leave: AtomicBool::new(false),
            connected: Arc::clone(&connected),
            saved: Arc::clone(&saved),
            reports: 0,
            seen: Seen::default(),
            has_several: false,
            names: Arc::new(Names::of_system()),
            verifiers: Arc::new(Semaphore::new(VERIFIERS)),
        };
        let agent = Self {
            phase,
            connected,
            saved,
            thread: None,
        };
        (agent, context)
    }

    /// Makes the session say goodbye and end.
    #[cfg(feature = "simulation")]
    pub(crate) fn say_goodbye(&self) {
        self.phase.send_replace(Phase::Leaving);
    }

    /// An agent without a thread, and its session, which the caller must poll. The session ends when the node
    /// leaves.
    #[cfg(feature = "simulation")]
    pub(crate) fn simulated(
        store: Store,
        options: Options,
    ) -> (Self, impl Future<Output = ()> + use<>) {
        let (agent, context) = Self::of(store, options);
        (agent, context.run())
    }

    /// Whether a master has welcomed the node and the session is open.
    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }

    /// The blocks that stay behind, once the master has answered the stop of the node: none waits any more to be
    /// copied or moved.
    pub(crate) fn saved(&self) -> Option<u64> {
        *self.saved.lock()
    }

    /// Whether the node drains: an operator has taken it out of service, or it stops.
    #[cfg(feature = "simulation")]
    pub(crate) fn drains(&self) -> bool {
        *self.phase.borrow() >= Phase::Draining
    }

    /// Whether the thread still runs, as it should until [`Agent::leave`].
    pub(crate) fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| !t.is_finished())
    }

    /// Tells the master to place nothing here any more.
    pub(crate) fn drain(&self) {
        self.phase.send_replace(Phase::Stopping);
    }

    /// Tells the master that this incarnation is over, and ends. Blocks, two seconds at most.
    pub(crate) fn leave(mut self) {
        self.phase.send_replace(Phase::Leaving);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the master session's thread panicked");
        }
    }
}

/// Raises the scheduling priority of the calling thread. Many hosts do not permit this. The thread's own
/// runtime keeps it apart from the data port in any case.
fn run_sooner() {
    match rustix::process::setpriority_process(None, NICE) {
        Ok(()) => tracing::debug!(
            nice = NICE,
            "raised the priority of the master session's thread"
        ),
        Err(error) => {
            tracing::debug!(%error, "cannot raise the priority of the master session's thread")
        }
    }
}

/// The state of the agent's thread.
struct Context {
    store: Store,
    options: Options,
    phases: watch::Receiver<Phase>,
    /// The master may have the node drain.
    phase: watch::Sender<Phase>,
    /// Whether the operator who drains the node has said that its media do not come back.
    media_leave: AtomicBool,
    connected: Arc<AtomicBool>,
    /// Set when the master has said that no block of the node, which stops, waits any more.
    saved: Arc<Mutex<Option<u64>>>,
    /// How often the node has reported that it drains.
    reports: u64,
    seen: Seen,
    /// Whether more than one master is known.
    has_several: bool,
    names: Arc<Names>,
    /// One permit for each verification. A verification continues after its session has ended.
    verifiers: Arc<Semaphore>,
}

impl Context {
    async fn run(mut self) {
        let masters = self.options.masters.clone();
        let mut backoff = Backoff::default();
        let mut discovery = MasterDiscovery::new(&masters, &Before::Nothing);
        loop {
            let (end, master) = match Box::pin(discovery.run(&mut self)).await {
                Ok((session, master)) => {
                    backoff = Backoff::default();
                    self.has_several = discovery.is_of_several();
                    self.connected.store(true, Ordering::Release);
                    self.store.metrics().session_open.set(1);
                    let end = Box::pin(session.run(&mut self)).await;
                    self.connected.store(false, Ordering::Release);
                    self.store.metrics().session_open.set(0);
                    (end, master)
                }
                Err(ended) => ended,
            };
            let mut leader = String::new();
            let before = match end {
                End::Left => return,
                End::NewLife { keep_cluster, why } => {
                    tracing::warn!(
                        master,
                        why,
                        "the master ended this incarnation: the node starts a new one, without blocks"
                    );
                    if !keep_cluster {
                        self.seen = Seen::default();
                    }
                    self.store.renew(keep_cluster);
                    Before::Anew(&master, backoff.next(GONE))
                }
                End::Again(why) => {
                    tracing::info!(master, why, "registering with the master again");
                    Before::Anew(&master, backoff.next(GONE))
                }
                End::Failed(failure) => {
                    tracing::warn!(master, error = %failure, "session with the master ended");
                    leader.push_str(failure.not_leader().unwrap_or_default());
                    Before::Lost(&master)
                }
            };
            discovery = MasterDiscovery::new(&masters, &before);
            discovery.names(&leader);
        }
    }

    /// The node's present description of itself, for a registration.
    fn introduction(&self) -> Introduction {
        let snapshot = self.store.snapshot();
        Introduction {
            register: message::register(
                self.store.identity(),
                &self.options,
                &snapshot,
                &self.store.loaded(),
                &self.seen,
            ),
            incarnation: snapshot.incarnation,
            numbered: snapshot.segments.iter().all(|(_, id)| id.is_some()),
        }
    }
}
