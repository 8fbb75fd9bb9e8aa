//! Builds the programs of the cases.

use super::case::{Case, Program};
use crate::cargo::{DAEMONS, EVERYTHING, answers, cargo, root, succeeds, target_dir};
use crate::python::OLDEST;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The programs of the cases and their paths; `None` for a program that this machine cannot build.
pub(super) struct Programs(BTreeMap<Program, Option<PathBuf>>);

impl Programs {
    /// Builds all that the cases need.
    pub(super) fn build(cases: &[&Case]) -> Result<Self> {
        let mut programs = BTreeMap::new();
        // The cases that measure run kvbench.
        let measured = [
            &["--profile", "dist"],
            &DAEMONS[..],
            &["-p", "kvpool-bench"],
        ]
        .concat();
        let builds = [(false, EVERYTHING.to_vec()), (true, measured)];
        for (optimised, what) in builds {
            let is_such = |program: &Program| match program {
                Program::Binary { dist, .. } => *dist == optimised,
                Program::Test { .. } | Program::Bench { .. } | Program::Python => false,
            };
            let mut needed = cases.iter().flat_map(|case| &case.programs);
            if needed.any(is_such) && !succeeds(cargo(&["build"]).args(what))? {
                bail!("what the cases run does not build");
            }
        }
        let built = target_dir()?;
        for program in cases.iter().flat_map(|case| &case.programs) {
            if programs.contains_key(program) {
                continue;
            }
            let path = match program {
                Program::Binary { name, dist } => {
                    let profile = if *dist { "dist" } else { "debug" };
                    Some(built.join(profile).join(name))
                }
                Program::Test { directory, name } => Some(build_test(directory, name)?),
                Program::Bench { name } => Some(build_bench(name)?),
                Program::Python => build_python()?,
            };
            programs.insert(program.clone(), path);
        }
        Ok(Self(programs))
    }

    /// The arguments that put a case's programs into a guest. An error names the program that this machine cannot
    /// build.
    pub(super) fn of(&self, case: &Case) -> Result<Vec<OsString>, String> {
        let argument = |program: &Program| {
            let path = self.0.get(program).and_then(Option::as_ref);
            match (program, path) {
                (Program::Binary { .. }, Some(path)) => Ok(path.clone().into_os_string()),
                // Cargo names a test's binary with a hash.
                (Program::Test { name, .. } | Program::Bench { name }, Some(path)) => {
                    Ok(named(path, name))
                }
                (Program::Python, Some(path)) => Ok(named(path, "python")),
                (
                    Program::Binary { name, .. }
                    | Program::Test { name, .. }
                    | Program::Bench { name },
                    None,
                ) => Err(format!("there is no {name}")),
                (Program::Python, None) => Err("there is no python3 of 3.11 or later".to_owned()),
            }
        };
        case.programs.iter().map(argument).collect()
    }
}

/// The argument of the scripts for a file and its name in the guest.
fn named(path: &Path, name: &str) -> OsString {
    let mut argument = path.as_os_str().to_owned();
    argument.push("=");
    argument.push(name);
    argument
}

/// Builds the native half of the package `kvpool`; `None` where there is no Python for it.
fn build_python() -> Result<Option<PathBuf>> {
    if !answers(Command::new("python3").args(["-I", "-c", OLDEST])) {
        return Ok(None);
    }
    if !succeeds(&mut cargo(&["build", "-p", "kvpool-python", "--lib"]))? {
        bail!("the Python package's native half does not build");
    }
    Ok(Some(target_dir()?.join("debug/lib_native.so")))
}

/// The name of the tests that stand in a package's own sources.
const UNIT: &str = "unit";

/// Whether the package in `directory` has a test of that name.
fn has_test(directory: &str, name: &str) -> bool {
    let package = root().join(directory);
    let sources = match name {
        UNIT => vec![package.join("src/lib.rs")],
        name => vec![
            package.join(format!("tests/{name}.rs")),
            package.join(format!("tests/{name}/main.rs")),
        ],
    };
    sources.iter().any(|source| source.is_file())
}

/// Builds a test of the package in `directory`.
fn build_test(directory: &str, name: &str) -> Result<PathBuf> {
    if !has_test(directory, name) {
        bail!("a case names the test {name} of {directory}/, which does not exist");
    }
    let package = format!("kvpool-{directory}");
    let target = match name {
        UNIT => package.replace('-', "_"),
        name => name.to_owned(),
    };
    // All tests are built together: one test alone would compile its dependencies again, with other
    // features.
    let command = ["test", "--workspace", "--no-run"];
    built(&command, directory, &target)
}

/// Builds a benchmark of the profile `dist`.
fn build_bench(name: &str) -> Result<PathBuf> {
    let what = ["bench", "--no-run", "--profile", "dist"];
    let whose = ["-p", "kvpool-tests", "--bench", name];
    built(&[&what[..], &whose[..]].concat(), "tests", name)
}

/// Runs a command that builds, and returns the binary of this target of the package in `directory`.
fn built(command: &[&str], directory: &str, target: &str) -> Result<PathBuf> {
    eprintln!(
        "\n▶ cargo {}, for {target} of {directory}/",
        command.join(" ")
    );
    let built = cargo(command)
        .args(["--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    if !built.status.success() {
        bail!("{target} of {directory}/ does not build");
    }
    let messages = String::from_utf8(built.stdout).context("cargo's messages are not UTF-8")?;
    let path = messages
        .lines()
        .find_map(|line| executable(line, directory, target));
    path.with_context(|| format!("cargo has built {target}, but names no binary"))
}

/// The binary that one of cargo's messages is about, if it is that of the test of the package in
/// `directory`.
fn executable(message: &str, directory: &str, test: &str) -> Option<PathBuf> {
    if !message.contains(&format!("/{directory}/Cargo.toml\"")) {
        return None;
    }
    let kinds = [
        "\"kind\":[\"test\"]",
        "\"kind\":[\"bench\"]",
        "\"kind\":[\"lib\"]",
    ];
    let is_test = kinds.iter().any(|kind| message.contains(kind));
    if !is_test || !message.contains(&format!("\"name\":\"{test}\"")) {
        return None;
    }
    let (_, rest) = message.split_once("\"executable\":\"")?;
    Some(PathBuf::from(rest.split_once('"')?.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::{IN_TESTS, case, scripts};

    #[test]
    fn each_program_that_a_case_names_exists() {
        let cases = case::read_all(&scripts().join("cases")).unwrap();
        assert!(!cases.is_empty());
        let binaries = ["kvmaster", "kvstore-node", "kvctl", "kvbench"];
        for case in &cases {
            for program in &case.programs {
                let exists = match program {
                    Program::Binary { name, .. } => binaries.contains(&name.as_str()),
                    Program::Test { directory, name } => has_test(directory, name),
                    Program::Bench { name } => {
                        root().join(format!("tests/benches/{name}.rs")).is_file()
                    }
                    Program::Python => true,
                };
                assert!(exists, "{}: {program:?}", case.name);
            }
        }
        for part in IN_TESTS {
            let is_there = cases.iter().any(|case| case.name.contains(part));
            assert!(is_there, "no case is called {part}");
        }
        assert!(!has_test("transport", "no-such-test"));
        assert!(build_test("transport", "no-such-test").is_err());
    }

    #[test]
    fn the_binary_of_a_test_is_told_from_others() {
        let line = r#"{"reason":"compiler-artifact","manifest_path":"/k/transport/Cargo.toml","target":{"kind":["test"],"name":"verbs"},"executable":"/t/verbs-1"}"#;
        assert_eq!(
            executable(line, "transport", "verbs"),
            Some("/t/verbs-1".into())
        );
        assert_eq!(executable(line, "transport", "conformance"), None);
        assert_eq!(executable(line, "disk", "verbs"), None);
        assert_eq!(
            executable(
                &line.replace("[\"test\"]", "[\"bin\"]"),
                "transport",
                "verbs"
            ),
            None
        );
        assert_eq!(
            executable(
                &line.replace("\"/t/verbs-1\"", "null"),
                "transport",
                "verbs"
            ),
            None
        );
    }
}
