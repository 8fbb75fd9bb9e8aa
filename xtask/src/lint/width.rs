//! The width of lines. rustfmt holds code to 100 columns and leaves comments and strings alone; this
//! check holds every line to 120.

use super::ratchet::Check;
use super::text::{Files, Finding, Line};

/// Columns, counted as characters.
const LIMIT: usize = 120;

pub(super) const CHECK: Check = Check {
    name: "width",
    find,
};

fn find(files: &Files) -> Vec<Finding> {
    let mut findings = Vec::new();
    for line in files.lines() {
        let width = line.text.chars().count();
        if width > LIMIT && !is_one_piece(&line) {
            findings.push(line.finding(format!("{width} columns, at most {LIMIT}")));
        }
    }
    findings
}

/// Whether the line cannot be wrapped: a row of a markdown table, or one word, such as an address.
fn is_one_piece(line: &Line<'_>) -> bool {
    let text = line.text.trim_start();
    let of_table = line.is_in("md") && text.starts_with('|');
    let words = text.trim_start_matches(['-', '*', '/', '!', '#']);
    of_table || words.split_whitespace().count() <= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_over_the_limit_are_found_unless_they_cannot_be_wrapped() {
        let fits = "é".repeat(LIMIT);
        let wide = "ab ".repeat(41);
        let row = format!("| {wide} |");
        let address = format!("/// <https://{}>", "a".repeat(LIMIT));
        let text = [fits.as_str(), &wide, &row, &address].join("\n");
        let lines = |file: &str| {
            let found = find(&Files::of(&[(file, &text)]));
            found.iter().map(|found| found.line).collect::<Vec<_>>()
        };
        assert_eq!(lines("a.md"), [2]);
        assert_eq!(lines("a.rs"), [2, 3], "only markdown has tables");
    }
}
