//! Hundreds of seeded attacks. Whatever the relay does, decode has the right bytes or fails.

use super::frames::{Frame, Port, Way};
use super::scene::{Mode, Scene, Size, hasty};
use super::{Attack, RUNTIME, Wire};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The number of attacks at a time. Most of them wait for a deadline.
const WORKERS: usize = 40;
const PATIENCE: Duration = Duration::from_millis(1200);
/// How long a message waits for the next one, which is to overtake it.
const SWAP: Duration = Duration::from_millis(40);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Harm {
    /// One bit.
    Flip,
    /// One bit of the bytes of a write, with corrected checksums.
    Forge,
    Truncate,
    Duplicate,
    Replay,
    Swap,
}

/// The place of an attack in one direction.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// A byte of the stream.
    Byte(u64),
    /// A frame, and a byte of it.
    Frame(u64, u64),
}

#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    mode: Mode,
    size: Size,
    harm: Harm,
    way: Way,
    place: Place,
    bit: u8,
    /// The earlier message that is repeated, or whether both directions of a connection are cut.
    choice: u64,
}

impl Case {
    fn of(seed: u64, harm: Harm) -> Self {
        let mut chance = StdRng::seed_from_u64(seed);
        let size = match chance.random_range(0..4) {
            0 => Size::Large,
            _ => Size::Small,
        };
        let way = Way::ALL[chance.random_range(0..4)];
        let (bytes, frames) = span(size, way);
        let place = match chance.random_bool(0.5) {
            true => Place::Byte(chance.random_range(0..bytes)),
            false => Place::Frame(chance.random_range(0..frames), chance.random()),
        };
        Self {
            seed,
            mode: Mode::BOTH[chance.random_range(0..2)],
            size,
            harm,
            way,
            place,
            bit: chance.random_range(0..8),
            choice: chance.random(),
        }
    }
}

/// Approximately the bytes and frames that a request moves in one direction.
const fn span(size: Size, way: Way) -> (u64, u64) {
    match (way.port, way.is_answer, size) {
        (Port::Decode, false, Size::Small) => (55_000, 11),
        (Port::Decode, false, Size::Large) => (638_000, 11),
        (Port::Decode, true, _) => (480, 8),
        (Port::Prefill, false, _) => (1700, 8),
        (Port::Prefill, true, _) => (420, 7),
    }
}

/// A frame that waits for the next one of its connection.
type Held = (u64, Vec<u8>);

/// The attack of one case.
struct Chance {
    case: Case,
    bytes: u64,
    frames: u64,
    earlier: Vec<Vec<u8>>,
    held: Arc<Mutex<Option<Held>>>,
    is_done: Arc<AtomicBool>,
}

impl Chance {
    /// The byte of this frame that the case attacks.
    fn byte_of(&self, frame: &Frame) -> Option<usize> {
        let length = frame.bytes.len() as u64;
        let at = match self.case.place {
            Place::Byte(at) => at.checked_sub(self.bytes)?,
            Place::Frame(number, at) if number == self.frames => at % length,
            Place::Frame(..) => return None,
        };
        (at < length).then(|| usize::try_from(at).unwrap())
    }

    fn harm(&mut self, mut frame: Frame, at: usize, wire: &Wire) {
        match self.case.harm {
            Harm::Flip => {
                frame.bytes[at] ^= 1 << self.case.bit;
                wire.ahead(frame.bytes);
            }
            Harm::Forge => {
                let is_inside = frame.is_write() && at >= frame.payload_at();
                frame.bytes[at] ^= 1 << self.case.bit;
                if is_inside {
                    frame = frame.with_right_sums();
                }
                wire.ahead(frame.bytes);
            }
            Harm::Truncate => {
                frame.bytes.truncate(at);
                wire.ahead(frame.bytes);
                match self.case.choice % 2 {
                    0 => wire.cut(),
                    _ => wire.end(),
                }
            }
            Harm::Duplicate => {
                wire.ahead(frame.bytes.clone());
                wire.ahead(frame.bytes);
            }
            Harm::Replay => {
                let count = self.earlier.len() as u64;
                let which = self.case.choice.checked_rem(count).unwrap_or(0);
                let again = self.earlier.get(usize::try_from(which).unwrap());
                let again = again.unwrap_or(&frame.bytes).clone();
                wire.ahead(frame.bytes);
                wire.ahead(again);
            }
            Harm::Swap => {
                *self.held.lock() = Some((frame.connection, frame.bytes));
                let (held, wire) = (Arc::clone(&self.held), wire.clone());
                RUNTIME.spawn(async move {
                    tokio::time::sleep(SWAP).await;
                    if let Some((_, bytes)) = held.lock().take() {
                        wire.ahead(bytes);
                    }
                });
            }
        }
    }
}

impl Attack for Chance {
    fn frame(&mut self, frame: Frame, wire: &Wire) {
        if frame.way != self.case.way {
            return wire.ahead(frame.bytes);
        }
        let at = self.byte_of(&frame);
        self.bytes += frame.bytes.len() as u64;
        self.frames += 1;
        let is_first = at.is_some() && !self.is_done.load(Ordering::Relaxed);
        if let Some(at) = at.filter(|_| is_first) {
            self.is_done.store(true, Ordering::Relaxed);
            return self.harm(frame, at, wire);
        }
        if self.case.harm == Harm::Replay {
            self.earlier.push(frame.bytes.clone());
        }
        let mut held = self.held.lock();
        let is_next = |held: &mut Held| held.0 == frame.connection;
        let overtaken = held.take_if(is_next);
        wire.ahead(frame.bytes);
        if let Some((_, bytes)) = overtaken {
            wire.ahead(bytes);
        }
    }
}

/// How one case ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    /// The stream ended before the place of the attack, so nothing was attacked.
    NotReached,
    WrongBytes,
    Ends(String, String),
}

fn run(case: &Case) -> Verdict {
    let is_done = Arc::<AtomicBool>::default();
    let chance = Chance {
        case: case.clone(),
        bytes: 0,
        frames: 0,
        earlier: Vec::new(),
        held: Arc::default(),
        is_done: Arc::clone(&is_done),
    };
    let mut scene = Scene::start(case.size, &hasty(), chance).with_another_room();
    let pages = scene.pages();
    let request = scene.request((case.mode, case.seed), (0, &pages), PATIENCE);
    let (ends, is_right) = scene.ends(request);
    scene.close();
    let name = |outcome: Result<(), kvpool_types::Code>| match outcome {
        Ok(()) => "success".to_owned(),
        Err(code) => code.to_string(),
    };
    let (decode, prefill) = ends.outcomes();
    match (is_right, is_done.load(Ordering::Relaxed)) {
        (false, _) => Verdict::WrongBytes,
        (true, false) => Verdict::NotReached,
        (true, true) => Verdict::Ends(name(decode), name(prefill)),
    }
}

type Outcomes = BTreeMap<(Harm, Verdict), u32>;

fn run_all(cases: &[Case]) -> Outcomes {
    let (next, outcomes) = (AtomicU64::new(0), Mutex::<Outcomes>::default());
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(usize::try_from(index).unwrap()) else {
                        return;
                    };
                    let run = std::panic::AssertUnwindSafe(|| run(case));
                    let verdict = std::panic::catch_unwind(run);
                    let verdict = verdict.unwrap_or_else(|_| panic!("{case:?}"));
                    *outcomes.lock().entry((case.harm, verdict)).or_default() += 1;
                }
            });
        }
    });
    outcomes.into_inner()
}

#[test]
fn whatever_a_relay_does_decode_has_the_right_bytes_or_fails() {
    let counts = [
        (Harm::Flip, 400),
        (Harm::Forge, 80),
        (Harm::Truncate, 80),
        (Harm::Duplicate, 60),
        (Harm::Replay, 60),
        (Harm::Swap, 60),
    ];
    let of =
        |(harm, count): (Harm, u32)| (0..u64::from(count)).map(move |seed| Case::of(seed, harm));
    let cases: Vec<Case> = counts.into_iter().flat_map(of).collect();
    let outcomes = run_all(&cases);
    for ((harm, verdict), count) in &outcomes {
        println!("{count:4} {harm:?}: {verdict:?}");
    }
    for (harm, count) in counts {
        let of = |verdict| outcomes.get(&(harm, verdict)).copied().unwrap_or(0);
        assert_eq!(of(Verdict::WrongBytes), 0, "{harm:?}");
        let missed = of(Verdict::NotReached);
        assert!(missed * 2 < count, "{harm:?}: {missed} of {count} missed");
    }
}
