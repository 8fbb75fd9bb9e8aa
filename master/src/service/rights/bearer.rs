//! A caller with its token, and the decision about each of its requests.

use super::{DEFAULT_NAMESPACE, Guard, Operation, judge, unknown_caller};
use crate::service::passing::Called;
use crate::service::refused::Refused;
use kvpool_auth::{Identity, TokenError};
use kvpool_types::Token;
use parking_lot::{Mutex, RwLock};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tonic::metadata::MetadataMap;

/// The subject of an audit line if the caller's token is missing or refused.
const UNKNOWN: &str = "unknown";
/// The metadata entry that carries the token.
const AUTHORIZATION: &str = "authorization";

/// The most characters of a caller's own text in an audit line.
const LONGEST_NAMED: usize = 512;

/// Bounds on the audit lines about callers whose token is missing or refused: at once, and then for
/// each second.
const MOST_STRANGERS: u32 = 500;
const STRANGERS_A_SECOND: u32 = 20;

/// A caller. While tokens are off, callers have no identity and everything is allowed.
#[derive(Clone, Debug, Default)]
pub(in crate::service) struct Who(Option<Arc<Identity>>);

impl Who {
    /// Whether the caller may do `operation` in `namespace`.
    pub(in crate::service) fn may(
        &self,
        operation: Operation,
        namespace: &str,
    ) -> Result<(), Refused> {
        match &self.0 {
            None => Ok(()),
            Some(identity) => judge(identity, operation, namespace),
        }
    }

    /// Whether the caller sees the whole pool.
    pub(in crate::service) fn watches_pool(&self) -> bool {
        self.may(Operation::WatchPool, "").is_ok()
    }

    /// Whether the caller may see that `namespace` exists.
    pub(in crate::service) fn sees(&self, namespace: &str) -> bool {
        self.watches_pool() || self.may(Operation::UseNamespace, namespace).is_ok()
    }

    /// Writes the audit line of one call.
    pub(in crate::service) fn note(
        &self,
        operation: Operation,
        what: &str,
        outcome: Result<(), &Refused>,
    ) {
        let subject = self.0.as_ref().map_or("anonymous", |known| known.subject());
        note(subject, operation, what, outcome);
    }
}

/// Cuts text that the caller supplied after [`LONGEST_NAMED`] characters.
fn note(subject: &str, operation: Operation, what: &str, outcome: Result<(), &Refused>) {
    let outcome = outcome.map_or_else(|refused| refused.code.label(), |()| "ok");
    let unwritten = std::mem::take(&mut STRANGERS.lock().unwritten);
    if unwritten > 0 {
        tracing::info!(target: "audit", subject = UNKNOWN, calls = unwritten, "refused calls without a line");
    }
    let end = what.char_indices().nth(LONGEST_NAMED);
    let what = end.map_or(what, |(end, _)| what.get(..end).unwrap_or_default());
    tracing::info!(target: "audit", subject, operation = operation.label(), what, outcome, "call");
}

/// Writes the audit line of an unknown caller's call, unless this second had too many of them.
fn note_stranger(operation: Operation, what: &str, refused: &Refused) {
    let turn = STRANGERS.lock().turn(kvpool_seams::boot_time());
    if !turn {
        return;
    }
    note(UNKNOWN, operation, what, Err(refused));
}

/// The bound on audit lines about unknown callers. Otherwise any process that reaches the port
/// could fill the log's disk.
#[derive(Debug)]
struct Strangers {
    /// The number of lines that may still be written at once.
    room: u32,
    /// When `room` was last refilled, as time since boot.
    counted: Duration,
    /// The number of calls without an audit line that no later line has reported yet.
    unwritten: u64,
}

static STRANGERS: Mutex<Strangers> = Mutex::new(Strangers::new());

impl Strangers {
    const fn new() -> Self {
        Self {
            room: MOST_STRANGERS,
            counted: Duration::ZERO,
            unwritten: 0,
        }
    }

    /// Whether a call may write an audit line now.
    fn turn(&mut self, now: Duration) -> bool {
        let seconds = now.saturating_sub(self.counted).as_secs();
        self.counted += Duration::from_secs(seconds);
        let more = u32::try_from(seconds).unwrap_or(u32::MAX);
        let more = more.saturating_mul(STRANGERS_A_SECOND);
        self.room = self.room.saturating_add(more).min(MOST_STRANGERS);
        let has_turn = self.room > 0;
        match has_turn {
            true => self.room -= 1,
            false => self.unwritten += 1,
        }
        has_turn
    }
}

/// A request whose caller may make it.
#[derive(Debug)]
pub(in crate::service) struct Allowed<M> {
    request: M,
    who: Who,
}

impl<M> Allowed<M> {
    /// The request and its caller.
    pub(in crate::service) fn open(self) -> (M, Who) {
        (self.request, self.who)
    }

    /// The caller of the request.
    pub(in crate::service) const fn who(&self) -> &Who {
        &self.who
    }
}

impl<M> Deref for Allowed<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.request
    }
}

/// A caller with its token. A framed connection keeps one; over gRPC each call has its own.
///
/// The token is judged once, and again only after the keys or the policy changed. A later request
/// then costs only a comparison of names and a test of bits.
#[derive(Debug)]
pub(in crate::service) struct Bearer {
    guard: Guard,
    token: Token,
    judged: RwLock<Judged>,
}

#[derive(Debug)]
struct Judged {
    generation: u64,
    outcome: Result<Arc<Identity>, TokenError>,
}

impl Bearer {
    /// The holder of `token`.
    pub(in crate::service) fn new(guard: Guard, token: Token) -> Self {
        let judged = RwLock::new(Judged::new(&guard, &token));
        Self {
            guard,
            token,
            judged,
        }
    }

    /// The same caller with a new token.
    pub(in crate::service) fn renewed(&self, token: String) -> Self {
        Self::new(self.guard.clone(), Token::from(token))
    }

    /// Writes the audit line of a refused call. The caller may be unknown.
    pub(in crate::service) fn note_refused(
        &self,
        operation: Operation,
        what: &str,
        refused: &Refused,
    ) {
        match self.who() {
            Ok(who) => who.note(operation, what, Err(refused)),
            Err(_) => note_stranger(operation, what, refused),
        }
    }

    /// The caller's present identity. Keys, policy and time may have changed since the token was
    /// judged.
    pub(in crate::service) fn who(&self) -> Result<Who, Refused> {
        let Some(authority) = self.guard.authority() else {
            return Ok(Who(None));
        };
        let identity = {
            let judged = self.judged.read();
            let is_fresh = judged.generation == authority.generation();
            is_fresh.then(|| judged.outcome.clone())
        };
        let identity = match identity {
            Some(identity) => identity,
            None => {
                let fresh = Judged::new(&self.guard, &self.token);
                let outcome = fresh.outcome.clone();
                *self.judged.write() = fresh;
                outcome
            }
        };
        let identity = identity.map_err(|error| unknown_caller(&error))?;
        if identity.has_expired() {
            return Err(unknown_caller(&TokenError::Expired));
        }
        Ok(Who(Some(identity)))
    }

    /// Judges a request. No other code decides the rights of clients.
    pub(in crate::service) fn allow<M: Called>(&self, request: M) -> Result<Allowed<M>, Refused> {
        if self.guard.authority().is_none() {
            let who = Who(None);
            return Ok(Allowed { request, who });
        }
        let operation = request.operation();
        let who = self.who().inspect_err(|refused| {
            if operation.is_audited() {
                note_stranger(operation, &request.about(), refused);
            }
        })?;
        let namespace = match request.namespace() {
            "" => DEFAULT_NAMESPACE,
            named => named,
        };
        match who.may(operation, namespace) {
            Ok(()) => Ok(Allowed { request, who }),
            Err(refused) => {
                if operation.is_audited() {
                    who.note(operation, &request.about(), Err(&refused));
                }
                Err(refused)
            }
        }
    }
}

impl Judged {
    fn new(guard: &Guard, token: &Token) -> Self {
        let Some(authority) = guard.authority() else {
            return Self {
                generation: 0,
                outcome: Err(TokenError::Missing),
            };
        };
        // Read before the files are judged: if they change meanwhile, the next request judges
        // again.
        let generation = authority.generation();
        Self {
            generation,
            outcome: authority.judge(token.as_str()),
        }
    }
}

/// The caller of a gRPC call.
pub(in crate::service) fn bearer_of(guard: &Guard, metadata: &MetadataMap) -> Bearer {
    let value = metadata
        .get(AUTHORIZATION)
        .filter(|_| guard.authority().is_some());
    let token = value
        .and_then(|value| kvpool_auth::bearer(value.to_str().ok()?))
        .unwrap_or_default();
    Bearer::new(guard.clone(), Token::from(token.to_owned()))
}

/// The metadata that passes a caller's token on to the leader, which judges it again.
pub(in crate::service) fn pass_on(from: &MetadataMap, to: &mut MetadataMap) {
    if let Some(token) = from.get(AUTHORIZATION) {
        let mut token = token.clone();
        token.set_sensitive(true);
        to.insert(AUTHORIZATION, token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_leave_some_lines_a_second_and_the_others_are_counted() {
        let mut strangers = Strangers::new();
        let start = Duration::from_secs(90);
        let turns =
            |strangers: &mut Strangers, now| (0..1000).filter(|_| strangers.turn(now)).count();
        assert_eq!(turns(&mut strangers, start), 500);
        assert_eq!(turns(&mut strangers, start + Duration::from_millis(999)), 0);
        assert_eq!(strangers.unwritten, 1500);
        assert_eq!(turns(&mut strangers, start + Duration::from_secs(2)), 40);
        assert_eq!(
            turns(&mut strangers, start + Duration::from_secs(3600)),
            500
        );
    }
}
