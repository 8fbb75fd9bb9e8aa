//! The cases: scripts that run in guests. Lines at the top of a script name its needs.
//!
//! ```text
//! #: guests 2                    one, or two on one Ethernet
//! #: programs kvctl test:transport/verbs    binaries, and a package's tests by its directory
//! #: limit 300                   seconds, after which it has failed
//! #: memory 2048                 MiB of each guest
//! ```
//!
//! A binary `dist:kvbench` is one of the profile `dist`: for cases that measure. `bench:media` is a benchmark of
//! `tests/benches`, of that profile too. `python` is this machine's
//! Python with the packages of the repository.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

const MARK: &str = "#: ";
const LIMIT: u64 = 300;
const MEMORY: u64 = 1536;

/// One case.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Case {
    /// The script's name, without its ending.
    pub(super) name: String,
    pub(super) script: PathBuf,
    pub(super) guests: u64,
    pub(super) programs: Vec<Program>,
    /// In seconds.
    pub(super) limit: u64,
    /// Of each guest, in MiB.
    pub(super) memory: u64,
}

/// A program that a case needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Program {
    /// A binary of the repository.
    Binary { name: String, dist: bool },
    /// A test of a package, by the package's directory and the test's name.
    Test { directory: String, name: String },
    /// A benchmark of `tests/benches`, of the profile `dist`.
    Bench { name: String },
    /// The interpreter with the packages `kvpool` and `mooncake`.
    Python,
}

impl Case {
    /// Whether it measures: it needs a build of its own, and takes longer.
    pub(super) fn is_measurement(&self) -> bool {
        let mut programs = self.programs.iter();
        programs.any(|program| {
            matches!(
                program,
                Program::Binary { dist: true, .. } | Program::Bench { .. }
            )
        })
    }
}

/// All cases in a directory, by name.
pub(super) fn read_all(directory: &Path) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for entry in std::fs::read_dir(directory)
        .with_context(|| format!("cannot read {}", directory.display()))?
    {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path)?;
        let case = read(&path, &text);
        cases.push(case.with_context(|| format!("{} says nothing useful", path.display()))?);
    }
    cases.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(cases)
}

fn read(path: &Path, text: &str) -> Result<Case> {
    let name = path.file_stem().context("it has no name")?;
    let mut case = Case {
        name: name.to_string_lossy().into_owned(),
        script: path.to_owned(),
        guests: 1,
        programs: Vec::new(),
        limit: LIMIT,
        memory: MEMORY,
    };
    for line in text.lines().filter_map(|line| line.strip_prefix(MARK)) {
        let (what, value) = line.split_once(' ').context("a line without a value")?;
        let number = || value.trim().parse().with_context(|| line.to_owned());
        match what {
            "guests" => case.guests = number()?,
            "limit" => case.limit = number()?,
            "memory" => case.memory = number()?,
            "programs" => case.programs = value.split_whitespace().map(program).collect(),
            _ => bail!("`{what}` is not known"),
        }
    }
    if !(1..=2).contains(&case.guests) {
        bail!("a case has one guest or two");
    }
    Ok(case)
}

fn program(word: &str) -> Program {
    if word == "python" {
        return Program::Python;
    }
    let test = word
        .strip_prefix("test:")
        .and_then(|test| test.split_once('/'));
    if let Some((directory, name)) = test {
        return Program::Test {
            directory: directory.to_owned(),
            name: name.to_owned(),
        };
    }
    if let Some(name) = word.strip_prefix("bench:") {
        return Program::Bench {
            name: name.to_owned(),
        };
    }
    let optimised = word.strip_prefix("dist:");
    Program::Binary {
        name: optimised.unwrap_or(word).to_owned(),
        dist: optimised.is_some(),
    }
}

/// The lines of the console that a case marks for display.
pub(super) fn figures(console: &str) -> impl Iterator<Item = &str> {
    console
        .lines()
        .map(without_guest)
        .filter_map(|line| line.strip_prefix("== "))
}

/// Why a case was skipped.
pub(super) fn reason(console: &str) -> Option<&str> {
    let mut lines = console.lines().map(without_guest);
    lines.find_map(|line| line.strip_prefix("SKIPPED: "))
}

/// A line of a console without the name of its guest.
fn without_guest(line: &str) -> &str {
    let line = line.trim_end();
    ["a| ", "b| "]
        .iter()
        .find_map(|name| line.strip_prefix(name))
        .unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_says_what_it_needs() {
        let text = "# Words.\n#: guests 2\n#: programs kvctl dist:kvctl test:transport/verbs bench:media python\n#: limit 60\nexit 0\n";
        let case = read(Path::new("cases/x.sh"), text).unwrap();
        let binary = |dist| Program::Binary {
            name: "kvctl".into(),
            dist,
        };
        assert!(case.is_measurement());
        assert_eq!(
            (case.name.as_str(), case.guests, case.limit, case.memory),
            ("x", 2, 60, MEMORY)
        );
        assert_eq!(
            case.programs,
            [
                binary(false),
                binary(true),
                Program::Test {
                    directory: "transport".into(),
                    name: "verbs".into()
                },
                Program::Bench {
                    name: "media".into()
                },
                Program::Python
            ]
        );
    }

    #[test]
    fn a_case_that_says_nonsense_is_an_error() {
        for text in [
            "#: guests 3\n",
            "#: guests two\n",
            "#: color red\n",
            "#: limit\n",
        ] {
            assert!(read(Path::new("x.sh"), text).is_err(), "{text}");
        }
    }

    #[test]
    fn figures_and_reasons_are_found_on_either_console() {
        let console = "noise\nb| == 1 GB/s\r\n== 2 GB/s\na| SKIPPED: no device\n";
        assert_eq!(figures(console).collect::<Vec<_>>(), ["1 GB/s", "2 GB/s"]);
        assert_eq!(reason(console), Some("no device"));
    }

    #[test]
    fn every_case_of_the_repository_is_understood() {
        let cases = read_all(&super::super::scripts().join("cases")).unwrap();
        assert!(!cases.is_empty());
    }
}
