use super::*;
use crate::handshake::tests::World;
use crate::session::Session;

/// Both ends of a session, and what one has sent.
struct Pair {
    sender: Session,
    receiver: Session,
}

fn pair(world: &World, records_of_key: Option<u64>) -> Pair {
    let (mut client, server) = world.agree();
    if let Some(count) = records_of_key {
        client.records_of_key = count;
    }
    Pair {
        sender: Session::agreed(client).unwrap(),
        receiver: Session::agreed(server).unwrap(),
    }
}

impl Pair {
    fn sealed(&self, plain: &[u8]) -> Vec<u8> {
        sealed(&self.sender, plain)
    }

    /// What arrives of `sealed`, until the end or an error.
    fn opened(&self, sealed: &[u8]) -> (Vec<u8>, io::Result<()>) {
        opened(&self.receiver, sealed)
    }

    const fn records(&self) -> &Records {
        &self.sender.records
    }

    /// Sends a record of any kind.
    fn record(&self, kind: u8, inside: &[u8]) -> Vec<u8> {
        let mut record = vec![0; HEAD + inside.len() + 1 + TAG];
        record[HEAD..HEAD + inside.len()].copy_from_slice(inside);
        let mut sealing = self.records().sealing.lock();
        sealing.key.seal(kind, inside.len(), &mut record).unwrap();
        record
    }
}

fn sealed(session: &Session, plain: &[u8]) -> Vec<u8> {
    let mut sent = Vec::new();
    let send = |bytes: &[u8]| {
        // A socket may take any part of the bytes.
        let count = bytes.len().min(7000);
        sent.extend_from_slice(&bytes[..count]);
        Ok(count)
    };
    session.send(plain, send).unwrap();
    sent
}

fn opened(session: &Session, mut sealed: &[u8]) -> (Vec<u8>, io::Result<()>) {
    let mut plain = Vec::new();
    loop {
        let mut room = [0; 5000];
        let received = session.receive(&mut room, |room| {
            let count = sealed.len().min(room.len()).min(3001);
            let (now, rest) = sealed.split_at(count);
            room[..count].copy_from_slice(now);
            sealed = rest;
            Ok(count)
        });
        match received {
            Ok(0) => return (plain, Ok(())),
            Ok(count) => plain.extend_from_slice(&room[..count]),
            Err(error) => return (plain, Err(error)),
        }
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (at * 7 + at / 251).to_le_bytes()[0])
        .collect()
}

#[test]
fn a_key_changes_before_its_limit_and_no_byte_is_lost() {
    let world = World::new();
    let pair = pair(&world, Some(3));
    // More keys in a row than records without data may come.
    let bytes = pattern(80 * PLAIN + 9);
    let (plain, ended) = pair.opened(&pair.sealed(&bytes));
    ended.unwrap();
    assert!(plain == bytes);
    // 81 records of data, two with each key, and the message about the next one.
    let sealing = pair.records().sealing.lock();
    assert_eq!(sealing.key.next, 1, "records of the last key");
}

#[test]
fn a_peer_that_wants_a_new_key_gets_it_before_the_next_data() {
    let world = World::new();
    let pair = pair(&world, None);
    let asks = pair.record(kind::HANDSHAKE, &[message::NEW_KEY, 0, 0, 1, 1]);
    let mut sealing = pair.records().sealing.lock();
    sealing.key = Key::new(pair.records().rekeys.lock().sending().unwrap()).unwrap();
    drop(sealing);
    let (plain, ended) = pair.opened(&[asks, pair.sealed(b"with the new key")].concat());
    ended.unwrap();
    assert_eq!(plain, b"with the new key");
    // The other direction has a new key from its next record on.
    let answer = sealed(&pair.receiver, b"answer");
    let notice = HEAD + 5 + 1 + TAG;
    assert_eq!(answer.len(), notice + HEAD + 6 + 1 + TAG);
    let (plain, ended) = opened(&pair.sender, &answer);
    ended.unwrap();
    assert_eq!(plain, b"answer");
    assert_eq!(sealed(&pair.receiver, b"again").len(), HEAD + 5 + 1 + TAG);
    // It was no wish for another key: two peers would change keys for ever.
    assert_eq!(pair.sealed(b"again").len(), HEAD + 5 + 1 + TAG);
}

#[test]
fn a_changed_repeated_missing_or_swapped_record_is_an_error_and_gives_no_byte() {
    let world = World::new();
    let bytes = pattern(2 * PLAIN);
    let whole = HEAD + PLAIN + 1 + TAG;
    for place in [0, 1, 2, 3, 4, HEAD, 999, whole - 1] {
        for bit in 0..8 {
            let pair = pair(&world, None);
            let mut sent = pair.sealed(&bytes);
            sent[place] ^= 1 << bit;
            let (plain, ended) = pair.opened(&sent);
            // A longer record may wait for bytes that never come.
            let waits = ended.is_ok() && (3..5).contains(&place);
            assert!(waits || ended.is_err(), "{place} {bit}");
            assert!(plain.is_empty(), "{place} {bit}");
            // The next record is sound, and no hole may come before it.
            let (plain, again) = pair.opened(&[]);
            assert!(waits || again.is_err(), "{place} {bit}");
            assert!(plain.is_empty() && (waits || pair.receiver.has_received()));
        }
    }
    for order in [&[0, 0][..], &[1], &[1, 0]] {
        let pair = pair(&world, None);
        let sent = pair.sealed(&bytes);
        let mixed = order.iter().map(|at| &sent[at * whole..(at + 1) * whole]);
        let (plain, ended) = pair.opened(&mixed.collect::<Vec<_>>().concat());
        assert!(ended.is_err(), "{order:?}");
        let sound = if order[0] == 0 { PLAIN } else { 0 };
        assert!(plain == bytes[..sound], "{order:?}");
    }
}

#[test]
fn padding_tickets_and_empty_records_give_no_byte() {
    let world = World::new();
    let pair = pair(&world, None);
    let ticket = [message::TICKET, 0, 0, 3, 9, 9, 9];
    let mut sent = pair.record(kind::HANDSHAKE, &[ticket, ticket].concat());
    sent.extend(pair.record(kind::DATA, &[]));
    // The kind of a padded record stands before the zeros: 23, and then two of them.
    sent.extend(pair.record(0, &[b'a', kind::DATA, 0]));
    sent.extend(pair.record(kind::ALERT, &[1, 90]));
    sent.extend(pair.sealed(b"bc"));
    sent.extend(pair.record(kind::ALERT, &[1, 0]));
    sent.extend(pair.sealed(b"after the end"));
    let (plain, ended) = pair.opened(&sent);
    ended.unwrap();
    assert_eq!(plain, b"abc");
}

#[test]
fn what_no_session_has_is_an_error() {
    let world = World::new();
    let long = [1; PLAIN + 1];
    let padded = [&[b'a', kind::DATA][..], &[0; PLAIN]].concat();
    let wrong: [(&str, u8, &[u8]); 12] = [
        ("a long record", kind::DATA, &long),
        ("a record with much padding", 0, &padded),
        ("an alert", kind::ALERT, &[2, 40]),
        ("half an alert", kind::ALERT, &[2]),
        ("a kind", 99, b"x"),
        ("no kind", 0, &[0, 0]),
        ("a change of ciphers", 20, &[1]),
        ("a hello", kind::HANDSHAKE, &[1, 0, 0, 0]),
        (
            "half a message",
            kind::HANDSHAKE,
            &[message::TICKET, 0, 0, 9, 1],
        ),
        ("half a head", kind::HANDSHAKE, &[message::TICKET, 0]),
        (
            "an unknown wish",
            kind::HANDSHAKE,
            &[message::NEW_KEY, 0, 0, 1, 2],
        ),
        (
            "a message behind a new key",
            kind::HANDSHAKE,
            &[message::NEW_KEY, 0, 0, 1, 0, message::TICKET, 0, 0, 0],
        ),
    ];
    for (name, kind, inside) in wrong {
        let pair = pair(&world, None);
        let mut sent = pair.record(kind, inside);
        sent.extend(pair.sealed(b"data"));
        let (plain, ended) = pair.opened(&sent);
        assert!(plain.is_empty(), "{name}");
        let error = ended.expect_err(name);
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{name}");
    }
    // Records that carry nothing must not keep a receiver busy.
    let pair = pair(&world, None);
    let empty: Vec<_> = (0..=IDLE_RECORDS)
        .map(|_| pair.record(kind::DATA, &[]))
        .collect();
    let (_, ended) = pair.opened(&empty.concat());
    assert!(ended.is_err());
}
