//! The search for the leader: rounds of questions to the masters, until the leader is found.
//!
//! In a round, the client asks the next master when the previous answer was of no use or is late. If an
//! answer names a leader, that master is asked at once. Only its own answer counts, since other masters may
//! be behind. If the leader does not answer, the master that named it forwards the calls.

use super::known::{ANOTHER_POOL, Known};
use super::master::Master;
use super::masters::{Masters, Route};
use super::status;
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

/// The time limit of the answer to the question which master leads.
const ASK_TIMEOUT: Duration = Duration::from_millis(400);
/// After this time without an answer, another master is asked too.
const STAGGER: Duration = Duration::from_millis(100);
/// About how long the first pause between two rounds is.
const FIRST_PAUSE: Duration = Duration::from_millis(40);

/// Asks until the leader is found, or no call waits for it any more.
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
        // All masters have been asked once. From now on one answer is enough for a round, since there may be
        // many clients. Each round begins with another master.
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

/// The meaning of one answer.
enum Word {
    /// The answering master leads.
    Leads,
    /// This master leads, in this term.
    Names(Epoch, String),
    /// The answer names no leader.
    Nobody,
    /// There was no answer.
    Silence,
}

/// The answers of one round.
#[derive(Default)]
struct Heard {
    /// The answering masters, with the term and the address of the leader that each named.
    named: Vec<(Arc<Master>, Epoch, String)>,
    silent: Vec<String>,
    read_only: Option<(Epoch, Arc<Master>)>,
    /// Masters that refused the question. Such a master is older than the question and may lead. Or the
    /// address serves no master, and a call will fail there.
    refused: Vec<Arc<Master>>,
}

/// The last answer of each master, as text for an error message.
#[derive(Default)]
struct Words {
    of: BTreeMap<String, String>,
    /// How each master that answered last refused the token; `None` if it did not.
    answered: BTreeMap<String, Option<Code>>,
    /// The master that last named a leader which this client must not call without TLS.
    plain_leader: Option<String>,
}

impl Words {
    fn set(&mut self, master: &Master, words: impl Into<String>) {
        // This replaces the master's earlier answer.
        self.plain_leader.take_if(|who| *who == master.address);
        self.of.insert(master.address.clone(), words.into());
    }

    /// Records that a master answered; `token_refused` is the code if it refused the token.
    fn note_answer(&mut self, master: &Master, token_refused: Option<Code>) {
        self.answered.insert(master.address.clone(), token_refused);
    }

    /// The code with which the token was refused, if every answer was such a refusal. Waiting does not help
    /// then. A master that does not refuse the token may lead soon.
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
    /// Interprets an answer. It counts only if its epoch is not below the highest epoch seen.
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
                let said = match status::refused(address) {
                    Some(why) => format!("refused the connection: {why}"),
                    None => "does not answer".to_owned(),
                };
                words.set(master, said);
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
                // gRPC reports a missing method with the first code. An HTTP port that serves no pool reports
                // the second code.
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

    /// A route over a standby to the leader that it names, if this leader does not answer this client.
    fn passed_on(&self, masters: &Masters) -> Option<Route> {
        let (standby, _, leader) = self
            .named
            .iter()
            .find(|(_, epoch, leader)| *epoch >= masters.epoch() && self.silent.contains(leader))?;
        Some(Route::to(Arc::clone(standby), Some(masters.at(leader)?)))
    }

    /// The route when all masters were asked without success. It leads to a read-only leader, or to a master
    /// that did not understand the question. Such a master is older than the question and is called as a
    /// leader.
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
