//! Counts that may only fall.
//!
//! `xtask/ratchet.txt` holds, for a check and a top-level directory, the number of findings that are accepted there.
//! A directory without an entry has none. A higher count fails the lint. A lower count is reported, and `cargo xtask
//! lint --tighten` records it.

use super::text::{Files, Finding};
use super::{seams, sentences, width};
use crate::cargo::root;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::fmt::Write;

const FILE: &str = "xtask/ratchet.txt";
const HEADER: &str = "\
# Findings that `cargo xtask lint` accepts, by check and top-level directory (`.` is the root itself).
# The counts may only fall: `cargo xtask lint --tighten` lowers them.
";

/// One kind of finding.
pub(super) struct Check {
    /// The name of the check in the file.
    pub(super) name: &'static str,
    pub(super) find: fn(&Files) -> Vec<Finding>,
}

const CHECKS: [&Check; 3] = [&seams::CHECK, &sentences::CHECK, &width::CHECK];

/// The accepted count of each check and directory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ratchet(BTreeMap<(String, String), usize>);

impl Ratchet {
    pub(super) fn read() -> Result<Self> {
        let text = std::fs::read_to_string(root().join(FILE));
        Self::parse(&text.with_context(|| format!("cannot read {FILE}"))?)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut counts = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let words: Vec<_> = line.split_whitespace().collect();
            let [check, directory, count] = words[..] else {
                bail!("{FILE}: `{line}` is not `CHECK DIRECTORY COUNT`");
            };
            let count = count.parse();
            let count = count.with_context(|| format!("{FILE}: no count in `{line}`"))?;
            counts.insert((check.to_owned(), directory.to_owned()), count);
        }
        Ok(Self(counts))
    }

    fn accepted(&self, check: &str, directory: &str) -> usize {
        let key = (check.to_owned(), directory.to_owned());
        self.0.get(&key).copied().unwrap_or(0)
    }

    /// Whether no directory exceeds its count. Prints the findings of each directory that does.
    pub(super) fn holds(&self, check: &Check, files: &Files) -> bool {
        let mut holds = true;
        let found = by_directory((check.find)(files));
        for (directory, findings) in &found {
            let accepted = self.accepted(check.name, directory);
            if findings.len() > accepted {
                holds = false;
                for finding in findings {
                    eprintln!("{finding}");
                }
                let count = findings.len();
                let name = check.name;
                eprintln!("{name}: {count} in {directory}, at most {accepted} are accepted");
            }
        }
        let is_lower = |directory: &str, accepted| {
            found.get(directory).map_or(0, |findings| findings.len()) < accepted
        };
        let mut counts = self.0.iter().filter(|((name, _), _)| name == check.name);
        if counts.any(|((_, directory), accepted)| is_lower(directory, *accepted)) {
            eprintln!(
                "{}: counts have fallen; `cargo xtask lint --tighten` records them",
                check.name
            );
        }
        holds
    }

    /// Lowers each count to the number of findings. Never raises one.
    fn lower(&mut self, found: &BTreeMap<(String, String), usize>) {
        for (key, accepted) in &mut self.0 {
            *accepted = found.get(key).copied().unwrap_or(0).min(*accepted);
        }
        self.0.retain(|_, accepted| *accepted > 0);
    }

    fn print(&self) -> String {
        let mut text = HEADER.to_owned();
        for ((check, directory), count) in &self.0 {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{check} {directory} {count}");
        }
        text
    }
}

/// Lowers the counts in the file, and fails if one of them is exceeded.
pub(super) fn tighten(files: &Files) -> Result<bool> {
    let mut ratchet = Ratchet::read()?;
    let mut found = BTreeMap::new();
    let mut holds = true;
    for check in CHECKS {
        holds &= ratchet.holds(check, files);
        for (directory, findings) in by_directory((check.find)(files)) {
            found.insert((check.name.to_owned(), directory), findings.len());
        }
    }
    ratchet.lower(&found);
    std::fs::write(root().join(FILE), ratchet.print())?;
    Ok(holds)
}

fn by_directory(findings: Vec<Finding>) -> BTreeMap<String, Vec<Finding>> {
    let mut directories: BTreeMap<String, Vec<Finding>> = BTreeMap::new();
    for finding in findings {
        let directory = finding.file.split_once('/').map_or(".", |(first, _)| first);
        let of_directory = directories.entry(directory.to_owned()).or_default();
        of_directory.push(finding);
    }
    directories
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(files: &Files) -> Vec<Finding> {
        let lines = files.lines().filter(|line| line.text.contains("long"));
        lines.map(|line| line.finding("long")).collect()
    }

    const CHECK: Check = Check { name: "x", find };

    #[test]
    fn a_directory_may_have_as_many_findings_as_the_file_says_and_no_more() {
        let files = Files::of(&[("a/one.md", "long\nlong\n"), ("b.md", "short\n")]);
        let holds = |text: &str| Ratchet::parse(text).unwrap().holds(&CHECK, &files);
        assert!(holds("x a 2\n"));
        assert!(holds("x a 3\nx . 1\n"));
        assert!(!holds("x a 1\n"));
        assert!(!holds("# nothing\n"), "a directory without a line has none");
        assert!(!holds("y a 2\n"), "the count of another check");
    }

    #[test]
    fn counts_fall_and_never_rise() {
        let mut ratchet = Ratchet::parse("x a 3\nx b 3\nx c 3\n").unwrap();
        let found = [("a", 1), ("b", 5)];
        let found = found.map(|(directory, count)| (("x".into(), directory.into()), count));
        ratchet.lower(&found.into());
        assert_eq!(ratchet, Ratchet::parse("x a 1\nx b 3\n").unwrap());
        assert_eq!(Ratchet::parse(&ratchet.print()).unwrap(), ratchet);
    }

    #[test]
    fn a_line_that_is_no_count_is_named() {
        let error = Ratchet::parse("x a b\n").unwrap_err();
        assert!(error.to_string().contains("x a b"), "{error}");
        assert!(Ratchet::parse("x 3\n").is_err());
    }
}
