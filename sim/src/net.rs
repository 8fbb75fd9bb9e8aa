//! The network between the processes: it delays, reorders, repeats and loses messages, and is cut.

use crate::ambush::Ambushes;
use crate::answers::{self, Answers, Stop};
use crate::checks;
use crate::dice::{Dice, Stream};
use crate::life::Life;
use crate::media::{DiskRead, Media};
use crate::pins::Damage;
use crate::plan::{Noise, Plan, Process};
use crate::promises::Promises;
use crate::spans::Spans;
use crate::trace::Trace;
use crate::whole::Terms;
use bytes::Bytes;
use futures::future::BoxFuture;
use kvpool_client::simulation::Unanswered;
use kvpool_master::leadership::Seat;
use kvpool_master::pool::Pool;
use kvpool_master::service::{NodeInbox, NodesService, PoolService};
use kvpool_proto as proto;
use kvpool_store_node::simulation::{Inbox, Node, Outgoing};
use kvpool_types::{ClusterId, Code, Epoch, Extent, Grant, Incarnation, Key, ReadRight};
use parking_lot::Mutex;
use prost::Message;
use proto::node_message::Body;
use proto::pool_server::Pool as _;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code as GrpcCode, Request, Status};

/// How long a peer takes to find out that a connection is gone: keep-alive pings say so.
const LOST_CONNECTION: Duration = Duration::from_millis(1_500);
/// How long a reader takes at most to report wrong bytes, beside the time of its lease. A get takes three seconds, and
/// so does the call that reports.
const REPORTED: Duration = Duration::from_secs(10);
/// Used grants that an eavesdropper keeps.
const GRANTS: usize = 64;
/// Messages on their way in one session of a node.
const SESSION_QUEUE: usize = 256;

/// A kvmaster's ports.
pub(crate) struct MasterPort {
    pub(crate) life: Life,
    pub(crate) seat: Arc<Seat>,
    pub(crate) pool: PoolService,
    pub(crate) nodes: NodesService,
}

/// A store node's port.
#[derive(Clone)]
pub(crate) struct NodePort {
    pub(crate) life: Life,
    pub(crate) node: Arc<Node>,
}

/// A session of a node with a master.
#[derive(Debug)]
struct Session {
    /// Later sessions have greater numbers.
    number: u64,
    stop: Stop,
}

/// See the module's documentation.
pub(crate) struct Net {
    pub(crate) trace: Arc<Trace>,
    pub(crate) dice: Dice,
    noise: Mutex<Noise>,
    cuts: Spans<(Process, Process)>,
    stops: Spans<Process>,
    masters: Mutex<BTreeMap<usize, Arc<MasterPort>>>,
    nodes: Mutex<BTreeMap<usize, NodePort>>,
    /// The last registration of each node, as an eavesdropper sees it.
    registrations: Mutex<BTreeMap<usize, proto::Register>>,
    /// Grants that were used lately, at each node's life.
    grants: Mutex<VecDeque<(Incarnation, Grant)>>,
    /// Signed locations that were shown lately.
    locations: Mutex<VecDeque<Shown>>,
    /// Reads of signed locations in progress, each at a life of a node.
    pub(crate) reads: Mutex<Vec<(Life, Extent)>>,
    /// The pool's id, once a master has said it.
    pub(crate) cluster: Mutex<Option<ClusterId>>,
    pub(crate) messages: AtomicU64,
    /// How many sessions nodes have had.
    sessions: AtomicU64,
    /// Receives in progress at each life of a node: segment, range and grant.
    receives: Mutex<Vec<Receive>>,
    /// How long after a jump of a master's clock readers may find wrong bytes under a lease. Leases from before the
    /// jump may end early. `None`: always, because bytes become wrong on their way.
    wrong_after_jump: Option<Duration>,
    /// Whether nodes send no bytes without a location that the leader signed.
    has_signed_reads: bool,
    /// Where blocks became wrong on their way.
    pub(crate) damage: Damage,
    /// The reads of disks that masters ordered, and the disks that may return wrong bytes.
    pub(crate) media: Media,
    /// What masters promised to readers.
    pub(crate) promises: Promises,
    /// The terms of the answers that readers got.
    pub(crate) terms: Terms,
    /// The answers to nodes that stop.
    pub(crate) answers: Answers,
    pub(crate) violations: Mutex<Vec<String>>,
    pub(crate) ambushes: Arc<Ambushes>,
}

/// A signed location that a node took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown {
    pub(crate) node: Incarnation,
    pub(crate) epoch: Epoch,
    pub(crate) extent: Extent,
    pub(crate) right: ReadRight,
}

/// Bytes that a node lets in.
#[derive(Clone, Debug)]
pub(crate) struct Receive {
    pub(crate) life: Life,
    pub(crate) grant: Grant,
}

impl Receive {
    fn meets(&self, life: &Life, two: &Extent) -> bool {
        let one = self.grant.extent;
        self.life.is_same(life)
            && one.segment == two.segment
            && one.offset.0 < two.offset.0 + two.length.0
            && two.offset.0 < one.offset.0 + one.length.0
    }

    fn is(&self, other: &Self) -> bool {
        self.life.is_same(&other.life) && self.grant == other.grant
    }
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Net").finish_non_exhaustive()
    }
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Arrived,
    Lost,
}

/// The address of a master.
pub(crate) fn master_address(master: usize) -> String {
    format!("http://m{master}:7070")
}

/// The address of a node's data port.
pub(crate) fn node_address(node: usize) -> String {
    format!("n{node}:7072")
}

fn number_in(address: &str) -> Option<usize> {
    let digits = address.trim_start_matches("http://").get(1..)?;
    digits.split(':').next()?.parse().ok()
}

impl Net {
    pub(crate) fn new(plan: &Plan, trace: &Arc<Trace>) -> Arc<Self> {
        Arc::new(Self {
            trace: Arc::clone(trace),
            dice: Dice::new(plan.seed, Stream::Network),
            noise: Mutex::new(plan.noise),
            cuts: Spans::default(),
            stops: Spans::default(),
            masters: Mutex::default(),
            nodes: Mutex::default(),
            registrations: Mutex::default(),
            grants: Mutex::default(),
            cluster: Mutex::default(),
            messages: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
            receives: Mutex::default(),
            damage: Damage::default(),
            media: Media::default(),
            wrong_after_jump: (!plan.flips_bytes())
                .then(|| Duration::from_millis(plan.lease_ms) + REPORTED),
            has_signed_reads: plan.has_signed_reads,
            promises: Promises::default(),
            terms: Terms::default(),
            answers: Answers::default(),
            locations: Mutex::default(),
            reads: Mutex::default(),
            violations: Mutex::default(),
            ambushes: Arc::new(Ambushes::new(plan)),
        })
    }

    pub(crate) fn noise(&self) -> Noise {
        *self.noise.lock()
    }

    pub(crate) fn open_master(&self, master: usize, port: MasterPort) {
        self.masters.lock().insert(master, Arc::new(port));
    }

    pub(crate) fn open_node(&self, node: usize, port: NodePort) {
        self.nodes.lock().insert(node, port);
    }

    pub(crate) fn close(&self, process: Process) {
        match process {
            Process::Master(master) => drop(self.masters.lock().remove(&master)),
            Process::Node(node) => drop(self.nodes.lock().remove(&node)),
            Process::Client(_) => {}
        }
    }

    /// Forgets all processes: they hold the network, as the network holds them.
    pub(crate) fn end(&self) {
        self.masters.lock().clear();
        self.nodes.lock().clear();
    }

    pub(crate) fn masters(&self) -> Vec<(usize, Arc<Seat>)> {
        let masters = self.masters.lock();
        let seats = masters.iter();
        seats
            .map(|(number, port)| (*number, Arc::clone(&port.seat)))
            .collect()
    }

    /// A connection between masters, until it ends.
    pub(crate) async fn meet(&self, from: usize, address: &str) -> io::Result<()> {
        let from = Process::Master(from);
        let to = number_in(address).unwrap_or(usize::MAX);
        let is_cut = |to| self.is_cut(from, to) || self.is_cut(to, from);
        sleep(self.dice.micros(50, 1_500)).await;
        if is_cut(Process::Master(to)) {
            sleep(Duration::from_secs(1)).await;
            return Err(io::ErrorKind::TimedOut.into());
        }
        let port = self.masters.lock().get(&to).cloned();
        let Some(port) = port else {
            return Err(io::ErrorKind::ConnectionRefused.into());
        };
        port.life.over().await;
        // The end is not heard across a cut.
        while is_cut(Process::Master(to)) {
            sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    pub(crate) fn node(&self, node: usize) -> Option<NodePort> {
        self.nodes.lock().get(&node).cloned()
    }

    pub(crate) fn node_at(&self, address: &str) -> Option<(usize, NodePort)> {
        let number = number_in(address)?;
        Some((number, self.node(number)?))
    }

    /// What a node said at its last registration.
    pub(crate) fn registered(&self, node: usize) -> Option<proto::Register> {
        self.registrations.lock().get(&node).cloned()
    }

    /// Grants that were used at a node's life.
    pub(crate) fn grants_of(&self, node: Incarnation) -> Vec<Grant> {
        let grants = self.grants.lock();
        let of_node = grants.iter().filter(|(at, _)| *at == node);
        of_node.map(|(_, grant)| *grant).collect()
    }

    /// A stranger's session with a master.
    pub(crate) fn knock(
        &self,
        master: usize,
        messages: NodeInbox,
    ) -> Option<mpsc::UnboundedReceiver<Result<proto::MasterMessage, Status>>> {
        let port = self.masters.lock().get(&master).cloned()?;
        Some(port.nodes.session_over(messages))
    }

    pub(crate) fn cut(&self, from: Process, to: Process, wait: Duration) {
        self.cuts.begin((from, to), wait);
    }

    pub(crate) fn stop(&self, process: Process, wait: Duration) {
        self.stops.begin(process, wait);
    }

    /// Ends all faults.
    pub(crate) fn heal(&self) {
        *self.noise.lock() = Noise::default();
        self.cuts.clear();
        self.stops.clear();
    }

    pub(crate) fn is_cut(&self, from: Process, to: Process) -> bool {
        self.cuts.lasts(&(from, to))
    }

    /// Returns once a process that was stopped goes on.
    pub(crate) async fn running(&self, process: Process) {
        self.stops.ended(&process).await;
    }

    /// A node lets bytes in. Nobody may read there under a lease.
    pub(crate) fn admitted(&self, node: Incarnation, grant: &Grant) {
        let mut grants = self.grants.lock();
        grants.push_back((node, *grant));
        if grants.len() > GRANTS {
            grants.pop_front();
        }
        drop(grants);
        let extent = grant.extent;
        let range = extent.offset.0..extent.offset.0 + extent.length.0;
        let broken = self.promises.broken_by_write(node, extent.segment, &range);
        if let Some(broken) = broken {
            let broken = format!("{broken}, but grant {} writes there", grant.id);
            self.violations.lock().push(broken);
        }
    }

    /// A node takes a signed location.
    pub(crate) fn located(
        &self,
        node: Incarnation,
        epoch: Epoch,
        extent: Extent,
        right: ReadRight,
    ) {
        let mut locations = self.locations.lock();
        locations.push_back(Shown {
            node,
            epoch,
            extent,
            right,
        });
        if locations.len() > GRANTS {
            locations.pop_front();
        }
    }

    /// A node asks another one for a block. The leader signed the location for it, as for every reader.
    pub(crate) fn pulls(&self, from: Process, extent: &Extent, right: Option<&ReadRight>) {
        if self.has_signed_reads && matches!(from, Process::Node(_)) && right.is_none() {
            let wrong = format!("{from} pulls {extent}, and shows no signed location");
            self.violations.lock().push(wrong);
        }
    }

    /// Signed locations that were shown to a node's life.
    pub(crate) fn locations_of(&self, node: Incarnation) -> Vec<Shown> {
        let locations = self.locations.lock();
        let of_node = locations.iter().filter(|shown| shown.node == node);
        of_node.copied().collect()
    }

    /// Bytes begin to arrive at a node. No two receives touch one byte, whatever the fence says. No reader who showed
    /// a signed location gets such a byte.
    pub(crate) fn receive(&self, begun: &Receive) {
        let mut reads = self.reads.lock().clone().into_iter();
        if let Some((_, extent)) = reads.find(|(life, extent)| begun.meets(life, extent)) {
            self.violations.lock().push(format!(
                "grant {} writes to {} while a reader gets the bytes of {extent}",
                begun.grant.id, begun.grant.extent
            ));
        }
        let mut receives = self.receives.lock();
        let meets = |other: &&Receive| other.meets(&begun.life, &begun.grant.extent);
        if let Some(other) = receives.iter().find(meets) {
            let (one, two) = (other.grant, begun.grant);
            self.violations.lock().push(format!(
                "grants {} and {} write to {} and {} at once",
                one.id, two.id, one.extent, two.extent
            ));
        }
        receives.push(begun.clone());
    }

    /// The receive has ended.
    pub(crate) fn received(&self, ended: &Receive) {
        self.receives.lock().retain(|receive| !receive.is(ended));
    }

    fn delay(&self) -> Duration {
        if self.dice.chance(self.noise().slow) {
            self.dice.micros(20_000, 3_000_000)
        } else {
            self.dice.micros(50, 2_000)
        }
    }

    /// Whether a reader under a lease finds the committed bytes now.
    fn reads_are_right(&self) -> bool {
        let excused = self.wrong_after_jump;
        excused.is_some_and(|excused| !self.promises.has_jumped_within(excused))
    }

    /// The way of one message.
    pub(crate) async fn pass(&self, from: Process, to: Process) -> Fate {
        self.messages.fetch_add(1, Ordering::Relaxed);
        self.running(from).await;
        if self.is_cut(from, to) {
            return Fate::Lost;
        }
        sleep(self.delay()).await;
        self.running(to).await;
        if self.is_cut(from, to) || self.dice.chance(self.noise().lost) {
            return Fate::Lost;
        }
        Fate::Arrived
    }

    /// A client's call of a master.
    pub(crate) async fn call(
        self: Arc<Self>,
        from: Process,
        life: Life,
        address: String,
        method: &'static str,
        request: Bytes,
    ) -> Result<Bytes, Unanswered> {
        let broken = |what: &str| Unanswered::Failed(Status::new(GrpcCode::Unavailable, what));
        life.check().await;
        let asked = Instant::now();
        if method == "Release" {
            self.promises.released(from, &request);
        }
        if method == "ReportReplicas" && self.reads_are_right() && reports_wrong_bytes(&request) {
            let wrong = format!("{from} found other bytes than were committed, under a lease");
            self.violations.lock().push(wrong);
        }
        let Some(number) = number_in(&address) else {
            return Err(Unanswered::NoWay(format!("{address} is no master")));
        };
        let to = Process::Master(number);
        if self.pass(from, to).await == Fate::Lost {
            self.trace
                .note(from, format_args!("{method} to {to} is lost"));
            sleep(LOST_CONNECTION).await;
            life.check().await;
            return Err(broken("the connection broke"));
        }
        let Some(port) = self.masters.lock().get(&number).cloned() else {
            let _refused = self.pass(to, from).await;
            life.check().await;
            return Err(Unanswered::NoWay("connection refused".to_owned()));
        };
        if is_repeatable(method) && self.dice.chance(self.noise().twice) {
            self.trace
                .note(from, format_args!("{method} to {to} comes twice"));
            let (net, port, request) = (Arc::clone(&self), Arc::clone(&port), request.clone());
            tokio::spawn(async move {
                sleep(net.delay()).await;
                let life = port.life.clone();
                life.run(answer(&port, method, request)).await
            });
        }
        if let Process::Client(client) = from {
            sleep(self.ambushes.asks(client, method, &request)).await;
        }
        let asks = request.clone();
        // A master carries a call out also when its caller gives up, unless it hears of that in time.
        let hears = self.dice.chance(700);
        let (mut done, answered) = oneshot::channel();
        let (served, net) = (Arc::clone(&port), Arc::clone(&self));
        tokio::spawn(async move {
            let life = served.life.clone();
            let is_left = async {
                done.closed().await;
                sleep(net.delay()).await;
                if !hears {
                    std::future::pending::<()>().await;
                }
            };
            let answered = tokio::select! {
                biased;
                answered = life.run(answer(&served, method, request)) => answered,
                () = is_left => return,
            };
            let _caller_left = done.send(answered);
        });
        let Ok(Some(reply)) = answered.await else {
            life.check().await;
            return Err(broken("connection reset"));
        };
        if self.pass(to, from).await == Fate::Lost {
            self.trace
                .note(to, format_args!("the answer of {method} to {from} is lost"));
            sleep(LOST_CONNECTION).await;
            life.check().await;
            return Err(broken("the connection broke"));
        }
        life.check().await;
        if let Ok(reply) = &reply {
            self.terms.answered(from, method, reply);
            let promises = &self.promises;
            let wrong = match method {
                "Lookup" => promises.located(from, asked, &asks, reply),
                "Renew" => promises.renewed(from, asked, &asks, reply),
                "Exist" => promises.present(from, asked, &asks, reply),
                _ => None,
            };
            self.violations.lock().extend(wrong);
        }
        reply.map_err(Unanswered::Failed)
    }

    /// A node's session with a master.
    pub(crate) async fn session(
        self: Arc<Self>,
        node: usize,
        life: Life,
        address: String,
        outgoing: Outgoing,
    ) -> Result<Inbox, Status> {
        let broken = |what: &str| Status::new(GrpcCode::Unavailable, what.to_owned());
        let from = Process::Node(node);
        let Some(number) = number_in(&address) else {
            return Err(broken("no master"));
        };
        let to = Process::Master(number);
        if self.pass(from, to).await == Fate::Lost {
            sleep(Duration::from_secs(1)).await;
            return Err(broken("no connection"));
        }
        let Some(port) = self.masters.lock().get(&number).cloned() else {
            return Err(broken("connection refused"));
        };
        let (to_master, at_master) = mpsc::channel(SESSION_QUEUE);
        let (to_node, at_node) = mpsc::channel(SESSION_QUEUE);
        let answers = port
            .nodes
            .session_over(Box::pin(ReceiverStream::new(at_master)));
        let lives = [life, port.life.clone()];
        let session = Arc::new(Session {
            number: self.sessions.fetch_add(1, Ordering::Relaxed),
            stop: Stop::default(),
        });
        let up = Arc::clone(&self).pump(
            from,
            to,
            outgoing.into_inner(),
            to_master,
            lives.clone(),
            Arc::clone(&session),
        );
        tokio::spawn(up);
        tokio::spawn(self.pump_down(to, from, answers, to_node, lives, session));
        Ok(Box::pin(ReceiverStream::new(at_node)))
    }

    async fn pump(
        self: Arc<Self>,
        from: Process,
        to: Process,
        mut messages: mpsc::Receiver<proto::NodeMessage>,
        inbox: mpsc::Sender<Result<proto::NodeMessage, Status>>,
        [one, other]: [Life; 2],
        session: Arc<Session>,
    ) {
        let pump = async {
            while let Some(message) = messages.recv().await {
                if let (Process::Node(node), Some(Body::Register(seen))) = (from, &message.body) {
                    self.registrations.lock().insert(node, seen.clone());
                }
                if let Process::Master(master) = to
                    && let Some(read) = self.media.wrong_read(session.number, &message)
                    && let Some(wrong) = self.judge_read(master, read)
                {
                    self.violations.lock().push(wrong);
                }
                sleep(self.ambushes.hears(&message)).await;
                if !self.carry(from, to).await {
                    return;
                }
                session.stop.hears(&message);
                if inbox.send(Ok(message)).await.is_err() {
                    return;
                }
            }
        };
        let _dead = one.run(other.run(pump)).await;
    }

    /// What is wrong with a read of a disk, as the master of the session sees it.
    fn judge_read(&self, master: usize, read: DiskRead) -> Option<String> {
        read.judge(&*self.pool_of(master)?)
    }

    /// A block that has its only place in the memory of a node, as the node's leader sees it now.
    fn left_behind(&self, master: usize, node: usize, life: &Life) -> Option<Key> {
        let port = self.node(node).filter(|port| port.life.is_same(life))?;
        let pool = self.pool_of(master).filter(|pool| pool.leads())?;
        checks::only_on(&pool, port.node.incarnation())
    }

    /// The pool of a master that leads.
    fn pool_of(&self, master: usize) -> Option<Arc<Pool>> {
        let port = self.masters.lock().get(&master).cloned()?;
        port.seat.pool().ok()
    }

    async fn pump_down(
        self: Arc<Self>,
        from: Process,
        to: Process,
        mut messages: mpsc::UnboundedReceiver<Result<proto::MasterMessage, Status>>,
        inbox: mpsc::Sender<Result<proto::MasterMessage, Status>>,
        [node_life, master_life]: [Life; 2],
        session: Arc<Session>,
    ) {
        let pump = async {
            while let Some(message) = messages.recv().await {
                let answers_stop = message
                    .as_ref()
                    .is_ok_and(|message| session.stop.is_answered_by(message));
                let mut left = None;
                if let Ok(message) = &message {
                    let wrong = answers::names_no_report(message);
                    self.violations.lock().extend(wrong);
                    if let (Process::Master(master), Process::Node(node)) = (from, to) {
                        let pool = || self.pool_of(master);
                        self.media.orders(session.number, node, message, pool);
                        if answers_stop && answers::says_none(message) {
                            left = self.left_behind(master, node, &node_life);
                        }
                    }
                    sleep(self.ambushes.orders(message)).await;
                }
                if !self.carry(from, to).await {
                    return;
                }
                if answers_stop {
                    self.answers.reach(&node_life, left);
                }
                if inbox.send(message).await.is_err() {
                    return;
                }
            }
        };
        let _dead = node_life.run(master_life.run(pump)).await;
    }

    /// The way of one message of a stream, which comes in order or not at all; false when the connection breaks.
    async fn carry(&self, from: Process, to: Process) -> bool {
        loop {
            match self.pass(from, to).await {
                Fate::Arrived => return true,
                // The kernel sends it again for a while.
                Fate::Lost if self.dice.chance(900) => {
                    sleep(self.dice.micros(50_000, 400_000)).await;
                }
                Fate::Lost => {
                    self.trace
                        .note(from, format_args!("the session with {to} breaks"));
                    return false;
                }
            }
        }
    }
}

/// Whether a reader has found other bytes than the master says, and not only no node.
fn reports_wrong_bytes(request: &Bytes) -> bool {
    let wrong = u32::from(Code::ChecksumMismatch.to_wire());
    proto::ReportReplicasRequest::decode(request.clone())
        .is_ok_and(|request| request.reports.iter().any(|report| report.code == wrong))
}

/// Whether a client may make the call again by itself, so that it may come twice. A release is never repeated.
fn is_repeatable(method: &str) -> bool {
    matches!(
        method,
        "Reserve" | "Commit" | "Revoke" | "Lookup" | "Exist" | "MatchPrefix" | "Renew"
    )
}

/// What a master answers.
fn answer<'p>(
    port: &'p MasterPort,
    method: &'static str,
    request: Bytes,
) -> BoxFuture<'p, Result<Bytes, Status>> {
    macro_rules! calls {
        ($($name:literal $call:ident,)*) => {
            match method {
                $($name => Box::pin(async move {
                    let request = Message::decode(request)
                        .map_err(|error| Status::invalid_argument(error.to_string()))?;
                    let reply = port.pool.$call(Request::new(request)).await?;
                    Ok(reply.into_inner().encode_to_vec().into())
                }),)*
                _ => Box::pin(async { Err(Status::unimplemented("no such call")) }),
            }
        };
    }
    calls! {
        "Hello" hello,
        "CreateNamespace" create_namespace,
        "ChangeNamespace" change_namespace,
        "DeleteNamespace" delete_namespace,
        "Reserve" reserve,
        "Commit" commit,
        "Revoke" revoke,
        "Lookup" lookup,
        "Exist" exist,
        "MatchPrefix" match_prefix,
        "Renew" renew,
        "Release" release,
        "Remove" remove,
        "List" list,
        "Describe" describe,
        "ReportReplicas" report_replicas,
        "Stats" stats,
        "Cluster" cluster,
        "ChangeReplicas" change_replicas,
    }
}
