//! Cases of pools that ask for tokens, and of pools that encrypt. Each is the twin of a case of the open pool.

use super::{Bound, Case, Goal, Metric, Path, Pool, Way, What};
use crate::cases::Guard;

/// The smallest share of the open pool's rate that tokens leave.
const WITH_TOKENS: f64 = 0.98;

/// The longest call with tokens, in calls of the open pool.
const LONGEST_WITH_TOKENS: f64 = 1.02;

/// The longest answer of a pool with TLS, in answers of the open pool.
const WITH_TLS: f64 = 1.15;

/// The smallest share of a bare TLS stream that puts and gets reach.
const OF_A_STREAM: f64 = 0.9;

/// The twins of `open`.
pub(super) fn cases(open: &[Case]) -> Vec<Case> {
    let twins = |guard| open.iter().filter_map(move |case| twin(case, guard));
    twins(Guard::Tokens).chain(twins(Guard::Tls)).collect()
}

fn twin(case: &Case, guard: Guard) -> Option<Case> {
    let place = case.place;
    let pool = match place.pool {
        Pool::Main => Pool::Guarded(guard),
        Pool::Keys => Pool::GuardedKeys(guard),
        _ => return None,
    };
    let moves = matches!(case.what, What::Put(..) | What::Get(..));
    let asks = matches!(case.what, What::Exist { .. } | What::MatchPrefix(_));
    let is_plain_tcp = place.way == Way::Tcp && place.path == Path::Loopback;
    if !(moves || asks) || case.metric == Metric::Cpu || place.way == Way::Rdma || is_plain_tcp {
        return None;
    }
    let (bound, goal) = match (guard, case.metric) {
        (Guard::Tokens, Metric::P50) => (own(case), Goal::RatioAtMost(LONGEST_WITH_TOKENS)),
        (Guard::Tokens, _) => (own(case), Goal::RatioAtLeast(WITH_TOKENS)),
        // Shared memory is not encrypted.
        (Guard::Tls, _) if moves && place.way == Way::Shm => return None,
        (Guard::Tls, Metric::Rate) if is_batch(case.what) => {
            (Bound::TlsStreamsAsUsed, Goal::RatioAtLeast(OF_A_STREAM))
        }
        (Guard::Tls, Metric::P50) if asks => (own(case), Goal::RatioAtMost(WITH_TLS)),
        (Guard::Tls, _) => (own(case), Goal::None("bytes are encrypted")),
    };
    let (name, group) = match guard {
        Guard::Tokens => ("tokens", "a pool that asks for tokens, beside an open pool"),
        Guard::Tls => ("tls", "a pool with TLS"),
    };
    Some(Case {
        id: format!("{name}/{}", case.id),
        group,
        place: super::Place { pool, ..place },
        bound,
        goal,
        ..case.clone()
    })
}

/// A single block spends much of its time in questions, which no stream has.
const fn is_batch(what: What) -> bool {
    matches!(what, What::Put(_, blocks) | What::Get(_, blocks) if blocks > 1)
}

fn own(case: &Case) -> Bound {
    Bound::Case(case.id.clone())
}
