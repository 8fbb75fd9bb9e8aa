//! Random histories of a correct register. Any violation that the checker finds in them is an error
//! of the checker.

use super::{At, Excuse, Found, Operation, Removed, What, Wrote};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

/// The random choices for one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draw {
    client: u8,
    key: u64,
    kind: u8,
    /// The pause before it, in milliseconds.
    pause: u16,
    /// Its duration, in milliseconds.
    takes: u16,
    /// The point of its effect between start and end, of 1000.
    effect: u16,
    /// The age of a read, as a share of the permitted age, of 1000.
    age: u16,
    /// The deviation from a plain operation.
    twist: u8,
}

/// The permitted deviations of a simulated history from a plain register.
#[derive(Clone, Copy, Debug)]
pub(super) struct World {
    pub(super) clients: u8,
    pub(super) stale: Duration,
    /// Whether some outcomes are lost.
    pub(super) forgets: bool,
    /// The time at which values are lost, as when a node dies.
    pub(super) loses: Option<At>,
    /// The time from which blocks are unreachable for half a second.
    pub(super) hides: Option<At>,
    /// Whether some writes are done twice.
    pub(super) repeats: bool,
    /// The time from which a deposed leader answers for half a second.
    pub(super) deposes: Option<At>,
}

pub(super) fn draws(clients: u8) -> impl Strategy<Value = Vec<Draw>> {
    let draw = (
        (0..clients, 0..2u64, any::<u8>(), 1..30u16),
        (1..60u16, 0..=1000u16, 0..=1000u16, any::<u8>()),
    )
        .prop_map(
            |((client, key, kind, pause), (takes, effect, age, twist))| Draw {
                client,
                key,
                kind,
                pause,
                takes,
                effect,
                age,
                twist,
            },
        );
    prop::collection::vec(draw, 1..120)
}

/// An operation whose outcome is not decided yet.
#[derive(Clone, Copy)]
struct Planned {
    draw: Draw,
    value: u64,
    start: At,
    end: At,
    /// The time of its effect; `None` without one.
    effect: Option<At>,
    is_known: bool,
    /// A remove that was done but reported as refused: its first answer was lost.
    is_refused: bool,
    /// A read that shows an earlier state, through a cached location.
    is_of_memory: bool,
    /// Whether it has already taken effect before.
    is_again: bool,
}

/// Runs a correct register through the random choices.
pub(super) fn history(draws: &[Draw], world: &World) -> Vec<Operation> {
    let mut planned = plan(draws, world);
    if world.repeats {
        repeat(&mut planned);
    }
    planned.sort_by_key(|planned| planned.effect);
    let mut kept: BTreeMap<u64, u64> = BTreeMap::new();
    let mut loss = world.loses;
    let mut done = Vec::new();
    for planned in planned {
        let Some(effect) = planned.effect else {
            done.push(never(&planned));
            continue;
        };
        if loss.is_some_and(|at| at <= effect) {
            loss = None;
            kept.clear();
        }
        let is_hidden = world.hides.is_some_and(|from| {
            effect >= from && effect <= from + TROUBLE && planned.draw.twist % 2 == 0
        });
        let what = apply(&planned, &mut kept, is_hidden);
        // Only a present value's location can be cached.
        if planned.is_again {
            continue;
        }
        if planned.is_of_memory && !matches!(what, What::Get(Found::Value(_))) {
            continue;
        }
        done.push(operation(&planned, what));
    }
    done
}

/// How long each trouble of a [`World`] lasts.
const TROUBLE: Duration = Duration::from_millis(500);

/// Makes some writes take effect a second time, between the first effect and the end, unnoticed by
/// their clients.
fn repeat(planned: &mut Vec<Planned>) {
    let again = planned.iter().filter_map(|first| {
        let effect = first.effect.filter(|effect| *effect < first.end)?;
        let draw = first.draw;
        (draw.kind < 90 && draw.twist % 3 == 0).then(|| Planned {
            effect: Some(effect + (first.end - effect) * draw.age.into() / 1000),
            is_again: true,
            ..*first
        })
    });
    let again: Vec<Planned> = again.collect();
    planned.extend(again);
}

/// The excuses that the checker needs for the world.
pub(super) fn excuses(world: &World) -> Vec<Excuse> {
    let lost = world.loses.map(|at| Excuse::Lost(at, at));
    let hidden = world.hides.map(|from| Excuse::Hidden(from, from + TROUBLE));
    let deposed = world
        .deposes
        .map(|from| Excuse::Deposed(from, from + TROUBLE));
    lost.into_iter().chain(hidden).chain(deposed).collect()
}

fn plan(draws: &[Draw], world: &World) -> Vec<Planned> {
    let mut clocks = vec![At::ZERO; usize::from(world.clients)];
    let plan = draws.iter().zip(0..).map(|(draw, value)| {
        let clock = &mut clocks[usize::from(draw.client)];
        let millis = |number: u16| Duration::from_millis(number.into());
        let start = *clock + millis(draw.pause);
        let took = millis(draw.takes);
        *clock = start + took;
        let is_read = draw.kind >= 120;
        let forgotten = world.forgets && !is_read && draw.twist >= 200;
        let by_deposed = world
            .deposes
            .is_some_and(|from| start <= from + TROUBLE && start + took >= from);
        let is_of_memory = is_read && remembers(draw) && !by_deposed;
        let effect = match (is_read, forgotten) {
            (true, _) if is_of_memory || by_deposed => {
                let oldest = start.saturating_sub(world.stale);
                Some(oldest + (start + took - oldest) * draw.age.into() / 1000)
            }
            (true, _) => Some(start + took * draw.effect.into() / 1000),
            (false, false) => Some(start + took * draw.effect.into() / 1000),
            // The effect may come long after the client gave up, or never.
            (false, true) => (draw.age > 300).then(|| start + took * draw.age.into() / 100),
        };
        Planned {
            draw: *draw,
            value,
            start,
            end: *clock,
            effect,
            is_known: !forgotten,
            is_of_memory,
            is_again: false,
            is_refused: world.forgets && draw.twist % 5 == 0,
        }
    });
    plan.collect()
}

fn never(planned: &Planned) -> Operation {
    let what = match planned.draw.kind {
        0..50 => What::Put(planned.value, not(planned)),
        50..90 => What::Upsert(planned.value, not(planned)),
        _ => What::Remove(Removed::Unknown),
    };
    operation(planned, what)
}

fn operation(planned: &Planned, what: What) -> Operation {
    Operation {
        key: planned.draw.key,
        start: planned.start,
        end: planned.end,
        remembers: remembers(&planned.draw),
        what,
    }
}

fn remembers(draw: &Draw) -> bool {
    draw.client % 2 == 1
}

/// The answer to a put without effect.
fn not(planned: &Planned) -> Wrote {
    match planned.draw.effect % 2 {
        0 => Wrote::Not,
        _ => Wrote::Unknown,
    }
}

fn apply(planned: &Planned, kept: &mut BTreeMap<u64, u64>, is_hidden: bool) -> What {
    let (key, value) = (planned.draw.key, planned.value);
    let there = kept.get(&key).copied();
    let seen = there.filter(|_| !is_hidden);
    let known = |outcome| match planned.is_known {
        true => outcome,
        false => Wrote::Unknown,
    };
    match planned.draw.kind {
        0..50 if seen.is_some() => What::Put(value, known(Wrote::Present)),
        0..50 => {
            kept.insert(key, value);
            What::Put(value, known(Wrote::Stored))
        }
        50..90 => {
            kept.insert(key, value);
            What::Upsert(value, known(Wrote::Stored))
        }
        90..120 => {
            if seen.is_some() {
                kept.remove(&key);
            }
            What::Remove(match planned.is_known {
                true if planned.is_refused => Removed::Refused,
                true if seen.is_none() => Removed::Missing,
                true => Removed::Done,
                false => Removed::Unknown,
            })
        }
        120..200 => What::Get(seen.map_or(Found::Nothing, Found::Value)),
        _ => What::Exist(seen.is_some()),
    }
}
