//! Bytes of earlier connections, and streams that end.

use super::frames::{Frame, Port, Way};
use super::scene::{Mode, Request, Scene, Size, each, modes_and_sizes, patient};
use super::{Attack, Wire, read_plain};
use crate::ranks::Rank;
use kvpool_handoff::room::PollState;
use kvpool_types::Code;
use kvpool_types::wire::data::{Failure, Meta};
use kvpool_types::wire::frame::{HEADER_BYTES, Op};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);

/// The requests of each connection.
type Recording = Arc<Mutex<BTreeMap<u64, Vec<Frame>>>>;

fn recorder() -> (impl Attack, Recording) {
    let recording = Recording::default();
    let kept = Arc::clone(&recording);
    let attack = move |frame: Frame, wire: &Wire| {
        if !frame.way.is_answer {
            let mut kept = kept.lock();
            kept.entry(frame.connection)
                .or_default()
                .push(frame.clone());
        }
        wire.ahead(frame.bytes);
    };
    (attack, recording)
}

/// The answers to the bytes of one connection: the codes for letters, and for writes into rooms.
#[derive(Debug, Default)]
struct Said {
    letters: Vec<Code>,
    writes: Vec<Code>,
    hellos: Vec<Code>,
}

/// Sends all bytes of a connection again, on a new connection.
fn replay(frames: &[Frame], to: &Rank, said: &mut Said) {
    let mut socket = TcpStream::connect(to.session.local_addr()).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    for frame in frames {
        // A session that refuses the hello ends the connection.
        if socket.write_all(&frame.bytes).is_err() {
            break;
        }
    }
    drop(socket.shutdown(Shutdown::Write));
    for request in frames {
        let Ok(bytes) = read_plain(&mut socket) else {
            break;
        };
        let answer = Frame {
            way: Way::new(request.way.port, true),
            connection: 0,
            bytes,
        };
        let codes = match answer.header().op {
            Op::Failure => vec![Failure::decode(&answer.bytes[HEADER_BYTES..]).unwrap().code],
            Op::HelloReply => vec![Code::Ok],
            _ => answer.codes().unwrap_or_default(),
        };
        match (request.header().op, request.message(), request.room()) {
            (Op::Hello, ..) => said.hellos.extend(codes),
            (_, Some(_), _) => said.letters.extend(codes),
            (_, _, Some(_)) => said.writes.extend(codes),
            _ => {}
        }
    }
}

fn replay_all(recording: &BTreeMap<u64, Vec<Frame>>, scene: &Scene) -> Said {
    let mut said = Said::default();
    for frames in recording.values() {
        let to = match frames[0].way.port {
            Port::Prefill => &scene.prefill,
            Port::Decode => &scene.decode,
        };
        replay(frames, to, &mut said);
    }
    said
}

fn all_are(codes: &[Code], wanted: Code) {
    assert!(!codes.is_empty());
    assert!(codes.iter().all(|code| *code == wanted), "{codes:?}");
}

/// The next request has the same pages. It waits while the old bytes are repeated.
#[test]
fn the_bytes_of_an_earlier_request_change_nothing_in_the_next() {
    each(modes_and_sizes(), |(mode, size)| {
        let (attack, recording) = recorder();
        let mut scene = Scene::start(size, &patient(), attack).with_another_room();
        scene.hand_off(mode, 1, PATIENCE).assert_success();
        let earlier = recording.lock().clone();
        let pages = scene.pages();
        let receiving = scene.ask((mode, 2), (0, &pages), PATIENCE);
        let before = scene.decode.image();
        let said = replay_all(&earlier, &scene);
        // A hello proves that its sender knew the secret. It opens no room.
        all_are(&said.hellos, Code::Ok);
        all_are(&said.letters, Code::StaleEpoch);
        all_are(&said.writes, Code::GrantEnded);
        assert!(scene.decode.image() == before, "a page was written");
        assert_ne!(receiving.state().poll, PollState::Failed);
        let sending = scene.compute((mode, 2), size.pages(), PATIENCE);
        let request = Request::new(receiving, sending, (0, &pages), PATIENCE);
        let (ends, is_right) = scene.ends(request);
        assert!(is_right);
        ends.assert_success();
        scene.close();
    });
}

#[test]
fn the_bytes_for_an_earlier_life_of_a_process_are_refused() {
    let (attack, recording) = recorder();
    let mut scene = Scene::start(Size::Large, &patient(), attack);
    scene.hand_off(Mode::Push, 1, PATIENCE).assert_success();
    scene.close();
    let mut anew = Scene::start(Size::Large, &patient(), recorder().0);
    let pages = anew.pages();
    let receiving = anew.ask((Mode::Push, 1), (0, &pages), PATIENCE);
    let said = replay_all(&recording.lock(), &anew);
    // The first hello of a link names no incarnation.
    let of_lanes = |code: &&Code| **code != Code::Ok;
    let refused: Vec<Code> = said.hellos.iter().filter(of_lanes).copied().collect();
    all_are(&refused, Code::WrongIncarnation);
    all_are(&said.letters, Code::WrongIncarnation);
    assert!(
        said.writes
            .iter()
            .all(|code| *code == Code::WrongIncarnation)
    );
    let sending = anew.compute((Mode::Push, 1), Size::Large.pages(), PATIENCE);
    let request = Request::new(receiving, sending, (0, &pages), PATIENCE);
    let (ends, is_right) = anew.ends(request);
    assert!(is_right);
    ends.assert_success();
    anew.close();
}

/// Cuts the connection of the first write into a room, within its bytes.
struct Cut {
    is_done: bool,
    /// Whether every later frame is dropped.
    is_final: bool,
}

impl Attack for Cut {
    fn frame(&mut self, mut frame: Frame, wire: &Wire) {
        let is_first = frame.room().is_some() && !self.is_done;
        if is_first {
            self.is_done = true;
            frame.bytes.truncate(frame.bytes.len() / 2);
            wire.ahead(frame.bytes);
            return wire.cut();
        }
        if self.is_done && self.is_final {
            return wire.cut();
        }
        wire.ahead(frame.bytes);
    }

    fn connects(&mut self, _: Port) -> bool {
        !(self.is_done && self.is_final)
    }
}

#[test]
fn a_stream_that_ends_within_a_write_goes_on_or_both_ends_know() {
    let cases = modes_and_sizes().flat_map(|case| [false, true].map(|is_final| (case, is_final)));
    each(cases, |((mode, size), is_final)| {
        let cut = Cut {
            is_done: false,
            is_final,
        };
        let mut scene = Scene::start(size, &patient(), cut).with_another_room();
        let ends = scene.hand_off(mode, 1, PATIENCE);
        match is_final {
            false => ends.assert_success(),
            true => ends.assert_failed_with(Code::Unreachable),
        }
        scene.close();
    });
}
