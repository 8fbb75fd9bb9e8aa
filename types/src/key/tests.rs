use super::*;
use proptest::prelude::*;

fn digest_parts(key: &Key) -> Option<(&str, &str)> {
    match key.as_ref() {
        KeyRef::Digest { prefix, suffix, .. } => Some((prefix, suffix)),
        KeyRef::Text(_) => None,
    }
}

#[test]
fn a_key_writes_no_line_of_its_own_into_a_log() {
    let hex = "0123456789abcdef".repeat(4);
    let key = Key::parse(&format!("a\n{hex}\u{1b}[2J b\"é")).unwrap();
    let shown = key.shown().to_string();
    assert!(!shown.contains(char::is_control), "{shown}");
    assert!(shown.contains(&hex) && shown.contains('é'), "{shown}");
}

#[test]
fn a_run_of_exactly_64_lower_case_digits_is_a_digest() {
    let hex = "0123456789abcdef".repeat(4);
    for (text, parts) in [
        (hex.clone(), Some(("", ""))),
        (format!("p@{hex}@s"), Some(("p@", "@s"))),
        (format!("é{hex}é"), Some(("é", "é"))),
        // A longer run: its first 64 digits are the digest, so that each key has one form.
        (format!("{hex}a"), Some(("", "a"))),
        (format!("x{hex}{hex}"), Some(("x", hex.as_str()))),
        (hex[1..].to_owned(), None),
        (hex.to_uppercase(), None),
        (format!("{}g{}", &hex[..32], &hex[32..]), None),
    ] {
        let key = Key::parse(&text).unwrap();
        assert_eq!(digest_parts(&key), parts, "{text}");
        assert_eq!(key.to_string(), text);
    }
}

#[test]
fn lengths_are_enforced_at_their_edges() {
    assert_eq!(Key::parse(""), Err(KeyError::Empty));
    Key::parse(&"k".repeat(MAX_KEY_BYTES)).unwrap();
    assert_eq!(
        Key::parse(&"k".repeat(MAX_KEY_BYTES + 1)),
        Err(KeyError::TooLong(MAX_KEY_BYTES + 1))
    );
    // Bytes count, not characters.
    assert_eq!(Key::parse(&"é".repeat(513)), Err(KeyError::TooLong(1026)));
}

#[test]
fn a_digest_and_its_string_are_the_same_key() {
    let digest = [0xa5; 32];
    let key = Key::from_digest(digest);
    assert_eq!(Key::parse(&key.to_string()), Ok(key));
}

proptest! {
    #[test]
    fn strings_round_trip(text in "\\PC{1,300}") {
        let key = Key::parse(&text).unwrap();
        prop_assert_eq!(key.to_string(), text.clone());
        prop_assert_eq!(key.as_ref().text_len(), text.len());
        prop_assert_eq!(key.as_ref().to_key(), key);
    }

    #[test]
    fn strings_with_hex_runs_round_trip(
        before in "[0-9a-fA-Fé@]{0,80}",
        run in "[0-9a-f]{60,70}|[0-9a-f]{120,140}",
        after in "[0-9a-fA-Fé@]{0,80}",
    ) {
        let text = format!("{before}{run}{after}");
        let key = Key::parse(&text).unwrap();
        prop_assert_eq!(key.to_string(), text.clone());
        prop_assert_eq!(key.as_ref().text_len(), text.len());
        let is_hex = |window: &[u8]| window.iter().all(|byte| nibble(*byte).is_some());
        let has_digest = text.as_bytes().windows(HEX_DIGITS).any(is_hex);
        prop_assert_eq!(digest_parts(&key).is_some(), has_digest);
        // The digest is the first run: nothing before it contains or starts a run.
        if let Some((prefix, _)) = digest_parts(&key) {
            prop_assert!(!holds_digest(prefix));
            prop_assert!(prefix.bytes().last().is_none_or(|byte| nibble(byte).is_none()));
        }
        prop_assert_eq!(Key::parse(&text).unwrap(), key);
    }

    #[test]
    fn different_strings_are_different_keys(
        one in "[ab]{0,2}[0-9a-f]{63,66}[ab@]{0,2}",
        other in "[ab]{0,2}[0-9a-f]{63,66}[ab@]{0,2}",
    ) {
        let same = Key::parse(&one).unwrap() == Key::parse(&other).unwrap();
        prop_assert_eq!(same, one == other);
    }
}
