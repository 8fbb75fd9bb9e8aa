//! Long sentences in markdown, in Rust's doc comments and in Python's docstrings.
//!
//! A sentence ends at `.`, `!` or `?` before white space and a capital, a digit, a quote or markup. A
//! word has a letter, a digit or an underscore; a code span counts as one word, a link's address as
//! none. Code blocks and headings are left out; a cell of a table is a paragraph of its own.

mod paragraphs;

use super::ratchet::Check;
use super::text::{Files, Finding, extension_of};
use paragraphs::Paragraph;

/// Words.
const LIMIT: usize = 30;
/// How much of a long sentence is shown, in characters.
const SHOWN: usize = 80;

pub(super) const CHECK: Check = Check {
    name: "sentences",
    find,
};

fn find(files: &Files) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (file, text) in files.iter() {
        for paragraph in paragraphs_of(file, text) {
            for sentence in sentences(&paragraph.text) {
                let words = words(&sentence);
                if words > LIMIT {
                    let begin: String = sentence.chars().take(SHOWN).collect();
                    findings.push(Finding {
                        file: file.to_owned(),
                        line: paragraph.line,
                        what: format!("a sentence of {words} words, at most {LIMIT}: {begin}…"),
                    });
                }
            }
        }
    }
    findings
}

fn paragraphs_of(file: &str, text: &str) -> Vec<Paragraph> {
    match extension_of(file) {
        "md" => paragraphs::of_markdown(text),
        "rs" => paragraphs::of_rust(text),
        "py" | "pyi" => paragraphs::of_python(text),
        _ => Vec::new(),
    }
}

fn words(sentence: &str) -> usize {
    let is_of_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let words = sentence.split_whitespace();
    words.filter(|word| word.contains(is_of_word)).count()
}

fn sentences(paragraph: &str) -> Vec<String> {
    let letters: Vec<char> = plain(paragraph).chars().collect();
    let skip = |from: usize, is_such: fn(char) -> bool| {
        let rest = letters.get(from..).unwrap_or_default();
        from + rest.iter().take_while(|letter| is_such(**letter)).count()
    };
    let mut sentences = Vec::new();
    let mut begin = 0;
    for (at, letter) in letters.iter().enumerate() {
        if !matches!(letter, '.' | '!' | '?') {
            continue;
        }
        let end = skip(at + 1, closes);
        let next = skip(end, char::is_whitespace);
        if next > end && letters.get(next).is_some_and(|letter| begins(*letter)) {
            sentences.push(letters.get(begin..=at).unwrap_or_default().iter().collect());
            begin = next;
        }
    }
    sentences.push(letters.get(begin..).unwrap_or_default().iter().collect());
    sentences
}

/// Characters that may stand between the end of a sentence and the space after it.
fn closes(letter: char) -> bool {
    matches!(letter, '"' | '”' | ')' | '*' | '_' | ']')
}

/// Characters with which a sentence may begin.
fn begins(letter: char) -> bool {
    letter.is_ascii_uppercase()
        || letter.is_ascii_digit()
        || matches!(letter, '"' | '“' | '(' | '`' | '*' | '_' | '[')
}

/// A paragraph with each code span as one word and without the addresses of links.
fn plain(paragraph: &str) -> String {
    let mut text = String::new();
    let mut rest = paragraph;
    while let Some((before, span)) = rest.split_once('`') {
        let Some((_, after)) = span.split_once('`') else {
            break;
        };
        text.push_str(before);
        text.push_str("CODE");
        rest = after;
    }
    text.push_str(rest);
    let mut plain = String::new();
    let mut rest = text.as_str();
    while let Some((before, link)) = rest.split_once("](") {
        let Some((_, after)) = link.split_once(')') else {
            break;
        };
        plain.push_str(before);
        plain.push(']');
        rest = after;
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(paragraph: &str) -> Vec<usize> {
        sentences(paragraph).iter().map(|s| words(s)).collect()
    }

    #[test]
    fn a_sentence_ends_at_a_stop_before_a_capital_a_digit_a_quote_or_markup() {
        assert_eq!(
            counts("One two. Three! 4 five? (Six.) [Seven] eight."),
            [2, 1, 2, 1, 2]
        );
        assert_eq!(counts("He said \"no.\" Then he left."), [3, 3]);
        assert_eq!(counts("About 1.5 s, i.e. long, e.g. here."), [7]);
        assert_eq!(counts("The last. `x` is code."), [2, 3]);
    }

    #[test]
    fn a_code_span_is_one_word_and_an_address_none() {
        assert_eq!(counts("Run `cargo test --all now` twice."), [3]);
        assert_eq!(
            counts("See [the notes](https://example.org/a b) here."),
            [4]
        );
        assert_eq!(counts("A - dash and a lone ` tick."), [6]);
    }

    #[test]
    fn the_finding_names_the_paragraph_and_the_count() {
        let long = "word ".repeat(LIMIT + 1);
        let text = format!("Short.\n\n{long}\n");
        let found = find(&Files::of(&[("docs/a.md", &text), ("a.toml", &long)]));
        let found: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("docs/a.md:3: a sentence of 31 words"),
            "{found:?}"
        );
    }
}
