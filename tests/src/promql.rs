//! The metrics and labels that a PromQL expression names, and those that a daemon exports.
//!
//! This reads tokens and checks no syntax: promtool does that.

use anyhow::{Context, bail};
use std::collections::{BTreeMap, BTreeSet};

/// Labels that Prometheus or the scrape's configuration adds.
const TARGET_LABELS: [&str; 4] = ["job", "namespace", "container", "instance"];
/// Series that Prometheus makes itself.
const OWN_SERIES: [&str; 2] = ["up", "ALERTS"];
/// Words that precede a list of labels in parentheses.
const GROUPINGS: [&str; 6] = [
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
];

/// The samples of scrapes: the label sets of each name.
#[derive(Debug, Default)]
pub struct Scrape(BTreeMap<String, Vec<BTreeMap<String, String>>>);

impl Scrape {
    /// Adds the text of one `/metrics` page.
    pub fn add(&mut self, page: &str) -> anyhow::Result<()> {
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let tokens = tokens(line).with_context(|| line.to_owned())?;
            let Some(Token::Word(name)) = tokens.first() else {
                bail!("no name in {line:?}");
            };
            let mut labels = BTreeMap::new();
            for (label, values) in matchers(tokens.get(1..).unwrap_or_default()) {
                labels.insert(label, values);
            }
            self.0.entry(name.clone()).or_default().push(labels);
        }
        Ok(())
    }

    /// The names in `expression` that the scrapes lack, one line each.
    pub fn lacks(&self, expression: &str) -> anyhow::Result<Vec<String>> {
        let used = Used::read(expression)?;
        let mut lacking = Vec::new();
        let mut labels: BTreeSet<&str> = TARGET_LABELS.into();
        for selector in &used.selectors {
            let Some(series) = self.0.get(&selector.name) else {
                lacking.push(format!("metric {}", selector.name));
                continue;
            };
            labels.extend(series.iter().flat_map(BTreeMap::keys).map(String::as_str));
            for (label, pattern) in &selector.matchers {
                if TARGET_LABELS.contains(&label.as_str()) {
                    continue;
                }
                for value in pattern.split('|') {
                    let has = |one: &BTreeMap<_, _>| one.get(label).is_some_and(|is| is == value);
                    if !series.iter().any(has) {
                        lacking.push(format!("{}{{{label}={value:?}}}", selector.name));
                    }
                }
            }
        }
        let grouped = used.groupings.iter().filter(|label| {
            // Prometheus' own series have labels that no scrape shows.
            !used.selectors.is_empty() && !labels.contains(label.as_str())
        });
        lacking.extend(grouped.map(|label| format!("label {label}")));
        Ok(lacking)
    }
}

/// A metric of kvpool, with the labels that select its series.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    /// The metric.
    pub name: String,
    /// The labels, each with the value or pattern that it is compared with.
    pub matchers: Vec<(String, String)>,
}

/// The names in an expression.
#[derive(Debug, Default)]
pub struct Used {
    /// The metrics of kvpool.
    pub selectors: Vec<Selector>,
    /// The labels by which series are grouped or joined.
    pub groupings: BTreeSet<String>,
}

impl Used {
    /// Reads an expression. A series that is neither kvpool's nor Prometheus' own is an error.
    pub fn read(expression: &str) -> anyhow::Result<Self> {
        let tokens = tokens(expression).with_context(|| expression.to_owned())?;
        let mut used = Self::default();
        for (at, token) in tokens.iter().enumerate() {
            let rest = tokens.get(at + 1..).unwrap_or_default();
            let opens = |sign| rest.first() == Some(&Token::Sign(sign));
            match token {
                Token::Word(word) if word.starts_with("kvpool_") => used.selectors.push(Selector {
                    name: word.clone(),
                    matchers: matchers(rest),
                }),
                Token::Word(word) if GROUPINGS.contains(&word.as_str()) && opens('(') => {
                    let labels = rest.iter().skip(1);
                    let labels = labels.take_while(|token| **token != Token::Sign(')'));
                    used.groupings.extend(labels.filter_map(Token::word));
                }
                Token::Word(word)
                    if (opens('{') || opens('[')) && !OWN_SERIES.contains(&word.as_str()) =>
                {
                    bail!("{word} is no metric of kvpool, in {expression:?}");
                }
                _ => {}
            }
        }
        Ok(used)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// A name, keyword, number or duration.
    Word(String),
    /// The text in quotes.
    Text(String),
    /// Any other character.
    Sign(char),
}

impl Token {
    fn word(&self) -> Option<String> {
        match self {
            Self::Word(word) => Some(word.clone()),
            _ => None,
        }
    }
}

fn tokens(text: &str) -> anyhow::Result<Vec<Token>> {
    let is_of_word = |c: char| c.is_ascii_alphanumeric() || "_:.".contains(c);
    let mut tokens = Vec::new();
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c == '"' || c == '\'' {
            let mut quoted = String::new();
            loop {
                match rest.next().context("a quote is not closed")? {
                    '\\' => quoted.extend(rest.next()),
                    end if end == c => break,
                    other => quoted.push(other),
                }
            }
            tokens.push(Token::Text(quoted));
        } else if is_of_word(c) {
            let mut word = String::from(c);
            while let Some(more) = rest.next_if(|c| is_of_word(*c)) {
                word.push(more);
            }
            tokens.push(Token::Word(word));
        } else if !c.is_whitespace() {
            tokens.push(Token::Sign(c));
        }
    }
    Ok(tokens)
}

/// The labels and values in the braces that `tokens` begin with; none without braces.
fn matchers(tokens: &[Token]) -> Vec<(String, String)> {
    if tokens.first() != Some(&Token::Sign('{')) {
        return Vec::new();
    }
    let inside = tokens
        .iter()
        .take_while(|token| **token != Token::Sign('}'));
    let mut label = String::new();
    let mut all = Vec::new();
    for token in inside {
        match token {
            Token::Word(word) => label.clone_from(word),
            Token::Text(text) => all.push((label.clone(), text.clone())),
            Token::Sign(_) => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str =
        "# TYPE kvpool_a gauge\nkvpool_a 1\nkvpool_b_bucket{op=\"read\",le=\"+Inf\"} 2\n";

    fn lacks(expression: &str) -> Vec<String> {
        let mut scrape = Scrape::default();
        scrape.add(PAGE).unwrap();
        scrape.lacks(expression).unwrap()
    }

    #[test]
    fn what_a_scrape_has_is_not_lacking() {
        let expression = r#"sum by (le, job) (rate(kvpool_b_bucket{op=~"read", instance="x"}[5m])) > 1
            and on (instance) kvpool_a or up{job="a"} == 0"#;
        assert_eq!(lacks(expression), Vec::<String>::new());
    }

    #[test]
    fn each_thing_that_a_scrape_lacks_is_named() {
        let cases = [
            ("rate(kvpool_c[5m])", "metric kvpool_c"),
            (
                r#"kvpool_b_bucket{op=~"read|write"}"#,
                r#"kvpool_b_bucket{op="write"}"#,
            ),
            (r#"kvpool_a{op="read"}"#, r#"kvpool_a{op="read"}"#),
            ("sum by (kind) (kvpool_a)", "label kind"),
        ];
        for (expression, lacking) in cases {
            assert_eq!(lacks(expression), [lacking], "{expression}");
        }
    }

    #[test]
    fn a_series_of_another_program_and_an_open_quote_are_errors() {
        assert!(Used::read(r#"node_load1{job="a"} > 1"#).is_err());
        assert!(Used::read(r#"kvpool_a{job="a} > 1"#).is_err());
    }
}
