//! One session: from the registration to the end of the stream.

use super::message::{self, Malformed, Seen};
use super::names::Names;
use super::verifications::Verifications;
use super::{Context, Phase};
use crate::fence::TermError;
use crate::media::{Answers, Media};
use crate::pulls::PullSession;
use futures::future::BoxFuture;
use kvpool_auth::Credentials;
use kvpool_proto as proto;
use kvpool_tls::ClientTls;
use kvpool_tls::grpc::{GrpcAddressError, GrpcWay};
use kvpool_types::{ClusterId, Code, Epoch, Incarnation};
use proto::master_message::Body as FromMaster;
use proto::node_message::Body as ToMaster;
use proto::nodes_client::NodesClient;
use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, interval_at, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;

/// How long a connection to a master may take, once its addresses are known.
const CONNECT: Duration = Duration::from_secs(1);
/// How long a master may take to answer a registration, which it first makes durable.
const REGISTER: Duration = Duration::from_secs(5);
/// How long a master has to read a goodbye.
const GOODBYE: Duration = Duration::from_secs(1);
/// Messages on their way to the master. More means that it does not read.
const OUTBOX: usize = 256;
/// How many messages of tickets may be on their way: heartbeats and the rest find room beside them.
const REPORTS: usize = OUTBOX / 2;
/// How soon answers that found no room are tried again.
const REPORT_PAUSE: Duration = Duration::from_millis(1);
/// The silence of a master that ends the session, in intervals of heartbeats.
const SILENT_INTERVALS: u32 = 4;
/// The same where there is another master to go to.
const SILENT_INTERVALS_OF_SEVERAL: u32 = 3;
/// A master that says other things may answer heartbeats so many times later than one that says nothing.
const LATE_ANSWERS: u32 = 4;
/// How often tickets that wait for pins on boards are looked at.
const LOOK: Duration = Duration::from_millis(4);
/// A session is not ended for less silence than this.
const LEAST_SILENCE: Duration = Duration::from_secs(1);

/// Why there is no session any more.
pub(super) enum End {
    /// The node has left, or is to end.
    Left,
    /// The master knows this incarnation no more: come back as another.
    NewLife { keep_cluster: bool, why: String },
    /// All is well, but the master must be told anew.
    Again(&'static str),
    /// Anything else: try again.
    Failed(Failure),
}

/// Why a session failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("cannot resolve its name: {0}")]
    Name(Arc<io::Error>),
    #[error("cannot connect: {}", innermost(.0))]
    Connect(#[from] tonic::transport::Error),
    #[error("cannot call it: {}", innermost(.0))]
    Address(#[from] GrpcAddressError),
    #[error("the connection to the master broke: {}", .0.message())]
    Broken(#[from] tonic::Status),
    #[error("the master ended the stream")]
    Ended,
    #[error(
        "no answer to the registration within {}",
        humantime::format_duration(REGISTER)
    )]
    Unanswered,
    #[error("refused: {message} ({})", code.map_or_else(|raw| raw.to_string(), |code| code.to_string()))]
    Refused {
        /// Or the number of one that is not known here.
        code: Result<Code, u32>,
        message: String,
        /// Where the leader is, from one that is not.
        leader: String,
    },
    #[error(transparent)]
    Term(#[from] TermError),
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("the master answered {0} instead of a welcome")]
    Unexpected(&'static str),
    #[error("heartbeats have not been answered for {}", humantime::format_duration(*.0))]
    Silent(Duration),
    #[error("the master is in epoch {theirs}, the session began in {ours}")]
    TermOver { theirs: u64, ours: u64 },
    #[error("the master does not read: {OUTBOX} messages are queued")]
    Stuck,
}

impl Failure {
    /// Where the leader is when the master does not lead; empty when it does not know.
    pub(super) fn not_leader(&self) -> Option<&str> {
        match self {
            Self::Refused {
                code: Ok(Code::NotLeader),
                leader,
                ..
            } => Some(leader),
            _ => None,
        }
    }
}

/// What lies at the bottom of an error: tonic's own words for it only say that there is one.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

impl<E: Into<Failure>> From<E> for End {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// What the node says of itself when it registers.
pub(super) struct Introduction {
    pub(super) register: proto::Register,
    pub(super) incarnation: Incarnation,
    /// Whether all extents that are held could be named.
    pub(super) numbered: bool,
}

/// What a master answered with a welcome.
pub(super) struct Welcomed {
    introduction: Introduction,
    welcome: message::Welcome,
    outbox: mpsc::Sender<proto::NodeMessage>,
    inbox: Inbox,
    /// The number of the token that the master judged.
    token: u64,
}

/// The messages of a master, in order, until its stream ends.
pub(crate) type Inbox = Pin<Box<dyn Stream<Item = Result<proto::MasterMessage, Status>> + Send>>;
/// The node's messages to a master.
pub(crate) type Outgoing = ReceiverStream<proto::NodeMessage>;
/// Opens a session with a master over a network that is simulated.
pub(crate) type Connect =
    Arc<dyn Fn(&str, Outgoing) -> BoxFuture<'static, Result<Inbox, Status>> + Send + Sync>;

/// The way to a master.
enum Way<'c> {
    Grpc(NodesClient<Channel>),
    Simulated(&'c Connect),
}

async fn way_to<'c>(
    master: &str,
    tls: Option<&ClientTls>,
    connect: Option<&'c Connect>,
    names: &Names,
) -> Result<Way<'c>, Failure> {
    if let Some(connect) = connect {
        return Ok(Way::Simulated(connect));
    }
    let way = GrpcWay::to(master, tls)?;
    let way = way.with(|endpoint| endpoint.connect_timeout(CONNECT).tcp_nodelay(true));
    let found = names.resolve(&way.authority()).await;
    let client = NodesClient::new(way.connect_at(found.map_err(Failure::Name)?).await?);
    Ok(Way::Grpc(
        client.max_decoding_message_size(proto::MAX_MESSAGE_BYTES),
    ))
}

/// Connects to a master and registers there.
pub(super) async fn introduce(
    master: &str,
    credentials: &Credentials,
    tls: Option<&ClientTls>,
    connect: Option<&Connect>,
    names: &Names,
    introduction: Introduction,
) -> Result<Welcomed, End> {
    let way = way_to(master, tls, connect, names).await?;
    let (outbox, outgoing) = mpsc::channel(OUTBOX);
    // Cannot fail: the channel is empty and its other end is here.
    let _ = outbox.try_send(envelope(ToMaster::Register(introduction.register.clone())));
    let token = credentials.current();
    let answered = timeout(REGISTER, async {
        let mut request = tonic::Request::new(ReceiverStream::new(outgoing));
        if !credentials.is_none() {
            let value = AsciiMetadataValue::try_from(format!("Bearer {}", token.token.as_str()));
            let mut value = value.map_err(|_| {
                tonic::Status::unauthenticated("the node's token file holds no token")
            })?;
            value.set_sensitive(true);
            request.metadata_mut().insert("authorization", value);
        }
        let mut inbox = match way {
            Way::Grpc(mut client) => Box::pin(client.session(request).await?.into_inner()) as Inbox,
            Way::Simulated(connect) => connect(master, request.into_inner()).await?,
        };
        let first = inbox.next().await.transpose()?;
        Ok::<_, tonic::Status>((inbox, first.and_then(|message| message.body)))
    });
    let (inbox, first) = answered.await.map_err(|_| Failure::Unanswered)??;
    let welcome = match first {
        Some(FromMaster::Welcome(welcome)) => message::welcome(&welcome)?,
        Some(FromMaster::Refusal(refusal)) => return Err(refused(refusal)),
        Some(_) => return Err(Failure::Unexpected("something else").into()),
        None => return Err(Failure::Ended.into()),
    };
    Ok(Welcomed {
        introduction,
        welcome,
        outbox,
        inbox,
        token: token.number,
    })
}

/// A welcomed session.
pub(super) struct Session {
    outbox: mpsc::Sender<proto::NodeMessage>,
    inbox: Inbox,
    interval: Duration,
    epoch: u64,
    sequence: u64,
    /// What has been fenced and not yet been told.
    unreported: VecDeque<u64>,
    /// Extents were held that the registration could not name for want of segment numbers.
    untold: bool,
    cluster: ClusterId,
    incarnation: Incarnation,
    /// The number of the token that the master knows.
    token: u64,
    /// What the master was told in this session.
    phase: Phase,
}

impl Session {
    /// Enters the term of the master that gave the welcome.
    pub(super) fn enter(
        context: &mut Context,
        master: &str,
        welcomed: Welcomed,
    ) -> Result<Self, End> {
        let Welcomed {
            introduction,
            welcome,
            outbox,
            inbox,
            token,
        } = welcomed;
        let epoch = welcome.term.epoch;
        if epoch < context.seen.epoch {
            let seen = context.seen.epoch;
            return Err(TermError::Deposed {
                offered: epoch,
                seen,
            }
            .into());
        }
        if context.store.snapshot().wants_rights && welcome.term.ahead_ms.is_none() {
            tracing::warn!(
                master,
                "the master is of an earlier version and signs no locations: until it is upgraded, \
                 whoever has a token can read any block of this node over TCP"
            );
        }
        match context.store.enter(welcome.cluster, welcome.term) {
            Ok(()) => {}
            Err(error @ TermError::Renumbered) => {
                return Err(End::NewLife {
                    keep_cluster: true,
                    why: error.to_string(),
                });
            }
            Err(error) => return Err(error.into()),
        }
        context.seen = Seen {
            epoch,
            proof: welcome.proof,
        };
        context.store.metrics().sessions.inc();
        tracing::info!(
            master,
            cluster = %welcome.cluster,
            %epoch,
            incarnation = %introduction.incarnation,
            held = introduction.register.held.len(),
            "registered"
        );
        Ok(Self {
            outbox,
            inbox,
            interval: welcome.heartbeat_interval,
            epoch: epoch.0,
            sequence: 0,
            unreported: VecDeque::new(),
            untold: !introduction.numbered && !context.store.snapshot().held.is_empty(),
            cluster: welcome.cluster,
            incarnation: introduction.incarnation,
            token,
            phase: Phase::Serving,
        })
    }

    /// Keeps the session until it ends.
    pub(super) async fn run(mut self, context: &mut Context) -> End {
        if self.untold {
            return End::Again(
                "extents are still held from an earlier epoch and can be reported now",
            );
        }
        let failed = self.converse(context).await;
        failed.err().unwrap_or(End::Left)
    }

    async fn converse(&mut self, context: &mut Context) -> Result<(), End> {
        let mut verifications =
            Verifications::new(context.store.clone(), Arc::clone(&context.verifiers));
        let (answers, mut answered) = mpsc::unbounded_channel();
        if let Some(media) = &context.options.media {
            media.begin(self.cluster, answers.clone());
        }
        let mut beats = interval_at(Instant::now(), self.interval);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let intervals = if context.has_several {
            SILENT_INTERVALS_OF_SEVERAL
        } else {
            SILENT_INTERVALS
        };
        let patience = (self.interval * intervals).max(LEAST_SILENCE);
        let mut heard = Instant::now();
        let mut answered_at = heard;
        let mut phases = context.phases.clone();
        loop {
            let told = self.phase;
            let (silent_at, limit) = limit_of(heard, answered_at, patience);
            let has_room = self.outbox.capacity() > OUTBOX - REPORTS;
            // Heartbeats first: nothing that comes in, however much, makes one late.
            tokio::select! {
                biased;
                due = beats.tick() => {
                    context.store.metrics().heartbeat(due.elapsed());
                    self.heartbeat(context)?;
                }
                wanted = phases.wait_for(|wanted| *wanted > told) => {
                    // An error means that the node is gone without draining.
                    let Ok(wanted) = wanted.map(|wanted| *wanted) else { return Ok(()) };
                    self.phase = wanted;
                    if wanted == Phase::Leaving {
                        self.goodbye().await;
                        return Ok(());
                    }
                    let move_blocks = context.options.moves_blocks;
                    let out_of_service = wanted == Phase::Draining;
                    context.reports += 1;
                    let number = context.reports;
                    let media_leave = out_of_service && context.media_leave.load(Ordering::Acquire);
                    let draining = proto::Draining { move_blocks, out_of_service, number, media_leave };
                    self.send(ToMaster::Draining(draining))?;
                }
                _ = looks.tick(), if context.store.waits_for_boards() => {
                    context.store.look_again();
                }
                () = context.store.fenced() => {
                    let tickets = context.store.take_fenced();
                    context.store.metrics().fenced.inc_by(tickets.len() as u64);
                    self.unreported.extend(tickets);
                    self.report_fenced()?;
                }
                () = tokio::time::sleep(REPORT_PAUSE), if !self.unreported.is_empty() || !has_room => {
                    self.report_fenced()?;
                }
                Some(answer) = answered.recv(), if has_room => {
                    self.report_media(answer, &mut answered)?;
                }
                Some(verdict) = verifications.next(), if has_room => {
                    self.send(ToMaster::Verified(verdict))?;
                }
                message = self.inbox.next() => {
                    let message = message.transpose().map_err(Failure::Broken)?.ok_or(Failure::Ended)?;
                    if let Some(body) = message.body {
                        // Whatever a master says shows that it lives. Behind many fences its answers are late.
                        heard = Instant::now();
                        if matches!(body, FromMaster::HeartbeatAck(_)) {
                            answered_at = heard;
                        }
                        self.hear(context, body, &mut verifications, &answers)?;
                    }
                }
                // Last: what has come and was not read yet, for want of time, is no silence.
                () = sleep_until(silent_at) => return Err(Failure::Silent(limit).into()),
            }
        }
    }

    fn hear(
        &mut self,
        context: &Context,
        body: FromMaster,
        verifications: &mut Verifications,
        answers: &Answers,
    ) -> Result<(), End> {
        match body {
            FromMaster::HeartbeatAck(ack) if ack.epoch != self.epoch => {
                return Err(Failure::TermOver {
                    theirs: ack.epoch,
                    ours: self.epoch,
                }
                .into());
            }
            FromMaster::HeartbeatAck(ack) => {
                context.store.hear_clock(ack.clock_ms);
                if let Some(below) = message::grant(ack.loads_recorded_below) {
                    context.store.loads_recorded(below);
                }
            }
            FromMaster::Fence(fence) => {
                let items = fence.items.iter().map(message::fence_item);
                let items = items.collect::<Result<Vec<_>, _>>()?;
                context.store.fence(&items);
            }
            FromMaster::AttachMedium(order) => {
                let media = media(context)?;
                media.attach(self.cluster, order, answers.clone());
            }
            FromMaster::ResetMedium(order) => {
                let media = media(context)?;
                media.reset(self.cluster, &order.medium_id, answers.clone());
            }
            FromMaster::RefuseMedium(order) => media(context)?.refuse(order, answers),
            FromMaster::Transfers(orders) => {
                let media = media(context)?;
                media.transfer(self.incarnation, Epoch(self.epoch), orders, answers);
            }
            FromMaster::Pulls(orders) => {
                let session = PullSession {
                    cluster: self.cluster,
                    incarnation: self.incarnation,
                    epoch: Epoch(self.epoch),
                    answers: answers.clone(),
                };
                context.options.pulls.push(orders.pulls, &session);
            }
            FromMaster::Drain(order) => {
                context
                    .media_leave
                    .store(order.media_leave, Ordering::Release);
                context.phase.send_if_modified(|phase| {
                    let serves = *phase == Phase::Serving;
                    if serves {
                        *phase = Phase::Draining;
                    }
                    serves
                });
            }
            FromMaster::Undrain(order) => self.return_to_service(context, order.number)?,
            FromMaster::Demoted(answer) => self.hear_left(context, answer),
            FromMaster::Verify(verify) => verifications.push(&verify)?,
            FromMaster::Refusal(refusal) => return Err(refused(refusal)),
            FromMaster::Welcome(_) => return Err(Failure::Unexpected("a second welcome").into()),
        }
        Ok(())
    }

    /// Hears how many blocks stay behind. Only the answer to the stop of the node counts: an earlier answer may be of
    /// a drain that is cancelled, and the node has got blocks since.
    fn hear_left(&self, context: &Context, answer: proto::Demoted) {
        // A master of an earlier version does not say what it answers.
        let is_latest = answer.answers == 0 || answer.answers == context.reports;
        if is_latest && self.phase >= Phase::Stopping {
            *context.saved.lock() = Some(answer.left);
        }
    }

    /// Ends a drain that an operator began, and confirms it. A node that stops drains on.
    fn return_to_service(&mut self, context: &Context, number: u64) -> Result<(), End> {
        let has_changed = context.phase.send_if_modified(|phase| {
            let drains = *phase == Phase::Draining;
            if drains {
                *phase = Phase::Serving;
            }
            drains
        });
        if has_changed {
            tracing::info!("an operator takes the node back into service");
        }
        // The next order to drain is announced again.
        if self.phase == Phase::Draining {
            self.phase = Phase::Serving;
        }
        self.send(ToMaster::Undrained(proto::Undrained { number }))
    }

    /// Sends an answer about media, and with the end of a transfer all other ends that wait.
    fn report_media(
        &self,
        answer: ToMaster,
        answered: &mut mpsc::UnboundedReceiver<ToMaster>,
    ) -> Result<(), End> {
        let ToMaster::TransfersDone(mut done) = answer else {
            return self.send(answer);
        };
        while done.transfers.len() < proto::MAX_TICKETS {
            match answered.try_recv() {
                Ok(ToMaster::TransfersDone(more)) => done.transfers.extend(more.transfers),
                Ok(other) => {
                    self.send(ToMaster::TransfersDone(done))?;
                    return self.send(other);
                }
                Err(_) => break,
            }
        }
        self.send(ToMaster::TransfersDone(done))
    }

    fn heartbeat(&mut self, context: &Context) -> Result<(), End> {
        self.renew_token(&context.options.credentials)?;
        self.sequence += 1;
        let metrics = context.store.metrics();
        self.send(ToMaster::Heartbeat(proto::Heartbeat {
            sequence: self.sequence,
            held_bytes: context.store.census().held.0,
            connections: (context.options.connections)() as u64,
            read_bytes: metrics.read_bytes(),
            written_bytes: metrics.written_bytes(),
            problems: (context.options.problems)(),
        }))
    }

    /// Sends the token if its file was renewed: the master ends a session whose token has expired.
    fn renew_token(&mut self, credentials: &Credentials) -> Result<(), End> {
        if credentials.number() == self.token {
            return Ok(());
        }
        let current = credentials.current();
        self.token = current.number;
        let token = current.token.as_str().to_owned();
        self.send(ToMaster::RenewToken(proto::RenewToken { token }))
    }

    /// Tells the master what has been fenced, as much as there is room for. What is lost with a session
    /// here is asked for again by the master in the next.
    fn report_fenced(&mut self) -> Result<(), End> {
        while !self.unreported.is_empty() && self.outbox.capacity() > OUTBOX - REPORTS {
            let count = self.unreported.len().min(proto::MAX_TICKETS);
            let tickets = self.unreported.drain(..count).collect();
            self.send(ToMaster::Fenced(proto::Fenced { tickets }))?;
        }
        Ok(())
    }

    fn send(&self, body: ToMaster) -> Result<(), End> {
        match self.outbox.try_send(envelope(body)) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(Failure::Stuck.into()),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(Failure::Ended.into()),
        }
    }

    /// Says goodbye, and stays until the master has ended the stream, so that the word is not lost
    /// with the connection.
    async fn goodbye(&mut self) {
        if self.send(ToMaster::Goodbye(proto::Goodbye {})).is_err() {
            return;
        }
        let ended = async { while let Some(Ok(_)) = self.inbox.next().await {} };
        if timeout(GOODBYE, ended).await.is_err() {
            tracing::debug!("the master did not close the session after the goodbye");
        }
    }
}

/// When a session ends for want of answers, and the silence that this is.
fn limit_of(heard: Instant, answered: Instant, patience: Duration) -> (Instant, Duration) {
    let silence = (heard + patience, patience);
    let late = patience * LATE_ANSWERS;
    silence.min((answered + late, late))
}

fn envelope(body: ToMaster) -> proto::NodeMessage {
    proto::NodeMessage { body: Some(body) }
}

fn refused(refusal: proto::Refusal) -> End {
    let code = u16::try_from(refusal.code).ok().and_then(Code::from_wire);
    match code {
        Some(Code::IncarnationDropped | Code::WrongCluster) => End::NewLife {
            // A different cluster id means that the pool was made anew. This node's blocks belong to the
            // pool before it.
            keep_cluster: code == Some(Code::IncarnationDropped),
            why: refusal.message,
        },
        _ => End::Failed(Failure::Refused {
            code: code.ok_or(refusal.code),
            message: refusal.message,
            leader: refusal.leader,
        }),
    }
}

fn media(context: &Context) -> Result<&Media, End> {
    let media = context.options.media.as_deref();
    media.ok_or_else(|| Failure::Unexpected("an order for a medium that was not offered").into())
}

#[cfg(test)]
mod tests;
