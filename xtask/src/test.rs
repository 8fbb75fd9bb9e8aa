//! `cargo xtask test`.

use crate::cargo::{answers, cargo, lint_in_builds, root, target_dir, watch};
use crate::charts;
use crate::lint;
use crate::packages::Packages;
use crate::python;
use crate::rdma;
use crate::tally::{Doctests, Libtest, Nextest, Tally, without_colours};
use anyhow::Result;
use std::path::PathBuf;
use std::process::Command;

/// The package whose tests start real daemons.
const CLUSTER: &str = "kvpool-tests";
/// The number of cluster tests in parallel. Each runs several processes and has deadlines.
const CLUSTER_THREADS: &str = "--test-threads=3";
/// Programs whose packages also have a service. The packages are unpacked, not installed, so that no service starts.
const UNPACKED: [Unpacked; 2] = [
    Unpacked {
        program: "etcd",
        package: "etcd-server",
        variable: "KVPOOL_ETCD",
        tests: "tests over etcd",
    },
    Unpacked {
        program: "promtool",
        package: "prometheus",
        variable: "KVPOOL_PROMTOOL",
        tests: "the tests of the alert rules",
    },
];

/// A program that tests start.
struct Unpacked {
    program: &'static str,
    /// The Debian package that has it.
    package: &'static str,
    /// The variable that tells the tests where it is.
    variable: &'static str,
    tests: &'static str,
}

/// Variables for the tests, which name programs.
type Programs = Vec<(&'static str, PathBuf)>;

/// Runs all checks and tests, also after a failure. Returns whether all passed and at least one ran. A check, a build
/// or a step that cannot run counts as one failure.
pub(crate) fn run(quick: bool, packages: Packages) -> Result<bool> {
    let mut tally = Tally::default();
    let mut programs = Programs::new();
    tally.check("format", lint::format()?);
    let mut checks = Tally::default();
    lint::text(&mut checks)?;
    if !quick {
        let missing = match packages {
            Packages::Add => lint::deny::Missing::Install,
            Packages::LeaveOut => lint::deny::Missing::Skip,
        };
        lint::deny::check(missing, &mut checks)?;
    }
    tally.add_checks(checks);
    let mut helm = None;
    if !quick {
        helm = charts::helm(packages)?;
        programs.extend(helm.clone().map(|helm| (charts::HELM, helm)));
        provide_ip(packages)?;
        for unpacked in &UNPACKED {
            programs.extend(unpacked.provide(packages)?);
        }
    }
    build(&mut tally)?;
    if answers(&mut cargo(&["nextest", "--version"])) {
        with_nextest(quick, &programs, &mut tally)?;
    } else {
        with_cargo_test(quick, &programs, &mut tally)?;
    }
    if !quick {
        let done = charts::test(helm.as_deref(), &mut tally);
        tally.attempted("the Helm chart", done);
        let done = python::test(packages, &mut tally);
        tally.attempted("the Python tests", done);
        let done = rdma::test(packages, &mut tally);
        tally.attempted("RDMA in a guest", done);
    }
    let mut doctests = Doctests::default();
    let ended_well = watch(&mut cargo(&["test", "--doc", "--workspace"]), |line| {
        doctests.read(line);
    })?;
    tally.add("the documentation's tests", doctests.tally(), ended_well);
    tally.print();
    Ok(tally.is_good())
}

/// Builds all targets, and counts the warnings of the compiler and of clippy as a failure. The tests run all the same,
/// if the warnings are no errors.
fn build(tally: &mut Tally) -> Result<()> {
    let lints = lint_in_builds();
    if !lints {
        eprintln!("\nclippy is missing: `rustup component add clippy` adds it");
    }
    tally.check("clippy", lints);
    let mut has_warnings = false;
    // The cluster tests start the programs of this build.
    let mut build = cargo(&["build", "--workspace", "--all-targets"]);
    build.env("CARGO_TERM_QUIET", "false");
    let built = watch(&mut build, |line| has_warnings |= counts_warnings(line))?;
    tally.check("warnings", !has_warnings);
    tally.check("the build", built);
    Ok(())
}

/// Whether cargo says in this line how many warnings a target has. It says so in every build, also if it compiles
/// nothing.
fn counts_warnings(line: &str) -> bool {
    let line = without_colours(line);
    line.starts_with("warning: `") && line.contains(") generated ")
}

fn with_nextest(quick: bool, programs: &Programs, tally: &mut Tally) -> Result<()> {
    let report = root().join("target/nextest/xtask/junit.xml");
    // If this run wrote no report, the report of an earlier run would be read.
    if let Err(error) = std::fs::remove_file(&report)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(error.into());
    }
    // Many tests wait more than they compute: with two threads more than cores, a third of the time is idle. Tests that
    // start daemons have a limit of their own.
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let threads = (cores + 4).to_string();
    let mut command = cargo(&["nextest", "run", "--workspace", "--profile", "xtask"]);
    command.args(["--test-threads", &threads]);
    command.envs(programs.iter().cloned());
    if quick {
        // With --exclude, cargo would build the dependencies again, with other features.
        command.args(["-E", &format!("not package({CLUSTER})")]);
    }
    let mut nextest = Nextest::default();
    let ended_well = watch(&mut command, |line| nextest.read_line(line))?;
    if let Ok(report) = std::fs::read_to_string(&report) {
        nextest.read_report(&report);
    }
    tally.add("the tests", nextest.tally(), ended_well);
    Ok(())
}

fn with_cargo_test(quick: bool, programs: &Programs, tally: &mut Tally) -> Result<()> {
    // The output of passing tests is shown, because it tells whether a test skipped.
    let targets = ["--no-fail-fast", "--tests"];
    let shown = ["--", "--show-output"];
    let mut libtest = Libtest::default();
    let mut tests = cargo(&["test", "--workspace", "--exclude", CLUSTER]);
    tests.envs(programs.iter().cloned());
    let mut ended_well = watch(tests.args(targets).args(shown), |line| libtest.read(line))?;
    if !quick {
        let mut tests = cargo(&["test", "-p", CLUSTER]);
        tests.envs(programs.iter().cloned());
        tests.args(targets).args(shown).arg(CLUSTER_THREADS);
        ended_well &= watch(&mut tests, |line| libtest.read(line))?;
    }
    tally.add("the tests", libtest.tally(), ended_well);
    Ok(())
}

/// Installs `ip` if that was requested and is possible without a prompt. Some tests cut a network with it; without it
/// they skip.
fn provide_ip(packages: Packages) -> Result<()> {
    let is_there = answers(Command::new("ip").arg("-V"));
    if !is_there && !packages.install(&["iproute2"])? {
        missing("`ip`", "iproute2", "tests that cut a network");
    }
    Ok(())
}

impl Unpacked {
    /// Unpacks the program for the tests, and returns the variable that names it. `None` if the machine has the
    /// program, or cannot get it.
    fn provide(&self, packages: Packages) -> Result<Option<(&'static str, PathBuf)>> {
        let is_there = answers(Command::new(self.program).arg("--version"));
        if is_there || std::env::var_os(self.variable).is_some() {
            return Ok(None);
        }
        let place = target_dir()?.join(self.program);
        let path = packages.unpacked(self.package, &format!("usr/bin/{}", self.program), &place)?;
        match &path {
            Some(path) => eprintln!("\n{} for the tests: {}", self.program, path.display()),
            None => missing(self.program, self.package, self.tests),
        }
        Ok(path.map(|path| (self.variable, path)))
    }
}

/// Prints the missing program, and the tests that skip without it.
fn missing(what: &str, package: &str, tests: &str) {
    eprintln!(
        "\n{what} is missing (Debian package {package}): {tests} will skip; \
         `cargo xtask test --install` adds it where it can"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_with_warnings_is_noticed() {
        for line in [
            "warning: `kvpool-disk` (lib) generated 1 warning",
            "warning: `xtask` (bin \"xtask\" test) generated 2 warnings (1 duplicate)",
            "\u{1b}[1m\u{1b}[33mwarning\u{1b}[0m\u{1b}[1m:\u{1b}[0m `kvpool-disk` (lib) generated 1 warning",
        ] {
            assert!(counts_warnings(line), "{line}");
        }
        for line in [
            "   Compiling kvpool-disk v0.1.0",
            "warning: unused variable: `generated`",
        ] {
            assert!(!counts_warnings(line), "{line}");
        }
    }
}
