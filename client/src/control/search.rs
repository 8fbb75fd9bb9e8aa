//! The search for the leader: rounds of questions to the masters, until one is found that leads.
//!
//! In a round, the client asks the next master when the previous answer was of no use or is late. A master
//! that an answer names as leader is asked at once: only its own answer counts, since others may be
//! behind. If the leader does not answer, the master that named it forwards the calls.

use super::known::{ANOTHER_POOL, Known};
use super::master::Master;
use super::masters::{Masters, Route};
use crate::clock::{Backoff, Deadline};
use crate::errors::{ControlError, is_about_the_token};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kvpool_proto::ClusterReply;
use kvpool_tls::grpc::PLAIN_REFUSED;
use kvpool_types::{Code, Epoch};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// How long a master may take to say who leads.
const ASK_TIMEOUT: Duration = Duration::from_millis(400);
/// After so long without an answer another master is asked too.
const STAGGER: Duration = Duration::from_millis(100);
/// About how long the first pause between two rounds is.
const FIRST_PAUSE: Duration = Duration::from_millis(40);

/// Asks until somebody leads, or nobody waits for it any more.
pub(super) async fn search(masters: &Arc<Masters>) {
    let mut backoff = Backoff::from(FIRST_PAUSE);
    let mut thorough = true;
    let mut words = Words::default();
    loop {
        masters.discover().await;
        if let Some(route) = Box::pin(round(masters, thorough, &mut words)).await {
            return masters.found(route);
        }
        if !masters.found_nobody(words.error()) {
            return;
        }
        // All have been asked once. From now on one that answers is enough for a round, and each
        // round begins with another: there may be many clients.
        thorough = false;
        tokio::time::sleep(backoff.next()).await;
    }
}

/// Whether `master` says of itself that it leads.
pub(super) async fn leads(masters: &Masters, master: &Arc<Master>) -> bool {
    let (_, answer) = ask(masters.known(), Arc::clone(master)).await;
    let word = Heard::default().word(masters, master, answer, &mut Words::default());
    matches!(word, Word::Leads)
}

type Answer = Result<ClusterReply, ControlError>;

async fn ask(known: &Known, master: Arc<Master>) -> (Arc<Master>, Answer) {
    let answer = master.ask(known.caller(None), Deadline::after(ASK_TIMEOUT));
    let answer = answer.await;
    (master, answer)
}

/// What one answer says.
enum Word {
    /// I lead.
    Leads,
    /// That one does, in this term.
    Names(Epoch, String),
    /// I cannot tell.
    Nobody,
    /// Nothing: there was no answer.
    Silence,
}

/// What has been heard in one round.
#[derive(Default)]
struct Heard {
    /// Who named whom.
    named: Vec<(Arc<Master>, Epoch, String)>,
    silent: Vec<String>,
    read_only: Option<(Epoch, Arc<Master>)>,
    /// One that refused the question: it is older than the question and may well lead, or it is no
    /// master, which a call then tells.
    refused: Vec<Arc<Master>>,
}

/// What each master said last, for people.
#[derive(Default)]
struct Words {
    of: BTreeMap<String, String>,
    /// What the last answer of each that answered was: how it refused the token, or `None` for any other.
    answered: BTreeMap<String, Option<Code>>,
    /// The master that last named a leader which only TLS keeps this client from calling.
    plain_leader: Option<String>,
}

impl Words {
    fn set(&mut self, master: &Master, words: impl Into<String>) {
        // What it said before does not count any more.
        self.plain_leader.take_if(|who| *who == master.address);
        self.of.insert(master.address.clone(), words.into());
    }

    /// Notes that a master answered, and how if it refused the token.
    fn note_answer(&mut self, master: &Master, token_refused: Option<Code>) {
        self.answered.insert(master.address.clone(), token_refused);
    }

    /// How the token was refused, if nobody answered anything else. Waiting does not help then. A master that
    /// does not refuse the token may lead soon.
    fn token_refused(&self) -> Option<Code> {
        let refusals = self.answered.values().copied();
        let refusals = refusals.collect::<Option<Vec<Code>>>()?;
        refusals.first().copied()
    }

    fn error(&self) -> ControlError {
        let code = if let Some(code) = self.token_refused() {
            code
        } else if self.plain_leader.is_some() {
            Code::InvalidArgument
        } else if !self.answered.is_empty() {
            Code::NotLeader
        } else {
            Code::Unreachable
        };
        if self.of.is_empty() {
            return ControlError::new(code, "no kvmaster is announced");
        }
        let words = self.of.iter();
        let words: Vec<String> = words.map(|(who, what)| format!("{who} {what}")).collect();
        let why = format!("no kvmaster leads: {}", words.join("; "));
        ControlError::new(code, why)
    }
}

async fn round(masters: &Masters, thorough: bool, words: &mut Words) -> Option<Route> {
    let mut queue: VecDeque<Arc<Master>> = masters.in_order(thorough).into();
    let mut asked: Vec<String> = Vec::new();
    let mut asks = FuturesUnordered::new();
    let mut heard = Heard::default();
    let mut next_at = Instant::now();
    loop {
        if asks.is_empty() || Instant::now() >= next_at {
            if let Some(master) = queue.pop_front() {
                if !asked.contains(&master.address) {
                    asked.push(master.address.clone());
                    asks.push(ask(masters.known(), master));
                    next_at = Instant::now() + STAGGER;
                }
                continue;
            }
            if asks.is_empty() {
                return heard.conclude(masters);
            }
        }
        let (master, answer) = tokio::select! {
            biased;
            Some(answered) = asks.next() => answered,
            () = sleep_until(next_at), if !queue.is_empty() => continue,
        };
        match heard.word(masters, &master, answer, words) {
            Word::Leads => return Some(Route::to(master, None)),
            Word::Names(epoch, address) => {
                let leader = masters.at(&address);
                if let Some(leader) = leader.filter(|_| !asked.contains(&address)) {
                    queue.push_front(leader);
                    next_at = Instant::now();
                }
                heard.named.push((master, epoch, address));
            }
            Word::Silence => next_at = Instant::now(),
            Word::Nobody if thorough => next_at = Instant::now(),
            Word::Nobody => return heard.conclude(masters),
        }
        if let Some(route) = heard.passed_on(masters) {
            return Some(route);
        }
    }
}

impl Heard {
    /// Reads an answer. Another master's word on who leads is worth something only if it knows of no
    /// older term than the client does.
    fn word(
        &mut self,
        masters: &Masters,
        master: &Arc<Master>,
        answer: Answer,
        words: &mut Words,
    ) -> Word {
        let address = &master.address;
        let reply = match answer {
            Ok(reply) => reply,
            Err(error) if matches!(error.code, Code::Unreachable | Code::DeadlineExceeded) => {
                words.set(master, "does not answer");
                self.silent.push(address.clone());
                return Word::Silence;
            }
            Err(error) => {
                let refused = Some(error.code).filter(|code| is_about_the_token(*code));
                words.note_answer(master, refused);
                words.set(
                    master,
                    format!("answered {}: {}", error.code, error.message),
                );
                // The first is how gRPC says that there is no such call, the other one how an HTTP port
                // says that it serves no pool.
                if matches!(error.code, Code::VersionMismatch | Code::InvalidArgument) {
                    self.refused.push(Arc::clone(master));
                }
                return Word::Nobody;
            }
        };
        words.note_answer(master, None);
        if masters.known().is_of_another(&reply.cluster_id) {
            words.set(master, ANOTHER_POOL);
            return Word::Nobody;
        }
        let epoch = Epoch(reply.epoch);
        if let Err(highest) = masters.known().hear(epoch, address) {
            let said = format!("knows of epoch {epoch} only, and {highest} was seen");
            words.set(master, said);
            return Word::Nobody;
        }
        let members = reply.members.iter().map(|member| member.address.as_str());
        let members: Vec<&str> = members.filter(|address| !address.is_empty()).collect();
        masters.learn(address, &members);
        if reply.role == "leader" {
            return Word::Leads;
        }
        let reason = Some(&reply.reason).filter(|reason| !reason.is_empty());
        let reason = reason.map_or_else(String::new, |reason| format!(" ({reason})"));
        if reply.role == "read-only" {
            let older = self.read_only.as_ref().map(|(epoch, _)| *epoch);
            if older.is_none_or(|older| older < epoch) {
                self.read_only = Some((epoch, Arc::clone(master)));
            }
        } else if !reply.leader.is_empty() && reply.leader != *address {
            let said = format!("is {}{reason} and names {}", reply.role, reply.leader);
            if masters.refuse(&reply.leader) {
                words.set(master, format!("{said}: {PLAIN_REFUSED}"));
                words.plain_leader = Some(master.address.clone());
                return Word::Nobody;
            }
            words.set(master, said);
            return Word::Names(epoch, reply.leader);
        }
        // A master that names itself but does not lead is in transition.
        words.set(master, format!("is {}{reason}", reply.role));
        Word::Nobody
    }

    /// The way over a standby to a leader that it names and that does not answer here.
    fn passed_on(&self, masters: &Masters) -> Option<Route> {
        let (standby, _, leader) = self
            .named
            .iter()
            .find(|(_, epoch, leader)| *epoch >= masters.epoch() && self.silent.contains(leader))?;
        Some(Route::to(Arc::clone(standby), Some(masters.at(leader)?)))
    }

    /// The route when no master is left to ask: a read-only leader, or a master whose answer was not
    /// understood. Such a master is older than the question and is called as a leader.
    fn conclude(&self, masters: &Masters) -> Option<Route> {
        let read_only = self.read_only.as_ref();
        if let Some((_, master)) = read_only.filter(|(epoch, _)| *epoch >= masters.epoch()) {
            return Some(Route::to_read_only(Arc::clone(master)));
        }
        let failed = masters.failed();
        let is_another = |master: &&Arc<Master>| Some(&master.address) != failed.as_ref();
        let refused = self.refused.iter().find(is_another);
        let refused = refused.or(self.refused.first())?;
        Some(Route::to(Arc::clone(refused), None))
    }
}
