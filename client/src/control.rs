//! Calls to kvmaster: who calls, which term is known, and what is done when a call fails.
//!
//! Every reply carries its master's epoch. One below the highest seen comes from a deposed leader
//! and is refused; one above it ends the use of every location that was remembered. A call that
//! fails with a retryable code is repeated, on the next master when this one is gone or does not
//! lead, until its deadline; a call whose repetition would do harm says so ([`Call::once`]).

mod framed;
mod messages;
mod status;

use crate::api::Limits;
use crate::cache::Locations;
use crate::clock::{Backoff, Deadline};
use crate::counters::Counting;
use crate::errors::{ConnectError, ControlError};
use crate::options::Options;
use framed::Framed;
use kvpool_proto::pool_client::PoolClient;
use kvpool_proto::{Caller, CreateNamespaceRequest, HelloRequest, MAX_MESSAGE_BYTES};
use kvpool_types::{ChecksumAlgorithm, ClientId, ClusterId, Code, Epoch, HostId, Length};
pub(crate) use messages::Message;
use parking_lot::RwLock;
use prost::Message as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tonic::transport::{Channel, Endpoint};

/// How long opening a connection to a master may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// A master that does not answer a ping for so long, while calls wait on it, is gone.
const PING_INTERVAL: Duration = Duration::from_secs(2);
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// The least time that one attempt of a call gets.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(500);

/// One client's side of the conversation with the masters.
#[derive(Debug)]
pub(crate) struct Control {
    masters: Vec<Master>,
    /// The master that answered last, as an index into `masters`.
    current: AtomicUsize,
    client: ClientId,
    host: HostId,
    /// What every request says of who makes it; the epoch is filled in.
    caller: RwLock<Caller>,
    epoch: AtomicU64,
    agreed: RwLock<Agreed>,
    locations: Arc<Locations>,
    counting: Arc<Counting>,
    /// Where what nobody waits for runs.
    background: Handle,
}

#[derive(Debug)]
struct Master {
    address: String,
    pool: PoolClient<Channel>,
    framed: Framed,
}

/// What hello settled.
#[derive(Clone, Copy, Debug)]
struct Agreed {
    cluster: Option<ClusterId>,
    limits: Limits,
}

/// How one call is to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// When it must have returned.
    pub(crate) deadline: Deadline,
    epoch: Option<Epoch>,
    repeat: bool,
    waits: bool,
    aside: bool,
}

impl Call {
    /// A call that may be repeated and is answered at once.
    pub(crate) const fn by(deadline: Deadline) -> Self {
        Self {
            deadline,
            epoch: None,
            repeat: true,
            waits: false,
            aside: false,
        }
    }

    /// The call speaks of something that only `epoch` knows: it is made under that epoch, and is
    /// not repeated under another.
    pub(crate) const fn under(mut self, epoch: Epoch) -> Self {
        self.epoch = Some(epoch);
        self
    }

    /// The call is made once, whatever becomes of it.
    pub(crate) const fn once(mut self) -> Self {
        self.repeat = false;
        self
    }

    /// The master may take all of the time to answer.
    pub(crate) const fn waiting(mut self) -> Self {
        self.waits = true;
        self
    }

    /// The call is made by a task that nobody waits for. It goes over gRPC: a framed connection may
    /// belong to a runtime that runs only while somebody waits.
    pub(crate) const fn aside(mut self) -> Self {
        self.aside = true;
        self
    }

    /// How long one attempt may take: a part of what is left when another could follow it.
    fn attempt(&self) -> Deadline {
        if self.waits || !self.repeat {
            self.deadline
        } else {
            self.deadline
                .at_most((self.deadline.left() / 2).max(SHORTEST_ATTEMPT))
        }
    }
}

impl Control {
    /// Greets the masters until one lets the client in, and makes the namespace known.
    pub(crate) async fn connect(
        options: &Options,
        host: HostId,
        locations: Arc<Locations>,
        counting: Arc<Counting>,
        background: Handle,
    ) -> Result<Self, ConnectError> {
        if options.masters.is_empty() {
            return Err(ConnectError::NoMasters);
        }
        let masters = options
            .masters
            .iter()
            .map(|address| Master::new(address, options.spin, &background))
            .collect::<Result<Vec<_>, _>>()?;
        let client = ClientId(rand::random());
        let control = Self {
            masters,
            current: AtomicUsize::new(0),
            client,
            host,
            caller: RwLock::new(Caller {
                cluster_id: bytes::Bytes::new(),
                epoch: 0,
                client_id: client.to_bytes().to_vec().into(),
                host_id: host.to_bytes().to_vec().into(),
                namespace: options.namespace.name.clone(),
                forward: false,
            }),
            epoch: AtomicU64::new(0),
            agreed: RwLock::new(Agreed {
                cluster: None,
                limits: Limits {
                    max_block: Length(u64::MAX),
                    max_batch_keys: options.max_batch_keys.max(1),
                    lease_ttl: Duration::ZERO,
                },
            }),
            locations,
            counting,
            background,
        };
        let call = Call::by(Deadline::after(options.timeouts.connect));
        let refused = |source| ConnectError::Refused {
            masters: options.masters.join(", "),
            source,
        };
        let hello = control
            .call(HelloRequest::default(), call)
            .await
            .map_err(refused)?;
        control
            .agree(&hello, options.max_batch_keys.max(1))
            .map_err(refused)?;
        let create = CreateNamespaceRequest {
            caller: None,
            namespace: Some(kvpool_proto::Namespace {
                name: options.namespace.name.clone(),
                model: options.namespace.model.clone(),
                dtype: options.namespace.dtype.clone(),
                parallel_rank: options.namespace.parallel_rank.clone(),
                salt: options.namespace.salt.clone(),
            }),
        };
        control.call(create, call).await.map_err(refused)?;
        Ok(control)
    }

    /// Which life of which client this is.
    pub(crate) const fn client(&self) -> ClientId {
        self.client
    }

    /// The machine that the client runs on.
    pub(crate) const fn host(&self) -> HostId {
        self.host
    }

    /// The highest epoch seen.
    pub(crate) fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// What hello settled.
    pub(crate) fn limits(&self) -> Limits {
        self.agreed.read().limits
    }

    /// The pool that the client belongs to; zero before hello.
    pub(crate) fn cluster(&self) -> ClusterId {
        self.agreed.read().cluster.unwrap_or_default()
    }

    /// Makes a call, again where that may help, until it is answered or its deadline passes.
    pub(crate) async fn call<M: Message>(
        &self,
        message: M,
        call: Call,
    ) -> Result<M::Reply, ControlError> {
        let mut backoff = Backoff::default();
        loop {
            let at = self.current.load(Ordering::Relaxed);
            let Some(master) = self.masters.get(at % self.masters.len()) else {
                return Err(ControlError::new(Code::Internal, "no master is named"));
            };
            let error = match self.attempt(master, message.clone(), call).await {
                Ok(reply) => return Ok(reply),
                Err(error) => error,
            };
            if moves_on(error.code) {
                self.leave(at);
            }
            let fixed = call.epoch.is_some() && error.code == Code::StaleEpoch;
            if error.code == Code::StaleEpoch {
                self.learn_epoch(master, call.deadline).await;
            }
            if !call.repeat || fixed || !error.is_retryable() {
                return Err(error);
            }
            if !call.deadline.pause(backoff.next()).await {
                return Err(error);
            }
            Counting::one(&self.counting.control_retries);
        }
    }

    async fn attempt<M: Message>(
        &self,
        master: &Master,
        mut message: M,
        call: Call,
    ) -> Result<M::Reply, ControlError> {
        let deadline = call.attempt();
        message.set_caller(self.caller(call.epoch));
        let reply = self.send(master, message, call, deadline).await?;
        self.judge_epoch(master, Epoch(M::epoch_of(&reply)))?;
        Ok(reply)
    }

    /// Sends a message the quickest way that its master takes.
    async fn send<M: Message>(
        &self,
        master: &Master,
        message: M,
        call: Call,
        deadline: Deadline,
    ) -> Result<M::Reply, ControlError> {
        if let Some(op) = M::OP.filter(|_| !call.aside) {
            let greeting = || {
                let mut greeting = HelloRequest::default();
                greeting.set_caller(self.caller(None));
                greeting
            };
            if let Some(channel) = master.framed.channel(greeting, deadline).await? {
                let failed = |code, why: &dyn std::fmt::Display| {
                    ControlError::new(code, format!("{} at {}: {why}", M::NAME, master.address))
                };
                let reply = framed::call(&channel, op, self.epoch(), &message, deadline)
                    .await
                    .inspect_err(|error| {
                        if error.code == Code::DeadlineExceeded {
                            master.framed.doubt();
                        }
                    })
                    .map_err(|error| failed(error.code, &error.message))?;
                return M::Reply::decode(bytes::Bytes::from(reply))
                    .map_err(|error| failed(Code::Malformed, &error));
            }
        }
        let mut request = tonic::Request::new(message);
        request.set_timeout(deadline.left());
        match deadline.run(M::send(master.pool.clone(), request)).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(status::error(&master.address, M::NAME, &status)),
            Err(_) => Err(ControlError::new(
                Code::DeadlineExceeded,
                format!("kvmaster at {} did not answer {}", master.address, M::NAME),
            )),
        }
    }

    /// Runs what nobody waits for. Its calls are made [`Call::aside`].
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.background.spawn(work);
    }

    /// Refuses what comes from a lower epoch than the highest seen; forgets all locations when the
    /// epoch is a new one.
    fn judge_epoch(&self, master: &Master, epoch: Epoch) -> Result<(), ControlError> {
        let before = Epoch(self.epoch.fetch_max(epoch.0, Ordering::AcqRel));
        if epoch < before {
            return Err(ControlError::new(
                Code::StaleEpoch,
                format!(
                    "kvmaster at {} is of epoch {epoch}, and {before} was seen",
                    master.address
                ),
            ));
        }
        if epoch > before {
            Counting::one(&self.counting.epochs_seen);
            self.locations.purge_all();
            tracing::info!(%epoch, %before, master = master.address, "a new term of the master");
        }
        Ok(())
    }

    /// A stale epoch says that there is a newer one: hello says which.
    async fn learn_epoch(&self, master: &Master, deadline: Deadline) {
        let call = Call::by(deadline);
        if let Ok(hello) = Box::pin(self.attempt(master, HelloRequest::default(), call)).await {
            tracing::debug!(
                epoch = hello.epoch,
                "greeted the master again for a stale epoch"
            );
        } else {
            self.leave(self.current.load(Ordering::Relaxed));
        }
    }

    /// Turns to the master after `at`, unless another call did already.
    fn leave(&self, at: usize) {
        let _ = self.current.compare_exchange(
            at,
            at.wrapping_add(1),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }

    fn caller(&self, epoch: Option<Epoch>) -> Caller {
        let mut caller = self.caller.read().clone();
        caller.epoch = epoch.unwrap_or_else(|| self.epoch()).0;
        caller
    }

    fn agree(
        &self,
        hello: &kvpool_proto::HelloReply,
        max_batch_keys: usize,
    ) -> Result<(), ControlError> {
        let cluster = ClusterId::from_slice(&hello.cluster_id).ok_or_else(|| {
            ControlError::new(
                Code::Malformed,
                format!("a cluster id of {} bytes", hello.cluster_id.len()),
            )
        })?;
        let known = u8::try_from(hello.checksum_algorithm)
            .ok()
            .and_then(ChecksumAlgorithm::from_wire);
        if known.is_none() {
            return Err(ControlError::new(
                Code::VersionMismatch,
                format!(
                    "checksum algorithm {} is not known here",
                    hello.checksum_algorithm
                ),
            ));
        }
        self.caller.write().cluster_id = hello.cluster_id.clone();
        let theirs = usize::try_from(hello.max_batch_keys).unwrap_or(usize::MAX);
        *self.agreed.write() = Agreed {
            cluster: Some(cluster),
            limits: Limits {
                max_block: Length(hello.max_block_bytes),
                max_batch_keys: theirs.clamp(1, max_batch_keys),
                lease_ttl: Duration::from_millis(hello.lease_ttl_ms),
            },
        };
        Ok(())
    }
}

impl Master {
    fn new(address: &str, spin: Duration, background: &Handle) -> Result<Self, ConnectError> {
        let bad = |reason: String| ConnectError::BadAddress {
            address: address.to_owned(),
            reason,
        };
        let Some(authority) = address.strip_prefix("http://") else {
            return Err(bad("it does not begin with http://".to_owned()));
        };
        let endpoint = Endpoint::from_shared(address.to_owned())
            .map_err(|error| bad(error.to_string()))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .initial_stream_window_size(Some(4 << 20))
            .initial_connection_window_size(Some(16 << 20));
        // The connection's tasks run where this is.
        let _there = background.enter();
        Ok(Self {
            address: address.to_owned(),
            framed: Framed::new(authority.trim_end_matches('/').to_owned(), spin),
            pool: PoolClient::new(endpoint.connect_lazy())
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        })
    }
}

/// Whether a failure says that another master should be asked.
const fn moves_on(code: Code) -> bool {
    matches!(
        code,
        Code::Unreachable
            | Code::NotLeader
            | Code::DeadlineExceeded
            | Code::Draining
            | Code::StaleEpoch
    )
}
