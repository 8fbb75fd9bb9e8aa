//! Escapes text of unknown origin, so that it has no effect on a terminal.

use std::fmt::Write;

/// Whether a character must not reach a terminal. These are control characters (also C1), ends of lines and
/// paragraphs, characters that reverse the text direction, and invisible ones.
fn acts(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{061c}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// The text in one line, escaped as in a Rust string. A backslash is doubled, so that two different texts
/// never look the same.
pub(crate) fn one_line(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) || c == '\\' {
            out.extend(c.escape_debug());
        } else {
            out.push(c);
        }
    }
    out
}

/// The text with its line ends; other such characters are escaped.
pub(crate) fn several_lines(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) && c != '\n' {
            out.extend(c.escape_debug());
        } else {
            out.push(c);
        }
    }
    out
}

/// The same JSON value with such characters escaped. In JSON they occur only in strings, and the encoder
/// has escaped those below a space.
pub(super) fn json(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) && c != '\n' {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a string does not fail.
                let _ = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\u{1b}[2J\r\n\t\u{9b}m\u{7f}\u{202e}\u{2066}\u{200b}\u{e0041}\\é漢😀";

    #[test]
    fn control_characters_are_escaped_and_ordinary_text_stays() {
        assert!(!one_line(HOSTILE).chars().any(acts));
        assert!(!several_lines(HOSTILE).chars().any(|c| acts(c) && c != '\n'));
        assert!(
            !json(&serde_json::to_string(HOSTILE).unwrap())
                .chars()
                .any(acts)
        );
        assert_eq!(one_line("größe/漢字/😀 -_."), "größe/漢字/😀 -_.");
        assert_eq!(one_line("a\nb\u{1b}"), r"a\nb\u{1b}");
        assert_eq!(several_lines("a\nb\r"), "a\nb\\r");
    }

    #[test]
    fn two_texts_never_look_the_same() {
        assert_ne!(one_line("a\nb"), one_line(r"a\nb"));
        assert_ne!(one_line("\u{202e}"), one_line(r"\u{202e}"));
    }

    #[test]
    fn escaped_json_has_the_same_value() {
        for value in [
            serde_json::json!({ "key": HOSTILE, "list": [HOSTILE, 1, null] }),
            serde_json::json!({ HOSTILE: HOSTILE }),
        ] {
            let text = json(&serde_json::to_string_pretty(&value).unwrap());
            let back: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(back, value, "{text}");
        }
    }
}
