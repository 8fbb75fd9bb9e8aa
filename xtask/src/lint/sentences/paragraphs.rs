//! The paragraphs of a file that are prose.

/// Prose, on one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Paragraph {
    /// The line where it begins, from 1.
    pub(super) line: usize,
    pub(super) text: String,
}

/// Collects the lines of paragraphs.
#[derive(Default)]
struct Collector {
    done: Vec<Paragraph>,
    open: Option<Paragraph>,
}

impl Collector {
    fn add(&mut self, line: usize, text: &str) {
        if let Some(open) = &mut self.open {
            open.text.push(' ');
            open.text.push_str(text);
        } else {
            let text = text.to_owned();
            self.open = Some(Paragraph { line, text });
        }
    }

    fn end(&mut self) {
        self.done.extend(self.open.take());
    }
}

/// Reads lines of markdown, each with its number.
fn read<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<Paragraph> {
    let mut collector = Collector::default();
    let mut is_code = false;
    for (number, line) in lines {
        let line = line.trim();
        if line.starts_with("```") || line.starts_with("~~~") {
            is_code = !is_code;
            collector.end();
            continue;
        }
        if is_code {
            continue;
        }
        if line.is_empty() || line.starts_with(['#', '|', '<']) {
            collector.end();
            if line.starts_with('|') {
                for cell in line.trim_matches('|').split('|') {
                    collector.add(number, cell.trim());
                    collector.end();
                }
            }
            continue;
        }
        let item = of_item(line);
        if item.is_some() {
            collector.end();
        }
        collector.add(number, item.unwrap_or(line));
    }
    collector.end();
    collector.done
}

/// The text of an item of a list, without its mark.
fn of_item(line: &str) -> Option<&str> {
    let mark = line.find(char::is_whitespace)?;
    let (mark, text) = line.split_at(mark);
    let is_number = |mark: &str| !mark.is_empty() && mark.chars().all(|c| c.is_ascii_digit());
    let is_mark = matches!(mark, "-" | "*" | "+") || mark.strip_suffix('.').is_some_and(is_number);
    is_mark.then(|| text.trim_start())
}

pub(super) fn of_markdown(text: &str) -> Vec<Paragraph> {
    read((1..).zip(text.lines()))
}

/// The paragraphs of doc comments. Each run of such lines is markdown of its own.
pub(super) fn of_rust(text: &str) -> Vec<Paragraph> {
    let mut paragraphs = Vec::new();
    let mut comment = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim_start();
        let documentation = line
            .strip_prefix("///")
            .or_else(|| line.strip_prefix("//!"));
        match documentation {
            Some(line) => comment.push((number, line)),
            None => paragraphs.append(&mut read(comment.drain(..))),
        }
    }
    paragraphs.append(&mut read(comment.drain(..)));
    paragraphs
}

/// The paragraphs of docstrings: strings in three double quotes that open a file or follow a line that
/// ends with a colon.
pub(super) fn of_python(text: &str) -> Vec<Paragraph> {
    const QUOTES: &str = "\"\"\"";
    let mut paragraphs = Vec::new();
    let mut before = ":";
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let opened = line.trim_start_matches('r').strip_prefix(QUOTES);
        let Some(opened) = opened.filter(|_| before.ends_with(':')) else {
            before = line;
            continue;
        };
        before = "";
        let mut docstring = Vec::new();
        let mut last = (number, opened);
        loop {
            if let Some((text, _)) = last.1.split_once(QUOTES) {
                docstring.push((last.0, text));
                break;
            }
            docstring.push(last);
            let Some(next) = lines.next() else { break };
            last = next;
        }
        paragraphs.append(&mut read(docstring.into_iter()));
    }
    paragraphs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(paragraphs: &[Paragraph]) -> Vec<(usize, &str)> {
        let paragraphs = paragraphs.iter();
        paragraphs.map(|p| (p.line, p.text.as_str())).collect()
    }

    #[test]
    fn markdown_has_paragraphs_items_and_cells_but_no_code_and_no_headings() {
        let text = "\
# Heading
One
two.

- item
  goes on
10. tenth
```
let code = 1;
```
| a | b |
-5 is a number
";
        let expected = [
            (2, "One two."),
            (5, "item goes on"),
            (7, "tenth"),
            (11, "a"),
            (11, "b"),
            (12, "-5 is a number"),
        ];
        assert_eq!(told(&of_markdown(text)), expected);
    }

    #[test]
    fn rust_has_doc_comments_alone_and_other_lines_end_them() {
        let text = "\
//! Of the module.
//! ```text
//! a picture
//! ```

// Plain.
/// Of
/// an item.
fn f() {} // not this
    /// Of a field.
";
        let expected = [
            (1, "Of the module."),
            (7, "Of an item."),
            (10, "Of a field."),
        ];
        assert_eq!(told(&of_rust(text)), expected);
    }

    #[test]
    fn a_fence_that_is_left_open_ends_with_its_comment() {
        let text = "/// ```\n/// code\nfn f() {}\n/// Prose.\n";
        assert_eq!(told(&of_rust(text)), [(4, "Prose.")]);
    }

    #[test]
    fn python_has_docstrings_but_no_other_strings() {
        let text = "\
#!/usr/bin/env python3
\"\"\"Of the module.\"\"\"
X = \"\"\"
a string\"\"\"
class A:
    r\"\"\"Of A,

    twice.
    \"\"\"
    def f(self):
        print(\"no\")
        \"\"\"no docstring\"\"\"
";
        let expected = [(2, "Of the module."), (6, "Of A,"), (8, "twice.")];
        assert_eq!(told(&of_python(text)), expected);
    }
}
