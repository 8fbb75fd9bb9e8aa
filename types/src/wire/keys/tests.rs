use super::*;
use proptest::prelude::*;

fn key() -> impl Strategy<Value = Key> {
    let text = prop_oneof![
        3 => "[0-9a-f]{64}",
        3 => "[mn]@[0-9a-f]{64}@[01]",
        1 => "[0-9a-f]{63,67}",
        3 => "\\PC{1,12}",
    ];
    text.prop_map(|text| Key::parse(&text).unwrap())
}

fn unpacked(packed: &[u8]) -> Result<Vec<Key>, DecodeError> {
    unpack(packed).map(|key| key.map(KeyRef::to_key)).collect()
}

#[test]
fn a_batch_of_block_keys_is_one_run() {
    let keys: Vec<_> = (0..100).map(|i| Key::from_digest([i; 32])).collect();
    let packed = pack(&keys);
    assert_eq!(packed.len(), 100 * 32 + 9);
    assert_eq!(unpacked(&packed).unwrap(), keys);
}

#[test]
fn keys_that_share_their_affixes_share_a_run() {
    let key = |affix: &str, i: u8| Key::parse(&format!("{affix}@{}", Key::from_digest([i; 32])));
    let keys: Vec<_> = [("m", 1), ("m", 2), ("n", 3), ("n", 4)]
        .map(|(affix, i)| key(affix, i).unwrap())
        .into();
    let packed = pack(&keys);
    assert_eq!(packed.len(), 2 * (1 + 4 + (2 + 2) + 2 + 2 * 32));
    assert_eq!(unpacked(&packed).unwrap(), keys);
}

#[test]
fn bad_runs_are_refused() {
    let run = |tag: u8, count: u32, rest: &[u8]| {
        let mut packed = vec![tag];
        packed.extend_from_slice(&count.to_le_bytes());
        packed.extend_from_slice(rest);
        unpacked(&packed)
    };
    let bad = |what, value| Err(DecodeError::BadValue { what, value });
    assert_eq!(run(0, 1, &[]), bad("key run", 0));
    assert_eq!(run(TEXTS, 1, &[0, 0]), bad("key length", 0));
    assert_eq!(
        run(TEXTS, 1, &[1, 0, 0xff]),
        Err(DecodeError::NotUtf8 { what: "keys" })
    );

    let mut long = 1025u16.to_le_bytes().to_vec();
    long.extend_from_slice(&[b'k'; 1025]);
    assert_eq!(run(TEXTS, 1, &long), bad("key length", 1025));

    let mut affixes = 961u16.to_le_bytes().to_vec();
    affixes.extend_from_slice(&[b'@'; 961]);
    affixes.extend_from_slice(&[0; 34]);
    assert_eq!(run(DIGESTS, 1, &affixes), bad("key length", 1025));

    // A run that claims more keys than there are bytes costs nothing before it fails.
    assert_eq!(
        run(DIGESTS, u32::MAX, &[0, 0, 0, 0]),
        Err(DecodeError::Truncated { what: "keys" })
    );
}

/// Two forms of one key would be two keys in the directory.
#[test]
fn a_key_has_one_form_only() {
    let mut as_text = vec![TEXTS, 1, 0, 0, 0, 64, 0];
    as_text.extend_from_slice(&[b'a'; 64]);
    assert!(matches!(
        unpacked(&as_text),
        Err(DecodeError::BadValue {
            what: "text key with a digest",
            ..
        })
    ));
    for prefix in ["a".to_owned(), "@0".to_owned(), "a".repeat(64) + "@"] {
        let mut packer = Packer::default();
        packer.push(KeyRef::Digest {
            prefix: &prefix,
            suffix: "",
            digest: &[7; 32],
        });
        assert!(
            matches!(
                unpacked(&packer.finish()),
                Err(DecodeError::BadValue {
                    what: "key prefix with a digit of the digest",
                    ..
                })
            ),
            "{prefix}"
        );
    }
}

#[test]
fn nothing_follows_an_error() {
    let mut packed = pack(&[Key::parse("a").unwrap()]);
    packed.push(9);
    let mut keys = unpack(&packed);
    assert!(keys.next().unwrap().is_ok());
    assert!(keys.next().unwrap().is_err());
    assert!(keys.next().is_none());
}

proptest! {
    #[test]
    fn unpacked_keys_keep_their_order(keys in prop::collection::vec(key(), 0..40)) {
        let packed = pack(&keys);
        prop_assert_eq!(packed.is_empty(), keys.is_empty());
        prop_assert_eq!(unpacked(&packed).unwrap(), keys);
    }

    #[test]
    fn a_batch_cut_short_fails_or_ends_between_runs(
        keys in prop::collection::vec(key(), 1..12),
    ) {
        let packed = pack(&keys);
        for cut in 0..packed.len() {
            let read: Vec<_> = unpack(&packed[..cut]).collect();
            let good = read.iter().take_while(|key| key.is_ok()).count();
            prop_assert!(good < keys.len());
            for (key, wanted) in read.iter().take(good).zip(&keys) {
                prop_assert_eq!(key.as_ref().unwrap(), &wanted.as_ref());
            }
            if good == read.len() {
                // Without an error the result is a batch of fewer keys: a run ended at the cut.
                prop_assert_eq!(&pack(&keys[..good])[..], &packed[..cut]);
            }
        }
    }

    #[test]
    fn one_run_cut_anywhere_fails(digests in prop::collection::vec(any::<[u8; 32]>(), 1..4)) {
        let keys: Vec<_> = digests.into_iter().map(Key::from_digest).collect();
        let packed = pack(&keys);
        for cut in 1..packed.len() {
            prop_assert!(unpacked(&packed[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn every_decoded_key_equals_its_parsed_string(
        tag in 0u8..4, count in 0u32..4, prefix in "[a-g@]{0,3}", bytes: Vec<u8>,
    ) {
        let mut packed = vec![tag];
        packed.extend_from_slice(&count.to_le_bytes());
        put_str16(&mut packed, &prefix);
        packed.extend_from_slice(&[0; 2]);
        packed.extend_from_slice(&bytes);
        for key in unpack(&packed).flatten() {
            let parsed = Key::parse(&key.to_string()).unwrap();
            prop_assert_eq!(parsed.as_ref(), key);
        }
    }

    #[test]
    fn no_packed_bytes_cause_a_panic(bytes: Vec<u8>) {
        let read = unpack(&bytes).count();
        prop_assert!(read <= bytes.len());
    }
}

/// The keys of a batch, or the error.
fn batch(packed: &[u8], most: usize) -> Result<Vec<Key>, BatchError> {
    let batch = KeyBatch::unpack(packed, most)?;
    assert_eq!(batch.get(batch.len()), None);
    Ok(batch.iter().map(KeyRef::to_key).collect())
}

proptest! {
    /// In place or not, a batch holds the keys of its bytes.
    #[test]
    fn a_batch_holds_the_keys_in_order(
        keys in prop_oneof![
            proptest::collection::vec(key(), 0..20),
            proptest::collection::vec(any::<[u8; 32]>().prop_map(Key::from_digest), 0..20),
        ],
        most in 0..20usize,
        from in 0..25usize,
    ) {
        let packed = pack(&keys);
        prop_assert_eq!(batch(&packed, 20), Ok(keys.clone()));
        let expected = if keys.len() > most {
            Err(BatchError::TooMany { most })
        } else {
            Ok(keys.clone())
        };
        prop_assert_eq!(batch(&packed, most), expected);
        let whole = KeyBatch::unpack(&packed, 20).unwrap();
        let rest: Vec<Key> = whole.skip(from).iter().map(KeyRef::to_key).collect();
        let first: Vec<Key> = whole.first(from).iter().map(KeyRef::to_key).collect();
        prop_assert_eq!(first, &keys[..from.min(keys.len())]);
        prop_assert_eq!(rest, keys.get(from..).unwrap_or_default());
        let refs: Vec<KeyRef<'_>> = keys.iter().map(Key::as_ref).collect();
        let listed: Vec<Key> = KeyBatch::from(&refs).iter().map(KeyRef::to_key).collect();
        prop_assert_eq!(listed, keys);
    }

    #[test]
    fn malformed_bytes_are_no_batch(mut packed: Vec<u8>, first in 0..4u8, whole: bool) {
        if let Some(byte) = packed.first_mut() {
            *byte = first;
        }
        if whole {
            packed = pack(&[Key::from_digest([1; 32]), Key::from_digest([2; 32])]);
            packed.pop();
        }
        let expected = unpacked(&packed).map_err(BatchError::Malformed);
        prop_assert_eq!(batch(&packed, usize::MAX), expected);
    }
}
