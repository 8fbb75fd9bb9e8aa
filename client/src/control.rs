//! Calls to kvmaster: the caller's identity, the highest epoch seen, and the retries.
//!
//! Every reply carries its master's epoch. A reply below the highest epoch seen comes from a deposed leader
//! and is refused. A higher epoch drops every cached location. A call that fails with a retryable code is
//! repeated until its deadline. If the called master is gone or does not lead, the call is repeated at the
//! leader ([`masters`]). [`Call::once`] and [`Call::unless_done`] mark the calls that must not be repeated.

mod agreed;
mod framed;
mod known;
mod master;
mod masters;
mod messages;
mod search;
mod status;
mod survey;

use crate::api::Limits;
use crate::cache::Locations;
use crate::clock::{Backoff, Deadline, millis};
use crate::counters::Counting;
use crate::errors::{ConnectError, ControlError};
use crate::latencies::Measured;
use crate::options::{Options, read_masters};
use agreed::Agreed;
use known::Known;
use kvpool_auth::Credentials;
use kvpool_proto::{Caller, CreateNamespaceRequest, HelloRequest};
use kvpool_tls::ClientTls;
use kvpool_types::{ClientId, ClusterId, Code, Epoch, HostId};
pub(crate) use master::Carry;
#[cfg(feature = "simulation")]
pub(crate) use master::NotCarried;
use master::{Sending, Unanswered};
use masters::{Masters, Route};
pub(crate) use messages::Message;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
pub(crate) use survey::{Said, survey};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tracing::Instrument;

/// The least time limit of one attempt of a call.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(500);
/// The longest time limit of an attempt that a standby forwards. It does not apply if the leader may take its
/// time.
const FORWARDED_ATTEMPT: Duration = Duration::from_secs(1);
/// How long connecting waits for a read-only leader to create the namespace.
const READ_ONLY_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a put of a block over the limit waits for the leader to state its present limit.
const LIMITS_TIMEOUT: Duration = Duration::from_secs(1);
/// A call moves to another master at once at most this many times in a row, then it pauses. Two masters may
/// name each other.
const MOVES: u32 = 3;

/// The state of one client that its calls to the masters share.
#[derive(Debug)]
pub(crate) struct Control {
    masters: Arc<Masters>,
    client: ClientId,
    host: HostId,
    known: Arc<Known>,
    agreed: Arc<Agreed>,
    /// The request that creates the namespace, until a master has accepted it. It must be accepted before the
    /// first put.
    untold: Mutex<Option<CreateNamespaceRequest>>,
    counting: Arc<Counting>,
    credentials: Credentials,
    /// The runtime of tasks for which no caller waits.
    background: Handle,
}

/// Why one attempt of a call failed.
struct Failed {
    error: ControlError,
    /// Whether the failure is a reason to look for another master.
    leave: bool,
    /// Whether the master may have carried out the call all the same.
    maybe_done: bool,
}

/// When a failed call is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repeat {
    Always,
    UnlessDone,
    Never,
}

/// The options of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// The time by which the call must have returned.
    pub(crate) deadline: Deadline,
    epoch: Option<Epoch>,
    repeat: Repeat,
    waits: bool,
    aside: bool,
    connection: usize,
}

impl Call {
    /// A call that may be repeated, and whose master answers at once.
    pub(crate) const fn by(deadline: Deadline) -> Self {
        Self {
            deadline,
            epoch: None,
            repeat: Repeat::Always,
            waits: false,
            aside: false,
            connection: 0,
        }
    }

    /// Makes the call under `epoch`, because it names something that only this term knows. The call is not
    /// repeated under another epoch.
    pub(crate) const fn under(mut self, epoch: Epoch) -> Self {
        self.epoch = Some(epoch);
        self
    }

    /// Makes the call only once, even if it fails.
    pub(crate) const fn once(mut self) -> Self {
        self.repeat = Repeat::Never;
        self
    }

    /// Does not repeat the call once the master may have carried out an attempt. So one attempt has all of
    /// the time.
    pub(crate) const fn unless_done(mut self) -> Self {
        self.repeat = Repeat::UnlessDone;
        self.waits = true;
        self
    }

    /// Lets the master take all of the time to answer.
    pub(crate) const fn waiting(mut self) -> Self {
        self.waits = true;
        self
    }

    /// Makes the call for a task for which no caller waits. Such a call uses gRPC. A framed connection may
    /// belong to a runtime that runs only during calls.
    pub(crate) const fn aside(mut self) -> Self {
        self.aside = true;
        self
    }

    /// Makes the call one of several concurrent calls, which spread over the connections to the master.
    /// `number` is the call's number among them.
    pub(crate) const fn over(mut self, number: usize) -> Self {
        self.connection = number;
        self
    }

    /// The deadline of one attempt. If another attempt could follow, it gets a part of the
    /// remaining time.
    fn attempt(&self) -> Deadline {
        if self.waits || self.repeat != Repeat::Always {
            self.deadline
        } else {
            self.deadline
                .at_most((self.deadline.left() / 2).max(SHORTEST_ATTEMPT))
        }
    }
}

impl Control {
    /// Greets the masters until one accepts the client, and creates the namespace.
    pub(crate) async fn connect(
        options: &Options,
        host: HostId,
        locations: Arc<Locations>,
        counting: Arc<Counting>,
        background: Handle,
        carrier: Option<Arc<dyn Carry>>,
    ) -> Result<Self, ConnectError> {
        let client = ClientId(kvpool_seams::random());
        let caller = Caller {
            cluster_id: bytes::Bytes::new(),
            epoch: 0,
            client_id: client.to_bytes().to_vec().into(),
            host_id: host.to_bytes().to_vec().into(),
            namespace: options.namespace.name.clone(),
            forward: false,
            trace: bytes::Bytes::new(),
            wait_ms: 0,
        };
        let known = Arc::new(Known::new(caller, locations, Arc::clone(&counting)));
        let credentials = options.credentials();
        let addresses = read_masters(&options.masters)?;
        let masters = Masters::new(
            &addresses,
            options.spin,
            credentials.clone(),
            ClientTls::open(&options.tls)
                .map_err(|error| ConnectError::Tls(error.to_string()))?
                .map(|tls| tls.among(&addresses)),
            Arc::clone(&known),
            background.clone(),
            carrier,
        )?;
        let agreed = Arc::new(Agreed::new(Arc::clone(&known), options.max_batch_keys));
        let control = Self {
            masters,
            client,
            host,
            known,
            agreed,
            untold: Mutex::new(None),
            counting,
            credentials,
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
        control.agreed.settle(&hello).map_err(refused)?;
        let create = CreateNamespaceRequest {
            caller: None,
            namespace: Some(kvpool_proto::Namespace {
                name: options.namespace.name.clone(),
                model: options.namespace.model.clone(),
                dtype: options.namespace.dtype.clone(),
                parallel_rank: options.namespace.parallel_rank.clone(),
                salt: options.namespace.salt.clone(),
            }),
            settings: Vec::new(),
        };
        control.tell(create, call).await.map_err(refused)?;
        Ok(control)
    }

    /// Creates the namespace. A read-only leader cannot do this, but is good enough for a client that only
    /// reads.
    async fn tell(&self, create: CreateNamespaceRequest, call: Call) -> Result<(), ControlError> {
        let soon = Call::by(call.deadline.at_most(READ_ONLY_TIMEOUT));
        let mut told = self.call(create.clone(), soon).await;
        let is_refused =
            |error: &ControlError| error.code == Code::NotLeader && self.masters.are_read_only();
        // The search may learn that the leader is read-only just after the first call has ended.
        if matches!(&told, Err(error) if error.is_retryable() && !is_refused(error)) {
            told = self.call(create.clone(), call).await;
        }
        let told = match told {
            Err(error) if is_refused(&error) => {
                tracing::warn!(%error, "namespace not announced yet, retrying before the first put");
                *self.untold.lock() = Some(create);
                return Ok(());
            }
            // An operator has no namespace, and a reader may come before the first writer. If the caller
            // lacks a right, the call that needs the right fails.
            Err(error) if error.code == Code::Forbidden => {
                tracing::debug!(%error, "namespace not announced");
                return Ok(());
            }
            told => told,
        };
        told.map(|_| ())
    }

    /// The settings for addresses that require TLS.
    pub(crate) fn tls(&self) -> Option<ClientTls> {
        self.masters.tls().cloned()
    }

    /// The id of this client.
    pub(crate) const fn client(&self) -> ClientId {
        self.client
    }

    /// The machine that the client runs on.
    pub(crate) const fn host(&self) -> HostId {
        self.host
    }

    /// The client's token, or where it comes from.
    pub(crate) const fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// The highest epoch seen.
    pub(crate) fn epoch(&self) -> Epoch {
        self.known.epoch()
    }

    /// The limits that the last hello stated.
    pub(crate) fn limits(&self) -> Limits {
        self.agreed.limits()
    }

    /// Asks for the limits with a new hello. If the leader does not answer soon, the limits stay.
    pub(crate) async fn limits_now(&self, deadline: Deadline) -> Limits {
        let call = Call::by(deadline.at_most(LIMITS_TIMEOUT));
        let greeted = self.call(HelloRequest::default(), call).await;
        if let Err(error) = greeted.and_then(|hello| self.agreed.settle(&hello)) {
            tracing::debug!(%error, "limits of the pool not asked for");
        }
        self.limits()
    }

    /// The pool's id; zero before the first hello.
    pub(crate) fn cluster(&self) -> ClusterId {
        self.agreed.cluster().unwrap_or_default()
    }

    /// Makes a call, and repeats it where this may help, until it is answered or its deadline passes.
    pub(crate) async fn call<M: Message>(
        &self,
        message: M,
        call: Call,
    ) -> Result<M::Reply, ControlError> {
        self.call_noting(message, call, &mut false).await
    }

    /// [`Control::call`], which also sets `unknown` if an attempt without an answer may have been carried
    /// out.
    pub(crate) async fn call_noting<M: Message>(
        &self,
        message: M,
        call: Call,
        unknown: &mut bool,
    ) -> Result<M::Reply, ControlError> {
        let mut backoff = Backoff::default();
        let mut last: Option<(Route, ControlError)> = None;
        let mut moves = 0;
        loop {
            let mut route = self.masters.route(call.deadline).await;
            if let (Ok(next), Some((before, error))) = (&route, &last) {
                moves += 1;
                if moves >= MOVES || next.is_like(before) {
                    moves = 0;
                    if !call.deadline.pause(backoff.next()).await {
                        return Err(error.clone());
                    }
                    route = self.masters.route(call.deadline).await;
                }
                Counting::one(&self.counting.control_retries);
            }
            let route = match (route, last) {
                (Ok(route), _) => route,
                (Err(nobody), None) => return Err(nobody),
                (Err(nobody), Some((_, error))) => {
                    let both = error.then(&nobody);
                    // A leader that must not be called from here is a better reason than a master that does
                    // not lead.
                    let code = match nobody.code {
                        Code::InvalidArgument => nobody.code,
                        _ => both.code,
                    };
                    return Err(ControlError { code, ..both });
                }
            };
            let Failed {
                error,
                leave,
                maybe_done,
            } = match self.traced_attempt(&route, message.clone(), call).await {
                Ok(reply) => {
                    // A hello carries the limits of its term, so no other hello is needed.
                    if !M::SETTLES {
                        self.agreed.renew(&route, &self.background);
                    }
                    return Ok(reply);
                }
                Err(failed) => failed,
            };
            if leave {
                self.masters.doubt(&route, error.code);
            }
            *unknown |= maybe_done;
            let ends = match call.repeat {
                Repeat::Always => false,
                Repeat::UnlessDone => maybe_done,
                Repeat::Never => true,
            };
            let fixed = call.epoch.is_some() && error.code == Code::StaleEpoch;
            if error.code == Code::StaleEpoch {
                self.learn_epoch(&route, call.deadline).await;
            }
            if ends || fixed || !error.is_retryable() {
                return Err(error);
            }
            last = Some((route, error));
        }
    }

    /// Returns once a master can be called and has accepted the namespace. At the deadline it returns the
    /// reason why there is none.
    pub(crate) async fn ready(&self, deadline: Deadline) -> Result<(), ControlError> {
        self.masters.route(deadline).await?;
        let untold = self.untold.lock().clone();
        if let Some(create) = untold {
            self.call(create, Call::by(deadline)).await?;
            *self.untold.lock() = None;
        }
        Ok(())
    }

    /// Starts a search for the leader, because a store node named a newer term than any master has.
    pub(crate) fn hear_of_newer_term(&self) {
        self.masters.look_about();
    }

    /// Makes an attempt in a span of its own, which is the parent of the master's span.
    fn traced_attempt<M: Message>(
        &self,
        route: &Route,
        message: M,
        call: Call,
    ) -> impl Future<Output = Result<M::Reply, Failed>> {
        let span = kvpool_trace::span!(
            "client call",
            otel.name = M::NAME,
            otel.kind = "client",
            master = %route.master.address,
            epoch = self.known.epoch().0,
        );
        let attempt = self.attempt(route, message, call).instrument(span);
        async {
            let began = Instant::now();
            let answered = attempt.await;
            let measured = Measured::Call(M::NAME);
            self.counting.latencies.observe(measured, began.elapsed());
            answered
        }
    }

    async fn attempt<M: Message>(
        &self,
        route: &Route,
        mut message: M,
        call: Call,
    ) -> Result<M::Reply, Failed> {
        let forwarded = route.leader.is_some();
        let deadline = if forwarded && !call.waits {
            call.attempt().at_most(FORWARDED_ATTEMPT)
        } else {
            call.attempt()
        };
        let mut caller = self.known.caller(call.epoch);
        caller.forward = forwarded;
        // 0 would mean that nothing is stated.
        caller.wait_ms = millis(deadline.left()).max(1);
        message.set_caller(caller);
        let sending = Sending {
            deadline,
            framed: (!forwarded && !call.aside).then_some(&*self.known),
            connection: call.connection,
        };
        let sent = route.master.send(message, sending);
        let answered = if forwarded {
            let outdated = self.masters.outdated(route);
            // This is rare, and larger than the state of all other calls.
            Box::pin(async {
                tokio::select! {
                    biased;
                    answered = sent => answered,
                    why = outdated => Err(ControlError::new(Code::Unreachable, why).into()),
                }
            })
            .await
        } else {
            sent.await
        };
        let reply = answered.map_err(|Unanswered { error, sent }| Failed {
            leave: moves_on(error.code),
            maybe_done: sent && may_have_been_done(error.code),
            error,
        })?;
        let epoch = Epoch(M::epoch_of(&reply));
        let address = &route.master.address;
        let heard = self.known.hear(epoch, address);
        heard.map(|()| reply).map_err(|highest| Failed {
            error: ControlError::new(
                Code::StaleEpoch,
                format!(
                    "the master at {address} is in epoch {epoch}; a later epoch {highest} is known"
                ),
            ),
            leave: true,
            // A leader of an earlier term carried it out, perhaps while that term was still the latest.
            maybe_done: true,
        })
    }

    /// Runs a task for which no caller waits. Its calls are made [`Call::aside`].
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.background.spawn(work);
    }

    /// Learns the newer epoch with a hello, after a master answered that an epoch is stale.
    async fn learn_epoch(&self, route: &Route, deadline: Deadline) {
        let call = Call::by(deadline);
        match Box::pin(self.attempt(route, HelloRequest::default(), call)).await {
            Ok(hello) => {
                tracing::debug!(
                    epoch = hello.epoch,
                    "epoch was stale, handshake with the master repeated"
                );
                if let Err(error) = self.agreed.settle(&hello) {
                    tracing::debug!(%error, "limits of the new term not learned");
                }
            }
            Err(failed) => self.masters.doubt(route, failed.error.code),
        }
    }
}

/// Whether a failure is a reason to look for another master. A stale epoch is not: that master
/// knows a newer term than the caller.
const fn moves_on(code: Code) -> bool {
    matches!(
        code,
        Code::Unreachable | Code::NotLeader | Code::DeadlineExceeded | Code::Draining
    )
}

/// Whether a call that failed with `code` may have been carried out.
const fn may_have_been_done(code: Code) -> bool {
    !matches!(
        code,
        Code::NotLeader
            | Code::StaleEpoch
            | Code::Draining
            | Code::GrantEnded
            | Code::TooManyHeld
            | Code::StoreFull
            | Code::Unauthenticated
            | Code::TokenExpired
            | Code::Forbidden
    )
}
