//! The guarantees of letters: a known sender, once, in order.

use super::*;
use crate::peer::host::LETTERS;
use crate::peer::letters::LetterWriter;
use parking_lot::Mutex;
use std::sync::Arc;

#[derive(Default)]
struct Arrived(Mutex<Vec<Letter>>);

impl LetterBox for Arrived {
    fn take(&self, letter: Letter) -> Code {
        self.0.lock().push(letter);
        Code::Ok
    }
}

fn writer(secret: &str) -> (Endpoint, Arc<Arrived>) {
    let letter_box = Arc::<Arrived>::default();
    let options = EndpointOptions {
        name: "letters".to_owned(),
        secret: Secret::new(secret),
        stall: Duration::from_secs(20),
        rdma: None,
        reads_directly: false,
        letters: Some(LetterOptions {
            address: None,
            letter_box: letter_box.clone(),
        }),
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    (Endpoint::start(listener, options).unwrap(), letter_box)
}

#[test]
fn a_letter_tells_its_sender_and_comes_whole() {
    let ((here, _), (there, came)) = (writer("s"), writer("s"));
    let link = here.link(&name(&there), soon()).unwrap();
    // Small, at the border of a small write, and long.
    for length in [0, 1, 60_000, 65_536, 200_000, 5 << 20] {
        let body: Vec<u8> = (0..=250).cycle().take(length).collect();
        block_on(link.post(&body, soon())).unwrap();
        let letter = came.0.lock().pop().unwrap();
        assert_eq!(letter.from, here.session());
        assert_eq!(letter.address, name(&here));
        assert!(letter.body == body, "{length}");
    }
    let long = vec![0; 9 << 20];
    assert_eq!(
        code(block_on(link.post(&long, soon()))),
        Code::InvalidArgument
    );
    let mute = endpoint_with("s");
    let to_mute = here.link(&name(&mute), soon()).unwrap();
    assert_eq!(
        code(block_on(to_mute.post(b"hello", soon()))),
        Code::Unimplemented
    );
    let from_mute = mute.link(&name(&there), soon()).unwrap();
    assert_eq!(
        code(block_on(from_mute.post(b"hello", soon()))),
        Code::InvalidArgument
    );
    assert!(came.0.lock().is_empty());
}

/// Sends the bytes of a letter as they are.
fn send(from: &Endpoint, to: &Endpoint, letter: &[u8]) -> Code {
    let link = from.link(&name(to), soon()).unwrap();
    let extent = Extent {
        segment: LETTERS,
        ..extent(0, letter.len() as u64)
    };
    let grant = link
        .connected
        .signer
        .sign(link.session(), Epoch(0), GrantId(1), extent);
    let write = WriteOp {
        grant,
        from: vec![Region::from(letter.to_vec()).whole()],
    };
    let outcome = block_on(link.connected.tcp.write(vec![write], soon()))
        .pop()
        .unwrap();
    outcome.map_or_else(|error| error.code, |_| Code::Ok)
}

#[test]
fn a_letter_that_is_changed_repeated_or_overtaken_is_refused() {
    let ((here, _), (there, came)) = (writer("s"), writer("s"));
    let (other, _) = writer("s");
    let seal = LetterWriter::new(Secret::new("s"), here.session(), name(&here));
    let (one, two) = (
        seal.seal(there.session(), b"one"),
        seal.seal(there.session(), b"two"),
    );
    let stranger = LetterWriter::new(Secret::new("t"), here.session(), name(&here));
    let elsewhere = seal.seal(other.session(), b"elsewhere");
    assert_eq!(
        send(&here, &there, &stranger.seal(there.session(), b"x")),
        Code::GrantRefused
    );
    assert_eq!(send(&here, &there, &elsewhere), Code::WrongIncarnation);
    assert_eq!(send(&here, &there, &one[..20]), Code::Malformed);
    for index in 0..one.len() {
        let mut changed = one.clone();
        changed[index] ^= 1;
        let refused = send(&here, &there, &changed);
        assert_ne!(refused, Code::Ok, "byte {index} is not covered");
    }
    for length in 0..one.len() {
        assert_ne!(
            send(&here, &there, &one[..length.max(1)]),
            Code::Ok,
            "{length} bytes"
        );
    }
    assert!(came.0.lock().is_empty());
    assert_eq!(send(&here, &there, &two), Code::Ok);
    assert_eq!(send(&here, &there, &two), Code::StaleEpoch, "repeated");
    assert_eq!(send(&here, &there, &one), Code::StaleEpoch, "overtaken");
    assert_eq!(came.0.lock().len(), 1);
}
