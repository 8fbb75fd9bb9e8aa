//! Attacks on one message that are refused with a certain code.

use super::frames::Frame;
use super::scene::{Mode, Scene, Size, each, modes_and_sizes, patient};
use super::{Attack, Wire};
use kvpool_types::{Code, Epoch};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

/// A byte of the first block of every write into a room.
const BYTE: usize = 1000;

type Codes = Arc<Mutex<Vec<Code>>>;

/// Waits until `count` codes are noted: an answer may be on its way when a request has ended.
fn wait_for(codes: &Codes, count: usize) {
    let until = Instant::now() + PATIENCE;
    while codes.lock().len() < count {
        assert!(Instant::now() < until, "{:?}", codes.lock());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Attacks the first letter of a kind. Notes the codes of its answers.
struct OnLetter<F> {
    name: &'static str,
    harm: F,
    request: Option<(u64, u64)>,
    codes: Codes,
    /// The number of answers that the sender gets. The relay drops further answers.
    answers: usize,
}

impl<F: FnMut(Frame, &Wire)> OnLetter<F> {
    fn new(name: &'static str, answers: usize, harm: F) -> (Self, Codes) {
        let codes = Codes::default();
        let attack = Self {
            name,
            harm,
            request: None,
            codes: Arc::clone(&codes),
            answers,
        };
        (attack, codes)
    }

    /// Whether the attack answers the sender itself, or has let the answer through.
    fn takes(&self, answer: &Frame) -> bool {
        let mut codes = self.codes.lock();
        codes.extend(answer.codes().into_iter().flatten());
        codes.len() > self.answers
    }
}

impl<F: FnMut(Frame, &Wire) + Send> Attack for OnLetter<F> {
    fn frame(&mut self, frame: Frame, wire: &Wire) {
        let is_of_letter = self.request == Some(frame.request());
        if frame.way.is_answer {
            if !is_of_letter || !self.takes(&frame) {
                wire.ahead(frame.bytes);
            }
        } else if self.request.is_none() && frame.message() == Some(self.name) {
            self.request = Some(frame.request());
            (self.harm)(frame, wire);
        } else {
            wire.ahead(frame.bytes);
        }
    }
}

const LETTERS: [&str; 6] = ["register", "offer", "accept", "chunk", "done", "complete"];

#[test]
fn a_letter_that_is_changed_on_its_way_is_refused_and_the_request_goes_on() {
    let of = |mode| LETTERS.map(|name| (mode, name));
    each(Mode::BOTH.into_iter().flat_map(of), |(mode, name)| {
        // One changed bit: the checksum detects it, and the letter is sent again.
        let (attack, codes) = OnLetter::new(name, 1, |mut frame: Frame, wire: &Wire| {
            frame.payload()[20] ^= 1;
            wire.ahead(frame.bytes);
        });
        let mut scene = Scene::start(Size::Small, &patient(), attack);
        scene.hand_off(mode, 1, PATIENCE).assert_success();
        scene.close();
        assert_eq!(*codes.lock(), [Code::ChecksumMismatch], "{name}");
        // The checksum is right, and the code is wrong.
        let (attack, codes) = OnLetter::new(name, 1, |frame: Frame, wire: &Wire| {
            wire.ahead(frame.with_changed_body().bytes);
        });
        // After a refused registration the next attempt waits for a second.
        let mut options = patient();
        options.limits.grace = Duration::from_secs(3);
        let mut scene = Scene::start(Size::Small, &options, attack);
        scene.hand_off(mode, 2, PATIENCE).assert_success();
        scene.close();
        assert_eq!(*codes.lock(), [Code::GrantRefused], "{name}");
    });
}

#[test]
fn a_letter_that_comes_twice_is_taken_once() {
    let of = |mode| LETTERS.map(|name| (mode, name));
    each(Mode::BOTH.into_iter().flat_map(of), |(mode, name)| {
        let (attack, codes) = OnLetter::new(name, 1, |frame: Frame, wire: &Wire| {
            wire.ahead(frame.bytes.clone());
            wire.ahead(frame.bytes);
        });
        let mut scene = Scene::start(Size::Small, &patient(), attack);
        scene.hand_off(mode, 1, PATIENCE).assert_success();
        wait_for(&codes, 2);
        scene.close();
        assert_eq!(*codes.lock(), [Code::Ok, Code::StaleEpoch], "{name}");
    });
}

/// The relay answers that a letter was taken, and keeps the letter until the next one has passed.
struct Overtakes {
    name: &'static str,
    held: Option<Frame>,
    request: Option<(u64, u64)>,
    codes: Codes,
}

impl Attack for Overtakes {
    fn frame(&mut self, frame: Frame, wire: &Wire) {
        if frame.way.is_answer {
            if self.request == Some(frame.request()) {
                self.codes.lock().extend(frame.codes().unwrap());
            } else {
                wire.ahead(frame.bytes);
            }
            return;
        }
        if self.request.is_none() && frame.message() == Some(self.name) {
            self.request = Some(frame.request());
            wire.back(frame.forged_answer());
            self.held = Some(frame);
            return;
        }
        let is_next =
            |held: &mut Frame| frame.message().is_some() && held.connection == frame.connection;
        let overtaken = self.held.take_if(is_next);
        wire.ahead(frame.bytes);
        if let Some(held) = overtaken {
            wire.ahead(held.bytes);
        }
    }
}

#[test]
fn a_letter_that_the_next_one_overtakes_is_refused_and_the_request_goes_on() {
    // No letter follows the last letter of an end.
    let of = |mode| ["offer", "accept", "chunk", "done"].map(|name| (mode, name));
    each(Mode::BOTH.into_iter().flat_map(of), |(mode, name)| {
        let codes = Codes::default();
        let attack = Overtakes {
            name,
            held: None,
            request: None,
            codes: Arc::clone(&codes),
        };
        let mut scene = Scene::start(Size::Small, &patient(), attack);
        scene.hand_off(mode, 1, PATIENCE).assert_success();
        scene.close();
        assert_eq!(*codes.lock(), [Code::StaleEpoch], "{name}");
    });
}

/// Forwards every frame except writes into rooms.
fn on_room_writes(
    mut harm: impl FnMut(Frame, &Wire) + Send + 'static,
) -> impl FnMut(Frame, &Wire) + Send {
    move |frame, wire| match frame.room() {
        Some(_) => harm(frame, wire),
        None => wire.ahead(frame.bytes),
    }
}

#[test]
fn changed_bytes_of_a_page_are_sent_again_when_the_checksum_tells() {
    each(modes_and_sizes(), |(mode, size)| {
        let codes = Codes::default();
        let (seen, mut is_done) = (Arc::clone(&codes), false);
        let attack = move |mut frame: Frame, wire: &Wire| {
            if frame.room().is_some() && !std::mem::replace(&mut is_done, true) {
                frame.payload()[BYTE] ^= 0x10;
            }
            seen.lock().extend(frame.codes().into_iter().flatten());
            wire.ahead(frame.bytes);
        };
        let mut scene = Scene::start(size, &patient(), attack);
        scene.hand_off(mode, 1, PATIENCE).assert_success();
        scene.close();
        let wrong = |code: &&Code| **code == Code::ChecksumMismatch;
        assert_eq!(codes.lock().iter().filter(wrong).count(), 1);
    });
}

#[test]
fn changed_bytes_with_right_checksums_fail_both_ends() {
    each(modes_and_sizes(), |(mode, size)| {
        let attack = on_room_writes(|mut frame, wire| {
            frame.payload()[BYTE] ^= 0x10;
            wire.ahead(frame.with_right_sums().bytes);
        });
        let mut scene = Scene::start(size, &patient(), attack).with_another_room();
        let ends = scene.hand_off(mode, 1, PATIENCE);
        ends.assert_failed_with(Code::ChecksumMismatch);
        scene.close();
    });
}

/// A signed write is repeated with other bytes, before the room is closed.
#[test]
fn a_write_that_is_replayed_with_other_bytes_fails_both_ends() {
    each(modes_and_sizes(), |(mode, size)| {
        let mut replayed = std::collections::HashMap::new();
        let attack = move |frame: Frame, wire: &Wire| {
            if frame.room().is_some() {
                let mut again = frame.clone();
                again.payload()[BYTE] ^= 0x10;
                wire.ahead(frame.bytes.clone());
                wire.ahead(again.with_right_sums().bytes);
                replayed.insert(frame.request(), 0);
                return;
            }
            // The sender gets its answer when both writes are in place.
            let answers = frame
                .way
                .is_answer
                .then(|| replayed.get_mut(&frame.request()));
            if let Some(answers) = answers.flatten() {
                *answers += 1;
                if *answers == 1 {
                    return;
                }
            }
            wire.ahead(frame.bytes);
        };
        let mut scene = Scene::start(size, &patient(), attack).with_another_room();
        let ends = scene.hand_off(mode, 1, PATIENCE);
        ends.assert_failed_with(Code::ChecksumMismatch);
        scene.close();
    });
}

#[test]
fn blocks_that_change_places_fail_both_ends() {
    each(modes_and_sizes(), |(mode, size)| {
        let attack = on_room_writes(|frame, wire| {
            // The slot of metadata is a write of one block.
            let blocks = frame.write().unwrap().grants.len();
            match blocks {
                1 => wire.ahead(frame.bytes),
                _ => wire.ahead(frame.with_permuted_blocks().bytes),
            }
        });
        let mut scene = Scene::start(size, &patient(), attack).with_another_room();
        let ends = scene.hand_off(mode, 1, PATIENCE);
        ends.assert_failed_with(Code::ChecksumMismatch);
        scene.close();
    });
}

/// The relay keeps all writes and answers that they are in place. It delivers them after the end of the room.
#[test]
fn writes_that_never_came_fail_both_ends_and_late_ones_change_nothing() {
    each(modes_and_sizes(), |(mode, size)| {
        let held = Arc::<Mutex<Vec<(Frame, Wire)>>>::default();
        let codes = Codes::default();
        let (keeps, seen) = (Arc::clone(&held), Arc::clone(&codes));
        let attack = move |frame: Frame, wire: &Wire| {
            let is_kept = |(kept, _): &(Frame, Wire)| kept.request() == frame.request();
            if frame.room().is_some() {
                wire.back(frame.forged_answer());
                keeps.lock().push((frame, wire.clone()));
            } else if frame.way.is_answer && keeps.lock().iter().any(is_kept) {
                seen.lock().extend(frame.codes().unwrap());
            } else {
                wire.ahead(frame.bytes);
            }
        };
        let mut scene = Scene::start(size, &patient(), attack).with_another_room();
        let ends = scene.hand_off(mode, 1, PATIENCE);
        ends.assert_failed_with(Code::ChecksumMismatch);
        let late = held.lock().clone();
        assert!(!late.is_empty());
        for (frame, wire) in &late {
            wire.ahead(frame.bytes.clone());
        }
        let wanted: usize = late
            .iter()
            .map(|(frame, _)| frame.write().unwrap().grants.len())
            .sum();
        wait_for(&codes, wanted);
        assert!(codes.lock().iter().all(|code| *code == Code::GrantEnded));
        scene.close();
    });
}

/// The pages of one request go to the places of another request.
#[test]
fn pages_that_go_to_another_room_fail_both_rooms() {
    each(Mode::BOTH, |mode| {
        let mut first: Option<(Epoch, Frame, Wire)> = None;
        let mut is_done = false;
        let attack = on_room_writes(move |mut frame, wire| {
            if is_done {
                return wire.ahead(frame.bytes);
            }
            let epoch = frame.room().unwrap();
            let length = frame.bytes.len();
            let fits = |(other, held, _): &mut (Epoch, Frame, Wire)| {
                *other != epoch && held.bytes.len() == length
            };
            match first.take_if(fits) {
                Some((_, mut other, other_wire)) => {
                    other.payload().swap_with_slice(frame.payload());
                    other_wire.ahead(other.bytes);
                    wire.ahead(frame.bytes);
                    is_done = true;
                }
                None if first.is_none() => first = Some((epoch, frame, wire.clone())),
                None => wire.ahead(frame.bytes),
            }
        });
        let mut scene = Scene::start(Size::Small, &patient(), attack).with_another_room();
        // The second request has other bytes: those of the fourth to the sixth page of a request.
        let one = scene.request((mode, 1), (0, &[1, 3, 5]), PATIENCE);
        let two = scene.request((mode, 2), (3, &[7, 9, 11]), PATIENCE);
        for request in [one, two] {
            let (ends, is_right) = scene.ends(request);
            assert!(is_right);
            ends.assert_failed_with(Code::ChecksumMismatch);
        }
        scene.close();
    });
}
