//! Calls to kvmaster: who calls, which term is known, and what is done when a call fails.
//!
//! Every reply carries its master's epoch. A reply below the highest epoch seen comes from a deposed
//! leader and is refused. A higher epoch drops every cached location. A call that fails with a
//! retryable code is repeated until its deadline. If this master is gone or does not lead, the leader gets
//! the repetition ([`masters`]). Calls that must not be repeated are marked ([`Call::once`],
//! [`Call::unless_done`]).

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

/// The least time that one attempt of a call gets.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(500);
/// The most that one attempt gets where a standby passes it on, unless the leader may take its time.
const FORWARDED_ATTEMPT: Duration = Duration::from_secs(1);
/// How long connecting waits for a read-only leader to take the namespace.
const READ_ONLY_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a put of a block over the limit waits for the leader to say the limit anew.
const LIMITS_TIMEOUT: Duration = Duration::from_secs(1);
/// So often in a row a call goes to another master at once; then it pauses: they may name each other.
const MOVES: u32 = 3;

/// One client's side of the conversation with the masters.
#[derive(Debug)]
pub(crate) struct Control {
    masters: Arc<Masters>,
    client: ClientId,
    host: HostId,
    known: Arc<Known>,
    agreed: Arc<Agreed>,
    /// The namespace, while no master has been told of it: it is before the first put.
    untold: Mutex<Option<CreateNamespaceRequest>>,
    counting: Arc<Counting>,
    credentials: Credentials,
    /// Where what nobody waits for runs.
    background: Handle,
}

/// Why one attempt of a call failed.
struct Failed {
    error: ControlError,
    /// Whether that says that another master should be looked for.
    leave: bool,
    /// Whether it may have been carried out all the same.
    maybe_done: bool,
}

/// When a call that failed is made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repeat {
    Always,
    UnlessDone,
    Never,
}

/// How one call is to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// When it must have returned.
    pub(crate) deadline: Deadline,
    epoch: Option<Epoch>,
    repeat: Repeat,
    waits: bool,
    aside: bool,
    connection: usize,
}

impl Call {
    /// A call that may be repeated and is answered at once.
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

    /// The call speaks of something that only `epoch` knows: it is made under that epoch, and is
    /// not repeated under another.
    pub(crate) const fn under(mut self, epoch: Epoch) -> Self {
        self.epoch = Some(epoch);
        self
    }

    /// The call is made once, whatever becomes of it.
    pub(crate) const fn once(mut self) -> Self {
        self.repeat = Repeat::Never;
        self
    }

    /// The call is not repeated once an attempt of it may have been carried out: one that is made has
    /// all of the time.
    pub(crate) const fn unless_done(mut self) -> Self {
        self.repeat = Repeat::UnlessDone;
        self.waits = true;
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

    /// The call is one of several side by side, which share the connections to the master: this is
    /// the call's number among them.
    pub(crate) const fn over(mut self, number: usize) -> Self {
        self.connection = number;
        self
    }

    /// How long one attempt may take: a part of what is left when another could follow it.
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
    /// Greets the masters until one lets the client in, and makes the namespace known.
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

    /// Makes the namespace known. A leader that is read-only now cannot take it, and is good enough for
    /// who wants to read.
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
            // An operator has no namespace, and a reader may come before the first writer. What the
            // caller may not do, the call in question refuses.
            Err(error) if error.code == Code::Forbidden => {
                tracing::debug!(%error, "namespace not announced");
                return Ok(());
            }
            told => told,
        };
        told.map(|_| ())
    }

    /// How addresses that ask for TLS are called.
    pub(crate) fn tls(&self) -> Option<ClientTls> {
        self.masters.tls().cloned()
    }

    /// Which life of which client this is.
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

    /// What the last hello settled.
    pub(crate) fn limits(&self) -> Limits {
        self.agreed.limits()
    }

    /// What a hello settles now. A leader that does not answer soon changes nothing.
    pub(crate) async fn limits_now(&self, deadline: Deadline) -> Limits {
        let call = Call::by(deadline.at_most(LIMITS_TIMEOUT));
        let greeted = self.call(HelloRequest::default(), call).await;
        if let Err(error) = greeted.and_then(|hello| self.agreed.settle(&hello)) {
            tracing::debug!(%error, "limits of the pool not asked for");
        }
        self.limits()
    }

    /// The pool that the client belongs to; zero before hello.
    pub(crate) fn cluster(&self) -> ClusterId {
        self.agreed.cluster().unwrap_or_default()
    }

    /// Makes a call, again where that may help, until it is answered or its deadline passes.
    pub(crate) async fn call<M: Message>(
        &self,
        message: M,
        call: Call,
    ) -> Result<M::Reply, ControlError> {
        self.call_noting(message, call, &mut false).await
    }

    /// The same, noting whether an attempt may have been carried out although it was not answered.
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
                    // That the leader must not be called from here says more than that another does not lead.
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
                    // A hello that tells of a new term brings the limits with it: another is not needed.
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

    /// Returns once there is a master that can be called, and that has been told of the namespace; at
    /// the deadline, why there is none.
    pub(crate) async fn ready(&self, deadline: Deadline) -> Result<(), ControlError> {
        self.masters.route(deadline).await?;
        let untold = self.untold.lock().clone();
        if let Some(create) = untold {
            self.call(create, Call::by(deadline)).await?;
            *self.untold.lock() = None;
        }
        Ok(())
    }

    /// A store node spoke of a newer term than any master has: who leads is asked anew.
    pub(crate) fn hear_of_newer_term(&self) {
        self.masters.look_about();
    }

    /// Makes an attempt in a span of its own, below which the master's span comes.
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
            // Rare, and large beside what all other calls need.
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
            // A leader of an earlier term did it, perhaps while that was still the latest.
            maybe_done: true,
        })
    }

    /// Runs what nobody waits for. Its calls are made [`Call::aside`].
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.background.spawn(work);
    }

    /// A stale epoch says that there is a newer one: hello says which.
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

/// Whether a failure says that another master should be looked for. One that knows a newer term than
/// the caller is no such failure.
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
