//! The search for the leader: rounds of questions to the masters, until one is found that leads.
//!
//! In a round the next master is asked when the one before it has answered something of no use, or
//! has not answered for a while. Whom an answer names as the leader is asked at once: only its own
//! word counts, since the others may be behind. When it does not answer, the one that named it is to
//! pass calls on.

use super::known::Known;
use super::master::Master;
use super::masters::{Masters, Route};
use crate::clock::{Backoff, Deadline};
use crate::errors::ControlError;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kvpool_proto::ClusterReply;
use kvpool_types::{Code, Epoch};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// How long a master may take to say who leads.
const PATIENCE: Duration = Duration::from_millis(400);
/// After so long without an answer another master is asked too.
const STAGGER: Duration = Duration::from_millis(100);
/// About how long the first pause between two rounds is.
const FIRST_PAUSE: Duration = Duration::from_millis(40);

/// Asks until somebody leads, or nobody waits for it any more.
pub(super) async fn search(masters: &Masters) {
    let mut backoff = Backoff::from(FIRST_PAUSE);
    let mut thorough = true;
    loop {
        match Box::pin(round(masters, thorough)).await {
            Ok(route) => return masters.found(route),
            Err(why) => {
                if !masters.found_nobody(why) {
                    return;
                }
            }
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
    let mut heard = Heard::default();
    let word = heard.word(masters, master, answer);
    matches!(word, Word::Leads)
}

type Answer = Result<ClusterReply, ControlError>;

async fn ask(known: &Known, master: Arc<Master>) -> (Arc<Master>, Answer) {
    let answer = master.ask(known.caller(None), Deadline::after(PATIENCE));
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
    /// One that does not know the question, being older; it may well lead.
    older: Vec<Arc<Master>>,
    /// For people.
    words: Vec<String>,
    answered: bool,
}

async fn round(masters: &Masters, thorough: bool) -> Result<Route, ControlError> {
    let mut queue: VecDeque<Arc<Master>> = masters.in_order().into();
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
            Some(answered) = asks.next() => answered,
            () = sleep_until(next_at), if !queue.is_empty() => continue,
        };
        match heard.word(masters, &master, answer) {
            Word::Leads => return Ok(Route::to(master, None)),
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
            return Ok(route);
        }
    }
}

impl Heard {
    /// Reads an answer. Another master's word on who leads is worth something only if it knows of no
    /// older term than the client does.
    fn word(&mut self, masters: &Masters, master: &Arc<Master>, answer: Answer) -> Word {
        let address = &master.address;
        let reply = match answer {
            Ok(reply) => reply,
            Err(error) => {
                let silent = matches!(error.code, Code::Unreachable | Code::DeadlineExceeded);
                // That is how gRPC says that there is no such call.
                let is_older = error.code == Code::VersionMismatch;
                if silent {
                    self.words.push(error.message);
                    self.silent.push(address.clone());
                    return Word::Silence;
                }
                self.answered = true;
                if is_older {
                    self.older.push(Arc::clone(master));
                } else {
                    self.words.push(error.to_string());
                }
                return Word::Nobody;
            }
        };
        self.answered = true;
        if masters.known().is_of_another(&reply.cluster_id) {
            self.words.push(format!("{address} is of another pool"));
            return Word::Nobody;
        }
        let epoch = Epoch(reply.epoch);
        if let Err(highest) = masters.known().hear(epoch, address) {
            let words = format!("{address} knows epoch {epoch} only, and {highest} was seen");
            self.words.push(words);
            return Word::Nobody;
        }
        let members = reply.members.iter().map(|member| member.address.as_str());
        masters.learn(members.filter(|address| !address.is_empty()));
        match reply.role.as_str() {
            "leader" => return Word::Leads,
            "read-only" => {
                let older = self.read_only.as_ref().map(|(epoch, _)| *epoch);
                if older.is_none_or(|older| older < epoch) {
                    self.read_only = Some((epoch, Arc::clone(master)));
                }
            }
            // What names itself and does not lead is about to, or was until now.
            _ if !reply.leader.is_empty() && reply.leader != *address => {
                return Word::Names(epoch, reply.leader);
            }
            _ => {}
        }
        let reason = Some(reply.reason).filter(|reason| !reason.is_empty());
        let reason = reason.map_or_else(String::new, |reason| format!(" ({reason})"));
        self.words.push(format!("{address} is {}{reason}", reply.role));
        Word::Nobody
    }

    /// The way over a standby to a leader that it names and that does not answer here.
    fn passed_on(&self, masters: &Masters) -> Option<Route> {
        let (standby, _, leader) = self.named.iter().find(|(_, epoch, leader)| {
            *epoch >= masters.epoch() && self.silent.contains(leader)
        })?;
        Some(Route::to(Arc::clone(standby), Some(masters.at(leader)?)))
    }

    /// What is left when all have been asked.
    fn conclude(self, masters: &Masters) -> Result<Route, ControlError> {
        if let Some((epoch, master)) = self.read_only
            && epoch >= masters.epoch()
        {
            return Ok(Route::to_read_only(master));
        }
        let failed = masters.failed();
        let is_another = |master: &&Arc<Master>| Some(&master.address) != failed.as_ref();
        let older = self.older.iter().find(is_another);
        if let Some(older) = older.or(self.older.first()) {
            return Ok(Route::to(Arc::clone(older), None));
        }
        let named = self.named.iter();
        let named = named.map(|(by, _, leader)| format!("{} names {leader}", by.address));
        let words: Vec<String> = self.words.into_iter().chain(named).collect();
        let code = if self.answered {
            Code::NotLeader
        } else {
            Code::Unreachable
        };
        let why = format!("no kvmaster leads: {}", words.join("; "));
        Err(ControlError::new(code, why))
    }
}
